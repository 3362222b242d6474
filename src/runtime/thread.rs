//! A thread with an executor of ours on it: a shard, or the lease keeper.
//!
//! The thread's main function is a trait and not a closure, because it is given one of several executors and
//! its loops are compiled for each.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::affinity;
use super::probe::RuntimeKind;
use super::tokio::TokioRuntime;
use crate::metrics::ShardMetrics;
use crate::seam::dial::Dial;

/// What a thread is to do.
pub trait ThreadMain: Send + 'static {
    /// What it leaves.
    type Output: Send + 'static;

    /// Its life. When it ends, so do all tasks it has spawned.
    fn run<R: Dial>(self, runtime: R) -> impl Future<Output = Self::Output> + 'static;
}

/// How a thread is made.
#[derive(Clone, Debug)]
pub struct ThreadPlan {
    /// On which executor.
    pub kind: RuntimeKind,
    /// Pinned to this core. If it cannot be, the thread runs unpinned and a warning says so.
    pub core: Option<usize>,
    /// Its name, as the operating system shows it (15 bytes of it).
    pub name: String,
    /// Where panics of its tasks are counted.
    pub metrics: Arc<ShardMetrics>,
}

/// A running thread.
#[derive(Debug)]
pub struct RunningThread<T>(JoinHandle<Option<T>>);

impl<T> RunningThread<T> {
    /// Waits for its end (blocking).
    ///
    /// # Errors
    /// What its main function panicked with.
    pub fn join(self) -> std::thread::Result<T> {
        match self.0.join()? {
            Some(output) => Ok(output),
            None => Err(Box::new("the executor could not be made")),
        }
    }

    /// It has ended: [`RunningThread::join`] will not block.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }
}

/// Starts a thread and returns once its executor runs, or cannot be made.
///
/// # Errors
/// The system gave no thread, or the executor could not be made in it: the system's words.
pub fn start<M: ThreadMain>(plan: ThreadPlan, main: M) -> io::Result<RunningThread<M::Output>> {
    let (started, starting) = sync_channel(1);
    let thread = std::thread::Builder::new().name(plan.name.clone()).spawn(move || live(plan, main, &started))?;
    match starting.recv() {
        Ok(Ok(())) => Ok(RunningThread(thread)),
        Ok(Err(error)) => {
            let _ = thread.join();
            Err(error)
        }
        // The thread ended without a word: it panicked before the executor ran.
        Err(_) => Err(io::Error::other("the thread panicked before its executor ran")),
    }
}

fn live<M: ThreadMain>(plan: ThreadPlan, main: M, started: &SyncSender<io::Result<()>>) -> Option<M::Output> {
    if let Some(core) = plan.core
        && let Err(error) = affinity::pin_current_thread(core)
    {
        tracing::warn!(thread = plan.name, core, %error, "the thread cannot be pinned and runs unpinned");
    }
    let outcome = match plan.kind {
        RuntimeKind::Tokio => TokioRuntime::run(plan.metrics, |runtime| {
            let _ = started.send(Ok(()));
            main.run(runtime)
        }),
        #[cfg(all(feature = "glommio", target_os = "linux"))]
        RuntimeKind::Glommio => super::glommio::GlommioRuntime::run(plan.metrics, |runtime| {
            let _ = started.send(Ok(()));
            main.run(runtime)
        }),
        #[cfg(not(all(feature = "glommio", target_os = "linux")))]
        RuntimeKind::Glommio => Err(io::ErrorKind::Unsupported.into()),
    };
    match outcome {
        Ok(Ok(output)) => Some(output),
        Ok(Err(panic)) => std::panic::resume_unwind(panic),
        Err(error) => {
            let _ = started.send(Err(error));
            None
        }
    }
}
