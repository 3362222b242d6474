//! Recycled batches: a shard or caller takes warm columns instead of allocating new ones.
//!
//! Invariants
//! - A recycled batch is empty and has no second holder.
//! - The pool keeps at most `kept_max` batches, none whose arena has grown beyond `bytes_max` (one huge batch does not pin
//!   its memory for ever), and at most `all_bytes_max` in all of them: claims bring batches that were never taken here,
//!   and each of those kept gets its turn to grow.
//! - Taking and giving back holds no lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam::queue::ArrayQueue;

use super::rows::Rows;

/// A bounded, lock-free store of empty batches.
#[derive(Debug)]
pub struct Pool {
    kept: ArrayQueue<Arc<Rows>>,
    bytes_max: usize,
    /// Of those kept; what is being given or taken may count a moment longer.
    all_bytes: AtomicUsize,
    all_bytes_max: usize,
}

impl Pool {
    /// A pool of at most `kept_max` batches (at least 1) of at most `bytes_max` arena bytes each, and `all_bytes_max` of
    /// arenas and columns in all.
    #[must_use]
    pub fn new(kept_max: usize, bytes_max: usize, all_bytes_max: usize) -> Self {
        Self { kept: ArrayQueue::new(kept_max.max(1)), bytes_max, all_bytes: AtomicUsize::new(0), all_bytes_max }
    }

    /// An empty batch: a warm one if there is one.
    #[must_use]
    pub fn take(&self) -> Arc<Rows> {
        let Some(batch) = self.kept.pop() else { return Arc::default() };
        // Nobody has changed it since it was given.
        self.all_bytes.fetch_sub(batch.held_bytes(), Ordering::Relaxed);
        batch
    }

    /// Gives a batch back. While somebody else holds it, it is theirs to give: of two who give it at the same moment
    /// one does. One that has grown too large is let go, as is one that has never held anything.
    pub fn give(&self, mut batch: Arc<Rows>) {
        if Arc::get_mut(&mut batch).is_none() {
            let Some(rows) = Arc::into_inner(batch) else { return };
            batch = Arc::new(rows);
        }
        if let Some(rows) = Arc::get_mut(&mut batch)
            && rows.arena.capacity() <= self.bytes_max
        {
            rows.clear();
            let bytes = rows.held_bytes();
            let before = self.all_bytes.fetch_add(bytes, Ordering::Relaxed);
            if bytes == 0 || before + bytes > self.all_bytes_max || self.kept.push(batch).is_err() {
                self.all_bytes.fetch_sub(bytes, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Both wait for the other on a spinning counter, so that they give within nanoseconds of each other.
    #[test]
    fn of_two_holders_who_give_a_batch_at_once_one_does() {
        const ROUNDS: usize = 100_000;
        let pool = Pool::new(1, 1 << 20, 1 << 20);
        let hand_over = ArrayQueue::<Arc<Rows>>::new(1);
        let (ready, given) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let reach = |counter: &AtomicUsize, count: usize| {
            counter.fetch_add(1, Ordering::SeqCst);
            while counter.load(Ordering::SeqCst) < count {
                std::hint::spin_loop();
            }
        };
        pool.give(Arc::new(Rows::with_capacity(8, 64)));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    let batch = loop {
                        if let Some(batch) = hand_over.pop() {
                            break batch;
                        }
                        std::hint::spin_loop();
                    };
                    reach(&ready, 2 * round);
                    pool.give(batch);
                    reach(&given, 2 * round);
                }
            });
            let mut lost = 0;
            for round in 1..=ROUNDS {
                let mut batch = pool.take();
                if batch.arena.capacity() == 0 {
                    lost += 1;
                    batch = Arc::new(Rows::with_capacity(8, 64));
                }
                let _ = hand_over.push(batch.clone());
                reach(&ready, 2 * round);
                pool.give(batch);
                reach(&given, 2 * round);
            }
            assert_eq!(lost, 0, "warm batches lost in {ROUNDS} rounds");
        });
    }

    #[test]
    fn a_batch_that_has_grown_too_large_is_let_go() {
        let pool = Pool::new(2, 100, 1 << 20);
        pool.give(Arc::new(Rows::with_capacity(1, 1_000)));
        assert_eq!(pool.take().arena.capacity(), 0);
    }

    /// As claims do: what is given was never taken here, and whoever takes makes it grow.
    #[test]
    fn what_is_kept_is_bounded_in_all_however_many_are_given() {
        let pool = Pool::new(4_096, 1 << 20, 1 << 20);
        for _ in 0..1_000 {
            pool.give(Arc::new(Rows::with_capacity(1, 0)));
            let mut batch = pool.take();
            if let Some(rows) = Arc::get_mut(&mut batch) {
                rows.reserve(100, 100_000);
            }
            pool.give(batch);
            pool.give(Arc::new(Rows::with_capacity(100, 100_000)));
        }
        let kept: Vec<_> = std::iter::from_fn(|| pool.kept.pop()).collect();
        let bytes: usize = kept.iter().map(|rows| rows.held_bytes()).sum();
        assert!((500_000..=1 << 20).contains(&bytes), "{bytes} bytes in {} batches", kept.len());
        assert_eq!(pool.all_bytes.load(Ordering::Relaxed), bytes);
    }
}
