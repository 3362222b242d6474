//! The inbox: messages that brokers deliver are remembered, handled in the order of their streams, and their effects
//! commit once.
//!
//! Invariants
//! - One (consumer, message id) has its effects once within `inbox.window_days` of its first receipt, whatever is
//!   delivered again, and however many copies come at once: its memory is written first, in the transaction of its effects.
//! - A stream is handled by one task in the cluster at a time: its lane's lock is a session lock of the worker's connection.
//!   A worker that is not heard of loses it in bounded time, with its connection: what it does then comes to nothing.
//! - A delivery is settled after the commit that decides it.
//! - User code runs on threads of the inbox's own: it holds neither a shard nor the bridge.
//!
//! `source` collects and settles, `worker` handles and commits, `lane` and `gate` decide, `door` speaks SQL, `tend`
//! keeps the memory in shape.

mod commit;
mod consumers;
pub(crate) mod door;
mod gate;
mod given_back;
mod hand;
mod handler;
mod lane;
mod source;
mod tend;
mod worker;

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;

pub(crate) use consumers::{Consumers, NewConsumer, Running};
pub(crate) use handler::Handlers;
pub use handler::{Handler, HandlerContext, HandlerError, Handling, read};

use crate::config::Config;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::limits::NAME_BYTES_MAX;
use crate::message::Message;
use crate::metrics::InboxMetrics;
use crate::seam::receiver::Receiver;
use crate::store::schema_name::SchemaName;
use handler::Typed;

/// Every statement that consumers send.
#[doc(hidden)]
#[must_use]
pub fn statements(schema: &SchemaName) -> Vec<String> {
    door::texts(schema).into_iter().chain([tend::text(schema)]).collect()
}

/// A worker on a loaded machine says something within this time.
const SILENT_MS_MIN: u64 = 5_000;

/// Makes a [`Consumer`].
pub struct ConsumerBuilder {
    engine: Engine,
    name: String,
    sources: Vec<String>,
    receivers: Vec<Arc<dyn Receiver>>,
    handlers: Handlers,
}

impl ConsumerBuilder {
    pub(crate) fn new(engine: Engine, name: &str) -> Self {
        let handlers = Handlers::new(engine.event_types().clone());
        Self { engine, name: name.to_owned(), sources: Vec::new(), receivers: Vec::new(), handlers }
    }

    /// A queue or subscription of the engine's transport to receive from.
    #[must_use]
    pub fn source(mut self, name: &str) -> Self {
        self.sources.push(name.to_owned());
        self
    }

    /// A receiver of the program's own, beside the engine's transport.
    #[must_use]
    pub fn receiver(mut self, receiver: Arc<dyn Receiver>) -> Self {
        self.receivers.push(receiver);
        self
    }

    /// Handles messages of a type, by its stable name or an older one that [`crate::EventTypes`] has of it; the body is read
    /// as JSON, and brought up to date. One that cannot be read goes to the broker's dead letters, alone.
    #[must_use]
    pub fn handler<M>(
        self,
        function: impl for<'a, 't> Fn(M, &'a mut HandlerContext<'t>) -> Handling<'a> + Send + Sync + 'static,
    ) -> Self
    where
        M: Message + DeserializeOwned + Send + 'static,
    {
        self.typed(function, false)
    }

    /// The same for a handler that writes SQL of its own: [`HandlerContext::transaction`].
    #[must_use]
    pub fn handler_in_transaction<M>(
        self,
        function: impl for<'a, 't> Fn(M, &'a mut HandlerContext<'t>) -> Handling<'a> + Send + Sync + 'static,
    ) -> Self
    where
        M: Message + DeserializeOwned + Send + 'static,
    {
        self.typed(function, true)
    }

    fn typed<M>(
        mut self,
        function: impl for<'a, 't> Fn(M, &'a mut HandlerContext<'t>) -> Handling<'a> + Send + Sync + 'static,
        needs_transaction: bool,
    ) -> Self
    where
        M: Message + DeserializeOwned + Send + 'static,
    {
        let types = self.engine.event_types().clone();
        let typed = Typed { function, needs_transaction, types, reads: PhantomData::<fn() -> M> };
        self.handlers.insert(M::NAME, Arc::new(typed));
        self
    }

    /// Handles messages of a type by its name, as they came.
    #[must_use]
    pub fn raw_handler(mut self, type_name: &str, handler: impl Handler) -> Self {
        self.handlers.insert(type_name, Arc::new(handler));
        self
    }

    /// Handles messages of all types that have no handler of their own. Without one they go to the broker's dead letters.
    #[must_use]
    pub fn other_types(mut self, handler: impl Handler) -> Self {
        self.handlers.insert_others(Arc::new(handler));
        self
    }

    /// Begins to receive. The consumer works until it is stopped or the engine ends; dropping the handle changes nothing.
    ///
    /// # Errors
    /// [`Error::Config`]: no source, none of its name at the transport, no handler, a name that cannot be, or no direct
    /// connection to the database. [`Error::Store`]: the database cannot be reached. [`Error::ShutDown`].
    pub async fn start(self) -> Result<Consumer> {
        let config = self.engine.config().clone();
        let wrong = |what: String| Err(Error::Config(format!("consumer {:?}: {what}", self.name)));
        if self.name.is_empty() || self.name.len() > NAME_BYTES_MAX || self.name.contains('\0') {
            return wrong(format!("its name must have 1..={NAME_BYTES_MAX} bytes without NUL"));
        }
        if self.handlers.is_empty() {
            return wrong("it has no handler: give it one before start()".to_owned());
        }
        let mut receivers = self.receivers;
        for source in &self.sources {
            match self.engine.receiver(source) {
                Some(receiver) => receivers.push(receiver),
                None => return wrong(format!("the transport has no source {source:?}, or gives none at all")),
            }
        }
        if receivers.is_empty() {
            return wrong("it has no source: name one before start()".to_owned());
        }
        let running = self.engine.start_consumer(&config, &self.name, receivers, self.handlers).await?;
        Ok(Consumer { running })
    }
}

/// A running consumer. Clones share it.
#[derive(Clone)]
pub struct Consumer {
    running: Arc<Running>,
}

/// How a consumer ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConsumerReport {
    /// Everything that ran was committed and settled in time.
    pub drained: bool,
    /// Deliveries given back to the broker because the consumer ended.
    pub abandoned: usize,
    /// Messages whose handlers were not done in time: they come again.
    pub left: usize,
}

impl Consumer {
    /// Its figures.
    #[must_use]
    pub fn metrics(&self) -> &InboxMetrics {
        self.running.metrics()
    }

    /// Receives nothing more until [`Consumer::resume`]. What is in hand is handled; stored messages are tried again.
    pub fn pause(&self) {
        self.running.pause(true);
    }

    /// Goes on.
    pub fn resume(&self) {
        self.running.pause(false);
    }

    /// Receives nothing more, lets what runs end within `timeout`, commits and settles it, and gives the rest back.
    pub async fn stop(&self, timeout: Duration) -> ConsumerReport {
        self.running.stop(timeout).await
    }
}

/// How long the server waits for a word of a worker before it ends its session, and lets others have its lanes: as long as a
/// handler may take, which in a transaction of its own is silent, and a little more.
pub(crate) fn silent_ms(config: &Config) -> u64 {
    (config.inbox.handler_timeout_ms + config.lease.ttl_ms / 4).max(SILENT_MS_MIN)
}

/// What the workers' partitions are, and their rules: see `consumers`.
fn share(config: &Config, worker: usize) -> Vec<i32> {
    (0..config.partitions.count)
        .filter(|partition| *partition as usize % config.inbox.workers == worker)
        .filter_map(|partition| i32::try_from(partition).ok())
        .collect()
}
