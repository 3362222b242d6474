//! `store_shard_messages` and `find_flush`: numbers, locks, ownership.

use std::time::Duration;

use corelane::seam::store::{Coordination, LastNumbers, Member, ReadPosition, Store, StoreError, StoreReply};
use uuid::Uuid;

use crate::store_kit::*;
use crate::support::eventually;

#[tokio::test]
async fn a_flush_gives_versions_to_events_and_numbers_to_all() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let (a, b) = (Uuid::now_v7(), Uuid::now_v7());
    let stored = owner.store(&[event(a, "a1"), message(a, "a2"), event(a, "a3"), loose("x"), event(b, "b1")]).await;
    assert!(stored.owned && !stored.foreign, "{stored:?}");
    assert_eq!(stored.looked_up, Some(vec![LastNumbers { seq: 0, version: 0 }; 2]), "new streams are looked up");
    let stored = owner.store(&[event(a, "a4"), message(b, "b2")]).await;
    assert_eq!(stored.looked_up, None, "remembered numbers are used as they are");

    let client = space.schema.client().await;
    let rows = client
        .query(
            "select convert_from(payload, 'UTF8'), stream_seq, version, xid, position from wh_event_store
             union all select convert_from(payload, 'UTF8'), stream_seq, 0, xid, position from wh_outbox order by 5",
            &[],
        )
        .await
        .unwrap();
    let seen: Vec<_> = rows
        .iter()
        .map(|row| format!("{} {} {}", row.get::<_, &str>(0), row.get::<_, i64>(1), row.get::<_, i64>(2)))
        .collect();
    assert_eq!(seen, ["a1 1 1", "a2 2 0", "a3 3 2", "x 1 0", "b1 1 1", "a4 4 3", "b2 2 0"]);
    assert_eq!(rows[5].get::<_, i64>(3) as u64, stored.xid);
    assert_eq!(rows[5].get::<_, i64>(4), stored.position);
}

#[tokio::test]
async fn all_columns_come_back_as_they_went() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let stream = Uuid::now_v7();
    let mut binary = message(stream, "");
    binary.payload = vec![0, 255, 254, 0, 10];
    binary.destinations = vec!["first", "second"];
    owner.store(&[event(stream, "e"), binary.clone(), loose("l")]).await;
    let reply = owner.claim(&ReadPosition::default(), &[], 100).await;
    let rows = &reply.rows;
    assert_eq!(rows.len(), 4, "one row a reference");
    assert_eq!(rows.stream_seq, [1, 2, 2, 1]);
    assert_eq!(rows.version, [1, 0, 0, 0]);
    assert_eq!(rows.bytes(rows.payload[1]), binary.payload);
    assert_eq!(rows.message_id[1], binary.id);
    let names: Vec<_> = rows.reference_destination.iter().map(|id| id.name()).collect();
    assert_eq!(names, ["somewhere", "first", "second", "somewhere"]);
    assert_eq!((rows.stream_id(0), rows.stream_id(3)), (Some(stream), None));
    assert_eq!(rows.correlation_id[0], Uuid::from_u128(7));
    assert!(rows.causation_id[0].is_nil() && rows.metadata[0].len == 0 && rows.content_type[0].len == 0);
    assert_eq!((rows.trace[0].span_id, rows.trace[0].flags), (u64::MAX, 1));
    assert_eq!(reply.logs.iter().map(|log| log.reference_count).collect::<Vec<_>>(), [4]);
}

#[tokio::test]
async fn a_wrong_remembered_number_fails_the_whole_flush() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let stream = Uuid::now_v7();
    owner.store(&[event(stream, "1"), event(stream, "2")]).await;
    owner.last.insert(stream, (1, 1));
    let failed = owner.try_store(&[loose("with it"), event(stream, "3")]).await;
    assert!(matches!(failed, Err(StoreError::NumberTaken)), "{failed:?}");
    let count: i64 = space.schema.client().await.query_one("select count(*) from wh_outbox", &[]).await.unwrap().get(0);
    assert_eq!(count, 0, "nothing of the flush was written");
    owner.last.clear();
    let stored = owner.store(&[event(stream, "3")]).await;
    assert_eq!(stored.looked_up, Some(vec![LastNumbers { seq: 2, version: 2 }]));
}

/// A caller's open transaction, as `store_outbox_messages` locks: the partition shared, the stream exclusively.
async fn hold_stream(space: &Space, stream: Uuid) -> tokio_postgres::Client {
    let client = space.schema.client().await;
    client.batch_execute("begin").await.unwrap();
    let partition = corelane::partition::partition_of(stream, PARTITIONS) as i32;
    client.query("select pg_advisory_xact_lock_shared(wh_lock_class(1), $1)", &[&partition]).await.unwrap();
    client.query("select pg_advisory_xact_lock(wh_lock_class(2), wh_stream_key($1))", &[&stream]).await.unwrap();
    client
}

#[tokio::test]
async fn an_open_transaction_makes_its_own_stream_busy_and_no_other() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let (held, neighbour) = (stream_in(3), stream_in(3));
    let user = hold_stream(&space, held).await;
    let other = stream_in(4);
    assert_eq!(owner.busy(&[event(held, "h"), event(neighbour, "n"), event(other, "o"), loose("l")]).await, [held]);
    let count: i64 = space.schema.client().await.query_one("select count(*) from wh_log", &[]).await.unwrap().get(0);
    assert_eq!(count, 0, "a busy answer wrote nothing");
    // The same partition, another stream: shared with a lock a stream.
    owner.store(&[event(neighbour, "n"), event(other, "o"), loose("l")]).await;
    user.batch_execute("commit").await.unwrap();
    owner.store(&[event(held, "h")]).await;
}

#[tokio::test]
async fn an_exclusively_held_partition_makes_all_its_streams_busy() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let client = space.schema.client().await;
    client.batch_execute("begin; select pg_advisory_xact_lock(wh_lock_class(1), 5)").await.unwrap();
    let (inside, outside) = (stream_in(5), stream_in(6));
    assert_eq!(owner.busy(&[event(inside, "i"), event(outside, "o")]).await, [inside]);
    owner.store(&[event(outside, "o")]).await;
}

#[tokio::test]
async fn beyond_256_streams_in_contested_partitions_the_rest_is_busy() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let client = space.schema.client().await;
    client.batch_execute("begin; select pg_advisory_xact_lock_shared(wh_lock_class(1), 5)").await.unwrap();
    let many: Vec<_> = (0..300).map(|n| event(stream_in(5), &n.to_string())).collect();
    let busy = owner.busy(&many).await;
    assert_eq!(busy.len(), 44);
    let rest: Vec<_> = many.iter().filter(|m| !busy.contains(&m.stream.unwrap())).cloned().collect();
    owner.store(&rest).await;
}

#[tokio::test]
async fn another_writers_rows_outside_what_was_read_are_foreign() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let stream = Uuid::now_v7();
    owner.store(&[event(stream, "1")]).await;
    assert!(!owner.store(&[event(stream, "2")]).await.foreign);
    // Another process stores: it holds nothing, so its log rows are not owned.
    let mut stranger = space.owner(1).await;
    assert!(stranger.taken.held.is_empty());
    let stored = stranger.store(&[message(stream, "3")]).await;
    assert_eq!(stored.looked_up, Some(vec![LastNumbers { seq: 2, version: 2 }]));
    let stored = owner.store(&[event(stream, "4")]).await;
    assert!(stored.foreign && stored.owned);
    assert_eq!(stored.looked_up, Some(vec![LastNumbers { seq: 3, version: 2 }]), "looked up, although remembered");
    let (texts, position) = owner.drain(&ReadPosition::default(), 10).await;
    assert_eq!(texts, ["1", "2", "3", "4"]);
    owner.read = position.read;
    assert!(!owner.store(&[event(stream, "5")]).await.foreign, "it was read");
}

#[tokio::test]
async fn a_transaction_listed_by_the_reader_is_foreign_when_it_commits() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let user = space.schema.client().await;
    user.batch_execute("begin").await.unwrap();
    let open: i64 = user.query_one("select pg_current_xact_id()::text::int8", &[]).await.unwrap().get(0);
    // Something later completes, so that the open one is listed.
    owner.store(&[loose("x")]).await;
    let (_, position) = owner.drain(&ReadPosition::default(), 10).await;
    assert!(position.read.listed().contains(&(open as u64)), "{}", position.read);
    owner.read = position.read.clone();
    insert_foreign_log(&user, &[]).await;
    assert!(!owner.store(&[loose("y")]).await.foreign, "not committed yet");
    user.batch_execute("commit").await.unwrap();
    assert!(owner.store(&[loose("z")]).await.foreign);
}

/// A log row as a caller's transaction writes it, with references to nothing or to these messages of the outbox.
async fn insert_foreign_log(client: &tokio_postgres::Client, lanes: &[Uuid]) {
    client
        .execute(
            "insert into wh_log (position, xid, floor, segment, owned, partition, destination_index, stream_seq,
                version, lane_id, destination)
             select p.position, p.xid, p.floor, 0, false, coalesce(array_agg(3) filter (where l is not null), '{}'),
                coalesce(array_agg(1::int2) filter (where l is not null), '{}'),
                coalesce(array_agg(1::int8) filter (where l is not null), '{}'),
                coalesce(array_agg(0::int8) filter (where l is not null), '{}'), $1, '{somewhere}'
             from wh_draw_position() p left join unnest($1::uuid[]) l on true group by 1, 2, 3",
            &[&lanes],
        )
        .await
        .unwrap();
}

#[tokio::test]
async fn a_dead_incarnation_still_stores_but_not_as_owner() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let heir = space.owner(1).await;
    let stream = Uuid::now_v7();
    owner.store(&[event(stream, "1")]).await;
    let client = space.schema.client().await;
    space.expire(&owner).await;
    let members = heir.coordination.members(heir.incarnation).await.unwrap();
    assert_eq!(members.others.len(), 1);
    assert!(heir.coordination.mark_dead(members.others[0], false).await.unwrap());
    let stored = owner.store(&[event(stream, "2")]).await;
    assert!(!stored.owned);
    assert_eq!(stored.looked_up, Some(vec![LastNumbers { seq: 1, version: 1 }]), "looked up, although remembered");
    let owned: Vec<bool> = client
        .query("select owned from wh_log order by position", &[])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(owned, [true, false]);
}

#[tokio::test]
async fn references_of_partitions_that_are_not_held_stand_in_rows_of_their_own() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let (mine, theirs) = (stream_in(2), stream_in(9));
    owner.taken.held.retain(|held| held.partition != 9);
    owner.store(&[event(theirs, "t1"), event(mine, "m1"), event(theirs, "t2"), event(mine, "m2")]).await;
    let client = space.schema.client().await;
    let rows = client.query("select owned, partition, version from wh_log order by position", &[]).await.unwrap();
    let seen: Vec<(bool, Vec<i32>, Vec<i64>)> = rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    assert_eq!(seen, [(true, vec![2, 2], vec![1, 2]), (false, vec![9, 9], vec![1, 2])]);
}

#[tokio::test]
async fn long_flushes_and_many_names_are_cut_into_log_rows_of_one_page() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let stream = Uuid::now_v7();
    let names: Vec<&'static str> = (0..40).map(|n| &*format!("{n:0>200}").leak()).collect();
    let mut many: Vec<_> = (0..500).map(|n| event(stream, &n.to_string())).collect();
    many[250].destinations = names.clone();
    owner.store(&many).await;
    let client = space.schema.client().await;
    let toasted: i64 = client
        .query_one(
            "select coalesce(sum(pg_relation_size(c.reltoastrelid)), 0)::int8 from pg_class c
             where c.oid in ('wh_log_0'::regclass, 'wh_log_1'::regclass, 'wh_log_2'::regclass)",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert_eq!(toasted, 0, "no log row needs TOAST");
    let reply = owner.claim(&ReadPosition::default(), &[], 10_000).await;
    let expected: Vec<String> =
        (0..500).flat_map(|n: i32| vec![n.to_string(); if n == 250 { 40 } else { 1 }]).collect();
    assert_eq!(payloads(&reply.rows), expected);
    let of_many: Vec<_> = reply.rows.reference_destination[250..290].iter().map(|id| id.name()).collect();
    assert_eq!(of_many, names);
}

#[tokio::test]
async fn scheduled_messages_wait_beside_the_log() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let stream = stream_in(1);
    let mut later = message(stream, "later");
    later.due_unix_us = 4_000_000_000_000_000;
    later.destinations = vec!["first", "second"];
    let mut loose_later = loose("loose");
    loose_later.due_unix_us = 4_000_000_000_000_001;
    owner.store(&[message(stream, "now"), later, message(stream, "also now"), loose_later]).await;
    let client = space.schema.client().await;
    let rows = client
        .query(
            "select stream_id, destination, (extract(epoch from due) * 1000000)::int8, convert_from(payload, 'UTF8')
             from wh_scheduled order by due",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(rows[0].get::<_, Option<Uuid>>(0), Some(stream));
    assert_eq!(rows[0].get::<_, Vec<String>>(1), ["first", "second"]);
    assert_eq!(rows[0].get::<_, i64>(2), 4_000_000_000_000_000);
    assert_eq!(rows[1].get::<_, Option<Uuid>>(0), None);
    assert_eq!(rows[1].get::<_, Vec<String>>(1), ["somewhere"]);
    let reply = owner.claim(&ReadPosition::default(), &[], 10).await;
    assert_eq!(payloads(&reply.rows), ["now", "also now"]);
    assert_eq!(reply.rows.stream_seq, [1, 2]);
    assert!(reply.scheduled_in_ms.unwrap() > 1_000_000);
}

#[tokio::test]
async fn numbers_survive_the_truncation_of_the_segment_that_held_them() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let stream = Uuid::now_v7();
    owner.store(&[event(stream, "1"), message(stream, "2")]).await;
    let client = space.schema.client().await;
    client
        .batch_execute(
            "insert into wh_stream (stream_id, last_seq) select lane_id, max(stream_seq) from wh_outbox group by 1;
             truncate wh_outbox_0, wh_log_0",
        )
        .await
        .unwrap();
    owner.last.clear();
    let stored = owner.store(&[message(stream, "3")]).await;
    assert_eq!(stored.looked_up, Some(vec![LastNumbers { seq: 2, version: 1 }]));
}

#[tokio::test]
async fn a_lost_flush_is_looked_up_behind_its_own_lock() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let (stream, other) = (Uuid::now_v7(), Uuid::now_v7());
    owner.store(&[event(stream, "1")]).await;
    let before = owner.store(&[message(stream, "2"), event(stream, "3"), message(other, "o")]).await;
    let found = owner
        .store
        .find_flush(owner.origin(), &[stream, other, Uuid::now_v7()], &[2, 1, 0], before.xid)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(
        (found.xid, found.epoch, found.position, found.owned),
        (before.xid, before.epoch, before.position, true)
    );
    let last = |seq, version| LastNumbers { seq, version };
    assert_eq!(found.looked_up, Some(vec![last(1, 1), last(0, 0), last(0, 0)]));

    // One that is still committing: the look-up waits for it instead of finding nothing.
    let mut committing = owner.origin();
    committing.flush_number += 1;
    let user = space.schema.client().await;
    user.batch_execute("begin").await.unwrap();
    let (number, flush) = (committing.incarnation.number, committing.flush_number);
    user.query("select pg_advisory_xact_lock(wh_lock_class(7), wh_flush_key($1, 0::int2))", &[&number]).await.unwrap();
    user.execute(
        "insert into wh_log (position, xid, floor, flush_number, incarnation, shard, segment, owned, partition,
            destination_index, stream_seq, version, lane_id, destination)
         select position, xid, floor, $1, $2, 0, 0, true, '{}', '{}', '{}', '{}', '{}', '{}' from wh_draw_position()",
        &[&flush, &number],
    )
    .await
    .unwrap();
    let looking = owner.store.find_flush(committing, &[], &[], before.xid);
    let finishing = async {
        let watch = space.schema.client().await;
        eventually("the look-up waits", Duration::from_secs(5), || async { waits_for_class(&watch, 7).await }).await;
        user.batch_execute("commit").await.unwrap();
    };
    let (found, ()) = tokio::join!(looking, finishing);
    assert!(found.unwrap().is_some());
    committing.flush_number += 1;
    assert_eq!(owner.store.find_flush(committing, &[], &[], before.xid).await.unwrap(), None);
}

#[tokio::test]
async fn a_flush_that_was_not_found_is_given_up_should_it_arrive_yet() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    owner.store(&[loose("first")]).await;
    // Its connection was lost before the server had begun with it.
    let mut next = owner.origin();
    next.flush_number += 1;
    assert_eq!(owner.store.find_flush(next, &[], &[], 0).await.unwrap(), None);
    match owner.try_store(&[loose("second")]).await {
        Err(StoreError::Refused { sqlstate, .. }) => assert_eq!(sqlstate, "CL004"),
        other => panic!("the caller was told that it is sent again, and here it is: {other:?}"),
    }
    assert!(matches!(owner.try_store(&[loose("second, sent again")]).await, Ok(StoreReply::Stored(_))));
}

#[tokio::test]
async fn a_dropped_call_takes_its_connection_along() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    owner.store(&[loose("first")]).await;
    let blocker = space.schema.client().await;
    blocker.batch_execute("begin; lock table wh_log_0 in access exclusive mode").await.unwrap();
    let second = [loose("second")];
    {
        let call = owner.try_store(&second);
        let mut call = std::pin::pin!(call);
        let watch = space.schema.client().await;
        let waits = eventually("the flush waits", Duration::from_secs(5), || async {
            let sql = "select count(*) from pg_locks where relation = 'wh_log_0'::regclass and not granted";
            watch.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) > 0
        });
        tokio::select! {
            reply = &mut call => panic!("{reply:?}"),
            () = waits => {}
        }
    }
    // The abandoned one is still on the server. A look-up does not queue behind it on its connection: it waits on
    // another one, for the lock.
    let origin = owner.origin();
    let looking = owner.store.find_flush(origin, &[], &[], 0);
    let ending = async {
        let watch = space.schema.client().await;
        eventually("the look-up waits", Duration::from_secs(5), || async { waits_for_class(&watch, 7).await }).await;
        blocker.batch_execute("commit").await.unwrap();
    };
    let (found, ()) = tokio::join!(looking, ending);
    found.unwrap();
    assert!(matches!(owner.try_store(&[loose("third")]).await, Ok(StoreReply::Stored(_))));
}

#[tokio::test]
async fn two_incarnations_flush_at_once_without_waiting() {
    let space = Space::new().await;
    let mut first = space.owner(1).await;
    let mut second = space.owner(1).await;
    let streams: Vec<_> = (0..PARTITIONS).map(stream_in).collect();
    for round in 0..10 {
        let text = round.to_string();
        let of_first: Vec<_> = streams.iter().map(|stream| event(*stream, &text)).collect();
        let of_second: Vec<_> = (0..PARTITIONS).map(|p| event(stream_in(p), &text)).collect();
        let (one, two) = tokio::join!(first.try_store(&of_first), second.try_store(&of_second));
        for reply in [one, two] {
            assert!(reply.is_ok(), "{reply:?}");
        }
    }
    let dead = Member {
        incarnation: second.incarnation,
        counter: 0,
        expired: false,
        connected: false,
        direct: true,
        owns: true,
        held: 0,
    };
    assert!(!first.coordination.mark_dead(dead, true).await.unwrap(), "its session lock is held");
}
