//! The outbox: messages that join a transaction of the caller's own.
//!
//! Invariants
//! - What is enlisted is there when the caller's transaction commits, and leaves nothing when it rolls back.
//! - Nothing is published before the commit; a forgotten [`Enlisted::announce`] costs latency, never delivery.

use std::sync::Arc;

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{GenericClient, Transaction};
use uuid::Uuid;

use super::{Engine, Receipt, exclusive, expected, id_of};
use crate::batch::{Rows, Span};
use crate::error::{Error, Result};
use crate::limits::{STORE_CALL_BYTES_MAX, STORE_ROWS_MAX};
use crate::message::Enqueue;
use crate::store::schema_name::SchemaName;

/// See the module.
pub struct Outbox {
    engine: Engine,
}

/// Messages on their way into a transaction.
pub struct Push {
    engine: Engine,
    rows: Arc<Rows>,
}

/// Messages that a transaction holds.
#[must_use = "call announce() after the commit: without it the messages wait for the next poll"]
pub struct Enlisted {
    engine: Engine,
    /// One a message, in order.
    pub receipts: Vec<Receipt>,
}

impl Outbox {
    pub(super) fn new(engine: Engine) -> Self {
        Self { engine }
    }

    /// A first message.
    ///
    /// # Errors
    /// A limit that it breaks.
    pub fn push<M: Enqueue + ?Sized>(&self, message: &M) -> Result<Push> {
        Push { engine: self.engine.clone(), rows: self.engine.shared.pool.take() }.push(message)
    }
}

impl Push {
    /// A further message.
    ///
    /// # Errors
    /// A limit that it breaks.
    pub fn push<M: Enqueue + ?Sized>(mut self, message: &M) -> Result<Self> {
        let (shared, rows) = (&self.engine.shared, exclusive(&mut self.rows));
        let message_id = id_of(message);
        shared.refuse_beyond_unit(rows, message_id)?;
        shared.router.write(rows, message, message_id)?;
        Ok(self)
    }

    /// Stores them in the caller's transaction, by a call to the server for each 4,096 or 64 MiB. One such call takes its
    /// streams' locks in ascending order; transactions that enlist several streams in several of them can deadlock
    /// like any two transactions, and the server ends one with 40P01.
    ///
    /// # Errors
    /// [`Error::Enlist`]: what the database said. The transaction has then failed. [`Error::VersionConflict`] where a
    /// stream has another version than expected: the transaction has then failed as well, and nothing was stored.
    pub async fn enlist(self, transaction: &Transaction<'_>) -> Result<Enlisted> {
        expected::check(&self.rows)?;
        let stored = store(transaction, &self.engine.shared.schema, &self.rows).await;
        let receipts = stored.map_err(|error| expected::conflict(&error).unwrap_or(Error::Enlist(error)))?;
        let Self { engine, rows } = self;
        engine.shared.pool.give(rows);
        Ok(Enlisted { engine, receipts })
    }
}

impl Enlisted {
    /// Tells this process's shards to look for the messages. Call it after the commit.
    pub fn announce(self) {
        self.engine.announce();
    }
}

/// One past the last row of a store call that begins with this one.
fn end_of_call(rows: &Rows, first: usize, bytes_max: usize) -> usize {
    let mut bytes = 0;
    let last = (first + STORE_ROWS_MAX).min(rows.len());
    let fits = |row: &usize| {
        bytes += rows.row_bytes(*row);
        *row == first || bytes <= bytes_max
    };
    (first..last).take_while(fits).last().map_or(last, |row| row + 1)
}

/// Stores rows through the callers' function, 4,096 or 64 MiB at a time.
pub(crate) async fn store<C: GenericClient>(
    client: &C,
    schema: &SchemaName,
    rows: &Rows,
) -> std::result::Result<Vec<Receipt>, tokio_postgres::Error> {
    if rows.has_expectations() {
        expected::expect(client, schema, rows).await?;
    }
    let types = [
        Type::UUID_ARRAY,
        Type::UUID_ARRAY,
        Type::TEXT_ARRAY,
        Type::BYTEA_ARRAY,
        Type::BOOL_ARRAY,
        Type::TEXT_ARRAY,
        Type::INT4_ARRAY,
        Type::TEXT_ARRAY,
        Type::UUID_ARRAY,
        Type::UUID_ARRAY,
        Type::UUID_ARRAY,
        Type::INT8_ARRAY,
        Type::INT2_ARRAY,
        Type::TEXT_ARRAY,
        Type::BYTEA_ARRAY,
        Type::INT8_ARRAY,
    ];
    let sql = format!(
        "select message_id, stream_seq, version from {}.store_outbox_messages($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, \
         $12, $13, $14, $15, (select array_agg(case when due <> 0 then timestamptz 'epoch' + due * interval '1 microsecond' \
         end order by turn) from unnest($16::int8[]) with ordinality d(due, turn)))",
        schema.quoted()
    );
    let mut receipts = Vec::with_capacity(rows.len());
    let mut first = 0;
    while first < rows.len() {
        let end = end_of_call(rows, first, STORE_CALL_BYTES_MAX);
        let columns = Columns::of(rows, first..end);
        let parameters: [&(dyn ToSql + Sync); 16] = [
            &columns.message_id,
            &columns.stream_id,
            &columns.type_name,
            &columns.payload,
            &columns.is_event,
            &columns.destination,
            &columns.reference_message,
            &columns.reference_destination,
            &columns.correlation_id,
            &columns.causation_id,
            &columns.trace_id,
            &columns.span_id,
            &columns.trace_flags,
            &columns.content_type,
            &columns.metadata,
            &columns.due,
        ];
        let typed: Vec<_> = parameters.into_iter().zip(types.iter().cloned()).collect();
        // Without a name on the server: the caller's transaction may be one of a pooler's.
        for row in client.query_typed(&sql, &typed).await? {
            receipts.push(Receipt {
                message_id: row.try_get(0)?,
                stream_seq: row.try_get::<_, Option<i64>>(1)?.unwrap_or(0),
                version: row.try_get::<_, Option<i64>>(2)?.unwrap_or(0),
            });
        }
        first = end;
    }
    Ok(receipts)
}

/// Rows as the callers' function takes them. Not the hot path: vectors of borrowed values.
struct Columns<'a> {
    message_id: &'a [Uuid],
    stream_id: Vec<Option<Uuid>>,
    type_name: Vec<&'a str>,
    payload: Vec<&'a [u8]>,
    is_event: Vec<bool>,
    destination: Vec<Option<&'static str>>,
    reference_message: Vec<i32>,
    reference_destination: Vec<&'static str>,
    correlation_id: Vec<Option<Uuid>>,
    causation_id: Vec<Option<Uuid>>,
    trace_id: Vec<Option<Uuid>>,
    span_id: Vec<Option<i64>>,
    trace_flags: Vec<Option<i16>>,
    content_type: Vec<Option<&'a str>>,
    metadata: Vec<Option<&'a [u8]>>,
    due: Vec<i64>,
}

impl<'a> Columns<'a> {
    fn of(rows: &'a Rows, range: std::ops::Range<usize>) -> Self {
        let some_id = |id: Uuid| (!id.is_nil()).then_some(id);
        let texts = |spans: &'a [Span]| spans[range.clone()].iter().map(|span| rows.text(*span));
        let bytes = |spans: &'a [Span]| spans[range.clone()].iter().map(|span| rows.bytes(*span));
        let traces = || rows.trace[range.clone()].iter();
        // A message's first destination stands with it, its further ones in the references, which are by row.
        let mut first = vec![None; range.len()];
        let (mut reference_message, mut reference_destination) = (Vec::new(), Vec::new());
        let from = rows.reference_row.partition_point(|row| (*row as usize) < range.start);
        let to = rows.reference_row.partition_point(|row| (*row as usize) < range.end);
        for (row, destination) in rows.reference_row[from..to].iter().zip(&rows.reference_destination[from..to]) {
            let at = *row as usize - range.start;
            match &mut first[at] {
                place @ None => *place = Some(destination.name()),
                Some(_) => {
                    reference_message.push(at as i32 + 1);
                    reference_destination.push(destination.name());
                }
            }
        }
        Self {
            message_id: &rows.message_id[range.clone()],
            stream_id: range.clone().map(|row| rows.stream_id(row)).collect(),
            type_name: texts(&rows.type_name).collect(),
            payload: bytes(&rows.payload).collect(),
            is_event: range.clone().map(|row| rows.is_event(row)).collect(),
            destination: first,
            reference_message,
            reference_destination,
            correlation_id: rows.correlation_id[range.clone()].iter().map(|id| some_id(*id)).collect(),
            causation_id: rows.causation_id[range.clone()].iter().map(|id| some_id(*id)).collect(),
            trace_id: traces().map(|trace| some_id(trace.trace_id)).collect(),
            span_id: traces().map(|trace| (!trace.is_none()).then_some(trace.span_id.cast_signed())).collect(),
            trace_flags: traces().map(|trace| (!trace.is_none()).then_some(i16::from(trace.flags))).collect(),
            content_type: texts(&rows.content_type).map(|text| (!text.is_empty()).then_some(text)).collect(),
            metadata: bytes(&rows.metadata).map(|bytes| (!bytes.is_empty()).then_some(bytes)).collect(),
            due: rows.due_unix_us[range].to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::NewRow;

    #[test]
    fn a_store_call_ends_before_what_passes_its_rows_or_bytes_and_takes_one_at_least() {
        let mut rows = Rows::default();
        for (n, bytes) in [10, 10, 30, 5, 5, 5].into_iter().enumerate() {
            let message_id = Uuid::from_u128(n as u128 + 1);
            let row = NewRow {
                message_id,
                stream_id: None,
                partition: 0,
                is_event: false,
                type_name: "",
                content_type: "",
                correlation_id: Uuid::nil(),
                causation_id: Uuid::nil(),
                trace: crate::envelope::Trace::default(),
                metadata: b"",
                payload: &vec![0; bytes],
                due_unix_us: 0,
            };
            rows.push(&row, &[]);
        }
        let ends: Vec<usize> = (0..6).map(|first| end_of_call(&rows, first, 20)).collect();
        assert_eq!(ends, [2, 2, 3, 6, 6, 6]);
        assert_eq!(end_of_call(&rows, 0, usize::MAX), 6);
    }
}
