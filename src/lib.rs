//! Corelane: a sharded message engine that a service embeds: an outbox and an event store in the service's own
//! Postgres, published in order per stream.
//!
//! Begin with [`Config`] and [`Engine::builder`]; declare a [`Message`], hand it to [`Engine::enqueue`] or push
//! several into a [`UnitOfWork`]; write a [`Transport`], or take [`MemoryTransport`]. The README has an example,
//! ARCHITECTURE.md the reasons and the words. The modules `batch`, `plan`, `seam`, `shard`, `store` and
//! `runtime` are the engine's inside: public for loadgen, tests and benches, not shown here, and they change with it.

#[doc(hidden)]
pub mod batch;
pub mod config;
pub mod engine;
pub mod envelope;
pub mod error;
pub mod ids;
pub mod inbox;
pub mod limits;
pub mod message;
pub mod metrics;
pub mod partition;
#[doc(hidden)]
pub mod plan;
#[cfg(feature = "private-postgres")]
pub mod private_postgres;
#[doc(hidden)]
pub mod runtime;
#[doc(hidden)]
pub mod seam;
#[doc(hidden)]
pub mod shard;
#[doc(hidden)]
pub mod store;
pub mod time;
pub mod transport;

pub use config::{Config, Strategy};
pub use engine::subscription::{EventBatch, Lag, Subscription, SubscriptionBuilder};
pub use engine::{
    Engine, EventStore, FeedBuilder, FeedPage, FeedPlace, FeedReader, ListenerHealth, Pushed, Receipt, StoredEvent,
    UnitOfWork,
};
pub use error::{Error, FailureReason, Result};
pub use inbox::{Consumer, Handler, HandlerContext, HandlerError};
pub use message::event_types::{DecodeError, Decoded, EventTypes, EventTypesBuilder};
pub use message::{Command, Enqueue, Event, Expected, Message, RawMessage, Wishes};
pub use seam::receiver::{
    Delivery, OnDisconnected, Receipt as DeliveryReceipt, ReceiveError, Receiver, Receiving, SettleOutcome, Settlement,
};
pub use seam::store::StoreError;
pub use seam::transport::{OutgoingBatch, OutgoingMessage, PublishOutcome, Transport, TransportLimits};
pub use store::dead_letters;
pub use store::inbox_statistics::{InboxStatistics, inbox_statistics};
pub use store::replay;
pub use store::retention;
pub use store::schema_name::SchemaName;
pub use transport::memory::MemoryTransport;
pub use transport::memory_broker::MemoryBroker;

/// The examples of README and docs are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;

/// See [`Readme`].
#[cfg(doctest)]
#[doc = include_str!("../docs/recipes.md")]
pub struct Recipes;

/// See [`Readme`].
#[cfg(doctest)]
#[doc = include_str!("../docs/operating.md")]
pub struct Operating;
