//! Figures of a shard: counters and durations that the shard's thread adds to and anybody may read.
//!
//! Invariant: every figure that loadgen, the operators' tool or a metrics exporter shows comes from here.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use hdrhistogram::Histogram;

/// Ten minutes: no call to the database is given longer.
const HIGHEST_US: u64 = 600_000_000;

/// A number that only its shard writes.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds.
    pub fn add(&self, by: u64) {
        self.0.fetch_add(by, Ordering::Relaxed);
    }

    /// Keeps the larger.
    pub fn max(&self, value: u64) {
        self.0.fetch_max(value, Ordering::Relaxed);
    }

    /// Replaces.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Reads.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How long something took, in microseconds, with three digits. What took longer than ten minutes counts as that.
/// Recording locks what nobody else holds but for the moment of a [`Durations::copy`], and allocates nothing.
#[derive(Debug)]
pub struct Durations(Mutex<Histogram<u64>>);

impl Default for Durations {
    fn default() -> Self {
        Self(Mutex::new(match Histogram::new_with_bounds(1, HIGHEST_US, 3) {
            Ok(histogram) => histogram,
            Err(error) => unreachable!("the bounds are constants and right: {error}"),
        }))
    }
}

impl Durations {
    /// Records one.
    pub fn record_us(&self, us: u64) {
        let mut histogram = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        histogram.saturating_record(us.clamp(1, HIGHEST_US));
    }

    /// What was recorded since the start. The copies of one shard can be subtracted, those of several added.
    #[must_use]
    pub fn copy(&self) -> Histogram<u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// One shard's figures. Counts since start unless the name says otherwise.
#[derive(Debug, Default)]
#[allow(missing_docs)] // The names say it; the units stand last in them.
pub struct ShardMetrics {
    pub flushes: Counter,
    pub flush_retries: Counter,
    pub rows_stored: Counter,
    pub units_busy: Counter,
    pub looked_up_flushes: Counter,
    pub claims: Counter,
    pub claims_empty: Counter,
    pub claim_us: Durations,
    pub rows_claimed: Counter,
    pub rows_from_memory: Counter,
    pub runs: Counter,
    pub rows_published: Counter,
    pub publish_failures: Counter,
    pub publish_unknown: Counter,
    pub not_ready: Counter,
    pub parked_lanes_now: Counter,
    pub spilled_rows: Counter,
    pub dead_letters: Counter,
    pub messages_missing: Counter,
    pub settles: Counter,
    pub cursors: Counter,
    pub fenced: Counter,
    pub epochs_changed: Counter,
    pub reconnects: Counter,
    pub ring_rows_max: Counter,
    pub rows_in_memory_now: Counter,
    pub task_panics: Counter,
    pub cpu_us: Counter,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_kept_with_their_bounds_and_can_be_told_by_period() {
        let durations = Durations::default();
        durations.record_us(1_000);
        let before = durations.copy();
        durations.record_us(0);
        durations.record_us(u64::MAX);
        let mut since = durations.copy();
        since.subtract(&before).unwrap();
        assert_eq!((since.len(), since.min()), (2, 1));
        assert!(since.max() >= HIGHEST_US);
    }
}
