//! The broker seam's implementations.

pub mod memory;
pub mod memory_broker;
