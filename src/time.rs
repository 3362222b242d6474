//! Time as the loops see it: a tick count that is passed in, never read inside `plan`.
//!
//! Invariants
//! - A [`Tick`] counts microseconds of a clock that goes on while the machine is suspended
//!   (`CLOCK_BOOTTIME`), so a lease deadline computed before a suspend is over after it.
//! - Ticks of two processes are never compared; what the cluster judges by is the database's clock.

/// Microseconds since an arbitrary start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(pub u64);

impl Tick {
    /// A moment that never comes.
    pub const NEVER: Self = Self(u64::MAX);

    /// This moment and so many microseconds more; saturates.
    #[must_use]
    pub fn plus_us(self, us: u64) -> Self {
        Self(self.0.saturating_add(us))
    }

    /// This moment and so many milliseconds more; saturates.
    #[must_use]
    pub fn plus_ms(self, ms: u64) -> Self {
        self.plus_us(ms.saturating_mul(1000))
    }

    /// Microseconds from `earlier` to here; 0 if `earlier` is later.
    #[must_use]
    pub fn since_us(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// The machine's boot-time clock.
#[must_use]
pub fn boot_time() -> Tick {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Tick((now.tv_sec as u64) * 1_000_000 + (now.tv_nsec as u64) / 1_000)
}
