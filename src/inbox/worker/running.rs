//! A worker's handlers: when one starts, and what becomes of one that does not end.
//!
//! Invariants
//! - A handler has a place among those of the process, but for those that run in the commit: they run one at a time.
//! - What is decided in the commit bars its lane until then.

use tokio::sync::OwnedSemaphorePermit;
use uuid::Uuid;

use super::super::commit::{Rules, Verdict};
use super::super::handler::{HandlerError, Handlers};
use super::super::lane::Slot;
use super::{Finished, Run, Worker};
use crate::time::boot_time;

/// Beyond its time, a handler is waited for so long before it is taken for one that blocks.
const BLOCKED_GRACE_MS: u64 = 1_000;

impl Worker {
    /// Starts handlers as places allow. Whether it waits for a place.
    pub(super) fn start_handlers(&mut self) -> bool {
        while !self.stopping && self.door.is_some() && self.lanes.has_ready() {
            let Ok(place) = self.parts.places.clone().try_acquire_owned() else { return true };
            let Some((lane_id, slot)) = self.lanes.start_next() else { return false };
            self.start(lane_id, slot, place);
        }
        false
    }

    fn start(&mut self, lane_id: Uuid, slot: Slot, place: OwnedSemaphorePermit) {
        let Some(held) = self.hand.get(slot) else {
            self.lanes.decided(lane_id);
            self.lanes.committed(lane_id, 1);
            return;
        };
        let rules = self.parts.rules.clone();
        let Some(handler) = rules.handlers.of(&held.delivery.type_name).cloned() else {
            let outcome = Err(Rules::no_handler(&held.delivery.type_name));
            let run = self.note_run(slot, lane_id);
            self.finish(Finished { run, outcome });
            return;
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
            return;
        }
        let run = self.note_run(slot, lane_id);
        let Some(held) = self.hand.get(slot) else { return };
        let (delivery, attempts, ended) = (held.delivery.clone(), held.attempts, self.finished.0.clone());
        self.handling.spawn(async move {
            let mut context = rules.context(&delivery, attempts, None);
            let outcome = rules.run(&*handler, &delivery, &mut context).await;
            let outcome = outcome.map(|()| context.rows);
            // A worker that has ended does not mind.
            let _ = ended.send(Finished { run, outcome });
            drop(place);
        });
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
