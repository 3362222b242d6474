//! The model's side for lease keepers: incarnations, leases, take-over.
//!
//! Invariants
//! - A session lock lives as long as the keeper's connection; when that ends, the server notices a little later.
//! - Whoever ends an incarnation holds its fence exclusively, and so sees its last writes.

use std::cell::Cell;

use super::Model;
use super::database::Instance;
use super::locks::Key;
use super::transaction::Tx;
use crate::ids::Incarnation;
use crate::plan::mutants::{self, Mutant};
use crate::plan::snapshot::Snapshot;
use crate::seam::runtime::Runtime;
use crate::seam::store::{
    Coordination, Heard, HeldPartition, Maintenance, Member, Members, Registration, Release, Renewed, StoreError, Taken,
};

/// Notifications in a thousand that are lost.
const UNHEARD_PER_MILLE: u64 = 100;
/// Longest time until the server sees that a connection has ended.
const NOTICE_US: u64 = 50_000;
/// The "shard" of the lock that stands for an instance's own row.
const ROW: u16 = u16::MAX;

/// A session: its lock owner, in one life of the server.
#[derive(Clone, Copy)]
struct Session {
    owner: u64,
    life: u64,
}

/// A lease keeper's door to the model.
pub struct ModelCoordination {
    model: Model,
    session: Cell<Option<Session>>,
    /// Whose session lock it is to hold.
    number: Cell<Option<i32>>,
    /// What it has heard so far.
    heard: Cell<(u64, u64)>,
}

impl ModelCoordination {
    pub(super) fn new(model: Model) -> Self {
        let heard = Cell::new(model.0.said.get());
        Self { model, session: Cell::new(None), number: Cell::new(None), heard }
    }

    /// The session, begun if there is none in this life of the server.
    fn session(&self) -> u64 {
        let life = self.model.0.life.get();
        match self.session.get() {
            Some(session) if session.life == life => session.owner,
            _ => {
                let owner = self.model.fresh_owner();
                self.session.set(Some(Session { owner, life }));
                owner
            }
        }
    }

    /// The connection has ended: the server lets go of its locks when it notices.
    fn end_session(&self) {
        let Some(session) = self.session.take() else { return };
        if let Some(number) = self.number.get() {
            self.model.0.session_lost.borrow_mut().insert(number, self.model.0.runtime.now());
        }
        let model = self.model.clone();
        let server = self.model.0.server.borrow().clone();
        server.spawn(async move {
            model.0.runtime.dawdle(NOTICE_US).await;
            if model.0.life.get() == session.life {
                model.0.locks.borrow().clone().release_all(session.owner);
            }
        });
    }

    /// What was seen is old when it is known.
    async fn age_view(&self) {
        let us_max = self.model.0.settings.get().view_us_max;
        if us_max > 0 {
            self.model.0.runtime.dawdle(us_max).await;
        }
    }

    fn noted<T>(&self, answer: Result<T, StoreError>) -> Result<T, StoreError> {
        if matches!(answer, Err(StoreError::ConnectionLost(_))) {
            self.end_session();
        }
        answer
    }
}

impl Drop for ModelCoordination {
    fn drop(&mut self) {
        self.end_session();
    }
}

impl Coordination for ModelCoordination {
    async fn register_instance(
        &self,
        registration: &Registration,
        lease_ms: u64,
    ) -> Result<(Incarnation, u32), StoreError> {
        let session = self.session();
        let Registration { id, shards, owns, .. } = *registration;
        let answer = self
            .model
            .call(async move |tx: Tx| {
                tx.pause().await?;
                // From a sequence: it is gone whether or not this commits.
                let number = {
                    let mut database = tx.database();
                    database.next_instance += 1;
                    database.next_instance
                };
                let lease_until = tx.model.clock().plus_ms(lease_ms);
                let instance = Instance { id, counter: 0, ownership: 0, lease_until, shards, alive: true, owns };
                tx.try_lock_for(session, Key::Alive(number));
                tx.effect(move |database| {
                    database.instances.insert(number, instance);
                });
                let count = tx.database().partition_count;
                let model = tx.model.clone();
                tx.effect(move |_| model.say(true));
                tx.commit().await?;
                Ok((Incarnation { number, id }, count))
            })
            .await;
        if let Ok((incarnation, _)) = &answer {
            self.number.set(Some(incarnation.number));
        }
        self.noted(answer)
    }

    async fn renew_lease(&self, incarnation: Incarnation, lease_ms: u64) -> Result<Renewed, StoreError> {
        let (session, number) = (self.session(), incarnation.number);
        let answer = self
            .model
            .call(async move |tx: Tx| {
                // On a new connection the lock is taken again, as soon as the server has let go of the old one.
                tx.try_lock_for(session, Key::Alive(number));
                tx.lock(Key::Row(number, ROW), true).await?;
                tx.pause().await?;
                let now = tx.model.clock();
                let renewable = tx.database().instances.get(&number).is_some_and(|of| of.alive && of.lease_until > now);
                if !renewable {
                    return Ok(Renewed::Dead);
                }
                let until = now.plus_ms(lease_ms);
                tx.effect(move |database| {
                    if let Some(of) = database.instances.get_mut(&number) {
                        of.counter += 1;
                        of.lease_until = until;
                    }
                });
                tx.commit().await?;
                Ok(Renewed::Alive)
            })
            .await;
        self.noted(answer)
    }

    async fn members(&self, incarnation: Incarnation) -> Result<Members, StoreError> {
        let number = incarnation.number;
        let answer = self
            .model
            .call(async move |tx: Tx| {
                tx.pause().await?;
                let now = tx.model.clock();
                let database = tx.database();
                let held =
                    |number: i32| database.partitions.iter().filter(|of| of.owner == Some(number)).count() as u32;
                let others = database
                    .instances
                    .iter()
                    .filter(|(other, of)| **other != number && of.alive && (of.owns || held(**other) > 0))
                    .map(|(other, of)| Member {
                        incarnation: Incarnation { number: *other, id: of.id },
                        counter: of.counter,
                        expired: of.lease_until < now,
                        connected: tx.holder_but(tx.owner, Key::Alive(*other)).is_some(),
                        direct: true,
                        owns: of.owns,
                        held: held(*other),
                    })
                    .collect();
                let all = database.partitions.iter().zip(0u32..);
                let free = all.filter(|(of, _)| of.owner.is_none()).map(|(_, partition)| partition).collect();
                Ok(Members { others, free, position: database.next_position })
            })
            .await;
        self.age_view().await;
        self.noted(answer)
    }

    async fn mark_dead(&self, dead: Member, early: bool) -> Result<bool, StoreError> {
        let answer = self.model.call(move |tx| end(tx, dead, early)).await;
        self.noted(answer)
    }

    async fn take_partitions(&self, incarnation: Incarnation, partitions: &[u32]) -> Result<Option<Taken>, StoreError> {
        let (number, wanted) = (incarnation.number, partitions.to_vec());
        let answer = self.model.call(move |tx| take(tx, number, wanted)).await;
        self.age_view().await;
        self.noted(answer)
    }

    async fn release_partitions(&self, incarnation: Incarnation, release: &Release) -> Result<Option<i64>, StoreError> {
        let (number, release) = (incarnation.number, release.clone());
        let answer = self.model.call(move |tx| hand_over(tx, number, release)).await;
        self.noted(answer)
    }

    async fn announce(&self, _incarnation: Incarnation) -> Result<(), StoreError> {
        self.model.say(false);
        Ok(())
    }

    async fn listen(&self) -> Result<bool, StoreError> {
        Ok(true)
    }

    async fn test_listener(&self) -> Result<(), StoreError> {
        let runtime = &self.model.0.runtime;
        // A network that cuts connections swallows words as well.
        if self.model.0.settings.get().cut_per_mille > 0 && runtime.per_mille(UNHEARD_PER_MILLE) {
            return std::future::pending().await;
        }
        runtime.dawdle(NOTICE_US).await;
        Ok(())
    }

    async fn heard(&self) -> Heard {
        let runtime = &self.model.0.runtime;
        loop {
            let (said, heard) = (self.model.0.said.get(), self.heard.replace(self.model.0.said.get()));
            if said != heard && !runtime.per_mille(UNHEARD_PER_MILLE) {
                return Heard { members: said.0 != heard.0, work: said.1 != heard.1, lost: false };
            }
            runtime.sleep_until(runtime.now().plus_ms(5)).await;
        }
    }

    async fn wait_for_end(&self, member: Member, limit_ms: u64) -> Result<bool, StoreError> {
        let runtime = &self.model.0.runtime;
        let until = runtime.now().plus_ms(limit_ms);
        while runtime.now() < until {
            let number = member.incarnation.number;
            if self.model.0.locks.borrow().holder_but(self.session(), Key::Alive(number)).is_none() {
                return Ok(true);
            }
            runtime.sleep_until(runtime.now().plus_ms(10)).await;
        }
        Ok(false)
    }

    async fn withdraw_instance(&self, incarnation: Incarnation) -> Result<bool, StoreError> {
        let number = incarnation.number;
        let answer = self
            .model
            .call(async move |tx: Tx| {
                tx.lock(Key::Row(number, ROW), true).await?;
                tx.pause().await?;
                let alive = tx.database().instances.get(&number).is_some_and(|of| of.alive);
                tx.effect(move |database| {
                    if let Some(of) = database.instances.get_mut(&number) {
                        of.owns = false;
                    }
                });
                tx.commit().await?;
                Ok(alive)
            })
            .await;
        self.noted(answer)
    }

    async fn deregister_instance(&self, incarnation: Incarnation) -> Result<(), StoreError> {
        let (session, number) = (self.session(), incarnation.number);
        let answer = self
            .model
            .call(async move |tx: Tx| {
                tx.lock(Key::Fence(number), true).await?;
                tx.lock(Key::Row(number, ROW), true).await?;
                tx.pause().await?;
                if tx.database().instances.get(&number).is_some_and(|of| of.alive) {
                    free(&tx, number).await?;
                }
                tx.release(session, Key::Alive(number));
                tx.commit().await
            })
            .await;
        self.noted(answer)
    }

    async fn perform_maintenance(&self, _incarnation: Incarnation, _limit_ms: u64) -> Result<Maintenance, StoreError> {
        let answer = self.model.call(super::maintenance::perform).await;
        self.noted(answer)
    }
}

async fn end(tx: Tx, dead: Member, early: bool) -> Result<bool, StoreError> {
    let number = dead.incarnation.number;
    if early && !tx.try_lock(Key::Alive(number), true) {
        return Ok(false);
    }
    if !mutants::active(Mutant::NoFenceLock) {
        tx.lock(Key::Fence(number), true).await?;
    }
    tx.lock(Key::Row(number, ROW), true).await?;
    tx.pause().await?;
    let now = tx.model.clock();
    let may_end = tx
        .database()
        .instances
        .get(&number)
        .is_some_and(|of| of.alive && (early || (of.counter == dead.counter && of.lease_until < now)));
    if !may_end {
        return Ok(false);
    }
    free(&tx, number).await?;
    tx.commit().await?;
    Ok(true)
}

/// Ends the incarnation's ownership: what its shards had resolved becomes the bases.
async fn free(tx: &Tx, number: i32) -> Result<(), StoreError> {
    tx.lock(Key::Partitions, true).await?;
    tx.pause().await?;
    let bases: Vec<_> = {
        let database = tx.database();
        (0..database.partitions.len() as u32).map(|partition| database.resolved(partition)).collect()
    };
    let model = tx.model.clone();
    tx.effect(move |database| {
        model.say(true);
        if let Some(of) = database.instances.get_mut(&number) {
            of.alive = false;
        }
        for (partition, base) in database.partitions.iter_mut().zip(bases) {
            if partition.owner == Some(number) {
                partition.owner = None;
                partition.fence += 1;
                partition.base = base;
            }
        }
    });
    Ok(())
}

async fn take(tx: Tx, number: i32, wanted: Vec<u32>) -> Result<Option<Taken>, StoreError> {
    tx.lock(Key::Row(number, ROW), true).await?;
    tx.pause().await?;
    let now = tx.model.clock();
    let alive = tx.database().instances.get(&number).is_some_and(|of| of.alive && of.lease_until > now);
    if !alive {
        return Ok(None);
    }
    // Who else is taking has locked the rows: they are left to him.
    let may_take = tx.try_lock(Key::Partitions, true);
    tx.pause().await?;
    let (mut ownership, free, mut held) = {
        let database = tx.database();
        let ownership = database.instances.get(&number).map_or(0, |of| of.ownership);
        let all = || database.partitions.iter().zip(0u32..);
        let free: Vec<u32> =
            all().filter(|(of, at)| may_take && of.owner.is_none() && wanted.contains(at)).map(|(_, at)| at).collect();
        let held: Vec<HeldPartition> = all()
            .filter(|(of, at)| of.owner == Some(number) || free.contains(at))
            .map(|(of, at)| HeldPartition { partition: at, fence: of.fence + i64::from(of.owner.is_none()) })
            .collect();
        (ownership, free, held)
    };
    held.sort_by_key(|of| of.partition);
    if !free.is_empty() {
        ownership += 1;
        tx.effect(move |database| {
            if let Some(of) = database.instances.get_mut(&number) {
                of.ownership = ownership;
            }
            for partition in free {
                let of = &mut database.partitions[partition as usize];
                of.owner = Some(number);
                of.fence += 1;
                of.ownership = ownership;
            }
        });
    }
    tx.commit().await?;
    Ok(Some(Taken { ownership, held }))
}

/// Hands partitions over: see `release_partitions.sql`.
async fn hand_over(tx: Tx, number: i32, release: Release) -> Result<Option<i64>, StoreError> {
    if !mutants::active(Mutant::NoFenceLock) {
        tx.lock(Key::Fence(number), true).await?;
    }
    tx.lock(Key::Row(number, ROW), true).await?;
    tx.lock(Key::Partitions, true).await?;
    tx.pause().await?;
    let epoch = tx.model.epoch();
    let (ownership, bases) = {
        let database = tx.database();
        let Some(of) = database.instances.get(&number).filter(|of| of.alive) else { return Ok(None) };
        let base = |(partition, exact): &(u32, Option<Snapshot>)| {
            let resolved = database.resolved(*partition);
            let exact = exact.as_ref().filter(|_| release.epoch == Some(epoch));
            (*partition, exact.map_or(resolved.clone(), |exact| resolved.union(exact)))
        };
        (of.ownership + 1, release.partitions.iter().map(base).collect::<Vec<_>>())
    };
    tx.model.0.runtime.trace(|| format!("hand over: {number} {:?}", release.partitions));
    let model = tx.model.clone();
    tx.effect(move |database| {
        model.say(true);
        if let Some(of) = database.instances.get_mut(&number) {
            of.ownership = ownership;
        }
        for (partition, base) in bases {
            let of = &mut database.partitions[partition as usize];
            if of.owner == Some(number) {
                of.owner = None;
                of.fence += 1;
                of.base = base;
            }
        }
    });
    tx.commit().await?;
    Ok(Some(ownership))
}
