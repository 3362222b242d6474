//! The lease keeper's maintenance: rotation and trimming, in bounded steps.
//!
//! Invariants
//! - It has a connection and a time limit of its own, below a step: however slow it is, the next renewal is sent in time.
//! - Every keeper comes by; the database lets one at a time do it, and whoever is alive can.
//! - It comes soon while something stands in the log, and once a minute when there was nothing, until a look shows that
//!   somebody has stored.

use super::Control;
use super::tend::Keeper;
use crate::ids::Incarnation;
use crate::seam::runtime::Runtime;
use crate::seam::store::{Coordination, StoreError};
use crate::time::Tick;

/// How often maintenance is done while something stands in the log, and when it has failed.
const MAINTENANCE_MS: u64 = 5_000;
/// How often it is done when there was nothing to do, until a look shows that somebody has stored.
const MAINTENANCE_IDLE_MS: u64 = 60_000;

/// When maintenance comes.
pub(super) struct Upkeep {
    pub(super) due: Tick,
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
        Self { due: soon, soon, position: None, idle_at: None, blocked_by: None }
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
            return upkeep.done(idle, self.runtime.now());
        }
    }
}
