//! What a client of the broker says, and what it is answered: serde's forms in one frame each.
//!
//! Invariants
//! - Frames are those of the sink (`sink::frames`): a length, a kind, a body. The broker's kind is [`KIND`].

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::queue::Faults;
use crate::sink::frames::{SinkMessage, hash_of};

/// The first byte of a broker's frame.
pub const KIND: u8 = 4;

/// A message with its body.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Whole {
    pub message_id: Uuid,
    pub stream_id: Option<Uuid>,
    pub stream_seq: i64,
    pub version: i64,
    pub fence: i64,
    pub type_name: String,
    pub content_type: String,
    pub correlation_id: Uuid,
    pub causation_id: Uuid,
    pub trace_id: Uuid,
    pub span_id: u64,
    pub trace_flags: u8,
    pub metadata: Vec<u8>,
    pub payload: Vec<u8>,
}

impl Whole {
    /// As the sink's journal keeps it.
    #[must_use]
    pub fn hashed(&self, destination: &str) -> SinkMessage {
        SinkMessage {
            message_id: self.message_id,
            stream_id: self.stream_id.unwrap_or(Uuid::nil()),
            stream_seq: self.stream_seq,
            version: self.version,
            fence: self.fence,
            destination_hash: hash_of(destination.as_bytes()),
            payload_hash: hash_of(&self.payload),
        }
    }
}

/// A message that a client is given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delivered {
    /// What settles it.
    pub receipt: u64,
    /// 1 the first time.
    pub delivery_count: u32,
    /// Which turn of its session; it grows when something of it has come back.
    pub turn: u64,
    /// The message.
    pub message: Whole,
}

/// What became of a message at its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Settled {
    /// It is done.
    Completed,
    /// It shall come again.
    Abandoned,
    /// It shall not come again, and somebody shall look at it.
    Dead,
}

/// A queue in figures.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct QueueState {
    pub name: String,
    pub waiting: u64,
    pub out: u64,
    pub delivered: u64,
    pub completed: u64,
    pub dead: u64,
}

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Take these; answered by a byte each, as the sink's.
    Publish {
        /// The queue.
        queue: String,
        /// In order.
        messages: Vec<Whole>,
    },
    /// Take these, from somebody who is no engine: whatever the sink is told, they are taken, and its journal has none
    /// of them; answered as [`Order::Publish`].
    Arrive {
        /// The queue.
        queue: String,
        /// In order.
        messages: Vec<Whole>,
    },
    /// Give up to so many, after so many milliseconds at the latest; answered by [`Delivered`].
    Receive {
        /// Who asks; its end of this connection gives back what it holds.
        client: u64,
        /// The queue.
        queue: String,
        /// At most so many.
        rows_max: u32,
        /// The answer is empty then.
        wait_ms: u32,
    },
    /// What became of them; answered by a bool each: whether the lock was held.
    Settle {
        /// Who held them.
        client: u64,
        /// By receipt.
        settled: Vec<(u64, Settled)>,
    },
    /// Hold them longer; answered by a bool each.
    Renew {
        /// Who holds them.
        client: u64,
        /// Which.
        receipts: Vec<u64>,
    },
    /// Misbehave so from now on; answered by nothing.
    Misbehave(Faults),
    /// All connections of clients end; answered by nothing.
    HangUp,
    /// Answered by [`QueueState`].
    States,
}

/// Why a form could not be made or read.
pub type FormError = postcard::Error;

impl Order {
    /// A frame's body.
    ///
    /// # Errors
    /// Never for what this module holds.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FormError> {
        postcard::to_extend(self, vec![KIND])
    }

    /// From a frame's body.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (kind, form) = bytes.split_first()?;
        (*kind == KIND).then(|| postcard::from_bytes(form).ok()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_survive_the_wire() {
        let whole = Whole { type_name: "OrderPlaced".into(), payload: vec![0, 255, 10], ..Whole::default() };
        for order in [
            Order::Publish { queue: "orders".into(), messages: vec![whole; 2] },
            Order::Receive { client: 1, queue: "orders".into(), rows_max: 9, wait_ms: 5 },
            Order::Settle { client: 1, settled: vec![(4, Settled::Dead)] },
            Order::HangUp,
        ] {
            assert_eq!(Order::parse(&order.to_bytes().unwrap()), Some(order));
        }
        assert_eq!(Order::parse(&[KIND, 99]), None);
        assert_eq!(Order::parse(&[1]), None);
    }
}
