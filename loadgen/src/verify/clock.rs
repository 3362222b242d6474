//! A process whose clock is wrong: what it asks for as the time of day is moved by a small library put before libc.
//!
//! Invariants
//! - The monotonic clock stays right: a machine's wrong time of day does not make its seconds longer.
//! - The library is built by `cc` when it is needed; where there is none the fault is refused by name, or left out of
//!   `all`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::failure::{Failure, Result};

const SOURCE: &str = r#"
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *time) {
    int answer = syscall(SYS_clock_gettime, id, time);
    const char *moved = getenv("LOADGEN_CLOCK_MOVED_S");
    if (answer == 0 && id == CLOCK_REALTIME && moved) time->tv_sec += atol(moved);
    return answer;
}
"#;

/// Whether such a library can be built here.
#[must_use]
pub fn is_possible() -> bool {
    let compiler = Command::new("cc").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    cfg!(target_os = "linux") && compiler.is_ok_and(|status| status.success())
}

/// Builds the library in `directory`.
///
/// # Errors
/// Where `cc` cannot.
pub fn build(directory: &Path) -> Result<PathBuf> {
    let (source, library) = (directory.join("clock.c"), directory.join("clock.so"));
    std::fs::write(&source, SOURCE).map_err(Failure::io("writing the wrong clock"))?;
    let built = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).status();
    let built = built.map_err(Failure::io("running cc"))?;
    if built.success() {
        Ok(library)
    } else {
        Err(Failure::Broken(format!("cc could not build the wrong clock: {built}")))
    }
}

/// The environment of a process whose time of day is `moved_s` seconds off.
#[must_use]
pub fn environment(library: &Path, moved_s: i64) -> Vec<(String, String)> {
    vec![
        ("LD_PRELOAD".to_owned(), library.display().to_string()),
        ("LOADGEN_CLOCK_MOVED_S".to_owned(), moved_s.to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_under_it_sees_another_time() {
        assert!(is_possible(), "cc, which the build needs as well");
        let directory = tempfile::tempdir().unwrap();
        let library = build(directory.path()).unwrap();
        let seen = |moved_s| {
            let output = Command::new("date").arg("+%s").envs(environment(&library, moved_s)).output().unwrap();
            String::from_utf8(output.stdout).unwrap().trim().parse::<i64>().unwrap()
        };
        let difference = seen(600) - seen(-600);
        assert!((1_195..=1_205).contains(&difference), "{difference}");
    }
}
