//! Expected versions of a unit of work that goes over a connection of its own, the caller's or the engine's.
//!
//! Invariants
//! - All streams of the unit are named in one call before anything is stored: their locks are taken in order, and what
//!   was compared stays so until the transaction ends.
//! - Events of one unit that expect what cannot all be true are refused without asking the database.

use hashbrown::HashMap;
use tokio_postgres::GenericClient;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use crate::batch::Rows;
use crate::error::{Error, Result};
use crate::store::schema_name::SchemaName;
use crate::store::sqlstate::version_conflict;

/// A stream of the unit: its events so far, and the version that is expected before the first of them.
#[derive(Clone, Copy, Default)]
struct Stream {
    events: i64,
    before: Option<i64>,
}

/// The streams of a unit with what is expected of them, in the order in which they come.
fn streams(rows: &Rows) -> Result<(Vec<Uuid>, HashMap<Uuid, Stream>)> {
    let (mut order, mut streams) = (Vec::new(), HashMap::<Uuid, Stream>::new());
    for row in 0..rows.len() {
        let Some(stream_id) = rows.stream_id(row).filter(|_| !rows.is_scheduled(row)) else { continue };
        let stream = streams.entry(stream_id).or_insert_with(|| {
            order.push(stream_id);
            Stream::default()
        });
        if let Some(expected) = rows.expected(row) {
            let before = expected - stream.events;
            let found = stream.before.unwrap_or(before.max(0)) + stream.events;
            if found != expected {
                return Err(Error::VersionConflict { stream_id, expected, found });
            }
            stream.before = Some(before);
        }
        stream.events += i64::from(rows.is_event(row));
    }
    Ok((order, streams))
}

/// Whether a unit's expectations can all be true.
pub(super) fn check(rows: &Rows) -> Result<()> {
    if rows.has_expectations() { streams(rows).map(|_| ()) } else { Ok(()) }
}

/// Locks the unit's streams in the transaction, and compares.
pub(super) async fn expect<C: GenericClient>(
    client: &C,
    schema: &SchemaName,
    rows: &Rows,
) -> std::result::Result<(), tokio_postgres::Error> {
    // Checked before: there is no other error.
    let Ok((order, streams)) = streams(rows) else { return Ok(()) };
    let expected: Vec<Option<i64>> = order.iter().map(|stream| streams[stream].before).collect();
    let parameters: [(&(dyn ToSql + Sync), Type); 2] = [(&order, Type::UUID_ARRAY), (&expected, Type::INT8_ARRAY)];
    let sql = format!("select {}.expect_versions($1, $2)", schema.quoted());
    client.query_typed(&sql, &parameters).await.map(|_| ())
}

/// The conflict that the database has told of.
pub(super) fn conflict(error: &tokio_postgres::Error) -> Option<Error> {
    let (stream_id, expected, found) = version_conflict(error)?;
    Some(Error::VersionConflict { stream_id, expected, found })
}
