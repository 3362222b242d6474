//! `corelane status`: the figures of `wh_status`, one a line: what waits to be published, and to be handled by consumers,
//! and how far subscriptions are behind.

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
    /// What the database said, or what this role has to be granted.
    pub async fn run(&self, runtime: &TokioRuntime) -> Result<(), Error> {
        let (client, schema) = self.place.connect(runtime).await?;
        let statement = format!("select what, figure, note from {schema}.wh_status()");
        let rows = match client.query(&statement, &[]).await {
            Ok(rows) => rows,
            Err(error) => {
                self.place.may_look(&client, &schema).await?;
                if error.code().is_some_and(|code| is_missing_object(code.code())) {
                    // Not installed, or too old: it says which, and what to do.
                    install::verify(&client, &schema, None).await?;
                }
                return Err(classify(&error).into());
            }
        };
        for row in rows {
            let column = |index| row.try_get::<_, Option<&str>>(index).map_err(|error| classify(&error));
            let figure: i64 = row.try_get(1).map_err(|error| classify(&error))?;
            println!("{:<18} {figure:>12}  {}", column(0)?.unwrap_or_default(), column(2)?.unwrap_or_default());
        }
        Ok(())
    }
}
