//! `relay`: messages arrive from a broker in a process of its own, each is handled with a row of the handler's own SQL and
//! one emitted message, and that one is received from the broker's second queue.
//!
//! Invariants
//! - The latency counts from the moment before a batch is given to the broker to the moment what was emitted is received.
//! - As many messages are under way as all callers' batches; at the end each that was sent once has come out once, its
//!   stream in order, with one effect.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use corelane::engine::Engine;
use corelane::store::install::migrate;
use corelane::store::schema_name::SchemaName;
use tokio::sync::Notify;
use uuid::Uuid;

use super::describe;
use crate::baselines::{DESTINATION, TYPE_NAME};
use crate::broker::client::BrokerClient;
use crate::broker::frames::{Settled, Whole};
use crate::broker::transport::BrokerTransport;
use crate::checks::Findings;
use crate::drive::{Caller, measured};
use crate::engine_side::config;
use crate::failure::{Failure, Result};
use crate::figures::Figures;
use crate::latency::Recorder;
use crate::measure::{Meter, charge_counts};
use crate::progress::Tally;
use crate::running;
use crate::scenario::{Rate, Scenario};
use crate::shape::{Payload, StreamChoice, StreamFamily};
use crate::sink::frames::hash_of;
use crate::target::{Target, quoted};
use crate::verify::processes::Process;
use crate::verify::relay::{SOURCE, TABLE};
use crate::verify::relay_process::Relay;

/// Longest time something may take to begin or to end.
const PATIENCE: Duration = Duration::from_secs(20);

/// Measures relays under a scenario, in a schema of its own.
///
/// # Errors
/// Of the server, the broker or the engine. Broken promises are figures, no errors.
pub async fn measure(target: &Target, scenario: &Scenario) -> Result<Figures> {
    if scenario.rate != Rate::Top {
        return Err(Failure::Usage("--rate belongs to the scenarios outbox, events and subscribe".into()));
    }
    if scenario.instances > 1 {
        return Err(Failure::Usage("--instances belongs to the scenario outbox, and to verify of relay".into()));
    }
    target.in_fresh_schema(async |schema| in_schema(target, scenario, schema).await).await
}

async fn in_schema(target: &Target, scenario: &Scenario, schema: &str) -> Result<Figures> {
    let directory = tempfile::Builder::new().prefix("loadgen-").tempdir().map_err(Failure::io("a directory"))?;
    let path = |name: &str| directory.path().join(name).display().to_string();
    let arguments = ["sink", "--socket", &path("sink"), "--journal", &path("journal"), "--queues", &path("queues")];
    let _broker = Process::start(arguments.map(str::to_owned).to_vec(), Vec::new())?;
    let socket = directory.path().join("sink");
    let client = BrokerClient::new(socket.clone());
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = client.states().await {
        if Instant::now() > deadline {
            return Err(Failure::Io { what: "starting the broker".to_owned(), source: error });
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let meter = Meter::new(target).await?;
    let config = config(scenario, target.url(), schema)?;
    let workers = config.inbox.workers;
    let mut database = target.connect().await?;
    migrate(&mut database, &SchemaName::new(schema)?, config.partitions.count).await?;
    database.batch_execute(&TABLE.replace('@', &quoted(schema))).await?;
    meter.settle_server().await?;
    let counts = meter.counts(schema).await?;
    let engine = running::start_one(Engine::builder(config).transport(BrokerTransport::new(socket.clone()))).await?;
    let handler = Relay::new(schema).without_failures();
    let consumer = engine.consumer("loadgen").source(SOURCE).other_types(handler).start().await?;
    let tally = Arc::new(Tally::default());
    let book = Arc::new(Book::default());
    let receiving = tokio::spawn(receive(client, book.clone(), tally.clone()));
    let family = StreamFamily::random();
    let callers = (0..scenario.callers).map(|index| RelayCaller {
        broker: BrokerClient::new(socket.clone()),
        book: book.clone(),
        tally: tally.clone(),
        family,
        streams: StreamChoice::new(scenario, index, 7),
        payload: Payload::new(scenario.payload_bytes),
        batch: scenario.batch,
        duplicates_percent: scenario.duplicates_percent.into(),
        under_way_max: (scenario.batch * scenario.callers) as u64,
        sent: 0,
    });
    let reset = async || {
        book.locked().latency = Recorder::default();
        Ok(())
    };
    let outcome = measured(callers.collect(), scenario, &meter, &tally, "relay", reset).await;
    consumer.stop(PATIENCE).await;
    running::end(std::slice::from_ref(&engine)).await;
    receiving.abort();
    let mut figures = outcome?;
    charge_counts(&mut figures, &counts, &meter.final_counts(schema, "corelane").await?, tally.stored());
    let effects = format!("select count(*), count(distinct message_id) from {}.loadgen_effects", quoted(schema));
    let row = database.query_one(&effects, &[]).await?;
    let (effects, distinct) = (row.get::<_, i64>(0) as u64, row.get::<_, i64>(1) as u64);
    let state = book.locked();
    figures.judge(Findings {
        lost: state.under_way.len() as u64,
        order_violations: state.order_violations,
        copies: state.copies,
    });
    figures.double_effects = Some(effects - distinct + state.doubles);
    figures.duplicates = Some(book.duplicates.load(Ordering::Relaxed));
    figures.latency_ms.store = None;
    figures.latency_ms.end_to_end = state.latency.percentiles();
    drop(state);
    describe(&mut figures, scenario, &engine, workers);
    Ok(figures)
}

struct Given {
    number: u64,
    at: Instant,
}

#[derive(Default)]
struct State {
    /// By the hash of their bytes, which no other message has.
    under_way: HashMap<u64, Given>,
    /// Ids of what came out.
    ids: HashSet<Uuid>,
    /// The highest number that came out, of each stream.
    highest: HashMap<Uuid, u64>,
    order_violations: u64,
    copies: u64,
    doubles: u64,
    latency: Recorder,
}

/// What is under way.
#[derive(Default)]
struct Book {
    state: Mutex<State>,
    duplicates: AtomicU64,
    moved: Notify,
}

impl Book {
    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Something came out; whether it was the first of its kind.
    fn take(&mut self, message: &Whole) -> bool {
        if !self.ids.insert(message.message_id) {
            self.copies += 1;
            return false;
        }
        let Some(given) = self.under_way.remove(&hash_of(&message.payload)) else {
            self.doubles += 1;
            return false;
        };
        self.latency.record_us(given.at.elapsed().as_micros() as u64, 1);
        let highest = self.highest.entry(message.stream_id.unwrap_or_default()).or_default();
        self.order_violations += u64::from(given.number < *highest);
        *highest = given.number.max(*highest);
        true
    }
}

/// Receives what was emitted.
async fn receive(broker: BrokerClient, book: Arc<Book>, tally: Arc<Tally>) -> std::io::Result<()> {
    loop {
        let given = broker.receive(DESTINATION, 1_000).await?;
        let first = {
            let mut state = book.locked();
            given.iter().filter(|delivered| state.take(&delivered.message)).count()
        };
        tally.published.fetch_add(first as u64, Ordering::Relaxed);
        book.moved.notify_waiters();
        broker.settle(given.iter().map(|delivered| (delivered.receipt, Settled::Completed)).collect()).await?;
    }
}

struct RelayCaller {
    broker: BrokerClient,
    book: Arc<Book>,
    tally: Arc<Tally>,
    family: StreamFamily,
    streams: StreamChoice,
    payload: Payload,
    batch: usize,
    duplicates_percent: u64,
    under_way_max: u64,
    sent: u64,
}

impl RelayCaller {
    fn make(&mut self) -> Vec<Whole> {
        let mut messages = Vec::with_capacity(self.batch);
        let at = Instant::now();
        let mut state = self.book.locked();
        for _ in 0..self.batch {
            let message_id = Uuid::now_v7();
            let mut payload = self.payload.draw().to_vec();
            // Callers count alike: the id makes the bytes one's own.
            payload.splice(1..1, format!("\"id\":\"{message_id}\",").into_bytes());
            self.sent += 1;
            state.under_way.insert(hash_of(&payload), Given { number: self.sent, at });
            let stream_id = Some(self.family.stream(self.streams.draw()));
            messages.push(Whole {
                message_id,
                stream_id,
                type_name: TYPE_NAME.to_owned(),
                payload,
                ..Whole::default()
            });
            if self.sent % 100 < self.duplicates_percent {
                messages.extend(messages.last().cloned());
                self.book.duplicates.fetch_add(1, Ordering::Relaxed);
            }
        }
        messages
    }
}

impl Caller for RelayCaller {
    async fn call(&mut self, _intended: Instant) -> Result<u64> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let moved = self.book.moved.notified();
            let under_way = self.tally.stored().saturating_sub(self.tally.published());
            if under_way + self.batch as u64 <= self.under_way_max {
                break;
            }
            if tokio::time::timeout_at(deadline.into(), moved).await.is_err() {
                return Err(Failure::TimedOut(format!("nothing was relayed for {PATIENCE:?}")));
            }
        }
        let messages = self.make();
        self.broker.arrive(SOURCE, messages).await.map_err(Failure::io("sending to the broker"))?;
        Ok(self.batch as u64)
    }
}
