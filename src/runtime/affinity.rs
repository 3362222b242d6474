//! Which cores this process may use, and pinning a thread to one of them.
//!
//! A container often has fewer cores than the machine, and not the first ones: what the kernel allows counts,
//! never the number of processors.

use std::io;

/// The cores that the process' main thread may run on, ascending. Never empty: where the system does not tell,
/// it is as many as the standard library counts.
#[must_use]
pub fn usable_cores() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    {
        // Not the calling thread's own set: that one may be pinned.
        let process = rustix::process::getpid();
        if let Ok(set) = rustix::thread::sched_getaffinity(Some(process)) {
            let cores: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect();
            if !cores.is_empty() {
                return cores;
            }
        }
    }
    (0..std::thread::available_parallelism().map_or(1, usize::from)).collect()
}

/// Refuses cores that are named and that this process may not use.
///
/// # Errors
/// The first such core, and those that may be named.
pub fn check_named(named: &[usize]) -> Result<(), String> {
    // Elsewhere nothing is pinned, and nobody tells which cores there are.
    if !cfg!(target_os = "linux") {
        return Ok(());
    }
    let usable = usable_cores();
    match named.iter().find(|core| !usable.contains(core)) {
        None => Ok(()),
        Some(core) => Err(format!("core {core} is not one of this process's: must be out of {}", ranges(&usable))),
    }
}

/// Ascending numbers as a person writes them: "0..=3, 8".
fn ranges(numbers: &[usize]) -> String {
    let mut found: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match found.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => found.push((*number, *number)),
        }
    }
    let texts = found.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}..={last}"),
    });
    texts.collect::<Vec<_>>().join(", ")
}

/// Pins the calling thread to one core.
///
/// # Errors
/// The core is not there, or the system cannot pin.
pub fn pin_current_thread(core: usize) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        if core >= rustix::thread::CpuSet::MAX_CPU {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("core {core} is beyond what can be named"),
            ));
        }
        let mut set = rustix::thread::CpuSet::new();
        set.set(core);
        Ok(rustix::thread::sched_setaffinity(None, &set)?)
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = core;
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_runs_there_and_does_not_narrow_the_process() {
        let cores = usable_cores();
        let last = *cores.last().unwrap();
        std::thread::spawn(move || {
            pin_current_thread(last).unwrap();
            assert_eq!(rustix::thread::sched_getcpu(), last);
            assert_eq!(usable_cores(), cores);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_named_core_is_one_of_this_process() {
        let cores = usable_cores();
        assert_eq!(check_named(&cores), Ok(()));
        assert_eq!(check_named(&[]), Ok(()));
        let beyond = cores.last().unwrap() + 1;
        let text = check_named(&[cores[0], beyond]).unwrap_err();
        assert!(text.starts_with(&format!("core {beyond} is not")) && text.ends_with(&ranges(&cores)), "{text}");
        assert_eq!(ranges(&[0, 1, 2, 5, 8, 9]), "0..=2, 5, 8..=9");
    }

    #[test]
    fn a_core_that_is_not_there_is_an_error() {
        assert!(pin_current_thread(1_000_000).is_err());
        let beyond = rustix::thread::CpuSet::MAX_CPU - 1;
        if !usable_cores().contains(&beyond) {
            assert!(pin_current_thread(beyond).is_err());
        }
    }
}
