//! When a failed message is tried again, and when a destination is.
//!
//! Invariants
//! - Attempt `n` that failed waits `base × 2^(n-1)`, at most `cap`, with a jitter either way; at
//!   `attempts_max` the message is dead. No input overflows.
//! - A destination that is not ready costs no attempt: it pauses, one probe goes out after the pause, and
//!   only an acceptance opens it again.

use crate::time::Tick;

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

/// First and longest pause of a destination that is not ready.
const PAUSE_MS: (u64, u64) = (100, 5_000);
/// The longest pause a transport can ask for.
const THROTTLE_MS_MAX: u64 = 300_000;

/// Whether a destination may be sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaySend {
    /// As much as there is.
    Freely,
    /// One message, to see.
    Probe,
    /// Not before this moment (`Tick::NEVER`: a probe is out).
    At(Tick),
}

/// The state of one destination.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pause {
    /// Current pause; 0 = open.
    pause_ms: u64,
    until: Tick,
    probe_out: bool,
}

impl Pause {
    /// An open destination.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether to send.
    #[must_use]
    pub fn may_send(&self, now: Tick) -> MaySend {
        if self.pause_ms == 0 {
            MaySend::Freely
        } else if self.probe_out {
            MaySend::At(Tick::NEVER)
        } else if self.until <= now {
            MaySend::Probe
        } else {
            MaySend::At(self.until)
        }
    }

    /// Something was sent; whether it is the probe.
    pub fn sent(&mut self) -> bool {
        self.probe_out = self.pause_ms != 0;
        self.probe_out
    }

    /// It is not ready.
    pub fn not_ready(&mut self, now: Tick) {
        if self.pause_ms != 0 && !self.probe_out {
            return; // Another message of a run that was out when the pause began.
        }
        self.pause_ms = if self.pause_ms == 0 { PAUSE_MS.0 } else { (self.pause_ms * 2).min(PAUSE_MS.1) };
        self.until = now.plus_ms(self.pause_ms);
        self.probe_out = false;
    }

    /// It asks to slow down.
    pub fn throttled(&mut self, now: Tick, retry_after_ms: u64) {
        self.not_ready(now);
        self.until = self.until.max(now.plus_ms(retry_after_ms.min(THROTTLE_MS_MAX)));
        self.probe_out = false;
    }

    /// A run came back without a word of the destination (a time-out, or from before a restart of the lanes):
    /// if it was the probe, the next one may go out after the pause.
    pub fn silent(&mut self, now: Tick) {
        if self.probe_out {
            self.not_ready(now);
        }
    }

    /// The destination answers the probe: it accepted, or refused a message for that message's own fault. What a run
    /// says that was sent before the pause, or that brought it about, does not end it.
    pub fn answered(&mut self) {
        *self = Self::default();
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

    #[test]
    fn a_destination_that_is_away_gets_one_probe_at_a_time() {
        let mut pause = Pause::new();
        assert_eq!(pause.may_send(Tick(0)), MaySend::Freely);
        pause.not_ready(Tick(0));
        pause.not_ready(Tick(5)); // The rest of the run.
        assert_eq!(pause.may_send(Tick(10)), MaySend::At(Tick(100_000)));
        assert_eq!(pause.may_send(Tick(100_000)), MaySend::Probe);
        assert!(pause.sent());
        assert_eq!(pause.may_send(Tick(100_001)), MaySend::At(Tick::NEVER));
        pause.not_ready(Tick(100_001));
        assert_eq!(pause.may_send(Tick(100_002)), MaySend::At(Tick(300_001)));
        assert!(pause.sent());
        pause.answered();
        assert_eq!(pause.may_send(Tick(300_002)), MaySend::Freely);
        pause.throttled(Tick(0), 7_000);
        assert_eq!(pause.may_send(Tick(0)), MaySend::At(Tick(7_000_000)));
    }
}
