//! Truncation from the event store's handle, and how an event that was erased is told from others.
//!
//! Invariant: the connection is the operator's. An engine's own role can neither delete nor overwrite events.

use tokio_postgres::GenericClient;
use uuid::Uuid;

use super::event_store::{EventStore, StoredEvent};
use crate::error::Result;
use crate::store::dead_letters::Mode;
use crate::store::retention::{self, ERASED, ROWS_MAX, Truncated};

impl EventStore {
    /// Deletes a stream's events before the version `before`, for good, a bounded number a call: again while it answers
    /// `more`. From then on a read from below is [`crate::Error::StreamTruncated`]; appends go on with the same versions.
    /// `client` is a connection of an operator's, or his transaction. See [`retention`].
    ///
    /// # Errors
    /// As [`retention::truncate_stream`].
    pub async fn truncate_stream(
        &self,
        client: &impl GenericClient,
        stream_id: Uuid,
        before: i64,
        note: Option<&str>,
        mode: Mode,
    ) -> Result<Truncated> {
        retention::truncate_stream(client, &self.engine.shared.schema, stream_id, before, note, ROWS_MAX, mode).await
    }
}

impl StoredEvent {
    /// Whether its payload was erased ([`retention::erase_events`]): there is nothing to decode.
    #[must_use]
    pub fn is_erased(&self) -> bool {
        self.content_type == ERASED
    }
}
