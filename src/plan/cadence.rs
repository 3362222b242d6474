//! When a shard looks into the database for work it has not been told of.
//!
//! Invariants
//! - While the listener has proved itself, whoever stores says so: the first interval is the relaxed one (if that is
//!   the longer), doubling from the second empty look, up to the maximum.
//! - While it has not, nothing is certain to be heard: every interval is the base, however much is empty.
//! - Work that nobody has said shows that somebody stores silently (plain SQL without `announce`): the intervals begin
//!   at the base again until work is found that was said.
//! - Any work, and any wake-up, brings it back to the first interval; many wake-ups are one look.
//! - Only polls are spaced here. What is due at a time (scheduled messages, parked lanes) is none and is not delayed.

use crate::time::Tick;

/// What a look has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// No log row that matters here.
    Nothing,
    /// Log rows of this shard's own flushes, which it knew of.
    Own,
    /// What somebody else has stored.
    Others,
}

/// The intervals, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intervals {
    /// While nothing is certain to be heard, and the first one while somebody stores silently.
    pub base_ms: u64,
    /// The first one while the listener is healthy, if it is longer than the base and not above the longest.
    pub relaxed_ms: u64,
    /// The longest.
    pub max_ms: u64,
}

/// An adaptive poll.
#[derive(Clone, Copy, Debug)]
pub struct Cadence {
    intervals: Intervals,
    listening: bool,
    silent: bool,
    told_at: Option<Tick>,
    empty_count: u32,
    looked_at: Tick,
    due: Tick,
}

impl Cadence {
    /// Due at once; the listener has not proved itself yet.
    #[must_use]
    pub fn new(intervals: Intervals) -> Self {
        Self {
            intervals,
            listening: false,
            silent: false,
            told_at: None,
            empty_count: 0,
            looked_at: Tick(0),
            due: Tick(0),
        }
    }

    /// A look has ended.
    pub fn after(&mut self, found: Found, now: Tick) {
        self.empty_count = if found == Found::Nothing { self.empty_count.saturating_add(1) } else { 0 };
        if found == Found::Others {
            // What comes so soon after a word is taken to be what it was about.
            let recent = |told_at: Tick| now.since_us(told_at) <= self.intervals.base_ms * 1000;
            self.silent = !self.told_at.is_some_and(recent);
        }
        self.looked_at = now;
        self.due = now.plus_ms(self.interval_ms());
    }

    /// When to look next.
    #[must_use]
    pub fn due(&self) -> Tick {
        self.due
    }

    /// Somebody says there is work: look now.
    pub fn told(&mut self, now: Tick) {
        self.told_at = Some(now);
        self.hurry(now);
    }

    /// There may be work, though nobody has said so: look now.
    pub fn hurry(&mut self, now: Tick) {
        self.empty_count = 0;
        self.due = now;
    }

    /// Whether the listener has proved itself and is believed to hear everything. A change counts from the last look.
    pub fn listen(&mut self, listening: bool) {
        if self.listening == listening {
            return;
        }
        // A look that is due is not put off.
        let waits = self.due > self.looked_at;
        self.listening = listening;
        self.empty_count = 0;
        if waits {
            self.due = self.looked_at.plus_ms(self.interval_ms());
        }
    }

    fn interval_ms(&self) -> u64 {
        let Intervals { base_ms, relaxed_ms, max_ms } = self.intervals;
        if !self.listening {
            return base_ms;
        }
        let first_ms = if self.silent { base_ms } else { base_ms.max(relaxed_ms) };
        let doublings = self.empty_count.saturating_sub(1).min(10);
        (first_ms << doublings).min(max_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: Intervals = Intervals { base_ms: 250, relaxed_ms: 5_000, max_ms: 10_000 };

    fn listening(intervals: Intervals) -> Cadence {
        let mut cadence = Cadence::new(intervals);
        cadence.listen(true);
        cadence
    }

    /// The waits after so many looks in a row, each begun when it was due.
    fn waits(cadence: &mut Cadence, found: Found, count: usize) -> Vec<u64> {
        let mut now = cadence.due();
        (0..count)
            .map(|_| {
                cadence.after(found, now);
                let wait_ms = cadence.due().since_us(now) / 1000;
                now = cadence.due();
                wait_ms
            })
            .collect()
    }

    #[test]
    fn it_doubles_from_the_second_empty_look_up_to_the_maximum() {
        let mut cadence = listening(Intervals { relaxed_ms: 0, ..USUAL });
        assert_eq!(waits(&mut cadence, Found::Nothing, 9), [250, 500, 1000, 2000, 4000, 8000, 10_000, 10_000, 10_000]);
        assert_eq!(waits(&mut cadence, Found::Own, 2), [250, 250]);
        assert_eq!(waits(&mut cadence, Found::Nothing, 3), [250, 500, 1000]);
    }

    #[test]
    fn a_healthy_listener_relaxes_it_at_once_and_work_that_was_said_keeps_it_so() {
        let mut cadence = listening(USUAL);
        assert_eq!(waits(&mut cadence, Found::Nothing, 4), [5_000, 10_000, 10_000, 10_000]);
        let now = cadence.due();
        cadence.told(now);
        assert_eq!(cadence.due(), now);
        cadence.after(Found::Others, now.plus_ms(3));
        assert_eq!(cadence.due(), now.plus_ms(5_003));
        // A base that is longer than the relaxed one stays the base.
        let mut slow = listening(Intervals { base_ms: 7_000, ..USUAL });
        assert_eq!(waits(&mut slow, Found::Nothing, 3), [7_000, 10_000, 10_000]);
        // And nothing is longer than the longest.
        let mut quick = listening(Intervals { max_ms: 1_000, ..USUAL });
        assert_eq!(waits(&mut quick, Found::Nothing, 2), [1_000, 1_000]);
    }

    #[test]
    fn without_a_healthy_listener_it_stays_at_the_base() {
        let mut cadence = Cadence::new(USUAL);
        assert_eq!(waits(&mut cadence, Found::Nothing, 30), [250; 30]);
        cadence.listen(true);
        assert_eq!(waits(&mut cadence, Found::Nothing, 2), [5_000, 10_000]);
        // It goes deaf in the middle of a long wait: that is over.
        let looked_at = Tick(cadence.due().0 - 10_000_000);
        cadence.listen(false);
        assert_eq!(cadence.due(), looked_at.plus_ms(250));
    }

    #[test]
    fn a_look_that_is_due_is_not_put_off_by_a_listener_that_gets_well() {
        let mut cadence = Cadence::new(USUAL);
        cadence.after(Found::Nothing, Tick(1_000_000));
        cadence.hurry(Tick(1_000_000));
        cadence.listen(true);
        assert_eq!(cadence.due(), Tick(1_000_000));
    }

    #[test]
    fn work_that_nobody_has_said_brings_the_base_back_until_work_is_said() {
        let mut cadence = listening(USUAL);
        assert_eq!(waits(&mut cadence, Found::Others, 1), [250]);
        assert_eq!(waits(&mut cadence, Found::Nothing, 7), [250, 500, 1000, 2000, 4000, 8000, 10_000]);
        // A look that nobody asked for by a word is no word.
        cadence.hurry(cadence.due());
        assert_eq!(waits(&mut cadence, Found::Others, 2), [250, 250]);
        let now = cadence.due();
        cadence.told(now);
        cadence.after(Found::Others, now.plus_ms(250));
        assert_eq!(waits(&mut cadence, Found::Nothing, 2), [5_000, 10_000]);
    }
}
