//! What an orderly end has to say.

use std::time::Duration;

use uuid::Uuid;

use crate::inbox::ConsumerReport;
use crate::shard::ShardReport;

/// How the engine ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShutdownReport {
    /// Every shard had done everything in hand in time: what was acknowledged or announced is published, or, where other
    /// instances are there, handed over to them.
    pub drained: bool,
    /// Messages of callers that were refused because the time was over: their callers have the error.
    pub rows_refused: usize,
    /// Stored messages that were in memory and not published: the next owner claims them.
    pub rows_left: usize,
    /// Shards that did not end in time, or ended by a panic.
    pub shards_lost: usize,
    /// Messages that were queued by a strategy when the end began, and that no shard had yet.
    pub queued: usize,
    /// Of these, such that were not stored, or of which that is not known: their callers have the error.
    pub queued_unwritten: usize,
    /// The ids of the first 1,000 of them.
    pub unwritten: Vec<Uuid>,
    /// Deliveries that consumers gave back to their brokers because the engine ended.
    pub deliveries_abandoned: usize,
    /// Messages whose handlers were not done in time: they are handled again.
    pub handlers_left: usize,
    /// How long it took.
    pub took: Duration,
}

impl ShutdownReport {
    pub(super) fn of(shards: &[Option<ShardReport>], took: Duration) -> Self {
        let ended = || shards.iter().flatten();
        Self {
            drained: shards.iter().all(|shard| shard.is_some_and(|report| report.drained)),
            rows_refused: ended().map(|report| report.rows_refused).sum(),
            rows_left: ended().map(|report| report.rows_left).sum(),
            shards_lost: shards.iter().filter(|shard| shard.is_none()).count(),
            took,
            ..Self::default()
        }
    }

    pub(super) fn with_consumers(self, consumers: ConsumerReport, took: Duration) -> Self {
        Self {
            drained: self.drained && consumers.drained,
            deliveries_abandoned: consumers.abandoned,
            handlers_left: consumers.left,
            took,
            ..self
        }
    }
}
