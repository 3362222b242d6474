//! One lane and its messages, as columns of [`super::lanes::Lanes`]: the plain types.
//!
//! Invariant: what a lane does is one of five states; see `lanes` for how it gets from one to the other.

use uuid::Uuid;

use super::ledger::TransactionIndex;
use crate::batch::DestinationId;
use crate::time::Tick;

/// A message waiting in a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotIndex(pub u32);

/// A lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneIndex(pub u32);

/// Where a message's bytes are, and what is to be told when it is resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Batch of the shard.
    pub batch: u32,
    /// Reference in the batch.
    pub reference: u32,
    /// Transaction of the log; `NONE` for a copy kept beside it.
    pub transaction: TransactionIndex,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub(super) source: Source,
    pub(super) stream_seq: i64,
    pub(super) next: u32,
    pub(super) lane: u32,
}

/// What a lane does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneState {
    /// Nothing to do.
    Idle,
    /// In its destination's queue.
    Ready,
    /// A run is out.
    InFlight,
    /// Its head failed: nothing before `due`.
    Parked,
    /// Its head is on its way to the dead letters.
    Dying,
}

/// One lane, as others may see it.
#[derive(Clone, Copy, Debug)]
pub struct Lane {
    /// Stream, or the message's own id.
    pub lane_id: Uuid,
    /// Destination.
    pub destination: DestinationId,
    /// Partition.
    pub partition: u32,
    /// Number of the newest message admitted.
    pub last_seq: i64,
    /// Attempts of the head that ended in failure.
    pub attempts: i32,
    /// What it does.
    pub state: LaneState,
    /// When a parked lane is due.
    pub due: Tick,
    /// A parked row exists (or is being written): later messages go beside the log.
    pub kept_beside: bool,
    /// It was kept beside at some time.
    pub was_beside: bool,
    /// Copies that are written beside the log but not committed yet.
    pub copying: u32,
    /// Copies that are acknowledged but whose deletion is not committed yet: until then they can still be read.
    pub deleting: u32,
    /// It stands still until the lanes are read anew: a message of it could be written nowhere.
    pub held: bool,
    /// It is not drained before this moment, whoever asks: what is drained first could not be buried.
    pub rests_until: Tick,
    /// The lane goes away when it is empty (a message without stream).
    pub single: bool,
    /// Messages in it.
    pub len: u32,
    pub(super) head: u32,
    pub(super) tail: u32,
    pub(super) used: bool,
}

/// What became of an admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admitted {
    /// Queued in its lane.
    Queued,
    /// The lane is parked: copy it beside the log.
    Beside(LaneIndex),
    /// At or below the last number: a copy that is passed over.
    Known,
}

/// What is admitted.
#[derive(Clone, Copy, Debug)]
pub struct Admission {
    /// Stream, or the message's own id.
    pub lane_id: Uuid,
    /// Destination.
    pub destination: DestinationId,
    /// Partition.
    pub partition: u32,
    /// Number.
    pub stream_seq: i64,
    /// A message without stream.
    pub single: bool,
    /// Its bytes and its transaction.
    pub source: Source,
}
