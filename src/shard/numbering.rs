//! Numbers for a flush: which place each message takes in its stream, as far as the shard knows.
//!
//! Invariants
//! - For a stream whose last numbers are known the rows get their final numbers; for another they count
//!   from 1 (versions from the one that is expected), and the database's answer is added afterwards.
//! - A number is remembered only after the commit that used it.
//!
//! Cost: one hash look-up a row; the columns keep their memory from flush to flush.

use std::sync::Arc;

use uuid::Uuid;

use super::expected::Expectations;
use super::pending::Pending;
use super::state::State;
use crate::batch::Rows;
use crate::seam::store::{LastNumbers, NO_STREAM};

/// The batch for writing. One that somebody else still holds (a caller, a call that was given up) costs a copy,
/// nothing more.
pub(super) fn unique(rows: &mut Arc<Rows>) -> &mut Rows {
    if Arc::get_mut(rows).is_none() {
        *rows = Arc::new(copy_of(rows));
    }
    let Some(unique) = Arc::get_mut(rows) else { unreachable!("a fresh batch has one holder") };
    unique
}

fn copy_of(rows: &Rows) -> Rows {
    let mut copy = Rows::with_capacity(rows.len(), rows.arena.len());
    let mut start = 0;
    for end in &rows.unit_end {
        (start..*end as usize).for_each(|row| copy.push_copy(rows, row));
        copy.end_unit();
        start = *end as usize;
    }
    copy
}

/// The columns of a flush that are not the callers' own.
#[derive(Debug, Default)]
pub(super) struct FlushColumns {
    pub row_stream: Vec<u32>,
    pub stream_id: Vec<Uuid>,
    pub stream_partition: Vec<u32>,
    pub stream_known: Vec<bool>,
    pub stream_last_seq: Vec<i64>,
    pub stream_last_version: Vec<i64>,
    pub partitions: Vec<u32>,
    /// Numbers and versions given so far, by stream.
    given: Vec<(i64, i64)>,
}

impl FlushColumns {
    /// Fills the columns and numbers the rows.
    pub(super) fn number(&mut self, state: &mut State, taken: &mut [Pending], expected: &Expectations) {
        self.row_stream.clear();
        self.stream_id.clear();
        self.stream_partition.clear();
        self.stream_known.clear();
        self.stream_last_seq.clear();
        self.stream_last_version.clear();
        self.partitions.clear();
        self.given.clear();
        state.numbers.begin_flush();
        for pending in taken {
            self.number_batch(state, unique(&mut pending.rows), expected);
        }
        self.partitions.sort_unstable();
        self.partitions.dedup();
    }

    fn number_batch(&mut self, state: &mut State, rows: &mut Rows, expected: &Expectations) {
        let mut last_partition = u32::MAX;
        for row in 0..rows.len() {
            let partition = rows.partition[row];
            if partition != last_partition {
                self.partitions.push(partition);
                last_partition = partition;
            }
            if rows.is_scheduled(row) {
                self.row_stream.push(NO_STREAM);
                continue;
            }
            let Some(stream) = rows.stream_id(row) else {
                self.row_stream.push(NO_STREAM);
                rows.stream_seq[row] = 1;
                continue;
            };
            let (index, is_new, entry) = state.numbers.index_in_flush(stream, self.stream_id.len() as u32);
            if is_new {
                let known = state.numbers.is_known(&entry) && state.holds(partition);
                self.stream_id.push(stream);
                self.stream_partition.push(partition);
                self.stream_known.push(known);
                self.stream_last_seq.push(if known { entry.last_seq } else { 0 });
                self.stream_last_version.push(if known { entry.last_version } else { expected.base(stream) });
                self.given.push((0, 0));
            }
            let at = index as usize;
            self.given[at].0 += 1;
            rows.stream_seq[row] = self.stream_last_seq[at] + self.given[at].0;
            if rows.is_event(row) {
                self.given[at].1 += 1;
                rows.version[row] = self.stream_last_version[at] + self.given[at].1;
            }
            self.row_stream.push(index);
        }
    }

    /// How many messages of each stream were numbered.
    pub(super) fn stream_rows(&self) -> Vec<u32> {
        self.given.iter().map(|(rows, _)| *rows as u32).collect()
    }

    /// A stream's version after the flush; `None` if it is not in it.
    pub(super) fn version_after(&self, stream: Uuid, looked_up: Option<&[LastNumbers]>) -> Option<i64> {
        let at = self.stream_id.iter().position(|id| *id == stream)?;
        let before = looked_up.map_or(self.stream_last_version[at], |looked_up| looked_up[at].version);
        Some(before + self.given[at].1)
    }

    /// Adds what the database looked up.
    pub(super) fn correct(&self, taken: &mut [Pending], looked_up: Option<&[LastNumbers]>) {
        let Some(looked_up) = looked_up else { return };
        let mut at = 0;
        for pending in taken {
            let rows = unique(&mut pending.rows);
            for row in 0..rows.len() {
                let stream = self.row_stream[at];
                at += 1;
                if stream == NO_STREAM {
                    continue;
                }
                let stream = stream as usize;
                rows.stream_seq[row] += looked_up[stream].seq - self.stream_last_seq[stream];
                if rows.is_event(row) {
                    rows.version[row] += looked_up[stream].version - self.stream_last_version[stream];
                }
            }
        }
    }

    /// Remembers the streams' last numbers after the commit.
    pub(super) fn learn(&self, state: &mut State, looked_up: Option<&[LastNumbers]>, generation: u64) {
        for (index, stream) in self.stream_id.iter().enumerate() {
            let base = looked_up.map_or(
                LastNumbers { seq: self.stream_last_seq[index], version: self.stream_last_version[index] },
                |looked_up| looked_up[index],
            );
            let (seq, version) = self.given[index];
            state.numbers.learn(*stream, base.seq + seq, base.version + version, generation);
        }
    }
}
