//! A client's connections to the sink, kept for the next question.
//!
//! Invariants
//! - A connection on which an answer is missing is never used again: the next answer would be the wrong one. Nor is one
//!   whose other end has gone: after a restart of the sink each of those would cost a message its outcome.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use tokio::net::UnixStream;

use super::frames::{receive, send};

/// See the module.
#[derive(Debug)]
pub struct Connections {
    socket: PathBuf,
    idle: Mutex<Vec<UnixStream>>,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum NoAnswer {
    /// The sink cannot have got it.
    NotSent,
    /// It was sent: nobody knows.
    Unknown(std::io::Error),
}

impl std::fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotSent => f.write_str("nobody listens"),
            Self::Unknown(error) => error.fmt(f),
        }
    }
}

const IDLE_MAX: usize = 8;

impl Connections {
    /// To the sink that listens there.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Self { socket, idle: Mutex::default() }
    }

    /// Asks, and waits for the answer. May be dropped: the connection goes with it.
    ///
    /// # Errors
    /// See [`NoAnswer`].
    pub async fn ask(&self, body: &[u8]) -> Result<Vec<u8>, NoAnswer> {
        let mut connection = match self.kept() {
            Some(connection) => connection,
            None => UnixStream::connect(&self.socket).await.map_err(|_| NoAnswer::NotSent)?,
        };
        // A send into a socket whose other end was killed may succeed: from here on nobody knows.
        let answer = match send(&mut connection, body).await {
            Ok(()) => receive(&mut connection).await,
            Err(error) => Err(error),
        };
        match answer {
            Ok(answer) => {
                self.keep(connection);
                Ok(answer)
            }
            Err(error) => {
                // The others were to the same sink.
                self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
                Err(NoAnswer::Unknown(error))
            }
        }
    }

    /// A kept connection whose other end is still there.
    fn kept(&self) -> Option<UnixStream> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        std::iter::from_fn(|| idle.pop()).find(is_open)
    }

    fn keep(&self, connection: UnixStream) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_MAX {
            idle.push(connection);
        }
    }
}

/// Nothing is under way on an idle connection: what can be read there is its end.
fn is_open(connection: &UnixStream) -> bool {
    matches!(connection.try_read(&mut [0; 1]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
}
