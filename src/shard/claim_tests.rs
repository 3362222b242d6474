//! What log rows of others mean for a shard: several instances write into one log.

use std::cell::Cell;

use uuid::Uuid;

use super::publish::tests::{comes_back, run, shard};
use super::shard_kit::{run_for, shard_around};
use super::state::State;
use crate::batch::{DestinationId, NewRow, Rows};
use crate::envelope::Trace;
use crate::ids::{Epoch, Incarnation};
use crate::plan::snapshot::Snapshot;
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
    assert!(!state.claimed(page(200, &[(true, 0), (true, 0)])), "nothing of it is for this shard");
    assert!(knows(&mut state));
    state.flush_in_flight = true;
    assert!(!state.claimed(page(300, &[(true, 0)])));
    assert!(state.fed_meanwhile.is_empty(), "no flush of this shard was met");
}

#[test]
fn a_row_that_is_not_an_owners_makes_numbers_void_and_is_no_reason_to_hurry() {
    let mut state = knowing();
    assert!(!state.claimed(page(200, &[(true, 0), (false, 0)])), "there is nothing to publish");
    assert!(!knows(&mut state), "it may hold events of the stream, without a destination");
    let mut state = knowing();
    state.flush_in_flight = true;
    assert!(!state.claimed(page(200, &[(false, 0)])));
    assert!(knows(&mut state), "it may be the flush itself: its answer tells");
    assert_eq!(state.fed_meanwhile, [(200, false)]);
}

#[test]
fn what_the_owner_before_has_left_is_fed_and_voids_nothing() {
    // Its writer was fenced before the partition was taken: the numbers were looked up later than it wrote.
    let mut state = knowing();
    assert!(state.claimed(page(200, &[(true, 2)])));
    assert!(knows(&mut state));
    assert_eq!(state.lanes.ready_count(), 2);
    assert!(state.claimed(page(300, &[(false, 1)])));
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
struct Busy {
    claims: Cell<u64>,
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
        Ok(page(100 + 10 * self.claims.get(), &[(true, 0), (false, 0)]))
    }

    async fn claim_parked(&self, _: Uuid, _: DestinationId, _: u32, _: usize) -> Result<Rows, StoreError> {
        unreachable!("only claims")
    }

    async fn release_scheduled(&self, _: Incarnation, _: &[u32], _: usize) -> Result<usize, StoreError> {
        unreachable!("only claims")
    }

    async fn load(&self, _: Incarnation, _: &[u32]) -> Result<LoadReply, StoreError> {
        unreachable!("only claims")
    }
}

#[test]
fn an_idle_instance_polls_slowly_beside_a_busy_one() {
    let shard = shard_around(knowing(), Busy { claims: Cell::new(0) }, 100_000);
    run_for(&shard, 600_000, |of| async move { of.claim_loop().await });
    // From 250 ms to 10 s; at 250 ms it would be 2,400 in ten minutes.
    let claims = shard.store.claims.get();
    assert!((60..80).contains(&claims), "{claims} claims in ten minutes");
}
