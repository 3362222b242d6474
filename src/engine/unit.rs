//! A unit of work: messages that commit together or not at all.
//!
//! Invariants
//! - Nothing is stored before [`UnitOfWork::commit`]; after it, all or nothing.
//! - One that is dropped without a commit stores nothing, is counted, and said once in the log.
//! - One that is larger than a flush, or has more than 256 streams, goes over a connection of its own, in one
//!   transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{Engine, Receipt, bulk, exclusive, id_of, receipt};
use crate::batch::Rows;
use crate::error::Result;
use crate::limits::{STORE_ROWS_MAX, STREAM_LOCKS_MAX};
use crate::message::Enqueue;

static DROPPED: AtomicU64 = AtomicU64::new(0);
static SAID: AtomicBool = AtomicBool::new(false);

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
    rows: Option<Arc<Rows>>,
}

impl UnitOfWork {
    pub(super) fn new(engine: Engine) -> Self {
        Self { engine, rows: None }
    }

    /// Adds a message. Answers its id.
    ///
    /// # Errors
    /// A limit that it breaks. The unit goes on without it.
    pub fn push<M: Enqueue + ?Sized>(&mut self, message: &M) -> Result<uuid::Uuid> {
        let shared = &self.engine.shared;
        let batch = self.rows.get_or_insert_with(|| shared.pool.take());
        let rows = exclusive(batch);
        let message_id = id_of(message);
        shared.refuse_beyond_unit(rows, message_id)?;
        shared.router.write(rows, message, message_id)?;
        Ok(message_id)
    }

    /// Messages in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.as_ref().map_or(0, |rows| rows.len())
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Units of work that were dropped without a commit since the process began.
    #[must_use]
    pub fn dropped_count() -> u64 {
        DROPPED.load(Ordering::Relaxed)
    }

    /// Stores all of it; one receipt a message, in order. Waits while the shard is full. Dropping the future does not
    /// take the unit back once the shard has it.
    ///
    /// # Errors
    /// The engine has ended, or what the database said. Nothing was stored then, unless the error says that it was,
    /// or that this is not known.
    pub async fn commit(mut self) -> Result<Vec<Receipt>> {
        let Some(mut batch) = self.rows.take() else { return Ok(Vec::new()) };
        let rows = exclusive(&mut batch);
        rows.end_unit();
        let (count, bytes) = (rows.len(), rows.arena.len());
        if count == 0 {
            return Ok(Vec::new());
        }
        let shared = &self.engine.shared;
        let config = &shared.config;
        let fits = count <= config.flush.rows_max.min(STORE_ROWS_MAX).min(config.ring.rows_max)
            && bytes <= config.flush.bytes_max.max(1 << 20)
            && !has_many_streams(rows);
        if !fits {
            let receipts = bulk::commit(&self.engine, batch).await?;
            self.engine.announce();
            return Ok(receipts);
        }
        let shard = shared.router.shard_of(rows.partition[0]);
        match shared.acquire(shard, count).await {
            Ok(true) => {}
            refused => {
                shared.pool.give(batch);
                refused?;
                return Err(shared.overloaded(shard));
            }
        }
        let answer = shared.submit(shard, batch, count)?;
        let mut reply = answer.await.map_err(|_| super::not_known())?;
        match reply.refused.pop() {
            Some((_, error)) => {
                shared.pool.give(reply.rows);
                Err(error)
            }
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
}

impl Drop for UnitOfWork {
    fn drop(&mut self) {
        if self.rows.as_ref().is_some_and(|rows| !rows.is_empty()) {
            DROPPED.fetch_add(1, Ordering::Relaxed);
            if !SAID.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    "a unit of work was dropped without commit(): nothing of it was stored (said once; counted)"
                );
            }
        }
        if let Some(rows) = self.rows.take() {
            self.engine.shared.pool.give(rows);
        }
    }
}
