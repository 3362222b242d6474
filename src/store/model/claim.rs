//! The model's reading side: `claim_work`, `claim_parked`, `load`, `release_scheduled`.
//!
//! Invariants
//! - A page is what a snapshot sees and the reader has not read, by position.
//! - A reference whose message is gone is a failure of the run: nothing may be truncated before it is resolved.

use std::rc::Rc;

use uuid::Uuid;

use super::database::{Body, Database, Log, Reference};
use super::flush::{ModelStore, insert, numbered, stream_key};
use super::locks::Key;
use super::transaction::Tx;
use crate::batch::{DestinationId, ROW_REPLAYED, Rows};
use crate::ids::Incarnation;
use crate::plan::mutants::{self, Mutant};
use crate::plan::snapshot::Snapshot;
use crate::seam::store::{
    ClaimReply, ClaimRequest, ClaimedLog, LOOK_BESIDE, LoadReply, ParkedLane, ReadPosition, Release, StoreError,
};

struct Request {
    incarnation: Incarnation,
    shard: u16,
    position: ReadPosition,
    partitions: Vec<u32>,
    flushes: Vec<i64>,
    rows_max: usize,
    streams_max: usize,
}

/// Appends a message with one of its destinations only.
fn push_reference(rows: &mut Rows, body: &Body, destination: DestinationId) {
    let references = rows.reference_row.len();
    rows.push_copy(body, 0);
    rows.reference_row.truncate(references);
    rows.reference_destination.truncate(references);
    rows.reference_row.push(rows.len() as u32 - 1);
    rows.reference_destination.push(destination);
    rows.end_unit();
}

/// Milliseconds from `now` until `due`, rounded up.
fn in_ms(due: crate::time::Tick, now: crate::time::Tick) -> i64 {
    (due.0 as i64 - now.0 as i64).div_euclid(1000) + 1
}

impl ModelStore {
    pub(super) async fn claim_call(&self, request: &ClaimRequest<'_>) -> Result<ClaimReply, StoreError> {
        let request = Request {
            incarnation: request.incarnation,
            shard: request.shard,
            position: request.position.clone(),
            partitions: request.partitions.to_vec(),
            flushes: request.flushes_in_memory.to_vec(),
            rows_max: request.rows_max.max(1),
            streams_max: request.streams_max.max(1),
        };
        self.model.call(|tx| claim(tx, request)).await
    }

    pub(super) async fn claim_parked_call(
        &self,
        lane_id: Uuid,
        destination: DestinationId,
        rows_max: usize,
    ) -> Result<Rows, StoreError> {
        self.model
            .call(async move |tx: Tx| {
                tx.pause().await?;
                let snapshot = tx.snapshot();
                let database = tx.database();
                let mut rows = Rows::default();
                tx.model
                    .0
                    .runtime
                    .trace(|| format!("claim parked: {:x}>{}", lane_id.as_u128() as u32, destination.name()));
                let kept = database.kept.range((lane_id, destination, 0)..=(lane_id, destination, i64::MAX));
                for ((_, _, stream_seq), kept) in kept.take(rows_max) {
                    let body = match &kept.body {
                        Some(body) => Some(body.clone()),
                        None => database.body_of(lane_id, *stream_seq, kept.version, &snapshot),
                    };
                    match body {
                        Some(body) => {
                            push_reference(&mut rows, &body, destination);
                            if let Some(flags) = rows.flags.last_mut().filter(|_| kept.given_back) {
                                *flags |= ROW_REPLAYED;
                            }
                        }
                        None => tx.model.0.runtime.fail(format!("kept reference {lane_id} {stream_seq}: no message")),
                    }
                }
                Ok(rows)
            })
            .await
    }

    pub(super) async fn keep_call(&self, incarnation: Incarnation, kept: &Release) -> Result<(), StoreError> {
        let (number, kept) = (incarnation.number, kept.clone());
        self.model
            .call(async move |tx: Tx| {
                tx.lock(Key::Fence(number), false).await?;
                tx.lock(Key::Partitions, true).await?;
                tx.pause().await?;
                let text = format!("keep: {number} {:?} {}", kept.epoch, kept.partitions.len());
                tx.model.0.runtime.trace(|| text);
                if kept.epoch != Some(tx.model.epoch()) {
                    return Ok(());
                }
                tx.effect(move |database| {
                    for (partition, resolved) in kept.partitions {
                        let of = &mut database.partitions[partition as usize];
                        if let Some(resolved) = resolved.filter(|_| of.owner == Some(number)) {
                            of.base = of.base.union(&resolved);
                        }
                    }
                });
                tx.commit().await.map(|_| ())
            })
            .await
    }

    pub(super) async fn load_call(
        &self,
        incarnation: Incarnation,
        partitions: &[u32],
    ) -> Result<LoadReply, StoreError> {
        let partitions = partitions.to_vec();
        self.model
            .call(async move |tx: Tx| {
                tx.pause().await?;
                let epoch = tx.model.epoch();
                let now = tx.model.clock();
                let database = tx.database();
                if partitions.iter().any(|of| database.partitions[*of as usize].owner != Some(incarnation.number)) {
                    let text = "a partition is not owned any more".into();
                    return Err(StoreError::Transient { sqlstate: "55000".into(), text });
                }
                let resolved = partitions.iter().map(|partition| database.resolved(*partition)).collect();
                let parked = database
                    .parked
                    .iter()
                    .filter(|(_, parked)| partitions.contains(&parked.partition))
                    .map(|((lane_id, destination), parked)| ParkedLane {
                        lane_id: *lane_id,
                        destination: *destination,
                        partition: parked.partition,
                        attempts: parked.attempts,
                        due_in_ms: in_ms(parked.due, now),
                    })
                    .collect();
                let read_at = database.snapshot();
                Ok(LoadReply { epoch, resolved, parked, read_at })
            })
            .await
    }

    pub(super) async fn release_scheduled_call(
        &self,
        partitions: &[u32],
        rows_max: usize,
    ) -> Result<usize, StoreError> {
        let partitions = partitions.to_vec();
        self.model.call(move |tx| release(tx, partitions, rows_max)).await
    }
}

async fn claim(tx: Tx, request: Request) -> Result<ClaimReply, StoreError> {
    tx.pause().await?;
    let epoch = tx.model.epoch();
    let now = tx.model.clock();
    let database = tx.database();
    let read = &request.position.read;
    let (page, after) = match &request.position.page {
        Some((page, after)) => (page.clone(), *after),
        None => (database.snapshot(), 0),
    };
    let mine = |log: &Log| log.flush.filter(|of| log.owned && of.0 == request.incarnation.number);
    let mut logs: Vec<&Log> = database
        .segments
        .iter()
        .flat_map(|segment| &segment.log)
        .filter(|log| page.contains(log.xid) && !read.contains(log.xid) && log.position > after)
        .filter(|log| mine(log).is_none_or(|(_, shard, _)| shard == request.shard))
        .collect();
    logs.sort_by_key(|log| log.position);
    let unordered = mutants::active(Mutant::OrderByXid);
    if unordered {
        logs.sort_by_key(|log| (log.xid, log.position));
    }
    let mut reply = ClaimReply {
        epoch,
        position: ReadPosition { read: page.clone(), ..ReadPosition::default() },
        more: false,
        logs: Vec::new(),
        rows: Rows::default(),
        scheduled_in_ms: None,
    };
    let mut passed = 0;
    let mut streams = std::collections::BTreeSet::new();
    for (index, log) in logs.iter().enumerate() {
        if (passed >= request.rows_max || streams.len() >= request.streams_max) && !unordered {
            let end = logs[index - 1].position;
            reply.position = ReadPosition { read: read.clone(), page: Some((page, end)), ..ReadPosition::default() };
            reply.more = true;
            break;
        }
        let own_flush = mine(log).map(|(_, _, flush)| flush).filter(|flush| request.flushes.contains(flush));
        let mut reference_count = 0;
        if own_flush.is_none() {
            passed += log.references.len();
            for of in log.references.iter().filter(|of| request.partitions.contains(&of.partition)) {
                streams.insert(of.lane_id);
                if of.stream_seq <= LOOK_BESIDE {
                    let row = reply.rows.push_missing(of.lane_id, of.partition, 0, of.destination);
                    reply.rows.stream_seq[row] = of.stream_seq;
                    reference_count += 1;
                    continue;
                }
                match database.body_of(of.lane_id, of.stream_seq, of.version, &database.snapshot()) {
                    Some(body) => {
                        push_reference(&mut reply.rows, &body, of.destination);
                        reference_count += 1;
                    }
                    None => {
                        let text = format!("reference {} {} of xid {}: no message", of.lane_id, of.stream_seq, log.xid);
                        tx.model.0.runtime.fail(text);
                    }
                }
            }
        }
        reply.logs.push(ClaimedLog { xid: log.xid, own_flush, owned: log.owned, reference_count });
    }
    tx.model.0.runtime.trace(|| {
        let (number, shard) = (request.incarnation.number, request.shard);
        let logs: Vec<_> = reply.logs.iter().map(|log| (log.xid, log.own_flush, log.reference_count)).collect();
        let rows: Vec<_> = (0..reply.rows.len())
            .map(|row| {
                let lane = reply.rows.lane_id[row].as_u128() as u32;
                format!("{lane:x}>{} {}", reply.rows.reference_destination[row].name(), reply.rows.stream_seq[row])
            })
            .collect();
        format!("claim: {number}/{shard} read {} more {} {logs:?} {rows:?}", reply.position.read, reply.more)
    });
    let mine = database.scheduled.values().filter(|of| request.partitions.contains(&of.body.partition[0]));
    reply.scheduled_in_ms = mine.map(|of| of.due).min().map(|due| if due <= now { 0 } else { in_ms(due, now) });
    Ok(reply)
}

/// Gives due messages their numbers and puts them into the log, as any caller would.
async fn release(tx: Tx, partitions: Vec<u32>, rows_max: usize) -> Result<usize, StoreError> {
    tx.pause().await?;
    let now = tx.model.clock();
    let mut due: Vec<(i64, Body)> = tx
        .database()
        .scheduled
        .iter()
        .filter(|(_, of)| of.due <= now && partitions.contains(&of.body.partition[0]))
        .map(|(id, of)| (*id, of.body.clone()))
        .collect();
    due.truncate(rows_max);
    due.retain(|(id, _)| tx.try_lock(Key::Scheduled(*id), true));
    let mut held: Vec<u32> = due.iter().map(|(_, body)| body.partition[0]).collect();
    held.sort_unstable();
    held.dedup();
    held.retain(|partition| tx.try_lock(Key::Partition(*partition), false));
    due.retain(|(_, body)| held.contains(&body.partition[0]));
    due.retain(|(_, body)| body.stream_id(0).is_none_or(|stream| tx.try_lock(stream_key(stream), true)));
    tx.pause().await?;
    // The lock of a scheduled row does not tell whether somebody has released it before.
    due.retain(|(id, _)| tx.database().scheduled.contains_key(id));
    if due.is_empty() {
        return Ok(0);
    }
    let xid = tx.xid();
    let snapshot = tx.snapshot();
    let (position, segment) = {
        let mut database = tx.database();
        (database.draw_position(), database.current_segment(&snapshot))
    };
    tx.lock(Key::Segment(segment), false).await?;
    let mut references = Vec::new();
    for (id, body) in &due {
        let stream_seq = match body.stream_id(0) {
            Some(stream) => tx.database().last_numbers(stream, &snapshot, Some(xid)).seq + 1,
            None => 1,
        };
        let body = numbered(body, stream_seq, 0);
        insert(&tx, &body, xid, segment).await?;
        references.extend(references_of(&body));
        let id = *id;
        tx.effect(move |database| {
            database.scheduled.remove(&id);
        });
    }
    append_log(&tx, references, position, segment);
    let count = due.len();
    tx.commit().await?;
    Ok(count)
}

/// The references of a numbered message.
pub(super) fn references_of(body: &Body) -> Vec<Reference> {
    let reference = |destination: &DestinationId| Reference {
        partition: body.partition[0],
        destination: *destination,
        stream_seq: body.stream_seq[0],
        version: body.version[0],
        lane_id: body.lane_id[0],
    };
    body.reference_destination.iter().map(reference).collect()
}

/// A log row that no shard's flush wrote.
pub(super) fn append_log(tx: &Tx, references: Vec<Reference>, position: i64, segment: usize) {
    let xid = tx.xid();
    tx.wrote();
    let size = tx.model.0.settings.get().log_references_max;
    let mut chunks: Vec<Vec<Reference>> = references.chunks(size).map(<[Reference]>::to_vec).collect();
    if chunks.is_empty() {
        // At least one row a call: a segment with rows of the outbox is seen to be written to.
        chunks.push(Vec::new());
    }
    let mut database = tx.database();
    for (index, references) in chunks.into_iter().enumerate() {
        let position = position + index as i64;
        let log = Log { xid, position, flush: None, owned: false, references, before: Rc::default() };
        database.segments[segment].log.push(log);
    }
}

impl Database {
    /// All log rows of a segment that a snapshot sees.
    pub(super) fn log_of(&self, segment: usize, snapshot: &Snapshot) -> Vec<&Log> {
        self.segments[segment].log.iter().filter(|log| snapshot.contains(log.xid)).collect()
    }
}
