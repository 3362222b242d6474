//! Outcomes that the database refuses: the one is found, and has an end of its own.
//!
//! Invariants
//! - What is refused is halved, in its order, until it stands alone; whatever else was with it is written.
//! - Each element has an end: without its text; a reference that cannot be kept beside the log is a dead letter; a
//!   head that cannot be buried is parked. What even that is refused for is **set aside**: its transaction stays open,
//!   so no cursor passes it, and the next owner of its partition publishes it again.
//! - A lane that is to be held and the dead letter it is held behind are one element. Where that is refused nothing of it
//!   is written: its message is set aside, or, if it is a copy beside the log, tried again.
//! - Behind a reference that was set aside its lane stands still: nothing of it is drained, and nothing is written
//!   beside the log that would be drained before it. Other lanes go on.
//! - What is set aside is bounded: at most `SET_ASIDE_TRANSACTIONS_MAX` transactions a shard stand in its ledger and its
//!   cursors. Beyond them the shard writes no cursor at all. It goes on publishing (reading less, or beginning anew,
//!   would stop every other lane for one, and find the same again), loses nothing, and pays for it with copies of what
//!   it published since, when somebody reads anew. The log is not truncated meanwhile, as for a single such message.
//! - A copy beside the log that can neither be published nor buried is tried once a retry cap: its lane rests between.

use std::cmp::Reverse;

use super::settle::{Held, SettleQueue};
use super::state::State;
use crate::error::{FailureReason, bounded_error_text};
use crate::limits::SET_ASIDE_TRANSACTIONS_MAX;
use crate::plan::lanes::{LaneIndex, LaneState, Source};
use crate::plan::ledger::TransactionIndex;
use crate::seam::store::{DeadLetter, Spill, StoreError};
use crate::time::Tick;

/// Begins the text that stands for one which the database does not take (its encoding may be a small one).
const TEXT_REFUSED: &str = "the text was refused by the database: ";

/// Whether an error is about the elements and not about the schema as a whole, which somebody has to repair first.
pub(super) fn concerns_elements(error: &StoreError) -> bool {
    matches!(error, StoreError::Refused { sqlstate, .. } if !sqlstate.starts_with("42"))
}

impl SettleQueue {
    /// Elements that are written.
    pub(super) fn len(&self) -> usize {
        self.park.len()
            + self.held.len()
            + self.spill.len()
            + self.drained.len()
            + self.dead.len()
            + self.missing.len()
            + self.unpark.len()
    }

    /// Takes it apart. The first half holds what the second depends on: parked rows before the copies behind them,
    /// all of a lane before its unpark.
    pub(super) fn halves(mut self) -> (Self, Self) {
        fn head<T>(from: &mut Vec<T>, left: &mut usize) -> Vec<T> {
            let count = from.len().min(*left);
            *left -= count;
            from.drain(..count).collect()
        }
        let mut left = self.len() / 2;
        let first = Self {
            park: head(&mut self.park, &mut left),
            held: head(&mut self.held, &mut left),
            spill: head(&mut self.spill, &mut left),
            drained: head(&mut self.drained, &mut left),
            dead: head(&mut self.dead, &mut left),
            missing: head(&mut self.missing, &mut left),
            unpark: head(&mut self.unpark, &mut left),
            drain_next: Vec::new(),
        };
        (first, self)
    }

    /// What can be written instead of an element that was refused alone, if there is something.
    fn instead(&mut self, error: &StoreError) -> Option<Self> {
        let mut instead = Self { drain_next: std::mem::take(&mut self.drain_next), ..Self::default() };
        if let Some(mut park) = self.park.pop_if(|park| may_lose_text(&park.error)) {
            (park.error, park.error_cut) = text_refused(error);
            instead.park.push(park);
        } else if let Some(mut held) = self.held.pop_if(|held| may_lose_text(&held.dead.error)) {
            (held.dead.error, held.dead.error_cut) = text_refused(error);
            (held.park.error, held.park.error_cut) = (held.dead.error.clone(), held.dead.error_cut);
            instead.held.push(held);
        } else if let Some((mut dead, lane)) = self.dead.pop_if(|(dead, _)| may_lose_text(&dead.error)) {
            (dead.error, dead.error_cut) = text_refused(error);
            instead.dead.push((dead, lane));
        } else if let Some((mut dead, lane, source)) = self.missing.pop_if(|(dead, ..)| may_lose_text(&dead.error)) {
            (dead.error, dead.error_cut) = text_refused(error);
            instead.missing.push((dead, lane, source));
        } else if let Some((spill, lane, source)) = self.spill.pop() {
            instead.missing.push((unkept(spill, error), Some(lane), source));
        } else {
            self.drain_next = instead.drain_next;
            return None;
        }
        Some(instead)
    }
}

fn may_lose_text(text: &str) -> bool {
    !text.is_empty() && !text.starts_with(TEXT_REFUSED)
}

/// Plain ASCII: the code only.
fn text_refused(error: &StoreError) -> (String, bool) {
    let code = if let StoreError::Refused { sqlstate, .. } = error { sqlstate.as_str() } else { "" };
    (format!("{TEXT_REFUSED}{code}"), true)
}

/// The dead letter of a reference that cannot be kept.
fn unkept(spill: Spill, error: &StoreError) -> DeadLetter {
    let (error, error_cut) = bounded_error_text(&format!("the reference could not be kept beside the log: {error}"));
    DeadLetter {
        lane_id: spill.lane_id,
        destination: spill.destination,
        unnamed: None,
        partition: spill.partition,
        stream_seq: spill.stream_seq,
        version: spill.version,
        attempts: 0,
        reason: FailureReason::EventStorageFailure as i16,
        error,
        error_cut,
    }
}

impl State {
    /// One element, refused alone: what to write instead, if there is something; else its end.
    pub(super) fn refused_alone(
        &mut self,
        mut part: SettleQueue,
        error: &StoreError,
        now: Tick,
    ) -> Option<SettleQueue> {
        if let Some(instead) = part.instead(error) {
            tracing::error!(%error, "settle: one outcome was refused by the database: trying it in another form");
            return Some(instead);
        }
        self.metrics.settles_refused.add(1);
        let later = now.plus_ms(self.settings.retry_cap_ms);
        let end = |lane: uuid::Uuid, end: &str| {
            tracing::error!(%error, %lane, "settle: one outcome was refused by the database for good: {end}");
        };
        for park in part.park {
            // The copies of what waits in the lane bring its row along.
            end(park.lane_id, "the lane's next try and its attempts are known to this process only");
        }
        for Held { dead, lane, source, .. } in part.held {
            if source.transaction == TransactionIndex::NONE {
                end(dead.lane_id, "the copy stays beside the log, and is tried again");
                self.lanes.postpone(lane, later);
                self.parked_due.push(Reverse((later, lane)));
                self.resolve(source);
                continue;
            }
            end(dead.lane_id, "the message is set aside: the next owner of its partition publishes it");
            self.lanes.hold(lane);
            self.set_aside(source);
        }
        for (drained, source) in part.drained {
            end(
                drained.lane_id,
                "the copy stays beside the log; its lane stands still, its next owner publishes it again",
            );
            if let Some(lane) = self.lanes.find(drained.lane_id, drained.destination) {
                self.lanes.hold(lane);
            }
            self.resolve(source);
        }
        for (dead, lane) in part.dead {
            end(dead.lane_id, "the message is parked instead, and tried again");
            // A head that cannot be buried waits as one that failed does.
            let attempts = self.lanes.lane(lane).attempts;
            self.park_lane(lane, attempts, later);
        }
        for (dead, lane, source) in part.missing {
            if source.transaction == TransactionIndex::NONE {
                end(dead.lane_id, "the copy stays beside the log, and is tried again");
                if let Some(lane) = self.lanes.find(dead.lane_id, dead.destination) {
                    self.lanes.rest(lane, later);
                }
                self.resolve(source);
                continue;
            }
            end(dead.lane_id, "the message is set aside: the next owner of its partition publishes it");
            if let Some(lane) = lane {
                self.lanes.hold(lane);
            }
            self.set_aside(source);
        }
        for lane in part.unpark {
            end(self.lanes.lane(lane).lane_id, "the lane stays parked, and is looked at again");
            self.lanes.park_again(lane, later);
            self.parked_due.push(Reverse((later, lane)));
        }
        self.drain_further(part.drain_next, now);
        None
    }

    /// Leaves its transaction open for good, and lets its memory go.
    pub(super) fn set_aside(&mut self, source: Source) {
        let was_full = self.ledger.is_full();
        self.ledger.set_aside(source.transaction, SET_ASIDE_TRANSACTIONS_MAX);
        if self.ledger.is_full() && !was_full {
            tracing::error!(
                shard = self.settings.shard,
                transactions = SET_ASIDE_TRANSACTIONS_MAX,
                "too much is set aside that the database refuses: no cursor is written any more, and what is published \
                 from now on goes out again when this process is restarted or its partitions change; repair what is \
                 refused (see the errors before), then restart it"
            );
        }
        self.set_aside_count += 1;
        self.metrics.references_set_aside_now.set(self.set_aside_count);
        self.release_batch(source.batch);
    }

    /// Lanes to drain further: at once, unless the lane is to rest.
    pub(super) fn drain_further(&mut self, lanes: Vec<LaneIndex>, now: Tick) {
        for lane in lanes {
            let (state, due) = (self.lanes.lane(lane).state, self.lanes.lane(lane).rests_until);
            if state == LaneState::Idle && due > now {
                self.lanes.park_again(lane, due);
                self.parked_due.push(Reverse((due, lane)));
            } else {
                self.drain.push_back(lane);
            }
        }
        self.metrics.parked_lanes_now.set(self.lanes.parked_count() as u64);
    }

    /// References of lanes that stand still are not written beside the log.
    pub(super) fn set_aside_held(&mut self, part: &mut SettleQueue) {
        let mut aside = Vec::new();
        part.spill.retain(|(_, lane, source)| {
            let held = self.lanes.lane(*lane).held;
            if held {
                aside.push(*source);
            }
            !held
        });
        aside.into_iter().for_each(|source| self.set_aside(source));
    }

    /// The lane waits until `due`; what it has in memory goes beside the log.
    pub(super) fn park_lane(&mut self, lane: LaneIndex, attempts: i32, due: Tick) {
        let mut beside = Vec::new();
        self.lanes.park(lane, attempts, due, |stream_seq, source| beside.push((stream_seq, source)));
        for (stream_seq, source) in beside {
            self.spill_parked(lane, stream_seq, source);
        }
        self.parked_due.push(Reverse((due, lane)));
        self.metrics.parked_lanes_now.set(self.lanes.parked_count() as u64);
    }

    /// A message that leaves the memory of a lane that was just parked: it is copied beside the log, if it is not
    /// there already.
    pub(super) fn spill_parked(&mut self, lane: LaneIndex, stream_seq: i64, source: Source) {
        if source.transaction == TransactionIndex::NONE {
            self.resolve(source);
            return;
        }
        let of = *self.lanes.lane(lane);
        let version = self.version_of(source);
        self.metrics.spilled_rows.add(1);
        let (lane_id, destination, partition) = (of.lane_id, of.destination, of.partition);
        self.settle.spill(Spill { lane_id, destination, partition, stream_seq, version }, lane, source);
    }
}
