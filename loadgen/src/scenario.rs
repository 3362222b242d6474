//! A load that has been checked: what `cli` read, with its defaults filled in.
//!
//! Invariant: a `Scenario` can be run as it is; everything that cannot be is refused here, with the value
//! and what is allowed.

use std::path::PathBuf;
use std::time::Duration;

use crate::cli::{Affinity, Distribution, Hold, LoadArgs, RuntimeChoice, ScenarioChoice};
use crate::failure::{Failure, Result};

/// When a measurement ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Until {
    /// After so long.
    Elapsed(Duration),
    /// After so many messages.
    Count(u64),
}

/// How fast messages are made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rate {
    /// As fast as acknowledgements come: a closed loop.
    Top,
    /// So many a second: an open loop.
    PerSecond(f64),
    /// A share of the top rate, 0 to 1, measured first.
    ShareOfTop(f64),
}

/// A load that can be run.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // The command line describes each.
pub struct Scenario {
    pub kind: ScenarioChoice,
    pub producers: usize,
    pub callers: usize,
    pub streams: u32,
    pub distribution: Distribution,
    pub zipf_exponent: f64,
    pub payload_bytes: usize,
    pub batch: usize,
    pub rate: Rate,
    pub until: Until,
    pub warm_up: Duration,
    pub shards: Option<usize>,
    pub instances: usize,
    pub affinity: Affinity,
    pub runtime: Option<RuntimeChoice>,
    pub config: Option<PathBuf>,
    pub hold: Option<Hold>,
    pub parked: u64,
    pub backlog: u64,
    pub conflicts_percent: u32,
    pub duplicates_percent: u32,
}

/// The smallest payload: its JSON frame and the counter.
pub const PAYLOAD_BYTES_MIN: usize = 32;

impl Scenario {
    /// Checks the options of a load.
    ///
    /// # Errors
    /// [`Failure::Usage`] naming the option, its value and its range.
    pub fn check(args: &LoadArgs) -> Result<Self> {
        in_range("--producers", args.producers as u64, 1, 64)?;
        in_range("--streams", u64::from(args.streams), 1, 10_000_000)?;
        in_range("--payload-bytes", args.payload_bytes as u64, PAYLOAD_BYTES_MIN as u64, 16 << 20)?;
        in_range("--batch", args.batch as u64, 1, corelane::limits::STORE_ROWS_MAX as u64)?;
        let callers = args.callers.unwrap_or(if args.batch == 1 { 32 } else { 8 });
        in_range("--callers", callers as u64, 1, 4096)?;
        if u64::from(args.streams) < callers as u64 {
            // Each caller has streams of its own: the baselines number by MAX + 1, and two writers of one stream collide.
            return Err(Failure::Usage(format!(
                "--streams {} is fewer than --callers {callers}: each caller needs a stream of its own",
                args.streams
            )));
        }
        if !(args.zipf_exponent > 0.0 && args.zipf_exponent <= 5.0) {
            return Err(Failure::Usage(format!(
                "--zipf-exponent {} is out of range: above 0, at most 5",
                args.zipf_exponent
            )));
        }
        in_range("--instances", args.instances as u64, 1, 32)?;
        if let Some(shards) = args.shards {
            in_range("--shards", shards as u64, 1, 1024)?;
        }
        in_range("--parked", args.parked, 0, 10_000_000)?;
        in_range("--backlog", args.backlog, 0, 100_000_000)?;
        in_range("--conflicts-percent", args.conflicts_percent.into(), 0, 100)?;
        in_range("--duplicates-percent", args.duplicates_percent.into(), 0, 100)?;
        in_range("--pairs", args.pairs as u64, 0, 100)?;
        if args.config.len() > 2 {
            return Err(Failure::Usage("--config may be given once, or twice to alternate between two".into()));
        }
        let is_outbox = args.scenario == ScenarioChoice::Outbox;
        if !is_outbox && (args.hold.is_some() || args.parked > 0 || args.backlog > 0) {
            return Err(Failure::Usage("--hold, --parked and --backlog belong to the scenario outbox".into()));
        }
        if !is_outbox && args.scenario != ScenarioChoice::Relay && args.instances > 1 {
            return Err(Failure::Usage("--instances belongs to the scenarios outbox and relay".into()));
        }
        if args.conflicts_percent > 0 && args.scenario != ScenarioChoice::Events {
            return Err(Failure::Usage("--conflicts-percent belongs to the scenario events".into()));
        }
        let arrive = matches!(args.scenario, ScenarioChoice::Inbox | ScenarioChoice::Relay);
        if args.duplicates_percent > 0 && !arrive {
            return Err(Failure::Usage("--duplicates-percent belongs to the scenarios inbox and relay".into()));
        }
        let until = match (args.duration, args.count) {
            (_, Some(count)) => {
                in_range("--count", count, 1, 1_000_000_000)?;
                Until::Count(count)
            }
            (Some(duration), None) => {
                in_range("--duration (ms)", duration.as_millis() as u64, 100, 86_400_000)?;
                Until::Elapsed(duration)
            }
            (None, None) => Until::Elapsed(Duration::from_secs(10)),
        };
        let alternates = args.hold.is_some() || args.parked > 0 || args.backlog > 0 || args.config.len() == 2;
        if args.pairs > 0 && !alternates {
            return Err(Failure::Usage(
                "--pairs alternates with the clean run: give --hold, --parked, --backlog or a second --config with it"
                    .into(),
            ));
        }
        Ok(Self {
            kind: args.scenario,
            producers: args.producers,
            callers,
            streams: args.streams,
            distribution: args.distribution,
            zipf_exponent: args.zipf_exponent,
            payload_bytes: args.payload_bytes,
            batch: args.batch,
            rate: args.rate.as_deref().map_or(Ok(Rate::Top), parse_rate)?,
            until,
            warm_up: args.warm_up,
            shards: args.shards,
            instances: args.instances,
            affinity: args.affinity,
            runtime: args.runtime,
            config: args.config.first().cloned(),
            hold: args.hold,
            parked: args.parked,
            backlog: args.backlog,
            conflicts_percent: args.conflicts_percent,
            duplicates_percent: args.duplicates_percent,
        })
    }

    /// The same load without what disturbs it.
    #[must_use]
    pub fn clean(&self) -> Self {
        Self { hold: None, parked: 0, backlog: 0, ..self.clone() }
    }

    /// One word or two for the table's head.
    #[must_use]
    pub fn name(&self) -> String {
        let mut name = String::from(match self.kind {
            ScenarioChoice::Outbox => "outbox",
            ScenarioChoice::Events => "events",
            ScenarioChoice::Inbox => "inbox",
            ScenarioChoice::Subscribe => "subscribe",
            ScenarioChoice::Relay => "relay",
        });
        if self.conflicts_percent > 0 {
            name.push_str(&format!(" conflicts={}%", self.conflicts_percent));
        }
        if self.duplicates_percent > 0 {
            name.push_str(&format!(" duplicates={}%", self.duplicates_percent));
        }
        if let Some(hold) = self.hold {
            name.push_str(" hold=");
            name.push_str(hold.name());
        }
        if self.parked > 0 {
            name.push_str(&format!(" parked={}", self.parked));
        }
        if self.backlog > 0 {
            name.push_str(&format!(" backlog={}", self.backlog));
        }
        match self.rate {
            Rate::Top => {}
            Rate::PerSecond(rate) => name.push_str(&format!(" rate={rate:.0}")),
            Rate::ShareOfTop(share) => name.push_str(&format!(" rate={:.0}%", share * 100.0)),
        }
        name
    }
}

fn in_range(option: &str, value: u64, min: u64, max: u64) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(Failure::Usage(format!("{option} {value} is out of range: {min} to {max}")))
}

fn parse_rate(text: &str) -> Result<Rate> {
    let wrong =
        || Failure::Usage(format!("--rate {text}: write messages a second (5000) or a share of the top rate (50%)"));
    if let Some(share) = text.strip_suffix('%') {
        let share: f64 = share.parse().map_err(|_| wrong())?;
        if !(share > 0.0 && share <= 200.0) {
            return Err(Failure::Usage(format!("--rate {text} is out of range: above 0 %, at most 200 %")));
        }
        return Ok(Rate::ShareOfTop(share / 100.0));
    }
    let rate: f64 = text.parse().map_err(|_| wrong())?;
    if !(rate > 0.0 && rate <= 10_000_000.0) {
        return Err(Failure::Usage(format!("--rate {text} is out of range: above 0, at most 10000000")));
    }
    Ok(Rate::PerSecond(rate))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::Parser;

    fn check(line: &str) -> Result<Scenario> {
        let cli = Cli::try_parse_from(std::iter::once("loadgen").chain(line.split_whitespace())).unwrap();
        Scenario::check(&cli.run)
    }

    #[test]
    fn nothing_said_is_ten_seconds_of_eight_callers() {
        let scenario = check("").unwrap();
        assert_eq!((scenario.callers, scenario.batch, scenario.payload_bytes), (8, 100, 200));
        assert_eq!(scenario.until, Until::Elapsed(Duration::from_secs(10)));
        assert_eq!(check("--batch 1").unwrap().callers, 32);
    }

    #[test]
    fn a_value_out_of_range_is_named_with_its_range() {
        for (line, said) in [
            ("--batch 0", "--batch 0 is out of range: 1 to 4096"),
            ("--streams 3", "fewer than --callers 8"),
            ("--rate fast", "--rate fast: write"),
            ("--rate 0%", "out of range"),
            ("--payload-bytes 5", "--payload-bytes 5 is out of range"),
            ("--pairs 3", "--pairs alternates"),
        ] {
            let error = check(line).unwrap_err().to_string();
            assert!(error.contains(said), "{line}: {error}");
        }
    }

    #[test]
    fn a_rate_is_a_number_or_a_share() {
        assert_eq!(check("--rate 5000").unwrap().rate, Rate::PerSecond(5000.0));
        assert_eq!(check("--rate 50%").unwrap().rate, Rate::ShareOfTop(0.5));
    }
}
