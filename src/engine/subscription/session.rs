//! One connection's life of a subscription's member: what it has, what is out, and when to do what next.
//!
//! Invariant: the run of a batch that is out is in the batch and nowhere else, until it is known what became of it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio_postgres::Client;
use uuid::Uuid;

use super::{BatchEnd, DONE, OPEN};
use crate::plan::follow::{Run, Runs};
use crate::store::subscriptions::Membership;

/// Wait before a failed call or connection is tried again, at first and at most.
pub(super) const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// A batch that was handed out.
pub(super) struct Out {
    pub(super) end: Arc<BatchEnd>,
    /// Where its run stood before.
    pub(super) before: Run,
    pub(super) attempt: u32,
    pub(super) not_before: Instant,
}

/// One connection's life.
pub(super) struct Session {
    pub(super) client: Client,
    pub(super) member: Membership,
    pub(super) epoch: Option<Uuid>,
    pub(super) runs: Runs,
    pub(super) out: Option<Out>,
    pub(super) give_up: Vec<i32>,
    /// Another batch is asked for: what became of the one before has to be found out, once.
    pub(super) asked: bool,
    /// A page was answered: the connection is good for what it is for.
    pub(super) has_read: bool,
    pub(super) look_at: Instant,
    pub(super) write_at: Instant,
    pub(super) read_at: Instant,
    /// When the indexes are to be brought up to date; `None`: nothing has been stored since.
    pub(super) summarize_at: Option<Instant>,
    /// The page up to which they are; `None`: not known.
    pub(super) summarized_to: Option<i64>,
}

impl Session {
    /// When to do something unasked.
    pub(super) fn due(&self, wants: bool) -> Instant {
        let mut due = self.summarize_at.map_or(self.look_at, |at| at.min(self.look_at));
        if self.out.is_none() {
            if self.runs.runs.iter().any(|run| run.moved) {
                due = due.min(self.write_at);
            }
            if wants {
                due = due.min(self.read_at);
            }
        } else if wants && let Some(out) = &self.out {
            due = due.min(out.not_before);
        }
        due
    }

    /// The batch's place is its run's.
    pub(super) fn done(&mut self, out: &Out, fences_by: i64) {
        let mut run = out.end.run.clone();
        run.held.iter_mut().for_each(|held| held.fence += fences_by);
        run.moved = fences_by == 0;
        self.runs.runs.push(run);
        // What the last look has said of them is old.
        self.look_at = if self.give_up.is_empty() { self.look_at } else { Instant::now() };
    }

    /// A batch that is done, or that nobody has any more while its partitions are to go, waits for no question.
    pub(super) fn settle_unasked(&mut self) {
        let gives_up = !self.give_up.is_empty();
        let Some(out) = self.out.take() else { return };
        match out.end.state.load(Ordering::Acquire) {
            DONE => self.done(&out, 0),
            OPEN if gives_up && Arc::strong_count(&out.end) == 1 => {
                self.runs.runs.push(out.before);
                self.read_at = Instant::now();
            }
            _ => self.out = Some(out),
        }
    }

    /// It comes again, after a pause.
    pub(super) fn again(&mut self, mut out: Out) {
        let pause = RETRY.0 * 2_u32.saturating_pow(out.attempt.saturating_sub(1)).min(64);
        out.not_before = Instant::now() + pause.min(RETRY.1);
        self.out = Some(out);
    }

    /// From what is written down.
    pub(super) fn drop_all(&mut self) {
        self.runs = Runs::default();
        self.out = None;
        self.give_up.clear();
        self.look_at = Instant::now();
    }
}
