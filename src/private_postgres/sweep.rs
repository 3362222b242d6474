//! Directories of private servers whose owner was killed.
//!
//! Invariant: a directory is removed only while its lock file is locked by the sweeper: a live owner holds
//! that lock for as long as it lives.

use std::fs::{File, OpenOptions};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// Begins every directory's name.
pub(super) const PREFIX: &str = "corelane-pg-";
/// The lock file in it.
pub(super) const LOCK: &str = "owner.lock";

/// Locks a new directory for as long as the answer lives.
pub(super) fn lock(directory: &Path) -> std::io::Result<File> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(directory.join(LOCK))?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(file)
}

/// Removes what was left behind under `parent`.
pub(super) fn sweep(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        let Ok(file) = OpenOptions::new().write(true).open(entry.path().join(LOCK)) else { continue };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}
