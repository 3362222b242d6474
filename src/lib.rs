//! Corelane: a sharded message engine that a service embeds: an outbox and an event store in the service's own
//! Postgres, published in order per stream.
//!
//! Begin with [`Config`] and [`Engine::builder`]; declare a [`Message`], hand it to [`Engine::enqueue`] or push
//! several into a [`UnitOfWork`]; write a [`Transport`], or take [`MemoryTransport`]. The README has an example,
//! ARCHITECTURE.md the reasons and the words. The modules `batch`, `plan`, `seam::store`, `shard`, `store` and
//! `runtime` are the engine's inside: public for loadgen, tests and benches, and they change with it.

pub mod batch;
pub mod config;
pub mod engine;
pub mod envelope;
pub mod error;
pub mod ids;
pub mod limits;
pub mod message;
pub mod metrics;
pub mod partition;
pub mod plan;
#[cfg(feature = "private-postgres")]
pub mod private_postgres;
pub mod runtime;
pub mod seam;
pub mod shard;
pub mod store;
pub mod time;
pub mod transport;

pub use config::Config;
pub use engine::{Engine, Receipt, UnitOfWork};
pub use error::{Error, Result};
pub use message::{Command, Event, Message, RawMessage, Wishes};
pub use seam::transport::{OutgoingBatch, OutgoingMessage, PublishOutcome, Transport, TransportLimits};
pub use transport::memory::MemoryTransport;

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
