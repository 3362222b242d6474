//! What a shard remembers of its streams: the last numbers given, and how far the lanes have been fed.
//!
//! Invariants
//! - `last_seq`/`last_version` are the database's as of the shard's last flush of the stream, if *known*.
//!   All are forgotten at once (a new generation) whenever somebody else may have stored into a partition of this
//!   shard, or it itself did not learn what it stored: the claim passed a log row that is not owned, a flush had no
//!   answer, the fence was lost, another epoch began, a number was taken. (A row that is owned was written under the
//!   fence of partitions that are not this shard's, or by itself.) An answer to a flush that was sent in an older
//!   generation makes nothing known.
//! - `fed_seq`: every message of the stream up to this number has been admitted to its lanes, parked or
//!   resolved, as far as this owner knows. Admission from memory needs `fed_seq + 1 == k`.
//! - `waiting` counts own rows that stand in memory and wait for the claim; an entry with any is kept.
//!
//! Cost: one hash look-up a row; nothing is allocated below `streams_max` entries.

use hashbrown::HashMap;
use uuid::Uuid;

/// One remembered stream.
#[derive(Clone, Copy, Debug, Default)]
pub struct StreamEntry {
    /// Last number given.
    pub last_seq: i64,
    /// Last version given.
    pub last_version: i64,
    /// Fed to the lanes up to here; `UNFED` if unknown.
    pub fed_seq: i64,
    /// Own rows waiting for the claim.
    pub waiting: u32,
    /// The generation in which `last_seq` and `last_version` were learnt; 0 for never.
    known_in: u64,
    /// The flush that is being made up, and the stream's index in it.
    mark: u64,
    index: u32,
}

/// Nothing is known about what the lanes have been fed.
pub const UNFED: i64 = -1;

/// The remembered streams.
#[derive(Debug)]
pub struct Numbers {
    entries: HashMap<Uuid, StreamEntry>,
    streams_max: usize,
    mark: u64,
    generation: u64,
}

impl Numbers {
    /// Room for so many streams.
    #[must_use]
    pub fn with_capacity(streams_max: usize) -> Self {
        Self { entries: HashMap::with_capacity(streams_max.min(1 << 16)), streams_max, mark: 0, generation: 1 }
    }

    /// Begins to make up a flush: indexes given before are void.
    pub fn begin_flush(&mut self) {
        self.shed();
        self.mark += 1;
    }

    /// Sheds memory when over the bound. Not while a flush is being made up.
    pub fn shed(&mut self) {
        if self.entries.len() > self.streams_max {
            // Rare and whole: what is shed costs one look-up when the stream comes again.
            self.entries.retain(|_, entry| entry.waiting > 0);
        }
    }

    /// The stream's index in the flush being made up; `next` if it is new to it (then the second value is
    /// true).
    pub fn index_in_flush(&mut self, stream: Uuid, next: u32) -> (u32, bool, StreamEntry) {
        let mark = self.mark;
        let entry = self.entries.entry(stream).or_insert(StreamEntry { fed_seq: UNFED, ..StreamEntry::default() });
        if entry.mark == mark {
            return (entry.index, false, *entry);
        }
        entry.mark = mark;
        entry.index = next;
        (next, true, *entry)
    }

    /// The stream's entry, made if missing.
    pub fn entry(&mut self, stream: Uuid) -> &mut StreamEntry {
        self.entries.entry(stream).or_insert(StreamEntry { fed_seq: UNFED, ..StreamEntry::default() })
    }

    /// The generation of what is known now: kept by a flush from its sending to its answer.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether the entry's last numbers may be used.
    #[must_use]
    pub fn is_known(&self, entry: &StreamEntry) -> bool {
        entry.known_in == self.generation
    }

    /// Sets a stream's last numbers as learnt by a flush that was sent in `generation`.
    pub fn learn(&mut self, stream: Uuid, last_seq: i64, last_version: i64, generation: u64) {
        let entry = self.entry(stream);
        entry.last_seq = last_seq;
        entry.last_version = last_version;
        entry.known_in = generation;
    }

    /// Forgets a stream's last numbers, not how far it was fed.
    pub fn forget(&mut self, stream: Uuid) {
        if let Some(entry) = self.entries.get_mut(&stream) {
            entry.known_in = 0;
        }
    }

    /// Forgets all last numbers, not how far the streams were fed.
    pub fn forget_numbers(&mut self) {
        self.generation += 1;
    }

    /// Forgets how far the lanes were fed: the reader goes back.
    pub fn forget_fed(&mut self) {
        self.entries.values_mut().for_each(|entry| entry.fed_seq = UNFED);
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.generation += 1;
    }

    /// Number of remembered streams.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(number: u128) -> Uuid {
        Uuid::from_u128(number)
    }

    #[test]
    fn a_stream_has_one_index_in_a_flush_and_another_in_the_next() {
        let mut numbers = Numbers::with_capacity(10);
        numbers.begin_flush();
        let taken = |(index, is_new, _): (u32, bool, StreamEntry)| (index, is_new);
        assert_eq!(taken(numbers.index_in_flush(stream(1), 0)), (0, true));
        assert_eq!(taken(numbers.index_in_flush(stream(2), 1)), (1, true));
        assert_eq!(taken(numbers.index_in_flush(stream(1), 2)), (0, false));
        numbers.begin_flush();
        assert_eq!(taken(numbers.index_in_flush(stream(2), 0)), (0, true));
    }

    #[test]
    fn what_an_older_generation_says_makes_nothing_known() {
        let mut numbers = Numbers::with_capacity(10);
        let sent_in = numbers.generation();
        numbers.learn(stream(1), 5, 2, sent_in);
        let entry = *numbers.entry(stream(1));
        assert!(numbers.is_known(&entry) && (entry.last_seq, entry.last_version) == (5, 2));
        numbers.forget_numbers();
        assert!(!numbers.is_known(&entry), "somebody else has stored");
        // The answer to a flush that was on its way meanwhile.
        numbers.learn(stream(1), 6, 3, sent_in);
        let entry = *numbers.entry(stream(1));
        assert!(!numbers.is_known(&entry));
        numbers.learn(stream(1), 7, 3, numbers.generation());
        let entry = *numbers.entry(stream(1));
        assert!(numbers.is_known(&entry));
    }

    #[test]
    fn forgetting_numbers_keeps_how_far_the_lanes_were_fed_and_clearing_does_not() {
        let mut numbers = Numbers::with_capacity(10);
        numbers.entry(stream(1)).fed_seq = 4;
        numbers.forget_numbers();
        assert_eq!(numbers.entry(stream(1)).fed_seq, 4);
        numbers.clear();
        assert_eq!(numbers.entry(stream(1)).fed_seq, UNFED);
    }

    #[test]
    fn memory_is_shed_above_the_bound_except_for_streams_with_waiting_rows() {
        let mut numbers = Numbers::with_capacity(3);
        for number in 1..=4 {
            numbers.entry(stream(number)).fed_seq = 1;
        }
        numbers.entry(stream(2)).waiting = 1;
        numbers.shed();
        assert_eq!((numbers.len(), numbers.entry(stream(2)).fed_seq), (1, 1));
        numbers.shed();
        assert_eq!(numbers.len(), 1, "within the bound nothing goes");
    }
}
