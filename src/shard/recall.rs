//! What others put beside the log: dead letters that an operator gives back, and lanes that an operator lets go on.
//!
//! They say so in the log, in the same transaction, by references with numbers that no message has (`wh_tell_lanes`): so
//! it is read by whoever owns the partition, exactly when it is visible, and a take-over finds the parked row itself.
//!
//! Invariants
//! - What a lane has not published yet goes beside the log as well, and comes after what was given back, by number.
//! - A lane with a run out is looked at when the run has come back; until then nothing new of it starts but what was
//!   admitted before.
//! - A lane that is held goes on by [`GO_ON`] only, and only by one that says so of this time it is held: what the
//!   parked rows held already when they were loaded is passed over, since the lane may have been held again.

use std::cmp::Reverse;

use uuid::Uuid;

use super::state::State;
use crate::batch::DestinationId;
use crate::plan::lanes::recall::Recalled;
use crate::seam::store::GO_ON;
use crate::time::Tick;

/// A lane to look at beside the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Recall {
    lane_id: Uuid,
    destination: DestinationId,
    partition: u32,
    release: bool,
}

impl State {
    /// The claim has read that something stands beside the log for a lane.
    pub(super) fn note_recall(&mut self, lane_id: Uuid, destination: DestinationId, partition: u32, number: i64) {
        if destination == DestinationId::UNNAMED {
            tracing::error!(%lane_id, "a dead letter was given back to a destination without a number here: its lane waits");
            return;
        }
        let recall = Recall { lane_id, destination, partition, release: number == GO_ON };
        if !self.recalls.contains(&recall) {
            self.recalls.push(recall);
        }
    }

    /// Whether the parked rows of the partition were loaded with what this transaction has done to them.
    pub(super) fn is_in_what_was_loaded(&self, partition: u32, xid: u64) -> bool {
        self.parked_as_of.iter().any(|(of, read_at)| *of == partition && read_at.contains(xid))
    }

    /// Looks at the lanes that can be looked at.
    pub(super) fn recall_lanes(&mut self) {
        if self.recalls.is_empty() {
            return;
        }
        let mut waiting = std::mem::take(&mut self.recalls);
        waiting.retain(|recall| self.holds(recall.partition) && !self.recalled(recall));
        self.recalls = waiting;
        self.metrics.parked_lanes_now.set(self.lanes.parked_count() as u64);
    }

    /// Whether the lane has been looked at. One that is to leave stays as it is, in case that it stays after all.
    fn recalled(&mut self, recall: &Recall) -> bool {
        if self.is_leaving(recall.partition) {
            return false;
        }
        let Some(lane) = self.lanes.find(recall.lane_id, recall.destination) else {
            let due = Tick(0);
            let lane = self.lanes.restore_parked(recall.lane_id, recall.destination, recall.partition, 0, due);
            self.parked_due.push(Reverse((due, lane)));
            return true;
        };
        let mut beside = Vec::new();
        let recalled = self.lanes.recall(lane, recall.release, |stream_seq, source| beside.push((stream_seq, source)));
        for (stream_seq, source) in beside {
            self.spill_parked(lane, stream_seq, source);
        }
        if recalled == Recalled::Due {
            self.parked_due.push(Reverse((Tick(0), lane)));
        }
        recalled != Recalled::Busy
    }
}
