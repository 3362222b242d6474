//! When a failed message is tried again, and what becomes of its stream when it is not.
//!
//! Invariants
//! - Attempt `n` that failed waits `base × 2^(n-1)`, at most `cap`, with a jitter either way; at
//!   `attempts_max` the message is dead. No input overflows.
//! - What is said of a destination by name goes before what is said of all.

/// What to do with a failed head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Try again in so many milliseconds.
    RetryIn(u64),
    /// To the dead letters.
    Dead,
}

/// The retry rule.
#[derive(Clone, Copy, Debug)]
pub struct Retry {
    base_ms: u64,
    cap_ms: u64,
    attempts_max: i32,
    jitter_percent: u32,
}

impl Retry {
    /// A rule; `jitter_percent` up to 100.
    #[must_use]
    pub fn new(base_ms: u64, cap_ms: u64, attempts_max: i32, jitter_percent: u32) -> Self {
        Self { base_ms, cap_ms, attempts_max, jitter_percent: jitter_percent.min(100) }
    }

    /// After the attempt number `attempts` (from 1) failed; `random` spreads the jitter evenly.
    #[must_use]
    pub fn after_failure(&self, attempts: i32, random: u32) -> Verdict {
        if attempts >= self.attempts_max {
            return Verdict::Dead;
        }
        let doublings = u32::try_from(attempts.saturating_sub(1).max(0)).unwrap_or(0).min(32);
        let wait = u128::from(self.base_ms) << doublings;
        let wait = wait.min(u128::from(self.cap_ms));
        let spread = wait * u128::from(self.jitter_percent) / 100;
        let offset = 2 * spread * u128::from(random) / u128::from(u32::MAX);
        Verdict::RetryIn((wait + offset - spread) as u64)
    }
}

/// What becomes of a stream whose head has died.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OnDeath {
    /// Whether it is held where nothing else is said.
    pub hold: bool,
    /// Destinations of which something else is said.
    pub of: Vec<(String, bool)>,
}

impl OnDeath {
    /// Whether the stream is held until an operator lets it go on.
    #[must_use]
    pub fn holds(&self, destination: &str) -> bool {
        self.of.iter().find(|(name, _)| name == destination).map_or(self.hold, |(_, hold)| *hold)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_to_its_cap_and_ends() {
        let retry = Retry::new(30_000, 300_000, 10, 0);
        let waits: Vec<_> = (1..=10).map(|attempt| retry.after_failure(attempt, 0)).collect();
        let mut expected: Vec<_> =
            [30, 60, 120, 240, 300, 300, 300, 300, 300].map(|s| Verdict::RetryIn(s * 1000)).to_vec();
        expected.push(Verdict::Dead);
        assert_eq!(waits, expected);
    }

    #[test]
    fn jitter_stays_within_its_share_and_nothing_overflows() {
        let retry = Retry::new(1000, 300_000, i32::MAX, 10);
        assert_eq!(retry.after_failure(1, 0), Verdict::RetryIn(900));
        assert_eq!(retry.after_failure(1, u32::MAX), Verdict::RetryIn(1100));
        let huge = Retry::new(u64::MAX, u64::MAX, i32::MAX, 100);
        for attempts in [i32::MIN, -1, 0, 1, 2, 33, i32::MAX - 1] {
            let _ = huge.after_failure(attempts, u32::MAX);
        }
        assert_eq!(huge.after_failure(i32::MAX, 1), Verdict::Dead);
    }
}
