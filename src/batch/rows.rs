//! The unit that crosses every boundary: messages as columns, with one byte arena beside them.
//!
//! Invariants
//! - All message columns have one length; all reference columns have one length; every span lies in the arena.
//! - A *unit of work* is a contiguous range of rows (`unit_end`); it commits whole or not at all.
//! - A *reference* is one (message, destination); a message without one is stored and never published.
//! - Rows of one stream stand in the order in which they are to be published.
//! - `stream_seq` and `version` are 0 until the shard (or the claim) numbers the rows.
//!
//! Cost: `push` into warm columns allocates nothing.

use uuid::Uuid;

use super::arena::{ArenaFull, has_room};
use super::names::DestinationId;
use crate::envelope::Trace;
use crate::ids::lane_of_message;

/// A range of the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub start: u32,
    /// Number of bytes.
    pub len: u32,
}

/// The row is an event of a stream: it gets a version and stands in `wh_event_store`.
pub const ROW_EVENT: u8 = 1;
/// The row has no stream: its lane is its own message id, its number 1.
pub const ROW_STREAMLESS: u8 = 2;
/// A reference whose message is not stored any more: the row has its place and nothing to publish.
pub const ROW_MISSING: u8 = 4;
/// A copy that an operator has asked for.
pub const ROW_REPLAYED: u8 = 16;

/// Its caller expects its stream at a version: see [`Rows::expected`].
pub const ROW_EXPECTED: u8 = 8;

/// Bytes of a row in the columns: three ids and a lane, six numbers, the trace context, four spans.
const ROW_BYTES: usize = 4 * size_of::<Uuid>() + 6 * size_of::<i64>() + size_of::<Trace>() + 4 * size_of::<Span>();
/// Bytes of a reference in the columns.
const REFERENCE_BYTES: usize = size_of::<u32>() + size_of::<DestinationId>();

/// One message as the caller gives it.
#[derive(Clone, Copy, Debug)]
pub struct NewRow<'a> {
    /// Message id.
    pub message_id: Uuid,
    /// Stream id, or `None` for a message without order.
    pub stream_id: Option<Uuid>,
    /// The partition of the stream id (of the message id where there is none).
    pub partition: u32,
    /// Whether it is an event. An event without stream is stored as another message is.
    pub is_event: bool,
    /// Stable type name.
    pub type_name: &'a str,
    /// Content type; empty for `application/json`.
    pub content_type: &'a str,
    /// Correlation id; nil for none.
    pub correlation_id: Uuid,
    /// Causation id; nil for none.
    pub causation_id: Uuid,
    /// Trace context.
    pub trace: Trace,
    /// Metadata bytes; empty for none.
    pub metadata: &'a [u8],
    /// Payload bytes.
    pub payload: &'a [u8],
    /// When it is due, in microseconds since 1970; 0 for now.
    pub due_unix_us: i64,
}

/// See [`Rows::is_scheduled`]; for who has the due time alone. A time before 1970 is due at once, as any past one is.
#[must_use]
pub const fn is_scheduled(due_unix_us: i64) -> bool {
    due_unix_us != 0
}

/// Messages as columns.
#[derive(Debug, Default)]
pub struct Rows {
    /// Message ids.
    pub message_id: Vec<Uuid>,
    /// The stream id, or what stands for the message where it has none ([`lane_of_message`]).
    pub lane_id: Vec<Uuid>,
    /// Partitions.
    pub partition: Vec<u32>,
    /// `ROW_EVENT`, `ROW_STREAMLESS`.
    pub flags: Vec<u8>,
    /// Numbers in the stream, from 1; 0 until numbered.
    pub stream_seq: Vec<i64>,
    /// Versions, from 1; 0 for what is not an event of a stream.
    pub version: Vec<i64>,
    /// Correlation ids; nil for none.
    pub correlation_id: Vec<Uuid>,
    /// Causation ids; nil for none.
    pub causation_id: Vec<Uuid>,
    /// Trace contexts.
    pub trace: Vec<Trace>,
    /// Type names in the arena.
    pub type_name: Vec<Span>,
    /// Content types in the arena; empty for `application/json`.
    pub content_type: Vec<Span>,
    /// Metadata in the arena.
    pub metadata: Vec<Span>,
    /// Payloads in the arena.
    pub payload: Vec<Span>,
    /// Due times in microseconds since 1970; 0 for now.
    pub due_unix_us: Vec<i64>,
    /// The row of each reference, ascending.
    pub reference_row: Vec<u32>,
    /// The destination of each reference.
    pub reference_destination: Vec<DestinationId>,
    /// The rows of events whose caller expects a version, ascending.
    pub expected_row: Vec<u32>,
    /// The version that each of them expects its stream to have before it.
    pub expected_version: Vec<i64>,
    /// One past the last row of each unit of work, ascending.
    pub unit_end: Vec<u32>,
    /// The bytes.
    pub arena: Vec<u8>,
}

impl Rows {
    /// Columns with room for so many rows and bytes.
    #[must_use]
    pub fn with_capacity(rows: usize, bytes: usize) -> Self {
        let mut this = Self::default();
        this.reserve(rows, bytes);
        this
    }

    /// Makes room for so many further rows and bytes.
    pub fn reserve(&mut self, rows: usize, bytes: usize) {
        self.message_id.reserve(rows);
        self.lane_id.reserve(rows);
        self.partition.reserve(rows);
        self.flags.reserve(rows);
        self.stream_seq.reserve(rows);
        self.version.reserve(rows);
        self.correlation_id.reserve(rows);
        self.causation_id.reserve(rows);
        self.trace.reserve(rows);
        self.type_name.reserve(rows);
        self.content_type.reserve(rows);
        self.metadata.reserve(rows);
        self.payload.reserve(rows);
        self.due_unix_us.reserve(rows);
        self.reference_row.reserve(rows);
        self.reference_destination.reserve(rows);
        self.unit_end.reserve(rows);
        self.arena.reserve(bytes);
    }

    /// Number of messages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.message_id.len()
    }

    /// Bytes in memory, about: the arena and the columns. A message without a byte of its own has its row.
    #[must_use]
    pub fn bytes_in_memory(&self) -> usize {
        self.arena.len() + self.len() * ROW_BYTES + self.reference_count() * REFERENCE_BYTES
    }

    /// Bytes that are held for it, about, whatever is in it: what a warm batch costs.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.arena.capacity() + self.message_id.capacity() * ROW_BYTES + self.reference_row.capacity() * REFERENCE_BYTES
    }

    /// Whether there is no message.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.message_id.is_empty()
    }

    /// Number of references.
    #[must_use]
    pub fn reference_count(&self) -> usize {
        self.reference_row.len()
    }

    /// Appends a message with its destinations; answers its row. The unit of work stays open until
    /// [`Rows::end_unit`].
    ///
    /// # Panics
    /// If the arena would pass 4 GiB: callers are bounded far below.
    pub fn push(&mut self, row: &NewRow<'_>, destinations: &[DestinationId]) -> usize {
        let payload = self.append(row.payload);
        self.push_row(row, payload, destinations)
    }

    /// As [`Rows::push`], with a payload that `write` appends to the arena itself: no buffer in between.
    /// `row.payload` is not read.
    ///
    /// # Errors
    /// That of `write`, or that there is no room for the message; the columns are then as they were.
    pub fn push_written<E: From<ArenaFull>>(
        &mut self,
        row: &NewRow<'_>,
        destinations: &[DestinationId],
        write: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<usize, E> {
        let start = self.arena.len();
        if let Err(error) = write(&mut self.arena) {
            self.arena.truncate(start);
            return Err(error);
        }
        assert!(start <= self.arena.len(), "a payload is appended");
        let more = row.type_name.len() + row.content_type.len() + row.metadata.len();
        if !has_room(self.arena.len(), more) {
            let bytes = self.arena.len() + more;
            self.arena.truncate(start);
            return Err(ArenaFull { message_id: row.message_id, bytes }.into());
        }
        let payload = Span { start: start as u32, len: (self.arena.len() - start) as u32 };
        Ok(self.push_row(row, payload, destinations))
    }

    fn push_row(&mut self, row: &NewRow<'_>, payload: Span, destinations: &[DestinationId]) -> usize {
        let index = self.message_id.len();
        let streamless = row.stream_id.is_none();
        self.message_id.push(row.message_id);
        self.lane_id.push(row.stream_id.unwrap_or_else(|| lane_of_message(row.message_id)));
        self.partition.push(row.partition);
        let event = if row.is_event && !streamless { ROW_EVENT } else { 0 };
        self.flags.push(event | if streamless { ROW_STREAMLESS } else { 0 });
        self.stream_seq.push(0);
        self.version.push(0);
        self.correlation_id.push(row.correlation_id);
        self.causation_id.push(row.causation_id);
        self.trace.push(row.trace);
        let type_name = self.append(row.type_name.as_bytes());
        self.type_name.push(type_name);
        let content_type = self.append(row.content_type.as_bytes());
        self.content_type.push(content_type);
        let metadata = self.append(row.metadata);
        self.metadata.push(metadata);
        self.payload.push(payload);
        self.due_unix_us.push(row.due_unix_us);
        for destination in destinations {
            self.reference_row.push(index as u32);
            self.reference_destination.push(*destination);
        }
        index
    }

    /// Appends a row for a reference whose message is not stored any more. What has no version may have had no stream:
    /// that is not known any more, and it is taken to have one.
    pub fn push_missing(&mut self, lane_id: Uuid, partition: u32, version: i64, destination: DestinationId) -> usize {
        let row = NewRow {
            message_id: Uuid::nil(),
            stream_id: Some(lane_id),
            partition,
            is_event: version > 0,
            type_name: "",
            content_type: "",
            correlation_id: Uuid::nil(),
            causation_id: Uuid::nil(),
            trace: Trace::default(),
            metadata: b"",
            payload: b"",
            due_unix_us: 0,
        };
        let index = self.push(&row, &[destination]);
        self.flags[index] |= ROW_MISSING;
        index
    }

    /// Appends a row for a reference whose destination has no number in this process, for this reason.
    pub fn push_unnamed(&mut self, lane_id: Uuid, partition: u32, version: i64, name: &str, reason: &str) -> usize {
        let index = self.push_missing(lane_id, partition, version, DestinationId::UNNAMED);
        self.type_name[index] = self.append(name.as_bytes());
        self.metadata[index] = self.append(reason.as_bytes());
        index
    }

    /// Of a row of [`Rows::push_unnamed`]: the destination's name, and why it has no number.
    #[must_use]
    pub fn unnamed(&self, row: usize) -> Option<(&str, &str)> {
        let reference = self.reference_row.partition_point(|of| (*of as usize) < row);
        (self.flags[row] & ROW_MISSING != 0
            && self.reference_destination.get(reference) == Some(&DestinationId::UNNAMED))
        .then(|| (self.text(self.type_name[row]), self.text(self.metadata[row])))
    }

    /// As [`Rows::push_copy`], where several batches become one.
    ///
    /// # Errors
    /// There is no room for it; nothing was appended.
    pub fn try_push_copy(&mut self, from: &Self, row: usize) -> Result<(), ArenaFull> {
        let more = from.row_bytes(row);
        if !has_room(self.arena.len(), more) {
            return Err(ArenaFull { message_id: from.message_id[row], bytes: self.arena.len().saturating_add(more) });
        }
        self.push_copy(from, row);
        Ok(())
    }

    /// Bytes of a row in the arena.
    #[must_use]
    pub fn row_bytes(&self, row: usize) -> usize {
        self.spans(row).iter().map(|span| span.len as usize).sum()
    }

    fn spans(&self, row: usize) -> [Span; 4] {
        [self.type_name[row], self.content_type[row], self.metadata[row], self.payload[row]]
    }

    /// Takes the row away that was appended last, with its bytes. Its unit of work is still open.
    pub fn pop(&mut self) {
        let Some(row) = self.len().checked_sub(1) else { return };
        let start = self.spans(row).iter().map(|span| span.start).min();
        self.arena.truncate(start.unwrap_or_default() as usize);
        let first = self.reference_row.partition_point(|of| (*of as usize) < row);
        self.reference_row.truncate(first);
        self.reference_destination.truncate(first);
        let first = self.expected_row.partition_point(|of| (*of as usize) < row);
        self.expected_row.truncate(first);
        self.expected_version.truncate(first);
        self.message_id.pop();
        self.lane_id.pop();
        self.partition.pop();
        self.flags.pop();
        self.stream_seq.pop();
        self.version.pop();
        self.correlation_id.pop();
        self.causation_id.pop();
        self.trace.pop();
        self.type_name.pop();
        self.content_type.pop();
        self.metadata.pop();
        self.payload.pop();
        self.due_unix_us.pop();
    }

    /// Appends a copy of another batch's row with its references and numbers.
    ///
    /// # Panics
    /// As [`Rows::push`]; a part of one batch has room.
    pub fn push_copy(&mut self, from: &Self, row: usize) {
        assert!(has_room(self.arena.len(), from.row_bytes(row)), "a batch's arena holds at most 4 GiB");
        let index = self.message_id.len();
        self.message_id.push(from.message_id[row]);
        self.lane_id.push(from.lane_id[row]);
        self.partition.push(from.partition[row]);
        self.flags.push(from.flags[row]);
        self.stream_seq.push(from.stream_seq[row]);
        self.version.push(from.version[row]);
        self.correlation_id.push(from.correlation_id[row]);
        self.causation_id.push(from.causation_id[row]);
        self.trace.push(from.trace[row]);
        for (to, of) in [
            (&mut self.type_name, &from.type_name),
            (&mut self.content_type, &from.content_type),
            (&mut self.metadata, &from.metadata),
            (&mut self.payload, &from.payload),
        ] {
            let bytes = from.bytes(of[row]);
            to.push(Span { start: self.arena.len() as u32, len: bytes.len() as u32 });
            self.arena.extend_from_slice(bytes);
        }
        self.due_unix_us.push(from.due_unix_us[row]);
        let first = from.reference_row.partition_point(|of| (*of as usize) < row);
        let end = from.reference_row.partition_point(|of| (*of as usize) <= row);
        for reference in first..end {
            self.reference_row.push(index as u32);
            self.reference_destination.push(from.reference_destination[reference]);
        }
        if let Some(version) = from.expected(row) {
            self.expected_row.push(index as u32);
            self.expected_version.push(version);
        }
    }

    /// Expects of the row appended last, an event of a stream, that its stream has this version before it.
    ///
    /// # Panics
    /// If it is no event of a stream, or has an expectation already.
    pub fn expect_version(&mut self, version: i64) {
        let flags = self.flags.last_mut().filter(|flags| **flags == ROW_EVENT);
        let Some(flags) = flags else { panic!("only an event of a stream has a version, and one expectation") };
        *flags |= ROW_EXPECTED;
        self.expected_row.push(self.message_id.len() as u32 - 1);
        self.expected_version.push(version);
    }

    /// The version that the row's caller expects its stream to have before it; `None`: any.
    #[must_use]
    pub fn expected(&self, row: usize) -> Option<i64> {
        if self.flags[row] & ROW_EXPECTED == 0 {
            return None;
        }
        let at = self.expected_row.binary_search(&(row as u32)).ok()?;
        Some(self.expected_version[at])
    }

    /// Whether any row's caller expects a version.
    #[must_use]
    pub fn has_expectations(&self) -> bool {
        !self.expected_row.is_empty()
    }

    /// Closes the unit of work that is open, if it has rows.
    pub fn end_unit(&mut self) {
        let end = self.len() as u32;
        if self.unit_end.last().copied().unwrap_or(0) < end {
            self.unit_end.push(end);
        }
    }

    /// The bytes of a span.
    #[must_use]
    pub fn bytes(&self, span: Span) -> &[u8] {
        &self.arena[span.start as usize..(span.start + span.len) as usize]
    }

    /// The text of a span that was appended as text.
    #[must_use]
    pub fn text(&self, span: Span) -> &str {
        std::str::from_utf8(self.bytes(span)).unwrap_or("\u{fffd}")
    }

    /// Whether the row is an event of a stream.
    #[must_use]
    pub fn is_event(&self, row: usize) -> bool {
        self.flags[row] & ROW_EVENT != 0
    }

    /// Whether the row's message is not stored any more.
    #[must_use]
    pub fn is_missing(&self, row: usize) -> bool {
        self.flags[row] & ROW_MISSING != 0
    }

    /// Whether an operator has asked for this copy.
    #[must_use]
    pub fn is_replayed(&self, row: usize) -> bool {
        self.flags[row] & ROW_REPLAYED != 0
    }

    /// Whether the row is scheduled: it has no number and no reference in the log before it is due. Who writes it and
    /// who publishes it must agree on this, or an acknowledged message is lost; so nobody asks in another way.
    #[must_use]
    pub fn is_scheduled(&self, row: usize) -> bool {
        is_scheduled(self.due_unix_us[row])
    }

    /// The row's stream id, if it has one.
    #[must_use]
    pub fn stream_id(&self, row: usize) -> Option<Uuid> {
        (self.flags[row] & ROW_STREAMLESS == 0).then(|| self.lane_id[row])
    }

    /// Empties the columns and keeps their memory.
    pub fn clear(&mut self) {
        self.message_id.clear();
        self.lane_id.clear();
        self.partition.clear();
        self.flags.clear();
        self.stream_seq.clear();
        self.version.clear();
        self.correlation_id.clear();
        self.causation_id.clear();
        self.trace.clear();
        self.type_name.clear();
        self.content_type.clear();
        self.metadata.clear();
        self.payload.clear();
        self.due_unix_us.clear();
        self.reference_row.clear();
        self.reference_destination.clear();
        self.expected_row.clear();
        self.expected_version.clear();
        self.unit_end.clear();
        self.arena.clear();
    }

    fn append(&mut self, bytes: &[u8]) -> Span {
        let start = self.arena.len();
        assert!(has_room(start, bytes.len()), "a batch's arena holds at most 4 GiB");
        self.arena.extend_from_slice(bytes);
        Span { start: start as u32, len: bytes.len() as u32 }
    }
}

#[cfg(test)]
#[path = "rows_tests.rs"]
mod tests;
