//! `inbox`: deliveries that arrive, are remembered, handled by a handler that does nothing, and settled.
//!
//! Invariants
//! - The broker is a part of this process that costs next to nothing: it makes deliveries when it is asked for them, as
//!   many as are allowed to be in hand, and counts what is settled as complete.
//! - An arrival counts when it is settled: that is after the commit. At the end each id that was settled is remembered,
//!   and its handler ran once.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use corelane::engine::Engine;
use corelane::inbox::Handling;
use corelane::seam::receiver::{OnDisconnected, Receipt, ReceiveError, Receiver, Receiving, SettleOutcome, Settlement};
use corelane::store::install::migrate;
use corelane::store::schema_name::SchemaName;
use corelane::{Delivery, Handler, HandlerContext};
use tokio::sync::Notify;
use uuid::Uuid;

use super::describe;
use crate::baselines::TYPE_NAME;
use crate::checks::Findings;
use crate::drive::{Caller, measured};
use crate::engine_side::config;
use crate::failure::{Failure, Result};
use crate::figures::Figures;
use crate::latency::Recorder;
use crate::measure::{Meter, charge_counts};
use crate::progress::Tally;
use crate::running;
use crate::scenario::{Rate, Scenario};
use crate::shape::{Payload, StreamChoice, StreamFamily};
use crate::target::{Target, quoted};

/// Longest time the consumer may take to end.
const STOP: Duration = Duration::from_secs(20);
/// Ids that are settled and may come again.
const COPIES_OF: usize = 10_000;

/// Measures a consumer under a scenario, in a schema of its own.
///
/// # Errors
/// Of the server or the engine. Broken promises are figures, no errors.
pub async fn measure(target: &Target, scenario: &Scenario) -> Result<Figures> {
    if scenario.rate != Rate::Top {
        return Err(Failure::Usage("--rate belongs to the scenarios outbox, events and subscribe".into()));
    }
    target.in_fresh_schema(async |schema| in_schema(target, scenario, schema).await).await
}

async fn in_schema(target: &Target, scenario: &Scenario, schema: &str) -> Result<Figures> {
    let meter = Meter::new(target).await?;
    let config = config(scenario, target.url(), schema)?;
    let workers = config.inbox.workers;
    let mut client = target.connect().await?;
    migrate(&mut client, &SchemaName::new(schema)?, config.partitions.count).await?;
    meter.settle_server().await?;
    let counts = meter.counts(schema).await?;
    let tally = Arc::new(Tally::default());
    let arrivals = Arc::new(Arrivals::new(scenario, tally.clone()));
    let handled = Arc::new(AtomicU64::new(0));
    let engine = Engine::builder(config).transport(corelane::MemoryTransport::new(|_, _| {})).start().await?;
    let consumer =
        engine.consumer("loadgen").receiver(arrivals.clone()).other_types(Nothing(handled.clone())).start().await?;
    let caller = Settled { arrivals: arrivals.clone(), batch: scenario.batch as u64 };
    let reset = async || {
        arrivals.locked().latency = Recorder::default();
        Ok(())
    };
    let outcome = measured(vec![caller], scenario, &meter, &tally, "inbox", reset).await;
    arrivals.ended.store(true, Ordering::Relaxed);
    let report = consumer.stop(STOP).await;
    running::end(std::slice::from_ref(&engine)).await;
    let mut figures = outcome?;
    let settled = arrivals.settled.load(Ordering::Relaxed);
    charge_counts(&mut figures, &counts, &meter.final_counts(schema, "corelane").await?, settled);
    let remembered = format!("select count(*) from {}.wh_inbox_seen", quoted(schema));
    let remembered = client.query_one(&remembered, &[]).await?.get::<_, i64>(0) as u64;
    let unique = arrivals.unique_settled.load(Ordering::Relaxed);
    figures.judge(Findings { lost: unique.saturating_sub(remembered), ..Findings::default() });
    figures.double_effects = Some(handled.load(Ordering::Relaxed).saturating_sub(remembered + report.left as u64));
    figures.duplicates = Some(settled - unique);
    figures.latency_ms.store = None;
    figures.latency_ms.end_to_end = arrivals.locked().latency.percentiles();
    describe(&mut figures, scenario, &engine, workers);
    Ok(figures)
}

/// A handler without an effect.
struct Nothing(Arc<AtomicU64>);

impl Handler for Nothing {
    fn handle<'a>(&'a self, _: &'a Delivery, _: &'a mut HandlerContext<'_>) -> Handling<'a> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Box::pin(std::future::ready(Ok(())))
    }
}

struct InHand {
    message_id: Uuid,
    stream_id: Uuid,
    given: Instant,
    is_copy: bool,
}

struct Book {
    streams: StreamChoice,
    payload: Payload,
    in_hand: HashMap<u64, InHand>,
    /// Ids that have been settled, with their streams.
    settled: VecDeque<(Uuid, Uuid)>,
    next: u64,
    latency: Recorder,
}

/// The broker.
struct Arrivals {
    family: StreamFamily,
    book: Mutex<Book>,
    in_hand_max: usize,
    duplicates_percent: u64,
    settled: AtomicU64,
    unique_settled: AtomicU64,
    moved: Notify,
    ended: AtomicBool,
    tally: Arc<Tally>,
}

impl Arrivals {
    fn new(scenario: &Scenario, tally: Arc<Tally>) -> Self {
        let one = Scenario { callers: 1, ..scenario.clone() };
        let book = Book {
            streams: StreamChoice::new(&one, 0, 7),
            payload: Payload::new(scenario.payload_bytes),
            in_hand: HashMap::new(),
            settled: VecDeque::new(),
            next: 0,
            latency: Recorder::default(),
        };
        Self {
            family: StreamFamily::random(),
            book: Mutex::new(book),
            in_hand_max: scenario.callers * scenario.batch,
            duplicates_percent: scenario.duplicates_percent.into(),
            settled: AtomicU64::new(0),
            unique_settled: AtomicU64::new(0),
            moved: Notify::new(),
            ended: AtomicBool::new(false),
            tally,
        }
    }

    fn locked(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make(&self, rows_max: usize) -> Vec<Delivery> {
        let mut book = self.locked();
        let book = &mut *book;
        let count = rows_max.min(self.in_hand_max.saturating_sub(book.in_hand.len()));
        let given = Instant::now();
        (0..count)
            .map(|_| {
                let receipt = book.next;
                book.next += 1;
                let copy = (receipt % 100 < self.duplicates_percent).then(|| book.settled.pop_front()).flatten();
                let (message_id, stream_id) =
                    copy.unwrap_or_else(|| (Uuid::now_v7(), self.family.stream(book.streams.draw())));
                book.in_hand.insert(receipt, InHand { message_id, stream_id, given, is_copy: copy.is_some() });
                Delivery {
                    message_id,
                    stream_id: Some(stream_id),
                    type_name: TYPE_NAME.to_owned(),
                    payload: book.payload.draw().to_vec(),
                    delivery_count: 1,
                    receipt: Receipt(receipt),
                    ..Delivery::default()
                }
            })
            .collect()
    }

    fn settle_all(&self, settlements: &[(Receipt, Settlement)]) -> Vec<SettleOutcome> {
        let mut book = self.locked();
        let mut completed = 0;
        let outcomes = settlements
            .iter()
            .map(|(receipt, settlement)| {
                let Some(of) = book.in_hand.remove(&receipt.0) else { return SettleOutcome::LockLost };
                if *settlement == Settlement::Complete {
                    completed += 1;
                    book.latency.record_us(of.given.elapsed().as_micros() as u64, 1);
                    if !of.is_copy {
                        self.unique_settled.fetch_add(1, Ordering::Relaxed);
                        if book.settled.len() < COPIES_OF {
                            book.settled.push_back((of.message_id, of.stream_id));
                        }
                    }
                }
                SettleOutcome::Settled
            })
            .collect();
        drop(book);
        self.settled.fetch_add(completed, Ordering::Relaxed);
        self.tally.published.fetch_add(completed, Ordering::Relaxed);
        self.moved.notify_waiters();
        outcomes
    }
}

impl Receiver for Arrivals {
    fn receive(&self, rows_max: usize) -> Receiving<'_, std::result::Result<Vec<Delivery>, ReceiveError>> {
        Box::pin(async move {
            loop {
                let moved = self.moved.notified();
                if !self.ended.load(Ordering::Relaxed) {
                    let made = self.make(rows_max);
                    if !made.is_empty() {
                        return Ok(made);
                    }
                }
                moved.await;
            }
        })
    }

    fn settle<'a>(&'a self, settlements: &'a [(Receipt, Settlement)]) -> Receiving<'a, Vec<SettleOutcome>> {
        Box::pin(std::future::ready(self.settle_all(settlements)))
    }

    fn renew<'a>(&'a self, _: &'a [Receipt]) -> Receiving<'a, ()> {
        Box::pin(std::future::ready(()))
    }

    fn lock_ms(&self) -> u64 {
        600_000
    }

    fn pause(&self) {}

    fn resume(&self) {}

    fn on_disconnected(&self, _: OnDisconnected) {}

    fn name(&self) -> &str {
        "arrivals"
    }
}

/// Counts what is settled, by batches.
struct Settled {
    arrivals: Arc<Arrivals>,
    batch: u64,
}

impl Caller for Settled {
    async fn call(&mut self, _intended: Instant) -> Result<u64> {
        loop {
            let moved = self.arrivals.moved.notified();
            let open = self.arrivals.tally.published().saturating_sub(self.arrivals.tally.stored());
            if open >= self.batch {
                return Ok(self.batch);
            }
            if tokio::time::timeout(Duration::from_secs(15), moved).await.is_err() {
                return Err(Failure::TimedOut("nothing was settled for 15 s".into()));
            }
        }
    }
}
