//! Which executor the shards get: glommio where the kernel lets it live, tokio with the reason where not.
//!
//! Invariants
//! - glommio is not touched before the kernel has been asked: refused, it panics and leaves a poisoned static
//!   behind, and no later try in this process can succeed. So there is one probe a process, and its answer stays.
//! - The answer says why, in words for the person who can change it.

use std::sync::OnceLock;

use crate::config::RuntimeChoice;
use crate::error::Error;

/// An executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuntimeKind {
    /// io_uring.
    Glommio,
    /// A current-thread runtime.
    Tokio,
}

impl RuntimeKind {
    /// As [`crate::seam::runtime::Runtime::name`] says it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Glommio => "glommio",
            Self::Tokio => "tokio",
        }
    }
}

/// What was chosen, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The executor.
    pub kind: RuntimeKind,
    /// For the log and the operators' tool.
    pub reason: String,
}

/// Decides.
///
/// # Errors
/// Only where glommio was asked for by name and cannot run: why, and what to set instead.
pub fn decide(choice: RuntimeChoice) -> Result<Decision, Error> {
    if choice == RuntimeChoice::Tokio {
        return Ok(Decision { kind: RuntimeKind::Tokio, reason: "shards.runtime = tokio".to_owned() });
    }
    match (glommio_refused(), choice) {
        (None, _) => Ok(Decision { kind: RuntimeKind::Glommio, reason: "the kernel allows io_uring".to_owned() }),
        (Some(why), RuntimeChoice::Glommio) => {
            Err(Error::Config(format!("shards.runtime = glommio: cannot run here: {why}; use auto or tokio")))
        }
        (Some(why), _) => Ok(Decision { kind: RuntimeKind::Tokio, reason: format!("no glommio: {why}") }),
    }
}

/// Why glommio cannot run in this process, found out once.
#[must_use]
pub fn glommio_refused() -> Option<&'static str> {
    static REFUSED: OnceLock<Option<String>> = OnceLock::new();
    REFUSED.get_or_init(probe).as_deref()
}

#[cfg(not(all(feature = "glommio", target_os = "linux")))]
fn probe() -> Option<String> {
    let why = if cfg!(target_os = "linux") {
        "this build is without the feature `glommio`"
    } else {
        "io_uring is Linux only"
    };
    Some(why.to_owned())
}

#[cfg(all(feature = "glommio", target_os = "linux"))]
fn probe() -> Option<String> {
    locked_memory_too_small().or_else(ring_refused).or_else(executor_fails)
}

/// glommio asks for so much before it makes its first ring, whatever the kernel then charges.
#[cfg(all(feature = "glommio", target_os = "linux"))]
const LOCKED_MEMORY_BYTES_MIN: u64 = 512 * 1024;

#[cfg(all(feature = "glommio", target_os = "linux"))]
fn locked_memory_too_small() -> Option<String> {
    // `None` is "unlimited".
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current?;
    (limit < LOCKED_MEMORY_BYTES_MIN).then(|| {
        format!(
            "the limit of locked memory is {} KiB, at least {} are needed (ulimit -l, LimitMEMLOCK=)",
            limit / 1024,
            LOCKED_MEMORY_BYTES_MIN / 1024
        )
    })
}

#[cfg(all(feature = "glommio", target_os = "linux"))]
fn ring_refused() -> Option<String> {
    // `struct io_uring_params`: 120 bytes, zero for "no wishes".
    let mut parameters = [0_u64; 15];
    // SAFETY: the kernel reads and writes the 120 bytes of its own structure and nothing else.
    let descriptor = unsafe { libc::syscall(libc::SYS_io_uring_setup, 8_u32, parameters.as_mut_ptr()) };
    if descriptor >= 0 {
        // SAFETY: just got from the kernel, nobody else has it.
        unsafe { libc::close(descriptor as libc::c_int) };
        return None;
    }
    let error = std::io::Error::last_os_error();
    let hint = match error.raw_os_error() {
        Some(libc::EPERM) => "io_uring is not permitted (a container's seccomp profile, or kernel.io_uring_disabled)",
        Some(libc::ENOSYS) => "this kernel has no io_uring",
        Some(libc::ENOMEM) => "no locked memory is left for io_uring (ulimit -l, LimitMEMLOCK=)",
        Some(libc::EMFILE | libc::ENFILE) => "no file descriptor is left for io_uring (ulimit -n)",
        _ => "io_uring cannot be set up",
    };
    Some(format!("{hint}: {error}"))
}

/// One throw-away executor on a throw-away thread: the last word, for kernels that give a ring and then lack an
/// operation that glommio needs.
#[cfg(all(feature = "glommio", target_os = "linux"))]
fn executor_fails() -> Option<String> {
    let thread = std::thread::Builder::new().name("corelane-probe".to_owned()).spawn(|| {
        super::glommio::GlommioRuntime::run(std::sync::Arc::default(), |runtime| async move {
            use crate::seam::runtime::Runtime;
            runtime.sleep_until(runtime.now().plus_us(100)).await;
        })
    });
    let text = match thread.map(std::thread::JoinHandle::join) {
        Ok(Ok(Ok(Ok(())))) => return None,
        Ok(Ok(Ok(Err(panic))) | Err(panic)) => super::tasks::panic_text(&*panic).to_owned(),
        Ok(Ok(Err(error))) | Err(error) => error.to_string(),
    };
    Some(format!("a first executor could not run: {text}"))
}
