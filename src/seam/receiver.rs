//! The broker seam, the way in: deliveries come in batches and are settled one by one.
//!
//! Invariants (of every implementation)
//! - A delivery stays with the broker until it is settled. What is not settled within the lock time, nor renewed, or
//!   whose connection ends, is delivered again: here or to somebody else.
//! - A broker that keeps a stream in order gives it to one receiver at a time. When a delivery of the stream goes back
//!   (abandoned, its lock over, the connection gone), those behind it go back with it, and the stream's next [`turn`]
//!   begins: the inbox handles nothing of a turn of which it has given something back. What a `receive` answers that
//!   began after an abandonment was answered was delivered after it: nothing is kept back from before.
//! - `receive` may be dropped at an await without losing a delivery for longer than the lock time.
//!
//! It runs on tokio, never on a shard's thread.
//!
//! [`turn`]: Delivery::turn

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use uuid::Uuid;

use crate::envelope::Trace;
use crate::error::FailureReason;

/// What names a delivery at its receiver, given by it; nobody else reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Receipt(pub u64);

/// A message as a broker delivers it. What is not valid in it is found by the inbox, one delivery at a time.
#[derive(Clone, Debug, Default)]
pub struct Delivery {
    /// The id that every copy bears. The nil UUID is refused by the inbox.
    pub message_id: Uuid,
    /// The stream, if it has one. The nil UUID is refused by the inbox.
    pub stream_id: Option<Uuid>,
    /// Stable type name.
    pub type_name: String,
    /// Content type; empty for `application/json`.
    pub content_type: String,
    /// Correlation id; nil for none.
    pub correlation_id: Uuid,
    /// Causation id; nil for none.
    pub causation_id: Uuid,
    /// W3C trace; a nil trace id for none.
    pub trace: Trace,
    /// Metadata bytes (JSON); empty for none.
    pub metadata: Vec<u8>,
    /// Payload bytes as they came.
    pub payload: Vec<u8>,
    /// How often the broker has delivered it, this time included; 0 where it does not say.
    pub delivery_count: u32,
    /// Which turn of its stream at the broker; it grows whenever something of the stream has gone back. 0 where the
    /// broker keeps no order.
    pub turn: u64,
    /// Names it in `settle` and `renew`.
    pub receipt: Receipt,
}

impl Delivery {
    /// Bytes that it holds in memory, about.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.type_name.len() + self.content_type.len() + self.metadata.len() + self.payload.len()
    }
}

/// What is to become of a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// It is done: the broker forgets it.
    Complete,
    /// Not now: delivered again. It takes effect before `settle` answers.
    Abandon,
    /// Never: to the broker's dead letters.
    DeadLetter {
        /// The reference's number for the reason.
        reason: FailureReason,
        /// What is wrong, in words.
        text: String,
    },
}

/// What became of a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettleOutcome {
    /// The broker has it.
    Settled,
    /// The delivery was not ours any more: it comes again, to whomever.
    LockLost,
    /// Nobody knows, or not now. May be tried again; if it is not, the delivery comes again.
    Failed,
}

/// Why nothing could be received.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReceiveError {
    /// The broker cannot be reached: tried again after a pause.
    #[error("the broker cannot be reached: {0}")]
    Disconnected(String),
    /// The broker refuses (no such source, no right): tried again, later, and said in the log.
    #[error("the broker refuses: {0}")]
    Refused(String),
}

/// A future of a receiver.
pub type Receiving<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Called when the connection to the broker has ended, with the reason. Must not block.
pub type OnDisconnected = Arc<dyn Fn(&str) + Send + Sync>;

/// One source (a queue, a subscription) at a broker.
pub trait Receiver: Send + Sync + 'static {
    /// Waits for at least one delivery and answers up to `rows_max`, those of a stream in its order.
    fn receive(&self, rows_max: usize) -> Receiving<'_, Result<Vec<Delivery>, ReceiveError>>;

    /// Settles deliveries, in this order. One outcome each, in order; a shorter answer means `Failed` for the rest.
    fn settle<'a>(&'a self, settlements: &'a [(Receipt, Settlement)]) -> Receiving<'a, Vec<SettleOutcome>>;

    /// Keeps deliveries ours for another lock time. What is lost already stays lost.
    fn renew<'a>(&'a self, receipts: &'a [Receipt]) -> Receiving<'a, ()>;

    /// How long a delivery stays ours without renewal, in milliseconds.
    fn lock_ms(&self) -> u64;

    /// Gives no further delivery until [`Receiver::resume`].
    fn pause(&self);

    /// Goes on after [`Receiver::pause`].
    fn resume(&self);

    /// Sets what is told when the connection ends; one at a time.
    fn on_disconnected(&self, callback: OnDisconnected);

    /// The source's name, for logs.
    fn name(&self) -> &str;
}
