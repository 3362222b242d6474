//! The bound of a batch's bytes.
//!
//! Invariant: an offset of 32 bits never passes its range: what has no room is refused, by name.

use uuid::Uuid;

use crate::error::Error;

/// A message that a batch has no room for: its bytes are addressed by 32 bits. The batch is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("message {message_id}: its batch would have {bytes} bytes, at most {} are allowed", u32::MAX)]
pub struct ArenaFull {
    /// The message.
    pub message_id: Uuid,
    /// What the batch would have.
    pub bytes: usize,
}

impl From<ArenaFull> for Error {
    fn from(full: ArenaFull) -> Self {
        Self::MessageLimit {
            message_id: full.message_id,
            what: "size of its batch with it",
            value: format!("{} bytes", full.bytes),
            allowed: format!("0..={} bytes", u32::MAX),
        }
    }
}

/// Whether a batch of so many bytes has room for so many more.
pub(super) fn has_room(bytes: usize, more: usize) -> bool {
    bytes.checked_add(more).is_some_and(|bytes| bytes <= u32::MAX as usize)
}
