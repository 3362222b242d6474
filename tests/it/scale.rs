//! One stream of a million events, a million streams of ten: what each costs does not grow with them. By hand:
//!
//! cargo test --test it -- --ignored --nocapture --test-threads 1 scale::
//!
//! `CORELANE_TEST_EVENTS` and `CORELANE_TEST_STREAMS` ask for fewer. Held by counts and bytes; the times are printed only.

use std::time::Instant;

use corelane::message::{Enqueue, Expected};
use corelane::{RawMessage, Wishes};
use futures_util::StreamExt;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::dead_letters::SOON;
use crate::engine::{Sink, start};
use crate::store_kit::Space;

/// What the process may grow by while it reads or appends many times as much.
const GROWTH_MIB_MAX: i64 = 64;
const PAYLOAD: [u8; 200] = [b'x'; 200];

fn size(variable: &str, usual: i64) -> i64 {
    std::env::var(variable).map_or(usual, |size| size.parse().unwrap())
}

/// This process's resident memory; the server's is not in it.
fn resident_mib() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let (_, rest) = status.split_once("VmRSS:").unwrap();
    rest.split_whitespace().next().unwrap().parse::<i64>().unwrap() / 1024
}

/// Buffers that a page of a stream touches.
async fn buffers(client: &Client, stream: Uuid, from: i64, rows_max: i32) -> i64 {
    let explain = "explain (analyze, buffers) select from read_stream($1, $2, false, $3)";
    // Twice: the first look fills the catalogue's caches.
    client.query(explain, &[&stream, &from, &rows_max]).await.unwrap();
    let plan = client.query(explain, &[&stream, &from, &rows_max]).await.unwrap();
    let line = plan.iter().map(|row| row.get::<_, String>(0)).find(|line| line.contains("Buffers:")).unwrap();
    line.split(['=', ' ']).filter_map(|word| word.parse::<i64>().ok()).sum()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "writes 1,000,000 events: about a minute and 400 MB"]
async fn a_million_events_of_one_stream_are_read_at_constant_memory() {
    let events = size("CORELANE_TEST_EVENTS", 1_000_000);
    let space = Space::new().await;
    let engine = start(&space.schema, Sink::default().transport()).await;
    let (client, stream) = (space.schema.client().await, Uuid::now_v7());
    let began = Instant::now();
    let fill = "insert into wh_event_store (position, stream_seq, version, xid, stored_at, stream_id, message_id,
            partition, type_name, payload)
        select nextval('wh_position'), n, n, pg_current_xact_id()::text::int8, clock_timestamp(), $1, gen_random_uuid(),
            compute_partition($1, 16), 'test.event', $2
        from generate_series(1, $3::int8) n order by n";
    client.execute(fill, &[&stream, &PAYLOAD.as_slice(), &events]).await.unwrap();
    client.batch_execute("vacuum analyze wh_event_store").await.unwrap();
    println!("{events} events are there after {} ms", began.elapsed().as_millis());

    let (began, mut settled, mut most, mut read) = (Instant::now(), 0, 0, 0);
    let mut all = Box::pin(engine.event_store().read_forwards(stream, 1).events());
    while let Some(event) = all.next().await {
        let event = event.unwrap();
        read += 1;
        assert_eq!((event.version, event.payload.len()), (read, PAYLOAD.len()));
        if read == events / 20 {
            settled = resident_mib();
        }
        if read % 1_000 == 0 {
            most = most.max(resident_mib());
        }
    }
    assert_eq!(read, events);
    println!(
        "read in {} ms; resident: {settled} MiB after a twentieth, {most} MiB at most",
        began.elapsed().as_millis()
    );
    assert!(most - settled <= GROWTH_MIB_MAX, "{settled} MiB, then {most} MiB");

    let (first, last) = (buffers(&client, stream, 1, 500).await, buffers(&client, stream, events - 500, 500).await);
    println!("buffers of a page of 500: {first} the first, {last} the last");
    assert!(last <= first + 20, "the last page costs what the first does: {first}, {last}");
    let appended = Instant::now();
    let next = RawMessage::event("test.event", &PAYLOAD).stream(stream);
    let receipt = engine.enqueue(&next.with(Wishes::new().expected(Expected::Exact(events)))).await.unwrap();
    println!("appended behind it in {} us", appended.elapsed().as_micros());
    assert_eq!(receipt.version, events + 1);
    engine.shutdown(SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "appends 10,000,000 events: about ten minutes and 5 GB"]
async fn a_million_streams_of_ten_events_cost_no_more_than_a_few() {
    const EVENTS: i64 = 10;
    const CALL: usize = 1_000;
    let streams = size("CORELANE_TEST_STREAMS", 1_000_000);
    let space = Space::new().await;
    let engine = start(&space.schema, Sink::default().transport()).await;
    let client = space.schema.client().await;
    let ids: Vec<Uuid> = (0..streams).map(|_| Uuid::new_v4()).collect();
    let (mut settled, mut most, mut tenths) = (0, 0, Vec::new());
    // A round is an event of each stream, so by the next one most have been forgotten.
    for version in 0..EVENTS {
        let began = Instant::now();
        for (turn, part) in ids.chunks(CALL).enumerate() {
            let wishes = Wishes::new().expected(Expected::Exact(version));
            let events =
                part.iter().map(|stream| RawMessage::event("test.event", &PAYLOAD).stream(*stream).with(wishes));
            for receipt in engine.enqueue_many(events).await {
                assert_eq!(receipt.unwrap().version, version + 1);
            }
            if turn % 100 == 0 {
                most = most.max(resident_mib());
            }
        }
        tenths.push(began.elapsed().as_millis());
        if version == 0 {
            settled = resident_mib();
        }
    }
    println!("{} events over {streams} streams; ms a round of one each: {tenths:?}", streams * EVENTS);
    println!("resident: {settled} MiB after the first round, {most} MiB at most");
    assert!(most - settled <= GROWTH_MIB_MAX, "{settled} MiB, then {most} MiB");
    let whole = "select count(*) from (select from wh_event_store group by stream_id
        having count(*) = $1 and min(version) = 1 and max(version) = $1) s";
    assert_eq!(client.query_one(whole, &[&EVENTS]).await.unwrap().get::<_, i64>(0), streams);
    client.batch_execute("vacuum analyze wh_event_store").await.unwrap();
    let mut cost = Vec::new();
    for stream in ids.iter().step_by(ids.len() / 100) {
        assert_eq!(engine.event_store().read_forwards(*stream, 1).next_page().await.unwrap().len(), EVENTS as usize);
        cost.push(buffers(&client, *stream, 1, 500).await);
    }
    cost.sort_unstable();
    println!("buffers of a stream's page: {} (median), {} at most", cost[cost.len() / 2], cost[cost.len() - 1]);
    assert!(cost[cost.len() - 1] <= 40, "a probe and a page an event: {cost:?}");
    engine.shutdown(SOON).await;
}
