//! A transport inside the process: for tests, examples and loadgen. Faults and delay on demand.
//!
//! Invariants
//! - What it answers `Accepted` for has been given to the sink, in the batch's order, before the answer.
//! - A fault is decided message by message; the others of its batch are unharmed (unless the batch is declared
//!   atomic: then the first fault that is not acceptance decides for all).

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use crate::error::FailureReason;
use crate::seam::transport::{OutgoingBatch, OutgoingMessage, PublishOutcome, Transport, TransportLimits};

/// What happens to a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is accepted.
    None,
    /// It is refused, with these words.
    Refuse(String),
    /// It is refused for good.
    RefuseForGood(String),
    /// The transport is not ready.
    NotReady,
    /// The transport asks to wait so many milliseconds.
    Throttle(u64),
    /// Nobody knows what became of it.
    Unknown {
        /// Whether the sink got it all the same.
        delivered: bool,
    },
    /// The whole call panics.
    Panic,
    /// The whole call never ends.
    Hang,
}

type Sink = Box<dyn Fn(&str, &OutgoingMessage<'_>) + Send + Sync>;
type Faults = Box<dyn Fn(&str, &OutgoingMessage<'_>) -> Fault + Send + Sync>;
type Delay = Box<dyn Fn() -> Duration + Send + Sync>;

/// See the module.
pub struct MemoryTransport {
    limits: TransportLimits,
    sink: Sink,
    faults: Option<Faults>,
    delay: Option<Delay>,
}

impl MemoryTransport {
    /// Gives every accepted message to `sink` with its destination's name. The sink must not block.
    #[must_use]
    pub fn new(sink: impl Fn(&str, &OutgoingMessage<'_>) + Send + Sync + 'static) -> Self {
        Self { limits: TransportLimits::default(), sink: Box::new(sink), faults: None, delay: None }
    }

    /// Declares other limits.
    #[must_use]
    pub fn with_limits(mut self, limits: TransportLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Decides what happens to each message.
    #[must_use]
    pub fn with_faults(mut self, faults: impl Fn(&str, &OutgoingMessage<'_>) -> Fault + Send + Sync + 'static) -> Self {
        self.faults = Some(Box::new(faults));
        self
    }

    /// How long each call takes before it answers.
    #[must_use]
    pub fn with_delay(mut self, delay: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        self.delay = Some(Box::new(delay));
        self
    }

    fn outcome(&self, destination: &str, message: &OutgoingMessage<'_>, fault: Fault) -> PublishOutcome {
        match fault {
            Fault::None => {
                (self.sink)(destination, message);
                PublishOutcome::Accepted
            }
            Fault::Refuse(text) => PublishOutcome::Failed { reason: FailureReason::TransportException, text },
            Fault::RefuseForGood(text) => PublishOutcome::Permanent { reason: FailureReason::ValidationError, text },
            Fault::NotReady => PublishOutcome::NotReady,
            Fault::Throttle(retry_after_ms) => PublishOutcome::Throttled { retry_after_ms },
            Fault::Unknown { delivered } => {
                if delivered {
                    (self.sink)(destination, message);
                }
                PublishOutcome::Unknown { text: "no answer".to_owned() }
            }
            Fault::Panic | Fault::Hang => PublishOutcome::Unknown { text: "unreachable".to_owned() },
        }
    }
}

impl Transport for MemoryTransport {
    fn limits(&self) -> TransportLimits {
        self.limits.clone()
    }

    fn publish<'a>(
        &'a self,
        batch: &'a dyn OutgoingBatch,
        outcomes: &'a mut Vec<PublishOutcome>,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(async move {
            if let Some(delay) = &self.delay {
                tokio::time::sleep(delay()).await;
            }
            let destination = batch.destination();
            let Some(faults) = &self.faults else {
                for index in 0..batch.len() {
                    (self.sink)(destination, &batch.get(index));
                    outcomes.push(PublishOutcome::Accepted);
                }
                return;
            };
            let decided: Vec<Fault> = (0..batch.len()).map(|index| faults(destination, &batch.get(index))).collect();
            assert!(!decided.contains(&Fault::Panic), "a fault that was asked for");
            if decided.contains(&Fault::Hang) {
                std::future::pending::<()>().await;
            }
            let whole = self.limits.ordered_atomic_batches.then(|| decided.iter().find(|fault| **fault != Fault::None));
            for (index, fault) in decided.iter().enumerate() {
                let fault = whole.flatten().unwrap_or(fault).clone();
                outcomes.push(self.outcome(destination, &batch.get(index), fault));
            }
        })
    }

    fn name(&self) -> &str {
        "memory"
    }
}
