//! How much a shard holds in memory: the record that the bounds are checked by (promise P8: every queue has one).
//!
//! Bounds, with D the most destinations of a message. A *page* is what one call brings: `claim.rows_max` references and
//! those of one log row, or `DRAIN_ROWS_MAX` copies of a parked lane.
//! - Rows of callers: what they have drawn from the budget, `ring.rows_max`.
//! - Messages: nothing is claimed or drained while `lane.rows_max` are there, so those and a page; nothing is admitted
//!   from memory either, waiting rows counted, so those and a flush may wait for the claim, and are D each afterwards;
//!   beside them what a settlement under way has taken, `KIND_MAX` of each kind.
//! - Transactions before the cursor: one a message in memory, and `SET_ASIDE_TRANSACTIONS_MAX`.
//! - Own flushes that the claim has not passed: `FLUSHES_MAX`.
//! - Streams and lanes that are remembered: `lane.streams_max`, and those of the messages in memory; until the reader has
//!   caught up also the lanes that were parked.
//! - Parked lanes are bounded by the disk: a lane is its entry in the lanes' table, and for each two entries more to look
//!   at it, and an outcome an attempt. Their messages stand beside the log.

use super::state::State;

impl State {
    /// Records what there is. Called after each flush and each page, which is where it grows; never for a row.
    pub(super) fn note_memory(&self) {
        let memory = &self.metrics.memory;
        let held_back: usize = self.held_back.iter().map(|pending| pending.rows.len()).sum();
        memory.pending_rows_max.max((self.pending_rows + held_back) as u64);
        memory.rows_max.max(self.rows_in_memory() as u64);
        memory.transactions_max.max(self.ledger.len() as u64);
        memory.flushes_max.max(self.flushes.len() as u64);
        memory.streams_max.max(self.numbers.len() as u64);
        let kept = self.lanes.kept_count();
        memory.lanes_max.max((self.lanes.len() - kept) as u64);
        memory.parked_lanes_max.max(kept as u64);
        let entries = self.parked_due.len() + self.drain.len() + self.settle.of_lanes();
        memory.parked_entries_max.max(entries as u64);
    }
}
