//! What becomes of an outcome that the database refuses, and of those beside it.
//!
//! Every story begins with one message in each of streams 1 to n, stored by transactions 11 to 10 + n, and a run with
//! all of them that has come back. `settled` lists what was committed, element by element.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use super::publish::tests::{comes_back, run, shard};
use super::shard_kit::{Kit, run_for, shard_around};
use super::state::State;
use crate::batch::{DestinationId, Rows};
use crate::error::FailureReason;
use crate::ids::{Epoch, Incarnation};
use crate::limits::SET_ASIDE_TRANSACTIONS_MAX;
use crate::plan::lanes::LaneState;
use crate::plan::retry::OnDeath;
use crate::seam::store::{
    ClaimReply, ClaimRequest, HELD_MS, LoadReply, Origin, Park, Release, SettleReply, SettleRequest, Store, StoreError,
    StoreReply, StoreRequest, Stored,
};
use crate::seam::transport::PublishOutcome;
use crate::time::Tick;
use uuid::Uuid;

type Refuses = Box<dyn Fn(&SettleRequest) -> Option<StoreError>>;

/// A database that refuses settlements in which the script finds something.
struct Door {
    refuses: Refuses,
    settled: RefCell<Vec<String>>,
    cursor: RefCell<String>,
    calls: Cell<usize>,
    claims: Cell<usize>,
    drains: RefCell<Vec<u128>>,
    /// Whose copies beside the log are there; of others none is. Their messages are not stored any more.
    copies: Cell<Option<Uuid>>,
    /// Lanes that were held without the dead letter that names them.
    apart: RefCell<Vec<u128>>,
}

fn refused(sqlstate: &str) -> Option<StoreError> {
    Some(StoreError::Refused { sqlstate: sqlstate.to_owned(), text: "by design".to_owned() })
}

impl Store for Door {
    async fn store_shard_messages(&self, _: &StoreRequest<'_>) -> Result<StoreReply, StoreError> {
        unreachable!("nothing is stored here")
    }

    async fn find_flush(&self, _: Origin, _: &[Uuid], _: &[u32], _: u64) -> Result<Option<Stored>, StoreError> {
        unreachable!("nothing is stored here")
    }

    async fn keep_resolved(&self, _: Incarnation, _: &Release) -> Result<(), StoreError> {
        unreachable!("the partitions stay as they are")
    }

    async fn find_duplicates(&self, _: &[Uuid]) -> Result<Vec<Uuid>, StoreError> {
        unreachable!("nothing is stored here")
    }

    async fn settle(&self, _: Incarnation, request: &SettleRequest) -> Result<SettleReply, StoreError> {
        self.calls.set(self.calls.get() + 1);
        if let Some(error) = (self.refuses)(request) {
            return Err(error);
        }
        let named = |of: &&Park| request.dead.iter().any(|dead| dead.lane_id == of.lane_id);
        let held = request.park.iter().filter(|of| of.due_in_ms == HELD_MS && !named(of));
        self.apart.borrow_mut().extend(held.map(|of| of.lane_id.as_u128()));
        let mut settled = self.settled.borrow_mut();
        let stream = |id: Uuid| id.as_u128();
        settled.extend(request.park.iter().map(|of| format!("park {}", stream(of.lane_id))));
        settled.extend(request.spill.iter().map(|of| format!("spill {}", stream(of.lane_id))));
        settled.extend(request.dead.iter().map(|of| format!("dead {}: {}", stream(of.lane_id), of.error)));
        if let Some(cursor) = &request.cursor {
            *self.cursor.borrow_mut() = cursor.to_string();
        }
        Ok(SettleReply::Settled { epoch: Epoch(Uuid::nil()), unparked: vec![true; request.unpark.len()] })
    }

    async fn claim_work(&self, request: &ClaimRequest<'_>) -> Result<ClaimReply, StoreError> {
        self.claims.set(self.claims.get() + 1);
        let (epoch, rows, position) = (Epoch(Uuid::nil()), Rows::default(), request.position.clone());
        Ok(ClaimReply { epoch, position, more: false, logs: Vec::new(), rows, scheduled_in_ms: None })
    }

    async fn claim_parked(
        &self,
        lane_id: Uuid,
        destination: DestinationId,
        _: u32,
        _: usize,
    ) -> Result<Rows, StoreError> {
        self.drains.borrow_mut().push(lane_id.as_u128());
        if self.copies.get() == Some(lane_id) {
            let mut rows = Rows::default();
            let row = rows.push_missing(lane_id, 0, 1, destination);
            rows.stream_seq[row] = 1;
            return Ok(rows);
        }
        if lane_id == of(1) { Err(refused("XX001").unwrap()) } else { Ok(Rows::default()) }
    }

    async fn release_scheduled(&self, _: Incarnation, _: &[u32], _: usize) -> Result<usize, StoreError> {
        unreachable!("nothing is scheduled here")
    }

    async fn load(&self, _: Incarnation, _: &[u32]) -> Result<LoadReply, StoreError> {
        unreachable!("it is loaded")
    }
}

/// How a story ended: what was committed (sorted), the cursor, refused for good, calls, and the shard's state.
struct End {
    settled: Vec<String>,
    cursor: String,
    refused: u64,
    calls: usize,
    state: Kit<Door>,
}

fn failed(_: u128) -> PublishOutcome {
    PublishOutcome::Failed { reason: FailureReason::TransportException, text: "k\u{e9}o".to_owned() }
}

fn permanent(_: u128) -> PublishOutcome {
    PublishOutcome::Permanent { reason: FailureReason::ValidationError, text: "k\u{e9}o".to_owned() }
}

fn story(
    streams: u128,
    outcome: impl Fn(u128) -> PublishOutcome,
    refuses: impl Fn(&SettleRequest) -> Option<StoreError> + 'static,
) -> End {
    let (mut state, _) = shard("refused", streams);
    let sent = run(&mut state, Tick(0));
    comes_back(&mut state, sent, (1..=streams).map(outcome).collect(), Tick(1));
    end_of(state, refuses)
}

fn end_of(mut state: State, refuses: impl Fn(&SettleRequest) -> Option<StoreError> + 'static) -> End {
    // It writes what there is, then its cursor, and ends.
    state.ended = true;
    let metrics = state.metrics.clone();
    let door = Door {
        refuses: Box::new(refuses),
        settled: RefCell::default(),
        cursor: RefCell::default(),
        calls: Cell::new(0),
        claims: Cell::new(0),
        drains: RefCell::default(),
        copies: Cell::new(None),
        apart: RefCell::default(),
    };
    let shard = shard_around(state, door, 100_000);
    let ended = run_for(&shard, 60_000, |of| async move { of.settle_loop().await });
    assert!(ended, "the settlements came to no end within a minute");
    let mut settled = shard.store.settled.take();
    settled.sort();
    End {
        settled,
        cursor: shard.store.cursor.take(),
        refused: metrics.settles_refused.get(),
        calls: shard.store.calls.get(),
        state: shard,
    }
}

fn of(id: u128) -> Uuid {
    Uuid::from_u128(id)
}

#[test]
fn a_reference_that_cannot_be_kept_is_a_dead_letter_and_the_others_are_kept() {
    let end = story(4, failed, |request| {
        request.spill.iter().any(|spill| spill.lane_id == of(3)).then(|| refused("CL001")).flatten()
    });
    let dead = "dead 3: the reference could not be kept beside the log: refused (CL001): by design";
    assert_eq!(end.settled, [dead, "park 1", "park 2", "park 3", "park 4", "spill 1", "spill 2", "spill 4"]);
    assert_eq!((end.cursor.as_str(), end.refused), ("100:100:", 0), "all of them are resolved");
    assert!(end.calls < 16, "halved, not one by one: {} calls", end.calls);
}

#[test]
fn a_text_that_the_database_does_not_take_is_left_out() {
    let odd = |text: &String| !text.is_ascii();
    let refuses = move |request: &SettleRequest| {
        let texts = request.park.iter().map(|of| &of.error).chain(request.dead.iter().map(|of| &of.error));
        texts.into_iter().any(odd).then(|| refused("22P05")).flatten()
    };
    let end = story(2, |stream| if stream == 1 { permanent(1) } else { failed(2) }, refuses);
    assert_eq!(end.settled, ["dead 1: the text was refused by the database: 22P05", "park 2", "spill 2"]);
    assert_eq!((end.cursor.as_str(), end.refused), ("100:100:", 0));
}

#[test]
fn a_head_that_cannot_be_buried_is_parked_and_tried_again() {
    let end = story(2, permanent, |request| {
        request.dead.iter().any(|dead| dead.lane_id == of(1)).then(|| refused("23514")).flatten()
    });
    let dead = "dead 2: k\u{e9}o";
    assert_eq!((end.settled, end.refused), (vec![dead.to_owned(), "spill 1".to_owned()], 1));
    let state = end.state.state.borrow();
    let lane = state.lanes.find(of(1), DestinationId::of("refused").unwrap()).unwrap();
    assert_eq!((state.lanes.lane(lane).state, state.lanes.lane(lane).held), (LaneState::Parked, false));
    assert!(state.parked_due.iter().any(|due| due.0.1 == lane), "it will be looked at again");
}

#[test]
fn what_can_be_written_nowhere_stays_before_the_cursor_and_its_lane_stands_still() {
    let refuses = |request: &SettleRequest| {
        let spill = request.spill.iter().any(|spill| spill.lane_id == of(2));
        (spill || request.dead.iter().any(|dead| dead.lane_id == of(2))).then(|| refused("XX001")).flatten()
    };
    let end = story(3, failed, refuses);
    assert_eq!(end.settled, ["park 1", "park 2", "park 3", "spill 1", "spill 3"]);
    assert_eq!((end.cursor.as_str(), end.refused), ("12:100:12", 1), "its transaction is open for ever");
    let mut state = end.state.state.borrow_mut();
    let destination = DestinationId::of("refused").unwrap();
    let lane = state.lanes.find(of(2), destination).unwrap();
    assert!(state.lanes.lane(lane).held);
    // What comes later in the lane stays in the log as well: it must not be drained before what was set aside.
    let (mut later, _) = shard("refused", 3);
    std::mem::swap(&mut *state, &mut later);
    let transaction = later.ledger.open(50, 1);
    let mut rows = Rows::default();
    rows.push_copy(shard("refused", 3).0.rows_of(0), 1);
    rows.stream_seq[0] = 2;
    let batch = later.add_batch(Arc::new(rows));
    later.count_references(batch, 1);
    later.feed(batch, 0, 0..1, transaction);
    later.release_batch(batch);
    drop(state);
    assert_eq!(later.rows_in_memory(), 0, "it takes no memory");
    later.cursor_dirty = true;
    let end = end_of(later, |_| None);
    assert_eq!((end.settled, end.cursor.as_str()), (Vec::<String>::new(), "12:100:12,50"));
}

#[test]
fn a_schema_that_has_to_be_repaired_ends_no_element() {
    let left = Cell::new(5);
    let end = story(2, failed, move |_| {
        left.set(left.get() - 1);
        (left.get() >= 0).then(|| refused("42P01")).flatten()
    });
    assert_eq!((end.settled.len(), end.refused, end.cursor.as_str()), (4, 0, "100:100:"));
}

#[test]
fn a_cursor_that_is_refused_holds_up_no_outcome() {
    let times = Cell::new(0);
    let end = story(2, failed, move |request| {
        times.set(times.get() + usize::from(request.cursor.is_some()));
        (request.cursor.is_some() && times.get() < 3).then(|| refused("54000")).flatten()
    });
    assert_eq!((end.settled.len(), end.cursor.as_str()), (4, "100:100:"));
}

#[test]
fn a_lane_that_cannot_be_drained_holds_up_no_claim_and_no_other_lane() {
    let shard = story(2, failed, |_| None).state;
    shard.state.borrow_mut().ended = false;
    run_for(&shard, 60_000, |of| async move { of.claim_loop().await });
    let drains = shard.store.drains.take();
    assert!(drains.iter().filter(|stream| **stream == 1).count() > 3, "it is tried again: {drains:?}");
    assert!(drains.contains(&2), "its neighbour is drained: {drains:?}");
    let claims = shard.store.claims.get();
    assert!(claims > 3, "{claims} claims");
}

#[test]
fn a_copy_that_can_neither_be_published_nor_buried_is_tried_once_a_retry_cap() {
    let refuses = |request: &SettleRequest| {
        request.dead.iter().any(|dead| dead.lane_id == of(1)).then(|| refused("XX001")).flatten()
    };
    let shard = story(2, failed, refuses).state;
    shard.store.copies.set(Some(of(1)));
    shard.state.borrow_mut().ended = false;
    let minutes = 30;
    run_for(&shard, minutes * 60_000, |of| async move { futures_util::join!(of.claim_loop(), of.settle_loop()) });
    let drains = shard.store.drains.take();
    let tries = drains.iter().filter(|stream| **stream == 1).count() as u64;
    // The cap of these shards is five minutes.
    assert!((minutes / 5..=minutes / 5 + 1).contains(&tries), "{tries} tries in {minutes} minutes");
    assert!(drains.contains(&2), "its neighbour is drained: {drains:?}");
    let metrics = shard.state.borrow().metrics.clone();
    assert_eq!((metrics.settles_refused.get(), metrics.references_set_aside_now.get()), (tries, 0));
    assert_eq!(metrics.parked_lanes_now.get(), 1);
}

#[test]
fn what_is_set_aside_is_bounded_and_other_lanes_go_on() {
    let refuses = |request: &SettleRequest| {
        let spill = request.spill.iter().any(|spill| spill.lane_id == of(2));
        (spill || request.dead.iter().any(|dead| dead.lane_id == of(2))).then(|| refused("XX001")).flatten()
    };
    let end = story(3, failed, refuses);
    let (mut state, _) = shard("refused", 1);
    std::mem::swap(&mut *end.state.state.borrow_mut(), &mut state);
    state.ended = false;
    let before = state.ledger.len();
    // Its stream is written on and on, each message in a transaction of its own.
    let messages = 3 * SET_ASIDE_TRANSACTIONS_MAX;
    let (others, _) = shard("refused", 3);
    let mut rows = Rows::default();
    for number in 0..messages {
        rows.push_copy(others.rows_of(0), 1);
        rows.stream_seq[number] = 2 + number as i64;
    }
    let batch = state.add_batch(Arc::new(rows));
    for row in 0..messages {
        let transaction = state.ledger.open(1_000 + row as u64, 1);
        state.count_references(batch, 1);
        state.feed(batch, row, row..row + 1, transaction);
    }
    state.release_batch(batch);
    assert_eq!((before, state.ledger.len()), (1, SET_ASIDE_TRANSACTIONS_MAX));
    assert_eq!(state.metrics.references_set_aside_now.get(), 1 + messages as u64);
    assert_eq!((state.rows_in_memory(), state.lanes.ready_count()), (0, 0));
    // Another stream is published as ever.
    let mut rows = Rows::default();
    rows.push_copy(others.rows_of(0), 2);
    rows.lane_id[0] = of(9);
    rows.stream_seq[0] = 1;
    let batch = state.add_batch(Arc::new(rows));
    let transaction = state.ledger.open(9_000, 1);
    state.count_references(batch, 1);
    state.feed(batch, 0, 0..1, transaction);
    state.release_batch(batch);
    let sent = run(&mut state, Tick(5));
    comes_back(&mut state, sent, vec![PublishOutcome::Accepted], Tick(6));
    assert_eq!(state.ledger.len(), SET_ASIDE_TRANSACTIONS_MAX, "it is resolved");
    // No cursor could list them all: none is written, and nobody waits for one.
    state.cursor_dirty = true;
    assert!(state.is_drained());
    let end = end_of(state, |_| None);
    assert_eq!((end.settled, end.cursor.as_str()), (Vec::<String>::new(), ""));
}

/// The same, but each stream is held behind the message that dies.
fn held_story(streams: u128, refuses: impl Fn(&SettleRequest) -> Option<StoreError> + 'static) -> End {
    let (mut state, _) = shard("refused", streams);
    state.settings.on_death = OnDeath { hold: true, of: Vec::new() };
    state.settings.publish_run_rows_max = streams as usize;
    let sent = run(&mut state, Tick(0));
    comes_back(
        &mut state,
        sent,
        (1..=streams).map(|of| if of % 2 == 1 { permanent(of) } else { failed(of) }).collect(),
        Tick(1),
    );
    end_of(state, refuses)
}

#[test]
fn a_lane_is_held_in_the_transaction_of_the_dead_letter_that_names_it() {
    // More than one transaction takes of parked lanes.
    let end = held_story(2_500, |_| None);
    assert_eq!(end.state.store.apart.take(), Vec::<u128>::new());
    let count = |of: &str| end.settled.iter().filter(|line| line.starts_with(of)).count();
    assert_eq!((count("park"), count("dead"), count("spill"), end.cursor.as_str()), (2_500, 1_250, 1_250, "100:100:"));
    // Halved, because something of it is refused.
    let end = held_story(6, |request| {
        (request.park.iter().any(|of| of.lane_id == self::of(2))).then(|| refused("XX001")).flatten()
    });
    assert_eq!(end.state.store.apart.take(), Vec::<u128>::new());
    let keo = |stream| format!("dead {stream}: k\u{e9}o");
    let parked = [1, 3, 4, 5, 6].map(|stream| format!("park {stream}"));
    let kept = [2, 4, 6].map(|stream| format!("spill {stream}"));
    assert_eq!(end.settled, [[1, 3, 5].map(keo).to_vec(), parked.to_vec(), kept.to_vec()].concat());
}

#[test]
fn a_lane_whose_dead_head_can_be_written_nowhere_is_not_held_for_an_operator() {
    let end = held_story(2, |request| {
        request.dead.iter().any(|dead| dead.lane_id == of(1)).then(|| refused("XX001")).flatten()
    });
    assert_eq!((end.settled, end.refused), (vec!["park 2".to_owned(), "spill 2".to_owned()], 1));
    assert_eq!(end.cursor, "11:100:11", "the next owner publishes it, and holds its lane then");
    let state = end.state.state.borrow();
    let lane = state.lanes.find(of(1), DestinationId::of("refused").unwrap()).unwrap();
    assert!(state.lanes.lane(lane).held, "nothing behind it is written before it");
}
