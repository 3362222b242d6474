//! Many independent messages in one call.
//!
//! Invariants
//! - One outcome a message, in the order given.
//! - Messages of one stream keep their order: they go to one shard in order.
//! - Memory is bounded by the shards' budgets and by what is in hand here: a million messages are fine. The
//!   outcomes are the only thing that grows.

use std::collections::VecDeque;
use std::sync::Arc;

use futures_channel::oneshot;

use super::{Engine, Receipt, exclusive, id_of, receipt};
use crate::batch::{Pool, Rows};
use crate::error::{Error, Result};
use crate::message::Enqueue;
use crate::shard::SubmissionReply;

/// Batches of one call that are in the shards' hands at the same time, by shard.
const OUTSTANDING_MAX: usize = 8;

struct Outstanding {
    answer: oneshot::Receiver<SubmissionReply>,
    /// For each row, the message's place in the call.
    places: Vec<u32>,
}

#[derive(Default)]
struct Open {
    batch: Option<Arc<Rows>>,
    places: Vec<u32>,
}

impl Engine {
    /// Stores independent messages, each a unit of work of its own, and answers one outcome a message in the order
    /// given. They go to the shards in batches of up to `flush.rows_max` rows and `flush.bytes_max` bytes. Waits while
    /// the shards are full. Dropping the future does not take back what the shards have.
    pub async fn enqueue_many<M: Enqueue>(&self, messages: impl IntoIterator<Item = M>) -> Vec<Result<Receipt>> {
        let shared = &self.shared;
        let router = shared.router;
        let chunk_rows = shared.config.flush.rows_max.min(shared.config.ring.rows_max);
        let chunk_bytes = shared.config.flush.bytes_max;
        let mut outcomes: Vec<Option<Result<Receipt>>> = Vec::new();
        let mut open: Vec<Open> = (0..shared.shards.len()).map(|_| Open::default()).collect();
        let mut outstanding: VecDeque<Outstanding> = VecDeque::new();
        for message in messages {
            let place = outcomes.len() as u32;
            outcomes.push(None);
            let message_id = id_of(&message);
            let shard = router.shard_of(router.partition(&message, message_id));
            let batch = open[shard].batch.get_or_insert_with(|| shared.pool.take());
            let rows = exclusive(batch);
            if let Err(error) = router.write(rows, &message, message_id) {
                outcomes[place as usize] = Some(Err(error));
                continue;
            }
            rows.end_unit();
            let full = rows.len() >= chunk_rows || rows.arena.len() >= chunk_bytes;
            open[shard].places.push(place);
            if full {
                while outstanding.len() >= OUTSTANDING_MAX * open.len() {
                    settle(&shared.pool, outstanding.pop_front(), &mut outcomes).await;
                }
                self.send(shard, &mut open[shard], &mut outstanding, &mut outcomes).await;
            }
        }
        for (shard, open) in open.iter_mut().enumerate() {
            self.send(shard, open, &mut outstanding, &mut outcomes).await;
        }
        while let Some(next) = outstanding.pop_front() {
            settle(&shared.pool, Some(next), &mut outcomes).await;
        }
        outcomes.into_iter().map(|outcome| outcome.unwrap_or(Err(Error::ShutDown))).collect()
    }

    async fn send(
        &self,
        shard: usize,
        open: &mut Open,
        outstanding: &mut VecDeque<Outstanding>,
        outcomes: &mut [Option<Result<Receipt>>],
    ) {
        let places = std::mem::take(&mut open.places);
        let Some(batch) = open.batch.take() else { return };
        let count = batch.len();
        if count == 0 {
            self.shared.pool.give(batch);
            return;
        }
        let submitted = match self.shared.acquire(shard, count).await {
            Ok(true) => self.shared.submit(shard, batch, count),
            refused => {
                self.shared.pool.give(batch);
                Err(refused.err().unwrap_or_else(|| self.shared.overloaded(shard)))
            }
        };
        match submitted {
            Ok(answer) => outstanding.push_back(Outstanding { answer, places }),
            Err(error) => {
                for place in places {
                    outcomes[place as usize] = Some(Err(repeat(&error)));
                }
            }
        }
    }
}

async fn settle(pool: &Pool, next: Option<Outstanding>, outcomes: &mut [Option<Result<Receipt>>]) {
    let Some(Outstanding { answer, places }) = next else { return };
    let Ok(reply) = answer.await else {
        for place in places {
            outcomes[place as usize] = Some(Err(super::not_known()));
        }
        return;
    };
    for (row, place) in places.iter().enumerate() {
        outcomes[*place as usize] = Some(Ok(receipt(&reply.rows, row)));
    }
    // Each message is a unit of its own here.
    for (unit, error) in reply.refused {
        outcomes[places[unit as usize] as usize] = Some(Err(error));
    }
    pool.give(reply.rows);
}

/// The error that a whole batch met, for one of its messages.
fn repeat(error: &Error) -> Error {
    match error {
        Error::Overloaded { shard, rows_max } => Error::Overloaded { shard: *shard, rows_max: *rows_max },
        _ => Error::ShutDown,
    }
}
