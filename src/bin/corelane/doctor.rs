//! `corelane doctor`: whether an engine could work here, and how well: one line a finding.
//!
//! Invariant: every finding that is not fine says what to do about it.

use clap::Args;
use corelane::config::RuntimeChoice;
use corelane::runtime::affinity::usable_cores;
use corelane::runtime::probe;
use corelane::runtime::tokio::TokioRuntime;
use corelane::store::grants;
use corelane::store::install;
use corelane::store::schema_name::SchemaName;
use corelane::store::sqlstate::classify;
use corelane::{Error, inbox_statistics};
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
        self.place.may_look(&client, &schema).await?;
        let installed = install::verify(&client, &schema, None).await?;
        println!(
            "installation  schema {schema} fits this library: {} partitions, generation {}",
            installed.partition_count, installed.generation
        );
        privileges(&client, &schema).await?;
        inbox(&client, &schema).await?;
        subscriptions(&client, &schema).await
    }
}

async fn inbox(client: &Client, schema: &SchemaName) -> Result<(), Error> {
    let found = inbox_statistics(client, schema).await?;
    println!(
        "inbox         {} consumers: {} messages kept, {} streams wait, {} of them for an operator; {} dead letters",
        found.consumers, found.kept, found.parked, found.held, found.dead_letters
    );
    if found.overdue > 0 {
        println!(
            "              {} streams have been due for over a minute: start an engine that has their consumer \
             (`corelane status` names it)",
            found.overdue
        );
    }
    if found.held > 0 || found.dead_letters > 0 {
        println!(
            "              dead letters: look at them by list_inbox_dead_letters, then retry_inbox_dead_letters or \
             discard_inbox_dead_letters"
        );
    }
    if found.days_skipped > 0 {
        println!(
            "              {} days of the memory have no part of their own: let an engine with a consumer run all the time",
            found.days_skipped
        );
    }
    Ok(())
}

async fn subscriptions(client: &Client, schema: &SchemaName) -> Result<(), Error> {
    let refused = |error: tokio_postgres::Error| Error::from(classify(&error));
    let statement = format!(
        "select s.name, m.events, m.oldest_age_ms, m.members, m.partitions_free from {schema}.wh_subscription s \
         cross join lateral {schema}.measure_subscription(s.name, 100000) m order by s.name"
    );
    for row in client.query(&statement, &[]).await.map_err(refused)? {
        let (name, events, oldest_ms): (&str, i64, i64) =
            (row.try_get(0).map_err(refused)?, row.try_get(1).map_err(refused)?, row.try_get(2).map_err(refused)?);
        let (members, free): (i32, i32) = (row.try_get(3).map_err(refused)?, row.try_get(4).map_err(refused)?);
        let age = if events > 0 { format!(", the oldest {} s old", oldest_ms / 1_000) } else { String::new() };
        println!("subscription  {name}: {events} events behind{age}; {members} members");
        if members == 0 {
            println!("              nobody follows it: start one that does, or remove_subscription('{name}')");
        } else if free > 0 {
            println!(
                "              {free} partitions have nobody: a member takes them within a lease, look again then"
            );
        }
    }
    Ok(())
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
    let refused = |error: tokio_postgres::Error| Error::from(classify(&error));
    let version: i32 = row.try_get(0).map_err(refused)?;
    match version {
        ..15 => println!("server        PostgreSQL {version}: too old, 15 is the least"),
        15..=18 => println!("server        PostgreSQL {version}"),
        _ => println!("server        PostgreSQL {version}: newer than what was tested (18)"),
    }
    if row.try_get(1).map_err(refused)? {
        println!("              a standby: the engine works on the primary only");
    }
    for (column, setting) in [(2, "fsync"), (3, "full_page_writes")] {
        if !row.try_get::<_, bool>(column).map_err(refused)? {
            println!("              {setting} is off: a crash of the machine may lose messages");
        }
    }
    if row.try_get::<_, &str>(4).map_err(refused)? == "off" {
        println!("              synchronous_commit is off: a crash may lose acknowledged messages; set it to on");
    }
    let idle: i64 = row.try_get(6).map_err(refused)?;
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
