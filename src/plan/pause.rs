//! Whether a destination may be sent to: it has asked for a pause, or its breaker is open.
//!
//! Invariants
//! - Nothing is sent during a pause, and then one probe; only its answer ends the pause. What a run says that was sent
//!   before the pause does not.
//! - A destination that is not ready costs no attempt, and pauses for a short time.
//! - The breaker opens after so many failures in a row, without an acceptance between them, of more than one lane: one
//!   message that fails for ever is its own fault. It is the same pause, only longer; a failed probe makes it longer still.

use uuid::Uuid;

use crate::time::Tick;

/// First and longest pause of a destination that is not ready.
const PAUSE_MS: (u64, u64) = (100, 5_000);
/// The longest pause a transport can ask for.
const THROTTLE_MS_MAX: u64 = 300_000;

/// When the breaker of a destination opens, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerRules {
    /// So many failures in a row; 0: never.
    pub failures_max: u32,
    /// The first pause.
    pub base_ms: u64,
    /// The longest; it doubles up to this.
    pub cap_ms: u64,
}

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

/// What a run that has come back says of its destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunSaid {
    /// Messages that it took.
    pub accepted: u32,
    /// Messages that failed, not for good: perhaps for its fault.
    pub failed: u32,
    /// Messages that are refused for good: for their own fault.
    pub refused: u32,
    /// The lane of the first that failed.
    pub failed_lane: Option<Uuid>,
    /// Others failed as well.
    pub failed_lanes: bool,
    /// It asked for a pause, which was noted.
    pub asked_for_pause: bool,
}

impl RunSaid {
    /// A message of this lane failed.
    pub fn failed(&mut self, lane: Uuid) {
        self.failed += 1;
        self.failed_lanes |= *self.failed_lane.get_or_insert(lane) != lane;
    }
}

/// The state of one destination.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pause {
    /// Current pause; 0 = open.
    pause_ms: u64,
    until: Tick,
    probe_out: bool,
    /// The breaker is open.
    broken: bool,
    /// Failures in a row, the lane of the first, and whether there were others.
    failures: u32,
    failed_lane: Option<Uuid>,
    failed_lanes: bool,
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

    /// Whether the breaker is open.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// The current pause in milliseconds; 0: none.
    #[must_use]
    pub fn pause_ms(&self) -> u64 {
        self.pause_ms
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
        let longest = if self.broken { self.pause_ms.max(PAUSE_MS.1) } else { PAUSE_MS.1 };
        self.pause_ms = if self.pause_ms == 0 { PAUSE_MS.0 } else { (self.pause_ms * 2).min(longest) };
        self.until = now.plus_ms(self.pause_ms);
        self.probe_out = false;
    }

    /// It asks to slow down.
    pub fn throttled(&mut self, now: Tick, retry_after_ms: u64) {
        self.not_ready(now);
        self.until = self.until.max(now.plus_ms(retry_after_ms.min(THROTTLE_MS_MAX)));
        self.probe_out = false;
    }

    /// The probe came back without a word of the destination (from before a restart of the lanes): the next one may go
    /// out after the pause.
    pub fn silent(&mut self, now: Tick) {
        if self.probe_out {
            self.not_ready(now);
        }
    }

    /// A run came back, the probe or another one.
    pub fn came_back(&mut self, now: Tick, probe: bool, said: &RunSaid, rules: &BreakerRules) {
        if said.accepted > 0 {
            (self.failures, self.failed_lane, self.failed_lanes) = (0, None, false);
        } else if let Some(lane) = said.failed_lane {
            self.failures = self.failures.saturating_add(said.failed);
            self.failed_lanes |= said.failed_lanes || *self.failed_lane.get_or_insert(lane) != lane;
        }
        if probe && !said.asked_for_pause {
            self.probe_answered(now, said, rules);
        }
        let opens = rules.failures_max > 0 && self.failures >= rules.failures_max && self.failed_lanes;
        if opens && !self.broken {
            self.broken = true;
            self.pause_ms = rules.base_ms;
            self.until = self.until.max(now.plus_ms(rules.base_ms));
            self.probe_out = false;
        }
    }

    fn probe_answered(&mut self, now: Tick, said: &RunSaid, rules: &BreakerRules) {
        if said.accepted > 0 {
            *self = Self::default();
        } else if self.broken && said.failed > 0 {
            self.pause_ms = (self.pause_ms * 2).min(rules.cap_ms).max(1);
            self.until = now.plus_ms(self.pause_ms);
            self.probe_out = false;
        } else if self.broken && said.refused > 0 {
            // That message's own fault: another one tells more, at once.
            (self.until, self.probe_out) = (now, false);
        } else if said.failed + said.refused > 0 {
            // It answers: what it is not ready for is over.
            (self.pause_ms, self.until, self.probe_out) = (0, Tick(0), false);
        } else {
            self.silent(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: BreakerRules = BreakerRules { failures_max: 5, base_ms: 3_000, cap_ms: 10_000 };

    fn accepted() -> RunSaid {
        RunSaid { accepted: 1, ..RunSaid::default() }
    }

    fn failed(lanes: &[u128]) -> RunSaid {
        let mut said = RunSaid::default();
        lanes.iter().for_each(|lane| said.failed(Uuid::from_u128(*lane)));
        said
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
        pause.came_back(Tick(300_001), true, &accepted(), &RULES);
        assert_eq!(pause.may_send(Tick(300_002)), MaySend::Freely);
        pause.throttled(Tick(0), 7_000);
        assert_eq!(pause.may_send(Tick(0)), MaySend::At(Tick(7_000_000)));
    }

    #[test]
    fn the_breaker_opens_after_failures_of_several_lanes_in_a_row() {
        let mut pause = Pause::new();
        pause.came_back(Tick(0), false, &failed(&[1, 2, 3, 4]), &RULES);
        pause.came_back(Tick(0), false, &accepted(), &RULES);
        pause.came_back(Tick(0), false, &failed(&[1, 2]), &RULES);
        pause.came_back(Tick(0), false, &failed(&[3, 1]), &RULES);
        assert_eq!(pause.may_send(Tick(1)), MaySend::Freely);
        let mut mixed = failed(&[1, 2, 3, 4, 5, 6]);
        mixed.accepted = 1;
        pause.came_back(Tick(0), false, &mixed, &RULES);
        assert!(!pause.is_broken(), "it takes messages");
        pause.came_back(Tick(5), false, &failed(&[1, 2, 3, 4, 5]), &RULES);
        assert!(pause.is_broken());
        assert_eq!(pause.may_send(Tick(6)), MaySend::At(Tick(3_000_005)));
        // What was out meanwhile changes nothing.
        pause.came_back(Tick(7), false, &accepted(), &RULES);
        pause.came_back(Tick(8), false, &failed(&[7]), &RULES);
        assert_eq!(pause.may_send(Tick(9)), MaySend::At(Tick(3_000_005)));
    }

    #[test]
    fn one_message_that_fails_for_ever_opens_no_breaker() {
        let mut pause = Pause::new();
        for _ in 0..100 {
            pause.came_back(Tick(0), false, &failed(&[1]), &RULES);
        }
        assert!(!pause.is_broken());
        let never = BreakerRules { failures_max: 0, ..RULES };
        pause.came_back(Tick(0), false, &failed(&[1, 2, 3, 4, 5, 6]), &never);
        assert!(!pause.is_broken());
    }

    #[test]
    fn a_failed_probe_doubles_the_pause_up_to_its_cap_and_an_acceptance_closes_the_breaker() {
        let mut pause = Pause::new();
        pause.came_back(Tick(0), false, &failed(&[1, 2, 3, 4, 5]), &RULES);
        let mut now = Tick(0);
        for wait_ms in [3_000, 6_000, 10_000, 10_000] {
            let MaySend::At(at) = pause.may_send(now) else { unreachable!("it pauses") };
            assert_eq!(at, now.plus_ms(wait_ms));
            now = at;
            assert_eq!(pause.may_send(now), MaySend::Probe);
            assert!(pause.sent());
            pause.came_back(now, true, &failed(&[9]), &RULES);
            assert!(pause.is_broken());
        }
        now = now.plus_ms(10_000);
        assert!(pause.sent());
        pause.came_back(now, true, &RunSaid { refused: 1, ..RunSaid::default() }, &RULES);
        assert_eq!(pause.may_send(now), MaySend::Probe, "its own fault: the next one, at once");
        assert!(pause.sent());
        pause.came_back(now, true, &accepted(), &RULES);
        assert_eq!((pause.may_send(now), pause.is_broken()), (MaySend::Freely, false));
    }

    #[test]
    fn a_probe_that_finds_a_broken_destination_not_ready_keeps_the_longer_pause() {
        let mut pause = Pause::new();
        pause.came_back(Tick(0), false, &failed(&[1, 2, 3, 4, 5]), &RULES);
        let now = Tick(0).plus_ms(3_000);
        assert!(pause.sent());
        pause.not_ready(now);
        let said = RunSaid { asked_for_pause: true, ..RunSaid::default() };
        pause.came_back(now, true, &said, &RULES);
        assert_eq!((pause.may_send(now), pause.is_broken()), (MaySend::At(now.plus_ms(5_000)), true));
    }
}
