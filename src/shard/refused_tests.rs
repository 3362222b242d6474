//! What becomes of an outcome that the database refuses, and of those beside it.
//!
//! Every story begins with one message in each of streams 1 to n, stored by transactions 11 to 10 + n, and a run with
//! all of them that has come back. `settled` lists what was committed, element by element.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use super::publish::tests::{comes_back, run, shard};
use super::state::State;
use super::{LeaseCell, Shard, signal::Signal};
use crate::batch::{DestinationId, Rows};
use crate::error::FailureReason;
use crate::ids::{Epoch, Incarnation};
use crate::plan::lanes::LaneState;
use crate::runtime::budget::Budget;
use crate::runtime::sim::SimRuntime;
use crate::seam::publisher::{PublishRun, Publisher};
use crate::seam::runtime::Runtime;
use crate::seam::store::{
    ClaimReply, ClaimRequest, LoadReply, Origin, SettleReply, SettleRequest, Store, StoreError, StoreReply,
    StoreRequest, Stored,
};
use crate::seam::transport::{PublishOutcome, TransportLimits};
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

    async fn settle(&self, _: Incarnation, request: &SettleRequest) -> Result<SettleReply, StoreError> {
        self.calls.set(self.calls.get() + 1);
        if let Some(error) = (self.refuses)(request) {
            return Err(error);
        }
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

    async fn claim_parked(&self, lane_id: Uuid, _: DestinationId, _: u32, _: usize) -> Result<Rows, StoreError> {
        self.drains.borrow_mut().push(lane_id.as_u128());
        if lane_id == of(1) { Err(refused("XX001").unwrap()) } else { Ok(Rows::default()) }
    }

    async fn release_scheduled(&self, _: Incarnation, _: &[u32], _: usize) -> Result<usize, StoreError> {
        unreachable!("nothing is scheduled here")
    }

    async fn load(&self, _: Incarnation, _: &[u32]) -> Result<LoadReply, StoreError> {
        unreachable!("it is loaded")
    }
}

struct Nowhere(TransportLimits);

impl Publisher for Nowhere {
    fn limits(&self) -> &TransportLimits {
        &self.0
    }

    fn publish(&self, run: Box<PublishRun>) -> impl Future<Output = Box<PublishRun>> + 'static {
        std::future::ready(run)
    }
}

/// How a story ended: what was committed (sorted), the cursor, refused for good, calls, and the shard's state.
struct End {
    settled: Vec<String>,
    cursor: String,
    refused: u64,
    calls: usize,
    state: Rc<Shard<SimRuntime, Door, Nowhere>>,
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
    };
    let runtime = SimRuntime::new(1, 100_000);
    let shard = Rc::new(Shard {
        runtime: runtime.clone(),
        store: Rc::new(door),
        publisher: Nowhere(TransportLimits::default()),
        budget: Arc::new(Budget::default()),
        lease: Arc::new(LeaseCell::default()),
        state: RefCell::new(state),
        announced: Cell::new(false),
        left_behind: Cell::new(None),
        call_timeout_us: 1_000_000,
        flush_signal: Signal::default(),
        claim_signal: Signal::default(),
        publish_signal: Signal::default(),
        settle_signal: Signal::default(),
    });
    let (of, clock) = (shard.clone(), runtime.clone());
    let ended = runtime.block_on(async move {
        let deadline = clock.sleep_until(clock.now().plus_ms(60_000));
        let (settles, deadline) = (std::pin::pin!(of.settle_loop()), std::pin::pin!(deadline));
        matches!(futures_util::future::select(settles, deadline).await, futures_util::future::Either::Left(_))
    });
    assert!(ended.unwrap(), "the settlements came to no end within a minute");
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
    let (of, clock) = (shard.clone(), shard.runtime.clone());
    let watched = shard.runtime.block_on(async move {
        let until = clock.sleep_until(clock.now().plus_ms(60_000));
        let (claims, until) = (std::pin::pin!(of.claim_loop()), std::pin::pin!(until));
        futures_util::future::select(claims, until).await;
    });
    watched.unwrap();
    let drains = shard.store.drains.take();
    assert!(drains.iter().filter(|stream| **stream == 1).count() > 3, "it is tried again: {drains:?}");
    assert!(drains.contains(&2), "its neighbour is drained: {drains:?}");
    let claims = shard.store.claims.get();
    assert!(claims > 3, "{claims} claims");
}
