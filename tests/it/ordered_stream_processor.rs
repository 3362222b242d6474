//! What the reference's OrderedStreamProcessor does: group by stream, order by the stream's own number, one
//! after the other inside, side by side across, a stream stops at its first failure.
//!
//! [`ASKED`] says which test holds what is asked of it. Its inbox and outbox ask the same of the lanes; the outbox side is held here. Different on purpose: a message without stream is a lane of its own (there: all of them
//! share one), and what failed is tried again in order (there: it is left to a later sweep).

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use corelane::{MemoryTransport, OutgoingBatch, PublishOutcome, RawMessage, Transport, TransportLimits};
use uuid::Uuid;

use crate::engine::{Sink, config, start};
use crate::support::{TestSchema, eventually, schema};

/// What the reference asks, and the test of this file that holds it.
const ASKED: &[(&str, &str)] = &[
    ("five items of one stream are done in their order, of the inbox and of the outbox", "a_stream_keeps_its_order"),
    ("three streams are in progress at the same time", "streams_are_in_progress_side_by_side"),
    (
        "the first failure of a stream ends it, the other stream is done",
        "a_stream_stops_at_its_first_failure_and_the_others_go_on",
    ),
    (
        "a failure is reported with its text and the status that was reached before",
        "a_failure_is_kept_with_its_words_and_what_was_reached",
    ),
    ("no list and an empty one ask nothing", "nothing_asks_nothing_of_the_transport"),
    ("a cancellation takes hold between two items, and is no error", "an_end_comes_between_two_messages_of_a_stream"),
    ("items without stream are all done", "messages_without_stream_do_not_wait_for_each_other"),
    ("what succeeded is reported as complete, once", "what_succeeded_is_complete_and_not_done_again"),
];

#[test]
fn all_that_is_asked_has_its_test() {
    let source = include_str!("ordered_stream_processor.rs");
    for (asked, test) in ASKED {
        assert!(source.contains(&format!("async fn {test}()")), "{asked}: there is no test {test}");
    }
}

/// Stores so many events on each stream, in turn: payload `"<stream>.<number>"`.
async fn store(engine: &corelane::Engine, streams: &[Uuid], each: usize) {
    let payloads: Vec<(Uuid, String)> = (0..each)
        .flat_map(|n| streams.iter().enumerate().map(move |(s, id)| (*id, format!("\"{s}.{}\"", n + 1))))
        .collect();
    let messages = payloads
        .iter()
        .map(|(stream, payload)| RawMessage::event("test.osp", payload.as_bytes()).stream(*stream).to(&["sink"]));
    for receipt in engine.enqueue_many(messages).await {
        receipt.expect("stored");
    }
}

fn texts(sink: &Sink) -> Vec<String> {
    let text = |payload: &[u8]| String::from_utf8_lossy(payload).trim_matches('"').to_owned();
    sink.all().iter().map(|seen| text(&seen.payload)).collect()
}

fn of_stream(sink: &Sink, stream: usize) -> Vec<String> {
    texts(sink).into_iter().filter(|text| text.starts_with(&format!("{stream}."))).collect()
}

fn streams(count: usize) -> Vec<Uuid> {
    (0..count).map(|_| Uuid::new_v4()).collect()
}

const SOON: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_keeps_its_order() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    store(&engine, &streams(1), 5).await;
    sink.wait_for(5).await;
    engine.shutdown(SOON).await;
    assert_eq!(texts(&sink), ["0.1", "0.2", "0.3", "0.4", "0.5"]);
}

/// Holds every call until so many are inside.
struct Gathering {
    inner: MemoryTransport,
    wanted: usize,
    inside: AtomicUsize,
    complete: tokio::sync::Notify,
}

impl Transport for Gathering {
    fn limits(&self) -> TransportLimits {
        // One message a call: side by side means calls side by side.
        TransportLimits { batch_rows_max: 1, ..self.inner.limits() }
    }

    fn publish<'a>(
        &'a self,
        batch: &'a dyn OutgoingBatch,
        outcomes: &'a mut Vec<PublishOutcome>,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(async move {
            let gathering = self;
            let complete = gathering.complete.notified();
            if gathering.inside.fetch_add(1, Ordering::SeqCst) + 1 < gathering.wanted {
                complete.await;
            } else {
                gathering.complete.notify_waiters();
            }
            gathering.inner.publish(batch, outcomes).await;
        })
    }

    fn name(&self) -> &str {
        "gathering"
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_are_in_progress_side_by_side() {
    let schema = schema();
    let sink = Sink::default();
    let gathering = Gathering {
        inner: sink.transport(),
        wanted: 3,
        inside: AtomicUsize::new(0),
        complete: tokio::sync::Notify::new(),
    };
    let mut config = config(&schema);
    // A run a stream, so that the calls can be side by side; a transport's call that waits for the others in vain
    // is given up after its time limit, and its message comes twice.
    config.publish.run_rows_max = 1;
    let engine = corelane::Engine::builder(config).transport(gathering).migrate(true).start().await.expect("start");
    store(&engine, &streams(3), 2).await;
    sink.wait_for(6).await;
    let report = engine.shutdown(SOON).await;
    assert!(report.drained, "{report:?}");
    assert_eq!(sink.len(), 6, "none of the three waited in vain: {:?}", texts(&sink));
    sink.assert_ordered();
}

/// Refuses the first message of the first stream until it is healed.
fn failing_head(sink: &Sink, words: &'static str) -> (MemoryTransport, Arc<AtomicBool>) {
    let healed = Arc::new(AtomicBool::new(false));
    let asked = healed.clone();
    let transport = sink.transport().with_faults(move |_, message| {
        if !asked.load(Ordering::SeqCst) && message.payload == b"\"0.1\"" {
            corelane::transport::memory::Fault::Refuse(words.to_owned())
        } else {
            corelane::transport::memory::Fault::None
        }
    });
    (transport, healed)
}

async fn attempts(schema: &TestSchema) -> Option<i32> {
    let client = schema.client().await;
    let row = client.query_opt("select attempts from wh_parked", &[]).await.unwrap();
    row.map(|row| row.get(0))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_stops_at_its_first_failure_and_the_others_go_on() {
    let schema = schema();
    let sink = Sink::default();
    let (transport, healed) = failing_head(&sink, "not today");
    let engine = start(&schema, transport).await;
    store(&engine, &streams(2), 2).await;
    sink.wait_for(2).await;
    eventually("it was tried again", SOON, || async { attempts(&schema).await >= Some(2) }).await;
    assert_eq!(texts(&sink), ["1.1", "1.2"], "the second of the failed stream waits");
    // Beyond the reference: the failed head comes first when it goes through.
    healed.store(true, Ordering::SeqCst);
    sink.wait_for(4).await;
    engine.shutdown(SOON).await;
    assert_eq!(of_stream(&sink, 0), ["0.1", "0.2"]);
    assert_eq!(sink.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_is_kept_with_its_words_and_what_was_reached() {
    let schema = schema();
    let sink = Sink::default();
    let (transport, _) = failing_head(&sink, "Receptor processing failed");
    let engine = start(&schema, transport).await;
    let stream = streams(1);
    store(&engine, &stream, 1).await;
    eventually("it is parked", SOON, || async { attempts(&schema).await >= Some(1) }).await;
    engine.shutdown(SOON).await;
    let client = schema.client().await;
    let parked = client.query_one("select lane_id, stream_seq, reason, error from wh_parked", &[]).await.unwrap();
    assert_eq!((parked.get::<_, Uuid>(0), parked.get::<_, i64>(1)), (stream[0], 1));
    assert_eq!(parked.get::<_, i16>(2), 2, "the reference's TransportException");
    assert!(parked.get::<_, &str>(3).contains("Receptor processing failed"));
    // Stored it is (status bit Stored), published it is not.
    let stored: i64 = client.query_one("select count(*) from wh_event_store", &[]).await.unwrap().get(0);
    assert_eq!((stored, sink.len()), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_asks_nothing_of_the_transport() {
    let schema = schema();
    let sink = Sink::default();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let transport = sink.transport().with_faults(move |_, _| {
        counted.fetch_add(1, Ordering::SeqCst);
        corelane::transport::memory::Fault::None
    });
    let engine = start(&schema, transport).await;
    assert!(engine.enqueue_many(Vec::<RawMessage<'_>>::new()).await.is_empty());
    assert!(engine.unit_of_work().commit().await.unwrap().is_empty());
    let stored_only = RawMessage::event("test.osp", b"{}").stream(Uuid::new_v4());
    assert_eq!(engine.enqueue(&stored_only).await.unwrap().version, 1, "no destination: event store only");
    let report = engine.shutdown(SOON).await;
    assert!(report.drained, "{report:?}");
    assert_eq!(calls.load(Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_comes_between_two_messages_of_a_stream() {
    let schema = schema();
    let sink = Sink::default();
    let second = Arc::new(tokio::sync::Notify::new());
    let seen = second.clone();
    let transport = sink.transport().with_faults(move |_, message| {
        if message.stream_seq == 2 {
            seen.notify_one();
        }
        // From the second on the transport is slow to say that it is not ready: the end comes meanwhile.
        if message.stream_seq > 2 {
            corelane::transport::memory::Fault::NotReady
        } else {
            corelane::transport::memory::Fault::None
        }
    });
    let engine = start(&schema, transport).await;
    store(&engine, &streams(1), 5).await;
    second.notified().await;
    let report = engine.shutdown(Duration::from_secs(5)).await;
    assert_eq!(report.shards_lost, 0, "it ends in order, without an error: {report:?}");
    assert!(sink.len() <= 3, "{:?}", texts(&sink));
    // What was left is not lost: the next owner goes on where this one ended.
    let engine = start(&schema, sink.transport()).await;
    eventually("all five", SOON, || async { of_stream(&sink, 0).last().is_some_and(|text| text == "0.5") }).await;
    engine.shutdown(SOON).await;
    sink.assert_ordered();
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_without_stream_do_not_wait_for_each_other() {
    let schema = schema();
    let sink = Sink::default();
    let (transport, healed) = failing_head(&sink, "not this one");
    let engine = start(&schema, transport).await;
    let payloads: [&[u8]; 3] = [b"\"0.1\"", b"\"1.1\"", b"\"2.1\""];
    let messages = payloads.map(|payload| RawMessage::command("test.osp", payload).to(&["sink"]));
    assert!(engine.enqueue_many(messages).await.iter().all(Result::is_ok));
    sink.wait_for(2).await;
    healed.store(true, Ordering::SeqCst);
    sink.wait_for(3).await;
    engine.shutdown(SOON).await;
    let mut seen = texts(&sink);
    assert_eq!(seen.pop().as_deref(), Some("0.1"), "the one that failed comes last");
    seen.sort();
    assert_eq!(seen, ["1.1", "2.1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_succeeded_is_complete_and_not_done_again() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    store(&engine, &streams(2), 1).await;
    sink.wait_for(2).await;
    let report = engine.shutdown(SOON).await;
    assert!(report.drained, "{report:?}");
    // A successor that finds nothing left to do publishes what is new, and only that.
    let engine = start(&schema, sink.transport()).await;
    store(&engine, &streams(1), 1).await;
    sink.wait_for(3).await;
    engine.shutdown(SOON).await;
    assert_eq!(sink.len(), 3, "{:?}", texts(&sink));
}
