//! The conformance script: what any implementation of the Postgres seam answers, step by step. It runs on the
//! in-memory model (`tests/sim`) and on Postgres (`tests/it`), and so holds the two against each other.
//!
//! Each step says what it is for. The schema is freshly installed and nobody else uses it.

mod expected;
mod requests;

use corelane::batch::{DestinationId, Rows};
use corelane::ids::{Epoch, Incarnation};
use corelane::plan::snapshot::Snapshot;
use corelane::seam::store::{
    ClaimReply, Coordination, DeadLetter, Drained, LastNumbers, Park, Registration, Release, Renewed, SettleReply,
    SettleRequest, Spill, Store, StoreError, StoreReply, Stored, Taken,
};
use uuid::Uuid;

use requests::{Flush, Reader};

const LEASE_MS: u64 = 60_000;

fn id(number: u128) -> Uuid {
    Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0000 + number)
}

fn all(partition_count: u32) -> Vec<u32> {
    (0..partition_count).collect()
}

fn registration(number: u128, instance_name: &str) -> Registration {
    let (service_name, instance_name) = ("service".to_owned(), instance_name.to_owned());
    Registration { id: id(number), service_name, instance_name, shards: 1, owns: true }
}

fn to(name: &str) -> DestinationId {
    DestinationId::of(name).unwrap()
}

fn stored(reply: Result<StoreReply, StoreError>) -> Stored {
    match reply {
        Ok(StoreReply::Stored(stored)) => stored,
        other => panic!("not stored: {other:?}"),
    }
}

/// `lane:seq/version>destination` of every row, in order.
fn story(rows: &Rows) -> Vec<String> {
    (0..rows.len())
        .map(|row| {
            let destination = rows.reference_destination[row].name();
            let lane = rows.lane_id[row].as_u128() as u16;
            format!("{lane}:{}/{}>{destination}", rows.stream_seq[row], rows.version[row])
        })
        .collect()
}

fn owned(reply: &ClaimReply) -> Vec<bool> {
    reply.logs.iter().map(|log| log.owned).collect()
}

fn own_flushes(reply: &ClaimReply) -> Vec<Option<i64>> {
    reply.logs.iter().map(|log| log.own_flush).collect()
}

/// Runs the script. `keeper_a` and `keeper_b` are two connections.
pub async fn run<S: Store, C: Coordination>(store: &S, keeper_a: &C, keeper_b: &C, partition_count: u32) {
    one_that_listens_hears_itself(keeper_a).await;
    let (a, taken) = an_incarnation_takes_everything(store, keeper_a, partition_count).await;
    let mut reader = Reader::new(a, &taken);
    let first = a_flush_is_numbered_and_claimed(store, &mut reader, partition_count).await;
    numbers_are_never_given_twice(store, &mut reader, partition_count).await;
    a_flush_is_found_after_its_answer_was_lost(store, &reader, &first, partition_count).await;
    a_foreign_row_is_seen(store, &mut reader, partition_count).await;
    what_stems_from_another_life_is_void(store, &mut reader, partition_count).await;
    a_page_is_cut_by_position(store, &reader).await;
    a_lane_is_parked_and_drained(store, &mut reader, partition_count).await;
    a_dead_letter_is_written_once(store, &mut reader, partition_count).await;
    a_scheduled_message_gets_its_number_when_due(store, &mut reader, partition_count).await;
    an_id_that_is_stored_is_told_and_taken_once(store, &mut reader, partition_count).await;
    expected::an_expected_version_is_compared(store, &mut reader, partition_count).await;
    a_partition_is_handed_over_exactly(store, keeper_a, &mut reader).await;
    a_successor_starts_where_the_cursor_stands(store, keeper_a, keeper_b, &mut reader).await;
}

/// As often as it is asked, over one connection, and before there is an incarnation.
async fn one_that_listens_hears_itself<C: Coordination>(keeper: &C) {
    for _ in 0..3 {
        assert!(keeper.listen().await.unwrap());
        keeper.test_listener().await.unwrap();
    }
}

async fn an_incarnation_takes_everything<S: Store, C: Coordination>(
    store: &S,
    keeper: &C,
    partition_count: u32,
) -> (Incarnation, Taken) {
    let (a, count) = keeper.register_instance(&registration(1, "a"), LEASE_MS).await.unwrap();
    assert_eq!((a.id, count), (id(1), partition_count));
    assert_eq!(keeper.renew_lease(a, LEASE_MS).await.unwrap(), Renewed::Alive);
    let members = keeper.members(a).await.unwrap();
    assert_eq!((members.others.len(), members.free.len() as u32), (0, partition_count));
    let taken = keeper.take_partitions(a, &all(partition_count)).await.unwrap().unwrap();
    assert_eq!(taken.held.len() as u32, partition_count);
    assert!(taken.held.iter().zip(0..).all(|(held, partition)| (held.partition, held.fence) == (partition, 1)));
    let again = keeper.take_partitions(a, &all(partition_count)).await.unwrap().unwrap();
    assert_eq!(again, taken, "nothing was free: nothing changes");
    let held: Vec<u32> = taken.held.iter().map(|held| held.partition).collect();
    let load = store.load(a, &held).await.unwrap();
    assert_eq!(load.resolved.len(), held.len());
    assert!(load.resolved.iter().all(|resolved| !resolved.contains(3)) && load.parked.is_empty());
    (a, taken)
}

/// Events and other messages share the stream's numbers; versions count events; a message without stream is 1.
async fn a_flush_is_numbered_and_claimed<S: Store>(store: &S, reader: &mut Reader, count: u32) -> Stored {
    let mut flush = Flush::new(reader, 1, count);
    flush.push(Some(id(10)), true, &["x"]).push(Some(id(10)), false, &["x", "y"]).push(Some(id(10)), true, &[]);
    flush.push(None, false, &["y"]);
    let first = stored(store.store_shard_messages(&flush.request(reader)).await);
    assert!(first.owned && !first.foreign);
    assert_eq!(first.looked_up, Some(vec![LastNumbers { seq: 0, version: 0 }]));

    let in_memory = store.claim_work(&reader.claim(&[1], 100)).await.unwrap();
    assert_eq!(own_flushes(&in_memory), vec![Some(1); in_memory.logs.len()]);
    assert!(!in_memory.logs.is_empty() && in_memory.rows.is_empty() && !in_memory.more);
    assert_eq!(in_memory.epoch, first.epoch);

    let claimed = store.claim_work(&reader.claim(&[], 100)).await.unwrap();
    assert_eq!(story(&claimed.rows), ["10:1/1>x", "10:2/0>x", "10:2/0>y", &flush.streamless_story("y")]);
    assert!(claimed.logs.iter().all(|log| log.xid == first.xid && log.own_flush.is_none() && log.owned));
    let references: u32 = claimed.logs.iter().map(|log| log.reference_count).sum();
    assert_eq!(references, 4);
    assert_eq!(claimed.position.page, None);
    assert!(claimed.position.read.contains(first.xid));
    reader.position = claimed.position;
    let nothing = store.claim_work(&reader.claim(&[], 100)).await.unwrap();
    assert!(nothing.logs.is_empty() && nothing.rows.is_empty(), "what was read does not come again");
    first
}

/// Remembered numbers are taken as they are; wrong ones fail the flush and nothing of it is written.
async fn numbers_are_never_given_twice<S: Store>(store: &S, reader: &mut Reader, count: u32) {
    let mut flush = Flush::new(reader, 2, count);
    flush.known(id(10), 3, 2).push(Some(id(10)), true, &["x"]);
    let second = stored(store.store_shard_messages(&flush.request(reader)).await);
    assert_eq!(second.looked_up, None);

    let mut wrong = Flush::new(reader, 3, count);
    wrong.known(id(10), 3, 2).push(Some(id(11)), true, &["x"]).push(Some(id(10)), true, &["x"]);
    wrong.known(id(11), 0, 0);
    let taken = store.store_shard_messages(&wrong.request(reader)).await;
    assert!(matches!(taken, Err(StoreError::NumberTaken)), "{taken:?}");

    // An unknown stream in the flush: all of them are looked up.
    let mut mixed = Flush::new(reader, 4, count);
    mixed.known(id(10), 4, 3).push(Some(id(10)), false, &["x"]).push(Some(id(11)), true, &["x"]);
    let mixed = stored(store.store_shard_messages(&mixed.request(reader)).await);
    let expected = vec![LastNumbers { seq: 4, version: 3 }, LastNumbers { seq: 0, version: 0 }];
    assert_eq!(mixed.looked_up, Some(expected));

    let claimed = store.claim_work(&reader.claim(&[], 100)).await.unwrap();
    assert_eq!(story(&claimed.rows), ["10:4/3>x", "10:5/0>x", "11:1/1>x"]);
    assert!(mixed.xid > second.xid && mixed.position > second.position);
    reader.position = claimed.position;
}

/// One that is not found never comes: its request may still be on its way.
async fn a_flush_is_found_after_its_answer_was_lost<S: Store>(store: &S, reader: &Reader, first: &Stored, count: u32) {
    let found = store.find_flush(reader.origin(1), &[id(10)], &[3], first.xid).await.unwrap().unwrap();
    assert_eq!((found.xid, found.position, found.owned), (first.xid, first.position, true));
    assert_eq!(found.looked_up, first.looked_up);
    assert_eq!(found.epoch, first.epoch);
    let absent = store.find_flush(reader.origin(3), &[id(10)], &[1], first.xid).await.unwrap();
    assert_eq!(absent, None, "it was not committed");
    let mut late = Flush::new(reader, 3, count);
    late.push(Some(id(13)), true, &["x"]);
    let late = store.store_shard_messages(&late.request(reader)).await;
    assert!(matches!(late, Err(StoreError::Refused { .. })), "given up: {late:?}");
}

/// A row that no owner wrote makes the next flush look up, until it has been read.
async fn a_foreign_row_is_seen<S: Store>(store: &S, reader: &mut Reader, count: u32) {
    let mut stranger = Flush::new(reader, 5, count);
    stranger.not_held().push(Some(id(10)), false, &["x"]);
    let stranger = stored(store.store_shard_messages(&stranger.request(reader)).await);
    assert_eq!(stranger.looked_up, Some(vec![LastNumbers { seq: 5, version: 3 }]));

    let mut wrong_ownership = Flush::new(reader, 6, count);
    wrong_ownership.ownership(reader.ownership + 7).known(id(12), 0, 0).push(Some(id(12)), true, &["x"]);
    let not_owned = stored(store.store_shard_messages(&wrong_ownership.request(reader)).await);
    assert!(!not_owned.owned && not_owned.foreign);
    assert_eq!(not_owned.looked_up, Some(vec![LastNumbers { seq: 0, version: 0 }]));

    let mut own = Flush::new(reader, 7, count);
    own.known(id(10), 6, 3).push(Some(id(10)), true, &["x"]);
    let own_stored = stored(store.store_shard_messages(&own.request(reader)).await);
    assert!(own_stored.foreign && own_stored.owned);

    let claimed = store.claim_work(&reader.claim(&[5, 6, 7], 100)).await.unwrap();
    assert_eq!(own_flushes(&claimed), [None, None, Some(7)], "only owned rows are left out");
    assert_eq!(owned(&claimed), [false, false, true], "the others may be about any partition");
    assert_eq!(story(&claimed.rows), ["10:6/0>x", "12:1/1>x"]);
    reader.position = claimed.position;

    let mut after = Flush::new(reader, 8, count);
    after.known(id(10), 7, 4).push(Some(id(10)), true, &["x"]);
    let after = stored(store.store_shard_messages(&after.request(reader)).await);
    assert!(!after.foreign && after.looked_up.is_none(), "what was read is not foreign any more");
    let claimed = store.claim_work(&reader.claim(&[], 100)).await.unwrap();
    assert_eq!(story(&claimed.rows), ["10:8/5>x"]);
    reader.position = claimed.position;
}

/// A server that has crashed gives transaction ids again: what was read before says nothing any more.
async fn what_stems_from_another_life_is_void<S: Store>(store: &S, reader: &mut Reader, count: u32) {
    let other = Epoch(id(99));
    let mut flush = Flush::new(reader, 12, count);
    flush.epoch(other).known(id(10), 8, 5).push(Some(id(10)), false, &[]);
    let flush = stored(store.store_shard_messages(&flush.request(reader)).await);
    assert!(flush.foreign && flush.epoch != other);
    assert_eq!(flush.looked_up, Some(vec![LastNumbers { seq: 8, version: 5 }]));

    let far = Snapshot::new((1 << 40) + 3, Vec::new());
    let cursor = SettleRequest {
        ownership: reader.ownership,
        epoch: Some(other),
        cursor: Some(far),
        ..SettleRequest::default()
    };
    let reply = store.settle(reader.incarnation, &cursor).await.unwrap();
    assert_eq!(reply, SettleReply::Settled { epoch: flush.epoch, unparked: Vec::new() });
    let load = store.load(reader.incarnation, &reader.held).await.unwrap();
    assert!(load.resolved.iter().all(|resolved| !resolved.contains(1 << 39)), "the cursor was not written");
    let claimed = store.claim_work(&reader.claim(&[], 100)).await.unwrap();
    reader.position = claimed.position;
}

/// Small pages of one snapshot give the same rows in the same order as one large page.
async fn a_page_is_cut_by_position<S: Store>(store: &S, reader: &Reader) {
    let mut paged = reader.begin();
    let mut rows = Vec::new();
    let mut pages = 0;
    loop {
        let page = store.claim_work(&paged.claim(&[], 1)).await.unwrap();
        rows.extend(story(&page.rows));
        pages += 1;
        assert_eq!(page.more, page.position.page.is_some());
        assert!(pages < 20, "the pages do not end");
        paged.position = page.position;
        if !page.more {
            break;
        }
    }
    assert!(pages > 3, "{pages} pages");
    let whole = store.claim_work(&reader.begin().claim(&[], 100)).await.unwrap();
    assert_eq!(rows, story(&whole.rows));
    assert_eq!(rows.len(), 4 + 3 + 3 + 1);

    let mut half = reader.begin();
    half.held.retain(|partition| partition % 2 == 0);
    let claimed = store.claim_work(&half.claim(&[], 100)).await.unwrap();
    assert!(claimed.rows.partition.iter().all(|partition| partition % 2 == 0));
    let passed = |reply: &ClaimReply| reply.logs.iter().map(|log| log.xid).collect::<Vec<_>>();
    assert_eq!(passed(&claimed), passed(&whole), "rows of others are passed, without references");
}

/// Parked, copied beside the log, drained, un-parked; all of it may be sent twice.
async fn a_lane_is_parked_and_drained<S: Store>(store: &S, reader: &mut Reader, count: u32) {
    let mut flush = Flush::new(reader, 9, count);
    flush.push(Some(id(20)), true, &["x"]).push(Some(id(20)), false, &["x"]);
    stored(store.store_shard_messages(&flush.request(reader)).await);
    let claimed = store.claim_work(&reader.claim(&[], 100)).await.unwrap();
    let partition = claimed.rows.partition[0];
    reader.position = claimed.position;
    let (lane_id, destination) = (id(20), to("x"));
    let spill = |stream_seq, version| Spill { lane_id, destination, partition, stream_seq, version };
    let park = SettleRequest {
        ownership: reader.ownership,
        park: vec![Park {
            lane_id,
            destination,
            partition,
            stream_seq: 1,
            attempts: 2,
            reason: 2,
            error: "refused".into(),
            error_cut: false,
            due_in_ms: 3_600_000,
        }],
        spill: vec![spill(1, 1), spill(2, 0)],
        ..SettleRequest::default()
    };
    for _ in 0..2 {
        let reply = store.settle(reader.incarnation, &park).await.unwrap();
        assert!(matches!(reply, SettleReply::Settled { unparked, .. } if unparked.is_empty()));
    }
    let load = store.load(reader.incarnation, &reader.held).await.unwrap();
    assert_eq!(load.parked.len(), 1);
    let parked = &load.parked[0];
    assert_eq!((parked.lane_id, parked.destination, parked.attempts), (lane_id, destination, 2));
    assert!(parked.due_in_ms > 3_000_000 && parked.due_in_ms <= 3_600_001, "{}", parked.due_in_ms);
    let kept = store.claim_parked(lane_id, destination, partition, 10).await.unwrap();
    assert_eq!(story(&kept), ["20:1/1>x", "20:2/0>x"]);
    assert_eq!(story(&store.claim_parked(lane_id, destination, partition, 1).await.unwrap()), ["20:1/1>x"]);

    let drained = |stream_seq| Drained { lane_id, destination, partition, stream_seq };
    let unpark = |drained| SettleRequest {
        drained,
        unpark: vec![(lane_id, destination, partition)],
        ..SettleRequest::default()
    };
    for (request, gone) in [
        (unpark(vec![drained(1)]), false),
        (unpark(vec![drained(1)]), false),
        (unpark(vec![drained(2)]), true),
        (unpark(vec![]), true),
    ] {
        match store.settle(reader.incarnation, &request).await.unwrap() {
            SettleReply::Settled { unparked, .. } => assert_eq!(unparked, [gone], "{request:?}"),
            SettleReply::Fenced => panic!("fenced"),
        }
    }
    assert!(store.load(reader.incarnation, &reader.held).await.unwrap().parked.is_empty());
}

async fn a_dead_letter_is_written_once<S: Store>(store: &S, reader: &mut Reader, count: u32) {
    let mut flush = Flush::new(reader, 10, count);
    flush.push(Some(id(21)), true, &["x"]);
    stored(store.store_shard_messages(&flush.request(reader)).await);
    let claimed = store.claim_work(&reader.claim(&[], 100)).await.unwrap();
    let partition = claimed.rows.partition[0];
    reader.position = claimed.position;
    let request = SettleRequest {
        ownership: reader.ownership,
        dead: vec![DeadLetter {
            lane_id: id(21),
            destination: to("x"),
            unnamed: None,
            partition,
            stream_seq: 1,
            version: 1,
            attempts: 10,
            reason: 5,
            error: "ends here".into(),
            error_cut: true,
        }],
        cursor: Some(reader.position.read.clone()),
        ..SettleRequest::default()
    };
    for _ in 0..2 {
        let reply = store.settle(reader.incarnation, &request).await.unwrap();
        assert!(matches!(reply, SettleReply::Settled { .. }));
    }
    let load = store.load(reader.incarnation, &reader.held).await.unwrap();
    for xid in claimed.logs.iter().map(|log| log.xid) {
        assert!(load.resolved.iter().all(|resolved| resolved.contains(xid)), "the cursor came with it");
    }
}

async fn a_scheduled_message_gets_its_number_when_due<S: Store>(store: &S, reader: &mut Reader, count: u32) {
    let mut flush = Flush::new(reader, 11, count);
    flush.push_due(id(10), 1, &["x"]);
    stored(store.store_shard_messages(&flush.request(reader)).await);
    let claimed = store.claim_work(&reader.claim(&[11], 100)).await.unwrap();
    assert!(claimed.rows.is_empty(), "not in the log yet");
    assert_eq!(claimed.scheduled_in_ms, Some(0));
    reader.position = claimed.position;
    assert_eq!(store.release_scheduled(reader.incarnation, &reader.held, 10).await.unwrap(), 1);
    assert_eq!(store.release_scheduled(reader.incarnation, &reader.held, 10).await.unwrap(), 0);
    let claimed = store.claim_work(&reader.claim(&[11], 100)).await.unwrap();
    assert_eq!(story(&claimed.rows), ["10:10/0>x"]);
    assert_eq!(claimed.scheduled_in_ms, None);
    reader.position = claimed.position;
}

/// Messages without stream are told apart by their ids, as far back as the log is kept.
async fn an_id_that_is_stored_is_told_and_taken_once<S: Store>(store: &S, reader: &mut Reader, count: u32) {
    let mut flush = Flush::new(reader, 20, count);
    flush.push_as(id(300), None, &["x"]).push_as(id(301), None, &[]).push_as(id(302), Some(id(303)), &[]);
    stored(store.store_shard_messages(&flush.request(reader)).await);
    let mut told = store.find_duplicates(&[id(299), id(301), id(302), id(300), id(303)]).await.unwrap();
    told.sort_unstable();
    assert_eq!(
        told,
        [id(300), id(301)],
        "one with a stream is told apart by its number, and a stream's id is no message's"
    );
    assert!(store.find_duplicates(&[]).await.unwrap().is_empty());
    let mut again = Flush::new(reader, 21, count);
    again.push_as(id(304), None, &["x"]).push_as(id(301), None, &["x"]);
    let again = store.store_shard_messages(&again.request(reader)).await;
    assert!(matches!(again, Err(StoreError::DuplicateMessage { message_id }) if message_id == id(301)), "{again:?}");
    let claimed = store.claim_work(&reader.claim(&[], 100)).await.unwrap();
    assert_eq!(story(&claimed.rows), [format!("{}:1/0>x", id(300).as_u128() as u16)]);
    reader.position = claimed.position;
}

/// What is handed over begins with what its owner knows to be resolved, in this life of the server; the others stay.
async fn a_partition_is_handed_over_exactly<S: Store, C: Coordination>(store: &S, keeper: &C, reader: &mut Reader) {
    let a = reader.incarnation;
    let epoch = store.load(a, &reader.held).await.unwrap().epoch;
    let far = Snapshot::new((1 << 40) + 9, vec![(1 << 40) + 5]);
    let (gone, kept) = (reader.held[0], reader.held[1]);
    let other_life = Release { epoch: Some(Epoch(id(77))), partitions: vec![(kept, Some(far.clone()))] };
    store.keep_resolved(a, &other_life).await.unwrap();
    assert_ne!(store.load(a, &[kept]).await.unwrap().resolved[0].xmax(), far.xmax(), "of another life: nothing");
    let of_it = Release { epoch: Some(epoch), ..other_life };
    store.keep_resolved(a, &of_it).await.unwrap();
    assert_eq!(store.load(a, &[kept]).await.unwrap().resolved[0].to_string(), far.to_string());

    let release = Release { epoch: Some(epoch), partitions: vec![(gone, Some(far.clone()))] };
    let ownership = keeper.release_partitions(a, &release).await.unwrap();
    assert_eq!(ownership, Some(reader.ownership + 1), "a flush that is under way now is not the owner's");
    assert_eq!(keeper.members(a).await.unwrap().free, [gone]);
    assert!(store.load(a, &[gone]).await.is_err(), "it is not owned any more");
    let again = keeper.release_partitions(a, &release).await.unwrap();
    assert_eq!(again, Some(reader.ownership + 2), "asked twice: nothing more to free");

    let taken = keeper.take_partitions(a, &[gone]).await.unwrap().unwrap();
    assert_eq!(taken.held.iter().map(|held| held.fence).max(), Some(3), "handed over, taken");
    assert_eq!(store.load(a, &[gone]).await.unwrap().resolved[0].to_string(), far.to_string());
    reader.ownership = taken.ownership;
}

/// A clean end frees the partitions with what was resolved; the old incarnation writes nothing any more.
async fn a_successor_starts_where_the_cursor_stands<S: Store, C: Coordination>(
    store: &S,
    keeper_a: &C,
    keeper_b: &C,
    reader: &mut Reader,
) {
    let a = reader.incarnation;
    let (b, _) = keeper_b.register_instance(&registration(2, "b"), LEASE_MS).await.unwrap();
    let members = keeper_b.members(b).await.unwrap();
    assert_eq!((members.others.len(), members.free.len() as u32), (1, 0));
    assert!(keeper_a.withdraw_instance(a).await.unwrap());
    let withdrawn = keeper_b.members(b).await.unwrap().others[0];
    assert!(!withdrawn.owns && withdrawn.held > 0, "it takes none, and still owns");
    let member = members.others[0];
    assert_eq!((member.incarnation, member.counter, member.expired), (a, 1, false));
    for early in [true, false] {
        assert!(!keeper_b.mark_dead(member, early).await.unwrap(), "it lives: early {early}");
    }
    let cursor = SettleRequest {
        ownership: reader.ownership,
        cursor: Some(reader.position.read.clone()),
        ..SettleRequest::default()
    };
    assert!(matches!(store.settle(a, &cursor).await.unwrap(), SettleReply::Settled { .. }));
    keeper_a.deregister_instance(a).await.unwrap();
    let absent = store.find_flush(reader.origin(99), &[id(10)], &[1], 0).await;
    assert!(matches!(absent, Err(StoreError::Refused { .. })), "its absence proves nothing now: {absent:?}");
    assert_eq!(keeper_a.renew_lease(a, LEASE_MS).await.unwrap(), Renewed::Dead);
    assert_eq!(keeper_a.take_partitions(a, &reader.held).await.unwrap(), None);
    let late = SettleRequest { cursor: Some(Snapshot::new((1 << 40) + 3, Vec::new())), ..SettleRequest::default() };
    assert_eq!(store.settle(a, &late).await.unwrap(), SettleReply::Fenced);

    let taken = keeper_b.take_partitions(b, &reader.held).await.unwrap().unwrap();
    assert_eq!(taken.held.len(), reader.held.len());
    let fences = taken.held.iter().map(|held| held.fence);
    assert!(fences.clone().skip(1).all(|fence| fence == 3), "one step to be freed, one to be taken");
    assert_eq!(fences.max(), Some(5), "and twice that for the one that was handed over before");
    let load = store.load(b, &reader.held).await.unwrap();
    // Two of them were handed over with sets of their own.
    for resolved in &load.resolved[2..] {
        assert_eq!(resolved.xmax(), reader.position.read.xmax());
    }
    let mut successor = Reader::new(b, &taken);
    successor.position.read = load.resolved[2].clone();
    let claimed = store.claim_work(&successor.claim(&[], 100)).await.unwrap();
    assert!(claimed.rows.is_empty(), "everything was resolved: {:?}", story(&claimed.rows));

    let maintenance = keeper_b.perform_maintenance(b, 10_000).await.unwrap();
    assert_eq!(maintenance.blocked_by, None);
    keeper_b.deregister_instance(b).await.unwrap();
}
