//! Sets of transactions in `pg_snapshot` form: everything below `xmax` except those listed.
//!
//! Invariants
//! - `listed` is ascending, without doubles, and below `xmax`.
//! - A [`Snapshot`] is used both for what a reader has read and for what is resolved; which one it is,
//!   is said where it is held. The raw snapshot of a claim is never persisted as a cursor.

use std::fmt;

/// Everything below `xmax` except `listed`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    xmax: u64,
    listed: Vec<u64>,
}

impl Snapshot {
    /// The empty set.
    #[must_use]
    pub fn empty() -> Self {
        Self::default()
    }

    /// A set from its parts; sorts and drops what is not below `xmax`.
    #[must_use]
    pub fn new(xmax: u64, mut listed: Vec<u64>) -> Self {
        listed.retain(|xid| *xid < xmax);
        listed.sort_unstable();
        listed.dedup();
        Self { xmax, listed }
    }

    /// First transaction beyond the set's range.
    #[must_use]
    pub fn xmax(&self) -> u64 {
        self.xmax
    }

    /// The transactions below `xmax` that are not in the set, ascending.
    #[must_use]
    pub fn listed(&self) -> &[u64] {
        &self.listed
    }

    /// Whether the transaction is in the set.
    #[must_use]
    pub fn contains(&self, xid: u64) -> bool {
        xid < self.xmax && self.listed.binary_search(&xid).is_err()
    }

    /// What is in either.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        let xmax = self.xmax.max(other.xmax);
        let mut listed: Vec<u64> = self.listed.iter().chain(&other.listed).copied().collect();
        listed.retain(|xid| !self.contains(*xid) && !other.contains(*xid));
        Self::new(xmax, listed)
    }

    /// What is in both.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let listed = self.listed.iter().chain(&other.listed).copied().collect();
        Self::new(self.xmax.min(other.xmax), listed)
    }

    /// Parses Postgres' text form `xmin:xmax:xip,xip`. `None` if it is not one.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let _xmin: u64 = parts.next()?.parse().ok()?;
        let xmax: u64 = parts.next()?.parse().ok()?;
        let list = parts.next()?;
        if parts.next().is_some() {
            return None;
        }
        let mut listed = Vec::new();
        if !list.is_empty() {
            for xid in list.split(',') {
                listed.push(xid.parse().ok()?);
            }
        }
        Some(Self::new(xmax, listed))
    }
}

/// Postgres' text form, accepted by its `pg_snapshot` input (which wants `xmin >= 1`).
impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let xmax = self.xmax.max(1);
        let xmin = self.listed.first().copied().unwrap_or(xmax);
        write!(f, "{xmin}:{xmax}:")?;
        for (index, xid) in self.listed.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            write!(f, "{xid}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn union_and_intersection_agree_with_membership() {
        let sets = [
            Snapshot::empty(),
            Snapshot::new(5, vec![]),
            Snapshot::new(9, vec![2, 3, 8]),
            Snapshot::new(7, vec![3, 6]),
            Snapshot::new(12, vec![2, 9, 11]),
        ];
        for a in &sets {
            for b in &sets {
                for xid in 0..14 {
                    assert_eq!(a.union(b).contains(xid), a.contains(xid) || b.contains(xid), "{a} ∪ {b} at {xid}");
                    assert_eq!(
                        a.intersection(b).contains(xid),
                        a.contains(xid) && b.contains(xid),
                        "{a} ∩ {b} at {xid}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_text_form_goes_both_ways() {
        for text in ["10:20:10,14,15", "5:5:", "1:1:"] {
            assert_eq!(Snapshot::parse(text).map(|set| set.to_string()).as_deref(), Some(text));
        }
        for bad in ["", "1:2", "a:b:", "1:2:3:4", "1:5:x"] {
            assert_eq!(Snapshot::parse(bad), None, "{bad}");
        }
    }
}
