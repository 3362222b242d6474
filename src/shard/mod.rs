//! One core's life: the loops that do what `plan` decides.
//!
//! A shard owns its partitions' lanes. It is given messages through its ring, its partitions through
//! [`Control`], and its right to publish through [`LeaseCell`].

mod admit;
mod aside;
mod claim;
#[cfg(all(test, feature = "simulation"))]
#[allow(clippy::unwrap_used)]
mod claim_tests;
mod crowd;
mod duplicates;
mod expected;
mod flush;
#[cfg(all(test, feature = "simulation"))]
#[allow(clippy::unwrap_used)]
mod flush_tests;
mod handover;
pub mod listen;
mod memory;
mod neighbours;
mod numbering;
mod parting;
mod pending;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod pending_tests;
mod publish;
mod recall;
mod refused;
#[cfg(all(test, feature = "simulation"))]
#[allow(clippy::unwrap_used)]
mod refused_tests;
mod regroup;
mod settle;
#[cfg(all(test, feature = "simulation"))]
#[allow(clippy::unwrap_used)]
mod shard_kit;
mod signal;
mod starved;
mod state;
pub mod tend;
#[cfg(all(test, feature = "simulation"))]
#[allow(clippy::unwrap_used)]
mod tend_tests;
#[cfg(all(test, feature = "simulation"))]
#[allow(clippy::unwrap_used)]
mod tend_town;
pub mod upkeep;

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Poll;

use futures_util::task::AtomicWaker;

use crate::batch::{Pool, Rows};
use crate::error::Error;
use crate::ids::Incarnation;
use crate::metrics::ShardMetrics;
use crate::runtime::budget::Budget;
use crate::runtime::ring::RingReceiver;
use crate::seam::publisher::Publisher;
use crate::seam::runtime::Runtime;
use crate::seam::store::{HeldPartition, Release, Store, StoreError};
use crate::time::Tick;

pub use crowd::CROWD_MS;
pub use state::ShardSettings;

/// A batch on its way from a caller to a shard.
#[derive(Debug)]
pub struct Submission {
    /// The messages, in units of work.
    pub rows: Arc<Rows>,
    /// Answered once, after the commit that holds the last of its units.
    pub reply: futures_channel::oneshot::Sender<SubmissionReply>,
}

/// What a caller gets back: the same rows, numbered, and the units that were not stored.
#[derive(Debug)]
pub struct SubmissionReply {
    /// The rows. `stream_seq` and `version` are set for units that were stored.
    pub rows: Arc<Rows>,
    /// Unit index and why it was not stored; empty when all were.
    pub refused: Vec<(u32, Error)>,
}

/// What the engine and the lease keeper tell a shard.
#[derive(Debug)]
pub enum Control {
    /// The partitions of the incarnation have changed: here is this shard's whole set.
    Partitions {
        /// Under which this process writes now.
        incarnation: Incarnation,
        /// Sent with every flush.
        ownership: i64,
        /// This shard's, ascending.
        held: Vec<HeldPartition>,
    },
    /// These partitions are wanted elsewhere: publish what is in flight, write the outcomes, and let them go.
    Release {
        /// Some of those held.
        partitions: Vec<u32>,
        /// Answered when nothing of them is in flight: what is resolved of each. Dropped if the shard cannot say.
        reply: futures_channel::oneshot::Sender<Release>,
    },
    /// Somebody says that messages were stored which are not in this shard's memory: claim soon.
    Announce,
    /// Nobody has said so, but somebody seems to have stored: claim soon.
    Look,
    /// Whether the listener has proved itself: how often to look without a word depends on it.
    Listening(bool),
    /// Take no more submissions, publish what is in hand until `deadline`, write the cursor, end.
    Stop {
        /// When to end at the latest.
        deadline: Tick,
    },
}

/// What crosses the ring.
#[derive(Debug)]
pub enum Arrival {
    /// New messages.
    Submission(Submission),
    /// An order.
    Control(Control),
}

/// The lease as the shards see it: until when this process may start to publish. Written by the lease
/// keeper, read by every shard before every run.
#[derive(Debug, Default)]
pub struct LeaseCell {
    /// Boot-time microseconds; 0 = not alive.
    deadline_us: AtomicU64,
    /// Why this process works on the schema no more, for good.
    stood_down: OnceLock<StoreError>,
    /// A shard was refused as a stranger, and has let everything go.
    fenced: AtomicBool,
    /// Others are there to own partitions, and hear at once of what is free.
    others: AtomicBool,
    /// The keeper has looked at the members once, or could not.
    looked: AtomicBool,
    /// What shards have let go of at a stop, and whom to tell.
    parted: Mutex<Vec<Release>>,
    parts: AtomicBool,
    keeper: AtomicWaker,
}

impl LeaseCell {
    /// Whether others are there that take at once what is let go, as the keeper last saw.
    pub(crate) fn has_others(&self) -> bool {
        self.others.load(Ordering::Acquire)
    }

    pub(crate) fn note_others(&self, others: bool) {
        self.others.store(others, Ordering::Release);
    }

    /// Whether the shards know what they hold first, if the database could be asked.
    pub(crate) fn has_looked(&self) -> bool {
        self.looked.load(Ordering::Acquire)
    }

    pub(crate) fn note_looked(&self) {
        self.looked.store(true, Ordering::Release);
    }

    /// A shard is to end, and lets go of what it held.
    pub(crate) fn part(&self, release: Release) {
        self.parted.lock().unwrap_or_else(PoisonError::into_inner).push(release);
        self.parts.store(true, Ordering::Release);
        self.keeper.wake();
    }

    /// Whether some shard has: then nothing is taken any more.
    pub(crate) fn is_parting(&self) -> bool {
        self.parts.load(Ordering::Acquire)
    }

    /// Resolves when there is something to hand over. One waits.
    pub(crate) async fn parted(&self) {
        poll_fn(|context| {
            self.keeper.register(context.waker());
            let any = !self.parted.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
            if any { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    pub(crate) fn take_parted(&self) -> Vec<Release> {
        std::mem::take(&mut self.parted.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A shard was fenced. If the incarnation is alive after all, the keeper tells its set again.
    pub(crate) fn note_fenced(&self) {
        self.fenced.store(true, Ordering::Release);
    }

    pub(crate) fn take_fenced(&self) -> bool {
        self.fenced.swap(false, Ordering::AcqRel)
    }

    /// A run may start before this moment: the lease's end less the margin, which holds the transport's time limit.
    #[must_use]
    pub fn deadline(&self) -> Tick {
        if self.stood_down.get().is_some() {
            return Tick(0);
        }
        Tick(self.deadline_us.load(Ordering::Acquire))
    }

    /// The schema is not the one that this process works with: keeper and shards stand down, whoever of them found it.
    pub fn stand_down(&self, error: &StoreError) {
        if self.stood_down.set(error.clone()).is_ok() {
            tracing::error!(%error, "standing down: the shards of this process store and publish nothing any more");
        }
    }

    /// Why, if that is so.
    #[must_use]
    pub fn stood_down(&self) -> Option<&StoreError> {
        self.stood_down.get()
    }

    /// Sets the deadline (already less the margin).
    pub fn set(&self, deadline: Tick) {
        self.deadline_us.store(deadline.0, Ordering::Release);
    }

    /// Nothing may start any more.
    pub fn end(&self) {
        self.deadline_us.store(0, Ordering::Release);
    }
}

/// Rung when this process has stored messages that others are to publish; the lease keeper tells them.
#[derive(Debug, Default)]
pub struct OthersBell {
    rung: AtomicBool,
    waker: AtomicWaker,
    stored: AtomicBool,
    stored_waker: AtomicWaker,
}

impl OthersBell {
    /// Any thread may ring, as often as it likes.
    pub fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.waker.wake();
        }
    }

    /// Resolves when it has been rung since it was last silenced. One waits.
    pub(crate) async fn rung(&self) {
        poll_fn(|context| {
            self.waker.register(context.waker());
            if self.rung.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Something was stored, for whomever: subscriptions of this process look.
    pub fn note_stored(&self) {
        if !self.stored.swap(true, Ordering::AcqRel) {
            self.stored_waker.wake();
        }
    }

    /// Resolves when something was stored since the last time. One waits.
    pub(crate) async fn stored(&self) {
        poll_fn(|context| {
            self.stored_waker.register(context.waker());
            if self.stored.swap(false, Ordering::AcqRel) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    pub(crate) fn silence(&self) {
        self.rung.store(false, Ordering::Release);
    }
}

/// Everything a shard is made of.
pub struct ShardParts<R, S, P> {
    /// Its thread's executor.
    pub runtime: R,
    /// Its connections to the database.
    pub store: Rc<S>,
    /// Its end of the bridge.
    pub publisher: P,
    /// Its ring.
    pub ring: RingReceiver<Arrival>,
    /// What callers draw from before they push rows into the ring; the shard gives it back with its answers.
    pub budget: Arc<Budget>,
    /// Until when it may publish.
    pub lease: Arc<LeaseCell>,
    /// Rung when it has stored what others are to publish.
    pub others: Arc<OthersBell>,
    /// Where it counts.
    pub metrics: Arc<ShardMetrics>,
    /// Where its batches come from and go to.
    pub pool: Arc<Pool>,
    /// By what it runs.
    pub settings: ShardSettings,
}

/// How a shard ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardReport {
    /// Rows of callers that were refused because the time was over.
    pub rows_refused: usize,
    /// Stored messages that were in memory and not published: the next owner claims them.
    pub rows_left: usize,
    /// Whether everything in hand was done in time.
    pub drained: bool,
}

struct Shard<R, S, P> {
    runtime: R,
    store: Rc<S>,
    publisher: P,
    budget: Arc<Budget>,
    lease: Arc<LeaseCell>,
    others: Arc<OthersBell>,
    state: RefCell<state::State>,
    announced: Cell<bool>,
    /// Nobody has said anything, and yet there may be something.
    suspected: Cell<bool>,
    /// Whether the listener is healthy.
    listening: Cell<bool>,
    /// Rows that were in memory when the shard stood down, if it has.
    left_behind: Cell<Option<usize>>,
    call_timeout_us: u64,
    flush_signal: signal::Signal,
    claim_signal: signal::Signal,
    publish_signal: signal::Signal,
    settle_signal: signal::Signal,
}

/// Runs a shard until it is told to stop. All its loops are one task: a wake-up polls them in turn, and
/// nothing of it is left when it ends.
pub async fn run<R: Runtime, S: Store, P: Publisher>(parts: ShardParts<R, S, P>) -> ShardReport {
    let call_timeout_us = parts.settings.call_timeout_ms * 1000;
    let shard = Shard {
        runtime: parts.runtime,
        store: parts.store,
        publisher: parts.publisher,
        budget: parts.budget,
        lease: parts.lease,
        others: parts.others,
        state: RefCell::new(state::State::new(parts.settings, parts.metrics, parts.pool)),
        announced: Cell::new(false),
        suspected: Cell::new(false),
        listening: Cell::new(false),
        left_behind: Cell::new(None),
        call_timeout_us,
        flush_signal: signal::Signal::default(),
        claim_signal: signal::Signal::default(),
        publish_signal: signal::Signal::default(),
        settle_signal: signal::Signal::default(),
    };
    let (mut report, refused, ..) = futures_util::join!(
        shard.arrivals(parts.ring),
        shard.flush_loop(),
        shard.publish_loop(),
        shard.claim_loop(),
        shard.settle_loop()
    );
    report.rows_refused += refused;
    report
}

impl<R: Runtime, S: Store, P: Publisher> Shard<R, S, P> {
    /// Takes what comes through the ring, until told to stop; then waits for the others to be done.
    async fn arrivals(&self, mut ring: RingReceiver<Arrival>) -> ShardReport {
        loop {
            self.take_arrivals(&mut ring);
            if self.lease.stood_down().is_some() {
                self.stand_down();
            }
            let stop_at = self.state.borrow().stopping;
            let Some(stop_at) = stop_at else {
                ring.wait().await;
                continue;
            };
            let drained = self.get_on_with_the_end();
            if drained || self.runtime.now() >= stop_at {
                // What has come since the last look is answered as well; what comes from here on goes back at once.
                ring.close();
                self.take_arrivals(&mut ring);
                let refused = self.refuse_pending(&|| Error::ShutDown);
                let rows_left = self.state.borrow().rows_unpublished() + self.left_behind.get().unwrap_or(0);
                self.state.borrow_mut().ended = true;
                self.raise_all();
                let drained = drained && rows_left == 0 && self.left_behind.get().is_none();
                return ShardReport { rows_refused: refused, rows_left, drained };
            }
            self.runtime.sleep_until(self.runtime.now().plus_ms(2).min(stop_at)).await;
        }
    }

    fn take_arrivals(&self, ring: &mut RingReceiver<Arrival>) {
        while let Some(arrival) = ring.pop() {
            match arrival {
                Arrival::Submission(submission) => {
                    let pending = pending::Pending::new(submission, self.runtime.now());
                    if self.state.borrow().stopping.is_some() {
                        self.answered(pending.answer(Some(&|| Error::ShutDown)));
                        continue;
                    }
                    if let Some(error) = self.lease.stood_down() {
                        self.answered(pending.answer(Some(&|| error.clone().into())));
                        continue;
                    }
                    let mut state = self.state.borrow_mut();
                    state.put_last(pending);
                    state.metrics.ring_rows_max.max(state.pending_rows as u64);
                    drop(state);
                    self.flush_signal.raise();
                }
                Arrival::Control(Control::Partitions { .. }) if self.lease.stood_down().is_some() => {}
                Arrival::Control(Control::Partitions { incarnation, ownership, held }) => {
                    self.state.borrow_mut().change_partitions(incarnation, ownership, held, self.runtime.now());
                    self.raise_all();
                }
                Arrival::Control(Control::Release { partitions, reply }) => {
                    self.state.borrow_mut().release_partitions(partitions, reply, self.runtime.now());
                    self.raise_all();
                }
                Arrival::Control(Control::Announce) => {
                    self.announced.set(true);
                    self.claim_signal.raise();
                }
                Arrival::Control(Control::Look) => {
                    self.suspected.set(true);
                    self.claim_signal.raise();
                }
                Arrival::Control(Control::Listening(listening)) => {
                    self.listening.set(listening);
                    self.claim_signal.raise();
                }
                Arrival::Control(Control::Stop { deadline }) => {
                    self.state.borrow_mut().stop(deadline, self.lease.has_others(), self.runtime.now());
                    self.raise_all();
                }
            }
        }
    }

    /// Lets go of everything that is stored, for an engine that fits the schema, and answers everything that is not.
    /// Nothing is held from here on, so no loop has anything to do; what is in flight comes back and is dropped.
    fn stand_down(&self) {
        let Some(error) = self.lease.stood_down() else { return };
        if self.left_behind.get().is_none() {
            let mut state = self.state.borrow_mut();
            self.left_behind.set(Some(state.rows_in_memory()));
            state.held.clear();
            state.fences.iter_mut().for_each(|fence| *fence = 0);
            state.reset();
        }
        self.refuse_pending(&|| error.clone().into());
        self.raise_all();
    }

    fn raise_all(&self) {
        self.flush_signal.raise();
        self.claim_signal.raise();
        self.publish_signal.raise();
        self.settle_signal.raise();
    }

    /// So many rows of callers were answered: others may come.
    fn answered(&self, rows: usize) {
        self.budget.release(rows);
    }

    /// A call to the database, given up after `call_timeout_ms`: the store then drops the connection, since
    /// the query may still be running.
    async fn within_deadline<T>(&self, call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        let call = std::pin::pin!(call);
        let sleep = std::pin::pin!(self.runtime.sleep_until(self.runtime.now().plus_us(self.call_timeout_us)));
        match futures_util::future::select(call, sleep).await {
            futures_util::future::Either::Left((answer, _)) => {
                if let Err(error @ StoreError::SchemaChanged { .. }) = &answer {
                    self.lease.stand_down(error);
                    self.stand_down();
                }
                answer
            }
            futures_util::future::Either::Right(_) => Err(StoreError::no_answer((self.call_timeout_us / 1000).into())),
        }
    }
}
