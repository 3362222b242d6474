//! A worker's handlers: when one starts, and what becomes of one that does not end.
//!
//! Invariants
//! - A handler has a place among those of the process, but for those that run in the commit: they run one at a time.
//!   Those that start together take turns in one (see `together`).
//! - What is decided in the commit bars its lane until then.

use std::collections::VecDeque;

use tokio::sync::OwnedSemaphorePermit;
use uuid::Uuid;

use super::super::commit::{Rules, Verdict};
use super::super::handler::{HandlerError, Handlers};
use super::super::lane::Slot;
use super::together::{Ended, Job, Together, next_size};
use super::{Finished, Run, Worker};
use crate::time::boot_time;

/// Beyond its time, a handler is waited for so long before it is taken for one that blocks.
const BLOCKED_GRACE_MS: u64 = 1_000;

impl Worker {
    /// Starts handlers as places allow. Whether it waits for a place.
    pub(super) fn start_handlers(&mut self) -> bool {
        while !self.stopping && self.door.is_some() && self.lanes.has_ready() {
            let Ok(place) = self.parts.places.clone().try_acquire_owned() else { return true };
            let mut jobs = VecDeque::new();
            while jobs.len() < self.together_max
                && let Some((lane_id, slot)) = self.lanes.start_next()
            {
                jobs.extend(self.job(lane_id, slot));
            }
            if !jobs.is_empty() {
                self.start(jobs, place);
            }
        }
        false
    }

    /// What is to be run of a message that starts; nothing where it is decided without, or in the commit.
    fn job(&mut self, lane_id: Uuid, slot: Slot) -> Option<Job> {
        let Some(held) = self.hand.get(slot) else {
            self.lanes.decided(lane_id);
            self.lanes.committed(lane_id, 1);
            return None;
        };
        let (delivery, attempts) = (held.delivery.clone(), held.attempts);
        let rules = self.parts.rules.clone();
        let Some(handler) = rules.handlers.of(&delivery.type_name) else {
            let outcome = Err(Rules::no_handler(&delivery.type_name));
            let run = self.note_run(slot, lane_id);
            self.finish(Finished { run, outcome });
            return None;
        };
        if handler.needs_transaction() {
            self.lanes.decided(lane_id);
            self.decide(slot, Verdict::InTransaction);
            while let Some(next) = self.lanes.peek(lane_id).filter(|next| self.is_transactional(*next, &rules.handlers))
            {
                self.lanes.take_along(lane_id);
                self.decide(next, Verdict::InTransaction);
            }
            self.lanes.bar(lane_id);
            return None;
        }
        Some(Job { run: self.note_run(slot, lane_id), handler: handler.clone(), delivery, attempts })
    }

    fn start(&mut self, jobs: VecDeque<Job>, place: OwnedSemaphorePermit) {
        self.next_group += 1;
        let is_one = jobs.len() == 1;
        let together = Together::new(self.next_group, jobs);
        if !is_one {
            self.together.push(together.clone());
        }
        self.handling.spawn(together.run(self.parts.rules.clone(), place, self.ended.0.clone()));
    }

    /// Some have ended, or come back.
    pub(super) fn ended(&mut self, ended: Ended) {
        let Ended { finished, unstarted, are_quick, group } = ended;
        if let Some(group) = group {
            self.together.retain(|of| of.group != group);
        }
        if let Some(are_quick) = are_quick {
            self.together_max = next_size(self.together_max, are_quick);
        }
        for finished in finished {
            self.finish(finished);
        }
        for run in unstarted {
            let Some(Run { slot, lane_id, .. }) = self.runs.remove(&run) else { continue };
            if !self.lanes.unstart(lane_id, slot) {
                self.arrived += 1;
            } else if self.stopping {
                let slots = self.lanes.clear(lane_id);
                self.abandon(slots);
            }
        }
    }

    /// What waits behind a handler that takes its time is not its to keep.
    pub(super) fn take_late(&mut self) {
        if self.together.is_empty() {
            return;
        }
        let now = boot_time();
        let late: Vec<Ended> = self.together.iter().filter_map(|together| together.take_late(now)).collect();
        for ended in late {
            self.ended(ended);
        }
    }

    fn note_run(&mut self, slot: Slot, lane_id: Uuid) -> u64 {
        let time_ms = u64::try_from(self.parts.rules.handler_time.as_millis()).unwrap_or(u64::MAX);
        let given_up_at = boot_time().plus_ms(time_ms).plus_ms(BLOCKED_GRACE_MS);
        self.next_run += 1;
        self.runs.insert(self.next_run, Run { slot, lane_id, given_up_at });
        self.next_run
    }

    /// A handler that blocks its thread is not ended by its timer. It keeps the thread, and its place; its message has
    /// failed.
    pub(super) fn give_up_blocked(&mut self) {
        let now = boot_time();
        if self.runs.is_empty() || now < self.next_overdue_look {
            return;
        }
        self.next_overdue_look = now.plus_ms(BLOCKED_GRACE_MS / 4);
        let overdue: Vec<u64> = self.runs.iter().filter(|(_, of)| of.given_up_at <= now).map(|(run, _)| *run).collect();
        for run in overdue {
            self.parts.rules.metrics.timed_out.add(1);
            self.parts.rules.metrics.failed.add(1);
            let text = "the handler blocks its thread: it was given up, and what it does still has no effect here";
            tracing::error!(consumer = %self.parts.rules.name, text);
            self.finish(Finished { run, outcome: Err(HandlerError::retry(text)) });
        }
    }

    fn is_transactional(&self, slot: Slot, handlers: &Handlers) -> bool {
        let held = self.hand.get(slot);
        held.and_then(|held| handlers.of(&held.delivery.type_name)).is_some_and(|handler| handler.needs_transaction())
    }
}
