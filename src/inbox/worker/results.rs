//! A worker's results: from a handler's end to the commit and the broker.
//!
//! Invariants
//! - Behind a failure the rest of its lane that was to be handled is stored behind it.
//! - A transaction that is refused is taken apart until the message is alone whose fault it is.
//! - One that was disturbed goes again by itself; if it is again, it rests, and others go on meanwhile. Not for ever: see
//!   `inbox.disturbed_max`.
//! - A message that fails in there parks its lane for those of the batch that were decided later.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashSet;
use tokio::sync::mpsc;
use uuid::Uuid;

use super::super::commit::{Decision, Fate, NotApplied, Rules, Verdict, apply};
use super::super::hand::Held;
use super::super::handler::{ErrorKind, HandlerError};
use super::super::lane::Slot;
use super::super::source::{Answered, Source};
use super::{Finished, Run, Worker};
use crate::error::FailureReason;
use crate::limits::INBOX_TRANSACTION_MS;
use crate::seam::receiver::{Receipt, Settlement};
use crate::seam::store::StoreError;
use crate::time::{Tick, boot_time};

/// Wait before a transaction that was refused for others' sake goes again, doubling.
const TRANSIENT_PAUSE_MS: (u64, u64) = (5, 500);

/// Pauses of a message whose handler is disturbed though it runs by itself, doubling.
const DISTURBED_PAUSE_MS: (u64, u64) = (10, 5_000);

/// What was stored behind is looked for after so long at the latest.
const BEHIND_LOOK_MS: u64 = 50;

/// Due times that are remembered; others are found by the poll.
const DUES_MAX: usize = 1_000;

impl Worker {
    /// A handler has ended.
    pub(super) fn finish(&mut self, finished: Finished) {
        let Finished { run, outcome } = finished;
        // One that was given up has no result any more.
        let Some(Run { slot, lane_id, .. }) = self.runs.remove(&run) else { return };
        if !self.lanes.decided(lane_id) {
            // Of a connection that is lost: its result is nobody's, and it stands in its lane again.
            self.arrived += 1;
            return;
        }
        let Some(held) = self.hand.get(slot) else { return };
        let verdict = match outcome {
            Ok(rows) => Verdict::Done(Box::new(rows)),
            Err(error) if error.kind == ErrorKind::Disturbed && !self.is_too_much(slot) => {
                return self.rest(lane_id, vec![slot], &error.text);
            }
            Err(error) => {
                let error = self.no_longer_disturbed(error);
                tracing::warn!(
                    consumer = %self.parts.rules.name, message_id = %held.delivery.message_id,
                    attempt = held.attempts + 1, error = %error.text, "a handler failed"
                );
                self.parts.rules.judge(error, held.attempts, held.is_stored)
            }
        };
        let parks = verdict.parks();
        if matches!(verdict, Verdict::Abandon) {
            // What is behind it goes back with it, in order.
            self.lanes.committed(lane_id, 1);
            let mut slots = vec![slot];
            slots.extend(self.lanes.clear(lane_id));
            self.abandon(slots);
            return;
        }
        if let Verdict::Refuse { reason, text } = verdict {
            self.lanes.committed(lane_id, 1);
            self.refuse(slot, reason, text);
            return;
        }
        self.decide(slot, verdict);
        if parks {
            self.store_behind(lane_id);
        }
    }

    /// Those behind a failed head are stored behind it.
    pub(super) fn store_behind(&mut self, lane_id: Uuid) {
        for slot in self.lanes.fail(lane_id) {
            let is_stored = self.hand.get(slot).is_some_and(|held| held.is_stored);
            self.decide(slot, if is_stored { Verdict::Left } else { Verdict::Behind });
        }
    }

    pub(super) fn decide(&mut self, slot: Slot, verdict: Verdict) {
        let Some(held) = self.hand.get(slot) else { return };
        if self.decisions.is_empty() {
            self.first_decision = boot_time();
        }
        self.decisions.push(Decision {
            slot,
            lane_id: held.lane_id,
            delivery: held.delivery.clone(),
            source: held.source.clone(),
            is_stored: held.is_stored,
            attempts: held.attempts,
            is_alone: held.disturbed > 0,
            verdict,
        });
    }

    /// Makes what is decided durable, and settles it.
    pub(super) async fn commit(&mut self) {
        let mut back = GoesBack::default();
        self.commit_parts(&mut back).await;
        if back.lanes.is_empty() {
            return;
        }
        // What was decided behind them for a later commit, or waits, goes back at once with them, in order: of two
        // give-backs nobody would know which comes first.
        let GoesBack { mut slots, lanes } = back;
        for decision in std::mem::take(&mut self.decisions) {
            if lanes.contains(&decision.lane_id) && is_later(&decision) && !decision.is_stored {
                self.lanes.committed(decision.lane_id, 1);
                slots.push(decision.slot);
            } else {
                self.decisions.push(decision);
            }
        }
        for lane_id in lanes {
            slots.extend(self.lanes.clear(lane_id));
        }
        self.abandon(slots);
    }

    async fn commit_parts(&mut self, back: &mut GoesBack) {
        let count = self.decisions.len().min(self.parts.commit_gate.rows_max);
        let mut stack = vec![self.decisions.drain(..count).collect::<Vec<_>>()];
        self.first_decision = boot_time();
        let mut parked: HashSet<Uuid> = HashSet::new();
        let mut pause_ms = TRANSIENT_PAUSE_MS.0;
        while let Some(mut batch) = stack.pop() {
            let (brokers, rest) = divide(batch, &parked, &mut back.lanes);
            batch = rest;
            self.settle_brokers(brokers, back);
            if let Some(rest) = cut(&mut batch, self.in_transaction_max, self.parts.rules.commit_bytes_max) {
                stack.push(rest);
            }
            if batch.is_empty() {
                continue;
            }
            let in_transaction = batch.iter().filter(|decision| decision.is_in_transaction()).count();
            let rules = self.parts.rules.clone();
            let Some(door) = &mut self.door else { return };
            let began = std::time::Instant::now();
            match apply(door, &rules, &mut batch).await {
                Ok(applied) => {
                    let metrics = &rules.metrics;
                    metrics.commits.add(1);
                    metrics.rows_committed.add(batch.len() as u64);
                    metrics.commit_us.record_us(u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX));
                    if applied.emitted > 0 {
                        metrics.emitted.add(applied.emitted as u64);
                        (self.parts.announce)();
                    }
                    if applied.more {
                        self.claim_at = Tick(0);
                    }
                    // Quick ones: more of them share the next transaction.
                    let is_quick = began.elapsed() < Duration::from_millis(INBOX_TRANSACTION_MS / 4);
                    if is_quick && in_transaction >= self.in_transaction_max {
                        self.in_transaction_max = in_transaction.saturating_mul(2);
                    }
                    self.committed(batch, &applied.fates, &mut parked);
                }
                Err(NotApplied::Again) => stack.push(batch),
                Err(NotApplied::Full { at }) => {
                    stack.push(batch.split_off(at));
                    self.in_transaction_max = batch.iter().filter(|of| of.is_in_transaction()).count().max(1);
                    stack.push(batch);
                }
                Err(NotApplied::Disturbed { at, text }) if batch.len() > 1 => {
                    tracing::debug!(text, "a handler was disturbed: it goes again by itself");
                    let mut tail = batch.split_off(at);
                    stack.push(tail.split_off(1));
                    stack.push(tail);
                    stack.push(batch);
                }
                Err(NotApplied::Disturbed { text, .. }) => self.disturbed_alone(batch, &mut stack, &text),
                // Read-only after a failover: dialling finds the primary, this connection never will.
                Err(NotApplied::Store(StoreError::Transient { sqlstate, text })) if sqlstate == "25006" => {
                    stack.push(batch);
                    return self.lose_with(stack, &text);
                }
                Err(NotApplied::Store(StoreError::Transient { sqlstate, text }))
                    if in_transaction == 1 && batch.len() == 1 =>
                {
                    rules.metrics.disturbed.add(1);
                    self.disturbed_alone(batch, &mut stack, &format!("{sqlstate}: {text}"));
                }
                Err(NotApplied::Store(StoreError::Transient { sqlstate, text })) => {
                    tracing::debug!(sqlstate, text, "a commit of the inbox goes again");
                    if in_transaction > 0 {
                        stack.push(batch.split_off(batch.len() / 2));
                    }
                    stack.push(batch);
                    if self.is_over() {
                        return self.lose_with(stack, "the time of its end is over");
                    }
                    tokio::time::sleep(Duration::from_millis(pause_ms)).await;
                    pause_ms = (pause_ms * 2).min(TRANSIENT_PAUSE_MS.1);
                }
                Err(NotApplied::Store(
                    error
                    @ (StoreError::Refused { .. } | StoreError::NumberTaken | StoreError::DuplicateMessage { .. }),
                )) => {
                    if batch.len() > 1 {
                        rules.metrics.bisections.add(1);
                        let second = batch.split_off(batch.len() / 2);
                        stack.push(second);
                    } else {
                        batch = batch.into_iter().map(|decision| refused(&rules, decision, &error)).collect();
                    }
                    stack.push(batch);
                }
                Err(NotApplied::Store(error)) => {
                    // Back in their order: what is in front was decided first.
                    stack.push(batch);
                    return self.lose_with(stack, &error.to_string());
                }
            }
        }
    }

    /// The connection is given up with what is to be committed, by pieces of which the last is the first.
    fn lose_with(&mut self, stack: Vec<Vec<Decision>>, why: &str) {
        let later = std::mem::take(&mut self.decisions);
        self.decisions = stack.into_iter().rev().flatten().chain(later).collect();
        self.lose(why);
    }

    /// A handler in the transaction was disturbed though it ran by itself: it stands in its lane again with those of it
    /// that were to run behind it.
    pub(super) fn rest_of_commit(&mut self, alone: Vec<Decision>, stack: &mut [Vec<Decision>], text: &str) {
        let Some(first) = alone.into_iter().next() else { return };
        let mut slots = vec![first.slot];
        let is_behind = |of: &Decision| of.lane_id == first.lane_id && of.is_in_transaction();
        for part in stack.iter_mut().rev().chain([&mut self.decisions]) {
            slots.extend(part.iter().filter(|of| is_behind(of)).map(|of| of.slot));
            part.retain(|of| !is_behind(of));
        }
        self.rest(first.lane_id, slots, text);
    }

    /// The first of these was disturbed: it runs again after a pause, with the others behind it. No attempt is counted.
    fn rest(&mut self, lane_id: Uuid, slots: Vec<Slot>, text: &str) {
        if self.stopping {
            self.lanes.committed(lane_id, slots.len());
            return self.abandon(slots);
        }
        let times = self.hand.disturbed(slots[0]);
        let (first_ms, most_ms) = DISTURBED_PAUSE_MS;
        let pause_ms = first_ms.saturating_mul(1 << (times - 1).min(16)).min(most_ms);
        // Not in step with whom it disturbs.
        let pause_ms = pause_ms / 2 + rand::random_range(0..=pause_ms / 2);
        if times.is_power_of_two() {
            let message_id = self.hand.get(slots[0]).map(|held| held.delivery.message_id).unwrap_or_default();
            tracing::warn!(
                consumer = %self.parts.rules.name, %message_id, times, text,
                "a handler is disturbed by others: it runs again, no attempt is counted"
            );
        }
        self.lanes.rest(lane_id, &slots, boot_time().plus_ms(pause_ms));
    }

    /// What follows from a commit, message by message.
    pub(super) fn committed(&mut self, batch: Vec<Decision>, fates: &[Fate], parked: &mut HashSet<Uuid>) {
        let mut settlements = Settlements::default();
        let metrics = self.parts.rules.metrics.clone();
        let mut counts: BTreeMap<Uuid, usize> = BTreeMap::new();
        let mut stored = Vec::new();
        for (decision, fate) in batch.into_iter().zip(fates) {
            let Decision { slot, lane_id, verdict, is_stored, .. } = decision;
            *counts.entry(lane_id).or_default() += 1;
            if verdict.parks() && *fate == Fate::Done && parked.insert(lane_id) {
                // Those looked up since, of a handler that failed in the transaction.
                self.store_behind(lane_id);
                for later in self.decisions.iter_mut().filter(|later| later.lane_id == lane_id) {
                    wait_behind(later);
                }
            }
            match &verdict {
                Verdict::Failed { due_in_ms, .. } => self.due(*due_in_ms),
                // Its lane may have been freed since it was looked up: it is due then.
                Verdict::Behind => self.due(BEHIND_LOOK_MS),
                _ => {}
            }
            if *fate == Fate::Done && matches!(verdict, Verdict::Store) {
                metrics.stored.add(1);
                for (source, receipt) in self.hand.is_stored_now(slot) {
                    settlements.push(source, receipt, Settlement::Complete);
                }
                stored.push((lane_id, slot));
                continue;
            }
            match (fate, &verdict) {
                (Fate::Duplicate, _) => metrics.duplicates.add(1),
                (Fate::Done, Verdict::Done(_) | Verdict::InTransaction) => metrics.handled.add(1),
                (Fate::Done, Verdict::Behind) => metrics.stored.add(1),
                (Fate::Done, Verdict::Dead { .. }) => metrics.dead.add(1),
                _ => {}
            }
            debug_assert!(is_stored || !matches!(verdict, Verdict::Left));
            if let Some(held) = self.hand.remove(slot) {
                settlements.all(&held, &Settlement::Complete);
            }
        }
        for (lane_id, slot) in stored {
            self.lanes.claimed(lane_id, slot);
        }
        for (lane_id, count) in counts {
            self.lanes.committed(lane_id, count);
        }
        settlements.send(&self.parts.sources);
    }

    /// A lane of ours is due then: it is looked for then.
    fn due(&mut self, due_in_ms: u64) {
        let at = boot_time().plus_ms(due_in_ms.saturating_add(1));
        if self.dues.len() < DUES_MAX {
            self.dues.insert(at);
        }
        self.claim_at = self.claim_at.min(at);
    }

    /// Decisions that the database has nothing to do with; those that go back to the broker are only noted.
    fn settle_brokers(&mut self, decisions: Vec<Decision>, back: &mut GoesBack) {
        for Decision { slot, lane_id, verdict, .. } in decisions {
            match verdict {
                Verdict::Refuse { reason, text } => self.refuse(slot, reason, text),
                Verdict::Abandon => back.slots.push(slot),
                _ => _ = self.hand.remove(slot),
            }
            self.lanes.committed(lane_id, 1);
        }
    }

    pub(super) fn refuse(&mut self, slot: Slot, reason: FailureReason, text: String) {
        let Some(held) = self.hand.remove(slot) else { return };
        self.parts.rules.metrics.unreadable.add(1);
        tracing::warn!(
            consumer = %self.parts.rules.name, message_id = %held.delivery.message_id, %text, "a delivery is refused"
        );
        let mut settlements = Settlements::default();
        settlements.all(&held, &Settlement::DeadLetter { reason, text });
        settlements.send(&self.parts.sources);
    }

    /// Gives messages back to the broker, in order; stored ones are only let go.
    pub(super) fn abandon(&mut self, slots: Vec<Slot>) {
        let now = boot_time();
        let mut settlements = Settlements::default();
        self.hand.give_back();
        for slot in slots {
            let Some(held) = self.hand.remove(slot) else { continue };
            self.hand.gone(&held, now);
            self.end.abandoned += usize::from(self.stopping);
            settlements.all(&held, &Settlement::Abandon);
        }
        settlements.give_back(&self.parts.sources, &self.answers.0);
    }

    pub(super) fn drop_or_put_back(&mut self, lane_id: Uuid, slot: Slot) {
        if self.hand.get(slot).is_some_and(|held| held.is_stored) {
            self.hand.remove(slot);
        } else {
            self.lanes.put_back(lane_id, slot);
            self.arrived += 1;
        }
    }
}

/// What a commit gives back to the brokers: its messages in order, and their lanes.
#[derive(Default)]
struct GoesBack {
    slots: Vec<Slot>,
    lanes: HashSet<Uuid>,
}

/// Settlements by source, in order.
#[derive(Default)]
pub(super) struct Settlements(BTreeMap<usize, Vec<(Receipt, Settlement)>>);

impl Settlements {
    pub(super) fn push(&mut self, source: usize, receipt: Receipt, settlement: Settlement) {
        self.0.entry(source).or_default().push((receipt, settlement));
    }

    pub(super) fn all(&mut self, held: &Held, settlement: &Settlement) {
        for (source, receipt) in &held.receipts {
            self.push(*source, *receipt, settlement.clone());
        }
    }

    pub(super) fn send(self, sources: &[Arc<Source>]) {
        for (source, settlements) in self.0 {
            sources[source].settle(settlements, None);
        }
    }

    /// The same of what goes back: `tell` is told what becomes of it.
    pub(super) fn give_back(self, sources: &[Arc<Source>], tell: &mpsc::UnboundedSender<Answered>) {
        for (source, settlements) in self.0 {
            sources[source].settle(settlements, Some(tell.clone()));
        }
    }
}

/// Parts what is the broker's from what is the database's. Of a lane that was parked meanwhile, what was decided later
/// waits behind; of one that was abandoned, it goes back too.
fn divide(
    batch: Vec<Decision>,
    parked: &HashSet<Uuid>,
    abandoned: &mut HashSet<Uuid>,
) -> (Vec<Decision>, Vec<Decision>) {
    let mut rest = Vec::with_capacity(batch.len());
    let mut brokers = Vec::new();
    for mut decision in batch {
        if is_later(&decision) && abandoned.contains(&decision.lane_id) && !decision.is_stored {
            decision.verdict = Verdict::Abandon;
        } else if parked.contains(&decision.lane_id) {
            wait_behind(&mut decision);
        }
        if matches!(decision.verdict, Verdict::Abandon) {
            abandoned.insert(decision.lane_id);
        }
        if decision.verdict.is_brokers() { brokers.push(decision) } else { rest.push(decision) }
    }
    (brokers, rest)
}

/// Cuts off what is another transaction's: one that was disturbed before has its own, and of handlers that run in it there
/// are so many at most, and of bytes.
fn cut(batch: &mut Vec<Decision>, in_transaction_max: usize, bytes_max: usize) -> Option<Vec<Decision>> {
    let (mut in_transaction, mut bytes) = (0, 0);
    let at = batch.iter().enumerate().position(|(at, decision)| {
        let is_alone = |of: &Decision| of.is_alone && of.is_in_transaction();
        in_transaction += usize::from(decision.is_in_transaction());
        bytes += decision.bytes();
        let is_full = in_transaction > in_transaction_max || bytes > bytes_max;
        at > 0 && (is_full || is_alone(decision) || is_alone(&batch[0]))
    })?;
    Some(batch.split_off(at))
}

/// Whether it is for nothing if something before it in its lane is not done.
fn is_later(decision: &Decision) -> bool {
    matches!(decision.verdict, Verdict::Done(_) | Verdict::InTransaction | Verdict::Behind)
}

/// Its lane is parked by what was decided before it.
fn wait_behind(decision: &mut Decision) {
    if is_later(decision) {
        decision.verdict = if decision.is_stored { Verdict::Left } else { Verdict::Behind };
    }
}

/// What becomes of a decision that the database refuses by itself.
fn refused(rules: &Rules, mut decision: Decision, error: &StoreError) -> Decision {
    let text = error.to_string();
    let effects = matches!(decision.verdict, Verdict::Done(_) | Verdict::InTransaction);
    decision.verdict = if effects {
        rules.metrics.failed.add(1);
        let error = HandlerError::retry(text).because(FailureReason::EventStorageFailure);
        rules.judge(error, decision.attempts, decision.is_stored)
    } else if decision.is_stored {
        tracing::error!(
            consumer = %rules.name, message_id = %decision.delivery.message_id, %text,
            "neither the failure nor the death of a stored message can be written: it is tried again"
        );
        Verdict::Left
    } else {
        Verdict::Refuse { reason: FailureReason::ValidationError, text }
    };
    decision
}
