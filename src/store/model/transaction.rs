//! One transaction of the model: its statements, its locks, its end.
//!
//! Invariants
//! - Dropped without a commit it is rolled back, and its locks go.
//! - Nothing ends it between its commit record and its visibility, but a crash of the server.
//! - After a crash every further step of it fails: its life is over.

use std::cell::{Cell, RefCell, RefMut};
use std::rc::Rc;

use futures_util::future::{Either, select};

use super::database::{Committed, Database, Effect};
use super::locks::{Key, Locks};
use super::{Call, Fate, Model, crashed};
use crate::plan::mutants::{self, Mutant};
use crate::plan::snapshot::Snapshot;
use crate::seam::runtime::Runtime;
use crate::seam::store::StoreError;

/// How long a wait for a lock may be before circles are looked for.
const DEADLOCK_TIMEOUT_MS: u64 = 1_000;
/// How often a wait looks whether its backend was ended.
const WAIT_STEP_MS: u64 = 100;
/// How long a commit may take whose connection is broken.
const BROKEN_COMMIT_US: u64 = 400_000;

/// A transaction under way.
pub(super) struct Tx {
    pub(super) model: Model,
    pub(super) owner: u64,
    life: u64,
    locks: Locks,
    call: Rc<Call>,
    finished: Cell<bool>,
    /// Of a REPEATABLE READ transaction: taken at its first statement.
    fixed: RefCell<Option<Snapshot>>,
    repeatable: bool,
}

impl Tx {
    pub(super) fn begin(model: &Model, call: Rc<Call>) -> Self {
        Self::with_isolation(model, call, false)
    }

    /// A transaction of a caller's own.
    pub(super) fn begin_user(model: &Model, repeatable: bool) -> Self {
        let call = Call { fate: Fate::Fine, ended: Cell::new(false), broken: RefCell::new(None) };
        Self::with_isolation(model, Rc::new(call), repeatable)
    }

    fn with_isolation(model: &Model, call: Rc<Call>, repeatable: bool) -> Self {
        let owner = model.fresh_owner();
        let locks = model.0.locks.borrow().clone();
        let life = model.0.life.get();
        let fixed = RefCell::new(None);
        Self { model: model.clone(), owner, life, locks, call, finished: Cell::new(false), fixed, repeatable }
    }

    pub(super) fn is_repeatable(&self) -> bool {
        self.repeatable
    }

    /// The data. Never held across an await.
    pub(super) fn database(&self) -> RefMut<'_, Database> {
        self.model.0.database.borrow_mut()
    }

    /// Between two statements: time passes, and the backend may be ended.
    pub(super) async fn pause(&self) -> Result<(), StoreError> {
        let us_max = self.model.0.settings.get().statement_us_max;
        self.model.0.runtime.dawdle(us_max).await;
        self.check()
    }

    fn check(&self) -> Result<(), StoreError> {
        if self.life != self.model.0.life.get() {
            return Err(crashed());
        }
        if self.call.ended.get() {
            return Err(StoreError::ConnectionLost("the backend was ended".into()));
        }
        Ok(())
    }

    /// The snapshot of the next statement.
    pub(super) fn snapshot(&self) -> Snapshot {
        if !self.repeatable {
            return self.database().snapshot();
        }
        self.fixed.borrow_mut().get_or_insert_with(|| self.model.0.database.borrow().snapshot()).clone()
    }

    pub(super) fn try_lock(&self, key: Key, exclusive: bool) -> bool {
        self.locks.try_lock(self.owner, key, exclusive)
    }

    /// Gives one lock back before the end (a session's).
    pub(super) fn release(&self, owner: u64, key: Key) {
        self.locks.release(owner, key);
    }

    /// Whether somebody else holds it.
    pub(super) fn holder_but(&self, owner: u64, key: Key) -> Option<u64> {
        self.locks.holder_but(owner, key)
    }

    /// Takes a lock for a session.
    pub(super) fn try_lock_for(&self, session: u64, key: Key) -> bool {
        self.locks.try_lock(session, key, true)
    }

    /// Waits for a lock. In a circle of waits this transaction is the one that is ended.
    pub(super) async fn lock(&self, key: Key, exclusive: bool) -> Result<(), StoreError> {
        let runtime = &self.model.0.runtime;
        let since = runtime.now();
        let mut acquire = self.locks.lock(self.owner, key, exclusive);
        loop {
            let tick = Box::pin(runtime.sleep_until(runtime.now().plus_ms(WAIT_STEP_MS)));
            match select(acquire, tick).await {
                Either::Left(_) => return self.check(),
                Either::Right((_, waiting)) => acquire = waiting,
            }
            self.check()?;
            if runtime.now().since_us(since) > DEADLOCK_TIMEOUT_MS * 1000 && self.locks.is_deadlocked(self.owner) {
                self.model.0.deadlocks.set(self.model.0.deadlocks.get() + 1);
                return Err(StoreError::Transient { sqlstate: "40P01".into(), text: "deadlock detected".into() });
            }
        }
    }

    /// Waits for a lock for so long; answers whether it was got.
    pub(super) async fn lock_within(&self, key: Key, exclusive: bool, ms: u64) -> Result<bool, StoreError> {
        let runtime = &self.model.0.runtime;
        let late = Box::pin(runtime.sleep_until(runtime.now().plus_ms(ms)));
        match select(Box::pin(self.lock(key, exclusive)), late).await {
            Either::Left((locked, _)) => locked.map(|()| true),
            Either::Right(_) => self.check().map(|()| false),
        }
    }

    /// The transaction's id, from its first write on.
    pub(super) fn xid(&self) -> u64 {
        let xid = self.database().assign_xid(self.owner);
        self.try_lock(Key::Transaction(xid), true);
        xid
    }

    pub(super) fn xid_if_any(&self) -> Option<u64> {
        self.database().transactions.get(&self.owner).and_then(|of| of.xid)
    }

    /// Rows were put into tables.
    pub(super) fn wrote(&self) {
        self.database().transactions.entry(self.owner).or_default().wrote = true;
    }

    /// Changes something when the transaction becomes visible.
    pub(super) fn effect(&self, effect: impl FnOnce(&mut Database) + 'static) {
        self.xid();
        let effect: Effect = Box::new(effect);
        let mut database = self.database();
        let transaction = database.transactions.entry(self.owner).or_default();
        transaction.wrote = true;
        transaction.effects.push(effect);
    }

    /// For the oracle: this message will be there.
    pub(super) fn will_commit(&self, message: Committed) {
        self.database().transactions.entry(self.owner).or_default().committed.push(message);
    }

    /// A number in a unique index: waits for whoever is inserting the same one. `false`: taken, and passed over
    /// (only by the mutant).
    pub(super) async fn free_number(&self, holder: impl Fn(&Database) -> Option<u64>) -> Result<bool, StoreError> {
        let own = self.xid();
        loop {
            let other = holder(&self.database());
            let Some(other) = other else { return Ok(true) };
            if other != own && self.holder_but(self.owner, Key::Transaction(other)).is_some() {
                self.lock(Key::Transaction(other), false).await?;
                self.release(self.owner, Key::Transaction(other));
                continue;
            }
            if mutants::active(Mutant::DoNothingOnNumbers) {
                return Ok(false);
            }
            return Err(StoreError::NumberTaken);
        }
    }

    /// Commits, waiting for the write-ahead log.
    pub(super) async fn commit(self) -> Result<(), StoreError> {
        self.commit_as(None).await
    }

    /// Commits; a cursor alone does not wait for the write-ahead log.
    pub(super) async fn commit_as(self, alone: Option<((i32, u16), i64)>) -> Result<(), StoreError> {
        self.check()?;
        let runtime = &self.model.0.runtime;
        let at_commit = self.call.fate == Fate::AtCommit;
        if at_commit {
            self.call.break_connection();
            if runtime.per_mille(300) {
                return Err(StoreError::ConnectionLost("ended before its commit record".into()));
            }
            runtime.dawdle(BROKEN_COMMIT_US / 2).await;
        }
        if self.xid_if_any().is_some() {
            self.pause().await?;
            self.database().record_commit(self.owner, alone, alone.is_none(), runtime.now());
            let us_max = if at_commit { BROKEN_COMMIT_US } else { self.model.0.settings.get().commit_us_max };
            runtime.dawdle(if alone.is_some() { us_max / 10 } else { us_max }).await;
            if self.life != self.model.0.life.get() {
                return Err(crashed());
            }
            self.database().make_visible(self.owner);
            runtime.dawdle(20).await;
        }
        if self.life == self.model.0.life.get() {
            self.locks.release_all(self.owner);
        }
        self.finished.set(true);
        Ok(())
    }
}

impl Drop for Tx {
    fn drop(&mut self) {
        if self.finished.get() || self.life != self.model.0.life.get() {
            return;
        }
        let recorded = {
            let database = self.model.0.database.borrow();
            database.transactions.get(&self.owner).is_some_and(|of| of.recorded)
        };
        if recorded {
            // The caller's process was killed while the server commits: the server does not mind.
            self.model.0.database.borrow_mut().make_visible(self.owner);
        } else {
            self.model.0.database.borrow_mut().abort(self.owner);
        }
        self.locks.release_all(self.owner);
    }
}
