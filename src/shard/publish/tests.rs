//! What a run that comes back says of its destination.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use uuid::Uuid;

use super::*;
use crate::batch::{NewRow, Rows};
use crate::envelope::Trace;
use crate::ids::Incarnation;
use crate::plan::pause::MaySend;
use crate::plan::snapshot::Snapshot;
use crate::seam::store::HeldPartition;
use crate::shard::pending_tests::state;

const RETRY: (u64, u64, i32) = (30_000, 300_000, 10);
const LEASE: Tick = Tick(u64::MAX - 1);

/// A shard with one message in each of so many streams, all to one destination; that of stream n was stored by
/// transaction 10 + n, and everything below 100 is read.
pub(in crate::shard) fn shard(name: &str, messages: u128) -> (State, DestinationId) {
    let mut state = state(100, 1 << 20);
    let incarnation = Incarnation { number: 1, id: Uuid::nil() };
    state.set_partitions(incarnation, 1, &[HeldPartition { partition: 0, fence: 1 }]);
    state.loaded_from(vec![Snapshot::new(100, Vec::new())]);
    let destination = DestinationId::of(name).unwrap();
    let mut rows = Rows::default();
    for id in 1..=messages {
        let row = NewRow {
            message_id: Uuid::from_u128(id),
            stream_id: Some(Uuid::from_u128(id)),
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
        let row = rows.push(&row, &[destination]);
        rows.stream_seq[row] = 1;
    }
    let batch = state.add_batch(Arc::new(rows));
    for row in 0..messages as usize {
        let transaction = state.ledger.open(11 + row as u64, 1);
        state.count_references(batch, 1);
        state.feed(batch, row, row..row + 1, transaction);
    }
    (state, destination)
}

pub(in crate::shard) fn run(state: &mut State, now: Tick) -> Sent {
    state.next_run(now, LEASE, 1, &mut Vec::new()).map_err(|at| format!("nothing before {at:?}")).unwrap()
}

pub(in crate::shard) fn comes_back(state: &mut State, mut sent: Sent, outcomes: Vec<PublishOutcome>, now: Tick) {
    assert_eq!(sent.slots.len(), outcomes.len());
    sent.run.outcomes = outcomes;
    state.run_came_back(&mut sent, now, &Retry::new(RETRY.0, RETRY.1, RETRY.2, 0));
}

#[test]
fn a_run_in_which_one_message_is_throttled_leaves_the_destination_throttled() {
    let throttled = PublishOutcome::Throttled { retry_after_ms: 60_000 };
    for outcomes in [
        vec![PublishOutcome::Accepted, throttled.clone(), PublishOutcome::Accepted],
        vec![throttled.clone(), PublishOutcome::Accepted, PublishOutcome::Accepted],
        vec![
            PublishOutcome::Failed { reason: FailureReason::Unknown, text: String::new() },
            throttled,
            PublishOutcome::Accepted,
        ],
    ] {
        let (mut state, destination) = shard("throttles-one", 3);
        let sent = run(&mut state, Tick(0));
        comes_back(&mut state, sent, outcomes, Tick(10));
        assert_eq!(state.pause_of(destination).may_send(Tick(20)), MaySend::At(Tick(60_000_010)));
        assert_eq!(state.lanes.ready_count(), 1, "the throttled one goes out again, and costs no attempt");
        let probe = run(&mut state, Tick(60_000_010));
        comes_back(&mut state, probe, vec![PublishOutcome::Accepted], Tick(60_000_020));
        assert_eq!(state.pause_of(destination).may_send(Tick(60_000_020)), MaySend::Freely);
    }
}

#[test]
fn a_run_from_before_the_pause_does_not_end_it() {
    let (mut state, destination) = shard("throttles-later", 3);
    state.settings.publish_run_rows_max = 1;
    let (first, second) = (run(&mut state, Tick(0)), run(&mut state, Tick(0)));
    comes_back(&mut state, second, vec![PublishOutcome::NotReady], Tick(10));
    comes_back(&mut state, first, vec![PublishOutcome::Accepted], Tick(20));
    assert_eq!(state.pause_of(destination).may_send(Tick(30)), MaySend::At(Tick(100_010)));
}
