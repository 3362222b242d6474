//! Shard to bridge: how a run of messages gets to a transport and back.
//!
//! A shard never awaits code it did not write: it hands a [`PublishRun`] over and gets it back with
//! outcomes, through `engine::bridge` (tokio) or the simulation's faulty transport.

use std::future::Future;
use std::sync::Arc;

use crate::batch::{DestinationId, Rows};
use crate::seam::transport::{OutgoingBatch, OutgoingMessage, PublishOutcome, TransportLimits};

/// One message of a run.
#[derive(Clone, Debug)]
pub struct RunItem {
    /// The batch it lies in.
    pub rows: Arc<Rows>,
    /// Its reference in that batch.
    pub reference: u32,
    /// The fence of its partition.
    pub fence: i64,
}

/// Messages for one destination, of different lanes (or consecutive ones of a lane, where the transport
/// declares `ordered_atomic_batches`). Recycled: its columns keep their memory.
#[derive(Debug)]
pub struct PublishRun {
    /// Where to.
    pub destination: DestinationId,
    /// What.
    pub items: Vec<RunItem>,
    /// One a message, in order; what is missing is unknown.
    pub outcomes: Vec<PublishOutcome>,
}

impl OutgoingBatch for PublishRun {
    fn destination(&self) -> &str {
        self.destination.name()
    }

    fn len(&self) -> usize {
        self.items.len()
    }

    fn get(&self, index: usize) -> OutgoingMessage<'_> {
        let item = &self.items[index];
        let rows = &*item.rows;
        let row = rows.reference_row[item.reference as usize] as usize;
        let content_type = rows.text(rows.content_type[row]);
        OutgoingMessage {
            message_id: rows.message_id[row],
            stream_id: rows.stream_id(row),
            stream_seq: rows.stream_seq[row],
            version: rows.version[row],
            fence: item.fence,
            replayed: rows.is_replayed(row),
            type_name: rows.text(rows.type_name[row]),
            content_type: if content_type.is_empty() { "application/json" } else { content_type },
            correlation_id: rows.correlation_id[row],
            causation_id: rows.causation_id[row],
            trace: rows.trace[row],
            metadata: rows.bytes(rows.metadata[row]),
            payload: rows.bytes(rows.payload[row]),
        }
    }
}

/// The shard's end of the bridge.
pub trait Publisher: 'static {
    /// What the transport can do.
    fn limits(&self) -> &TransportLimits;

    /// Publishes a run within the transport's time limit and gives it back with its outcomes. Never fails:
    /// what has no outcome is unknown.
    fn publish(&self, run: Box<PublishRun>) -> impl Future<Output = Box<PublishRun>> + 'static;
}
