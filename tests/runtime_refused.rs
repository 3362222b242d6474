//! Where the kernel refuses io_uring the shards run on tokio, and say why.
//!
//! The refusals are real ones: this program starts itself under a seccomp filter (as container engines have it
//! by default) or under a low limit of locked memory, and looks at what the child makes of it. One case a
//! process, because the answer is found out once a process.

#![cfg(all(target_os = "linux", feature = "glommio"))]
#![allow(clippy::expect_used, clippy::unwrap_used)] // A test says by it what it stands on.

use std::future::Future;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use corelane::config::RuntimeChoice;
use corelane::runtime::probe::{RuntimeKind, decide};
use corelane::runtime::thread::{ThreadMain, ThreadPlan, start};
use corelane::seam::dial::Dial;

struct Name;

impl ThreadMain for Name {
    type Output = &'static str;

    fn run<R: Dial>(self, runtime: R) -> impl Future<Output = &'static str> + 'static {
        async move { runtime.name() }
    }
}

/// What a child does: decides twice, runs a shard thread by the decision, prints what came of it.
#[test]
#[ignore = "the child's part of the tests below"]
fn child() {
    let decision = decide(RuntimeChoice::Auto).unwrap();
    assert_eq!(decide(RuntimeChoice::Auto).unwrap(), decision);
    let plan = ThreadPlan { kind: decision.kind, core: None, name: "shard".to_owned(), metrics: Arc::default() };
    let ran_on = start(plan, Name).unwrap().join().unwrap();
    assert_eq!(ran_on, decision.kind.name());
    assert_eq!(decide(RuntimeChoice::Tokio).unwrap().kind, RuntimeKind::Tokio);
    let by_name = decide(RuntimeChoice::Glommio).map(|decision| decision.kind.name());
    let by_name = by_name.unwrap_or_else(|error| Box::leak(error.to_string().into_boxed_str()));
    println!("RESULT auto: {ran_on}, {} | glommio: {by_name}", decision.reason);
}

fn result_of_child(before: impl FnMut() -> io::Result<()> + Send + Sync + 'static) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--ignored", "--nocapture"]);
    // SAFETY: the closures below only make system calls, on data that was made before the fork.
    unsafe { command.pre_exec(before) };
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text.lines().find_map(|line| line.split_once("RESULT ").map(|(_, result)| result.to_owned())).expect("a result")
}

fn refuse_io_uring(errno: i32) -> impl FnMut() -> io::Result<()> + Send + Sync + 'static {
    // Load the system call's number; if it is io_uring_setup, answer the error; else allow.
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let filter = [
        libc::sock_filter { code: load as u16, jt: 0, jf: 0, k: 0 },
        libc::sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            jt: 0,
            jf: 1,
            k: libc::SYS_io_uring_setup as u32,
        },
        libc::sock_filter { code: libc::BPF_RET as u16, jt: 0, jf: 0, k: libc::SECCOMP_RET_ERRNO | errno as u32 },
        libc::sock_filter { code: libc::BPF_RET as u16, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW },
    ];
    move || {
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
        // SAFETY: the kernel copies the filter, which lives in this closure.
        let refused = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) != 0
        };
        if refused { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

#[test]
fn under_a_containers_filter_the_shards_run_on_tokio() {
    let result = result_of_child(refuse_io_uring(libc::EPERM));
    assert!(result.starts_with("auto: tokio, no glommio: io_uring is not permitted"), "{result}");
    assert!(result.contains("glommio: shards.runtime = glommio: cannot run here"), "{result}");
}

#[test]
fn on_a_kernel_without_io_uring_the_shards_run_on_tokio() {
    let result = result_of_child(refuse_io_uring(libc::ENOSYS));
    assert!(result.starts_with("auto: tokio, no glommio: this kernel has no io_uring"), "{result}");
}

#[test]
fn with_little_locked_memory_the_shards_run_on_tokio() {
    let result = result_of_child(|| {
        let limit = libc::rlimit { rlim_cur: 64 * 1024, rlim_max: 64 * 1024 };
        // SAFETY: the kernel reads the structure.
        if unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    });
    assert!(result.starts_with("auto: tokio, no glommio: the limit of locked memory is 64 KiB"), "{result}");
}

#[test]
fn without_a_refusal_auto_and_the_name_agree() {
    let result = result_of_child(|| Ok(()));
    let both = result.starts_with("auto: glommio, ") && result.ends_with("| glommio: glommio");
    let neither = result.starts_with("auto: tokio, ") && result.contains("cannot run here");
    assert!(both || neither, "{result}");
}
