//! `subscribe`: events are appended at a pace, and a subscription sees them.
//!
//! Invariants
//! - The latency counts from the moment the append was meant to start to the moment the subscriber's program has the event.
//! - At the end the subscriber has had every event once, and each stream in order.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use corelane::engine::Engine;
use corelane::store::install::migrate;
use corelane::store::schema_name::SchemaName;
use uuid::Uuid;

use super::{Append, describe};
use crate::checks::Findings;
use crate::drive::{Caller, measured};
use crate::engine_side::config;
use crate::failure::{Failure, Result};
use crate::figures::Figures;
use crate::latency::Recorder;
use crate::measure::{Meter, charge_counts};
use crate::progress::Tally;
use crate::running;
use crate::scenario::Scenario;
use crate::shape::{OwnStreams, Payload, StreamFamily};
use crate::target::Target;

/// Longest time the subscriber may take to see that the engine has ended.
const WATCHED: Duration = Duration::from_secs(20);

/// Measures a subscription under a scenario, in a schema of its own.
///
/// # Errors
/// Of the server or the engine. Broken promises are figures, no errors.
pub async fn measure(target: &Target, scenario: &Scenario) -> Result<Figures> {
    target.in_fresh_schema(async |schema| in_schema(target, scenario, schema).await).await
}

/// What the subscriber has seen.
#[derive(Default)]
struct Seen {
    latency: Mutex<Recorder>,
    events: AtomicU64,
    again: AtomicU64,
    passed_over: AtomicU64,
    /// At its looks, at most.
    lag_events: AtomicU64,
    lag_age_ms: AtomicU64,
}

async fn in_schema(target: &Target, scenario: &Scenario, schema: &str) -> Result<Figures> {
    let meter = Meter::new(target).await?;
    let config = config(scenario, target.url(), schema)?;
    let mut client = target.connect().await?;
    migrate(&mut client, &SchemaName::new(schema)?, config.partitions.count).await?;
    meter.settle_server().await?;
    let counts = meter.counts(schema).await?;
    let builder = Engine::builder(config).transport(corelane::MemoryTransport::new(|_, _| {}));
    let engine = running::start_one(builder).await?;
    let (tally, began, family) = (Arc::new(Tally::default()), Instant::now(), StreamFamily::random());
    let seen = Arc::new(Seen::default());
    let mut subscription = engine.subscribe("loadgen").from_beginning().start().await?;
    let watching = {
        let (seen, tally) = (seen.clone(), tally.clone());
        let mut versions = vec![0_i64; scenario.streams as usize];
        let metrics = subscription.metrics().clone();
        tokio::spawn(async move {
            while let Some(batch) = subscription.next().await? {
                let now_us = began.elapsed().as_micros() as u64;
                let mut first = 0;
                for event in batch.events() {
                    let Some(stream) = family.index_of(event.stream_id) else { continue };
                    let last = &mut versions[stream as usize];
                    if event.version <= *last {
                        seen.again.fetch_add(1, Ordering::Relaxed);
                        continue;
                    }
                    seen.passed_over.fetch_add((event.version - *last - 1) as u64, Ordering::Relaxed);
                    *last = event.version;
                    first += 1;
                    let meant_us = event.correlation_id.as_u128() as u64;
                    let mut latency = seen.latency.lock().unwrap_or_else(PoisonError::into_inner);
                    latency.record_us(now_us.saturating_sub(meant_us), 1);
                }
                seen.events.fetch_add(first, Ordering::Relaxed);
                tally.published.fetch_add(first, Ordering::Relaxed);
                seen.lag_events.fetch_max(metrics.lag_events_now.get(), Ordering::Relaxed);
                seen.lag_age_ms.fetch_max(metrics.lag_age_ms_now.get(), Ordering::Relaxed);
                batch.done();
            }
            Ok::<(), corelane::Error>(())
        })
    };
    let callers = (0..scenario.callers).map(|index| AppendCaller {
        engine: engine.clone(),
        streams: OwnStreams::new(scenario, index, family),
        payload: Payload::new(scenario.payload_bytes),
        batch: scenario.batch,
        began,
    });
    let reset = async || {
        seen.lag_events.store(0, Ordering::Relaxed);
        seen.lag_age_ms.store(0, Ordering::Relaxed);
        *seen.latency.lock().unwrap_or_else(PoisonError::into_inner) = Recorder::default();
        Ok(())
    };
    let outcome = measured(callers.collect(), scenario, &meter, &tally, "subscribe", reset).await;
    running::end(std::slice::from_ref(&engine)).await;
    let watched = tokio::time::timeout(WATCHED, watching).await;
    let mut figures = outcome?;
    match watched {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => return Err(error.into()),
        Ok(Err(panic)) => return Err(Failure::Broken(format!("the subscriber ended in a panic: {panic}"))),
        Err(_) => return Err(Failure::TimedOut(format!("the subscription did not end within {WATCHED:?}"))),
    }
    charge_counts(&mut figures, &counts, &meter.final_counts(schema, "corelane").await?, tally.stored());
    figures.judge(Findings {
        lost: tally.stored().saturating_sub(seen.events.load(Ordering::Relaxed)),
        copies: seen.again.load(Ordering::Relaxed),
        ..Findings::default()
    });
    figures.lag_events = Some(seen.lag_events.load(Ordering::Relaxed));
    figures.lag_age_ms = Some(seen.lag_age_ms.load(Ordering::Relaxed));
    figures.skips = Some(seen.passed_over.load(Ordering::Relaxed));
    figures.latency_ms.end_to_end = seen.latency.lock().unwrap_or_else(PoisonError::into_inner).percentiles();
    describe(&mut figures, scenario, &engine, 1);
    Ok(figures)
}

struct AppendCaller {
    engine: Engine,
    streams: OwnStreams,
    payload: Payload,
    batch: usize,
    began: Instant,
}

impl Caller for AppendCaller {
    async fn call(&mut self, intended: Instant) -> Result<u64> {
        let meant_us = intended.saturating_duration_since(self.began).as_micros() as u64;
        let correlation_id = Uuid::from_u128(u128::from(meant_us) | 1 << 100);
        let appends: Vec<Append> = (0..self.batch)
            .map(|_| {
                self.payload.count();
                let (stream_id, _) = self.streams.draw();
                Append { stream_id, expected: None, correlation_id, payload: self.payload.view() }
            })
            .collect();
        let mut stored = 0;
        for outcome in self.engine.enqueue_many(appends).await {
            match outcome {
                Ok(_) => stored += 1,
                Err(corelane::Error::Overloaded { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(stored)
    }
}
