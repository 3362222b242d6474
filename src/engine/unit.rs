//! A unit of work: messages that commit together or not at all.
//!
//! Invariants
//! - Nothing is stored before [`UnitOfWork::commit`] (or [`UnitOfWork::flush`]); after it, all or nothing. (With
//!   [`Strategy::Immediate`] each push is a unit of its own, and is handed over at once.)
//! - What a flush could not store stays in the unit, unless it is not known whether it did.
//! - One that is dropped unfinished stores nothing, is counted, and said in the log, at most once a minute.
//! - One that is larger than a flush, or has more than 256 streams, goes over a connection of its own, in one
//!   transaction, and at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::strategy::{Rare, Share};
use super::{Engine, Receipt, bulk, exclusive, id_of, receipt};
use crate::batch::Rows;
use crate::config::Strategy;
use crate::error::{Error, Result};
use crate::limits::{STORE_ROWS_MAX, STREAM_LOCKS_MAX};
use crate::message::Enqueue;
use crate::time::boot_time;

static DROPPED: AtomicU64 = AtomicU64::new(0);
static SAID: Rare = Rare::new();

/// Whether there are more streams than one transaction may lock one by one.
pub(super) fn has_many_streams(rows: &Rows) -> bool {
    let mut streams = hashbrown::HashSet::new();
    (0..rows.len()).filter_map(|row| rows.stream_id(row)).any(|stream| {
        streams.insert(stream);
        streams.len() > STREAM_LOCKS_MAX
    })
}

/// See the module.
pub struct UnitOfWork {
    engine: Engine,
    strategy: Strategy,
    rows: Option<Arc<Rows>>,
    /// Of `Immediate`: what was handed over.
    handed: Vec<Share>,
}

impl UnitOfWork {
    pub(super) fn new(engine: Engine, strategy: Strategy) -> Self {
        Self { engine, strategy, rows: None, handed: Vec::new() }
    }

    /// Its strategy.
    #[must_use]
    pub fn strategy(&self) -> Strategy {
        self.strategy
    }

    /// Adds a message. Answers its id. With [`Strategy::Immediate`] the message is handed over at once, as a unit of its
    /// own; whether it was stored says the next [`UnitOfWork::flush`].
    ///
    /// # Errors
    /// A limit that it breaks; with [`Strategy::Immediate`] also [`Error::Overloaded`] and [`Error::ShutDown`]. The unit
    /// goes on without it.
    pub fn push<M: Enqueue + ?Sized>(&mut self, message: &M) -> Result<uuid::Uuid> {
        let shared = &self.engine.shared;
        let batch = self.rows.get_or_insert_with(|| shared.pool.take());
        let rows = exclusive(batch);
        let message_id = id_of(message);
        shared.refuse_beyond_unit(rows, message_id)?;
        shared.router.write(rows, message, message_id)?;
        if self.strategy == Strategy::Immediate {
            let taken = shared.queue_now(self.strategy, rows);
            rows.clear();
            self.handed.push(taken?);
        }
        Ok(message_id)
    }

    /// Messages in it that are not handed over.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.as_ref().map_or(0, |rows| rows.len())
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Units of work that were dropped unfinished since the process began, over all engines.
    #[must_use]
    pub fn dropped_count() -> u64 {
        DROPPED.load(Ordering::Relaxed)
    }

    /// Stores all of it; one receipt a message, in order. Waits for its strategy's turn, and while the shard is full.
    /// Dropping the future does not take the unit back once its shard or its queue has it.
    ///
    /// # Errors
    /// The engine has ended, or what the database said. Nothing was stored then, unless the error says that it was,
    /// or that this is not known. (With [`Strategy::Immediate`] the first error of a push; the others are stored.)
    pub async fn commit(mut self) -> Result<Vec<Receipt>> {
        let stored = self.flush().await;
        self.roll_back();
        stored
    }

    /// The same for what was pushed so far: the unit goes on, empty. Where nothing was stored, what it had is still in
    /// it, under the same ids: it can be flushed again. So it can if the future is dropped while the shard is full.
    ///
    /// # Errors
    /// Those of [`UnitOfWork::commit`].
    pub async fn flush(&mut self) -> Result<Vec<Receipt>> {
        if self.strategy == Strategy::Immediate {
            return self.await_handed().await;
        }
        let Some(rows) = self.rows.as_deref().filter(|rows| !rows.is_empty()) else { return Ok(Vec::new()) };
        // Until there is room the unit is as it was: who stops waiting has lost nothing.
        let shard = if self.fits(rows) { Some(self.acquire(rows).await?) } else { None };
        let mut batch = self.rows.take().unwrap_or_default();
        exclusive(&mut batch).end_unit();
        let outcome = match (shard, self.strategy) {
            (Some(shard), Strategy::Interval | Strategy::Batch) => self.queue(shard, batch).await,
            (Some(shard), _) => self.hand_over(shard, batch).await,
            (None, _) => match bulk::commit(&self.engine, batch.clone()).await {
                Ok(receipts) => {
                    self.engine.announce();
                    Ok(receipts)
                }
                Err(error) => Err((error, batch)),
            },
        };
        outcome.map_err(|(error, batch)| {
            self.keep(&error, batch);
            error
        })
    }

    /// Forgets what is in it: nothing of that is stored.
    pub fn roll_back(mut self) {
        self.clear();
    }

    fn fits(&self, rows: &Rows) -> bool {
        let config = &self.engine.shared.config;
        rows.len() <= config.flush.rows_max.min(STORE_ROWS_MAX).min(config.ring.rows_max)
            && rows.arena.len() <= config.flush.bytes_max.max(1 << 20)
            && !has_many_streams(rows)
    }

    async fn await_handed(&mut self) -> Result<Vec<Receipt>> {
        let mut receipts = Vec::with_capacity(self.handed.len());
        let mut failed = None;
        for share in std::mem::take(&mut self.handed) {
            match share.receipts().await {
                Ok(stored) => receipts.extend(stored),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(receipts), Err)
    }

    async fn queue(&self, shard: usize, batch: Arc<Rows>) -> Outcome {
        let shared = &self.engine.shared;
        // The queue has a copy; should that not be stored, this is what stays.
        let stored = match shared.queue_acquired(self.strategy, shard, &batch) {
            Ok(share) => share.receipts().await,
            Err(error) => Err(error),
        };
        match stored {
            Ok(receipts) => {
                shared.pool.give(batch);
                Ok(receipts)
            }
            Err(error) => Err((error, batch)),
        }
    }

    async fn hand_over(&self, shard: usize, batch: Arc<Rows>) -> Outcome {
        let shared = &self.engine.shared;
        let count = batch.len();
        let answer = match shared.hand(shard, batch) {
            Ok(answer) => answer,
            Err(batch) => {
                shared.shards[shard].budget.release(count);
                let ended = *shared.stopped.borrow() || shared.shards[shard].ring.is_closed();
                return Err((if ended { Error::ShutDown } else { shared.overloaded(shard) }, batch));
            }
        };
        let Ok(mut reply) = answer.await else { return Err((super::not_known(), Arc::default())) };
        match reply.refused.pop() {
            Some((_, error)) => Err((error, reply.rows)),
            None => {
                let receipts = (0..count).map(|row| receipt(&reply.rows, row)).collect();
                // What lies in partitions of sibling shards is found by their claims.
                shared.announce_to(
                    reply.rows.partition.iter().map(|partition| shared.router.shard_of(*partition)),
                    shard,
                );
                shared.pool.give(reply.rows);
                Ok(receipts)
            }
        }
    }

    /// Waits for room at the unit's shard.
    async fn acquire(&self, rows: &Rows) -> Result<usize> {
        let shared = &self.engine.shared;
        let shard = shared.router.shard_of(rows.partition[0]);
        if shared.acquire(shard, rows.len()).await? { Ok(shard) } else { Err(shared.overloaded(shard)) }
    }

    /// Takes back what was not stored. Of what may have been stored another try could make a second copy.
    fn keep(&mut self, error: &Error, mut batch: Arc<Rows>) {
        if !matches!(error, Error::OutcomeUnknown { .. } | Error::StoredUnnumbered { .. }) {
            if Arc::get_mut(&mut batch).is_none() {
                // The thread of a large unit has not let go of it yet.
                let mut copy = Rows::default();
                (0..batch.len()).for_each(|row| copy.push_copy(&batch, row));
                batch = Arc::new(copy);
            }
            // Open again: what is pushed from here on belongs to it.
            exclusive(&mut batch).unit_end.clear();
            self.rows = Some(batch);
        } else {
            self.engine.shared.pool.give(batch);
        }
    }

    fn clear(&mut self) {
        if let Some(rows) = self.rows.take() {
            self.engine.shared.pool.give(rows);
        }
    }
}

/// Receipts, or the error and what was not stored.
type Outcome = std::result::Result<Vec<Receipt>, (Error, Arc<Rows>)>;

impl Drop for UnitOfWork {
    fn drop(&mut self) {
        if !self.is_empty() {
            DROPPED.fetch_add(1, Ordering::Relaxed);
            self.engine.shared.strategies.metrics().units_dropped.add(1);
            if let Some(unsaid) = SAID.say(boot_time()) {
                tracing::warn!(
                    unsaid,
                    "a unit of work was dropped without commit(): nothing of it was stored (said once a minute; counted)"
                );
            }
        }
        self.clear();
    }
}
