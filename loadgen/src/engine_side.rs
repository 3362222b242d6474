//! Corelane itself as the subject of a measurement.

use crate::failure::Result;
use crate::target::{Target, quoted};

/// Installs the engine's schema.
///
/// # Errors
/// Of the database.
pub async fn install(target: &Target, schema: &str) -> Result<()> {
    let client = target.connect().await?;
    client.batch_execute(&format!("create schema {}", quoted(schema))).await?;
    client
        .batch_execute(&include_str!("../../sql/migrations/0001_tables.sql").replace("@schema@", &quoted(schema)))
        .await?;
    Ok(())
}
