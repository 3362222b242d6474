//! One strategy's queue: units of work in the order in which they came, an open batch a shard.
//!
//! Invariants
//! - Rows in it count as in hand at their shard (`ring.rows_max`): queue and shard together are bounded.
//! - Units of one stream are handed over in the order in which they joined: joining and handing over happen under one
//!   lock, and a batch that a full ring gives back stays where it is, with what comes behind it.
//! - Nothing leaves without an outcome. After the end nothing joins.
//! - No user code runs under the lock: messages are written before.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_channel::oneshot;
use uuid::Uuid;

use super::super::{Shared, exclusive, not_known};
use super::ticket::{Share, Ticket};
use crate::batch::Rows;
use crate::config::Strategy;
use crate::error::{Error, Result};
use crate::plan::strategy::{Due, Pace, Policy, Trigger};
use crate::shard::SubmissionReply;
use crate::time::Tick;

/// Where a ring was full, the next try.
const RETRY_US: u64 = 1_000;

struct Open {
    rows: Arc<Rows>,
    ticket: Arc<Ticket>,
}

struct State {
    pace: Pace,
    open: Vec<Option<Open>>,
    handed_count: u64,
    /// A ring was full: not before this moment again.
    retry_at: Option<Tick>,
    ended: bool,
}

/// See the module.
pub(super) struct Queue {
    strategy: Strategy,
    state: Mutex<State>,
    /// Batches that shards have, and have not answered, by the order of their handing over. Locked last.
    handed: Mutex<BTreeMap<u64, Arc<Ticket>>>,
}

impl Queue {
    pub(super) fn new(strategy: Strategy, policy: Policy, shards: usize) -> Self {
        let state = State {
            pace: Pace::new(policy),
            open: (0..shards).map(|_| None).collect(),
            handed_count: 0,
            retry_at: None,
            ended: false,
        };
        Self { strategy, state: Mutex::new(state), handed: Mutex::default() }
    }

    fn handed(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Ticket>>> {
        self.handed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Messages queued now.
    pub(super) fn messages(&self) -> usize {
        self.lock().pace.messages()
    }

    /// A unit of work joins; its rows have been acquired at the shard, and are given back with an error. Answers also
    /// whether the driver has to look at the time anew.
    pub(super) fn join(&self, shared: &Arc<Shared>, shard: usize, unit: &Rows, now: Tick) -> Result<(Share, bool)> {
        let mut guard = self.lock();
        let state = &mut *guard;
        let refused = |error| {
            shared.shards[shard].budget.release(unit.len());
            Err(error)
        };
        if state.ended {
            return refused(Error::ShutDown);
        }
        let flush = &shared.config.flush;
        let beyond = |open: &Option<Open>, rows_max: usize, bytes_max: usize| {
            let Some(Open { rows, .. }) = open else { return false };
            rows.len() + unit.len() > rows_max || rows.arena.len() + unit.arena.len() > bytes_max
        };
        if beyond(&state.open[shard], flush.rows_max, flush.bytes_max) {
            self.hand_over(shared, state, shard, Trigger::FullFlush, now);
            // The ring was full. A batch has its limits, too.
            if beyond(&state.open[shard], usize::MAX, shared.config.unit.bytes_max) {
                return refused(shared.overloaded(shard));
            }
        }
        let open = state.open[shard].get_or_insert_with(|| {
            let ticket = Ticket::new(shared.pool.clone(), shared.strategies.metrics.clone());
            Open { rows: shared.pool.take(), ticket: Arc::new(ticket) }
        });
        let rows = exclusive(&mut open.rows);
        let first_row = rows.len();
        (0..unit.len()).for_each(|row| rows.push_copy(unit, row));
        rows.end_unit();
        let share = Share {
            ticket: open.ticket.clone(),
            unit: rows.unit_end.len() as u32 - 1,
            first_row: first_row as u32,
            rows: unit.len() as u32,
        };
        let first = state.pace.queued(unit.len(), now);
        let handed = match state.pace.due(now) {
            Due::Now(trigger @ (Trigger::Push | Trigger::Size)) => self.hand_over_all(shared, state, trigger, now),
            _ => true,
        };
        Ok((share, first || !handed))
    }

    /// Hands over what is due; answers when to look again.
    pub(super) fn tick(&self, shared: &Arc<Shared>, now: Tick) -> Tick {
        let mut guard = self.lock();
        let state = &mut *guard;
        if let Some(at) = state.retry_at
            && at > now
        {
            return at;
        }
        let due = match (state.pace.due(now), state.retry_at) {
            (Due::Empty, _) => return Tick::NEVER,
            (Due::At(at), None) => return at,
            (Due::At(_), Some(_)) => Trigger::FullFlush,
            (Due::Now(trigger), _) => trigger,
        };
        self.hand_over_all(shared, state, due, now);
        state.retry_at.unwrap_or(Tick::NEVER)
    }

    /// Hands over all that is queued, and answers what has no outcome yet: that, and what was handed over before.
    pub(super) fn flush(&self, shared: &Arc<Shared>, now: Tick) -> Vec<Arc<Ticket>> {
        let mut guard = self.lock();
        let state = &mut *guard;
        self.hand_over_all(shared, state, Trigger::Manual, now);
        let waiting = state.open.iter().flatten().map(|open| open.ticket.clone());
        // One that was answered this moment may still be listed.
        let handed: Vec<_> = self.handed().values().filter(|ticket| !ticket.is_decided()).cloned().collect();
        handed.into_iter().chain(waiting).collect()
    }

    /// Takes nothing more, and hands over all that is queued. Answers what that is: its ids, for the report.
    pub(super) fn end(&self, shared: &Arc<Shared>, now: Tick) -> Vec<(Arc<Ticket>, Vec<Uuid>)> {
        let mut guard = self.lock();
        let state = &mut *guard;
        state.ended = true;
        let of = |open: &Open| (open.ticket.clone(), open.rows.message_id.clone());
        let queued = state.open.iter().flatten().map(of).collect();
        self.hand_over_all(shared, state, Trigger::End, now);
        queued
    }

    /// Once more, for rings that were full. Answers whether nothing is left.
    pub(super) fn end_again(&self, shared: &Arc<Shared>, now: Tick) -> bool {
        self.hand_over_all(shared, &mut self.lock(), Trigger::End, now)
    }

    /// What is left has no time any more.
    pub(super) fn give_up(&self, shared: &Shared) {
        let left: Vec<(usize, Open)> = {
            let mut state = self.lock();
            let opens = state.open.iter_mut().enumerate();
            let left: Vec<_> = opens.filter_map(|(shard, open)| open.take().map(|open| (shard, open))).collect();
            state.pace.handed_over(left.iter().map(|(_, open)| open.rows.len()).sum());
            left
        };
        for (shard, Open { rows, ticket }) in left {
            shared.shards[shard].budget.release(rows.len());
            ticket.give_up(rows.unit_end.len(), rows.len(), || Error::ShutDown);
            shared.pool.give(rows);
        }
    }

    /// Answers whether all of it has gone.
    fn hand_over_all(&self, shared: &Arc<Shared>, state: &mut State, trigger: Trigger, now: Tick) -> bool {
        (0..state.open.len()).for_each(|shard| self.hand_over(shared, state, shard, trigger, now));
        let gone = state.open.iter().all(Option::is_none);
        state.retry_at = (!gone).then(|| now.plus_us(RETRY_US));
        gone
    }

    fn hand_over(&self, shared: &Arc<Shared>, state: &mut State, shard: usize, trigger: Trigger, now: Tick) {
        let Some(Open { rows, ticket }) = state.open[shard].take() else { return };
        let (messages, units) = (rows.len(), rows.unit_end.len());
        let answer = match shared.hand(shard, rows) {
            Ok(answer) => answer,
            Err(rows) if shared.shards[shard].ring.is_closed() => {
                shared.shards[shard].budget.release(messages);
                state.pace.handed_over(messages);
                ticket.give_up(units, messages, || Error::ShutDown);
                shared.pool.give(rows);
                return;
            }
            Err(rows) => {
                state.open[shard] = Some(Open { rows, ticket });
                state.retry_at = Some(now.plus_us(RETRY_US));
                return;
            }
        };
        state.pace.handed_over(messages);
        let metrics = &shared.strategies.metrics;
        metrics.handed_over[trigger as usize].add(1);
        metrics.messages_handed_over.add(messages as u64);
        state.handed_count += 1;
        let number = state.handed_count;
        self.handed().insert(number, ticket.clone());
        let strategy = self.strategy;
        let handed = Handed { shared: shared.clone(), strategy, shard, number, ticket, answer, units, messages };
        shared.strategies.tasks.spawn(handed.follow());
    }
}

/// A batch at its shard. Whatever ends this, the callers get their outcome.
struct Handed {
    shared: Arc<Shared>,
    strategy: Strategy,
    shard: usize,
    number: u64,
    ticket: Arc<Ticket>,
    answer: oneshot::Receiver<SubmissionReply>,
    units: usize,
    messages: usize,
}

impl Handed {
    async fn follow(mut self) {
        if let Ok(reply) = (&mut self.answer).await {
            self.answered(reply);
        }
    }

    fn answered(&self, reply: SubmissionReply) {
        // What lies in partitions of sibling shards is found by their claims.
        if self.shared.shards.len() > 1 && reply.refused.len() < reply.rows.unit_end.len() {
            let router = self.shared.router;
            let shards = reply.rows.partition.iter().map(|partition| router.shard_of(*partition));
            self.shared.announce_to(shards, self.shard);
        }
        self.ticket.answer(reply);
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        // After `follow` the channel is empty. Before, this task has been dropped with its runtime: the engine ends.
        if let Ok(Some(reply)) = self.answer.try_recv() {
            self.answered(reply);
        }
        self.ticket.give_up(self.units, self.messages, not_known);
        let queue = self.shared.strategies.queue(self.strategy);
        queue.handed().remove(&self.number);
    }
}
