//! The transport of `run`: accepts everything at once, in this process, and takes note of it.
//!
//! A message says by its correlation id which call it belongs to and when that call was meant to start
//! ([`CallMark`]), so nothing is parsed and nothing is remembered a message.
//!
//! Invariants
//! - Streams of the *refused* family are refused every time: they are what `--parked` parks.
//! - A latency is recorded for first copies only, and by message.
//! - Memory is bounded: see `samples` for the latencies.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use corelane::error::FailureReason;
use corelane::seam::transport::{OutgoingBatch, PublishOutcome, Transport, TransportLimits};
use uuid::Uuid;

use crate::checks::{Arrival, Checks};
use crate::latency::Recorder;
use crate::progress::Tally;
use crate::samples::{Acknowledgements, Samples};
use crate::shape::StreamFamily;

/// What a correlation id of ours says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallMark {
    /// The call's number, from 1.
    pub call: u64,
    /// When it was meant to start, in microseconds since the collector was made.
    pub intended_us: u64,
}

impl CallMark {
    /// As a correlation id.
    #[must_use]
    pub fn to_uuid(self) -> Uuid {
        Uuid::from_u64_pair(self.call, self.intended_us)
    }

    /// From a correlation id.
    #[must_use]
    pub fn of(id: Uuid) -> Self {
        let (call, intended_us) = id.as_u64_pair();
        Self { call, intended_us }
    }
}

/// The transport.
#[derive(Debug)]
pub struct Collector {
    origin: Instant,
    family: StreamFamily,
    refused: StreamFamily,
    checks: Checks,
    tally: Arc<Tally>,
    acknowledgements: Acknowledgements,
    samples: Samples,
    refusals: AtomicU64,
}

impl Collector {
    /// A collector of a family's streams.
    #[must_use]
    pub fn new(family: StreamFamily, refused: StreamFamily, streams: u32, tally: Arc<Tally>) -> Self {
        let acknowledgements = Acknowledgements::default();
        Self {
            origin: Instant::now(),
            family,
            refused,
            checks: Checks::new(streams),
            tally,
            samples: Samples::start(acknowledgements.clone()),
            acknowledgements,
            refusals: AtomicU64::new(0),
        }
    }

    /// What was checked.
    #[must_use]
    pub fn checks(&self) -> &Checks {
        &self.checks
    }

    /// Messages of the refused family that were refused.
    #[must_use]
    pub fn refusals(&self) -> u64 {
        self.refusals.load(Ordering::Relaxed)
    }

    /// A moment as this collector counts.
    #[must_use]
    pub fn micros_of(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.origin).as_micros() as u64
    }

    /// A call is about to be made: its slot is empty.
    pub fn call_begins(&self, call: u64) {
        self.acknowledgements.begins(call);
    }

    /// A call was acknowledged just now.
    pub fn call_acknowledged(&self, call: u64) {
        self.acknowledgements.acknowledged(call, self.micros_of(Instant::now()));
    }

    /// Forgets the latencies so far (of the warm-up).
    pub fn reset_latencies(&self) {
        self.samples.reset();
    }

    /// Publish and end-to-end latencies so far.
    #[must_use]
    pub fn latencies(&self) -> (Recorder, Recorder) {
        let latencies = self.samples.so_far();
        (latencies.publish, latencies.end_to_end)
    }

    fn accept(&self, batch: &dyn OutgoingBatch, outcomes: &mut Vec<PublishOutcome>) {
        let now_us = self.micros_of(Instant::now());
        // Consecutive messages of a batch are mostly of one call: latencies are recorded by group.
        let mut group = (CallMark { call: 0, intended_us: 0 }, 0u64);
        let mut marks = Vec::with_capacity(batch.len());
        let mut numbers = Vec::with_capacity(batch.len());
        for index in 0..batch.len() {
            let message = batch.get(index);
            let stream = message.stream_id.unwrap_or_default();
            if let Some(index) = self.family.index_of(stream) {
                numbers.push((index, message.stream_seq as u64));
                marks.push(CallMark::of(message.correlation_id));
                outcomes.push(PublishOutcome::Accepted);
            } else if self.refused.index_of(stream).is_some() {
                self.refusals.fetch_add(1, Ordering::Relaxed);
                let text = "refused on purpose (--parked)".to_owned();
                outcomes.push(PublishOutcome::Failed { reason: FailureReason::TransportException, text });
            } else {
                // Somebody else's (a message of --hold enlisted after its rollback would be one).
                outcomes.push(PublishOutcome::Accepted);
            }
        }
        let mut first = 0;
        let mut samples = Vec::new();
        let mut marks = marks.into_iter();
        self.checks.accepted(numbers.into_iter(), |arrival| {
            let Some(mark) = marks.next() else { return };
            if arrival == Arrival::Copy {
                return;
            }
            first += 1;
            if mark == group.0 {
                group.1 += 1;
            } else {
                samples.push(group);
                group = (mark, 1);
            }
        });
        samples.push(group);
        self.samples.accepted(samples, now_us);
        self.tally.published.fetch_add(first, Ordering::Relaxed);
    }
}

/// The collector as the engine holds it.
#[derive(Clone, Debug)]
pub struct CollectorTransport(pub Arc<Collector>);

impl Transport for CollectorTransport {
    fn limits(&self) -> TransportLimits {
        TransportLimits { message_bytes_max: 32 << 20, batch_bytes_max: 64 << 20, ..TransportLimits::default() }
    }

    fn publish<'a>(
        &'a self,
        batch: &'a dyn OutgoingBatch,
        outcomes: &'a mut Vec<PublishOutcome>,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(async move { self.0.accept(batch, outcomes) })
    }

    fn name(&self) -> &str {
        "loadgen"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use corelane::envelope::Trace;
    use corelane::seam::transport::OutgoingMessage;

    struct Batch(Vec<(Uuid, i64, CallMark)>);

    impl OutgoingBatch for Batch {
        fn destination(&self) -> &str {
            "orders"
        }
        fn len(&self) -> usize {
            self.0.len()
        }
        fn get(&self, index: usize) -> OutgoingMessage<'_> {
            let (stream, stream_seq, mark) = self.0[index];
            OutgoingMessage {
                message_id: Uuid::from_u128(7),
                stream_id: Some(stream),
                stream_seq,
                version: stream_seq,
                fence: 1,
                replayed: false,
                type_name: "t",
                content_type: "application/json",
                correlation_id: mark.to_uuid(),
                causation_id: Uuid::nil(),
                trace: Trace::default(),
                metadata: b"",
                payload: b"{}",
            }
        }
    }

    #[test]
    fn latencies_are_by_message_and_survive_an_acknowledgement_that_comes_late() {
        let (family, refused) = (StreamFamily::random(), StreamFamily::random());
        let tally = Arc::new(Tally::default());
        let collector = Collector::new(family, refused, 4, tally.clone());
        let (one, two) = (CallMark { call: 1, intended_us: 0 }, CallMark { call: 2, intended_us: 0 });
        collector.call_acknowledged(1);
        let mut outcomes = Vec::new();
        let batch = Batch(vec![
            (family.stream(0), 1, one),
            (family.stream(1), 1, one),
            (family.stream(2), 1, two),
            (refused.stream(0), 1, one),
        ]);
        collector.accept(&batch, &mut outcomes);
        assert!(matches!(
            outcomes[..],
            [
                PublishOutcome::Accepted,
                PublishOutcome::Accepted,
                PublishOutcome::Accepted,
                PublishOutcome::Failed { .. }
            ]
        ));
        assert_eq!(collector.samples.so_far().early.len(), 1, "call 2 has no acknowledgement yet");
        collector.call_acknowledged(2);
        let (publish, end_to_end) = collector.latencies();
        assert!(publish.percentiles().is_some() && end_to_end.percentiles().is_some());
        assert!(collector.samples.so_far().early.is_empty());
        assert_eq!((tally.published(), collector.refusals()), (3, 1));
    }

    #[test]
    fn a_copy_is_no_second_message() {
        let family = StreamFamily::random();
        let tally = Arc::new(Tally::default());
        let collector = Collector::new(family, StreamFamily::random(), 1, tally.clone());
        let mark = CallMark { call: 1, intended_us: 0 };
        for _ in 0..2 {
            collector.accept(&Batch(vec![(family.stream(0), 1, mark)]), &mut Vec::new());
        }
        assert_eq!((tally.published(), collector.checks().findings().copies), (1, 1));
    }
}
