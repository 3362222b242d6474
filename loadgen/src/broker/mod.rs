//! A small broker for the harness: a process of its own that keeps what was published until it is settled.
//!
//! It is the sink of `verify` with the other half: queues, sessions, locks, redelivery. Two services can talk over it.

pub mod client;
pub mod frames;
pub mod queue;
pub mod server;
pub mod store;
pub mod transport;
