//! What an error of the database means for whoever asked: by SQLSTATE, never by text.
//!
//! Invariants
//! - `ConnectionLost` is the cautious answer: whatever leaves it open whether a COMMIT took place is that.
//! - The server's detail is left out of every text: it quotes rows, so payloads. Its hint is not.
//! - Only the driver's own findings, which have no SQLSTATE, are told apart by their (English, fixed) words.

use std::error::Error as _;

use tokio_postgres::Error as PostgresError;
use tokio_postgres::error::{DbError, Severity, SqlState};
use uuid::Uuid;

use crate::batch::Rows;
use crate::seam::store::StoreError;

/// SQLSTATE of errors that are the client's own finding.
const CLIENT_PROTOCOL: &str = "08P01";

/// What an error means, without regard to the statement: a unique value that was taken (23505) is a refusal.
#[must_use]
pub fn classify(error: &PostgresError) -> StoreError {
    match error.as_db_error() {
        Some(refusal) => truncated(refusal).unwrap_or_else(|| from_database(refusal)),
        None => from_driver(error),
    }
}

impl StoreError {
    /// What an error means of a statement that writes numbers: one that was taken is [`StoreError::NumberTaken`].
    #[must_use]
    pub fn from_postgres(error: &PostgresError) -> Self {
        match error.code() {
            Some(code) if *code == SqlState::UNIQUE_VIOLATION => Self::NumberTaken,
            _ => classify(error),
        }
    }
}

/// The lane whose number was taken, if it was one of `wh_outbox`. The key stands in the detail, in the same form in
/// every language of the server; nothing else of the detail is used.
fn taken_lane(error: &PostgresError) -> Option<Uuid> {
    let refusal = error.as_db_error().filter(|refusal| *refusal.code() == SqlState::UNIQUE_VIOLATION)?;
    lane_of_key(refusal.detail()?)
}

/// Why rows could not be stored: where the lane of a message without stream is taken, that message is stored already.
#[must_use]
pub fn number_taken<'a>(error: &PostgresError, batches: impl IntoIterator<Item = &'a Rows>) -> StoreError {
    // No stream has the lane of a message without one (`ids::lane_of_message`). Scheduled ones get their numbers when
    // they are due.
    let message_of = |lane: Uuid| {
        let is_it = |rows: &Rows, row: usize| {
            rows.lane_id[row] == lane && rows.stream_id(row).is_none() && !rows.is_scheduled(row)
        };
        batches.into_iter().find_map(|rows| {
            let row = (0..rows.len()).find(|row| is_it(rows, *row))?;
            Some(rows.message_id[row])
        })
    };
    match taken_lane(error).and_then(message_of) {
        Some(message_id) => StoreError::DuplicateMessage { message_id },
        None => StoreError::from_postgres(error),
    }
}

fn lane_of_key(detail: &str) -> Option<Uuid> {
    let (_, key) = detail.split_once("(lane_id, stream_seq)=(")?;
    Uuid::parse_str(key.split_once(',')?.0).ok()
}

/// SQLSTATE of an append whose stream has another version than expected.
const VERSION_CONFLICT: &str = "CL010";

/// The stream, the version expected, and the one found, of an append that was refused for it. They stand in the detail, in
/// a form of ours.
#[must_use]
pub fn version_conflict(error: &PostgresError) -> Option<(Uuid, i64, i64)> {
    let refusal = error.as_db_error().filter(|refusal| refusal.code().code() == VERSION_CONFLICT)?;
    versions_of_detail(refusal.detail()?)
}

fn versions_of_detail(detail: &str) -> Option<(Uuid, i64, i64)> {
    let mut parts = detail.split(' ').filter_map(|part| part.split_once('=')).map(|(_, value)| value);
    Some((Uuid::parse_str(parts.next()?).ok()?, parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// SQLSTATE of a read that begins below the first event that is kept.
const TRUNCATED: &str = "CL030";

fn truncated(refusal: &DbError) -> Option<StoreError> {
    let detail = refusal.detail().filter(|_| refusal.code().code() == TRUNCATED)?;
    let mut parts = detail.split(' ').filter_map(|part| part.split_once('=')).map(|(_, value)| value);
    Some(StoreError::Truncated {
        stream_id: Uuid::parse_str(parts.next()?).ok()?,
        first_version: parts.next()?.parse().ok()?,
        note: bounded(refusal.hint().unwrap_or_default()),
    })
}

impl From<PostgresError> for StoreError {
    fn from(error: PostgresError) -> Self {
        classify(&error)
    }
}

/// The socket failed, and not what was said on it.
fn is_broken_connection(error: &PostgresError) -> bool {
    error
        .source()
        .and_then(|cause| cause.downcast_ref::<std::io::Error>())
        .is_some_and(|cause| cause.kind() != std::io::ErrorKind::InvalidData)
}

fn from_database(refusal: &DbError) -> StoreError {
    let mut text = refusal.message().to_owned();
    if let Some(hint) = refusal.hint() {
        text.push_str("; ");
        text.push_str(hint);
    }
    let ends_session = matches!(refusal.parsed_severity(), Some(Severity::Fatal | Severity::Panic));
    meaning(refusal.code().code(), ends_session, bounded(&text))
}

/// tokio-postgres' own findings; its kinds are not public, its first words are.
fn from_driver(error: &PostgresError) -> StoreError {
    let kind = error.to_string();
    let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
    if ["authentication error", "invalid configuration", "invalid connection string"].contains(&kind.as_str()) {
        // The cause of the last may quote the connection line, so the password.
        let text = if kind.ends_with("string") { kind } else { bounded(&format!("{kind}{cause}")) };
        return StoreError::Denied { sqlstate: "28000".to_owned(), text };
    }
    if kind == "error performing TLS handshake" && !is_broken_connection(error) {
        return StoreError::Denied { sqlstate: CLIENT_PROTOCOL.to_owned(), text: bounded(&format!("{kind}{cause}")) };
    }
    // Before anything was sent, or after an answer that cannot be read: again with the same input.
    let is_ours = ["error serializing", "error deserializing", "invalid column", "expected ", "query returned"]
        .iter()
        .any(|start| kind.starts_with(start));
    if is_ours || kind == "error encoding message to server" {
        return StoreError::Refused { sqlstate: CLIENT_PROTOCOL.to_owned(), text: bounded(&format!("{kind}{cause}")) };
    }
    StoreError::ConnectionLost(bounded(&format!("{kind}{cause}")))
}

fn meaning(code: &str, ends_session: bool, text: String) -> StoreError {
    let sqlstate = code.to_owned();
    match code {
        // No or a wrong password, no such database, no right to connect or to touch an object.
        "3D000" | "42501" => StoreError::Denied { sqlstate, text },
        _ if code.starts_with("28") => StoreError::Denied { sqlstate, text },
        // The back end went away, or 40003: it does not know itself what became of the statement.
        "40003" | "25P03" | "57P01" | "57P02" | "57P03" | "57P05" => StoreError::ConnectionLost(text),
        _ if code.starts_with("08") => StoreError::ConnectionLost(text),
        // 40002: a constraint, checked at commit.
        "40002" => StoreError::Refused { sqlstate, text },
        "25006" | "55P03" | "55006" | "57014" => StoreError::Transient { sqlstate, text },
        // 40 rolled back for others' sake, 53 no room, 58 the server's disk. A FATAL among them (53300: too many
        // connections) comes before a session exists, so nothing is left open.
        _ if ["40", "53", "58"].iter().any(|class| code.starts_with(class)) => StoreError::Transient { sqlstate, text },
        _ if ends_session => StoreError::ConnectionLost(format!("{code}: {text}")),
        _ => StoreError::Refused { sqlstate, text },
    }
}

/// Whether something that a statement of ours names is not there: function, table, column, schema.
#[must_use]
pub fn is_missing_object(sqlstate: &str) -> bool {
    matches!(sqlstate, "42883" | "42P01" | "42703" | "3F000")
}

fn bounded(text: &str) -> String {
    crate::error::bounded_error_text(text).0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(code: &str) -> &'static str {
        match meaning(code, false, String::new()) {
            StoreError::ConnectionLost(_) => "lost",
            StoreError::Refused { .. } => "refused",
            StoreError::NumberTaken | StoreError::DuplicateMessage { .. } => "a number, which is not decided here",
            StoreError::Truncated { .. } => "a stream's beginning, which is not decided here",
            StoreError::Transient { .. } => "transient",
            StoreError::Denied { .. } => "denied",
            StoreError::SchemaChanged { .. } => "the schema's, which is not decided here",
        }
    }

    #[test]
    fn every_code_of_the_design_has_its_meaning() {
        for (codes, expected) in [
            ("40001 40P01 53100 53200 53300 53400 55P03 55006 57014 25006 58030", "transient"),
            ("28P01 28000 3D000 42501", "denied"),
            ("08006 08003 08P01 57P01 57P02 57P03 57P05 25P03 40003", "lost"),
            ("22023 22P02 23502 23505 23503 23514 40002 42P01 42883 0A000 25P02 XX000 P0001", "refused"),
        ] {
            for code in codes.split(' ') {
                assert_eq!(kind(code), expected, "{code}");
            }
        }
    }

    #[test]
    fn the_lane_of_a_taken_number_is_read_in_every_language() {
        let id = Uuid::from_u128(7);
        for detail in [
            format!("Key (lane_id, stream_seq)=({id}, 1) already exists."),
            format!("Schlüssel »(lane_id, stream_seq)=({id}, 1)« existiert bereits."),
        ] {
            assert_eq!(lane_of_key(&detail), Some(id), "{detail}");
        }
        assert_eq!(lane_of_key(&format!("Key (stream_id, version)=({id}, 1) already exists.")), None);
    }

    #[test]
    fn the_versions_of_a_conflict_are_read_and_nothing_else_is_taken_for_one() {
        let id = Uuid::from_u128(7);
        assert_eq!(versions_of_detail(&format!("stream_id={id} expected=3 found=5")), Some((id, 3, 5)));
        assert_eq!(versions_of_detail("Key (lane_id, stream_seq)=(7, 1) already exists."), None);
    }

    #[test]
    fn an_unknown_error_that_ends_the_session_leaves_the_commit_open() {
        assert!(matches!(meaning("XX000", true, String::new()), StoreError::ConnectionLost(_)));
    }
}
