//! Figures of a shard: counters and durations that the shard's thread adds to and anybody may read.
//!
//! Invariant: every figure of a shard that loadgen or a metrics exporter shows comes from here.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use hdrhistogram::Histogram;

/// Ten minutes: no call to the database is given longer.
const HIGHEST_US: u64 = 600_000_000;

/// A number that its shard writes. (Threads beside the shards, for large units of work, count panics with shard 0.)
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

/// One member's figures of a subscription. Counts since start unless the name says otherwise.
#[derive(Debug, Default)]
pub struct SubscriptionMetrics {
    /// Events read (those of a batch that comes again once).
    pub events: Counter,
    /// Batches read.
    pub batches: Counter,
    /// Batches handed out again.
    pub batches_again: Counter,
    /// Connections or memberships that were lost.
    pub reconnects: Counter,
    /// Partitions it has now.
    pub partitions_now: Counter,
    /// Events that the whole subscription was behind at the last look (each quarter of a lease), up to 10,000.
    pub lag_events_now: Counter,
    /// Age of the oldest of them then, in milliseconds.
    pub lag_age_ms_now: Counter,
}

/// One shard's figures. Counts since start unless the name says otherwise.
#[derive(Debug, Default)]
pub struct ShardMetrics {
    /// Store calls begun, one transaction each.
    pub flushes: Counter,
    /// Flushes that are tried again: busy server, wrong numbers, no connection.
    pub flush_retries: Counter,
    /// Messages stored.
    pub rows_stored: Counter,
    /// Flushes held up because somebody else works in one of their streams.
    pub units_busy: Counter,
    /// Stored flushes for which the database looked up last numbers.
    pub looked_up_flushes: Counter,
    /// Pages asked for.
    pub claims: Counter,
    /// Of these, such without a log row.
    pub claims_empty: Counter,
    /// How long each claim took.
    pub claim_us: Durations,
    /// Messages that came by a claim.
    pub rows_claimed: Counter,
    /// Messages that went from their commit to the lanes without a claim.
    pub rows_from_memory: Counter,
    /// Runs handed to the transport.
    pub runs: Counter,
    /// Acknowledged messages, one for each destination.
    pub rows_published: Counter,
    /// Runs' heads that failed; each parks its lane, or is a dead letter.
    pub publish_failures: Counter,
    /// Of these, such whose outcome the transport did not tell.
    pub publish_unknown: Counter,
    /// Lanes put back because the transport was not ready or throttled: no attempt is counted.
    pub not_ready: Counter,
    /// Lanes that wait for their retry, as of now.
    pub parked_lanes_now: Counter,
    /// Messages copied beside the log behind a parked head, or of a lane that made room.
    pub spilled_rows: Counter,
    /// Lanes put beside the log because they held much of a memory that was full, and got on slowly.
    pub lanes_made_room: Counter,
    /// Destinations whose breaker is open in this shard, as of now: nothing but probes is sent to them.
    pub breakers_open_now: Counter,
    /// Breakers that opened.
    pub breakers_opened: Counter,
    /// Messages put to the dead letters.
    pub dead_letters: Counter,
    /// Of these, such whose message somebody had deleted before it was published.
    pub messages_missing: Counter,
    /// Settlements begun, cursors included.
    pub settles: Counter,
    /// Outcomes that the database refused for good, each by itself: somebody has to look at the log.
    pub settles_refused: Counter,
    /// References that can be written nowhere, as of now: their lanes stand still until somebody has repaired what
    /// refuses them and has restarted the process.
    pub references_set_aside_now: Counter,
    /// Settlements with a cursor.
    pub cursors: Counter,
    /// Settlements refused because another instance had taken over.
    pub fenced: Counter,
    /// Crashes of the server that the shard noticed.
    pub epochs_changed: Counter,
    /// Flushes looked up because their connection was lost.
    pub reconnects: Counter,
    /// Most rows that waited for a flush at once.
    pub ring_rows_max: Counter,
    /// Panics of tasks, each caught.
    pub task_panics: Counter,
    /// CPU time of the shard's thread in microseconds, as of the last look.
    pub cpu_us: Counter,
    /// What the shard has held in memory.
    pub memory: MemoryMetrics,
}

/// What the process's listener does. Counts since start unless the name says otherwise.
#[derive(Debug, Default)]
pub struct ListenerMetrics {
    /// What is believed of it: 0 off, 1 not proved yet, 2 healthy, 3 deaf.
    pub health_now: Counter,
    /// Tests begun.
    pub tests: Counter,
    /// Tests that were not heard in time, connections that ended, and such that could not be made.
    pub tests_failed: Counter,
}

/// What the instance that inspects the schema found at its last look (once a minute): all zero in the others.
#[derive(Debug, Default)]
pub struct SentinelMetrics {
    /// Messages stored longer ago than `sentinel.unpublished_ms` and not published, one for each destination.
    pub unpublished_now: Counter,
    /// Age of the oldest of them.
    pub unpublished_age_ms_now: Counter,
    /// Scheduled messages due longer ago than that.
    pub overdue_now: Counter,
    /// Streams parked or held for longer than `sentinel.stuck_ms`.
    pub stuck_now: Counter,
    /// For how long the longest of them.
    pub stuck_age_ms_now: Counter,
    /// Streams that wait for an operator.
    pub held_now: Counter,
    /// Dead letters deleted since the start because they were older than `retention.dead_letters_days`.
    pub dead_letters_trimmed: Counter,
}

/// The most that a shard has held at once, by what it is. Each has a bound: `shard/memory` says which.
#[derive(Debug, Default)]
pub struct MemoryMetrics {
    /// Rows of callers that wait while a flush ends, those behind a busy stream included.
    pub pending_rows_max: Counter,
    /// Stored messages that are not resolved, one for each destination (while they wait for the claim, one for all).
    pub rows_max: Counter,
    /// Transactions before the cursor.
    pub transactions_max: Counter,
    /// Own flushes that the claim has not passed.
    pub flushes_max: Counter,
    /// Streams whose numbers are remembered.
    pub streams_max: Counter,
    /// Lanes that are not parked.
    pub lanes_max: Counter,
    /// Lanes that are parked.
    pub parked_lanes_max: Counter,
    /// Entries for parked lanes: to look at when they are due, to drain, and outcomes that are not written yet.
    pub parked_entries_max: Counter,
}

/// Figures of an engine's strategies: what callers queue before a shard has it. Counts since start.
#[derive(Debug, Default)]
pub struct StrategyMetrics {
    /// Batches handed over, each for this reason, in the order of [`crate::engine::Trigger::ALL`].
    pub handed_over: [Counter; 8],
    /// Messages in them.
    pub messages_handed_over: Counter,
    /// Of these, such whose unit of work was not stored, or of which that is not known.
    pub messages_refused: Counter,
    /// Units of work whose refusal nobody has read: their [`crate::engine::Pushed`] was dropped.
    pub refusals_unread: Counter,
    /// Units of work that were dropped before they were finished: rolled back.
    pub units_dropped: Counter,
}

/// Figures of one consumer of the inbox. Counts since start unless the name says otherwise.
#[derive(Debug, Default)]
pub struct InboxMetrics {
    /// Deliveries that brokers gave.
    pub received: Counter,
    /// Of these, copies of what was handled, stored or in hand already.
    pub duplicates: Counter,
    /// Deliveries and stored messages whose effects are committed.
    pub handled: Counter,
    /// Tries that ended in failure, panics and time-outs included.
    pub failed: Counter,
    /// Of these, handlers that did not end in time.
    pub timed_out: Counter,
    /// Handlers that others' work or a lost connection disturbed: run again, no attempt counted.
    pub disturbed: Counter,
    /// Messages put to the dead letters of the inbox.
    pub dead: Counter,
    /// Deliveries given to the broker's dead letters: unknown type, unreadable body, no valid id.
    pub unreadable: Counter,
    /// Messages stored behind a parked stream's head, or by `inbox.settle = "stored"`.
    pub stored: Counter,
    /// Deliveries given back to the broker.
    pub abandoned: Counter,
    /// Deliveries that found their stream in another process's hands, once a look.
    pub busy: Counter,
    /// Transactions of results.
    pub commits: Counter,
    /// Results in them.
    pub rows_committed: Counter,
    /// Transactions that were refused and taken apart to find whose fault it was.
    pub bisections: Counter,
    /// Messages emitted by handlers.
    pub emitted: Counter,
    /// Looks for retries.
    pub claims: Counter,
    /// Stored messages that they found.
    pub rows_claimed: Counter,
    /// Deliveries in hand, as of now.
    pub in_hand_now: Counter,
    /// Settlements that the broker did not take.
    pub settle_failures: Counter,
    /// Connections to a broker that ended.
    pub disconnects: Counter,
    /// Connections to the database that were lost.
    pub reconnects: Counter,
    /// How long each handler took.
    pub handler_us: Durations,
    /// How long each commit took.
    pub commit_us: Durations,
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
