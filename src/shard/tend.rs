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
//! Cost when idle: a statement every quarter of the lease, and two a minute.

use std::pin::pin;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::{Either, LocalBoxFuture, select};

use super::handover::Leaving;
use super::listen::Listener;
use super::neighbours::neighbour;
use super::upkeep::{Sentinel, Upkeep};
use super::{Control, LeaseCell, OthersBell};
use crate::ids::Incarnation;
use crate::plan::assign::{self, Claimant};
use crate::plan::lease::{LeaseTimes, Watch};
use crate::seam::runtime::Runtime;
use crate::seam::store::{Coordination, Heard, HeldPartition, Member, Registration, Release, Renewed, StoreError};
use crate::time::Tick;

/// First wait before a failed step is tried again; it doubles up to the usual step.
const RETRY_MS: u64 = 250;
/// Looks that others ask for are at least so far apart.
const HEARD_MS: u64 = 20;
/// How often the others are told at most that something was stored for them.
const ANNOUNCE_MS: u64 = 20;

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
    /// Rung by the shards when they have stored what others are to publish.
    pub others: Arc<OthersBell>,
    /// What is believed of the listener.
    pub listener: Arc<Listener>,
    /// What to look out for.
    pub sentinel: Sentinel,
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

/// What the keeper knows of itself and the others.
pub(super) struct Standing {
    pub(super) current: Option<Incarnation>,
    partition_count: u32,
    watch: Watch,
    pub(super) ownership: i64,
    /// All that this incarnation owns, by the database.
    pub(super) held: Vec<HeldPartition>,
    /// Whether that is known: not while an answer is outstanding, or was lost.
    is_sure: bool,
    pub(super) leaving: Option<Leaving>,
    /// What shards have let go of because of a stop, and could not be handed over yet.
    pub(super) left_over: Vec<Release>,
    /// Whose end is waited for.
    neighbour: Option<Member>,
    /// The last look failed.
    has_failed: bool,
    /// When the others may be told again.
    announce_at: Tick,
    /// When the neighbour's end may be waited for again.
    vigil_at: Tick,
    /// The last position that a look has seen, and whether it was another one than the look before had seen.
    position: Option<i64>,
    has_moved: bool,
}

/// Why the keeper woke.
enum Woken {
    Time,
    Heard(Heard),
    /// The shards have stored for others.
    Stored,
    NeighbourEnded(Result<bool, StoreError>),
    HandOver,
    /// A shard has let go of everything, because of a stop.
    Parted,
}

impl<R: Runtime, C: Coordination, F: Fn(u16, Control)> Keeper<R, C, F> {
    /// Runs until stopped; then frees the partitions.
    pub async fn keep(self, stop: impl Stop) {
        select(pin!(self.stay(stop)), pin!(self.listen())).await;
    }

    async fn stay(&self, stop: impl Stop) {
        let mut of = Standing {
            current: None,
            partition_count: 0,
            watch: Watch::default(),
            ownership: -1,
            held: Vec::new(),
            is_sure: false,
            leaving: None,
            left_over: Vec::new(),
            neighbour: None,
            has_failed: false,
            announce_at: Tick(0),
            vigil_at: Tick(0),
            position: None,
            has_moved: false,
        };
        let mut waiting: Option<(Incarnation, LocalBoxFuture<'_, Result<bool, StoreError>>)> = None;
        let mut upkeep = Upkeep::from(self.runtime.now());
        let mut retry_ms = RETRY_MS;
        loop {
            if stop.is_stopped() {
                self.lease.end();
                if let Some(leaving) = &mut of.leaving {
                    of.left_over.extend(leaving.take_gone());
                }
                self.hand_over_the_rest(&mut of).await;
                if let Some(incarnation) = of.current
                    && let Err(error) = self.until_done(|| self.coordination.deregister_instance(incarnation)).await
                {
                    tracing::warn!(%error, "the partitions could not be freed: they are taken over when the lease ends");
                }
                return;
            }
            if self.lease.stood_down().is_some() {
                let Some(incarnation) = of.current else {
                    return self.tell_all(|| Control::Announce);
                };
                self.stand_down(&mut of);
                // No run is started any more: another one may take the partitions.
                if let Err(error) = self.until_done(|| self.coordination.deregister_instance(incarnation)).await {
                    tracing::warn!(%error, "the partitions could not be freed: they are taken over when this connection ends");
                }
                return;
            }
            let begun = self.runtime.now();
            let step = self.step(&mut of).await;
            of.has_failed = step.is_err();
            self.lease.note_looked();
            let mut pause_ms = self.times.step_ms();
            let mut until = None;
            match step {
                Ok(Step::Alive(position)) => {
                    retry_ms = RETRY_MS;
                    // From before the renewal: what maintenance takes is not added to it.
                    until = Some(begun.plus_ms(pause_ms));
                    self.look_if_moved(&mut of, position);
                    upkeep.seen(position);
                    if self.hand_over_the_rest(&mut of).await {
                        until = Some(self.runtime.now().plus_ms(RETRY_MS));
                    } else if let Some(incarnation) = of.current
                        && upkeep.due <= self.runtime.now()
                    {
                        let work = self.maintain(incarnation, &mut upkeep);
                        // Dropped at a stop, it takes its connection along; the server ends it by its own limit.
                        first_of(work, first_of(stop.stopped(), self.lease.parted())).await;
                    }
                }
                Ok(Step::Dead) => {
                    tracing::error!(
                        "this incarnation was declared dead by another instance: standing down, and coming back as a new one"
                    );
                    let dead = of.current;
                    self.stand_down(&mut of);
                    // If it is only too late, and nobody has ended it: its partitions are free at once. Its session lock
                    // goes in any case, which otherwise says for as long as the connection lives that it is alive.
                    if let Some(dead) = dead
                        && let Err(error) = self.within_limit(self.coordination.deregister_instance(dead)).await
                    {
                        tracing::debug!(%error, "the dead incarnation was not ended");
                    }
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
            let look_again = self.rest(&mut of, &mut waiting, until, &stop).await;
            // One that others wake all the time still looks no more often than this.
            self.runtime.sleep_until(begun.plus_ms(look_again)).await;
        }
    }

    /// Somebody has stored since the last look, perhaps without saying so: the shards look too. Also after the look that
    /// follows: a position is drawn before its transaction commits, and until then the shards find nothing.
    fn look_if_moved(&self, of: &mut Standing, position: Option<i64>) {
        let before = std::mem::replace(&mut of.position, position);
        let has_moved = before.is_some() && position.is_some() && before != position;
        let had_moved = std::mem::replace(&mut of.has_moved, has_moved);
        if has_moved || had_moved {
            self.tell_all(|| Control::Look);
        }
    }

    /// Waits until there is something to look at; answers how long after the last look that may be at the earliest, in
    /// milliseconds.
    async fn rest<'a>(
        &'a self,
        of: &mut Standing,
        waiting: &mut Option<(Incarnation, LocalBoxFuture<'a, Result<bool, StoreError>>)>,
        until: Tick,
        stop: &impl Stop,
    ) -> u64 {
        loop {
            if waiting.as_ref().map(|(who, _)| *who) != of.neighbour.map(|of| of.incarnation) {
                *waiting =
                    of.neighbour.map(|member| (member.incarnation, self.vigil(member, of.vigil_at).boxed_local()));
            }
            let woken = {
                let announce_at = of.announce_at;
                let sleep = self.runtime.sleep_until(until).map(|()| Woken::Time);
                let stopped = stop.stopped().map(|()| Woken::Time);
                let heard = self.coordination.heard().map(Woken::Heard);
                let ended = async {
                    match waiting.as_mut() {
                        Some((_, ended)) => Woken::NeighbourEnded(ended.await),
                        None => std::future::pending().await,
                    }
                };
                let left = async {
                    match of.leaving.as_mut() {
                        Some(leaving) => {
                            leaving.all_gone().await;
                            self.runtime.sleep_until(leaving.not_before()).await;
                            Woken::HandOver
                        }
                        None => std::future::pending().await,
                    }
                };
                let stored = async {
                    self.others.rung().await;
                    self.runtime.sleep_until(announce_at).await;
                    Woken::Stored
                };
                let parted = self.lease.parted().map(|()| Woken::Parted);
                let stopped = first_of(stopped, parted);
                first_of(first_of(sleep, stopped), first_of(first_of(heard, stored), first_of(ended, left))).await
            };
            match woken {
                Woken::Time => return 0,
                Woken::Heard(heard) => {
                    if heard.work {
                        self.tell_all(|| Control::Announce);
                    }
                    if heard.lost {
                        // No new run before the incarnation is proved alive. After a failure that waits for its turn.
                        self.lease.end();
                        if !of.has_failed {
                            return 0;
                        }
                    }
                    if heard.members {
                        return HEARD_MS;
                    }
                }
                Woken::Stored => {
                    self.others.silence();
                    of.announce_at = self.runtime.now().plus_ms(ANNOUNCE_MS);
                    let Some(incarnation) = of.current else { continue };
                    // A hint: it must not make a renewal late.
                    let said = self.within_ms(self.times.step_ms() / 4, self.coordination.announce(incarnation)).await;
                    if let Err(error) = said {
                        tracing::debug!(%error, "the others were not told: they find it with their next poll");
                        if matches!(error, StoreError::ConnectionLost(_)) {
                            // The session lock is gone: no new run before the incarnation is proved alive.
                            self.lease.end();
                            return 0;
                        }
                    }
                }
                Woken::NeighbourEnded(ended) => {
                    *waiting = None;
                    // At once after its time limit. Otherwise not: whoever is still there at the next look (it has
                    // connected again, or nobody can be waited for) is not asked at full speed.
                    let pause_ms = if matches!(ended, Ok(false)) { 0 } else { RETRY_MS };
                    of.vigil_at = self.runtime.now().plus_ms(pause_ms);
                    match ended {
                        Ok(true) => return 0,
                        Ok(false) => {}
                        Err(error) => tracing::debug!(%error, "the wait for a member's end has ended"),
                    }
                }
                Woken::Parted => {
                    if self.hand_over_the_rest(of).await {
                        return 0;
                    }
                }
                Woken::HandOver => {
                    if self.hand_over(of).await {
                        return 0;
                    }
                }
            }
        }
    }

    /// Nothing is held any more, and nothing may start.
    fn stand_down(&self, of: &mut Standing) {
        self.lease.end();
        (of.ownership, of.leaving, of.neighbour) = (-1, None, None);
        of.held.clear();
        of.left_over.clear();
        of.is_sure = false;
        if let Some(incarnation) = of.current.take() {
            self.distribute(incarnation, of);
        }
    }

    /// One look: renew (or register), look at the others, take what is free, give up what is too much.
    async fn step(&self, of: &mut Standing) -> Result<Step, StoreError> {
        let sent = self.runtime.now();
        let ttl_ms = self.times.ttl_ms();
        let mut seen = None;
        let incarnation = match of.current {
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
                let registration = Registration {
                    id: self.runtime.draw_id(),
                    service_name: self.service_name.clone(),
                    instance_name: self.instance_name.clone(),
                    shards: self.shards,
                    // One that is ended while it parts comes back to store what is in hand, and to own nothing.
                    owns: self.owns && !self.lease.is_parting(),
                };
                let (incarnation, partition_count) =
                    self.within_limit(self.coordination.register_instance(&registration, ttl_ms)).await?;
                tracing::info!(incarnation = incarnation.number, id = %incarnation.id, "registered");
                (of.current, of.partition_count) = (Some(incarnation), partition_count);
                // The shards may store from here on.
                self.distribute(incarnation, of);
                incarnation
            }
        };
        self.lease.set(self.times.deadline(sent));
        if !self.owns {
            return Ok(Step::Alive(None));
        }
        let mut members = match seen {
            Some(members) => members,
            None => self.within_limit(self.coordination.members(incarnation)).await?,
        };
        if self.mark_dead(&mut of.watch, &members).await? {
            members = self.within_limit(self.coordination.members(incarnation)).await?;
        }
        of.neighbour = neighbour(incarnation, &members);
        let others = members.others.iter().filter(|member| member.owns && !member.expired);
        let mut claimants: Vec<Claimant> =
            others.map(|member| Claimant { id: member.incarnation.id, held: member.held }).collect();
        // To whom a stop may leave what it holds: one that hears of it at once. The others count for their shares only,
        // and may never come again.
        let takes = |member: &Member| member.owns && !member.expired && member.direct && member.connected;
        self.lease.note_others(members.others.iter().any(takes));
        if self.lease.is_parting() {
            return Ok(Step::Alive(Some(members.position)));
        }
        claimants.push(Claimant { id: incarnation.id, held: of.held.len() as u32 });
        let held: Vec<u32> = of.held.iter().map(|held| held.partition).collect();
        let moves = assign::moves(of.partition_count, &claimants, incarnation.id, &held, &members.free);
        // While some are on their way out the set does not change otherwise: a shard can tell by it that they have left.
        if of.leaving.is_none() && (!of.is_sure || !moves.take.is_empty()) {
            // Until it is answered: what it took may be this incarnation's already.
            of.is_sure = false;
            match self.within_limit(self.coordination.take_partitions(incarnation, &moves.take)).await? {
                None => return Ok(Step::Dead),
                Some(taken) => {
                    of.is_sure = true;
                    if taken.ownership != of.ownership {
                        (of.ownership, of.held) = (taken.ownership, taken.held);
                        tracing::info!(
                            incarnation = incarnation.number,
                            partitions = of.held.len(),
                            members = claimants.len(),
                            "partitions held"
                        );
                        self.distribute(incarnation, of);
                    }
                }
            }
        }
        if of.leaving.is_none() && self.lease.take_fenced() {
            self.distribute(incarnation, of);
        }
        if !moves.give_up.is_empty() && of.leaving.is_none() {
            self.begin_hand_over(of, moves.give_up);
        }
        Ok(Step::Alive(Some(members.position)))
    }

    pub(super) async fn within_limit<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        self.within_ms(self.times.ttl_ms() / 2, call).await
    }

    pub(super) async fn within_ms<T>(
        &self,
        limit_ms: u64,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let call = std::pin::pin!(call);
        let sleep = std::pin::pin!(self.runtime.sleep_until(self.runtime.now().plus_ms(limit_ms)));
        match futures_util::future::select(call, sleep).await {
            futures_util::future::Either::Left((answer, _)) => answer,
            futures_util::future::Either::Right(_) => Err(StoreError::no_answer(limit_ms.into())),
        }
    }

    /// Tells all shards the same.
    pub(super) fn tell_all(&self, word: impl Fn() -> Control) {
        (0..self.shards).for_each(|shard| (self.tell)(shard, word()));
    }

    /// Tells each shard what it holds: what is owned, less what is leaving.
    pub(super) fn distribute(&self, incarnation: Incarnation, of: &Standing) {
        let stays = |held: &HeldPartition| !of.leaving.as_ref().is_some_and(|leaving| leaving.holds(held.partition));
        for shard in 0..self.shards {
            let is_of = |held: &HeldPartition| held.partition % u32::from(self.shards) == u32::from(shard);
            let held = of.held.iter().copied().filter(|held| is_of(held) && stays(held)).collect();
            (self.tell)(shard, Control::Partitions { incarnation, ownership: of.ownership, held });
        }
    }
}

/// What the first of two futures resolves to.
async fn first_of<T>(a: impl Future<Output = T>, b: impl Future<Output = T>) -> T {
    match select(pin!(a), pin!(b)).await {
        Either::Left((first, _)) | Either::Right((first, _)) => first,
    }
}

enum Step {
    /// With the last position that anybody has drawn, if it was looked at.
    Alive(Option<i64>),
    Dead,
}
