//! The broker's half of the sink's process: orders in, answers out.
//!
//! Invariants
//! - A client is served by connections; when one on which it received ends, what the client holds comes again.
//! - Publishing misbehaves as the sink is told to (`sink::server`); what it calls accepted is in the queue.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::{Notify, watch};

use super::frames::{Order, Whole};
use super::store::StoredQueues;
use crate::failure::{Failure, Result};

/// Queues, and who waits for them.
#[derive(Debug)]
pub struct Broker {
    stored: Mutex<StoredQueues>,
    came: Notify,
    hung_up: watch::Sender<u64>,
    began: Instant,
}

/// A lock that ends while somebody waits is noticed so soon.
const LOOK: Duration = Duration::from_millis(50);

impl Broker {
    /// Opens its journal; its locks last so long, in milliseconds.
    ///
    /// # Errors
    /// Of the file.
    pub fn open(journal: &Path, lock_ms: u64) -> Result<Self> {
        let mut stored = StoredQueues::open(journal)?;
        stored.queues.lock_for(lock_ms);
        let stored = Mutex::new(stored);
        Ok(Self { stored, came: Notify::new(), hung_up: watch::Sender::new(0), began: Instant::now() })
    }

    /// Ends when all connections are to be hung up.
    pub async fn hung_up(&self) {
        // An error means that the broker has gone, which ends connections as well.
        let _ = self.hung_up.subscribe().changed().await;
    }

    /// Takes messages that the sink has accepted.
    ///
    /// # Errors
    /// Of the journal.
    pub fn publish(&self, queue: &str, messages: Vec<Whole>) -> Result<()> {
        self.locked().publish(queue, messages)?;
        self.came.notify_waiters();
        Ok(())
    }

    /// A client has gone.
    pub fn disconnect(&self, client: u64) {
        self.locked().queues.disconnect(client);
        self.came.notify_waiters();
    }

    /// What an order is answered by; publishing is the sink's.
    ///
    /// # Errors
    /// Of the journal.
    pub async fn answer(&self, order: Order) -> Result<Vec<u8>> {
        match order {
            Order::Publish { queue, messages } | Order::Arrive { queue, messages } => {
                let answers = vec![0; messages.len()];
                self.publish(&queue, messages)?;
                Ok(answers)
            }
            Order::Receive { client, queue, rows_max, wait_ms } => {
                let until = Instant::now() + Duration::from_millis(wait_ms.into());
                loop {
                    // Before the look: what comes meanwhile is not missed.
                    let came = self.came.notified();
                    let given = self.locked().queues.receive(client, &queue, rows_max as usize, self.now_ms());
                    let left = until.saturating_duration_since(Instant::now());
                    if !given.is_empty() || left.is_zero() {
                        return form(&given);
                    }
                    // A time-out is a look as well.
                    let _ = tokio::time::timeout(left.min(LOOK), came).await;
                }
            }
            Order::Settle { client, settled } => {
                let held = self.locked().settle(client, &settled, self.now_ms())?;
                self.came.notify_waiters();
                form(&held)
            }
            Order::Renew { client, receipts } => form(&self.locked().queues.renew(client, &receipts, self.now_ms())),
            Order::Misbehave(faults) => {
                self.locked().queues.misbehave(faults);
                Ok(Vec::new())
            }
            Order::HangUp => {
                self.hung_up.send_modify(|count| *count += 1);
                Ok(Vec::new())
            }
            Order::States => {
                let mut stored = self.locked();
                stored.queues.expire(self.now_ms());
                form(&stored.queues.states())
            }
        }
    }

    fn locked(&self) -> MutexGuard<'_, StoredQueues> {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

fn form(answer: &impl Serialize) -> Result<Vec<u8>> {
    postcard::to_allocvec(answer).map_err(|error| Failure::Broken(error.to_string()))
}
