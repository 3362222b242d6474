//! The server's own programs beside it: pg_dump and pg_restore.

use std::path::{Path, PathBuf};
use std::process::Command;

use corelane::private_postgres::Binaries;

/// A program of the server's installation. What PATH shows of it may be links to some of its programs.
pub fn program(binaries: &Binaries, name: &str) -> PathBuf {
    let beside = binaries.directory.join(name);
    if beside.exists() {
        return beside;
    }
    let real = std::fs::canonicalize(binaries.directory.join("initdb")).expect("initdb is there");
    real.parent().unwrap_or(Path::new("/")).join(name)
}

/// Runs it; answers what it printed.
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}
