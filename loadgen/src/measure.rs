//! What a load costs: CPU of server and client, WAL, commits, changed rows, allocations.
//!
//! Invariants
//! - CPU, WAL and allocations are differences of two readings between which every counted message was
//!   stored **and** published: work left for later is not cheap, it is in the figure.
//! - Commits and changed rows come from the server's statistics, which backends report late; they are read
//!   before the subject connects and after its connections have ended, and divided by all its messages.
//! - WAL is the distance of the insert position, full-page images included.

use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::cpu::{self, ServerCpu};
use crate::failure::Result;
use crate::figures::Figures;
use crate::target::Target;
use crate::{allocations, failure::Failure};

/// One moment.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// When.
    pub at: Instant,
    /// CPU of all server processes since they started.
    pub server_cpu_us: Option<u64>,
    /// CPU of this process.
    pub client_cpu_us: u64,
    /// WAL insert position.
    pub wal_bytes: u64,
    /// Allocations of this process.
    pub allocations: u64,
}

/// The server's own counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Commits in this database.
    pub commits: u64,
    /// Rows updated or deleted in the schema's tables.
    pub changed_rows: u64,
}

/// Takes readings.
#[derive(Debug)]
pub struct Meter {
    client: Client,
    server: Option<ServerCpu>,
}

impl Meter {
    /// A meter with a connection of its own.
    ///
    /// # Errors
    /// Where the server does not answer.
    pub async fn new(target: &Target) -> Result<Self> {
        Ok(Self { client: target.connect().await?, server: target.server_cpu() })
    }

    /// Server CPU alone, without a statement.
    #[must_use]
    pub fn server(&self) -> Option<ServerCpu> {
        self.server
    }

    /// Reads everything that can be read at once.
    ///
    /// # Errors
    /// Where the server does not answer.
    pub async fn read(&self) -> Result<Reading> {
        const WAL: &str = "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::int8";
        let wal: i64 = self.client.query_one(WAL, &[]).await?.get(0);
        Ok(Reading {
            at: Instant::now(),
            server_cpu_us: self.server.and_then(ServerCpu::read_us),
            client_cpu_us: cpu::of_this_process_us(),
            wal_bytes: wal as u64,
            allocations: allocations::count(),
        })
    }

    /// Writes out dirty pages, so that the next subject does not pay for the last one's.
    ///
    /// # Errors
    /// Where the server does not answer. A role without the right to is no error.
    pub async fn settle_server(&self) -> Result<()> {
        match self.client.batch_execute("checkpoint").await {
            Err(error) if error.code() == Some(&tokio_postgres::error::SqlState::INSUFFICIENT_PRIVILEGE) => Ok(()),
            other => Ok(other?),
        }
    }

    /// The server's counts for a schema, as far as they have been reported.
    ///
    /// # Errors
    /// Where the server does not answer.
    pub async fn counts(&self, schema: &str) -> Result<Counts> {
        const COUNTS: &str = "select (select xact_commit from pg_stat_database where datname = current_database()), \
             coalesce((select sum(n_tup_upd + n_tup_del) from pg_stat_all_tables where schemaname = $1), 0)::int8";
        let row = self.client.query_one(COUNTS, &[&schema]).await?;
        Ok(Counts { commits: row.get::<_, i64>(0) as u64, changed_rows: row.get::<_, i64>(1) as u64 })
    }

    /// The counts once no other backend of this database is connected under `application`, and reported them.
    ///
    /// # Errors
    /// [`Failure::TimedOut`] if some stay connected for ten seconds.
    pub async fn final_counts(&self, schema: &str, application: &str) -> Result<Counts> {
        const CONNECTED: &str = "select count(*) from pg_stat_activity where datname = current_database() \
             and pid <> pg_backend_pid() and starts_with(application_name, $1)";
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.client.query_one(CONNECTED, &[&application]).await?.get::<_, i64>(0) > 0 {
            if Instant::now() > deadline {
                return Err(Failure::TimedOut(format!(
                    "connections of \"{application}\" are open ten seconds after its end"
                )));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.counts(schema).await
    }
}

/// Puts the difference of two readings into the figures.
pub fn charge(figures: &mut Figures, from: &Reading, to: &Reading, messages: u64) {
    let each = |total: u64| total as f64 / messages.max(1) as f64;
    figures.messages = messages;
    figures.seconds = to.at.duration_since(from.at).as_secs_f64();
    figures.messages_per_second = messages as f64 / figures.seconds.max(1e-9);
    figures.server_cpu_us_per_message = from.server_cpu_us.zip(to.server_cpu_us).map(|(from, to)| each(to - from));
    figures.client_cpu_us_per_message = Some(each(to.client_cpu_us - from.client_cpu_us));
    figures.wal_bytes_per_message = Some(each(to.wal_bytes - from.wal_bytes));
    let allocated = to.allocations - from.allocations;
    figures.allocations_per_message = (to.allocations > 0).then(|| each(allocated));
}

/// Puts the server's counts into the figures.
pub fn charge_counts(figures: &mut Figures, from: &Counts, to: &Counts, messages: u64) {
    let each = |total: u64| total as f64 / messages.max(1) as f64;
    figures.commits_per_message = Some(each(to.commits.saturating_sub(from.commits)));
    figures.rows_updated_or_deleted_per_message = Some(each(to.changed_rows.saturating_sub(from.changed_rows)));
}
