//! What a worker has in hand: one entry a message, however many copies of it have come.
//!
//! Invariants
//! - A copy that comes while its message is in hand belongs to that entry, and is settled with it: not before the commit.
//! - Of a stream of which something was given back nothing is taken that may have overtaken it: see `given_back`.

use std::sync::Arc;

use hashbrown::HashMap;
use uuid::Uuid;

use super::given_back::{GivenBack, Judged, Ruling};
use super::lane::Slot;
use super::source::{Answered, Arrived};
use crate::seam::receiver::{Delivery, Receipt};
use crate::time::Tick;

/// A message in hand.
pub(super) struct Held {
    pub lane_id: Uuid,
    pub delivery: Arc<Delivery>,
    pub source: Arc<str>,
    /// By source and receipt: none of one that was claimed.
    pub receipts: Vec<(usize, Receipt)>,
    pub is_stored: bool,
    pub attempts: i32,
    /// Times that its handler was disturbed by itself: no attempts.
    pub disturbed: u32,
    /// The highest turn of its copies, with their source.
    turn: (usize, u64),
}

/// See the module.
#[derive(Default)]
pub(super) struct Hand {
    entries: Vec<Option<Held>>,
    free: Vec<Slot>,
    /// Those that came from a broker and are not stored.
    by_id: HashMap<Uuid, Slot>,
    given_back: GivenBack,
    count: usize,
}

/// What an arrival is.
pub(super) enum Arrival {
    /// A message, at this slot.
    New(Slot),
    /// A copy of one in hand.
    Copy,
    /// Something in front of it may be on its way back: to be given back, as one that has been noted.
    Gone,
    /// The same, and that is under way: the broker takes it back by itself.
    Left,
}

impl Hand {
    /// Takes a delivery.
    pub(super) fn arrive(&mut self, arrived: Arrived, source: Arc<str>, now: Tick) -> Arrival {
        let Arrived { source: index, lane_id, asked, delivery } = arrived;
        let (receipt, turn, message_id) = (delivery.receipt, delivery.turn, delivery.message_id);
        match self.given_back.judge(Judged { stream: (index, lane_id), message_id, receipt, turn, asked }, now) {
            Ruling::Fine => {}
            Ruling::GiveBack => return Arrival::Gone,
            Ruling::Leave => return Arrival::Left,
        }
        if let Some(held) = self.by_id.get(&message_id).and_then(|slot| self.entries[*slot].as_mut()) {
            held.receipts.push((index, receipt));
            held.turn = (index, held.turn.1.max(turn));
            return Arrival::Copy;
        }
        let held = Held {
            lane_id,
            delivery,
            source,
            receipts: vec![(index, receipt)],
            is_stored: false,
            attempts: 0,
            disturbed: 0,
            turn: (index, turn),
        };
        let slot = self.insert(held);
        self.by_id.insert(message_id, slot);
        Arrival::New(slot)
    }

    /// Takes a stored message.
    pub(super) fn claim(&mut self, lane_id: Uuid, delivery: Delivery, source: Arc<str>, attempts: i32) -> Slot {
        let delivery = Arc::new(delivery);
        let (receipts, turn) = (Vec::new(), (0, 0));
        self.insert(Held { lane_id, delivery, source, receipts, is_stored: true, attempts, disturbed: 0, turn })
    }

    fn insert(&mut self, held: Held) -> Slot {
        self.count += 1;
        match self.free.pop() {
            Some(slot) => {
                self.entries[slot] = Some(held);
                slot
            }
            None => {
                self.entries.push(Some(held));
                self.entries.len() - 1
            }
        }
    }

    /// What is at a slot.
    pub(super) fn get(&self, slot: Slot) -> Option<&Held> {
        self.entries.get(slot)?.as_ref()
    }

    /// Its handler was disturbed; answers how often by now.
    pub(super) fn disturbed(&mut self, slot: Slot) -> u32 {
        let Some(held) = self.entries.get_mut(slot).and_then(Option::as_mut) else { return 0 };
        held.disturbed = held.disturbed.saturating_add(1);
        held.disturbed
    }

    /// From here on it is one that is stored here: its deliveries, to be settled.
    pub(super) fn is_stored_now(&mut self, slot: Slot) -> Vec<(usize, Receipt)> {
        let Some(held) = self.entries.get_mut(slot).and_then(Option::as_mut) else { return Vec::new() };
        held.is_stored = true;
        self.by_id.remove(&held.delivery.message_id);
        std::mem::take(&mut held.receipts)
    }

    /// Lets one go.
    pub(super) fn remove(&mut self, slot: Slot) -> Option<Held> {
        let held = self.entries.get_mut(slot)?.take()?;
        self.count -= 1;
        self.free.push(slot);
        if !held.is_stored {
            self.by_id.remove(&held.delivery.message_id);
        }
        Some(held)
    }

    /// What is told of by [`Self::gone`] from here on goes back at once, in this order.
    pub(super) fn give_back(&mut self) {
        self.given_back.begin();
    }

    /// One goes back to the broker: nothing is handled that may overtake it.
    pub(super) fn gone(&mut self, held: &Held, now: Tick) {
        let (source, turn) = held.turn;
        let latest = held.receipts.iter().rev().find(|(of, _)| *of == source);
        if let Some((_, receipt)) = latest {
            self.given_back.note((source, held.lane_id), held.delivery.message_id, turn, *receipt, now);
        }
    }

    /// What became of what goes back; answers what else is to go back there then.
    pub(super) fn answered(&mut self, answered: &Answered) -> Vec<Receipt> {
        self.given_back.answered(answered)
    }

    /// Messages in hand.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Those of them that are stored here, and the bytes of their payloads.
    pub(super) fn stored(&self) -> (usize, usize) {
        let stored = self.entries.iter().flatten().filter(|held| held.is_stored);
        stored.fold((0, 0), |(count, bytes), held| (count + 1, bytes + held.delivery.payload.len()))
    }

    /// Every slot in use.
    pub(super) fn slots(&self) -> Vec<Slot> {
        (0..self.entries.len()).filter(|slot| self.entries[*slot].is_some()).collect()
    }
}
