//! Strategies: when a unit of work is handed to its shard. There the flush gate merges the units of all callers.
//!
//! Invariants
//! - `plan/strategy` decides; here units are queued, handed over, and their outcomes brought back.
//! - A flush waits for all that was queued or handed over before it, whoever did so: a second one at the same time
//!   carries its own messages.
//! - What a failed flush carried is still at its shard, which tries again under the same ids, or its callers have the
//!   error. The end of the engine hands over what is queued, and says what could not be stored.
//!
//! The timers run on the bridge: a transport that blocks its threads delays them, as it delays publishing.

mod queue;
mod rare;
mod ticket;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::Notify;
use uuid::Uuid;

pub(super) use rare::Rare;
pub use ticket::Pushed;
pub(super) use ticket::Share;

use self::queue::Queue;
use self::ticket::Ticket;
use super::{Engine, ShutdownReport, UnitOfWork, exclusive, id_of};
use super::{Receipt, Shared};
use crate::batch::Rows;
use crate::config::{Config, Strategy};
use crate::error::{Error, Result};
use crate::message::Enqueue;
use crate::metrics::StrategyMetrics;
use crate::plan::strategy::Policy;
use crate::time::{Tick, boot_time};

/// How long the end waits for outcomes that its threads have left behind.
const OUTCOMES: Duration = Duration::from_secs(1);
/// Ids in the report of the end.
const IDS_MAX: usize = 1_000;

/// What a flush has waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flushed {
    /// Messages that were stored.
    pub stored: usize,
    /// Messages that were not, or of which that is not known: their callers have the error.
    pub refused: usize,
}

impl Engine {
    /// A unit of work: what is pushed into it commits together or not at all. It is handed over by `strategy.default`;
    /// where that is `immediate`, when it is committed: no configuration takes a unit apart.
    #[must_use]
    pub fn unit_of_work(&self) -> UnitOfWork {
        self.unit_with(match self.shared.config.strategy.default {
            Strategy::Immediate => Strategy::Scoped,
            strategy => strategy,
        })
    }

    /// A unit of work with a strategy of its own. With [`Strategy::Immediate`] **each push is a unit of its own**,
    /// handed over at once. With [`Strategy::Interval`] and [`Strategy::Batch`] the unit is queued whole by `commit()`,
    /// which waits for its turn.
    #[must_use]
    pub fn unit_with(&self, strategy: Strategy) -> UnitOfWork {
        UnitOfWork::new(self.clone(), strategy)
    }

    /// Runs the closure with a unit of work, commits it if that answers `Ok` and rolls it back if `Err`. Answers what the
    /// closure did, and a receipt for each message. Dropped before its end it rolls back.
    ///
    /// ```no_run
    /// # async fn example(engine: corelane::Engine) -> corelane::Result<()> {
    /// # let (first, second) = (corelane::RawMessage::command("a", b"{}"), corelane::RawMessage::command("b", b"{}"));
    /// let (answer, receipts) = engine
    ///     .scope(async |unit| {
    ///         unit.push(&first)?;
    ///         unit.push(&second)?;
    ///         Ok::<_, corelane::Error>("both or none")
    ///     })
    ///     .await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The closure's, or that of [`UnitOfWork::commit`].
    pub async fn scope<T, E: From<Error>>(
        &self,
        work: impl AsyncFnOnce(&mut UnitOfWork) -> Result<T, E>,
    ) -> Result<(T, Vec<Receipt>), E> {
        let mut unit = self.unit_of_work();
        match work(&mut unit).await {
            Ok(answer) => Ok((answer, unit.commit().await?)),
            Err(error) => {
                unit.roll_back();
                Err(error)
            }
        }
    }

    /// Takes one message as a unit of work of its own, by `strategy.default`, without waiting for its commit
    /// ([`Pushed::stored`] does). It is stored also if what this answers is dropped.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if as many rows are queued or in hand as may be; [`Error::ShutDown`]; a limit that the message
    /// breaks. Nothing was taken then.
    pub fn push<M: Enqueue + ?Sized>(&self, message: &M) -> Result<Pushed> {
        self.push_with(self.shared.config.strategy.default, message)
    }

    /// The same with a strategy of its own. The scope of a single message ends with it: [`Strategy::Scoped`] hands it over at
    /// once.
    ///
    /// # Errors
    /// Those of [`Engine::push`].
    pub fn push_with<M: Enqueue + ?Sized>(&self, strategy: Strategy, message: &M) -> Result<Pushed> {
        let shared = &self.shared;
        shared.check_running()?;
        let mut batch = shared.pool.take();
        let rows = exclusive(&mut batch);
        let message_id = id_of(message);
        let taken = shared.router.write(rows, message, message_id).and_then(|()| shared.queue_now(strategy, rows));
        shared.pool.give(batch);
        Ok(Pushed { share: taken?, message_id })
    }

    /// Hands over now what is queued, and waits until all of it, and what was handed over before, has its outcome.
    /// The outcomes themselves are the callers'. Dropping the future takes nothing back.
    pub async fn flush(&self) -> Flushed {
        let mut flushed = Flushed::default();
        for ticket in self.shared.strategies.flush(&self.shared) {
            let (stored, refused) = ticket.decided().await;
            flushed.stored += stored;
            flushed.refused += refused;
        }
        flushed
    }

    /// Messages that are queued now and that no shard has yet.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.shared.strategies.queues.iter().map(Queue::messages).sum()
    }

    /// Figures of the strategies.
    #[must_use]
    pub fn strategy_metrics(&self) -> Arc<StrategyMetrics> {
        self.shared.strategies.metrics.clone()
    }
}

impl Shared {
    /// Takes a unit of work if there is room now.
    pub(super) fn queue_now(self: &Arc<Self>, strategy: Strategy, unit: &Rows) -> Result<Share> {
        let shard = self.router.shard_of(unit.partition[0]);
        if !self.try_acquire(shard, unit.len())? {
            return Err(self.overloaded(shard));
        }
        self.queue_acquired(strategy, shard, unit)
    }

    /// Takes a unit of work whose rows have been acquired.
    pub(super) fn queue_acquired(self: &Arc<Self>, strategy: Strategy, shard: usize, unit: &Rows) -> Result<Share> {
        let (share, look) = self.strategies.queue(strategy).join(self, shard, unit, boot_time())?;
        if look {
            self.strategies.bell.notify_one();
        }
        Ok(share)
    }
}

/// The queues of an engine.
pub(super) struct Strategies {
    /// `Immediate` (and `Scoped`), `Interval`, `Batch`.
    queues: [Queue; 3],
    metrics: Arc<StrategyMetrics>,
    tasks: Handle,
    /// Rung when the moment to look at has changed.
    bell: Notify,
}

impl Strategies {
    pub(super) fn new(config: &Config, shards: usize, tasks: Handle) -> Self {
        let strategy = &config.strategy;
        let us = |ms: u64| ms.saturating_mul(1_000);
        let interval = Policy::Interval { interval_us: us(strategy.interval_ms), origin: boot_time() };
        let batch = Policy::Batch {
            size: strategy.batch_size,
            debounce_us: us(strategy.batch_debounce_ms),
            age_us_max: us(strategy.batch_age_ms_max),
        };
        let queues = [
            Queue::new(Strategy::Immediate, Policy::Immediate, shards),
            Queue::new(Strategy::Interval, interval, shards),
            Queue::new(Strategy::Batch, batch, shards),
        ];
        Self { queues, metrics: Arc::default(), tasks, bell: Notify::new() }
    }

    pub(super) fn metrics(&self) -> &StrategyMetrics {
        &self.metrics
    }

    fn queue(&self, strategy: Strategy) -> &Queue {
        match strategy {
            Strategy::Immediate | Strategy::Scoped => &self.queues[0],
            Strategy::Interval => &self.queues[1],
            Strategy::Batch => &self.queues[2],
        }
    }

    /// Starts the timer, until the engine is told to end.
    pub(super) fn drive(shared: &Arc<Shared>) {
        let shared_of = shared.clone();
        shared.strategies.tasks.spawn(async move {
            let shared = shared_of;
            let mut stopping = shared.stopped.subscribe();
            loop {
                let now = boot_time();
                let queues = &shared.strategies.queues;
                let at = queues.iter().map(|queue| queue.tick(&shared, now)).min().unwrap_or(Tick::NEVER);
                let rest = Duration::from_micros(at.since_us(now).min(3_600_000_000));
                tokio::select! {
                    () = shared.strategies.bell.notified() => {}
                    () = tokio::time::sleep(rest) => {}
                    _ = stopping.wait_for(|stopped| *stopped) => return,
                }
            }
        });
    }

    fn flush(&self, shared: &Arc<Shared>) -> Vec<Arc<Ticket>> {
        let now = boot_time();
        let tickets = self.queues.iter().flat_map(|queue| queue.flush(shared, now)).collect();
        // Where a ring was full the timer has to come back.
        self.bell.notify_one();
        tickets
    }

    /// The engine ends: hands over all that is queued, for as long as there is time (blocking).
    pub(super) fn end(&self, shared: &Arc<Shared>, deadline: Instant) -> Queued {
        let queued = self.queues.iter().flat_map(|queue| queue.end(shared, boot_time())).collect();
        while !self.queues.iter().all(|queue| queue.end_again(shared, boot_time())) {
            if Instant::now() >= deadline {
                self.queues.iter().for_each(|queue| queue.give_up(shared));
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Queued(queued)
    }

    /// The same where nobody waits: what finds a full ring has the error.
    pub(super) fn end_at_once(&self, shared: &Arc<Shared>) {
        for queue in &self.queues {
            queue.end(shared, boot_time());
            queue.give_up(shared);
        }
    }
}

/// What was queued when the end began.
#[derive(Default)]
pub(super) struct Queued(Vec<(Arc<Ticket>, Vec<Uuid>)>);

impl Queued {
    /// Adds what became of it.
    pub(super) async fn report(self, mut report: ShutdownReport) -> ShutdownReport {
        let all = async {
            for (ticket, _) in &self.0 {
                ticket.decided().await;
            }
        };
        // What a shard has that did not end in time has no outcome: it is not known.
        let _ = tokio::time::timeout(OUTCOMES, all).await;
        for (ticket, ids) in &self.0 {
            let unwritten = ticket.unwritten(ids);
            report.queued += ids.len();
            report.queued_unwritten += unwritten.len();
            let room = IDS_MAX - report.unwritten.len();
            report.unwritten.extend(unwritten.into_iter().take(room));
        }
        report
    }
}
