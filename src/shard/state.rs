//! What one shard knows. How messages get into its lanes is told in `admit`.
//!
//! Invariants
//! - Only the shard's own task touches it, and no borrow of it is held across an await.
//! - A batch stays in memory exactly as long as a reference of it is unresolved.
//! - `era` changes whenever lanes are dropped; whatever comes back from an older era is ignored.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

use uuid::Uuid;

use super::crowd::Crowd;
use super::parting::Parting;
use super::pending::Pending;
use super::recall::Recall;
use super::regroup::Regroup;
use super::settle::SettleQueue;
use crate::batch::{DestinationId, Pool, Rows};
use crate::ids::{Epoch, Incarnation};
use crate::metrics::ShardMetrics;
use crate::plan::cadence::Intervals;
use crate::plan::lanes::{LaneIndex, Lanes, Source};
use crate::plan::ledger::{Ledger, TransactionIndex};
use crate::plan::mutants::{self, Mutant};
use crate::plan::numbers::Numbers;
use crate::plan::pause::{BreakerRules, Pause};
use crate::plan::retry::OnDeath;
use crate::plan::snapshot::Snapshot;
use crate::seam::store::{HeldPartition, ReadPosition};
use crate::time::Tick;

/// The figures a shard runs by; `engine::builder` makes them from the config, which checks the bounds.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // Named as the config keys (`claim.poll…`: the intervals), which say what they are.
pub struct ShardSettings {
    pub shard: u16,
    pub flush_rows_max: usize,
    pub flush_bytes_max: usize,
    pub flush_age_us_max: u64,
    pub claim_rows_max: usize,
    pub claim_streams_max: usize,
    pub claim_intervals: Intervals,
    pub lane_rows_max: usize,
    pub lane_streams_max: usize,
    /// How long memory may be full before its longest lanes make room ([`super::CROWD_MS`]; shorter in simulations).
    pub lane_crowd_ms: u64,
    pub publish_run_rows_max: usize,
    pub publish_in_flight_max: usize,
    pub retry_base_ms: u64,
    pub retry_cap_ms: u64,
    pub retry_attempts_max: i32,
    pub retry_jitter_percent: u32,
    pub on_death: OnDeath,
    pub breaker: BreakerRules,
    pub cursor_interval_ms: u64,
    /// Longest a call to the database may take before its connection is given up.
    pub call_timeout_ms: u64,
}

/// A batch in memory.
#[derive(Debug)]
pub(super) struct Batch {
    pub rows: Arc<Rows>,
    unresolved: u32,
}

/// See [`State::rows_of`], for where other parts of the state are borrowed.
pub(super) fn rows_of(batches: &[Option<Batch>], batch: u32) -> &Arc<Rows> {
    let Some(Some(batch)) = batches.get(batch as usize) else { unreachable!("batch {batch} is not in memory") };
    &batch.rows
}

/// One of the shard's own flushes whose rows are in memory, until the reader has read it whole.
#[derive(Debug)]
pub(super) struct FlushRecord {
    pub number: i64,
    pub xid: u64,
    /// The claim has passed it: all its rows are in their lanes.
    pub fed: bool,
    pub transaction: TransactionIndex,
    /// Rows that wait for the claim, in order: batch and row.
    pub waiting: Vec<(u32, u32)>,
}

/// The shard's state.
pub(super) struct State {
    pub settings: ShardSettings,
    pub metrics: Arc<ShardMetrics>,
    pub pool: Arc<Pool>,

    pub incarnation: Option<Incarnation>,
    pub ownership: i64,
    pub held: Vec<u32>,
    pub fences: Vec<i64>,
    pub era: u32,
    pub must_load: bool,
    pub loaded: bool,
    pub epoch: Option<Epoch>,

    pub reader: ReadPosition,
    pub caught_up: bool,
    /// Oldest and newest of the own transactions whose rows were left to the claim, until it has read them.
    left: Option<(u64, u64)>,
    /// Stream and number of the message that the claim's last page ended in.
    pub half_fed: Option<(Uuid, i64)>,
    /// Transactions that the claim came by while a flush had no answer: it may be one of them. And whether the log row
    /// was an owner's.
    pub fed_meanwhile: Vec<(u64, bool)>,
    /// What was resolved for a partition when it was taken, until the reader has caught up.
    pub bases: Vec<(u32, Snapshot)>,

    pub lanes: Lanes,
    pub ledger: Ledger,
    pub numbers: Numbers,
    pub batches: Vec<Option<Batch>>,
    free_batches: Vec<u32>,
    pub waiting_rows: usize,
    pub flush_number: i64,
    pub flushes: VecDeque<FlushRecord>,
    pub pending: VecDeque<Pending>,
    pub held_back: VecDeque<Pending>,
    pub pending_rows: usize,
    pub pending_bytes: usize,
    pub flush_in_flight: bool,

    pub settle: SettleQueue,
    /// A settlement is under way, perhaps of an older era.
    pub settling: bool,
    pub cursor_dirty: bool,
    /// References that were set aside; see `refused`.
    pub set_aside_count: u64,
    pub parked_due: BinaryHeap<Reverse<(Tick, LaneIndex)>>,
    pub drain: VecDeque<LaneIndex>,
    pub crowd: Crowd,
    /// The lane whose copies are being fetched.
    pub draining: Option<LaneIndex>,
    /// Lanes to look at beside the log; see `recall`.
    pub recalls: Vec<Recall>,
    /// In which snapshot the parked lanes of a partition were read, until the reader has caught up.
    pub parked_as_of: Vec<(u32, Snapshot)>,
    pub pauses: Vec<(DestinationId, Pause)>,
    pub runs_in_flight: usize,
    pub next_destination: usize,
    pub regroup: Regroup,
    pub stopping: Option<Tick>,
    pub parting: Parting,
    pub ended: bool,
}

impl State {
    pub(super) fn new(settings: ShardSettings, metrics: Arc<ShardMetrics>, pool: Arc<Pool>) -> Self {
        Self {
            lanes: Lanes::with_capacity(settings.lane_rows_max, settings.lane_streams_max),
            ledger: Ledger::with_capacity(4096),
            numbers: Numbers::with_capacity(settings.lane_streams_max),
            settings,
            metrics,
            pool,
            incarnation: None,
            ownership: -1,
            held: Vec::new(),
            fences: Vec::new(),
            era: 0,
            must_load: false,
            loaded: false,
            epoch: None,
            reader: ReadPosition::default(),
            caught_up: false,
            left: None,
            half_fed: None,
            fed_meanwhile: Vec::new(),
            bases: Vec::new(),
            batches: Vec::new(),
            free_batches: Vec::new(),
            waiting_rows: 0,
            flush_number: 0,
            flushes: VecDeque::with_capacity(256),
            pending: VecDeque::with_capacity(1024),
            held_back: VecDeque::new(),
            pending_rows: 0,
            pending_bytes: 0,
            flush_in_flight: false,
            settle: SettleQueue::default(),
            settling: false,
            cursor_dirty: false,
            set_aside_count: 0,
            parked_due: BinaryHeap::new(),
            drain: VecDeque::new(),
            crowd: Crowd::default(),
            draining: None,
            recalls: Vec::new(),
            parked_as_of: Vec::new(),
            pauses: Vec::new(),
            runs_in_flight: 0,
            next_destination: 0,
            regroup: Regroup::default(),
            stopping: None,
            parting: Parting::default(),
            ended: false,
        }
    }

    /// Whether this shard holds the partition.
    pub(super) fn holds(&self, partition: u32) -> bool {
        self.fence(partition) > 0
    }

    /// The partition's fence; 0 if it is not held.
    pub(super) fn fence(&self, partition: u32) -> i64 {
        self.fences.get(partition as usize).copied().unwrap_or(0)
    }

    /// Messages in memory that were stored and are not resolved.
    pub(super) fn rows_in_memory(&self) -> usize {
        self.rows_claimed_in_memory() + self.waiting_rows
    }

    /// The same without those that wait for the claim. This bounds the claim: what waits for it must not stop it.
    pub(super) fn rows_claimed_in_memory(&self) -> usize {
        self.lanes.rows() + self.settle.outside_lanes()
    }

    /// Everything of the shard's partitions that is committed has been fed, but for what waits.
    pub(super) fn complete_in_memory(&self) -> bool {
        self.loaded && self.caught_up && self.reader.page.is_none() && self.left.is_none()
    }

    /// Whether own transactions wait for the claim.
    pub(super) fn has_left_to_claim(&self) -> bool {
        self.left.is_some()
    }

    /// The rows of a transaction of this shard are left to the claim.
    pub(super) fn leave_to_claim(&mut self, xid: u64) {
        self.left = Some(self.left.map_or((xid, xid), |(oldest, newest)| (oldest.min(xid), newest.max(xid))));
    }

    /// Whether a transaction of this shard was committed, and when, cannot be told: in this era nothing in memory is
    /// known to be complete any more. The claim brings what was stored, if it was.
    pub(super) fn leave_unknown_to_claim(&mut self) {
        self.left = Some((0, u64::MAX));
    }

    /// The reader has read a snapshot whole. One that was taken before a transaction was committed can have a
    /// later `xmax`: what it lists is not read.
    pub(super) fn read_whole(&mut self) {
        self.caught_up = true;
        self.regroup.wholes += 1;
        self.bases.clear();
        self.parked_as_of.clear();
        self.flushes_were_read();
        let read = &self.reader.read;
        if let Some((oldest, newest)) = self.left
            && newest < read.xmax()
            && !read.listed().iter().any(|xid| (oldest..=newest).contains(xid))
        {
            self.left = None;
        }
    }

    /// Another set of partitions, or another incarnation: everything is dropped and read anew.
    pub(super) fn set_partitions(&mut self, incarnation: Incarnation, ownership: i64, held: &[HeldPartition]) {
        if self.incarnation != Some(incarnation) {
            self.flush_number = 0;
        }
        self.incarnation = Some(incarnation);
        self.hold(ownership, held);
        self.reset();
    }

    /// These are the shard's partitions.
    pub(super) fn hold(&mut self, ownership: i64, held: &[HeldPartition]) {
        self.ownership = ownership;
        self.held.clear();
        self.fences.iter_mut().for_each(|fence| *fence = 0);
        for partition in held {
            self.held.push(partition.partition);
            if self.fences.len() <= partition.partition as usize {
                self.fences.resize(partition.partition as usize + 1, 0);
            }
            self.fences[partition.partition as usize] = partition.fence;
        }
    }

    /// Drops lanes, numbers and bookkeeping. The claim loop loads again when nothing is in flight. `met_meanwhile`
    /// stays: what the claim has met was stored, in whichever era.
    pub(super) fn reset(&mut self) {
        self.era += 1;
        self.forget_frozen();
        self.draining = None;
        self.loaded = false;
        self.must_load = !self.held.is_empty();
        self.caught_up = false;
        self.lanes.clear();
        self.ledger.clear();
        self.numbers.clear();
        self.batches.clear();
        self.free_batches.clear();
        self.waiting_rows = 0;
        self.flushes.clear();
        self.settle.clear();
        self.parked_due.clear();
        self.drain.clear();
        self.crowd = Crowd::default();
        self.recalls.clear();
        self.parked_as_of.clear();
        self.bases.clear();
        self.left = None;
        self.half_fed = None;
        self.fed_meanwhile.clear();
        self.reader = ReadPosition::default();
        self.cursor_dirty = false;
        self.set_aside_count = 0;
        self.metrics.references_set_aside_now.set(0);
        self.metrics.parked_lanes_now.set(0);
    }

    /// Compares the epoch of an answer; on another one everything is dropped.
    pub(super) fn check_epoch(&mut self, epoch: Epoch) -> bool {
        if self.epoch == Some(epoch) || self.epoch.is_none() || mutants::active(Mutant::CursorKeptOverCrash) {
            self.epoch = Some(epoch);
            return true;
        }
        tracing::warn!(shard = self.settings.shard, "the server has crashed and come back: reading anew");
        self.metrics.epochs_changed.add(1);
        self.epoch = Some(epoch);
        self.reset();
        false
    }

    /// Starts from what the database says.
    pub(super) fn loaded_from(&mut self, resolved: Vec<Snapshot>) {
        let mut read: Option<Snapshot> = None;
        for base in &resolved {
            read = Some(match read {
                None => base.clone(),
                Some(read) => read.intersection(base),
            });
        }
        let read = read.unwrap_or_default();
        self.bases = self.held.iter().copied().zip(resolved).filter(|(_, base)| *base != read).collect();
        self.reader = ReadPosition { read, ..ReadPosition::default() };
        self.caught_up = false;
        self.loaded = true;
        self.must_load = false;
    }

    /// Whether a reference was resolved before the partition was taken.
    pub(super) fn resolved_before(&self, partition: u32, xid: u64) -> bool {
        self.bases
            .binary_search_by_key(&partition, |(partition, _)| *partition)
            .is_ok_and(|index| self.bases[index].1.contains(xid))
    }

    /// Takes a batch into memory; its references are counted as they are admitted. Whoever adds it holds it, as a
    /// reference does, until [`State::release_batch`]: its first message may be resolved before its last is fed.
    pub(super) fn add_batch(&mut self, rows: Arc<Rows>) -> u32 {
        let batch = Some(Batch { rows, unresolved: 1 });
        match self.free_batches.pop() {
            Some(index) => {
                self.batches[index as usize] = batch;
                index
            }
            None => {
                self.batches.push(batch);
                (self.batches.len() - 1) as u32
            }
        }
    }

    /// The rows of a batch in memory.
    ///
    /// # Panics
    /// If it is not there: only a bug can let a batch go before its last reference, and a message would be lost.
    pub(super) fn rows_of(&self, batch: u32) -> &Arc<Rows> {
        rows_of(&self.batches, batch)
    }

    /// So many references of the batch are unresolved.
    pub(super) fn count_references(&mut self, batch: u32, count: u32) {
        if let Some(Some(entry)) = self.batches.get_mut(batch as usize) {
            entry.unresolved += count;
        }
    }

    /// One reference less, or the hold of whoever added it; the last gives the batch back.
    pub(super) fn release_batch(&mut self, batch: u32) {
        let Some(entry) = self.batches.get_mut(batch as usize) else { return };
        let Some(held) = entry else { return };
        held.unresolved -= 1;
        if held.unresolved == 0
            && let Some(batch_entry) = entry.take()
        {
            self.free_batches.push(batch);
            self.pool.give(batch_entry.rows);
        }
    }

    /// One reference is acknowledged, copied beside the log, or dead: for the ledger and for its batch.
    pub(super) fn resolve(&mut self, source: Source) {
        if source.transaction != TransactionIndex::NONE {
            self.ledger.resolve(source.transaction);
            self.cursor_dirty = true;
        }
        self.release_batch(source.batch);
    }

    /// Whether everything in hand is done: nothing pending, nothing in flight, the cursor written.
    pub(super) fn is_drained(&self) -> bool {
        self.pending.is_empty()
            && self.held_back.is_empty()
            && !self.flush_in_flight
            && self.runs_in_flight == 0
            && self.rows_in_memory() == 0
            && self.settle.is_empty()
            && (self.flushes.is_empty() || !self.loaded)
            && !self.has_cursor_to_write()
    }

    /// Whether a cursor is to be written that says more than the last one.
    pub(super) fn has_cursor_to_write(&self) -> bool {
        self.cursor_dirty && self.loaded && !self.ledger.is_full()
    }

    /// The pause of a destination.
    pub(super) fn pause_of(&mut self, destination: DestinationId) -> &mut Pause {
        let at = match self.pauses.iter().position(|(of, _)| *of == destination) {
            Some(at) => at,
            None => {
                self.pauses.push((destination, Pause::new()));
                self.pauses.len() - 1
            }
        };
        &mut self.pauses[at].1
    }
}
