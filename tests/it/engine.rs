//! The engine end to end: what callers store is published, in order, once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corelane::message::Enqueue;
use corelane::transport::memory::Fault;
use corelane::{Config, Engine, MemoryTransport, RawMessage, Wishes};
use uuid::Uuid;

use crate::support::{TestSchema, eventually, schema};

/// What a sink saw of one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub destination: String,
    pub message_id: Uuid,
    pub stream_id: Option<Uuid>,
    pub stream_seq: i64,
    pub version: i64,
    pub payload: Vec<u8>,
}

/// Everything that was accepted, in order.
#[derive(Clone, Debug, Default)]
pub struct Sink(pub Arc<Mutex<Vec<Seen>>>);

impl Sink {
    pub fn transport(&self) -> MemoryTransport {
        let seen = self.0.clone();
        MemoryTransport::new(move |destination, message| {
            seen.lock().unwrap().push(Seen {
                destination: destination.to_owned(),
                message_id: message.message_id,
                stream_id: message.stream_id,
                stream_seq: message.stream_seq,
                version: message.version,
                payload: message.payload.to_vec(),
            });
        })
    }

    pub fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    pub fn all(&self) -> Vec<Seen> {
        self.0.lock().unwrap().clone()
    }

    /// Waits for so many messages.
    pub async fn wait_for(&self, count: usize) {
        eventually(&format!("{count} messages at the sink"), Duration::from_secs(60), || async { self.len() >= count })
            .await;
    }

    /// First copies by (destination, stream) are in ascending numbers without gaps.
    pub fn assert_ordered(&self) {
        let mut last: HashMap<(String, Uuid), i64> = HashMap::new();
        for seen in self.all() {
            let Some(stream) = seen.stream_id else { continue };
            let last = last.entry((seen.destination.clone(), stream)).or_insert(0);
            assert!(seen.stream_seq <= *last + 1, "{} of {stream} came after {last}", seen.stream_seq);
            *last = (*last).max(seen.stream_seq);
        }
    }
}

/// A configuration for a test: quick retries, the runtime of the environment.
pub fn config(schema: &TestSchema) -> Config {
    let mut config = Config::default();
    for (key, value) in [
        ("database.url", schema.url.as_str()),
        ("database.schema", schema.name.as_str()),
        ("shards.count", "2"),
        ("partitions.count", "16"),
        ("retry.base_ms", "50"),
        ("retry.cap_ms", "200"),
        ("claim.poll_ms", "20"),
        ("claim.poll_ms_max", "100"),
    ] {
        config.set(key, value).unwrap();
    }
    config.overlay_env("CORELANE").unwrap()
}

/// An engine with this sink.
pub async fn start(schema: &TestSchema, transport: MemoryTransport) -> Engine {
    let engine = Engine::builder(config(schema)).transport(transport).migrate(true).start().await.expect("start");
    eventually("partitions are held", Duration::from_secs(60), || async { engine.partitions_held() == 16 }).await;
    engine
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_enqueued_is_published_once_and_in_order() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let streams: Vec<Uuid> = (0..10).map(|_| Uuid::new_v4()).collect();
    let payloads: Vec<String> = (0..1000).map(|n| format!("{{\"n\":{n}}}")).collect();
    let messages = payloads.iter().enumerate().map(|(n, payload)| {
        RawMessage::event("test.counted", payload.as_bytes()).stream(streams[n % 10]).to(&["sink"])
    });
    let receipts = engine.enqueue_many(messages).await;
    for (n, receipt) in receipts.iter().enumerate() {
        let receipt = receipt.as_ref().expect("stored");
        assert_eq!((receipt.stream_seq, receipt.version), ((n / 10 + 1) as i64, (n / 10 + 1) as i64));
    }
    sink.wait_for(1000).await;
    let report = engine.shutdown(Duration::from_secs(10)).await;
    assert!(report.drained, "{report:?}");
    sink.assert_ordered();
    assert_eq!(sink.len(), 1000, "no copies");
    let rows: i64 = schema.client().await.query_one("select count(*) from wh_event_store", &[]).await.unwrap().get(0);
    assert_eq!(rows, 1000);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_enlisted_message_follows_the_callers_transaction() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let stream = Uuid::new_v4();
    let message = RawMessage::event("test.closed", b"{}").stream(stream).to(&["a", "b"]);
    let mut client = schema.client().await;
    client.batch_execute("create table cart (closed bool); insert into cart values (false)").await.unwrap();

    let transaction = client.transaction().await.unwrap();
    let rolled_back = engine.outbox().push(&message).unwrap().enlist(&transaction).await.unwrap();
    assert_eq!(rolled_back.receipts[0].version, 1);
    transaction.rollback().await.unwrap();
    rolled_back.announce();

    let transaction = client.transaction().await.unwrap();
    transaction.execute("update cart set closed = true", &[]).await.unwrap();
    let id = Uuid::now_v7();
    let pushed = engine.outbox().push(&message.with(Wishes::new().message_id(id))).unwrap();
    let enlisted = pushed.enlist(&transaction).await.unwrap();
    transaction.commit().await.unwrap();
    enlisted.announce();
    sink.wait_for(2).await;
    engine.shutdown(Duration::from_secs(10)).await;
    let mut seen: Vec<_> =
        sink.all().into_iter().map(|seen| (seen.destination, seen.message_id, seen.version)).collect();
    seen.sort();
    assert_eq!(seen, [("a".to_owned(), id, 1), ("b".to_owned(), id, 1)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unit_of_work_commits_whole_whatever_its_size() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let mut unit = engine.unit_of_work();
    for n in 0..5_000u128 {
        unit.push(&RawMessage::command("test.many", b"{}").stream(Uuid::from_u128(n % 700 + 1)).to(&["sink"])).unwrap();
    }
    let receipts = unit.commit().await.expect("commit");
    assert_eq!(receipts.len(), 5_000);
    sink.wait_for(5_000).await;
    engine.shutdown(Duration::from_secs(10)).await;
    sink.assert_ordered();
    assert_eq!(sink.len(), 5_000);
}

/// Neither the first message of a young engine nor one that only its announcement tells of is left behind by an end that
/// says that nothing was.
#[tokio::test(flavor = "multi_thread")]
async fn an_orderly_end_leaves_nothing_that_was_acknowledged_or_announced() {
    let message = |stream| RawMessage::event("test.closed", b"{}").stream(stream).to(&["a"]);
    for enlists in [false, true] {
        for _ in 0..5 {
            let schema = schema();
            let sink = Sink::default();
            let engine = start(&schema, sink.transport()).await;
            if enlists {
                let mut client = schema.client().await;
                let transaction = client.transaction().await.unwrap();
                let push = engine.outbox().push(&message(Uuid::new_v4())).unwrap();
                let enlisted = push.enlist(&transaction).await.unwrap();
                transaction.commit().await.unwrap();
                enlisted.announce();
            } else {
                engine.enqueue(&message(Uuid::new_v4())).await.unwrap();
            }
            let report = engine.shutdown(Duration::from_secs(10)).await;
            assert!(report.drained && report.rows_left == 0, "{report:?}");
            assert_eq!(sink.len(), 1, "enlists: {enlists}");
        }
    }
}

/// A destination that is away: the end uses its time, and says what it leaves.
#[tokio::test(flavor = "multi_thread")]
async fn an_end_that_cannot_publish_says_so() {
    let schema = schema();
    let away = MemoryTransport::new(|_, _| {}).with_faults(|_, _| Fault::NotReady);
    let engine = start(&schema, away).await;
    engine.enqueue(&RawMessage::event("test.closed", b"{}").stream(Uuid::new_v4()).to(&["a"])).await.unwrap();
    let report = engine.shutdown(Duration::from_millis(1_500)).await;
    assert!(!report.drained && report.rows_left == 1, "{report:?}");
    assert!(report.took >= Duration::from_millis(1_400), "{report:?}");
}
