//! What a consumer's program writes: handlers, by type or raw, and what they may do.
//!
//! Invariants
//! - A delivery is one unit of work with a context of its own, however many share a commit.
//! - What a handler pushes or writes in its transaction commits with the memory of its message, or not at all.
//! - A body that cannot be read is that message's outcome, found before the handler's code runs.

use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;

use hashbrown::HashMap;
use serde::de::DeserializeOwned;
use tokio_postgres::Transaction;
use uuid::Uuid;

use crate::batch::Rows;
use crate::engine::router::Router;
use crate::error::{Error, FailureReason, Result};
use crate::message::event_types::{Decoded, EventTypes};
use crate::message::{Enqueue, Message, is_json, json};
use crate::seam::receiver::Delivery;
use crate::seam::store::StoreError;

/// A handler on its way.
pub type Handling<'a> = Pin<Box<dyn Future<Output = std::result::Result<(), HandlerError>> + Send + 'a>>;

/// Handles messages of one or several types, as they came.
pub trait Handler: Send + Sync + 'static {
    /// Handles one. It may run several times before its effects commit; it is dropped after `inbox.handler_timeout_ms`.
    fn handle<'a>(&'a self, delivery: &'a Delivery, context: &'a mut HandlerContext<'_>) -> Handling<'a>;

    /// Whether it writes SQL of its own: it then runs inside the transaction that commits its result, under a savepoint,
    /// one after the other with the others of its worker. Others run beside each other, and no transaction is open
    /// meanwhile.
    fn needs_transaction(&self) -> bool {
        false
    }
}

/// Why a handler did not do it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandlerError {
    pub(crate) kind: ErrorKind,
    pub(crate) reason: FailureReason,
    pub(crate) text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorKind {
    /// Others' work, or a connection: nothing that the message could do about.
    Disturbed,
    Retry,
    Permanent,
    Unreadable,
}

impl HandlerError {
    /// Disturbed by others' work, or by a connection that was lost: it runs again soon, alone, with pauses of 10 ms to 5 s in
    /// between. No attempt is counted, and its stream waits; after `inbox.disturbed_max` times by itself it is a failure as
    /// any other. An error of the database in a handler's own SQL that says so (40001, 40P01, 55P03, 57014, class 53, a lost
    /// connection) becomes this by itself.
    #[must_use]
    pub fn disturbed(text: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Disturbed, reason: FailureReason::Unknown, text: text.into() }
    }

    /// Try again later, by the rules of `retry`.
    #[must_use]
    pub fn retry(text: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Retry, reason: FailureReason::Unknown, text: text.into() }
    }

    /// Never: to the dead letters at once.
    #[must_use]
    pub fn permanent(reason: FailureReason, text: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Permanent, reason, text: text.into() }
    }

    /// The same with another reason.
    #[must_use]
    pub fn because(self, reason: FailureReason) -> Self {
        Self { reason, ..self }
    }

    /// The body cannot be understood: to the broker's dead letters.
    #[must_use]
    pub fn unreadable(text: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Unreadable, reason: FailureReason::SerializationError, text: text.into() }
    }
}

impl From<tokio_postgres::Error> for HandlerError {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::from(StoreError::from(error))
    }
}

impl From<StoreError> for HandlerError {
    fn from(error: StoreError) -> Self {
        let text = error.to_string();
        match error {
            StoreError::Transient { .. } | StoreError::ConnectionLost(_) => Self::disturbed(text),
            _ => Self::retry(text),
        }
    }
}

impl From<Error> for HandlerError {
    fn from(error: Error) -> Self {
        match error {
            Error::MessageLimit { .. }
            | Error::InvalidJson { .. }
            | Error::InvalidStreamId
            | Error::ScheduledEvent { .. } => Self::permanent(FailureReason::ValidationError, error.to_string()),
            Error::Overloaded { .. } | Error::ShutDown => Self::disturbed(error.to_string()),
            Error::Store(error) => Self::from(error),
            Error::Enlist(error) => Self::from(error),
            error => Self::retry(error.to_string()),
        }
    }
}

/// What a handler may do beside reading its message.
pub struct HandlerContext<'t> {
    pub(crate) router: Router,
    pub(crate) bytes_max: usize,
    pub(crate) rows: Rows,
    pub(crate) attempt: u32,
    pub(crate) consumer: Arc<str>,
    pub(crate) message_id: Uuid,
    pub(crate) correlation_id: Uuid,
    pub(crate) trace: crate::envelope::Trace,
    pub(crate) transaction: Option<&'t Transaction<'t>>,
}

impl<'t> HandlerContext<'t> {
    /// Emits a message or an event: stored in the same transaction as the memory of this delivery, published after it.
    /// Its correlation is this delivery's, its causation this delivery's message, its trace this delivery's, unless it
    /// says otherwise. Answers its id.
    ///
    /// # Errors
    /// A limit that it breaks, or that all of this delivery's would break together ([`Error::MessageLimit`] by the id of the
    /// delivery; `inbox.emit_bytes_max`); it is not emitted then.
    pub fn push<M: Enqueue + ?Sized>(&mut self, message: &M) -> Result<Uuid> {
        let message_id = message.header().wishes.message_id.unwrap_or_else(Uuid::now_v7);
        self.router.write(&mut self.rows, message, message_id)?;
        let bytes = self.rows.bytes_in_memory();
        if bytes > self.bytes_max {
            self.rows.pop();
            return Err(Error::MessageLimit {
                message_id: self.message_id,
                what: "size of what its handler emits",
                value: format!("{bytes} bytes with message {message_id}"),
                allowed: format!("0..={} bytes (inbox.emit_bytes_max)", self.bytes_max),
            });
        }
        let row = self.rows.len() - 1;
        let set = |id: &mut Uuid, to: Uuid| {
            if id.is_nil() {
                *id = to;
            }
        };
        set(&mut self.rows.correlation_id[row], self.correlation_id);
        set(&mut self.rows.causation_id[row], self.message_id);
        if self.rows.trace[row].is_none() {
            self.rows.trace[row] = self.trace;
        }
        Ok(message_id)
    }

    /// The transaction that this delivery's result commits in, under a savepoint of this handler: what it writes is there
    /// with the rest, or not at all. It is not committed, rolled back or left in a failed state by the handler: that
    /// is a failure of its message.
    ///
    /// # Errors
    /// If the handler did not ask for one ([`Handler::needs_transaction`]).
    pub fn transaction(&self) -> std::result::Result<&'t Transaction<'t>, HandlerError> {
        let missing = || {
            HandlerError::permanent(
                FailureReason::Unknown,
                "the handler asks for its transaction and did not say so: register it by `handler_in_transaction`, or \
                 answer true in `needs_transaction`",
            )
        };
        self.transaction.ok_or_else(missing)
    }

    /// Which try this is, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The consumer's name.
    #[must_use]
    pub fn consumer(&self) -> &str {
        &self.consumer
    }
}

/// A consumer's handlers by the type's stable name.
#[derive(Clone, Default)]
pub(crate) struct Handlers {
    by_name: HashMap<String, Arc<dyn Handler>>,
    others: Option<Arc<dyn Handler>>,
    types: EventTypes,
}

impl Handlers {
    pub(crate) fn new(types: EventTypes) -> Self {
        Self { types, ..Self::default() }
    }

    pub(crate) fn insert(&mut self, type_name: &str, handler: Arc<dyn Handler>) {
        self.by_name.insert(type_name.to_owned(), handler);
    }

    pub(crate) fn insert_others(&mut self, handler: Arc<dyn Handler>) {
        self.others = Some(handler);
    }

    pub(crate) fn of(&self, type_name: &str) -> Option<&Arc<dyn Handler>> {
        let of_today = || self.types.current_name(type_name).and_then(|name| self.by_name.get(name));
        // A handler of the old name itself wants what came as it came.
        self.by_name.get(type_name).or_else(of_today).or(self.others.as_ref())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_name.is_empty() && self.others.is_none()
    }
}

/// A handler of one type, made of a closure.
pub(crate) struct Typed<M, F> {
    pub(crate) function: F,
    pub(crate) needs_transaction: bool,
    pub(crate) types: EventTypes,
    pub(crate) reads: PhantomData<fn() -> M>,
}

impl<M, F> Handler for Typed<M, F>
where
    M: Message + DeserializeOwned + Send + 'static,
    F: for<'a, 't> Fn(M, &'a mut HandlerContext<'t>) -> Handling<'a> + Send + Sync + 'static,
{
    fn handle<'a>(&'a self, delivery: &'a Delivery, context: &'a mut HandlerContext<'_>) -> Handling<'a> {
        match read::<M>(&self.types, delivery) {
            Ok(message) => (self.function)(message, context),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }

    fn needs_transaction(&self) -> bool {
        self.needs_transaction
    }
}

/// Reads a body as JSON of its type, brought up to date if it was sent under an older name that `types` knows.
///
/// # Errors
/// [`HandlerError::unreadable`] with the place.
pub fn read<M: Message + DeserializeOwned>(
    types: &EventTypes,
    delivery: &Delivery,
) -> std::result::Result<M, HandlerError> {
    if types.current_name(&delivery.type_name).is_some() {
        return match types.decode(&delivery.type_name, &delivery.content_type, &delivery.payload) {
            Decoded::Known(message) => Ok(message),
            Decoded::Failed(error) => Err(HandlerError::unreadable(error.to_string())),
            Decoded::Erased => Err(HandlerError::unreadable("what it said was erased")),
            Decoded::OtherType(_) | Decoded::Unknown => {
                Err(HandlerError::unreadable(format!("{:.100} is no {}", delivery.type_name, M::NAME)))
            }
        };
    }
    if !is_json(&delivery.content_type) {
        let text = format!("{} is read from JSON, the content type is {:.100}", M::NAME, delivery.content_type);
        return Err(HandlerError::unreadable(text));
    }
    json::read(&delivery.payload).map_err(|error| HandlerError::unreadable(format!("not a {}: {error}", M::NAME)))
}
