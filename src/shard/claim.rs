//! The claim loop: everything that comes from the database rather than from memory.
//!
//! Invariants
//! - Log rows are fed in the order of positions, page after page of one snapshot.
//! - Nothing is claimed while memory is full; what was not read stays in the log, and the cursor before it.
//! - A parked lane is drained from its copies only after what was acknowledged of them is committed.
//! - After a take-over, another epoch or a lost fence, reading begins from what is persisted, and only when
//!   nothing of the time before is still in flight.

use std::cmp::Reverse;
use std::sync::Arc;

use super::Shard;
use super::aside::LOOK_MS;
use super::state::State;
use crate::batch::Rows;
use crate::plan::cadence::{Cadence, Found};
use crate::plan::lanes::{LaneIndex, LaneState, Source};
use crate::plan::ledger::TransactionIndex;
use crate::plan::mutants::{self, Mutant};
use crate::seam::publisher::Publisher;
use crate::seam::runtime::Runtime;
use crate::seam::store::{ClaimReply, ClaimRequest, HELD_MS, LOOK_BESIDE, ParkedLane, Store, StoreError};
use crate::time::Tick;

/// Copies of a parked lane fetched at a time.
pub(super) const DRAIN_ROWS_MAX: usize = 256;
/// Log rows fed during one flush, beyond which the claim waits for its answer.
const FED_MEANWHILE_MAX: usize = 65_536;
/// Scheduled messages released at a time.
const RELEASE_ROWS_MAX: usize = 1_000;
/// Wait before a failed call to the database is made again.
const RETRY_US: u64 = 200_000;

impl State {
    /// Takes in a page; answers what there was for this shard in it.
    pub(super) fn claimed(&mut self, reply: ClaimReply) -> Found {
        if !self.check_epoch(reply.epoch) {
            return Found::Own;
        }
        let mut found = Found::Nothing;
        self.numbers.shed();
        let rows = Arc::new(reply.rows);
        self.metrics.rows_claimed.add(rows.len() as u64);
        let batch = self.add_batch(rows.clone());
        let last = rows.len().checked_sub(1).filter(|_| reply.position.page.is_some());
        let last = last.and_then(|row| Some((rows.stream_id(row)?, rows.stream_seq[row])));
        if !rows.is_empty() || reply.position.page.is_none() {
            self.page_ends_in(last);
        }
        let mut reference = 0;
        let mut foreign = false;
        for log in &reply.logs {
            self.cursor_dirty = true;
            // A flush answered while the claim was under way could not be left out of it.
            let in_memory = || self.flushes.iter().find(|record| record.xid == log.xid).map(|record| record.number);
            if let Some(number) = log.own_flush.or_else(in_memory) {
                found = if found == Found::Nothing { Found::Own } else { found };
                self.claim_passed(number);
                reference += log.reference_count as usize;
                continue;
            }
            // An owner's row without references here is of partitions of other shards, whose streams are not remembered
            // here. One that is not owned may hold messages without a destination, of which it does not tell the
            // partitions: any remembered number may be old. It is nothing to publish, and no reason to look again soon.
            let has_references = log.reference_count > 0;
            if has_references {
                found = Found::Others;
            }
            if self.flush_in_flight && (has_references || !log.owned) {
                // Perhaps its own rows; its answer will tell.
                self.fed_meanwhile.push((log.xid, log.owned));
            } else {
                foreign |= !log.owned;
            }
            for row in reference..reference + log.reference_count as usize {
                let partition = rows.partition[row];
                let is_done = self.resolved_before(partition, log.xid)
                    || rows.stream_seq[row] <= LOOK_BESIDE && self.is_in_what_was_loaded(partition, log.xid);
                if !self.holds(partition) || is_done {
                    continue;
                }
                let transaction = self.ledger.open(log.xid, 1);
                self.count_references(batch, 1);
                self.feed(batch, row, row..row + 1, transaction);
            }
            reference += log.reference_count as usize;
        }
        say_missing(&rows);
        drop(rows);
        self.release_batch(batch);
        if foreign {
            self.numbers.forget_numbers();
        }
        self.reader = reply.position;
        if self.reader.page.is_none() {
            self.read_whole();
        }
        self.lanes.shed(self.caught_up);
        self.note_memory();
        found
    }

    /// Lanes that the database knows to be parked.
    pub(super) fn restore_parked(&mut self, all: Vec<ParkedLane>, now: Tick) {
        for parked in all {
            // On hold, in a hundred years: an operator lets it go on.
            let is_held = parked.due_in_ms >= HELD_MS / 2;
            let due = if is_held { Tick::NEVER } else { now.plus_ms(parked.due_in_ms.max(0) as u64) };
            let lane =
                self.lanes.restore_parked(parked.lane_id, parked.destination, parked.partition, parked.attempts, due);
            if !is_held {
                self.parked_due.push(Reverse((due, lane)));
            }
        }
        self.metrics.parked_lanes_now.set(self.lanes.parked_count() as u64);
    }

    /// Parked lanes that are due join the lanes to drain.
    fn parked_become_due(&mut self, now: Tick) {
        while let Some(Reverse((due, lane))) = self.parked_due.peek().copied() {
            if due > now {
                break;
            }
            self.parked_due.pop();
            let of = self.lanes.lane(lane);
            let is_due = of.state == LaneState::Parked && of.kept_beside && of.due <= now;
            if !is_due || self.is_leaving(of.partition) {
                continue;
            }
            if self.waits_for_destination(lane, now) {
                let later = now.plus_ms(LOOK_MS);
                self.lanes.postpone(lane, later);
                self.parked_due.push(Reverse((later, lane)));
                continue;
            }
            self.lanes.begin_drain(lane);
            self.drain.push_back(lane);
        }
        self.metrics.parked_lanes_now.set(self.lanes.parked_count() as u64);
    }

    /// Whether nothing of the lane may be drained: then it is parked, and not looked at again.
    fn stands_still(&mut self, lane: LaneIndex) -> bool {
        let held = self.lanes.lane(lane).held;
        if held {
            self.lanes.park_again(lane, Tick::NEVER);
        }
        held
    }

    pub(super) fn drained_rows(&mut self, lane: LaneIndex, rows: Rows) {
        if self.is_leaving(self.lanes.lane(lane).partition) || self.stands_still(lane) {
            return; // The next owner finds them.
        }
        if rows.is_empty() {
            if self.lanes.lane(lane).copying == 0 {
                self.settle.unpark(lane);
            } else {
                // Copies are on their way: look again after their commit.
                self.settle.drain_next(lane);
            }
            return;
        }
        let count = rows.len();
        let rows = Arc::new(rows);
        let batch = self.add_batch(rows.clone());
        self.count_references(batch, count as u32);
        let destination = self.lanes.lane(lane).destination;
        for row in 0..count {
            let source = Source { batch, reference: row as u32, transaction: TransactionIndex::NONE };
            if rows.is_missing(row) {
                self.bury_missing(&rows, row, destination, source);
            } else {
                self.lanes.admit_copy(lane, rows.stream_seq[row], source);
            }
        }
        say_missing(&rows);
        if self.lanes.lane(lane).len == 0 {
            // None of them is there any more: further when their dead letters are committed.
            self.settle.drain_next(lane);
        }
        drop(rows);
        self.release_batch(batch);
        self.note_memory();
    }
}

/// One line for all of an answer that cannot be published, and why.
fn say_missing(rows: &Rows) {
    if let Some((first, (name, why))) = (0..rows.len()).find_map(|row| Some((row, rows.unnamed(row)?))) {
        tracing::error!(
            messages = (first..rows.len()).filter(|row| rows.unnamed(*row).is_some()).count(),
            lane = %rows.lane_id[first],
            stream_seq = rows.stream_seq[first],
            "messages to destinations without a number here: dead letters; the first is to {name:.64?}: {why}"
        );
    }
    let is_missing =
        |row: &usize| rows.is_missing(*row) && rows.unnamed(*row).is_none() && rows.stream_seq[*row] > LOOK_BESIDE;
    let Some(first) = (0..rows.len()).find(is_missing) else { return };
    tracing::error!(
        messages = (first..rows.len()).filter(is_missing).count(),
        lane = %rows.lane_id[first],
        stream_seq = rows.stream_seq[first],
        "messages to be published are not stored any more: dead letters; this is the first"
    );
}

impl<R: Runtime, S: Store, P: Publisher> Shard<R, S, P> {
    /// Runs until the shard has ended.
    pub(super) async fn claim_loop(&self) {
        let (intervals, interval_us) = {
            let state = self.state.borrow();
            (state.settings.claim_intervals, state.settings.cursor_interval_ms * 1000)
        };
        let mut cadence = Cadence::new(intervals);
        let mut last_claim = Tick(0);
        let mut scheduled_at = Tick::NEVER;
        let mut scheduled_not_before = Tick(0);
        let mut not_before = Tick(0);
        loop {
            let now = self.runtime.now();
            cadence.listen(self.listening.get());
            // However often it was said: one look.
            if self.announced.take() {
                cadence.told(now);
            }
            if self.suspected.take() {
                cadence.hurry(now);
            }
            let mut next_look = Tick::NEVER;
            {
                let mut state = self.state.borrow_mut();
                if state.ended {
                    return;
                }
                state.recall_lanes();
                state.parked_become_due(now);
                if let Some(Reverse((due, _))) = state.parked_due.peek() {
                    next_look = next_look.min(*due);
                }
                next_look = next_look.min(state.look_for_room(now));
            }
            if not_before > now {
                self.wait_until(not_before).await;
                continue;
            }
            let (must_load, quiet, loaded, full) = {
                let state = self.state.borrow();
                (
                    state.must_load,
                    state.runs_in_flight == 0 && !state.settling,
                    state.loaded,
                    (state.rows_claimed_in_memory() + state.frozen_rows() >= state.settings.lane_rows_max
                        || state.fed_meanwhile.len() >= FED_MEANWHILE_MAX)
                        && !mutants::active(Mutant::ClaimWithoutBound),
                )
            };
            if must_load && quiet {
                if let Err(error) = self.load().await {
                    tracing::warn!(%error, "load: trying again");
                    not_before = self.runtime.now().plus_us(RETRY_US);
                }
                cadence.hurry(self.runtime.now());
                continue;
            }
            if !loaded {
                let at = if must_load { now.plus_ms(10) } else { Tick::NEVER };
                self.wait(&self.claim_signal, at).await;
                continue;
            }
            match self.add_partitions().await {
                Ok(false) => {}
                Ok(true) => {
                    cadence.hurry(self.runtime.now());
                    continue;
                }
                Err(error) => {
                    tracing::warn!(%error, "further partitions: trying again");
                    not_before = self.runtime.now().plus_us(RETRY_US);
                    continue;
                }
            }
            let drain = if full { None } else { self.state.borrow_mut().drain.pop_front() };
            if let Some(lane) = drain {
                let is_leaving = |state: &State| state.is_leaving(state.lanes.lane(lane).partition);
                if is_leaving(&self.state.borrow()) || self.state.borrow_mut().stands_still(lane) {
                    continue;
                }
                if self.wait_for_deletions(lane) {
                    continue;
                }
                self.drain_lane(lane).await;
                continue;
            }
            if scheduled_at <= now {
                let released = self.release_scheduled().await;
                let now = self.runtime.now();
                match released {
                    Ok(0) => scheduled_not_before = now.plus_us(RETRY_US), // Somebody else is at it.
                    Ok(_) => {}
                    Err(error) => {
                        tracing::warn!(%error, "scheduled messages: trying again");
                        scheduled_not_before = now.plus_us(RETRY_US);
                    }
                }
                // The claim that follows says when the next is due.
                scheduled_at = Tick::NEVER;
                cadence.hurry(now);
                continue;
            }
            next_look = next_look.min(scheduled_at);
            let due = {
                let state = self.state.borrow();
                if state.reader.page.is_some() || !state.caught_up || state.hurries_claim() {
                    now
                } else if state.waiting_rows > 0 {
                    last_claim.plus_us(1_000)
                } else if state.flushes.is_empty() && !state.has_left_to_claim() {
                    cadence.due()
                } else {
                    // Own flushes wait to be passed, so that the cursor can move, or to be read.
                    cadence.due().min(last_claim.plus_us(interval_us))
                }
            };
            if full || due > now {
                let at = if full { next_look } else { next_look.min(due) };
                self.wait(&self.claim_signal, at).await;
                continue;
            }
            last_claim = now;
            match self.claim().await {
                Ok((found, scheduled_in_ms)) => {
                    let now = self.runtime.now();
                    cadence.after(found, now);
                    scheduled_at = scheduled_in_ms
                        .map_or(Tick::NEVER, |ms| now.plus_ms(ms.max(0) as u64).max(scheduled_not_before));
                }
                Err(error) => {
                    tracing::warn!(%error, "claim: trying again");
                    not_before = self.runtime.now().plus_us(RETRY_US);
                }
            }
            self.publish_signal.raise();
            self.settle_signal.raise();
        }
    }

    /// Sleeps, but not beyond the shard's end.
    async fn wait_until(&self, at: Tick) {
        self.wait(&self.claim_signal, at).await;
    }

    async fn claim(&self) -> Result<(Found, Option<i64>), StoreError> {
        let (incarnation, shard, position, partitions, flushes, rows_max, streams_max, era) = {
            let state = self.state.borrow();
            let Some(incarnation) = state.incarnation else { return Ok((Found::Nothing, None)) };
            let flushes: Vec<i64> = state.flushes.iter().map(|record| record.number).collect();
            (
                incarnation,
                state.settings.shard,
                state.reader.clone(),
                state.held.clone(),
                flushes,
                state.settings.claim_rows_max,
                state.settings.claim_streams_max,
                state.era,
            )
        };
        let request = ClaimRequest {
            incarnation,
            shard,
            position: &position,
            partitions: &partitions,
            flushes_in_memory: &flushes,
            rows_max,
            streams_max,
        };
        let asked = self.runtime.now();
        let reply = self.within_deadline(self.store.claim_work(&request)).await?;
        let took_us = self.runtime.now().since_us(asked);
        let mut state = self.state.borrow_mut();
        state.metrics.claim_us.record_us(took_us);
        state.metrics.claims.add(1);
        if state.era != era {
            return Ok((Found::Own, None));
        }
        if reply.logs.is_empty() {
            state.metrics.claims_empty.add(1);
        }
        let scheduled = reply.scheduled_in_ms;
        Ok((state.claimed(reply), scheduled))
    }

    async fn load(&self) -> Result<(), StoreError> {
        let (incarnation, shard, partitions, era) = {
            let state = self.state.borrow();
            let Some(incarnation) = state.incarnation else { return Ok(()) };
            (incarnation, state.settings.shard, state.held.clone(), state.era)
        };
        let reply = self.within_deadline(self.store.load(incarnation, &partitions)).await?;
        let now = self.runtime.now();
        let mut state = self.state.borrow_mut();
        if state.era != era {
            return Ok(());
        }
        state.epoch = Some(reply.epoch);
        state.parked_as_of = partitions.iter().map(|partition| (*partition, reply.read_at.clone())).collect();
        state.loaded_from(reply.resolved);
        state.restore_parked(reply.parked, now);
        tracing::info!(shard, partitions = partitions.len(), read = %state.reader.read, "loaded");
        Ok(())
    }

    /// Whether copies of the lane are acknowledged and can still be read: the settlement is slower than its next
    /// try. Then it is drained after their commit.
    fn wait_for_deletions(&self, lane: LaneIndex) -> bool {
        let mut state = self.state.borrow_mut();
        let waits = state.lanes.lane(lane).deleting > 0;
        if waits {
            state.settle.drain_next(lane);
            self.settle_signal.raise();
        }
        waits
    }

    /// Fetches the next copies of a lane. One that cannot be drained waits by itself: the claim goes on.
    async fn drain_lane(&self, lane: LaneIndex) {
        let (lane_id, destination, partition, era) = {
            let mut state = self.state.borrow_mut();
            state.draining = Some(lane);
            let of = state.lanes.lane(lane);
            (of.lane_id, of.destination, of.partition, state.era)
        };
        let rows = self.within_deadline(self.store.claim_parked(lane_id, destination, partition, DRAIN_ROWS_MAX)).await;
        let mut state = self.state.borrow_mut();
        if state.era != era {
            return;
        }
        state.draining = None;
        match rows {
            Ok(rows) => state.drained_rows(lane, rows),
            Err(error) => {
                tracing::warn!(%error, %lane_id, "drain: trying again");
                let due = self.runtime.now().plus_us(RETRY_US);
                state.lanes.park_again(lane, due);
                state.parked_due.push(Reverse((due, lane)));
            }
        }
        drop(state);
        self.publish_signal.raise();
        self.settle_signal.raise();
    }

    async fn release_scheduled(&self) -> Result<usize, StoreError> {
        let (incarnation, partitions) = {
            let state = self.state.borrow();
            let Some(incarnation) = state.incarnation else { return Ok(0) };
            (incarnation, state.held.clone())
        };
        self.within_deadline(self.store.release_scheduled(incarnation, &partitions, RELEASE_ROWS_MAX)).await
    }
}
