//! Where a machine keeps its PostgreSQL server binaries.
//!
//! Invariant: `CORELANE_PG_BIN` decides alone if it is set; elsewhere the newest version from 15 wins.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Oldest server that works.
const MAJOR_MIN: u32 = 15;

/// A directory with `initdb` and `postgres`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binaries {
    /// The directory.
    pub directory: PathBuf,
    /// Major version.
    pub major: u32,
}

impl Binaries {
    /// Looks into a directory. `None` if it has no usable server.
    #[must_use]
    pub fn at(directory: &Path) -> Option<Self> {
        if !directory.join("initdb").exists() {
            return None;
        }
        let output = Command::new(directory.join("postgres")).arg("--version").output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let version = text.split_whitespace().find(|word| word.starts_with(|first: char| first.is_ascii_digit()))?;
        let digits: String = version.chars().take_while(char::is_ascii_digit).collect();
        let major = digits.parse().ok()?;
        (major >= MAJOR_MIN).then(|| Self { directory: directory.to_owned(), major })
    }
}

/// The binaries to use, if there are any. `CORELANE_PG_BIN` first and alone, then PATH and the usual places of
/// Debian, Red Hat and Homebrew, newest version first. `CORELANE_PG_USUAL_PLACES=0` leaves the usual places out.
#[must_use]
pub fn find() -> Option<Binaries> {
    if let Some(given) = std::env::var_os("CORELANE_PG_BIN") {
        return Binaries::at(Path::new(&given));
    }
    let mut found: Vec<Binaries> = Vec::new();
    if let Some(path) = std::env::var_os("PATH") {
        found.extend(std::env::split_paths(&path).filter_map(|directory| Binaries::at(&directory)));
    }
    if std::env::var("CORELANE_PG_USUAL_PLACES").as_deref() != Ok("0") {
        for (parent, prefix, inner) in [
            ("/usr/lib/postgresql", "", "bin"),
            ("/usr", "pgsql-", "bin"),
            ("/usr/lib64", "pgsql", "bin"),
            ("/opt/homebrew/opt", "postgresql", "bin"),
            ("/usr/local/opt", "postgresql", "bin"),
        ] {
            let Ok(entries) = std::fs::read_dir(parent) else { continue };
            for entry in entries.flatten() {
                if entry.file_name().to_string_lossy().starts_with(prefix) {
                    found.extend(Binaries::at(&entry.path().join(inner)));
                }
            }
        }
        found.extend(
            ["/usr/bin", "/usr/local/pgsql/bin"].iter().filter_map(|directory| Binaries::at(Path::new(directory))),
        );
    }
    found.sort_by_key(|binaries| std::cmp::Reverse(binaries.major));
    found.into_iter().next()
}
