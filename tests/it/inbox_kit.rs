//! What the tests of the inbox stand on: a broker in the process, an engine that receives from it, handlers made of
//! closures, and a table of effects.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use corelane::inbox::{ConsumerBuilder, Handling};
use corelane::{
    Consumer, Delivery, Engine, EventTypes, Handler, HandlerContext, HandlerError, MemoryBroker, RawMessage, Transport,
};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::support::{TestSchema, eventually, schema};

/// The source and the consumer of the tests.
pub const SOURCE: &str = "orders";
pub const CONSUMER: &str = "billing";
const PATIENCE: Duration = Duration::from_secs(60);

/// A handler made of a closure.
struct Does<F> {
    function: F,
    in_transaction: bool,
}

impl<F> Handler for Does<F>
where
    F: for<'a, 't> Fn(&'a Delivery, &'a mut HandlerContext<'t>) -> Handling<'a> + Send + Sync + 'static,
{
    fn handle<'a>(&'a self, delivery: &'a Delivery, context: &'a mut HandlerContext<'_>) -> Handling<'a> {
        (self.function)(delivery, context)
    }

    fn needs_transaction(&self) -> bool {
        self.in_transaction
    }
}

/// In the transaction of its result, or beside others.
pub fn does_in(
    in_transaction: bool,
    function: impl for<'a, 't> Fn(&'a Delivery, &'a mut HandlerContext<'t>) -> Handling<'a> + Send + Sync + 'static,
) -> impl Handler {
    Does { function, in_transaction }
}

/// Beside others, without a transaction.
pub fn does(
    function: impl for<'a, 't> Fn(&'a Delivery, &'a mut HandlerContext<'t>) -> Handling<'a> + Send + Sync + 'static,
) -> impl Handler {
    does_in(false, function)
}

/// In the transaction of its result.
pub fn writes(
    function: impl for<'a, 't> Fn(&'a Delivery, &'a mut HandlerContext<'t>) -> Handling<'a> + Send + Sync + 'static,
) -> impl Handler {
    does_in(true, function)
}

/// Writes the payload as an effect of the message.
pub async fn effect(delivery: &Delivery, context: &HandlerContext<'_>) -> Result<(), HandlerError> {
    let text = text_of(delivery);
    let sql = "insert into effect (message, text) values ($1, $2)";
    context.transaction()?.execute(sql, &[&delivery.message_id, &text]).await?;
    Ok(())
}

/// A handler that writes an effect and emits an event of its stream to `sink`.
pub fn effects_and_emits() -> impl Handler {
    writes(|delivery, context| {
        Box::pin(async move {
            effect(delivery, context).await?;
            let stream = delivery.stream_id.unwrap_or(delivery.message_id);
            context.push(&RawMessage::event("test.handled", &delivery.payload).stream(stream).to(&["sink"]))?;
            Ok(())
        })
    })
}

/// A handler that writes its effect but for what is named, which fails so many times.
pub fn fails(name: &'static str, times: usize, calls: &Calls) -> impl corelane::Handler + use<> {
    let calls = calls.clone();
    writes(move |delivery, context| {
        let fails = text_of(delivery) == name && calls.note() < times;
        Box::pin(async move {
            if fails {
                return Err(HandlerError::retry("not yet"));
            }
            effect(delivery, context).await
        })
    })
}
pub fn text_of(delivery: &Delivery) -> String {
    String::from_utf8_lossy(&delivery.payload).into_owned()
}

/// A message of a stream (0: of none).
pub fn message(stream: u128, text: &str) -> Delivery {
    Delivery {
        message_id: Uuid::now_v7(),
        stream_id: (stream != 0).then(|| Uuid::from_u128(stream)),
        type_name: "test.order".to_owned(),
        payload: text.as_bytes().to_vec(),
        ..Delivery::default()
    }
}

/// A schema with the table of effects, and a broker.
pub struct Inbox {
    pub schema: TestSchema,
    pub broker: MemoryBroker,
    pub settings: Vec<(&'static str, String)>,
    pub types: EventTypes,
}

impl Inbox {
    pub fn new() -> Self {
        Self::in_schema(schema(), MemoryBroker::new(30_000))
    }

    pub fn in_schema(schema: TestSchema, broker: MemoryBroker) -> Self {
        Self { schema, broker, settings: Vec::new(), types: EventTypes::default() }
    }

    pub fn set(mut self, key: &'static str, value: &str) -> Self {
        self.settings.push((key, value.to_owned()));
        self
    }

    /// An engine over this broker (or another transport), with the table of effects in its schema.
    pub async fn engine(&self, transport: impl Transport) -> Engine {
        let mut config = crate::engine::config(&self.schema);
        config.set("inbox.poll_ms", "20").unwrap();
        // So that the handlers' SQL finds the table of effects.
        let url = format!("{}?options=-csearch_path%3D{}", config.database.url, self.schema.name);
        config.set("database.url", &url).unwrap();
        for (key, value) in &self.settings {
            config.set(key, value).unwrap();
        }
        let builder = Engine::builder(config).transport(transport).event_types(self.types.clone()).migrate(true);
        let engine = builder.start().await.expect("start");
        let sql =
            "create table if not exists effect (turn bigint generated always as identity, message uuid, text text)";
        self.schema.client().await.batch_execute(sql).await.unwrap();
        engine
    }

    pub async fn client(&self) -> Client {
        self.schema.client().await
    }

    pub fn put(&self, stream: u128, text: &str) -> Uuid {
        let message = message(stream, text);
        let id = message.message_id;
        self.broker.put(SOURCE, message);
        id
    }

    /// Waits until the broker has nothing more of the source.
    pub async fn settled(&self) {
        eventually("everything is settled", PATIENCE, || async {
            let counts = self.broker.counts(SOURCE);
            counts.waiting == 0 && counts.in_hand == 0
        })
        .await;
    }

    /// Waits until so many effects are there; answers their texts in order.
    pub async fn effects(&self, count: usize) -> Vec<String> {
        let client = self.client().await;
        let read = || async { texts(&client, "select text from effect order by turn").await };
        eventually(&format!("{count} effects"), PATIENCE, || async { read().await.len() >= count }).await;
        read().await
    }

    /// Rows of a table of the schema.
    pub async fn count(&self, table: &str) -> i64 {
        self.client().await.query_one(&format!("select count(*) from {table}"), &[]).await.unwrap().get(0)
    }

    /// Waits until nothing is stored or parked any more.
    pub async fn nothing_kept(&self) {
        eventually("nothing is kept", PATIENCE, || async {
            self.count("wh_inbox").await == 0 && self.count("wh_inbox_parked").await == 0
        })
        .await;
    }
}

pub async fn texts(client: &Client, sql: &str) -> Vec<String> {
    client.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

/// The tests' consumer, before its handlers.
pub fn consumer(engine: &Engine) -> ConsumerBuilder {
    engine.consumer(CONSUMER).source(SOURCE)
}

/// The tests' consumer with one handler for everything. SQL of handlers finds the schema's tables by their names.
pub async fn consume(engine: &Engine, handler: impl Handler) -> Consumer {
    consumer(engine).other_types(handler).start().await.expect("start")
}

/// Counts calls.
#[derive(Clone, Default)]
pub struct Calls(Arc<AtomicUsize>);

impl Calls {
    /// Counts one; answers how many there were before.
    pub fn note(&self) -> usize {
        self.0.fetch_add(1, Ordering::AcqRel)
    }

    pub fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }

    pub async fn wait_for(&self, count: usize) {
        eventually(&format!("{count} calls"), PATIENCE, || async { self.count() >= count }).await;
    }
}
