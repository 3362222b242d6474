//! A broker inside the process, both sides of it: for tests and examples. Copies and faults on demand.
//!
//! Invariants
//! - A message is kept until it is completed or dead: what is in hand goes back when its lock time is over, when its
//!   receiver disconnects, and when it is abandoned.
//! - The messages of a stream are delivered in the order in which they came, to one receiver at a time (its session);
//!   when one goes back, those of the stream behind it go back too, and a new turn begins.
//! - What goes back keeps its place.
//!
//! Cost: a receive looks at what is ready, from the front; with many streams in others' hands that is much.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use uuid::Uuid;

use crate::error::FailureReason;
use crate::seam::receiver::{
    Delivery, OnDisconnected, Receipt, ReceiveError, Receiver, Receiving, SettleOutcome, Settlement,
};
use crate::seam::transport::{OutgoingBatch, OutgoingMessage, PublishOutcome, Transport, TransportLimits};

/// What happens to a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettleFault {
    /// It is done.
    None,
    /// It does not reach the broker.
    Lost,
    /// It is done, and the answer is lost.
    AnswerLost,
    /// It is never answered, and not done.
    Hang,
}

/// A message that a receiver gave up.
#[derive(Clone, Debug)]
pub struct DeadDelivery {
    /// The message.
    pub delivery: Delivery,
    /// Why.
    pub reason: FailureReason,
    /// In words.
    pub text: String,
}

/// What a source has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BrokerCounts {
    /// Messages that wait for a receiver, as of now.
    pub waiting: usize,
    /// Messages in hand, as of now.
    pub in_hand: usize,
    /// Completed.
    pub completed: usize,
    /// Given back by a receiver.
    pub abandoned: usize,
    /// Gone back without its doing: lock time, disconnect, something before them in their stream.
    pub taken_back: usize,
    /// Dead.
    pub dead: usize,
    /// Deliveries, copies and later turns included.
    pub delivered: usize,
}

type Copies = Box<dyn Fn(&Delivery) -> usize + Send + Sync>;
type SettleFaults = Box<dyn Fn(&Delivery, &Settlement) -> SettleFault + Send + Sync>;

struct Kept {
    delivery: Delivery,
    in_hand: Option<InHand>,
}

#[derive(Clone, Copy)]
struct InHand {
    receipt: u64,
    receiver: u64,
    until: Instant,
}

#[derive(Default)]
struct Source {
    next_place: u64,
    kept: BTreeMap<u64, Kept>,
    ready: BTreeSet<u64>,
    places: HashMap<u64, u64>,
    turns: HashMap<Uuid, u64>,
    dead: Vec<DeadDelivery>,
    counts: BrokerCounts,
    disconnects: u64,
    callbacks: HashMap<u64, OnDisconnected>,
}

struct State {
    lock: Duration,
    sources: Mutex<HashMap<String, Source>>,
    away: Mutex<bool>,
    next: std::sync::atomic::AtomicU64,
    changed: Notify,
    copies: Option<Copies>,
    faults: Option<SettleFaults>,
}

/// See the module. Clones share it.
#[derive(Clone)]
pub struct MemoryBroker(Arc<State>);

impl MemoryBroker {
    /// A broker whose locks last so many milliseconds.
    #[must_use]
    pub fn new(lock_ms: u64) -> Self {
        Self::with(lock_ms, None, None)
    }

    /// The same; each message comes with so many copies under its id, and each settlement meets its fault.
    #[must_use]
    pub fn with_faults(
        lock_ms: u64,
        copies: impl Fn(&Delivery) -> usize + Send + Sync + 'static,
        faults: impl Fn(&Delivery, &Settlement) -> SettleFault + Send + Sync + 'static,
    ) -> Self {
        Self::with(lock_ms, Some(Box::new(copies)), Some(Box::new(faults)))
    }

    fn with(lock_ms: u64, copies: Option<Copies>, faults: Option<SettleFaults>) -> Self {
        Self(Arc::new(State {
            lock: Duration::from_millis(lock_ms),
            sources: Mutex::default(),
            away: Mutex::new(false),
            next: std::sync::atomic::AtomicU64::new(1),
            changed: Notify::new(),
            copies,
            faults,
        }))
    }

    /// Puts a message at the end of a source, whatever it is.
    pub fn put(&self, source: &str, delivery: Delivery) {
        let copies = self.0.copies.as_ref().map_or(0, |copies| copies(&delivery));
        let mut sources = self.0.sources();
        let of = sources.entry(source.to_owned()).or_default();
        for _ in 0..=copies {
            let place = of.next_place;
            of.next_place += 1;
            of.kept.insert(place, Kept { delivery: delivery.clone(), in_hand: None });
            of.ready.insert(place);
        }
        drop(sources);
        self.0.changed.notify_waiters();
    }

    /// A receiver of a source.
    #[must_use]
    pub fn receiver_of(&self, source: &str) -> Arc<dyn Receiver> {
        Arc::new(MemoryReceiver {
            state: self.0.clone(),
            source: source.to_owned(),
            id: self.0.draw(),
            paused: std::sync::atomic::AtomicBool::new(false),
        })
    }

    /// What a source has seen.
    #[must_use]
    pub fn counts(&self, source: &str) -> BrokerCounts {
        let sources = self.0.sources();
        let Some(of) = sources.get(source) else { return BrokerCounts::default() };
        BrokerCounts { waiting: of.ready.len(), in_hand: of.places.len(), dead: of.dead.len(), ..of.counts }
    }

    /// The dead letters of a source.
    #[must_use]
    pub fn dead(&self, source: &str) -> Vec<DeadDelivery> {
        self.0.sources().get(source).map_or_else(Vec::new, |of| of.dead.clone())
    }

    /// Ends the connections of a source's receivers: what they have in hand goes back. They may receive again at once.
    pub fn disconnect(&self, source: &str) {
        let callbacks: Vec<OnDisconnected> = {
            let mut sources = self.0.sources();
            let Some(of) = sources.get_mut(source) else { return };
            of.disconnects += 1;
            let in_hand: Vec<u64> = of.places.values().copied().collect();
            in_hand.into_iter().for_each(|place| of.take_back(place));
            of.callbacks.values().cloned().collect()
        };
        self.0.changed.notify_waiters();
        callbacks.iter().for_each(|tell| tell("the broker has ended the connection"));
    }

    /// Whether the broker is away: nothing is received, nothing published, nothing settled.
    pub fn set_away(&self, away: bool) {
        *self.0.away.lock().unwrap_or_else(PoisonError::into_inner) = away;
        self.0.changed.notify_waiters();
    }
}

impl State {
    fn sources(&self) -> MutexGuard<'_, HashMap<String, Source>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_away(&self) -> bool {
        *self.away.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn draw(&self) -> u64 {
        self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }
}

impl Source {
    /// Puts a message in hand back, and those of its stream behind it.
    fn take_back(&mut self, place: u64) {
        let Some(stream) = self.kept.get(&place).map(|kept| kept.delivery.stream_id) else { return };
        let behind: Vec<u64> = match stream {
            None => vec![place],
            Some(stream) => {
                *self.turns.entry(stream).or_default() += 1;
                self.kept
                    .range(place..)
                    .filter(|(_, kept)| kept.delivery.stream_id == Some(stream))
                    .map(|(place, _)| *place)
                    .collect()
            }
        };
        for place in behind {
            let Some(hand) = self.kept.get_mut(&place).and_then(|kept| kept.in_hand.take()) else { continue };
            self.places.remove(&hand.receipt);
            self.ready.insert(place);
            self.counts.taken_back += 1;
        }
    }

    fn end_locks(&mut self, now: Instant) {
        let over: Vec<u64> = self
            .places
            .values()
            .filter(|place| self.kept.get(place).and_then(|kept| kept.in_hand).is_some_and(|hand| hand.until <= now))
            .copied()
            .collect();
        over.into_iter().for_each(|place| self.take_back(place));
    }

    fn next_end(&self) -> Option<Instant> {
        self.places.values().filter_map(|place| self.kept.get(place)?.in_hand.map(|hand| hand.until)).min()
    }

    fn give(&mut self, receiver: u64, rows_max: usize, lock: Duration, state: &State) -> Vec<Delivery> {
        let now = Instant::now();
        self.end_locks(now);
        // Streams in others' hands.
        let others: HashSet<Uuid> = (self.places.values())
            .filter_map(|place| self.kept.get(place))
            .filter(|kept| kept.in_hand.is_some_and(|hand| hand.receiver != receiver))
            .filter_map(|kept| kept.delivery.stream_id)
            .collect();
        let chosen: Vec<u64> = (self.ready.iter().copied())
            .filter(|place| {
                self.kept.get(place).is_some_and(|kept| kept.delivery.stream_id.is_none_or(|id| !others.contains(&id)))
            })
            .take(rows_max)
            .collect();
        let mut given = Vec::with_capacity(chosen.len());
        for place in chosen {
            let Some(kept) = self.kept.get_mut(&place) else { continue };
            let receipt = state.draw();
            kept.in_hand = Some(InHand { receipt, receiver, until: now + lock });
            kept.delivery.delivery_count += 1;
            kept.delivery.receipt = Receipt(receipt);
            kept.delivery.turn =
                kept.delivery.stream_id.map_or(0, |stream| self.turns.get(&stream).copied().unwrap_or(0) + 1);
            given.push(kept.delivery.clone());
            self.ready.remove(&place);
            self.places.insert(receipt, place);
        }
        self.counts.delivered += given.len();
        given
    }

    fn settle(&mut self, receipt: Receipt, settlement: &Settlement) -> SettleOutcome {
        self.end_locks(Instant::now());
        let Some(place) = self.places.get(&receipt.0).copied() else { return SettleOutcome::LockLost };
        if *settlement == Settlement::Abandon {
            let taken_back = self.counts.taken_back;
            self.take_back(place);
            self.counts.abandoned += 1;
            // It was its receiver's doing; what went back with it was not.
            self.counts.taken_back = taken_back.max(self.counts.taken_back - 1);
            return SettleOutcome::Settled;
        }
        self.places.remove(&receipt.0);
        let Some(kept) = self.kept.remove(&place) else { return SettleOutcome::LockLost };
        match settlement {
            Settlement::DeadLetter { reason, text } => {
                self.dead.push(DeadDelivery { delivery: kept.delivery, reason: *reason, text: text.clone() });
            }
            _ => self.counts.completed += 1,
        }
        SettleOutcome::Settled
    }
}

struct MemoryReceiver {
    state: Arc<State>,
    source: String,
    id: u64,
    paused: std::sync::atomic::AtomicBool,
}

impl MemoryReceiver {
    fn is_paused(&self) -> bool {
        self.paused.load(std::sync::atomic::Ordering::Acquire)
    }
}

impl Receiver for MemoryReceiver {
    fn receive(&self, rows_max: usize) -> Receiving<'_, Result<Vec<Delivery>, ReceiveError>> {
        Box::pin(async move {
            let disconnects = self.state.sources().entry(self.source.clone()).or_default().disconnects;
            loop {
                // Before the look: what comes between the two is not missed.
                let mut changed = std::pin::pin!(self.state.changed.notified());
                changed.as_mut().enable();
                if self.state.is_away() {
                    return Err(ReceiveError::Disconnected("it is away".to_owned()));
                }
                let wait = {
                    let mut sources = self.state.sources();
                    let of = sources.entry(self.source.clone()).or_default();
                    if of.disconnects != disconnects {
                        return Err(ReceiveError::Disconnected("it has ended the connection".to_owned()));
                    }
                    if !self.is_paused() {
                        let given = of.give(self.id, rows_max.max(1), self.state.lock, &self.state);
                        if !given.is_empty() {
                            return Ok(given);
                        }
                    }
                    of.next_end()
                };
                match wait {
                    Some(end) => {
                        let _ = tokio::time::timeout_at(end.into(), changed).await;
                    }
                    None => changed.await,
                }
            }
        })
    }

    fn settle<'a>(&'a self, settlements: &'a [(Receipt, Settlement)]) -> Receiving<'a, Vec<SettleOutcome>> {
        Box::pin(async move {
            let mut outcomes = Vec::with_capacity(settlements.len());
            for (receipt, settlement) in settlements {
                if self.state.is_away() {
                    outcomes.push(SettleOutcome::Failed);
                    continue;
                }
                let fault = match &self.state.faults {
                    None => SettleFault::None,
                    Some(faults) => {
                        let delivery = {
                            let sources = self.state.sources();
                            let of = sources.get(&self.source);
                            of.and_then(|of| Some(of.kept.get(of.places.get(&receipt.0)?)?.delivery.clone()))
                        };
                        delivery.map_or(SettleFault::None, |delivery| faults(&delivery, settlement))
                    }
                };
                match fault {
                    SettleFault::Hang => std::future::pending().await,
                    SettleFault::Lost => outcomes.push(SettleOutcome::Failed),
                    SettleFault::None | SettleFault::AnswerLost => {
                        let settled = {
                            let mut sources = self.state.sources();
                            sources.entry(self.source.clone()).or_default().settle(*receipt, settlement)
                        };
                        outcomes.push(if fault == SettleFault::None { settled } else { SettleOutcome::Failed });
                    }
                }
            }
            self.state.changed.notify_waiters();
            outcomes
        })
    }

    fn renew<'a>(&'a self, receipts: &'a [Receipt]) -> Receiving<'a, ()> {
        Box::pin(async move {
            if self.state.is_away() {
                return;
            }
            let mut sources = self.state.sources();
            let Some(of) = sources.get_mut(&self.source) else { return };
            let now = Instant::now();
            of.end_locks(now);
            for receipt in receipts {
                let place = of.places.get(&receipt.0);
                if let Some(hand) = place.and_then(|place| of.kept.get_mut(place)?.in_hand.as_mut()) {
                    hand.until = now + self.state.lock;
                }
            }
        })
    }

    fn lock_ms(&self) -> u64 {
        self.state.lock.as_millis() as u64
    }

    fn pause(&self) {
        self.paused.store(true, std::sync::atomic::Ordering::Release);
    }

    fn resume(&self) {
        self.paused.store(false, std::sync::atomic::Ordering::Release);
        self.state.changed.notify_waiters();
    }

    fn on_disconnected(&self, callback: OnDisconnected) {
        self.state.sources().entry(self.source.clone()).or_default().callbacks.insert(self.id, callback);
    }

    fn name(&self) -> &str {
        &self.source
    }
}

impl Drop for MemoryReceiver {
    /// Its connection ends: what it has in hand goes back.
    fn drop(&mut self) {
        let mut sources = self.state.sources();
        if let Some(of) = sources.get_mut(&self.source) {
            of.callbacks.remove(&self.id);
            let held = |place: &u64| {
                of.kept.get(place).and_then(|kept| kept.in_hand).is_some_and(|hand| hand.receiver == self.id)
            };
            let in_hand: Vec<u64> = of.places.values().copied().filter(held).collect();
            in_hand.into_iter().for_each(|place| of.take_back(place));
        }
        drop(sources);
        self.state.changed.notify_waiters();
    }
}

fn delivery_of(message: &OutgoingMessage<'_>) -> Delivery {
    Delivery {
        message_id: message.message_id,
        stream_id: message.stream_id,
        type_name: message.type_name.to_owned(),
        content_type: message.content_type.to_owned(),
        correlation_id: message.correlation_id,
        causation_id: message.causation_id,
        trace: message.trace,
        metadata: message.metadata.to_vec(),
        payload: message.payload.to_vec(),
        ..Delivery::default()
    }
}

impl Transport for MemoryBroker {
    fn limits(&self) -> TransportLimits {
        TransportLimits::default()
    }

    fn publish<'a>(
        &'a self,
        batch: &'a dyn OutgoingBatch,
        outcomes: &'a mut Vec<PublishOutcome>,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(async move {
            for index in 0..batch.len() {
                if self.0.is_away() {
                    outcomes.push(PublishOutcome::NotReady);
                    continue;
                }
                self.put(batch.destination(), delivery_of(&batch.get(index)));
                outcomes.push(PublishOutcome::Accepted);
            }
        })
    }

    fn name(&self) -> &str {
        "memory broker"
    }

    fn receiver(&self, source: &str) -> Option<Arc<dyn Receiver>> {
        Some(self.receiver_of(source))
    }
}

#[cfg(test)]
#[path = "memory_broker_tests.rs"]
mod tests;
