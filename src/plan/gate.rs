//! The flush gate: when a shard's waiting rows become a transaction.
//!
//! Invariant: the gate closes as soon as rows, bytes or age reach their bound; with `age_us_max` 0 it
//! closes at once, and what arrives during a flush makes up the next.

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
}

impl Gate {
    /// A gate with these bounds.
    #[must_use]
    pub fn new(rows_max: usize, bytes_max: usize, age_us_max: u64) -> Self {
        Self { rows_max, bytes_max, age_us_max }
    }

    /// Whether to flush, given what waits and since when.
    #[must_use]
    pub fn close(&self, rows: usize, bytes: usize, oldest: Option<Tick>, now: Tick) -> Close {
        let Some(oldest) = oldest else { return Close::Empty };
        let due = oldest.plus_us(self.age_us_max);
        if rows >= self.rows_max || bytes >= self.bytes_max || due <= now { Close::Now } else { Close::At(due) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_bytes_or_age_close_it() {
        let gate = Gate::new(10, 1000, 50);
        let at = Some(Tick(100));
        assert_eq!(gate.close(0, 0, None, Tick(100)), Close::Empty);
        assert_eq!(gate.close(1, 1, at, Tick(149)), Close::At(Tick(150)));
        assert_eq!(gate.close(1, 1, at, Tick(150)), Close::Now);
        assert_eq!(gate.close(10, 1, at, Tick(100)), Close::Now);
        assert_eq!(gate.close(1, 1000, at, Tick(100)), Close::Now);
        assert_eq!(Gate::new(10, 1000, 0).close(1, 1, at, Tick(100)), Close::Now);
    }
}
