//! What an orderly end has to say.

use std::time::Duration;

use crate::shard::ShardReport;

/// How the engine ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShutdownReport {
    /// Every shard had done everything in hand in time.
    pub drained: bool,
    /// Messages of callers that were refused because the time was over: their callers have the error.
    pub rows_refused: usize,
    /// Stored messages that were in memory and not published: the next owner claims them.
    pub rows_left: usize,
    /// Shards that did not end in time, or ended by a panic.
    pub shards_lost: usize,
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
        }
    }
}
