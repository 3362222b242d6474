//! How messages get into the lanes: from memory after a commit, or when the claim arrives at them.
//!
//! Invariants
//! - A row stored by this shard enters its lanes from memory only if everything before it in its stream has been
//!   fed (`fed_seq + 1 == k`, or it is the first), or if nothing else can be outstanding: the reader had read everything, and no other
//!   writer's log row lay outside that. Otherwise it waits for the claim, which comes by in the order of positions.
//! - A message whose row was deleted ends in the dead letters, alone.
//! - A flush without an answer has nothing in memory: if the claim comes by, it brings the rows itself, in their
//!   place among those of other writers, and the answer then leaves all of them to the claim.

use std::sync::Arc;

use uuid::Uuid;

use super::state::{FlushRecord, State};
use crate::batch::{DestinationId, Rows};
use crate::error::{FailureReason, bounded_error_text};
use crate::plan::lanes::{Admission, Admitted, Source};
use crate::plan::ledger::TransactionIndex;
use crate::plan::mutants::{self, Mutant};
use crate::plan::numbers::UNFED;
use crate::seam::store::{DeadLetter, LOOK_BESIDE, Spill, Stored};

/// Own flushes that wait to be passed by the claim; each goes along with the claim's request.
const FLUSHES_MAX: usize = 4_096;

/// What the dead letter of a message says that somebody has deleted.
const MISSING: &str = "CL001: the message is not stored any more: it was deleted before it was published";

impl State {
    /// Feeds one row's references (on partitions held) to their lanes. The caller has counted them.
    pub(super) fn feed(
        &mut self,
        batch: u32,
        row: usize,
        references: std::ops::Range<usize>,
        transaction: TransactionIndex,
    ) {
        let rows = self.rows_of(batch).clone();
        let stream_seq = rows.stream_seq[row];
        let single = rows.stream_id(row).is_none();
        for reference in references {
            let source = Source { batch, reference: reference as u32, transaction };
            let destination = rows.reference_destination[reference];
            let partition = rows.partition[row];
            if !self.holds(partition) {
                self.resolve(source);
                continue;
            }
            if self.is_leaving(partition) {
                self.freeze(partition, source);
                continue;
            }
            if stream_seq <= LOOK_BESIDE {
                self.note_recall(rows.lane_id[row], destination, partition, stream_seq);
                self.resolve(source);
                continue;
            }
            let admission =
                Admission { lane_id: rows.lane_id[row], destination, partition, stream_seq, single, source };
            if rows.unnamed(row).is_some() {
                self.bury_missing(&rows, row, destination, source);
                continue;
            }
            if rows.is_missing(row) {
                if self.lanes.pass(&admission) {
                    self.bury_missing(&rows, row, destination, source);
                } else {
                    self.resolve(source);
                }
                continue;
            }
            match self.lanes.admit(&admission) {
                Admitted::Queued => {}
                Admitted::Known => self.resolve(source),
                Admitted::Beside(lane) if self.lanes.lane(lane).held => self.set_aside(source),
                Admitted::Beside(lane) => {
                    self.metrics.spilled_rows.add(1);
                    self.settle.spill(
                        Spill {
                            lane_id: rows.lane_id[row],
                            destination,
                            partition: rows.partition[row],
                            stream_seq,
                            version: rows.version[row],
                        },
                        lane,
                        source,
                    );
                }
            }
        }
        if !single && stream_seq > LOOK_BESIDE && self.half_fed != Some((rows.lane_id[row], stream_seq)) {
            self.fed(rows.lane_id[row], stream_seq);
        }
    }

    /// A message that is not stored any more, or has a destination without a number, can never be published: it goes to the dead letters by itself, whatever
    /// its lane is at, and nothing waits for it.
    pub(super) fn bury_missing(&mut self, rows: &Rows, row: usize, destination: DestinationId, source: Source) {
        let unnamed = rows.unnamed(row);
        let (reason, (error, error_cut)) = match unnamed {
            Some((_, why)) => (FailureReason::Unknown, bounded_error_text(why)),
            None => {
                self.metrics.messages_missing.add(1);
                (FailureReason::EventStorageFailure, (MISSING.to_owned(), false))
            }
        };
        self.settle.bury_missing(
            DeadLetter {
                lane_id: rows.lane_id[row],
                destination,
                unnamed: unnamed.map(|(name, _)| name.into()),
                partition: rows.partition[row],
                stream_seq: rows.stream_seq[row],
                version: rows.version[row],
                attempts: 0,
                reason: reason as i16,
                error,
                error_cut,
            },
            source,
        );
    }

    fn fed(&mut self, stream: Uuid, stream_seq: i64) {
        let entry = self.numbers.entry(stream);
        entry.fed_seq = entry.fed_seq.max(stream_seq);
    }

    /// The message that a page of the claim ends in, if the next page may hold further references of it: until then
    /// its stream is not fed up to it, whatever lanes it is in.
    pub(super) fn page_ends_in(&mut self, message: Option<(Uuid, i64)>) {
        let before = std::mem::replace(&mut self.half_fed, message);
        if let Some((stream, stream_seq)) = before
            && before != message
        {
            self.fed(stream, stream_seq);
        }
    }

    /// Whether a row stored by this shard may enter its lanes from memory (rule of admission).
    pub(super) fn may_feed_from_memory(&mut self, stream: Option<Uuid>, stream_seq: i64, complete: bool) -> bool {
        let Some(stream) = stream else { return true };
        if mutants::active(Mutant::AdmissionWithoutPredecessor) {
            return true;
        }
        let entry = self.numbers.entry(stream);
        if entry.waiting > 0 {
            return false;
        }
        // Before the first there is none to wait for.
        (entry.fed_seq != UNFED && entry.fed_seq + 1 == stream_seq) || stream_seq == 1 || complete
    }

    /// Feeds what an answered flush stored, or leaves it to the claim.
    pub(super) fn admit_flush(
        &mut self,
        number: i64,
        stored: &Stored,
        batches: Vec<Arc<Rows>>,
        complete_when_sent: bool,
    ) {
        let full = self.rows_in_memory() >= self.settings.lane_rows_max || self.flushes.len() >= FLUSHES_MAX;
        let fed_by_claim = self.fed_meanwhile.iter().any(|(xid, _)| *xid == stored.xid);
        if !stored.owned || !self.loaded || full || fed_by_claim || self.is_coming() {
            self.leave_to_claim(stored.xid);
            batches.into_iter().for_each(|rows| self.pool.give(rows));
            return;
        }
        let complete = complete_when_sent && !stored.foreign;
        let transaction = self.ledger.open(stored.xid, 1);
        let mut record = FlushRecord { number, xid: stored.xid, fed: false, transaction, waiting: Vec::new() };
        for rows in batches {
            let batch = self.add_batch(rows.clone());
            let mut reference = 0;
            for row in 0..rows.len() {
                let first = reference;
                while reference < rows.reference_count() && rows.reference_row[reference] as usize == row {
                    reference += 1;
                }
                if rows.is_scheduled(row) || !self.holds(rows.partition[row]) {
                    continue;
                }
                let count = (reference - first) as u32;
                if count > 0 {
                    self.ledger.open(stored.xid, count);
                    self.count_references(batch, count);
                }
                let stream = rows.stream_id(row);
                if self.may_feed_from_memory(stream, rows.stream_seq[row], complete) {
                    self.metrics.rows_from_memory.add(1);
                    self.feed(batch, row, first..reference, transaction);
                } else {
                    record.waiting.push((batch, row as u32));
                    // Holds the batch, also for a row without references.
                    self.count_references(batch, 1);
                    self.waiting_rows += 1;
                    if let Some(stream) = stream {
                        self.numbers.entry(stream).waiting += 1;
                    }
                }
            }
            drop(rows);
            self.release_batch(batch);
        }
        self.ledger.resolve(transaction);
        self.cursor_dirty = true;
        self.flushes.push_back(record);
        if self.reader.read.contains(stored.xid) {
            // The claim has gone by and has seen no row of it: nothing else will come for it.
            self.claim_passed(number);
        }
    }

    /// The claim has come to one of the shard's own flushes.
    ///
    /// # Panics
    /// If its rows are not in memory: only a bug can ask a claim to leave out what is not there, and it would be
    /// lost.
    pub(super) fn claim_passed(&mut self, number: i64) {
        let record = self.flushes.iter_mut().find(|record| record.number == number);
        assert!(record.is_some(), "flush {number} was left out of a claim and is not in memory");
        let Some(record) = record else { return };
        self.cursor_dirty = true;
        record.fed = true;
        let (waiting, transaction) = (std::mem::take(&mut record.waiting), record.transaction);
        for (batch, row) in waiting {
            self.feed_waiting(batch, row as usize, transaction);
        }
    }

    /// The reader has read these flushes whole, whatever rows of theirs it came by: none waits any longer.
    pub(super) fn flushes_were_read(&mut self) {
        let mut at = 0;
        while at < self.flushes.len() {
            if !self.reader.read.contains(self.flushes[at].xid) {
                at += 1;
                continue;
            }
            if !self.flushes[at].fed {
                self.claim_passed(self.flushes[at].number);
            }
            self.flushes.remove(at);
        }
    }

    fn feed_waiting(&mut self, batch: u32, row: usize, transaction: TransactionIndex) {
        self.waiting_rows -= 1;
        let rows = self.rows_of(batch).clone();
        if let Some(stream) = rows.stream_id(row) {
            self.numbers.entry(stream).waiting -= 1;
        }
        let first = rows.reference_row.partition_point(|of| (*of as usize) < row);
        let end = rows.reference_row.partition_point(|of| (*of as usize) <= row);
        drop(rows);
        self.feed(batch, row, first..end, transaction);
        self.resolve(Source { batch, reference: 0, transaction: TransactionIndex::NONE });
    }
}
