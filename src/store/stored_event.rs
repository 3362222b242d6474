//! An event as every reader gets it, whether of a stream, by a subscription or of the feed.
//!
//! Invariants
//! - Payload and metadata are the bytes that went in.
//! - It is read as a type by its reader, not when it is fetched: one that cannot be read spoils no page.
//! - One type, and one reading of each column: what is not there is empty or nil, never a default of some reader's own.

use std::time::SystemTime;

use serde::de::DeserializeOwned;
use tokio_postgres::Row;
use uuid::Uuid;

use crate::envelope::Trace;
use crate::message::Message;
use crate::message::event_types::{Decoded, EventTypes};

/// An event as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredEvent {
    /// Its stream.
    pub stream_id: Uuid,
    /// Its place among the stream's events, from 1.
    pub version: i64,
    /// Its place among everything of the stream, from 1.
    pub stream_seq: i64,
    /// Its place among everything that was stored; along a stream it grows.
    pub position: i64,
    /// When it was stored, by the database's clock.
    pub stored_at: SystemTime,
    /// Its id.
    pub message_id: Uuid,
    /// The name it was stored under.
    pub type_name: String,
    /// Content type; empty for `application/json`.
    pub content_type: String,
    /// Correlation id; nil for none.
    pub correlation_id: Uuid,
    /// Causation id; nil for none.
    pub causation_id: Uuid,
    /// Trace context.
    pub trace: Trace,
    /// Metadata as it went in; empty for none.
    pub metadata: Vec<u8>,
    /// Payload as it went in.
    pub payload: Vec<u8>,
    /// The types it is read by: those of the engine that has read it.
    pub types: EventTypes,
}

impl StoredEvent {
    /// Reads it as a type, brought up to date if it was stored under an older name or in an older shape that the engine's
    /// [`EventTypes`] know. What cannot be read is this event's outcome.
    pub fn decode<T: Message + DeserializeOwned>(&self) -> Decoded<T> {
        self.types.decode(&self.type_name, &self.content_type, &self.payload)
    }

    /// The name that its type has today, if the engine's [`EventTypes`] know the one it was stored under.
    #[must_use]
    pub fn current_name(&self) -> Option<&'static str> {
        self.types.current_name(&self.type_name)
    }

    /// Of a row that `read_stream` answers.
    pub(crate) fn of_stream(types: &EventTypes, stream_id: Uuid, row: &Row) -> Result<Self, tokio_postgres::Error> {
        Ok(Self {
            stream_id,
            version: row.try_get(0)?,
            stream_seq: row.try_get(1)?,
            position: row.try_get(2)?,
            stored_at: row.try_get(3)?,
            message_id: row.try_get(4)?,
            type_name: row.try_get(5)?,
            content_type: row.try_get::<_, Option<String>>(6)?.unwrap_or_default(),
            correlation_id: id(row, 7)?,
            causation_id: id(row, 8)?,
            trace: Trace::from_columns(row.try_get(9)?, row.try_get(10)?, row.try_get(11)?),
            metadata: row.try_get::<_, Option<Vec<u8>>>(12)?.unwrap_or_default(),
            payload: row.try_get(13)?,
            types: types.clone(),
        })
    }

    /// Of a row that `read_subscription` or `read_feed` answers.
    pub(crate) fn of_feed(types: &EventTypes, row: &Row) -> Result<Self, tokio_postgres::Error> {
        Ok(Self {
            stream_id: row.try_get(0)?,
            version: row.try_get(1)?,
            stream_seq: row.try_get(2)?,
            message_id: row.try_get(3)?,
            correlation_id: id(row, 4)?,
            causation_id: id(row, 5)?,
            trace: Trace::from_columns(row.try_get(6)?, row.try_get(7)?, row.try_get(8)?),
            type_name: row.try_get(10)?,
            content_type: row.try_get::<_, Option<String>>(11)?.unwrap_or_default(),
            metadata: row.try_get::<_, Option<Vec<u8>>>(12)?.unwrap_or_default(),
            payload: row.try_get(13)?,
            stored_at: row.try_get(14)?,
            position: row.try_get(15)?,
            types: types.clone(),
        })
    }
}

fn id(row: &Row, column: usize) -> Result<Uuid, tokio_postgres::Error> {
    Ok(row.try_get::<_, Option<Uuid>>(column)?.unwrap_or_default())
}
