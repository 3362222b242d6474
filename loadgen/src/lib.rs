//! Load generator, verifier and comparer for Corelane.

pub mod allocations;
pub mod backlog;
pub mod baselines;
pub mod checks;
pub mod cli;
pub mod collector;
pub mod compare;
pub mod cpu;
pub mod drive;
pub mod engine_side;
pub mod failure;
pub mod figures;
pub mod hold;
pub mod latency;
pub mod measure;
pub mod private_server;
pub mod progress;
pub mod report;
pub mod run;
pub mod samples;
pub mod scenario;
pub mod shape;
pub mod sink;
pub mod target;
pub mod verify;
