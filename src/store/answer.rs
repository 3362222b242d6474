//! The columns of an answer to an operator's call.
//!
//! Invariant: an answer of another version's schema is an error that says so, and what to do; never a panic.

use std::error::Error as _;

use tokio_postgres::Row;
use tokio_postgres::types::FromSql;

use super::sql::SCHEMA_VERSION;
use crate::error::{Error, Result};

/// One of them, by its index.
///
/// # Errors
/// [`Error::Schema`] if it is not there, or not of this type.
pub(super) fn column<'r, T: FromSql<'r>>(row: &'r Row, index: usize) -> Result<T> {
    row.try_get(index).map_err(|error| {
        let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
        let name = row.columns().get(index).map_or("(none)", |column| column.name());
        Error::Schema(format!(
            "the database answers otherwise than this library (schema version {SCHEMA_VERSION}) reads, column {name}: \
             {error}{cause}. The schema is of another version: run `corelane migrate` of this version if the schema is \
             older, or use a program of the schema's version"
        ))
    })
}
