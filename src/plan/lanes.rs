//! Per-stream FIFO lanes: which messages may be in flight.
//!
//! Invariants
//! - A lane (stream, destination) has at most one run in flight, and in it only its oldest messages
//!   (exactly one, unless the transport takes ordered batches whole). Everything about order follows.
//! - A lane whose head failed publishes nothing until it is due; nothing overtakes the head.
//! - While a lane is parked (`kept_beside`), its messages live beside the log: what is admitted is handed
//!   back to be copied there, and what is published from there is known to be a copy.
//! - A head that goes to the dead letters blocks its lane until that is committed.
//!
//! Cost: `admit`, `take`, `settle` are O(1) a message; nothing is allocated within the capacities.

pub mod recall;
mod whole;

use std::collections::VecDeque;

use hashbrown::HashMap;
use uuid::Uuid;

use super::lane::Slot;
pub use super::lane::{Admission, Admitted, Lane, LaneIndex, LaneState, SlotIndex, Source};
use super::ledger::TransactionIndex;
use crate::batch::DestinationId;
use crate::time::Tick;

/// No slot, no lane.
const NONE: u32 = u32::MAX;

/// The lanes of a shard.
#[derive(Debug, Default)]
pub struct Lanes {
    index_of: HashMap<(Uuid, DestinationId), u32>,
    lanes: Vec<Lane>,
    free_lanes: Vec<u32>,
    slots: Vec<Slot>,
    free_slots: Vec<u32>,
    slots_used: usize,
    ready: Vec<VecDeque<u32>>,
    destinations: Vec<DestinationId>,
    ready_count: usize,
    parked_count: usize,
    kept_count: usize,
    streams_max: usize,
}

impl Lanes {
    /// Room for so many messages in so many lanes.
    #[must_use]
    pub fn with_capacity(rows_max: usize, streams_max: usize) -> Self {
        let lanes = streams_max.min(1 << 16);
        let rows = rows_max.min(1 << 16);
        Self {
            index_of: HashMap::with_capacity(lanes),
            lanes: Vec::with_capacity(lanes),
            free_lanes: Vec::with_capacity(lanes),
            slots: Vec::with_capacity(rows),
            free_slots: Vec::with_capacity(rows),
            slots_used: 0,
            ready: Vec::new(),
            destinations: Vec::new(),
            ready_count: 0,
            parked_count: 0,
            kept_count: 0,
            streams_max,
        }
    }

    /// Lanes that are remembered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.index_of.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.index_of.is_empty()
    }

    /// Of these, such as are kept beside the log: parked, or on their way back.
    #[must_use]
    pub fn kept_count(&self) -> usize {
        self.kept_count
    }

    /// Messages in lanes.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.slots_used
    }

    /// Lanes that could publish now.
    #[must_use]
    pub fn ready_count(&self) -> usize {
        self.ready_count
    }

    /// Lanes that are parked.
    #[must_use]
    pub fn parked_count(&self) -> usize {
        self.parked_count
    }

    /// A lane.
    #[must_use]
    pub fn lane(&self, lane: LaneIndex) -> &Lane {
        &self.lanes[lane.0 as usize]
    }

    /// The lane of this stream and destination, if there is one.
    #[must_use]
    pub fn find(&self, lane_id: Uuid, destination: DestinationId) -> Option<LaneIndex> {
        self.index_of.get(&(lane_id, destination)).copied().map(LaneIndex)
    }

    /// Puts a message at the end of its lane.
    pub fn admit(&mut self, admission: &Admission) -> Admitted {
        let index = self.lane_for(admission);
        let lane = &mut self.lanes[index as usize];
        if admission.stream_seq <= lane.last_seq {
            return Admitted::Known;
        }
        lane.last_seq = admission.stream_seq;
        if lane.kept_beside {
            lane.copying += 1;
            return Admitted::Beside(LaneIndex(index));
        }
        self.append(index, admission.stream_seq, admission.source);
        Admitted::Queued
    }

    /// Notes that a message comes by that never enters its lane. `false`: it is known already.
    pub fn pass(&mut self, admission: &Admission) -> bool {
        let index = self.lane_for(admission);
        let lane = &mut self.lanes[index as usize];
        let is_new = admission.stream_seq > lane.last_seq;
        lane.last_seq = lane.last_seq.max(admission.stream_seq);
        is_new
    }

    /// Puts a copy kept beside the log at the end of its parked lane. Copies come by number, and are written by
    /// number: what is below one is resolved or stands before it, even where the log hands it out again.
    pub fn admit_copy(&mut self, lane: LaneIndex, stream_seq: i64, source: Source) {
        let of = &mut self.lanes[lane.0 as usize];
        of.last_seq = of.last_seq.max(stream_seq);
        self.append(lane.0, stream_seq, source);
    }

    /// A lane that the database knows to be parked.
    pub fn restore_parked(
        &mut self,
        lane_id: Uuid,
        destination: DestinationId,
        partition: u32,
        attempts: i32,
        due: Tick,
    ) -> LaneIndex {
        let index = self.lane_for(&Admission {
            lane_id,
            destination,
            partition,
            stream_seq: 0,
            single: false,
            source: Source { batch: NONE, reference: 0, transaction: TransactionIndex::NONE },
        });
        self.keep_beside(index as usize);
        let lane = &mut self.lanes[index as usize];
        lane.attempts = attempts;
        lane.state = LaneState::Parked;
        lane.due = due;
        self.parked_count += 1;
        LaneIndex(index)
    }

    /// Takes the heads of up to `rows_max` ready lanes of a destination out for a run; with `per_lane` over
    /// 1, up to so many consecutive messages of a lane.
    pub fn take(
        &mut self,
        destination: DestinationId,
        rows_max: usize,
        per_lane: usize,
        mut each: impl FnMut(SlotIndex, &Source),
    ) {
        let Some(queue) = self.ready.get_mut(destination.index()) else { return };
        let mut taken = 0;
        while taken < rows_max {
            let Some(index) = queue.pop_front() else { break };
            self.ready_count -= 1;
            let lane = &mut self.lanes[index as usize];
            lane.state = LaneState::InFlight;
            let mut slot = lane.head;
            let mut of_lane = 0;
            while slot != NONE && of_lane < per_lane && taken < rows_max {
                each(SlotIndex(slot), &self.slots[slot as usize].source);
                slot = self.slots[slot as usize].next;
                of_lane += 1;
                taken += 1;
            }
        }
    }

    /// Lanes of a destination that could publish now.
    #[must_use]
    pub fn ready_for(&self, destination: DestinationId) -> usize {
        self.ready.get(destination.index()).map_or(0, VecDeque::len)
    }

    /// The first of them.
    #[must_use]
    pub fn first_ready(&self, destination: DestinationId) -> Option<LaneIndex> {
        self.ready.get(destination.index())?.front().copied().map(LaneIndex)
    }

    /// A parked lane waits longer.
    pub fn postpone(&mut self, lane: LaneIndex, due: Tick) {
        self.lanes[lane.0 as usize].due = due;
    }

    /// Destinations that have had a lane, by index.
    #[must_use]
    pub fn destination_count(&self) -> usize {
        self.destinations.len()
    }

    /// One of them.
    #[must_use]
    pub fn destination_at(&self, index: usize) -> Option<DestinationId> {
        self.destinations.get(index).copied()
    }

    /// The lane of a slot that is out.
    #[must_use]
    pub fn lane_of(&self, slot: SlotIndex) -> LaneIndex {
        LaneIndex(self.slots[slot.0 as usize].lane)
    }

    /// The number of a slot's message.
    #[must_use]
    pub fn stream_seq_of(&self, slot: SlotIndex) -> i64 {
        self.slots[slot.0 as usize].stream_seq
    }

    /// The slot's source.
    #[must_use]
    pub fn source_of(&self, slot: SlotIndex) -> Source {
        self.slots[slot.0 as usize].source
    }

    /// The head was acknowledged: it leaves the lane. The lane goes on with [`Lanes::release`].
    ///
    /// # Panics
    /// If the slot is not its lane's head: only a bug can acknowledge out of order.
    pub fn acknowledge(&mut self, slot: SlotIndex) -> Source {
        let lane = self.slots[slot.0 as usize].lane as usize;
        assert_eq!(self.lanes[lane].head, slot.0, "acknowledged out of order");
        self.lanes[lane].attempts = 0;
        let source = self.pop_head(lane);
        if source.transaction == TransactionIndex::NONE {
            self.lanes[lane].deleting += 1;
        }
        source
    }

    /// A run of the lane has ended, or a wait of it: it becomes ready, idle, or goes away.
    pub fn release(&mut self, lane: LaneIndex) {
        let index = lane.0 as usize;
        if self.lanes[index].head != NONE {
            self.make_ready(lane.0, false);
            return;
        }
        self.lanes[index].state = LaneState::Idle;
        if self.lanes[index].single && !self.lanes[index].kept_beside {
            self.remove(lane.0);
        }
    }

    /// The destination did not take the head for no fault of its own: first in the queue again.
    pub fn put_back(&mut self, lane: LaneIndex) {
        self.make_ready(lane.0, true);
    }

    /// The head failed: the lane waits until `due`. All its messages leave memory: each is handed out with its
    /// number; those that are not copies already are to be copied beside the log.
    pub fn park(&mut self, lane: LaneIndex, attempts: i32, due: Tick, mut each: impl FnMut(i64, Source)) {
        let index = lane.0 as usize;
        debug_assert!(matches!(self.lanes[index].state, LaneState::InFlight | LaneState::Dying));
        self.lanes[index].state = LaneState::Parked;
        self.lanes[index].attempts = attempts;
        self.lanes[index].due = due;
        self.keep_beside(index);
        self.parked_count += 1;
        while self.lanes[index].head != NONE {
            let head = self.lanes[index].head;
            let stream_seq = self.slots[head as usize].stream_seq;
            let source = self.pop_head(index);
            if source.transaction != TransactionIndex::NONE {
                self.lanes[index].copying += 1;
            }
            each(stream_seq, source);
        }
    }

    /// Copies of the lane were committed beside the log.
    pub fn copied(&mut self, lane: LaneIndex, count: u32) {
        self.lanes[lane.0 as usize].copying -= count;
    }

    /// The deletion of an acknowledged copy was committed.
    pub fn deleted(&mut self, lane_id: Uuid, destination: DestinationId) {
        if let Some(index) = self.index_of.get(&(lane_id, destination)) {
            self.lanes[*index as usize].deleting -= 1;
        }
    }

    /// The lane stands still from now on. It is kept beside the log; whoever drains it asks first.
    pub fn hold(&mut self, lane: LaneIndex) {
        self.lanes[lane.0 as usize].held = true;
    }

    /// The lane is not drained before this moment.
    pub fn rest(&mut self, lane: LaneIndex, until: Tick) {
        self.lanes[lane.0 as usize].rests_until = until;
    }

    /// A parked lane is being drained: it is no longer waiting for its time, and not yet free.
    pub fn begin_drain(&mut self, lane: LaneIndex) {
        let lane = &mut self.lanes[lane.0 as usize];
        if lane.state == LaneState::Parked {
            self.parked_count -= 1;
        }
        lane.state = LaneState::Idle;
    }

    /// The drain found nothing yet, or failed: parked again until `due`.
    pub fn park_again(&mut self, lane: LaneIndex, due: Tick) {
        let lane = &mut self.lanes[lane.0 as usize];
        lane.state = LaneState::Parked;
        lane.due = due;
        self.parked_count += 1;
    }

    /// The parked row is gone: the lane is as any other.
    pub fn unparked(&mut self, lane: LaneIndex) {
        let index = lane.0 as usize;
        self.kept_count -= usize::from(std::mem::take(&mut self.lanes[index].kept_beside));
        self.lanes[index].attempts = 0;
        self.release(lane);
    }

    /// The head goes to the dead letters: the lane waits for the commit.
    pub fn die(&mut self, lane: LaneIndex) {
        self.lanes[lane.0 as usize].state = LaneState::Dying;
    }

    /// The head's dead letter is committed: it leaves the lane. Go on with [`Lanes::release`].
    pub fn buried(&mut self, lane: LaneIndex) -> Source {
        self.lanes[lane.0 as usize].attempts = 0;
        self.pop_head(lane.0 as usize)
    }

    fn keep_beside(&mut self, lane: usize) {
        self.kept_count += usize::from(!std::mem::replace(&mut self.lanes[lane].kept_beside, true));
        self.lanes[lane].was_beside = true;
    }

    fn lane_for(&mut self, admission: &Admission) -> u32 {
        let key = (admission.lane_id, admission.destination);
        if let Some(index) = self.index_of.get(&key) {
            return *index;
        }
        let lane = Lane {
            lane_id: admission.lane_id,
            destination: admission.destination,
            partition: admission.partition,
            last_seq: 0,
            attempts: 0,
            state: LaneState::Idle,
            due: Tick::NEVER,
            kept_beside: false,
            was_beside: false,
            copying: 0,
            deleting: 0,
            held: false,
            rests_until: Tick(0),
            single: admission.single,
            len: 0,
            head: NONE,
            tail: NONE,
            used: true,
        };
        let index = match self.free_lanes.pop() {
            Some(index) => {
                self.lanes[index as usize] = lane;
                index
            }
            None => {
                self.lanes.push(lane);
                (self.lanes.len() - 1) as u32
            }
        };
        self.index_of.insert(key, index);
        while self.ready.len() <= admission.destination.index() {
            self.ready.push(VecDeque::new());
        }
        if !self.destinations.contains(&admission.destination) {
            self.destinations.push(admission.destination);
            self.ready[admission.destination.index()].reserve(1024);
        }
        index
    }

    fn append(&mut self, lane: u32, stream_seq: i64, source: Source) {
        let slot = Slot { source, stream_seq, next: NONE, lane };
        let index = match self.free_slots.pop() {
            Some(index) => {
                self.slots[index as usize] = slot;
                index
            }
            None => {
                self.slots.push(slot);
                (self.slots.len() - 1) as u32
            }
        };
        self.slots_used += 1;
        let entry = &mut self.lanes[lane as usize];
        entry.len += 1;
        if entry.tail == NONE {
            entry.head = index;
        } else {
            self.slots[entry.tail as usize].next = index;
        }
        entry.tail = index;
        if entry.state == LaneState::Idle {
            self.make_ready(lane, false);
        }
    }

    fn make_ready(&mut self, lane: u32, first: bool) {
        let entry = &mut self.lanes[lane as usize];
        entry.state = LaneState::Ready;
        let queue = &mut self.ready[entry.destination.index()];
        if first {
            queue.push_front(lane);
        } else {
            queue.push_back(lane);
        }
        self.ready_count += 1;
    }

    fn pop_head(&mut self, lane: usize) -> Source {
        let entry = &mut self.lanes[lane];
        let head = entry.head;
        let slot = self.slots[head as usize];
        entry.head = slot.next;
        if entry.head == NONE {
            entry.tail = NONE;
        }
        entry.len -= 1;
        self.free_slots.push(head);
        self.slots_used -= 1;
        slot.source
    }

    fn remove(&mut self, lane: u32) {
        let entry = &mut self.lanes[lane as usize];
        entry.used = false;
        self.index_of.remove(&(entry.lane_id, entry.destination));
        self.free_lanes.push(lane);
    }
}
