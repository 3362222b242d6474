//! A message that somebody has deleted before it was published, or whose destination cannot be used: it ends in the
//! dead letters, and holds up nothing.

use std::time::Duration;

use corelane::RawMessage;
use corelane::partition::partition_of;
use corelane::seam::store::ReadPosition;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::engine::{Sink, start};
use crate::outbox_kit::call;
use crate::store_kit::{PARTITIONS, Space, event};
use crate::support::eventually;

async fn delete_second(client: &Client, stream: Uuid) {
    let deleted = client.execute("delete from wh_event_store where stream_id = $1 and version = 2", &[&stream]).await;
    assert_eq!(deleted.unwrap(), 1);
}

/// Number, reason, attempts and text of the stream's dead letters.
async fn dead(client: &Client, stream: Uuid) -> Vec<(i64, i16, i32, String)> {
    let sql = "select stream_seq, reason, attempts, error from wh_dead_letter where lane_id = $1 order by stream_seq";
    let rows = client.query(sql, &[&stream]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3))).collect()
}

fn numbers(sink: &Sink, stream: Uuid) -> Vec<i64> {
    sink.all().iter().filter(|seen| seen.stream_id == Some(stream)).map(|seen| seen.stream_seq).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_deleted_before_it_was_claimed_is_dead_and_its_stream_goes_on() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let (stream, other) = (Uuid::now_v7(), Uuid::now_v7());
    call(&client, &[event(stream, "1"), event(stream, "2"), event(stream, "3"), event(other, "1")]).await.unwrap();
    delete_second(&client, stream).await;
    let sink = Sink::default();
    let engine = start(&space.schema, sink.transport()).await;
    sink.wait_for(3).await;
    let later = RawMessage::event("test.later", b"4").stream(stream).to(&["somewhere"]);
    assert_eq!(engine.enqueue(&later).await.unwrap().stream_seq, 4);
    sink.wait_for(4).await;
    let missing = || engine.shards().iter().map(|shard| shard.metrics.messages_missing.get()).sum::<u64>();
    assert_eq!(missing(), 1);
    let report = engine.shutdown(Duration::from_secs(10)).await;
    assert!(report.drained, "{report:?}");
    assert_eq!((numbers(&sink, stream), numbers(&sink, other)), (vec![1, 3, 4], vec![1]));
    let dead = dead(&client, stream).await;
    assert_eq!(dead.len(), 1);
    assert_eq!((dead[0].0, dead[0].1, dead[0].2), (2, 7, 0));
    assert!(dead[0].3.starts_with("CL001"), "{}", dead[0].3);
    // Nothing is claimed again: the cursor has passed it.
    let heir = space.owner(1).await;
    let load = corelane::seam::store::Store::load(&heir.store, heir.incarnation, &heir.held()).await.unwrap();
    let at = heir.held().iter().position(|held| *held == partition_of(stream, PARTITIONS)).unwrap();
    let read = load.resolved[at].clone();
    let claimed = heir.claim(&ReadPosition { read, ..ReadPosition::default() }, &[], 100).await;
    assert!(claimed.rows.is_empty(), "{:?}", claimed.rows.stream_seq);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_deleted_while_its_stream_is_parked_is_dead_and_the_rest_is_drained() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let stream = Uuid::now_v7();
    let sink = Sink::default();
    let ill = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let tries = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (asked, noted) = (ill.clone(), tries.clone());
    let transport = sink.transport().with_faults(move |_, _| {
        if asked.load(std::sync::atomic::Ordering::SeqCst) {
            noted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            corelane::transport::memory::Fault::Refuse("ill".to_owned())
        } else {
            corelane::transport::memory::Fault::None
        }
    });
    call(&client, &[event(stream, "1"), event(stream, "2"), event(stream, "3")]).await.unwrap();
    let engine = start(&space.schema, transport).await;
    let kept =
        || async { client.query_one("select count(*) from wh_parked_reference", &[]).await.unwrap().get::<_, i64>(0) };
    eventually("all three are kept beside the log", Duration::from_secs(60), || async { kept().await == 3 }).await;
    delete_second(&client, stream).await;
    // One try may have read it before: what the second one sends was read after.
    let tried = || tries.load(std::sync::atomic::Ordering::SeqCst);
    let before = tried();
    eventually("two more tries", Duration::from_secs(60), || async { tried() >= before + 2 }).await;
    ill.store(false, std::sync::atomic::Ordering::SeqCst);
    sink.wait_for(2).await;
    let parked = || async { client.query_one("select count(*) from wh_parked", &[]).await.unwrap().get::<_, i64>(0) };
    eventually("the lane is free again", Duration::from_secs(60), || async { parked().await == 0 }).await;
    engine.shutdown(Duration::from_secs(10)).await;
    assert_eq!((numbers(&sink, stream), kept().await), (vec![1, 3], 0));
    let dead = dead(&client, stream).await;
    assert_eq!(dead.iter().map(|dead| dead.0).collect::<Vec<_>>(), [2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_that_can_have_no_number_costs_its_own_references_only() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let (stream, other) = (Uuid::now_v7(), Uuid::now_v7());
    call(&client, &[event(stream, "1"), event(stream, "2")]).await.unwrap();
    // As good as the 4,097th name of a process: none is given a number.
    let long = "n".repeat(300);
    let renamed = client.execute("update wh_log set destination = array[$1::text]", &[&long]).await.unwrap();
    assert_eq!(renamed, 1);
    call(&client, &[event(other, "1"), event(stream, "3")]).await.unwrap();
    client
        .execute(
            "insert into wh_parked (stream_seq, due, lane_id, partition, attempts, reason, error_cut, destination, error)
             values (1, now(), $1, $2, 1, 0, false, $3, '')",
            &[&Uuid::now_v7(), &(partition_of(stream, PARTITIONS) as i32), &long],
        )
        .await
        .unwrap();
    let sink = Sink::default();
    let engine = start(&space.schema, sink.transport()).await;
    sink.wait_for(2).await;
    let count = || async {
        let sql = "select count(*) from wh_dead_letter where destination = $1 and message_id is not null";
        client.query_one(sql, &[&long]).await.unwrap().get::<_, i64>(0)
    };
    eventually("both are dead letters", Duration::from_secs(60), || async { count().await == 2 }).await;
    let report = engine.shutdown(Duration::from_secs(10)).await;
    assert!(report.drained, "{report:?}");
    assert_eq!((numbers(&sink, stream), numbers(&sink, other)), (vec![3], vec![1]));
    let dead = dead(&client, stream).await;
    assert_eq!(dead.iter().map(|dead| (dead.0, dead.1)).collect::<Vec<_>>(), [(1, 99), (2, 99)]);
    assert!(dead[0].3.contains("1 to 255 bytes"), "{}", dead[0].3);
}
