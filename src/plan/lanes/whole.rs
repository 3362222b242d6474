//! What concerns all lanes at once: walks over them, and lanes that go away.
//!
//! Invariant: a lane that goes away leaves nothing behind: not in a queue, not in a count, and whoever still has its
//! index finds nothing to do.
//!
//! Cost: each is a walk over all lanes; none is on the way of a message.

use std::collections::VecDeque;

use super::{Lane, LaneIndex, LaneState, Lanes, NONE, Source};

impl Lanes {
    /// Every message in a lane, with its partition.
    pub fn each_message(&self, mut each: impl FnMut(u32, &Source)) {
        for lane in self.lanes.iter().filter(|lane| lane.used) {
            let mut slot = lane.head;
            while slot != NONE {
                let of = &self.slots[slot as usize];
                each(lane.partition, &of.source);
                slot = of.next;
            }
        }
    }

    /// A lane that is so, if there is one; the search begins at the place of the last one that was found, and goes round.
    /// So a question that is asked again and again until no lane is so any more walks over most lanes once.
    #[must_use]
    pub fn find_from(&self, place: LaneIndex, is_so: impl Fn(&Lane) -> bool) -> Option<LaneIndex> {
        let count = self.lanes.len();
        let from = (place.0 as usize).min(count);
        let is_so = |index: &usize| self.lanes[*index].used && is_so(&self.lanes[*index]);
        (from..count).chain(0..from).find(is_so).map(|index| LaneIndex(index as u32))
    }

    /// Lanes of such partitions go away with their messages, which are handed out. None of them may be in flight.
    pub fn remove_if(&mut self, gone: impl Fn(u32) -> bool, mut each: impl FnMut(Source)) {
        for index in 0..self.lanes.len() {
            let lane = self.lanes[index];
            if !lane.used || !gone(lane.partition) {
                continue;
            }
            match lane.state {
                LaneState::Ready => {
                    self.ready[lane.destination.index()].retain(|ready| *ready != index as u32);
                    self.ready_count -= 1;
                }
                LaneState::Parked => self.parked_count -= 1,
                _ => {}
            }
            while self.lanes[index].head != NONE {
                each(self.pop_head(index));
            }
            // Whoever still has its index finds nothing to do.
            self.lanes[index].state = LaneState::Idle;
            if std::mem::take(&mut self.lanes[index].kept_beside) {
                self.kept_count -= 1;
            }
            self.remove(index as u32);
        }
    }

    /// Sheds idle lanes when there are more than the bound. `caught_up`: nothing that was kept beside the log can come
    /// out of the log any more; before that, a lane that was drained must go on knowing how far.
    pub fn shed(&mut self, caught_up: bool) {
        if self.index_of.len() <= self.streams_max {
            return;
        }
        for index in 0..self.lanes.len() as u32 {
            let lane = &self.lanes[index as usize];
            let is_idle = lane.used && lane.state == LaneState::Idle && !lane.kept_beside && lane.head == NONE;
            if is_idle && (caught_up || !lane.was_beside) {
                self.remove(index);
            }
        }
    }

    /// Forgets all lanes and every message in them. The bound on lanes stays.
    pub fn clear(&mut self) {
        let streams_max = self.streams_max;
        self.index_of.clear();
        self.lanes.clear();
        self.free_lanes.clear();
        self.slots.clear();
        self.free_slots.clear();
        self.slots_used = 0;
        self.ready.iter_mut().for_each(VecDeque::clear);
        self.ready_count = 0;
        self.parked_count = 0;
        self.kept_count = 0;
        self.streams_max = streams_max;
    }
}
