//! The inbox's dead letters: what a consumer has given up. [`super::list`], [`super::retry`] and [`super::discard`] take their
//! [`Filter`] as they take the outbox's.
//!
//! Invariant: a dead letter has its body with it; what is discarded stays remembered, so a copy of it is one.

use std::time::SystemTime;

use tokio_postgres::types::ToSql;
use tokio_postgres::{GenericClient, Row};
use uuid::Uuid;

use super::filter::{FilterOf, Side};
use crate::envelope::Trace;
use crate::error::{FailureReason, Result};
use crate::store::answer::column;
use crate::store::install::store;
use crate::store::schema_name::SchemaName;

/// Dead letters of the inbox.
pub type Filter = FilterOf<Received>;

/// What was received.
#[derive(Clone, Debug, Default)]
pub struct Received {
    pub(super) consumer: Option<String>,
    pub(super) source: Option<String>,
}

/// A dead letter of a consumer, without its body.
#[derive(Clone, Debug, PartialEq)]
pub struct DeadLetter {
    /// Its id; ids grow. Those of the outbox count for themselves.
    pub dead_letter_id: i64,
    /// When it died.
    pub dead_at: SystemTime,
    /// Whose it was.
    pub consumer: String,
    /// Where it came from.
    pub source: String,
    /// Its stream, or what stands for one.
    pub lane_id: Uuid,
    /// Its stream.
    pub stream_id: Option<Uuid>,
    /// The message's id.
    pub message_id: Uuid,
    /// When it was kept first.
    pub received_at: SystemTime,
    /// Its type.
    pub type_name: String,
    /// Tries that failed.
    pub attempts: i32,
    /// How often it was given back before.
    pub retried: i32,
    /// Why it died.
    pub reason: FailureReason,
    /// In the words of its handler.
    pub error: String,
    /// Whether they were cut.
    pub error_cut: bool,
    /// The same for errors that differ in numbers and ids only.
    pub error_fingerprint: String,
    /// Its stream waits behind it.
    pub holds: bool,
}

/// A dead letter with its body.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    /// What [`super::list`] tells.
    pub dead_letter: DeadLetter,
    /// The message it belongs to.
    pub correlation_id: Option<Uuid>,
    /// The message that caused it.
    pub causation_id: Option<Uuid>,
    /// Its place in a trace.
    pub trace: Trace,
    /// Of the payload.
    pub content_type: String,
    /// As it came.
    pub metadata: Option<Vec<u8>>,
    /// As it came.
    pub payload: Vec<u8>,
}

impl Side for Received {
    type DeadLetter = DeadLetter;
    const INFIX: &'static str = "inbox_";
    const COLUMNS: &'static str = "dead_letter_id, dead_at, consumer, source, lane_id, stream_id, message_id, received_at, \
                                   type_name, attempts, retried, reason, error, error_cut, error_fingerprint, holds";
    const RETRIED: &'static str = "matched, retried, 0, lanes, released, more";

    fn place(&self) -> Vec<&(dyn ToSql + Sync)> {
        vec![&self.consumer, &self.source]
    }

    fn read(row: &Row) -> Result<DeadLetter> {
        Ok(DeadLetter {
            dead_letter_id: column(row, 0)?,
            dead_at: column(row, 1)?,
            consumer: column(row, 2)?,
            source: column(row, 3)?,
            lane_id: column(row, 4)?,
            stream_id: column(row, 5)?,
            message_id: column(row, 6)?,
            received_at: column(row, 7)?,
            type_name: column(row, 8)?,
            attempts: column(row, 9)?,
            retried: column(row, 10)?,
            reason: FailureReason::from_number(column(row, 11)?),
            error: column(row, 12)?,
            error_cut: column(row, 13)?,
            error_fingerprint: column(row, 14)?,
            holds: column(row, 15)?,
        })
    }
}

/// One with its body; `None` if there is none of this id.
///
/// # Errors
/// [`crate::Error::Store`] if the database refuses.
pub async fn show(client: &impl GenericClient, schema: &SchemaName, dead_letter_id: i64) -> Result<Option<Shown>> {
    let statement = format!(
        "select l.*, s.correlation_id, s.causation_id, s.trace_id, s.span_id, s.trace_flags, s.content_type, s.metadata, \
         s.payload from (select {} from {schema}.list_inbox_dead_letters(p_ids => array[$1::int8])) l \
         join {schema}.show_inbox_dead_letter($1) s on s.dead_letter_id = l.dead_letter_id",
        Received::COLUMNS
    );
    let row = client.query_opt(&statement, &[&dead_letter_id]).await.map_err(store)?;
    row.map(|row| {
        Ok(Shown {
            dead_letter: Received::read(&row)?,
            correlation_id: column(&row, 16)?,
            causation_id: column(&row, 17)?,
            trace: Trace::from_columns(column(&row, 18)?, column(&row, 19)?, column(&row, 20)?),
            content_type: column(&row, 21)?,
            metadata: column(&row, 22)?,
            payload: column(&row, 23)?,
        })
    })
    .transpose()
}
