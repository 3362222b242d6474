//! When a worker looks its arrivals up, and when it commits its results. Decisions only.
//!
//! Invariants
//! - A worker with nothing in hand waits for nothing: the times are bounds, not waits.
//! - A trickle puts nothing off for ever: the age of the first counts.

use crate::time::Tick;

/// The arrivals' gate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArrivalGate {
    /// So many close it.
    pub rows_max: usize,
    /// None since so long closes it.
    pub quiet_ms: u64,
    /// The first has waited so long: closes it.
    pub age_ms_max: u64,
}

impl ArrivalGate {
    /// When to look `rows` arrivals up of which the first and the last came then: now or earlier is at once.
    pub(crate) fn closes_at(&self, rows: usize, first: Tick, last: Tick, is_idle: bool) -> Tick {
        if rows == 0 {
            return Tick::NEVER;
        }
        if is_idle || rows >= self.rows_max {
            return Tick(0);
        }
        last.plus_ms(self.quiet_ms).min(first.plus_ms(self.age_ms_max))
    }
}

/// The results' gate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommitGate {
    /// So many close it.
    pub rows_max: usize,
    /// The first has waited so long: closes it.
    pub age_ms_max: u64,
}

impl CommitGate {
    /// When to commit `rows` results of which the first came then, while so many handlers run.
    pub(crate) fn closes_at(&self, rows: usize, first: Tick, running: usize) -> Tick {
        match rows {
            0 => Tick::NEVER,
            _ if running == 0 || rows >= self.rows_max => Tick(0),
            _ => first.plus_ms(self.age_ms_max),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_wait_only_while_something_is_in_hand() {
        let gate = ArrivalGate { rows_max: 200, quiet_ms: 20, age_ms_max: 1_000 };
        assert_eq!(gate.closes_at(0, Tick(0), Tick(0), true), Tick::NEVER);
        assert_eq!(gate.closes_at(1, Tick(5), Tick(5), true), Tick(0));
        assert_eq!(gate.closes_at(1, Tick(0), Tick(7_000), false), Tick(27_000));
        assert_eq!(gate.closes_at(50, Tick(0), Tick(990_000), false), Tick(1_000_000));
        assert_eq!(gate.closes_at(200, Tick(5), Tick(5), false), Tick(0));
    }

    #[test]
    fn results_wait_for_what_still_runs_and_not_for_long() {
        let gate = CommitGate { rows_max: 500, age_ms_max: 10 };
        assert_eq!(gate.closes_at(0, Tick(0), 0), Tick::NEVER);
        assert_eq!(gate.closes_at(1, Tick(3_000), 0), Tick(0));
        assert_eq!(gate.closes_at(1, Tick(3_000), 2), Tick(13_000));
        assert_eq!(gate.closes_at(500, Tick(3_000), 2), Tick(0));
    }
}
