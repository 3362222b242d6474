//! Simulation: the shards' own loops on a seeded executor, against the in-memory model of the database, with a
//! faulty transport, strangers and faults.
//!
//! `CORELANE_SIM_SEED=n` replays one seed (`CORELANE_SIM_TRACE=1` prints every event), `CORELANE_SIM_SEEDS=n`
//! runs that many, from `CORELANE_SIM_FIRST` on.

#![allow(clippy::expect_used, clippy::unwrap_used)] // A test says by it what it stands on.

#[path = "../conformance/mod.rs"]
mod conformance;

mod chaos;
mod memory;
mod model;
mod mutants;
mod process;
mod publisher;
mod scenario;
mod seeds;
mod sink;
mod views_late;
mod writers;
