//! `corelane doctor`: whether an engine could work here, and how well: one line a finding.
//!
//! Invariant: every finding that is not fine says what to do about it.

use clap::Args;
use corelane::Error;
use corelane::config::RuntimeChoice;
use corelane::runtime::affinity::usable_cores;
use corelane::runtime::probe;
use corelane::runtime::tokio::TokioRuntime;
use corelane::store::grants;
use corelane::store::install;
use corelane::store::schema_name::SchemaName;
use corelane::store::sqlstate::classify;
use tokio_postgres::Client;

use crate::Place;

/// Check installation, server, privileges and this machine.
#[derive(Debug, Args)]
pub struct Doctor {
    #[command(flatten)]
    place: Place,
}

impl Doctor {
    /// Asks and prints.
    ///
    /// # Errors
    /// Why an engine could not start.
    pub async fn run(&self, runtime: &TokioRuntime) -> Result<(), Error> {
        let decision = probe::decide(RuntimeChoice::Auto)?;
        println!("runtime       {} ({})", decision.kind.name(), decision.reason);
        println!("cores         {} usable: {:?}", usable_cores().len(), usable_cores());
        let (client, schema) = self.place.connect(runtime).await?;
        server(&client).await?;
        let installed = install::verify(&client, &schema, None).await?;
        println!(
            "installation  schema {schema} fits this library: {} partitions, generation {}",
            installed.partition_count, installed.generation
        );
        privileges(&client, &schema).await
    }
}

async fn server(client: &Client) -> Result<(), Error> {
    let row = client
        .query_one(
            "select current_setting('server_version_num')::int4 / 10000, pg_is_in_recovery(), \
             current_setting('fsync')::bool, current_setting('full_page_writes')::bool, \
             current_setting('synchronous_commit'), current_setting('max_prepared_transactions')::int4, \
             (select count(*) from pg_stat_activity where state like 'idle in transaction%' \
             and xact_start < now() - interval '1 minute')",
            &[],
        )
        .await
        .map_err(|error| classify(&error))?;
    let version: i32 = row.get(0);
    match version {
        ..15 => println!("server        PostgreSQL {version}: too old, 15 is the least"),
        15..=18 => println!("server        PostgreSQL {version}"),
        _ => println!("server        PostgreSQL {version}: newer than what was tested (18)"),
    }
    if row.get(1) {
        println!("              a standby: the engine works on the primary only");
    }
    for (column, setting) in [(2, "fsync"), (3, "full_page_writes")] {
        if !row.get::<_, bool>(column) {
            println!("              {setting} is off: a crash of the machine may lose messages");
        }
    }
    if row.get::<_, &str>(4) == "off" {
        println!("              synchronous_commit is off: a crash may lose acknowledged messages; set it to on");
    }
    let idle: i64 = row.get(6);
    if idle > 0 {
        println!("              {idle} sessions are idle in a transaction for over a minute: they may hold a segment");
    }
    Ok(())
}

async fn privileges(client: &Client, schema: &SchemaName) -> Result<(), Error> {
    let missing = grants::missing(client, schema).await?;
    if missing.is_empty() {
        println!("privileges    this role may do what an engine does");
        return Ok(());
    }
    for privilege in &missing {
        println!("privileges    {privilege} is missing");
    }
    Err(Error::Schema(format!(
        "{} privileges are missing: `corelane migrate --grant-to ROLE`, run by the schema's owner, gives a service's role \
         what it needs",
        missing.len()
    )))
}
