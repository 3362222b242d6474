//! Memory (P8): what every shard of a run has held at once at the most, against the bounds that `shard/memory` states.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use corelane::limits::SET_ASIDE_TRANSACTIONS_MAX;
use corelane::metrics::ShardMetrics;
use corelane::runtime::sim::SimRuntime;
use corelane::store::model::ModelSettings;

use crate::process::ProcessPlan;

/// Copies of a parked lane that one drain brings.
const DRAIN_ROWS_MAX: usize = 256;
/// Elements of one kind in a settlement under way; three kinds hold messages.
const KIND_MAX: usize = 1_000;
/// Own flushes that the claim has not passed.
const FLUSHES_MAX: usize = 4_096;

/// The figures of all shards there have been.
#[derive(Clone, Default)]
pub struct Memory(Rc<RefCell<Vec<Arc<ShardMetrics>>>>);

impl Memory {
    pub fn watch(&self, metrics: &Arc<ShardMetrics>) {
        self.0.borrow_mut().push(metrics.clone());
    }

    /// Lanes of all shards that were put beside the log to make room.
    pub fn made_room(&self) -> u64 {
        self.0.borrow().iter().map(|metrics| metrics.lanes_made_room.get()).sum()
    }

    /// Ends the run if a shard has held more than it may. `destinations`: the most of one message.
    pub fn check(&self, runtime: &SimRuntime, plan: &ProcessPlan, destinations: usize) {
        let settings = &plan.settings;
        let (lane_rows, flush_rows) = (settings.lane_rows_max, settings.flush_rows_max);
        let log_row = ModelSettings::default().log_references_max;
        let page = (settings.claim_rows_max + log_row).max(DRAIN_ROWS_MAX);
        let rows = lane_rows + page + (lane_rows + flush_rows) * destinations;
        for metrics in self.0.borrow().iter() {
            let memory = &metrics.memory;
            let parked = memory.parked_lanes_max.get() as usize;
            let lanes = memory.lanes_max.get() as usize;
            let attempts = settings.retry_attempts_max as usize;
            for (what, counter, bound) in [
                ("rows of callers", &metrics.ring_rows_max, plan.budget_rows),
                ("rows of callers at a flush", &memory.pending_rows_max, plan.budget_rows),
                ("messages", &memory.rows_max, rows),
                ("open transactions", &memory.transactions_max, rows + 3 * KIND_MAX + SET_ASIDE_TRANSACTIONS_MAX),
                ("own flushes", &memory.flushes_max, FLUSHES_MAX),
                ("streams", &memory.streams_max, settings.lane_streams_max + rows + flush_rows),
                // Until the reader has caught up those that were parked go on knowing how far they were drained.
                ("lanes", &memory.lanes_max, settings.lane_streams_max + rows + parked),
                ("entries of parked lanes", &memory.parked_entries_max, lanes + parked * (4 + attempts)),
            ] {
                if counter.get() as usize > bound {
                    runtime.fail(format!("P8: {} {what} at once in a shard, {bound} at most", counter.get()));
                }
            }
        }
    }
}
