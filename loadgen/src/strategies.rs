//! `strategies`: what each strategy costs and how long its callers wait, at several numbers of callers, in one run.
//!
//! Invariants
//! - Each cell has an engine and a schema of its own; calls, commits and messages are those of its whole life, latencies
//!   those after the warm-up.
//! - `immediate` and `scoped` are closed loops: a caller waits for its acknowledgement, then comes again. `interval` and
//!   `batch` are for callers that do not wait, and are driven at a rate: a latency counts from the moment the push was
//!   meant to be made.
//! - Every acknowledged message is published before a cell ends: one that is not is a broken promise.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};
use corelane::config::{Config, Strategy};
use corelane::engine::Engine;
use corelane::{MemoryTransport, Pushed};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde::Serialize;
use serde_json::Map;

use crate::baselines::Ids;
use crate::cli::StrategiesArgs;
use crate::engine_side::{Message, install};
use crate::failure::{Failure, Result};
use crate::latency::{Pace, Percentiles, Recorder};
use crate::measure::Meter;
use crate::report;
use crate::run::{Ending, Outcome, settings};
use crate::running;
use crate::scenario::PAYLOAD_BYTES_MIN;
use crate::shape::{Payload, StreamFamily};
use crate::target::Target;

/// Streams of one caller.
const STREAMS_A_CALLER: u32 = 64;
/// The run as a whole ends within this.
const SECONDS_MAX: f64 = 170.0;
/// Starting, installing and ending a cell.
const SECONDS_A_CELL: f64 = 1.5;

/// One strategy at one number of callers.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    strategy: &'static str,
    callers: usize,
    /// Messages of the cell's whole life, its warm-up included.
    messages: u64,
    messages_per_second: f64,
    acknowledged_ms: Option<Percentiles>,
    /// Transactions that store messages.
    store_calls_per_1000_messages: f64,
    store_calls_per_second: f64,
    /// With claims and the outcomes (cursors) of what was published.
    database_calls_per_1000_messages: f64,
    /// As the server counts: everything, leases included.
    commits_per_1000_messages: f64,
    /// Pushes refused as overloaded.
    overloaded: u64,
    lost: u64,
}

/// Measures all cells and prints the table.
///
/// # Errors
/// Of options, server, engine or files.
pub async fn strategies(args: &StrategiesArgs) -> Result<Outcome> {
    let cells = args.strategy.len() * args.callers.len();
    let seconds = (args.duration.as_secs_f64() + args.warm_up.as_secs_f64() + SECONDS_A_CELL) * cells as f64;
    if seconds > SECONDS_MAX || args.duration < Duration::from_millis(100) {
        return Err(Failure::Usage(format!(
            "--duration {:?} makes {cells} cells last {seconds:.0} s: at least 100 ms, and {SECONDS_MAX:.0} s in all",
            args.duration
        )));
    }
    if args.callers.iter().any(|callers| !(1..=4096).contains(callers)) || !(1..=1_000).contains(&args.unit) {
        return Err(Failure::Usage("--callers is 1 to 4096, --unit 1 to 1000".into()));
    }
    if !(1.0..=1e6).contains(&args.rate) {
        return Err(Failure::Usage(format!("--rate {} is out of range: 1 to 1,000,000 messages a second", args.rate)));
    }
    if !(PAYLOAD_BYTES_MIN..=1 << 20).contains(&args.payload_bytes) {
        return Err(Failure::Usage(format!("--payload-bytes is {PAYLOAD_BYTES_MIN} to 1048576")));
    }
    let target = Target::open(args.database_url.as_deref()).await?;
    let mut measured = Vec::new();
    for strategy in &args.strategy {
        for callers in &args.callers {
            eprintln!("{}, {callers} callers", strategy.name());
            measured.push(measure(&target, args, *strategy, *callers).await?);
        }
    }
    println!("{}", table(&measured));
    let broken = measured.iter().any(|cell| cell.lost > 0);
    let mut json = Map::new();
    report::put(&mut json, "strategies", measured);
    report::put(&mut json, "unit", args.unit);
    report::put(&mut json, "rate", args.rate);
    report::put(&mut json, "server_settings", settings(&target).await?);
    Ok(Outcome { json, ending: Ending::of(broken) })
}

/// As it stands in docs/recipes.md.
fn table(cells: &[Cell]) -> Table {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    table.set_header([
        "strategy",
        "callers",
        "messages/s",
        "acknowledged p50 ms",
        "p99 ms",
        "store calls a 1,000",
        "store calls/s",
        "all calls a 1,000",
        "commits a 1,000",
    ]);
    for cell in cells {
        let ms = |value: Option<f64>| value.map_or("-".to_owned(), |ms| format!("{ms:.1}"));
        table.add_row([
            cell.strategy.to_owned(),
            cell.callers.to_string(),
            format!("{:.0}", cell.messages_per_second),
            ms(cell.acknowledged_ms.map(|latency| latency.p50)),
            ms(cell.acknowledged_ms.map(|latency| latency.p99)),
            format!("{:.1}", cell.store_calls_per_1000_messages),
            format!("{:.1}", cell.store_calls_per_second),
            format!("{:.1}", cell.database_calls_per_1000_messages),
            format!("{:.1}", cell.commits_per_1000_messages),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

async fn measure(target: &Target, args: &StrategiesArgs, strategy: Strategy, callers: usize) -> Result<Cell> {
    target.in_fresh_schema(async |schema| in_schema(target, args, strategy, callers, schema).await).await
}

fn config(args: &StrategiesArgs, target: &Target, schema: &str) -> Result<Config> {
    let config = match &args.config {
        Some(path) => Config::from_file(path)?,
        None => Config::default(),
    };
    let mut config = config.overlay_env("CORELANE")?;
    config.set("database.url", target.url())?;
    config.set("database.schema", schema)?;
    config.set("service.name", "loadgen")?;
    Ok(config)
}

async fn in_schema(
    target: &Target,
    args: &StrategiesArgs,
    strategy: Strategy,
    callers: usize,
    schema: &str,
) -> Result<Cell> {
    install(target, schema).await?;
    let meter = Meter::new(target).await?;
    meter.settle_server().await?;
    let before = meter.counts(schema).await?;
    let published = Arc::new(AtomicU64::new(0));
    let counting = published.clone();
    let transport = MemoryTransport::new(move |_, _| {
        counting.fetch_add(1, Ordering::Relaxed);
    });
    let config = config(args, target, schema)?;
    let partitions = config.partitions.count as usize;
    let engine = running::start_one(Engine::builder(config).transport(transport)).await?;
    let outcome = async {
        until("the partitions are held", || engine.partitions_held() == partitions).await?;
        let load = load(&engine, args, strategy, callers).await?;
        let all_published = || published.load(Ordering::Relaxed) >= load.stored;
        if let Err(failure) = until("everything is published", all_published).await {
            tracing::warn!("{failure}");
        }
        Ok(load)
    };
    let outcome: Result<Load> = outcome.await;
    let sum = |of: fn(&corelane::metrics::ShardMetrics) -> u64| -> u64 {
        engine.shards().iter().map(|shard| of(&shard.metrics)).sum()
    };
    let store_calls = sum(|metrics| metrics.flushes.get());
    let other_calls = sum(|metrics| metrics.claims.get() + metrics.settles.get());
    running::end(std::slice::from_ref(&engine)).await;
    drop(engine);
    let load = outcome?;
    let commits = meter.final_counts(schema, "corelane").await?.commits.saturating_sub(before.commits);
    let per_1000 = |count: u64| count as f64 * 1000.0 / load.stored.max(1) as f64;
    let seconds = load.took.as_secs_f64().max(1e-9);
    Ok(Cell {
        strategy: strategy.name(),
        callers,
        messages: load.stored,
        messages_per_second: load.stored as f64 / seconds,
        acknowledged_ms: load.latencies.percentiles(),
        store_calls_per_1000_messages: per_1000(store_calls),
        store_calls_per_second: store_calls as f64 / seconds,
        database_calls_per_1000_messages: per_1000(store_calls + other_calls),
        commits_per_1000_messages: per_1000(commits),
        overloaded: load.overloaded,
        lost: load.stored.saturating_sub(published.load(Ordering::Relaxed)),
    })
}

async fn until(what: &str, condition: impl Fn() -> bool) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        if Instant::now() > deadline {
            return Err(Failure::TimedOut(format!("not within 30 s: {what}")));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

/// What callers have seen.
#[derive(Default)]
struct Load {
    stored: u64,
    overloaded: u64,
    latencies: Recorder,
    took: Duration,
}

impl Load {
    fn acknowledged(&mut self, intended: Instant, measured_from: Instant, messages: u64) {
        self.stored += messages;
        if intended >= measured_from {
            self.latencies.record_us(intended.elapsed().as_micros() as u64, messages);
        }
    }
}

async fn load(engine: &Engine, args: &StrategiesArgs, strategy: Strategy, callers: usize) -> Result<Load> {
    let start = Instant::now();
    let (measured_from, end) = (start + args.warm_up, start + args.warm_up + args.duration);
    let family = StreamFamily::random();
    let mut tasks = Vec::with_capacity(callers);
    for index in 0..callers {
        let caller = Caller {
            engine: engine.clone(),
            messages: Messages {
                family,
                first_stream: index as u32 * STREAMS_A_CALLER,
                payload: Payload::new(args.payload_bytes),
                ids: Ids::default(),
                drawn: 0,
            },
            measured_from,
            end,
        };
        let pace = Pace::new(start, Some(args.rate), index, callers);
        let unit = args.unit;
        tasks.push(tokio::spawn(async move {
            match strategy {
                Strategy::Immediate => caller.immediate().await,
                Strategy::Scoped => caller.scoped(unit).await,
                Strategy::Interval | Strategy::Batch => caller.queued(strategy, pace).await,
            }
        }));
    }
    let mut load = Load::default();
    for task in tasks {
        let of = task.await.map_err(|error| Failure::Broken(format!("a caller ended early ({error})")))??;
        load.stored += of.stored;
        load.overloaded += of.overloaded;
        load.latencies.merge(&of.latencies);
    }
    load.took = start.elapsed();
    Ok(load)
}

struct Messages {
    family: StreamFamily,
    first_stream: u32,
    payload: Payload,
    ids: Ids,
    drawn: u32,
}

impl Messages {
    fn next(&mut self) -> Message {
        self.drawn = self.drawn.wrapping_add(1);
        self.payload.count();
        let stream = self.family.stream(self.first_stream + self.drawn % STREAMS_A_CALLER);
        let correlation_id = self.ids.draw();
        Message::new(stream, &self.payload, correlation_id, &mut self.ids)
    }
}

struct Caller {
    engine: Engine,
    messages: Messages,
    measured_from: Instant,
    end: Instant,
}

impl Caller {
    async fn immediate(mut self) -> Result<Load> {
        let mut load = Load::default();
        while Instant::now() < self.end {
            let began = Instant::now();
            self.engine.push_with(Strategy::Immediate, &self.messages.next())?.stored().await?;
            load.acknowledged(began, self.measured_from, 1);
        }
        Ok(load)
    }

    async fn scoped(mut self, unit: usize) -> Result<Load> {
        let mut load = Load::default();
        while Instant::now() < self.end {
            let began = Instant::now();
            let mut work = self.engine.unit_with(Strategy::Scoped);
            for _ in 0..unit {
                work.push(&self.messages.next())?;
            }
            let receipts = work.commit().await?;
            load.acknowledged(began, self.measured_from, receipts.len() as u64);
        }
        Ok(load)
    }

    /// Pushes at its pace, and listens for acknowledgements meanwhile.
    async fn queued(mut self, strategy: Strategy, mut pace: Pace) -> Result<Load> {
        let mut load = Load::default();
        let mut waiting = FuturesUnordered::new();
        let answer = |pushed: Pushed, intended: Instant| async move { (intended, pushed.stored().await) };
        loop {
            let intended = pace.next(Instant::now());
            if intended >= self.end || Instant::now() >= self.end {
                break;
            }
            let mut due = std::pin::pin!(tokio::time::sleep_until(intended.into()));
            loop {
                tokio::select! {
                    biased;
                    Some((intended, stored)) = waiting.next(), if !waiting.is_empty() => {
                        stored?;
                        load.acknowledged(intended, self.measured_from, 1);
                    }
                    () = &mut due => break,
                }
            }
            match self.engine.push_with(strategy, &self.messages.next()) {
                Ok(pushed) => waiting.push(answer(pushed, intended)),
                Err(corelane::Error::Overloaded { .. }) => load.overloaded += 1,
                Err(error) => return Err(error.into()),
            }
        }
        while let Some((intended, stored)) = waiting.next().await {
            stored?;
            load.acknowledged(intended, self.measured_from, 1);
        }
        Ok(load)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_one_for_a_readme_and_shows_each_cell() {
        let cell = |strategy: Strategy, callers| Cell {
            strategy: strategy.name(),
            callers,
            messages: 2_000,
            messages_per_second: 400.0,
            acknowledged_ms: None,
            store_calls_per_1000_messages: 1000.0,
            store_calls_per_second: 400.0,
            database_calls_per_1000_messages: 1040.5,
            commits_per_1000_messages: 1050.25,
            overloaded: 0,
            lost: 0,
        };
        let cells: Vec<Cell> =
            Strategy::ALL.into_iter().flat_map(|strategy| [cell(strategy, 1), cell(strategy, 32)]).collect();
        let text = table(&cells).to_string();
        assert_eq!(text.lines().count(), 2 + cells.len(), "{text}");
        assert!(text.lines().all(|line| line.starts_with('|') && line.ends_with('|')), "{text}");
        assert!(text.contains("1040.5"), "{text}");
    }
}
