//! A transport that refuses, delays, throttles, forgets to answer, and goes on when its caller is dead.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;

use corelane::batch::DestinationId;
use corelane::error::FailureReason;
use corelane::runtime::sim::SimRuntime;
use corelane::seam::publisher::{PublishRun, Publisher};
use corelane::seam::runtime::Runtime;
use corelane::seam::transport::{OutgoingBatch, PublishOutcome, TransportLimits};
use corelane::time::Tick;
use futures_channel::oneshot;
use futures_util::future::{Either, select};

use crate::sink::{Copy, Sink};

/// How the transport behaves; chances in a thousand.
#[derive(Clone, Copy, Debug, Default)]
pub struct Manners {
    pub failed: u64,
    pub permanent: u64,
    pub unknown: u64,
    pub short: u64,
    pub slow: u64,
    /// What every message may take at the most; 0: next to nothing.
    pub pace_us: u64,
}

/// The broker, shared by all processes.
#[derive(Clone)]
pub struct Broker {
    pub runtime: SimRuntime,
    pub sink: Sink,
    pub manners: Rc<Cell<Manners>>,
    /// Destinations that are away until this moment, and whether they say "slow down" instead.
    pub away: Rc<std::cell::RefCell<BTreeMap<DestinationId, (Tick, bool)>>>,
}

/// One shard's end of it.
pub struct SimPublisher {
    broker: Broker,
    limits: TransportLimits,
    incarnation: Rc<Cell<i32>>,
}

impl SimPublisher {
    pub fn new(broker: &Broker, limits: TransportLimits, incarnation: Rc<Cell<i32>>) -> Self {
        Self { broker: broker.clone(), limits, incarnation }
    }
}

enum Deed {
    Accept,
    AcceptAndForget,
    Fail,
    FailForGood,
    Forget,
    NotReady,
    Throttle,
}

impl Broker {
    fn deed(&self, destination: DestinationId) -> Deed {
        if let Some((until, throttles)) = self.away.borrow().get(&destination)
            && *until > self.runtime.now()
        {
            return if *throttles { Deed::Throttle } else { Deed::NotReady };
        }
        let manners = self.manners.get();
        let draw = self.runtime.below(1000);
        let mut bound = manners.failed;
        if draw < bound {
            return Deed::Fail;
        }
        bound += manners.permanent;
        if draw < bound {
            return Deed::FailForGood;
        }
        bound += manners.unknown;
        match draw < bound {
            true if self.runtime.per_mille(500) => Deed::AcceptAndForget,
            true => Deed::Forget,
            false => Deed::Accept,
        }
    }

    /// Takes the messages one after the other, at moments of its own.
    async fn take(
        self,
        copies: Vec<Copy>,
        ordered: bool,
        deadline: Tick,
        answer: oneshot::Sender<Vec<PublishOutcome>>,
    ) {
        let manners = self.manners.get();
        let slow = self.runtime.per_mille(manners.slow);
        let us_max = if slow { 900_000 / copies.len() as u64 } else { manners.pace_us.max(1_500) };
        let mut outcomes = Vec::with_capacity(copies.len());
        let count = match self.runtime.per_mille(manners.short) {
            true => self.runtime.below(copies.len() as u64) as usize,
            false => copies.len(),
        };
        // A batch that is taken whole or not at all meets one fate.
        let whole = ordered.then(|| self.deed(copies[0].lane.1));
        for (index, copy) in copies.iter().enumerate() {
            self.runtime.dawdle(us_max).await;
            let drawn = self.deed(copy.lane.1);
            let deed = whole.as_ref().unwrap_or(&drawn);
            let unheard = index >= count || self.runtime.now() >= deadline;
            outcomes.push(match deed {
                Deed::Accept => {
                    self.sink.accept(copy, unheard);
                    PublishOutcome::Accepted
                }
                Deed::AcceptAndForget => {
                    self.sink.accept(copy, true);
                    PublishOutcome::Unknown { text: "lost on the way back".into() }
                }
                Deed::Fail => PublishOutcome::Failed { reason: FailureReason::TransportException, text: "no".into() },
                Deed::FailForGood => {
                    PublishOutcome::Permanent { reason: FailureReason::MessageBodyTooLarge, text: "never".into() }
                }
                Deed::Forget => PublishOutcome::Unknown { text: "lost on the way".into() },
                Deed::NotReady => PublishOutcome::NotReady,
                Deed::Throttle => PublishOutcome::Throttled { retry_after_ms: 30 },
            });
        }
        outcomes.truncate(count);
        self.runtime.dawdle(300).await;
        let _ = answer.send(outcomes);
    }
}

impl Publisher for SimPublisher {
    fn limits(&self) -> &TransportLimits {
        &self.limits
    }

    fn publish(&self, mut run: Box<PublishRun>) -> impl Future<Output = Box<PublishRun>> + 'static {
        let started = self.broker.runtime.now();
        let copies: Vec<Copy> = (0..run.len())
            .map(|index| {
                let message = run.get(index);
                let item = &run.items[index];
                let row = item.rows.reference_row[item.reference as usize] as usize;
                assert_eq!(item.rows.reference_destination[item.reference as usize], run.destination);
                Copy {
                    lane: (item.rows.lane_id[row], run.destination),
                    stream_seq: message.stream_seq,
                    version: message.version,
                    message_id: message.message_id,
                    partition: item.rows.partition[row],
                    fence: item.fence,
                    started,
                }
            })
            .collect();
        self.broker.sink.run_starts(self.incarnation.get(), &copies);
        let (answer, hears) = oneshot::channel();
        let deadline = started.plus_ms(self.limits.timeout_ms);
        let (broker, ordered) = (self.broker.clone(), self.limits.ordered_atomic_batches);
        let clock = broker.runtime.clone();
        let sent = copies.clone();
        self.broker.runtime.spawn(broker.take(copies, ordered, deadline, answer));
        let sink = self.broker.sink.clone();
        async move {
            match select(hears, Box::pin(clock.sleep_until(deadline))).await {
                Either::Left((outcomes, _)) => run.outcomes = outcomes.unwrap_or_default(),
                Either::Right(_) => {
                    // Whatever was accepted, its sender does not know.
                    sent.iter().for_each(|copy| sink.not_told(copy));
                    run.outcomes.clear();
                }
            }
            sink.run_ends(&sent);
            run
        }
    }
}
