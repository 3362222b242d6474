//! Array parameters written straight from the batches' columns and arenas, and text kept by number.
//!
//! Invariants
//! - A column writes exactly `len` elements, each with its own length word; the server refuses anything else.
//! - Nothing is copied before the connection's own buffer: no allocation a message.
//!
//! Cost: a length word and a copy an element.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use bytes::{BufMut, BytesMut};
use postgres_types::{IsNull, Kind, ToSql, Type, to_sql_checked};
use uuid::Uuid;

use crate::batch::{ROW_EVENT, ROW_EXPECTED, ROW_STREAMLESS, Rows, Span, is_scheduled};
use crate::plan::snapshot::Snapshot;

/// Microseconds from 1970 to 2000, where Postgres' time begins.
const POSTGRES_EPOCH_US: i64 = 946_684_800_000_000;

/// One array parameter: what its elements are, how many, and who writes them.
pub struct Column<F> {
    element: Type,
    len: usize,
    write: F,
}

impl<F: Fn(&mut BytesMut) + Sync> Column<F> {
    /// `write` appends `len` elements of type `element`.
    pub fn new(element: Type, len: usize, write: F) -> Self {
        Self { element, len, write }
    }
}

impl<F> fmt::Debug for Column<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.element.name(), self.len)
    }
}

impl<F: Fn(&mut BytesMut) + Sync> ToSql for Column<F> {
    fn to_sql(&self, wanted: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn StdError + Sync + Send>> {
        let Kind::Array(element) = wanted.kind() else {
            return Err(format!("the parameter is {wanted}, the column {}[]", self.element).into());
        };
        if *element != self.element {
            return Err(format!("the parameter is {element}[], the column {}[]", self.element).into());
        }
        let dimensions = i32::from(self.len > 0);
        out.put_i32(dimensions);
        out.put_i32(0); // The server finds nulls by itself.
        out.put_u32(element.oid());
        if dimensions > 0 {
            out.put_i32(i32::try_from(self.len)?);
            out.put_i32(1);
            (self.write)(out);
        }
        Ok(IsNull::No)
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}

/// Writes the null element.
pub fn put_null(out: &mut BytesMut) {
    out.put_i32(-1);
}

/// Writes an `int2` element.
pub fn put_i16(out: &mut BytesMut, value: i16) {
    out.put_i32(2);
    out.put_i16(value);
}

/// Writes an `int4` element.
pub fn put_i32(out: &mut BytesMut, value: i32) {
    out.put_i32(4);
    out.put_i32(value);
}

/// Writes an `int8` element.
pub fn put_i64(out: &mut BytesMut, value: i64) {
    out.put_i32(8);
    out.put_i64(value);
}

/// Writes a `bool` element.
pub fn put_bool(out: &mut BytesMut, value: bool) {
    out.put_i32(1);
    out.put_u8(u8::from(value));
}

/// Writes a `uuid` element.
pub fn put_uuid(out: &mut BytesMut, value: Uuid) {
    out.put_i32(16);
    out.put_slice(value.as_bytes());
}

/// Writes a `text` or `bytea` element. Lengths are below 4 GiB by the arena's bound; the server refuses what is
/// above its own.
pub fn put_bytes(out: &mut BytesMut, value: &[u8]) {
    out.put_i32(value.len() as i32);
    out.put_slice(value);
}

/// `timestamptz` in binary: microseconds since 2000.
#[must_use]
pub fn postgres_us(unix_us: i64) -> i64 {
    unix_us.saturating_sub(POSTGRES_EPOCH_US)
}

/// A parameter over a slice, element by element.
pub fn of<'a, T: Sync>(
    element: Type,
    values: &'a [T],
    put: impl Fn(&mut BytesMut, &T) + Sync + 'a,
) -> Column<impl Fn(&mut BytesMut) + Sync + 'a> {
    Column::new(element, values.len(), move |out| {
        for value in values {
            put(out, value);
        }
    })
}

/// Transaction ids, partitions and the like as `int8[]`.
pub fn of_u64(values: &[u64]) -> Column<impl Fn(&mut BytesMut) + Sync + '_> {
    of(Type::INT8, values, |out, value| put_i64(out, *value as i64))
}

/// Partitions as `int4[]`.
pub fn of_u32(values: &[u32]) -> Column<impl Fn(&mut BytesMut) + Sync + '_> {
    of(Type::INT4, values, |out, value| put_i32(out, *value as i32))
}

/// Numbers as `int8[]`.
pub fn of_i64(values: &[i64]) -> Column<impl Fn(&mut BytesMut) + Sync + '_> {
    of(Type::INT8, values, |out, value| put_i64(out, *value))
}

/// Ids as `uuid[]`.
pub fn of_uuid(values: &[Uuid]) -> Column<impl Fn(&mut BytesMut) + Sync + '_> {
    of(Type::UUID, values, |out, value| put_uuid(out, *value))
}

/// All rows of some batches, one after the other, as columns.
#[derive(Clone, Copy, Debug)]
pub struct Batches<'a> {
    batches: &'a [Arc<Rows>],
    len: usize,
}

impl<'a> Batches<'a> {
    /// The rows of these batches.
    #[must_use]
    pub fn new(batches: &'a [Arc<Rows>]) -> Self {
        Self { batches, len: batches.iter().map(|rows| rows.len()).sum() }
    }

    /// Number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// One element a row, written from one column of the batch.
    pub fn column<T: 'a>(
        self,
        element: Type,
        pick: impl Fn(&'a Rows) -> &'a [T] + Sync + 'a,
        put: impl Fn(&mut BytesMut, &'a Rows, &'a T) + Sync + 'a,
    ) -> Column<impl Fn(&mut BytesMut) + Sync + 'a> {
        Column::new(element, self.len, move |out| {
            for rows in self.batches {
                for value in pick(rows) {
                    put(out, rows, value);
                }
            }
        })
    }

    /// Ids; the nil one is null where `nil_is_null`.
    pub fn uuids(
        self,
        pick: impl Fn(&'a Rows) -> &'a [Uuid] + Sync + 'a,
        nil_is_null: bool,
    ) -> Column<impl Fn(&mut BytesMut) + Sync + 'a> {
        self.column(
            Type::UUID,
            pick,
            move |out, _, id| {
                if nil_is_null && id.is_nil() { put_null(out) } else { put_uuid(out, *id) }
            },
        )
    }

    /// Numbers.
    pub fn numbers(
        self,
        pick: impl Fn(&'a Rows) -> &'a [i64] + Sync + 'a,
    ) -> Column<impl Fn(&mut BytesMut) + Sync + 'a> {
        self.column(Type::INT8, pick, |out, _, number| put_i64(out, *number))
    }

    /// Bytes of the arena; the empty span is null where `empty_is_null`.
    pub fn spans(
        self,
        element: Type,
        pick: impl Fn(&'a Rows) -> &'a [Span] + Sync + 'a,
        empty_is_null: bool,
    ) -> Column<impl Fn(&mut BytesMut) + Sync + 'a> {
        self.column(element, pick, move |out, rows, span| {
            if empty_is_null && span.len == 0 { put_null(out) } else { put_bytes(out, rows.bytes(*span)) }
        })
    }

    /// What a row is: 0 message, 1 event, 2 message without stream; + 4 where it is scheduled; 9: an event of which its
    /// caller expects the version.
    pub fn kinds(self) -> Column<impl Fn(&mut BytesMut) + Sync + 'a> {
        Column::new(Type::INT2, self.len, move |out| {
            for rows in self.batches {
                for (flags, due) in rows.flags.iter().zip(&rows.due_unix_us) {
                    put_i16(out, kind(*flags, *due));
                }
            }
        })
    }
}

/// See [`Batches::kinds`].
#[must_use]
pub fn kind(flags: u8, due_unix_us: i64) -> i16 {
    let kind = if flags & ROW_STREAMLESS != 0 { 2 } else { i16::from(flags & ROW_EVENT != 0) };
    let kind = kind + if flags & ROW_EXPECTED != 0 { 8 } else { 0 };
    kind + if is_scheduled(due_unix_us) { 4 } else { 0 }
}

/// What is resolved of partitions, as two arrays; snapshots as text.
pub fn of_resolved(resolved: &[(u32, Option<Snapshot>)]) -> (Vec<i32>, Vec<Option<String>>) {
    resolved.iter().map(|(partition, set)| (*partition as i32, set.as_ref().map(ToString::to_string))).unzip()
}
