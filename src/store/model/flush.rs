//! The model's `store_shard_messages`, and the shards' door to the model.
//!
//! Invariants
//! - Locks before reads, reads in later statements: a transaction that was waited for is seen.
//! - A flush is busy without having written anything, or it is whole.

use std::collections::BTreeSet;
use std::rc::Rc;

use uuid::Uuid;

use super::Model;
use super::database::{Body, Committed, Database, Event, Flush, Log, Outbox, Reference, Scheduled};
use super::find::{find, find_duplicates};
use super::locks::Key;
use super::transaction::Tx;
use crate::batch::{DestinationId, Rows};
use crate::limits::STREAM_LOCKS_MAX;
use crate::plan::mutants::{self, Mutant};
use crate::plan::snapshot::Snapshot;
use crate::seam::store::{
    ClaimReply, ClaimRequest, LastNumbers, LoadReply, NO_STREAM, Origin, SettleReply, SettleRequest, Store, StoreError,
    StoreReply, StoreRequest, Stored,
};
use crate::time::Tick;

/// A shard's door to the model.
pub struct ModelStore {
    pub(super) model: Model,
}

/// A stream of a flush.
#[derive(Clone, Copy)]
struct Stream {
    id: Uuid,
    partition: u32,
    known: bool,
    assumed: LastNumbers,
}

/// A flush as the server gets it: nothing of the client's memory is held.
struct Request {
    origin: Origin,
    ownership: i64,
    read: Snapshot,
    epoch: Option<crate::ids::Epoch>,
    rows: Vec<Body>,
    row_stream: Vec<u32>,
    streams: Vec<Stream>,
    partitions: Vec<u32>,
    held: Vec<u32>,
    patient: Vec<usize>,
    patience_ms: u64,
}

impl Request {
    fn of(request: &StoreRequest<'_>) -> Self {
        let mut rows = Vec::new();
        for batch in request.batches {
            rows.extend((0..batch.len()).map(|row| single(batch, row)));
        }
        let streams = (0..request.stream_id.len())
            .map(|at| Stream {
                id: request.stream_id[at],
                partition: request.stream_partition[at],
                known: request.stream_known[at],
                assumed: LastNumbers { seq: request.stream_last_seq[at], version: request.stream_last_version[at] },
            })
            .collect();
        Self {
            origin: request.origin,
            ownership: request.ownership,
            read: request.read.clone(),
            epoch: request.epoch,
            rows,
            row_stream: request.row_stream.to_vec(),
            streams,
            partitions: request.partitions.to_vec(),
            held: request.held.to_vec(),
            patient: request.patient.iter().map(|at| *at as usize).collect(),
            patience_ms: request.patience_ms,
        }
    }
}

/// One row as a batch of its own.
pub(super) fn single(from: &Rows, row: usize) -> Body {
    let mut body = Rows::default();
    body.push_copy(from, row);
    body.end_unit();
    Rc::new(body)
}

/// The row with its numbers.
pub(super) fn numbered(body: &Body, stream_seq: i64, version: i64) -> Body {
    let mut rows = Rows::default();
    rows.push_copy(body, 0);
    rows.stream_seq[0] = stream_seq;
    rows.version[0] = version;
    rows.end_unit();
    Rc::new(rows)
}

/// 32 bits of a stream's id.
pub(super) fn stream_key(id: Uuid) -> Key {
    Key::Stream((id.as_u128() ^ (id.as_u128() >> 64)) as u32)
}

impl ModelStore {
    pub(super) fn new(model: Model) -> Self {
        Self { model }
    }
}

impl Store for ModelStore {
    async fn store_shard_messages(&self, request: &StoreRequest<'_>) -> Result<StoreReply, StoreError> {
        let request = Request::of(request);
        self.model.call(|tx| store(tx, request)).await
    }

    async fn find_flush(
        &self,
        origin: Origin,
        stream_id: &[Uuid],
        stream_rows: &[u32],
        since: u64,
    ) -> Result<Option<Stored>, StoreError> {
        let streams = stream_id.iter().copied().zip(stream_rows.iter().copied()).collect();
        self.model.call(move |tx| find(tx, origin, streams, since)).await
    }

    async fn find_duplicates(&self, message_id: &[Uuid]) -> Result<Vec<Uuid>, StoreError> {
        let wanted = message_id.to_vec();
        self.model.call(move |tx| find_duplicates(tx, wanted)).await
    }

    async fn settle(
        &self,
        incarnation: crate::ids::Incarnation,
        request: &SettleRequest,
    ) -> Result<SettleReply, StoreError> {
        self.settle_call(incarnation, request).await
    }

    async fn claim_work(&self, request: &ClaimRequest<'_>) -> Result<ClaimReply, StoreError> {
        self.claim_call(request).await
    }

    async fn claim_parked(
        &self,
        lane_id: Uuid,
        destination: DestinationId,
        _partition: u32,
        rows_max: usize,
    ) -> Result<Rows, StoreError> {
        self.claim_parked_call(lane_id, destination, rows_max).await
    }

    async fn release_scheduled(
        &self,
        _incarnation: crate::ids::Incarnation,
        partitions: &[u32],
        rows_max: usize,
    ) -> Result<usize, StoreError> {
        self.release_scheduled_call(partitions, rows_max).await
    }

    async fn keep_resolved(
        &self,
        incarnation: crate::ids::Incarnation,
        kept: &crate::seam::store::Release,
    ) -> Result<(), StoreError> {
        self.keep_call(incarnation, kept).await
    }

    async fn load(&self, incarnation: crate::ids::Incarnation, partitions: &[u32]) -> Result<LoadReply, StoreError> {
        self.load_call(incarnation, partitions).await
    }
}

/// Waits for the locks of streams that others leave no gap at, as callers do and in their order.
async fn queue_for_streams(tx: &Tx, request: &Request) -> Result<(), StoreError> {
    let mut streams: Vec<&Stream> = request.patient.iter().map(|at| &request.streams[*at]).collect();
    streams.sort_by_key(|stream| stream_key(stream.id));
    let partitions: BTreeSet<u32> = streams.iter().map(|stream| stream.partition).collect();
    let partitions = partitions.into_iter().map(|partition| (Key::Partition(partition), false));
    for (key, exclusive) in partitions.chain(streams.iter().map(|stream| (stream_key(stream.id), true))) {
        if !tx.lock_within(key, exclusive, request.patience_ms).await? {
            break;
        }
    }
    Ok(())
}

/// Takes what can be taken at once; answers the streams that somebody else works on.
async fn lock_what_is_free(tx: &Tx, request: &Request) -> Result<Vec<Uuid>, StoreError> {
    let contested: Vec<u32> =
        request.partitions.iter().copied().filter(|of| !tx.try_lock(Key::Partition(*of), true)).collect();
    if contested.is_empty() {
        return Ok(Vec::new());
    }
    tx.pause().await?;
    let refused: Vec<u32> = contested.iter().copied().filter(|of| !tx.try_lock(Key::Partition(*of), false)).collect();
    let mut streams: Vec<&Stream> =
        request.streams.iter().filter(|stream| contested.contains(&stream.partition)).collect();
    streams.sort_by_key(|stream| stream_key(stream.id));
    let mut busy = Vec::new();
    for (turn, stream) in streams.into_iter().enumerate() {
        let free =
            !refused.contains(&stream.partition) && turn < STREAM_LOCKS_MAX && tx.try_lock(stream_key(stream.id), true);
        if !free {
            busy.push(stream.id);
        }
    }
    Ok(busy)
}

/// Whether there is a log row that was not written by an owner and is outside `read`.
fn is_foreign(database: &Database, read: &Snapshot, now: &Snapshot) -> bool {
    database
        .segments
        .iter()
        .flat_map(|segment| &segment.log)
        .any(|log| !log.owned && now.contains(log.xid) && !read.contains(log.xid))
}

async fn store(tx: Tx, request: Request) -> Result<StoreReply, StoreError> {
    let number = request.origin.incarnation.number;
    if !mutants::active(Mutant::NoFenceLock) {
        tx.lock(Key::Fence(number), false).await?;
    }
    tx.lock(Key::Flush(number, request.origin.shard), true).await?;
    tx.pause().await?;
    queue_for_streams(&tx, &request).await?;
    let busy = lock_what_is_free(&tx, &request).await?;
    if !busy.is_empty() {
        return Ok(StoreReply::Busy { stream_id: busy });
    }
    tx.pause().await?;
    let given_up = tx.database().given_up.get(&(number, request.origin.shard)).copied();
    if given_up.is_some_and(|flush| flush >= request.origin.flush_number)
        && !mutants::active(Mutant::LookUpWithoutLocks)
    {
        return Err(StoreError::Refused { sqlstate: "CL004".into(), text: "looked up, and given up".into() });
    }
    let epoch = tx.model.epoch();
    let is_other_life = request.epoch.is_some_and(|of| of != epoch) && !mutants::active(Mutant::CursorKeptOverCrash);
    let (owned, segment, foreign) = {
        let snapshot = tx.snapshot();
        let database = tx.database();
        let instance = database.instances.get(&number);
        (
            instance.is_some_and(|of| of.alive && of.ownership == request.ownership),
            database.current_segment(&snapshot),
            is_foreign(&database, &request.read, &snapshot) || is_other_life,
        )
    };
    tx.pause().await?;
    let look_up = !owned || foreign || request.streams.iter().any(|stream| !stream.known);
    let before: Vec<LastNumbers> = {
        let snapshot = tx.snapshot();
        let database = tx.database();
        let numbers = |stream: &Stream| match look_up {
            true => database.last_numbers(stream.id, &snapshot, None),
            false => stream.assumed,
        };
        request.streams.iter().map(numbers).collect()
    };
    if look_up && !mutants::active(Mutant::ExpectationUnchecked) {
        let found = conflicts(&request, &before);
        if !found.is_empty() {
            return Ok(StoreReply::Conflict { found });
        }
    }
    tx.pause().await?;
    let xid = tx.xid();
    let position = tx.database().draw_position();
    let flush = (number, request.origin.shard, request.origin.flush_number);
    tx.model.0.runtime.trace(|| {
        format!("flush: {flush:?} xid {xid} owned {owned} foreign {foreign} looked up {look_up} read {}", request.read)
    });
    let written = write_rows(&tx, &request, &before, segment).await?;
    write_log(&tx, &request, written, &before, position, segment, owned, flush);
    tx.pause().await?;
    tx.commit().await?;
    let looked_up = look_up.then_some(before);
    Ok(StoreReply::Stored(Stored { xid, epoch, position, owned, foreign, looked_up }))
}

/// Streams that have another version than is expected of them.
fn conflicts(request: &Request, before: &[LastNumbers]) -> Vec<(Uuid, i64)> {
    let is_expected = |at: usize| {
        let mut rows = request.rows.iter().zip(&request.row_stream);
        rows.any(|(row, of)| *of == at as u32 && row.has_expectations())
    };
    let streams = request.streams.iter().zip(before).enumerate();
    let wrong = streams.filter(|(at, (stream, before))| stream.assumed.version != before.version && is_expected(*at));
    wrong.map(|(_, (stream, before))| (stream.id, before.version)).collect()
}

/// Inserts the rows; answers the references of each that was put into a table.
async fn write_rows(
    tx: &Tx,
    request: &Request,
    before: &[LastNumbers],
    segment: usize,
) -> Result<Vec<Reference>, StoreError> {
    let xid = tx.xid();
    let mut references = Vec::new();
    tx.lock(Key::Segment(segment), false).await?;
    for (index, body) in request.rows.iter().enumerate() {
        if body.is_scheduled(0) {
            let (body, due) = (body.clone(), Tick(body.due_unix_us[0].max(0) as u64));
            tx.effect(move |database| database.schedule(body, due));
            continue;
        }
        let (mut seq, mut version) = (body.stream_seq[0], body.version[0]);
        let at = request.row_stream[index];
        if at != NO_STREAM {
            let assumed = request.streams[at as usize].assumed;
            seq += before[at as usize].seq - assumed.seq;
            if version > 0 {
                version += before[at as usize].version - assumed.version;
            }
        }
        let body = numbered(body, seq, version);
        let destinations = body.reference_destination.clone();
        if insert(tx, &body, xid, segment).await? {
            references.extend(destinations.into_iter().map(|destination| Reference {
                partition: body.partition[0],
                destination,
                stream_seq: seq,
                version,
                lane_id: body.lane_id[0],
            }));
        }
    }
    Ok(references)
}

/// Puts one numbered message into its table. `false`: its number was taken, and it was passed over (mutant).
pub(super) async fn insert(tx: &Tx, body: &Body, xid: u64, segment: usize) -> Result<bool, StoreError> {
    let (lane_id, stream_seq, version) = (body.lane_id[0], body.stream_seq[0], body.version[0]);
    tx.model.0.runtime.trace(|| {
        let lane = lane_id.as_u128() as u32;
        format!(
            "store: {lane:x} {stream_seq}/{version} xid {xid} segment {segment} {}",
            body.message_id[0].as_u128() as u16
        )
    });
    let free = if version > 0 {
        let key = (lane_id, version);
        tx.free_number(move |database| database.events.get(&key).map(|row| row.xid)).await
    } else {
        let key = (lane_id, stream_seq);
        tx.free_number(move |database| database.segments[segment].outbox.get(&key).map(|row| row.xid)).await
    };
    let free = free.map_err(|error| match (error, body.stream_id(0)) {
        (StoreError::NumberTaken, None) => StoreError::DuplicateMessage { message_id: body.message_id[0] },
        (error, _) => error,
    })?;
    tx.wrote();
    tx.will_commit(Committed {
        message_id: body.message_id[0],
        lane_id,
        stream_seq,
        version,
        destinations: body.reference_destination.clone(),
    });
    if !free {
        return Ok(false);
    }
    let mut database = tx.database();
    let body = body.clone();
    if version > 0 {
        database.events.insert((lane_id, version), Event { xid, stream_seq, body });
    } else {
        database.segments[segment].outbox.insert((lane_id, stream_seq), Outbox { xid, body });
    }
    Ok(true)
}

/// The log rows of a flush: the references of partitions held, and those of others. At least one.
#[allow(clippy::too_many_arguments)] // One call, one caller: a struct of these would be read once.
fn write_log(
    tx: &Tx,
    request: &Request,
    references: Vec<Reference>,
    before: &[LastNumbers],
    position: i64,
    segment: usize,
    owned: bool,
    flush: Flush,
) {
    let before: Vec<_> = request.streams.iter().map(|stream| stream.id).zip(before.iter().copied()).collect();
    let before = Rc::new(before);
    let (held, others): (Vec<_>, Vec<_>) =
        references.into_iter().partition(|of| request.held.binary_search(&of.partition).is_ok());
    let size = tx.model.0.settings.get().log_references_max;
    let mut chunks: Vec<(bool, Vec<Reference>)> = Vec::new();
    chunks.extend(held.chunks(size).map(|chunk| (owned, chunk.to_vec())));
    chunks.extend(others.chunks(size).map(|chunk| (false, chunk.to_vec())));
    let is_other = |body: &Body| request.held.binary_search(&body.partition[0]).is_err();
    if others.is_empty() && request.rows.iter().any(is_other) {
        // Without references as well: the streams' owner has to learn that its numbers are old.
        chunks.push((false, Vec::new()));
    }
    if chunks.is_empty() {
        chunks.push((owned, Vec::new()));
    }
    let xid = tx.xid();
    tx.wrote();
    let mut database = tx.database();
    for (index, (owned, references)) in chunks.into_iter().enumerate() {
        let position = position + index as i64;
        let log = Log { xid, position, flush: Some(flush), owned, references, before: before.clone() };
        database.segments[segment].log.push(log);
    }
}

impl Database {
    pub(super) fn schedule(&mut self, body: Body, due: Tick) {
        self.scheduled.insert(self.next_scheduled, Scheduled { body, due });
        self.next_scheduled += 1;
    }
}
