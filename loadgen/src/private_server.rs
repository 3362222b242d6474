//! The private, throw-away server, shared by the parts that load it and the parts that break it.
//!
//! Invariant: starting and stopping block, so they run beside the async threads; the server itself is
//! a child of a thread that lives as long as this process.

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
        let server = blocking(|| PrivatePostgres::start(Options::default()).map_err(cluster)).await?;
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

fn cluster(error: corelane::private_postgres::PrivatePostgresError) -> Failure {
    Failure::Cluster(error.to_string())
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(panic) => Err(Failure::Cluster(format!("ended in a panic: {panic}"))),
    }
}
