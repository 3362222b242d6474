//! What log rows of others mean for a shard: several instances write into one log.

use std::cell::Cell;
use std::pin::pin;

use futures_channel::oneshot;
use futures_util::future::select;
use uuid::Uuid;

use super::publish::tests::{comes_back, run, shard};
use super::shard_kit::{Kit, run_for, shard_around};
use super::state::State;
use super::{Arrival, Control};
use crate::batch::{DestinationId, NewRow, Rows};
use crate::envelope::Trace;
use crate::ids::{Epoch, Incarnation};
use crate::plan::cadence::Found;
use crate::plan::snapshot::Snapshot;
use crate::runtime::ring::Ring;
use crate::seam::runtime::Runtime;
use crate::seam::store::{
    ClaimReply, ClaimRequest, ClaimedLog, LoadReply, Origin, ReadPosition, SettleReply, SettleRequest, Store,
    StoreError, StoreReply, StoreRequest, Stored,
};
use crate::seam::transport::PublishOutcome;
use crate::time::Tick;

const STREAM: Uuid = Uuid::from_u128(77);

/// A page with log rows, each written whether by an owner and with how many references here.
fn page(first_xid: u64, logs: &[(bool, u32)]) -> ClaimReply {
    let mut rows = Rows::default();
    for reference in 0..logs.iter().map(|(_, count)| *count).sum::<u32>() {
        let row = NewRow {
            message_id: Uuid::from_u128(u128::from(first_xid) * 1_000 + u128::from(reference)),
            stream_id: None,
            partition: 0,
            is_event: false,
            type_name: "t",
            content_type: "",
            correlation_id: Uuid::nil(),
            causation_id: Uuid::nil(),
            trace: Trace::default(),
            metadata: b"",
            payload: b"",
            due_unix_us: 0,
        };
        let at = rows.push(&row, &[DestinationId::of("claimed").unwrap()]);
        rows.stream_seq[at] = 1;
    }
    let log = |(at, (owned, reference_count)): (usize, &(bool, u32))| ClaimedLog {
        xid: first_xid + at as u64,
        own_flush: None,
        owned: *owned,
        reference_count: *reference_count,
    };
    ClaimReply {
        epoch: Epoch(Uuid::nil()),
        position: ReadPosition {
            read: Snapshot::new(first_xid + logs.len() as u64, Vec::new()),
            ..ReadPosition::default()
        },
        more: false,
        logs: logs.iter().enumerate().map(log).collect(),
        rows,
        scheduled_in_ms: None,
    }
}

/// A shard that remembers the numbers of a stream.
fn knowing() -> State {
    let (mut state, _) = shard("claimed", 0);
    let generation = state.numbers.generation();
    state.numbers.learn(STREAM, 5, 5, generation);
    state
}

fn knows(state: &mut State) -> bool {
    let entry = *state.numbers.entry(STREAM);
    state.numbers.is_known(&entry)
}

#[test]
fn rows_of_other_owners_neither_wake_a_shard_nor_make_it_forget() {
    let mut state = knowing();
    assert_eq!(state.claimed(page(200, &[(true, 0), (true, 0)])), Found::Nothing, "nothing of it is for this shard");
    assert!(knows(&mut state));
    state.flush_in_flight = true;
    assert_eq!(state.claimed(page(300, &[(true, 0)])), Found::Nothing);
    assert!(state.fed_meanwhile.is_empty(), "no flush of this shard was met");
}

#[test]
fn a_row_that_is_not_an_owners_makes_numbers_void_and_is_no_reason_to_hurry() {
    let mut state = knowing();
    assert_eq!(state.claimed(page(200, &[(true, 0), (false, 0)])), Found::Nothing, "there is nothing to publish");
    assert!(!knows(&mut state), "it may hold events of the stream, without a destination");
    let mut state = knowing();
    state.flush_in_flight = true;
    assert_eq!(state.claimed(page(200, &[(false, 0)])), Found::Nothing);
    assert!(knows(&mut state), "it may be the flush itself: its answer tells");
    assert_eq!(state.fed_meanwhile, [(200, false)]);
}

#[test]
fn what_the_owner_before_has_left_is_fed_and_voids_nothing() {
    // Its writer was fenced before the partition was taken: the numbers were looked up later than it wrote.
    let mut state = knowing();
    assert_eq!(state.claimed(page(200, &[(true, 2)])), Found::Others);
    assert!(knows(&mut state));
    assert_eq!(state.lanes.ready_count(), 2);
    assert_eq!(state.claimed(page(300, &[(false, 1)])), Found::Others);
    assert!(!knows(&mut state));
}

#[test]
fn acknowledged_copies_count_as_memory_until_their_deletion_is_committed() {
    let (mut state, destination) = shard("claimed", 0);
    for lane in 1..=3 {
        let lane = state.lanes.restore_parked(Uuid::from_u128(lane), destination, 0, 1, Tick(0));
        state.lanes.begin_drain(lane);
        state.drained_rows(lane, page(200, &[(true, 1)]).rows);
    }
    let sent = run(&mut state, Tick(1));
    comes_back(&mut state, sent, vec![PublishOutcome::Accepted; 3], Tick(2));
    assert_eq!((state.lanes.rows(), state.rows_claimed_in_memory()), (0, 3), "or a slow database is drained for ever");
    assert!(!state.is_drained());
}

/// A log into which another instance writes all the time.
#[derive(Default)]
struct Busy {
    claims: Cell<u64>,
    /// Holds up the next claim.
    hold: Cell<Option<oneshot::Receiver<()>>>,
    /// What the next claim says of scheduled messages, and how often they were released.
    scheduled_in_ms: Cell<Option<i64>>,
    released: Cell<u64>,
}

impl Store for Busy {
    async fn keep_resolved(
        &self,
        _: crate::ids::Incarnation,
        _: &crate::seam::store::Release,
    ) -> Result<(), StoreError> {
        unreachable!("the partitions stay as they are")
    }

    async fn store_shard_messages(&self, _: &StoreRequest<'_>) -> Result<StoreReply, StoreError> {
        unreachable!("only claims")
    }

    async fn find_flush(&self, _: Origin, _: &[Uuid], _: &[u32], _: u64) -> Result<Option<Stored>, StoreError> {
        unreachable!("only claims")
    }

    async fn find_duplicates(&self, _: &[Uuid]) -> Result<Vec<Uuid>, StoreError> {
        unreachable!("only claims")
    }

    async fn settle(&self, _: Incarnation, _: &SettleRequest) -> Result<SettleReply, StoreError> {
        unreachable!("only claims")
    }

    async fn claim_work(&self, _: &ClaimRequest<'_>) -> Result<ClaimReply, StoreError> {
        self.claims.set(self.claims.get() + 1);
        if let Some(hold) = self.hold.take() {
            hold.await.unwrap();
        }
        let page = page(100 + 10 * self.claims.get(), &[(true, 0), (false, 0)]);
        Ok(ClaimReply { scheduled_in_ms: self.scheduled_in_ms.take(), ..page })
    }

    async fn claim_parked(&self, _: Uuid, _: DestinationId, _: u32, _: usize) -> Result<Rows, StoreError> {
        unreachable!("only claims")
    }

    async fn release_scheduled(&self, _: Incarnation, _: &[u32], _: usize) -> Result<usize, StoreError> {
        self.released.set(self.released.get() + 1);
        Ok(1)
    }

    async fn load(&self, _: Incarnation, _: &[u32]) -> Result<LoadReply, StoreError> {
        unreachable!("only claims")
    }
}

/// A shard around it whose claim loop runs beside the script; answers whether that came to its end.
fn beside_claims<F: Future + 'static>(listening: bool, script: impl FnOnce(Kit<Busy>) -> F) -> Kit<Busy> {
    let shard = shard_around(knowing(), Busy::default(), 100_000);
    shard.listening.set(listening);
    let script = script(shard.clone());
    let ended = run_for(&shard, 3_600_000, |of| async move {
        select(pin!(of.claim_loop()), pin!(script)).await;
    });
    assert!(ended);
    shard
}

fn tell(shard: &Kit<Busy>) {
    shard.announced.set(true);
    shard.claim_signal.raise();
}

async fn pass(shard: &Kit<Busy>, ms: u64) {
    shard.runtime.sleep_until(shard.runtime.now().plus_ms(ms)).await;
}

#[test]
fn an_idle_instance_polls_slowly_beside_a_busy_one() {
    let shard = beside_claims(true, |of| async move { pass(&of, 600_000).await });
    // From 5 s to 10 s; at 250 ms it would be 2,400 in ten minutes.
    let claims = shard.store.claims.get();
    assert!((60..65).contains(&claims), "{claims} claims in ten minutes");
    let shard = beside_claims(false, |of| async move { pass(&of, 60_000).await });
    assert_eq!(shard.store.claims.get(), 240, "nothing is certain to be heard");
}

#[test]
fn many_wake_ups_in_a_row_are_one_look_and_those_during_it_one_more() {
    beside_claims(true, |of| async move {
        pass(&of, 30_000).await;
        let before = of.store.claims.get();
        (0..100).for_each(|_| tell(&of));
        pass(&of, 10).await;
        assert_eq!(of.store.claims.get(), before + 1);
        let (go_on, hold) = oneshot::channel();
        of.store.hold.set(Some(hold));
        tell(&of);
        for _ in 0..100 {
            pass(&of, 1).await;
            tell(&of);
        }
        assert_eq!(of.store.claims.get(), before + 2, "one is under way");
        go_on.send(()).unwrap();
        pass(&of, 10).await;
        assert_eq!(of.store.claims.get(), before + 3);
    });
}

#[test]
fn what_is_due_at_a_time_is_no_poll_and_is_not_delayed_by_one() {
    beside_claims(true, |of| {
        of.store.scheduled_in_ms.set(Some(1_000));
        async move {
            pass(&of, 900).await;
            assert_eq!((of.store.claims.get(), of.store.released.get()), (1, 0), "the next poll is in 5 s");
            pass(&of, 110).await;
            assert_eq!(of.store.released.get(), 1);
        }
    });
}

#[test]
fn a_listener_that_goes_deaf_makes_the_shard_poll_at_the_base_from_then_on() {
    beside_claims(true, |of| async move {
        pass(&of, 30_000).await;
        let before = of.store.claims.get();
        of.listening.set(false);
        of.claim_signal.raise();
        pass(&of, 1_010).await;
        assert_eq!(of.store.claims.get(), before + 5, "at once, for the last look is long ago, and every 250 ms");
    });
}

/// How long a stop takes, in milliseconds, of a shard that has had nothing to do for so long.
fn stop_after(idle_ms: u64, has_others: bool) -> u64 {
    let shard = shard_around(knowing(), Busy::default(), 100_000);
    shard.listening.set(true);
    shard.lease.note_others(has_others);
    let took = std::rc::Rc::new(Cell::new(None));
    let into = took.clone();
    let ended = run_for(&shard, 3_600_000, move |of| async move {
        let (ring, receiver) = Ring::new(8);
        let stop = async {
            pass(&of, idle_ms).await;
            let now = of.runtime.now();
            assert!(ring.push(Arrival::Control(Control::Stop { deadline: now.plus_ms(20_000) })).is_ok());
            now
        };
        let end = async {
            let report = of.arrivals(receiver).await;
            (report, of.runtime.now())
        };
        let (stopped_at, (report, ended_at), (), ()) =
            futures_util::join!(stop, end, of.claim_loop(), of.publish_loop());
        assert!(report.drained, "{report:?}");
        into.set(Some(ended_at.since_us(stopped_at) / 1_000));
    });
    assert!(ended);
    took.get().unwrap()
}

#[test]
fn a_stop_of_an_idle_shard_waits_for_no_poll() {
    for idle_ms in [1, 2_499, 4_999, 5_000, 7_777, 30_000, 30_001] {
        for has_others in [false, true] {
            let took_ms = stop_after(idle_ms, has_others);
            assert!(took_ms < 100, "{took_ms} ms after {idle_ms} ms, beside others: {has_others}");
        }
    }
}
