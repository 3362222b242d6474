//! A private, throw-away Postgres for loadgen, tests and benchmarks.
//!
//! Invariants
//! - Durable settings: fsync, full-page writes and synchronous commit as a stock server has them, on a file
//!   system that is not in memory (or loudly said to be).
//! - Reached through a unix socket only, in a directory only its server's user can enter.
//! - It does not outlive its process: dropped, interrupted or killed, the server ends (the kernel signals it)
//!   and its directory goes, at the latest when the next private server starts.

mod binaries;
mod cluster;
mod fetch;
mod sweep;
#[cfg(test)]
mod tests;

pub use binaries::{Binaries, find};
pub use cluster::{Options, PrivatePostgres, StopMode};

/// Why there is no private server.
#[derive(Debug, thiserror::Error)]
pub enum PrivatePostgresError {
    /// No server binaries, and none could be got.
    #[error(
        "no PostgreSQL server binaries (15 or later) found in CORELANE_PG_BIN, PATH or the usual places{0}. Install the package \
         `postgresql` (Debian, Ubuntu), `postgresql-server` (Fedora, Red Hat) or `postgresql@17` (Homebrew), point CORELANE_PG_BIN \
         at a directory with initdb and postgres, or use a server of your own with --database-url"
    )]
    NoBinaries(String),
    /// A file or process operation failed.
    #[error("private Postgres: {what}: {source}")]
    Io {
        /// What was being done.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The server did not start.
    #[error("private Postgres: {what}; the end of its log:\n{log}")]
    NotStarted {
        /// What happened.
        what: String,
        /// The log's end.
        log: String,
    },
}

fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> PrivatePostgresError {
    let what = what.into();
    move |source| PrivatePostgresError::Io { what, source }
}
