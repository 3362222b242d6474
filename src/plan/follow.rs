//! Where a member of a subscription stands: what it has read of each partition, and what it reads next.
//!
//! Invariants
//! - A run is partitions that are read together: they have the same target and position in it. Partitions that come
//!   while others are in the middle of a target are a run of their own until both are between two targets.
//! - A place moves when a page's events are done, or when the page had none; never before.
//! - Whatever changes hands, or is found elsewhere than expected, is read again from what is written down.
//!
//! Transactions are in `pg_snapshot` form and never looked into here: the server compares them.

use std::sync::Arc;

/// A partition that is this member's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Followed {
    /// Its number.
    pub partition: i32,
    /// Rises when it is taken and whenever its place is written.
    pub fence: i64,
    /// Transactions that have been read whole.
    pub resolved: Arc<str>,
}

/// Behind a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// Everything in the target has been read.
    pub whole: bool,
    /// What is being read; with `whole` what has been.
    pub target: Arc<str>,
    /// No position at or below is drawn by a transaction beyond the target.
    pub target_floor: i64,
    /// How far, by position.
    pub position: i64,
    /// The last position that the target can hold.
    pub ceiling: Option<i64>,
    /// How many positions the next page may begin with.
    pub window: Option<i64>,
}

/// Partitions that are read together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// They, ascending.
    pub held: Vec<Followed>,
    /// Beyond what each has resolved nothing lies at or below.
    pub floor: i64,
    /// What is being read; `None` between two targets.
    pub target: Option<Arc<str>>,
    /// The floor of the target.
    pub target_floor: i64,
    /// How far the target has been read.
    pub position: i64,
    /// Events of before a rebase are to be read too.
    pub before: bool,
    /// As the last page said.
    pub ceiling: Option<i64>,
    /// As the last page said.
    pub window: Option<i64>,
    /// All stand where the last page ended, and that was whole.
    pub quiet: bool,
    /// It has moved since it was written down.
    pub moved: bool,
}

/// A partition as it is written down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The partition.
    pub held: Followed,
    /// See [`Run`].
    pub floor: i64,
    /// See [`Run`].
    pub target: Option<Arc<str>>,
    /// See [`Run`].
    pub target_floor: i64,
    /// See [`Run`].
    pub position: i64,
    /// See [`Run`].
    pub before: bool,
    /// It is more than this member's share.
    pub give_up: bool,
}

impl Run {
    /// The place behind a page.
    pub fn advance(&mut self, ahead: &Ahead) {
        self.moved |= !(self.quiet && ahead.whole && self.held.iter().all(|held| held.resolved == ahead.target));
        self.window = ahead.window;
        if ahead.whole {
            for held in &mut self.held {
                held.resolved = ahead.target.clone();
            }
            (self.floor, self.target, self.target_floor, self.position) = (ahead.target_floor, None, 0, 0);
            (self.before, self.ceiling, self.quiet) = (false, None, true);
        } else {
            (self.target, self.target_floor) = (Some(ahead.target.clone()), ahead.target_floor);
            (self.position, self.ceiling, self.quiet) = (ahead.position, ahead.ceiling, false);
        }
    }

    /// Whether it holds the partition with this fence.
    fn holds(&self, partition: i32, fence: i64) -> bool {
        self.held.iter().any(|held| held.partition == partition && held.fence == fence)
    }

    fn stands_as(&self, other: &Self) -> bool {
        self.before == other.before
            && match (&self.target, &other.target) {
                (None, None) => true,
                (Some(a), Some(b)) => a == b && self.position == other.position,
                _ => false,
            }
    }

    fn join(&mut self, other: Self) {
        let same = |held: &Followed| self.held.first().is_some_and(|first| first.resolved == held.resolved);
        self.quiet = self.quiet && other.quiet && self.floor == other.floor && other.held.iter().all(same);
        self.floor = self.floor.min(other.floor);
        self.moved |= other.moved;
        self.window = None;
        self.held.extend(other.held);
        self.held.sort_unstable_by_key(|held| held.partition);
    }
}

/// Everything that a member follows.
#[derive(Clone, Debug, Default)]
pub struct Runs {
    /// The runs, in the order they are read.
    pub runs: Vec<Run>,
}

impl Runs {
    /// Takes in what the database says is this member's. What stands in memory with the same fence goes on from there.
    /// Answers what is to be given up.
    pub fn reconcile(&mut self, written: Vec<Written>) -> Vec<i32> {
        let is_ours = |held: &Followed| {
            written.iter().any(|of| of.held.partition == held.partition && of.held.fence == held.fence)
        };
        for run in &mut self.runs {
            run.held.retain(is_ours);
        }
        self.runs.retain(|run| !run.held.is_empty());
        let mut give_up = Vec::new();
        for of in written {
            if of.give_up {
                give_up.push(of.held.partition);
            }
            if self.runs.iter().any(|run| run.holds(of.held.partition, of.held.fence)) {
                continue;
            }
            self.runs.push(Run {
                held: vec![of.held],
                floor: of.floor,
                target: of.target,
                target_floor: of.target_floor,
                position: of.position,
                before: of.before,
                ceiling: None,
                window: None,
                quiet: false,
                moved: false,
            });
        }
        self.merge();
        give_up
    }

    /// Runs that have come to the same place become one.
    pub fn merge(&mut self) {
        let mut merged: Vec<Run> = Vec::with_capacity(self.runs.len());
        for run in self.runs.drain(..) {
            match merged.iter_mut().find(|of| of.stands_as(&run)) {
                Some(of) => of.join(run),
                None => merged.push(run),
            }
        }
        self.runs = merged;
    }

    /// Takes partitions out.
    pub fn remove(&mut self, partitions: &[i32]) {
        for run in &mut self.runs {
            run.held.retain(|held| !partitions.contains(&held.partition));
        }
        self.runs.retain(|run| !run.held.is_empty());
    }

    /// How many partitions there are.
    #[must_use]
    pub fn partition_count(&self) -> usize {
        self.runs.iter().map(|run| run.held.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(partition: i32, fence: i64, resolved: &str) -> Written {
        Written {
            held: Followed { partition, fence, resolved: resolved.into() },
            floor: i64::from(partition),
            target: None,
            target_floor: 0,
            position: 0,
            before: false,
            give_up: false,
        }
    }

    fn ahead(whole: bool, target: &str, position: i64) -> Ahead {
        Ahead { whole, target: target.into(), target_floor: 9, position, ceiling: Some(100), window: None }
    }

    #[test]
    fn partitions_at_different_places_are_read_together_between_two_targets() {
        let mut runs = Runs::default();
        assert_eq!(runs.reconcile(vec![written(2, 1, "5:5:"), written(3, 1, "7:7:")]), Vec::<i32>::new());
        assert_eq!(runs.runs.len(), 1);
        assert_eq!((runs.runs[0].floor, runs.runs[0].quiet), (2, false));
        runs.runs[0].advance(&ahead(true, "9:9:", 0));
        assert!(runs.runs[0].held.iter().all(|held| &*held.resolved == "9:9:"));
        assert_eq!((runs.runs[0].floor, runs.runs[0].quiet), (9, true));
    }

    #[test]
    fn one_that_comes_in_the_middle_of_a_target_waits_for_its_end() {
        let mut runs = Runs::default();
        runs.reconcile(vec![written(1, 1, "5:5:")]);
        runs.runs[0].advance(&ahead(false, "9:9:", 40));
        runs.reconcile(vec![written(1, 1, "5:5:"), written(2, 4, "3:3:")]);
        assert_eq!(runs.runs.len(), 2, "the one in memory keeps its place");
        assert_eq!((runs.runs[0].position, runs.runs[1].position), (40, 0));
        runs.runs[0].advance(&ahead(true, "9:9:", 0));
        runs.merge();
        assert_eq!(runs.runs.len(), 1);
        assert_eq!(&*runs.runs[0].held[0].resolved, "9:9:");
        assert_eq!(&*runs.runs[0].held[1].resolved, "3:3:");
        assert!(!runs.runs[0].quiet, "they have not read the same");
    }

    #[test]
    fn another_fence_is_another_place() {
        let mut runs = Runs::default();
        runs.reconcile(vec![written(1, 1, "5:5:"), written(2, 1, "5:5:")]);
        runs.runs[0].advance(&ahead(true, "9:9:", 0));
        let taken_and_back = Written { give_up: true, ..written(1, 3, "6:6:") };
        assert_eq!(runs.reconcile(vec![taken_and_back]), [1]);
        assert_eq!((runs.partition_count(), &*runs.runs[0].held[0].resolved), (1, "6:6:"));
    }
}
