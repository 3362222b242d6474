//! Latency samples: many who measure, one thread that records.
//!
//! Invariants
//! - What is measured goes through a bounded channel, a batch of samples at a time; a full one holds up who measures,
//!   since a sample that is dropped makes the figures better than they are.
//! - The recorders belong to their thread: no lock, and no histogram's work on the way of a message.
//! - A question goes through the same channel: its answer holds everything that was sent before it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::collector::CallMark;
use crate::latency::Recorder;

/// Calls whose acknowledgement times are remembered at once.
const CALLS_MAX: usize = 1 << 18;
const NOT_YET: u64 = 0;
/// Batches on their way to the recorder.
const BATCHES_MAX: usize = 4_096;

/// When calls were acknowledged, in microseconds + 1, by number modulo the length.
#[derive(Clone, Debug)]
pub struct Acknowledgements(Arc<Vec<AtomicU64>>);

impl Default for Acknowledgements {
    fn default() -> Self {
        Self(Arc::new((0..CALLS_MAX).map(|_| AtomicU64::new(NOT_YET)).collect()))
    }
}

impl Acknowledgements {
    /// A call is about to be made: its slot is empty.
    pub fn begins(&self, call: u64) {
        self.slot(call).store(NOT_YET, Ordering::Relaxed);
    }

    /// A call was acknowledged.
    pub fn acknowledged(&self, call: u64, at_us: u64) {
        self.slot(call).store(at_us + 1, Ordering::Release);
    }

    fn of(&self, call: u64) -> Option<u64> {
        match self.slot(call).load(Ordering::Acquire) {
            NOT_YET => None,
            acknowledged => Some(acknowledged - 1),
        }
    }

    fn slot(&self, call: u64) -> &AtomicU64 {
        &self.0[call as usize % CALLS_MAX]
    }
}

/// So many messages of one call.
pub type Sample = (CallMark, u64);

enum Note {
    Accepted { samples: Vec<Sample>, at_us: u64 },
    Reset,
    Ask(flume::Sender<Latencies>),
}

/// What was recorded.
#[derive(Clone, Debug, Default)]
pub struct Latencies {
    /// From the acknowledgement to the transport.
    pub publish: Recorder,
    /// From the intended start of the call to the transport.
    pub end_to_end: Recorder,
    /// Accepted before the caller had its acknowledgement: call, when, how many.
    pub early: Vec<(u64, u64, u64)>,
}

/// The way to the recorder; it ends when the last of these goes.
#[derive(Clone, Debug)]
pub struct Samples(flume::Sender<Note>);

impl Samples {
    /// A recorder with a thread of its own.
    #[must_use]
    pub fn start(acknowledgements: Acknowledgements) -> Self {
        let (sender, receiver) = flume::bounded(BATCHES_MAX);
        let record = move || {
            let mut latencies = Latencies::default();
            for note in receiver {
                match note {
                    Note::Accepted { samples, at_us } => {
                        samples.into_iter().for_each(|sample| latencies.record(sample, at_us, &acknowledgements));
                        latencies.resolve_early(&acknowledgements);
                    }
                    Note::Reset => latencies = Latencies::default(),
                    Note::Ask(answer) => {
                        latencies.resolve_early(&acknowledgements);
                        // Who has asked may have gone.
                        let _ = answer.send(latencies.clone());
                    }
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("loadgen-samples".to_owned()).spawn(record) {
            tracing::error!(%error, "no thread for the recorder: there will be no latencies");
        }
        Self(sender)
    }

    /// Messages were accepted by the transport just now.
    pub fn accepted(&self, samples: Vec<Sample>, at_us: u64) {
        self.tell(Note::Accepted { samples, at_us });
    }

    /// Forgets what was recorded so far (of the warm-up).
    pub fn reset(&self) {
        self.tell(Note::Reset);
    }

    /// What was recorded of everything that was sent so far.
    #[must_use]
    pub fn so_far(&self) -> Latencies {
        let (answer, answered) = flume::bounded(1);
        self.tell(Note::Ask(answer));
        answered.recv().unwrap_or_default()
    }

    fn tell(&self, note: Note) {
        if self.0.send(note).is_err() {
            tracing::error!("the recorder of latencies has ended");
        }
    }
}

impl Latencies {
    fn record(&mut self, (mark, count): Sample, at_us: u64, acknowledgements: &Acknowledgements) {
        // Call 0 is nobody's: messages that were in the database before the run.
        if count == 0 || mark.call == 0 || mark.call >> 48 != 0 {
            return;
        }
        self.end_to_end.record_us(at_us.saturating_sub(mark.intended_us), count);
        match acknowledgements.of(mark.call) {
            None => self.early.push((mark.call, at_us, count)),
            Some(acknowledged_us) => self.publish.record_us(at_us.saturating_sub(acknowledged_us), count),
        }
    }

    /// The caller sees its acknowledgement a moment after the commit, sometimes after the transport has the
    /// message already: that took no time at all.
    fn resolve_early(&mut self, acknowledgements: &Acknowledgements) {
        let publish = &mut self.publish;
        self.early.retain(|(call, accepted_us, count)| match acknowledgements.of(*call) {
            None => true,
            Some(acknowledged_us) => {
                publish.record_us(accepted_us.saturating_sub(acknowledged_us), *count);
                false
            }
        });
    }
}
