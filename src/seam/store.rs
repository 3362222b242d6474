//! The Postgres seam: what the shards and the lease keeper ask of the database.
//!
//! Implementations: `store::postgres`, and `store::model` (in memory, for simulation only). Not meant for users: it
//! changes with the engine. One method here = one file in `sql/functions` = its test; one name differs: `load` calls
//! `load_shard.sql`. Every answer that a shard acts on carries the [`Epoch`] of the server that gave it.

use std::future::Future;
use std::sync::Arc;

use uuid::Uuid;

use crate::batch::{DestinationId, Rows};
use crate::ids::{Epoch, Incarnation};
use crate::plan::snapshot::Snapshot;

pub use super::coordination::{
    Coordination, Heard, HeldPartition, InspectRules, Inspection, Maintenance, Member, Members, Registration, Release,
    Renewed, Taken,
};

/// Why a call to the database did not do what was asked.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// The connection is gone, or was never made. Whether a COMMIT under way took place is unknown:
    /// look it up, never resend blindly.
    #[error("connection lost: {0}")]
    ConnectionLost(String),
    /// Refused, and will be again with the same input (SQLSTATE classes 22 and 23, 42 …).
    #[error("refused ({sqlstate}): {text}")]
    Refused {
        /// SQLSTATE.
        sqlstate: String,
        /// The server's words.
        text: String,
    },
    /// A unique number was taken (23505): remembered numbers are wrong. Nothing was written.
    #[error("a number was taken already")]
    NumberTaken,
    /// A message without stream has the id of one that is stored, or of another in the same call. Nothing was written.
    #[error("message {message_id}: a message of this id is stored already")]
    DuplicateMessage {
        /// Its id.
        message_id: Uuid,
    },
    /// Try again later as it is (40001, 40P01, 53xxx, 57014, 55P03, read-only server …). Nothing was written.
    #[error("try again ({sqlstate}): {text}")]
    Transient {
        /// SQLSTATE.
        sqlstate: String,
        /// The server's words.
        text: String,
    },
    /// A function, table or column that this program names is not there (42883, 42P01, 42703, 3F000): the schema is not
    /// the one that it was started on any more. No later call can do better: stand down.
    #[error(
        "the installed schema is of version {}, this program works with version {wanted}, and something that it needs \
         is not there ({sqlstate}: {text}): update the program if the schema is newer, run `corelane migrate` if it is \
         not, and start the program again", installed.map_or_else(|| "unknown".to_owned(), |version| version.to_string())
    )]
    SchemaChanged {
        /// What is installed now; `None` if the schema's record cannot be read either.
        installed: Option<i32>,
        /// What this program works with.
        wanted: i32,
        /// SQLSTATE.
        sqlstate: String,
        /// The server's words.
        text: String,
    },
    /// The events that a read begins with were truncated. Read from the first version on that is kept.
    #[error("stream {stream_id} begins at version {first_version}: what was before is truncated ({note})")]
    Truncated {
        /// The stream.
        stream_id: Uuid,
        /// The first event that is kept.
        first_version: i64,
        /// What was noted at the truncation, such as where the archive is.
        note: String,
    },
    /// Wrong password, unknown database, no privilege: someone has to act.
    #[error("cannot work with this database ({sqlstate}): {text}")]
    Denied {
        /// SQLSTATE.
        sqlstate: String,
        /// The server's words.
        text: String,
    },
}

impl StoreError {
    /// A call that was given up after its time: the connection is, too.
    pub(crate) fn no_answer(ms: u128) -> Self {
        Self::ConnectionLost(format!("no answer within {ms} ms"))
    }
}

/// Which flush wrote a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    /// The incarnation.
    pub incarnation: Incarnation,
    /// Its shard.
    pub shard: u16,
    /// The shard's flush number, from 1, never given twice in an incarnation.
    pub flush_number: i64,
}

/// SQLSTATE of a flush that is stored and whose numbers cannot be told any more.
pub const NUMBERS_UNKNOWN: &str = "CL006";

/// A park without end: the lane waits until an operator lets it go on. In milliseconds, a hundred years; the database marks
/// the lane as held by it.
pub const HELD_MS: i64 = 3_155_760_000_000;

/// The number of a log reference that is no message: something was put beside the log for its lane.
pub const LOOK_BESIDE: i64 = 0;

/// The number of one that says that its lane is held no more.
pub const GO_ON: i64 = -1;

/// "This row has no stream" in [`StoreRequest::row_stream`].
pub const NO_STREAM: u32 = u32::MAX;

/// One flush of new messages. Rows are the concatenation of the batches' rows.
#[derive(Debug)]
pub struct StoreRequest<'a> {
    /// Who writes.
    pub origin: Origin,
    /// What the incarnation believes its set of partitions to be (a counter; see [`Taken::ownership`]).
    /// If it is not so, the rows are stored with numbers looked up, and as not owned.
    pub ownership: i64,
    /// What the shard's reader has read whole: log rows of others outside it make `foreign` true.
    pub read: &'a Snapshot,
    /// The server's life that `read` belongs to. In another one transaction ids may have been given again, and the
    /// answer is as if there were a row of another writer. `None`: any.
    pub epoch: Option<Epoch>,
    /// The messages. `stream_seq` and `version` are final where the stream's `known` is true, and count
    /// from 1 within this request where it is not. Where a row's caller expects a version ([`Rows::expected`]), the
    /// versions of its stream count from that one: the store checks it where it looks numbers up.
    pub batches: &'a [Arc<Rows>],
    /// For each row, the index of its stream in the columns below, or [`NO_STREAM`].
    pub row_stream: &'a [u32],
    /// Distinct streams.
    pub stream_id: &'a [Uuid],
    /// Their partitions.
    pub stream_partition: &'a [u32],
    /// Whether the shard remembers the stream's last numbers (only ever for partitions it holds).
    pub stream_known: &'a [bool],
    /// The remembered last number (0 where unknown).
    pub stream_last_seq: &'a [i64],
    /// The remembered last version; where it is unknown, the one that is expected, or 0.
    pub stream_last_version: &'a [i64],
    /// Partitions of all rows (streamless ones included), ascending, without doubles: locked exclusively if
    /// that is possible at once, otherwise shared with a lock a stream.
    pub partitions: &'a [u32],
    /// Partitions that this shard holds, ascending: references of others go into a log row that is not owned.
    pub held: &'a [u32],
    /// Streams (by index) whose locks are waited for. Usually none.
    pub patient: &'a [u32],
    /// How long for each, in milliseconds.
    pub patience_ms: u64,
}

/// A stream's last numbers before the flush, as the database saw them under its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastNumbers {
    /// Last `stream_seq`; 0 for none.
    pub seq: i64,
    /// Last `version`; 0 for none.
    pub version: i64,
}

/// What became of a flush.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreReply {
    /// Committed.
    Stored(Stored),
    /// Nothing was written: these streams (with their partition) were locked by somebody else.
    Busy {
        /// Streams whose lock, or whose partition's lock, is held elsewhere.
        stream_id: Vec<Uuid>,
    },
    /// Nothing was written: callers expect other versions of these streams than they have.
    Conflict {
        /// Each of them, and the version that it has, read under its lock.
        found: Vec<(Uuid, i64)>,
    },
}

/// A committed flush.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Its transaction.
    pub xid: u64,
    /// The server's life.
    pub epoch: Epoch,
    /// Position of row 0; row i has `position + i`.
    pub position: i64,
    /// Whether the ownership in the request was right, checked under the incarnation's lock.
    pub owned: bool,
    /// Whether there was a log row of another writer outside `read`: then numbers were looked up and a
    /// stream without a lane must wait for the claim.
    pub foreign: bool,
    /// Looked-up numbers of all streams of the request, in its order; `None` when all were known and right.
    pub looked_up: Option<Vec<LastNumbers>>,
}

/// A failed head: its stream waits for `due`, for one destination.
#[derive(Clone, Debug, PartialEq)]
pub struct Park {
    /// Stream, or the message's own id.
    pub lane_id: Uuid,
    /// Destination.
    pub destination: DestinationId,
    /// Partition.
    pub partition: u32,
    /// The number of the message that failed.
    pub stream_seq: i64,
    /// Attempts that ended in failure, this one included (0 for a lane that was only moved out of memory).
    pub attempts: i32,
    /// The reference's reason number.
    pub reason: i16,
    /// Bounded text.
    pub error: String,
    /// Whether the text was cut.
    pub error_cut: bool,
    /// Next try, in milliseconds from now; the database adds them to its own clock. [`HELD_MS`]: none by itself.
    pub due_in_ms: i64,
}

/// References to copy beside the log, so that the cursor can pass them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spill {
    /// Lane.
    pub lane_id: Uuid,
    /// Destination.
    pub destination: DestinationId,
    /// Partition.
    pub partition: u32,
    /// Number.
    pub stream_seq: i64,
    /// Version; 0 for a message of `wh_outbox`.
    pub version: i64,
}

/// A message that goes to the dead letters for one destination.
#[derive(Clone, Debug, PartialEq)]
pub struct DeadLetter {
    /// Lane.
    pub lane_id: Uuid,
    /// Destination.
    pub destination: DestinationId,
    /// Its name, where this process has no number for it (then `destination` is [`DestinationId::UNNAMED`]).
    pub unnamed: Option<Box<str>>,
    /// Partition.
    pub partition: u32,
    /// Number.
    pub stream_seq: i64,
    /// Version; 0 for a message of `wh_outbox`.
    pub version: i64,
    /// Attempts that ended in failure.
    pub attempts: i32,
    /// The reference's reason number.
    pub reason: i16,
    /// Bounded text.
    pub error: String,
    /// Whether the text was cut.
    pub error_cut: bool,
}

impl DeadLetter {
    /// The destination's name.
    #[must_use]
    pub fn destination_name(&self) -> &str {
        self.unnamed.as_deref().unwrap_or_else(|| self.destination.name())
    }
}

/// A reference that was copied beside the log and is now acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Lane.
    pub lane_id: Uuid,
    /// Destination.
    pub destination: DestinationId,
    /// Partition.
    pub partition: u32,
    /// Number.
    pub stream_seq: i64,
}

/// One transaction of outcomes: everything here commits together. All of it is idempotent: sent again
/// after a lost connection it changes nothing.
#[derive(Debug, Default)]
pub struct SettleRequest {
    /// Shard of the cursor.
    pub shard: u16,
    /// The set of partitions that `cursor` was made for ([`Taken::ownership`]): of one taken later it says nothing.
    pub ownership: i64,
    /// The server's life that this stems from: in another one nothing is written (a cursor would hold
    /// transaction ids that were given again), and the answer names the new one. `None`: any.
    pub epoch: Option<Epoch>,
    /// Transactions whose messages on the shard's partitions are all resolved **once this commits**.
    pub cursor: Option<Snapshot>,
    /// Lanes that wait. An existing row is overwritten.
    pub park: Vec<Park>,
    /// References copied beside the log. The body of a message of `wh_outbox` is copied with it.
    pub spill: Vec<Spill>,
    /// Acknowledged references: their copies are deleted.
    pub drained: Vec<Drained>,
    /// Dead letters; the copy beside the log is deleted if there is one.
    pub dead: Vec<DeadLetter>,
    /// Lanes whose parked row goes, if no reference of theirs is left beside the log. Answered in order.
    pub unpark: Vec<(Uuid, DestinationId, u32)>,
}

impl SettleRequest {
    /// Whether there is nothing but perhaps a cursor: such a transaction may commit asynchronously.
    #[must_use]
    pub fn only_cursor(&self) -> bool {
        self.park.is_empty()
            && self.spill.is_empty()
            && self.dead.is_empty()
            && self.unpark.is_empty()
            && self.drained.is_empty()
    }
}

/// What became of a settlement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettleReply {
    /// Committed. For each element of `unpark`, whether the row is gone.
    Settled {
        /// The server's life.
        epoch: Epoch,
        /// See above.
        unparked: Vec<bool>,
    },
    /// The incarnation is dead or does not own what it writes about: nothing was written. Stand down.
    Fenced,
}

/// Where a shard's reader stands.
#[derive(Clone, Debug, Default)]
pub struct ReadPosition {
    /// Read whole.
    pub read: Snapshot,
    /// Being read page by page: the snapshot that filters them, and the position of the last one's end.
    pub page: Option<(Snapshot, i64)>,
    /// Handed back as it came; left at its default where `read` was made anew.
    pub range: ReadRange,
}

/// Between which positions a store has to look (0: not known).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadRange {
    /// Transactions at or above `read.xmax` have drawn positions above this one.
    pub read_floor: i64,
    /// The same for the page's snapshot.
    pub page_floor: i64,
    /// No row of the page's snapshot lies above this one.
    pub page_ceiling: i64,
}

/// One claim.
#[derive(Debug)]
pub struct ClaimRequest<'a> {
    /// The reader.
    pub incarnation: Incarnation,
    /// Its shard. Owned log rows of other shards of the same incarnation are passed over.
    pub shard: u16,
    /// Where it stands.
    pub position: &'a ReadPosition,
    /// Partitions held, ascending.
    pub partitions: &'a [u32],
    /// Own flushes whose rows are in memory: their owned log rows come without references.
    pub flushes_in_memory: &'a [i64],
    /// At most about so many references.
    pub rows_max: usize,
    /// At most about so many streams.
    pub streams_max: usize,
}

/// One log row that a claim passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimedLog {
    /// Its transaction.
    pub xid: u64,
    /// Set if it is an own, owned row whose references are in memory.
    pub own_flush: Option<i64>,
    /// Its writer held the partitions of all that it stored with it, under the fence: it stored nothing into those of
    /// anybody else. Of a row that is not owned, nothing tells the partitions of its messages without a destination.
    pub owned: bool,
    /// References in `ClaimReply::rows` that belong to it (consecutive, in order); only those of the
    /// partitions asked for.
    pub reference_count: u32,
}

/// What a claim found. Rows bear their numbers; `reference_row[i] == i`, one row a reference.
#[derive(Debug)]
pub struct ClaimReply {
    /// The server's life.
    pub epoch: Epoch,
    /// Where the reader stands after this page.
    pub position: ReadPosition,
    /// Whether the snapshot holds more than this page.
    pub more: bool,
    /// The log rows passed, by position.
    pub logs: Vec<ClaimedLog>,
    /// The messages behind the references.
    pub rows: Rows,
    /// Milliseconds until the next scheduled message of the partitions is due (0 = now), if there is one.
    pub scheduled_in_ms: Option<i64>,
}

/// A lane that waits, as it stands in the database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParkedLane {
    /// Lane.
    pub lane_id: Uuid,
    /// Destination.
    pub destination: DestinationId,
    /// Partition.
    pub partition: u32,
    /// Attempts of its head.
    pub attempts: i32,
    /// Milliseconds until it is due; 0 or less for now, about [`HELD_MS`] if it is held.
    pub due_in_ms: i64,
}

/// What a shard starts from after its partitions were taken.
#[derive(Debug)]
pub struct LoadReply {
    /// The server's life.
    pub epoch: Epoch,
    /// For each partition asked for: what is resolved (base of the take-over and own cursor united).
    pub resolved: Vec<Snapshot>,
    /// All parked lanes of these partitions.
    pub parked: Vec<ParkedLane>,
    /// The snapshot that all of it was read in: what these transactions have done to parked lanes is in it.
    pub read_at: Snapshot,
}

/// The shards' side of the database.
pub trait Store: 'static {
    /// Stores a flush: one transaction, one commit.
    fn store_shard_messages(&self, request: &StoreRequest<'_>) -> impl Future<Output = Result<StoreReply, StoreError>>;

    /// Whether the flush committed, asked under the lock of the shard's flushes (blocking, so that a transaction
    /// still committing is waited for). `stream_id` as in the request: if it committed, `looked_up` holds their
    /// last numbers before it. `stream_rows`: how many numbered messages the flush has of each. `since` is a transaction
    /// id no newer than the flush's. Refused if it is not there and the incarnation has ended: then its absence proves
    /// nothing; and with [`NUMBERS_UNKNOWN`] if it is stored, and rotation has truncated what would tell its numbers.
    fn find_flush(
        &self,
        origin: Origin,
        stream_id: &[Uuid],
        stream_rows: &[u32],
        since: u64,
    ) -> impl Future<Output = Result<Option<Stored>, StoreError>>;

    /// Which of these ids a message without stream cannot have any more, because one that is stored has it.
    fn find_duplicates(&self, message_id: &[Uuid]) -> impl Future<Output = Result<Vec<Uuid>, StoreError>>;

    /// Writes outcomes: one transaction, fenced by the incarnation's lock.
    fn settle(
        &self,
        incarnation: Incarnation,
        request: &SettleRequest,
    ) -> impl Future<Output = Result<SettleReply, StoreError>>;

    /// Fetches committed, unpublished messages of held partitions.
    fn claim_work(&self, request: &ClaimRequest<'_>) -> impl Future<Output = Result<ClaimReply, StoreError>>;

    /// The first `rows_max` references kept beside the log for a lane, by number, with their messages.
    fn claim_parked(
        &self,
        lane_id: Uuid,
        destination: DestinationId,
        partition: u32,
        rows_max: usize,
    ) -> impl Future<Output = Result<Rows, StoreError>>;

    /// Gives due scheduled messages of the partitions their numbers and puts them into the log: at most
    /// `rows_max`. Answers how many.
    fn release_scheduled(
        &self,
        incarnation: Incarnation,
        partitions: &[u32],
        rows_max: usize,
    ) -> impl Future<Output = Result<usize, StoreError>>;

    /// What is resolved of partitions that the incarnation holds, written where the next load of them finds it. Nothing
    /// is written for one that it does not own, nor of another life of the server.
    fn keep_resolved(&self, incarnation: Incarnation, kept: &Release) -> impl Future<Output = Result<(), StoreError>>;

    /// Reads, in a transaction of its own begun after the take-over committed, where to start.
    fn load(&self, incarnation: Incarnation, partitions: &[u32])
    -> impl Future<Output = Result<LoadReply, StoreError>>;
}
