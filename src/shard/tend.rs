//! The lease keeper: one a process. It keeps the incarnation alive, takes partitions, and tells the shards.
//!
//! Invariants
//! - The deadline in the [`LeaseCell`] is set only after a renewal (or a registration) was answered, and counts
//!   from before it was sent. A lost connection ends it at once, until the incarnation has proved itself alive.
//! - A dead incarnation is dead for ever: the shards are told to stand down, and the process comes back as a
//!   new incarnation.
//! - Where the schema is not this program's any more, keeper and shards stand down together, whoever met it first; the
//!   shards are told, the partitions are freed, and the keeper ends.
//! - An orderly stop frees the partitions at once, after the shards have written their cursors.
//! - A call without an answer within half a lease is given up with its connection: a network that swallows packets
//!   must not hold up the renewal on a fresh one.
//! - Maintenance has a connection and a time limit of its own, below a step: however slow it is, the next renewal is
//!   sent in time. A stop does not wait for it.
//!
//! Cost when idle: a statement every quarter of the lease, and one a minute.

use std::sync::Arc;

use uuid::Uuid;

use super::{Control, LeaseCell};
use crate::ids::Incarnation;
use crate::plan::lease::{LeaseTimes, Watch};
use crate::seam::runtime::Runtime;
use crate::seam::store::{Coordination, HeldPartition, Member, Renewed, StoreError, Taken};
use crate::time::Tick;

/// First wait before a failed step is tried again; it doubles up to the usual step.
const RETRY_MS: u64 = 250;
/// How often maintenance is done while something stands in the log, and when it has failed.
const MAINTENANCE_MS: u64 = 5_000;
/// How often it is done when there was nothing to do, until a look shows that somebody has stored.
const MAINTENANCE_IDLE_MS: u64 = 60_000;

/// What the keeper is made of.
pub struct Keeper<R, C, F> {
    /// Its thread's executor.
    pub runtime: R,
    /// Its own connection.
    pub coordination: C,
    /// Name of the service.
    pub service_name: String,
    /// Name of the instance (not its identity).
    pub instance_name: String,
    /// Number of shards.
    pub shards: u16,
    /// Figures of the lease.
    pub times: LeaseTimes,
    /// Whether to own partitions at all; an instance that only stores does not.
    pub owns: bool,
    /// What the shards read.
    pub lease: Arc<LeaseCell>,
    /// Tells a shard.
    pub tell: F,
}

/// What the keeper waits for besides time.
pub trait Stop {
    /// Resolves when the shards have ended and the keeper is to free its partitions.
    fn stopped(&self) -> impl Future<Output = ()>;
    /// Whether that is so.
    fn is_stopped(&self) -> bool;
}

impl<R: Runtime, C: Coordination, F: Fn(u16, Control)> Keeper<R, C, F> {
    /// Runs until stopped; then frees the partitions.
    pub async fn keep(self, stop: impl Stop) {
        let mut current: Option<Incarnation> = None;
        let mut watch = Watch::default();
        let mut ownership = -1;
        let mut upkeep = Upkeep::from(self.runtime.now());
        let mut retry_ms = RETRY_MS;
        loop {
            if stop.is_stopped() {
                self.lease.end();
                if let Some(incarnation) = current
                    && let Err(error) = self.within_limit(self.coordination.deregister_instance(incarnation)).await
                {
                    tracing::warn!(%error, "the partitions could not be freed: they are taken over when the lease ends");
                }
                return;
            }
            if self.lease.stood_down().is_some() {
                let Some(incarnation) = current else {
                    return (0..self.shards).for_each(|shard| (self.tell)(shard, Control::Announce));
                };
                self.distribute(incarnation, &Taken { ownership: -1, held: Vec::new() });
                // No run is started any more: another one may take the partitions.
                if let Err(error) = self.within_limit(self.coordination.deregister_instance(incarnation)).await {
                    tracing::warn!(%error, "the partitions could not be freed: they are taken over when this connection ends");
                }
                return;
            }
            let begun = self.runtime.now();
            let step = self.step(&mut current, &mut watch, &mut ownership).await;
            let mut pause_ms = self.times.step_ms();
            let mut until = None;
            match step {
                Ok(Step::Alive(position)) => {
                    retry_ms = RETRY_MS;
                    // From before the renewal: what maintenance takes is not added to it.
                    until = Some(begun.plus_ms(pause_ms));
                    upkeep.seen(position);
                    if let Some(incarnation) = current
                        && upkeep.due <= self.runtime.now()
                    {
                        let work = std::pin::pin!(self.maintain(incarnation, &mut upkeep));
                        let stopped = std::pin::pin!(stop.stopped());
                        // Dropped at a stop, it takes its connection along; the server ends it by its own limit.
                        futures_util::future::select(work, stopped).await;
                    }
                }
                Ok(Step::Dead) => {
                    tracing::error!(
                        "this incarnation was declared dead by another instance: standing down, and coming back as a new one"
                    );
                    self.lease.end();
                    if let Some(incarnation) = current.take() {
                        self.distribute(incarnation, &Taken { ownership: -1, held: Vec::new() });
                    }
                    ownership = -1;
                    pause_ms = RETRY_MS;
                }
                Err(error @ StoreError::SchemaChanged { .. }) => {
                    self.lease.stand_down(&error);
                    continue;
                }
                Err(error) => {
                    if matches!(error, StoreError::ConnectionLost(_) | StoreError::Denied { .. }) {
                        // The session lock may be gone: no new run before the incarnation is proved alive.
                        self.lease.end();
                    }
                    tracing::warn!(%error, "lease keeper: trying again");
                    pause_ms = retry_ms.min(pause_ms);
                    retry_ms = retry_ms.saturating_mul(2).min(self.times.step_ms());
                }
            }
            let until = until.unwrap_or_else(|| self.runtime.now().plus_ms(pause_ms));
            let sleep = std::pin::pin!(self.runtime.sleep_until(until));
            let stopped = std::pin::pin!(stop.stopped());
            futures_util::future::select(sleep, stopped).await;
        }
    }

    /// One look: renew (or register), look at the others, take what is free.
    async fn step(
        &self,
        current: &mut Option<Incarnation>,
        watch: &mut Watch,
        ownership: &mut i64,
    ) -> Result<Step, StoreError> {
        let sent = self.runtime.now();
        let ttl_ms = self.times.ttl_ms();
        let mut seen = None;
        let incarnation = match *current {
            Some(incarnation) if self.owns => {
                seen = self.within_limit(self.coordination.renew_and_look(incarnation, ttl_ms)).await?;
                if seen.is_none() {
                    return Ok(Step::Dead);
                }
                incarnation
            }
            Some(incarnation) => {
                let renewed = self.within_limit(self.coordination.renew_lease(incarnation, ttl_ms)).await?;
                if renewed == Renewed::Dead {
                    return Ok(Step::Dead);
                }
                incarnation
            }
            None => {
                let (incarnation, _) = self
                    .within_limit(self.coordination.register_instance(
                        Uuid::new_v4(),
                        &self.service_name,
                        &self.instance_name,
                        self.shards,
                        self.times.ttl_ms(),
                    ))
                    .await?;
                tracing::info!(incarnation = incarnation.number, id = %incarnation.id, "registered");
                // The shards may store from here on.
                self.distribute(incarnation, &Taken { ownership: -1, held: Vec::new() });
                *current = Some(incarnation);
                incarnation
            }
        };
        self.lease.set(self.times.deadline(sent));
        if !self.owns {
            return Ok(Step::Alive(None));
        }
        let members = match seen {
            Some(members) => members,
            None => self.within_limit(self.coordination.members(incarnation)).await?,
        };
        let mut freed = members.free_partitions > 0 || *ownership < 0;
        for member in members.others.iter().filter(|member| !member.connected) {
            if self.within_limit(self.coordination.mark_dead(*member, true)).await? {
                tracing::warn!(incarnation = member.incarnation.number, "declared dead: its connection has ended");
                freed = true;
            }
        }
        let mut late: Vec<Member> = Vec::new();
        watch.look(&members.others, self.times.ttl_ms(), self.runtime.now(), |member| late.push(member));
        for member in late {
            if self.within_limit(self.coordination.mark_dead(member, false)).await? {
                tracing::warn!(incarnation = member.incarnation.number, "declared dead: its lease is over");
                freed = true;
            }
        }
        if freed {
            match self.within_limit(self.coordination.take_partitions(incarnation)).await? {
                None => return Ok(Step::Dead),
                Some(taken) => {
                    if taken.ownership != *ownership || *ownership < 0 {
                        *ownership = taken.ownership;
                        tracing::info!(
                            incarnation = incarnation.number,
                            partitions = taken.held.len(),
                            "partitions held"
                        );
                        self.distribute(incarnation, &taken);
                    }
                }
            }
        }
        Ok(Step::Alive(Some(members.position)))
    }

    async fn within_limit<T>(&self, call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        self.within_ms(self.times.ttl_ms() / 2, call).await
    }

    async fn within_ms<T>(
        &self,
        limit_ms: u64,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let call = std::pin::pin!(call);
        let sleep = std::pin::pin!(self.runtime.sleep_until(self.runtime.now().plus_ms(limit_ms)));
        match futures_util::future::select(call, sleep).await {
            futures_util::future::Either::Left((answer, _)) => answer,
            futures_util::future::Either::Right(_) => {
                Err(StoreError::ConnectionLost(format!("no answer within {limit_ms} ms")))
            }
        }
    }

    /// Steps of maintenance, for as long as they get on and half their time limit; notes when to come again.
    async fn maintain(&self, incarnation: Incarnation, upkeep: &mut Upkeep) {
        let limit_ms = self.times.upkeep_limit_ms();
        let enough = self.runtime.now().plus_ms(limit_ms / 2);
        loop {
            // The server gives it up by itself; this is for one that does not answer.
            let step = self.coordination.perform_maintenance(incarnation, limit_ms);
            let idle = match self.within_ms(limit_ms + limit_ms / 4, step).await {
                Ok(done) => {
                    if let Some(pid) = done.blocked_by
                        && upkeep.blocked_by != Some(pid)
                    {
                        tracing::warn!(pid, "a log segment cannot be truncated: this backend holds a lock on it");
                    }
                    upkeep.blocked_by = done.blocked_by;
                    tracing::debug!(?done, "maintenance");
                    if done.more && self.runtime.now() < enough {
                        continue;
                    }
                    !done.work_left
                }
                Err(error) => {
                    match error {
                        StoreError::SchemaChanged { .. } => self.lease.stand_down(&error),
                        error => tracing::warn!(%error, "maintenance: trying again"),
                    }
                    false
                }
            };
            return upkeep.done(idle, self.runtime.now());
        }
    }

    fn distribute(&self, incarnation: Incarnation, taken: &Taken) {
        for shard in 0..self.shards {
            let held: Vec<HeldPartition> = taken
                .held
                .iter()
                .copied()
                .filter(|held| held.partition % u32::from(self.shards) == u32::from(shard))
                .collect();
            (self.tell)(shard, Control::Partitions { incarnation, ownership: taken.ownership, held });
        }
    }
}

enum Step {
    /// With the last position that anybody has drawn, if it was looked at.
    Alive(Option<i64>),
    Dead,
}

/// When maintenance comes.
struct Upkeep {
    due: Tick,
    /// When it comes if there is something to do.
    soon: Tick,
    /// The last position that was seen drawn, and the one that was when there was nothing to do.
    position: Option<i64>,
    idle_at: Option<i64>,
    /// Who was last said to hold a segment.
    blocked_by: Option<i32>,
}

impl Upkeep {
    fn from(now: Tick) -> Self {
        let soon = now.plus_ms(MAINTENANCE_MS);
        Self { due: soon, soon, position: None, idle_at: None, blocked_by: None }
    }

    /// A look at the database: has anybody stored since there was nothing to do?
    fn seen(&mut self, position: Option<i64>) {
        self.position = position;
        if self.idle_at.is_some() && self.idle_at != position {
            self.due = self.due.min(self.soon);
        }
    }

    fn done(&mut self, idle: bool, now: Tick) {
        self.soon = now.plus_ms(MAINTENANCE_MS);
        self.due = if idle { now.plus_ms(MAINTENANCE_IDLE_MS) } else { self.soon };
        self.idle_at = self.position.filter(|_| idle);
    }
}
