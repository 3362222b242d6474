//! From an error of the driver to what it means for the caller.
//!
//! Invariant: decided by SQLSTATE, never by text (servers speak many languages).

use tokio_postgres::error::DbError;

use crate::seam::store::StoreError;

/// What a failed statement means. A number that was taken (23505) is [`StoreError::NumberTaken`] only where the
/// statement writes numbers; here it is a refusal like any other.
#[must_use]
pub fn classify(error: &tokio_postgres::Error) -> StoreError {
    let Some(refusal) = error.as_db_error() else {
        return StoreError::ConnectionLost(with_source(error));
    };
    let (sqlstate, text) = (refusal.code().code().to_owned(), words(refusal));
    match sqlstate.as_str() {
        // The server ends, or has not begun yet.
        "57P01" | "57P02" | "57P03" | "57P05" => StoreError::ConnectionLost(text),
        "40001" | "40P01" | "55P03" | "57014" | "25006" => StoreError::Transient { sqlstate, text },
        "42501" | "3D000" => StoreError::Denied { sqlstate, text },
        code => match &code[..2] {
            "08" => StoreError::ConnectionLost(text),
            "53" => StoreError::Transient { sqlstate, text },
            "28" => StoreError::Denied { sqlstate, text },
            _ => StoreError::Refused { sqlstate, text },
        },
    }
}

fn words(refusal: &DbError) -> String {
    let mut text = refusal.message().to_owned();
    for more in [refusal.detail(), refusal.hint()].into_iter().flatten() {
        text.push_str("; ");
        text.push_str(more);
    }
    text
}

fn with_source(error: &tokio_postgres::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
