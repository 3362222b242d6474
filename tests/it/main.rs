//! Integration tests against a real Postgres: a private cluster of this process (or the server of
//! `CORELANE_TEST_DATABASE_URL`), a schema a test. Tests that kill, restart or fill a server have their own.

#![allow(clippy::expect_used, clippy::unwrap_used)] // A test says by it what it stands on.

mod engine;
mod install;
mod store_flush;
mod store_kit;
mod support;
