//! Messages without a stream: a lane of their own also where their id is a stream's, and every double of one in sight.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use corelane::message::Enqueue;
use corelane::partition::partition_of;
use corelane::seam::store::{DeadLetter, ReadPosition, SettleReply, SettleRequest, Spill, Store, StoreError};
use corelane::transport::memory::Fault;
use corelane::{RawMessage, Wishes};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::engine::{Seen, Sink, start};
use crate::outbox_kit::call;
use crate::store_kit::{Message, PARTITIONS, Space, destination, event, loose, message};
use crate::support::eventually;

/// Three of the stream, of this kind.
fn of_stream(stream: Uuid, is_event: bool) -> Vec<Message> {
    ["1", "2", "3"].map(|text| Message { event: is_event, ..message(stream, text) }).to_vec()
}

/// A message without stream, under a stream's id.
fn under(stream: Uuid) -> Message {
    Message { id: stream, ..loose("alone") }
}

/// Everything of the stream came in order, and the message of its id came as well.
fn assert_all_came(seen: &[Seen], stream: Uuid, how: &str) {
    let numbers: Vec<i64> =
        seen.iter().filter(|seen| seen.stream_id == Some(stream)).map(|seen| seen.stream_seq).collect();
    assert_eq!(numbers, [1, 2, 3], "{how}: the stream");
    let alone = seen.iter().filter(|seen| seen.message_id == stream);
    let alone: Vec<_> = alone.map(|seen| (seen.stream_id, seen.stream_seq, seen.payload.as_slice())).collect();
    assert_eq!(alone, [(None, 1, b"alone".as_slice())], "{how}: the message of its id");
}

/// Orders in which the two meet, and whether in one batch.
const WAYS: [(&str, bool, bool); 4] = [
    ("stream first", false, false),
    ("message first", true, false),
    ("stream first, one batch", false, true),
    ("message first, one batch", true, true),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_message_may_have_the_id_of_a_stream_in_an_engines_flushes() {
    let space = Space::new().await;
    let sink = Sink::default();
    let engine = start(&space.schema, sink.transport()).await;
    let mut count = 0;
    let mut stories = Vec::new();
    for is_event in [true, false] {
        for (way, message_first, one_batch) in WAYS {
            let stream = Uuid::now_v7();
            let plain = RawMessage::command("test.alone", b"alone").to(&["sink"]);
            let alone = plain.with(Wishes::new().message_id(stream));
            let base =
                if is_event { RawMessage::event("test.of", b"{}") } else { RawMessage::command("test.of", b"{}") };
            let of = base.stream(stream).to(&["sink"]);
            let numbers: Vec<i64> = if one_batch {
                let mut unit = engine.unit_of_work();
                if message_first {
                    unit.push(&alone).unwrap();
                }
                for _ in 0..3 {
                    unit.push(&of).unwrap();
                }
                if !message_first {
                    unit.push(&alone).unwrap();
                }
                let receipts = unit.commit().await.unwrap_or_else(|error| panic!("{way}, events {is_event}: {error}"));
                receipts.iter().filter(|of| of.message_id != stream).map(|of| of.stream_seq).collect()
            } else {
                let mut numbers = Vec::new();
                for turn in 0..4 {
                    let is_alone = turn == if message_first { 0 } else { 3 };
                    let stored = if is_alone { engine.enqueue(&alone).await } else { engine.enqueue(&of).await };
                    let stored = stored.unwrap_or_else(|error| panic!("{way}, events {is_event}: {error}"));
                    numbers.extend((!is_alone).then_some(stored.stream_seq));
                    count += 1;
                    // Published before the next: one that is taken for an old number of the lane would be passed over.
                    sink.wait_for(count).await;
                }
                numbers
            };
            assert_eq!(numbers, [1, 2, 3], "{way}, events {is_event}");
            count = count.max(stories.len() * 4 + 4);
            sink.wait_for(count).await;
            stories.push((stream, format!("{way}, events {is_event}")));
        }
    }
    // The same id without stream once more is a double, by its own name.
    let again = RawMessage::command("test.alone", b"again").to(&["sink"]);
    let again = again.with(Wishes::new().message_id(stories[0].0));
    let refused = engine.enqueue(&again).await.unwrap_err();
    assert!(
        matches!(refused, corelane::Error::DuplicateMessage { message_id } if message_id == stories[0].0),
        "{refused}"
    );
    engine.shutdown(Duration::from_secs(10)).await;
    for (stream, how) in stories {
        assert_all_came(&sink.all(), stream, &how);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_may_have_the_id_of_a_stream_in_plain_sql() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let mut stories = Vec::new();
    for is_event in [true, false] {
        for (way, message_first, one_batch) in WAYS {
            let stream = Uuid::now_v7();
            let mut all = of_stream(stream, is_event);
            all.insert(if message_first { 0 } else { 3 }, under(stream));
            let mut numbers = Vec::new();
            for batch in all.chunks(if one_batch { 4 } else { 1 }) {
                let numbered = call(&client, batch).await.unwrap_or_else(|error| panic!("{way}, {is_event}: {error}"));
                numbers.extend(numbered.iter().filter(|one| one.message_id != stream).filter_map(|one| one.seq));
            }
            assert_eq!(numbers, [1, 2, 3], "{way}, events {is_event}");
            stories.push((stream, format!("{way}, events {is_event}")));
        }
    }
    let sink = Sink::default();
    let engine = start(&space.schema, sink.transport()).await;
    sink.wait_for(stories.len() * 4).await;
    engine.shutdown(Duration::from_secs(10)).await;
    for (stream, how) in stories {
        assert_all_came(&sink.all(), stream, &how);
    }
}

#[tokio::test]
async fn every_double_of_a_due_message_is_a_dead_letter_of_its_own() {
    let space = Space::new().await;
    let (client, owner) = (space.schema.client().await, space.owner(1).await);
    let (twice, often) = (Uuid::now_v7(), Uuid::now_v7());
    let due = |id: Uuid, text: &str| Message { id, due_unix_us: 1, destinations: vec!["b", "a"], ..loose(text) };
    call(&client, &[Message { destinations: vec!["a"], ..due(often, "stored") }]).await.unwrap();
    let release = async || owner.store.release_scheduled(owner.incarnation, &owner.held(), 100).await.unwrap();
    assert_eq!(release().await, 1);
    let texts = ["one", "two", "three"];
    call(&client, &texts.map(|text| due(often, text))).await.unwrap();
    call(&client, &[due(twice, "first"), due(twice, "second")]).await.unwrap();
    assert_eq!(release().await, 1);
    call(&client, &[due(often, "four"), due(twice, "third")]).await.unwrap();
    assert_eq!(release().await, 0);

    assert_eq!(owner.drain(&ReadPosition::default(), 100).await.0, ["stored", "first", "first"]);
    let dead = dead_letters(&client).await;
    let mut expected: Vec<(String, String)> = ["one", "two", "three", "second", "four", "third"]
        .iter()
        .flat_map(|text| ["a", "b"].map(|destination| ((*text).to_owned(), destination.to_owned())))
        .collect();
    expected.sort();
    assert_eq!(dead.iter().map(|dead| (dead.0.clone(), dead.1.clone())).collect::<Vec<_>>(), expected);
    // A key that no number of a stream can take, and by which each can be told from the others.
    assert!(dead.iter().all(|dead| dead.2 < 0), "{dead:?}");
    let left: i64 = client.query_one("select count(*) from wh_scheduled", &[]).await.unwrap().get(0);
    assert_eq!(left, 0);
}

/// Text, destination and key of all dead letters.
async fn dead_letters(client: &Client) -> Vec<(String, String, i64)> {
    let sql = "select convert_from(payload, 'UTF8'), destination, stream_seq from wh_dead_letter";
    let rows = client.query(sql, &[]).await.unwrap();
    let mut dead: Vec<_> = rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    dead.sort();
    dead
}

#[tokio::test(flavor = "multi_thread")]
async fn what_version_1_stored_without_stream_is_kept_and_published_with_its_body() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let stored = call(&client, &[loose("old")]).await.unwrap();
    client
        .batch_execute("update wh_outbox set lane_id = message_id; update wh_log set lane_id = array[o.message_id] from wh_outbox o")
        .await
        .unwrap();
    let (sink, ill) = (Sink::default(), Arc::new(AtomicBool::new(true)));
    let asked = ill.clone();
    let transport = sink.transport().with_faults(move |_, _| {
        if asked.load(Ordering::SeqCst) { Fault::Refuse("ill".to_owned()) } else { Fault::None }
    });
    let engine = start(&space.schema, transport).await;
    let kept = "select count(*) from wh_parked_reference where payload is not null";
    let kept = || async { client.query_one(kept, &[]).await.unwrap().get::<_, i64>(0) };
    eventually("it is kept beside the log", Duration::from_secs(60), || async { kept().await == 1 }).await;
    ill.store(false, Ordering::SeqCst);
    sink.wait_for(1).await;
    engine.shutdown(Duration::from_secs(10)).await;
    assert_eq!((sink.all()[0].message_id, sink.all()[0].payload.as_slice()), (stored[0].message_id, b"old".as_slice()));
    assert!(dead_letters(&client).await.is_empty());
}

/// A program of version 1 claims it, and takes its id for its lane.
#[tokio::test]
async fn what_is_stored_without_stream_keeps_its_body_when_version_1_cannot_publish_it() {
    let space = Space::new().await;
    let (client, owner) = (space.schema.client().await, space.owner(1).await);
    let (kept, dead) = (loose("kept"), loose("dead"));
    call(&client, &[kept.clone(), dead.clone()]).await.unwrap();
    let (destination, partition) = (destination("elsewhere"), |id| partition_of(id, PARTITIONS));
    let spill = |lane_id| Spill { lane_id, destination, partition: partition(lane_id), stream_seq: 1, version: 0 };
    let request = SettleRequest {
        spill: vec![spill(kept.id)],
        dead: vec![DeadLetter {
            lane_id: dead.id,
            destination,
            unnamed: None,
            partition: partition(dead.id),
            stream_seq: 1,
            version: 0,
            attempts: 1,
            reason: 99,
            error: String::new(),
            error_cut: false,
        }],
        ..SettleRequest::default()
    };
    let reply = owner.store.settle(owner.incarnation, &request).await.unwrap();
    assert!(matches!(reply, SettleReply::Settled { .. }), "{reply:?}");
    let sql = "select convert_from(payload, 'UTF8') from wh_parked_reference
        union all select convert_from(payload, 'UTF8') from wh_dead_letter";
    let bodies: Vec<Option<String>> = client.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert_eq!(bodies, [Some("kept".to_owned()), Some("dead".to_owned())]);
}

#[tokio::test]
async fn a_double_is_told_by_its_message_not_by_a_stream_of_the_same_id() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let stream = Uuid::now_v7();
    owner.store(&of_stream(stream, false)).await;
    owner.store(&[event(stream, "4"), under(stream)]).await;
    match owner.try_store(&[message(stream, "5"), under(stream)]).await {
        Err(StoreError::DuplicateMessage { message_id }) => assert_eq!(message_id, stream),
        other => panic!("{other:?}"),
    }
    owner.store(&[message(stream, "5")]).await;
    assert_eq!(owner.drain(&ReadPosition::default(), 100).await.0, ["1", "2", "3", "4", "alone", "5"]);
}
