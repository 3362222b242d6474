//! An orderly stop: what this shard holds leaves as at a hand-over, all of it.
//!
//! Invariants
//! - Alone, the shard first reads what was stored before the stop, for [`LOOK_MS`] at most: what was acknowledged or
//!   announced is published before the end, also where it was left to the claim. Beside other engines it leaves that to
//!   them, at once. A worker that speaks SQL, or an engine that is not told (behind a pooler alone), is none: it may come
//!   late, or never.
//! - What is in lanes is published; what comes from then on is frozen, and is the next owner's. So a stop under load
//!   ends: others go on storing for these partitions for as long as they are held.
//! - What is resolved is known exactly, and the lease keeper hands it over at once: nothing of it goes out again, and
//!   nobody waits for what this shard has still to store for its callers.
//! - Before it is loaded, or while another change is under way, a shard drains as far as it has come, and its last cursor
//!   says what is resolved.

use super::Shard;
use super::regroup::{Leaving, PATIENCE_US};
use super::state::State;
use crate::seam::publisher::Publisher;
use crate::seam::runtime::Runtime;
use crate::seam::store::{Release, Store};
use crate::time::Tick;

/// How long a shard that is alone reads on.
const LOOK_MS: u64 = 1_000;

/// How far an orderly stop has come.
#[derive(Debug, Default)]
pub(super) enum Parting {
    /// There is none.
    #[default]
    None,
    /// What was stored before the stop is read: so many whole snapshots, or until then.
    Reading { whole: u64, until: Tick, patience_us: u64 },
    /// The partitions are on their way out.
    Begun(futures_channel::oneshot::Receiver<Release>),
    /// This is resolved of each: to be told to the keeper, which hands it over at once.
    Told(Release),
    /// It has been told. What is pending is stored still, as by somebody who owns nothing.
    Done,
}

impl State {
    /// The shard is to end.
    pub(super) fn stop(&mut self, deadline: Tick, has_others: bool, now: Tick) {
        self.stopping = Some(deadline);
        // Alone it has the whole time to publish what is in lanes.
        let (until, patience_us) = if has_others { (now, PATIENCE_US) } else { (now.plus_ms(LOOK_MS), u64::MAX) };
        // One that is being read, or asked for, was begun before the stop.
        let whole = self.regroup.wholes + 2;
        self.parting = Parting::Reading { whole, until, patience_us };
    }

    /// Whether the claim is to look at once, so that a stop gets on.
    pub(super) fn reads_before_stop(&self) -> bool {
        matches!(self.parting, Parting::Reading { whole, .. } if self.regroup.wholes < whole)
    }

    /// Everything held is to leave, if it can.
    fn begin_parting(&mut self, patience_us: u64, now: Tick) {
        self.parting = Parting::None;
        if !self.loaded || self.held.is_empty() || !self.regroup.may_part() {
            return;
        }
        self.thaw();
        let (reply, parted) = futures_channel::oneshot::channel();
        self.regroup.coming = None;
        let mut leaving = Leaving::of(self, self.held.clone(), reply, now);
        leaving.patience_us = patience_us;
        self.regroup.leaving = Some(leaving);
        self.parting = Parting::Begun(parted);
    }

    /// Whether the partitions are on their way out because of a stop.
    pub(super) fn is_parting(&self) -> bool {
        matches!(self.parting, Parting::Begun(_))
    }

    /// Whether nothing is left to do before the end.
    pub(super) fn may_end(&mut self, now: Tick) -> bool {
        if let Parting::Reading { until, patience_us, .. } = self.parting {
            let has_read = self.loaded && !self.reads_before_stop();
            if !has_read && now < until && !self.held.is_empty() {
                return false;
            }
            self.begin_parting(patience_us, now);
        }
        if let Parting::Begun(parted) = &mut self.parting {
            match parted.try_recv() {
                Ok(Some(release)) => self.parting = Parting::Told(release),
                Ok(None) => return false,
                // It was given up: what is persisted is the truth.
                Err(_) => self.parting = Parting::None,
            }
        }
        match self.parting {
            Parting::Told(_) | Parting::Done => {
                self.pending.is_empty()
                    && self.held_back.is_empty()
                    && !self.flush_in_flight
                    && self.runs_in_flight == 0
            }
            _ => self.is_drained(),
        }
    }

    /// What is resolved of what has left, once.
    pub(super) fn parted(&mut self) -> Option<Release> {
        if !matches!(self.parting, Parting::Told(_)) {
            return None;
        }
        match std::mem::replace(&mut self.parting, Parting::Done) {
            Parting::Told(release) => Some(release),
            _ => None,
        }
    }

    /// Messages in memory that this shard should have published: what was frozen was never its own.
    pub(super) fn rows_unpublished(&self) -> usize {
        if matches!(self.parting, Parting::Done) { self.lanes.rows() } else { self.rows_in_memory() }
    }
}

impl<R: Runtime, S: Store, P: Publisher> Shard<R, S, P> {
    /// Gets on with a stop; answers whether nothing is left to do before the end.
    pub(super) fn get_on_with_the_end(&self) -> bool {
        let (is_over, has_begun, parted) = {
            let mut state = self.state.borrow_mut();
            let was_parting = state.is_parting();
            let is_over = state.may_end(self.runtime.now());
            (is_over, state.is_parting() && !was_parting, state.parted())
        };
        if has_begun {
            // An idle shard's loops sleep until the next poll: nothing else gets the partitions on their way.
            self.raise_all();
        }
        if let Some(release) = parted {
            self.lease.part(release);
        }
        is_over
    }
}
