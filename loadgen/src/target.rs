//! The database under load: a private, throw-away server, or one that was given.
//!
//! Invariants
//! - On a given server loadgen touches one schema, which it makes and drops; one that exists already is
//!   refused, whoever made it.
//! - Faults and figures that need the server's processes exist on the private server only.

use std::str::FromStr;
use std::time::{Duration, Instant};

use tokio_postgres::config::Host;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Config, NoTls};
use uuid::Uuid;

use crate::cpu::ServerCpu;
use crate::failure::{Failure, Result};
use crate::private_server::PrivateServer;

/// How long a server may take until it lets somebody in again.
const RECOVERY_MAX: Duration = Duration::from_secs(30);

/// Where the load goes.
#[derive(Debug)]
pub struct Target {
    url: String,
    config: Config,
    private: Option<PrivateServer>,
}

impl Target {
    /// Uses the server at `url`, or starts a private one.
    ///
    /// # Errors
    /// Where the URL cannot be read, or the private server cannot be started.
    pub async fn open(url: Option<&str>) -> Result<Self> {
        let private = match url {
            Some(_) => None,
            None => Some(PrivateServer::start().await?),
        };
        let url = match (&private, url) {
            (Some(server), _) => server.url(),
            (None, Some(url)) => url.to_owned(),
            (None, None) => unreachable!("a private server was started"),
        };
        let mut config = Config::from_str(&url)
            .map_err(|error| Failure::Usage(format!("--database-url cannot be read: {error}")))?;
        config.application_name("loadgen");
        let target = Self { url, config, private };
        target.connect().await?;
        Ok(target)
    }

    /// The URL, for the engine.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The private server, if it is one.
    #[must_use]
    pub fn private(&self) -> Option<&PrivateServer> {
        self.private.as_ref()
    }

    /// Does something in a schema of its own, which goes with it whatever comes of it.
    ///
    /// # Errors
    /// Of the work, or of the database.
    pub async fn in_fresh_schema<T>(&self, work: impl AsyncFnOnce(&str) -> Result<T>) -> Result<T> {
        let schema = self.fresh_schema().await?;
        let outcome = work(&schema).await;
        self.drop_schema(&schema).await?;
        outcome
    }

    /// A connection of loadgen's own. Its task ends with the client. A server that is starting, or recovers from a
    /// fault of ours, is waited for.
    ///
    /// # Errors
    /// Where the server refuses.
    pub async fn connect(&self) -> Result<Client> {
        let deadline = Instant::now() + RECOVERY_MAX;
        let (client, connection) = loop {
            match self.config.connect(NoTls).await {
                Ok(connected) => break connected,
                Err(error) if error.code() == Some(&SqlState::CANNOT_CONNECT_NOW) && Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(source) => return Err(Failure::Unreachable { place: place(&self.config), source }),
            }
        };
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection of loadgen ended");
            }
        });
        Ok(client)
    }

    /// The server's CPU, where its processes can be seen.
    #[must_use]
    pub fn server_cpu(&self) -> Option<ServerCpu> {
        self.private.as_ref().and_then(PrivateServer::pid).map(ServerCpu::of)
    }

    /// A name for a schema of loadgen's own, which does not exist yet.
    ///
    /// # Errors
    /// Where it exists after all.
    pub async fn fresh_schema(&self) -> Result<String> {
        let name = format!("loadgen_{:08x}", Uuid::new_v4().as_u128() as u32);
        self.refuse_existing(&name).await?;
        Ok(name)
    }

    /// Refuses a schema that exists.
    ///
    /// # Errors
    /// [`Failure::Usage`] if it does.
    pub async fn refuse_existing(&self, schema: &str) -> Result<()> {
        let client = self.connect().await?;
        let taken = client.query_opt("select from pg_namespace where nspname = $1", &[&schema]).await?.is_some();
        if taken {
            return Err(Failure::Usage(format!(
                "schema {schema} exists already: loadgen works in one of its own only"
            )));
        }
        Ok(())
    }

    /// Drops a schema of loadgen's and what is in it.
    ///
    /// # Errors
    /// Where the server refuses.
    pub async fn drop_schema(&self, schema: &str) -> Result<()> {
        let client = self.connect().await?;
        client.batch_execute(&format!("drop schema if exists {} cascade", quoted(schema))).await?;
        Ok(())
    }

    /// The settings of the server that decide about these figures.
    ///
    /// # Errors
    /// Where the server does not answer.
    pub async fn settings(&self) -> Result<Vec<(String, String)>> {
        const NAMES: &[&str] = &[
            "server_version",
            "fsync",
            "synchronous_commit",
            "full_page_writes",
            "wal_level",
            "wal_sync_method",
            "wal_compression",
            "checkpoint_timeout",
            "max_wal_size",
            "shared_buffers",
            "max_connections",
            "autovacuum",
        ];
        let client = self.connect().await?;
        let rows = client
            .query(
                "select name, current_setting(name) from unnest($1::text[]) with ordinality as wanted (name, place) order by place",
                &[&NAMES],
            )
            .await?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
    }
}

/// Where it was looked for.
fn place(config: &Config) -> String {
    let ports = config.get_ports();
    let hosts = config.get_hosts().iter().enumerate().map(|(index, host)| {
        let host = match host {
            Host::Tcp(name) => name.clone(),
            Host::Unix(directory) => directory.display().to_string(),
        };
        // One port counts for all hosts.
        let port = ports.get(index).or(ports.first()).copied().unwrap_or(5432);
        format!("{host}:{port}")
    });
    hosts.collect::<Vec<_>>().join(", ")
}

/// A name quoted as an SQL identifier.
#[must_use]
pub fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_server_that_is_not_there_is_named_without_the_password() {
        let error = Target::open(Some("postgres://someone:hunter2@127.0.0.1:1/x")).await.unwrap_err().to_string();
        assert!(error.starts_with("database at 127.0.0.1:1: ") && !error.contains("hunter2"), "{error}");
        let error = Target::open(Some("host=/nowhere port=77 user=a password=hunter2")).await.unwrap_err().to_string();
        assert!(error.starts_with("database at /nowhere:77: ") && !error.contains("hunter2"), "{error}");
    }
}
