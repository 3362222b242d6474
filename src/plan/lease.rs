//! The lease keeper's decisions: until when this process may publish, and whose work it may take.
//!
//! Invariants
//! - The local deadline counts from the moment *before* a renewal was sent, less the margin: whatever the
//!   network did, the database's lease ends later.
//! - Another incarnation is taken over only if its counter has stood still for a whole lease on this
//!   process's own clock **and** its lease is past by the database's clock. (The early way, by its session
//!   lock, needs neither; the database decides it.)

use crate::limits::LEASE_TTL_MS as TTL_MS;
use crate::seam::store::Member;
use crate::time::Tick;

/// The lease's figures. [`LeaseTimes::new`] checks them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTimes {
    ttl_ms: u64,
    margin_ms: u64,
}

impl LeaseTimes {
    /// Checks a lease against the transport's time limit.
    ///
    /// # Errors
    /// A text that names the key, its value and what is allowed.
    pub fn new(ttl_ms: u64, margin_ms: u64, publish_timeout_ms: u64) -> Result<Self, String> {
        if !(TTL_MS.0..=TTL_MS.1).contains(&ttl_ms) {
            return Err(format!("lease.ttl_ms = {ttl_ms}: must be {}..={}", TTL_MS.0, TTL_MS.1));
        }
        let least = publish_timeout_ms.saturating_add(1_000);
        if margin_ms < least || margin_ms > ttl_ms / 2 {
            return Err(format!(
                "lease.margin_ms = {margin_ms}: must be at least publish.timeout_ms + 1000 = {least} and at most half of lease.ttl_ms = {}",
                ttl_ms / 2
            ));
        }
        Ok(Self { ttl_ms, margin_ms })
    }

    /// The lease's length.
    #[must_use]
    pub fn ttl_ms(&self) -> u64 {
        self.ttl_ms
    }

    /// How often to renew, and to look at the members.
    #[must_use]
    pub fn step_ms(&self) -> u64 {
        self.ttl_ms / 4
    }

    /// How long a statement of maintenance may take: half a step at most, whatever the lease, so that the next renewal
    /// is not late. (A second statement begins in the first half of this only, and an answer is waited for a quarter
    /// longer: 7/8 of a step together.)
    #[must_use]
    pub fn upkeep_limit_ms(&self) -> u64 {
        (self.step_ms() / 2).min(2_000)
    }

    /// Until when a run may end, after a renewal that was sent at `sent`.
    #[must_use]
    pub fn deadline(&self, sent: Tick) -> Tick {
        sent.plus_ms(self.ttl_ms - self.margin_ms)
    }
}

/// What is known of the other incarnations.
#[derive(Debug, Default)]
pub struct Watch {
    seen: Vec<(Member, Tick)>,
}

impl Watch {
    /// Takes a look's result; hands out those that may be marked dead the late way.
    pub fn look(&mut self, members: &[Member], ttl_ms: u64, now: Tick, mut late: impl FnMut(Member)) {
        self.seen.retain(|(seen, _)| members.iter().any(|member| member.incarnation == seen.incarnation));
        for member in members {
            match self.seen.iter_mut().find(|(seen, _)| seen.incarnation == member.incarnation) {
                None => self.seen.push((*member, now)),
                Some((seen, since)) if seen.counter != member.counter => {
                    *seen = *member;
                    *since = now;
                }
                Some((_, since)) => {
                    if member.expired && now.since_us(*since) >= ttl_ms * 1000 {
                        late(*member);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Incarnation;
    use uuid::Uuid;

    fn member(counter: i64, expired: bool) -> Member {
        let incarnation = Incarnation { number: 1, id: Uuid::nil() };
        Member { incarnation, counter, expired, connected: true, direct: true, owns: true, held: 1 }
    }

    #[test]
    fn a_take_over_needs_both_clocks() {
        let mut watch = Watch::default();
        let mut late_at = Vec::new();
        for (second, counter, expired) in [
            (0, 1, false),
            (5, 1, true),
            (9, 1, true),
            (10, 1, false),
            (11, 1, true),
            (12, 2, true),
            (21, 2, true),
            (22, 2, true),
        ] {
            watch.look(&[member(counter, expired)], 10_000, Tick(second * 1_000_000), |_| late_at.push(second));
        }
        assert_eq!(late_at, [11, 22]);
    }

    #[test]
    fn the_deadline_counts_from_before_the_renewal() {
        let times = LeaseTimes::new(10_000, 5_000, 4_000);
        assert_eq!(times.map(|times| times.deadline(Tick(7))), Ok(Tick(5_000_007)));
    }

    #[test]
    fn maintenance_ends_before_the_next_renewal_however_short_the_lease() {
        for ttl_ms in [8, 500, 1_000, 1_999, TTL_MS.0, 2_020, 10_000, TTL_MS.1] {
            let times = LeaseTimes { ttl_ms, margin_ms: ttl_ms / 2 };
            let limit_ms = times.upkeep_limit_ms();
            assert!(limit_ms > 0, "{ttl_ms}: no limit at all");
            let longest_ms = limit_ms / 2 + limit_ms + limit_ms / 4;
            assert!(longest_ms < times.step_ms(), "{ttl_ms}: {longest_ms} of {} ms", times.step_ms());
        }
        // A lease that is too short for any margin is refused, whatever the range of the key says.
        assert!((TTL_MS.0..2_020).all(|ttl_ms| LeaseTimes::new(ttl_ms, ttl_ms / 2, 10).is_err()));
    }

    #[test]
    fn figures_that_do_not_fit_are_refused_by_name() {
        for (ttl, margin, timeout, key) in [
            (0, 0, 0, "lease.ttl_ms = 0"),
            (600_001, 5_000, 4_000, "lease.ttl_ms = 600001"),
            (100_000_000_000, 5_000, 4_000, "lease.ttl_ms = 100000000000"),
            (10_000, 4_999, 4_000, "lease.margin_ms = 4999"),
            (10_000, 5_001, 4_000, "lease.margin_ms = 5001"),
            (u64::MAX, u64::MAX, u64::MAX, "lease.ttl_ms"),
        ] {
            let error = LeaseTimes::new(ttl, margin, timeout).map(|_| ()).map_err(|text| text.starts_with(key));
            assert_eq!(error, Err(true), "{key}");
        }
    }
}
