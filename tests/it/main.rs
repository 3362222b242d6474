//! Integration tests against a real Postgres: a private cluster of this process (or the server of
//! `CORELANE_TEST_DATABASE_URL`), a schema a test. Tests that kill, restart or fill a server have their own.

#![allow(clippy::expect_used, clippy::unwrap_used)] // A test says by it what it stands on.

#[path = "../conformance/mod.rs"]
mod conformance;

mod bad_input;
mod cases_bulk;
mod cases_bytes;
mod cases_faults;
mod cases_order;
mod cases_processes;
mod cli;
mod connect;
mod cut_proxy;
mod dump;
mod engine;
mod install;
mod members;
mod missing;
mod ordered_stream_processor;
mod outbox_kit;
mod partition;
mod process_kit;
mod rebase;
mod rotation;
mod schema;
mod store_claim;
mod store_conformance;
mod store_coordination;
mod store_flush;
mod store_kit;
mod store_outbox_messages;
mod store_settle;
mod streamless;
mod support;
mod upgrade;
