//! When a handler that others disturb has failed after all.
//!
//! Invariant: a message is disturbed `inbox.disturbed_max` times by itself at most, then an attempt is counted. One that
//! always runs into a time limit (`statement_timeout`, a lock that is never free) would hold its stream for ever else.

use super::super::commit::Decision;
use super::super::handler::{ErrorKind, HandlerError};
use super::super::lane::Slot;
use super::Worker;

impl Worker {
    /// Whether a handler that is disturbed once more has failed. What ends goes back as it is.
    pub(super) fn is_too_much(&self, slot: Slot) -> bool {
        let times = self.hand.get(slot).map_or(0, |held| held.disturbed);
        !self.stopping && times.saturating_add(1) >= self.parts.rules.disturbed_max
    }

    /// The failure that a disturbance has become; another error as it is.
    pub(super) fn no_longer_disturbed(&self, error: HandlerError) -> HandlerError {
        if error.kind != ErrorKind::Disturbed {
            return error;
        }
        self.parts.rules.metrics.failed.add(1);
        let (times, text) = (self.parts.rules.disturbed_max, error.text);
        HandlerError::retry(format!("disturbed {times} times though it ran by itself, at last by {text}"))
            .because(error.reason)
    }

    /// A handler in the transaction was disturbed though it ran by itself: it rests, or its failure is committed.
    pub(super) fn disturbed_alone(&mut self, mut alone: Vec<Decision>, stack: &mut Vec<Vec<Decision>>, text: &str) {
        match alone.first_mut().filter(|first| self.is_too_much(first.slot)) {
            Some(first) => {
                let error = self.no_longer_disturbed(HandlerError::disturbed(text));
                let rules = &self.parts.rules;
                tracing::warn!(
                    consumer = %rules.name, message_id = %first.delivery.message_id, attempt = first.attempts + 1,
                    error = %error.text, "a handler failed"
                );
                first.verdict = rules.judge(error, first.attempts, first.is_stored);
                stack.push(alone);
            }
            None => self.rest_of_commit(alone, stack, text),
        }
    }
}
