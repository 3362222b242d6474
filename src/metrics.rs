//! Figures of a shard: plain counters that the shard's thread adds to and anybody may read.
//!
//! Invariant: every figure that loadgen, the operators' tool or a metrics exporter shows comes from here.

use std::sync::atomic::{AtomicU64, Ordering};

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
