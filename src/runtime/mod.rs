//! The core seam's implementations, and the lock-free ring into a shard.

pub mod affinity;
#[cfg(all(feature = "glommio", target_os = "linux"))]
pub mod glommio;
pub mod ring;
#[cfg(feature = "simulation")]
pub mod sim;
pub mod tokio;
