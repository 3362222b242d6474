//! The Postgres seam's implementations.

mod answer;
pub mod columns;
pub mod connect;
pub mod dead_letters;
pub mod grants;
pub mod inbox_statistics;
pub mod install;
#[cfg(feature = "simulation")]
pub mod model;
pub mod postgres;
pub mod rebase;
pub mod replay;
pub mod retention;
pub mod schema_name;
pub mod sql;
pub mod sqlstate;
pub mod stored_event;
pub mod subscriptions;
pub mod target;
#[cfg(feature = "tls")]
mod tls;
