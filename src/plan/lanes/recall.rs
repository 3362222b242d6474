//! Lanes that are looked at beside the log because somebody has put something there, or lets them go on.
//!
//! Invariant: a lane with a run out, or a head on its way to the dead letters, is not touched: it is asked again.

use super::{Lane, LaneIndex, LaneState, Lanes, Source};
use crate::time::Tick;

/// What became of a lane that was to be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recalled {
    /// It is parked, and due now.
    Due,
    /// It is read from beside the log already, to the end; or it stands still, and somebody else lets it go on.
    AsItIs,
    /// Its messages are out: ask again.
    Busy,
}

impl Lane {
    /// Whether its next message may go out.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.state == LaneState::Ready
    }

    /// Whether it waits for an operator.
    #[must_use]
    pub fn is_on_hold(&self) -> bool {
        self.state == LaneState::Parked && self.due == Tick::NEVER
    }
}

impl Lanes {
    /// Something stands beside the log for this lane: it is parked, due now and without attempts. What it has in memory
    /// is handed out with its number, to be copied beside the log as well. `release`: also if it is on hold.
    pub fn recall(&mut self, lane: LaneIndex, release: bool, each: impl FnMut(i64, Source)) -> Recalled {
        let index = lane.0 as usize;
        let of = self.lanes[index];
        match of.state {
            LaneState::Parked if of.is_on_hold() && (of.held || !release) => Recalled::AsItIs,
            LaneState::Parked => {
                (self.lanes[index].attempts, self.lanes[index].due) = (0, Tick(0));
                Recalled::Due
            }
            // What is drained is drained to the end, and the row goes only if nothing is left.
            _ if of.kept_beside => Recalled::AsItIs,
            LaneState::InFlight | LaneState::Dying => Recalled::Busy,
            LaneState::Ready | LaneState::Idle => {
                self.take_back(lane);
                self.park(lane, 0, Tick(0), each);
                Recalled::Due
            }
        }
    }

    /// Nothing new of a lane starts, of which nothing is out: go on with [`Lanes::park`].
    pub fn take_back(&mut self, lane: LaneIndex) {
        let of = &mut self.lanes[lane.0 as usize];
        if of.state == LaneState::Ready {
            self.ready[of.destination.index()].retain(|ready| *ready != lane.0);
            self.ready_count -= 1;
        }
        of.state = LaneState::InFlight;
    }
}
