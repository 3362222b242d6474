//! What the embedding program sees.

pub mod bridge;
pub mod builder;
pub mod outbox;
pub mod report;
pub mod router;
pub mod unit;
