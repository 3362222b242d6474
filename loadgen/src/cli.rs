//! The command line: `run` (also without a word), `verify`, `compare`, `strategies`, and the two hidden processes that
//! `verify` starts.
//!
//! Invariant: nothing here decides; values are only read and described. `scenario` checks them together.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use corelane::Strategy;

use crate::sink::server::SinkArgs;
use crate::verify::engine_process::EngineArgs;
use crate::verify::relay_process::RelayArgs;

/// Drives Corelane against a real Postgres: how fast, how dear, and does it keep its promises.
#[derive(Debug, Parser)]
#[command(name = "loadgen", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// What to do; `run` when nothing is said.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Options of `run`, when no command is given.
    #[command(flatten)]
    pub run: LoadArgs,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure Corelane and check order, loss and copies while it runs (the default).
    Run(Box<LoadArgs>),
    /// Break things on purpose and compare what a sink in its own process got with what was stored.
    Verify(Box<VerifyArgs>),
    /// Measure Corelane beside the usual outbox cycle and the bare insert, alternating, in one run.
    Compare(Box<CompareArgs>),
    /// Measure the strategies (immediate, scoped, interval, batch) at several numbers of callers.
    Strategies(Box<StrategiesArgs>),
    /// The sink of `verify`, in its own process.
    #[command(hide = true)]
    Sink(SinkArgs),
    /// The engine of `verify`, in its own process.
    #[command(hide = true)]
    Engine(Box<EngineArgs>),
    /// The engine of `verify --scenario relay`, in its own process.
    #[command(hide = true)]
    Relay(Box<RelayArgs>),
}

impl Command {
    /// Where its figures are to be written.
    #[must_use]
    pub fn json(&self) -> Option<&Path> {
        let path = match self {
            Self::Run(args) => &args.json,
            Self::Compare(args) => &args.load.json,
            Self::Verify(args) => &args.load.json,
            Self::Strategies(args) => &args.json,
            Self::Sink(_) | Self::Engine(_) | Self::Relay(_) => &None,
        };
        path.as_deref()
    }
}

/// The load, and where it goes.
#[derive(Clone, Debug, Args)]
pub struct LoadArgs {
    /// What is loaded.
    #[arg(long, value_enum, default_value_t = ScenarioChoice::Outbox)]
    pub scenario: ScenarioChoice,
    /// Threads that make messages.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub producers: usize,
    /// Calls that may be waiting for their acknowledgement at the same moment [default: 8, or 32 at batch 1].
    #[arg(long, value_name = "N")]
    pub callers: Option<usize>,
    /// Streams the messages are spread over.
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub streams: u32,
    /// How they are spread.
    #[arg(long, value_enum, default_value_t = Distribution::Uniform)]
    pub distribution: Distribution,
    /// Exponent of the zipf distribution.
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    pub zipf_exponent: f64,
    /// Bytes of one payload.
    #[arg(long, value_name = "BYTES", default_value_t = 200)]
    pub payload_bytes: usize,
    /// Messages of one call.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub batch: usize,
    /// Messages a second ("5000"), or a share of the top rate that is measured first ("50%"); as fast as possible without it.
    #[arg(long, value_name = "N|N%")]
    pub rate: Option<String>,
    /// How long to measure ("10s", "500ms", "2m") [default: 10s].
    #[arg(long, value_name = "TIME", value_parser = parse_duration, conflicts_with = "count")]
    pub duration: Option<Duration>,
    /// How many messages to measure, instead of a time.
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// Load before the clock starts, to warm caches and connections.
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1s")]
    pub warm_up: Duration,
    /// Shards of the engine (overrides `shards.count` of the config file).
    #[arg(long, value_name = "N")]
    pub shards: Option<usize>,
    /// Engines on the one database, each with its own share of the partitions and of the callers.
    #[arg(long, default_value_t = 1)]
    pub instances: usize,
    /// With several instances: whose streams the callers of an instance write to.
    #[arg(long, value_enum, default_value_t = Affinity::Owner)]
    pub affinity: Affinity,
    /// What the shards run on (overrides `shards.runtime` of the config file).
    #[arg(long, value_enum)]
    pub runtime: Option<RuntimeChoice>,
    /// A database to use, in a schema of its own; without it a private, throw-away server is started.
    #[arg(long, value_name = "URL", env = "LOADGEN_DATABASE_URL", hide_env_values = true)]
    pub database_url: Option<String>,
    /// The engine's config file. Given twice, both are run, alternating (see --pairs), and the second stands beside the first as `other`.
    #[arg(long, value_name = "FILE")]
    pub config: Vec<PathBuf>,
    /// Write the figures as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Hold a transaction open for the whole measurement.
    #[arg(long, value_enum)]
    pub hold: Option<Hold>,
    /// Messages that are parked behind refused heads before the clock starts.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub parked: u64,
    /// Messages that stand in the database before the engine starts; the run drains them by claim and produces nothing.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub backlog: u64,
    /// Alternate so often with the same run without --hold, --parked or --backlog, which stands beside as `clean`.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub pairs: usize,
    /// Of 100 appends, so many expect a version that is not the stream's any more (scenario `events`).
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub conflicts_percent: u32,
    /// Of 100 arrivals, so many are copies (scenarios `inbox` and `relay`; `verify` sends ten of a hundred twice).
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub duplicates_percent: u32,
}

/// What is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ScenarioChoice {
    /// Messages are stored, published in order, completed.
    #[default]
    Outbox,
    /// Events are appended with expected versions.
    Events,
    /// Deliveries arrive and are handled once.
    Inbox,
    /// Events are appended, and a subscription sees them.
    Subscribe,
    /// Messages arrive from a broker, are handled once, and what their handlers emit goes to the broker again.
    Relay,
}

/// How messages are spread over streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Distribution {
    /// Each stream as often as any other.
    Uniform,
    /// A few streams get most.
    Zipf,
}

/// Whose streams the callers of an instance write to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Affinity {
    /// Those whose partitions their instance holds: requests are routed by stream id.
    Owner,
    /// Any: requests come to any instance.
    Any,
}

/// What the shards run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RuntimeChoice {
    /// io_uring where the kernel allows it.
    Auto,
    /// io_uring, or an error.
    Glommio,
    /// Pinned tokio threads.
    Tokio,
}

impl RuntimeChoice {
    /// The word the config file uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Glommio => "glommio",
            Self::Tokio => "tokio",
        }
    }
}

/// A transaction held open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Hold {
    /// REPEATABLE READ, without a transaction id.
    Snapshot,
    /// One that has written into a table of somebody else.
    Writer,
    /// One that has stored a message and does not commit.
    Enlisted,
    /// A reader that has a lock on every segment, as a dump has.
    Locks,
}

impl Hold {
    /// The word of the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Snapshot => "snapshot",
            Self::Writer => "writer",
            Self::Enlisted => "enlisted",
            Self::Locks => "locks",
        }
    }
}

/// `compare`.
#[derive(Clone, Debug, Args)]
pub struct CompareArgs {
    /// The load.
    #[command(flatten)]
    pub load: LoadArgs,
    /// What to compare with; may be repeated; without it with what is usual for the load.
    #[arg(long, value_enum, value_name = "WHAT")]
    pub against: Vec<Against>,
    /// Rounds, alternating; medians are shown.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub rounds: usize,
}

/// `strategies`.
#[derive(Clone, Debug, Args)]
pub struct StrategiesArgs {
    /// Which of them, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "immediate,scoped,interval,batch")]
    pub strategy: Vec<Strategy>,
    /// Callers at the same time, separated by commas: a row of the table each.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,32,256")]
    pub callers: Vec<usize>,
    /// Messages of a unit of work of `scoped`.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub unit: usize,
    /// Messages a second of `interval` and `batch`, over all callers.
    #[arg(long, value_name = "N", default_value_t = 5_000.0)]
    pub rate: f64,
    /// How long to measure each row.
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "5s")]
    pub duration: Duration,
    /// Load before the clock starts.
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "500ms")]
    pub warm_up: Duration,
    /// Bytes of one payload.
    #[arg(long, value_name = "BYTES", default_value_t = 200)]
    pub payload_bytes: usize,
    /// A database to use, in a schema of its own; without it a private, throw-away server is started.
    #[arg(long, value_name = "URL", env = "LOADGEN_DATABASE_URL", hide_env_values = true)]
    pub database_url: Option<String>,
    /// The engine's config file.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Write the figures as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// What Corelane is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Against {
    /// The usual outbox cycle: jsonb, row leases, DELETE by id, written set-based.
    SeedCycle,
    /// The same event rows into the same table with only its primary key, and nothing else.
    InsertCeiling,
    /// Appends with expected versions by the unique index, tried again after a conflict.
    AppendPlain,
    /// Appends with expected versions over a counter row a stream.
    AppendCounter,
    /// Remembered ids, a statement and a commit each.
    DedupOne,
    /// Remembered ids, a statement and a commit a batch.
    DedupBatch,
}

/// `verify`.
#[derive(Clone, Debug, Args)]
pub struct VerifyArgs {
    /// The load.
    #[command(flatten)]
    pub load: LoadArgs,
    /// Faults, separated by commas; `all` for every one that this database allows, `none` for none.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "all")]
    pub faults: Vec<FaultChoice>,
    /// Seed of the faults' order and times; a random one is printed without it.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

/// A fault that `verify` injects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum)]
#[allow(missing_docs)] // `Fault` documents them.
pub enum FaultChoice {
    All,
    None,
    Refuse,
    Late,
    Unknown,
    SinkKill,
    Cut,
    CommitCut,
    BackendKill,
    ServerRestart,
    ReadOnly,
    StatementTimeout,
    Conflicts,
    NetworkDelay,
    NetworkLoss,
    Skew,
    EngineStop,
    EngineKill,
    EngineStall,
    HangUp,
    ShortLocks,
    Redeliver,
    ForeignSql,
    Enlisted,
    LowerXid,
    RepeatableRead,
}

/// Reads "10s", "500ms", "2m", "1h" or plain seconds.
///
/// # Errors
/// What is wrong, for clap to print.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.parse().map_err(|_| format!("\"{text}\" is no time: write 10s, 500ms or 2m"))?;
    let seconds = match unit {
        "ms" => number / 1000.0,
        "" | "s" => number,
        "m" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(format!("\"{unit}\" is no unit of time: write ms, s, m or h")),
    };
    if !(0.0..=86_400.0).contains(&seconds) {
        return Err(format!("{text} is out of range: 0 to 24h"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn no_word_means_run() {
        let cli = Cli::try_parse_from(["loadgen", "--batch", "7"]).unwrap();
        assert!(cli.command.is_none());
        assert_eq!(cli.run.batch, 7);
    }

    #[test]
    fn times_have_units() {
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("10"), Ok(Duration::from_secs(10)));
        assert!(parse_duration("10 fortnights").is_err());
        assert!(parse_duration("-1s").is_err());
        assert!(parse_duration("9999h").is_err());
    }
}
