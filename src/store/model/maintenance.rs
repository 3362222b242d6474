//! The model's rotation of segments.
//!
//! Invariants
//! - A segment is truncated only if every row of its log is resolved in the persisted cursors of all
//!   partitions, checked without a lock, and again under a lock that nothing holds beside it.
//! - The last numbers of its streams are carried over in the same transaction.

use super::database::{Database, SEGMENTS, Segment, Truncated};
use super::locks::Key;
use super::transaction::Tx;
use crate::plan::mutants::{self, Mutant};
use crate::plan::snapshot::Snapshot;
use crate::seam::runtime::Runtime;
use crate::seam::store::{Maintenance, StoreError};

/// Cursors of a shard that are kept.
const CURSORS_KEPT: usize = 3;

pub(super) async fn perform(tx: Tx) -> Result<Maintenance, StoreError> {
    let mut done = Maintenance::default();
    if !tx.try_lock(Key::Maintenance, true) {
        return Ok(done);
    }
    tx.pause().await?;
    let now = tx.snapshot();
    let current = tx.database().current_segment(&now);
    for segment in (0..SEGMENTS).filter(|segment| *segment != current) {
        let is_empty = {
            let database = tx.database();
            database.segments[segment].log.is_empty() && database.segments[segment].outbox.is_empty()
        };
        if is_empty || !may_go(&tx, segment) {
            continue;
        }
        let seen = tx.snapshot();
        carry_over(&tx, segment);
        tx.pause().await?;
        if !tx.try_lock(Key::Segment(segment), true) {
            done.blocked_by = Some(tx.holder_but(tx.owner, Key::Segment(segment)).unwrap_or(0) as i32);
            continue;
        }
        tx.pause().await?;
        let snapshot = tx.snapshot();
        let unchanged = tx.database().log_of(segment, &snapshot).iter().all(|log| seen.contains(log.xid));
        if (unchanged && may_go(&tx, segment)) || mutants::active(Mutant::XidOnlyTruncation) {
            tx.effect(move |database| {
                let segment = std::mem::take(&mut database.segments[segment]);
                database.note_flushes(&segment);
            });
            done.truncated += 1;
        }
    }
    tx.pause().await?;
    let next = (current + 1) % SEGMENTS;
    let settings = tx.model.0.settings.get();
    let clock = tx.model.0.runtime.now();
    let (next_is_empty, rows) = {
        let database = tx.database();
        let of = |segment: usize| database.segments[segment].log.len();
        (of(next) == 0 && database.segments[next].outbox.is_empty(), of(current))
    };
    let is_old = clock.since_us(tx.model.0.switched_at.get()) >= settings.rotate_ms * 1000;
    if next_is_empty && rows > 0 && (rows >= settings.rotate_rows || is_old) {
        let xid = tx.xid();
        tx.effect(move |database| database.current.push((xid, next)));
        tx.model.0.switched_at.set(clock);
        done.rotated = true;
    }
    done.work_left = tx.database().segments.iter().any(|segment| !segment.log.is_empty());
    done.more = done.truncated > 0 || done.rotated;
    done.cursors_trimmed = trim_cursors(&tx);
    tx.commit().await?;
    Ok(done)
}

impl Database {
    fn note_flushes(&mut self, truncated: &Segment) {
        for log in &truncated.log {
            let Some((number, shard, flush_number)) = log.flush else { continue };
            let of = Truncated { flush_number, xid: log.xid, position: log.position, owned: log.owned };
            let newest = self.truncated.entry((number, shard)).or_insert(of);
            if newest.flush_number < flush_number {
                *newest = of;
            } else if newest.flush_number == flush_number {
                newest.position = newest.position.min(log.position);
                newest.owned &= log.owned;
            }
        }
    }
}

/// Whether every row of the segment's log is resolved for every partition.
fn may_go(tx: &Tx, segment: usize) -> bool {
    let snapshot = tx.snapshot();
    let database = tx.database();
    let mut resolved: Option<Snapshot> = None;
    for partition in 0..database.partition_count {
        let of = database.resolved(partition);
        resolved = Some(resolved.map_or_else(|| of.clone(), |all| all.intersection(&of)));
    }
    let resolved = resolved.unwrap_or_default();
    if mutants::active(Mutant::XidOnlyTruncation) {
        // Every reader has passed the switch away from the segment: whoever wrote before it has ended.
        let switch = database.current.last().map_or(0, |(xid, _)| *xid);
        return resolved.xmax() > switch && resolved.listed().iter().all(|xid| *xid > switch);
    }
    database.log_of(segment, &snapshot).iter().all(|log| resolved.contains(log.xid))
}

fn carry_over(tx: &Tx, segment: usize) {
    if mutants::active(Mutant::NumberGivenAgain) {
        return;
    }
    let snapshot = tx.snapshot();
    let xid = tx.xid();
    let last: Vec<_> = tx.database().segments[segment]
        .outbox
        .iter()
        .filter(|(_, row)| row.body.stream_id(0).is_some() && snapshot.contains(row.xid))
        .map(|((stream, seq), _)| (*stream, *seq))
        .collect();
    tx.effect(move |database| {
        for (stream, seq) in last {
            let of = database.streams.entry(stream).or_insert((0, xid));
            *of = (of.0.max(seq), xid);
        }
    });
}

fn trim_cursors(tx: &Tx) -> u32 {
    let spare = |cursors: &Vec<super::database::Cursor>| cursors.len().saturating_sub(CURSORS_KEPT);
    let count: usize = tx.database().cursors.values().map(spare).sum();
    if count > 0 {
        tx.effect(|database| {
            for cursors in database.cursors.values_mut() {
                cursors.sort_by_key(|cursor| cursor.number);
                let spare = cursors.len().saturating_sub(CURSORS_KEPT);
                cursors.drain(..spare);
            }
        });
    }
    count as u32
}
