//! How messages get into the lanes: from memory after a commit, or when the claim arrives at them.
//!
//! Invariants
//! - A row stored by this shard enters its lanes from memory only if everything before it in its stream has been
//!   fed (`fed_seq + 1 == k`), or if nothing else can be outstanding: the reader had read everything, and no other
//!   writer's log row lay outside that. Otherwise it waits for the claim, which comes by in the order of positions.
//! - A transaction that the claim has seen before its flush was answered counts as open until the answer.

use std::sync::Arc;

use uuid::Uuid;

use super::state::State;
use crate::batch::Rows;
use crate::plan::lanes::{Admission, Admitted, Source};
use crate::plan::ledger::TransactionIndex;
use crate::plan::mutants::{self, Mutant};
use crate::plan::numbers::UNFED;
use crate::seam::store::{Spill, Stored};

impl State {
    /// Feeds one row's references (on partitions held) to their lanes. The caller has counted them.
    pub(super) fn feed(
        &mut self,
        batch: u32,
        row: usize,
        references: std::ops::Range<usize>,
        transaction: TransactionIndex,
    ) {
        let Some(rows) = self.rows_of(batch).cloned() else { return };
        let stream_seq = rows.stream_seq[row];
        let single = rows.stream_id(row).is_none();
        for reference in references {
            let source = Source { batch, reference: reference as u32, transaction };
            let destination = rows.reference_destination[reference];
            let admission = Admission {
                lane_id: rows.lane_id[row],
                destination,
                partition: rows.partition[row],
                stream_seq,
                single,
                source,
            };
            match self.lanes.admit(&admission) {
                Admitted::Queued => {}
                Admitted::Known => self.resolve(source),
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
        if !single {
            let entry = self.numbers.entry(rows.lane_id[row]);
            entry.fed_seq = entry.fed_seq.max(stream_seq);
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
        (entry.fed_seq != UNFED && entry.fed_seq + 1 == stream_seq) || complete
    }

    /// Feeds what an answered flush stored, or leaves it to the claim.
    pub(super) fn admit_flush(
        &mut self,
        number: i64,
        stored: &Stored,
        batches: Vec<Arc<Rows>>,
        complete_when_sent: bool,
    ) {
        let Some(at) = self.flushes.iter().position(|record| record.number == number) else {
            batches.into_iter().for_each(|rows| self.pool.give(rows));
            return;
        };
        let full = self.rows_in_memory() >= self.settings.lane_rows_max;
        // The claim may have gone by with a request that did not know this flush yet, or the flush has no log row
        // that is its own shard's: nothing else will come for it.
        let passed = self.flushes[at].passed || self.reader.read.contains(stored.xid);
        if (!stored.owned || !self.loaded || full) && !passed {
            self.left_max = self.left_max.max(stored.xid);
            self.flushes.remove(at);
            batches.into_iter().for_each(|rows| self.pool.give(rows));
            return;
        }
        let complete = complete_when_sent && !stored.foreign;
        let transaction = self.ledger.open(stored.xid, 1);
        let mut record = match self.flushes.remove(at) {
            Some(record) => record,
            None => return,
        };
        record.answered = true;
        record.passed = passed;
        record.transaction = transaction;
        for rows in batches {
            let batch = self.add_batch(rows.clone());
            // Held until all is fed: rows that are known already must not let go of the others' batch.
            self.count_references(batch, 1);
            let mut reference = 0;
            for row in 0..rows.len() {
                let first = reference;
                while reference < rows.reference_count() && rows.reference_row[reference] as usize == row {
                    reference += 1;
                }
                if rows.due_unix_us[row] != 0 || !self.holds(rows.partition[row]) {
                    continue;
                }
                let count = (reference - first) as u32;
                if count > 0 {
                    self.ledger.open(stored.xid, count);
                    self.count_references(batch, count);
                }
                let stream = rows.stream_id(row);
                if record.passed || self.may_feed_from_memory(stream, rows.stream_seq[row], complete) {
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
            self.resolve(Source { batch, reference: 0, transaction: TransactionIndex::NONE });
        }
        self.ledger.resolve(transaction);
        if let Some(sentinel) = record.sentinel.take() {
            self.ledger.resolve(sentinel);
        }
        self.cursor_dirty = true;
        record.xid = stored.xid;
        record.fed = record.passed;
        let at = at.min(self.flushes.len());
        self.flushes.insert(at, record);
    }

    /// The claim has come to one of the shard's own flushes.
    pub(super) fn claim_passed(&mut self, number: i64, xid: u64) {
        let Some(at) = self.flushes.iter().position(|record| record.number == number) else { return };
        self.cursor_dirty = true;
        let record = &mut self.flushes[at];
        if !record.answered {
            if !record.passed {
                // The answer is on its way: until then the transaction counts as open.
                record.passed = true;
                record.sentinel = Some(self.ledger.open(xid, 1));
            }
            return;
        }
        record.fed = true;
        let (waiting, transaction) = (std::mem::take(&mut record.waiting), record.transaction);
        for (batch, row) in waiting {
            self.feed_waiting(batch, row as usize, transaction);
        }
    }

    /// The reader has read these flushes whole, whatever rows of theirs it came by: none waits any longer.
    pub(super) fn flushes_were_read(&mut self) {
        let read = &self.reader.read;
        let of_read = |record: &&super::state::FlushRecord| record.answered && !record.fed && read.contains(record.xid);
        let numbers: Vec<(i64, u64)> =
            self.flushes.iter().filter(of_read).map(|record| (record.number, record.xid)).collect();
        for (number, xid) in numbers {
            self.claim_passed(number, xid);
        }
    }

    fn feed_waiting(&mut self, batch: u32, row: usize, transaction: TransactionIndex) {
        self.waiting_rows -= 1;
        let Some(rows) = self.rows_of(batch).cloned() else { return };
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
