//! A worker's life: look arrivals up, run their handlers, commit the results, settle.
//!
//! Invariants
//! - A worker's lanes are handled by it alone in this process, and under their locks: by nobody else in the cluster.
//! - While handlers run no transaction is open (but for those that asked for it).
//! - A delivery is settled after the commit that decides it; of a commit whose outcome is not known nothing is settled:
//!   everything in hand is looked up anew.
//! - It ends within its time: what runs then is left, and comes again.

mod connection;
mod disturbed;
mod results;
mod running;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use tokio::sync::{Semaphore, mpsc, watch};
use uuid::Uuid;

use super::commit::{Decision, Rules, Verdict};
use super::door::{Dialled, Door};
use super::gate::{ArrivalGate, CommitGate};
use super::hand::{Arrival, Hand};
use super::handler::HandlerError;
use super::lane::{Found, Lanes, Slot};
use super::source::{Answered, Arrived, Room, Source};
use crate::batch::Rows;
use crate::config::SettleWhen;
use crate::seam::receiver::Settlement;
use crate::time::{Tick, boot_time};
use connection::Reach;
use results::Settlements;

/// How soon a busy lane is looked at again.
const BUSY_AGAIN_MS: u64 = 50;
/// Lanes, rows and bytes of one look for retries.
const CLAIM: (i32, i32, i64) = (100, 200, 8 << 20);
/// With so many stored messages, or bytes, in hand none are claimed: the rest waits in the database, and its lanes are
/// anybody's.
const CLAIMED_MAX: (usize, usize) = (400, 16 << 20);
/// How soon it is looked again whether there is room for more of them.
const CLAIM_AGAIN_MS: u64 = 10;

/// When the consumer ends: not yet, or by then.
pub(super) type Ending = Option<tokio::time::Instant>;

/// How a worker ended.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WorkerEnd {
    pub abandoned: usize,
    pub left: usize,
}

/// What a worker is made of.
pub(super) struct WorkerParts {
    pub rules: Arc<Rules>,
    pub dial: flume::Sender<Dialled>,
    pub call_timeout: Duration,
    pub sources: Vec<Arc<Source>>,
    pub room: Arc<Room>,
    pub arrivals: mpsc::UnboundedReceiver<Vec<Arrived>>,
    pub ending: watch::Receiver<Ending>,
    pub places: Arc<Semaphore>,
    /// Its share of the partitions, for retries.
    pub partitions: Vec<i32>,
    pub arrival_gate: ArrivalGate,
    pub commit_gate: CommitGate,
    pub settle: SettleWhen,
    pub busy_ms_max: u64,
    pub poll_ms: u64,
    /// So long after its last call a connection is asked whether it lives, which also tells the server that we do.
    pub ping_ms: u64,
    /// Tells the shards that something was stored.
    pub announce: Arc<dyn Fn() + Send + Sync>,
}

/// A handler that has ended.
struct Finished {
    run: u64,
    outcome: Result<Rows, HandlerError>,
}

/// A handler that runs.
struct Run {
    slot: Slot,
    lane_id: Uuid,
    /// It has not ended by its own timer until then: it blocks its thread.
    given_up_at: Tick,
}

/// See the module.
pub(super) struct Worker {
    parts: WorkerParts,
    names: Vec<Arc<str>>,
    door: Option<Door>,
    reach: Reach,
    lanes: Lanes,
    hand: Hand,
    decisions: Vec<Decision>,
    /// Handlers that run in one transaction, at most: as many as it had time for.
    in_transaction_max: usize,
    first_decision: Tick,
    arrived: usize,
    first_arrival: Tick,
    last_arrival: Tick,
    claim_at: Tick,
    /// When lanes that were parked here are due.
    dues: BTreeSet<Tick>,
    finished: (mpsc::UnboundedSender<Finished>, mpsc::UnboundedReceiver<Finished>),
    /// What became of what went back to the brokers.
    answers: (mpsc::UnboundedSender<Answered>, mpsc::UnboundedReceiver<Answered>),
    handling: tokio::task::JoinSet<()>,
    runs: HashMap<u64, Run>,
    next_run: u64,
    next_overdue_look: Tick,
    end: WorkerEnd,
    stopping: bool,
}

impl Worker {
    pub(super) fn new(parts: WorkerParts) -> Self {
        Self {
            names: parts.sources.iter().map(|source| source.receiver.name().into()).collect(),
            parts,
            door: None,
            reach: Reach::default(),
            lanes: Lanes::default(),
            hand: Hand::default(),
            decisions: Vec::new(),
            in_transaction_max: usize::MAX,
            first_decision: Tick(0),
            arrived: 0,
            first_arrival: Tick(0),
            last_arrival: Tick(0),
            claim_at: Tick(0),
            dues: BTreeSet::new(),
            finished: mpsc::unbounded_channel(),
            answers: mpsc::unbounded_channel(),
            handling: tokio::task::JoinSet::new(),
            runs: HashMap::new(),
            next_run: 0,
            next_overdue_look: Tick(0),
            end: WorkerEnd::default(),
            stopping: false,
        }
    }

    /// Works until the consumer ends.
    pub(super) async fn run(mut self) -> WorkerEnd {
        loop {
            while let Ok(arrived) = self.parts.arrivals.try_recv() {
                self.take(arrived);
            }
            while let Ok(answered) = self.answers.1.try_recv() {
                self.went_back(&answered);
            }
            while let Ok(finished) = self.finished.1.try_recv() {
                self.finish(finished);
            }
            while self.handling.try_join_next().is_some() {}
            self.give_up_blocked();
            let ending = *self.parts.ending.borrow();
            if let Some(by) = ending
                && self.end_step(by)
            {
                return self.end;
            }
            if self.door.as_ref().is_some_and(Door::is_closed) {
                self.lose("the connection has ended");
            }
            self.lanes.wake(boot_time());
            let permit = self.start_handlers();
            let done = match &self.door {
                Some(_) => self.work().await,
                None if self.reach.connect_at <= boot_time() && !self.stopping => self.connect().await,
                None => false,
            };
            if done {
                self.reach.ping_at = boot_time().plus_ms(self.parts.ping_ms);
            } else {
                self.wait(permit).await;
            }
        }
    }

    /// One call to the database, if one is due. Whether there was.
    async fn work(&mut self) -> bool {
        let now = boot_time();
        let commits = self.parts.commit_gate.closes_at(self.decisions.len(), self.first_decision, self.lanes.running());
        if commits <= now {
            self.commit().await;
            return true;
        }
        if !self.stopping && (self.begins_at() <= now) {
            self.begin(now).await;
            return true;
        }
        let idle = self.lanes.take_idle();
        if !idle.is_empty() {
            let consumer = self.parts.rules.number;
            let unlocked = match &self.door {
                Some(door) => door.begin_inbox(consumer, &[], &[], &[], &idle).await.map(|_| ()),
                None => Ok(()),
            };
            if let Err(error) = unlocked {
                self.lose(&error.to_string());
            }
            return true;
        }
        // Behind it: a lane that is held is not claimed, and of one that is idle more may be stored.
        if !self.stopping && self.claim_at <= now && self.claim(now).await {
            return true;
        }
        self.reach.ping_at <= now && self.ping().await
    }

    fn begins_at(&self) -> Tick {
        let is_idle = self.lanes.running() == 0 && self.decisions.is_empty();
        let gate = self.parts.arrival_gate.closes_at(self.arrived, self.first_arrival, self.last_arrival, is_idle);
        // Lanes that were busy, or behind a failure, are looked at when their time has come.
        let again = if self.arrived == 0 { self.lanes.next_look().unwrap_or(Tick::NEVER) } else { Tick::NEVER };
        gate.min(again)
    }

    /// Waits for whatever comes first.
    async fn wait(&mut self, permit: bool) {
        let now = boot_time();
        let commits = self.parts.commit_gate.closes_at(self.decisions.len(), self.first_decision, self.lanes.running());
        let until = match (&self.door, self.stopping) {
            (Some(_), false) => {
                let work = self.claim_at.min(self.begins_at()).min(commits);
                work.min(self.lanes.next_wake()).min(self.reach.ping_at)
            }
            (Some(_), true) => commits.min(now.plus_ms(10)),
            (None, false) => self.reach.connect_at,
            (None, true) => now.plus_ms(10),
        };
        let until = until.min(now.plus_ms(1_000));
        let ending = *self.parts.ending.borrow();
        let sleep = Duration::from_micros(until.since_us(now).max(100));
        let places = self.parts.places.clone();
        tokio::select! {
            Some(arrived) = self.parts.arrivals.recv() => self.take(arrived),
            Some(answered) = self.answers.1.recv() => self.went_back(&answered),
            Some(finished) = self.finished.1.recv() => self.finish(finished),
            // Taken and given back: the next round takes it.
            _ = places.acquire(), if permit => {}
            _ = self.parts.ending.changed(), if ending.is_none() => {}
            () = tokio::time::sleep(sleep) => {}
        }
    }

    /// What came from a source.
    fn take(&mut self, arrived: Vec<Arrived>) {
        let now = boot_time();
        let mut settlements = Settlements::default();
        for arrived in arrived {
            let (source, lane_id) = (arrived.source, arrived.lane_id);
            let receipt = arrived.delivery.receipt;
            if self.stopping {
                self.end.abandoned += 1;
                settlements.push(source, receipt, Settlement::Abandon);
                continue;
            }
            match self.hand.arrive(arrived, self.names[source].clone(), now) {
                Arrival::New(slot) => {
                    self.lanes.arrive(lane_id, slot);
                    if self.arrived == 0 {
                        self.first_arrival = now;
                    }
                    self.arrived += 1;
                    self.last_arrival = now;
                }
                Arrival::Copy => self.parts.rules.metrics.duplicates.add(1),
                Arrival::Gone => settlements.push(source, receipt, Settlement::Abandon),
                Arrival::Left => self.parts.sources[source].leave(&[receipt]),
            }
        }
        settlements.give_back(&self.parts.sources, &self.answers.0);
    }

    /// What went back to a broker has, or has not.
    fn went_back(&mut self, answered: &Answered) {
        let next = self.hand.answered(answered);
        let settlements = next.into_iter().map(|receipt| (receipt, Settlement::Abandon)).collect();
        self.parts.sources[answered.source].settle(settlements, Some(self.answers.0.clone()));
    }

    /// Looks arrivals up.
    async fn begin(&mut self, now: Tick) {
        let chosen = self.lanes.to_begin(now, self.parts.arrival_gate.rows_max);
        self.arrived = self.arrived.saturating_sub(chosen.len());
        if chosen.is_empty() {
            self.arrived = 0;
            return;
        }
        self.first_arrival = now;
        let idle = self.lanes.take_idle();
        let (lanes, slots): (Vec<Uuid>, Vec<Slot>) = chosen.into_iter().unzip();
        let messages: Vec<Uuid> = slots
            .iter()
            .map(|slot| self.hand.get(*slot).map_or(Uuid::nil(), |held| held.delivery.message_id))
            .collect();
        let held = self.lanes.locked();
        let consumer = self.parts.rules.number;
        let Some(door) = &self.door else { return };
        let found = match door.begin_inbox(consumer, &messages, &lanes, &held, &idle).await {
            Ok(found) => found,
            Err(error) => return self.lose(&error.to_string()),
        };
        self.prove();
        let now = boot_time();
        let mut settlements = Settlements::default();
        for ((lane_id, slot), found) in lanes.into_iter().zip(slots).zip(found) {
            let stores = found == Found::New && self.parts.settle == SettleWhen::Stored;
            self.lanes.began(lane_id, slot, if stores { Found::Behind } else { found }, now, BUSY_AGAIN_MS);
            let metrics = &self.parts.rules.metrics;
            match found {
                Found::New if stores => self.decide(slot, Verdict::Store),
                Found::New => {}
                Found::Busy => metrics.busy.add(1),
                Found::Behind => self.decide(slot, Verdict::Behind),
                Found::Duplicate => {
                    metrics.duplicates.add(1);
                    if let Some(held) = self.hand.remove(slot) {
                        settlements.all(&held, &Settlement::Complete);
                    }
                }
            }
        }
        settlements.send(&self.parts.sources);
        if let Some(since) = now.0.checked_sub(self.parts.busy_ms_max * 1_000) {
            for lane_id in self.lanes.busy_since(Tick(since)) {
                let slots = self.lanes.clear(lane_id);
                self.abandon(slots);
            }
        }
    }

    /// Looks for stored messages whose time has come, if there is room for them. Whether there was.
    async fn claim(&mut self, now: Tick) -> bool {
        let (stored, bytes) = self.hand.stored();
        if stored >= CLAIMED_MAX.0 || bytes >= CLAIMED_MAX.1 {
            self.claim_at = now.plus_ms(CLAIM_AGAIN_MS);
            return false;
        }
        self.dues = self.dues.split_off(&now.plus_us(1));
        self.claim_at = now.plus_ms(self.parts.poll_ms).min(self.dues.first().copied().unwrap_or(Tick::NEVER));
        let held = self.lanes.locked();
        let rules = self.parts.rules.clone();
        let Some(door) = &self.door else { return true };
        let (lanes_max, rows_max, bytes_max) = CLAIM;
        let partitions = &self.parts.partitions;
        match door.claim_inbox(rules.number, partitions, &held, lanes_max, rows_max, bytes_max).await {
            Ok((claimed, more)) => {
                self.prove();
                rules.metrics.claims.add(1);
                rules.metrics.rows_claimed.add(claimed.len() as u64);
                if more && !claimed.is_empty() {
                    self.claim_at = now;
                }
                for row in claimed {
                    let slot = self.hand.claim(row.lane_id, row.delivery, row.source.into(), row.attempts);
                    self.lanes.claimed(row.lane_id, slot);
                }
            }
            Err(error) => self.lose(&error.to_string()),
        }
        true
    }

    fn is_over(&self) -> bool {
        self.parts.ending.borrow().is_some_and(|by| tokio::time::Instant::now() >= by)
    }

    /// One step of the end. Whether it is over.
    fn end_step(&mut self, by: tokio::time::Instant) -> bool {
        if !self.stopping {
            self.stopping = true;
            for lane_id in self.lanes.waiting() {
                let slots = self.lanes.clear(lane_id);
                self.abandon(slots);
            }
        }
        let is_done = self.lanes.running() == 0 && self.decisions.is_empty();
        if !is_done && tokio::time::Instant::now() < by {
            return false;
        }
        self.handling.abort_all();
        let slots = self.hand.slots();
        self.end.left = slots.len();
        self.abandon(slots);
        true
    }
}
