//! `events`: appends with expected versions, acknowledged when they are committed, and then read back.
//!
//! Invariants
//! - Each event of a call is a unit of work of its own, has the stream to itself there, and expects its version; a share
//!   of them expects the version before, as if somebody else had been faster, and is appended again.
//! - A call counts when all its events are stored. At the end the versions of all streams are 1 to n, as acknowledged.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

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
use crate::measure::{Meter, charge_counts};
use crate::progress::Tally;
use crate::running;
use crate::scenario::Scenario;
use crate::shape::{OwnStreams, Payload, StreamFamily};
use crate::target::{Target, quoted};

/// Measures the engine's appends under a scenario, in a schema of its own.
///
/// # Errors
/// Of the server or the engine. Broken promises are figures, no errors.
pub async fn measure(target: &Target, scenario: &Scenario) -> Result<Figures> {
    target.in_fresh_schema(async |schema| in_schema(target, scenario, schema).await).await
}

async fn in_schema(target: &Target, scenario: &Scenario, schema: &str) -> Result<Figures> {
    let meter = Meter::new(target).await?;
    let config = config(scenario, target.url(), schema)?;
    let mut client = target.connect().await?;
    migrate(&mut client, &SchemaName::new(schema)?, config.partitions.count).await?;
    meter.settle_server().await?;
    let counts = meter.counts(schema).await?;
    // It owns the partitions, so that it knows their numbers; nothing is published.
    let builder = Engine::builder(config).transport(corelane::MemoryTransport::new(|_, _| {}));
    let engine = running::start_one(builder).await?;
    let (tally, conflicts) = (Arc::new(Tally::default()), Arc::new(AtomicU64::new(0)));
    let family = StreamFamily::random();
    let callers = (0..scenario.callers).map(|index| EventCaller {
        engine: engine.clone(),
        streams: OwnStreams::new(scenario, index, family),
        payload: Payload::new(scenario.payload_bytes),
        batch: scenario.batch,
        conflicts_percent: scenario.conflicts_percent,
        conflicts: conflicts.clone(),
        tally: tally.clone(),
    });
    let outcome = measured(callers.collect(), scenario, &meter, &tally, "events", async || Ok(())).await;
    running::end(std::slice::from_ref(&engine)).await;
    let mut figures = outcome?;
    charge_counts(&mut figures, &counts, &meter.final_counts(schema, "corelane").await?, tally.stored());
    let (events, gaps) = versions(&client, schema).await?;
    figures.judge(Findings { lost: tally.stored().saturating_sub(events), ..Findings::default() });
    figures.gaps = Some(gaps);
    figures.conflicts = Some(conflicts.load(Ordering::Relaxed));
    describe(&mut figures, scenario, &engine, 0);
    Ok(figures)
}

/// Events that are stored, and streams whose versions are not 1 to n.
async fn versions(client: &tokio_postgres::Client, schema: &str) -> Result<(u64, u64)> {
    let sql = "select coalesce(sum(n), 0)::int8, count(*) filter (where n <> last or first <> 1) from ( \
               select count(*) as n, max(version) as last, min(version) as first from @.wh_event_store group by stream_id) s";
    let row = client.query_one(&sql.replace('@', &quoted(schema)), &[]).await?;
    Ok((row.get::<_, i64>(0) as u64, row.get::<_, i64>(1) as u64))
}

struct EventCaller {
    engine: Engine,
    streams: OwnStreams,
    payload: Payload,
    batch: usize,
    conflicts_percent: u32,
    conflicts: Arc<AtomicU64>,
    tally: Arc<Tally>,
}

impl Caller for EventCaller {
    async fn call(&mut self, _intended: Instant) -> Result<u64> {
        let mut appends: Vec<Append> = (0..self.batch)
            .map(|row| {
                let (stream_id, version) = self.streams.draw();
                let is_wrong = row * 100 < self.batch * self.conflicts_percent as usize && version > 0;
                self.payload.count();
                let expected = Some(version - i64::from(is_wrong));
                Append { stream_id, expected, correlation_id: Uuid::nil(), payload: self.payload.view() }
            })
            .collect();
        while !appends.is_empty() {
            let outcomes = self.engine.enqueue_many(appends.clone()).await;
            let mut found = HashMap::new();
            for (append, outcome) in appends.iter().zip(outcomes) {
                let expected = append.expected.unwrap_or(0);
                match outcome {
                    Ok(receipt) if receipt.version == expected + 1 => {}
                    Ok(receipt) => {
                        return Err(Failure::Broken(format!(
                            "an append that expected {expected} got version {}",
                            receipt.version
                        )));
                    }
                    Err(corelane::Error::VersionConflict { stream_id, found: version, .. }) => {
                        self.conflicts.fetch_add(1, Ordering::Relaxed);
                        found.insert(stream_id, version);
                    }
                    Err(corelane::Error::Overloaded { .. }) => {
                        found.insert(append.stream_id, expected);
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            appends.retain_mut(|append| match found.get(&append.stream_id) {
                Some(version) => {
                    append.expected = Some(*version);
                    true
                }
                None => false,
            });
        }
        self.tally.published.fetch_add(self.batch as u64, Ordering::Relaxed);
        Ok(self.batch as u64)
    }
}
