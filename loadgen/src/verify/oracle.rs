//! The oracle: what a sink got, against what the database holds and what callers were promised.
//!
//! It shares no code with the engine, and judges after everything has gone quiet.
//!
//! Invariants
//! - *To be published* is every event in the event store, every other message still in the outbox, and every
//!   message whose store was acknowledged to somebody.
//! - The first copies of one stream are in the order of its numbers, whoever wrote them.
//! - Events at the sink that the database does not hold came out of a transaction that never was.

use std::collections::{HashMap, HashSet};

use uuid::Uuid;

use crate::sink::frames::SinkMessage;
use crate::sink::journal::Entry;

/// A message that is to be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Stored {
    pub message_id: Uuid,
    pub stream_id: Uuid,
    pub stream_seq: i64,
    /// 0: not an event.
    pub version: i64,
    pub payload_hash: u64,
}

/// Everything the oracle looks at.
#[derive(Debug, Default)]
pub struct Evidence {
    /// The sink's journal.
    pub journal: Vec<Entry>,
    /// The event store.
    pub events: Vec<Stored>,
    /// What is left of the outbox.
    pub outbox: Vec<Stored>,
    /// What callers were told is stored.
    pub acknowledged: Vec<Stored>,
}

/// What it found. All but `copies` must be 0; copies have a bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Verdict {
    /// Messages that were to be published.
    pub messages: u64,
    /// First copies that came before a predecessor's.
    pub order_violations: u64,
    /// Messages of which no copy came, or that were acknowledged and are not stored.
    pub lost: u64,
    /// Copies beyond the first.
    pub copies: u64,
    /// Copies whose sender had been told nothing certain about an earlier one.
    pub copies_after_unknown: u64,
    /// Events at the sink that are not stored.
    pub phantoms: u64,
    /// Messages whose payload, stream or number at the sink is not the stored one.
    pub altered: u64,
    /// Numbers of a stream given to two messages.
    pub numbers_given_twice: u64,
    /// Streams whose versions are not 1, 2, 3 ….
    pub version_gaps: u64,
    /// Effects of one arrival beyond the first (`relay`).
    pub double_effects: u64,
}

impl Verdict {
    /// Whether a promise was broken.
    #[must_use]
    pub fn broken(&self, copies_max: u64) -> bool {
        self.findings().iter().any(|(_, found)| *found > 0) || self.copies > copies_max
    }

    /// What must be 0, with its name.
    #[must_use]
    pub fn findings(&self) -> [(&'static str, u64); 7] {
        [
            ("order violations", self.order_violations),
            ("lost", self.lost),
            ("events published that are not stored", self.phantoms),
            ("altered", self.altered),
            ("numbers given twice", self.numbers_given_twice),
            ("streams with gaps in their versions", self.version_gaps),
            ("double effects", self.double_effects),
        ]
    }
}

/// Judges.
#[must_use]
pub fn judge(evidence: &Evidence) -> Verdict {
    let mut verdict = Verdict::default();
    let events: HashMap<Uuid, &Stored> = evidence.events.iter().map(|event| (event.message_id, event)).collect();
    let mut wanted: HashMap<Uuid, &Stored> = HashMap::new();
    for stored in evidence.events.iter().chain(&evidence.outbox).chain(&evidence.acknowledged) {
        let known = wanted.entry(stored.message_id).or_insert(stored);
        verdict.altered += u64::from(*known != stored);
    }
    verdict.messages = wanted.len() as u64;
    for acknowledged in &evidence.acknowledged {
        if acknowledged.version > 0 && !events.contains_key(&acknowledged.message_id) {
            verdict.lost += 1;
        }
    }
    let arrived = read_journal(evidence, &wanted, &events, &mut verdict);
    verdict.lost += wanted.keys().filter(|id| !arrived.contains(*id)).count() as u64;
    verdict.numbers_given_twice = doubles(wanted.values().map(|stored| (stored.stream_id, stored.stream_seq)));
    verdict.version_gaps = version_gaps(&evidence.events);
    verdict
}

fn read_journal(
    evidence: &Evidence,
    wanted: &HashMap<Uuid, &Stored>,
    events: &HashMap<Uuid, &Stored>,
    verdict: &mut Verdict,
) -> HashSet<Uuid> {
    let mut arrived: HashMap<Uuid, bool> = HashMap::with_capacity(wanted.len());
    // Highest number so far of each stream and destination.
    let mut highest: HashMap<(Uuid, u64), i64> = HashMap::new();
    for entry in &evidence.journal {
        let message = &entry.message;
        if let Some(unknown) = arrived.get_mut(&message.message_id) {
            verdict.copies += 1;
            verdict.copies_after_unknown += u64::from(*unknown);
            *unknown |= entry.answered_unknown;
            continue;
        }
        arrived.insert(message.message_id, entry.answered_unknown);
        match wanted.get(&message.message_id) {
            Some(stored) => verdict.altered += u64::from(!same(message, stored)),
            None => verdict.phantoms += u64::from(message.version > 0 && !events.contains_key(&message.message_id)),
        }
        if message.stream_id.is_nil() {
            continue;
        }
        let highest = highest.entry((message.stream_id, message.destination_hash)).or_insert(0);
        verdict.order_violations += u64::from(message.stream_seq < *highest);
        *highest = (*highest).max(message.stream_seq);
    }
    arrived.into_keys().collect()
}

fn same(message: &SinkMessage, stored: &Stored) -> bool {
    (message.stream_id, message.stream_seq, message.version, message.payload_hash)
        == (stored.stream_id, stored.stream_seq, stored.version, stored.payload_hash)
}

fn doubles(numbers: impl Iterator<Item = (Uuid, i64)>) -> u64 {
    let mut seen = HashSet::new();
    numbers.filter(|(stream, _)| !stream.is_nil()).filter(|number| !seen.insert(*number)).count() as u64
}

fn version_gaps(events: &[Stored]) -> u64 {
    let mut of_stream: HashMap<Uuid, (i64, i64)> = HashMap::new();
    for event in events {
        let (count, highest) = of_stream.entry(event.stream_id).or_default();
        *count += 1;
        *highest = (*highest).max(event.version);
    }
    of_stream.values().filter(|(count, highest)| count != highest).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(id: u128, seq: i64) -> Stored {
        Stored {
            message_id: Uuid::from_u128(id),
            stream_id: Uuid::from_u128(99),
            stream_seq: seq,
            version: seq,
            payload_hash: 5,
        }
    }

    fn entry(id: u128, seq: i64) -> Entry {
        let Stored { message_id, stream_id, stream_seq, version, payload_hash } = stored(id, seq);
        let message =
            SinkMessage { message_id, stream_id, stream_seq, version, fence: 1, destination_hash: 3, payload_hash };
        Entry { message, answered_unknown: false }
    }

    fn of(journal: &[Entry], events: &[Stored], acknowledged: &[Stored]) -> Verdict {
        judge(&Evidence {
            journal: journal.to_vec(),
            events: events.to_vec(),
            outbox: Vec::new(),
            acknowledged: acknowledged.to_vec(),
        })
    }

    #[test]
    fn a_clean_run_is_clean_and_a_late_copy_is_a_copy() {
        let events = [stored(1, 1), stored(2, 2)];
        let verdict = of(&[entry(1, 1), entry(2, 2), entry(1, 1)], &events, &events[..1]);
        assert_eq!(verdict, Verdict { messages: 2, copies: 1, ..Verdict::default() });
        assert!(verdict.broken(0) && !verdict.broken(1));
    }

    #[test]
    fn each_broken_promise_is_seen() {
        let events = [stored(1, 1), stored(2, 2)];
        let clean = [entry(1, 1), entry(2, 2)];
        assert_eq!(of(&[clean[1], clean[0]], &events, &[]).order_violations, 1);
        assert_eq!(of(&clean[..1], &events, &[]).lost, 1, "stored and never published");
        assert_eq!(
            of(&[clean[0], clean[1], entry(3, 3)], &events, &[stored(3, 3)]).lost,
            1,
            "acknowledged, not stored"
        );
        assert_eq!(of(&[clean[0], clean[1], entry(3, 3)], &events, &[]).phantoms, 1);
        let mut other_bytes = clean;
        other_bytes[0].message.payload_hash = 6;
        assert_eq!(of(&other_bytes, &events, &[]).altered, 1);
        assert_eq!(of(&[clean[0], entry(2, 1)], &[events[0], stored(2, 1)], &[]).numbers_given_twice, 1);
        assert_eq!(of(&[entry(2, 2)], &events[1..], &[]).version_gaps, 1);
    }

    #[test]
    fn a_copy_after_an_unknown_answer_is_told_apart() {
        let mut journal = [entry(1, 1), entry(1, 1)];
        journal[0].answered_unknown = true;
        let verdict = of(&journal, &[stored(1, 1)], &[]);
        assert_eq!((verdict.copies, verdict.copies_after_unknown), (1, 1));
    }
}
