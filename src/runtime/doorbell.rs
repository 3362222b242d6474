//! The doorbell: how a shard that sleeps learns that something was put into its ring.
//!
//! Invariants
//! - No lost wake-up: whoever has made work visible and then calls [`Doorbell::ring`] either finds the
//!   sleeper's mark, or the sleeper finds the work. The two fences below are what makes it so; each side
//!   writes its own word before the fence and reads the other's after it.
//! - At most one waker is registered, and of many ringers one wakes. A shard that is awake costs a ringer one
//!   fence and one read: no shared word is written.
//!
//! This file is compiled twice: here, and in `tests/ring_loom.rs` where `sync` is loom's and every
//! interleaving is tried. It therefore names nothing but `super::sync`.

use std::task::{Context, Poll};

use super::sync::{AtomicBool, AtomicWaker, Ordering, fence};

/// One sleeper, many ringers.
#[derive(Debug, Default)]
pub struct Doorbell {
    /// The sleeper has registered its waker and may not be looking at its work.
    asleep: AtomicBool,
    waker: AtomicWaker,
}

impl Doorbell {
    /// Says that work has been made visible. Any thread.
    pub fn ring(&self) {
        // Pairs with the fence in `poll_work`.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::AcqRel) {
            self.waker.wake();
        }
    }

    /// Ready as soon as `has_work` says so; otherwise the task is woken by the next ring. One task only.
    pub fn poll_work(&self, context: &mut Context<'_>, has_work: impl Fn() -> bool) -> Poll<()> {
        if has_work() {
            return Poll::Ready(());
        }
        self.waker.register(context.waker());
        // An exchange and not a store: all writes of `asleep` are exchanges, so their order is one for everybody
        // and a late ringer's `false` cannot come to lie over this.
        self.asleep.swap(true, Ordering::AcqRel);
        // Pairs with the fence in `ring`: a ringer that does not see `asleep` has its work seen below.
        fence(Ordering::SeqCst);
        if has_work() {
            self.asleep.swap(false, Ordering::AcqRel);
            return Poll::Ready(());
        }
        Poll::Pending
    }

    /// Lets go of the waker, on the sleeper's own thread: some executors want their wakers back there.
    pub fn forget_waker(&self) {
        self.asleep.swap(false, Ordering::AcqRel);
        drop(self.waker.take());
    }
}
