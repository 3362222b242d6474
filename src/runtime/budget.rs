//! A bound on rows in hand: what callers may have put into a shard and not got back.
//!
//! Invariants
//! - The sum of what was acquired and not released never exceeds the bound.
//! - [`Budget::acquire`] loses no wake-up: as long as something is in hand another release will come, and the
//!   release that leaves nothing in hand wakes a waiter that then fits. A waiter that got its rows wakes the
//!   next if there is room left.
//!
//! Cost: without waiters one compare-and-swap each way; no lock.

use std::sync::atomic::{AtomicUsize, Ordering, fence};

use tokio::sync::Notify;

/// Rows in hand.
#[derive(Debug, Default)]
pub struct Budget {
    rows: AtomicUsize,
    waiters: AtomicUsize,
    room: Notify,
}

impl Budget {
    /// Takes `rows` if there is room for all of them below `rows_max`.
    #[must_use]
    pub fn try_acquire(&self, rows: usize, rows_max: usize) -> bool {
        self.rows
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| {
                now.checked_add(rows).filter(|sum| *sum <= rows_max)
            })
            .is_ok()
    }

    /// Gives `rows` back. Any thread.
    pub fn release(&self, rows: usize) {
        let before = self.rows.fetch_sub(rows, Ordering::SeqCst);
        assert!(before >= rows, "{rows} rows released, {before} were in hand");
        self.wake_one();
    }

    /// Waits until there is room for `rows`, for callers on tokio. False at once if there never can be
    /// (`rows` above `rows_max`). May be dropped at any time: then nothing was taken.
    pub async fn acquire(&self, rows: usize, rows_max: usize) -> bool {
        if rows > rows_max {
            return false;
        }
        if self.try_acquire(rows, rows_max) {
            return true;
        }
        let _waiting = Waiting::new(&self.waiters);
        loop {
            let mut notified = std::pin::pin!(self.room.notified());
            // Queue up before looking: a release after the look finds us.
            notified.as_mut().enable();
            fence(Ordering::SeqCst);
            if self.try_acquire(rows, rows_max) {
                break;
            }
            notified.await;
        }
        if self.rows() < rows_max {
            self.wake_one();
        }
        true
    }

    /// Rows in hand now.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows.load(Ordering::Relaxed)
    }

    fn wake_one(&self) {
        if self.waiters.load(Ordering::SeqCst) > 0 {
            self.room.notify_one();
        }
    }
}

/// Counts a waiter for as long as it waits, also if it is dropped.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn takes_what_fits_and_no_more() {
        let budget = Budget::default();
        assert!(budget.try_acquire(6, 10));
        assert!(!budget.try_acquire(5, 10));
        assert!(budget.try_acquire(4, 10));
        budget.release(6);
        assert_eq!(budget.rows(), 4);
        assert!(!budget.try_acquire(usize::MAX, 10), "a sum that overflows does not fit");
    }

    #[tokio::test]
    async fn what_can_never_fit_is_refused_at_once() {
        assert!(!Budget::default().acquire(11, 10).await);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn waiters_of_all_sizes_get_their_turn_and_the_bound_holds() {
        const MAX: usize = 8;
        let budget = Arc::new(Budget::default());
        let mut tasks = Vec::new();
        for caller in 0..32_usize {
            let budget = Arc::clone(&budget);
            tasks.push(tokio::spawn(async move {
                for turn in 0..50 {
                    let rows = 1 + (caller + turn) % MAX;
                    if turn % 7 == 3 {
                        // Dropped while it waits: must neither keep rows nor swallow another's turn.
                        let _ = tokio::time::timeout(Duration::ZERO, async {
                            budget.acquire(rows, MAX).await;
                            budget.release(rows);
                        })
                        .await;
                        continue;
                    }
                    assert!(budget.acquire(rows, MAX).await);
                    assert!(budget.rows() <= MAX);
                    tokio::task::yield_now().await;
                    budget.release(rows);
                }
            }));
        }
        tokio::time::timeout(Duration::from_secs(30), async {
            for task in tasks {
                task.await.unwrap();
            }
        })
        .await
        .expect("a waiter was never woken");
        assert_eq!(budget.rows(), 0);
    }
}
