//! CPU time from the kernel: of this process, and of a Postgres server with all its processes.
//!
//! Invariants
//! - A server process that ended between two readings is still counted: the postmaster has waited for it,
//!   so its time stands in the postmaster's children time.
//! - A process is counted in one of the two places, never in both: the list of children is read before and
//!   after, and the reading is repeated while they differ.

use std::collections::BTreeSet;
use std::fs;

/// CPU of this process, user and system, in microseconds.
#[must_use]
pub fn of_this_process_us() -> u64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: getrusage fills the struct it is given; a zeroed one is valid if it fails.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let micros = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
    micros(usage.ru_utime) + micros(usage.ru_stime)
}

/// CPU of a server: its postmaster, its living children, and the children that have ended.
#[derive(Clone, Copy, Debug)]
pub struct ServerCpu {
    postmaster: i32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Times {
    parent: i32,
    own_ticks: u64,
    ended_children_ticks: u64,
}

impl ServerCpu {
    /// A server by its postmaster's process id.
    #[must_use]
    pub fn of(postmaster: i32) -> Self {
        Self { postmaster }
    }

    /// User and system time so far in microseconds; `None` when the server is gone.
    #[must_use]
    pub fn read_us(self) -> Option<u64> {
        for _ in 0..8 {
            let before = self.children();
            let mut ticks = 0;
            for child in &before {
                // One that has just ended is missing here and makes the lists differ.
                ticks += times_of(*child).map_or(0, |times| times.own_ticks + times.ended_children_ticks);
            }
            let postmaster = times_of(self.postmaster)?;
            ticks += postmaster.own_ticks + postmaster.ended_children_ticks;
            if self.children() == before {
                return Some(ticks * 1_000_000 / ticks_per_second());
            }
        }
        None
    }

    fn children(self) -> BTreeSet<i32> {
        let Ok(processes) = fs::read_dir("/proc") else { return BTreeSet::new() };
        processes
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
            .filter(|process| times_of(*process).is_some_and(|times| times.parent == self.postmaster))
            .collect()
    }
}

fn ticks_per_second() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    if ticks > 0 { ticks as u64 } else { 100 }
}

fn times_of(process: i32) -> Option<Times> {
    parse_stat(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
}

/// The name in the second field may contain blanks and brackets: fields are counted from the last bracket.
fn parse_stat(line: &str) -> Option<Times> {
    let fields: Vec<&str> = line[line.rfind(')')? + 1..].split_ascii_whitespace().collect();
    // Field 3 (state) is index 0: ppid 4, utime 14, stime 15, cutime 16, cstime 17.
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    Some(Times {
        parent: fields.get(1)?.parse().ok()?,
        own_ticks: number(14)? + number(15)?,
        ended_children_ticks: number(16)? + number(17)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_with_brackets_does_not_shift_the_fields() {
        let line = "77 (postgres: a) b (c) S 42 77 77 0 -1 4194560 900 0 0 0 11 22 33 44 20 0 1 0 99 0 0";
        let times = parse_stat(line).unwrap();
        assert_eq!(times, Times { parent: 42, own_ticks: 33, ended_children_ticks: 77 });
    }

    #[test]
    fn work_done_by_a_child_that_has_ended_is_still_counted() {
        let this = ServerCpu::of(std::process::id() as i32);
        let before = this.read_us().unwrap();
        let burned = std::process::Command::new("sh")
            .args(["-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"])
            .status()
            .unwrap();
        assert!(burned.success());
        assert!(this.read_us().unwrap() > before + 50_000, "a few hundred thousand turns take more than 50 ms");
    }
}
