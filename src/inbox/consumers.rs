//! The consumers of an engine: their threads, their tasks, their end.
//!
//! Invariants
//! - Nothing is started before the first consumer; all of it ends with the engine.
//! - A consumer that ends receives nothing first, then its workers end, then their settlements, and only then is nothing
//!   renewed any more.
//! - Its tasks do not keep the engine alive.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinHandle;

use super::commit::Rules;
use super::door::{Connections, Dialled, Door};
use super::gate::{ArrivalGate, CommitGate};
use super::handler::Handlers;
use super::source::{Collecting, Room, Source};
use super::tend::tend;
use super::worker::{Ending, Worker, WorkerEnd, WorkerParts};
use super::{ConsumerReport, share, silent_ms};
use crate::config::Config;
use crate::engine::router::Router;
use crate::error::{Error, Result};
use crate::metrics::InboxMetrics;
use crate::plan::retry::Retry;
use crate::runtime::probe::RuntimeKind;
use crate::runtime::thread::{self, ThreadPlan};
use crate::seam::receiver::Receiver;
use crate::store::connect::ConnectPlan;
use crate::store::schema_name::SchemaName;

/// Beyond its time, an end waits so long for tasks that were told to end.
const GRACE: Duration = Duration::from_millis(500);

/// What an engine has started for its consumers.
struct Started {
    runtime: tokio::runtime::Runtime,
    dial: flume::Sender<Dialled>,
}

/// See the module.
pub(crate) struct Consumers {
    /// `None`: the database has no direct connection.
    plan: Option<ConnectPlan>,
    schema: SchemaName,
    places: Arc<Semaphore>,
    started: Mutex<Option<Started>>,
    has_ended: AtomicBool,
    running: Mutex<Vec<Arc<Running>>>,
}

/// What a consumer is made of.
pub(crate) struct NewConsumer<'a> {
    pub config: &'a Config,
    pub name: &'a str,
    pub receivers: Vec<Arc<dyn Receiver>>,
    pub handlers: Handlers,
    pub router: Router,
    /// Tells the shards that something was stored.
    pub announce: Arc<dyn Fn() + Send + Sync>,
}

impl Consumers {
    pub(crate) fn new(plan: Option<ConnectPlan>, schema: SchemaName, config: &Config) -> Self {
        let places = Arc::new(Semaphore::new(config.inbox.concurrency_max));
        Self {
            plan,
            schema,
            places,
            started: Mutex::default(),
            has_ended: AtomicBool::new(false),
            running: Mutex::default(),
        }
    }

    /// The runtime and the connections' thread, started at first use.
    fn started(&self, config: &Config) -> Result<(tokio::runtime::Handle, flume::Sender<Dialled>)> {
        let plan = self.plan.clone().ok_or_else(|| {
            Error::Config(
                "database.direct = false: the inbox locks streams by its sessions; set database.direct_url".to_owned(),
            )
        })?;
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        if self.has_ended.load(Ordering::Acquire) {
            return Err(Error::ShutDown);
        }
        if let Some(started) = &*started {
            return Ok((started.runtime.handle().clone(), started.dial.clone()));
        }
        let no_thread = |source| Error::Thread { what: "the inbox", source };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(config.inbox.workers)
            .thread_name("corelane-handle")
            .enable_all()
            .build()
            .map_err(no_thread)?;
        let (dial, requests) = flume::unbounded();
        let thread = ThreadPlan {
            kind: RuntimeKind::Tokio,
            core: None,
            name: "corelane-inbox".to_owned(),
            metrics: Arc::default(),
        };
        thread::start(thread, Connections { plan, requests }).map_err(no_thread)?;
        runtime.spawn(tend(dial.clone(), self.schema.clone(), config.inbox.window_days));
        let answer = (runtime.handle().clone(), dial.clone());
        *started = Some(Started { runtime, dial });
        Ok(answer)
    }

    pub(crate) async fn start(&self, new: NewConsumer<'_>) -> Result<Arc<Running>> {
        let NewConsumer { config, name, receivers, handlers, router, announce } = new;
        let schema = self.schema.clone();
        let (tasks, dial) = self.started(config)?;
        let call_timeout = Duration::from_millis(config.database.call_timeout_ms);
        let opened = {
            let (dial, schema, name) = (dial.clone(), schema.clone(), name.to_owned());
            tasks.spawn(async move { Door::open(&dial, &schema, &name, call_timeout).await })
        };
        let (_, number) = opened.await.map_err(|_| Error::ShutDown)?.map_err(Error::from)?;

        let metrics = Arc::new(InboxMetrics::default());
        let handlers = Arc::new(handlers);
        let retry = &config.retry;
        let rules = Arc::new(Rules {
            name: name.into(),
            number,
            handlers: handlers.clone(),
            router,
            schema,
            retry: Retry::new(retry.base_ms, retry.cap_ms, retry.attempts_max as i32, retry.jitter_percent),
            retry_by: config.inbox.retry,
            on_dead: config.inbox.on_dead,
            handler_time: Duration::from_millis(config.inbox.handler_timeout_ms),
            disturbed_max: config.inbox.disturbed_max,
            emit_bytes_max: config.inbox.emit_bytes_max,
            commit_bytes_max: config.inbox.commit_bytes_max,
            metrics: metrics.clone(),
        });
        let room = Arc::new(Room::default());
        let sources: Vec<Arc<Source>> = (receivers.into_iter().enumerate())
            .map(|(index, receiver)| Source::new(receiver, index, room.clone(), metrics.clone()))
            .collect();
        let (ending, ends) = watch::channel::<Ending>(None);
        let mut senders = Vec::new();
        let mut workers = Vec::new();
        for index in 0..config.inbox.workers {
            let (sender, arrivals) = mpsc::unbounded_channel();
            senders.push(sender);
            let worker = Worker::new(WorkerParts {
                rules: rules.clone(),
                dial: dial.clone(),
                call_timeout,
                sources: sources.clone(),
                room: room.clone(),
                arrivals,
                ending: ends.clone(),
                places: self.places.clone(),
                partitions: share(config, index),
                arrival_gate: ArrivalGate {
                    rows_max: config.inbox.batch_rows_max,
                    quiet_ms: config.inbox.batch_quiet_ms,
                    age_ms_max: config.inbox.batch_age_ms_max,
                },
                commit_gate: CommitGate {
                    rows_max: config.inbox.commit_rows_max,
                    age_ms_max: config.inbox.commit_age_ms_max,
                },
                settle: config.inbox.settle,
                busy_ms_max: config.inbox.busy_ms_max,
                poll_ms: config.inbox.poll_ms,
                ping_ms: silent_ms(config) / 4,
                announce: announce.clone(),
            });
            workers.push(tasks.spawn(worker.run()));
        }
        let collecting = Arc::new(Collecting {
            workers: senders,
            handlers,
            partitions: config.partitions.count,
            rows_max: config.inbox.rows_max,
            bytes_max: config.inbox.bytes_max,
            batch_rows_max: config.inbox.batch_rows_max,
        });
        let collectors = sources.iter().map(|source| tasks.spawn(source.clone().collect(collecting.clone()))).collect();
        let renewers = sources.iter().map(|source| tasks.spawn(source.clone().renew())).collect();
        let running = Arc::new(Running {
            metrics,
            sources,
            ending,
            tasks: Mutex::new(Some(Tasks { collectors, renewers, workers })),
        });
        self.running.lock().unwrap_or_else(PoisonError::into_inner).push(running.clone());
        Ok(running)
    }

    /// Ends all of them within their time.
    pub(crate) async fn end(&self, timeout: Duration) -> ConsumerReport {
        self.has_ended.store(true, Ordering::Release);
        let running = std::mem::take(&mut *self.running.lock().unwrap_or_else(PoisonError::into_inner));
        let reports = futures_util::future::join_all(running.iter().map(|running| running.stop(timeout))).await;
        self.end_at_once();
        ConsumerReport {
            drained: reports.iter().all(|report| report.drained),
            abandoned: reports.iter().map(|report| report.abandoned).sum(),
            left: reports.iter().map(|report| report.left).sum(),
        }
    }

    /// Ends whatever still runs; what is in hand comes again.
    pub(crate) fn end_at_once(&self) {
        self.has_ended.store(true, Ordering::Release);
        if let Some(started) = self.started.lock().unwrap_or_else(PoisonError::into_inner).take() {
            started.runtime.shutdown_background();
        }
    }
}

struct Tasks {
    collectors: Vec<JoinHandle<()>>,
    renewers: Vec<JoinHandle<()>>,
    workers: Vec<JoinHandle<WorkerEnd>>,
}

/// A running consumer.
pub(crate) struct Running {
    metrics: Arc<InboxMetrics>,
    sources: Vec<Arc<Source>>,
    ending: watch::Sender<Ending>,
    tasks: Mutex<Option<Tasks>>,
}

impl Running {
    pub(crate) fn metrics(&self) -> &InboxMetrics {
        &self.metrics
    }

    pub(crate) fn pause(&self, is_paused: bool) {
        for source in &self.sources {
            if is_paused { source.receiver.pause() } else { source.receiver.resume() }
        }
    }

    pub(crate) async fn stop(&self, timeout: Duration) -> ConsumerReport {
        let Some(tasks) = self.tasks.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return ConsumerReport { drained: true, ..ConsumerReport::default() };
        };
        let by = tokio::time::Instant::now() + timeout;
        self.pause(true);
        for collector in tasks.collectors {
            collector.abort();
            // Until it has ended it may hand something over.
            let _ = tokio::time::timeout_at(by, collector).await;
        }
        self.ending.send_replace(Some(by));
        let mut report = ConsumerReport { drained: true, ..ConsumerReport::default() };
        for worker in tasks.workers {
            match tokio::time::timeout_at(by + GRACE, worker).await {
                Ok(Ok(end)) => {
                    report.abandoned += end.abandoned;
                    report.left += end.left;
                    report.drained &= end.left == 0;
                }
                _ => report.drained = false,
            }
        }
        for source in &self.sources {
            report.drained &= tokio::time::timeout_at(by + GRACE, source.all_settled()).await.is_ok();
        }
        tasks.renewers.iter().for_each(JoinHandle::abort);
        report
    }
}
