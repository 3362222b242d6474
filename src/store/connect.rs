//! Dialling Postgres, and what its errors mean.

use std::future::Future;
use std::pin::Pin;

use crate::seam::store::StoreError;

/// Makes connections for one shard or one lease keeper. The connection's driver runs on the same thread.
pub trait Connect {
    /// Dials once, with a time limit of its own.
    fn connect(&self) -> Pin<Box<dyn Future<Output = Result<tokio_postgres::Client, StoreError>> + '_>>;
}

impl From<tokio_postgres::Error> for StoreError {
    fn from(error: tokio_postgres::Error) -> Self {
        let Some(server) = error.as_db_error() else {
            return Self::ConnectionLost(error.to_string());
        };
        let sqlstate = server.code().code().to_owned();
        let text = server.message().to_owned();
        match (&sqlstate[..2], sqlstate.as_str()) {
            (_, "23505") => Self::NumberTaken,
            ("57", "57P01" | "57P02" | "57P03") | ("08", _) => Self::ConnectionLost(text),
            ("40" | "53" | "57" | "58", _) | (_, "55P03" | "25006" | "25P03") => Self::Transient { sqlstate, text },
            ("28" | "3D", _) | (_, "42501") => Self::Denied { sqlstate, text },
            _ => Self::Refused { sqlstate, text },
        }
    }
}
