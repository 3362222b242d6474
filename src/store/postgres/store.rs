//! `store_shard_messages`, `find_flush` and `find_duplicates`: a flush, what became of it, and why it could not be.
//!
//! Invariant: one statement a flush, which commits by itself; its parameters are written from the batches as they are.

use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::log::LogRows;
use super::send::{Connection, Sql, only, takes};
use crate::batch::{Rows, Span, is_scheduled};
use crate::ids::Epoch;
use crate::seam::store::{LastNumbers, Origin, StoreError, StoreReply, StoreRequest, Stored};
use crate::store::columns::{self, Batches, put_bytes, put_i16, put_i32, put_i64, put_null, put_uuid};
use crate::store::sqlstate::number_taken;

/// What a flush is sent with, and what comes behind it.
macro_rules! takes_of_flush {
    ($($more:ident),*) => {
        takes![
            INT4,
            INT2,
            INT8,
            INT8,
            INT8,
            INT8_ARRAY,
            UUID,
            INT4_ARRAY,
            BOOL,
            INT4,
            INT4,
            INT2_ARRAY,
            INT8_ARRAY,
            INT8_ARRAY,
            INT8_ARRAY,
            UUID_ARRAY,
            UUID_ARRAY,
            UUID_ARRAY,
            UUID_ARRAY,
            UUID_ARRAY,
            INT4_ARRAY,
            INT2_ARRAY,
            TEXT_ARRAY,
            TEXT_ARRAY,
            BYTEA_ARRAY,
            BYTEA_ARRAY,
            TIMESTAMPTZ_ARRAY,
            INT4_ARRAY,
            TEXT_ARRAY,
            INT4_ARRAY,
            BOOL_ARRAY,
            INT4_ARRAY,
            TEXT_ARRAY,
            INT4_ARRAY,
            INT2_ARRAY,
            $($more),*
        ]
    };
}

const STORED: &str = "select busy, xid, epoch, position, owned, is_foreign, last_seq, last_version";

pub(super) fn store_sql(schema: &str) -> Sql {
    let parameters = parameters(35);
    let text = format!("{STORED} from {schema}.store_shard_messages({parameters})");
    Sql { slot: 0, text, takes: takes_of_flush![] }
}

/// The same, behind a wait for streams. Its first parameter is an answer of that wait: so it comes later.
pub(super) fn store_patiently_sql(schema: &str) -> Sql {
    let (first, rest) = ("case when q.done is not null then $1 end", parameters(35).split_off("$1".len()));
    let text = format!(
        "{STORED} from {schema}.queue_for_streams($1, $2, $8, $36, $37, $38) q(done) \
         cross join lateral {schema}.store_shard_messages({first}{rest})"
    );
    Sql { slot: 8, text, takes: takes_of_flush![UUID_ARRAY, INT4_ARRAY, INT4] }
}

fn parameters(count: usize) -> String {
    (1..=count).map(|n| format!("${n}")).collect::<Vec<_>>().join(", ")
}

pub(super) fn find_flush_sql(schema: &str) -> Sql {
    let text = format!(
        "select xid, epoch, position, owned, last_seq, last_version from {schema}.find_flush($1, $2, $3, $4, $5, $6)"
    );
    Sql { slot: 1, text, takes: takes![INT4, INT2, INT8, INT8, UUID_ARRAY, INT4_ARRAY] }
}

pub(super) fn find_duplicates_sql(schema: &str) -> Sql {
    Sql { slot: 7, text: format!("select {schema}.find_duplicates($1)"), takes: takes![UUID_ARRAY] }
}

pub(super) async fn store(
    connection: &Connection,
    sql: &Sql,
    patiently: &Sql,
    request: &StoreRequest<'_>,
) -> Result<StoreReply, StoreError> {
    let rows = Batches::new(request.batches);
    assert_eq!(rows.len(), request.row_stream.len(), "one stream index a row");
    let log = LogRows::of(request);
    let flags = request.batches.iter().flat_map(|rows| rows.flags.iter().zip(&rows.due_unix_us));
    let (mut events, mut messages, mut scheduled) = (0i32, 0i32, 0i32);
    for (flags, due) in flags {
        match columns::kind(*flags, *due) {
            1 | 9 => events += 1,
            0 | 2 => messages += 1,
            _ => scheduled += 1,
        }
    }
    let known = request.stream_known.iter().all(|known| *known);

    let incarnation = request.origin.incarnation.number;
    let shard = request.origin.shard as i16;
    let read_xmax = request.read.xmax() as i64;
    let epoch = request.epoch.map(|epoch| epoch.0);
    let read_listed = columns::of_u64(request.read.listed());
    let partitions = columns::of_u32(request.partitions);
    // An array in which no row has a value is not sent: the server receives and copies every element it is given.
    let has = |any: &dyn Fn(&Rows) -> bool| request.batches.iter().any(|rows| any(rows));
    let given = |ids: &[Uuid]| ids.iter().any(|id| !id.is_nil());
    let written = |spans: &[Span]| spans.iter().any(|span| span.len > 0);
    let traced = has(&|rows| rows.trace.iter().any(|trace| !trace.is_none()));

    let expected = has(&|rows| rows.has_expectations());

    let kind = (messages + scheduled > 0 || expected).then(|| rows.kinds());
    let stream_seq = rows.numbers(|rows| &rows.stream_seq);
    let version = rows.numbers(|rows| &rows.version);
    let span_id = rows.column(
        Type::INT8,
        |rows| &rows.trace,
        |out, _, trace| {
            if trace.is_none() { put_null(out) } else { put_i64(out, trace.span_id as i64) }
        },
    );
    let lane_id = rows.uuids(|rows| &rows.lane_id, false);
    let message_id = rows.uuids(|rows| &rows.message_id, false);
    let correlation_id =
        has(&|rows| given(&rows.correlation_id)).then(|| rows.uuids(|rows| &rows.correlation_id, true));
    let causation_id = has(&|rows| given(&rows.causation_id)).then(|| rows.uuids(|rows| &rows.causation_id, true));
    let trace_id = rows.column(
        Type::UUID,
        |rows| &rows.trace,
        |out, _, trace| {
            if trace.is_none() { put_null(out) } else { put_uuid(out, trace.trace_id) }
        },
    );
    let partition = rows.column(Type::INT4, |rows| &rows.partition, |out, _, value| put_i32(out, *value as i32));
    let trace_flags = rows.column(
        Type::INT2,
        |rows| &rows.trace,
        |out, _, trace| {
            if trace.is_none() { put_null(out) } else { put_i16(out, i16::from(trace.flags)) }
        },
    );
    let type_name = rows.spans(Type::TEXT, |rows| &rows.type_name, false);
    let content_type =
        has(&|rows| written(&rows.content_type)).then(|| rows.spans(Type::TEXT, |rows| &rows.content_type, true));
    let metadata = has(&|rows| written(&rows.metadata)).then(|| rows.spans(Type::BYTEA, |rows| &rows.metadata, true));
    let payload = rows.spans(Type::BYTEA, |rows| &rows.payload, false);

    let due = rows.column(
        Type::TIMESTAMPTZ,
        |rows| &rows.due_unix_us,
        |out, _, due| {
            if is_scheduled(*due) { put_i64(out, columns::postgres_us(*due)) } else { put_null(out) }
        },
    );
    let (destination_end, destinations) = scheduled_destinations(request, scheduled > 0);
    let destination_end = columns::of(Type::INT4, &destination_end, |out, end| put_i32(out, *end));
    let destinations = columns::of(Type::TEXT, &destinations, |out, name| put_bytes(out, name.as_bytes()));

    let log_end = columns::of(Type::INT4, &log.end, |out, end| put_i32(out, *end));
    let log_owned = columns::of(Type::BOOL, &log.owned, |out, owned| columns::put_bool(out, *owned));
    let log_dictionary_end = columns::of(Type::INT4, &log.dictionary_end, |out, end| put_i32(out, *end));
    let dictionary = columns::of(Type::TEXT, &log.dictionary, |out, name| put_bytes(out, name.name().as_bytes()));
    let log_row = (!log.is_row_by_row(rows.len()))
        .then(|| columns::of(Type::INT4, &log.references, |out, at| put_i32(out, at.request_row as i32 + 1)));
    let log_destination = log
        .references
        .iter()
        .any(|at| at.destination != 1)
        .then(|| columns::of(Type::INT2, &log.references, |out, at| put_i16(out, at.destination)));

    let (span_id, trace_id, trace_flags) =
        (traced.then_some(span_id), traced.then_some(trace_id), traced.then_some(trace_flags));
    let due = (scheduled > 0).then_some(due);
    let patient = request.patient.iter().map(|at| *at as usize);
    let streams: Vec<Uuid> = patient.clone().map(|at| request.stream_id[at]).collect();
    let stream_partitions: Vec<i32> = patient.map(|at| request.stream_partition[at] as i32).collect();
    let patience_ms = request.patience_ms as i32;
    let parameters: [&(dyn ToSql + Sync); 38] = [
        &incarnation,
        &shard,
        &request.origin.flush_number,
        &request.ownership,
        &read_xmax,
        &read_listed,
        &epoch,
        &partitions,
        &known,
        &events,
        &messages,
        &kind,
        &stream_seq,
        &version,
        &span_id,
        &lane_id,
        &message_id,
        &correlation_id,
        &causation_id,
        &trace_id,
        &partition,
        &trace_flags,
        &type_name,
        &content_type,
        &metadata,
        &payload,
        &due,
        &destination_end,
        &destinations,
        &log_end,
        &log_owned,
        &log_dictionary_end,
        &dictionary,
        &log_row,
        &log_destination,
        &streams,
        &stream_partitions,
        &patience_ms,
    ];
    let (sql, parameters) = if streams.is_empty() { (sql, &parameters[..35]) } else { (patiently, &parameters[..]) };
    let batches = || request.batches.iter().map(|rows| &**rows);
    let rows = connection.rows(sql, parameters).await.map_err(|error| number_taken(&error, batches()))?;
    let row = only(rows)?;
    if let Some(stream_id) = row.try_get::<_, Option<Vec<Uuid>>>(0)? {
        let Some(version) = row.try_get::<_, Option<Vec<i64>>>(7)? else { return Ok(StoreReply::Busy { stream_id }) };
        return Ok(StoreReply::Conflict { found: stream_id.into_iter().zip(version).collect() });
    }
    let looked_up = match row.try_get::<_, Option<Vec<i64>>>(6)? {
        Some(seq) => Some(last_numbers(seq, row.try_get(7)?)),
        None => None,
    };
    Ok(StoreReply::Stored(Stored {
        xid: row.try_get::<_, i64>(1)? as u64,
        epoch: Epoch(row.try_get(2)?),
        position: row.try_get(3)?,
        owned: row.try_get(4)?,
        foreign: row.try_get(5)?,
        looked_up,
    }))
}

pub(super) async fn find_flush(
    connection: &Connection,
    sql: &Sql,
    origin: Origin,
    stream_id: &[Uuid],
    stream_rows: &[u32],
    since: u64,
) -> Result<Option<Stored>, StoreError> {
    let shard = origin.shard as i16;
    let since = since as i64;
    let streams = columns::of_uuid(stream_id);
    let stream_rows = columns::of_u32(stream_rows);
    let parameters: [&(dyn ToSql + Sync); 6] =
        [&origin.incarnation.number, &shard, &origin.flush_number, &since, &streams, &stream_rows];
    let Some(row) = connection.rows(sql, &parameters).await?.into_iter().next() else {
        return Ok(None);
    };
    let seq = row.try_get::<_, Option<Vec<i64>>>(4)?.unwrap_or_default();
    let version = row.try_get::<_, Option<Vec<i64>>>(5)?.unwrap_or_default();
    Ok(Some(Stored {
        xid: row.try_get::<_, i64>(0)? as u64,
        epoch: Epoch(row.try_get(1)?),
        position: row.try_get(2)?,
        owned: row.try_get(3)?,
        // Whether it met another writer is not recorded: as if it had.
        foreign: true,
        looked_up: Some(last_numbers(seq, version)),
    }))
}

pub(super) async fn find_duplicates(
    connection: &Connection,
    sql: &Sql,
    message_id: &[Uuid],
) -> Result<Vec<Uuid>, StoreError> {
    let message_id = columns::of_uuid(message_id);
    let parameters: [&(dyn ToSql + Sync); 1] = [&message_id];
    let rows = connection.rows(sql, &parameters).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

fn last_numbers(seq: Vec<i64>, version: Vec<i64>) -> Vec<LastNumbers> {
    seq.into_iter().zip(version).map(|(seq, version)| LastNumbers { seq, version }).collect()
}

/// The destinations of scheduled rows, row after row; nothing where there is none.
fn scheduled_destinations(request: &StoreRequest<'_>, any: bool) -> (Vec<i32>, Vec<&'static str>) {
    let (mut ends, mut names) = (Vec::new(), Vec::new());
    if any {
        for rows in request.batches {
            let mut references = rows.reference_row.iter().zip(&rows.reference_destination).peekable();
            for row in 0..rows.len() {
                while let Some((_, destination)) = references.next_if(|(of, _)| **of as usize == row) {
                    if rows.is_scheduled(row) {
                        names.push(destination.name());
                    }
                }
                ends.push(names.len() as i32);
            }
        }
    }
    (ends, names)
}
