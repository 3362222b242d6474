//! The broker seam: how a batch of messages leaves the process.
//!
//! A transport is given batches and answers one outcome a message. It runs on the bridge (tokio),
//! never on a shard's thread. The engine keeps order by never having two messages of one lane in
//! flight, so a transport may send the messages of a batch in any order, unless it declares
//! `ordered_atomic_batches`.

use std::future::Future;
use std::pin::Pin;

use uuid::Uuid;

/// What a transport can do. Read once at start.
#[derive(Clone, Debug)]
pub struct TransportLimits {
    /// Bytes of one message, headers included. A larger one is a permanent failure.
    pub message_bytes_max: usize,
    /// Bytes of one batch.
    pub batch_bytes_max: usize,
    /// Messages of one batch.
    pub batch_rows_max: usize,
    /// Longest time one `publish` call should take, in milliseconds. The engine does not read it: it drops the call
    /// after `publish.timeout_ms` and takes what has no outcome as unknown.
    pub timeout_ms: u64,
    /// The transport accepts a batch in order, whole or not at all.
    pub ordered_atomic_batches: bool,
}

impl Default for TransportLimits {
    fn default() -> Self {
        Self {
            message_bytes_max: 1024 * 1024,
            batch_bytes_max: 4 * 1024 * 1024,
            batch_rows_max: 4096,
            timeout_ms: 4_000,
            ordered_atomic_batches: false,
        }
    }
}

/// One message on its way out, borrowed from the batch.
#[derive(Clone, Copy, Debug)]
pub struct OutgoingMessage<'a> {
    /// The id that every copy of this message bears.
    pub message_id: Uuid,
    /// The stream, if it has one.
    pub stream_id: Option<Uuid>,
    /// Place in the stream, from 1; 1 for a message without stream.
    pub stream_seq: i64,
    /// Place among the stream's events, from 1; 0 for a message that is not an event of a stream.
    pub version: i64,
    /// The publisher's fence of the message's partition.
    pub fence: i64,
    /// An operator has asked for this copy: a replay, or a dead letter that was given back. It has no place in the
    /// stream's order: others of the stream, before and behind it, may have gone out long ago.
    pub replayed: bool,
    /// Stable type name.
    pub type_name: &'a str,
    /// Content type; `application/json` where the message states none.
    pub content_type: &'a str,
    /// Correlation id; nil for none.
    pub correlation_id: Uuid,
    /// Causation id; nil for none.
    pub causation_id: Uuid,
    /// W3C trace: trace id, span id, flags; a nil trace id for none.
    pub trace: crate::envelope::Trace,
    /// Metadata bytes as the producer gave them (JSON); empty for none.
    pub metadata: &'a [u8],
    /// Payload bytes as the producer gave them.
    pub payload: &'a [u8],
}

/// What became of one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PublishOutcome {
    /// The transport has it.
    Accepted,
    /// Refused; try again after a backoff. Counts an attempt.
    Failed {
        /// The reference's number for the reason.
        reason: crate::error::FailureReason,
        /// The transport's words.
        text: String,
    },
    /// Refused for good (too large, not serializable): straight to the dead letters.
    Permanent {
        /// The reference's number for the reason.
        reason: crate::error::FailureReason,
        /// The transport's words.
        text: String,
    },
    /// The transport is not ready. Counts no attempt; the destination pauses.
    NotReady,
    /// The transport asks to slow down. Counts no attempt; the destination pauses at least so long.
    Throttled {
        /// Milliseconds to wait; 0 if it did not say.
        retry_after_ms: u64,
    },
    /// Nobody knows (time-out, connection lost after sending). Tried again; a copy may go out.
    Unknown {
        /// What happened.
        text: String,
    },
}

/// A batch for one destination. Messages are read by index.
pub trait OutgoingBatch: Send + Sync {
    /// The destination's name.
    fn destination(&self) -> &str;
    /// Number of messages, at least 1.
    fn len(&self) -> usize;
    /// Whether there is none; never true for a batch that is given to a transport.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The message at `index`.
    ///
    /// # Panics
    /// If `index >= len()`.
    fn get(&self, index: usize) -> OutgoingMessage<'_>;
}

/// A broker client.
pub trait Transport: Send + Sync + 'static {
    /// What it can do.
    fn limits(&self) -> TransportLimits;

    /// Sends a batch and answers one outcome a message, in the batch's order. A shorter answer means
    /// `Unknown` for the rest. `outcomes` comes empty.
    fn publish<'a>(
        &'a self,
        batch: &'a dyn OutgoingBatch,
        outcomes: &'a mut Vec<PublishOutcome>,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

    /// A name for logs.
    fn name(&self) -> &str;

    /// The way in from a source (a queue, a subscription). `None`: there is none of this name, or none at all.
    fn receiver(&self, source: &str) -> Option<std::sync::Arc<dyn super::receiver::Receiver>> {
        let _ = source;
        None
    }
}
