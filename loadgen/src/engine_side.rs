//! Corelane itself as the subject of a measurement.

use corelane::store::install::migrate;
use corelane::store::schema_name::SchemaName;

use crate::failure::Result;
use crate::target::Target;

/// Installs the engine's schema.
///
/// # Errors
/// Of the database.
pub async fn install(target: &Target, schema: &str) -> Result<()> {
    let mut client = target.connect().await?;
    migrate(&mut client, &SchemaName::new(schema)?, 64).await?;
    Ok(())
}
