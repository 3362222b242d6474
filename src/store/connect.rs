//! Dialling Postgres, and what its errors mean.

use std::future::Future;
use std::pin::Pin;

use crate::seam::store::StoreError;

/// Makes connections for one shard or one lease keeper. The connection's driver runs on the same thread.
pub trait Connect {
    /// Dials once, with a time limit of its own.
    fn connect(&self) -> Pin<Box<dyn Future<Output = Result<tokio_postgres::Client, StoreError>> + '_>>;
}
