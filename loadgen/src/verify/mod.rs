//! `verify`: everything is broken on purpose, and an oracle that shares nothing with the engine judges.
//!
//! This process owns the server, breaks things and judges; the engine and the sink are processes of their own.
//!
//! Invariants
//! - The verdict is made after the producers ended and the sink has been quiet while nothing was broken.
//! - Copies have a bound that is computed and printed; everything else must be 0.

pub mod engine_process;
pub mod faults;
pub mod foreign;
pub mod oracle;
pub mod processes;
pub mod proxy;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::Map;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::baselines::DESTINATION;
use crate::cli::{FaultChoice, VerifyArgs};
use crate::engine_side;
use crate::failure::{Failure, Result};
use crate::report;
use crate::run::{Outcome, settings};
use crate::scenario::{Scenario, Until};
use crate::shape::StreamFamily;
use crate::sink::frames::hash_of;
use crate::sink::journal;
use crate::sink::socket_transport::SinkControl;
use crate::target::{Target, quoted};
use faults::Scene;
use foreign::{Foreign, Shape};
use oracle::{Evidence, Stored, Verdict, judge};
use processes::Process;
use proxy::Proxy;

/// Streams of a verification: few, so that writers meet on them.
const STREAMS: u32 = 200;
/// Shards where nothing else is said: more than one, also on a small machine, because what one stores the claim of
/// another has to leave alone.
const SHARDS: usize = 2;
/// How long the sink must have been quiet, and how long that may take.
const QUIET: Duration = Duration::from_secs(3);
const QUIET_MAX: Duration = Duration::from_secs(60);

/// Verifies and prints the verdict.
///
/// # Errors
/// Where something cannot be started, or does not come back after a fault.
pub async fn verify(args: &VerifyArgs) -> Result<Outcome> {
    let scenario = Scenario::check(&args.load)?;
    if scenario.hold.is_some() || scenario.parked > 0 || scenario.backlog > 0 || args.load.pairs > 0 {
        return Err(Failure::Usage("--hold, --parked, --backlog and --pairs belong to run".into()));
    }
    let duration = match scenario.until {
        Until::Elapsed(duration) if args.load.duration.is_some() => duration,
        Until::Elapsed(_) => Duration::from_secs(60),
        Until::Count(_) => return Err(Failure::Usage("verify runs for a time: give --duration, not --count".into())),
    };
    let chosen = faults::choose(&args.faults, args.load.database_url.is_none())?;
    let target = Arc::new(Target::open(args.load.database_url.as_deref()).await?);
    let schema = target.fresh_schema().await?;
    let directory = tempfile::Builder::new().prefix("loadgen-").tempdir().map_err(Failure::io("a directory"))?;
    let seed = args.seed.unwrap_or_else(|| Uuid::new_v4().as_u128() as u64);
    let names: Vec<String> = chosen.iter().map(|fault| faults::name(*fault)).collect();
    let (seconds, instances) = (duration.as_secs(), scenario.instances);
    println!("verify: {seconds} s, {instances} instances, seed {seed}, faults {}", names.join(","));
    let stage = Stage { target: &target, schema: &schema, directory: directory.path(), chosen: &chosen, seed };
    let outcome = stage.play(args, &scenario, duration).await;
    let settings = settings(&target).await?;
    target.drop_schema(&schema).await?;
    let Played { verdict, incidents, copies_max, commits, take_overs } = outcome?;
    show(&verdict, copies_max, incidents.len());
    let mut take_over_ms: Vec<f64> = take_overs.iter().map(|time| time.as_secs_f64() * 1000.0).collect();
    take_over_ms.sort_by(f64::total_cmp);
    if let Some(longest) = take_over_ms.last() {
        let (count, median) = (take_over_ms.len(), take_over_ms[take_over_ms.len() / 2]);
        println!("  {:40} {count}, median {median:.0} ms, at most {longest:.0} ms", "killed engines taken over");
    }
    let broken = verdict.broken(copies_max);
    let mut json = Map::new();
    report::put(&mut json, "scenario", "verify");
    report::put(&mut json, "seed", seed);
    report::put(&mut json, "seconds", duration.as_secs_f64());
    report::put(&mut json, "faults", names);
    if let Ok(serde_json::Value::Object(findings)) = serde_json::to_value(verdict) {
        json.extend(findings);
    }
    report::put(&mut json, "instances", scenario.instances);
    report::put(&mut json, "take_over_ms", take_over_ms);
    report::put(&mut json, "copies_max", copies_max);
    report::put(&mut json, "foreign_commits", commits);
    report::put(&mut json, "incidents", incidents);
    report::put(&mut json, "server_settings", settings);
    Ok(Outcome { json, broken })
}

fn show(verdict: &Verdict, copies_max: u64, incidents: usize) {
    println!("{} messages, {incidents} faults", verdict.messages);
    for (name, found) in [
        ("order violations", verdict.order_violations),
        ("lost", verdict.lost),
        ("events published that are not stored", verdict.phantoms),
        ("altered", verdict.altered),
        ("numbers given twice", verdict.numbers_given_twice),
        ("streams with gaps in their versions", verdict.version_gaps),
    ] {
        println!("  {name:40} {found}");
    }
    let after = verdict.copies_after_unknown;
    println!("  {:40} {} (at most {copies_max}; {after} after an unknown answer)", "copies", verdict.copies);
}

/// What came of it.
struct Played {
    verdict: Verdict,
    incidents: Vec<faults::Incident>,
    copies_max: u64,
    commits: u64,
    take_overs: Vec<Duration>,
}

struct Stage<'a> {
    target: &'a Arc<Target>,
    schema: &'a str,
    directory: &'a Path,
    chosen: &'a [FaultChoice],
    seed: u64,
}

impl Stage<'_> {
    async fn play(&self, args: &VerifyArgs, scenario: &Scenario, duration: Duration) -> Result<Played> {
        engine_side::install(self.target, self.schema).await?;
        let setup = self.target.connect().await?;
        setup.batch_execute(&format!("create table {}.loadgen_elsewhere (value int8)", quoted(self.schema))).await?;
        drop(setup);
        let family = StreamFamily::random();
        let proxy = match self.target.private() {
            Some(server) => Some(Proxy::start(self.directory, server.socket())?),
            None => None,
        };
        let sink = SinkControl { socket: self.directory.join("sink") };
        let sink_process = self.start_sink()?;
        let engines: Vec<Process> = (0..scenario.instances)
            .map(|index| self.start_engine(args, scenario, family, proxy.as_ref(), index))
            .collect::<Result<_>>()?;
        let mut scene = Scene {
            target: self.target.clone(),
            schema: self.schema.to_owned(),
            proxy,
            sink,
            sink_process,
            engines,
            take_overs: Vec::new(),
            timeline: Vec::new(),
            incidents: Vec::new(),
            random: StdRng::seed_from_u64(self.seed),
            began: Instant::now(),
        };
        for engine in &mut scene.engines {
            engine.await_line("started", Duration::from_secs(20)).await?;
        }
        let acknowledged = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let writers = self.start_writers(family, &stop, &acknowledged);
        let steps: Vec<FaultChoice> =
            self.chosen.iter().copied().filter(|fault| faults::STEPS.contains(fault)).collect();
        let until = Instant::now() + duration;
        let played = if steps.is_empty() {
            scene.watch_for(duration).await;
            Ok(())
        } else {
            scene.play(&steps, until).await
        };
        stop.store(true, Ordering::Relaxed);
        let mut commits = 0;
        for writer in writers {
            commits += writer.await.unwrap_or(0);
        }
        played?;
        for engine in &mut scene.engines {
            engine.order("quiet", "quiet", Duration::from_secs(40)).await?;
        }
        self.await_silence(&mut scene, family, &acknowledged).await?;
        for engine in &mut scene.engines {
            engine.order("stop", "stopped", Duration::from_secs(20)).await?;
        }
        let (_, unknown) = scene.sink.count().await?;
        let copies_max = unknown + scene.incidents.iter().map(|incident| incident.copies_max).sum::<u64>();
        let evidence = self.evidence(family, &acknowledged, scene.engines.len()).await?;
        let verdict = judge(&evidence);
        Ok(Played { verdict, incidents: scene.incidents, copies_max, commits, take_overs: scene.take_overs })
    }

    fn start_sink(&self) -> Result<Process> {
        let path = |name: &str| self.directory.join(name).display().to_string();
        let arguments = ["sink", "--socket", &path("sink"), "--journal", &path("journal")].map(str::to_owned);
        Process::start(arguments.to_vec(), Vec::new())
    }

    fn start_engine(
        &self,
        args: &VerifyArgs,
        scenario: &Scenario,
        family: StreamFamily,
        proxy: Option<&Proxy>,
        index: usize,
    ) -> Result<Process> {
        let path = |name: &str| self.directory.join(name).display().to_string();
        let url = proxy.map_or_else(|| self.target.url().to_owned(), Proxy::url);
        let mut arguments: Vec<String> =
            ["engine", "--schema", self.schema, "--sink", &path("sink")].map(str::to_owned).to_vec();
        let batch = scenario.batch.min(20).to_string();
        let callers = scenario.callers.clamp(3, 16).to_string();
        for (option, value) in [
            ("--acknowledged", path(&format!("acknowledged-{index}"))),
            ("--family", family.stream(0).to_string()),
            ("--streams", scenario.streams.min(STREAMS).to_string()),
            ("--callers", callers),
            ("--batch", batch),
            ("--pause-ms", "20".to_owned()),
        ] {
            arguments.extend([option.to_owned(), value]);
        }
        if let Some(config) = args.load.config.first() {
            arguments.extend(["--config".to_owned(), config.display().to_string()]);
        }
        let shards = scenario.shards.or(args.load.config.is_empty().then_some(SHARDS));
        if let Some(shards) = shards {
            arguments.extend(["--shards".to_owned(), shards.to_string()]);
        }
        if let Some(runtime) = scenario.runtime {
            arguments.extend(["--runtime".to_owned(), runtime.name().to_owned()]);
        }
        // A URL may hold a password: not on the command line, where everybody sees it.
        Process::start(arguments, vec![("LOADGEN_ENGINE_DATABASE_URL".to_owned(), url)])
    }

    fn start_writers(
        &self,
        family: StreamFamily,
        stop: &Arc<AtomicBool>,
        acknowledged: &Arc<Mutex<Vec<Stored>>>,
    ) -> Vec<tokio::task::JoinHandle<u64>> {
        let shape = |fault: &FaultChoice| match fault {
            FaultChoice::ForeignSql => Some(Shape::Plain),
            FaultChoice::Enlisted => Some(Shape::Enlisted),
            FaultChoice::LowerXid => Some(Shape::LowerXid),
            FaultChoice::RepeatableRead => Some(Shape::RepeatableRead),
            _ => None,
        };
        let shapes = self.chosen.iter().filter_map(shape).enumerate();
        shapes
            .map(|(index, shape)| {
                let writer = Foreign {
                    target: self.target.clone(),
                    schema: self.schema.to_owned(),
                    family,
                    streams: STREAMS,
                    stop: stop.clone(),
                    acknowledged: acknowledged.clone(),
                };
                tokio::spawn(writer.run(shape, self.seed.wrapping_add(index as u64)))
            })
            .collect()
    }

    /// Waits until everything that is to be published has been, or nothing has come for a while.
    async fn await_silence(
        &self,
        scene: &mut Scene,
        family: StreamFamily,
        acknowledged: &Arc<Mutex<Vec<Stored>>>,
    ) -> Result<()> {
        let deadline = Instant::now() + QUIET_MAX;
        let mut last = (0, Instant::now());
        loop {
            scene.watch_for(Duration::from_millis(200)).await;
            let count = scene.timeline.last().map_or(0, |(_, count)| *count);
            if count != last.0 {
                last = (count, Instant::now());
            }
            let silent = last.1.elapsed() > QUIET;
            if silent
                && (judge(&self.evidence(family, acknowledged, scene.engines.len()).await?).lost == 0
                    || last.1.elapsed() > QUIET * 5)
            {
                return Ok(());
            }
            if Instant::now() > deadline {
                eprintln!("loadgen: the sink was not quiet within {QUIET_MAX:?}; judged as it is");
                return Ok(());
            }
        }
    }

    async fn evidence(
        &self,
        family: StreamFamily,
        acknowledged: &Arc<Mutex<Vec<Stored>>>,
        engines: usize,
    ) -> Result<Evidence> {
        let client = self.target.connect().await?;
        let events = "select message_id, stream_id, stream_seq, version, payload from @.wh_event_store";
        let outbox =
            "select message_id, stream_id, stream_seq, 0::int8, payload from @.wh_outbox where stream_id is not null";
        let mut told = acknowledged.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for index in 0..engines {
            let noted = self.directory.join(format!("acknowledged-{index}"));
            if noted.exists() {
                told.extend(journal::read(&noted)?.into_iter().map(|entry| Stored {
                    message_id: entry.message.message_id,
                    stream_id: entry.message.stream_id,
                    stream_seq: entry.message.stream_seq,
                    version: entry.message.version,
                    payload_hash: entry.message.payload_hash,
                }));
            }
        }
        let destination = hash_of(DESTINATION.as_bytes());
        let mut all = journal::read(&self.directory.join("journal"))?;
        all.retain(|entry| {
            entry.message.destination_hash == destination && family.index_of(entry.message.stream_id).is_some()
        });
        Ok(Evidence {
            journal: all,
            events: self.stored(&client, events).await?,
            outbox: self.stored(&client, outbox).await?,
            acknowledged: told,
        })
    }

    async fn stored(&self, client: &Client, sql: &str) -> Result<Vec<Stored>> {
        let rows = client.query(&sql.replace('@', &quoted(self.schema)), &[]).await?;
        let stored = rows.iter().map(|row| Stored {
            message_id: row.get(0),
            stream_id: row.get(1),
            stream_seq: row.get(2),
            version: row.get(3),
            payload_hash: hash_of(row.get(4)),
        });
        Ok(stored.collect())
    }
}
