//! Corelane itself as the subject of a measurement.
//!
//! Invariants
//! - The engine runs in this process, as in a service; the callers are ordinary tokio tasks.
//! - Commits and changed rows are counted over the engine's whole life, everything else from the moment
//!   the warm-up is published to the moment the last measured message is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use corelane::config::Config;
use corelane::engine::{Builder, Engine, ShardView};
use corelane::envelope::Trace;
use corelane::message::{Enqueue, Header, PayloadError, Wishes};
use corelane::store::install::migrate;
use corelane::store::schema_name::SchemaName;
use hdrhistogram::Histogram;
use uuid::Uuid;

use crate::backlog;
use crate::baselines::{DESTINATION, Ids, TYPE_NAME};
use crate::cli::Affinity;
use crate::collector::{CallMark, Collector, CollectorTransport};
use crate::drive::{Caller, measured, quiet};
use crate::failure::{Failure, Result};
use crate::figures::{ConfigValue, Figures, ShardFigures};
use crate::hold::Held;
use crate::latency::Recorder;
use crate::measure::{Meter, charge, charge_counts};
use crate::progress::{Tally, Watch};
use crate::running;
use crate::scenario::Scenario;
use crate::shape::{Payload, StreamChoice, StreamFamily};
use crate::target::{Target, quoted};

/// Messages behind one refused head of `--parked`.
const PARKED_ROWS_A_STREAM: u64 = 100;

/// Installs the engine's schema.
///
/// # Errors
/// Of the database.
pub async fn install(target: &Target, schema: &str) -> Result<()> {
    let mut client = target.connect().await?;
    migrate(&mut client, &SchemaName::new(schema)?, Config::default().partitions.count).await?;
    Ok(())
}

/// The engine's configuration: defaults, the file, the environment, the command line.
///
/// # Errors
/// Naming the key.
pub fn config(scenario: &Scenario, url: &str, schema: &str) -> Result<Config> {
    let config = match &scenario.config {
        Some(path) => Config::from_file(path)?,
        None => Config::default(),
    };
    let mut config = config.overlay_env("CORELANE")?;
    config.set("database.url", url)?;
    config.set("database.schema", schema)?;
    config.set("service.name", "loadgen")?;
    if let Some(shards) = scenario.shards {
        config.set("shards.count", &shards.to_string())?;
    }
    if let Some(runtime) = scenario.runtime {
        config.set("shards.runtime", runtime.name())?;
    }
    config.validate()?;
    Ok(config)
}

/// Measures the engine under a scenario, in a schema of its own.
///
/// # Errors
/// Of the server or the engine. Broken promises are figures, no errors.
pub async fn measure(target: &Target, scenario: &Scenario, title: &str) -> Result<Figures> {
    target.in_fresh_schema(async |schema| in_schema(target, scenario, title, schema).await).await
}

async fn in_schema(target: &Target, scenario: &Scenario, title: &str, schema: &str) -> Result<Figures> {
    let meter = Meter::new(target).await?;
    let config = config(scenario, target.url(), schema)?;
    let entries = config.entries();
    let (family, refused) = (StreamFamily::random(), StreamFamily::random());
    let tally = Arc::new(Tally::default());
    let collector = Arc::new(Collector::new(family, refused, scenario.streams, tally.clone()));
    let mut client = target.connect().await?;
    migrate(&mut client, &SchemaName::new(schema)?, config.partitions.count).await?;
    if scenario.backlog > 0 {
        let last = backlog::store(target, schema, scenario, family, scenario.backlog).await?;
        collector.checks().acknowledged((0..).zip(last));
        tally.stored.store(scenario.backlog, Ordering::Relaxed);
    }
    meter.settle_server().await?;
    let counts = meter.counts(schema).await?;

    let subject = Subject { target, scenario, schema, meter: &meter, collector, tally, family, refused, title };
    let builders = (0..scenario.instances)
        .map(|_| Engine::builder(config.clone()).transport(CollectorTransport(subject.collector.clone())))
        .collect();
    let outcome = if scenario.backlog > 0 {
        subject.drain(builders).await
    } else {
        let engines = start(builders).await?;
        let outcome = subject.load(&engines).await;
        finish(&engines, outcome).await
    };
    let mut figures = outcome?;
    let stored = subject.tally.stored();
    charge_counts(&mut figures, &counts, &meter.final_counts(schema, "corelane").await?, stored);
    figures.judge(subject.collector.checks().findings());
    figures.scenario = scenario.name();
    figures.subject = "corelane".into();
    figures.batch = scenario.batch;
    // Two a shard; one for the lease, one for maintenance and, beside others, one that waits for their end.
    let of_instance = if scenario.instances > 1 { 3 } else { 2 };
    figures.connections = 2 * figures.shards + of_instance * scenario.instances;
    figures.config = entries
        .into_iter()
        .map(|entry| ConfigValue { key: entry.name.to_owned(), value: entry.value, origin: entry.origin.to_string() })
        .collect();
    Ok(figures)
}

struct Subject<'a> {
    target: &'a Target,
    scenario: &'a Scenario,
    schema: &'a str,
    meter: &'a Meter,
    collector: Arc<Collector>,
    tally: Arc<Tally>,
    family: StreamFamily,
    refused: StreamFamily,
    title: &'a str,
}

impl Subject<'_> {
    /// Callers against a running engine.
    async fn load(&self, engines: &[Engine]) -> Result<Figures> {
        await_partitions(engines).await?;
        if self.scenario.parked > 0 {
            self.park(&engines[0]).await?;
        }
        let calls = Arc::new(AtomicU64::new(1));
        let overloaded = Arc::new(AtomicU64::new(0));
        let callers = (0..self.scenario.callers)
            .map(|index| EngineCaller {
                engine: engines[index % engines.len()].clone(),
                collector: self.collector.clone(),
                family: self.family,
                streams: StreamChoice::new(self.scenario, index, 7),
                chosen: Vec::with_capacity(self.scenario.batch),
                messages: Vec::with_capacity(self.scenario.batch),
                payload: Payload::new(self.scenario.payload_bytes),
                ids: Ids::default(),
                calls: calls.clone(),
                overloaded: overloaded.clone(),
                batch: self.scenario.batch,
                home: Home::new(self.scenario),
            })
            .collect();
        let mut held = None;
        let mut before = Vec::new();
        let measuring = async || {
            if let Some(hold) = self.scenario.hold {
                held = Some(Held::begin(self.target, self.schema, hold).await?);
            }
            self.collector.reset_latencies();
            before = engines.iter().flat_map(Engine::shards).map(|shard| count_of(&shard)).collect();
            Ok(())
        };
        let mut figures = measured(callers, self.scenario, self.meter, &self.tally, self.title, measuring).await?;
        drop(held);
        self.describe(&mut figures, engines, &before);
        figures.overloaded = overloaded.load(Ordering::Relaxed);
        Ok(figures)
    }

    /// An engine against messages that are there already: measured from its start.
    async fn drain(&self, builders: Vec<Builder>) -> Result<Figures> {
        let watch = Watch::start(self.title.to_owned(), self.tally.clone(), self.meter.server(), None);
        let from = self.meter.read().await?;
        let engines = start(builders).await?;
        let silence = quiet(&self.tally, Duration::from_secs(30)).await;
        let outcome = async {
            let to = self.meter.read().await?;
            let mut figures = Figures { windows: watch.stop().await, ..Figures::default() };
            charge(&mut figures, &from, &to, self.tally.published());
            self.describe(&mut figures, &engines, &[]);
            Ok(figures)
        };
        if let Err(failure) = silence {
            tracing::warn!("{failure}");
        }
        let outcome = outcome.await;
        finish(&engines, outcome).await
    }

    fn describe(&self, figures: &mut Figures, engines: &[Engine], before: &[Counts]) {
        let shards: Vec<ShardView> = engines.iter().flat_map(Engine::shards).collect();
        figures.runtime = engines[0].runtime().kind.name().to_owned();
        figures.shards = shards.len();
        let (publish, end_to_end) = self.collector.latencies();
        figures.latency_ms.publish = publish.percentiles();
        figures.latency_ms.end_to_end = end_to_end.percentiles();
        let mut claimed = 0;
        let mut claim = Recorder::default();
        figures.per_shard = shards
            .iter()
            .enumerate()
            .map(|(index, view)| {
                let (now, then) = (count_of(view), before.get(index).cloned().unwrap_or_default());
                if let Some(now) = now.claim_us {
                    claim.merge(&Recorder::between(now, then.claim_us.as_ref()));
                }
                claimed += now.claimed - then.claimed;
                let (rows, flushes) = (now.rows - then.rows, now.flushes - then.flushes);
                ShardFigures {
                    core: view.core,
                    partitions: view.partitions as u64,
                    rows,
                    flushes,
                    rows_per_flush: rows as f64 / flushes.max(1) as f64,
                    ring_fill_max: view.metrics.ring_rows_max.get(),
                    claims: now.claims - then.claims,
                    runs: now.runs - then.runs,
                    cpu_us: now.cpu_us - then.cpu_us,
                }
            })
            .collect();
        figures.claimed_messages = Some(claimed);
        figures.latency_ms.claim = claim.percentiles();
    }

    /// Streams whose head is refused, with messages behind it, all beside the log before the clock starts.
    async fn park(&self, engine: &Engine) -> Result<()> {
        let total = self.scenario.parked;
        let streams = total.div_ceil(PARKED_ROWS_A_STREAM) as u32;
        let mut payload = Payload::new(self.scenario.payload_bytes);
        let mut ids = Ids::default();
        let mut left = total;
        while left > 0 {
            let count = left.min(u64::from(streams));
            left -= count;
            let (correlation_id, payload, ids) = (ids.draw(), &mut payload, &mut ids);
            let messages = (0..count as u32).map(|stream| {
                payload.count();
                Message::new(self.refused.stream(stream), payload, correlation_id, ids)
            });
            for outcome in engine.enqueue_many(messages).await {
                outcome?;
            }
        }
        let waiting = format!("select count(*) from {}.wh_parked_reference", quoted(self.schema));
        let client = self.target.connect().await?;
        let deadline = Instant::now() + Duration::from_secs(60);
        // The heads may stand in the parked row alone.
        let wanted = (total - u64::from(streams)) as i64;
        loop {
            let parked: i64 = client.query_one(&waiting, &[]).await?.get(0);
            if parked >= wanted {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Failure::TimedOut(format!("{parked} of {total} messages were parked within a minute")));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

async fn start(builders: Vec<Builder>) -> Result<Vec<Engine>> {
    let mut engines = Vec::with_capacity(builders.len());
    for builder in builders {
        engines.push(running::start_one(builder).await?);
    }
    Ok(engines)
}

/// Ends the engines whatever came before; what came before is the answer.
async fn finish(engines: &[Engine], outcome: Result<Figures>) -> Result<Figures> {
    running::end(engines).await;
    outcome
}

/// Waits until each engine holds its share of the partitions: before that nothing is published from memory.
async fn await_partitions(engines: &[Engine]) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(15);
    let least = Config::default().partitions.count as usize / engines.len();
    while engines.iter().any(|engine| engine.partitions_held() < least.max(1)) {
        if Instant::now() > deadline {
            let held: Vec<usize> = engines.iter().map(Engine::partitions_held).collect();
            return Err(Failure::TimedOut(format!(
                "the engines hold {held:?} partitions after 15 s, not {least} each"
            )));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

#[derive(Clone, Debug, Default)]
struct Counts {
    rows: u64,
    flushes: u64,
    claims: u64,
    claimed: u64,
    runs: u64,
    cpu_us: u64,
    claim_us: Option<Histogram<u64>>,
}

fn count_of(view: &ShardView) -> Counts {
    let metrics = &view.metrics;
    Counts {
        rows: metrics.rows_stored.get(),
        flushes: metrics.flushes.get(),
        claims: metrics.claims.get(),
        claimed: metrics.rows_claimed.get(),
        runs: metrics.runs.get(),
        cpu_us: metrics.cpu_us.get(),
        claim_us: Some(metrics.claim_us.copy()),
    }
}

/// A message of the load, written straight into the engine's arena.
#[derive(Clone, Debug)]
pub struct Message {
    stream_id: Uuid,
    payload: crate::shape::PayloadView,
    wishes: Wishes<'static>,
    is_event: bool,
}

impl Message {
    /// An event with everything a traced one carries.
    #[must_use]
    pub fn new(stream_id: Uuid, payload: &Payload, correlation_id: Uuid, ids: &mut Ids) -> Self {
        let trace_id = ids.draw();
        let trace = Trace { trace_id, span_id: trace_id.as_u128() as u64 | 1, flags: 1 };
        let wishes = Wishes { correlation_id, causation_id: ids.draw(), trace, ..Wishes::default() };
        Self { stream_id, payload: payload.view(), wishes, is_event: true }
    }

    /// With an id of the caller's, as an event or another message.
    #[must_use]
    pub fn identified(self, message_id: Uuid, is_event: bool) -> Self {
        Self { wishes: Wishes { message_id: Some(message_id), ..self.wishes }, is_event, ..self }
    }
}

impl Enqueue for Message {
    fn header(&self) -> Header<'_> {
        Header {
            type_name: TYPE_NAME,
            content_type: "",
            is_event: self.is_event,
            stream_id: Some(self.stream_id),
            destinations: &[DESTINATION],
            wishes: self.wishes,
            check_json: false,
        }
    }

    fn write_payload(&self, buffer: &mut Vec<u8>, bytes_max: usize) -> Result<(), PayloadError> {
        self.payload.write(buffer, bytes_max)
    }
}

/// Which streams a caller's requests are for, where they are routed by stream id.
#[derive(Debug)]
struct Home {
    routed: bool,
    /// By partition; as of a moment ago.
    held: Vec<bool>,
    /// Draws in vain, beyond which the next stream is taken as it comes: a caller may have none of its instance's.
    misses: u32,
    asked: Option<Instant>,
}

impl Home {
    const AGE: Duration = Duration::from_millis(100);
    const MISSES_MAX: u32 = 1_000;

    fn new(scenario: &Scenario) -> Self {
        let routed = scenario.instances > 1 && scenario.affinity == Affinity::Owner;
        Self { routed, held: Vec::new(), misses: 0, asked: None }
    }

    fn is_of(&mut self, engine: &Engine, stream_id: Uuid) -> bool {
        if !self.routed {
            return true;
        }
        if self.misses == 0 && self.asked.is_none_or(|asked| asked.elapsed() > Self::AGE) {
            self.asked = Some(Instant::now());
            self.held.clear();
            for partition in engine.held_partitions() {
                self.held.resize(self.held.len().max(partition as usize + 1), false);
                self.held[partition as usize] = true;
            }
        }
        let is_of = self.held.get(engine.partition_of(stream_id) as usize).copied().unwrap_or(false);
        self.misses = if is_of || self.misses >= Self::MISSES_MAX { 0 } else { self.misses + 1 };
        self.misses == 0
    }
}

struct EngineCaller {
    engine: Engine,
    collector: Arc<Collector>,
    family: StreamFamily,
    streams: StreamChoice,
    chosen: Vec<u32>,
    messages: Vec<Message>,
    payload: Payload,
    ids: Ids,
    calls: Arc<AtomicU64>,
    overloaded: Arc<AtomicU64>,
    batch: usize,
    home: Home,
}

impl Caller for EngineCaller {
    async fn call(&mut self, intended: Instant) -> Result<u64> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let correlation_id = CallMark { call, intended_us: self.collector.micros_of(intended) }.to_uuid();
        self.collector.call_begins(call);
        self.chosen.clear();
        for _ in 0..self.batch {
            let mut stream = self.streams.draw();
            while !self.home.is_of(&self.engine, self.family.stream(stream)) {
                stream = self.streams.draw();
            }
            self.chosen.push(stream);
            self.payload.count();
            let stream_id = self.family.stream(stream);
            self.messages.push(Message::new(stream_id, &self.payload, correlation_id, &mut self.ids));
        }
        let outcomes = self.engine.enqueue_many(self.messages.drain(..)).await;
        self.collector.call_acknowledged(call);
        let mut stored = 0;
        let mut failure = None;
        let acknowledged = outcomes.into_iter().zip(&self.chosen).filter_map(|(outcome, stream)| match outcome {
            Ok(receipt) => {
                stored += 1;
                Some((*stream, receipt.stream_seq as u64))
            }
            Err(error) => {
                failure = Some(error);
                None
            }
        });
        self.collector.checks().acknowledged(acknowledged);
        match failure {
            None => Ok(stored),
            Some(corelane::Error::Overloaded { .. }) => {
                self.overloaded.fetch_add(1, Ordering::Relaxed);
                Ok(stored)
            }
            Some(error) => Err(error.into()),
        }
    }
}
