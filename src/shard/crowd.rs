//! A stream with more waiting messages than memory has room for makes room for the others: it goes beside the log.
//!
//! Invariants
//! - A lane goes only when the claim stands still: memory is full, and in [`CROWD_MS`] less than a [`TURN`]th of it was
//!   published. Whoever keeps up pays nothing for having much to do.
//! - A lane goes as a whole, its oldest message first, and what comes later follows: it is drained in its order, and who
//!   takes it over finds it so at every moment.
//! - So memory is never full for long of fewer than [`LONG`] lanes. Where it is full of more, they wait for each other.
//!
//! Cost: a row written and deleted a message beyond the memory's room, for a stream that is slow anyway.

use super::state::State;
use crate::plan::lanes::{Lane, LaneIndex};
use crate::time::Tick;

/// How long memory may be full before its longest lanes make room.
pub const CROWD_MS: u64 = 1_000;
/// What share of `lane.rows_max` has to be published in that time, for the claim to be said to get on.
const TURN: u64 = 4;
/// What share of it a lane holds that makes room.
const LONG: usize = 16;

/// How full memory has been lately.
#[derive(Debug, Default)]
pub(super) struct Crowd {
    /// Since when it is full, and what had been published by then.
    since: Option<(Tick, u64)>,
    /// Long lanes make room.
    makes_room: bool,
}

impl State {
    /// Looks whether the claim has stood still for too long; answers when to look again.
    pub(super) fn look_for_room(&mut self, now: Tick) -> Tick {
        let (rows, rows_max) = (self.rows_claimed_in_memory(), self.settings.lane_rows_max);
        if rows < rows_max {
            // A little room comes and goes.
            if rows * 4 < rows_max * 3 {
                self.crowd = Crowd::default();
            }
            return Tick::NEVER;
        }
        let published = self.metrics.rows_published.get();
        let (since, before) = *self.crowd.since.get_or_insert((now, published));
        let until = since.plus_ms(self.settings.lane_crowd_ms);
        if now < until {
            return until;
        }
        let is_slow = (published - before) * TURN < rows_max as u64;
        self.crowd = Crowd { since: Some((now, published)), makes_room: is_slow && self.stopping.is_none() };
        if self.crowd.makes_room {
            let mut place = LaneIndex(0);
            while let Some(lane) = self.lanes.find_from(place, |of| of.is_ready() && self.is_to_make_room(of)) {
                self.put_long_lane_beside(lane);
                place = lane;
            }
        }
        now.plus_ms(self.settings.lane_crowd_ms)
    }

    /// Whether the lane is to go beside the log as soon as nothing of it is out.
    pub(super) fn is_to_make_room(&self, of: &Lane) -> bool {
        let long = (self.settings.lane_rows_max / LONG).max(1);
        self.crowd.makes_room && of.len as usize > long && !of.kept_beside && !self.is_leaving(of.partition)
    }

    /// Nothing of the lane is out: what it has goes beside the log, and is drained from there at once.
    pub(super) fn put_long_lane_beside(&mut self, lane: LaneIndex) {
        self.metrics.lanes_made_room.add(1);
        tracing::debug!(lane = %self.lanes.lane(lane).lane_id, "a long lane makes room");
        self.lanes.take_back(lane);
        self.park_lane(lane, 0, Tick(0));
    }
}
