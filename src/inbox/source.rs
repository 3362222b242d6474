//! One source of a consumer: what it gives is collected, handed to the workers, kept ours while it is in hand, and
//! settled.
//!
//! Invariants
//! - Nothing is received beyond `inbox.rows_max` and `inbox.bytes_max` in hand; what is being settled is in hand.
//! - What can never be handled (no valid id, no handler for its type, a limit broken) is that delivery's outcome: to the
//!   broker's dead letters, at once.
//! - A delivery is renewed until it is settled. A settlement that fails is tried again a few times, and then left: the
//!   delivery comes again, and is known.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use hashbrown::HashMap;
use tokio::sync::{Notify, mpsc};
use uuid::Uuid;

use super::handler::Handlers;
use crate::error::{FailureReason, bounded_error_text};
use crate::ids::lane_of_message;
use crate::limits::{METADATA_BYTES_MAX, NAME_BYTES_MAX, PAYLOAD_BYTES_MAX};
use crate::metrics::InboxMetrics;
use crate::partition::partition_of;
use crate::seam::receiver::{Delivery, Receipt, Receiver, SettleOutcome, Settlement};
use crate::time::{Tick, boot_time};

/// Waits between receives that fail.
const PAUSE_MS: (u64, u64) = (100, 5_000);
/// Times that a settlement is tried.
const SETTLE_TRIES: u32 = 3;
/// Longest wait for an answer of the broker to a settlement.
const SETTLE_TIME_MAX: Duration = Duration::from_secs(30);

/// A delivery on its way to its worker.
pub(super) struct Arrived {
    pub source: usize,
    pub lane_id: Uuid,
    /// When it was asked for: what was settled before has had its effect by then.
    pub asked: Tick,
    pub delivery: Arc<Delivery>,
}

/// What became of deliveries that were given back.
pub(super) struct Answered {
    pub source: usize,
    pub at: Tick,
    /// By then the broker has those back that have failed.
    pub locks_end: Tick,
    pub outcomes: Vec<(Receipt, SettleOutcome)>,
}

/// What is in hand of a consumer, over all its sources.
#[derive(Default)]
pub(super) struct Room {
    rows: AtomicUsize,
    bytes: AtomicUsize,
    given: Notify,
    /// Nothing is received while the database is away for long.
    closed: AtomicBool,
}

impl Room {
    pub(super) fn set_closed(&self, closed: bool) {
        if self.closed.swap(closed, Ordering::AcqRel) != closed {
            self.given.notify_waiters();
        }
    }

    pub(super) fn rows(&self) -> usize {
        self.rows.load(Ordering::Acquire)
    }

    async fn wait(&self, rows_max: usize, bytes_max: usize) -> usize {
        loop {
            let mut given = std::pin::pin!(self.given.notified());
            given.as_mut().enable();
            let (rows, bytes) = (self.rows.load(Ordering::Acquire), self.bytes.load(Ordering::Acquire));
            if rows < rows_max && bytes < bytes_max && !self.closed.load(Ordering::Acquire) {
                return rows_max - rows;
            }
            given.await;
        }
    }

    fn take(&self, bytes: usize) {
        self.rows.fetch_add(1, Ordering::AcqRel);
        self.bytes.fetch_add(bytes, Ordering::AcqRel);
    }

    fn give(&self, rows: usize, bytes: usize) {
        self.rows.fetch_sub(rows, Ordering::AcqRel);
        self.bytes.fetch_sub(bytes, Ordering::AcqRel);
        self.given.notify_waiters();
    }
}

/// See the module.
pub(super) struct Source {
    pub receiver: Arc<dyn Receiver>,
    pub index: usize,
    pub room: Arc<Room>,
    pub metrics: Arc<InboxMetrics>,
    /// In hand, with their sizes.
    in_hand: Mutex<HashMap<Receipt, usize>>,
    settling: AtomicUsize,
    settled: Notify,
}

/// What the collector needs beside its source.
pub(super) struct Collecting {
    pub workers: Vec<mpsc::UnboundedSender<Vec<Arrived>>>,
    pub handlers: Arc<Handlers>,
    pub partitions: u32,
    pub rows_max: usize,
    pub bytes_max: usize,
    pub batch_rows_max: usize,
}

impl Source {
    pub(super) fn new(
        receiver: Arc<dyn Receiver>,
        index: usize,
        room: Arc<Room>,
        metrics: Arc<InboxMetrics>,
    ) -> Arc<Self> {
        let this = Arc::new(Self {
            receiver,
            index,
            room,
            metrics,
            in_hand: Mutex::default(),
            settling: AtomicUsize::new(0),
            settled: Notify::new(),
        });
        let (source, metrics) = (Arc::downgrade(&this), this.metrics.clone());
        this.receiver.on_disconnected(Arc::new(move |why| {
            metrics.disconnects.add(1);
            let name = source.upgrade().map(|source| source.receiver.name().to_owned()).unwrap_or_default();
            tracing::warn!(source = name, why, "a broker's connection has ended: what is in hand will come again");
        }));
        this
    }

    /// Receives until the consumer stops: ends when its future is dropped.
    pub(super) async fn collect(self: Arc<Self>, collecting: Arc<Collecting>) {
        let mut pause_ms = PAUSE_MS.0;
        loop {
            let room = self.room.wait(collecting.rows_max, collecting.bytes_max).await;
            let asked = boot_time();
            let receiving = self.receiver.receive(room.min(collecting.batch_rows_max));
            match AssertUnwindSafe(receiving).catch_unwind().await {
                Ok(Ok(deliveries)) => {
                    pause_ms = PAUSE_MS.0;
                    self.hand_out(deliveries, asked, &collecting);
                    continue;
                }
                Ok(Err(error)) => tracing::warn!(source = self.receiver.name(), %error, "nothing can be received"),
                Err(_) => tracing::error!(source = self.receiver.name(), "the receiver panicked"),
            }
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            pause_ms = (pause_ms * 2).min(PAUSE_MS.1);
        }
    }

    fn hand_out(self: &Arc<Self>, deliveries: Vec<Delivery>, asked: Tick, collecting: &Collecting) {
        self.metrics.received.add(deliveries.len() as u64);
        let workers = collecting.workers.len();
        let mut parts: Vec<Vec<Arrived>> = (0..workers).map(|_| Vec::new()).collect();
        let mut refused = Vec::new();
        for delivery in deliveries {
            self.note(&delivery);
            match check(&delivery, &collecting.handlers) {
                Err((reason, text)) => {
                    self.metrics.unreadable.add(1);
                    tracing::warn!(source = self.receiver.name(), message_id = %delivery.message_id, %text, "a delivery is refused");
                    refused.push((delivery.receipt, Settlement::DeadLetter { reason, text }));
                }
                Ok(()) => {
                    let lane_id = delivery.stream_id.unwrap_or_else(|| lane_of_message(delivery.message_id));
                    let worker = partition_of(lane_id, collecting.partitions) as usize % workers;
                    parts[worker].push(Arrived { source: self.index, lane_id, asked, delivery: Arc::new(delivery) });
                }
            }
        }
        self.settle(refused, None);
        for (worker, part) in collecting.workers.iter().zip(parts) {
            if !part.is_empty() {
                // A worker that has ended leaves its deliveries to the broker.
                let _ = worker.send(part);
            }
        }
    }

    fn note(&self, delivery: &Delivery) {
        self.room.take(delivery.bytes());
        self.metrics.in_hand_now.set(self.room.rows() as u64);
        self.held().insert(delivery.receipt, delivery.bytes());
    }

    fn held(&self) -> std::sync::MutexGuard<'_, HashMap<Receipt, usize>> {
        self.in_hand.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what is in hand ours: ends when its future is dropped.
    pub(super) async fn renew(self: Arc<Self>) {
        let period = Duration::from_millis((self.receiver.lock_ms() / 3).max(1));
        loop {
            tokio::time::sleep(period).await;
            let receipts: Vec<Receipt> = self.held().keys().copied().collect();
            if !receipts.is_empty() {
                let renewing = AssertUnwindSafe(self.receiver.renew(&receipts)).catch_unwind();
                let _ = tokio::time::timeout(period, renewing).await;
            }
        }
    }

    /// Leaves deliveries to the broker without a word: they are renewed no more.
    pub(super) fn leave(&self, receipts: &[Receipt]) {
        let (rows, bytes) = self.let_go(receipts.iter());
        self.room.give(rows, bytes);
        self.metrics.in_hand_now.set(self.room.rows() as u64);
    }

    fn let_go<'a>(&self, receipts: impl Iterator<Item = &'a Receipt>) -> (usize, usize) {
        let mut held = self.held();
        receipts.filter_map(|receipt| held.remove(receipt)).fold((0, 0), |(rows, bytes), of| (rows + 1, bytes + of))
    }

    /// Settles deliveries in this order, on a task of its own; `tell` is told what became of those that go back.
    pub(super) fn settle(
        self: &Arc<Self>,
        settlements: Vec<(Receipt, Settlement)>,
        tell: Option<mpsc::UnboundedSender<Answered>>,
    ) {
        if settlements.is_empty() {
            return;
        }
        let (rows, bytes) = self.let_go(settlements.iter().map(|(receipt, _)| receipt));
        let abandoned = settlements.iter().filter(|(_, settlement)| *settlement == Settlement::Abandon).count();
        self.metrics.abandoned.add(abandoned as u64);
        self.settling.fetch_add(1, Ordering::AcqRel);
        let this = self.clone();
        tokio::spawn(async move {
            let outcomes = this.settle_now(settlements).await;
            if let Some(tell) = tell.filter(|_| !outcomes.is_empty()) {
                let (at, lock_ms) = (boot_time(), this.receiver.lock_ms());
                // A renewal may have been under way.
                let locks_end = at.plus_ms(lock_ms.saturating_add(lock_ms / 3));
                // A worker that has ended takes nothing any more.
                let _ = tell.send(Answered { source: this.index, at, locks_end, outcomes });
            }
            // Not before: a broker that takes settlements slowly gets no further deliveries out of its hands.
            this.room.give(rows, bytes);
            this.metrics.in_hand_now.set(this.room.rows() as u64);
            this.settling.fetch_sub(1, Ordering::AcqRel);
            this.settled.notify_waiters();
        });
    }

    /// Answers what became of those that go back.
    async fn settle_now(&self, mut settlements: Vec<(Receipt, Settlement)>) -> Vec<(Receipt, SettleOutcome)> {
        let mut known = Vec::new();
        for attempt in 1..=SETTLE_TRIES {
            let settling = AssertUnwindSafe(self.receiver.settle(&settlements)).catch_unwind();
            let outcomes = match tokio::time::timeout(SETTLE_TIME_MAX, settling).await {
                Ok(Ok(outcomes)) => outcomes,
                Ok(Err(_)) | Err(_) => Vec::new(),
            };
            let mut at = 0;
            settlements.retain(|(receipt, settlement)| {
                at += 1;
                let outcome = outcomes.get(at - 1).copied().unwrap_or(SettleOutcome::Failed);
                let is_over = outcome != SettleOutcome::Failed || attempt == SETTLE_TRIES;
                if is_over && *settlement == Settlement::Abandon {
                    known.push((*receipt, outcome));
                }
                outcome == SettleOutcome::Failed
            });
            if settlements.is_empty() {
                return known;
            }
            tokio::time::sleep(Duration::from_millis(PAUSE_MS.0 * u64::from(attempt))).await;
        }
        self.metrics.settle_failures.add(settlements.len() as u64);
        tracing::warn!(
            source = self.receiver.name(),
            rows = settlements.len(),
            "the broker does not take these settlements: they will come again"
        );
        known
    }

    /// Waits until no settlement is under way.
    pub(super) async fn all_settled(&self) {
        loop {
            let mut settled = std::pin::pin!(self.settled.notified());
            settled.as_mut().enable();
            if self.settling.load(Ordering::Acquire) == 0 {
                return;
            }
            settled.await;
        }
    }
}

/// What can be said of a delivery before its handler runs.
fn check(delivery: &Delivery, handlers: &Handlers) -> Result<(), (FailureReason, String)> {
    let wrong = |text: String| Err((FailureReason::ValidationError, text));
    if delivery.message_id.is_nil() {
        return wrong("the message id is the nil UUID: copies could not be told apart".to_owned());
    }
    if delivery.stream_id.is_some_and(|id| id.is_nil()) {
        return wrong("the stream id is the nil UUID: it is left out for a message without order".to_owned());
    }
    for (what, text, min) in [("type name", &delivery.type_name, 1), ("content type", &delivery.content_type, 0)] {
        if text.len() < min || text.len() > NAME_BYTES_MAX || text.contains('\0') {
            let bytes = text.len();
            return wrong(format!("the {what} has {bytes} bytes: {min}..={NAME_BYTES_MAX} without NUL are allowed"));
        }
    }
    for (what, bytes, max) in [
        ("payload", delivery.payload.len(), PAYLOAD_BYTES_MAX),
        ("metadata", delivery.metadata.len(), METADATA_BYTES_MAX),
    ] {
        if bytes > max {
            let text = format!("the {what} has {bytes} bytes: at most {max} are allowed");
            return Err((FailureReason::MessageBodyTooLarge, text));
        }
    }
    if handlers.of(&delivery.type_name).is_none() {
        let name = bounded_error_text(&delivery.type_name).0;
        return Err((FailureReason::SerializationError, format!("no handler here for messages of the type {name}")));
    }
    Ok(())
}
