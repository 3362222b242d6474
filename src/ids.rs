//! Identifiers: what names a message, a stream, a partition, an incarnation.
//!
//! Invariant: a nil stream id never becomes a [`StreamId`]: it is a typed error at the door.

use uuid::Uuid;

use crate::error::{Error, Result};

/// The id of one message: a UUID, version 7 when Corelane makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageId(pub Uuid);

impl MessageId {
    /// A new time-ordered id.
    #[must_use]
    pub fn new() -> Self {
        Self(Uuid::now_v7())
    }
}

impl Default for MessageId {
    fn default() -> Self {
        Self::new()
    }
}

/// The lane of a message without stream: its id with one bit turned, so that it is no stream's lane, also where the
/// message's id is a stream's (`sql/functions/wh_lane.sql`, where it is explained).
#[must_use]
pub fn lane_of_message(message_id: Uuid) -> Uuid {
    Uuid::from_u128(message_id.as_u128() ^ (1 << 63))
}

/// The day of an id in the inbox's memory, in days from 1970; -1 where the id has no time of its own
/// (`sql/functions/wh_inbox_day.sql`, the same rule; a test compares the two).
#[must_use]
pub fn inbox_day(message_id: Uuid) -> i32 {
    let bytes = message_id.as_bytes();
    if bytes[6] >> 4 != 7 || bytes[8] >> 6 != 2 {
        return -1;
    }
    let milliseconds = bytes[..6].iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
    // At most 2^48 / 86,400,000: some three million.
    (milliseconds / 86_400_000) as i32
}

/// The id of a stream: the messages that bear it are published one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(Uuid);

impl StreamId {
    /// Checks an id given by the caller.
    ///
    /// # Errors
    /// [`Error::InvalidStreamId`] for the nil UUID, which other systems use for "none".
    pub fn new(id: Uuid) -> Result<Self> {
        if id.is_nil() {
            return Err(Error::InvalidStreamId);
        }
        Ok(Self(id))
    }

    /// The UUID itself.
    #[must_use]
    pub fn get(self) -> Uuid {
        self.0
    }
}

impl TryFrom<Uuid> for StreamId {
    type Error = Error;
    fn try_from(id: Uuid) -> Result<Self> {
        Self::new(id)
    }
}

/// One life of one process in the cluster. `number` keys its advisory locks, `id` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Incarnation {
    /// Serial number given by the database; never used twice in one schema.
    pub number: i32,
    /// Random id made by the process.
    pub id: Uuid,
}

/// One life of the server between crashes: the value of the row in `wh_epoch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Epoch(pub Uuid);
