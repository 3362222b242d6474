//! From a configuration to a running engine.
//!
//! Invariants
//! - Nothing starts with a configuration that does not hold together, a schema that does not fit, or a database that
//!   was restored and not rebased.
//! - If a part cannot be started, those that were are ended again.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::bridge::Bridge;
use super::router::Router;
use super::threads::{KeeperMain, Life, ShardMain, Starting, ThreadClock, Threads, handle};
use super::{Engine, Shared};
use crate::batch::Pool;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::metrics::ShardMetrics;
use crate::plan::lease::LeaseTimes;
use crate::runtime::affinity;
use crate::runtime::budget::Budget;
use crate::runtime::probe::{self, RuntimeKind};
use crate::runtime::ring::Ring;
use crate::runtime::thread::{self, ThreadMain, ThreadPlan};
use crate::seam::dial::Dial;
use crate::seam::store::StoreError;
use crate::seam::transport::Transport;
use crate::shard::{Arrival, LeaseCell, OthersBell, ShardSettings};
use crate::store::connect::{Connect, ConnectPlan, ConnectTarget};
use crate::store::install;
use crate::store::schema_name::SchemaName;

/// Room in a ring for orders beside the callers' batches.
const CONTROL_ENTRIES: usize = 64;
/// Entries of a ring at most: a batch has at least one row.
const RING_ENTRIES_MAX: usize = 65_536;
/// Recycled batches kept by the process, and the largest arena kept.
const POOL: (usize, usize) = (4_096, 1 << 20);

/// Makes an [`Engine`].
pub struct Builder {
    config: Config,
    transport: Option<Arc<dyn Transport>>,
    migrate: bool,
    owns: bool,
}

impl Builder {
    pub(super) fn new(config: Config) -> Self {
        Self { config, transport: None, migrate: false, owns: true }
    }

    /// Where messages go. Without one the engine only stores, and owns no partitions.
    #[must_use]
    pub fn transport(mut self, transport: impl Transport) -> Self {
        self.transport = Some(Arc::new(transport));
        self
    }

    /// Installs or upgrades the schema at start. Off: a schema that does not fit is an error.
    #[must_use]
    pub fn migrate(mut self, migrate: bool) -> Self {
        self.migrate = migrate;
        self
    }

    /// Stores only: this process never owns partitions, others publish.
    #[must_use]
    pub fn produce_only(mut self) -> Self {
        self.owns = false;
        self
    }

    /// Starts the engine.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Schema`], or [`Error::Store`] if the database cannot be reached or refuses.
    pub async fn start(self) -> Result<Engine> {
        let config = self.config;
        config.validate()?;
        let decision = probe::decide(config.shards.runtime)?;
        tracing::info!(runtime = decision.kind.name(), reason = %decision.reason, "runtime");
        if config.database.url.is_empty() {
            return Err(Error::Config("database.url: must be set".to_owned()));
        }
        let refused = |error: crate::store::connect::TargetError| Error::Config(error.to_string());
        let connect_limit = Duration::from_millis(config.database.connect_timeout_ms);
        let target = ConnectTarget::parse(&config.database.url).map_err(refused)?.or_connect_timeout(connect_limit);
        let schema = SchemaName::new(&config.database.schema)
            .map_err(|error| Error::Config(format!("database.schema: {error}")))?;
        let lease_quarter_ms = config.lease.ttl_ms / 4;
        let settings = ConnectPlan::settings(schema.name(), "engine", lease_quarter_ms, lease_quarter_ms);
        let connect = ConnectPlan::new(target, settings).map_err(refused)?;
        let times = LeaseTimes::new(config.lease.ttl_ms, config.lease.margin_ms, config.publish.timeout_ms)
            .map_err(Error::Config)?;
        prepare(&connect, &schema, &config, self.migrate).await?;

        let named = !config.shards.cores.is_empty();
        let cores = if named { config.shards.cores.clone() } else { affinity::usable_cores() };
        let count = match config.shards.count {
            0 if named => cores.len(),
            // A shard keeps two cores of a server busy: with more of them only the flushes get smaller.
            0 => cores.len() / 2,
            count => count,
        };
        let count = count.clamp(1, config.partitions.count as usize);
        let timeout = Duration::from_millis(config.publish.timeout_ms);
        let owns = self.owns && self.transport.is_some();
        let transport = self.transport.unwrap_or_else(|| {
            Arc::new(
                crate::transport::memory::MemoryTransport::new(|_, _| {})
                    .with_faults(|_, _| crate::transport::memory::Fault::NotReady),
            )
        });
        let bridge = Bridge::start(transport, config.bridge.threads, count * config.publish.in_flight_max, timeout)
            .map_err(|error| cannot_start("the bridge", error))?;
        let pool = Arc::new(Pool::new(POOL.0, POOL.1));
        let lease = Arc::new(LeaseCell::default());
        let others = Arc::new(OthersBell::default());
        let mut handles = Vec::with_capacity(count);
        let mut running = Vec::with_capacity(count);
        let mut starting = Starting::default();
        for index in 0..count {
            let (sender, receiver) = Ring::<Arrival>::new(config.ring.rows_max.min(RING_ENTRIES_MAX) + CONTROL_ENTRIES);
            let core = (!cores.is_empty()).then(|| cores[index % cores.len()]);
            let metrics = Arc::new(ShardMetrics::default());
            let budget = Arc::new(Budget::default());
            let clock = Arc::new(ThreadClock::default());
            let main = ShardMain {
                connect: connect.clone(),
                schema: schema.clone(),
                publisher: bridge.publisher(),
                ring: receiver,
                budget: budget.clone(),
                lease: lease.clone(),
                others: others.clone(),
                metrics: metrics.clone(),
                pool: pool.clone(),
                settings: settings_of(&config, index),
                clock: clock.clone(),
            };
            let plan =
                ThreadPlan { kind: decision.kind, core, name: format!("corelane-{index}"), metrics: metrics.clone() };
            starting.rings.push(sender.clone());
            running.push(thread::start(plan, main).map_err(|error| cannot_start("a shard", error))?);
            handles.push(handle(sender, budget, metrics, core, clock));
        }
        let (stop_keeper, stop) = tokio::sync::watch::channel(false);
        let keeper = KeeperMain {
            connect: connect.with_settings(ConnectPlan::settings(
                schema.name(),
                "keeper",
                lease_quarter_ms,
                lease_quarter_ms,
            )),
            schema: schema.clone(),
            service_name: config.service.name.clone(),
            instance_name: instance_name(&config),
            times,
            owns,
            lease,
            others: others.clone(),
            shards: handles.iter().map(|shard| (shard.ring.clone(), shard.held.clone())).collect(),
            stop,
        };
        let plan = ThreadPlan {
            kind: RuntimeKind::Tokio,
            core: None,
            name: "corelane-lease".to_owned(),
            metrics: Arc::default(),
        };
        let keeper = thread::start(plan, keeper).map_err(|error| cannot_start("the lease keeper", error))?;
        let router = Router { partitions: config.partitions.count, shards: count as u16 };
        let shared = Arc::new(Shared {
            config,
            schema,
            connect,
            router,
            shards: handles,
            pool,
            bulk_turns: tokio::sync::Semaphore::new(super::bulk::UNDER_WAY_MAX),
            runtime: decision,
            others,
            stopped: tokio::sync::watch::Sender::new(false),
        });
        let threads = Threads { shards: running, keeper, stop_keeper, bridge };
        // All of it runs: it ends with its handles from here on.
        starting.rings.clear();
        let life = Arc::new(Life { shared: shared.clone(), threads: Mutex::new(Some(threads)) });
        Ok(Engine { shared, life })
    }
}

fn cannot_start(what: &'static str, error: std::io::Error) -> Error {
    Error::Thread { what, source: error }
}

fn settings_of(config: &Config, index: usize) -> ShardSettings {
    ShardSettings {
        shard: index as u16,
        flush_rows_max: config.flush.rows_max,
        flush_bytes_max: config.flush.bytes_max,
        flush_age_us_max: config.flush.age_us_max,
        claim_rows_max: config.claim.rows_max,
        claim_streams_max: config.claim.streams_max,
        claim_poll_ms: config.claim.poll_ms,
        claim_poll_ms_max: config.claim.poll_ms_max,
        lane_rows_max: config.lane.rows_max,
        lane_streams_max: config.lane.streams_max,
        publish_run_rows_max: config.publish.run_rows_max,
        publish_in_flight_max: config.publish.in_flight_max,
        retry_base_ms: config.retry.base_ms,
        retry_cap_ms: config.retry.cap_ms,
        retry_attempts_max: config.retry.attempts_max as i32,
        retry_jitter_percent: config.retry.jitter_percent,
        cursor_interval_ms: config.cursor.interval_ms,
        call_timeout_ms: config.database.call_timeout_ms,
    }
}

fn instance_name(config: &Config) -> String {
    if !config.service.instance.is_empty() {
        return config.service.instance.clone();
    }
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if host.is_empty() { "instance".to_owned() } else { host }
}

/// Installs or checks the schema, on a thread of its own: connections belong to their thread.
async fn prepare(connect: &ConnectPlan, schema: &SchemaName, config: &Config, migrate: bool) -> Result<()> {
    let (answer, answered) = futures_channel::oneshot::channel();
    let main = Prepare {
        connect: connect.clone(),
        schema: schema.clone(),
        partitions: config.partitions.count,
        migrate,
        answer,
    };
    let plan =
        ThreadPlan { kind: RuntimeKind::Tokio, core: None, name: "corelane-check".to_owned(), metrics: Arc::default() };
    thread::start(plan, main).map_err(|error| cannot_start("the schema check", error))?;
    answered.await.map_err(|_| Error::Store(StoreError::ConnectionLost("the schema check ended early".to_owned())))?
}

struct Prepare {
    connect: ConnectPlan,
    schema: SchemaName,
    partitions: u32,
    migrate: bool,
    answer: futures_channel::oneshot::Sender<Result<()>>,
}

impl ThreadMain for Prepare {
    type Output = ();

    async fn run<R: Dial>(self, runtime: R) {
        let connector = self.connect.on(runtime);
        let work = async {
            let mut client = connector.connect().await?;
            if self.migrate {
                install::migrate(&mut client, &self.schema, self.partitions).await?;
            }
            install::verify(&client, &self.schema, Some(self.partitions)).await?;
            Ok(())
        };
        let _ = self.answer.send(work.await);
    }
}
