//! The broker's side: what was accepted, and the checks of the promises at the moment of each acceptance.
//!
//! Checked here
//! - Order (P2): the first copy of a message comes after the first copies of all before it in its lane that are
//!   not in the dead letters.
//! - What is published is committed, under the numbers it bears.
//! - A further copy needs a reason: an unknown outcome of the copy before, another owner, or a fault since that
//!   was sent.
//! - A run with an older fence of a partition starts only where an early take-over may have come first.
//! - Where nobody is followed early: runs of one partition that are under way at once have one fence, and no two
//!   incarnations have the same.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use corelane::batch::DestinationId;
use corelane::runtime::sim::SimRuntime;
use corelane::seam::runtime::Runtime;
use corelane::store::model::{DeadKey, Model};
use corelane::time::Tick;
use uuid::Uuid;

pub type Lane = (Uuid, DestinationId);

/// One copy on its way.
#[derive(Clone, Debug)]
pub struct Copy {
    pub lane: Lane,
    pub stream_seq: i64,
    pub version: i64,
    pub message_id: Uuid,
    pub partition: u32,
    pub fence: i64,
    pub started: Tick,
}

#[derive(Default)]
struct Expected {
    message_id: Uuid,
    version: i64,
    copies: u64,
    /// When the run of the newest copy started, and whether its sender was told that it was accepted.
    last_started: Tick,
    last_unknown: bool,
    /// Copies that operators have asked for and that have not come yet.
    asked_for: u32,
    last_fence: i64,
}

struct State {
    history_known: usize,
    lanes: BTreeMap<Lane, BTreeMap<i64, Expected>>,
    fences: BTreeMap<u32, i64>,
    /// Of each partition and fence, the messages that are under way.
    under_way: BTreeMap<(u32, i64), usize>,
    /// Who had a partition under a fence.
    owners: BTreeMap<(u32, i64), i32>,
    last_fault: Tick,
    copies: u64,
    accepted: u64,
}

/// The broker.
#[derive(Clone)]
pub struct Sink {
    runtime: SimRuntime,
    model: Model,
    lease_ms: u64,
    state: Rc<RefCell<State>>,
    holds: Rc<Cell<bool>>,
    one_fence_at_once: Rc<Cell<bool>>,
}

impl Sink {
    pub fn new(runtime: &SimRuntime, model: &Model, lease_ms: u64) -> Self {
        let state = State {
            history_known: 0,
            lanes: BTreeMap::new(),
            fences: BTreeMap::new(),
            under_way: BTreeMap::new(),
            owners: BTreeMap::new(),
            last_fault: Tick(0),
            copies: 0,
            accepted: 0,
        };
        Self {
            runtime: runtime.clone(),
            model: model.clone(),
            lease_ms,
            state: Rc::new(RefCell::new(state)),
            holds: Rc::default(),
            one_fence_at_once: Rc::default(),
        }
    }

    /// Something happened after which a copy may go out; whoever it befalls notices it within `lasting_ms`.
    pub fn fault(&self, what: &str, lasting_ms: u64) {
        self.runtime.trace(|| format!("fault: {what}"));
        let mut state = self.state.borrow_mut();
        state.last_fault = state.last_fault.max(self.runtime.now().plus_ms(lasting_ms));
    }

    /// A run of this incarnation starts with these messages.
    pub fn run_starts(&self, incarnation: i32, copies: &[Copy]) {
        let now = self.runtime.now();
        for copy in copies {
            let newest = {
                let mut state = self.state.borrow_mut();
                let newest = state.fences.entry(copy.partition).or_insert(0);
                *newest = (*newest).max(copy.fence);
                *newest
            };
            // Who lost its session lock may be followed at once, and learns it with its next renewal.
            let lost = self.model.session_lost(incarnation);
            let early = lost.is_some_and(|lost| now.since_us(lost) <= self.lease_ms * 1000);
            if copy.fence < newest && !early {
                self.runtime.fail(format!(
                    "P2: incarnation {incarnation} starts a run on partition {} with fence {}, newest is {newest}",
                    copy.partition, copy.fence
                ));
            }
            self.is_under_way(incarnation, copy);
        }
    }

    fn is_under_way(&self, incarnation: i32, copy: &Copy) {
        let key = (copy.partition, copy.fence);
        let mut state = self.state.borrow_mut();
        *state.under_way.entry(key).or_default() += 1;
        if !self.one_fence_at_once.get() {
            return;
        }
        let all = (copy.partition, i64::MIN)..=(copy.partition, i64::MAX);
        if let Some(((partition, other), _)) = state.under_way.range(all).find(|(of, _)| **of != key) {
            self.runtime.fail(format!("P2: partition {partition} under fences {other} and {} at once", copy.fence));
        }
        let owner = *state.owners.entry(key).or_insert(incarnation);
        if owner != incarnation {
            self.runtime.fail(format!("P2: partition and fence {key:?} of {owner} and {incarnation}"));
        }
    }

    /// The run has ended for its sender.
    pub fn run_ends(&self, copies: &[Copy]) {
        let mut state = self.state.borrow_mut();
        for copy in copies {
            let key = (copy.partition, copy.fence);
            if let Some(count) = state.under_way.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    state.under_way.remove(&key);
                }
            }
        }
    }

    /// Nobody is followed before it is known to have ended.
    pub fn allow_one_fence_at_once(&self) {
        self.one_fence_at_once.set(true);
    }

    /// The transport has the message. `unknown`: its sender will not be told so.
    pub fn accept(&self, copy: &Copy, unknown: bool) {
        self.learn_history();
        self.runtime.trace(|| {
            let lane = copy.lane.0.as_u128() as u32;
            let doubt = if unknown { " (not told)" } else { "" };
            format!("sink: {lane:x}>{} {} fence {}{doubt}", copy.lane.1.name(), copy.stream_seq, copy.fence)
        });
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        state.accepted += 1;
        let last_fault = state.last_fault.max(self.model.last_cut());
        let Some(lane) = state.lanes.get_mut(&copy.lane) else {
            return self.runtime.fail(format!("published what was never committed: {copy:?}"));
        };
        let earlier = lane
            .range(..copy.stream_seq)
            .filter(|(_, of)| of.copies == 0)
            .find(|(seq, _)| !self.may_be_overtaken((copy.lane.0, copy.lane.1, **seq)));
        let earlier = earlier.map(|(seq, _)| *seq);
        let Some(of) = lane.get_mut(&copy.stream_seq) else {
            return self.runtime.fail(format!("published what was never committed: {copy:?}"));
        };
        if (of.message_id, of.version) != (copy.message_id, copy.version) {
            return self.runtime.fail(format!("another message bears this number: {copy:?}"));
        }
        if of.copies == 0 {
            if let Some(earlier) = earlier {
                let text = format!("P2: number {} before {earlier}, lane {:?}", copy.stream_seq, copy.lane);
                return self.runtime.fail(text);
            }
        } else {
            state.copies += 1;
            // A run that its sender had given up may arrive after the next one.
            let given_up = unknown && copy.started < of.last_started;
            let other_owner = copy.fence != of.last_fence;
            let has_reason = of.last_unknown || given_up || other_owner || last_fault >= of.last_started;
            let asked_for = !has_reason && of.asked_for > 0;
            if asked_for {
                of.asked_for -= 1;
            } else if !has_reason {
                self.runtime.fail(format!("P3: a copy without a reason: {copy:?}, first at {:?}", of.last_started));
            }
        }
        of.copies += 1;
        if copy.started >= of.last_started {
            of.last_started = copy.started;
            of.last_unknown = unknown;
            of.last_fence = copy.fence;
        }
    }

    /// Whether what comes after it in its lane need not wait for it: it is, or was, a dead letter. Where streams are held
    /// behind their dead, only one that was discarded.
    fn may_be_overtaken(&self, key: DeadKey) -> bool {
        let (died, discarded) = self.model.ever_dead(key);
        if self.holds.get() { discarded } else { died }
    }

    /// Streams are held behind their dead from now on.
    pub fn hold(&self) {
        self.holds.set(true);
    }

    /// An operator gives these back: a further copy has its reason.
    pub fn given_back(&self, keys: &[DeadKey]) {
        let mut state = self.state.borrow_mut();
        for (lane, destination, stream_seq) in keys {
            if let Some(of) = state.lanes.get_mut(&(*lane, *destination)).and_then(|lane| lane.get_mut(stream_seq)) {
                of.asked_for += 1;
            }
        }
    }

    /// The sender of this copy was not told what became of it after all.
    pub fn not_told(&self, copy: &Copy) {
        let mut state = self.state.borrow_mut();
        if let Some(of) = state.lanes.get_mut(&copy.lane).and_then(|lane| lane.get_mut(&copy.stream_seq))
            && of.last_started == copy.started
        {
            of.last_unknown = true;
        }
    }

    /// Copies beyond the first, and everything accepted.
    pub fn counts(&self) -> (u64, u64) {
        let state = self.state.borrow();
        (state.copies, state.accepted)
    }

    /// Committed messages that were neither accepted nor buried.
    pub fn missing(&self) -> Vec<String> {
        self.learn_history();
        let state = self.state.borrow();
        let mut missing = Vec::new();
        for ((lane_id, destination), lane) in &state.lanes {
            for (seq, of) in lane {
                if of.copies == 0 && !self.is_decided((*lane_id, *destination, *seq)) {
                    missing.push(format!("{lane_id}>{} {seq}", destination.name()));
                }
            }
        }
        missing
    }

    fn is_decided(&self, key: DeadKey) -> bool {
        self.model.dead_letter(key.0, key.1, key.2).is_some() || self.model.ever_dead(key).1
    }

    fn learn_history(&self) {
        let mut state = self.state.borrow_mut();
        let news = self.model.history_after(state.history_known);
        state.history_known += news.len();
        for message in news {
            for destination in message.destinations {
                let lane = state.lanes.entry((message.lane_id, destination)).or_default();
                let expected =
                    Expected { message_id: message.message_id, version: message.version, ..Expected::default() };
                if lane.insert(message.stream_seq, expected).is_some() {
                    let text = format!("number {} of {} was given twice", message.stream_seq, message.lane_id);
                    self.runtime.fail(text);
                }
            }
        }
    }
}
