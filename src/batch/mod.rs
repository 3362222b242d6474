//! Columnar batches: what crosses from thread to thread, to Postgres and to a transport.

pub mod names;
pub mod pool;
pub mod rows;

pub use names::DestinationId;
pub use pool::Pool;
pub use rows::{NewRow, ROW_EVENT, ROW_STREAMLESS, Rows, Span, is_scheduled};
