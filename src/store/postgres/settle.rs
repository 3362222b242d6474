//! `settle`: a shard's outcomes in one transaction.

use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::send::{Connection, Sql, only, takes};
use crate::batch::DestinationId;
use crate::ids::{Epoch, Incarnation};
use crate::seam::store::{SettleReply, SettleRequest, StoreError};
use crate::store::columns::{Column, of, put_bool, put_bytes, put_i16, put_i32, put_i64, put_uuid};

pub(super) fn settle_sql(schema: &str) -> Sql {
    let parameters = (6..=35).map(|n| format!("${n}")).collect::<Vec<_>>().join(", ");
    let text = format!(
        "select fenced, epoch, unparked from {schema}.settle($1, $2, $3, $4, $5::text::pg_snapshot, {parameters})"
    );
    let takes = takes![
        INT4, INT2, INT8, UUID, TEXT, UUID_ARRAY, TEXT_ARRAY, INT4_ARRAY, INT8_ARRAY, INT4_ARRAY, INT2_ARRAY,
        TEXT_ARRAY, BOOL_ARRAY, INT8_ARRAY, UUID_ARRAY, TEXT_ARRAY, INT4_ARRAY, INT8_ARRAY, INT8_ARRAY, UUID_ARRAY,
        TEXT_ARRAY, INT4_ARRAY, INT8_ARRAY, UUID_ARRAY, TEXT_ARRAY, INT4_ARRAY, INT8_ARRAY, INT8_ARRAY, INT4_ARRAY,
        INT2_ARRAY, TEXT_ARRAY, BOOL_ARRAY, UUID_ARRAY, TEXT_ARRAY, INT4_ARRAY
    ];
    Sql { slot: 2, text, takes }
}

fn lanes<'a, T: Sync>(
    items: &'a [T],
    lane: impl Fn(&T) -> Uuid + Sync + 'a,
) -> Column<impl Fn(&mut bytes::BytesMut) + Sync + 'a> {
    of(Type::UUID, items, move |out, item| put_uuid(out, lane(item)))
}

fn names<'a, T: Sync>(
    items: &'a [T],
    destination: impl Fn(&T) -> DestinationId + Sync + 'a,
) -> Column<impl Fn(&mut bytes::BytesMut) + Sync + 'a> {
    of(Type::TEXT, items, move |out, item| put_bytes(out, destination(item).name().as_bytes()))
}

fn int4<'a, T: Sync>(
    items: &'a [T],
    value: impl Fn(&T) -> i32 + Sync + 'a,
) -> Column<impl Fn(&mut bytes::BytesMut) + Sync + 'a> {
    of(Type::INT4, items, move |out, item| put_i32(out, value(item)))
}

fn int8<'a, T: Sync>(
    items: &'a [T],
    value: impl Fn(&T) -> i64 + Sync + 'a,
) -> Column<impl Fn(&mut bytes::BytesMut) + Sync + 'a> {
    of(Type::INT8, items, move |out, item| put_i64(out, value(item)))
}

pub(super) async fn settle(
    connection: &Connection,
    sql: &Sql,
    incarnation: Incarnation,
    request: &SettleRequest,
) -> Result<SettleReply, StoreError> {
    let shard = request.shard as i16;
    let epoch = request.epoch.map(|epoch| epoch.0);
    let cursor = request.cursor.as_ref().map(ToString::to_string);
    let SettleRequest { park, spill, drained, dead, unpark, .. } = request;
    let parameters: [&(dyn ToSql + Sync); 35] = [
        &incarnation.number,
        &shard,
        &request.ownership,
        &epoch,
        &cursor,
        &lanes(park, |item| item.lane_id),
        &names(park, |item| item.destination),
        &int4(park, |item| item.partition as i32),
        &int8(park, |item| item.stream_seq),
        &int4(park, |item| item.attempts),
        &of(Type::INT2, park, |out, item| put_i16(out, item.reason)),
        &of(Type::TEXT, park, |out, item| put_bytes(out, item.error.as_bytes())),
        &of(Type::BOOL, park, |out, item| put_bool(out, item.error_cut)),
        &int8(park, |item| item.due_in_ms),
        &lanes(spill, |item| item.lane_id),
        &names(spill, |item| item.destination),
        &int4(spill, |item| item.partition as i32),
        &int8(spill, |item| item.stream_seq),
        &int8(spill, |item| item.version),
        &lanes(drained, |item| item.lane_id),
        &names(drained, |item| item.destination),
        &int4(drained, |item| item.partition as i32),
        &int8(drained, |item| item.stream_seq),
        &lanes(dead, |item| item.lane_id),
        &of(Type::TEXT, dead, |out, item| put_bytes(out, item.destination_name().as_bytes())),
        &int4(dead, |item| item.partition as i32),
        &int8(dead, |item| item.stream_seq),
        &int8(dead, |item| item.version),
        &int4(dead, |item| item.attempts),
        &of(Type::INT2, dead, |out, item| put_i16(out, item.reason)),
        &of(Type::TEXT, dead, |out, item| put_bytes(out, item.error.as_bytes())),
        &of(Type::BOOL, dead, |out, item| put_bool(out, item.error_cut)),
        &lanes(unpark, |item| item.0),
        &names(unpark, |item| item.1),
        &int4(unpark, |item| item.2 as i32),
    ];
    let row = only(connection.rows(sql, &parameters).await?)?;
    if row.try_get(0)? {
        return Ok(SettleReply::Fenced);
    }
    Ok(SettleReply::Settled { epoch: Epoch(row.try_get(1)?), unparked: row.try_get(2)? })
}
