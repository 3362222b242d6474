//! Hard case foreign-writer: whoever stores on a stream, it stays with the owner of its partition, in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use corelane::partition::partition_of;
use corelane::{Config, Engine, RawMessage};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::engine::{Sink, config};
use crate::outbox_kit::call;
use crate::store_kit::{PARTITIONS, event, message};
use crate::support::{eventually, schema};

const PATIENCE: Duration = Duration::from_secs(60);
const STREAMS: usize = 20;
const TEXTS: [&str; 8] = ["1 owner", "2 engine", "3 plain", "4 enlisted", "5 owner", "6 worker", "7 engine", "8 owner"];

async fn start(config: &Config, sink: &Sink) -> Engine {
    // Something of a stream is on its way while the next is stored.
    let transport = sink.transport().with_delay(|| Duration::from_millis(1));
    Engine::builder(config.clone()).transport(transport).migrate(true).start().await.unwrap()
}

async fn store(engine: &Engine, stream: Uuid, text: &str) {
    let of = RawMessage::event("test.case", text.as_bytes()).stream(stream).to(&["somewhere"]);
    engine.enqueue(&of).await.expect("stored");
}

/// Partition, owner and fence of all.
async fn owners(client: &Client) -> Vec<(i32, i32, i64)> {
    let rows = client.query("select partition, owner, fence from wh_partition order by 1", &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect()
}

/// B stores on streams of A, in every way there is: by its engine, in plain SQL, enlisted, as a worker that only stores.
#[tokio::test(flavor = "multi_thread")]
async fn foreign_writer_leaves_a_stream_with_its_owner_and_in_order() {
    let schema = schema();
    let mut config = config(&schema);
    // Nothing moves because a slow machine was late.
    for (key, value) in [("lease.ttl_ms", "120000"), ("service.name", "tests")] {
        config.set(key, value).unwrap();
    }
    let (of_a, of_b) = (Sink::default(), Sink::default());
    let a = start(&config, &of_a).await;
    eventually("A has all", PATIENCE, async || a.partitions_held() == PARTITIONS as usize).await;
    let b = start(&config, &of_b).await;
    eventually("they share", PATIENCE, async || {
        [a.partitions_held(), b.partitions_held()] == [PARTITIONS as usize / 2; 2]
    })
    .await;
    let (mut plain, worker) = (schema.client().await, Uuid::now_v7());
    let held = a.held_partitions();
    let is_as = |stream: &Uuid| held.contains(&partition_of(*stream, PARTITIONS));
    let streams: Vec<Uuid> = std::iter::repeat_with(Uuid::now_v7).filter(is_as).take(STREAMS).collect();
    let before = owners(&plain).await;

    for stream in &streams {
        store(&a, *stream, TEXTS[0]).await;
        store(&b, *stream, TEXTS[1]).await;
        call(&plain, &[message(*stream, TEXTS[2])]).await.expect("stored");
        let transaction = plain.transaction().await.unwrap();
        let of = RawMessage::command("test.case", TEXTS[3].as_bytes()).stream(*stream).to(&["somewhere"]);
        let enlisted = b.outbox().push(&of).unwrap().enlist(&transaction).await.unwrap();
        transaction.commit().await.unwrap();
        enlisted.announce();
        store(&a, *stream, TEXTS[4]).await;
        let stores = "select * from process_work_batch($1, 'tests', p_max_streams_per_batch => 0,
            p_new_outbox_messages => array[$2::uuid], p_new_outbox_stream_ids => array[$3::uuid],
            p_new_outbox_types => array['t'], p_new_outbox_payloads => array[$4::bytea],
            p_new_outbox_is_event => array[true], p_new_outbox_destinations => array['somewhere'])";
        plain.query(stores, &[&worker, &Uuid::now_v7(), stream, &TEXTS[5].as_bytes()]).await.expect("stored");
        store(&b, *stream, TEXTS[6]).await;
        store(&a, *stream, TEXTS[7]).await;
    }
    of_a.wait_for(STREAMS * TEXTS.len()).await;
    assert_eq!(owners(&plain).await, before, "the owner stays, and so does its fence");
    // B's own streams, meanwhile and after it, are B's.
    let of_other = std::iter::repeat_with(Uuid::now_v7).find(|stream| !is_as(stream)).unwrap();
    call(&plain, &[event(of_other, "B's")]).await.expect("stored");
    of_b.wait_for(1).await;
    for engine in [b, a] {
        engine.shutdown(Duration::from_secs(10)).await;
    }
    assert!(of_b.all().iter().all(|seen| seen.stream_id == Some(of_other)), "{:?}", of_b.all());
    let all = of_a.all();
    for stream in &streams {
        let texts: Vec<String> = (all.iter().filter(|seen| seen.stream_id == Some(*stream)))
            .map(|seen| String::from_utf8_lossy(&seen.payload).into_owned())
            .collect();
        assert_eq!(texts, TEXTS, "once each, in the order of storing");
    }
}

/// A dozen callers of plain SQL queue for the lock of one stream without a pause, each for a moment: there is no gap that
/// a try could find. Its owner has its turn all the same.
#[tokio::test(flavor = "multi_thread")]
async fn foreign_writers_that_leave_no_gap_do_not_starve_the_owner() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&config(&schema), &sink).await;
    let (stream, over) = (Uuid::now_v7(), Arc::new(AtomicBool::new(false)));
    let mut callers = tokio::task::JoinSet::new();
    // Their queue is longer than the first wait of the owner's flush.
    for _ in 0..12 {
        let (mut client, over) = (schema.client().await, over.clone());
        callers.spawn(async move {
            let mut stored = 0;
            while !over.load(Ordering::SeqCst) {
                let transaction = client.transaction().await.unwrap();
                call(&transaction, &[message(stream, "plain")]).await.expect("stored");
                transaction.execute("select pg_sleep(0.01)", &[]).await.unwrap();
                transaction.commit().await.unwrap();
                stored += 1;
            }
            stored
        });
    }
    let watch = schema.client().await;
    eventually("they queue", PATIENCE, async || {
        let sql = "select count(*) from pg_locks where locktype = 'advisory' and not granted";
        watch.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) > 6
    })
    .await;
    for _ in 0..5 {
        tokio::time::timeout(PATIENCE, store(&engine, stream, "owner")).await.expect("the owner's turn came");
    }
    over.store(true, Ordering::SeqCst);
    let stored: usize = callers.join_all().await.into_iter().sum();
    sink.wait_for(stored + 5).await;
    engine.shutdown(Duration::from_secs(10)).await;
    let numbers: Vec<i64> = sink.all().iter().map(|seen| seen.stream_seq).collect();
    assert!(numbers.iter().copied().eq(1..=stored as i64 + 5), "each once and in order: {numbers:?}");
}
