//! What can stop loadgen, in words for the person at the terminal.
//!
//! Invariant: a broken promise is not a failure of loadgen; it is a finding, with exit code 1. What is here
//! ends with exit code 2 and says what to do; [`Failure::Promise`] alone is a finding that ends a run.

/// Result of most calls here.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// Why loadgen cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// An option or a combination of options makes no sense.
    #[error("{0}")]
    Usage(String),
    /// The database said no.
    #[error("database: {}", database_text(.0))]
    Database(#[from] tokio_postgres::Error),
    /// It cannot be reached, or lets nobody in.
    #[error("database at {place}: {}", database_text(.source))]
    Unreachable {
        /// Host and port, never the password.
        place: String,
        /// What was said.
        #[source]
        source: tokio_postgres::Error,
    },
    /// The engine said no.
    #[error("engine: {0}")]
    Engine(#[from] corelane::Error),
    /// A file or socket.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, with the path.
        what: String,
        /// The system's words.
        #[source]
        source: std::io::Error,
    },
    /// Something that should have happened in a bounded time did not.
    #[error("{0}")]
    TimedOut(String),
    /// The engine did not do in time what it promises to do: a finding, which ended the run.
    #[error("{0}")]
    Promise(String),
    /// A part of loadgen itself broke: its report would be worth nothing.
    #[error("{0}: a defect of loadgen, please report it")]
    Broken(String),
    /// It was told to stop.
    #[error("interrupted")]
    Interrupted,
    /// The private cluster.
    #[error("{0}")]
    Cluster(String),
}

impl Failure {
    /// Wraps an I/O error with what was being done.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

/// The server's own sentence where there is one: `tokio_postgres::Error` alone prints only "db error".
fn database_text(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(db) => {
            let mut text = format!("{} ({})", db.message(), db.code().code());
            for part in [db.detail(), db.hint()].into_iter().flatten() {
                text.push_str("; ");
                text.push_str(part);
            }
            text
        }
        None => {
            let mut text = error.to_string();
            let mut source = std::error::Error::source(error);
            while let Some(cause) = source {
                text.push_str(": ");
                text.push_str(&cause.to_string());
                source = cause.source();
            }
            text
        }
    }
}
