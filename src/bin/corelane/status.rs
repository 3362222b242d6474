//! `corelane status`: the figures of `wh_status`, one a line.

use clap::Args;
use corelane::Error;
use corelane::runtime::tokio::TokioRuntime;
use corelane::store::install;
use corelane::store::sqlstate::{classify, is_missing_object};

use crate::Place;

/// Show what is pending, parked, dead and held.
#[derive(Debug, Args)]
pub struct Status {
    #[command(flatten)]
    place: Place,
}

impl Status {
    /// Asks and prints.
    ///
    /// # Errors
    /// What the database said.
    pub async fn run(&self, runtime: &TokioRuntime) -> Result<(), Error> {
        let (client, schema) = self.place.connect(runtime).await?;
        let statement = format!("select what, figure, note from {schema}.wh_status()");
        let rows = match client.query(&statement, &[]).await {
            Ok(rows) => rows,
            Err(error) => {
                if error.code().is_some_and(|code| is_missing_object(code.code())) {
                    // Not installed, or too old: it says which, and what to do.
                    install::verify(&client, &schema, None).await?;
                }
                return Err(classify(&error).into());
            }
        };
        for row in rows {
            let (what, figure, note): (&str, i64, Option<&str>) = (row.get(0), row.get(1), row.get(2));
            println!("{what:<18} {figure:>12}  {}", note.unwrap_or_default());
        }
        Ok(())
    }
}
