//! Recycled batches: a shard or caller takes warm columns instead of allocating new ones.
//!
//! Invariants
//! - A recycled batch is empty and has no second holder.
//! - The pool keeps at most `kept_max` batches, and none whose arena has grown beyond `bytes_max`:
//!   one huge batch does not pin its memory for ever.
//! - Taking and giving back holds no lock.

use std::sync::Arc;

use crossbeam::queue::ArrayQueue;

use super::rows::Rows;

/// A bounded, lock-free store of empty batches.
#[derive(Debug)]
pub struct Pool {
    kept: ArrayQueue<Arc<Rows>>,
    bytes_max: usize,
}

impl Pool {
    /// A pool of at most `kept_max` batches (at least 1) of at most `bytes_max` arena bytes each.
    #[must_use]
    pub fn new(kept_max: usize, bytes_max: usize) -> Self {
        Self { kept: ArrayQueue::new(kept_max.max(1)), bytes_max }
    }

    /// An empty batch: a warm one if there is one.
    #[must_use]
    pub fn take(&self) -> Arc<Rows> {
        self.kept.pop().unwrap_or_default()
    }

    /// Gives a batch back. One that somebody else still holds, or that has grown too large, is let go.
    pub fn give(&self, mut batch: Arc<Rows>) {
        if let Some(rows) = Arc::get_mut(&mut batch)
            && rows.arena.capacity() <= self.bytes_max
        {
            rows.clear();
            let _ = self.kept.push(batch);
        }
    }
}
