//! A worker's lanes: which of the messages in hand may be looked up, handled, and let go. Decisions only.
//!
//! Invariants
//! - Of a lane one handler runs at a time, and they start in the order in which their messages came.
//! - Behind a message that failed nothing of its lane is started before its failure is committed.
//! - A lane is unlocked only when nothing of it is in hand: waiting, running, or decided and not committed.
//! - After a lost connection nothing is believed that was looked up over it; what still runs is waited for, and its
//!   result is nobody's.
//!
//! Cost: each step is O(1) a message but [`Lanes::to_begin`], which looks at the lanes that have something new, and
//! [`Lanes::reset`].

use std::collections::{BTreeSet, VecDeque};

use hashbrown::{HashMap, HashSet};
use uuid::Uuid;

use crate::time::Tick;

/// Names a message in hand of its worker.
pub(crate) type Slot = usize;

/// What was found of a message when it was looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Not seen before; its lane is locked.
    New,
    /// Seen before.
    Duplicate,
    /// Its lane is in somebody else's hands.
    Busy,
    /// Its lane is parked: it has to wait behind. The lane is locked.
    Behind,
}

#[derive(Debug, Default)]
struct Lane {
    /// Not decided, in order.
    waiting: VecDeque<Slot>,
    /// So many of them, from the front, may be handled.
    begun: usize,
    running: Option<Slot>,
    /// What runs is of a lost connection.
    is_stale: bool,
    /// Decided and not committed.
    decided: usize,
    /// Nothing more starts before the commit: something failed, or is decided in it.
    is_barred: bool,
    is_locked: bool,
    /// Its head was disturbed: nothing starts before.
    rests_until: Option<Tick>,
    busy_since: Option<Tick>,
    again_at: Tick,
}

impl Lane {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_none() && self.decided == 0
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    lanes: HashMap<Uuid, Lane>,
    /// Lanes with something that is not looked up.
    new: HashSet<Uuid>,
    /// Lanes whose next may start, in the order in which they became so; may hold some that may not any more.
    ready: VecDeque<Uuid>,
    /// Lanes that rest, by their ends; may hold some that do not any more.
    resting: BTreeSet<(Tick, Uuid)>,
    /// Lanes that became idle.
    idle: Vec<Uuid>,
    running: usize,
}

impl Lanes {
    /// A message came.
    pub(crate) fn arrive(&mut self, lane_id: Uuid, slot: Slot) {
        self.lanes.entry(lane_id).or_default().waiting.push_back(slot);
        self.new.insert(lane_id);
    }

    /// What is to be looked up now, a lane's messages together and in order, about `rows_max` of it.
    pub(crate) fn to_begin(&self, now: Tick, rows_max: usize) -> Vec<(Uuid, Slot)> {
        let mut chosen = Vec::new();
        for lane_id in &self.new {
            let Some(lane) = self.lanes.get(lane_id) else { continue };
            if lane.is_stale || lane.is_barred || lane.again_at > now {
                continue;
            }
            chosen.extend(lane.waiting.iter().skip(lane.begun).map(|slot| (*lane_id, *slot)));
            if chosen.len() >= rows_max {
                break;
            }
        }
        chosen.truncate(rows_max.max(1));
        chosen
    }

    /// When a busy lane is to be looked at again.
    pub(crate) fn next_look(&self) -> Option<Tick> {
        self.new
            .iter()
            .filter_map(|id| self.lanes.get(id))
            .filter(|lane| !lane.is_stale && !lane.is_barred)
            .map(|lane| lane.again_at)
            .min()
    }

    /// What was found of a message that was looked up, in the order in which they were. One that does not stay in its lane
    /// (a duplicate, one that has to wait behind) leaves it here; those of a busy lane stay, but for its duplicates.
    pub(crate) fn began(&mut self, lane_id: Uuid, slot: Slot, found: Found, now: Tick, again_ms: u64) {
        let Some(lane) = self.lanes.get_mut(&lane_id) else { return };
        let Some(at) = lane.waiting.iter().skip(lane.begun).position(|waits| *waits == slot) else { return };
        let at = lane.begun + at;
        match found {
            Found::Busy => {
                lane.busy_since.get_or_insert(now);
                lane.again_at = now.plus_ms(again_ms);
                return;
            }
            Found::New => {
                debug_assert_eq!(at, lane.begun);
                lane.begun += 1;
            }
            Found::Duplicate => {
                lane.waiting.remove(at);
            }
            Found::Behind => {
                lane.waiting.remove(at);
                lane.decided += 1;
            }
        }
        // A lane of nothing but duplicates is not kept locked.
        if found != Found::Duplicate {
            lane.busy_since = None;
            lane.is_locked = true;
        }
        self.tidy(lane_id);
    }

    /// A stored message that was claimed with its lane's lock: it may be handled.
    pub(crate) fn claimed(&mut self, lane_id: Uuid, slot: Slot) {
        let lane = self.lanes.entry(lane_id).or_default();
        let at = lane.begun;
        lane.waiting.insert(at, slot);
        lane.begun += 1;
        lane.is_locked = true;
        self.tidy(lane_id);
    }

    /// Whether it is locked.
    #[cfg(test)]
    pub(crate) fn is_locked(&self, lane_id: Uuid) -> bool {
        self.lanes.get(&lane_id).is_some_and(|lane| lane.is_locked)
    }

    /// Every lane that is locked.
    pub(crate) fn locked(&self) -> Vec<Uuid> {
        self.lanes.iter().filter(|(_, lane)| lane.is_locked).map(|(id, _)| *id).collect()
    }

    /// The next message whose handler may start; its lane runs from here on.
    pub(crate) fn start_next(&mut self) -> Option<(Uuid, Slot)> {
        while let Some(lane_id) = self.ready.pop_front() {
            let Some(lane) = self.lanes.get_mut(&lane_id) else { continue };
            if lane.running.is_some() || lane.is_barred || lane.rests_until.is_some() || lane.begun == 0 {
                continue;
            }
            let Some(slot) = lane.waiting.pop_front() else { continue };
            lane.begun -= 1;
            lane.running = Some(slot);
            self.running += 1;
            return Some((lane_id, slot));
        }
        None
    }

    /// The lane's next message, if it may be handled with the one that has just been started (see [`Self::start_next`]).
    pub(crate) fn peek(&self, lane_id: Uuid) -> Option<Slot> {
        let lane = self.lanes.get(&lane_id).filter(|lane| lane.begun > 0)?;
        lane.waiting.front().copied()
    }

    /// Takes what [`Self::peek`] showed: decided in the commit, as the one before it.
    pub(crate) fn take_along(&mut self, lane_id: Uuid) {
        let Some(lane) = self.lanes.get_mut(&lane_id).filter(|lane| lane.begun > 0) else { return };
        if lane.waiting.pop_front().is_some() {
            lane.begun -= 1;
            lane.decided += 1;
        }
    }

    /// What ran is decided, or has been given to the commit. `false`: its result is nobody's (a lost connection); it stands
    /// in its lane again.
    pub(crate) fn decided(&mut self, lane_id: Uuid) -> bool {
        let Some(lane) = self.lanes.get_mut(&lane_id) else { return false };
        lane.running = None;
        self.running -= 1;
        let is_stale = std::mem::take(&mut lane.is_stale);
        if !is_stale {
            lane.decided += 1;
        }
        self.tidy(lane_id);
        !is_stale
    }

    /// The lane's last decision is a failure: answers those behind it that were to be handled next, which are decided as
    /// well (to wait behind). Nothing starts until the commit.
    pub(crate) fn fail(&mut self, lane_id: Uuid) -> Vec<Slot> {
        let Some(lane) = self.lanes.get_mut(&lane_id) else { return Vec::new() };
        lane.is_barred = true;
        let behind: Vec<Slot> = lane.waiting.drain(..lane.begun).collect();
        lane.begun = 0;
        lane.decided += behind.len();
        behind
    }

    /// The lane's last decision is made in the commit: nothing starts until then.
    pub(crate) fn bar(&mut self, lane_id: Uuid) {
        if let Some(lane) = self.lanes.get_mut(&lane_id) {
            lane.is_barred = true;
        }
    }

    /// What was decided of the lane last, in order, is not decided after all: it stands at its front again, to be handled,
    /// and the lane rests until then. Its lock is kept.
    pub(crate) fn rest(&mut self, lane_id: Uuid, slots: &[Slot], until: Tick) {
        let Some(lane) = self.lanes.get_mut(&lane_id) else { return };
        lane.decided = lane.decided.saturating_sub(slots.len());
        lane.begun += slots.len();
        slots.iter().rev().for_each(|slot| lane.waiting.push_front(*slot));
        if lane.decided == 0 {
            lane.is_barred = false;
        }
        lane.rests_until = Some(until);
        self.resting.insert((until, lane_id));
        self.tidy(lane_id);
    }

    /// Lanes that have rested long enough go on.
    pub(crate) fn wake(&mut self, now: Tick) {
        while let Some((until, lane_id)) = self.resting.pop_first() {
            if until > now {
                self.resting.insert((until, lane_id));
                return;
            }
            if let Some(lane) = self.lanes.get_mut(&lane_id)
                && lane.rests_until.is_some_and(|until| until <= now)
            {
                lane.rests_until = None;
                self.tidy(lane_id);
            }
        }
    }

    /// When a lane that rests goes on.
    pub(crate) fn next_wake(&self) -> Tick {
        self.resting.first().map_or(Tick::NEVER, |(until, _)| *until)
    }

    /// So many of the lane's decisions are committed.
    pub(crate) fn committed(&mut self, lane_id: Uuid, count: usize) {
        let Some(lane) = self.lanes.get_mut(&lane_id) else { return };
        lane.decided = lane.decided.saturating_sub(count);
        if lane.decided == 0 {
            lane.is_barred = false;
        }
        self.tidy(lane_id);
    }

    /// A message that is not handled now goes back to the front of its lane, to be looked up again.
    pub(crate) fn put_back(&mut self, lane_id: Uuid, slot: Slot) {
        let lane = self.lanes.entry(lane_id).or_default();
        lane.waiting.push_front(slot);
        self.new.insert(lane_id);
    }

    /// Everything of the lane that waits leaves it (to be abandoned), in order.
    pub(crate) fn clear(&mut self, lane_id: Uuid) -> Vec<Slot> {
        let Some(lane) = self.lanes.get_mut(&lane_id) else { return Vec::new() };
        lane.begun = 0;
        lane.rests_until = None;
        lane.busy_since = None;
        lane.again_at = Tick(0);
        let waiting = lane.waiting.drain(..).collect();
        self.tidy(lane_id);
        waiting
    }

    /// Lanes that have been in others' hands since `since` or longer.
    pub(crate) fn busy_since(&self, since: Tick) -> Vec<Uuid> {
        let long = |lane: &Lane| lane.busy_since.is_some_and(|began| began <= since);
        self.new.iter().filter(|id| self.lanes.get(*id).is_some_and(long)).copied().collect()
    }

    /// Lanes with something that waits and is not running.
    pub(crate) fn waiting(&self) -> Vec<Uuid> {
        self.lanes.iter().filter(|(_, lane)| !lane.waiting.is_empty()).map(|(id, _)| *id).collect()
    }

    /// The connection is lost: locks and look-ups are void. What runs stands in its lane again; what was decided is put back
    /// by the caller.
    pub(crate) fn reset(&mut self) {
        self.ready.clear();
        self.resting.clear();
        self.idle.clear();
        for (lane_id, lane) in &mut self.lanes {
            lane.begun = 0;
            lane.decided = 0;
            lane.is_barred = false;
            lane.is_locked = false;
            lane.rests_until = None;
            // Behind what was decided before it, which the caller puts before it, and before what waits. It is looked
            // up when what runs has ended.
            if lane.running.is_some() && !lane.is_stale {
                lane.is_stale = true;
                lane.waiting.extend(lane.running);
                lane.waiting.rotate_right(1);
            }
            lane.busy_since = None;
            lane.again_at = Tick(0);
            if !lane.waiting.is_empty() {
                self.new.insert(*lane_id);
            }
        }
        self.lanes.retain(|_, lane| !lane.is_idle());
    }

    /// Lanes of which nothing is in hand any more, to be unlocked; they are forgotten.
    pub(crate) fn take_idle(&mut self) -> Vec<Uuid> {
        let mut unlocked = Vec::new();
        for lane_id in std::mem::take(&mut self.idle) {
            if self.lanes.get(&lane_id).is_some_and(Lane::is_idle)
                && self.lanes.remove(&lane_id).is_some_and(|lane| lane.is_locked)
            {
                unlocked.push(lane_id);
            }
        }
        unlocked
    }

    /// Handlers that run.
    pub(crate) fn running(&self) -> usize {
        self.running
    }

    /// Whether no lane has anything in hand.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.lanes.values().all(Lane::is_idle)
    }

    /// Whether a handler could start.
    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Keeps the lists true after a change of a lane.
    fn tidy(&mut self, lane_id: Uuid) {
        let Some(lane) = self.lanes.get(&lane_id) else { return };
        if lane.waiting.len() == lane.begun {
            self.new.remove(&lane_id);
        } else {
            self.new.insert(lane_id);
        }
        let may_start = lane.begun > 0 && lane.running.is_none() && !lane.is_barred && lane.rests_until.is_none();
        if may_start && self.ready.back() != Some(&lane_id) {
            self.ready.push_back(lane_id);
        }
        if lane.is_idle() {
            self.idle.push(lane_id);
        }
    }
}

#[cfg(test)]
#[path = "lane_tests.rs"]
mod tests;
