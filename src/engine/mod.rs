//! What the embedding program sees: the engine, units of work, the outbox.
//!
//! Invariants
//! - A call is answered after the commit that holds its messages, or with an error when nothing was stored.
//! - Rows that callers have in hand at a shard are at most `ring.rows_max`: beyond it a single message is refused
//!   (`Overloaded`), and `enqueue_many` and `commit` wait.
//! - The caller's program is an ordinary tokio program; calls come from any thread.

mod bridge;
mod builder;
mod bulk;
mod consume;
pub mod event_store;
mod expected;
pub mod feed;
mod health;
mod many;
pub(crate) mod outbox;
mod report;
mod retention;
pub mod router;
mod strategy;
pub mod subscription;
mod threads;
mod unit;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_channel::oneshot;
use uuid::Uuid;

pub use builder::Builder;
pub use event_store::{EventStore, StoredEvent, StreamReader};
pub use feed::{FeedBuilder, FeedPage, FeedPlace, FeedReader};
pub use health::ListenerHealth;
pub use outbox::{Enlisted, Outbox, Push};
pub use report::ShutdownReport;
pub use strategy::{Flushed, Pushed};
pub use unit::UnitOfWork;

use crate::batch::{Pool, Rows};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::inbox::{ConsumerBuilder, Consumers};
use crate::message::Enqueue;
use crate::message::event_types::EventTypes;
use crate::metrics::{SentinelMetrics, ShardMetrics};
pub use crate::plan::strategy::Trigger;
use crate::runtime::budget::Budget;
use crate::runtime::probe::Decision;
use crate::runtime::ring::RingSender;
use crate::seam::store::HeldPartition;
use crate::seam::transport::Transport;
use crate::shard::listen::Listener;
use crate::shard::{Arrival, Control, OthersBell, Submission, SubmissionReply};
use crate::store::connect::ConnectPlan;
use crate::store::schema_name::SchemaName;
use router::Router;
use strategy::{Queued, Strategies};
use threads::Life;

/// What is known of a message that was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// Its id.
    pub message_id: Uuid,
    /// Its place in its stream, from 1 (1 without stream; 0 for one that is scheduled: it has none yet).
    pub stream_seq: i64,
    /// Its place among its stream's events, from 1; 0 for what is not an event of a stream.
    pub version: i64,
}

/// One shard, as callers see it.
struct ShardHandle {
    ring: RingSender<Arrival>,
    budget: Arc<Budget>,
    metrics: Arc<ShardMetrics>,
    core: Option<usize>,
    clock: Arc<threads::ThreadClock>,
    held: Arc<Mutex<Vec<HeldPartition>>>,
}

struct Shared {
    config: Config,
    schema: SchemaName,
    connect: ConnectPlan,
    /// For connections that listen and hold session locks, where there are such.
    direct: ConnectPlan,
    instance_name: String,
    /// Counts what shards of this process have stored; subscriptions look when it moves.
    stored: tokio::sync::watch::Sender<u64>,
    router: Router,
    shards: Vec<ShardHandle>,
    pool: Arc<Pool>,
    bulk_turns: tokio::sync::Semaphore,
    readers: event_store::ReaderThread,
    strategies: Strategies,
    runtime: Decision,
    /// Rung when something was stored that another process is to publish.
    others: Arc<OthersBell>,
    listener: Arc<Listener>,
    sentinel: Arc<SentinelMetrics>,
    stopped: tokio::sync::watch::Sender<bool>,
    transport: Arc<dyn Transport>,
    consumers: Consumers,
    event_types: EventTypes,
}

/// A running engine. Clones share it; it ends by [`Engine::shutdown`], or, less orderly, when the last clone goes.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
    life: Arc<Life>,
}

/// A shard's figures and place.
#[derive(Clone, Debug)]
pub struct ShardView {
    /// Its core, if it is pinned.
    pub core: Option<usize>,
    /// Partitions it holds now.
    pub partitions: usize,
    /// Its counters.
    pub metrics: Arc<ShardMetrics>,
}

impl Engine {
    /// Begins to make an engine.
    #[must_use]
    pub fn builder(config: Config) -> Builder {
        Builder::new(config)
    }

    /// Stores one message and answers after its commit. Dropping the future does not take the message back once the
    /// shard has it.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if the shard is full; [`Error::ShutDown`]; a limit that the message breaks; what the
    /// database said ([`Error::Store`]: nothing was stored), or could not say any more ([`Error::OutcomeUnknown`],
    /// [`Error::StoredUnnumbered`]).
    pub async fn enqueue<M: Enqueue + ?Sized>(&self, message: &M) -> Result<Receipt> {
        let mut batch = self.shared.pool.take();
        let rows = exclusive(&mut batch);
        let message_id = id_of(message);
        let router = self.shared.router;
        if let Err(error) = router.write(rows, message, message_id) {
            self.shared.pool.give(batch);
            return Err(error);
        }
        rows.end_unit();
        let shard = router.shard_of(rows.partition[0]);
        match self.shared.try_acquire(shard, 1) {
            Ok(true) => {}
            refused => {
                self.shared.pool.give(batch);
                refused?;
                return Err(self.shared.overloaded(shard));
            }
        }
        let reply = self.shared.submit(shard, batch, 1)?;
        let mut reply = reply.await.map_err(|_| not_known())?;
        let outcome = match reply.refused.pop() {
            Some((_, error)) => Err(error),
            None => Ok(receipt(&reply.rows, 0)),
        };
        self.shared.pool.give(reply.rows);
        outcome
    }

    /// The outbox: messages that join a transaction of the caller's own.
    #[must_use]
    pub fn outbox(&self) -> Outbox {
        Outbox::new(self.clone())
    }

    /// The event store: reads the events of streams, and the feed of all.
    #[must_use]
    pub fn event_store(&self) -> EventStore {
        EventStore::new(self.clone())
    }

    /// What shards run on, and why.
    #[must_use]
    pub fn runtime(&self) -> &Decision {
        &self.shared.runtime
    }

    /// The types it reads by.
    #[must_use]
    pub fn event_types(&self) -> &EventTypes {
        &self.shared.event_types
    }

    /// The configuration in force.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// The shards.
    #[must_use]
    pub fn shards(&self) -> Vec<ShardView> {
        for shard in &self.shared.shards {
            shard.metrics.cpu_us.set(shard.clock.read_us());
        }
        let view = |shard: &ShardHandle| ShardView {
            core: shard.core,
            partitions: shard.held.lock().unwrap_or_else(PoisonError::into_inner).len(),
            metrics: shard.metrics.clone(),
        };
        self.shared.shards.iter().map(view).collect()
    }

    /// The partition of a stream id, `0..partitions.count`: whoever holds it publishes the stream.
    #[must_use]
    pub fn partition_of(&self, stream_id: Uuid) -> u32 {
        crate::partition::partition_of(stream_id, self.shared.config.partitions.count)
    }

    /// What waits longer than it should, as this process found it if it is the one that looks (once a minute).
    #[must_use]
    pub fn sentinel(&self) -> &SentinelMetrics {
        &self.shared.sentinel
    }

    /// The partitions this process holds now, ascending. What is stored here for others of them is published by their
    /// owner, who reads it back from the database: callers that are routed by stream id to its owner spare that. The
    /// set changes while processes come and go.
    #[must_use]
    pub fn held_partitions(&self) -> Vec<u32> {
        let of = |shard: &ShardHandle| shard.held.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut held: Vec<u32> = self.shared.shards.iter().flat_map(of).map(|held| held.partition).collect();
        held.sort_unstable();
        held
    }

    /// Partitions this process holds now.
    #[must_use]
    pub fn partitions_held(&self) -> usize {
        self.shared.partitions_held()
    }

    /// Tells the shards that messages were stored by somebody else: they look at once.
    pub fn announce(&self) {
        self.shared.announce();
    }

    /// Begins to make a consumer of this name: what it has received is remembered by it, whichever process receives.
    #[must_use]
    pub fn consumer(&self, name: &str) -> ConsumerBuilder {
        ConsumerBuilder::new(self.clone(), name)
    }

    /// Takes no more messages, stores what is queued, publishes what is in hand, writes the cursors, frees the
    /// partitions. Returns within about `timeout`, whatever happens; what is not done then is left in the database for
    /// the next owner, and what could not be stored is in the report.
    pub async fn shutdown(&self, timeout: Duration) -> ShutdownReport {
        let began = Instant::now();
        let Some(threads) = self.life.take() else { return ShutdownReport::default() };
        // First of all: handlers that run may still store, and the shards publish what they emit. With most of the time,
        // not with all of it.
        let consumers = self.shared.consumers.end(timeout * 3 / 5).await;
        self.shared.stopped.send_replace(true);
        self.shared.readers.end();
        let shared = self.shared.clone();
        let ending = tokio::task::spawn_blocking(move || {
            let queued = shared.strategies.end(&shared, began + timeout);
            (queued, threads.end(&shared, timeout.saturating_sub(began.elapsed())))
        });
        let (queued, report) = match ending.await {
            Ok((queued, shards)) => (queued, ShutdownReport::of(&shards, began.elapsed())),
            Err(_) => (
                Queued::default(),
                ShutdownReport { shards_lost: self.shared.shards.len(), ..ShutdownReport::default() },
            ),
        };
        let report = queued.report(report).await;
        report.with_consumers(consumers, began.elapsed())
    }
}

impl Shared {
    fn overloaded(&self, shard: usize) -> Error {
        Error::Overloaded { shard, rows_max: self.config.ring.rows_max }
    }

    fn announce(&self) {
        for shard in &self.shards {
            // A full ring is busy anyway; the poll comes by later.
            let _ = shard.ring.push(Arrival::Control(Control::Announce));
        }
        self.others.note_stored();
        if self.partitions_held() < self.config.partitions.count as usize {
            self.others.ring();
        }
    }

    fn partitions_held(&self) -> usize {
        let held = |shard: &ShardHandle| shard.held.lock().unwrap_or_else(PoisonError::into_inner).len();
        self.shards.iter().map(held).sum()
    }

    fn check_running(&self) -> Result<()> {
        if *self.stopped.borrow() { Err(Error::ShutDown) } else { Ok(()) }
    }

    fn try_acquire(&self, shard: usize, rows: usize) -> Result<bool> {
        self.check_running()?;
        Ok(self.shards[shard].budget.try_acquire(rows, self.config.ring.rows_max))
    }

    /// Waits for room; false if there never can be so much. Who waits while the engine ends is told so: a shard
    /// that has ended gives no room back.
    async fn acquire(&self, shard: usize, rows: usize) -> Result<bool> {
        self.check_running()?;
        let mut stopping = self.stopped.subscribe();
        let stopped = std::pin::pin!(stopping.wait_for(|stopped| *stopped));
        let room = std::pin::pin!(self.shards[shard].budget.acquire(rows, self.config.ring.rows_max));
        match futures_util::future::select(room, stopped).await {
            futures_util::future::Either::Left((fits, _)) => Ok(fits),
            futures_util::future::Either::Right(_) => Err(Error::ShutDown),
        }
    }

    /// Refuses a further message of a unit of work that has reached `unit.bytes_max`.
    fn refuse_beyond_unit(&self, rows: &Rows, message_id: Uuid) -> Result<()> {
        let bytes_max = self.config.unit.bytes_max;
        let bytes = rows.bytes_in_memory();
        if bytes < bytes_max {
            return Ok(());
        }
        Err(Error::MessageLimit {
            message_id,
            what: "size of its unit of work",
            value: format!("over {bytes} bytes"),
            allowed: format!("0..={bytes_max} bytes (unit.bytes_max)"),
        })
    }

    /// Tells these shards, but for one, to look for messages that another one stored.
    fn announce_to(&self, shards: impl Iterator<Item = usize>, except: usize) {
        let mut told = vec![false; self.shards.len()];
        told[except] = true;
        for shard in shards {
            if !std::mem::replace(&mut told[shard], true) {
                // A full ring is busy anyway; the poll comes by later.
                let _ = self.shards[shard].ring.push(Arrival::Control(Control::Announce));
            }
        }
    }

    /// Hands a batch over whose rows have been acquired.
    fn submit(&self, shard: usize, rows: Arc<Rows>, count: usize) -> Result<oneshot::Receiver<SubmissionReply>> {
        self.hand(shard, rows).map_err(|rows| {
            let handle = &self.shards[shard];
            handle.budget.release(count);
            self.pool.give(rows);
            let ended = *self.stopped.borrow() || handle.ring.is_closed();
            if ended { Error::ShutDown } else { self.overloaded(shard) }
        })
    }

    /// The same; a ring that is full, or whose shard has gone, gives the batch back. Its rows stay acquired.
    fn hand(&self, shard: usize, rows: Arc<Rows>) -> Result<oneshot::Receiver<SubmissionReply>, Arc<Rows>> {
        let (reply, answer) = oneshot::channel();
        match self.shards[shard].ring.push(Arrival::Submission(Submission { rows, reply })) {
            Ok(()) => Ok(answer),
            Err(Arrival::Submission(Submission { rows, .. })) => Err(rows),
            Err(Arrival::Control(_)) => unreachable!("a batch was pushed"),
        }
    }
}

/// What is said of messages whose shard ended before it answered.
fn not_known() -> Error {
    Error::OutcomeUnknown { reason: "the engine ended before it answered".to_owned() }
}

/// A batch that nobody else holds: the pool gives no other.
fn exclusive(batch: &mut Arc<Rows>) -> &mut Rows {
    if Arc::get_mut(batch).is_none() {
        *batch = Arc::default();
    }
    match Arc::get_mut(batch) {
        Some(rows) => rows,
        None => unreachable!("just made"),
    }
}

fn id_of(message: &(impl Enqueue + ?Sized)) -> Uuid {
    message.header().wishes.message_id.unwrap_or_else(Uuid::now_v7)
}

fn receipt(rows: &Rows, row: usize) -> Receipt {
    Receipt { message_id: rows.message_id[row], stream_seq: rows.stream_seq[row], version: rows.version[row] }
}
