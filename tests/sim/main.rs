//! Simulation: the shards' own loops on a seeded executor, against the in-memory model of the database.

#[path = "../conformance/mod.rs"]
mod conformance;
mod model;
