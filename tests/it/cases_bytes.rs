//! Hard cases of bytes, sizes and crashes, through a running engine.

use std::time::Duration;

use corelane::transport::memory::Fault;
use corelane::{Config, Error, RawMessage};
use uuid::Uuid;

use crate::engine::{Sink, start};
use crate::outbox_kit::call;
use crate::store_kit::message;
use crate::support::{connect, eventually, own_cluster_with, quoted, schema, schema_on};

const END: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn nul_and_numbers_are_published_as_the_bytes_that_came() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let payloads: [&[u8]; 10] = [
        br#"{"fine":1}"#,
        br#"{"a":"\u0000"}"#,
        b"\x00\xff\xfe",
        b"12345678901234567890",
        b"0.1234567890123456789",
        b"1e400",
        b"1E+2",
        b"-0",
        br#"{"a":1,"a":2}"#,
        br#"{"b":1,"a":2}"#,
    ];
    let stream = Uuid::now_v7();
    let messages = payloads.map(|bytes| RawMessage::event("test.bytes", bytes).stream(stream).to(&["somewhere"]));
    for receipt in engine.enqueue_many(messages).await {
        receipt.expect("stored");
    }
    sink.wait_for(payloads.len()).await;
    engine.shutdown(END).await;
    let seen: Vec<Vec<u8>> = sink.all().into_iter().map(|seen| seen.payload).collect();
    assert_eq!(seen, payloads);
}

#[tokio::test(flavor = "multi_thread")]
async fn nil_stream_is_that_messages_own_outcome() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let raw = RawMessage::event("test.nil", b"{}").to(&["somewhere"]);
    let messages = [raw.stream(Uuid::now_v7()), raw.stream(Uuid::nil()), raw, raw.stream(Uuid::now_v7())];
    let outcomes = engine.enqueue_many(messages).await;
    assert!(matches!(outcomes[1], Err(Error::InvalidStreamId)), "{outcomes:?}");
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 3);
    sink.wait_for(3).await;
    engine.shutdown(END).await;
    assert_eq!(sink.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn huge_error_texts_are_cut_on_a_character_border() {
    let schema = schema();
    let sink = Sink::default();
    let transport = sink.transport().with_faults(|_, message| match message.payload {
        b"long" => Fault::RefuseForGood("x".repeat(10 << 20)),
        b"emoji" => Fault::RefuseForGood("\u{1f980}".repeat(1 << 18)),
        b"escapes" => Fault::RefuseForGood("\u{1b}[31m\0".repeat(10_000)),
        _ => Fault::None,
    });
    let engine = start(&schema, transport).await;
    for text in ["long", "emoji", "escapes", "fine"] {
        let raw = RawMessage::event("test.error", text.as_bytes()).stream(Uuid::now_v7()).to(&["somewhere"]);
        engine.enqueue(&raw).await.expect("stored");
    }
    sink.wait_for(1).await;
    let client = schema.client().await;
    eventually("three dead letters", Duration::from_secs(60), async || {
        client.query_one("select count(*) from wh_dead_letter", &[]).await.unwrap().get::<_, i64>(0) == 3
    })
    .await;
    for row in client.query("select error, error_cut, attempts from wh_dead_letter", &[]).await.unwrap() {
        let (error, cut): (String, bool) = (row.get(0), row.get(1));
        assert!(cut && error.len() <= corelane::limits::ERROR_TEXT_BYTES_MAX, "{} bytes", error.len());
        assert!(!error.contains('\0') && error.ends_with("…[cut]"));
    }
    store_one_more(&engine, &sink).await;
    engine.shutdown(END).await;
}

async fn store_one_more(engine: &corelane::Engine, sink: &Sink) {
    let before = sink.len();
    engine.enqueue(&RawMessage::event("test.error", b"fine").to(&["somewhere"])).await.expect("the shard lives");
    sink.wait_for(before + 1).await;
}

/// 1,000,000 in a release build; debug builds stop at 200,000.
#[tokio::test(flavor = "multi_thread")]
async fn many_in_one_call_are_one_logical_result() {
    let schema = schema();
    let engine = start(&schema, Sink::default().transport()).await;
    let most = if cfg!(debug_assertions) { 200_000 } else { 1_000_000 };
    let streams: Vec<Uuid> = (0..1_000).map(|_| Uuid::now_v7()).collect();
    let mut of_stream = 0;
    for count in [65_535, 65_536, most] {
        let messages = (0..count).map(|n| RawMessage::event("test.many", b"{}").stream(streams[n % 1_000]));
        let receipts = engine.enqueue_many(messages).await;
        assert_eq!(receipts.len(), count);
        for (n, receipt) in receipts.into_iter().enumerate() {
            let receipt = receipt.expect("stored");
            if n % 1_000 == 0 {
                of_stream += 1;
                assert_eq!(receipt.version, of_stream, "outcomes are in input order");
            }
        }
    }
    let stored: i64 = schema.client().await.query_one("select count(*) from wh_event_store", &[]).await.unwrap().get(0);
    assert_eq!(stored as usize, 65_535 + 65_536 + most);
    engine.shutdown(END).await;
}

#[test]
fn lease_range_is_named() {
    for value in ["0", "-1", "100000000000"] {
        let mut config = Config::default();
        let refused = config.set("lease.ttl_ms", value).and_then(|()| config.validate()).expect_err(value).to_string();
        for word in ["lease.ttl_ms", value, "1000..=600000"] {
            assert!(refused.replace('_', "").contains(&word.replace('_', "")), "{word} in: {refused}");
        }
    }
}

/// A transaction id that the reader has passed comes again after `kill -9` of a back end, with a message in it. The
/// server's log writer sleeps, so that ids which were only rolled back leave no trace.
#[tokio::test(flavor = "multi_thread")]
async fn reborn_xid_with_a_message_is_published() {
    let cluster = own_cluster_with(&["wal_writer_delay=10s"]);
    let schema = schema_on(cluster.url("postgres"));
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let mut reborn = 0;
    for attempt in 1..=10 {
        let client = schema.client().await;
        let mut burnt = 0;
        for _ in 0..50 {
            client.batch_execute("begin").await.unwrap();
            burnt = client.query_one("select pg_current_xact_id()::text::int8", &[]).await.unwrap().get::<_, i64>(0);
            client.batch_execute("rollback").await.unwrap();
        }
        // Every shard reads past them.
        let claims = || engine.shards().iter().map(|shard| shard.metrics.claims.get()).collect::<Vec<u64>>();
        let before = claims();
        engine.announce();
        eventually("all have read", Duration::from_secs(10), async || {
            claims().iter().zip(&before).all(|(now, before)| now >= &(before + 2))
        })
        .await;
        let pid: i32 = client.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
        // Not killed itself: when it is gone, the server knows, and lets nobody in until it has recovered.
        let witness = schema.client().await;
        std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
        eventually("all are gone", Duration::from_secs(10), async || client.is_closed() && witness.is_closed()).await;
        let url = schema.url.clone();
        eventually("the server is back", Duration::from_secs(60), async || {
            tokio_postgres::connect(&url, tokio_postgres::NoTls).await.is_ok()
        })
        .await;
        let mut client = connect(&url).await;
        client.batch_execute(&format!("set search_path = {}", quoted(&schema.name))).await.unwrap();
        let transaction = client.transaction().await.unwrap();
        call(&transaction, &[message(Uuid::now_v7(), &attempt.to_string())]).await.expect("stored");
        let xid: i64 = transaction.query_one("select pg_current_xact_id()::text::int8", &[]).await.unwrap().get(0);
        transaction.commit().await.unwrap();
        sink.wait_for(attempt).await;
        reborn += usize::from(xid <= burnt);
        if reborn >= 2 {
            break;
        }
    }
    assert!(reborn > 0, "no transaction id came again: the case was not met");
    engine.shutdown(END).await;
    drop(schema);
}
