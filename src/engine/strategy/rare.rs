//! A warning that may have cause a thousand times a second, and is said once a minute.
//!
//! Invariant: what was not said is counted, and said with the next one.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::time::Tick;

/// Between two of them.
const PAUSE_US: u64 = 60_000_000;

/// One warning's own memory.
pub(in super::super) struct Rare {
    /// When it may be said again; 0: at once.
    next_us: AtomicU64,
    unsaid: AtomicU64,
}

impl Rare {
    pub(in super::super) const fn new() -> Self {
        Self { next_us: AtomicU64::new(0), unsaid: AtomicU64::new(0) }
    }

    /// Whether to say it now: then, how often it was not said since the last time.
    pub(in super::super) fn say(&self, now: Tick) -> Option<u64> {
        let next = self.next_us.load(Ordering::Relaxed);
        let after = now.plus_us(PAUSE_US).0;
        let free =
            now.0 >= next && self.next_us.compare_exchange(next, after, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if free {
            return Some(self.unsaid.swap(0, Ordering::Relaxed));
        }
        self.unsaid.fetch_add(1, Ordering::Relaxed);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_once_a_minute_with_the_number_of_those_that_were_not() {
        let rare = Rare::new();
        assert_eq!(rare.say(Tick(5)), Some(0));
        for us in 6..16 {
            assert_eq!(rare.say(Tick(us)), None);
        }
        assert_eq!(rare.say(Tick(PAUSE_US + 5)), Some(10));
        assert_eq!(rare.say(Tick(PAUSE_US + 6)), None);
    }
}
