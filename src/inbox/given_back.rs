//! What a worker has given back to brokers that keep streams in order, and what it may take of these streams since.
//! Decisions only.
//!
//! Invariants
//! - While it is not known whether the broker has something of a stream back, nothing that it delivers of it is handled:
//!   what is behind may overtake it. This ends when the first that was given back comes again in a later turn: then it has
//!   gone back, and all behind it.
//! - A give-back that failed is over with the lock time of what was to go back.
//! - One give-back of a stream at a time is under way of what comes meanwhile: a broker that redelivers at once is not asked
//!   in a circle. The others of it are left, neither renewed nor settled. When all answers are there, the first that was
//!   left of each turn is given back: what was delivered before the last answer may have gone back with it, or may not.
//! - What is remembered is bounded, a stream's part of it too.

use hashbrown::HashMap;
use uuid::Uuid;

use super::source::Answered;
use crate::seam::receiver::{Receipt, SettleOutcome};
use crate::time::Tick;

/// Streams are remembered for so long.
const KEPT_MS: u64 = 600_000;
/// So many are remembered; of more the older half is forgotten, of which the broker has taken back all by then.
const STREAMS_MAX: usize = 16_384;
/// Of so many give-backs of a stream it is known what they began with, and of so many turns what was left first; of more the
/// oldest is forgotten, which costs another round at the broker, or a lock time.
const FIRSTS_MAX: usize = 4;

/// A stream of a source.
type Stream = (usize, Uuid);

/// A delivery as it is judged.
#[derive(Clone, Copy, Debug)]
pub(super) struct Judged {
    pub stream: Stream,
    pub message_id: Uuid,
    pub receipt: Receipt,
    pub turn: u64,
    /// When it was asked for.
    pub asked: Tick,
}

/// What becomes of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ruling {
    /// Nothing in front of it is on its way back.
    Fine,
    /// To be given back; the answer is waited for.
    GiveBack,
    /// To be left to the broker without a word.
    Leave,
}

#[derive(Debug)]
struct Back {
    /// The highest that was seen since.
    turn: u64,
    /// What was given back first, by each give-back: it comes again before anything behind it does.
    firsts: Vec<Uuid>,
    /// Their deliveries, while it is not known what became of them.
    open: Vec<Receipt>,
    /// What is asked for later than that comes in order.
    over: Tick,
    /// The first that was left of each turn: what is of a turn before another may have gone back with it, or not.
    left: Vec<Left>,
    noted: Tick,
    batch: u64,
}

#[derive(Clone, Copy, Debug)]
struct Left {
    turn: u64,
    message_id: Uuid,
    receipt: Receipt,
}

impl Back {
    fn give(&mut self, message_id: Uuid, receipt: Receipt) {
        if self.firsts.len() >= FIRSTS_MAX {
            self.firsts.remove(0);
        }
        self.firsts.push(message_id);
        self.open.push(receipt);
    }

    fn leave(&mut self, of: &Judged) {
        if self.left.iter().any(|left| left.turn == of.turn) {
            return;
        }
        if self.left.len() >= FIRSTS_MAX {
            self.left.remove(0);
        }
        self.left.push(Left { turn: of.turn, message_id: of.message_id, receipt: of.receipt });
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct GivenBack {
    streams: HashMap<Stream, Back>,
    /// The streams of what is open.
    open: HashMap<(usize, Receipt), Uuid>,
    batch: u64,
}

impl GivenBack {
    /// What becomes of a delivery; with [`Ruling::GiveBack`] it is noted as given back.
    pub(super) fn judge(&mut self, of: Judged, now: Tick) -> Ruling {
        let Some(back) = self.streams.get_mut(&of.stream).filter(|_| of.turn != 0) else { return Ruling::Fine };
        if of.turn > back.turn {
            let is_over = back.open.is_empty() && of.asked > back.over;
            if is_over || back.firsts.contains(&of.message_id) {
                self.streams.remove(&of.stream);
                return Ruling::Fine;
            }
            back.turn = of.turn;
        }
        if back.open.is_empty() && now >= back.over {
            // Delivered before, or after somebody else had what was given back.
            back.left.clear();
            back.give(of.message_id, of.receipt);
            back.noted = now;
            self.open.insert((of.stream.0, of.receipt), of.stream.1);
            return Ruling::GiveBack;
        }
        back.leave(&of);
        Ruling::Leave
    }

    /// What is noted from here on goes back at once, and in this order.
    pub(super) fn begin(&mut self) {
        self.batch += 1;
    }

    /// A message goes back, with the receipt of its latest delivery: nothing else of its turn is handled.
    pub(super) fn note(&mut self, stream: Stream, message_id: Uuid, turn: u64, receipt: Receipt, now: Tick) {
        if turn == 0 {
            return;
        }
        if self.streams.len() >= STREAMS_MAX {
            self.forget(now);
        }
        let batch = self.batch;
        let is_known = self.streams.contains_key(&stream);
        let back = self.streams.entry(stream).or_insert_with(|| Back {
            turn,
            firsts: Vec::new(),
            open: Vec::new(),
            over: Tick(0),
            left: Vec::new(),
            noted: now,
            batch,
        });
        back.turn = back.turn.max(turn);
        back.noted = now;
        if is_known && back.batch == batch {
            return;
        }
        // Which of two give-backs is in front is not known: neither's first proves anything.
        let is_open = !back.open.is_empty();
        back.give(message_id, receipt);
        if is_open {
            back.firsts.clear();
        }
        back.batch = batch;
        self.open.insert((stream.0, receipt), stream.1);
    }

    /// The broker has answered, or does not. What is to be given back then, of what was left: it is noted.
    pub(super) fn answered(&mut self, answered: &Answered) -> Vec<Receipt> {
        let mut next = Vec::new();
        for (receipt, outcome) in &answered.outcomes {
            let Some(lane_id) = self.open.remove(&(answered.source, *receipt)) else { continue };
            let Some(back) = self.streams.get_mut(&(answered.source, lane_id)) else { continue };
            let Some(at) = back.open.iter().position(|open| open == receipt) else { continue };
            back.open.swap_remove(at);
            let over = if *outcome == SettleOutcome::Failed { answered.locks_end } else { answered.at };
            back.over = back.over.max(over);
            if !back.open.is_empty() {
                continue;
            }
            // Those of a broker that has not answered are over with their lock time, as that one is.
            let left = std::mem::take(&mut back.left);
            if back.over > answered.at {
                continue;
            }
            for Left { message_id, receipt, .. } in &left {
                back.give(*message_id, *receipt);
                self.open.insert((answered.source, *receipt), lane_id);
                next.push(*receipt);
            }
            if left.len() > 1 {
                back.firsts.clear();
            }
        }
        next
    }

    /// Forgets streams that are old, and at least half of them: so it costs O(1) a stream.
    fn forget(&mut self, now: Tick) {
        let mut times: Vec<Tick> = self.streams.values().map(|back| back.noted).collect();
        times.sort_unstable();
        let old = Tick(now.0.saturating_sub(KEPT_MS * 1_000));
        let (middle, mut spared) = (times[times.len() / 2], times.len() / 2);
        let open = &mut self.open;
        self.streams.retain(|(source, _), back| {
            // Of many of the same moment no more than the other half stay.
            let stays = back.noted > old && back.noted >= middle && spared > 0;
            spared -= usize::from(stays);
            if !stays {
                back.open.iter().for_each(|receipt| _ = open.remove(&(*source, *receipt)));
            }
            stays
        });
    }
}

#[cfg(test)]
#[path = "given_back_tests.rs"]
mod tests;
