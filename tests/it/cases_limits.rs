//! Hard case limits: a transport's bounds on a message and on a batch, at their borders, through a running engine. (The
//! bound on a batch's rows, which a run of ours never reaches beside that on its bytes, is tested at the bridge.)

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corelane::{Engine, MemoryTransport, OutgoingBatch, PublishOutcome, RawMessage, Transport, TransportLimits};
use uuid::Uuid;

use crate::engine::{Sink, config};
use crate::support::{eventually, schema};

const MESSAGE_BYTES_MAX: usize = 262_144;
const BATCH_BYTES_MAX: usize = 1_048_576;
const BATCH_ROWS_MAX: usize = 4_500;
const TYPE: &str = "test.size";
/// What a message costs beside its payload: its names, and what the bridge allows for ids and trace as headers.
const HEADERS: usize = 512 + TYPE.len() + "application/json".len();
const SMALL: usize = 10_000;
const PATIENCE: Duration = Duration::from_secs(60);

/// Notes each batch's rows, its bytes and the largest message in it.
struct Measured {
    inner: MemoryTransport,
    batches: Arc<Mutex<Vec<(usize, usize, usize)>>>,
}

impl Transport for Measured {
    fn limits(&self) -> TransportLimits {
        self.inner.limits()
    }

    fn publish<'a>(
        &'a self,
        batch: &'a dyn OutgoingBatch,
        outcomes: &'a mut Vec<PublishOutcome>,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        let sizes = (0..batch.len()).map(|index| batch.get(index).payload.len() + HEADERS);
        let (bytes, largest) = sizes.fold((0, 0), |(sum, largest), size| (sum + size, largest.max(size)));
        self.batches.lock().unwrap().push((batch.len(), bytes, largest));
        self.inner.publish(batch, outcomes)
    }

    fn name(&self) -> &str {
        "measured"
    }
}

/// The messages: of one stream at the borders with the oversize one in the middle; the same without stream; a stream of
/// many with an oversize one in the middle; and 10,000 small ones on streams of their own.
fn sizes() -> Vec<(Option<Uuid>, usize)> {
    let (bordering, long) = (Uuid::now_v7(), Uuid::now_v7());
    let at_the_border = [MESSAGE_BYTES_MAX - 1, MESSAGE_BYTES_MAX + 1, MESSAGE_BYTES_MAX, HEADERS + 2];
    let mut all: Vec<(Option<Uuid>, usize)> = Vec::new();
    all.extend(at_the_border.map(|size| (Some(bordering), size)));
    all.extend((0..SMALL / 2).map(|_| (Some(Uuid::now_v7()), HEADERS + 2)));
    all.extend(at_the_border.map(|size| (None, size)));
    all.extend((0..400).map(|n| (Some(long), if n == 200 { MESSAGE_BYTES_MAX + 1 } else { HEADERS + 2 })));
    all.extend((0..SMALL / 2).map(|_| (Some(Uuid::now_v7()), HEADERS + 2)));
    all
}

async fn limits_hold(ordered_atomic_batches: bool) {
    let schema = schema();
    let (sink, batches) = (Sink::default(), Arc::new(Mutex::new(Vec::new())));
    let limits = TransportLimits {
        message_bytes_max: MESSAGE_BYTES_MAX,
        batch_bytes_max: BATCH_BYTES_MAX,
        batch_rows_max: BATCH_ROWS_MAX,
        ordered_atomic_batches,
        ..TransportLimits::default()
    };
    let transport = Measured { inner: sink.transport().with_limits(limits), batches: batches.clone() };
    let mut config = config(&schema);
    config.publish.run_rows_max = 4_096;
    let engine = Engine::builder(config).transport(transport).migrate(true).start().await.unwrap();
    let wanted = sizes();
    let payload = vec![b'1'; MESSAGE_BYTES_MAX];
    let messages = wanted.iter().map(|(stream, size)| {
        let of = RawMessage::command(TYPE, &payload[..size - HEADERS]).to(&["sink"]);
        if let Some(stream) = stream { of.stream(*stream) } else { of }
    });
    let stored: Vec<Uuid> = engine.enqueue_many(messages).await.into_iter().map(|of| of.unwrap().message_id).collect();
    let oversize: Vec<Uuid> =
        stored.iter().zip(&wanted).filter(|(_, (_, size))| *size > MESSAGE_BYTES_MAX).map(|(id, _)| *id).collect();
    assert_eq!(oversize.len(), 3);

    eventually("the others go out", PATIENCE, async || sink.len() >= stored.len() - 3).await;
    let client = schema.client().await;
    let dead = async || {
        let sql = "select message_id, reason, attempts, octet_length(payload) from wh_dead_letter";
        client.query(sql, &[]).await.unwrap()
    };
    eventually("three are dead", PATIENCE, async || dead().await.len() == 3).await;
    let report = engine.shutdown(Duration::from_secs(20)).await;
    assert!(report.drained && report.rows_left == 0, "{report:?}");
    for row in dead().await {
        assert!(oversize.contains(&row.get::<_, Uuid>(0)));
        let body = (MESSAGE_BYTES_MAX + 1 - HEADERS) as i32;
        assert_eq!((row.get::<_, i16>(1), row.get::<_, i32>(2), row.get::<_, i32>(3)), (12, 1, body), "tried once");
    }
    let parked: i64 = client.query_one("select count(*) from wh_parked", &[]).await.unwrap().get(0);
    assert_eq!((parked, sink.len()), (0, stored.len() - 3), "nothing loops, nothing goes out twice");

    // In order, but for the one that is dead.
    let mut last: HashMap<Uuid, i64> = HashMap::new();
    for seen in sink.all() {
        assert!(!oversize.contains(&seen.message_id));
        let Some(stream) = seen.stream_id else { continue };
        let last = last.entry(stream).or_insert(0);
        let skipped = seen.stream_seq - *last - 1;
        assert!((0..=1).contains(&skipped), "{} of {stream} came after {last}", seen.stream_seq);
        *last = seen.stream_seq;
    }
    let batches = batches.lock().unwrap();
    let rows: usize = batches.iter().map(|batch| batch.0).sum();
    assert_eq!(rows, stored.len() - 3, "what is too large is not offered, what is accepted is offered once");
    for batch in batches.iter() {
        assert!(batch.0 <= BATCH_ROWS_MAX && batch.1 <= BATCH_BYTES_MAX && batch.2 <= MESSAGE_BYTES_MAX, "{batch:?}");
    }
    assert!(batches.iter().any(|batch| batch.2 == MESSAGE_BYTES_MAX), "the largest that fits");
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_of_a_transport_hold_at_their_borders_and_one_oversize_is_alone() {
    limits_hold(false).await;
    limits_hold(true).await;
}
