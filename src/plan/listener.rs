//! The listener: what is believed of it, when it is tested, and when it is connected again.
//!
//! Invariants
//! - It is believed only what it has proved: healthy is one that has heard its own word since it was connected.
//! - A test that is not heard in time, and a connection that ends, make it deaf from that moment until it has proved
//!   itself again.
//! - It is connected again at growing intervals: 1 s, doubling up to 30 s; a proof begins them anew.

use crate::time::Tick;

/// First wait before it is connected again, and the longest.
const RECONNECT_MS: (u64, u64) = (1_000, 30_000);

/// What is believed of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Belief {
    /// Nobody listens: there is no direct connection, or nothing is owned that a word could be about.
    #[default]
    Off,
    /// It has not proved itself yet.
    Unproved,
    /// It has heard its own word.
    Healthy,
    /// It has not, or its connection has ended.
    Deaf {
        /// Since when.
        since: Tick,
        /// Why.
        reason: String,
    },
}

/// How often it is tested, and how long an answer may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TestTimes {
    /// From one proof to the next test, in milliseconds.
    pub interval_ms: u64,
    /// From a test's word until it is heard, in milliseconds.
    pub limit_ms: u64,
}

/// One listener's course.
#[derive(Clone, Debug)]
pub struct Course {
    times: TestTimes,
    belief: Belief,
    reconnect_ms: u64,
}

impl Course {
    /// Of one that is to be connected.
    #[must_use]
    pub fn new(times: TestTimes) -> Self {
        Self { times, belief: Belief::Unproved, reconnect_ms: RECONNECT_MS.0 }
    }

    /// What is believed.
    #[must_use]
    pub fn belief(&self) -> &Belief {
        &self.belief
    }

    /// It has heard its own word; answers when it is tested next.
    pub fn proved(&mut self, now: Tick) -> Tick {
        self.belief = Belief::Healthy;
        self.reconnect_ms = RECONNECT_MS.0;
        now.plus_ms(self.times.interval_ms)
    }

    /// It has not; answers when to connect again.
    pub fn failed(&mut self, reason: String, now: Tick) -> Tick {
        self.belief = match std::mem::take(&mut self.belief) {
            Belief::Deaf { since, .. } => Belief::Deaf { since, reason },
            _ => Belief::Deaf { since: now, reason },
        };
        let at = now.plus_ms(self.reconnect_ms);
        self.reconnect_ms = (self.reconnect_ms * 2).min(RECONNECT_MS.1);
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: TestTimes = TestTimes { interval_ms: 30_000, limit_ms: 2_000 };

    #[test]
    fn it_is_healthy_only_after_a_proof_and_deaf_since_the_first_failure() {
        let mut course = Course::new(TIMES);
        assert_eq!(course.belief(), &Belief::Unproved);
        assert_eq!(course.proved(Tick(5)), Tick(30_000_005));
        assert_eq!(course.belief(), &Belief::Healthy);
        course.failed("one".into(), Tick(7));
        course.failed("two".into(), Tick(9));
        assert_eq!(course.belief(), &Belief::Deaf { since: Tick(7), reason: "two".into() });
        course.proved(Tick(11));
        assert_eq!(course.belief(), &Belief::Healthy);
    }

    #[test]
    fn it_is_connected_again_after_a_second_doubling_up_to_thirty() {
        let mut course = Course::new(TIMES);
        let waits = |course: &mut Course| (0..7).map(|_| course.failed(String::new(), Tick(0)).0 / 1_000_000).collect();
        let first: Vec<u64> = waits(&mut course);
        assert_eq!(first, [1, 2, 4, 8, 16, 30, 30]);
        course.proved(Tick(0));
        let again: Vec<u64> = waits(&mut course);
        assert_eq!(again, first);
    }
}
