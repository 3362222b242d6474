//! The flush loop: new messages of all callers become one transaction.
//!
//! Invariants
//! - At most one flush is in flight, so remembered numbers are those of the last committed one.
//! - A unit of work is stored whole or not at all. One whose stream is locked elsewhere is held back, and
//!   everything that comes after it on any of its streams queues behind it.
//! - A caller is answered after the commit, or with an error when nothing was stored.
//! - What the database refuses for good is found and answered, and who expects another version than there is
//!   (`expected`); their neighbours in the flush are stored.
//! - A flush of which it is not known what it stored leaves no remembered number behind, and its rows to the claim.
//! - After a connection lost at COMMIT the flush is looked up under its own locks, never sent blindly.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use futures_util::FutureExt;
use uuid::Uuid;

use super::Shard;
use super::duplicates::{Duplicates, ids_without_stream};
use super::expected::{self, Expectations, Judged};
use super::numbering::FlushColumns;
use super::pending::{Pending, split_by_streams};
use super::starved::Starved;
use crate::batch::Rows;
use crate::error::Error;
use crate::plan::gate::{Close, Gate, Waiting};
use crate::plan::mutants::{self, Mutant};
use crate::plan::snapshot::Snapshot;
use crate::seam::publisher::Publisher;
use crate::seam::runtime::Runtime;
use crate::seam::store::{NUMBERS_UNKNOWN, Origin, Store, StoreError, StoreReply, StoreRequest, Stored};
use crate::time::Tick;

/// First and longest wait before what was locked elsewhere is tried again.
const BUSY_RETRY_US: (u64, u64) = (2_000, 100_000);
/// First and longest wait before a flush that the database could not do is tried again.
const TRANSIENT_RETRY_US: (u64, u64) = (5_000, 1_000_000);

enum Outcome {
    Stored,
    Busy(Vec<Uuid>),
    Refused(StoreError),
    /// The schema is not this program's any more: for everybody.
    StoodDown(StoreError),
    /// Messages without stream have ids of others.
    Duplicates(Duplicates),
    /// Callers expect other versions of these streams.
    Conflict(Vec<(Uuid, i64)>),
    /// Nothing was sent: what is remembered has to be looked up first.
    LookFirst,
    Again(StoreError),
    /// It was looked up, and numbers, or all of it, could not be told.
    Unknown(Unknown),
}

/// What a look-up could not tell.
enum Unknown {
    /// The numbers; the messages are stored, and rotation has shown that the claim has been there.
    Numbers,
    /// Whether it was stored: the shard ends before anybody could say.
    Outcome(StoreError),
}

impl Unknown {
    fn error(&self) -> Error {
        match self {
            Self::Numbers => Error::StoredUnnumbered { reason: "the connection was lost at the commit".to_owned() },
            Self::Outcome(error) => Error::OutcomeUnknown { reason: error.to_string() },
        }
    }
}

impl<R: Runtime, S: Store, P: Publisher> Shard<R, S, P> {
    /// Runs until the shard has ended. Answers how many rows of its last flush were refused because of that: what it could
    /// not store comes back to be tried again, and it is too late.
    pub(super) async fn flush_loop(&self) -> usize {
        let gate = {
            let state = self.state.borrow();
            Gate::new(state.settings.flush_rows_max, state.settings.flush_bytes_max, state.settings.flush_age_us_max)
        };
        let mut columns = FlushColumns::default();
        let mut expectations = Expectations::default();
        let mut starved = Starved::new(self.call_timeout_us / 1_000);
        let mut units_max = usize::MAX;
        let mut busy_wait_us = BUSY_RETRY_US.0;
        let mut recall_at: Option<Tick> = None;
        let mut answered_at = Tick(0);
        let mut expected_rows = usize::MAX;
        let mut transient_wait_us = TRANSIENT_RETRY_US.0;
        loop {
            let now = self.runtime.now();
            if let Some(error) = self.lease.stood_down() {
                self.refuse_pending(&|| error.clone().into());
            }
            if recall_at.is_some_and(|at| at <= now) {
                recall_at = None;
                self.state.borrow_mut().recall_held_back();
            }
            let (close, stopping, ended) = {
                let state = self.state.borrow();
                let waiting = state.pending.front().zip(state.pending.back()).map(|(oldest, newest)| Waiting {
                    oldest: oldest.arrived,
                    newest: newest.arrived,
                    answered: answered_at,
                    expected_rows,
                });
                let ready = state.incarnation.is_some();
                let close = if ready {
                    gate.close(state.pending_rows, state.pending_bytes, waiting, now)
                } else {
                    Close::Empty
                };
                (close, state.stopping.is_some(), state.ended)
            };
            if ended {
                return self.refuse_pending(&|| Error::ShutDown);
            }
            let wake_at = match close {
                Close::Now => None,
                Close::At(_) if stopping => None,
                Close::At(at) => Some(recall_at.map_or(at, |recall| recall.min(at))),
                Close::Empty => Some(recall_at.unwrap_or(Tick::NEVER)),
            };
            if let Some(at) = wake_at {
                self.wait(&self.flush_signal, at).await;
                continue;
            }
            let (taken, refused) = self.state.borrow_mut().collect(units_max);
            self.answered(refused);
            if taken.is_empty() {
                continue;
            }
            let units: usize = taken.iter().map(Pending::unit_count).sum();
            let rows: usize = taken.iter().map(|pending| pending.rows.len()).sum();
            let (taken, outcome) = self.flush(taken, &mut columns, &mut expectations, &mut starved).await;
            answered_at = self.runtime.now();
            expected_rows = rows + self.state.borrow().pending_rows;
            match outcome {
                Outcome::Stored => {
                    busy_wait_us = BUSY_RETRY_US.0;
                    transient_wait_us = TRANSIENT_RETRY_US.0;
                    units_max = units_max.saturating_mul(2);
                }
                Outcome::Busy(streams) => {
                    let mut state = self.state.borrow_mut();
                    state.metrics.units_busy.add(1);
                    let mut held: HashSet<Uuid> = streams.into_iter().collect();
                    let mut free = VecDeque::with_capacity(taken.len());
                    for pending in taken {
                        let (now, later) = split_by_streams(pending, &mut held);
                        free.extend(now);
                        state.held_back.extend(later);
                    }
                    while let Some(pending) = free.pop_back() {
                        state.put_first(pending);
                    }
                    if recall_at.is_none() {
                        recall_at = Some(self.runtime.now().plus_us(busy_wait_us));
                        busy_wait_us = (busy_wait_us * 2).min(BUSY_RETRY_US.1);
                    }
                }
                Outcome::Refused(error) if units <= 1 => {
                    tracing::error!(%error, "a unit of work was refused by the database");
                    for pending in taken {
                        self.answered(pending.answer(Some(&|| Error::Store(error.clone()))));
                    }
                }
                Outcome::StoodDown(error) => {
                    for pending in taken {
                        self.answered(pending.answer(Some(&|| error.clone().into())));
                    }
                }
                Outcome::Duplicates(duplicates) => {
                    let (refused, rest) = duplicates.part(taken);
                    self.put_all_first(rest);
                    for (pending, of_unit) in refused {
                        let error = |unit: usize| Error::DuplicateMessage { message_id: of_unit[unit] };
                        self.answered(pending.answer_by_unit(Some(&error)));
                    }
                }
                Outcome::LookFirst => {}
                Outcome::Conflict(found) => {
                    let mut state = self.state.borrow_mut();
                    found.iter().for_each(|(stream, _)| state.numbers.forget(*stream));
                    drop(state);
                    self.answer_judged(expected::refuse(taken, &found));
                }
                Outcome::Unknown(unknown) => {
                    for pending in taken {
                        self.answered(pending.answer(Some(&|| unknown.error())));
                    }
                }
                Outcome::Refused(_) => {
                    // One bad row must not cost its neighbours: halves, until it stands alone.
                    units_max = (units / 2).max(1);
                    self.put_all_first(taken);
                }
                Outcome::Again(error) => {
                    self.state.borrow().metrics.flush_retries.add(1);
                    tracing::warn!(%error, "flush: trying again");
                    self.put_all_first(taken);
                    let stop_at = self.state.borrow().stopping;
                    let until = self.runtime.now().plus_us(transient_wait_us);
                    if stop_at.is_some_and(|at| at <= until) {
                        self.refuse_pending(&|| Error::Store(error.clone()));
                        continue;
                    }
                    self.runtime.sleep_until(until).await;
                    transient_wait_us = (transient_wait_us * 2).min(TRANSIENT_RETRY_US.1);
                }
            }
        }
    }

    fn put_all_first(&self, taken: Vec<Pending>) {
        let mut state = self.state.borrow_mut();
        for pending in taken.into_iter().rev() {
            state.put_first(pending);
        }
    }

    fn answer_judged(&self, judged: Judged) {
        self.put_all_first(judged.again);
        for (pending, of_unit) in judged.refused {
            self.answered(pending.answer_by_unit(Some(&|unit: usize| expected::error(of_unit[unit]))));
        }
    }

    /// Answers everything that waits with an error: the shard ends. Answers how many rows that were.
    pub(super) fn refuse_pending(&self, error: &dyn Fn() -> Error) -> usize {
        let all: Vec<Pending> = {
            let mut state = self.state.borrow_mut();
            state.pending_rows = 0;
            state.pending_bytes = 0;
            let held: Vec<Pending> = state.held_back.drain(..).collect();
            held.into_iter().chain(state.pending.drain(..)).collect()
        };
        let rows = all.into_iter().map(|pending| pending.answer(Some(error))).sum();
        self.answered(rows);
        rows
    }

    /// One flush, from numbering to its answer. On success the callers have been answered.
    async fn flush(
        &self,
        mut taken: Vec<Pending>,
        columns: &mut FlushColumns,
        expectations: &mut Expectations,
        starved: &mut Starved,
    ) -> (Vec<Pending>, Outcome) {
        let asides = expectations.part(&mut self.state.borrow_mut(), &mut taken);
        if taken.is_empty() {
            let judged = expected::judge(&mut self.state.borrow_mut(), columns, asides, None);
            self.answer_judged(judged);
            return (taken, Outcome::LookFirst);
        }
        let (origin, ownership, read, epoch, held, complete, generation, era) = {
            let mut guard = self.state.borrow_mut();
            let state = &mut *guard;
            let Some(incarnation) = state.incarnation else {
                drop(guard);
                self.put_all_first(asides.into_iter().map(expected::Aside::give_back).collect());
                return (taken, Outcome::Again(StoreError::ConnectionLost("not registered yet".into())));
            };
            columns.number(state, &mut taken, expectations);
            state.flush_number += 1;
            let number = state.flush_number;
            state.flush_in_flight = true;
            state.metrics.flushes.add(1);
            (
                Origin { incarnation, shard: state.settings.shard, flush_number: number },
                state.ownership,
                if state.loaded { state.reader.read.clone() } else { Snapshot::empty() },
                state.epoch,
                state.held.clone(),
                state.complete_in_memory(),
                state.numbers.generation(),
                state.era,
            )
        };
        let batches: Vec<Arc<Rows>> = taken.iter().map(|pending| pending.rows.clone()).collect();
        let sent = self.runtime.now();
        let patient = starved.of(&columns.stream_id, sent);
        let request = StoreRequest {
            origin,
            ownership,
            read: &read,
            epoch,
            batches: &batches,
            row_stream: &columns.row_stream,
            stream_id: &columns.stream_id,
            stream_partition: &columns.stream_partition,
            stream_known: &columns.stream_known,
            stream_last_seq: &columns.stream_last_seq,
            stream_last_version: &columns.stream_last_version,
            partitions: &columns.partitions,
            held: &held,
            patient: &patient,
            patience_ms: starved.patience_ms(),
        };
        let mut answer = self.within_deadline(self.store.store_shard_messages(&request)).await;
        if !patient.is_empty() {
            let in_vain = matches!(&answer, Ok(StoreReply::Busy { .. }));
            starved.waited(sent, self.runtime.now(), in_vain);
        }
        let mut unknown = None;
        if let Err(StoreError::ConnectionLost(reason)) = answer {
            answer = match self.look_up(origin, columns, &reason).await {
                Ok(Some(stored)) => Ok(StoreReply::Stored(stored)),
                Ok(None) => Err(StoreError::ConnectionLost(reason)),
                Err(StoreError::Refused { sqlstate, .. }) if sqlstate == NUMBERS_UNKNOWN => {
                    unknown = Some(Unknown::Numbers);
                    Err(StoreError::ConnectionLost(reason))
                }
                Err(error) => {
                    unknown = Some(Unknown::Outcome(error.clone()));
                    Err(error)
                }
            };
        }
        drop(batches);
        let mut duplicates = None;
        if let Err(StoreError::DuplicateMessage { message_id }) = answer {
            // One answer for all of them, and not a transaction each. Without it that one goes.
            let wanted = ids_without_stream(&taken);
            let stored = self.within_deadline(self.store.find_duplicates(&wanted)).await;
            duplicates = Some(Duplicates::new(message_id, stored.unwrap_or_default()));
        }
        let mut guard = self.state.borrow_mut();
        let state = &mut *guard;
        state.flush_in_flight = false;
        let committed = if let Ok(StoreReply::Stored(stored)) = &answer { Some(stored.xid) } else { None };
        if state.fed_meanwhile.iter().any(|(xid, owned)| !owned && Some(*xid) != committed) {
            // Somebody else has stored: what was remembered of any stream may be old.
            state.numbers.forget_numbers();
        }
        if let Some(unknown) = &unknown {
            // Numbers were given that are not remembered here. A number that is given twice is refused by the database
            // only if both messages stand in one table: remembered ones must not be used any more.
            state.numbers.forget_numbers();
            // Of an incarnation that has another after it nothing is under way any more: it was fenced.
            if matches!(unknown, Unknown::Outcome(_)) && state.incarnation == Some(origin.incarnation) {
                state.leave_unknown_to_claim();
            }
        }
        let mut proved = None;
        let outcome = match answer {
            Ok(StoreReply::Stored(stored)) => {
                columns.correct(&mut taken, stored.looked_up.as_deref());
                if state.era == era && stored.owned {
                    columns.learn(state, stored.looked_up.as_deref(), generation);
                }
                state.metrics.rows_stored.add(taken.iter().map(|pending| pending.rows.len() as u64).sum());
                if stored.looked_up.is_some() {
                    state.metrics.looked_up_flushes.add(1);
                }
                // Numbered for another set of partitions: the claim finds which of it is this shard's.
                let same_set = state.era == era && state.ownership == ownership;
                if same_set && state.check_epoch(stored.epoch) {
                    let rows = taken.iter().map(|pending| pending.rows.clone()).collect();
                    state.admit_flush(origin.flush_number, &stored, rows, complete);
                } else {
                    state.leave_to_claim(stored.xid);
                }
                proved = Some(stored);
                starved.stored(&columns.stream_id);
                Outcome::Stored
            }
            Ok(StoreReply::Busy { stream_id }) => {
                starved.busy(&stream_id, self.runtime.now());
                Outcome::Busy(stream_id)
            }
            Ok(StoreReply::Conflict { found }) => Outcome::Conflict(found),
            Err(StoreError::NumberTaken) if columns.stream_known.iter().any(|known| *known) => {
                // What was remembered is wrong: once more, with look-ups.
                state.numbers.forget_numbers();
                Outcome::Again(StoreError::NumberTaken)
            }
            // All of them were looked up: it will be taken the next time as well.
            Err(StoreError::NumberTaken) => Outcome::Refused(StoreError::NumberTaken),
            Err(error @ StoreError::Refused { .. }) if unknown.is_none() => Outcome::Refused(error),
            Err(error @ StoreError::SchemaChanged { .. }) if unknown.is_none() => Outcome::StoodDown(error),
            Err(error) => match (unknown, duplicates) {
                (Some(unknown), _) => Outcome::Unknown(unknown),
                (None, Some(duplicates)) => Outcome::Duplicates(duplicates),
                (None, None) => Outcome::Again(error),
            },
        };
        state.fed_meanwhile.clear();
        let judged = expected::judge(state, columns, asides, proved.as_ref());
        let stored_for_others = columns.partitions.iter().any(|partition| !state.holds(*partition));
        state.note_memory();
        drop(guard);
        self.answer_judged(judged);
        self.publish_signal.raise();
        self.settle_signal.raise();
        self.claim_signal.raise();
        if matches!(outcome, Outcome::Stored) {
            if stored_for_others {
                self.others.ring();
            }
            self.others.note_stored();
            let rows: usize = taken.drain(..).map(|pending| pending.answer(None)).sum();
            self.answered(rows);
        }
        (taken, outcome)
    }

    /// Finds out what became of a flush whose connection was lost, for as long as it takes (or until the
    /// shard must end).
    async fn look_up(
        &self,
        origin: Origin,
        columns: &FlushColumns,
        reason: &str,
    ) -> Result<Option<Stored>, StoreError> {
        if mutants::active(Mutant::BlindResend) {
            return Ok(None);
        }
        tracing::warn!(
            shard = origin.shard,
            flush = origin.flush_number,
            reason,
            "connection lost during a flush: looking it up"
        );
        self.state.borrow().metrics.reconnects.add(1);
        let mut wait_us = TRANSIENT_RETRY_US.0;
        // From the first transaction on: after a crash that nobody here has noticed yet, the flush may have an id
        // below what was read before.
        let since = 0;
        let (stream_id, rows) = (&columns.stream_id, columns.stream_rows());
        loop {
            match self.within_deadline(self.store.find_flush(origin, stream_id, &rows, since)).await {
                Ok(found) => return Ok(found),
                // It cannot be told any more: this incarnation has ended meanwhile, or what would tell is gone.
                Err(error @ (StoreError::Refused { .. } | StoreError::SchemaChanged { .. })) => return Err(error),
                Err(error) => {
                    let until = self.runtime.now().plus_us(wait_us);
                    if self.state.borrow().stopping.is_some_and(|at| at <= until) {
                        return Err(error);
                    }
                    self.runtime.sleep_until(until).await;
                    wait_us = (wait_us * 2).min(TRANSIENT_RETRY_US.1);
                }
            }
        }
    }

    /// Waits for the signal or the moment.
    pub(super) async fn wait(&self, signal: &super::signal::Signal, at: Tick) {
        let signal = std::pin::pin!(signal.wait().fuse());
        let sleep = std::pin::pin!(self.runtime.sleep_until(at).fuse());
        futures_util::future::select(signal, sleep).await;
    }
}
