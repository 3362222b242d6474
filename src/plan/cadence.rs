//! When a shard looks into the database for work it has not been told of.
//!
//! Invariants
//! - Base interval after work, and after the first empty look; doubling from the second, up to the maximum.
//! - Any work, and any wake-up, brings it back to the base.

use crate::time::Tick;

/// An adaptive poll.
#[derive(Clone, Copy, Debug)]
pub struct Cadence {
    base_ms: u64,
    max_ms: u64,
    empty_count: u32,
    due: Tick,
}

impl Cadence {
    /// Due at once, then every `base_ms`, backing off to `max_ms`.
    #[must_use]
    pub fn new(base_ms: u64, max_ms: u64) -> Self {
        Self { base_ms, max_ms: max_ms.max(base_ms), empty_count: 0, due: Tick(0) }
    }

    /// A look has ended.
    pub fn after(&mut self, found_work: bool, now: Tick) {
        self.empty_count = if found_work { 0 } else { self.empty_count.saturating_add(1) };
        let doublings = self.empty_count.saturating_sub(1).min(20);
        self.due = now.plus_ms((self.base_ms << doublings).min(self.max_ms));
    }

    /// When to look next.
    #[must_use]
    pub fn due(&self) -> Tick {
        self.due
    }

    /// Somebody says there is work: look now, and often for a while.
    pub fn hurry(&mut self, now: Tick) {
        self.empty_count = 0;
        self.due = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_backs_off_and_comes_back() {
        let mut cadence = Cadence::new(250, 10_000);
        let mut waits = Vec::new();
        for _ in 0..9 {
            cadence.after(false, Tick(0));
            waits.push(cadence.due().0 / 1000);
        }
        assert_eq!(waits, [250, 500, 1000, 2000, 4000, 8000, 10_000, 10_000, 10_000]);
        cadence.after(true, Tick(0));
        assert_eq!(cadence.due(), Tick(250_000));
        cadence.hurry(Tick(7));
        assert_eq!(cadence.due(), Tick(7));
    }
}
