//! The lease keeper hands partitions over that another member should have.
//!
//! Invariants
//! - The shards let go first: nothing of a partition is in flight, and what is resolved of it is known, before the
//!   database says that nobody owns it.
//! - One hand-over at a time. While it is under way the partitions are this incarnation's; if it dies meanwhile they
//!   are taken over as any others.
//! - A hand-over whose answer was lost is asked for again: what is not owned any more is passed over. At a stop that is
//!   after each look, and for the last time before the incarnation ends, for what the shards let go of before as well.
//! - One that fails takes no other along; one that loses its connection ends the lease.

use futures_channel::oneshot::Receiver;

use super::Control;
use super::tend::{Keeper, Standing};
use crate::plan::mutants::{self, Mutant};
use crate::seam::runtime::Runtime;
use crate::seam::store::{Coordination, Release, StoreError};
use crate::time::Tick;

/// First and longest wait before a hand-over that failed is tried again.
const WAIT_MS: (u64, u64) = (50, 2_500);
/// The same at an end, for which others wait.
const END_WAIT_MS: (u64, u64) = (5, 250);

/// Partitions on their way out.
pub(super) struct Leaving {
    partitions: Vec<u32>,
    /// The shards that have not let go, with what each was asked for.
    asked: Vec<(Vec<u32>, Receiver<Release>)>,
    gone: Vec<Release>,
    /// After a failure: when to try again, and how long after the next one.
    not_before: Tick,
    wait_ms: u64,
}

impl Leaving {
    pub(super) fn holds(&self, partition: u32) -> bool {
        self.partitions.contains(&partition)
    }

    /// When the database may be told.
    pub(super) fn not_before(&self) -> Tick {
        self.not_before
    }

    /// Resolves when every shard has let go. A shard that cannot say keeps its own: they do not leave.
    pub(super) async fn all_gone(&mut self) {
        while let Some((partitions, receiver)) = self.asked.last_mut() {
            match receiver.await {
                Ok(release) => self.gone.push(release),
                Err(_) => self.partitions.retain(|partition| !partitions.contains(partition)),
            }
            self.asked.pop();
        }
    }

    /// What shards have let go of and the database was not told.
    pub(super) fn take_gone(&mut self) -> Vec<Release> {
        let let_go = self.asked.iter_mut().filter_map(|(_, receiver)| receiver.try_recv().ok().flatten());
        self.gone.extend(let_go);
        std::mem::take(&mut self.gone)
    }
}

impl<R: Runtime, C: Coordination, F: Fn(u16, Control)> Keeper<R, C, F> {
    /// Asks the shards to let go.
    pub(super) fn begin_hand_over(&self, of: &mut Standing, partitions: Vec<u32>) {
        tracing::info!(partitions = partitions.len(), "handing partitions over");
        let (mut asked, mut gone) = (Vec::new(), Vec::new());
        for shard in 0..self.shards {
            let is_of = |partition: &u32| partition % u32::from(self.shards) == u32::from(shard);
            let wanted: Vec<u32> = partitions.iter().copied().filter(is_of).collect();
            if wanted.is_empty() {
                continue;
            }
            if mutants::active(Mutant::HandedOverUnasked) {
                gone.push(Release { epoch: None, partitions: wanted.into_iter().map(|of| (of, None)).collect() });
                continue;
            }
            let (reply, receiver) = futures_channel::oneshot::channel();
            (self.tell)(shard, Control::Release { partitions: wanted.clone(), reply });
            asked.push((wanted, receiver));
        }
        of.leaving = Some(Leaving { partitions, asked, gone, not_before: Tick(0), wait_ms: WAIT_MS.0 });
    }

    /// Hands over what the shards have let go; answers whether the keeper should look at once.
    pub(super) async fn hand_over(&self, of: &mut Standing) -> bool {
        let (Some(incarnation), Some(leaving)) = (of.current, &mut of.leaving) else { return true };
        while let Some(release) = leaving.gone.last() {
            match self.within_limit(self.coordination.release_partitions(incarnation, release)).await {
                Ok(Some(ownership)) => {
                    of.ownership = ownership;
                    of.held.retain(|held| !release.partitions.iter().any(|(gone, _)| *gone == held.partition));
                    leaving.gone.pop();
                }
                // Dead: the next look finds that, and ends everything.
                Ok(None) => return true,
                Err(error) => {
                    tracing::warn!(%error, "partitions could not be handed over: trying again");
                    leaving.not_before = self.runtime.now().plus_ms(leaving.wait_ms);
                    leaving.wait_ms = (leaving.wait_ms * 2).min(WAIT_MS.1);
                    if matches!(error, StoreError::ConnectionLost(_)) {
                        self.lease.end();
                        return true;
                    }
                    return false;
                }
            }
        }
        of.leaving = None;
        self.distribute(incarnation, of);
        false
    }

    /// At a stop: what the shards have let go of, exactly as far as it is resolved. Where that fails it is asked for again
    /// after the next look, and before the end; after that the cursors say it, and a copy may go out. All of it takes no
    /// longer than one call. Answers whether the keeper should look at once: it has lost its connection.
    pub(super) async fn hand_over_the_rest(&self, of: &mut Standing) -> bool {
        let mut parted = std::mem::take(&mut of.left_over);
        parted.extend(self.lease.take_parted());
        let Some(incarnation) = of.current else { return false };
        if parted.is_empty() {
            return false;
        }
        let until = self.limit();
        let mut lost = false;
        let mut noted = |error: &StoreError| {
            if matches!(error, StoreError::ConnectionLost(_)) {
                // The session lock may be gone: no new run before the incarnation is proved alive.
                self.lease.end();
                lost = true;
            }
        };
        // Else what is let go of is left for this one, as its share.
        if let Err(error) = self.until_done(|| self.coordination.withdraw_instance(incarnation)).await {
            tracing::warn!(%error, "the others count this instance until it has ended");
            noted(&error);
        }
        for release in parted {
            let hand_over = || self.coordination.release_partitions(incarnation, &release);
            if let Err(error) = self.tried_until(until, hand_over).await {
                tracing::warn!(%error, "partitions could not be handed over exactly");
                noted(&error);
                of.left_over.push(release);
            }
        }
        lost
    }

    /// One of the last calls. Others wait for what it frees, for as long as a lease where it fails: so it is tried again
    /// while the database cannot do it just now (a conflict, a lock), for as long as one call may take.
    pub(super) async fn until_done<T, W: Future<Output = Result<T, StoreError>>>(
        &self,
        call: impl Fn() -> W,
    ) -> Result<T, StoreError> {
        self.tried_until(self.limit(), call).await
    }

    fn limit(&self) -> Tick {
        self.runtime.now().plus_ms(self.times.ttl_ms() / 2)
    }

    async fn tried_until<T, W: Future<Output = Result<T, StoreError>>>(
        &self,
        until: Tick,
        call: impl Fn() -> W,
    ) -> Result<T, StoreError> {
        let mut wait_ms = END_WAIT_MS.0;
        loop {
            let left_ms = until.since_us(self.runtime.now()) / 1_000;
            let answer = self.within_ms(left_ms, call()).await;
            let again_at = self.runtime.now().plus_ms(wait_ms);
            if !matches!(answer, Err(StoreError::Transient { .. })) || again_at >= until {
                return answer;
            }
            self.runtime.sleep_until(again_at).await;
            wait_ms = (wait_ms * 2).min(END_WAIT_MS.1);
        }
    }
}
