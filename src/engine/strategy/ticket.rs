//! What callers hold of a batch that a strategy queued: one ticket a batch, a share of it a unit of work.
//!
//! Invariants
//! - Every unit has one outcome: its receipts after the commit, or its own error. It is there once the shard has
//!   answered, or can answer no more.
//! - A refusal that nobody reads is counted, and said in the log, at most once a minute.
//! - Joining a batch allocates nothing: a share is a reference and three numbers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;
use uuid::Uuid;

use super::super::{Receipt, receipt};
use super::rare::Rare;
use crate::batch::{Pool, Rows};
use crate::error::{Error, Result};
use crate::metrics::StrategyMetrics;
use crate::shard::SubmissionReply;
use crate::time::boot_time;

static UNREAD: Rare = Rare::new();

/// What became of a batch.
enum Outcome {
    /// The rows, numbered, and what was refused of them, by unit; `None` once its caller has taken the error.
    Answered { rows: Arc<Rows>, refused: Vec<(u32, Option<Error>)> },
    /// The same error for each unit; and how many have not taken it.
    Gone { error: fn() -> Error, unread: usize },
}

/// A batch as its callers see it.
pub(super) struct Ticket {
    pool: Arc<Pool>,
    metrics: Arc<StrategyMetrics>,
    outcome: Mutex<Option<Outcome>>,
    /// Messages stored, and refused or unknown: set before `told`.
    stored: AtomicUsize,
    refused: AtomicUsize,
    told: Notify,
}

impl Ticket {
    pub(super) fn new(pool: Arc<Pool>, metrics: Arc<StrategyMetrics>) -> Self {
        let (outcome, told) = (Mutex::new(None), Notify::new());
        Self { pool, metrics, outcome, stored: AtomicUsize::new(0), refused: AtomicUsize::new(0), told }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Option<Outcome>) -> T) -> T {
        work(&mut self.outcome.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn is_decided(&self) -> bool {
        self.with(|outcome| outcome.is_some())
    }

    /// The shard has answered.
    pub(super) fn answer(&self, reply: SubmissionReply) {
        let SubmissionReply { rows, refused } = reply;
        let ends = &rows.unit_end;
        let messages_of = |unit: usize| ends[unit] - unit.checked_sub(1).map_or(0, |before| ends[before]);
        let lost: usize = refused.iter().map(|(unit, _)| messages_of(*unit as usize) as usize).sum();
        let refused = refused.into_iter().map(|(unit, error)| (unit, Some(error))).collect();
        self.decide(rows.len() - lost, lost, Outcome::Answered { rows, refused });
    }

    /// Nobody answers any more: the same error for all of so many units and messages.
    pub(super) fn give_up(&self, units: usize, messages: usize, error: fn() -> Error) {
        self.decide(0, messages, Outcome::Gone { error, unread: units });
    }

    fn decide(&self, stored: usize, refused: usize, outcome: Outcome) {
        self.with(|place| {
            if place.is_none() {
                self.stored.store(stored, Ordering::Release);
                self.refused.store(refused, Ordering::Release);
                self.metrics.messages_refused.add(refused as u64);
                *place = Some(outcome);
            }
        });
        self.told.notify_waiters();
    }

    /// Waits until it is known what became of it. Answers how many messages were stored, and how many not.
    pub(super) async fn decided(&self) -> (usize, usize) {
        loop {
            let mut told = std::pin::pin!(self.told.notified());
            // Queue up before looking: who decides after the look finds us.
            told.as_mut().enable();
            if self.is_decided() {
                return (self.stored.load(Ordering::Acquire), self.refused.load(Ordering::Acquire));
            }
            told.await;
        }
    }

    /// Of messages with these ids, in the batch's order: those that are not known to be stored.
    pub(super) fn unwritten(&self, ids: &[Uuid]) -> Vec<Uuid> {
        self.with(|outcome| match outcome {
            Some(Outcome::Answered { rows, refused }) => {
                let of_unit = |(unit, _): &(u32, Option<Error>)| unit_rows(rows, *unit as usize);
                refused.iter().flat_map(of_unit).map(|row| rows.message_id[row]).collect()
            }
            Some(Outcome::Gone { .. }) | None => ids.to_vec(),
        })
    }
}

fn unit_rows(rows: &Rows, unit: usize) -> std::ops::Range<usize> {
    let start = unit.checked_sub(1).map_or(0, |before| rows.unit_end[before] as usize);
    start..rows.unit_end[unit] as usize
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let unread = match self.outcome.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            Some(Outcome::Answered { rows, mut refused }) => {
                self.pool.give(rows);
                refused.retain(|(_, error)| error.is_some());
                if let Some((_, Some(error))) = refused.first() {
                    say(refused.len(), error);
                }
                refused.len()
            }
            Some(Outcome::Gone { error, unread }) if unread > 0 => {
                say(unread, &error());
                unread
            }
            Some(Outcome::Gone { .. }) | None => 0,
        };
        self.metrics.refusals_unread.add(unread as u64);
    }
}

fn say(units: usize, error: &Error) {
    if let Some(unsaid) = UNREAD.say(boot_time()) {
        tracing::error!(units, unsaid, %error, "queued units of work were not stored, and nobody asked: read what push() answers");
    }
}

/// A unit's part of a ticket.
pub(in super::super) struct Share {
    pub(super) ticket: Arc<Ticket>,
    pub(super) unit: u32,
    pub(super) first_row: u32,
    pub(super) rows: u32,
}

impl Share {
    /// One receipt a message, in order, after the commit.
    pub(in super::super) async fn receipts(self) -> Result<Vec<Receipt>> {
        self.ticket.decided().await;
        self.read(|rows, from, end| (from..end).map(|row| receipt(rows, row)).collect())
    }

    async fn receipt(self) -> Result<Receipt> {
        self.ticket.decided().await;
        self.read(|rows, from, _| receipt(rows, from))
    }

    fn read<T>(&self, stored: impl FnOnce(&Rows, usize, usize) -> T) -> Result<T> {
        let (from, end) = (self.first_row as usize, (self.first_row + self.rows) as usize);
        self.ticket.with(|outcome| match outcome {
            Some(Outcome::Answered { rows, refused }) => {
                match refused.binary_search_by_key(&self.unit, |(unit, _)| *unit) {
                    Ok(at) => Err(refused[at].1.take().unwrap_or_else(super::super::not_known)),
                    Err(_) => Ok(stored(rows, from, end)),
                }
            }
            Some(Outcome::Gone { error, unread }) => {
                *unread = unread.saturating_sub(1);
                Err(error())
            }
            None => Err(super::super::not_known()),
        })
    }
}

/// A message that its strategy has taken. It is stored whether this is kept or not; what became of it is here.
pub struct Pushed {
    pub(super) share: Share,
    pub(super) message_id: Uuid,
}

impl Pushed {
    /// Its id.
    #[must_use]
    pub fn message_id(&self) -> Uuid {
        self.message_id
    }

    /// Whether [`Pushed::stored`] would answer at once.
    #[must_use]
    pub fn is_decided(&self) -> bool {
        self.share.ticket.is_decided()
    }

    /// Waits for the commit.
    ///
    /// # Errors
    /// What the database said, or could not say any more, as of [`super::super::Engine::enqueue`].
    pub async fn stored(self) -> Result<Receipt> {
        self.share.receipt().await
    }
}

impl std::fmt::Debug for Pushed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pushed").field("message_id", &self.message_id).finish_non_exhaustive()
    }
}
