//! The sink of `verify`: a process of its own that keeps a journal of every message it accepted.

pub mod server;
