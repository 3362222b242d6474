//! `compare`: Corelane beside the baselines, alternating, in one run.
//!
//! Invariants
//! - Every round measures every subject once, on the same server, each in a fresh schema after a checkpoint.
//! - What is reported are medians of the rounds; ratios are made of medians.

use std::time::Duration;

use serde_json::{Map, Value};

use crate::baselines::{appends, dedup, insert_ceiling, seed_cycle};
use crate::cli::{Against, CompareArgs, ScenarioChoice};
use crate::failure::{Failure, Result};
use crate::figures::Figures;
use crate::report::{self, Column};
use crate::run::{Ending, Outcome, figures_broken, resolve_rate, settings};
use crate::scenario::{Scenario, Until};
use crate::scenarios;
use crate::target::Target;

/// A round of three subjects at ten seconds each, with set-up: three of them take two minutes.
const DURATION: Duration = Duration::from_secs(10);
/// One batch size ends within five minutes.
const SECONDS_MAX: f64 = 270.0;

/// Connections of the baselines of `inbox`: as many as a consumer has workers by itself.
const CONSUMERS: usize = 4;

/// Compares and prints the table.
///
/// # Errors
/// Of options, server, engine or files.
pub async fn compare(args: &CompareArgs) -> Result<Outcome> {
    let mut scenario = Scenario::check(&args.load)?;
    if args.rounds < 3 || args.rounds > 20 {
        return Err(Failure::Usage(format!("--rounds {} is out of range: 3 to 20 (medians need three)", args.rounds)));
    }
    if scenario.backlog > 0 || scenario.parked > 0 || args.load.config.len() > 1 || args.load.pairs > 0 {
        return Err(Failure::Usage("--backlog, --parked, --pairs and a second --config belong to run".into()));
    }
    let mut against = if args.against.is_empty() { usual(scenario.kind) } else { args.against.clone() };
    against.dedup();
    if args.load.duration.is_none() && args.load.count.is_none() {
        scenario.until = Until::Elapsed(DURATION);
    }
    if let Until::Elapsed(duration) = scenario.until {
        // Four seconds for the warm-up, the trial and the set-up of each subject.
        let seconds = (duration.as_secs_f64() + 4.0) * (against.len() + 1) as f64 * args.rounds as f64;
        if seconds > SECONDS_MAX {
            return Err(Failure::Usage(format!(
                "--duration and --rounds together make {seconds:.0} s: one comparison ends within {SECONDS_MAX:.0} s"
            )));
        }
    }
    let target = Target::open(args.load.database_url.as_deref()).await?;
    let (scenario, _) = resolve_rate(&target, scenario).await?;
    let mut ours = Vec::new();
    let mut theirs = vec![Vec::new(); against.len()];
    for round in 1..=args.rounds {
        eprintln!("round {round} of {}", args.rounds);
        let figures = scenarios::measure(&target, &scenario, "corelane").await?;
        let shards = figures.shards;
        ours.push(figures);
        for (subject, rounds) in against.iter().zip(&mut theirs) {
            rounds.push(match subject {
                Against::SeedCycle => seed_cycle::measure(&target, &scenario, shards).await?,
                Against::InsertCeiling => insert_ceiling::measure(&target, &scenario, shards).await?,
                Against::AppendPlain => appends::measure(&target, &scenario, shards, appends::Way::Plain).await?,
                Against::AppendCounter => appends::measure(&target, &scenario, shards, appends::Way::Counter).await?,
                Against::DedupOne => dedup::measure(&target, &scenario, CONSUMERS, dedup::Way::One).await?,
                Against::DedupBatch => dedup::measure(&target, &scenario, CONSUMERS, dedup::Way::Batch).await?,
            });
        }
    }
    let figures = Figures::median_of(&ours);
    let baselines: Vec<Figures> = theirs.iter().map(|rounds| Figures::median_of(rounds)).collect();
    let mut columns = vec![Column { head: "corelane".into(), figures: &figures }];
    columns.extend(baselines.iter().map(|figures| Column { head: figures.subject.clone(), figures }));
    println!("{}", report::table(&columns));
    if let Some(table) = report::shard_table(&figures) {
        println!("{table}");
    }
    let (mut ratios, mut beside, mut rounds) = (Map::new(), Map::new(), Map::new());
    report::put(&mut rounds, "corelane", &ours);
    for ((subject, baseline), each) in against.iter().zip(&baselines).zip(&theirs) {
        let key = key_of(*subject);
        let ratio = report::ratios(&figures, baseline);
        println!("{}", sentence(key, &ratio));
        ratios.insert(key.into(), ratio);
        report::put(&mut beside, key, baseline);
        report::put(&mut rounds, key, each);
    }
    let settings = settings(&target).await?;
    let shown: Vec<String> =
        settings.iter().map(|(name, value)| format!("{name} = {}", value.as_str().unwrap_or_default())).collect();
    println!("server: {}", shown.join(", "));
    let mut json = report::object(&figures);
    report::put(&mut json, "baselines", beside);
    report::put(&mut json, "ratios", ratios);
    report::put(&mut json, "rounds", rounds);
    report::put(&mut json, "server_settings", settings);
    Ok(Outcome { json, ending: Ending::of(figures_broken(&figures)) })
}

fn key_of(against: Against) -> &'static str {
    match against {
        Against::SeedCycle => "seed_cycle",
        Against::InsertCeiling => "insert_ceiling",
        Against::AppendPlain => "append_plain",
        Against::AppendCounter => "append_counter",
        Against::DedupOne => "dedup_one",
        Against::DedupBatch => "dedup_batch",
    }
}

/// What a load is compared with where nothing is said.
fn usual(kind: ScenarioChoice) -> Vec<Against> {
    match kind {
        ScenarioChoice::Outbox => vec![Against::SeedCycle, Against::InsertCeiling],
        ScenarioChoice::Events => vec![Against::InsertCeiling, Against::AppendPlain, Against::AppendCounter],
        ScenarioChoice::Inbox => vec![Against::DedupOne, Against::DedupBatch],
        ScenarioChoice::Subscribe | ScenarioChoice::Relay => vec![Against::InsertCeiling],
    }
}

fn sentence(key: &str, ratio: &Value) -> String {
    let part = |name: &str| ratio[name].as_f64().map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
    format!(
        "corelane against {key}: {} times its messages/s, {} times its messages a CPU second",
        part("wall"),
        part("cpu")
    )
}
