//! The model's `settle`: outcomes and the cursor in one transaction under the incarnation's fence.

use super::database::{Buried, Cursor, Dead, Kept, Parked};
use super::flush::ModelStore;
use super::locks::Key;
use super::transaction::Tx;
use crate::ids::Incarnation;
use crate::plan::mutants::{self, Mutant};
use crate::plan::snapshot::Snapshot;
use crate::seam::store::{DeadLetter, Drained, HELD_MS, Park, SettleReply, SettleRequest, Spill, StoreError};

/// A settlement as the server gets it.
struct Request {
    incarnation: i32,
    shard: u16,
    ownership: i64,
    epoch: Option<crate::ids::Epoch>,
    only_cursor: bool,
    cursor: Option<Snapshot>,
    park: Vec<Park>,
    spill: Vec<Spill>,
    drained: Vec<Drained>,
    dead: Vec<DeadLetter>,
    unpark: Vec<(uuid::Uuid, crate::batch::DestinationId, u32)>,
}

impl Request {
    fn partitions(&self) -> impl Iterator<Item = u32> {
        let park = self.park.iter().map(|of| of.partition);
        let spill = self.spill.iter().map(|of| of.partition);
        let drained = self.drained.iter().map(|of| of.partition);
        let dead = self.dead.iter().map(|of| of.partition);
        park.chain(spill).chain(drained).chain(dead).chain(self.unpark.iter().map(|of| of.2))
    }
}

impl ModelStore {
    pub(super) async fn settle_call(
        &self,
        incarnation: Incarnation,
        request: &SettleRequest,
    ) -> Result<SettleReply, StoreError> {
        let request = Request {
            incarnation: incarnation.number,
            shard: request.shard,
            ownership: request.ownership,
            epoch: request.epoch,
            only_cursor: request.only_cursor(),
            cursor: request.cursor.clone(),
            park: request.park.clone(),
            spill: request.spill.clone(),
            drained: request.drained.clone(),
            dead: request.dead.clone(),
            unpark: request.unpark.clone(),
        };
        self.model.call(|tx| settle(tx, request)).await
    }
}

async fn settle(tx: Tx, request: Request) -> Result<SettleReply, StoreError> {
    if !mutants::active(Mutant::NoFenceLock) {
        tx.lock(Key::Fence(request.incarnation), false).await?;
    }
    tx.pause().await?;
    let epoch = tx.model.epoch();
    if request.epoch.is_some_and(|of| of != epoch) && !mutants::active(Mutant::CursorKeptOverCrash) {
        return Ok(SettleReply::Settled { epoch, unparked: Vec::new() });
    }
    {
        let database = tx.database();
        let alive = database.instances.get(&request.incarnation).is_some_and(|of| of.alive);
        let owns = |partition: u32| database.partitions[partition as usize].owner == Some(request.incarnation);
        if !alive || !request.partitions().all(owns) {
            return Ok(SettleReply::Fenced);
        }
    }
    if !request.only_cursor {
        // Stands for the locks of the rows that are written: two settlements of a shard meet there.
        tx.lock(Key::Row(request.incarnation, request.shard), true).await?;
    }
    let mut lanes: Vec<_> = request.unpark.iter().map(|(lane, destination, _)| (*lane, *destination)).collect();
    lanes.sort_unstable();
    for (lane, destination) in lanes {
        tx.lock(Key::Lane(lane, destination), true).await?;
    }
    tx.pause().await?;
    let unparked = write_outcomes(&tx, &request)?;
    tx.model.0.runtime.trace(|| {
        let lane = |of: uuid::Uuid| of.as_u128() as u32;
        format!(
            "settle: {}/{} cursor {:?} park {:x?} spill {:x?} drained {:x?} dead {:x?} unpark {:x?} {unparked:?}",
            request.incarnation,
            request.shard,
            request.cursor.as_ref().map(ToString::to_string),
            request.park.iter().map(|of| (lane(of.lane_id), of.destination.index(), of.stream_seq)).collect::<Vec<_>>(),
            request
                .spill
                .iter()
                .map(|of| (lane(of.lane_id), of.destination.index(), of.stream_seq))
                .collect::<Vec<_>>(),
            request
                .drained
                .iter()
                .map(|of| (lane(of.lane_id), of.destination.index(), of.stream_seq))
                .collect::<Vec<_>>(),
            request.dead.iter().map(|of| (lane(of.lane_id), of.destination.index(), of.stream_seq)).collect::<Vec<_>>(),
            request.unpark.iter().map(|of| (lane(of.0), of.1.index())).collect::<Vec<_>>(),
        )
    });
    tx.pause().await?;
    let mut alone = None;
    if let Some(resolved) = request.cursor {
        let shard = (request.incarnation, request.shard);
        let number = {
            let mut database = tx.database();
            database.next_cursor += 1;
            database.next_cursor
        };
        let cursor = Cursor { number, ownership: request.ownership, resolved };
        tx.effect(move |database| database.cursors.entry(shard).or_default().push(cursor));
        alone = request.only_cursor.then_some((shard, number));
    }
    tx.commit_as(alone).await?;
    Ok(SettleReply::Settled { epoch, unparked })
}

/// Everything but the cursor. What `unpark` finds includes what was written before it here.
fn write_outcomes(tx: &Tx, request: &Request) -> Result<Vec<bool>, StoreError> {
    let now = tx.model.clock();
    let snapshot = tx.snapshot();
    let mut kept: Vec<_> = tx.database().kept.keys().copied().collect();
    let mut parked: Vec<_> = tx.database().parked.keys().copied().collect();
    for of in &request.spill {
        let key = (of.lane_id, of.destination, of.stream_seq);
        // Buried before the last cursor, and read again since: an operator decides about it.
        if kept.contains(&key) || tx.database().dead.contains_key(&key) {
            continue;
        }
        let body = tx.database().body_of(of.lane_id, of.stream_seq, of.version, &snapshot);
        if body.is_none() {
            let text = format!("{} number {} is not stored any more", of.lane_id, of.stream_seq);
            tx.model.0.runtime.fail(text);
        }
        let body = body.filter(|_| of.version == 0);
        let version = of.version;
        tx.effect(move |database| {
            database.kept.insert(key, Kept { version, body, given_back: false });
        });
        kept.push(key);
    }
    for of in &request.park {
        let key = (of.lane_id, of.destination);
        let due = now.plus_ms(of.due_in_ms.max(0) as u64);
        let (held, stream_seq) = (of.due_in_ms >= HELD_MS, of.stream_seq);
        let row = Parked { partition: of.partition, attempts: of.attempts, due, held, stream_seq };
        tx.effect(move |database| {
            database.parked.insert(key, row);
        });
        parked.push(key);
    }
    for of in &request.spill {
        // A kept reference never stands without its lane's row, or the next owner would not find it.
        let key = (of.lane_id, of.destination);
        let row = Parked { partition: of.partition, attempts: 0, due: now, held: false, stream_seq: of.stream_seq };
        tx.effect(move |database| {
            database.parked.entry(key).or_insert(row);
        });
        parked.push(key);
    }
    for of in &request.drained {
        let key = (of.lane_id, of.destination, of.stream_seq);
        tx.effect(move |database| {
            database.kept.remove(&key);
        });
        kept.retain(|other| *other != key);
    }
    for of in &request.dead {
        let key = (of.lane_id, of.destination, of.stream_seq);
        let dead = Dead { reason: of.reason, attempts: of.attempts };
        let body = {
            let database = tx.database();
            let kept = database.kept.get(&key).and_then(|kept| kept.body.clone());
            kept.or_else(|| database.body_of(of.lane_id, of.stream_seq, of.version, &snapshot))
        };
        let buried = Buried { partition: of.partition, version: of.version, body };
        tx.effect(move |database| {
            database.dead.entry(key).or_insert(dead);
            database.buried.entry(key).or_insert(buried);
            database.kept.remove(&key);
        });
        kept.retain(|other| *other != key);
    }
    let mut unparked = Vec::new();
    for (lane_id, destination, _) in &request.unpark {
        let key = (*lane_id, *destination);
        if !kept.iter().any(|of| (of.0, of.1) == key) {
            parked.retain(|other| *other != key);
            tx.effect(move |database| {
                database.parked.remove(&key);
            });
        }
        unparked.push(!parked.contains(&key));
    }
    Ok(unparked)
}
