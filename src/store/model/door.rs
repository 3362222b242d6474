//! The model's `store_outbox_messages`: what callers in any language do in transactions of their own.
//!
//! Invariants
//! - Blocking locks, partitions before streams, ascending; look-ups in later statements.
//! - At REPEATABLE READ the last number is proved to be the last, or the call fails with 40001.

use uuid::Uuid;

use super::Model;
use super::claim::{append_log, references_of};
use super::database::SEGMENTS;
use super::flush::{insert, numbered, single, stream_key};
use super::locks::Key;
use super::transaction::Tx;
use crate::batch::{DestinationId, NewRow, Rows};
use crate::partition::partition_of;
use crate::seam::store::{LastNumbers, StoreError};

/// Isolation of a caller's transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// A snapshot a statement.
    ReadCommitted,
    /// One snapshot, taken by the first statement.
    RepeatableRead,
}

/// A message as a caller gives it.
#[derive(Clone, Debug)]
pub struct NewMessage {
    /// Message id.
    pub message_id: Uuid,
    /// Stream, if it has one.
    pub stream_id: Option<Uuid>,
    /// Whether it is an event.
    pub is_event: bool,
    /// Where it is to go.
    pub destinations: Vec<DestinationId>,
}

/// The numbers a message was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbered {
    /// Place in the stream.
    pub stream_seq: i64,
    /// Place among its events; 0 for none.
    pub version: i64,
}

/// A transaction of a caller's own, in which it may enlist messages.
pub struct UserTransaction {
    tx: Tx,
}

impl Model {
    /// Begins a caller's transaction. Dropped without a commit it is rolled back.
    #[must_use]
    pub fn begin(&self, isolation: Isolation) -> UserTransaction {
        UserTransaction { tx: Tx::begin_user(self, isolation == Isolation::RepeatableRead) }
    }
}

impl UserTransaction {
    /// A statement that only reads: at REPEATABLE READ it fixes the snapshot.
    ///
    /// # Errors
    /// If the server has crashed.
    pub async fn read(&self) -> Result<(), StoreError> {
        self.tx.pause().await?;
        self.tx.snapshot();
        Ok(())
    }

    /// Writes a row somewhere else: the transaction gets its id.
    ///
    /// # Errors
    /// If the server has crashed.
    pub async fn write_elsewhere(&self) -> Result<(), StoreError> {
        self.read().await?;
        self.tx.xid();
        self.tx.wrote();
        Ok(())
    }

    /// Stores messages; waits for whoever works on their streams.
    ///
    /// # Errors
    /// 40001 at REPEATABLE READ if a stream has changed since; a lost connection; a deadlock.
    pub async fn store(&self, messages: &[NewMessage]) -> Result<Vec<Numbered>, StoreError> {
        let tx = &self.tx;
        self.read().await?;
        let rows = self.rows_of(messages);
        let mut partitions = rows.partition.clone();
        partitions.sort_unstable();
        partitions.dedup();
        for partition in partitions {
            tx.lock(Key::Partition(partition), false).await?;
        }
        let mut streams: Vec<Uuid> = (0..rows.len()).filter_map(|row| rows.stream_id(row)).collect();
        streams.sort_by_key(|stream| (stream_key(*stream), *stream));
        streams.dedup();
        for stream in &streams {
            tx.lock(stream_key(*stream), true).await?;
        }
        tx.pause().await?;
        // Reading takes its locks on the segments, until the transaction ends.
        for segment in 0..SEGMENTS {
            tx.lock(Key::Segment(segment), false).await?;
        }
        let snapshot = tx.snapshot();
        let own = tx.xid_if_any();
        let (mut last, segment) = {
            let database = tx.database();
            let last: Vec<LastNumbers> =
                streams.iter().map(|stream| database.last_numbers(*stream, &snapshot, own)).collect();
            (last, database.current_segment(&snapshot))
        };
        if tx.is_repeatable() {
            tx.pause().await?;
            self.prove_last(&streams, &last)?;
        }
        tx.pause().await?;
        let xid = tx.xid();
        let position = tx.database().draw_position();
        let (mut answers, mut references) = (Vec::new(), Vec::new());
        for row in 0..rows.len() {
            let mut numbers = Numbered { stream_seq: 1, version: 0 };
            if let Some(at) = rows.stream_id(row).and_then(|id| streams.iter().position(|stream| *stream == id)) {
                last[at].seq += 1;
                last[at].version += i64::from(rows.is_event(row));
                numbers.stream_seq = last[at].seq;
                numbers.version = if rows.is_event(row) { last[at].version } else { 0 };
            }
            let body = numbered(&single(&rows, row), numbers.stream_seq, numbers.version);
            insert(tx, &body, xid, segment).await?;
            references.extend(references_of(&body));
            answers.push(numbers);
        }
        tx.pause().await?;
        append_log(tx, references, position, segment);
        Ok(answers)
    }

    /// Commits.
    ///
    /// # Errors
    /// A crash of the server: whether it was committed is unknown.
    pub async fn commit(self) -> Result<(), StoreError> {
        self.tx.commit().await
    }

    fn rows_of(&self, messages: &[NewMessage]) -> Rows {
        let count = self.tx.database().partition_count;
        let mut rows = Rows::default();
        for message in messages {
            let row = NewRow {
                message_id: message.message_id,
                stream_id: message.stream_id,
                partition: partition_of(message.stream_id.unwrap_or(message.message_id), count),
                is_event: message.is_event,
                type_name: "caller",
                content_type: "",
                correlation_id: Uuid::nil(),
                causation_id: Uuid::nil(),
                trace: crate::envelope::Trace::default(),
                metadata: b"",
                payload: b"{}",
                due_unix_us: 0,
            };
            rows.push(&row, &message.destinations);
        }
        rows.end_unit();
        rows
    }

    /// Unique indexes see rows that the snapshot does not: the next numbers must be free in all of them.
    fn prove_last(&self, streams: &[Uuid], last: &[LastNumbers]) -> Result<(), StoreError> {
        let snapshot = self.tx.snapshot();
        let own = self.tx.xid_if_any();
        let database = self.tx.database();
        for (stream, last) in streams.iter().zip(last) {
            let carried = database.streams.get(stream);
            let changed = carried.is_some_and(|(_, xid)| !snapshot.contains(*xid) && Some(*xid) != own);
            let event = database.events.contains_key(&(*stream, last.version + 1));
            let message = database.segments.iter().any(|of| of.outbox.contains_key(&(*stream, last.seq + 1)));
            if changed || event || message {
                let text = "the stream has changed since the transaction began".into();
                return Err(StoreError::Transient { sqlstate: "40001".into(), text });
            }
        }
        Ok(())
    }
}
