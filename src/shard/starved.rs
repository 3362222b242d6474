//! Streams at whose locks others leave no gap: the flush waits for them at times.
//!
//! Invariants
//! - A flush only tries, at first: whoever works on a stream for long holds up that stream's messages and no other.
//! - What was locked at every try for [`TRIED_US`] is waited for in its queue, [`STREAM_PATIENCE_MS`] at most: the shorter
//!   time at first, twice as long after each wait that was in vain. So a stream that callers queue for without a pause is
//!   the owner's when it is its turn, if that comes within the longer time. In a longer queue it is not reached: the
//!   owner's messages wait for the first gap then.
//! - So the other streams of the shard wait for that for one [`SHARE`]th of the time at most, however long it is held.
//!
//! [`STREAM_PATIENCE_MS`]: crate::limits::STREAM_PATIENCE_MS

use hashbrown::HashMap;
use uuid::Uuid;

use crate::limits::STREAM_PATIENCE_MS;
use crate::time::Tick;

/// How long a stream is only tried for.
const TRIED_US: u64 = 250_000;
/// Of the time that follows a wait, what it may have taken.
const SHARE: u64 = 16;
/// Streams that one flush waits for, and fewer where each is waited for longer: their waits add up.
const STREAMS_MAX: usize = 4;
/// Streams that are remembered. Beyond them all are forgotten: they are tried for a little longer.
const REMEMBERED_MAX: usize = 4_096;

/// Since when streams are locked elsewhere.
#[derive(Debug)]
pub(super) struct Starved {
    since: HashMap<Uuid, Tick>,
    not_before: Tick,
    patience_ms: u64,
    patience_ms_max: u64,
}

impl Starved {
    /// For calls that may take so long: a quarter of it for one lock.
    pub(super) fn new(call_timeout_ms: u64) -> Self {
        let (first, longest) = STREAM_PATIENCE_MS;
        let patience_ms_max = longest.min(call_timeout_ms / 4).max(first);
        Self { since: HashMap::new(), not_before: Tick::default(), patience_ms: first, patience_ms_max }
    }

    /// These were locked elsewhere.
    pub(super) fn busy(&mut self, streams: &[Uuid], now: Tick) {
        if self.since.len() + streams.len() > REMEMBERED_MAX {
            self.since.clear();
        }
        for stream in streams.iter().take(REMEMBERED_MAX) {
            self.since.entry(*stream).or_insert(now);
        }
    }

    /// These were not.
    pub(super) fn stored(&mut self, streams: &[Uuid]) {
        if !self.since.is_empty() {
            self.since.retain(|stream, _| !streams.contains(stream));
        }
    }

    /// Which of a flush's streams it is to wait for, by their index.
    pub(super) fn of(&self, streams: &[Uuid], now: Tick) -> Vec<u32> {
        if self.since.is_empty() || now < self.not_before {
            return Vec::new();
        }
        let is_due = |stream: &Uuid| self.since.get(stream).is_some_and(|since| now.since_us(*since) >= TRIED_US);
        let due = streams.iter().enumerate().filter(|(_, stream)| is_due(stream));
        let fitting = (self.patience_ms_max / self.patience_ms).clamp(1, STREAMS_MAX as u64);
        due.map(|(at, _)| at as u32).take(fitting as usize).collect()
    }

    /// How long the next flush waits for one of them.
    pub(super) fn patience_ms(&self) -> u64 {
        self.patience_ms
    }

    /// A flush has waited; in vain where one of its streams was still locked.
    pub(super) fn waited(&mut self, sent: Tick, now: Tick, in_vain: bool) {
        self.not_before = now.plus_us(now.since_us(sent).saturating_mul(SHARE));
        let longer = (self.patience_ms * 2).min(self.patience_ms_max);
        self.patience_ms = if in_vain { longer } else { STREAM_PATIENCE_MS.0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_locked_at_every_try_is_waited_for_and_not_all_the_time() {
        let streams: Vec<Uuid> = (0..9).map(Uuid::from_u128).collect();
        let at = |ms: u64| Tick(1_000_000).plus_ms(ms);
        let mut starved = Starved::new(15_000);
        starved.busy(&streams[..7], at(0));
        starved.busy(&streams[..7], at(200));
        assert!(starved.of(&streams, at(249)).is_empty(), "it is tried first");
        assert_eq!(starved.of(&streams, at(250)), [0, 1, 2, 3]);
        assert_eq!(starved.patience_ms(), 250);
        starved.waited(at(250), at(350), true);
        assert!(starved.of(&streams, at(350 + 1_599)).is_empty(), "the other streams have their time");
        starved.stored(&streams[..3]);
        assert_eq!(starved.of(&streams, at(350 + 1_600)), [3, 4, 5, 6]);
        starved.busy(&streams[..1], at(2_000));
        assert_eq!(starved.of(&streams[..1], at(2_100)), [0u32; 0], "from the beginning");
        let mut patience = Vec::new();
        for in_vain in [true, true, true, false] {
            starved.waited(at(2_000), at(2_100), in_vain);
            patience.push(starved.patience_ms());
        }
        assert_eq!(patience, [1_000, 2_000, 2_000, 250], "it follows the queue");
        let mut short = Starved::new(2_400);
        short.waited(at(0), at(250), true);
        short.waited(at(0), at(250), true);
        assert_eq!(short.patience_ms(), 600, "a quarter of a call");
        short.busy(&streams, at(0));
        assert_eq!(short.of(&streams, at(9_000)), [0], "one at a time");
    }
}
