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
use super::strategy::Strategies;
use super::threads::{KeeperMain, Life, ShardMain, Starting, ThreadClock, Threads, handle};
use super::{Engine, Shared};
use crate::batch::Pool;
use crate::config::{Config, Database, OnDead, Prepared};
use crate::error::{Error, Result};
use crate::message::event_types::EventTypes;
use crate::metrics::ShardMetrics;
use crate::plan::cadence::Intervals;
use crate::plan::lease::LeaseTimes;
use crate::plan::listener::TestTimes;
use crate::plan::pause::BreakerRules;
use crate::plan::retry::OnDeath;
use crate::runtime::affinity;
use crate::runtime::budget::Budget;
use crate::runtime::probe::{self, RuntimeKind};
use crate::runtime::ring::Ring;
use crate::runtime::thread::{self, ThreadMain, ThreadPlan};
use crate::seam::dial::Dial;
use crate::seam::store::{InspectRules, StoreError};
use crate::seam::transport::Transport;
use crate::shard::listen::Listener;
use crate::shard::upkeep::Sentinel;
use crate::shard::{Arrival, LeaseCell, OthersBell, ShardSettings};
use crate::store::connect::{Connect, ConnectPlan, ConnectTarget, silence};
use crate::store::install;
use crate::store::schema_name::SchemaName;

/// How long a start waits for the first look at the members; where the database does not answer it goes on without.
const FIRST_LOOK: Duration = Duration::from_secs(2);
/// Room in a ring for orders beside the callers' batches.
const CONTROL_ENTRIES: usize = 64;
/// Entries of a ring at most: a batch has at least one row.
const RING_ENTRIES_MAX: usize = 65_536;
/// Recycled batches kept by the process, the largest arena kept, and bytes of all of them.
const POOL: (usize, usize, usize) = (4_096, 1 << 20, 64 << 20);

/// Makes an [`Engine`].
pub struct Builder {
    config: Config,
    transport: Option<Arc<dyn Transport>>,
    migrate: bool,
    owns: bool,
    event_types: EventTypes,
}

impl Builder {
    pub(super) fn new(config: Config) -> Self {
        Self { config, transport: None, migrate: false, owns: true, event_types: EventTypes::default() }
    }

    /// Where messages go. Without one the engine only stores, and owns no partitions.
    #[must_use]
    pub fn transport(mut self, transport: impl Transport) -> Self {
        self.transport = Some(Arc::new(transport));
        self
    }

    /// The types that this program reads, with the names and shapes they had before. Without them each is read under the
    /// name it has now.
    #[must_use]
    pub fn event_types(mut self, types: EventTypes) -> Self {
        self.event_types = types;
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

    /// Starts the engine, and waits (for two seconds at most) until it knows which partitions it holds. A database that
    /// cannot be reached is an error here, at once; later it is tried again.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Schema`], or [`Error::Store`] if the database cannot be reached or refuses.
    pub async fn start(self) -> Result<Engine> {
        let config = self.config;
        config.validate()?;
        // Not a matter of the file alone: another machine, or container, has other cores.
        affinity::check_named(&config.shards.cores)
            .map_err(|problem| Error::Config(format!("shards.cores = {:?}: {problem}", config.shards.cores)))?;
        let decision = probe::decide(config.shards.runtime)?;
        tracing::info!(runtime = decision.kind.name(), reason = %decision.reason, "runtime");
        if config.database.url.is_empty() {
            return Err(Error::Config("database.url: must be set".to_owned()));
        }
        let refused = |error: crate::store::connect::TargetError| Error::Config(error.to_string());
        let connect_limit = Duration::from_millis(config.database.connect_timeout_ms);
        let target = |url: &str| {
            ConnectTarget::parse(url).map_err(refused).map(|target| target.or_connect_timeout(connect_limit))
        };
        let schema = SchemaName::new(&config.database.schema)
            .map_err(|error| Error::Config(format!("database.schema: {error}")))?;
        let lease_quarter_ms = config.lease.ttl_ms / 4;
        let settings = ConnectPlan::settings(schema.name(), "engine", lease_quarter_ms, lease_quarter_ms);
        let Database { url, direct_url, direct, prepared_statements, .. } = &config.database;
        let connect = ConnectPlan::new(target(url)?, settings).map_err(refused)?;
        let is_pooled = !*direct || !direct_url.is_empty();
        let unnamed = match prepared_statements {
            Prepared::Auto => is_pooled,
            Prepared::On => false,
            Prepared::Off => true,
        };
        let connect = connect.in_manner(is_pooled, unnamed);
        let keeping = ConnectPlan::settings(schema.name(), "keeper", lease_quarter_ms, lease_quarter_ms);
        let keeping = if direct_url.is_empty() {
            connect.with_settings(keeping).in_manner(is_pooled, unnamed)
        } else {
            let plan = ConnectPlan::new(target(direct_url)?, keeping).map_err(refused)?;
            plan.in_manner(false, *prepared_statements == Prepared::Off)
        };
        // A handler in its transaction may think for as long as it may take.
        let silent_ms = crate::inbox::silent_ms(&config);
        let mut consuming = ConnectPlan::settings(schema.name(), "inbox", lease_quarter_ms, silent_ms);
        consuming.extend(silence(silent_ms));
        // A handler that was given up leaves no statement behind.
        let statement_ms = config.inbox.handler_timeout_ms.max(5_000);
        consuming.push(("statement_timeout".to_owned(), format!("{statement_ms}ms")));
        let consuming = direct.then(|| keeping.with_settings(consuming));
        let times = LeaseTimes::new(config.lease.ttl_ms, config.lease.margin_ms, config.publish.timeout_ms)
            .map_err(Error::Config)?;
        prepare(&keeping, &schema, &config, self.migrate).await?;

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
        let bridge =
            Bridge::start(transport.clone(), config.bridge.threads, count * config.publish.in_flight_max, timeout)
                .map_err(|error| cannot_start("the bridge", error))?;
        let pool = Arc::new(Pool::new(POOL.0, POOL.1, POOL.2));
        let lease = Arc::new(LeaseCell::default());
        let others = Arc::new(OthersBell::default());
        let listener = Arc::new(Listener::new(TestTimes {
            interval_ms: config.listen.test_interval_ms,
            limit_ms: config.listen.test_timeout_ms,
        }));
        let sentinel = Sentinel { rules: inspect_rules(&config), metrics: Arc::default() };
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
        let instance_name = instance_name(&config);
        let (stop_keeper, stop) = tokio::sync::watch::channel(false);
        let keeper = KeeperMain {
            connect: keeping.clone(),
            listens: config.database.direct,
            schema: schema.clone(),
            service_name: config.service.name.clone(),
            instance_name: instance_name.clone(),
            times,
            owns,
            lease: lease.clone(),
            others: others.clone(),
            listener: listener.clone(),
            sentinel: sentinel.clone(),
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
        let strategies = Strategies::new(&config, count, bridge.tasks());
        let consumers = crate::inbox::Consumers::new(consuming, schema.clone(), &config);
        let shared = Arc::new(Shared {
            config,
            schema,
            connect,
            direct: keeping,
            instance_name,
            stored: tokio::sync::watch::Sender::new(0),
            router,
            shards: handles,
            pool,
            bulk_turns: tokio::sync::Semaphore::new(super::bulk::UNDER_WAY_MAX),
            readers: super::event_store::ReaderThread::default(),
            strategies,
            runtime: decision,
            others,
            listener,
            sentinel: sentinel.metrics,
            stopped: tokio::sync::watch::Sender::new(false),
            transport,
            consumers,
            event_types: self.event_types,
        });
        let threads = Threads { shards: running, keeper, stop_keeper, bridge };
        // All of it runs: it ends with its handles from here on.
        starting.rings.clear();
        Strategies::drive(&shared);
        tell_subscriptions(&shared, &threads.bridge.tasks());
        let life = Arc::new(Life { shared: shared.clone(), threads: Mutex::new(Some(threads)) });
        // What is stored at once is then published from memory, and not left to a claim.
        let patience = tokio::time::Instant::now() + FIRST_LOOK;
        while !lease.has_looked() && tokio::time::Instant::now() < patience {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(Engine { shared, life })
    }
}

/// Passes on that shards have stored something. It ends with the bridge.
fn tell_subscriptions(shared: &Arc<Shared>, tasks: &tokio::runtime::Handle) {
    let shared = shared.clone();
    tasks.spawn(async move {
        loop {
            shared.others.stored().await;
            shared.stored.send_modify(|count| *count = count.wrapping_add(1));
        }
    });
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
        claim_intervals: Intervals {
            base_ms: config.claim.poll_ms,
            relaxed_ms: config.claim.poll_relaxed_ms,
            max_ms: config.claim.poll_ms_max,
        },
        lane_rows_max: config.lane.rows_max,
        lane_streams_max: config.lane.streams_max,
        lane_crowd_ms: crate::shard::CROWD_MS,
        publish_run_rows_max: config.publish.run_rows_max,
        publish_in_flight_max: config.publish.in_flight_max,
        retry_base_ms: config.retry.base_ms,
        retry_cap_ms: config.retry.cap_ms,
        retry_attempts_max: config.retry.attempts_max as i32,
        retry_jitter_percent: config.retry.jitter_percent,
        on_death: OnDeath {
            hold: config.retry.on_dead == OnDead::Hold,
            of: (config.destinations.on_dead()).map(|(name, of)| (name.to_owned(), of == OnDead::Hold)).collect(),
        },
        breaker: BreakerRules {
            failures_max: config.breaker.failures_max,
            base_ms: config.breaker.base_ms,
            cap_ms: config.breaker.cap_ms,
        },
        cursor_interval_ms: config.cursor.interval_ms,
        call_timeout_ms: config.database.call_timeout_ms,
    }
}

fn inspect_rules(config: &Config) -> InspectRules {
    InspectRules {
        dead_letters_days: config.retention.dead_letters_days,
        unpublished_ms: config.sentinel.unpublished_ms,
        stuck_ms: config.sentinel.stuck_ms,
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
