//! Getting server binaries where there are none: by apt, as root, on Debian and Ubuntu.
//!
//! Invariants
//! - No server of the package starts: `create_main_cluster = false` is written before the installation.
//! - It is announced; on a terminal it is asked first; anywhere else than above nothing is tried.

use std::io::{BufRead, IsTerminal, Write};
use std::process::{Command, Stdio};

use super::{Binaries, find};

/// Tries to install the server. Otherwise the text says why not.
pub(super) fn fetch() -> Result<Binaries, String> {
    fetch_with("/etc/postgresql-common")
}

/// With the directory of the package's settings: a test must not change this machine's.
pub(super) fn fetch_with(directory: &str) -> Result<Binaries, String> {
    if std::env::var_os("CORELANE_PG_BIN").is_some() {
        return Err(" (CORELANE_PG_BIN is set, and there are none in it)".into());
    }
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let debian = release.lines().any(|line| {
        matches!(line.split_once('='), Some(("ID" | "ID_LIKE", value)) if value.contains("debian") || value.contains("ubuntu"))
    });
    if !debian || !rustix::process::geteuid().is_root() {
        return Err(String::new());
    }
    let mut stderr = std::io::stderr();
    let _ = writeln!(
        stderr,
        "No PostgreSQL server found: installing the package `postgresql` with apt-get (no server is started by it)."
    );
    if std::io::stdin().is_terminal() {
        let _ = write!(stderr, "Go on? [Y/n] ");
        let _ = stderr.flush();
        let mut answer = String::new();
        let _ = std::io::stdin().lock().read_line(&mut answer);
        if !matches!(answer.trim(), "" | "y" | "Y" | "yes") {
            return Err(" (the installation was declined)".into());
        }
    }
    let file = format!("{directory}/createcluster.conf");
    std::fs::create_dir_all(directory).map_err(|error| format!(" ({directory}: {error})"))?;
    let old = std::fs::read_to_string(&file).unwrap_or_default();
    if !old.lines().any(|line| line.trim_start().starts_with("create_main_cluster")) {
        std::fs::write(&file, format!("{old}\ncreate_main_cluster = false\n"))
            .map_err(|error| format!(" ({file}: {error})"))?;
    }
    for arguments in [&["update"][..], &["install", "--yes", "--no-install-recommends", "postgresql"][..]] {
        let status = Command::new("apt-get")
            .args(arguments)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdin(Stdio::null())
            .stdout(Stdio::from(stderr_copy()?))
            .status()
            .map_err(|error| format!(" (apt-get: {error})"))?;
        if !status.success() {
            return Err(format!(" (apt-get {} ended with {status})", arguments[0]));
        }
    }
    find().ok_or_else(|| " (the package was installed, but brought no server from version 15)".into())
}

fn stderr_copy() -> Result<std::os::fd::OwnedFd, String> {
    rustix::io::dup(rustix::stdio::stderr()).map_err(|error| format!(" (stderr: {error})"))
}
