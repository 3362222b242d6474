//! Hard cases of order, through a running engine: who fails, who writes at the same time, who holds a transaction.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use corelane::transport::memory::Fault;
use corelane::{Engine, RawMessage};
use tokio_postgres::{Client, IsolationLevel};
use uuid::Uuid;

use crate::engine::{Sink, start};
use crate::outbox_kit::call;
use crate::store_kit::{Message, event, message};
use crate::support::{eventually, schema};

const END: Duration = Duration::from_secs(10);

async fn store(engine: &Engine, stream: Uuid, payload: &str, is_event: bool) {
    let bytes = payload.as_bytes();
    let raw = if is_event { RawMessage::event("test.case", bytes) } else { RawMessage::command("test.case", bytes) };
    engine.enqueue(&raw.stream(stream).to(&["somewhere"])).await.expect("stored");
}

/// The texts of each stream, as they were first accepted.
fn texts(sink: &Sink) -> HashMap<Uuid, Vec<String>> {
    let mut of: HashMap<Uuid, Vec<String>> = HashMap::new();
    for seen in sink.all() {
        of.entry(seen.stream_id.unwrap()).or_default().push(String::from_utf8(seen.payload).unwrap());
    }
    of
}

/// A step of what the lease keeper does every few seconds; the test does not wait for its turn.
async fn maintain(client: &Client) {
    let step = "select perform_maintenance((select max(number) from wh_instance where state = 0))";
    client.query(step, &[]).await.unwrap();
}

async fn current(client: &Client) -> i16 {
    client.query_one("select current from wh_segment", &[]).await.unwrap().get(0)
}

/// Writers go to the next segment.
async fn leave(client: &Client) -> i16 {
    let before = current(client).await;
    client.batch_execute("update wh_segment set switched_at = switched_at - interval '61 s'").await.unwrap();
    eventually("the segment is left", Duration::from_secs(40), async || {
        maintain(client).await;
        current(client).await != before
    })
    .await;
    before
}

/// What is stored has been published: its segment is left and truncated.
async fn rotate(client: &Client) {
    let before = leave(client).await;
    let count = format!("select (select count(*) from wh_log_{before}) + (select count(*) from wh_outbox_{before})");
    eventually("the segment is truncated", Duration::from_secs(40), async || {
        maintain(client).await;
        client.query_one(&count, &[]).await.unwrap().get::<_, i64>(0) == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_head_is_seen_before_those_behind_it() {
    let schema = schema();
    let sink = Sink::default();
    let refused = AtomicBool::new(false);
    let transport = sink.transport().with_faults(move |_, message| {
        if message.payload == b"m1" && !refused.swap(true, Ordering::Relaxed) {
            return Fault::Refuse("not now".into());
        }
        Fault::None
    });
    let engine = start(&schema, transport).await;
    let stream = Uuid::now_v7();
    let messages = ["m1", "m2", "m3"]
        .map(|text| RawMessage::event("test.case", text.as_bytes()).stream(stream).to(&["somewhere"]));
    for receipt in engine.enqueue_many(messages).await {
        receipt.expect("stored");
    }
    sink.wait_for(3).await;
    engine.shutdown(END).await;
    assert_eq!(texts(&sink)[&stream], ["m1", "m2", "m3"]);
}

/// Who stores each of the five: the owner (from memory) or another process (plain SQL), all 32 assignments, each a
/// stream; all segments are truncated in the middle.
#[tokio::test(flavor = "multi_thread")]
async fn mixed_stream_keeps_one_order_whoever_stores_and_whatever_is_truncated() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let client = schema.client().await;
    let streams: Vec<Uuid> = (0..32).map(|_| Uuid::now_v7()).collect();
    for (step, text) in ["e1", "m2", "e3", "m4", "e5"].into_iter().enumerate() {
        if step > 0 {
            // After three of them every segment has been truncated.
            sink.wait_for(step * 32).await;
            rotate(&client).await;
        }
        for (assignment, stream) in streams.iter().enumerate() {
            if assignment >> step & 1 == 0 {
                store(&engine, *stream, text, text.starts_with('e')).await;
            } else {
                let of = if text.starts_with('e') { event(*stream, text) } else { message(*stream, text) };
                call(&client, &[of]).await.expect("stored");
            }
        }
    }
    sink.wait_for(5 * 32).await;
    engine.shutdown(END).await;
    let texts = texts(&sink);
    for stream in &streams {
        assert_eq!(texts[stream], ["e1", "m2", "e3", "m4", "e5"]);
    }
    let versions = "select count(*) from (select stream_id from wh_event_store group by 1
                    having array_agg(version order by stream_seq) = '{1,2,3}') s";
    assert_eq!(client.query_one(versions, &[]).await.unwrap().get::<_, i64>(0), 32);
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_between_is_published_between() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let client = schema.client().await;
    let streams: Vec<Uuid> = (0..50).map(|_| Uuid::now_v7()).collect();
    for stream in &streams {
        store(&engine, *stream, "m1", false).await;
        call(&client, &[message(*stream, "m2")]).await.expect("stored");
        store(&engine, *stream, "m3", false).await;
    }
    sink.wait_for(150).await;
    engine.shutdown(END).await;
    let texts = texts(&sink);
    assert!(streams.iter().all(|stream| texts[stream] == ["m1", "m2", "m3"]), "{texts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_writers_of_one_stream_beside_its_owner() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let stream = Uuid::now_v7();
    let writer = |name: &'static str| {
        let schema = &schema;
        async move {
            let client = schema.client().await;
            for batch in 0..10 {
                let rows: Vec<Message> =
                    (0..10).map(|n| event(stream, &format!("{name}{:03}", batch * 10 + n))).collect();
                call(&client, &rows).await.expect("nobody's batch is aborted");
            }
        }
    };
    let owner = async {
        for n in 0..100 {
            store(&engine, stream, &format!("o{n:03}"), true).await;
        }
    };
    tokio::join!(writer("a"), writer("b"), owner);
    sink.wait_for(300).await;
    engine.shutdown(END).await;
    sink.assert_ordered();
    let texts = &texts(&sink)[&stream];
    for name in ["a", "b", "o"] {
        let of: Vec<&String> = texts.iter().filter(|text| text.starts_with(name)).collect();
        assert!(of.len() == 100 && of.is_sorted(), "{name}: {of:?}");
    }
    let client = schema.client().await;
    let row =
        client.query_one("select count(*), max(version), max(stream_seq) from wh_event_store", &[]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1), row.get::<_, i64>(2)), (300, 300, 300));
}

#[tokio::test(flavor = "multi_thread")]
async fn lower_xid_with_the_later_message_is_published_later() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let (mut late, early) = (schema.client().await, schema.client().await);
    early.batch_execute("create table elsewhere (n int)").await.unwrap();
    for _ in 0..10 {
        let stream = Uuid::now_v7();
        let lower = late.transaction().await.unwrap();
        lower.execute("insert into elsewhere values (1)", &[]).await.unwrap(); // Its id is drawn here.
        call(&early, &[message(stream, "1")]).await.expect("stored");
        call(&lower, &[message(stream, "2")]).await.expect("stored");
        lower.commit().await.unwrap();
        call(&early, &[message(stream, "3")]).await.expect("stored");
    }
    sink.wait_for(30).await;
    engine.shutdown(END).await;
    assert!(texts(&sink).values().all(|texts| *texts == ["1", "2", "3"]), "{:?}", texts(&sink));
}

/// The four transactions that hold something, each while messages flow, and after them their own message.
#[tokio::test(flavor = "multi_thread")]
async fn held_four_hold_up_nobody_but_their_own_stream() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let mut holders = [schema.client().await, schema.client().await, schema.client().await, schema.client().await];
    holders[0].batch_execute("create table elsewhere (n int)").await.unwrap();
    let own = Uuid::now_v7();
    let [snapshot, writer, enlisted, locks] = &mut holders;
    let snapshot = snapshot.build_transaction().isolation_level(IsolationLevel::RepeatableRead).start().await.unwrap();
    snapshot.query("select 1 from elsewhere", &[]).await.unwrap();
    let writer = writer.transaction().await.unwrap();
    writer.execute("insert into elsewhere values (1)", &[]).await.unwrap();
    let enlisted = enlisted.transaction().await.unwrap();
    call(&enlisted, &[message(own, "held")]).await.expect("stored");
    let locks = locks.transaction().await.unwrap();
    locks.batch_execute("lock table wh_log, wh_outbox in access share mode").await.unwrap();

    let began = Instant::now();
    for n in 0..200 {
        // The streams are all over the partitions: the held one's neighbours are among them.
        store(&engine, Uuid::now_v7(), &n.to_string(), n % 2 == 0).await;
    }
    sink.wait_for(200).await;
    assert!(began.elapsed() < Duration::from_secs(40), "{:?}", began.elapsed());
    assert_eq!(sink.len(), 200, "what is not committed is not published");

    // Long-writer: what the owner stores on the held stream waits for it, and comes behind it.
    let behind = tokio::spawn({
        let engine = engine.clone();
        async move { store(&engine, own, "behind", false).await }
    });
    store(&engine, Uuid::now_v7(), "free", false).await;
    sink.wait_for(201).await;
    assert!(!behind.is_finished(), "it waits for the stream's lock");
    enlisted.commit().await.unwrap();
    behind.await.unwrap();
    sink.wait_for(203).await;
    for transaction in [snapshot, writer, locks] {
        transaction.rollback().await.unwrap();
    }
    engine.shutdown(END).await;
    assert_eq!(texts(&sink)[&own], ["held", "behind"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn late_writer_into_a_left_segment_is_published() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let (mut client, other) = (schema.client().await, schema.client().await);
    let late = client.build_transaction().isolation_level(IsolationLevel::RepeatableRead).start().await.unwrap();
    late.query_one("select current from wh_segment", &[]).await.unwrap(); // Its snapshot is taken here.
    store(&engine, Uuid::now_v7(), "first", false).await;
    sink.wait_for(1).await;
    leave(&other).await;
    call(&late, &[message(Uuid::now_v7(), "late")]).await.expect("stored");
    late.commit().await.unwrap();
    sink.wait_for(2).await;
    engine.shutdown(END).await;
    assert_eq!(sink.all()[1].payload, b"late");
}

#[tokio::test(flavor = "multi_thread")]
async fn transport_away_and_back_again_in_order() {
    let schema = schema();
    let sink = Sink::default();
    let away = std::sync::Arc::new(AtomicBool::new(true));
    let (flag, asked) = (away.clone(), std::sync::Arc::new(Mutex::new(0)));
    let count = asked.clone();
    let transport = sink.transport().with_faults(move |_, _| {
        *count.lock().unwrap() += 1;
        if flag.load(Ordering::Relaxed) { Fault::NotReady } else { Fault::None }
    });
    let engine = start(&schema, transport).await;
    let streams: Vec<Uuid> = (0..20).map(|_| Uuid::now_v7()).collect();
    for n in 0..500 {
        store(&engine, streams[n % 20], &n.to_string(), true).await;
    }
    eventually("it was tried", Duration::from_secs(60), async || *asked.lock().unwrap() >= 3).await;
    assert!(*asked.lock().unwrap() < 500, "one probe, not every message: {}", asked.lock().unwrap());
    away.store(false, Ordering::Relaxed);
    sink.wait_for(500).await;
    engine.shutdown(END).await;
    sink.assert_ordered();
    assert_eq!(sink.len(), 500);
    let client = schema.client().await;
    for table in ["wh_parked", "wh_dead_letter"] {
        let rows: i64 = client.query_one(&format!("select count(*) from {table}"), &[]).await.unwrap().get(0);
        assert_eq!(rows, 0, "{table}: no attempt was counted");
    }
}

/// Small: 2,000 messages behind two refused heads, and 1,000 free streams that do not notice.
#[tokio::test(flavor = "multi_thread")]
async fn parked_mass_does_not_hold_the_free_streams() {
    let schema = schema();
    let sink = Sink::default();
    let refusing = std::sync::Arc::new(AtomicBool::new(true));
    let flag = refusing.clone();
    let transport = sink.transport().with_faults(move |_, message| {
        if message.payload == b"head" && flag.load(Ordering::Relaxed) {
            return Fault::Refuse("no".into());
        }
        Fault::None
    });
    let mut config = crate::engine::config(&schema);
    config.retry.attempts_max = 1_000_000;
    let engine = Engine::builder(config).transport(transport).migrate(true).start().await.expect("start");
    let parked = [Uuid::now_v7(), Uuid::now_v7()];
    for stream in parked {
        store(&engine, stream, "head", false).await;
    }
    let behind = (0..2_000).map(|n| RawMessage::event("test.case", b"behind").stream(parked[n % 2]).to(&["somewhere"]));
    let free = (0..1_000).map(|_| RawMessage::event("test.case", b"free").stream(Uuid::now_v7()).to(&["somewhere"]));
    for receipt in engine.enqueue_many(behind).await.into_iter().chain(engine.enqueue_many(free).await) {
        receipt.expect("stored");
    }
    sink.wait_for(1_000).await;
    assert!(sink.all().iter().all(|seen| seen.payload == b"free"));
    refusing.store(false, Ordering::Relaxed);
    sink.wait_for(3_002).await;
    engine.shutdown(END).await;
    sink.assert_ordered();
}
