//! The broker seam's implementations.

pub mod memory;
