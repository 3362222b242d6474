//! A worker's connection: how it is made, when it is believed, and what follows from its loss.
//!
//! Invariants
//! - A connection that is lost is not made again at once, and ever later until one has answered a call: whatever refuses
//!   every call does not make the worker go round.
//! - A connection over which nothing is to be asked is asked whether it lives, so that the server does not take this process
//!   for one that stands still (`store::connect::silence`).
//! - While none answers for `inbox.busy_ms_max`, nothing more is received, and what waits goes back to the broker.

use super::super::door::Door;
use super::Worker;
use crate::time::{Tick, boot_time};

/// Waits between attempts to connect, doubling.
const CONNECT_PAUSE_MS: (u64, u64) = (50, 2_000);

/// How the database is reached.
pub(super) struct Reach {
    /// When to connect next.
    pub(super) connect_at: Tick,
    /// When to say something over the connection, if nothing was said until then.
    pub(super) ping_at: Tick,
    pause_ms: u64,
    /// Since when no call was answered.
    away_since: Option<Tick>,
}

impl Default for Reach {
    fn default() -> Self {
        Self { connect_at: Tick(0), ping_at: Tick(0), pause_ms: CONNECT_PAUSE_MS.0, away_since: None }
    }
}

impl Worker {
    /// Tries to connect. Whether it has.
    pub(super) async fn connect(&mut self) -> bool {
        let rules = &self.parts.rules;
        match Door::open(&self.parts.dial, &rules.schema, &rules.name, self.parts.call_timeout).await {
            Ok((door, _)) => {
                self.door = Some(door);
                true
            }
            Err(error) => {
                tracing::warn!(consumer = %rules.name, %error, "the inbox has no connection to the database");
                self.stay_away();
                false
            }
        }
    }

    /// Says something. Always true: there was a call.
    pub(super) async fn ping(&mut self) -> bool {
        if let Some(door) = &self.door
            && let Err(error) = door.ping().await
        {
            self.lose(&error.to_string());
        }
        true
    }

    /// The connection answers: the next one that is lost is made again soon.
    pub(super) fn prove(&mut self) {
        if self.reach.away_since.take().is_some() {
            self.parts.room.set_closed(false);
        }
        self.reach.pause_ms = CONNECT_PAUSE_MS.0;
    }

    /// The connection is given up: everything in hand begins anew.
    pub(super) fn lose(&mut self, why: &str) {
        let was_there = self.door.take().is_some();
        if was_there {
            self.parts.rules.metrics.reconnects.add(1);
            tracing::warn!(consumer = %self.parts.rules.name, why, "the inbox has lost its connection: what is in hand is looked up anew");
        }
        self.lanes.reset();
        for decision in std::mem::take(&mut self.decisions).into_iter().rev() {
            self.drop_or_put_back(decision.lane_id, decision.slot);
        }
        // Stored ones that waited: claimed again by whoever is first.
        for lane_id in self.lanes.waiting() {
            for slot in self.lanes.clear(lane_id) {
                if self.hand.get(slot).is_some_and(|held| held.is_stored) {
                    self.hand.remove(slot);
                } else {
                    self.lanes.arrive(lane_id, slot);
                }
            }
        }
        self.arrived = self.hand.len();
        self.first_arrival = boot_time();
        self.last_arrival = self.first_arrival;
        self.claim_at = Tick(0);
        if was_there {
            self.stay_away();
        }
    }

    /// Connects later, and gives back what has waited for too long.
    fn stay_away(&mut self) {
        let now = boot_time();
        let since = *self.reach.away_since.get_or_insert(now);
        self.reach.connect_at = now.plus_ms(self.reach.pause_ms);
        self.reach.pause_ms = (self.reach.pause_ms * 2).min(CONNECT_PAUSE_MS.1);
        if now.since_us(since) >= self.parts.busy_ms_max * 1_000 {
            self.parts.room.set_closed(true);
            for lane_id in self.lanes.waiting() {
                let slots = self.lanes.clear(lane_id);
                self.abandon(slots);
            }
        }
    }
}
