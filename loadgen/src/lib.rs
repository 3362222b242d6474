//! Load generator, verifier and comparer for Corelane.

pub mod allocations;
pub mod baselines;
pub mod checks;
pub mod cli;
pub mod cpu;
pub mod drive;
pub mod engine_side;
pub mod failure;
pub mod figures;
pub mod latency;
pub mod measure;
pub mod private_server;
pub mod progress;
pub mod scenario;
pub mod shape;
pub mod sink;
pub mod target;
pub mod verify;
