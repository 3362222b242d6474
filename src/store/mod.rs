//! The Postgres seam's implementations.

pub mod columns;
pub mod connect;
pub mod grants;
pub mod install;
#[cfg(feature = "simulation")]
pub mod model;
pub mod postgres;
pub mod rebase;
pub mod schema_name;
pub mod sql;
pub mod sqlstate;
pub mod target;
#[cfg(feature = "tls")]
mod tls;
