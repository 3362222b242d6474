//! The promises, checked while a run goes on: order of first copies, loss, copies.
//!
//! Invariants
//! - Memory is bounded by the number of streams, not of messages: per stream the last number up to which
//!   every first copy has come, and the few that came before their turn.
//! - A first copy that comes before a predecessor's is one order violation, counted when it comes.
//! - A message is lost if its store was acknowledged and no copy has come when the run has gone quiet.
//! - Numbers of one stream are 1, 2, 3 … (the engine is the only writer here), so a gap is visible.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// What was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// First copies that came before a predecessor's first copy.
    pub order_violations: u64,
    /// Acknowledged messages of which no copy came.
    pub lost: u64,
    /// Copies beyond the first.
    pub copies: u64,
}

/// What came for one stream and destination.
#[derive(Debug, Default)]
struct Lane {
    /// Every number up to here has come.
    whole_to: u64,
    /// Highest number whose store was acknowledged.
    acknowledged: u64,
}

/// What came, over all streams of a family.
#[derive(Debug)]
pub struct Checks {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    lanes: Vec<Lane>,
    /// Numbers above `whole_to`: there is none while order holds.
    early: HashMap<(u32, u64), ()>,
    findings: Findings,
    first_copies: u64,
}

/// What one message was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// The first copy.
    First,
    /// A further one.
    Copy,
}

impl Checks {
    /// Checks of `streams` streams that have no messages yet.
    #[must_use]
    pub fn new(streams: u32) -> Self {
        let lanes = (0..streams).map(|_| Lane::default()).collect();
        Self {
            inner: Mutex::new(Inner { lanes, early: HashMap::new(), findings: Findings::default(), first_copies: 0 }),
        }
    }

    /// Takes note of the messages of a batch the transport accepted, in order. One lock a batch.
    pub fn accepted(&self, messages: impl Iterator<Item = (u32, u64)>, mut each: impl FnMut(Arrival)) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        for (stream, number) in messages {
            each(inner.accept(stream, number));
        }
    }

    /// Takes note of acknowledged stores.
    pub fn acknowledged(&self, messages: impl Iterator<Item = (u32, u64)>) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        for (stream, number) in messages {
            let lane = &mut inner.lanes[stream as usize];
            lane.acknowledged = lane.acknowledged.max(number);
        }
    }

    /// First copies so far.
    #[must_use]
    pub fn first_copies(&self) -> u64 {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).first_copies
    }

    /// Acknowledged messages that have not come yet.
    #[must_use]
    pub fn outstanding(&self) -> u64 {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).outstanding()
    }

    /// The verdict, once nothing moves any more.
    #[must_use]
    pub fn findings(&self) -> Findings {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        Findings { lost: inner.outstanding(), ..inner.findings }
    }
}

impl Inner {
    fn accept(&mut self, stream: u32, number: u64) -> Arrival {
        let lane = &mut self.lanes[stream as usize];
        if number == lane.whole_to + 1 {
            lane.whole_to += 1;
            while self.early.remove(&(stream, lane.whole_to + 1)).is_some() {
                lane.whole_to += 1;
            }
        } else if number <= lane.whole_to || self.early.insert((stream, number), ()).is_some() {
            self.findings.copies += 1;
            return Arrival::Copy;
        } else {
            self.findings.order_violations += 1;
        }
        self.first_copies += 1;
        Arrival::First
    }

    fn outstanding(&self) -> u64 {
        let missing: u64 = self.lanes.iter().map(|lane| lane.acknowledged.saturating_sub(lane.whole_to)).sum();
        let early = self.early.keys().filter(|(stream, number)| *number <= self.lanes[*stream as usize].acknowledged);
        missing - early.count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(accepted: &[(u32, u64)], acknowledged: &[(u32, u64)]) -> Findings {
        let checks = Checks::new(2);
        checks.accepted(accepted.iter().copied(), |_| {});
        checks.acknowledged(acknowledged.iter().copied());
        checks.findings()
    }

    #[test]
    fn in_order_and_complete_is_clean() {
        assert_eq!(after(&[(0, 1), (1, 1), (0, 2)], &[(0, 2), (1, 1)]), Findings::default());
    }

    #[test]
    fn a_first_copy_before_its_predecessor_is_one_violation() {
        let found = after(&[(0, 2), (0, 1), (0, 3)], &[(0, 3)]);
        assert_eq!(found, Findings { order_violations: 1, ..Findings::default() });
    }

    #[test]
    fn a_copy_out_of_place_is_a_copy_and_no_violation() {
        let found = after(&[(0, 1), (0, 2), (0, 1), (0, 2)], &[(0, 2)]);
        assert_eq!(found, Findings { copies: 2, ..Findings::default() });
    }

    #[test]
    fn a_message_that_never_came_is_lost_once_whatever_came_after_it() {
        let found = after(&[(0, 1), (0, 3)], &[(0, 3)]);
        assert_eq!(found, Findings { order_violations: 1, lost: 1, copies: 0 });
    }

    #[test]
    fn what_was_not_acknowledged_cannot_be_lost() {
        assert_eq!(after(&[(0, 1)], &[]), Findings::default());
    }
}
