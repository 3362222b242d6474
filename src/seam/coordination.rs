//! The lease keeper's side of the Postgres seam: membership, partitions, maintenance.
//!
//! Invariant: it has its own door and its own connections; nothing here writes a message.

use std::future::Future;

use uuid::Uuid;

use super::store::StoreError;
use crate::ids::{Epoch, Incarnation};
use crate::plan::snapshot::Snapshot;

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

/// Another incarnation that owns partitions, or may.
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
    /// Whether it has such a lock at all, as a process with a connection of its own does: it hears at once of what is
    /// free. A worker that speaks SQL comes by when it likes, if it comes again.
    pub direct: bool,
    /// Whether it takes partitions.
    pub owns: bool,
    /// How many it has.
    pub held: u32,
}

/// Who else owns partitions, and what nobody owns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members {
    /// Other incarnations that own partitions, or may.
    pub others: Vec<Member>,
    /// Partitions without an owner, ascending.
    pub free: Vec<u32>,
    /// The last position that anybody has drawn: another one than before says that somebody has stored.
    pub position: i64,
}

/// What others say: hints to look soon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// Who owns what has changed, or who may.
    pub members: bool,
    /// Messages were stored by somebody else than the owner of their partition.
    pub work: bool,
    /// The connection that holds the session lock has ended: others may take over.
    pub lost: bool,
}

/// Who an incarnation is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// Its identity, made by the process.
    pub id: Uuid,
    /// The service: its instances share the partitions.
    pub service_name: String,
    /// The instance, for whoever reads the tables; not an identity.
    pub instance_name: String,
    /// Its shards: partition % shards is the one that writes a partition's cursor.
    pub shards: u16,
    /// Whether it takes partitions.
    pub owns: bool,
}

/// What a shard hands over: partitions of which it publishes nothing any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Release {
    /// The life of the server that `resolved` stems from.
    pub epoch: Option<Epoch>,
    /// The partitions, and what is resolved of each: exactly, or `None` where only the last cursor is known.
    pub partitions: Vec<(u32, Option<Snapshot>)>,
}

/// The lease keeper's side of the database: its own door, its own connection.
pub trait Coordination: 'static {
    /// Registers a new incarnation with a lease of `lease_ms` and holds its session lock for as long as the
    /// connection lives. Answers it with the installed partition count.
    fn register_instance(
        &self,
        registration: &Registration,
        lease_ms: u64,
    ) -> impl Future<Output = Result<(Incarnation, u32), StoreError>>;

    /// Counter + 1 and a new lease end, only while alive and unexpired.
    fn renew_lease(&self, incarnation: Incarnation, lease_ms: u64)
    -> impl Future<Output = Result<Renewed, StoreError>>;

    /// Other incarnations that own partitions or may, and which partitions nobody owns.
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

    /// Takes those of the partitions that nobody owns, raising their fences; answers the whole set held. `None` if
    /// this incarnation is dead.
    fn take_partitions(
        &self,
        incarnation: Incarnation,
        partitions: &[u32],
    ) -> impl Future<Output = Result<Option<Taken>, StoreError>>;

    /// Hands partitions over: nobody owns them afterwards, their fences rise, and what is resolved of each is where
    /// the next owner begins. Waits for flushes and outcomes under way. Answers the incarnation's ownership from then
    /// on; `None` if it is dead.
    fn release_partitions(
        &self,
        incarnation: Incarnation,
        release: &Release,
    ) -> impl Future<Output = Result<Option<i64>, StoreError>>;

    /// Waits until another incarnation's connection ends, by its session lock, on a connection of its own. Answers
    /// whether it has ended; `false` after `limit_ms` (a statement that waits holds a snapshot: it must not do so for
    /// long). Where that cannot be seen it never resolves.
    fn wait_for_end(&self, _member: Member, _limit_ms: u64) -> impl Future<Output = Result<bool, StoreError>> {
        std::future::pending()
    }

    /// Says to the others that messages were stored which this incarnation does not publish. A hint: it may be lost.
    fn announce(&self, incarnation: Incarnation) -> impl Future<Output = Result<(), StoreError>> {
        let _ = incarnation;
        std::future::ready(Ok(()))
    }

    /// Sees to it that a connection of its own listens; answers whether one can at all. What was said before it did was
    /// not heard: `heard` says everything then.
    fn listen(&self) -> impl Future<Output = Result<bool, StoreError>> {
        std::future::ready(Ok(false))
    }

    /// Says something to itself over the listening connection and resolves when it has heard it: the caller's time
    /// limit. Dropped before, it takes the connection along.
    fn test_listener(&self) -> impl Future<Output = Result<(), StoreError>> {
        std::future::pending()
    }

    /// Resolves when the listening connection has ended by itself.
    fn listener_lost(&self) -> impl Future<Output = ()> {
        std::future::pending()
    }

    /// Resolves when others have said something since it last did: hints, which may be lost. Where nobody can be heard
    /// it never does.
    fn heard(&self) -> impl Future<Output = Heard> {
        std::future::pending()
    }

    /// The incarnation takes no partitions any more, and others count it no longer; what it owns is still its own.
    /// Answers whether it is alive.
    fn withdraw_instance(&self, incarnation: Incarnation) -> impl Future<Output = Result<bool, StoreError>>;

    /// Ends the incarnation: its cursors become the bases of its partitions, which are free at once.
    fn deregister_instance(&self, incarnation: Incarnation) -> impl Future<Output = Result<(), StoreError>>;

    /// One bounded step of rotation and trimming, given up by the server after `limit_ms`, and on a connection of its
    /// own: nothing that holds it up holds up a renewal. Answers what was done, for the log.
    fn perform_maintenance(
        &self,
        incarnation: Incarnation,
        limit_ms: u64,
    ) -> impl Future<Output = Result<Maintenance, StoreError>>;

    /// Looks for what waits longer than it should, and deletes old dead letters: bounded, given up by the server after
    /// `limit_ms`, on the connection of maintenance. `None`: another incarnation does it. A store without operators, as
    /// the model, has nothing to tell.
    fn inspect(
        &self,
        incarnation: Incarnation,
        rules: &InspectRules,
        limit_ms: u64,
    ) -> impl Future<Output = Result<Option<Inspection>, StoreError>> {
        let _ = (incarnation, rules, limit_ms);
        std::future::ready(Ok(None))
    }
}

/// What an inspection goes by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InspectRules {
    /// Dead letters that are older, in days, are deleted; 0: none.
    pub dead_letters_days: u32,
    /// A message that was stored longer ago should be published.
    pub unpublished_ms: u64,
    /// A lane should not be parked for longer.
    pub stuck_ms: u64,
}

/// What an inspection found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inspection {
    /// Dead letters deleted, because they were old.
    pub dead_letters_trimmed: u32,
    /// Messages that should be published, one for each destination (of the 1,000 oldest log rows).
    pub unpublished: u32,
    /// Age of the oldest of them.
    pub unpublished_age_ms: u64,
    /// Scheduled messages that should be released (1,000 at most).
    pub overdue: u32,
    /// Lanes that are parked for too long.
    pub stuck: u32,
    /// For how long the longest of them.
    pub stuck_age_ms: u64,
    /// Lanes that wait for an operator.
    pub held: u32,
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
