//! `verify`: everything is broken on purpose, and an oracle that shares nothing with the engine judges.
//!
//! This process owns the server, breaks things and judges; the engine and the sink are processes of their own.
//!
//! Invariants
//! - The verdict is made after the producers ended and the sink has been quiet while nothing was broken.
//! - Copies have a bound that is computed and printed; everything else must be 0.

pub mod choice;
pub mod clock;
pub mod conflicts;
pub mod engine_process;
pub mod faults;
pub mod foreign;
pub mod hand_over;
pub mod oracle;
pub mod processes;
pub mod proxy;
pub mod relay;
pub mod relay_oracle;
pub mod relay_process;
pub mod words;

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
use crate::broker::client::BrokerClient;
use crate::cli::{FaultChoice, ScenarioChoice, VerifyArgs};
use crate::engine_side;
use crate::failure::{Failure, Result};
use crate::private_server::PrivateServer;
use crate::report;
use crate::run::{Ending, Outcome, settings};
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
use relay::Arrivals;
use relay_oracle::{Effect, Relayed, Sent};
use words::{broken_off, count_of_each, sentence, show, sorted_ms};

/// Streams of a verification: few, so that writers meet on them.
const STREAMS: u32 = 200;
/// Shards where nothing else is said: more than one, also on a small machine, because what one stores the claim of
/// another has to leave alone.
const SHARDS: usize = 2;
/// How long the sink must have been quiet, and how long that may take: what is kept behind failures comes late, and late is not
/// lost. Where nothing comes for five times the first, it is over as well.
const QUIET: Duration = Duration::from_secs(3);
const QUIET_MAX: Duration = Duration::from_secs(300);

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
    let relays = match scenario.kind {
        ScenarioChoice::Outbox => false,
        ScenarioChoice::Relay => true,
        _ => return Err(Failure::Usage("verify knows the scenarios outbox and relay".into())),
    };
    let chosen = choice::choose(&args.faults, args.load.database_url.is_none(), relays)?;
    let target = Arc::new(Target::open(args.load.database_url.as_deref()).await?);
    let schema = target.fresh_schema().await?;
    let directory = tempfile::Builder::new().prefix("loadgen-").tempdir().map_err(Failure::io("a directory"))?;
    let seed = args.seed.unwrap_or_else(|| Uuid::new_v4().as_u128() as u64);
    let names: Vec<String> = chosen.iter().map(|fault| choice::name(*fault)).collect();
    let (seconds, instances) = (duration.as_secs(), scenario.instances);
    println!("verify: {seconds} s, {instances} instances, seed {seed}, faults {}", names.join(","));
    let stage = Stage { target: &target, schema: &schema, directory: directory.path(), chosen: &chosen, seed, relays };
    let mut json = Map::new();
    report::put(&mut json, "scenario", if relays { "verify relay" } else { "verify" });
    report::put(&mut json, "seed", seed);
    report::put(&mut json, "seconds", duration.as_secs_f64());
    report::put(&mut json, "faults", names);
    report::put(&mut json, "instances", scenario.instances);
    let mut incidents = Vec::new();
    let outcome = stage.play(args, &scenario, duration, &mut incidents).await;
    let tidied = async {
        report::put(&mut json, "server_settings", settings(&target).await?);
        target.drop_schema(&schema).await
    };
    // What came of the run is the answer, whether or not the server can still be tidied.
    if let Err(failure) = tidied.await {
        eprintln!("loadgen: after the run: {failure}");
    }
    report::put(&mut json, "faults_made", count_of_each(&incidents));
    report::put(&mut json, "incidents", &incidents);
    let Played { verdict, relayed, copies_max, commits, take_overs, hand_overs, stops, conflicts } = match outcome {
        Ok(played) => played,
        Err(failure) => return Ok(broken_off(json, &failure)),
    };
    show(&verdict, copies_max, &incidents);
    if let Some(relayed) = &relayed {
        relayed.show();
        report::put(&mut json, "relay", relayed);
        report::put(&mut json, "gaps", verdict.version_gaps);
    }
    if let Some(conflicts) = conflicts {
        println!("  {:40} {conflicts}", "deadlocks and serialization failures");
    }
    let take_over_ms = sorted_ms("killed engines taken over", &take_overs);
    let hand_over_ms = sorted_ms("stopped engines handed over", &hand_overs);
    let stop_ms = sorted_ms("their processes had stopped", &stops);
    let broken = verdict.broken(copies_max) || conflicts.is_some_and(|conflicts| conflicts > 0);
    if let Ok(serde_json::Value::Object(findings)) = serde_json::to_value(verdict) {
        json.extend(findings);
    }
    report::put(&mut json, "take_over_ms", take_over_ms);
    report::put(&mut json, "hand_over_ms", hand_over_ms);
    report::put(&mut json, "stop_ms", stop_ms);
    report::put(&mut json, "engine_conflicts", conflicts);
    report::put(&mut json, "copies_max", copies_max);
    report::put(&mut json, "foreign_commits", commits);
    let sentence = sentence(&verdict, copies_max, conflicts.unwrap_or(0));
    println!("{sentence}");
    report::put(&mut json, "verdict", sentence);
    Ok(Outcome { json, ending: Ending::of(broken) })
}

/// What came of it.
struct Played {
    verdict: Verdict,
    relayed: Option<Relayed>,
    copies_max: u64,
    commits: u64,
    take_overs: Vec<Duration>,
    hand_overs: Vec<Duration>,
    stops: Vec<Duration>,
    /// Deadlocks and conflicts of serialization on the engines' connections; not known of a given server.
    conflicts: Option<u64>,
}

struct Stage<'a> {
    target: &'a Arc<Target>,
    schema: &'a str,
    directory: &'a Path,
    chosen: &'a [FaultChoice],
    seed: u64,
    /// Messages arrive by the broker, instead of callers' own.
    relays: bool,
}

impl Stage<'_> {
    /// The faults that were made are in `made` also where it fails.
    async fn play(
        &self,
        args: &VerifyArgs,
        scenario: &Scenario,
        duration: Duration,
        made: &mut Vec<faults::Incident>,
    ) -> Result<Played> {
        engine_side::install(self.target, self.schema).await?;
        let setup = self.target.connect().await?;
        setup.batch_execute(&format!("create table {}.loadgen_elsewhere (value int8)", quoted(self.schema))).await?;
        setup.batch_execute(&relay::TABLE.replace('@', &quoted(self.schema))).await?;
        if self.chosen.contains(&FaultChoice::Conflicts) {
            conflicts::prepare(&setup, self.schema).await?;
        }
        drop(setup);
        let family = StreamFamily::random();
        let proxies: Vec<Proxy> = match self.target.private() {
            Some(server) => (0..scenario.instances)
                .map(|index| {
                    let directory = self.directory.join(format!("net-{index}"));
                    std::fs::create_dir(&directory).map_err(Failure::io("a directory"))?;
                    Proxy::start(&directory, server.socket())
                })
                .collect::<Result<_>>()?,
            None => Vec::new(),
        };
        let wrong_clock =
            if self.chosen.contains(&FaultChoice::Skew) { Some(clock::build(self.directory)?) } else { None };
        let sink = SinkControl { socket: self.directory.join("sink") };
        let sink_process = self.start_sink()?;
        let engines: Vec<Process> = (0..scenario.instances)
            .map(|index| self.start_engine(args, scenario, family, proxies.get(index), index))
            .collect::<Result<_>>()?;
        let mut scene = Scene {
            target: self.target.clone(),
            schema: self.schema.to_owned(),
            proxies,
            wrong_clock,
            broker: self.relays.then(|| BrokerClient::new(sink.socket.clone())),
            sink,
            sink_process,
            engines,
            take_overs: Vec::new(),
            hand_overs: Vec::new(),
            stops: Vec::new(),
            timeline: Vec::new(),
            incidents: Vec::new(),
            random: StdRng::seed_from_u64(self.seed),
            began: Instant::now(),
            until: None,
            told: Instant::now(),
        };
        for engine in &mut scene.engines {
            engine.await_line("started", Duration::from_secs(60)).await?;
        }
        let acknowledged = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let writers = self.start_writers(family, &stop, &acknowledged);
        let arrivals = self.relays.then(|| Arrivals::start(scene.sink.socket.clone(), family, self.seed));
        let steps: Vec<FaultChoice> =
            self.chosen.iter().copied().filter(|fault| choice::STEPS.contains(fault)).collect();
        let until = Instant::now() + duration;
        scene.until = Some(until);
        let played = if steps.is_empty() {
            scene.watch_for(duration).await;
            Ok(())
        } else {
            scene.play(&steps, until).await
        };
        made.clone_from(&scene.incidents);
        stop.store(true, Ordering::Relaxed);
        let mut commits = 0;
        for writer in writers {
            commits += writer.await.unwrap_or(0);
        }
        let sent = match arrivals {
            Some(arrivals) => Some(arrivals.end().await?),
            None => None,
        };
        played?;
        for engine in &mut scene.engines {
            engine.order("quiet", "quiet", Duration::from_secs(40)).await?;
        }
        self.await_silence(&mut scene, family, &acknowledged, sent.as_deref()).await?;
        let unsettled = scene.unsettled().await;
        for engine in &mut scene.engines {
            engine.order("stop", "stopped", Duration::from_secs(60)).await?;
        }
        let (_, unknown) = scene.sink.count().await?;
        let copies_max = unknown + made.iter().map(|incident| incident.copies_max).sum::<u64>();
        let evidence = self.evidence(family, &acknowledged, scene.engines.len()).await?;
        let mut verdict = judge(&evidence);
        let relayed = match &sent {
            Some(sent) => Some(Relayed { unsettled, ..self.relayed(sent).await? }),
            None => None,
        };
        if let Some(relayed) = &relayed {
            relayed.add_to(&mut verdict);
        }
        let conflicts = self.target.private().map(PrivateServer::engine_conflicts).transpose()?;
        for conflict in conflicts.iter().flatten() {
            eprintln!("the server's log: {conflict}");
        }
        // Who calls twice in one transaction may deadlock with whoever stores meanwhile: that is documented, and either of
        // the two is the server's victim. An engine's goes again; how often shows that it does.
        let conflicts = conflicts.map(|conflicts| conflicts.iter().filter(|text| !is_foreign(text)).count() as u64);
        let Scene { take_overs, hand_overs, stops, .. } = scene;
        Ok(Played { verdict, relayed, copies_max, commits, take_overs, hand_overs, stops, conflicts })
    }

    fn start_sink(&self) -> Result<Process> {
        let path = |name: &str| self.directory.join(name).display().to_string();
        let mut arguments = vec!["sink".into(), "--socket".into(), path("sink"), "--journal".into(), path("journal")];
        if self.relays {
            let lock_ms = relay::LOCK_MS.to_string();
            arguments.extend(["--queues".into(), path("queues"), "--lock-ms".into(), lock_ms]);
        }
        Process::start(arguments, Vec::new())
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
        let command = if self.relays { "relay" } else { "engine" };
        let mut arguments: Vec<String> =
            [command, "--schema", self.schema, "--sink", &path("sink")].map(str::to_owned).to_vec();
        let batch = scenario.batch.min(20).to_string();
        let callers = scenario.callers.clamp(3, 16).to_string();
        let of_callers = [
            ("--acknowledged", path(&format!("acknowledged-{index}"))),
            ("--family", family.stream(0).to_string()),
            ("--streams", scenario.streams.min(STREAMS).to_string()),
            ("--callers", callers),
            ("--batch", batch),
            ("--pause-ms", "20".to_owned()),
        ];
        for (option, value) in of_callers.into_iter().filter(|_| !self.relays) {
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
        sent: Option<&[Sent]>,
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
            if silent && last.1.elapsed() > QUIET * 5 {
                return Ok(());
            }
            let relayed = match sent {
                Some(sent) if silent => self.relayed(sent).await?.is_complete() && scene.unsettled().await == 0,
                _ => true,
            };
            if silent && relayed && judge(&self.evidence(family, acknowledged, scene.engines.len()).await?).lost == 0 {
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

    /// What came of what was sent.
    async fn relayed(&self, sent: &[Sent]) -> Result<Relayed> {
        let client = self.target.connect().await?;
        let effects = relay::EFFECTS.replace('@', &quoted(self.schema));
        let effect = |row: &tokio_postgres::Row| Effect {
            message_id: row.get(0),
            at_s: row.get(1),
            backend: row.get(2),
            attempt: row.get(3),
        };
        let effects: Vec<Effect> = client.query(&effects, &[]).await?.iter().map(effect).collect();
        Ok(relay_oracle::judge(sent, &effects, &journal::read(&self.directory.join("journal"))?))
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

/// Whether a deadlock is one with a foreign writer, by the statements that the server's log explains it with.
fn is_foreign(conflict: &str) -> bool {
    let explained = conflict.split("HINT:").next().unwrap_or(conflict);
    conflict.contains("deadlock detected") && explained.contains(foreign::MARK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadlock_among_engines_is_told_apart_from_one_with_a_foreign_writer() {
        let of = |error: &str, first: &str, second: &str, later: &str| {
            format!(
                "corelane/x ERROR:  {error}\ncorelane/x DETAIL:  ...\n\tProcess 1: {first}\n\tProcess 2: {second}\nHINT: {later}"
            )
        };
        let foreign = "/* foreign */ select 1";
        assert!(is_foreign(&of("deadlock detected", "select 2", foreign, "")));
        assert!(
            !is_foreign(&of("deadlock detected", "select 2", "select 3", foreign)),
            "a later line of somebody else"
        );
        assert!(!is_foreign(&of("could not serialize access", "select 2", foreign, "")));
    }
}
