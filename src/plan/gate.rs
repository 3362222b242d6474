//! The flush gate: when a shard's waiting rows become a transaction.
//!
//! Invariants
//! - The gate closes as soon as rows, bytes or age reach their bound, and where nothing more has come for half the
//!   longest age; with `age_us_max` 0 it closes at once, and what arrives during a flush makes up the next.
//! - Both times begin anew with the answer to the flush before: its callers come again, and are to be in the next
//!   one together with those that came meanwhile, not in the one after it.

use crate::time::Tick;

/// The gate's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// Flush.
    Now,
    /// Not before this moment, unless more arrives.
    At(Tick),
    /// There is nothing to flush.
    Empty,
}

/// The bounds.
#[derive(Clone, Copy, Debug)]
pub struct Gate {
    rows_max: usize,
    bytes_max: usize,
    age_us_max: u64,
    quiet_us: u64,
}

/// Since when rows wait.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// The oldest has arrived then.
    pub oldest: Tick,
    /// The newest has.
    pub newest: Tick,
    /// The flush before was answered then.
    pub answered: Tick,
}

impl Gate {
    /// A gate with these bounds.
    #[must_use]
    pub fn new(rows_max: usize, bytes_max: usize, age_us_max: u64) -> Self {
        Self { rows_max, bytes_max, age_us_max, quiet_us: age_us_max / 2 }
    }

    /// Whether to flush, given what waits and since when.
    #[must_use]
    pub fn close(&self, rows: usize, bytes: usize, waiting: Option<Waiting>, now: Tick) -> Close {
        let Some(Waiting { oldest, newest, answered }) = waiting else { return Close::Empty };
        let age_due = oldest.max(answered).plus_us(self.age_us_max);
        let due = age_due.min(newest.max(answered).plus_us(self.quiet_us));
        if rows >= self.rows_max || bytes >= self.bytes_max || due <= now { Close::Now } else { Close::At(due) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_bytes_or_age_close_it() {
        let gate = Gate::new(10, 1000, 50);
        let at = |oldest, newest, answered| {
            Some(Waiting { oldest: Tick(oldest), newest: Tick(newest), answered: Tick(answered) })
        };
        assert_eq!(gate.close(0, 0, None, Tick(100)), Close::Empty);
        assert_eq!(gate.close(1, 1, at(100, 100, 0), Tick(124)), Close::At(Tick(125)));
        assert_eq!(gate.close(1, 1, at(100, 100, 0), Tick(125)), Close::Now, "nothing more comes");
        assert_eq!(gate.close(2, 1, at(100, 140, 0), Tick(149)), Close::At(Tick(150)));
        assert_eq!(gate.close(2, 1, at(100, 140, 0), Tick(150)), Close::Now, "too old");
        assert_eq!(gate.close(2, 1, at(100, 100, 200), Tick(200)), Close::At(Tick(225)), "they may come again");
        assert_eq!(gate.close(2, 1, at(100, 240, 200), Tick(240)), Close::At(Tick(250)));
        assert_eq!(gate.close(10, 1, at(100, 100, 0), Tick(100)), Close::Now);
        assert_eq!(gate.close(1, 1000, at(100, 100, 0), Tick(100)), Close::Now);
        assert_eq!(Gate::new(10, 1000, 0).close(1, 1, at(100, 100, 100), Tick(100)), Close::Now);
    }
}
