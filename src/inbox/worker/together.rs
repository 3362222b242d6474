//! Handlers that are started together: one task, one place, one message to the worker for all of them.
//!
//! Invariants
//! - Only what ends at once is handled together: behind one that waits, or takes its time, nothing stays that has not begun.
//!   It goes back to the worker, in its order, whether the one in front ends or not.
//! - How many start together follows from how the last ones did: one at a time until they end at once.
//!
//! A handler that has nothing to wait for takes a microsecond, a task of its own, its wake-up and its answer several.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::poll;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::super::commit::Rules;
use super::super::handler::{Handler, HandlerError};
use super::Finished;
use crate::batch::Rows;
use crate::seam::receiver::Delivery;
use crate::time::{Tick, boot_time};

/// So many at most.
const TOGETHER_MAX: usize = 256;
/// What takes longer than this is not quick: fewer start together then.
const QUICK_US: u64 = 1_000;
/// What has not begun after so long is taken away from a handler that holds it up.
pub(super) const TAKEN_AWAY_MS: u64 = 10;

/// One to be handled.
pub(super) struct Job {
    pub run: u64,
    pub handler: Arc<dyn Handler>,
    pub delivery: Arc<Delivery>,
    pub attempts: i32,
}

/// What became of some.
#[derive(Default)]
pub(super) struct Ended {
    pub finished: Vec<Finished>,
    /// They have not begun: first the first.
    pub unstarted: Vec<u64>,
    /// Whether it is known by now that they ended at once, or did not.
    pub are_quick: Option<bool>,
    /// These have ended altogether.
    pub group: Option<u64>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    finished: Vec<Finished>,
}

/// Handlers that start together.
pub(super) struct Together {
    pub group: u64,
    began: Tick,
    state: Mutex<State>,
}

impl Together {
    pub(super) fn new(group: u64, jobs: VecDeque<Job>) -> Arc<Self> {
        let finished = Vec::with_capacity(jobs.len());
        Arc::new(Self { group, began: boot_time(), state: Mutex::new(State { waiting: jobs, finished }) })
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The outcome of the one before, and the next.
    fn next(&self, before: Option<Finished>) -> Option<Job> {
        let mut state = self.locked();
        state.finished.extend(before);
        state.waiting.pop_front()
    }

    /// What has ended, and what has not begun: not its runner's any more.
    fn take(&self) -> Ended {
        let state = std::mem::take(&mut *self.locked());
        let unstarted = state.waiting.iter().map(|job| job.run).collect();
        Ended { finished: state.finished, unstarted, ..Ended::default() }
    }

    /// The same, if what is behind the one that runs waits for too long.
    pub(super) fn take_late(&self, now: Tick) -> Option<Ended> {
        let is_late = self.began.plus_ms(TAKEN_AWAY_MS) <= now && !self.locked().waiting.is_empty();
        is_late.then(|| Ended { are_quick: Some(false), ..self.take() })
    }

    /// Runs them, one after the other.
    pub(super) async fn run(
        self: Arc<Self>,
        rules: Arc<Rules>,
        place: OwnedSemaphorePermit,
        ended: mpsc::UnboundedSender<Ended>,
    ) {
        let mut before = None;
        let mut has_waited = false;
        while let Some(job) = self.next(before.take()) {
            let mut context = rules.context(&job.delivery, job.attempts, None);
            let outcome = {
                let mut call = pin!(rules.run(&*job.handler, &job.delivery, &mut context));
                match poll!(call.as_mut()) {
                    std::task::Poll::Ready(outcome) => outcome,
                    std::task::Poll::Pending => {
                        has_waited = true;
                        // A worker that has ended does not mind, here and below.
                        let _ = ended.send(Ended { are_quick: Some(false), ..self.take() });
                        call.await
                    }
                }
            };
            before = Some(Finished { run: job.run, outcome: emitted(outcome, context.rows) });
        }
        let is_quick = boot_time().since_us(self.began) <= QUICK_US;
        let are_quick = (!has_waited).then_some(is_quick);
        let _ = ended.send(Ended { group: Some(self.group), are_quick, ..self.take() });
        drop(place);
    }
}

fn emitted(outcome: Result<(), HandlerError>, rows: Rows) -> Result<Option<Box<Rows>>, HandlerError> {
    outcome.map(|()| (!rows.is_empty()).then(|| Box::new(rows)))
}

/// How many start together next.
pub(super) fn next_size(size: usize, are_quick: bool) -> usize {
    if are_quick { (size * 2).min(TOGETHER_MAX) } else { (size / 4).max(1) }
}
