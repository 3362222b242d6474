//! What an operator does about dead letters: look at them, give them back, discard them, and let held streams go on. Those of
//! the outbox ([`Filter`]) and of the inbox ([`inbox::Filter`]) by the same functions: the filter says which.
//!
//! Needs a connection and the schema's name, no engine; each call is a call of the SQL function of its name, and joins the
//! caller's transaction if it is given one (keep that short: owners of the partitions wait for it).
//!
//! Invariants
//! - Whoever changes something says of what: a filter without anything in it is refused, [`Filter::all`] is one.
//! - A call is bounded: at most [`ROWS_MAX`] dead letters; `more` says whether to call again.

mod filter;
pub mod inbox;

use std::time::SystemTime;

use tokio_postgres::types::ToSql;
use tokio_postgres::{GenericClient, Row};
use uuid::Uuid;

use super::answer::column;
use super::install::store;
use super::schema_name::SchemaName;
use crate::error::{Error, FailureReason, Result};
use crate::seam::store::{Inspection, StoreError};
pub use filter::{Filter, FilterOf, Sent, Side};

/// Dead letters that one call looks at, or changes, at most.
pub const ROWS_MAX: i32 = 4_096;

/// Whether to do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Only count what would be done.
    DryRun,
    /// Do it.
    Apply,
}

/// A dead letter, without its body.
#[derive(Clone, Debug, PartialEq)]
pub struct DeadLetter {
    /// Its id; ids grow.
    pub dead_letter_id: i64,
    /// When it died.
    pub dead_at: SystemTime,
    /// Where it was to go.
    pub destination: String,
    /// Its stream, or what stands for one.
    pub lane_id: Uuid,
    /// Its stream.
    pub stream_id: Option<Uuid>,
    /// Its number in the stream.
    pub stream_seq: i64,
    /// Its version, if it is an event; else 0.
    pub version: i64,
    /// The message's id, if it is known.
    pub message_id: Option<Uuid>,
    /// Its type, if it is known.
    pub type_name: Option<String>,
    /// Tries that failed.
    pub attempts: i32,
    /// How often it was given back before.
    pub retried: i32,
    /// Why it died.
    pub reason: FailureReason,
    /// In the words of who refused it.
    pub error: String,
    /// Whether they were cut.
    pub error_cut: bool,
    /// The same for errors that differ in numbers and ids only.
    pub error_fingerprint: String,
    /// Its stream waits behind it.
    pub holds: bool,
    /// Its message is still there: it can be given back.
    pub is_stored: bool,
}

/// A dead letter with its body.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    /// What [`list`] tells.
    pub dead_letter: DeadLetter,
    /// The message it belongs to.
    pub correlation_id: Option<Uuid>,
    /// The message that caused it.
    pub causation_id: Option<Uuid>,
    /// Of the payload.
    pub content_type: String,
    /// As it came.
    pub metadata: Option<Vec<u8>>,
    /// As it came; `None` if it is stored no more.
    pub payload: Option<Vec<u8>>,
}

/// Dead letters of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Where they were to go.
    pub destination: String,
    /// Their type.
    pub type_name: Option<String>,
    /// Why they died.
    pub reason: FailureReason,
    /// Of their errors.
    pub error_fingerprint: String,
    /// How many.
    pub dead_letters: i64,
    /// Of them, such as hold their stream.
    pub holding: i64,
    /// The highest id.
    pub last_id: i64,
    /// The error of one of them.
    pub error: String,
}

/// What [`retry`] did, or would do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retried {
    /// Dead letters that the filter names.
    pub matched: i32,
    /// Given back.
    pub retried: i32,
    /// Left as they are: somebody has deleted the message. Those of the inbox have theirs with them.
    pub not_stored: i32,
    /// Lanes that get something back.
    pub lanes: i32,
    /// Of them, such as were held behind one of these and go on.
    pub released: i32,
    /// There are further ones: call again.
    pub more: bool,
}

/// What [`discard`] did, or would do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Discarded {
    /// Dead letters that the filter names.
    pub matched: i32,
    /// Deleted.
    pub discarded: i32,
    /// Lanes that were held behind one of these and go on.
    pub released: i32,
    /// There are further ones: call again.
    pub more: bool,
}

impl Side for Sent {
    type DeadLetter = DeadLetter;
    const INFIX: &'static str = "";
    const COLUMNS: &'static str = "dead_letter_id, dead_at, destination, lane_id, stream_id, stream_seq, version, \
                                   message_id, type_name, attempts, retried, reason, error, error_cut, \
                                   error_fingerprint, holds, is_stored";
    const RETRIED: &'static str = "matched, retried, not_stored, lanes, released, more";

    fn place(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![&self.destination]
    }

    fn read(row: &Row) -> Result<DeadLetter> {
        Ok(DeadLetter {
            dead_letter_id: column(row, 0)?,
            dead_at: column(row, 1)?,
            destination: column(row, 2)?,
            lane_id: column(row, 3)?,
            stream_id: column(row, 4)?,
            stream_seq: column(row, 5)?,
            version: column(row, 6)?,
            message_id: column(row, 7)?,
            type_name: column(row, 8)?,
            attempts: column(row, 9)?,
            retried: column(row, 10)?,
            reason: FailureReason::from_number(column(row, 11)?),
            error: column(row, 12)?,
            error_cut: column(row, 13)?,
            error_fingerprint: column(row, 14)?,
            holds: column(row, 15)?,
            is_stored: column(row, 16)?,
        })
    }
}

/// Calls a function that takes a filter and then further parameters.
async fn call<S: Side>(
    client: &impl GenericClient,
    schema: &SchemaName,
    (columns, verb): (&str, &str),
    filter: &FilterOf<S>,
    further: &[&(dyn ToSql + Sync)],
) -> Result<Vec<Row>> {
    let mut parameters = filter.parameters();
    parameters.extend(further);
    let holders: Vec<String> = (1..=parameters.len()).map(|number| format!("${number}")).collect();
    let statement = format!("select {columns} from {schema}.{verb}_{}dead_letters({})", S::INFIX, holders.join(", "));
    client.query(&statement, &parameters).await.map_err(store)
}

/// The same for a function that answers one row.
async fn act<S: Side>(
    client: &impl GenericClient,
    schema: &SchemaName,
    what: (&str, &str),
    filter: &FilterOf<S>,
    rows_max: i32,
    mode: Mode,
) -> Result<Row> {
    let dry_run = mode == Mode::DryRun;
    let rows = call(client, schema, what, filter, &[&rows_max, &dry_run]).await?;
    let none = || StoreError::Refused { sqlstate: "CL000".to_owned(), text: "unexpected answer: no row".to_owned() };
    rows.into_iter().next().ok_or_else(|| Error::Store(none()))
}

/// A page of dead letters, by id; the next one is the same filter [`Filter::after`] the last id.
///
/// # Errors
/// [`crate::Error::Store`] if the filter is empty, `rows_max` is not 1 to 10,000, or the database refuses.
pub async fn list<S: Side>(
    client: &impl GenericClient,
    schema: &SchemaName,
    filter: &FilterOf<S>,
    rows_max: i32,
) -> Result<Vec<S::DeadLetter>> {
    let rows = call(client, schema, (S::COLUMNS, "list"), filter, &[&rows_max]).await?;
    rows.iter().map(S::read).collect()
}

/// One with its body; `None` if there is none of this id.
///
/// # Errors
/// [`crate::Error::Store`] if the database refuses.
pub async fn show(client: &impl GenericClient, schema: &SchemaName, dead_letter_id: i64) -> Result<Option<Shown>> {
    let statement = format!(
        "select l.*, s.correlation_id, s.causation_id, s.content_type, s.metadata, s.payload \
         from (select {} from {schema}.list_dead_letters(p_ids => array[$1::int8])) l \
         join {schema}.show_dead_letter($1) s on s.dead_letter_id = l.dead_letter_id",
        Sent::COLUMNS
    );
    let row = client.query_opt(&statement, &[&dead_letter_id]).await.map_err(store)?;
    row.map(|row| {
        Ok(Shown {
            dead_letter: Sent::read(&row)?,
            correlation_id: column(&row, 17)?,
            causation_id: column(&row, 18)?,
            content_type: column(&row, 19)?,
            metadata: column(&row, 20)?,
            payload: column(&row, 21)?,
        })
    })
    .transpose()
}

/// How many there are of each kind, the most frequent first. Looks at 10,000 at most, by id: with more of them, ask again
/// [`Filter::after`] the highest `last_id`.
///
/// # Errors
/// As [`list`]; `kinds_max` likewise.
pub async fn count(
    client: &impl GenericClient,
    schema: &SchemaName,
    filter: &Filter,
    kinds_max: i32,
) -> Result<Vec<Kind>> {
    let columns = "destination, type_name, reason, error_fingerprint, dead_letters, holding, last_id, error";
    let rows = call(client, schema, (columns, "count"), filter, &[&kinds_max]).await?;
    rows.iter()
        .map(|row| {
            Ok(Kind {
                destination: column(row, 0)?,
                type_name: column(row, 1)?,
                reason: FailureReason::from_number(column(row, 2)?),
                error_fingerprint: column(row, 3)?,
                dead_letters: column(row, 4)?,
                holding: column(row, 5)?,
                last_id: column(row, 6)?,
                error: column(row, 7)?,
            })
        })
        .collect()
}

/// Gives dead letters back to be published, or handled: before what their streams have not published yet (or what the
/// consumer still keeps of them), without attempts. Lanes that are held behind one of them go on. A running owner notices at
/// once, a consumer within `inbox.poll_ms`.
///
/// # Errors
/// [`crate::Error::Store`] if the filter is empty, `rows_max` is not 1 to [`ROWS_MAX`], the partitions change their owners
/// too often meanwhile (run it again), or the database refuses. Nothing is changed then.
pub async fn retry<S: Side>(
    client: &impl GenericClient,
    schema: &SchemaName,
    filter: &FilterOf<S>,
    rows_max: i32,
    mode: Mode,
) -> Result<Retried> {
    let row = act(client, schema, (S::RETRIED, "retry"), filter, rows_max, mode).await?;
    Ok(Retried {
        matched: column(&row, 0)?,
        retried: column(&row, 1)?,
        not_stored: column(&row, 2)?,
        lanes: column(&row, 3)?,
        released: column(&row, 4)?,
        more: column(&row, 5)?,
    })
}

/// Deletes dead letters for good (events stay in the event store; a copy of what a consumer has received stays one). Lanes that are held behind one of them go on.
///
/// # Errors
/// As [`retry`].
pub async fn discard<S: Side>(
    client: &impl GenericClient,
    schema: &SchemaName,
    filter: &FilterOf<S>,
    rows_max: i32,
    mode: Mode,
) -> Result<Discarded> {
    let what = ("matched, discarded, released, more", "discard");
    let row = act(client, schema, what, filter, rows_max, mode).await?;
    Ok(Discarded {
        matched: column(&row, 0)?,
        discarded: column(&row, 1)?,
        released: column(&row, 2)?,
        more: column(&row, 3)?,
    })
}

/// Lets lanes (stream and destination) go on that are held, and leaves their dead letters where they are. Answers how many
/// were held.
///
/// # Errors
/// As [`retry`]; at most [`ROWS_MAX`] lanes.
pub async fn release_lanes(client: &impl GenericClient, schema: &SchemaName, lanes: &[(Uuid, &str)]) -> Result<i32> {
    let (ids, destinations): (Vec<Uuid>, Vec<&str>) = lanes.iter().copied().unzip();
    let statement = format!("select {schema}.release_lanes($1, $2)");
    let row = client.query_one(&statement, &[&ids, &destinations]).await.map_err(store)?;
    column(&row, 0)
}

/// What waits longer than it should: what a running engine looks for once a minute, asked now.
/// [`Inspection::dead_letters_trimmed`] is 0: nothing is deleted.
///
/// # Errors
/// [`crate::Error::Store`] if the database refuses.
pub async fn sentinel(
    client: &impl GenericClient,
    schema: &SchemaName,
    unpublished_ms: i64,
    stuck_ms: i64,
) -> Result<Inspection> {
    let statement = format!(
        "select unpublished, unpublished_age_ms, overdue, stuck, stuck_age_ms, held from {schema}.wh_sentinel($1, $2)"
    );
    let row = client.query_one(&statement, &[&unpublished_ms, &stuck_ms]).await.map_err(store)?;
    Ok(Inspection {
        dead_letters_trimmed: 0,
        unpublished: column::<i32>(&row, 0)?.unsigned_abs(),
        unpublished_age_ms: column::<i64>(&row, 1)?.unsigned_abs(),
        overdue: column::<i32>(&row, 2)?.unsigned_abs(),
        stuck: column::<i32>(&row, 3)?.unsigned_abs(),
        stuck_age_ms: column::<i64>(&row, 4)?.unsigned_abs(),
        held: column::<i32>(&row, 5)?.unsigned_abs(),
    })
}
