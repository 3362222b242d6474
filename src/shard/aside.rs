//! A destination that stays away makes room for the others: its lanes go beside the log.
//!
//! Invariants
//! - What waits for one destination never keeps the messages of another out of memory: beyond [`ROOM`] of
//!   `lane.rows_max` the lanes of a paused destination are parked, with their attempts as they were, since none was made.
//! - One lane of it stays in memory, or comes back: it is what the probe is made of. The others are looked at again in
//!   memory only, until the destination takes messages again.

use super::claim::DRAIN_ROWS_MAX;
use super::state::State;
use crate::batch::DestinationId;
use crate::error::FailureReason;
use crate::plan::lanes::{LaneIndex, SlotIndex};
use crate::plan::pause::MaySend;
use crate::seam::store::Park;
use crate::time::Tick;

/// Share of `lane.rows_max` (in quarters) that may be full before a paused destination has to make room.
const ROOM: usize = 2;
/// Lanes that make room at once.
const LANES_MAX: usize = 64;
/// How long such a lane waits before it is looked at again.
pub(super) const LOOK_MS: u64 = 1_000;

impl State {
    /// Whether a paused destination has to make room.
    pub(super) fn is_short_of_room(&self) -> bool {
        self.rows_claimed_in_memory() * 4 > self.settings.lane_rows_max * ROOM
    }

    /// Whether the destination takes no messages now.
    fn is_paused(&mut self, destination: DestinationId, now: Tick) -> bool {
        matches!(self.pause_of(destination).may_send(now), MaySend::At(_))
    }

    /// Whether a parked lane that is due has to wait on: its destination is away, and another lane serves for the probe.
    pub(super) fn waits_for_destination(&mut self, lane: LaneIndex, now: Tick) -> bool {
        let destination = self.lanes.lane(lane).destination;
        self.is_paused(destination, now) && self.lanes.ready_for(destination) > 0
    }

    /// Parks lanes of a paused destination: all but one, and that too if it is a long one.
    pub(super) fn put_beside(&mut self, destination: DestinationId, now: Tick) {
        let ready = self.lanes.ready_for(destination);
        let is_long = |lane| self.lanes.lane(lane).len as usize > DRAIN_ROWS_MAX;
        let stays = usize::from(!(ready == 1 && self.lanes.first_ready(destination).is_some_and(is_long)));
        let lanes_max = ready.saturating_sub(stays).min(LANES_MAX);
        let mut heads: Vec<SlotIndex> = Vec::with_capacity(lanes_max);
        self.lanes.take(destination, lanes_max, 1, |slot, _| heads.push(slot));
        let due = now.plus_ms(LOOK_MS);
        for head in heads {
            let lane = self.lanes.lane_of(head);
            let of = *self.lanes.lane(lane);
            let stream_seq = self.lanes.stream_seq_of(head);
            self.park_lane(lane, of.attempts, due);
            self.settle.park(Park {
                lane_id: of.lane_id,
                destination,
                partition: of.partition,
                stream_seq,
                attempts: of.attempts,
                reason: FailureReason::TransportNotReady as i16,
                error: "the destination is not ready".to_owned(),
                error_cut: false,
                due_in_ms: LOOK_MS as i64,
            });
        }
    }
}
