//! Columnar batches: what crosses from thread to thread, to Postgres and to a transport.

pub mod arena;
pub mod names;
pub mod pool;
pub mod rows;

pub use arena::ArenaFull;
pub use names::DestinationId;
pub use pool::Pool;
pub use rows::{NewRow, ROW_EVENT, ROW_EXPECTED, ROW_REPLAYED, ROW_STREAMLESS, Rows, Span, is_scheduled};
