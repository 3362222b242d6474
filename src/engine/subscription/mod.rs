//! Subscriptions: following the events of the store, from wherever one begins, and on.
//!
//! Invariants
//! - A batch comes again until it is done: [`EventBatch::done`], or [`EventBatch::checkpoint`] in a transaction that
//!   commits. Nothing behind it comes before.
//! - A checkpoint that commits is that of the partitions' owner, and of the batch that came next to what was written
//!   down before: effects in its transaction happen exactly once.
//! - One batch is in hand: what is not asked for is not read.

mod away;
mod reader;
mod session;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio_postgres::Transaction;

use super::Engine;
use crate::error::{Error, Result};
use crate::metrics::SubscriptionMetrics;
use crate::plan::follow::Run;
use crate::runtime::probe::RuntimeKind;
use crate::runtime::thread::{self, ThreadPlan};
use crate::store::stored_event::StoredEvent;
pub use crate::store::subscriptions::Lag;
use crate::store::subscriptions::{Filter, Membership, Registering, Statements};
use reader::{Order, ReaderMain};

/// Events of a batch, unless it is said otherwise.
const ROWS_MAX: u32 = 1_000;
/// Bytes of a batch, unless it is said otherwise.
const BYTES_MAX: u64 = 4 << 20;
/// SQLSTATE of a checkpoint that is not this member's to write.
const CHECKPOINT_LOST: &str = "CL020";

/// How a subscription begins, and what it is for.
#[must_use = "start() begins it"]
pub struct SubscriptionBuilder {
    engine: Engine,
    name: String,
    from: Option<i64>,
    filter: Filter,
}

/// A member of a subscription. Members of one name, in whatever processes, share the partitions of the streams.
pub struct Subscription {
    orders: mpsc::Sender<Order>,
    metrics: Arc<SubscriptionMetrics>,
}

/// What became of a batch.
pub(super) const OPEN: u8 = 0;
pub(super) const DONE: u8 = 1;
pub(super) const WRITTEN: u8 = 2;

/// Where a batch ends, and what became of it.
pub(super) struct BatchEnd {
    pub state: AtomicU8,
    pub member: Membership,
    /// With the fences from before, at the place behind the batch.
    pub run: Run,
    pub statements: Arc<Statements>,
    pub acknowledged: Arc<Notify>,
    pub events: Vec<StoredEvent>,
}

/// Events of several streams, in order within each. Dropped without [`EventBatch::done`] or
/// [`EventBatch::checkpoint`] it comes again.
pub struct EventBatch {
    end: Arc<BatchEnd>,
    attempt: u32,
}

impl Engine {
    /// Follows the events of the store under a name that keeps its place. From the beginning, unless the builder says
    /// otherwise; where the subscription exists already it goes on where it was.
    pub fn subscribe(&self, name: &str) -> SubscriptionBuilder {
        let filter = Filter { rows_max: ROWS_MAX as i32, bytes_max: BYTES_MAX as i64, ..Filter::default() };
        SubscriptionBuilder { engine: self.clone(), name: name.to_owned(), from: Some(0), filter }
    }
}

impl SubscriptionBuilder {
    /// A new one begins with the first event there is.
    pub fn from_beginning(mut self) -> Self {
        self.from = Some(0);
        self
    }

    /// A new one begins with what is not committed yet.
    pub fn from_now(mut self) -> Self {
        self.from = None;
        self
    }

    /// A new one begins behind a position (0 or more).
    pub fn from_position(mut self, position: i64) -> Self {
        self.from = Some(position);
        self
    }

    /// Only events of types with these names, or with older names that [`crate::EventTypes`] has of them; together with
    /// [`SubscriptionBuilder::of_categories`]: of either.
    pub fn of_types<S: AsRef<str>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.filter.types.extend(names.into_iter().map(|name| name.as_ref().to_owned()));
        self
    }

    /// Only events of types whose names begin so (`orders.`), or begin so today.
    pub fn of_categories<S: AsRef<str>>(mut self, prefixes: impl IntoIterator<Item = S>) -> Self {
        self.filter.prefixes.extend(prefixes.into_iter().map(|prefix| prefix.as_ref().to_owned()));
        self
    }

    /// Events of a batch at most, 1 to 10,000.
    pub fn rows_max(mut self, rows_max: u32) -> Self {
        self.filter.rows_max = rows_max.clamp(1, 10_000) as i32;
        self
    }

    /// Bytes of payloads and metadata of a batch at most; a single event may have more.
    pub fn bytes_max(mut self, bytes_max: u64) -> Self {
        self.filter.bytes_max = bytes_max.clamp(1, 1 << 30) as i64;
        self
    }

    /// Joins, on a thread and a connection of its own.
    ///
    /// # Errors
    /// [`Error::ShutDown`]; [`Error::Thread`]; [`Error::Store`] if the database cannot be reached, or refuses (a name of
    /// 0 or more than 255 bytes, a negative position).
    pub async fn start(mut self) -> Result<Subscription> {
        let shared = &self.engine.shared;
        shared.check_running()?;
        shared.event_types.widen(&mut self.filter.types, &self.filter.prefixes);
        let metrics = Arc::new(SubscriptionMetrics::default());
        let (orders, taken) = mpsc::channel(4);
        let (started, starting) = oneshot::channel();
        let config = &shared.config;
        let main = ReaderMain {
            connect: shared.direct.clone(),
            statements: Arc::new(Statements::of(&shared.schema).with_types(shared.event_types.clone())),
            name: self.name,
            from: self.from,
            filter: self.filter,
            who: Registering {
                service_name: config.service.name.clone(),
                instance_name: shared.instance_name.clone(),
                lease_ms: config.lease.ttl_ms as i64,
                direct: config.database.direct,
            },
            poll: Duration::from_millis(config.claim.poll_ms),
            call_timeout: Duration::from_millis(config.database.call_timeout_ms),
            orders: taken,
            stored: shared.stored.subscribe(),
            stopped: shared.stopped.subscribe(),
            acknowledged: Arc::default(),
            metrics: metrics.clone(),
            started: Some(started),
        };
        let plan = ThreadPlan {
            kind: RuntimeKind::Tokio,
            core: None,
            name: "corelane-subscr".to_owned(),
            metrics: shared.shards[0].metrics.clone(),
        };
        thread::start(plan, main).map_err(|source| Error::Thread { what: "a subscription", source })?;
        starting.await.map_err(|_| Error::ShutDown)??;
        Ok(Subscription { orders, metrics })
    }
}

impl Subscription {
    /// The next events, or the last ones again if they were not done; waits until there are any. `None` when the engine
    /// has been shut down.
    ///
    /// # Errors
    /// What the database refused; a lost connection is made again, and is none.
    pub async fn next(&mut self) -> Result<Option<EventBatch>> {
        let (reply, answer) = oneshot::channel();
        if self.orders.send(Order::Next(reply)).await.is_err() {
            return Ok(None);
        }
        match answer.await {
            Ok(batch) => batch,
            Err(_) => Ok(None),
        }
    }

    /// How far the subscription is behind, all members together.
    ///
    /// # Errors
    /// What the database said, at once also while there is no connection to it; [`Error::ShutDown`].
    pub async fn lag(&mut self) -> Result<Lag> {
        let (reply, answer) = oneshot::channel();
        self.orders.send(Order::Lag(reply)).await.map_err(|_| Error::ShutDown)?;
        answer.await.map_err(|_| Error::ShutDown)?
    }

    /// Its figures.
    #[must_use]
    pub fn metrics(&self) -> &Arc<SubscriptionMetrics> {
        &self.metrics
    }

    /// Writes where it stands and leaves: the others take over at once. Without a connection it leaves as it is: what was
    /// done since it was written down last comes again elsewhere. (Dropped, it does the same, and nobody waits.)
    pub async fn stop(self) {
        let (reply, answer) = oneshot::channel();
        if self.orders.send(Order::Stop(reply)).await.is_ok() {
            // Ended is ended, however.
            let _ = answer.await;
        }
    }
}

impl EventBatch {
    /// The events.
    #[must_use]
    pub fn events(&self) -> &[StoredEvent] {
        &self.end.events
    }

    /// How often it has been handed out, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Everything in it has had its effect. Written down within a second, and when the member leaves: after a crash
    /// what was done since comes again.
    pub fn done(self) {
        self.end.state.store(DONE, Ordering::Release);
        self.end.acknowledged.notify_one();
    }

    /// Writes down in the caller's transaction that everything in the batch has had its effect: with the effects, or not
    /// at all. Begin the transaction after [`Subscription::next`]. If it does not commit, the batch comes again.
    ///
    /// # Errors
    /// [`Error::CheckpointLost`]: roll back; [`Error::Enlist`] with what else the database said. The transaction has then
    /// failed.
    pub async fn checkpoint(&self, transaction: &Transaction<'_>) -> Result<()> {
        self.end.state.store(WRITTEN, Ordering::Release);
        let written = self.end.statements.checkpoint(transaction, self.end.member, &self.end.run).await;
        written.map_err(|error| match error.code() {
            Some(code) if code.code() == CHECKPOINT_LOST => Error::CheckpointLost,
            _ => Error::Enlist(error),
        })
    }
}
