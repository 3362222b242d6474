//! Directories of private servers whose owner was killed.
//!
//! Invariant: a directory is removed only while its lock file is locked by the sweeper: a live owner holds
//! that lock for as long as it lives.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// Begins every directory's name.
pub(super) const PREFIX: &str = "corelane-pg-";
/// The lock file in it.
pub(super) const LOCK: &str = "owner.lock";

/// Begins its name until it is locked.
const UNLOCKED: &str = ".corelane-pg-";
/// So old an unlocked one is nobody's any more.
const UNLOCKED_SECONDS_MAX: u64 = 60;

/// A new directory, locked for as long as the file lives. It gets its name only then: no sweeper sees it unlocked.
pub(super) fn new_directory(parent: &Path) -> std::io::Result<(PathBuf, File)> {
    let unlocked = tempfile::Builder::new()
        .prefix(UNLOCKED)
        .permissions(std::fs::Permissions::from_mode(0o700))
        .tempdir_in(parent)?;
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(unlocked.path().join(LOCK))?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    let name = unlocked.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let directory = parent.join(name.trim_start_matches('.'));
    std::fs::rename(unlocked.path(), &directory)?;
    let _ = unlocked.keep();
    Ok((directory, file))
}

/// Removes what was left behind under `parent`.
pub(super) fn sweep(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(UNLOCKED) {
            let age = entry.metadata().and_then(|of| of.modified()).ok().and_then(|since| since.elapsed().ok());
            if age.is_some_and(|age| age.as_secs() > UNLOCKED_SECONDS_MAX) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
        if !name.starts_with(PREFIX) {
            continue;
        }
        let Ok(file) = OpenOptions::new().write(true).open(entry.path().join(LOCK)) else { continue };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}
