//! Errors for the person who has to act on them, and the reasons a message can fail for.
//!
//! Invariant: an error says which key, message or value is meant, what is allowed, and what to do.
//! Passwords and payloads never appear in one.

use uuid::Uuid;

/// Result of most calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What the embedding program can get back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A stream id was the nil UUID.
    #[error("the nil UUID is not a stream id: leave the stream out for a message without order, or give its real id")]
    InvalidStreamId,
    /// A config key is unknown or its value is out of bounds. Nothing was started.
    #[error("{0}")]
    Config(String),
    /// Names of types, aliases and upcasters do not hold together: everything that is wrong, separated by semicolons.
    #[error("event types: {0}")]
    EventTypes(String),
    /// The operating system gave no thread: look at its limits (`ulimit -u`, the container's pids). Nothing was stored.
    #[error("{what} cannot be started: {source}: the operating system gives no further thread")]
    Thread {
        /// What it was for.
        what: &'static str,
        /// The system's words.
        #[source]
        source: std::io::Error,
    },
    /// The shard has as many rows in hand as it may: back off and try again. Nothing was stored.
    #[error(
        "shard {shard} is overloaded ({rows_max} rows in hand, ring.rows_max): back off and try again; nothing was stored"
    )]
    Overloaded {
        /// The shard.
        shard: usize,
        /// Its bound.
        rows_max: usize,
    },
    /// One message breaks a limit. Nothing of its unit of work was stored.
    #[error("message {message_id}: {what} is {value}, allowed is {allowed}")]
    MessageLimit {
        /// The message.
        message_id: Uuid,
        /// Which of its parts.
        what: &'static str,
        /// What it has.
        value: String,
        /// What it may have.
        allowed: String,
    },
    /// A payload that was declared JSON is not.
    #[error("message {message_id}: the payload is not valid JSON at byte {offset}: {text}")]
    InvalidJson {
        /// The message.
        message_id: Uuid,
        /// Byte offset of the first error.
        offset: usize,
        /// The parser's words.
        text: String,
    },
    /// An event was given a due time: events are facts, only other messages can be scheduled.
    #[error("message {message_id}: an event cannot be scheduled; schedule a command that appends it")]
    ScheduledEvent {
        /// The message.
        message_id: Uuid,
    },
    /// A message without stream has the id of one that is stored already, or of another of its own unit of work.
    /// Nothing of its unit of work was stored. Ids are kept apart as long as the log holds the message; they are the
    /// receivers' means against copies, not a promise that the outbox takes each once.
    #[error("message {message_id}: a message of this id is stored already; nothing of this unit of work was stored")]
    DuplicateMessage {
        /// The message.
        message_id: Uuid,
    },
    /// A stream has another version than the append expects. Nothing of its unit of work was stored. Read the stream,
    /// decide anew, and append with the version read. At REPEATABLE READ or higher an enlisted append may fail with a
    /// serialization failure (40001) instead.
    #[error(
        "stream {stream_id} is at version {found}, expected was {expected}: nothing of this unit of work was stored; read \
         the stream and decide anew"
    )]
    VersionConflict {
        /// The stream.
        stream_id: Uuid,
        /// The version that the event expects before it; 0 for no event at all.
        expected: i64,
        /// The version that there is, earlier events of the same unit of work included. (Where those alone make it
        /// impossible, only they.)
        found: i64,
    },
    /// A read begins, or goes on backwards, where events of the stream were truncated: nothing is silently fewer. Read from
    /// `first_version` on, or what is missing from the archive.
    #[error("stream {stream_id} begins at version {first_version}: what was before is truncated ({note})")]
    StreamTruncated {
        /// The stream.
        stream_id: Uuid,
        /// The first event that is kept.
        first_version: i64,
        /// What was noted at the truncation, such as where the archive is.
        note: String,
    },
    /// The engine is shutting down or has ended. Nothing was stored.
    #[error("the engine has been shut down: nothing was stored")]
    ShutDown,
    /// The messages are stored and will be published, but their numbers could not be told. Do not send them again:
    /// each would be stored, and published, a second time.
    #[error(
        "the messages are stored and will be published, only their numbers are not known ({reason}): do not send them again"
    )]
    StoredUnnumbered {
        /// What was in the way.
        reason: String,
    },
    /// Nobody could say whether the messages were stored. Look for them by their ids before sending them again, under
    /// the same ids: consumers then know a copy.
    #[error("whether the messages were stored is not known ({reason}): look for their ids before sending them again")]
    OutcomeUnknown {
        /// What was in the way.
        reason: String,
    },
    /// The database could not be reached or refused. Nothing was stored.
    #[error("database: {0}")]
    Store(#[source] crate::seam::store::StoreError),
    /// The schema was changed under the running engine, which has stood down: its shards store and publish nothing more.
    /// Nothing of this call was stored. What is stored already waits for an engine that fits the schema.
    #[error("the engine has stood down, nothing was stored: {0}")]
    StoodDown(#[source] crate::seam::store::StoreError),
    /// The installed schema does not fit this library.
    #[error("{0}")]
    Schema(String),
    /// Events of a subscription are another member's by now, or were done already: roll back, the batch is not this one's.
    #[error("the batch is another member's by now, or is done already: roll back; the next one is what is to be done")]
    CheckpointLost,
    /// A place in the feed is none, or lies ahead of a server that has lost transactions. The feed can be read from a position.
    #[error("{0}")]
    FeedPlace(String),
    /// A connection of the caller's own failed while enlisting.
    #[error("enlist: {0}")]
    Enlist(#[source] tokio_postgres::Error),
}

impl From<crate::seam::store::StoreError> for Error {
    fn from(error: crate::seam::store::StoreError) -> Self {
        match error {
            crate::seam::store::StoreError::SchemaChanged { .. } => Self::StoodDown(error),
            crate::seam::store::StoreError::Truncated { stream_id, first_version, note } => {
                Self::StreamTruncated { stream_id, first_version, note }
            }
            error => Self::Store(error),
        }
    }
}

/// Why a message failed: the reference's numbers (`MessageFailureReason`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i16)]
pub enum FailureReason {
    /// No reason.
    None = 0,
    /// The transport was not ready.
    TransportNotReady = 1,
    /// The transport refused.
    TransportException = 2,
    /// The payload could not be serialized or parsed.
    SerializationError = 3,
    /// The message is not valid.
    ValidationError = 4,
    /// It was tried as often as allowed.
    MaxAttemptsExceeded = 5,
    /// The lease ended.
    LeaseExpired = 6,
    /// The event could not be stored.
    EventStorageFailure = 7,
    /// The transport asked to slow down.
    Throttled = 8,
    /// The message is larger than the transport takes.
    MessageBodyTooLarge = 12,
    /// Anything else.
    Unknown = 99,
}

impl FailureReason {
    /// The reason with this number; `Unknown` for one that is not known.
    #[must_use]
    pub fn from_number(number: i16) -> Self {
        match number {
            0 => Self::None,
            1 => Self::TransportNotReady,
            2 => Self::TransportException,
            3 => Self::SerializationError,
            4 => Self::ValidationError,
            5 => Self::MaxAttemptsExceeded,
            6 => Self::LeaseExpired,
            7 => Self::EventStorageFailure,
            8 => Self::Throttled,
            12 => Self::MessageBodyTooLarge,
            _ => Self::Unknown,
        }
    }
}

/// Cuts an error text to [`crate::limits::ERROR_TEXT_BYTES_MAX`] on a character border, replaces NUL,
/// and says when it was cut.
#[must_use]
pub fn bounded_error_text(text: &str) -> (String, bool) {
    const MARK: &str = " …[cut]";
    let max = crate::limits::ERROR_TEXT_BYTES_MAX;
    let cut = text.len() > max;
    let mut end = if cut { max - MARK.len() } else { text.len() };
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let mut kept = text[..end].replace('\0', "\u{fffd}");
    if kept.len() > max {
        // Each NUL grew by two bytes.
        let mut end = max - MARK.len();
        while !kept.is_char_boundary(end) {
            end -= 1;
        }
        kept.truncate(end);
        kept.push_str(MARK);
        return (kept, true);
    }
    if cut {
        kept.push_str(MARK);
    }
    (kept, cut)
}
