//! The lease keeper's side of the Postgres seam: membership, partitions, maintenance.
//!
//! Invariant: it has its own door and its own connection; nothing here writes a message.

use std::future::Future;

use uuid::Uuid;

use super::store::StoreError;
use crate::ids::Incarnation;

/// A partition taken, with its fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldPartition {
    /// The partition.
    pub partition: u32,
    /// Its fence: grows with every change of owner.
    pub fence: i64,
}

/// What a renewal says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewed {
    /// Alive for another lease.
    Alive,
    /// This incarnation is dead for ever: stand down.
    Dead,
}

/// The partitions an incarnation holds now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Grows with every change of the incarnation's set of partitions; sent with every flush.
    pub ownership: i64,
    /// All partitions held, ascending.
    pub held: Vec<HeldPartition>,
}

/// Another incarnation that still owns partitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Who.
    pub incarnation: Incarnation,
    /// Its heartbeat counter.
    pub counter: i64,
    /// Whether `lease_until` is past by the database's clock.
    pub expired: bool,
    /// Whether its session lock is held. A hint that saves the early try: that asks again.
    pub connected: bool,
}

/// Who else owns partitions, and what nobody owns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members {
    /// Other incarnations that own partitions.
    pub others: Vec<Member>,
    /// Partitions without an owner.
    pub free_partitions: u32,
    /// The last position that anybody has drawn: another one than before says that somebody has stored.
    pub position: i64,
}

/// The lease keeper's side of the database: its own door, its own connection.
pub trait Coordination: 'static {
    /// Registers a new incarnation with a lease of `lease_ms` and holds its session lock for as long as the
    /// connection lives. Answers it with the installed partition count.
    fn register_instance(
        &self,
        id: Uuid,
        service_name: &str,
        instance_name: &str,
        shards: u16,
        lease_ms: u64,
    ) -> impl Future<Output = Result<(Incarnation, u32), StoreError>>;

    /// Counter + 1 and a new lease end, only while alive and unexpired.
    fn renew_lease(&self, incarnation: Incarnation, lease_ms: u64)
    -> impl Future<Output = Result<Renewed, StoreError>>;

    /// Other incarnations that own partitions, and how many partitions nobody owns.
    fn members(&self, incarnation: Incarnation) -> impl Future<Output = Result<Members, StoreError>>;

    /// Both at once: `None` if this incarnation is dead. One statement where the store can, since it is what an idle
    /// process costs.
    fn renew_and_look(
        &self,
        incarnation: Incarnation,
        lease_ms: u64,
    ) -> impl Future<Output = Result<Option<Members>, StoreError>> {
        async move {
            match self.renew_lease(incarnation, lease_ms).await? {
                Renewed::Alive => self.members(incarnation).await.map(Some),
                Renewed::Dead => Ok(None),
            }
        }
    }

    /// Marks another incarnation dead and frees its partitions, in one transaction that waits for its
    /// fenced writes. With `early`, only if its session lock is free; without, only if its counter is still
    /// `counter` and its lease is past. Answers whether it was done.
    fn mark_dead(&self, dead: Member, early: bool) -> impl Future<Output = Result<bool, StoreError>>;

    /// Takes every partition that nobody owns, raising its fence; answers the whole set held. `None` if this
    /// incarnation is dead.
    fn take_partitions(&self, incarnation: Incarnation) -> impl Future<Output = Result<Option<Taken>, StoreError>>;

    /// Ends the incarnation: its cursors become the bases of its partitions, which are free at once.
    fn deregister_instance(&self, incarnation: Incarnation) -> impl Future<Output = Result<(), StoreError>>;

    /// One bounded step of rotation and trimming, given up by the server after `limit_ms`, and on a connection of its
    /// own: nothing that holds it up holds up a renewal. Answers what was done, for the log.
    fn perform_maintenance(
        &self,
        incarnation: Incarnation,
        limit_ms: u64,
    ) -> impl Future<Output = Result<Maintenance, StoreError>>;
}

/// What a maintenance step did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Maintenance {
    /// Segments truncated.
    pub truncated: u32,
    /// Whether writers were switched to the next segment.
    pub rotated: bool,
    /// A segment could not be locked (a dump or an open enlisted transaction): the blocker's pid.
    pub blocked_by: Option<i32>,
    /// Superseded cursors deleted.
    pub cursors_trimmed: u32,
    /// Something stands in the log: the next step comes soon. Otherwise there is nothing to do until somebody stores.
    pub work_left: bool,
    /// This step got on, and the next can too.
    pub more: bool,
}
