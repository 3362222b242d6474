//! The inbox in figures, as the database knows it: for a dashboard or an alarm, once in ten seconds or less.
//!
//! Invariant: reading them changes nothing and waits for nothing.

use tokio_postgres::GenericClient;

use super::answer::column;
use super::install::store;
use super::schema_name::SchemaName;
use crate::error::Result;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InboxStatistics {
    /// Consumers that have ever received something.
    pub consumers: i32,
    /// Parts of the memory: days that are remembered.
    pub days: i32,
    /// Days for which nobody has made a part in time: their ids are deleted one by one.
    pub days_skipped: i32,
    /// The oldest of the days, counted from 1970.
    pub oldest_day: Option<i32>,
    /// Size of the memory on disk, in bytes.
    pub seen_bytes: i64,
    /// Ids without a time of their own, which are never forgotten. An estimate.
    pub timeless_rows: i64,
    /// Ids that stand with no day, such as those of wrong clocks. An estimate.
    pub other_rows: i64,
    /// Messages that are kept because their first try failed, or because they wait behind such.
    pub kept: i64,
    /// Their size on disk, in bytes.
    pub kept_bytes: i64,
    /// Lanes that wait for another try or for an operator.
    pub parked: i64,
    /// Those that wait for an operator.
    pub held: i64,
    /// Those that have been due for a minute.
    pub overdue: i64,
    /// Age of the one parked first, in milliseconds.
    pub oldest_parked_ms: Option<i64>,
    /// Dead letters.
    pub dead_letters: i64,
}

/// Reads them.
///
/// # Errors
/// [`crate::Error::Store`] if the database refuses.
pub async fn inbox_statistics(client: &impl GenericClient, schema: &SchemaName) -> Result<InboxStatistics> {
    let statement = format!(
        "select consumers, days, days_skipped, oldest_day, seen_bytes, timeless_rows, other_rows, kept, kept_bytes, parked, \
         held, overdue, oldest_parked_ms, dead_letters from {schema}.inbox_statistics()"
    );
    let row = client.query_one(&statement, &[]).await.map_err(store)?;
    Ok(InboxStatistics {
        consumers: column(&row, 0)?,
        days: column(&row, 1)?,
        days_skipped: column(&row, 2)?,
        oldest_day: column(&row, 3)?,
        seen_bytes: column(&row, 4)?,
        timeless_rows: column(&row, 5)?,
        other_rows: column(&row, 6)?,
        kept: column(&row, 7)?,
        kept_bytes: column(&row, 8)?,
        parked: column(&row, 9)?,
        held: column(&row, 10)?,
        overdue: column(&row, 11)?,
        oldest_parked_ms: column(&row, 12)?,
        dead_letters: column(&row, 13)?,
    })
}
