//! `run`: one load, or pairs of it with the clean run, and what is shown of it.

use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::cli::LoadArgs;
use crate::failure::Result;
use crate::figures::{ConfigValue, Figures};
use crate::report::{self, Column};
use crate::scenario::{Rate, Scenario, Until};
use crate::scenarios;
use crate::target::Target;

/// How long the top rate is measured before a share of it is run.
const TOP_RATE: std::time::Duration = std::time::Duration::from_secs(5);

/// What came out, and whether a promise was broken.
#[derive(Debug)]
pub struct Outcome {
    /// The JSON file.
    pub json: Map<String, Value>,
    /// The exit code.
    pub ending: Ending,
}

/// How a command that came to an end ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Every promise held: exit code 0.
    Held,
    /// One did not: exit code 1.
    Broken,
    /// Loadgen itself could not go on, and has said why: exit code 2.
    Undecided,
}

impl Ending {
    /// Of a run that was measured to its end.
    #[must_use]
    pub fn of(broken: bool) -> Self {
        if broken { Self::Broken } else { Self::Held }
    }
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
            theirs.push(scenarios::measure(&target, other, name).await?);
        }
        ours.push(scenarios::measure(&target, &scenario, "corelane").await?);
    }
    let figures = Figures::median_of(&ours);
    let beside = other.map(|(name, _)| (name, Figures::median_of(&theirs)));
    let differs = match &beside {
        Some((_, other)) if args.config.len() == 2 => differences(&figures.config, &other.config),
        _ => Vec::new(),
    };
    let mut columns = vec![Column { head: figures.scenario.clone(), figures: &figures }];
    if let Some((name, figures)) = &beside {
        columns.push(Column { head: (*name).to_owned(), figures });
    }
    if let [first, second] = args.config.as_slice() {
        columns[0].head = head(differs.iter().map(|key| (&key.key, &key.measured)), first);
        columns[1].head = head(differs.iter().map(|key| (&key.key, &key.other)), second);
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
            println!("CPU a message: {} {ratio:.2} times that of {}", columns[0].head, columns[1].head);
        }
        if args.config.len() == 2 {
            report::put(&mut json, "differs", &differs);
        }
        report::put(&mut json, "cpu_ratio", ratio);
        report::put(&mut json, name, beside);
        report::put(&mut json, "rounds", serde_json::json!({ "measured": ours, *name: theirs }));
        broken |= figures_broken(beside);
    }
    Ok(Outcome { json, ending: Ending::of(broken) })
}

/// A config key whose value is not the same in two runs.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Difference {
    key: String,
    measured: String,
    other: String,
}

/// The schema is another one in each run whatever is asked.
fn differences(measured: &[ConfigValue], other: &[ConfigValue]) -> Vec<Difference> {
    let both = measured.iter().zip(other).filter(|(one, two)| one.key != "database.schema" && one.value != two.value);
    both.map(|(one, two)| Difference { key: one.key.clone(), measured: one.value.clone(), other: two.value.clone() })
        .collect()
}

/// What tells a column from the one beside it; the file's name where nothing does.
fn head<'a>(values: impl Iterator<Item = (&'a String, &'a String)>, file: &Path) -> String {
    let said: Vec<String> = values.map(|(key, value)| format!("{key} = {value}")).collect();
    if said.is_empty() { file.display().to_string() } else { said.join(", ") }
}

/// A share of the top rate becomes a rate: the top is measured first, with the same options.
///
/// # Errors
/// Of the measurement.
pub async fn resolve_rate(target: &Target, scenario: Scenario) -> Result<(Scenario, Option<f64>)> {
    let Rate::ShareOfTop(share) = scenario.rate else { return Ok((scenario, None)) };
    let top = Scenario { rate: Rate::Top, until: Until::Elapsed(TOP_RATE), ..scenario.clean() };
    let top = scenarios::measure(target, &top, "top rate").await?.messages_per_second;
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
    let none = |count: Option<u64>| count.unwrap_or(0) == 0;
    figures.order_violations > 0
        || figures.lost > 0
        || figures.copies > 0
        || !(none(figures.gaps) && none(figures.double_effects) && none(figures.skips))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_named_by_the_key_that_differs() {
        let of = |rows: &str, schema: &str| -> Vec<ConfigValue> {
            [("database.schema", schema), ("flush.rows_max", rows), ("flush.age_us_max", "500")]
                .map(|(key, value)| ConfigValue { key: key.into(), value: value.into(), origin: "file".into() })
                .to_vec()
        };
        let differs = differences(&of("10", "loadgen_1"), &of("1000", "loadgen_2"));
        let keys: Vec<&str> = differs.iter().map(|difference| difference.key.as_str()).collect();
        assert_eq!(keys, ["flush.rows_max"]);
        let file = Path::new("a.toml");
        assert_eq!(head(differs.iter().map(|key| (&key.key, &key.measured)), file), "flush.rows_max = 10");
        assert_eq!(head(differs.iter().map(|key| (&key.key, &key.other)), file), "flush.rows_max = 1000");
        assert_eq!(head([].into_iter(), file), "a.toml", "nothing differs");
    }
}
