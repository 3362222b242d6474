//! The words the doorbell is made of. `tests/ring_loom.rs` puts loom's in their place.

pub use std::sync::atomic::{AtomicBool, Ordering, fence};

pub use futures_util::task::AtomicWaker;
