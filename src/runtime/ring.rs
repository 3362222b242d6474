//! The lock-free way into a shard: a bounded queue with a doorbell, and a budget of rows before it.
//!
//! Invariants
//! - The queue is bounded; a full one gives the value back.
//! - A push after the receiver last found the queue empty is never without a wake-up.
//! - One waker is registered, the shard's own: any number of callers cost it one wake-up.
//! - Rows that callers have in hand at a shard are at most the budget's; a single larger batch passes alone.
//!
//! Cost: a push is one CAS loop, one swap, and a wake only if the shard sleeps; nothing is allocated.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::Poll;

use crossbeam::queue::ArrayQueue;
use futures_util::task::AtomicWaker;

#[derive(Debug)]
struct Shared<T> {
    queue: ArrayQueue<T>,
    rung: AtomicBool,
    waker: AtomicWaker,
    receiver_gone: AtomicBool,
}

/// The callers' end.
#[derive(Debug)]
pub struct RingSender<T>(Arc<Shared<T>>);

impl<T> Clone for RingSender<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// The shard's end. There is one.
#[derive(Debug)]
pub struct RingReceiver<T>(Arc<Shared<T>>);

/// A ring of at most so many entries (at least 1).
#[must_use]
pub fn ring<T>(entries_max: usize) -> (RingSender<T>, RingReceiver<T>) {
    let shared = Arc::new(Shared {
        queue: ArrayQueue::new(entries_max.max(1)),
        rung: AtomicBool::new(false),
        waker: AtomicWaker::new(),
        receiver_gone: AtomicBool::new(false),
    });
    (RingSender(shared.clone()), RingReceiver(shared))
}

impl<T> RingSender<T> {
    /// Hands a value over.
    ///
    /// # Errors
    /// The value itself, if the ring is full or its shard has ended.
    pub fn push(&self, value: T) -> Result<(), T> {
        if self.0.receiver_gone.load(Ordering::Acquire) {
            return Err(value);
        }
        self.0.queue.push(value)?;
        if !self.0.rung.swap(true, Ordering::AcqRel) {
            self.0.waker.wake();
        }
        Ok(())
    }

    /// Whether the shard has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.receiver_gone.load(Ordering::Acquire)
    }
}

impl<T> RingReceiver<T> {
    /// The oldest value, if there is one.
    #[must_use]
    pub fn pop(&self) -> Option<T> {
        self.0.queue.pop()
    }

    /// Values in the ring.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.queue.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.queue.is_empty()
    }

    /// Resolves when something was pushed since the last wait; then pop until there is nothing.
    pub async fn wait(&self) {
        poll_fn(|context| {
            if self.0.rung.swap(false, Ordering::AcqRel) {
                return Poll::Ready(());
            }
            self.0.waker.register(context.waker());
            // Between the look and the registration somebody may have rung.
            if self.0.rung.swap(false, Ordering::AcqRel) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

impl<T> Drop for RingReceiver<T> {
    fn drop(&mut self) {
        self.0.receiver_gone.store(true, Ordering::Release);
        // What is left is dropped here, so that whoever waits for an answer learns that there is none.
        while self.0.queue.pop().is_some() {}
    }
}

/// How many rows callers may have in hand at a shard.
#[derive(Debug)]
pub struct Budget {
    used: AtomicUsize,
    rows_max: usize,
    waiters: AtomicUsize,
    freed: tokio::sync::Notify,
}

impl Budget {
    /// A budget of so many rows (at least 1).
    #[must_use]
    pub fn new(rows_max: usize) -> Self {
        Self {
            used: AtomicUsize::new(0),
            rows_max: rows_max.max(1),
            waiters: AtomicUsize::new(0),
            freed: tokio::sync::Notify::new(),
        }
    }

    /// The bound.
    #[must_use]
    pub fn rows_max(&self) -> usize {
        self.rows_max
    }

    /// Rows in hand.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes rows if there is room. More than the whole budget passes only when nothing else is in hand.
    #[must_use]
    pub fn try_acquire(&self, rows: usize) -> bool {
        self.used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                (used == 0 || used + rows <= self.rows_max).then_some(used + rows)
            })
            .is_ok()
    }

    /// Takes rows, waiting for room.
    pub async fn acquire(&self, rows: usize) {
        loop {
            if self.try_acquire(rows) {
                return;
            }
            let mut freed = std::pin::pin!(self.freed.notified());
            self.waiters.fetch_add(1, Ordering::SeqCst);
            // Registered before the second look: a release in between is not lost.
            freed.as_mut().enable();
            let acquired = self.try_acquire(rows);
            if !acquired {
                freed.await;
            }
            self.waiters.fetch_sub(1, Ordering::SeqCst);
            if acquired {
                return;
            }
        }
    }

    /// Gives rows back.
    pub fn release(&self, rows: usize) {
        self.used.fetch_sub(rows, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            self.freed.notify_waiters();
        }
    }
}
