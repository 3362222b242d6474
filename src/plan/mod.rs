//! Decisions: synchronous, without I/O, without a clock of their own, and without failure.
//! Time comes in as an argument; the loops in `shard` do what is decided here.

pub mod assign;
pub mod cadence;
pub mod follow;
pub mod gate;
mod lane;
pub mod lanes;
#[cfg(test)]
mod lanes_tests;
pub mod lease;
pub mod ledger;
pub mod listener;
pub mod mutants;
pub mod numbers;
pub mod pause;
pub mod retry;
pub mod snapshot;
pub mod strategy;
