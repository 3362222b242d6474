//! From a message to its row, its partition and its shard.
//!
//! Invariants
//! - What breaks a limit is refused here, with the message's id: nothing of its unit of work is stored.
//! - The payload is written once, straight into the batch's arena.
//! - No borrow of this thread's caches is held while the user's `Serialize` runs: it may push messages itself.
//! - A stream's partition, and so its shard, depends on its id alone.

use std::cell::RefCell;

use hashbrown::HashMap;
use uuid::Uuid;

use crate::batch::{DestinationId, NewRow, Rows, is_scheduled};
use crate::error::{Error, Result, bounded_error_text};
use crate::limits::{DESTINATIONS_OF_MESSAGE_MAX, METADATA_BYTES_MAX, NAME_BYTES_MAX, PAYLOAD_BYTES_MAX};
use crate::message::{Enqueue, Header, PayloadError, json};
use crate::partition::partition_of;

thread_local! {
    /// Destinations this thread has used: no lock after the first time.
    static DESTINATIONS: RefCell<HashMap<&'static str, DestinationId>> = RefCell::new(HashMap::new());
    static SCRATCH: RefCell<Vec<DestinationId>> = const { RefCell::new(Vec::new()) };
}

/// How messages are placed.
#[derive(Clone, Copy, Debug)]
pub struct Router {
    /// Installed partitions.
    pub partitions: u32,
    /// Shards of this process.
    pub shards: u16,
}

impl Router {
    /// The shard of a partition.
    #[must_use]
    pub fn shard_of(self, partition: u32) -> usize {
        (partition % u32::from(self.shards)) as usize
    }

    /// The partition a message would have.
    #[must_use]
    pub fn partition(self, message: &(impl Enqueue + ?Sized), message_id: Uuid) -> u32 {
        partition_of(message.header().stream_id.unwrap_or(message_id), self.partitions)
    }

    /// Appends a message to a batch, under this id. The unit of work stays open.
    ///
    /// # Errors
    /// A limit that it breaks, or JSON that is none; the batch is then as it was.
    pub fn write(self, rows: &mut Rows, message: &(impl Enqueue + ?Sized), message_id: Uuid) -> Result<()> {
        let header = message.header();
        if header.stream_id.is_some_and(|id| id.is_nil()) {
            return Err(Error::InvalidStreamId);
        }
        if message_id.is_nil() {
            return Err(Error::MessageLimit {
                message_id,
                what: "message id",
                value: "the nil UUID".to_owned(),
                allowed: "any other".to_owned(),
            });
        }
        let limit = |what, value: usize, allowed: String| Error::MessageLimit {
            message_id,
            what,
            value: value.to_string(),
            allowed,
        };
        let name = |what: &'static str, text: &str, min: usize| {
            if text.len() < min || text.len() > NAME_BYTES_MAX {
                return Err(limit(what, text.len(), format!("{min}..={NAME_BYTES_MAX} bytes")));
            }
            if text.contains('\0') {
                return Err(Error::MessageLimit {
                    message_id,
                    what,
                    value: "a text with NUL".to_owned(),
                    allowed: "a text without NUL".to_owned(),
                });
            }
            Ok(())
        };
        name("type name", header.type_name, 1)?;
        name("content type", header.content_type, 0)?;
        let wishes = &header.wishes;
        if wishes.metadata.len() > METADATA_BYTES_MAX {
            return Err(limit("metadata", wishes.metadata.len(), format!("0..={METADATA_BYTES_MAX} bytes")));
        }
        if wishes.due_unix_us < 0 {
            return Err(Error::MessageLimit {
                message_id,
                what: "due time",
                value: format!("{} us since 1970", wishes.due_unix_us),
                allowed: format!("0..={} us since 1970 (0: at once)", i64::MAX),
            });
        }
        if header.is_event && is_scheduled(wishes.due_unix_us) {
            return Err(Error::ScheduledEvent { message_id });
        }
        let expected = wishes.expected.version();
        if expected.is_some_and(|version| version < 0 || !header.is_event || header.stream_id.is_none()) {
            return Err(Error::MessageLimit {
                message_id,
                what: "expected version",
                value: format!("{:?}", wishes.expected),
                allowed: "of an event of a stream 0 or more, of anything else none".to_owned(),
            });
        }
        let destinations = wishes.destinations.unwrap_or(header.destinations);
        if destinations.len() > DESTINATIONS_OF_MESSAGE_MAX {
            let allowed = format!("0..={DESTINATIONS_OF_MESSAGE_MAX}");
            return Err(limit("number of destinations", destinations.len(), allowed));
        }
        let mut ids = SCRATCH.take();
        ids.clear();
        let written = resolve(destinations, message_id, &mut ids).and_then(|()| {
            let row = NewRow {
                message_id,
                stream_id: header.stream_id,
                partition: partition_of(header.stream_id.unwrap_or(message_id), self.partitions),
                is_event: header.is_event,
                type_name: header.type_name,
                content_type: header.content_type,
                correlation_id: wishes.correlation_id,
                causation_id: wishes.causation_id,
                trace: wishes.trace,
                metadata: wishes.metadata,
                payload: &[],
                due_unix_us: wishes.due_unix_us,
            };
            rows.push_written(&row, &ids, |arena| write_payload(message, &header, message_id, arena))
        });
        SCRATCH.set(ids);
        written.map(|_| expected.into_iter().for_each(|version| rows.expect_version(version)))
    }
}

fn resolve(names: &[&str], message_id: Uuid, into: &mut Vec<DestinationId>) -> Result<()> {
    for name in names {
        let id = destination_id(name).map_err(|allowed| Error::MessageLimit {
            message_id,
            what: "destination",
            value: format!("{name:.64?}"),
            allowed,
        })?;
        // Named twice is once.
        if !into.contains(&id) {
            into.push(id);
        }
    }
    Ok(())
}

fn write_payload(
    message: &(impl Enqueue + ?Sized),
    header: &Header<'_>,
    message_id: Uuid,
    arena: &mut Vec<u8>,
) -> Result<()> {
    let start = arena.len();
    let refused = |value: String, allowed: String| Error::MessageLimit { message_id, what: "payload", value, allowed };
    message.write_payload(arena, PAYLOAD_BYTES_MAX).map_err(|error| match error {
        PayloadError::TooLong => refused("longer".to_owned(), format!("0..={PAYLOAD_BYTES_MAX} bytes")),
        PayloadError::Serialize(text) => refused(
            format!("not to be serialized ({})", bounded_error_text(&text).0),
            "what serde_json can write".to_owned(),
        ),
    })?;
    if header.check_json {
        json::check(&arena[start..]).map_err(|(offset, text)| Error::InvalidJson { message_id, offset, text })?;
    }
    Ok(())
}

fn destination_id(name: &str) -> std::result::Result<DestinationId, String> {
    if let Some(id) = DESTINATIONS.with_borrow(|known| known.get(name).copied()) {
        return Ok(id);
    }
    let id = DestinationId::of(name)?;
    DESTINATIONS.with_borrow_mut(|known| known.insert(id.name(), id));
    Ok(id)
}

#[cfg(test)]
mod tests;
