//! The core seam's implementations, and the lock-free ring into a shard.

pub mod affinity;
pub mod budget;
mod doorbell;
#[cfg(all(feature = "glommio", target_os = "linux"))]
pub mod glommio;
pub mod probe;
#[cfg(feature = "simulation")]
mod random;
pub mod ring;
#[cfg(feature = "simulation")]
pub mod sim;
mod socket_options;
mod sync;
mod tasks;
pub mod thread;
pub mod tokio;
