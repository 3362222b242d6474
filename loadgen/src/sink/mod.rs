//! The sink of `verify`: a process of its own that keeps a journal of every message it accepted.

pub mod connections;
pub mod frames;
pub mod journal;
pub mod server;
pub mod socket_transport;
