//! The bridge by itself: limits, time, panics. Case `limits` at its exact borders.

use std::pin::Pin;
use std::sync::{Mutex, PoisonError};

use uuid::Uuid;

use super::*;
use crate::batch::{DestinationId, NewRow, Rows};
use crate::envelope::Trace;
use crate::seam::publisher::RunItem;
use crate::transport::memory::{Fault, MemoryTransport};

/// A run of messages with payloads of these sizes, each in a lane of its own or all in one.
fn run_of(payload_bytes: &[usize], one_lane: bool) -> Box<PublishRun> {
    let destination = DestinationId::of("bridge-test").unwrap();
    let payload = vec![b'x'; payload_bytes.iter().copied().max().unwrap_or(0)];
    let mut rows = Rows::default();
    for (index, bytes) in payload_bytes.iter().enumerate() {
        let stream = if one_lane { 1 } else { index as u128 + 1 };
        let row = NewRow {
            message_id: Uuid::from_u128(index as u128 + 1),
            stream_id: Some(Uuid::from_u128(stream)),
            partition: 0,
            is_event: true,
            type_name: "t",
            content_type: "",
            correlation_id: Uuid::nil(),
            causation_id: Uuid::nil(),
            trace: Trace::default(),
            metadata: &[],
            payload: &payload[..*bytes],
            due_unix_us: 0,
        };
        rows.push(&row, &[destination]);
    }
    let rows = Arc::new(rows);
    let item = |reference| RunItem { rows: rows.clone(), reference, fence: 1 };
    let items = (0..payload_bytes.len() as u32).map(item).collect();
    Box::new(PublishRun { destination, items, outcomes: Vec::new() })
}

/// A payload that makes a message of exactly so many bytes with its headers.
fn payload_for(bytes: usize) -> usize {
    bytes - HEADER_BYTES - "t".len() - "application/json".len()
}

/// Records the sizes of the batches that go through it.
struct Recording<T> {
    inner: T,
    batches: Arc<Mutex<Vec<usize>>>,
}

impl<T: Transport> Transport for Recording<T> {
    fn limits(&self) -> TransportLimits {
        self.inner.limits()
    }
    fn publish<'a>(
        &'a self,
        batch: &'a dyn OutgoingBatch,
        outcomes: &'a mut Vec<PublishOutcome>,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner).push(batch.len());
        self.inner.publish(batch, outcomes)
    }
    fn name(&self) -> &str {
        "recording"
    }
}

/// Sends a run; answers a letter a message (Accepted, Failed, Permanent, Not ready, Unknown) and the batches' sizes.
async fn outcomes_of(transport: MemoryTransport, mut run: Box<PublishRun>, timeout: Duration) -> (String, Vec<usize>) {
    let batches = Arc::new(Mutex::new(Vec::new()));
    let transport = Recording { inner: transport, batches: batches.clone() };
    publish(&transport, &transport.limits(), &mut run, timeout).await;
    let sizes = batches.lock().unwrap_or_else(PoisonError::into_inner).clone();
    (letters(&run), sizes)
}

fn letters(run: &PublishRun) -> String {
    let letter = |outcome: &PublishOutcome| match outcome {
        PublishOutcome::Accepted => 'A',
        PublishOutcome::Failed { .. } => 'F',
        PublishOutcome::Permanent { .. } => 'P',
        PublishOutcome::NotReady | PublishOutcome::Throttled { .. } => 'N',
        PublishOutcome::Unknown { .. } => 'U',
    };
    run.outcomes.iter().map(letter).collect()
}

fn sink() -> MemoryTransport {
    MemoryTransport::new(|_, _| {})
}

fn limits(message: usize, batch: usize, rows: usize, atomic: bool) -> TransportLimits {
    TransportLimits {
        message_bytes_max: message,
        batch_bytes_max: batch,
        batch_rows_max: rows,
        ordered_atomic_batches: atomic,
        ..TransportLimits::default()
    }
}

const LONG: Duration = Duration::from_secs(5);
/// For what ends by its time.
const SHORT: Duration = Duration::from_millis(100);

#[tokio::test]
async fn a_message_at_the_limit_goes_out_and_one_byte_more_does_not() {
    let limits = limits(262_144, 1_048_576, 4_500, false);
    let run = run_of(&[262_143, 262_144, 262_145, 262_144].map(payload_for), false);
    let (outcomes, batches) = outcomes_of(sink().with_limits(limits), run, LONG).await;
    assert_eq!(outcomes, "AAPA");
    assert_eq!(batches, [3]);
}

#[tokio::test]
async fn a_run_is_split_by_rows_and_by_bytes() {
    let small = run_of(&vec![10; 10_000], false);
    let (outcomes, batches) =
        outcomes_of(sink().with_limits(limits(262_144, 100_000_000, 4_500, false)), small, LONG).await;
    assert!(outcomes.bytes().all(|letter| letter == b'A') && outcomes.len() == 10_000);
    assert_eq!(batches, [4_500, 4_500, 1_000]);

    let large = run_of(&[payload_for(1_000); 10], false);
    let (outcomes, batches) = outcomes_of(sink().with_limits(limits(2_000, 3_999, 4_500, false)), large, LONG).await;
    assert_eq!((outcomes.as_str(), batches.as_slice()), ("AAAAAAAAAA", &[3, 3, 3, 1][..]));
}

#[tokio::test]
async fn nothing_of_an_atomic_run_goes_out_behind_what_was_not_accepted() {
    let limits = limits(262_144, 100_000_000, 2, true);
    let third = Uuid::from_u128(3);
    let transport = sink().with_limits(limits).with_faults(move |_, message| {
        if message.message_id == third { Fault::Refuse("no".to_owned()) } else { Fault::None }
    });
    let (outcomes, batches) = outcomes_of(transport, run_of(&[1; 6], true), LONG).await;
    assert_eq!((outcomes.as_str(), batches.as_slice()), ("AAFFNN", &[2, 2][..]));
}

#[tokio::test]
async fn nothing_of_an_atomic_run_goes_out_behind_an_oversize_one() {
    let limits = limits(2_000, 100_000_000, 10, true);
    let (outcomes, batches) = outcomes_of(sink().with_limits(limits), run_of(&[1, 5_000, 1], true), LONG).await;
    assert_eq!((outcomes.as_str(), batches.as_slice()), ("APN", &[1][..]));
}

#[tokio::test]
async fn a_hanging_transport_is_given_up_and_its_messages_are_unknown() {
    let transport = sink().with_faults(|_, _| Fault::Hang);
    let (outcomes, _) = outcomes_of(transport, run_of(&[1, 1], false), SHORT).await;
    assert_eq!(outcomes, "UU");
}

#[tokio::test]
async fn what_was_not_begun_in_time_costs_no_attempt() {
    let (outcomes, batches) = outcomes_of(sink(), run_of(&[1, 1], false), Duration::ZERO).await;
    assert_eq!((outcomes.as_str(), batches.len()), ("NN", 0));

    // The second hangs until the time is over; the third is not begun.
    let second = Uuid::from_u128(2);
    let hanging = sink()
        .with_limits(limits(10_000, 100_000_000, 1, false))
        .with_faults(move |_, message| if message.message_id == second { Fault::Hang } else { Fault::None });
    let (outcomes, batches) = outcomes_of(hanging, run_of(&[1, 1, 1], false), SHORT).await;
    assert_eq!((outcomes.as_str(), batches.len()), ("AUN", 2));
}

/// Panics before there is a future at all.
struct PanicsAtOnce;

impl Transport for PanicsAtOnce {
    fn limits(&self) -> TransportLimits {
        TransportLimits::default()
    }
    fn publish<'a>(
        &'a self,
        _: &'a dyn OutgoingBatch,
        _: &'a mut Vec<PublishOutcome>,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        panic!("asked for")
    }
    fn name(&self) -> &str {
        "panics"
    }
}

#[test]
fn a_worker_outlives_every_panic_of_its_transport() {
    let bridge = Bridge::start(Arc::new(PanicsAtOnce), 1, 1, LONG).unwrap();
    let publisher = bridge.publisher();
    // One worker: if the first panic ended it, the second run would not come back with outcomes.
    for _ in 0..3 {
        let run = futures_executor(publisher.publish(run_of(&[1, 1], false)));
        assert_eq!(letters(&run), "UU");
    }
}

fn futures_executor<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}
