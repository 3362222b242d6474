//! `corelane`: the operators' binary. Installs and checks the schema, rebases after a restore, shows the state.
//!
//! Invariant: an error is one line on standard error that says what to do, and exit code 1; 2 for a wrong command line.

mod doctor;
mod schema;
mod status;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Parser, Subcommand};
use corelane::Error;
use corelane::metrics::ShardMetrics;
use corelane::runtime::tokio::TokioRuntime;
use corelane::store::connect::{Connect, ConnectPlan, ConnectTarget};
use corelane::store::schema_name::SchemaName;
use corelane::store::sqlstate::classify;

/// Operates a Corelane message engine in its Postgres.
#[derive(Debug, Parser)]
#[command(name = "corelane", version, about)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Install the schema, or bring it to this version.
    Migrate(schema::Migrate),
    /// After a restore or copy: rewrite what is pending, so that the engine can start here.
    Rebase(schema::Rebase),
    /// Check installation, server, privileges and this machine.
    Doctor(doctor::Doctor),
    /// Show what is pending, parked, dead and held.
    Status(status::Status),
}

/// Where the schema is.
#[derive(Debug, Args)]
struct Place {
    /// Connection string or URL of the database.
    #[arg(long, env = "CORELANE_DATABASE_URL", hide_env_values = true)]
    database_url: String,
    /// Schema of the installation.
    #[arg(long, env = "CORELANE_SCHEMA", default_value = "corelane")]
    schema: String,
}

impl Place {
    async fn connect(&self, runtime: &TokioRuntime) -> Result<(tokio_postgres::Client, SchemaName), Error> {
        let schema = SchemaName::new(&self.schema)?;
        let target = ConnectTarget::parse(&self.database_url).map_err(|error| Error::Config(error.to_string()))?;
        let settings = ConnectPlan::settings(&self.schema, "cli", 1_000, 60_000);
        let plan = ConnectPlan::new(target, settings).map_err(|error| Error::Config(error.to_string()))?;
        Ok((plan.on(runtime.clone()).connect().await?, schema))
    }

    /// Whether this role may look into the schema, if there is one: the server only says "permission denied".
    async fn may_look(&self, client: &tokio_postgres::Client, schema: &SchemaName) -> Result<(), Error> {
        let sql = "select current_user::text, coalesce(bool_and(has_schema_privilege(n.oid, 'usage') and
                (c.oid is null or has_table_privilege(c.oid, 'select'))), true)
            from pg_catalog.pg_namespace n
            left join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = 'wh_schema_migration'
            where n.nspname = $1";
        let row = client.query_one(sql, &[&self.schema]).await.map_err(|error| classify(&error))?;
        let (role, may): (String, bool) =
            (row.try_get(0).map_err(|error| classify(&error))?, row.try_get(1).map_err(|error| classify(&error))?);
        if may {
            return Ok(());
        }
        Err(Error::Schema(format!(
            "role {role} may not look into schema {schema}: run this as a role that may, or have the schema's owner run \
             `corelane migrate --grant-to {role}`, which gives it what a service's engine needs"
        )))
    }
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let options = Options::parse();
    let ended = TokioRuntime::run(Arc::new(ShardMetrics::default()), |runtime| async move {
        match options.command {
            Command::Migrate(migrate) => migrate.run(&runtime).await,
            Command::Rebase(rebase) => rebase.run(&runtime).await,
            Command::Doctor(doctor) => doctor.run(&runtime).await,
            Command::Status(status) => status.run(&runtime).await,
        }
    });
    match ended {
        Ok(Ok(Ok(()))) => return ExitCode::SUCCESS,
        Ok(Ok(Err(error))) => eprintln!("corelane: {error}"),
        // The panic has printed itself.
        Ok(Err(_)) => {}
        Err(error) => eprintln!("corelane: no runtime: {error}"),
    }
    ExitCode::FAILURE
}
