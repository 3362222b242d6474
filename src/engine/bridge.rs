//! The tokio side: where transports run.
//!
//! Invariants
//! - A run comes back within its time limit, with an outcome for what has one; a panic or a time-out of the
//!   transport is an outcome, never an end of the bridge.
//! - A message larger than the transport takes is refused for good without being sent; its neighbours go out.
//! - What was not handed to the transport for lack of time comes back as not ready: it costs no attempt.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_channel::oneshot;
use futures_util::FutureExt;

use crate::error::FailureReason;
use crate::seam::publisher::{PublishRun, Publisher};
use crate::seam::transport::{OutgoingBatch, OutgoingMessage, PublishOutcome, Transport, TransportLimits};

/// Bytes a message costs beside its payload, metadata and names: ids, numbers, trace context as headers.
const HEADER_BYTES: usize = 512;

struct Job {
    run: Box<PublishRun>,
    /// When the shard handed it over: its time counts from then, as the shard's look at the lease does.
    handed_over: Instant,
    back: oneshot::Sender<Box<PublishRun>>,
}

/// A shard's end of the bridge.
#[derive(Clone)]
pub(super) struct BridgePublisher {
    jobs: flume::Sender<Job>,
    limits: Arc<TransportLimits>,
}

/// The bridge: its runtime and its workers.
pub(super) struct Bridge {
    runtime: Option<tokio::runtime::Runtime>,
    publisher: BridgePublisher,
}

impl Bridge {
    /// Starts `workers` workers on a runtime of `threads` threads.
    pub(super) fn start(
        transport: Arc<dyn Transport>,
        threads: usize,
        workers: usize,
        timeout: Duration,
    ) -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name("corelane-bridge")
            .enable_all()
            .build()?;
        let limits = Arc::new(transport.limits());
        // A shard has at most `in_flight_max` runs out and there is a worker for each: the channel never grows.
        let (sender, jobs) = flume::bounded::<Job>(workers);
        for _ in 0..workers {
            let (jobs, transport, limits) = (jobs.clone(), transport.clone(), limits.clone());
            runtime.spawn(async move {
                while let Ok(mut job) = jobs.recv_async().await {
                    let left = timeout.saturating_sub(job.handed_over.elapsed());
                    publish(&*transport, &limits, &mut job.run, left).await;
                    // A shard that has ended does not mind.
                    let _ = job.back.send(job.run);
                }
            });
        }
        Ok(Self { runtime: Some(runtime), publisher: BridgePublisher { jobs: sender, limits } })
    }

    pub(super) fn publisher(&self) -> BridgePublisher {
        self.publisher.clone()
    }

    /// For the strategies' timers and answers. What is spawned when the bridge has gone is dropped at once.
    pub(super) fn tasks(&self) -> tokio::runtime::Handle {
        match &self.runtime {
            Some(runtime) => runtime.handle().clone(),
            None => unreachable!("taken by drop alone"),
        }
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Not blocking: what a transport still does has no listener any more.
            runtime.shutdown_background();
        }
    }
}

impl Publisher for BridgePublisher {
    fn limits(&self) -> &TransportLimits {
        &self.limits
    }

    fn publish(&self, run: Box<PublishRun>) -> impl Future<Output = Box<PublishRun>> + 'static {
        let (back, answer) = oneshot::channel();
        let destination = run.destination;
        let sent = self.jobs.try_send(Job { run, handed_over: Instant::now(), back });
        async move {
            match sent {
                // Gone under way: nobody can say what became of the run.
                Ok(()) => answer
                    .await
                    .unwrap_or_else(|_| Box::new(PublishRun { destination, items: Vec::new(), outcomes: Vec::new() })),
                Err(flume::TrySendError::Full(job) | flume::TrySendError::Disconnected(job)) => {
                    let mut run = job.run;
                    run.outcomes.clear();
                    run.outcomes.resize(run.items.len(), PublishOutcome::NotReady);
                    run
                }
            }
        }
    }
}

/// A part of a run.
struct Part<'a> {
    run: &'a PublishRun,
    indexes: &'a [usize],
}

impl OutgoingBatch for Part<'_> {
    fn destination(&self) -> &str {
        self.run.destination()
    }

    fn len(&self) -> usize {
        self.indexes.len()
    }

    fn get(&self, index: usize) -> OutgoingMessage<'_> {
        self.run.get(self.indexes[index])
    }
}

fn size_of(message: &OutgoingMessage<'_>) -> usize {
    message.payload.len() + message.metadata.len() + message.type_name.len() + message.content_type.len() + HEADER_BYTES
}

/// Sends a run, in as many batches as the transport's limits ask for, and fills in its outcomes.
async fn publish(transport: &dyn Transport, limits: &TransportLimits, run: &mut PublishRun, timeout: Duration) {
    let count = run.items.len();
    let bytes: usize = (0..count).map(|index| size_of(&run.get(index))).sum();
    let fits = count <= limits.batch_rows_max && bytes <= limits.batch_bytes_max.min(limits.message_bytes_max);
    let mut outcomes = std::mem::take(&mut run.outcomes);
    outcomes.clear();
    if timeout.is_zero() {
        outcomes.resize(count, PublishOutcome::NotReady);
        run.outcomes = outcomes;
        return;
    }
    if fits {
        guarded(transport, run, &mut outcomes, timeout).await;
        outcomes.truncate(count);
        run.outcomes = outcomes;
        return;
    }
    let deadline = tokio::time::Instant::now() + timeout;
    let mut decided: Vec<Option<PublishOutcome>> = vec![None; count];
    let mut stopped = false;
    let mut next = 0;
    while next < count {
        let mut part = Vec::new();
        let mut part_bytes = 0;
        while next < count && part.len() < limits.batch_rows_max {
            let size = size_of(&run.get(next));
            if size > limits.message_bytes_max {
                decided[next] = Some(PublishOutcome::Permanent {
                    reason: FailureReason::MessageBodyTooLarge,
                    text: format!(
                        "the message has {size} bytes with its headers, the transport takes {}",
                        limits.message_bytes_max
                    ),
                });
                next += 1;
                // Behind it, in an atomic run, nothing of its lane may go out.
                stopped |= limits.ordered_atomic_batches;
                if stopped {
                    break;
                }
                continue;
            }
            if !part.is_empty() && part_bytes + size > limits.batch_bytes_max {
                break;
            }
            part_bytes += size;
            part.push(next);
            next += 1;
        }
        let left = deadline.saturating_duration_since(tokio::time::Instant::now());
        if left.is_zero() {
            decided[part.first().copied().unwrap_or(next)..]
                .iter_mut()
                .filter(|outcome| outcome.is_none())
                .for_each(|outcome| *outcome = Some(PublishOutcome::NotReady));
            break;
        }
        if !part.is_empty() {
            outcomes.clear();
            guarded(transport, &Part { run, indexes: &part }, &mut outcomes, left).await;
            for (index, at) in part.iter().enumerate() {
                decided[*at] = outcomes.get(index).cloned();
                stopped |= limits.ordered_atomic_batches && decided[*at] != Some(PublishOutcome::Accepted);
            }
        }
        if stopped {
            decided[next..].fill(Some(PublishOutcome::NotReady));
            break;
        }
    }
    outcomes.clear();
    outcomes.extend(decided.into_iter().map(|outcome| {
        outcome.unwrap_or_else(|| PublishOutcome::Unknown {
            text: "the transport gave no outcome for this message".into(),
        })
    }));
    run.outcomes = outcomes;
}

/// One call of the transport. A panic or a time-out leaves the outcomes that were there and `Unknown` after them.
async fn guarded(
    transport: &dyn Transport,
    batch: &dyn OutgoingBatch,
    outcomes: &mut Vec<PublishOutcome>,
    timeout: Duration,
) {
    // Everything of the transport's is inside: the call itself, its future, and that future's end on a time-out.
    let call = async { tokio::time::timeout(timeout, transport.publish(batch, outcomes)).await };
    let text = match AssertUnwindSafe(call).catch_unwind().await {
        Ok(Ok(())) => return,
        Ok(Err(_)) => format!("no answer of the transport within {} ms", timeout.as_millis()),
        Err(panic) => format!("the transport panicked: {}", panic_text(panic.as_ref())),
    };
    tracing::warn!(transport = transport.name(), destination = batch.destination(), rows = batch.len(), %text, "publish");
    while outcomes.len() < batch.len() {
        outcomes.push(PublishOutcome::Unknown { text: text.clone() });
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("(no text)")
}

#[cfg(test)]
mod tests;
