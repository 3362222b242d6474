//! The model's operators: dead letters that are given back or discarded, as `retry_dead_letters` and
//! `discard_dead_letters` do it.
//!
//! Invariant: the owners' fences come first, then the lanes' rows, ascending; what was read before is read again.

use uuid::Uuid;

use super::Model;
use super::claim::append_log;
use super::database::{Buried, Kept, Parked, Reference};
use super::locks::Key;
use super::transaction::Tx;
use crate::batch::DestinationId;
use crate::plan::mutants::{self, Mutant};
use crate::seam::store::{GO_ON, LOOK_BESIDE, StoreError};

/// A dead letter: lane, destination, number.
pub type DeadKey = (Uuid, DestinationId, i64);

impl Model {
    /// The dead letters there are.
    #[must_use]
    pub fn dead_letters(&self) -> Vec<DeadKey> {
        self.0.database.borrow().dead.keys().copied().collect()
    }

    /// Whether it was ever a dead letter, and whether it was discarded.
    #[must_use]
    pub fn ever_dead(&self, key: DeadKey) -> (bool, bool) {
        let database = self.0.database.borrow();
        (database.buried.contains_key(&key), database.discarded.contains(&key))
    }

    /// An operator gives dead letters back, or discards them.
    ///
    /// # Errors
    /// A crash of the server, or a deadlock.
    pub async fn decide_dead_letters(&self, keys: &[DeadKey], discard: bool) -> Result<(), StoreError> {
        let tx = Tx::begin_user(self, false);
        tx.pause().await?;
        let partitions: Vec<u32> = {
            let database = tx.database();
            keys.iter().filter_map(|key| database.buried.get(key)).map(|of| of.partition).collect()
        };
        lock_owners(&tx, &partitions).await?;
        let mut lanes: Vec<_> = keys.iter().map(|(lane, destination, _)| (*lane, *destination)).collect();
        lanes.sort_unstable();
        lanes.dedup();
        for (lane, destination) in lanes {
            tx.lock(Key::Lane(lane, destination), true).await?;
        }
        tx.pause().await?;
        let (now, snapshot) = (self.clock(), tx.snapshot());
        let mut references: Vec<Reference> = Vec::new();
        let dead: Vec<(DeadKey, Buried)> = {
            let database = tx.database();
            let still = keys.iter().filter(|key| database.dead.contains_key(*key));
            still.filter_map(|key| Some((*key, database.buried.get(key)?.clone()))).collect()
        };
        for (key, buried) in dead {
            let (lane_id, destination, stream_seq) = key;
            let (is_held, is_held_behind) = {
                let database = tx.database();
                let row = database.parked.get(&(lane_id, destination));
                (row.is_some_and(|of| of.held), row.is_some_and(|of| of.held && of.stream_seq == stream_seq))
            };
            if !discard || is_held_behind {
                let row = Parked { partition: buried.partition, attempts: 0, due: now, held: false, stream_seq };
                if !is_held || is_held_behind {
                    tx.effect(move |database| {
                        database.parked.insert((lane_id, destination), row);
                    });
                }
                let number = if is_held_behind { GO_ON } else { LOOK_BESIDE };
                let partition = buried.partition;
                references.push(Reference { partition, destination, stream_seq: number, version: 0, lane_id });
            }
            let body = buried.body.clone().filter(|_| buried.version == 0);
            let kept = Kept { version: buried.version, body, given_back: true };
            tx.effect(move |database| {
                database.dead.remove(&key);
                if discard {
                    database.discarded.insert(key);
                } else {
                    database.kept.entry(key).or_insert(kept);
                }
            });
        }
        if !references.is_empty() && !mutants::active(Mutant::OwnersNotTold) {
            tx.pause().await?;
            tx.xid();
            let position = tx.database().draw_position();
            let segment = tx.database().current_segment(&snapshot);
            tx.lock(Key::Segment(segment), false).await?;
            append_log(&tx, references, position, segment);
        }
        tx.commit().await
    }
}

/// As `wh_lock_owners`.
async fn lock_owners(tx: &Tx, partitions: &[u32]) -> Result<(), StoreError> {
    let mut locked: Vec<i32> = Vec::new();
    loop {
        let mut owners: Vec<i32> = {
            let database = tx.database();
            partitions.iter().filter_map(|of| database.partitions[*of as usize].owner).collect()
        };
        owners.retain(|owner| !locked.contains(owner));
        owners.sort_unstable();
        owners.dedup();
        if owners.is_empty() {
            return Ok(());
        }
        for owner in owners {
            tx.lock(Key::Fence(owner), true).await?;
            locked.push(owner);
        }
        tx.pause().await?;
    }
}
