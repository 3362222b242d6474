//! Making a restored or copied installation this server's own: `corelane rebase`.
//!
//! Invariants
//! - Never while a migration or another rebase runs: they share the installer's lock.
//! - One transaction: after a failure the installation is as it was, and still refuses to be worked with.

use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::answer::column;
use super::install::{self, ATTEMPTS_MAX, retry_locks, store};
use super::schema_name::SchemaName;
use crate::error::Result;

/// What a rebase found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rebased {
    /// The new generation.
    pub generation: i32,
    /// References that wait to be published.
    pub pending: i64,
    /// Lanes that are parked.
    pub parked: i64,
    /// Messages that are scheduled.
    pub scheduled: i64,
    /// Dead letters.
    pub dead_letters: i64,
}

/// Rewrites what is pending under this server's transaction ids. `None` if server and database are those of the
/// installation, unless it is forced.
///
/// # Errors
/// [`crate::Error::Schema`] if the schema is not of this library's version (migrate first);
/// [`crate::Error::Store`] if an instance still works here, or the tables are held by others.
pub async fn rebase(client: &mut Client, schema: &SchemaName, force: bool) -> Result<Option<Rebased>> {
    install::check_version(client, schema).await?;
    let mut attempt = 1;
    loop {
        match rebase_once(client, schema, force).await {
            Err(error) if attempt < ATTEMPTS_MAX && retry_locks(&error) => attempt += 1,
            outcome => return outcome,
        }
    }
}

async fn rebase_once(client: &mut Client, schema: &SchemaName, force: bool) -> Result<Option<Rebased>> {
    let transaction = install::begin_locked(client, schema).await?;
    let statement =
        format!("select done, generation, pending, parked, scheduled, dead_letters from {schema}.rebase($1)");
    let row = transaction.query_typed_one(&statement, &[(&force, Type::BOOL)]).await.map_err(store)?;
    // An answer that cannot be read is a rebase that is not done.
    let rebased = match column(&row, 0)? {
        false => None,
        true => Some(Rebased {
            generation: column(&row, 1)?,
            pending: column(&row, 2)?,
            parked: column(&row, 3)?,
            scheduled: column(&row, 4)?,
            dead_letters: column(&row, 5)?,
        }),
    };
    transaction.commit().await.map_err(store)?;
    Ok(rebased)
}
