//! `run`: one load, or pairs of it with the clean run, and what is shown of it.

use serde_json::{Map, Value};

use crate::cli::LoadArgs;
use crate::engine_side;
use crate::failure::Result;
use crate::figures::Figures;
use crate::report::{self, Column};
use crate::scenario::{Rate, Scenario, Until};
use crate::target::Target;

/// How long the top rate is measured before a share of it is run.
const TOP_RATE: std::time::Duration = std::time::Duration::from_secs(5);

/// What came out, and whether a promise was broken.
#[derive(Debug)]
pub struct Outcome {
    /// The JSON file.
    pub json: Map<String, Value>,
    /// Exit code 1.
    pub broken: bool,
}

/// Runs it and prints the table.
///
/// # Errors
/// Of options, server, engine or files.
pub async fn run(args: &LoadArgs) -> Result<Outcome> {
    let scenario = Scenario::check(args)?;
    let target = Target::open(args.database_url.as_deref()).await?;
    let (scenario, top) = resolve_rate(&target, scenario).await?;
    let other = match args.config.as_slice() {
        [_, second] => Some(("other", Scenario { config: Some(second.clone()), ..scenario.clone() })),
        _ if args.pairs > 0 => Some(("clean", scenario.clean())),
        _ => None,
    };
    let rounds = args.pairs.max(1);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        if let Some((name, other)) = &other {
            theirs.push(engine_side::measure(&target, other, name).await?);
        }
        ours.push(engine_side::measure(&target, &scenario, "corelane").await?);
    }
    let figures = Figures::median_of(&ours);
    let beside = other.map(|(name, _)| (name, Figures::median_of(&theirs)));
    let mut columns = vec![Column { head: figures.scenario.clone(), figures: &figures }];
    if let Some((name, figures)) = &beside {
        columns.push(Column { head: (*name).to_owned(), figures });
    }
    println!("{}", report::table(&columns));
    if let Some(table) = report::shard_table(&figures) {
        println!("{table}");
    }
    let mut json = report::object(&figures);
    report::put(&mut json, "server_settings", settings(&target).await?);
    report::put(&mut json, "top_messages_per_second", top);
    let mut broken = figures_broken(&figures);
    if let Some((name, beside)) = &beside {
        let ratio = figures.cpu_us_per_message().zip(beside.cpu_us_per_message()).map(|(one, other)| one / other);
        if let Some(ratio) = ratio {
            println!("CPU a message: {ratio:.2} times the {name} run's");
        }
        report::put(&mut json, "cpu_ratio", ratio);
        report::put(&mut json, name, beside);
        report::put(&mut json, "rounds", serde_json::json!({ "measured": ours, *name: theirs }));
        broken |= figures_broken(beside);
    }
    Ok(Outcome { json, broken })
}

/// A share of the top rate becomes a rate: the top is measured first, with the same options.
///
/// # Errors
/// Of the measurement.
pub async fn resolve_rate(target: &Target, scenario: Scenario) -> Result<(Scenario, Option<f64>)> {
    let Rate::ShareOfTop(share) = scenario.rate else { return Ok((scenario, None)) };
    let top = Scenario { rate: Rate::Top, until: Until::Elapsed(TOP_RATE), ..scenario.clean() };
    let top = engine_side::measure(target, &top, "top rate").await?.messages_per_second;
    Ok((Scenario { rate: Rate::PerSecond((top * share).max(1.0)), ..scenario }, Some(top)))
}

/// The server's settings as a JSON object.
///
/// # Errors
/// Where it does not answer.
pub async fn settings(target: &Target) -> Result<Map<String, Value>> {
    Ok(target.settings().await?.into_iter().map(|(name, value)| (name, Value::String(value))).collect())
}

/// No fault was injected, so no copy is allowed either.
#[must_use]
pub fn figures_broken(figures: &Figures) -> bool {
    figures.order_violations > 0 || figures.lost > 0 || figures.copies > 0
}
