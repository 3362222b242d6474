//! What a program hands to the engine: typed messages, raw ones, and the wishes that go with one push.
//!
//! Invariants
//! - The type says whether a message is an event ([`kind`]): no caller sets a flag for a typed message.
//! - A type is stored under `NAME`, which its declaration states; it is never guessed from a module path.
//! - Every wish of a push (`With`) wins over what the type states.

pub mod event_types;
#[cfg(test)]
mod event_types_tests;
pub mod json;

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use uuid::Uuid;

use crate::envelope::Trace;

/// What sort of message a type is.
pub mod kind {
    /// A fact of its stream: stored in the event store with a version.
    #[derive(Clone, Copy, Debug)]
    pub enum Event {}

    /// Anything else: a command, a request, a notification.
    #[derive(Clone, Copy, Debug)]
    pub enum Command {}

    /// One of the two.
    pub trait Kind: sealed::Sealed {
        /// Whether it is the first.
        const IS_EVENT: bool;
    }
    impl Kind for Event {
        const IS_EVENT: bool = true;
    }
    impl Kind for Command {
        const IS_EVENT: bool = false;
    }

    mod sealed {
        pub trait Sealed {}
        impl Sealed for super::Event {}
        impl Sealed for super::Command {}
    }
}

/// A typed message. Its payload is the JSON that serde writes.
///
/// ```
/// use corelane::message::{Message, kind};
/// use uuid::Uuid;
///
/// #[derive(serde::Serialize)]
/// struct OrderCreated { order: Uuid, items: u32 }
///
/// impl Message for OrderCreated {
///     type Kind = kind::Event;
///     const NAME: &'static str = "orders.order-created";
///     const DESTINATIONS: &'static [&'static str] = &["orders"];
///     fn stream_id(&self) -> Option<Uuid> { Some(self.order) }
/// }
/// ```
pub trait Message: Serialize {
    /// [`kind::Event`] or [`kind::Command`].
    type Kind: kind::Kind;
    /// The stable name it is stored and sent under.
    const NAME: &'static str;
    /// Queues or topics it goes to. Empty: it is stored and not published.
    const DESTINATIONS: &'static [&'static str];
    /// The stream it belongs to; messages of one stream are published one after the other. `None`: no order.
    fn stream_id(&self) -> Option<Uuid>;
}

impl<M: Message + ?Sized> Message for &M {
    type Kind = M::Kind;
    const NAME: &'static str = M::NAME;
    const DESTINATIONS: &'static [&'static str] = M::DESTINATIONS;
    fn stream_id(&self) -> Option<Uuid> {
        (**self).stream_id()
    }
}

/// A message that is an event.
pub trait Event: Message<Kind = kind::Event> {}
impl<M: Message<Kind = kind::Event> + ?Sized> Event for M {}

/// A message that is not.
pub trait Command: Message<Kind = kind::Command> {}
impl<M: Message<Kind = kind::Command> + ?Sized> Command for M {}

/// What an append expects of its stream: how many events are in it before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Expected {
    /// Nothing.
    #[default]
    Any,
    /// No event is in it. (Other messages of the stream do not count.)
    NoStream,
    /// The last event has this version; 0 is the same as [`Expected::NoStream`].
    Exact(i64),
}

impl Expected {
    /// The version, or `None` for any.
    #[must_use]
    pub const fn version(self) -> Option<i64> {
        match self {
            Self::Any => None,
            Self::NoStream => Some(0),
            Self::Exact(version) => Some(version),
        }
    }
}

/// What one push may ask for beyond what the type states.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wishes<'a> {
    /// The message's id; a new version 7 id where there is none.
    pub message_id: Option<Uuid>,
    /// Correlation id; nil for none.
    pub correlation_id: Uuid,
    /// Causation id; nil for none.
    pub causation_id: Uuid,
    /// Trace context.
    pub trace: Trace,
    /// Metadata bytes (JSON); empty for none.
    pub metadata: &'a [u8],
    /// Destinations instead of the type's.
    pub destinations: Option<&'a [&'a str]>,
    /// Microseconds since 1970 from which it is to be published; 0 for now.
    pub due_unix_us: i64,
    /// What the event expects of its stream. Of several events of one stream in one unit of work the first may say it
    /// for all of them.
    pub expected: Expected,
}

/// What the engine reads of a message before its payload.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    /// Stable name.
    pub type_name: &'a str,
    /// Content type; empty for `application/json`.
    pub content_type: &'a str,
    /// Whether it is an event.
    pub is_event: bool,
    /// Stream.
    pub stream_id: Option<Uuid>,
    /// Where it goes by its type.
    pub destinations: &'a [&'a str],
    /// What this push asks for.
    pub wishes: Wishes<'a>,
    /// The payload is to be checked to be JSON.
    pub check_json: bool,
}

/// Why a payload could not be written.
#[derive(Debug)]
pub enum PayloadError {
    /// It is longer than allowed.
    TooLong,
    /// Its type refused to be serialized.
    Serialize(String),
}

/// What can be enqueued: a typed message, a [`RawMessage`], or either of them [`With`] wishes.
pub trait Enqueue {
    /// Everything but the payload.
    fn header(&self) -> Header<'_>;

    /// Writes the payload at the end of a buffer, at most `bytes_max` of it.
    ///
    /// # Errors
    /// [`PayloadError`]; what was written is then cut off again by the caller.
    fn write_payload(&self, buffer: &mut Vec<u8>, bytes_max: usize) -> Result<(), PayloadError>;

    /// This message with wishes of its own.
    fn with<'a>(self, wishes: Wishes<'a>) -> With<'a, Self>
    where
        Self: Sized,
    {
        With { message: self, wishes }
    }
}

impl<M: Message> Enqueue for M {
    fn header(&self) -> Header<'_> {
        Header {
            type_name: M::NAME,
            content_type: "",
            is_event: <M::Kind as kind::Kind>::IS_EVENT,
            stream_id: self.stream_id(),
            destinations: M::DESTINATIONS,
            wishes: Wishes::default(),
            check_json: false,
        }
    }

    fn write_payload(&self, buffer: &mut Vec<u8>, bytes_max: usize) -> Result<(), PayloadError> {
        let mut writer = Bounded { buffer, left: bytes_max, full: false };
        match serde_json::to_writer(&mut writer, self) {
            Ok(()) => Ok(()),
            Err(_) if writer.full => Err(PayloadError::TooLong),
            Err(error) => Err(PayloadError::Serialize(error.to_string())),
        }
    }
}

/// Payload bytes with their names. Borrowed: the engine copies them once, into its arena.
#[derive(Clone, Copy, Debug)]
pub struct RawMessage<'a> {
    type_name: &'a str,
    payload: &'a [u8],
    content_type: &'a str,
    is_event: bool,
    stream_id: Option<Uuid>,
    destinations: &'a [&'a str],
    check_json: bool,
}

impl<'a> RawMessage<'a> {
    /// An event, declared JSON until another content type is given.
    #[must_use]
    pub fn event(type_name: &'a str, payload: &'a [u8]) -> Self {
        Self {
            type_name,
            payload,
            content_type: "",
            is_event: true,
            stream_id: None,
            destinations: &[],
            check_json: false,
        }
    }

    /// Any other message.
    #[must_use]
    pub fn command(type_name: &'a str, payload: &'a [u8]) -> Self {
        Self { is_event: false, ..Self::event(type_name, payload) }
    }

    /// What the bytes are; empty for `application/json`.
    #[must_use]
    pub fn content_type(self, content_type: &'a str) -> Self {
        Self { content_type, ..self }
    }

    /// Its stream.
    #[must_use]
    pub fn stream(self, stream_id: Uuid) -> Self {
        Self { stream_id: Some(stream_id), ..self }
    }

    /// Where it goes.
    #[must_use]
    pub fn to(self, destinations: &'a [&'a str]) -> Self {
        Self { destinations, ..self }
    }

    /// Checks that a payload declared JSON is JSON, and refuses the push if it is not.
    #[must_use]
    pub fn checked(self) -> Self {
        Self { check_json: true, ..self }
    }
}

impl Enqueue for RawMessage<'_> {
    fn header(&self) -> Header<'_> {
        Header {
            type_name: self.type_name,
            content_type: self.content_type,
            is_event: self.is_event,
            stream_id: self.stream_id,
            destinations: self.destinations,
            wishes: Wishes::default(),
            check_json: self.check_json && is_json(self.content_type),
        }
    }

    fn write_payload(&self, buffer: &mut Vec<u8>, bytes_max: usize) -> Result<(), PayloadError> {
        if self.payload.len() > bytes_max {
            return Err(PayloadError::TooLong);
        }
        buffer.extend_from_slice(self.payload);
        Ok(())
    }
}

/// Whether a content type promises JSON (RFC 6839: the suffix `+json` as well).
pub(crate) fn is_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    essence.is_empty()
        || essence.eq_ignore_ascii_case("application/json")
        || essence
            .len()
            .checked_sub(5)
            .and_then(|start| essence.get(start..))
            .is_some_and(|end| end.eq_ignore_ascii_case("+json"))
}

/// A message and the wishes of this push.
#[derive(Clone, Copy, Debug)]
pub struct With<'a, M> {
    message: M,
    wishes: Wishes<'a>,
}

impl<M: Enqueue> Enqueue for With<'_, M> {
    fn header(&self) -> Header<'_> {
        Header { wishes: self.wishes, ..self.message.header() }
    }

    fn write_payload(&self, buffer: &mut Vec<u8>, bytes_max: usize) -> Result<(), PayloadError> {
        self.message.write_payload(buffer, bytes_max)
    }
}

impl<'a> Wishes<'a> {
    /// None.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An id of the caller's own: a message enqueued again under it is stored again, consumers know it by it.
    #[must_use]
    pub fn message_id(self, id: Uuid) -> Self {
        Self { message_id: Some(id), ..self }
    }

    /// What conversation it belongs to.
    #[must_use]
    pub fn correlation_id(self, id: Uuid) -> Self {
        Self { correlation_id: id, ..self }
    }

    /// The message that caused it.
    #[must_use]
    pub fn causation_id(self, id: Uuid) -> Self {
        Self { causation_id: id, ..self }
    }

    /// A W3C `traceparent` header. One that is not valid is left out; the message is not.
    #[must_use]
    pub fn traceparent(self, header: &str) -> Self {
        Self { trace: Trace::parse(header).unwrap_or_default(), ..self }
    }

    /// JSON that travels beside the payload.
    #[must_use]
    pub fn metadata(self, json: &'a [u8]) -> Self {
        Self { metadata: json, ..self }
    }

    /// Destinations instead of the type's; none = store only.
    #[must_use]
    pub fn to(self, destinations: &'a [&'a str]) -> Self {
        Self { destinations: Some(destinations), ..self }
    }

    /// What the event expects of its stream: [`crate::Error::VersionConflict`] if it is not so.
    #[must_use]
    pub fn expected(self, expected: Expected) -> Self {
        Self { expected, ..self }
    }

    /// Not before this moment (by the database's clock). Events cannot be scheduled.
    #[must_use]
    pub fn due(self, at: SystemTime) -> Self {
        let us = at.duration_since(UNIX_EPOCH).map_or(1, |since| since.as_micros().clamp(1, i64::MAX as u128) as i64);
        Self { due_unix_us: us, ..self }
    }
}

/// Writes into a buffer until the limit.
struct Bounded<'a> {
    buffer: &'a mut Vec<u8>,
    left: usize,
    full: bool,
}

impl std::io::Write for Bounded<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.write_all(bytes)?;
        Ok(bytes.len())
    }

    fn write_all(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        if bytes.len() > self.left {
            self.full = true;
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        self.left -= bytes.len();
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_promised_by_the_usual_names() {
        for yes in ["", "application/json", "Application/JSON; charset=utf-8", "application/cloudevents+json", "+json"]
        {
            assert!(is_json(yes), "{yes}");
        }
        for no in ["text/plain", "json", "application/octet-stream", "application/jsonp", "é+jso"] {
            assert!(!is_json(no), "{no}");
        }
    }

    #[test]
    fn a_bad_traceparent_leaves_the_message_without_one() {
        assert!(Wishes::new().traceparent("00-zz").trace.is_none());
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert_eq!(Wishes::new().traceparent(good).trace.to_string(), good);
    }

    #[test]
    fn a_time_before_1970_is_due_at_once_and_still_scheduled() {
        let before = UNIX_EPOCH - std::time::Duration::from_secs(1);
        assert_eq!(Wishes::new().due(before).due_unix_us, 1);
    }
}
