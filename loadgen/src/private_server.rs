//! The private, throw-away server, shared by the parts that load it and the parts that break it.
//!
//! Invariant: starting and stopping block, so they run beside the async threads; the server itself is
//! a child of a thread that lives as long as this process.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use corelane::private_postgres::{Options, PrivatePostgres, StopMode};

use crate::failure::{Failure, Result};

/// A server that belongs to this process and goes away with it.
#[derive(Clone)]
pub struct PrivateServer(Arc<Mutex<PrivatePostgres>>);

impl std::fmt::Debug for PrivateServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PrivateServer")
    }
}

impl PrivateServer {
    /// Makes a cluster and starts it.
    ///
    /// # Errors
    /// Where there are no server binaries, or the server does not start.
    pub async fn start() -> Result<Self> {
        let server = blocking(|| {
            let settings = vec!["log_line_prefix=%a ".to_owned()];
            PrivatePostgres::start(Options { settings, ..Options::default() }).map_err(cluster)
        })
        .await?;
        if !server.is_durable() {
            eprintln!(
                "loadgen: the private server's files are not on a disk: these figures say nothing about a durable server"
            );
        }
        Ok(Self(Arc::new(Mutex::new(server))))
    }

    /// Where it listens.
    #[must_use]
    pub fn url(&self) -> String {
        self.with(|server| server.url("postgres"))
    }

    /// Its socket, for a proxy.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.with(|server| server.socket_directory().join(".s.PGSQL.5432"))
    }

    /// What its log says of deadlocks and conflicts of serialization on connections of an engine: each with the lines
    /// that explain it.
    ///
    /// # Errors
    /// Where the log cannot be read.
    pub fn engine_conflicts(&self) -> Result<Vec<String>> {
        const EXPLAINED_BY: usize = 12;
        let path = self.with(PrivatePostgres::log_path);
        let log = File::open(&path).map_err(Failure::io(format!("reading {}", path.display())))?;
        let mut conflicts: Vec<String> = Vec::new();
        let mut left = 0;
        for line in BufReader::new(log).split(b'\n') {
            let line = line.map_err(Failure::io("reading the server's log"))?;
            let line = String::from_utf8_lossy(&line);
            if is_conflict(&line) {
                conflicts.push(line.into_owned());
                left = EXPLAINED_BY;
            } else if left > 0
                && let Some(conflict) = conflicts.last_mut()
            {
                conflict.push('\n');
                conflict.push_str(&line);
                left -= 1;
            }
        }
        Ok(conflicts)
    }

    /// The postmaster's process id, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        self.with(|server| server.pid().map(|pid| pid as i32))
    }

    /// Stops it as a crash would and starts it again.
    ///
    /// # Errors
    /// With the end of its log, if it does not come back.
    pub async fn restart(&self) -> Result<()> {
        let this = self.clone();
        blocking(move || {
            let mut server = this.0.lock().unwrap_or_else(PoisonError::into_inner);
            server.restart(StopMode::Immediate).map_err(cluster)
        })
        .await
    }

    fn with<T>(&self, of: impl FnOnce(&PrivatePostgres) -> T) -> T {
        of(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A line begins with the connection's name, by `log_line_prefix`.
fn is_conflict(line: &str) -> bool {
    let of_engine = line.starts_with("corelane/") && line.contains("ERROR:");
    of_engine && (line.contains("deadlock detected") || line.contains("could not serialize access"))
}

fn cluster(error: corelane::private_postgres::PrivatePostgresError) -> Failure {
    Failure::Cluster(error.to_string())
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(panic) => Err(Failure::Cluster(format!("ended in a panic: {panic}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicts_of_engines_are_counted_and_no_others() {
        assert!(is_conflict("corelane/x/shard-0 ERROR:  deadlock detected"));
        assert!(is_conflict("corelane/x/keeper ERROR:  could not serialize access due to concurrent update"));
        assert!(!is_conflict("loadgen/x ERROR:  deadlock detected"));
        assert!(!is_conflict("corelane/x/shard-0 ERROR:  canceling statement due to statement timeout"));
        assert!(!is_conflict("corelane/x/shard-0 STATEMENT:  select 'deadlock detected'"));
    }
}
