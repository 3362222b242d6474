//! What an operator does about events that are to go: truncate a stream before a version, erase what is said of a subject.
//!
//! Needs a connection and the schema's name, no engine, and a role that may (`corelane migrate --grant-operator-to`, or the
//! tables' owner): a service's role may not. Each call is a call of the SQL function of its name, and joins the caller's
//! transaction if it is given one (keep that short).
//!
//! Invariants
//! - Events are never deleted by themselves. Versions go on as if nothing had gone, and whoever reads what has gone is told.
//! - A call is bounded: at most [`ROWS_MAX`] events; `more` says whether to call again. A dry run counts all of them.

use tokio_postgres::GenericClient;
use uuid::Uuid;

use super::answer::column;
use super::dead_letters::Mode;
use super::install::store;
use super::schema_name::SchemaName;
use crate::error::Result;

/// Events that one call truncates, or rows a table that it erases, at most.
pub const ROWS_MAX: i32 = 10_000;

/// The content type of what was erased; the payload is empty then, and there is no metadata.
pub const ERASED: &str = "application/vnd.corelane.erased";

/// What a truncation did, or would do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Truncated {
    /// The first event that is kept, or would be.
    pub first_version: i64,
    /// Events that were looked at.
    pub matched: i64,
    /// Deleted.
    pub truncated: i64,
    /// Of those looked at: to be published for the first time yet. The first of them is kept, and all behind it.
    pub waiting: i64,
    /// Of those looked at: dead letters. The first of them is kept, and all behind it.
    pub dead: i64,
    /// The next call gets on.
    pub more: bool,
}

/// Deletes a stream's events before the version `before`, for good. `note` says where their archive is (up to 1 KiB); `None`
/// leaves the one that is there. Archive first: read them, forwards, and store them elsewhere.
///
/// # Errors
/// [`crate::Error::Store`] if `before` is beyond the stream's newest event, which stays, `rows_max` is not 1 to
/// [`ROWS_MAX`], the role may not, or the database refuses. Nothing is changed then.
pub async fn truncate_stream(
    client: &impl GenericClient,
    schema: &SchemaName,
    stream_id: Uuid,
    before: i64,
    note: Option<&str>,
    rows_max: i32,
    mode: Mode,
) -> Result<Truncated> {
    let statement = format!(
        "select first_version, matched, truncated, waiting, dead, more from {schema}.truncate_stream($1, $2, $3, $4, $5)"
    );
    let row = client
        .query_one(&statement, &[&stream_id, &before, &note, &rows_max, &(mode == Mode::DryRun)])
        .await
        .map_err(store)?;
    Ok(Truncated {
        first_version: column(&row, 0)?,
        matched: column(&row, 1)?,
        truncated: column(&row, 2)?,
        waiting: column(&row, 3)?,
        dead: column(&row, 4)?,
        more: column(&row, 5)?,
    })
}

/// What is to be erased: streams whole, or single events.
#[derive(Clone, Debug, Default)]
pub struct Subject {
    stream_ids: Vec<Uuid>,
    versions: Vec<Option<i64>>,
}

impl Subject {
    /// Nothing yet: refused as it is.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Everything of this stream, messages that are no events included. Streams and events are at most 1,000 together.
    #[must_use]
    pub fn stream(mut self, stream_id: Uuid) -> Self {
        self.stream_ids.push(stream_id);
        self.versions.push(None);
        self
    }

    /// One event.
    #[must_use]
    pub fn event(mut self, stream_id: Uuid, version: i64) -> Self {
        self.stream_ids.push(stream_id);
        self.versions.push(Some(version));
        self
    }
}

/// Rows that were erased, or would be. Those that bear the mark already are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Erased {
    /// In the event store.
    pub events: i64,
    /// In the outbox's segments, scheduled, or beside the log.
    pub messages: i64,
    /// Dead letters of what is published.
    pub dead_letters: i64,
    /// Received: kept, or dead.
    pub inbox: i64,
    /// Call again.
    pub more: bool,
}

/// Overwrites payload and metadata with nothing, and the content type with [`ERASED`], wherever the schema has them. Ids,
/// numbers, types and the transport's words about failures stay. What a program has in memory at the moment may still be
/// published as it was, and stored once more: at last, run it dry until it counts nothing.
///
/// # Errors
/// [`crate::Error::Store`] if the subject is empty or too large, `rows_max` is not 1 to [`ROWS_MAX`], the role may not,
/// another operator is at the same dead letters (run it again), or the database refuses. Nothing is changed then.
pub async fn erase_events(
    client: &impl GenericClient,
    schema: &SchemaName,
    subject: &Subject,
    rows_max: i32,
    mode: Mode,
) -> Result<Erased> {
    let statement =
        format!("select events, messages, dead_letters, inbox, more from {schema}.erase_events($1, $2, $3, $4)");
    let row = client
        .query_one(&statement, &[&subject.stream_ids, &subject.versions, &rows_max, &(mode == Mode::DryRun)])
        .await
        .map_err(store)?;
    Ok(Erased {
        events: column(&row, 0)?,
        messages: column(&row, 1)?,
        dead_letters: column(&row, 2)?,
        inbox: column(&row, 3)?,
        more: column(&row, 4)?,
    })
}
