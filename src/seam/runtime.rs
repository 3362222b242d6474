//! The core seam: what a shard's loops need from the thread they run on.
//!
//! Implementations: `runtime::glommio`, `runtime::tokio`, and `runtime::sim` (seeded, virtual time).
//! Everything is local to one thread: futures need not be `Send`.

use std::future::Future;

use uuid::Uuid;

use crate::time::Tick;

/// A thread's executor.
pub trait Runtime: Clone + 'static {
    /// Now, in microseconds of the boot-time clock (virtual in the simulation).
    fn now(&self) -> Tick;

    /// Resolves at or after `at`. `Tick::NEVER` never resolves.
    fn sleep_until(&self, at: Tick) -> impl Future<Output = ()> + 'static;

    /// Runs a task on this thread until it ends or the executor goes away. A panic in it is caught,
    /// logged and counted; it does not end the thread. Long-lived tasks only (glommio keeps some
    /// 50 bytes of every task that is cancelled).
    fn spawn(&self, task: impl Future<Output = ()> + 'static);

    /// Lets the other tasks of this thread run once.
    fn yield_now(&self) -> impl Future<Output = ()> + 'static;

    /// An id that nobody else has (drawn from the seed in the simulation, so that a seed replays).
    fn draw_id(&self) -> Uuid {
        Uuid::new_v4()
    }

    /// `glommio`, `tokio` or `sim`.
    fn name(&self) -> &'static str;
}
