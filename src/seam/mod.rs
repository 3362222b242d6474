//! The seams: traits with two implementations each, and their plain types.

pub mod coordination;
pub mod dial;
pub mod publisher;
pub mod receiver;
pub mod runtime;
pub mod store;
pub mod transport;
