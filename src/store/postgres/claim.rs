//! `claim_work`, `claim_parked`, `release_scheduled`, `load_shard`: what a shard reads.
//!
//! Invariant: a reference whose message is not stored any more is a row that says so, never one without payload.

use std::pin::pin;

use futures_util::TryStreamExt;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Row, RowStream};
use uuid::Uuid;

use super::send::{Connection, Sql, malformed, only, takes};
use crate::batch::{DestinationId, NewRow, ROW_REPLAYED, Rows};
use crate::envelope::Trace;
use crate::ids::{Epoch, Incarnation};
use crate::plan::snapshot::Snapshot;
use crate::seam::store::{
    ClaimReply, ClaimRequest, ClaimedLog, LoadReply, ParkedLane, ReadPosition, ReadRange, Release, StoreError,
};
use crate::store::columns;

pub(super) fn claim_sql(schema: &str) -> Sql {
    let text = format!(
        "select stream_seq, version, span_id, stream_id, message_id, correlation_id, causation_id, trace_id, \
         partition, trace_flags, type_name, content_type, metadata, payload, lane_id, log, destination, \
         epoch, page_xmax, page_listed, page_position, page_floor, page_ceiling, log_xid, log_own_flush, \
         scheduled_in_ms \
         from {schema}.claim_work($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)"
    );
    let takes = takes![
        INT4, INT2, INT8, INT8_ARRAY, INT8, INT8_ARRAY, INT8, INT8, INT8, INT8, INT4_ARRAY, INT8_ARRAY, INT4, INT4
    ];
    Sql { slot: 3, text, takes }
}

pub(super) fn claim_parked_sql(schema: &str) -> Sql {
    let text = format!(
        "select stream_seq, version, span_id, stream_id, message_id, correlation_id, causation_id, trace_id, \
         partition, trace_flags, type_name, content_type, metadata, payload, replayed \
         from {schema}.claim_parked($1, $2, $3)"
    );
    Sql { slot: 4, text, takes: takes![UUID, TEXT, INT4] }
}

pub(super) fn release_scheduled_sql(schema: &str) -> Sql {
    Sql {
        slot: 5,
        text: format!("select {schema}.release_scheduled($1, $2, $3)"),
        takes: takes![INT4, INT4_ARRAY, INT4],
    }
}

pub(super) fn load_sql(schema: &str) -> Sql {
    let text = format!(
        "select partition, base, cursor, lane_id, destination, attempts, due_in_ms, {schema}.wh_epoch_token(), \
         pg_current_snapshot()::text from {schema}.load_shard($1, $2)"
    );
    Sql { slot: 6, text, takes: takes![INT4, INT4_ARRAY] }
}

pub(super) fn keep_sql(schema: &str) -> Sql {
    let text = format!("select {schema}.keep_resolved($1, $2, $3, $4::text[]::pg_snapshot[])");
    Sql { slot: 7, text, takes: takes![INT4, UUID, INT4_ARRAY, TEXT_ARRAY] }
}

/// Columns of `claim_work` behind those of the message.
mod column {
    pub const LANE_ID: usize = 14;
    pub const LOG: usize = 15;
    pub const DESTINATION: usize = 16;
    pub const EPOCH: usize = 17;
    pub const PAGE_XMAX: usize = 18;
    pub const PAGE_LISTED: usize = 19;
    pub const PAGE_POSITION: usize = 20;
    pub const PAGE_FLOOR: usize = 21;
    pub const PAGE_CEILING: usize = 22;
    pub const LOG_XID: usize = 23;
    pub const LOG_OWN_FLUSH: usize = 24;
    pub const SCHEDULED_IN_MS: usize = 25;
}

pub(super) async fn claim_work(
    connection: &Connection,
    sql: &Sql,
    request: &ClaimRequest<'_>,
) -> Result<ClaimReply, StoreError> {
    let ReadPosition { read, page, range } = request.position;
    let shard = request.shard as i16;
    let read_xmax = read.xmax() as i64;
    let read_listed = columns::of_u64(read.listed());
    let page_xmax = page.as_ref().map(|(snapshot, _)| snapshot.xmax() as i64);
    let page_listed = page.as_ref().map(|(snapshot, _)| columns::of_u64(snapshot.listed()));
    let page_position = page.as_ref().map(|(_, position)| *position);
    let partitions = columns::of_u32(request.partitions);
    let flushes = columns::of_i64(request.flushes_in_memory);
    let rows_max = i32::try_from(request.rows_max).unwrap_or(i32::MAX).max(1);
    let streams_max = i32::try_from(request.streams_max).unwrap_or(i32::MAX).max(1);
    let parameters: [&(dyn ToSql + Sync); 14] = [
        &request.incarnation.number,
        &shard,
        &read_xmax,
        &read_listed,
        &page_xmax,
        &page_listed,
        &page_position,
        &range.read_floor,
        &range.page_floor,
        &range.page_ceiling,
        &partitions,
        &flushes,
        &rows_max,
        &streams_max,
    ];
    connection.send(sql, &parameters, async |rows| read_claim(rows, request).await).await
}

async fn read_claim(stream: RowStream, request: &ClaimRequest<'_>) -> Result<ClaimReply, StoreError> {
    let mut stream = pin!(stream);
    let first = stream.try_next().await?.ok_or_else(|| malformed("no first row"))?;
    let mut reply = first_row(&first, request.position)?;
    let mut names = NameCache::default();
    while let Some(row) = stream.try_next().await? {
        let log: i32 = row.try_get(column::LOG)?;
        let log = reply.logs.get_mut(log as usize - 1).ok_or_else(|| malformed("a reference without log row"))?;
        log.reference_count += 1;
        let lane_id = row.try_get(column::LANE_ID)?;
        let name = row.try_get(column::DESTINATION)?;
        match names.get(name) {
            Ok(destination) => {
                push(&mut reply.rows, &row, lane_id, destination)?;
            }
            Err(why) => push_unnamed(&mut reply.rows, &row, lane_id, name, &why)?,
        }
    }
    // Rows without references here are answered as well: where they are not owned, another writer may have stored
    // messages without a destination, and the shard's remembered numbers are old from then on.
    Ok(reply)
}

fn first_row(row: &Row, before: &ReadPosition) -> Result<ClaimReply, StoreError> {
    let xmax: i64 = row.try_get(column::PAGE_XMAX)?;
    let listed: Vec<i64> = row.try_get(column::PAGE_LISTED)?;
    let snapshot = Snapshot::new(xmax as u64, listed.into_iter().map(|xid| xid as u64).collect());
    let page_floor = row.try_get(column::PAGE_FLOOR)?;
    let page_ceiling = row.try_get(column::PAGE_CEILING)?;
    let page_position: Option<i64> = row.try_get(column::PAGE_POSITION)?;
    let xids = row.try_get::<_, Option<Vec<i64>>>(column::LOG_XID)?.unwrap_or_default();
    let own = row.try_get::<_, Option<Vec<Option<i64>>>>(column::LOG_OWN_FLUSH)?.unwrap_or_default();
    let logs = xids
        .into_iter()
        .zip(own)
        .map(|(xid, own)| ClaimedLog {
            xid: xid as u64,
            own_flush: own.filter(|flush| *flush > 0),
            owned: own.is_some(),
            reference_count: 0,
        })
        .collect();
    Ok(ClaimReply {
        epoch: Epoch(row.try_get(column::EPOCH)?),
        more: page_position.is_some(),
        position: match page_position {
            Some(position) => ReadPosition {
                read: before.read.clone(),
                page: Some((snapshot, position)),
                range: ReadRange { read_floor: before.range.read_floor, page_floor, page_ceiling },
            },
            None => ReadPosition {
                read: snapshot,
                page: None,
                range: ReadRange { read_floor: page_floor, ..ReadRange::default() },
            },
        },
        logs,
        rows: Rows::default(),
        scheduled_in_ms: row.try_get(column::SCHEDULED_IN_MS)?,
    })
}

/// Appends one reference as a row of its own. The message's columns come first in both statements.
fn push(rows: &mut Rows, row: &Row, lane_id: Uuid, destination: DestinationId) -> Result<usize, StoreError> {
    let message_id: Option<Uuid> = row.try_get(4)?;
    let stream_seq: i64 = row.try_get(0)?;
    let version: i64 = row.try_get(1)?;
    let partition = row.try_get::<_, i32>(8)? as u32;
    let Some(message_id) = message_id else {
        let index = rows.push_missing(lane_id, partition, version, destination);
        rows.stream_seq[index] = stream_seq;
        rows.version[index] = version;
        return Ok(index);
    };
    let trace = match row.try_get::<_, Option<Uuid>>(7)? {
        Some(trace_id) => Trace {
            trace_id,
            span_id: row.try_get::<_, Option<i64>>(2)?.unwrap_or_default() as u64,
            flags: row.try_get::<_, Option<i16>>(9)?.unwrap_or_default() as u8,
        },
        None => Trace::default(),
    };
    let index = rows.push(
        &NewRow {
            message_id,
            stream_id: row.try_get::<_, Option<Uuid>>(3)?,
            partition,
            is_event: version > 0,
            type_name: row.try_get::<_, Option<&str>>(10)?.unwrap_or_default(),
            content_type: row.try_get::<_, Option<&str>>(11)?.unwrap_or_default(),
            correlation_id: row.try_get::<_, Option<Uuid>>(5)?.unwrap_or_default(),
            causation_id: row.try_get::<_, Option<Uuid>>(6)?.unwrap_or_default(),
            trace,
            metadata: row.try_get::<_, Option<&[u8]>>(12)?.unwrap_or_default(),
            payload: row.try_get::<_, Option<&[u8]>>(13)?.unwrap_or_default(),
            due_unix_us: 0,
        },
        &[destination],
    );
    // As it stands in the log: of a message without stream that version 1 has stored, its id itself.
    rows.lane_id[index] = lane_id;
    rows.stream_seq[index] = stream_seq;
    rows.version[index] = version;
    Ok(index)
}

/// The same for one whose destination has no number here: an outcome of this reference, not of the whole page.
fn push_unnamed(rows: &mut Rows, row: &Row, lane_id: Uuid, name: &str, why: &str) -> Result<(), StoreError> {
    let (stream_seq, version) = (row.try_get(0)?, row.try_get(1)?);
    let index = rows.push_unnamed(lane_id, row.try_get::<_, i32>(8)? as u32, version, name, why);
    rows.stream_seq[index] = stream_seq;
    rows.version[index] = version;
    Ok(())
}

pub(super) async fn claim_parked(
    connection: &Connection,
    sql: &Sql,
    lane_id: Uuid,
    destination: DestinationId,
    rows_max: usize,
) -> Result<Rows, StoreError> {
    let rows_max = i32::try_from(rows_max).unwrap_or(i32::MAX);
    let name = destination.name();
    let parameters: [&(dyn ToSql + Sync); 3] = [&lane_id, &name, &rows_max];
    let read = async |stream: RowStream| {
        let mut stream = pin!(stream);
        let mut rows = Rows::default();
        while let Some(row) = stream.try_next().await? {
            // In a lane of a replay the messages are of another stream than the lane's id says.
            let index = push(&mut rows, &row, row.try_get::<_, Option<Uuid>>(3)?.unwrap_or(lane_id), destination)?;
            if row.try_get(14)? {
                rows.flags[index] |= ROW_REPLAYED;
            }
        }
        Ok(rows)
    };
    connection.send(sql, &parameters, read).await
}

pub(super) async fn release_scheduled(
    connection: &Connection,
    sql: &Sql,
    incarnation: Incarnation,
    partitions: &[u32],
    rows_max: usize,
) -> Result<usize, StoreError> {
    let partitions = columns::of_u32(partitions);
    let rows_max = i32::try_from(rows_max).unwrap_or(i32::MAX);
    let parameters: [&(dyn ToSql + Sync); 3] = [&incarnation.number, &partitions, &rows_max];
    let row = only(connection.rows(sql, &parameters).await?)?;
    Ok(row.try_get::<_, i32>(0)? as usize)
}

pub(super) async fn load(
    connection: &Connection,
    sql: &Sql,
    incarnation: Incarnation,
    partitions: &[u32],
) -> Result<LoadReply, StoreError> {
    let wanted = columns::of_u32(partitions);
    let parameters: [&(dyn ToSql + Sync); 2] = [&incarnation.number, &wanted];
    connection.send(sql, &parameters, async |rows| read_load(rows, partitions).await).await
}

async fn read_load(stream: RowStream, partitions: &[u32]) -> Result<LoadReply, StoreError> {
    let mut stream = pin!(stream);
    let (mut epoch, mut read_at) = (None, None);
    let mut resolved: Vec<Option<Snapshot>> = vec![None; partitions.len()];
    let mut parked = Vec::new();
    let mut names = NameCache::default();
    while let Some(row) = stream.try_next().await? {
        epoch = Some(Epoch(row.try_get(7)?));
        if read_at.is_none() {
            read_at = Some(snapshot(row.try_get(8)?)?);
        }
        let partition = row.try_get::<_, i32>(0)? as u32;
        if let Some(lane_id) = row.try_get::<_, Option<Uuid>>(3)? {
            let name: &str = row.try_get(4)?;
            let destination = match names.get(name) {
                Ok(destination) => destination,
                Err(why) => {
                    // It stays as it is, for an owner that has a number for it.
                    tracing::error!(%lane_id, "a parked lane is left alone: destination {name:.64?}: {why}");
                    continue;
                }
            };
            parked.push(ParkedLane {
                lane_id,
                destination,
                partition,
                attempts: row.try_get(5)?,
                due_in_ms: row.try_get(6)?,
            });
        } else if let Some(at) = partitions.iter().position(|wanted| *wanted == partition) {
            resolved[at] = Some(snapshot(row.try_get(1)?)?.union(&snapshot(row.try_get(2)?)?));
        }
    }
    let resolved = resolved.into_iter().collect::<Option<Vec<_>>>();
    match (resolved, epoch, read_at) {
        (Some(resolved), Some(epoch), Some(read_at)) => Ok(LoadReply { epoch, resolved, parked, read_at }),
        // Lost again since it was taken: the lease keeper will say so.
        _ => Err(StoreError::Transient {
            sqlstate: "CL003".to_owned(),
            text: "a partition asked for is not owned (any more)".to_owned(),
        }),
    }
}

fn snapshot(text: &str) -> Result<Snapshot, StoreError> {
    Snapshot::parse(text).ok_or_else(|| malformed("not a snapshot"))
}

/// The numbers of the names in one answer: most rows bear the name of the row before.
#[derive(Default)]
struct NameCache {
    names: Vec<(String, DestinationId)>,
}

impl NameCache {
    fn get(&mut self, name: &str) -> Result<DestinationId, String> {
        if let Some(at) = self.names.iter().rposition(|(known, _)| known == name) {
            return Ok(self.names[at].1);
        }
        let destination = DestinationId::of(name)?;
        self.names.push((name.to_owned(), destination));
        Ok(destination)
    }
}

pub(super) async fn keep(
    connection: &Connection,
    sql: &Sql,
    incarnation: Incarnation,
    kept: &Release,
) -> Result<(), StoreError> {
    let epoch = kept.epoch.map(|epoch| epoch.0);
    let (partitions, resolved) = columns::of_resolved(&kept.partitions);
    let parameters: [&(dyn ToSql + Sync); 4] = [&incarnation.number, &epoch, &partitions, &resolved];
    connection.rows(sql, &parameters).await?;
    Ok(())
}
