//! `corelane migrate` and `corelane rebase`.

use clap::Args;
use corelane::Error;
use corelane::runtime::tokio::TokioRuntime;
use corelane::store::{grants, install, rebase};

use crate::Place;

/// Install the schema, or bring it to this version.
#[derive(Debug, Args)]
pub struct Migrate {
    #[command(flatten)]
    place: Place,
    /// Partitions, fixed at install: the unit of lease and take-over.
    #[arg(long, default_value_t = 64)]
    partitions: u32,
    /// Give this role what a service's engine needs in the schema.
    #[arg(long, value_name = "ROLE")]
    grant_to: Option<String>,
    /// Let this role truncate streams and erase events (`truncate_stream`, `erase_events`), which a service may not.
    #[arg(long, value_name = "ROLE")]
    grant_operator_to: Option<String>,
}

impl Migrate {
    /// Does it and says what was done.
    ///
    /// # Errors
    /// Why it was not done. A role that cannot be granted to leaves the schema as migrated.
    pub async fn run(&self, runtime: &TokioRuntime) -> Result<(), Error> {
        let (mut client, schema) = self.place.connect(runtime).await?;
        let migrated = install::migrate(&mut client, &schema, self.partitions).await?;
        if migrated.installed {
            println!("installed schema {schema} with {} partitions", self.partitions);
        } else if migrated.changed() {
            println!(
                "schema {schema}: {} migrations applied, {} functions replaced",
                migrated.migrations.len(),
                migrated.functions.len()
            );
        } else {
            println!("schema {schema} is up to date");
        }
        if let Some(role) = &self.grant_to {
            grants::grant(&client, &schema, role).await?;
            println!("role {role:?} may work with it");
        }
        if let Some(role) = &self.grant_operator_to {
            grants::grant_operator(&client, &schema, role).await?;
            println!("role {role:?} may truncate streams and erase events");
        }
        Ok(())
    }
}

/// After a restore or copy: rewrite what is pending, so that the engine can start here.
#[derive(Debug, Args)]
pub struct Rebase {
    #[command(flatten)]
    place: Place,
    /// Also where server and database are those of the installation (after a restore into the same database).
    #[arg(long)]
    force: bool,
}

impl Rebase {
    /// Does it and says what was done.
    ///
    /// # Errors
    /// Why it was not done; nothing is changed then.
    pub async fn run(&self, runtime: &TokioRuntime) -> Result<(), Error> {
        let (mut client, schema) = self.place.connect(runtime).await?;
        match rebase::rebase(&mut client, &schema, self.force).await? {
            Some(rebased) => println!(
                "schema {schema} is rebased, generation {}: {} messages wait to be published, {} lanes are parked, \
                 {} messages are scheduled, {} dead letters",
                rebased.generation, rebased.pending, rebased.parked, rebased.scheduled, rebased.dead_letters
            ),
            None => println!("schema {schema} is where it was made: nothing to rebase (--force does it all the same)"),
        }
        Ok(())
    }
}
