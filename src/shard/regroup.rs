//! A change of the shard's partitions while it goes on: what stays is not touched.
//!
//! Invariants
//! - Partitions that leave are **frozen** first: what is in their lanes is published, what comes now waits outside of
//!   them. So at the end a transaction is published whole or not at all, and nobody publishes any of it again.
//! - What is resolved of a partition is known exactly: what the reader has read, less the transactions of which a
//!   message of *this* partition is open. (The cursor lists a transaction while a message of *any* partition is open:
//!   good enough after a crash, a copy too many at a hand-over.)
//! - What is open of a partition that leaves stays open in the ledger until the database says that it has left: no
//!   cursor passes it before.
//! - Partitions that come are read from where they were left, by going back; what was fed of the others is not fed
//!   again. Before that, what is resolved of the others is written: the cursors of the time until the reader has caught
//!   up say less.
//! - None of it waits for ever: after [`PATIENCE_US`] it costs copies instead, which a fault may cost too. A stop, a
//!   take-over or another life of the server ends it: then what is persisted is the truth.

use hashbrown::HashMap;

use super::Shard;
use super::settle::SettleQueue;
use super::state::State;
use crate::ids::Incarnation;
use crate::plan::lanes::{LaneIndex, LaneState, Source};
use crate::plan::mutants::{self, Mutant};
use crate::plan::snapshot::Snapshot;
use crate::seam::publisher::Publisher;
use crate::seam::runtime::Runtime;
use crate::seam::store::{HeldPartition, LoadReply, ReadPosition, Release, Store, StoreError};
use crate::time::Tick;

/// How long the shard may take to come to the right moment by itself.
pub(super) const PATIENCE_US: u64 = 1_000_000;
/// How often it looks whether that has come.
const LOOK_US: u64 = 2_000;

/// A change of partitions, if one is under way.
#[derive(Debug, Default)]
pub(super) struct Regroup {
    pub(super) leaving: Option<Leaving>,
    pub(super) coming: Option<Coming>,
    /// How often the reader has read a snapshot whole.
    pub(super) wholes: u64,
}

impl Regroup {
    /// Whether everything may leave now: nothing was let go of that may be owned still.
    pub(super) fn may_part(&self) -> bool {
        self.leaving.as_ref().is_none_or(|leaving| leaving.reply.is_some())
    }
}

/// Partitions that are on their way to somebody else.
#[derive(Debug)]
pub(super) struct Leaving {
    partitions: Vec<u32>,
    /// Until it is answered.
    reply: Option<futures_channel::oneshot::Sender<Release>>,
    since: Tick,
    /// How long that may take before it costs copies.
    pub(super) patience_us: u64,
    /// Own flushes up to this one may have been published before the reader has passed them.
    last_flush: i64,
    /// The reader is through what it was reading.
    whole: u64,
    /// Where the last lane was that is not at rest.
    restless: LaneIndex,
    /// No run starts any more, until they have left: they had their time.
    halted: bool,
    /// Outcomes of these partitions are not written, and their lanes cannot be dropped before: everything is read anew.
    unclean: bool,
    /// What has come since, with its partition.
    frozen: Vec<(u32, Source)>,
}

impl Leaving {
    pub(super) fn of(
        state: &State,
        partitions: Vec<u32>,
        reply: futures_channel::oneshot::Sender<Release>,
        now: Tick,
    ) -> Self {
        Self {
            partitions,
            reply: Some(reply),
            since: now,
            patience_us: PATIENCE_US,
            last_flush: state.flush_number,
            whole: state.regroup.wholes + u64::from(state.reader.page.is_some() || !state.caught_up),
            restless: LaneIndex(0),
            halted: false,
            unclean: false,
            frozen: Vec::new(),
        }
    }
}

/// A set with further partitions.
#[derive(Debug)]
pub(super) struct Coming {
    ownership: i64,
    held: Vec<HeldPartition>,
    since: Tick,
}

impl State {
    /// Another set of partitions: at once, or when the shard has come so far.
    pub(super) fn change_partitions(
        &mut self,
        incarnation: Incarnation,
        ownership: i64,
        held: Vec<HeldPartition>,
        now: Tick,
    ) {
        let same_life = self.incarnation == Some(incarnation) && !held.is_empty();
        let left = self.regroup.leaving.take_if(|leaving| {
            leaving.reply.is_none() && !held.iter().any(|of| leaving.partitions.contains(&of.partition))
        });
        if same_life && self.stopping.is_some() {
            // It publishes what is in hand, and leaves; what came meanwhile leaves with it.
            if let Some(left) = left.filter(|left| !left.unclean && self.loaded) {
                self.drop_partitions(&left);
            }
            return;
        }
        let is_kept = |state: &Self| state.held.iter().all(|partition| state.is_among(*partition, &held));
        if same_life && self.loaded {
            if let Some(left) = left.filter(|left| !left.unclean) {
                self.drop_partitions(&left);
            }
            if self.regroup.leaving.is_none() && is_kept(self) {
                if held.len() == self.held.len() {
                    self.ownership = ownership;
                    self.regroup.coming = None;
                } else {
                    self.regroup.coming = Some(Coming { ownership, held, since: now });
                }
                return;
            }
        }
        self.end_regroup();
        self.set_partitions(incarnation, ownership, &held);
    }

    /// These partitions leave as soon as nothing of them is under way; the answer is what is resolved of them.
    pub(super) fn release_partitions(
        &mut self,
        partitions: Vec<u32>,
        reply: futures_channel::oneshot::Sender<Release>,
        now: Tick,
    ) {
        if self.stopping.is_some() || self.regroup.coming.is_some() {
            return; // The reply that goes says that they stay; with a stop they leave behind the last cursor.
        }
        self.regroup.leaving = Some(Leaving::of(self, partitions, reply, now));
    }

    /// Whether the partition is on its way out.
    pub(super) fn is_leaving(&self, partition: u32) -> bool {
        self.regroup.leaving.as_ref().is_some_and(|leaving| leaving.partitions.contains(&partition))
    }

    /// Takes a message of a partition that leaves: it stays open, and is published by the next owner.
    pub(super) fn freeze(&mut self, partition: u32, source: Source) {
        if let Some(leaving) = &mut self.regroup.leaving {
            leaving.frozen.push((partition, source));
        }
    }

    /// Messages that wait outside of lanes for their partition to leave.
    pub(super) fn frozen_rows(&self) -> usize {
        self.regroup.leaving.as_ref().map_or(0, |leaving| leaving.frozen.len())
    }

    /// Whether no run may start: of partitions that leave there may be messages in lanes, which are the next owner's.
    pub(super) fn is_halted(&self) -> bool {
        self.regroup.leaving.as_ref().is_some_and(|leaving| leaving.halted)
    }

    /// Whether own flushes are left to the claim, which is to pass all of them soon.
    pub(super) fn is_coming(&self) -> bool {
        self.regroup.coming.is_some()
    }

    /// Whether the claim is to look at once, so that a change gets on.
    pub(super) fn hurries_claim(&self) -> bool {
        let is_behind = self.reader.page.is_some() || !self.caught_up;
        let leaving = self.regroup.leaving.as_ref().filter(|leaving| leaving.reply.is_some());
        let waits = |last_flush: i64| self.flushes.front().is_some_and(|oldest| oldest.number <= last_flush);
        self.reads_before_stop()
            || (self.regroup.coming.is_some() && (is_behind || !self.flushes.is_empty()))
            || leaving
                .is_some_and(|leaving| waits(leaving.last_flush) || (is_behind && self.regroup.wholes < leaving.whole))
    }

    /// Gives a change up, because what is persisted is to be the truth. Whoever waits for an answer gets none.
    pub(super) fn end_regroup(&mut self) {
        self.regroup.leaving = None;
        self.regroup.coming = None;
    }

    /// Everything in memory is dropped: what waits to leave is read again, and frozen again. No outcome that is not
    /// written is left here, whatever was answered before.
    pub(super) fn forget_frozen(&mut self) {
        if let Some(leaving) = &mut self.regroup.leaving {
            leaving.frozen.clear();
            leaving.unclean = false;
        }
    }

    /// The partitions stay after all: what came for them meanwhile enters its lanes, in the order it came.
    pub(super) fn thaw(&mut self) {
        let Some(leaving) = self.regroup.leaving.take() else { return };
        for (_, source) in leaving.frozen {
            let row = self.rows_of(source.batch).reference_row[source.reference as usize] as usize;
            let reference = source.reference as usize;
            self.feed(source.batch, row, reference..reference + 1, source.transaction);
        }
    }

    fn is_among(&self, partition: u32, held: &[HeldPartition]) -> bool {
        held.iter().any(|of| of.partition == partition && of.fence == self.fence(partition))
    }

    /// Gets on with a hand-over; answers when to look again.
    fn step_leaving(&mut self, now: Tick) -> Option<Tick> {
        let leaving = self.regroup.leaving.as_ref().filter(|leaving| leaving.reply.is_some())?;
        if self.stopping.is_some() && !self.is_parting() {
            self.thaw();
            return None;
        }
        if !self.loaded {
            // Nothing is known here beyond what is persisted; but what is under way still arrives, and the next owner
            // is to come after it.
            if self.runs_in_flight == 0 && !self.settling {
                self.answer_release(None);
                return None;
            }
            return Some(now.plus_us(LOOK_US));
        }
        let is_read = self.regroup.wholes >= leaving.whole
            && self.flushes.front().is_none_or(|oldest| oldest.number > leaving.last_flush);
        let is_of_it = |lane: LaneIndex| leaving.partitions.contains(&self.lanes.lane(lane).partition);
        let drains = self.draining.is_some_and(is_of_it);
        let is_written = !self.settling && !self.settle.concerns(&self.lanes, |of| leaving.partitions.contains(&of));
        let (waited_us, patience_us) = (now.since_us(leaving.since), leaving.patience_us);
        let place = leaving.restless;
        let is_quiet = is_read && is_written && !drains;
        let restless = if is_quiet { self.restless_lane(&leaving.partitions, place) } else { Some(place) };
        let Some(restless) = restless else {
            let exact = self.resolved_exactly();
            self.answer_release(Some(exact));
            return None;
        };
        let halted = waited_us >= patience_us;
        if let Some(leaving) = &mut self.regroup.leaving {
            (leaving.halted, leaving.restless) = (halted, restless);
        }
        // Copies that are on their way into a lane are waited for, however long: they would find another lane there.
        if halted && self.runs_in_flight == 0 && !drains && (is_written || waited_us >= patience_us.saturating_mul(2)) {
            let exact = is_written.then(|| self.resolved_exactly());
            self.answer_release(exact);
            return None;
        }
        Some(now.plus_us(LOOK_US))
    }

    /// A lane of these partitions with something in it or on its way. Asked every two milliseconds: it looks first
    /// where it found one.
    fn restless_lane(&self, partitions: &[u32], place: LaneIndex) -> Option<LaneIndex> {
        self.lanes.find_from(place, |lane| {
            let is_under_way = matches!(lane.state, LaneState::InFlight | LaneState::Dying);
            (is_under_way || lane.len > 0 || lane.copying > 0 || lane.deleting > 0)
                && partitions.contains(&lane.partition)
        })
    }

    fn answer_release(&mut self, exact: Option<Vec<(u32, Snapshot)>>) {
        let epoch = self.epoch;
        let Some(leaving) = &mut self.regroup.leaving else { return };
        leaving.unclean = exact.is_none() && self.loaded;
        let of = |partition: &u32| {
            let found = exact.as_ref().and_then(|exact| exact.iter().find(|(of, _)| of == partition));
            (*partition, found.map(|(_, resolved)| resolved.clone()))
        };
        let release = Release { epoch, partitions: leaving.partitions.iter().map(of).collect() };
        if let Some(reply) = leaving.reply.take() {
            // Who has asked may have gone: then it has ended, and so will this.
            let _ = reply.send(release);
        }
    }

    /// They have left: nothing of them is this shard's concern.
    fn drop_partitions(&mut self, left: &Leaving) {
        let gone = |partition: u32| left.partitions.contains(&partition);
        self.drain.retain(|lane| !gone(self.lanes.lane(*lane).partition));
        let mut sources = Vec::new();
        self.lanes.remove_if(gone, |source| sources.push(source));
        sources.extend(left.frozen.iter().map(|(_, source)| *source));
        sources.into_iter().for_each(|source| self.resolve(source));
        self.held.retain(|partition| !gone(*partition));
        self.bases.retain(|(partition, _)| !gone(*partition));
        for partition in &left.partitions {
            if let Some(fence) = self.fences.get_mut(*partition as usize) {
                *fence = 0;
            }
        }
        self.numbers.forget_numbers();
        self.cursor_dirty = true;
        self.metrics.parked_lanes_now.set(self.lanes.parked_count() as u64);
    }

    /// Partitions that are to be read from now on, if the moment has come: those, and what is to be written of the
    /// others first.
    fn ready_to_add(&mut self, now: Tick) -> Option<(Vec<u32>, Release)> {
        let coming = self.regroup.coming.as_ref()?;
        let is_read = self.flushes.is_empty() && self.reader.page.is_none() && self.caught_up;
        if is_read && self.regroup.leaving.is_none() {
            let new = coming.held.iter().map(|of| of.partition).filter(|of| !self.holds(*of)).collect();
            let kept = self.resolved_exactly().into_iter().map(|(partition, resolved)| (partition, Some(resolved)));
            return Some((new, Release { epoch: self.epoch, partitions: kept.collect() }));
        }
        if now.since_us(coming.since) >= PATIENCE_US
            && let (Some(incarnation), Some(coming)) = (self.incarnation, self.regroup.coming.take())
        {
            self.end_regroup();
            self.set_partitions(incarnation, coming.ownership, &coming.held);
        }
        None
    }

    /// They are loaded: the reader goes back to where they were left.
    fn added(&mut self, reply: LoadReply, new: &[u32], now: Tick) {
        let Some(coming) = self.regroup.coming.take() else { return };
        if self.epoch != Some(reply.epoch)
            && let Some(incarnation) = self.incarnation
        {
            // Another life of the server: everything is read anew.
            return self.set_partitions(incarnation, coming.ownership, &coming.held);
        }
        let fed = std::mem::take(&mut self.reader).read;
        let mut read = fed.clone();
        self.bases = self.held.iter().map(|partition| (*partition, fed.clone())).collect();
        for (partition, resolved) in new.iter().zip(reply.resolved) {
            read = read.intersection(&resolved);
            self.bases.push((*partition, resolved));
        }
        self.bases.retain(|(_, base)| *base != read);
        self.bases.sort_unstable_by_key(|(partition, _)| *partition);
        self.hold(coming.ownership, &coming.held);
        self.reader = ReadPosition { read, ..ReadPosition::default() };
        self.caught_up = false;
        self.numbers.forget_numbers();
        // What is fed is said of partitions that were held; one that comes back was read by others meanwhile.
        self.numbers.forget_fed();
        self.parked_as_of.retain(|(partition, _)| !new.contains(partition));
        self.parked_as_of.extend(new.iter().map(|partition| (*partition, reply.read_at.clone())));
        self.restore_parked(reply.parked, now);
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
            if !mutants::active(Mutant::OpenHandedOver) {
                listed.extend(&anywhere);
                listed.extend(open.get(&partition).into_iter().flatten());
            }
            let exact = Snapshot::new(read.xmax(), listed);
            match self.bases.binary_search_by_key(&partition, |(of, _)| *of) {
                Ok(index) => exact.union(&self.bases[index].1),
                Err(_) => exact,
            }
        };
        self.held.iter().map(|partition| (*partition, resolved(*partition))).collect()
    }

    /// Messages in lanes, those that wait for the claim, and the frozen ones: a call for each reference.
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
        for (partition, source) in self.regroup.leaving.iter().flat_map(|leaving| &leaving.frozen) {
            if let Some(xid) = self.ledger.xid(source.transaction) {
                each(*partition, xid);
            }
        }
    }
}

impl SettleQueue {
    /// Whether something that is to be written is of such a partition.
    fn concerns(&self, lanes: &crate::plan::lanes::Lanes, of: impl Fn(u32) -> bool) -> bool {
        let lane = |lane: &crate::plan::lanes::LaneIndex| of(lanes.lane(*lane).partition);
        self.park.iter().any(|park| of(park.partition))
            || self.held.iter().any(|held| of(held.park.partition))
            || self.spill.iter().any(|(spill, ..)| of(spill.partition))
            || self.drained.iter().any(|(drained, _)| of(drained.partition))
            || self.dead.iter().any(|(dead, _)| of(dead.partition))
            || self.missing.iter().any(|(dead, ..)| of(dead.partition))
            || self.unpark.iter().any(lane)
    }
}

impl<R: Runtime, S: Store, P: Publisher> Shard<R, S, P> {
    /// Gets on with a hand-over, if one is under way; answers when to look again.
    pub(super) fn regroup(&self) -> Tick {
        let (look_again, hurries) = {
            let mut state = self.state.borrow_mut();
            let look_again = state.step_leaving(self.runtime.now());
            (look_again, state.hurries_claim())
        };
        if hurries {
            self.claim_signal.raise();
        }
        look_again.unwrap_or(Tick::NEVER)
    }

    /// Begins to read for further partitions, if they have come and the moment is right. Nothing else is read or
    /// admitted meanwhile. `true`: the claim loop has to look again at what it may do.
    pub(super) async fn add_partitions(&self) -> Result<bool, StoreError> {
        let (incarnation, new, kept, era) = {
            let mut state = self.state.borrow_mut();
            let era = state.era;
            let Some((new, kept)) = state.ready_to_add(self.runtime.now()) else {
                // Where patience has ended everything is to be loaded first: nothing may be read before.
                return Ok(state.era != era);
            };
            let Some(incarnation) = state.incarnation else { return Ok(false) };
            (incarnation, new, kept, state.era)
        };
        self.within_deadline(self.store.keep_resolved(incarnation, &kept)).await?;
        let reply = self.within_deadline(self.store.load(incarnation, &new)).await?;
        let mut state = self.state.borrow_mut();
        // Another change may have come meanwhile: then this one begins again.
        let is_same = |coming: &Coming| {
            let wanted = coming.held.iter().map(|of| of.partition);
            wanted.filter(|of| !state.holds(*of)).eq(new.iter().copied())
        };
        if state.era == era && state.regroup.coming.as_ref().is_some_and(is_same) {
            state.added(reply, &new, self.runtime.now());
        }
        Ok(true)
    }
}
