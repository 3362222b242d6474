//! The model's `find_flush` and `find_duplicates`: what became of a flush, and why it could not be.
//!
//! Invariant: a flush that is not found never comes: that is written before it is answered.

use std::collections::BTreeMap;

use uuid::Uuid;

use super::database::{Database, Log};
use super::locks::Key;
use super::transaction::Tx;
use crate::ids::lane_of_message;
use crate::plan::mutants::{self, Mutant};
use crate::seam::store::{LastNumbers, NUMBERS_UNKNOWN, Origin, StoreError, Stored};

/// A flush whose log rows are truncated: its numbers by its events, if it had nothing else of its streams.
fn find_truncated(
    database: &Database,
    origin: Origin,
    streams: &[(Uuid, u32)],
    epoch: crate::ids::Epoch,
) -> Result<Option<Stored>, StoreError> {
    let of = database.truncated.get(&(origin.incarnation.number, origin.shard));
    let Some(of) = of.filter(|of| of.flush_number == origin.flush_number) else { return Ok(None) };
    let mut looked_up = Vec::with_capacity(streams.len());
    for (stream, rows) in streams {
        let own = database.events.range((*stream, 0)..=(*stream, i64::MAX)).filter(|(_, row)| row.xid == of.xid);
        let numbers: Vec<(i64, i64)> = own.map(|((_, version), row)| (row.stream_seq, *version)).collect();
        match numbers.first() {
            Some((seq, version)) if numbers.len() == *rows as usize => {
                looked_up.push(LastNumbers { seq: seq - 1, version: version - 1 });
            }
            _ => {
                let text = "the flush is stored, its numbers are truncated".into();
                return Err(StoreError::Refused { sqlstate: NUMBERS_UNKNOWN.into(), text });
            }
        }
    }
    let (xid, position, owned) = (of.xid, of.position, of.owned);
    Ok(Some(Stored { xid, epoch, position, owned, foreign: true, looked_up: Some(looked_up) }))
}

pub(super) async fn find(
    tx: Tx,
    origin: Origin,
    streams: Vec<(Uuid, u32)>,
    since: u64,
) -> Result<Option<Stored>, StoreError> {
    let (number, shard) = (origin.incarnation.number, origin.shard);
    if !mutants::active(Mutant::LookUpWithoutLocks) {
        tx.lock(Key::Flush(number, shard), true).await?;
    }
    tx.pause().await?;
    let epoch = tx.model.epoch();
    let snapshot = tx.snapshot();
    let rows: Vec<Log> = {
        let database = tx.database();
        let of_flush = |log: &&Log| log.flush == Some((number, shard, origin.flush_number));
        let mut rows: Vec<Log> = database
            .segments
            .iter()
            .flat_map(|segment| &segment.log)
            .filter(of_flush)
            .filter(|log| log.xid >= since && snapshot.contains(log.xid))
            .cloned()
            .collect();
        rows.sort_by_key(|log| log.position);
        rows
    };
    let Some(first) = rows.first() else {
        let truncated = find_truncated(&tx.database(), origin, &streams, epoch)?;
        if truncated.is_some() {
            return Ok(truncated);
        }
        if !tx.database().instances.get(&number).is_some_and(|of| of.alive) {
            // Its successors may have published what it stored, and a rotation may have truncated it.
            let text = "whether the flush was stored cannot be told any more".into();
            return Err(StoreError::Refused { sqlstate: "CL005".into(), text });
        }
        // Its call may arrive yet.
        tx.xid();
        tx.wrote();
        tx.effect(move |database| {
            let newest = database.given_up.entry((number, shard)).or_default();
            *newest = origin.flush_number.max(*newest);
        });
        tx.commit().await?;
        return Ok(None);
    };
    let before: BTreeMap<Uuid, LastNumbers> = first.before.iter().copied().collect();
    let looked_up = streams
        .iter()
        .map(|(stream, _)| before.get(stream).copied().unwrap_or(LastNumbers { seq: 0, version: 0 }))
        .collect();
    Ok(Some(Stored {
        xid: first.xid,
        epoch,
        position: first.position,
        owned: rows.iter().all(|log| log.owned),
        // Nobody looked whether another had stored before it.
        foreign: true,
        looked_up: Some(looked_up),
    }))
}

pub(super) async fn find_duplicates(tx: Tx, wanted: Vec<Uuid>) -> Result<Vec<Uuid>, StoreError> {
    tx.pause().await?;
    let snapshot = tx.snapshot();
    let database = tx.database();
    let is_stored = |id: &Uuid| {
        let mut segments = database.segments.iter();
        segments.any(|of| of.outbox.get(&(lane_of_message(*id), 1)).is_some_and(|row| snapshot.contains(row.xid)))
    };
    Ok(wanted.into_iter().filter(is_stored).collect())
}
