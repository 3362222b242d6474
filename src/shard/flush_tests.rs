//! What a flush leaves behind that did not end as usual: its numbers, its rows, and how many transactions it cost.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use futures_channel::oneshot;
use uuid::Uuid;

use super::pending::Pending;
use super::publish::tests::shard;
use super::shard_kit::{Kit, run_for, shard_around};
use super::{Arrival, Control, Submission, SubmissionReply};
use crate::batch::{DestinationId, NewRow, Rows};
use crate::envelope::Trace;
use crate::error::Error;
use crate::ids::{Epoch, Incarnation};
use crate::plan::snapshot::Snapshot;
use crate::runtime::ring::Ring;
use crate::runtime::sim::SimRuntime;
use crate::seam::runtime::Runtime;
use crate::seam::store::{
    ClaimReply, ClaimRequest, LastNumbers, LoadReply, NO_STREAM, NUMBERS_UNKNOWN, Origin, SettleReply, SettleRequest,
    Store, StoreError, StoreReply, StoreRequest, Stored,
};
use crate::time::Tick;

/// A database that gives numbers, knows ids, and answers some stores with a lost connection.
#[derive(Default)]
struct Door {
    /// For each store in turn, why its look-up is refused after its answer was lost; `None`: it is answered.
    lost: RefCell<VecDeque<Option<StoreError>>>,
    last: RefCell<HashMap<Uuid, i64>>,
    ids: RefCell<HashSet<Uuid>>,
    finds_nothing: Cell<bool>,
    /// Each store is answered then, that its streams are in others' hands.
    busy_until: RefCell<Option<(SimRuntime, Tick)>>,
    stores: Cell<u64>,
    look_ups: Cell<usize>,
    /// Whether the streams of each store were all known.
    known: RefCell<Vec<bool>>,
}

impl Store for Door {
    async fn keep_resolved(
        &self,
        _: crate::ids::Incarnation,
        _: &crate::seam::store::Release,
    ) -> Result<(), StoreError> {
        unreachable!("the partitions stay as they are")
    }

    async fn store_shard_messages(&self, request: &StoreRequest<'_>) -> Result<StoreReply, StoreError> {
        self.stores.set(self.stores.get() + 1);
        let busy_until = self.busy_until.borrow().clone();
        if let Some((clock, until)) = busy_until {
            clock.sleep_until(until).await;
            return Ok(StoreReply::Busy { stream_id: request.stream_id.to_vec() });
        }
        let mut ids = self.ids.borrow().clone();
        for rows in request.batches {
            for row in (0..rows.len()).filter(|row| rows.stream_id(*row).is_none() && !rows.is_scheduled(*row)) {
                if !ids.insert(rows.message_id[row]) {
                    return Err(StoreError::DuplicateMessage { message_id: rows.message_id[row] });
                }
            }
        }
        *self.ids.borrow_mut() = ids;
        let mut last = self.last.borrow_mut();
        let before = request.stream_id.iter().map(|stream| last.get(stream).copied().unwrap_or(0));
        let before: Vec<LastNumbers> = before.map(|seq| LastNumbers { seq, version: 0 }).collect();
        for stream in request.row_stream.iter().filter(|stream| **stream != NO_STREAM) {
            *last.entry(request.stream_id[*stream as usize]).or_default() += 1;
        }
        let known = request.stream_known.iter().all(|known| *known);
        self.known.borrow_mut().push(known);
        if self.lost.borrow().front().is_some_and(Option::is_some) {
            return Err(StoreError::ConnectionLost("by design".into()));
        }
        self.lost.borrow_mut().pop_front();
        Ok(StoreReply::Stored(Stored {
            xid: 200 + self.stores.get(),
            epoch: Epoch(Uuid::nil()),
            position: 1,
            owned: true,
            foreign: false,
            looked_up: (!known).then_some(before),
        }))
    }

    async fn find_flush(&self, _: Origin, _: &[Uuid], _: &[u32], _: u64) -> Result<Option<Stored>, StoreError> {
        Err(self.lost.borrow_mut().pop_front().flatten().unwrap())
    }

    async fn find_duplicates(&self, message_id: &[Uuid]) -> Result<Vec<Uuid>, StoreError> {
        self.look_ups.set(self.look_ups.get() + 1);
        if self.finds_nothing.get() {
            return Err(StoreError::ConnectionLost("by design".into()));
        }
        let ids = self.ids.borrow();
        Ok(message_id.iter().copied().filter(|id| ids.contains(id)).collect())
    }

    async fn settle(&self, _: Incarnation, _: &SettleRequest) -> Result<SettleReply, StoreError> {
        unreachable!("only flushes")
    }

    async fn claim_work(&self, _: &ClaimRequest<'_>) -> Result<ClaimReply, StoreError> {
        unreachable!("only flushes")
    }

    async fn claim_parked(&self, _: Uuid, _: DestinationId, _: u32, _: usize) -> Result<Rows, StoreError> {
        unreachable!("only flushes")
    }

    async fn release_scheduled(&self, _: Incarnation, _: &[u32], _: usize) -> Result<usize, StoreError> {
        unreachable!("only flushes")
    }

    async fn load(&self, _: Incarnation, _: &[u32]) -> Result<LoadReply, StoreError> {
        unreachable!("only flushes")
    }
}

fn id(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

fn push(rows: &mut Rows, message_id: Uuid, stream_id: Option<Uuid>, due_unix_us: i64) {
    push_to(rows, message_id, stream_id, due_unix_us, &[DestinationId::of("flushed").unwrap()]);
}

fn push_to(rows: &mut Rows, message_id: Uuid, stream_id: Option<Uuid>, due_unix_us: i64, to: &[DestinationId]) {
    let row = NewRow {
        message_id,
        stream_id,
        partition: 0,
        is_event: false,
        type_name: "t",
        content_type: "",
        correlation_id: Uuid::nil(),
        causation_id: Uuid::nil(),
        trace: Trace::default(),
        metadata: b"",
        payload: b"",
        due_unix_us,
    };
    rows.push(&row, to);
}

/// One message of a stream.
fn one(stream: u128) -> Rows {
    let mut rows = Rows::default();
    push(&mut rows, Uuid::now_v7(), Some(id(stream)), 0);
    rows.end_unit();
    rows
}

/// A shard that has read everything there was.
fn begun(door: Door) -> Kit<Door> {
    let (mut state, _) = shard("flushed", 0);
    state.settings.flush_rows_max = 4_000;
    state.caught_up = true;
    shard_around(state, door, 100_000)
}

/// Each group of batches waits together; the next comes when it is answered.
fn answers(shard: &Kit<Door>, groups: Vec<Vec<Rows>>) -> Vec<SubmissionReply> {
    let answers = std::rc::Rc::new(RefCell::new(Vec::new()));
    let into = answers.clone();
    run_for(shard, 60_000, |of| async move {
        let callers = async {
            for group in groups {
                let mut hear = Vec::new();
                for rows in group {
                    assert!(of.budget.try_acquire(rows.len(), 10_000));
                    let (reply, answer) = oneshot::channel();
                    let pending = Pending::new(Submission { rows: Arc::new(rows), reply }, of.runtime.now());
                    of.state.borrow_mut().put_last(pending);
                    hear.push(answer);
                }
                of.flush_signal.raise();
                for answer in hear {
                    let answer = answer.await.unwrap();
                    into.borrow_mut().push(answer);
                }
            }
            of.state.borrow_mut().ended = true;
            of.flush_signal.raise();
        };
        futures_util::join!(of.flush_loop(), callers)
    });
    assert!(shard.budget.try_acquire(10_000, 10_000), "every row is given back");
    answers.take()
}

fn refused(sqlstate: &str) -> Option<StoreError> {
    Some(StoreError::Refused { sqlstate: sqlstate.to_owned(), text: "by design".to_owned() })
}

#[test]
fn a_flush_whose_numbers_cannot_be_told_leaves_none_behind() {
    let door = Door::default();
    door.lost.replace(VecDeque::from([None, None, refused(NUMBERS_UNKNOWN), None]));
    let shard = begun(door);
    let answers = answers(&shard, (0..4).map(|_| vec![one(1)]).collect());
    assert!(matches!(answers[2].refused[..], [(0, Error::StoredUnnumbered { .. })]), "{:?}", answers[2].refused);
    assert_eq!(*shard.store.known.borrow(), [false, true, true, false], "the last one looks them up");
    assert_eq!(answers[3].rows.stream_seq, [4], "3 is given to the one that is not known of");
}

#[test]
fn after_a_flush_of_unknown_outcome_nothing_is_taken_to_be_complete() {
    let door = Door::default();
    door.lost.replace(VecDeque::from([None, refused("CL005"), None, None]));
    let shard = begun(door);
    // Stream 1 may have a message that nobody has fed; of stream 2 nothing is known, of stream 1 no number.
    let answers = answers(&shard, vec![vec![one(1)], vec![one(1), one(2)], vec![one(2)], vec![one(1)]]);
    for unknown in &answers[1..3] {
        assert!(matches!(unknown.refused[..], [(0, Error::OutcomeUnknown { .. })]), "{:?}", unknown.refused);
    }
    assert_eq!((&answers[3].rows.stream_seq[..], &answers[4].rows.stream_seq[..]), (&[2][..], &[3][..]));
    let mut state = shard.state.borrow_mut();
    assert_eq!((state.metrics.rows_from_memory.get(), state.waiting_rows), (1, 2), "both wait for the claim");
    // A snapshot read whole says nothing of a transaction that may be committing yet.
    state.reader.read = Snapshot::new(10_000, Vec::new());
    state.read_whole();
    assert!(!state.complete_in_memory());
}

#[test]
fn however_many_ids_are_stored_already_they_cost_one_transaction_more() {
    let door = Door::default();
    door.ids.replace((0..500).map(|number| id(2 * number)).collect());
    let shard = begun(door);
    let mut groups = vec![Vec::new()];
    for batch in 0..2u128 {
        let mut rows = Rows::default();
        for unit in 0..500 {
            push(&mut rows, id(500 * batch + unit), None, 0);
            rows.end_unit();
        }
        groups[0].push(rows);
    }
    // Again in the same flush, in a unit with another message, twice in one, and scheduled, which is not stored yet.
    let mut rows = Rows::default();
    for (stream, ids, due) in [(Some(1), &[3][..], 0), (None, &[2001, 2001], 0), (None, &[3], 1), (None, &[2003], 0)] {
        if let Some(stream) = stream {
            push(&mut rows, id(5_000), Some(id(stream)), 0);
        }
        ids.iter().for_each(|number| push(&mut rows, id(*number), None, due));
        rows.end_unit();
    }
    groups[0].push(rows);
    let answers = answers(&shard, groups);
    let refused = |batch: usize| -> Vec<(u32, u128)> {
        let message = |(unit, error): &(u32, Error)| match error {
            Error::DuplicateMessage { message_id } => (*unit, message_id.as_u128()),
            other => panic!("{other}"),
        };
        answers[batch].refused.iter().map(message).collect()
    };
    let even = |first: u128| (0..500).step_by(2).map(|unit| (unit, first + u128::from(unit))).collect::<Vec<_>>();
    assert_eq!((refused(0), refused(1), refused(2)), (even(0), even(500), vec![(0, 3), (1, 2001)]));
    assert_eq!((shard.store.stores.get(), shard.store.look_ups.get()), (2, 1));
    assert_eq!(shard.store.ids.borrow().len(), 500 + 500 + 1);
    assert!(!shard.store.last.borrow().contains_key(&id(1)), "a unit is refused whole");
}

#[test]
fn without_the_look_up_duplicates_go_one_by_one() {
    let door = Door::default();
    door.ids.replace([id(1), id(3)].into());
    door.finds_nothing.set(true);
    let shard = begun(door);
    let mut rows = Rows::default();
    for number in [0, 1, 2, 3, 2] {
        push(&mut rows, id(number), None, 0);
        rows.end_unit();
    }
    let answers = answers(&shard, vec![vec![rows]]);
    let refused: Vec<u32> = answers[0].refused.iter().map(|(unit, _)| *unit).collect();
    assert_eq!((refused, shard.store.ids.borrow().len()), (vec![1, 3, 4], 4));
}

#[test]
fn a_stream_of_the_same_id_is_a_duplicate_as_well() {
    // The numbers of both would be one: the database names the message, and finds it nowhere.
    let taken = vec![Pending::new(
        Submission {
            rows: Arc::new({
                let mut rows = Rows::default();
                push(&mut rows, id(7), Some(id(1)), 0);
                rows.end_unit();
                push(&mut rows, id(1), None, 0);
                rows.end_unit();
                rows
            }),
            reply: oneshot::channel().0,
        },
        Tick(0),
    )];
    let (refused, rest) = super::duplicates::Duplicates::new(id(1), Vec::new()).part(taken);
    assert_eq!((refused[0].1.as_slice(), refused[0].0.rows.message_id.as_slice()), (&[id(1)][..], &[id(1)][..]));
    assert_eq!(rest[0].rows.message_id, [id(7)]);
}

#[test]
fn own_flushes_that_no_claim_has_passed_are_bounded() {
    let (mut state, _) = shard("flushed", 0);
    state.caught_up = true;
    let epoch = Epoch(Uuid::nil());
    for number in 1..=5_000 {
        let mut rows = Rows::default();
        push_to(&mut rows, Uuid::now_v7(), Some(id(1)), 0, &[]);
        rows.end_unit();
        rows.stream_seq[0] = number;
        let xid = 200 + number as u64;
        let stored = Stored { xid, epoch, position: number, owned: true, foreign: false, looked_up: None };
        state.admit_flush(number, &stored, vec![Arc::new(rows)], true);
    }
    assert_eq!(state.flushes.len(), 4_096);
    assert!(!state.complete_in_memory(), "the others are left to the claim");
    state.reader.read = Snapshot::new(10_000, Vec::new());
    state.read_whole();
    assert!(state.flushes.is_empty() && state.complete_in_memory());
}

#[test]
fn whoever_waits_at_the_end_is_told_that_nothing_was_stored_in_the_flush_under_way_behind_it_and_in_the_ring() {
    let shard = begun(Door::default());
    // The shard ends at 50 ms, its flush at 80.
    let at = |ms: u64| shard.runtime.now().plus_ms(ms);
    *shard.store.busy_until.borrow_mut() = Some((shard.runtime.clone(), at(80)));
    let (ring, receiver) = Ring::new(8);
    let submit = || {
        let (reply, answer) = oneshot::channel();
        assert!(shard.budget.try_acquire(1, 10));
        ring.push(Arrival::Submission(Submission { rows: Arc::new(one(1)), reply })).unwrap();
        answer
    };
    let mut waiting = vec![submit()];
    let deadline = at(50);
    let reports = std::rc::Rc::new(Cell::new((0, 0)));
    let (into, late) = (reports.clone(), ring.clone());
    // Behind it from 10 ms on; after the stop, while the shard is ending.
    let (reply, behind) = oneshot::channel();
    let (too_late, refused_at_once) = oneshot::channel();
    assert!(shard.budget.try_acquire(2, 10));
    run_for(&shard, 60_000, move |of| async move {
        let callers = async {
            of.runtime.sleep_until(of.runtime.now().plus_ms(10)).await;
            late.push(Arrival::Submission(Submission { rows: Arc::new(one(1)), reply })).unwrap();
            of.runtime.sleep_until(of.runtime.now().plus_ms(10)).await;
            late.push(Arrival::Control(Control::Stop { deadline })).unwrap();
            late.push(Arrival::Submission(Submission { rows: Arc::new(one(1)), reply: too_late })).unwrap();
        };
        let (report, in_flight, ()) = futures_util::join!(of.arrivals(receiver), of.flush_loop(), callers);
        into.set((report.rows_refused, in_flight));
    });
    waiting.extend([behind, refused_at_once]);
    for mut answer in waiting {
        let refused = answer.try_recv().unwrap().unwrap().refused;
        assert!(matches!(refused[..], [(0, Error::ShutDown)]), "{refused:?}");
    }
    assert_eq!(reports.get(), (1, 1), "what waited, and what came back");
    assert_eq!(shard.budget.rows(), 0, "every row is given back");
    assert!(ring.push(Arrival::Control(Control::Look)).is_err() && ring.is_closed());
}
