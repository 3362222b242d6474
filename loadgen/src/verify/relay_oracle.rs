//! The oracle of `relay`: what arrived, against the effects in the database and what came out at the other end.
//!
//! It shares no code with the engine, and judges after everything has gone quiet.
//!
//! Invariants
//! - Each message that was sent has one effect and one message of its bytes at the other end, which may come in copies
//!   of one id.
//! - Along a stream, effects and first copies are in the order in which the messages arrived.

use std::collections::{HashMap, HashSet};

use serde::Serialize;
use uuid::Uuid;

use super::oracle::Verdict;
use crate::sink::journal::Entry;

/// A message that was sent; those of a stream in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Sent {
    pub message_id: Uuid,
    pub stream_id: Option<Uuid>,
    /// Of bytes that no other message has.
    pub payload_hash: u64,
}

/// What a handler has written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effect {
    /// The message that it handled.
    pub message_id: Uuid,
    /// When, in seconds of the database's clock.
    pub at_s: f64,
    /// The database's process that wrote it.
    pub backend: i32,
    /// The handler's try, from 1.
    pub attempt: i32,
}

/// So many examples are kept of each kind.
const EXAMPLES_MAX: usize = 5;

/// What it found. All but `arrivals` must be 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Relayed {
    /// Messages that were sent, once each.
    pub arrivals: u64,
    /// Of these: without an effect.
    pub effects_lost: u64,
    /// Of these: nothing of it came out.
    pub relayed_lost: u64,
    /// Effects of one message beyond the first, in the database or as further messages at the other end.
    pub double_effects: u64,
    /// Effects that were written before those of a predecessor.
    pub effects_out_of_order: u64,
    /// First copies that came out before a predecessor's.
    pub relayed_out_of_order: u64,
    /// Effects of messages that nobody sent.
    pub strangers: u64,
    /// Arrivals that the broker still has: they were never settled.
    pub unsettled: u64,
    /// The first effects that are out of order or missing: the message, and what is known of it.
    pub examples: Vec<String>,
}

impl Relayed {
    /// Whether nothing is missing.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.effects_lost == 0 && self.relayed_lost == 0
    }

    /// Into the verdict of all.
    pub fn add_to(&self, verdict: &mut Verdict) {
        verdict.lost += self.effects_lost + self.relayed_lost + self.unsettled;
        verdict.order_violations += self.effects_out_of_order + self.relayed_out_of_order;
        verdict.double_effects += self.double_effects;
        verdict.phantoms += self.strangers;
    }

    /// Prints it.
    pub fn show(&self) {
        println!("{} arrivals", self.arrivals);
        for (name, found) in [
            ("without an effect", self.effects_lost),
            ("not relayed", self.relayed_lost),
            ("double effects", self.double_effects),
            ("effects out of order", self.effects_out_of_order),
            ("relayed out of order", self.relayed_out_of_order),
            ("effects of messages nobody sent", self.strangers),
            ("never settled", self.unsettled),
        ] {
            println!("  {name:40} {found}");
        }
        for example in &self.examples {
            eprintln!("{example}");
        }
    }
}

/// Judges; effects in the order in which they were written.
#[must_use]
pub fn judge(sent: &[Sent], effects: &[Effect], journal: &[Entry]) -> Relayed {
    let by_id: HashMap<Uuid, usize> = sent.iter().enumerate().map(|(at, sent)| (sent.message_id, at)).collect();
    let by_hash: HashMap<u64, usize> = sent.iter().enumerate().map(|(at, sent)| (sent.payload_hash, at)).collect();
    let mut written = Line::new(sent);
    let mut strangers = 0;
    let mut examples = Vec::new();
    for (place, effect) in effects.iter().enumerate() {
        match by_id.get(&effect.message_id) {
            Some(at) if !written.take(*at) && examples.len() < EXAMPLES_MAX => {
                examples.push(around(sent, effects, place));
            }
            Some(_) => {}
            None => strangers += 1,
        }
    }
    let missing = sent.iter().zip(&written.seen).filter(|(_, seen)| !**seen).map(|(sent, _)| sent.message_id);
    examples.extend(missing.take(EXAMPLES_MAX).map(|message_id| format!("{message_id} has no effect")));
    let mut out = Line::new(sent);
    let mut ids = HashSet::new();
    for entry in journal {
        // Further copies of one id are the outbox's; others of the stream are other writers'.
        if let Some(at) = by_hash.get(&entry.message.payload_hash)
            && ids.insert(entry.message.message_id)
        {
            _ = out.take(*at);
        }
    }
    Relayed {
        arrivals: sent.len() as u64,
        effects_lost: written.missing(),
        relayed_lost: out.missing(),
        double_effects: written.again + out.again,
        effects_out_of_order: written.out_of_order,
        relayed_out_of_order: out.out_of_order,
        strangers,
        unsettled: 0,
        examples,
    }
}

/// What was written of a message's stream before and after it.
fn around(sent: &[Sent], effects: &[Effect], place: usize) -> String {
    let of_stream: HashMap<Uuid, usize> = {
        let stream_of = |id| sent.iter().find(|sent| sent.message_id == id).and_then(|sent| sent.stream_id);
        let stream_id = stream_of(effects[place].message_id);
        let own = sent.iter().filter(|sent| sent.stream_id == stream_id).enumerate();
        own.map(|(number, sent)| (sent.message_id, number)).collect()
    };
    let line = |effect: &Effect| {
        let Effect { message_id, at_s, backend, attempt } = effect;
        of_stream.get(message_id).map(|number| format!("{number} at {at_s:.3} by {backend} try {attempt}"))
    };
    let mut before: Vec<String> = effects[..place].iter().rev().filter_map(line).take(6).collect();
    before.reverse();
    let after = effects[place + 1..].iter().filter_map(line).take(4);
    let this = line(&effects[place]).unwrap_or_default();
    let before = before.join(", ");
    format!("{}: {before}, HERE {this}, {}", effects[place].message_id, after.collect::<Vec<_>>().join(", "))
}

/// What was sent, as it comes by at one place.
struct Line<'a> {
    sent: &'a [Sent],
    seen: Vec<bool>,
    /// The last that came first, of each stream.
    highest: HashMap<Uuid, usize>,
    again: u64,
    out_of_order: u64,
}

impl<'a> Line<'a> {
    fn new(sent: &'a [Sent]) -> Self {
        Self { sent, seen: vec![false; sent.len()], highest: HashMap::new(), again: 0, out_of_order: 0 }
    }

    /// Whether it comes once and in its place.
    fn take(&mut self, at: usize) -> bool {
        if std::mem::replace(&mut self.seen[at], true) {
            self.again += 1;
            return false;
        }
        let Some(stream_id) = self.sent[at].stream_id else { return true };
        let highest = self.highest.entry(stream_id).or_insert(at);
        let is_late = at < *highest;
        self.out_of_order += u64::from(is_late);
        *highest = (*highest).max(at);
        !is_late
    }

    fn missing(&self) -> u64 {
        self.seen.iter().filter(|seen| !**seen).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::frames::SinkMessage;

    fn sent(id: u128, stream: Option<u128>) -> Sent {
        Sent { message_id: Uuid::from_u128(id), stream_id: stream.map(Uuid::from_u128), payload_hash: id as u64 }
    }

    /// Of a message's bytes, under another id.
    fn out(of: u64, id: u128) -> Entry {
        let message = SinkMessage {
            message_id: Uuid::from_u128(id),
            stream_id: Uuid::nil(),
            stream_seq: 0,
            version: 0,
            fence: 1,
            destination_hash: 3,
            payload_hash: of,
        };
        Entry { message, answered_unknown: false }
    }

    fn of(effects: &[u128], journal: &[Entry]) -> Relayed {
        let sent = [sent(1, Some(7)), sent(2, Some(7)), sent(3, None)];
        let effect = |id: &u128| Effect { message_id: Uuid::from_u128(*id), at_s: 0.0, backend: 5, attempt: 1 };
        let effects: Vec<Effect> = effects.iter().map(effect).collect();
        let relayed = judge(&sent, &effects, journal);
        let wrong = relayed.effects_out_of_order + relayed.effects_lost;
        assert!(wrong == 0 || !relayed.examples.is_empty(), "what is wrong has an example");
        Relayed { examples: Vec::new(), ..relayed }
    }

    #[test]
    fn one_effect_and_one_message_each_is_clean_whatever_copies_and_others_come() {
        let journal = [out(3, 30), out(1, 10), out(99, 98), out(1, 10), out(2, 20), out(1, 10)];
        assert_eq!(of(&[3, 1, 2], &journal), Relayed { arrivals: 3, ..Relayed::default() });
    }

    #[test]
    fn each_broken_promise_is_seen() {
        let journal = [out(1, 10), out(2, 20), out(3, 30)];
        let clean = || Relayed { arrivals: 3, ..Relayed::default() };
        assert_eq!(of(&[1, 3], &journal), Relayed { effects_lost: 1, ..clean() });
        assert_eq!(of(&[1, 2, 3, 1], &journal), Relayed { double_effects: 1, ..clean() });
        assert_eq!(of(&[2, 1, 3], &journal), Relayed { effects_out_of_order: 1, ..clean() });
        assert_eq!(of(&[1, 2, 3, 4], &journal), Relayed { strangers: 1, ..clean() });
        assert_eq!(of(&[1, 2, 3], &journal[..2]), Relayed { relayed_lost: 1, ..clean() });
        assert_eq!(
            of(&[1, 2, 3], &[journal[1], journal[0], journal[2]]),
            Relayed { relayed_out_of_order: 1, ..clean() }
        );
        let twice = [journal[0], journal[1], journal[2], out(2, 21)];
        assert_eq!(of(&[1, 2, 3], &twice), Relayed { double_effects: 1, ..clean() });
        let mut verdict = Verdict::default();
        Relayed { effects_lost: 1, unsettled: 1, double_effects: 2, strangers: 4, ..clean() }.add_to(&mut verdict);
        assert_eq!((verdict.lost, verdict.double_effects, verdict.phantoms), (2, 2, 4));
        assert!(verdict.broken(0));
    }
}
