//! The Postgres seam in memory, for simulation only: transactions that become visible out of order, locks,
//! crashes and cut connections, each at a moment drawn from the executor's seed.
//!
//! Invariants
//! - What a client awaits is only its answer: the server's side is a task of the server's own process, which
//!   goes on when the client is gone, and may be ended while the client believes it runs.
//! - Semantics are those of `sql/functions`; a statement there is one step between two pauses here, so that
//!   whatever another transaction can do between two statements happens here as well.
//! - The conformance script (`tests/conformance`) holds the two against each other.

mod claim;
mod coordination;
mod database;
mod door;
mod find;
mod flush;
mod locks;
mod maintenance;
mod operator;
mod settle;
mod transaction;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;

use futures_channel::oneshot;
use futures_util::future::{Either, select};
use uuid::Uuid;

use crate::runtime::sim::SimRuntime;
use crate::seam::runtime::Runtime;
use crate::seam::store::StoreError;
use crate::time::Tick;

pub use coordination::ModelCoordination;
pub use database::{Committed, Dead};
pub use door::{Isolation, NewMessage, Numbered, UserTransaction};
pub use flush::ModelStore;
pub use operator::DeadKey;

use database::Database;
use locks::Locks;
use transaction::Tx;

/// How the model behaves.
#[derive(Clone, Copy, Debug)]
pub struct ModelSettings {
    /// Partitions of the installation.
    pub partition_count: u32,
    /// Longest time between two statements of a transaction, in microseconds.
    pub statement_us_max: u64,
    /// Longest time from a commit record to its visibility.
    pub commit_us_max: u64,
    /// Calls in a thousand that lose their connection at some moment.
    pub cut_per_mille: u64,
    /// Longest time until a lease keeper knows what it asked of the members, or has taken.
    pub view_us_max: u64,
    /// References in a log row.
    pub log_references_max: usize,
    /// Log rows that make a segment worth rotating.
    pub rotate_rows: usize,
    /// Age that makes a segment worth rotating, in milliseconds.
    pub rotate_ms: u64,
}

impl Default for ModelSettings {
    fn default() -> Self {
        Self {
            partition_count: 8,
            statement_us_max: 300,
            commit_us_max: 2_000,
            cut_per_mille: 0,
            view_us_max: 0,
            log_references_max: 3,
            rotate_rows: 40,
            rotate_ms: 60_000,
        }
    }
}

/// What befalls one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Fine,
    /// The request does not reach the server.
    NotSent,
    /// The server ends the backend at this moment.
    Ended(Tick),
    /// The client hears nothing any more from this moment on; the server goes on.
    Deaf(Tick),
    /// The connection breaks as the commit begins; it may still take its time.
    AtCommit,
}

/// One call under way.
struct Call {
    fate: Fate,
    ended: Cell<bool>,
    /// Breaks the client's connection.
    broken: RefCell<Option<oneshot::Sender<()>>>,
}

impl Call {
    fn break_connection(&self) {
        if let Some(broken) = self.broken.borrow_mut().take() {
            let _ = broken.send(());
        }
    }
}

struct Shared {
    runtime: SimRuntime,
    server: RefCell<SimRuntime>,
    database: RefCell<Database>,
    locks: RefCell<Locks>,
    settings: Cell<ModelSettings>,
    /// Grows with every crash: what belongs to an older one is void.
    life: Cell<u64>,
    up_at: Cell<Tick>,
    clock_skew_us: Cell<i64>,
    next_owner: Cell<u64>,
    calls: RefCell<BTreeMap<u64, Rc<Call>>>,
    deadlocks: Cell<u64>,
    switched_at: Cell<Tick>,
    /// When each incarnation's session lock was last lost, for the checkers.
    session_lost: RefCell<BTreeMap<i32, Tick>>,
    last_cut: Cell<Tick>,
    /// How often it was said that members have changed, and that something was stored for others.
    said: Cell<(u64, u64)>,
}

/// The simulated server.
#[derive(Clone)]
pub struct Model(Rc<Shared>);

impl Model {
    /// An installed, empty schema on a server of its own in the runtime's world.
    #[must_use]
    pub fn new(runtime: &SimRuntime, settings: ModelSettings) -> Self {
        let runtime = runtime.new_process();
        let epoch = random_id(&runtime);
        Self(Rc::new(Shared {
            server: RefCell::new(runtime.new_process()),
            database: RefCell::new(Database::new(settings.partition_count, epoch)),
            locks: RefCell::new(Locks::default()),
            settings: Cell::new(settings),
            life: Cell::new(1),
            up_at: Cell::new(Tick(0)),
            clock_skew_us: Cell::new(0),
            next_owner: Cell::new(1),
            calls: RefCell::new(BTreeMap::new()),
            deadlocks: Cell::new(0),
            switched_at: Cell::new(runtime.now()),
            session_lost: RefCell::new(BTreeMap::new()),
            last_cut: Cell::new(Tick(0)),
            said: Cell::new((0, 0)),
            runtime,
        }))
    }

    /// The shards' door, for one shard.
    #[must_use]
    pub fn store(&self) -> ModelStore {
        ModelStore::new(self.clone())
    }

    /// The lease keeper's door, for one process. Its session ends with it.
    #[must_use]
    pub fn coordination(&self) -> ModelCoordination {
        ModelCoordination::new(self.clone())
    }

    /// Changes how calls from now on fare.
    pub fn set_cut_per_mille(&self, cut_per_mille: u64) {
        self.0.settings.set(ModelSettings { cut_per_mille, ..self.0.settings.get() });
    }

    /// Lease keepers know from now on what they ask for as soon as it is seen.
    pub fn end_late_views(&self) {
        self.0.settings.set(ModelSettings { view_us_max: 0, ..self.0.settings.get() });
    }

    /// Steps the database's clock.
    pub fn skew_clock_us(&self, by_us: i64) {
        self.0.clock_skew_us.set(self.0.clock_skew_us.get() + by_us);
    }

    /// The server dies and is up again after `down_us`. Young asynchronous commits may be lost, and
    /// transaction ids that left no trace are given again.
    pub fn crash(&self, down_us: u64) {
        self.0.runtime.trace(|| "server: crash".into());
        self.0.life.set(self.0.life.get() + 1);
        let dead = self.0.server.replace(self.0.runtime.new_process());
        self.0.locks.replace(Locks::default());
        self.0.calls.borrow_mut().clear();
        dead.kill();
        let (lost, reissued) = (self.0.runtime.below(1 << 32), self.0.runtime.below(1 << 32));
        let now = self.0.runtime.now();
        for number in self.0.database.borrow().instances.keys() {
            self.0.session_lost.borrow_mut().insert(*number, now);
        }
        self.0.database.borrow_mut().crash(now, lost, reissued);
        self.0.up_at.set(now.plus_us(down_us));
    }

    /// Cuts connections of calls under way: each with this chance, half of them with their backend.
    pub fn cut_connections(&self, per_mille: u64) {
        let calls: Vec<Rc<Call>> = self.0.calls.borrow().values().cloned().collect();
        for call in calls {
            if self.0.runtime.per_mille(per_mille) {
                call.ended.set(self.0.runtime.per_mille(500));
                call.break_connection();
            }
        }
    }

    /// All messages ever committed, in the order in which they became visible.
    #[must_use]
    pub fn history(&self) -> Vec<Committed> {
        self.0.database.borrow().history.clone()
    }

    /// Messages committed after the first `known` ones.
    #[must_use]
    pub fn history_after(&self, known: usize) -> Vec<Committed> {
        self.0.database.borrow().history[known..].to_vec()
    }

    /// Whether the message lies in the dead letters for the destination.
    #[must_use]
    pub fn dead_letter(&self, lane_id: Uuid, destination: crate::batch::DestinationId, seq: i64) -> Option<Dead> {
        self.0.database.borrow().dead.get(&(lane_id, destination, seq)).cloned()
    }

    /// Parked lanes, references kept beside the log, scheduled messages.
    #[must_use]
    pub fn left_over(&self) -> (usize, usize, usize) {
        let database = self.0.database.borrow();
        (database.parked.len(), database.kept.len(), database.scheduled.len())
    }

    /// Whether the message still waits for its time.
    #[must_use]
    pub fn is_scheduled(&self, message_id: Uuid) -> bool {
        self.0.database.borrow().scheduled.values().any(|of| of.body.message_id[0] == message_id)
    }

    /// Notifies: about members, or that something was stored for others.
    pub(super) fn say(&self, members: bool) {
        let (of_members, of_work) = self.0.said.get();
        self.0.said.set(if members { (of_members + 1, of_work) } else { (of_members, of_work + 1) });
    }

    /// How often partitions were freed or taken.
    #[must_use]
    pub fn fences(&self) -> i64 {
        self.0.database.borrow().partitions.iter().map(|of| of.fence).sum()
    }

    /// Deadlocks that were resolved by ending a transaction.
    #[must_use]
    pub fn deadlocks(&self) -> u64 {
        self.0.deadlocks.get()
    }

    /// When the incarnation's session lock was last lost, if it ever was.
    #[must_use]
    pub fn session_lost(&self, incarnation: i32) -> Option<Tick> {
        self.0.session_lost.borrow().get(&incarnation).copied()
    }

    /// When a call last lost its connection.
    #[must_use]
    pub fn last_cut(&self) -> Tick {
        self.0.last_cut.get()
    }

    fn clock(&self) -> Tick {
        let now = self.0.runtime.now().0 as i64;
        Tick(now.saturating_add(self.0.clock_skew_us.get()).max(0) as u64)
    }

    fn fresh_owner(&self) -> u64 {
        let owner = self.0.next_owner.get();
        self.0.next_owner.set(owner + 1);
        owner
    }

    fn epoch(&self) -> crate::ids::Epoch {
        let mut database = self.0.database.borrow_mut();
        crate::ids::Epoch(*database.epoch.get_or_insert_with(|| random_id(&self.0.runtime)))
    }

    fn draw_fate(&self) -> Fate {
        let runtime = &self.0.runtime;
        if !runtime.per_mille(self.0.settings.get().cut_per_mille) {
            return Fate::Fine;
        }
        let at = runtime.now().plus_us(runtime.below(8_000));
        match runtime.below(8) {
            0 => Fate::NotSent,
            1 | 2 => Fate::Ended(at),
            3 | 4 => Fate::Deaf(at),
            _ => Fate::AtCommit,
        }
    }

    /// One call of a client: the server's side runs as a task of its own.
    async fn call<T, B>(&self, body: impl FnOnce(Tx) -> B) -> Result<T, StoreError>
    where
        T: 'static,
        B: Future<Output = Result<T, StoreError>> + 'static,
    {
        let runtime = &self.0.runtime;
        let fate = self.draw_fate();
        if fate != Fate::Fine {
            runtime.trace(|| format!("call: {fate:?}"));
        }
        if self.0.up_at.get() > runtime.now() || fate == Fate::NotSent {
            runtime.dawdle(20_000).await;
            return Err(StoreError::ConnectionLost("no server answers".into()));
        }
        let (broken, hears_broken) = oneshot::channel();
        let call = Rc::new(Call { fate, ended: Cell::new(false), broken: RefCell::new(Some(broken)) });
        let id = self.fresh_owner();
        self.0.calls.borrow_mut().insert(id, call.clone());
        let (answer, hears_answer) = oneshot::channel();
        let work = body(Tx::begin(self, call.clone()));
        let model = self.clone();
        let server = self.0.server.borrow().clone();
        server.spawn(async move {
            model.0.runtime.dawdle(model.0.settings.get().statement_us_max).await;
            let result = work.await;
            model.0.calls.borrow_mut().remove(&id);
            let _ = answer.send(result);
        });
        if let Fate::Ended(at) | Fate::Deaf(at) = fate {
            let (call, clock) = (call.clone(), self.0.runtime.clone());
            server.spawn(async move {
                clock.sleep_until(at).await;
                call.ended.set(matches!(call.fate, Fate::Ended(_)));
                call.break_connection();
            });
        }
        drop(call);
        // Given up by its client, it is as lost as a cut one.
        let mut waits = Waits { model: self, lost: true };
        let answer = match select(hears_broken, hears_answer).await {
            Either::Left((Ok(()), _)) => Err(StoreError::ConnectionLost("cut".into())),
            // The other half went away without a word only because the call is answered, or the server crashed.
            Either::Left((Err(_), answer)) => answer.await.unwrap_or_else(|_| Err(crashed())),
            Either::Right((answer, _)) => answer.unwrap_or_else(|_| Err(crashed())),
        };
        waits.lost = matches!(answer, Err(StoreError::ConnectionLost(_)));
        answer
    }
}

/// A client that waits for its answer.
struct Waits<'a> {
    model: &'a Model,
    lost: bool,
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        if self.lost {
            self.model.0.last_cut.set(self.model.0.runtime.now());
        }
    }
}

fn crashed() -> StoreError {
    StoreError::ConnectionLost("the server has crashed".into())
}

fn random_id(runtime: &SimRuntime) -> Uuid {
    let high = u128::from(runtime.below(u64::MAX));
    Uuid::from_u128(high << 64 | u128::from(runtime.below(u64::MAX)))
}
