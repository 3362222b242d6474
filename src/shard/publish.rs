//! The publish loop: ready lanes become runs, runs come back with outcomes.
//!
//! Invariants
//! - A run starts only before the lease's end less its margin, and the margin holds the transport's time limit and a
//!   second: whatever was started has ended before the lease does.
//! - A stream stops at its first failure; the others go on.
//! - A destination that is not ready or asks to slow down counts no attempt: its lanes keep their order and
//!   one probe goes out after its own short backoff; after failures in a row, after the breaker's (see `plan::pause`).
//! - Behind a message that died its stream goes on, or is held until an operator lets it go on, as the config says.

use futures_util::stream::{FuturesUnordered, StreamExt};
use futures_util::{FutureExt, future};

use super::Shard;
use super::settle::Held;
use super::state::{State, rows_of};
use crate::batch::DestinationId;
use crate::error::{FailureReason, bounded_error_text};
use crate::plan::lanes::{Lane, LaneIndex, SlotIndex, Source};
use crate::plan::ledger::TransactionIndex;
use crate::plan::pause::{MaySend, RunSaid};
use crate::plan::retry::{Retry, Verdict};
use crate::seam::publisher::{PublishRun, Publisher, RunItem};
use crate::seam::runtime::Runtime;
use crate::seam::store::{DeadLetter, Drained, HELD_MS, Park, Store};
use crate::seam::transport::PublishOutcome;
use crate::time::Tick;

/// A run that is out, and the slots it was made of.
pub(super) struct Sent {
    run: Box<PublishRun>,
    slots: Vec<SlotIndex>,
    era: u32,
    /// It is to show whether the destination is back.
    probe: bool,
}

struct Failure<'a> {
    reason: FailureReason,
    text: &'a str,
    permanent: bool,
}

impl State {
    /// Makes the next run, if there is one: `None`, and when to look again.
    fn next_run(
        &mut self,
        now: Tick,
        lease: Tick,
        per_lane: usize,
        spare: &mut Vec<(Box<PublishRun>, Vec<SlotIndex>)>,
    ) -> Result<Sent, Tick> {
        if !self.loaded
            || self.is_halted()
            || self.lanes.ready_count() == 0
            || self.runs_in_flight >= self.settings.publish_in_flight_max
        {
            return Err(Tick::NEVER);
        }
        if now >= lease {
            // The lease keeper renews every quarter of the lease; look again soon.
            return Err(now.plus_ms(20));
        }
        let mut look_again = Tick::NEVER;
        let count = self.destination_count();
        for step in 0..count {
            let Some(destination) = self.destination_at((self.next_destination + step) % count) else { continue };
            let pause = self.pause_of(destination);
            let rows_max = match pause.may_send(now) {
                MaySend::Freely => self.settings.publish_run_rows_max,
                MaySend::Probe => 1,
                MaySend::At(at) => {
                    look_again = look_again.min(at);
                    if self.is_short_of_room() {
                        self.put_beside(destination, now);
                    }
                    continue;
                }
            };
            let (mut run, mut slots) = spare.pop().unwrap_or_else(|| {
                (Box::new(PublishRun { destination, items: Vec::new(), outcomes: Vec::new() }), Vec::new())
            });
            run.destination = destination;
            let (lanes, batches, fences) = (&mut self.lanes, &self.batches, &self.fences);
            lanes.take(destination, rows_max, per_lane, |slot, source| {
                let rows = rows_of(batches, source.batch);
                let row = rows.reference_row[source.reference as usize] as usize;
                let fence = fences.get(rows.partition[row] as usize).copied().unwrap_or(0);
                run.items.push(RunItem { rows: rows.clone(), reference: source.reference, fence });
                slots.push(slot);
            });
            if slots.is_empty() {
                spare.push((run, slots));
                continue;
            }
            self.next_destination = (self.next_destination + step + 1) % count;
            let probe = self.pause_of(destination).sent();
            self.runs_in_flight += 1;
            self.metrics.runs.add(1);
            return Ok(Sent { run, slots, era: self.era, probe });
        }
        Err(look_again)
    }

    /// Applies a run's outcomes.
    fn run_came_back(&mut self, sent: &mut Sent, now: Tick, retry: &Retry) {
        self.runs_in_flight -= 1;
        sent.run.items.clear(); // Lets go of the batches first: what is resolved below can then be recycled.
        let destination = sent.run.destination;
        if sent.era != self.era {
            if sent.probe {
                self.pause_of(destination).silent(now);
            }
            return;
        }
        let mut said = RunSaid::default();
        let mut at = 0;
        while at < sent.slots.len() {
            let lane = self.lanes.lane_of(sent.slots[at]);
            let mut end = at + 1;
            while end < sent.slots.len() && self.lanes.lane_of(sent.slots[end]) == lane {
                end += 1;
            }
            let mut blocked = false;
            for index in at..end {
                let slot = sent.slots[index];
                let outcome = sent.run.outcomes.get(index);
                let failure = match outcome {
                    Some(PublishOutcome::Accepted) => {
                        said.accepted += 1;
                        self.acknowledge(slot, lane);
                        continue;
                    }
                    Some(PublishOutcome::NotReady) => {
                        self.metrics.not_ready.add(1);
                        said.asked_for_pause = true;
                        self.pause_of(destination).not_ready(now);
                        self.lanes.put_back(lane);
                        blocked = true;
                        break;
                    }
                    Some(PublishOutcome::Throttled { retry_after_ms }) => {
                        self.metrics.not_ready.add(1);
                        said.asked_for_pause = true;
                        self.pause_of(destination).throttled(now, *retry_after_ms);
                        self.lanes.put_back(lane);
                        blocked = true;
                        break;
                    }
                    Some(PublishOutcome::Failed { reason, text }) => {
                        Failure { reason: *reason, text, permanent: false }
                    }
                    Some(PublishOutcome::Permanent { reason, text }) => {
                        Failure { reason: *reason, text, permanent: true }
                    }
                    Some(PublishOutcome::Unknown { text }) => {
                        self.metrics.publish_unknown.add(1);
                        Failure { reason: FailureReason::TransportException, text, permanent: false }
                    }
                    None => {
                        self.metrics.publish_unknown.add(1);
                        Failure {
                            reason: FailureReason::TransportException,
                            text: "the transport gave no outcome for this message",
                            permanent: false,
                        }
                    }
                };
                if failure.permanent {
                    said.refused += 1;
                } else {
                    said.failed(self.lanes.lane(lane).lane_id);
                }
                self.head_failed(slot, lane, &failure, now, retry);
                blocked = true;
                break;
            }
            if !blocked {
                self.lane_goes_on(lane);
            }
            at = end;
        }
        self.metrics.rows_published.add(said.accepted.into());
        self.destination_said(destination, now, sent.probe, &said);
        // Before anything new of their lanes starts.
        self.recall_lanes();
    }

    /// What a run says of its destination: it may open or close its breaker.
    fn destination_said(&mut self, destination: DestinationId, now: Tick, probe: bool, said: &RunSaid) {
        let rules = self.settings.breaker;
        let pause = self.pause_of(destination);
        let was_broken = pause.is_broken();
        pause.came_back(now, probe, said, &rules);
        let (is_broken, pause_ms) = (pause.is_broken(), pause.pause_ms());
        if is_broken == was_broken {
            return;
        }
        let (shard, name) = (self.settings.shard, destination.name());
        if is_broken {
            self.metrics.breakers_opened.add(1);
            tracing::warn!(
                shard,
                destination = name,
                pause_ms,
                "breaker open: nothing but a probe is sent after the pause"
            );
        } else {
            tracing::info!(shard, destination = name, "breaker closed: the destination takes messages again");
        }
        let open = self.pauses.iter().filter(|(_, pause)| pause.is_broken()).count();
        self.metrics.breakers_open_now.set(open as u64);
    }

    fn acknowledge(&mut self, slot: SlotIndex, lane: LaneIndex) {
        let stream_seq = self.lanes.stream_seq_of(slot);
        let source = self.lanes.acknowledge(slot);
        if source.transaction == TransactionIndex::NONE {
            let of = *self.lanes.lane(lane);
            let drained =
                Drained { lane_id: of.lane_id, destination: of.destination, partition: of.partition, stream_seq };
            self.settle.drained(drained, source);
        } else {
            self.resolve(source);
        }
    }

    fn head_failed(&mut self, slot: SlotIndex, lane: LaneIndex, failure: &Failure<'_>, now: Tick, retry: &Retry) {
        self.metrics.publish_failures.add(1);
        let of = *self.lanes.lane(lane);
        let stream_seq = self.lanes.stream_seq_of(slot);
        let attempts = of.attempts.saturating_add(1);
        let (error, error_cut) = bounded_error_text(failure.text);
        let verdict = if failure.permanent { Verdict::Dead } else { retry.after_failure(attempts, rand::random()) };
        match verdict {
            Verdict::Dead => {
                let source = self.lanes.source_of(slot);
                let dead = DeadLetter {
                    lane_id: of.lane_id,
                    destination: of.destination,
                    unnamed: None,
                    partition: of.partition,
                    stream_seq,
                    version: self.version_of(source),
                    attempts,
                    reason: failure.reason as i16,
                    error,
                    error_cut,
                };
                if self.has_stream(source) && self.settings.on_death.holds(of.destination.name()) {
                    self.hold_behind(dead, lane, &of);
                } else {
                    self.lanes.die(lane);
                    self.settle.bury(dead, lane);
                }
            }
            Verdict::RetryIn(due_in_ms) => {
                let due = now.plus_ms(due_in_ms);
                self.park_lane(lane, attempts, due);
                self.settle.park(Park {
                    lane_id: of.lane_id,
                    destination: of.destination,
                    partition: of.partition,
                    stream_seq,
                    attempts,
                    reason: failure.reason as i16,
                    error,
                    error_cut,
                    due_in_ms: i64::try_from(due_in_ms).unwrap_or(i64::MAX),
                });
            }
        }
    }

    /// The lane waits behind its head, which dies, until an operator lets it go on.
    fn hold_behind(&mut self, dead: DeadLetter, lane: LaneIndex, of: &Lane) {
        let mut beside = Vec::new();
        self.lanes.park(lane, dead.attempts, Tick::NEVER, |stream_seq, source| beside.push((stream_seq, source)));
        let park = Park {
            lane_id: of.lane_id,
            destination: of.destination,
            partition: of.partition,
            stream_seq: dead.stream_seq,
            attempts: dead.attempts,
            reason: dead.reason,
            error: dead.error.clone(),
            error_cut: dead.error_cut,
            due_in_ms: HELD_MS,
        };
        let mut beside = beside.into_iter();
        if let Some((_, source)) = beside.next() {
            self.settle.held.push(Held { park, dead, lane, source });
        }
        for (stream_seq, source) in beside {
            self.spill_parked(lane, stream_seq, source);
        }
        self.metrics.parked_lanes_now.set(self.lanes.parked_count() as u64);
    }

    fn has_stream(&self, source: Source) -> bool {
        let rows = self.rows_of(source.batch);
        rows.stream_id(rows.reference_row[source.reference as usize] as usize).is_some()
    }

    pub(super) fn version_of(&self, source: Source) -> i64 {
        let rows = self.rows_of(source.batch);
        rows.version[rows.reference_row[source.reference as usize] as usize]
    }

    fn destination_count(&self) -> usize {
        self.lanes.destination_count()
    }

    fn destination_at(&self, index: usize) -> Option<DestinationId> {
        self.lanes.destination_at(index)
    }
}

impl<R: Runtime, S: Store, P: Publisher> Shard<R, S, P> {
    /// Runs until the shard has ended; what is in flight then is given up (its outcome is unknown).
    pub(super) async fn publish_loop(&self) {
        let (retry, per_lane) = {
            let state = self.state.borrow();
            let settings = &state.settings;
            let retry = Retry::new(
                settings.retry_base_ms,
                settings.retry_cap_ms,
                settings.retry_attempts_max,
                settings.retry_jitter_percent,
            );
            let per_lane =
                if self.publisher.limits().ordered_atomic_batches { settings.publish_run_rows_max } else { 1 };
            (retry, per_lane)
        };
        let mut spare = Vec::new();
        let mut out = FuturesUnordered::new();
        loop {
            if self.state.borrow().ended {
                return;
            }
            let regroup_at = self.regroup();
            let now = self.runtime.now();
            let next = self.state.borrow_mut().next_run(now, self.lease.deadline(), per_lane, &mut spare);
            let look_again = match next {
                Ok(sent) => {
                    let Sent { run, slots, era, probe } = sent;
                    let publishing = self.publisher.publish(run);
                    out.push(async move { Sent { run: publishing.await, slots, era, probe } });
                    continue;
                }
                Err(at) => at.min(regroup_at),
            };
            if !self.state.borrow().settle.is_empty() {
                self.settle_signal.raise();
            }
            let came_back = {
                let waiting = std::pin::pin!(self.wait(&self.publish_signal, look_again).fuse());
                if out.is_empty() {
                    waiting.await;
                    None
                } else {
                    match future::select(out.next(), waiting).await {
                        future::Either::Left((came_back, _)) => came_back,
                        future::Either::Right(_) => None,
                    }
                }
            };
            let Some(mut sent) = came_back else { continue };
            self.state.borrow_mut().run_came_back(&mut sent, self.runtime.now(), &retry);
            sent.run.items.clear();
            sent.run.outcomes.clear();
            sent.slots.clear();
            spare.push((sent.run, sent.slots));
            self.settle_signal.raise();
            self.claim_signal.raise();
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
