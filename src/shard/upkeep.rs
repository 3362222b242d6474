//! The lease keeper's maintenance: rotation and trimming, in bounded steps; and the sentinel's look.
//!
//! Invariants
//! - It has a connection and a time limit of its own, below a step: however slow it is, the next renewal is sent in time.
//! - Every keeper comes by; the database lets one at a time do it, and whoever is alive can.
//! - It comes soon while something stands in the log, and once a minute when there was nothing, until a look shows that
//!   somebody has stored.
//! - What waits longer than it should is looked for once a minute, and said in the log for as long as it waits.

use std::sync::Arc;

use super::Control;
use super::tend::Keeper;
use crate::ids::Incarnation;
use crate::metrics::SentinelMetrics;
use crate::seam::runtime::Runtime;
use crate::seam::store::{Coordination, InspectRules, Inspection, StoreError};
use crate::time::Tick;

/// How often maintenance is done while something stands in the log, and when it has failed.
const MAINTENANCE_MS: u64 = 5_000;
/// How often it is done when there was nothing to do, until a look shows that somebody has stored.
const MAINTENANCE_IDLE_MS: u64 = 60_000;

/// How often the sentinel looks.
const INSPECT_MS: u64 = 60_000;

/// What the sentinel goes by, and where it says what it found.
#[derive(Clone, Debug, Default)]
pub struct Sentinel {
    /// What is too long.
    pub rules: InspectRules,
    /// What was found.
    pub metrics: Arc<SentinelMetrics>,
}

impl Sentinel {
    fn found(&self, of: &Inspection) {
        let metrics = &self.metrics;
        let waited = metrics.unpublished_now.get() + metrics.overdue_now.get() + metrics.stuck_now.get() > 0;
        if of.unpublished > 0 || of.overdue > 0 || of.stuck > 0 {
            tracing::warn!(
                unpublished = of.unpublished,
                unpublished_age_ms = of.unpublished_age_ms,
                overdue = of.overdue,
                stuck = of.stuck,
                stuck_age_ms = of.stuck_age_ms,
                held = of.held,
                "messages wait longer than they should: see wh_parked, list_dead_letters and the instances' logs"
            );
        } else if waited {
            tracing::info!("nothing waits longer than it should any more");
        }
        metrics.unpublished_now.set(of.unpublished.into());
        metrics.unpublished_age_ms_now.set(of.unpublished_age_ms);
        metrics.overdue_now.set(of.overdue.into());
        metrics.stuck_now.set(of.stuck.into());
        metrics.stuck_age_ms_now.set(of.stuck_age_ms);
        metrics.held_now.set(of.held.into());
        metrics.dead_letters_trimmed.add(of.dead_letters_trimmed.into());
    }
}

/// When maintenance comes.
pub(super) struct Upkeep {
    pub(super) due: Tick,
    /// When the sentinel looks.
    inspect_at: Tick,
    /// When it comes if there is something to do.
    soon: Tick,
    /// The last position that was seen drawn, and the one that was when there was nothing to do.
    position: Option<i64>,
    idle_at: Option<i64>,
    /// Who was last said to hold a segment.
    blocked_by: Option<i32>,
}

impl Upkeep {
    pub(super) fn from(now: Tick) -> Self {
        let soon = now.plus_ms(MAINTENANCE_MS);
        Self { due: soon, inspect_at: soon, soon, position: None, idle_at: None, blocked_by: None }
    }

    /// A look at the database: has anybody stored since there was nothing to do?
    pub(super) fn seen(&mut self, position: Option<i64>) {
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

impl<R: Runtime, C: Coordination, F: Fn(u16, Control)> Keeper<R, C, F> {
    /// Steps of maintenance, for as long as they get on and half their time limit; notes when to come again.
    pub(super) async fn maintain(&self, incarnation: Incarnation, upkeep: &mut Upkeep) {
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
            upkeep.done(idle, self.runtime.now());
            break;
        }
        if upkeep.inspect_at <= self.runtime.now() {
            // Maintenance comes at times of its own: not a round late for a moment.
            upkeep.inspect_at = self.runtime.now().plus_ms(INSPECT_MS - MAINTENANCE_MS);
            self.inspect(incarnation, limit_ms).await;
        }
    }

    async fn inspect(&self, incarnation: Incarnation, limit_ms: u64) {
        let look = self.coordination.inspect(incarnation, &self.sentinel.rules, limit_ms);
        match self.within_ms(limit_ms + limit_ms / 4, look).await {
            Ok(found) => self.sentinel.found(&found.unwrap_or_default()),
            Err(error @ StoreError::SchemaChanged { .. }) => self.lease.stand_down(&error),
            Err(error) => tracing::warn!(%error, "the sentinel could not look: trying again in a minute"),
        }
    }
}
