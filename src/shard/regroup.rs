//! A change of the shard's partitions: without a copy where there is time for it.
//!
//! Invariants
//! - Partitions change only between runs: nothing is in flight and every outcome is written. So whoever is next begins
//!   behind what was published, and before what was not.
//! - What is resolved of a partition is known exactly at that moment: what the reader has read, less the transactions
//!   of which a message of *this* partition is open. (The cursor lists a transaction while a message of *any* of its
//!   partitions is open: good enough after a crash, a copy too many at a hand-over.)
//! - Partitions that stay begin from that as well: a change costs them a short pause and no copy.
//! - It does not wait for ever: a backlog of which a page is half read, or a database that does not answer, gets
//!   [`PATIENCE_US`] and then costs copies (the next owner reads that page again).
//! - An orderly stop, a take-over or another life of the server ends it: then what is persisted is the truth.

use std::collections::VecDeque;

use hashbrown::HashMap;

use super::Shard;
use super::state::State;
use crate::ids::{Epoch, Incarnation};
use crate::plan::snapshot::Snapshot;
use crate::seam::publisher::Publisher;
use crate::seam::runtime::Runtime;
use crate::seam::store::{HeldPartition, Release, Store};
use crate::time::Tick;

/// How long it waits for the reader to finish what it is reading while runs go on, and then once more for everything
/// to be written while they do not.
const PATIENCE_US: u64 = 1_000_000;

/// What was asked for.
#[derive(Debug)]
pub(super) enum Change {
    /// Another set.
    Hold { ownership: i64, held: Vec<HeldPartition> },
    /// These leave.
    Release { partitions: Vec<u32>, reply: futures_channel::oneshot::Sender<Release> },
}

/// Changes that wait. There are few: the lease keeper asks for one hand-over at a time.
#[derive(Debug, Default)]
pub(super) struct Regroup {
    changes: VecDeque<Change>,
    /// Since when the first waits.
    since: Option<Tick>,
    /// Since when no run starts and nothing is admitted from memory.
    paused: Option<Tick>,
    /// What is resolved of the partitions that stay, until they are loaded: partition, fence, set.
    kept: Vec<(u32, i64, Snapshot)>,
    kept_epoch: Option<Epoch>,
}

impl State {
    /// Another set of partitions, at once or as soon as nothing is in flight.
    pub(super) fn change_partitions(&mut self, incarnation: Incarnation, ownership: i64, held: Vec<HeldPartition>) {
        let same_life = self.incarnation == Some(incarnation) && !held.is_empty();
        if same_life && self.stopping.is_some() {
            // It publishes what is in hand, and leaves; what came meanwhile leaves with it.
            return;
        }
        if !same_life || !self.loaded {
            let keeps_what_it_knows = self.incarnation == Some(incarnation);
            self.end_regroup();
            if !keeps_what_it_knows {
                self.regroup.kept.clear();
            }
            self.set_partitions(incarnation, ownership, &held);
            return;
        }
        self.regroup.changes.push_back(Change::Hold { ownership, held });
    }

    /// These partitions leave as soon as nothing is in flight; the answer is what is resolved of them.
    pub(super) fn release_partitions(
        &mut self,
        partitions: Vec<u32>,
        reply: futures_channel::oneshot::Sender<Release>,
    ) {
        if self.stopping.is_some() {
            return; // They leave with the others, behind the last cursor; the reply that goes says that they stay.
        }
        let change = Change::Release { partitions, reply };
        if self.loaded {
            self.regroup.changes.push_back(change);
        } else {
            // Nothing is known here beyond what is persisted.
            self.apply(change, None);
        }
    }

    /// Whether no run may start, and nothing may be admitted from memory.
    pub(super) fn is_paused(&self) -> bool {
        self.regroup.paused.is_some()
    }

    /// Whether the claim has to stand still: all it could bring would only have to be written again.
    pub(super) fn is_claim_paused(&self) -> bool {
        self.is_paused() && self.flushes.is_empty() && self.reader.page.is_none()
    }

    /// Gives waiting changes up, because what is persisted is to be the truth.
    pub(super) fn end_regroup(&mut self) {
        self.regroup.changes.clear(); // Whoever waits for an answer sees that there is none.
        self.regroup.since = None;
        self.regroup.paused = None;
    }

    /// Gets on with a change; answers when to look again, if one waits.
    fn step_regroup(&mut self, now: Tick) -> Option<Tick> {
        if self.regroup.changes.is_empty() {
            return None;
        }
        if self.stopping.is_some() {
            self.end_regroup();
            return None;
        }
        if !self.loaded {
            return Some(now.plus_ms(20));
        }
        if let Some(Change::Hold { ownership, held }) = self.regroup.changes.front()
            && self.holds_just(held)
        {
            self.ownership = *ownership;
            self.regroup.changes.pop_front();
            return self.step_regroup(now);
        }
        let since = *self.regroup.since.get_or_insert(now);
        let page_read = self.reader.page.is_none() && self.caught_up;
        if self.regroup.paused.is_none() && !page_read && now.since_us(since) < PATIENCE_US {
            return Some(since.plus_us(PATIENCE_US));
        }
        let paused = *self.regroup.paused.get_or_insert(now);
        let impatient = now.since_us(paused) >= PATIENCE_US;
        let written = !self.settling && self.settle.is_empty();
        let read = self.flushes.is_empty() && page_read;
        if self.runs_in_flight > 0 || !((written && read) || impatient) {
            return Some(if impatient { now.plus_ms(20) } else { paused.plus_us(PATIENCE_US) });
        }
        if let Some(change) = self.regroup.changes.pop_front() {
            let exact = written.then(|| self.resolved_exactly());
            self.apply(change, exact);
        }
        self.regroup.since = None;
        self.regroup.paused = None;
        Some(now)
    }

    fn holds_just(&self, held: &[HeldPartition]) -> bool {
        held.len() == self.held.len() && held.iter().all(|of| self.fence(of.partition) == of.fence)
    }

    /// Makes the change. `exact`: of each partition held, what is resolved.
    fn apply(&mut self, change: Change, exact: Option<Vec<(u32, Snapshot)>>) {
        let Some(incarnation) = self.incarnation else { return };
        let known = exact.is_some();
        let mut kept: Vec<(u32, i64, Snapshot)> = match exact {
            Some(exact) => exact
                .into_iter()
                .map(|(partition, resolved)| (partition, self.fence(partition), resolved))
                .collect(),
            None if self.loaded => Vec::new(),
            None => std::mem::take(&mut self.regroup.kept),
        };
        let epoch = if known { self.epoch } else { self.regroup.kept_epoch };
        let (ownership, held) = match change {
            Change::Hold { ownership, held } => (ownership, held),
            Change::Release { partitions, reply } => {
                let of = |partition: &u32| {
                    let found = kept.iter().find(|(of, fence, _)| of == partition && *fence == self.fence(*of));
                    (*partition, found.map(|(_, _, resolved)| resolved.clone()))
                };
                // Who has asked may have gone: then the next owner begins at the last cursor.
                let _ = reply.send(Release { epoch, partitions: partitions.iter().map(of).collect() });
                let stay = self.held.iter().filter(|partition| !partitions.contains(partition));
                let held = stay.map(|partition| HeldPartition { partition: *partition, fence: self.fence(*partition) });
                (self.ownership, held.collect::<Vec<_>>())
            }
        };
        kept.retain(|(partition, fence, _)| {
            held.iter().any(|of| of.partition == *partition && of.fence == *fence)
        });
        self.set_partitions(incarnation, ownership, &held);
        (self.regroup.kept, self.regroup.kept_epoch) = (kept, epoch);
    }

    /// Of each partition held, what is resolved: see the top of this file.
    fn resolved_exactly(&self) -> Vec<(u32, Snapshot)> {
        let mut open: HashMap<u32, Vec<u64>> = HashMap::with_capacity(self.held.len());
        let mut counted: HashMap<u64, u32> = HashMap::with_capacity(self.ledger.len());
        self.each_open_reference(|partition, xid| {
            *counted.entry(xid).or_default() += 1;
            let of = open.entry(partition).or_default();
            if of.last() != Some(&xid) {
                of.push(xid);
            }
        });
        // What is open and in no lane (set aside, or on its way beside the log) may be of any partition.
        let anywhere: Vec<u64> = self
            .ledger
            .open_transactions()
            .filter(|(xid, count)| counted.get(xid) != Some(count))
            .map(|(xid, _)| xid)
            .collect();
        let read = &self.reader.read;
        let resolved = |partition: u32| {
            let mut listed = read.listed().to_vec();
            listed.extend(&anywhere);
            listed.extend(open.get(&partition).into_iter().flatten());
            let exact = Snapshot::new(read.xmax(), listed);
            match self.bases.binary_search_by_key(&partition, |(of, _)| *of) {
                Ok(index) => exact.union(&self.bases[index].1),
                Err(_) => exact,
            }
        };
        self.held.iter().map(|partition| (*partition, resolved(*partition))).collect()
    }

    /// Messages in lanes, and those that wait for the claim: a call for each reference.
    fn each_open_reference(&self, mut each: impl FnMut(u32, u64)) {
        self.lanes.each_message(|partition, source| {
            if let Some(xid) = self.ledger.xid(source.transaction) {
                each(partition, xid);
            }
        });
        for record in &self.flushes {
            for (batch, row) in &record.waiting {
                let rows = self.rows_of(*batch);
                let references = rows.reference_row.iter().filter(|of| *of == row).count();
                (0..references).for_each(|_| each(rows.partition[*row as usize], record.xid));
            }
        }
    }

    /// What is known of the partitions that stay, to be written before they are loaded again.
    pub(super) fn kept(&self) -> Release {
        let still = self.regroup.kept.iter().filter(|(partition, fence, _)| self.fence(*partition) == *fence);
        let partitions = still.map(|(partition, _, resolved)| (*partition, Some(resolved.clone()))).collect();
        Release { epoch: self.regroup.kept_epoch, partitions }
    }

    /// It is written, unless the partitions have changed again meanwhile.
    pub(super) fn kept_is_stored(&mut self, era: u32) {
        if self.era == era {
            self.regroup.kept.clear();
        }
    }
}

impl<R: Runtime, S: Store, P: Publisher> Shard<R, S, P> {
    /// Gets on with a change of partitions, if one waits; answers when to look again.
    pub(super) fn regroup(&self) -> Tick {
        let (look_again, changed) = {
            let mut state = self.state.borrow_mut();
            let before = (state.era, state.is_paused());
            let look_again = state.step_regroup(self.runtime.now());
            (look_again, before != (state.era, state.is_paused()))
        };
        if changed {
            self.raise_all();
        }
        look_again.unwrap_or(Tick::NEVER)
    }
}
