//! The settle loop: outcomes and cursors go to the database, a transaction at a time.
//!
//! Invariants
//! - A message is resolved (for the cursor, and for its memory) only after the transaction that copied it
//!   beside the log, or buried it, has committed.
//! - A lane is held for an operator in the transaction of the dead letter that names it, however much is cut or halved.
//! - What is sent is idempotent: after a lost connection it is sent again as it was.
//! - One outcome that the database refuses holds up no other (see `refused`).
//! - The cursor lists every transaction with an open message; it is written at most every
//!   `cursor.interval_ms`, and only if something was resolved or passed since the last one.

use super::Shard;
use super::refused::concerns_elements;
use super::state::State;
use crate::batch::DestinationId;
use crate::ids::Incarnation;
use crate::plan::lanes::{LaneIndex, Source};
use crate::plan::ledger::TransactionIndex;
use crate::seam::publisher::Publisher;
use crate::seam::runtime::Runtime;
use crate::seam::store::{DeadLetter, Drained, Park, SettleReply, SettleRequest, Spill, Store, StoreError};
use crate::time::Tick;

/// Elements of one kind in one transaction: bounds its size and its time.
const KIND_MAX: usize = 1_000;

/// A lane that waits behind its dead head until an operator comes, and that head: neither is written without the other.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) park: Park,
    pub(super) dead: DeadLetter,
    pub(super) lane: LaneIndex,
    pub(super) source: Source,
}

/// What waits for the next settlement.
#[derive(Debug, Default)]
pub(super) struct SettleQueue {
    pub(super) park: Vec<Park>,
    pub(super) held: Vec<Held>,
    pub(super) spill: Vec<(Spill, LaneIndex, Source)>,
    pub(super) drained: Vec<(Drained, Source)>,
    pub(super) dead: Vec<(DeadLetter, LaneIndex)>,
    /// Dead letters that are in no lane: their messages are not stored any more, or could not be kept beside the log
    /// (then with the lane that counts their copy as under way).
    pub(super) missing: Vec<(DeadLetter, Option<LaneIndex>, Source)>,
    pub(super) unpark: Vec<LaneIndex>,
    /// Lanes to drain further once what was queued before is committed.
    pub(super) drain_next: Vec<LaneIndex>,
}

impl SettleQueue {
    pub(super) fn park(&mut self, park: Park) {
        self.park.push(park);
    }

    pub(super) fn spill(&mut self, spill: Spill, lane: LaneIndex, source: Source) {
        self.spill.push((spill, lane, source));
    }

    pub(super) fn drained(&mut self, drained: Drained, source: Source) {
        self.drained.push((drained, source));
    }

    pub(super) fn bury(&mut self, dead: DeadLetter, lane: LaneIndex) {
        self.dead.push((dead, lane));
    }

    pub(super) fn bury_missing(&mut self, dead: DeadLetter, source: Source) {
        self.missing.push((dead, None, source));
    }

    pub(super) fn unpark(&mut self, lane: LaneIndex) {
        self.unpark.push(lane);
    }

    pub(super) fn drain_next(&mut self, lane: LaneIndex) {
        self.drain_next.push(lane);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.park.is_empty()
            && self.held.is_empty()
            && self.spill.is_empty()
            && self.drained.is_empty()
            && self.dead.is_empty()
            && self.missing.is_empty()
            && self.unpark.is_empty()
            && self.drain_next.is_empty()
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// References that are in no lane: on their way beside the log, from there, or to the dead letters.
    pub(super) fn outside_lanes(&self) -> usize {
        self.held.len() + self.spill.len() + self.missing.len() + self.drained.len()
    }

    /// Outcomes of whole lanes.
    pub(super) fn of_lanes(&self) -> usize {
        self.park.len() + self.held.len() + self.dead.len() + self.unpark.len() + self.drain_next.len()
    }

    /// Takes at most [`KIND_MAX`] of each kind, oldest first; dead letters that are in no lane are of one kind with those
    /// that hold theirs. What depends on an earlier element of another kind (a held lane on that it was parked before,
    /// copies beside the log on their parked row, an unpark on its drained copies) waits while that kind is cut: copies
    /// without their parked row would be forgotten by the next owner.
    fn take(&mut self) -> Self {
        fn some<T>(from: &mut Vec<T>, max: usize) -> Vec<T> {
            let rest = from.split_off(from.len().min(max));
            std::mem::replace(from, rest)
        }
        fn head<T>(from: &mut Vec<T>) -> Vec<T> {
            some(from, KIND_MAX)
        }
        let mut taken = Self {
            park: head(&mut self.park),
            drained: head(&mut self.drained),
            dead: head(&mut self.dead),
            ..Self::default()
        };
        if self.park.is_empty() {
            taken.held = head(&mut self.held);
        }
        if self.park.is_empty() && self.held.is_empty() {
            taken.spill = head(&mut self.spill);
        }
        taken.missing = some(&mut self.missing, KIND_MAX - taken.held.len());
        // Copies of a long lane may be many: the other lanes do not wait for them, nor it for its last.
        let nothing_cut = self.park.is_empty() && self.held.is_empty() && self.drained.is_empty();
        if nothing_cut && self.dead.is_empty() && self.missing.is_empty() {
            taken.unpark = head(&mut self.unpark);
            taken.drain_next = std::mem::take(&mut self.drain_next);
        }
        taken
    }
}

impl State {
    fn request(&self, taken: &SettleQueue, with_cursor: bool) -> SettleRequest {
        SettleRequest {
            shard: self.settings.shard,
            ownership: self.ownership,
            epoch: self.epoch,
            cursor: if with_cursor { self.ledger.cursor(&self.reader.read) } else { None },
            park: taken.park.iter().chain(taken.held.iter().map(|held| &held.park)).cloned().collect(),
            spill: taken.spill.iter().map(|(spill, ..)| *spill).collect(),
            drained: taken.drained.iter().map(|(drained, _)| *drained).collect(),
            dead: (taken.dead.iter().map(|(dead, _)| dead.clone()))
                .chain(taken.missing.iter().map(|(dead, ..)| dead.clone()))
                .chain(taken.held.iter().map(|held| held.dead.clone()))
                .collect(),
            unpark: taken.unpark.iter().map(|lane| self.key_of(*lane)).collect(),
        }
    }

    fn key_of(&self, lane: LaneIndex) -> (uuid::Uuid, DestinationId, u32) {
        let lane = self.lanes.lane(lane);
        (lane.lane_id, lane.destination, lane.partition)
    }

    /// What the commit makes true.
    fn settled(&mut self, taken: SettleQueue, unparked: &[bool], now: Tick) {
        for (_, lane, source) in taken.spill {
            self.lanes.copied(lane, 1);
            self.resolve(source);
        }
        for (drained, source) in taken.drained {
            self.lanes.deleted(drained.lane_id, drained.destination);
            self.resolve(source);
        }
        for (dead, lane) in taken.dead {
            self.metrics.dead_letters.add(1);
            let source = self.lanes.buried(lane);
            self.resolve(source);
            self.lane_goes_on(lane);
            if self.lanes.lane(lane).kept_beside {
                tracing::debug!(lane = %dead.lane_id, "dead letter from a parked lane");
            }
        }
        for Held { lane, source, .. } in taken.held {
            self.metrics.dead_letters.add(1);
            if source.transaction != TransactionIndex::NONE {
                self.lanes.copied(lane, 1);
            }
            self.resolve(source);
        }
        for (_, lane, source) in taken.missing {
            self.metrics.dead_letters.add(1);
            if let Some(lane) = lane {
                self.lanes.copied(lane, 1);
            }
            self.resolve(source);
        }
        for (index, lane) in taken.unpark.into_iter().enumerate() {
            if unparked.get(index).copied().unwrap_or(false) && self.lanes.lane(lane).copying == 0 {
                self.lanes.unparked(lane);
            } else if unparked.get(index).copied().unwrap_or(false) {
                // Something was admitted meanwhile and is on its way beside the log: the row must stand again.
                self.park_row_again(lane);
                self.lanes.park_again(lane, now);
                self.parked_due.push(std::cmp::Reverse((now, lane)));
            } else {
                self.lanes.park_again(lane, now);
                self.parked_due.push(std::cmp::Reverse((now, lane)));
            }
        }
        self.drain_further(taken.drain_next, now);
    }

    fn park_row_again(&mut self, lane: LaneIndex) {
        let of = *self.lanes.lane(lane);
        self.settle.park(Park {
            lane_id: of.lane_id,
            destination: of.destination,
            partition: of.partition,
            stream_seq: of.last_seq,
            attempts: 0,
            reason: 0,
            error: String::new(),
            error_cut: false,
            due_in_ms: 0,
        });
    }

    /// A lane has nothing in flight: it is ready, idle, or, kept beside the log and empty, to be drained.
    pub(super) fn lane_goes_on(&mut self, lane: LaneIndex) {
        let of = *self.lanes.lane(lane);
        if self.is_to_make_room(&of) {
            return self.put_long_lane_beside(lane);
        }
        self.lanes.release(lane);
        if of.kept_beside && of.len == 0 {
            self.settle.drain_next(lane);
        }
    }
}

impl<R: Runtime, S: Store, P: Publisher> Shard<R, S, P> {
    /// Runs until the shard has ended and everything is written, or cannot be.
    pub(super) async fn settle_loop(&self) {
        let interval_us = self.state.borrow().settings.cursor_interval_ms * 1000;
        let mut cursor_due = self.runtime.now();
        loop {
            let now = self.runtime.now();
            let (work, cursor, ended) = {
                let state = self.state.borrow();
                let usable = state.loaded;
                (usable && !state.settle.is_empty(), state.has_cursor_to_write(), state.ended)
            };
            let cursor_now = cursor && (cursor_due <= now || ended);
            if !work && !cursor_now {
                if ended {
                    return;
                }
                let at = if cursor { cursor_due } else { Tick::NEVER };
                self.wait(&self.settle_signal, at).await;
                continue;
            }
            let (incarnation, taken, era) = {
                let mut state = self.state.borrow_mut();
                let Some(incarnation) = state.incarnation else { return };
                let taken = state.settle.take();
                if cursor_now {
                    state.cursor_dirty = false;
                    state.metrics.cursors.add(1);
                    cursor_due = now.plus_us(interval_us);
                }
                state.settling = true;
                (incarnation, taken, state.era)
            };
            let done = self.settle_all(incarnation, taken, cursor_now, era).await;
            self.state.borrow_mut().settling = false;
            if !done {
                return;
            }
            self.publish_signal.raise();
            self.claim_signal.raise();
            self.flush_signal.raise();
        }
    }

    /// Writes what was taken, whole, or in parts where the database refuses something of it. False if the shard ends.
    async fn settle_all(&self, incarnation: Incarnation, taken: SettleQueue, with_cursor: bool, era: u32) -> bool {
        let mut parts = vec![taken];
        let mut with_cursor = with_cursor;
        while let Some(mut part) = parts.pop() {
            let request = {
                let mut state = self.state.borrow_mut();
                if state.era != era {
                    break;
                }
                state.set_aside_held(&mut part);
                let request = state.request(&part, std::mem::take(&mut with_cursor));
                if request.only_cursor() && request.cursor.is_none() {
                    // Only lanes to drain further.
                    state.settled(part, &[], self.runtime.now());
                    continue;
                }
                state.metrics.settles.add(1);
                request
            };
            let reply = self.settle_until_answered(incarnation, &request, era).await;
            let mut state = self.state.borrow_mut();
            match reply {
                Some(Ok(SettleReply::Settled { epoch, unparked })) => {
                    // In another life of the server nothing was written, and all of it is dropped.
                    if state.era == era && state.check_epoch(epoch) {
                        let now = self.runtime.now();
                        state.settled(part, &unparked, now);
                    }
                }
                Some(Ok(SettleReply::Fenced)) => {
                    state.metrics.fenced.add(1);
                    if state.era == era {
                        tracing::error!(
                            shard = state.settings.shard,
                            "fenced: another instance has taken over; standing down"
                        );
                        self.lease.note_fenced();
                        state.end_regroup();
                        state.held.clear();
                        state.fences.iter_mut().for_each(|fence| *fence = 0);
                        state.reset();
                    }
                }
                Some(Err(error)) if state.era == era => {
                    // A cursor comes again by itself, in its time.
                    state.cursor_dirty |= request.cursor.is_some();
                    if request.only_cursor() {
                        state.metrics.settles_refused.add(1);
                        tracing::error!(%error, "settle: the cursor was refused by the database");
                        let now = self.runtime.now();
                        state.drain_further(part.drain_next, now);
                    } else if request.cursor.is_some() {
                        parts.push(part);
                    } else if part.len() > 1 {
                        let (first, second) = part.halves();
                        parts.extend([second, first]);
                    } else {
                        parts.extend(state.refused_alone(part, &error, self.runtime.now()));
                    }
                }
                Some(Err(_)) => {}
                None => {
                    if state.era == era && state.stopping.is_some() {
                        return false;
                    }
                }
            }
        }
        true
    }

    /// Sends until there is an answer, which a refusal of an element is as well; `None` if nobody waits for it any
    /// more.
    async fn settle_until_answered(
        &self,
        incarnation: Incarnation,
        request: &SettleRequest,
        era: u32,
    ) -> Option<Result<SettleReply, StoreError>> {
        let mut wait_us = 5_000;
        loop {
            let error = match self.within_deadline(self.store.settle(incarnation, request)).await {
                Err(error) if !concerns_elements(&error) => error,
                answer => return Some(answer),
            };
            let (changed, stop_at) = {
                let state = self.state.borrow();
                (state.era != era, state.stopping)
            };
            let until = self.runtime.now().plus_us(wait_us);
            if changed || stop_at.is_some_and(|at| at <= until) {
                return None;
            }
            tracing::warn!(%error, "settle: trying again");
            self.runtime.sleep_until(until).await;
            wait_us = (wait_us * 2).min(1_000_000);
        }
    }
}
