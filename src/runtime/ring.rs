//! The way into a shard: a bounded, lock-free queue with a doorbell, from any thread to one.
//!
//! Invariants
//! - Bounded: a full ring gives the value back; nothing waits, nothing grows.
//! - Nothing is stranded: a shard that ends closes its ring and answers what is in it; what is in the ring when the
//!   shard goes away otherwise is dropped, at the latest by the sender that put it there, so that a caller who waits
//!   for an answer gets "gone" and not silence.
//! - The receiving end stays on one thread and is the only one that takes things out while it lives.
//! - A wake-up costs some 35 to 75 µs whatever the queue: [`RingReceiver::wait`] once, then
//!   [`RingReceiver::pop`] until it is empty.
//!
//! Cost: a push is one compare-and-swap, one fence and one read while the shard is awake.

use std::cell::Cell;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use crossbeam::queue::ArrayQueue;

pub use super::budget::Budget;
use super::doorbell::Doorbell;

#[derive(Debug)]
struct Shared<T> {
    queue: ArrayQueue<T>,
    doorbell: Doorbell,
    /// The receiver is gone.
    closed: AtomicBool,
}

impl<T> Shared<T> {
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    fn drop_all(&self) {
        while self.queue.pop().is_some() {}
    }
}

/// Makes rings.
#[derive(Debug)]
pub struct Ring<T>(PhantomData<T>);

impl<T: Send> Ring<T> {
    /// A ring for at most `entries_max` values (at least 1).
    #[must_use]
    #[allow(clippy::new_ret_no_self)] // A ring is its two ends.
    pub fn new(entries_max: usize) -> (RingSender<T>, RingReceiver<T>) {
        let shared = Arc::new(Shared {
            queue: ArrayQueue::new(entries_max.max(1)),
            doorbell: Doorbell::default(),
            closed: AtomicBool::new(false),
        });
        (RingSender { shared: Arc::clone(&shared) }, RingReceiver { shared, _one_thread: PhantomData })
    }
}

/// An end that puts things in; cloned freely.
#[derive(Debug)]
pub struct RingSender<T> {
    shared: Arc<Shared<T>>,
}

impl<T> Clone for RingSender<T> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<T: Send> RingSender<T> {
    /// Puts a value in and wakes the shard if it sleeps.
    ///
    /// # Errors
    /// Gives the value back if the ring is full or its shard is gone ([`RingSender::is_closed`] tells which).
    pub fn push(&self, value: T) -> Result<(), T> {
        if self.shared.closed.load(Ordering::Relaxed) {
            return Err(value);
        }
        self.shared.queue.push(value)?;
        self.shared.doorbell.ring();
        // `ring` has a sequentially consistent fence, as has the receiver's end between closing and emptying:
        // either it found our value, or we find that it closed.
        if self.shared.closed.load(Ordering::Relaxed) {
            self.shared.drop_all();
        }
        Ok(())
    }

    /// The shard is gone, and will not come back.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }

    /// How many values are in the ring.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shared.queue.len()
    }

    /// No value is in the ring.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.shared.queue.is_empty()
    }
}

/// The shard's end. It may be moved to the shard's thread, and stays there.
#[derive(Debug)]
pub struct RingReceiver<T> {
    shared: Arc<Shared<T>>,
    /// Not shared between threads: one task waits.
    _one_thread: PhantomData<Cell<()>>,
}

impl<T: Send> RingReceiver<T> {
    /// Takes the oldest value.
    pub fn pop(&self) -> Option<T> {
        self.shared.queue.pop()
    }

    /// Nothing enters from now on, but for what is being pushed at this moment: that is dropped. What is in the ring is
    /// there to be taken.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Resolves as soon as a value is in the ring: at once if one is. It may be dropped at any time.
    pub fn wait(&self) -> impl Future<Output = ()> + '_ {
        let shared = &*self.shared;
        std::future::poll_fn(|context| shared.doorbell.poll_work(context, || !shared.queue.is_empty()))
    }

    /// How many values are in the ring.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shared.queue.len()
    }

    /// No value is in the ring.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.shared.queue.is_empty()
    }
}

impl<T> Drop for RingReceiver<T> {
    fn drop(&mut self) {
        self.shared.close();
        self.shared.doorbell.forget_waker();
        self.shared.drop_all();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_full_ring_gives_the_value_back() {
        let (sender, receiver) = Ring::new(2);
        assert_eq!(sender.push(1), Ok(()));
        assert_eq!(sender.push(2), Ok(()));
        assert_eq!(sender.push(3), Err(3));
        assert_eq!(receiver.pop(), Some(1));
        assert_eq!(sender.push(3), Ok(()));
        assert_eq!((receiver.pop(), receiver.pop(), receiver.pop()), (Some(2), Some(3), None));
    }

    #[test]
    fn what_is_in_the_ring_when_the_shard_goes_is_dropped() {
        let (sender, receiver) = Ring::new(4);
        let (answer, mut waiting) = futures_channel::oneshot::channel::<()>();
        sender.push(answer).unwrap();
        drop(receiver);
        assert!(waiting.try_recv().is_err(), "the caller must not wait for a shard that is gone");
        let (answer, _waiting) = futures_channel::oneshot::channel::<()>();
        assert!(sender.push(answer).is_err());
        assert!(sender.is_closed());
    }

    #[test]
    fn what_is_in_a_ring_that_is_closed_can_be_taken_and_nothing_enters() {
        let (sender, receiver) = Ring::new(4);
        assert_eq!(sender.push(1), Ok(()));
        receiver.close();
        assert_eq!(sender.push(2), Err(2));
        assert_eq!((receiver.pop(), receiver.pop(), sender.is_closed()), (Some(1), None, true));
    }

    #[test]
    fn nothing_is_stranded_by_a_shard_that_goes_while_others_push() {
        for _ in 0..200 {
            let (sender, receiver) = Ring::new(64);
            let value = Arc::new(());
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    let (sender, value) = (sender.clone(), Arc::clone(&value));
                    scope.spawn(move || while sender.push(Arc::clone(&value)).is_ok() || !sender.is_closed() {});
                }
                scope.spawn(move || drop(receiver));
            });
            assert_eq!(Arc::strong_count(&value), 1, "a value stayed in a ring without a shard");
        }
    }

    #[test]
    fn every_value_of_every_thread_arrives_once_and_in_its_order() {
        const THREADS: usize = 3;
        const VALUES: usize = 20_000;
        let (sender, receiver) = Ring::new(128);
        for thread in 0..THREADS {
            let sender = sender.clone();
            std::thread::spawn(move || {
                for value in 0..VALUES {
                    let mut item = (thread, value);
                    while let Err(back) = sender.push(item) {
                        item = back;
                        std::thread::yield_now();
                    }
                }
            });
        }
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let next = runtime.block_on(async move {
            let mut next = [0; THREADS];
            while next != [VALUES; THREADS] {
                receiver.wait().await;
                while let Some((thread, value)) = receiver.pop() {
                    assert_eq!(value, next[thread]);
                    next[thread] += 1;
                }
            }
            next
        });
        assert_eq!(next, [VALUES; THREADS]);
    }
}
