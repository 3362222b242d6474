//! Remembering ids, as one writes it without an engine: `insert … on conflict do nothing`, one by one or in batches.
//!
//! Invariants
//! - The effect is nothing: what is measured is the memory and its commit, as for the engine's handler that does nothing.
//! - One statement a call, one commit; one by one, every caller has a connection of its own.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tokio_postgres::{Client, Statement};
use uuid::Uuid;

use crate::baselines::with_schema;
use crate::drive::{Caller, measured};
use crate::failure::Result;
use crate::figures::Figures;
use crate::measure::{Meter, charge_counts};
use crate::progress::Tally;
use crate::scenario::Scenario;
use crate::target::{Target, quoted};

/// How.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A commit a message.
    One,
    /// A commit a batch.
    Batch,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::One => "dedup-one",
            Self::Batch => "dedup-batch",
        }
    }
}

/// Measures a way under a scenario; in batches over so many connections.
///
/// # Errors
/// Of the server.
pub async fn measure(target: &Target, scenario: &Scenario, connections: usize, way: Way) -> Result<Figures> {
    target.in_fresh_schema(async |schema| in_schema(target, scenario, connections, way, schema).await).await
}

async fn in_schema(
    target: &Target,
    scenario: &Scenario,
    connections: usize,
    way: Way,
    schema: &str,
) -> Result<Figures> {
    let meter = Meter::new(target).await?;
    let setup = target.connect().await?;
    setup.batch_execute(&format!("create schema {}", quoted(schema))).await?;
    setup.batch_execute(&with_schema(include_str!("../../sql/dedup_tables.sql"), schema)).await?;
    meter.settle_server().await?;
    let counts = meter.counts(schema).await?;
    let (callers, sql) = match way {
        // As many as a service gives its consumers.
        Way::One => (scenario.callers.max(32), include_str!("../../sql/dedup_one.sql")),
        Way::Batch => (connections, include_str!("../../sql/dedup_batch.sql")),
    };
    let tally = Arc::new(Tally::default());
    let mut all = Vec::new();
    for _ in 0..callers {
        let client = target.connect().await?;
        let statement = client.prepare(&with_schema(sql, schema)).await?;
        let batch = if way == Way::One { 1 } else { scenario.batch };
        let duplicates_percent = scenario.duplicates_percent;
        all.push(DedupCaller {
            client,
            statement,
            way,
            batch,
            duplicates_percent,
            tally: tally.clone(),
            last: Vec::new(),
        });
    }
    let scenario = Scenario { batch: if way == Way::One { 1 } else { scenario.batch }, ..scenario.clone() };
    let mut figures = measured(all, &scenario, &meter, &tally, way.name(), async || Ok(())).await?;
    drop(setup);
    charge_counts(&mut figures, &counts, &meter.counts(schema).await?, tally.stored());
    figures.subject = way.name().into();
    figures.runtime = "tokio".into();
    figures.connections = callers;
    figures.scenario = scenario.name();
    Ok(figures)
}

struct DedupCaller {
    client: Client,
    statement: Statement,
    way: Way,
    batch: usize,
    duplicates_percent: u32,
    tally: Arc<Tally>,
    last: Vec<Uuid>,
}

impl Caller for DedupCaller {
    async fn call(&mut self, _intended: Instant) -> Result<u64> {
        let copies = self.last.len() * self.duplicates_percent as usize / 100;
        let mut ids: Vec<Uuid> = self.last.drain(..copies).collect();
        ids.resize_with(self.batch, Uuid::now_v7);
        match self.way {
            Way::One => drop(self.client.execute(&self.statement, &[&ids[0]]).await?),
            Way::Batch => drop(self.client.query(&self.statement, &[&ids]).await?),
        }
        self.last = ids;
        self.tally.published.fetch_add(self.batch as u64, Ordering::Relaxed);
        Ok(self.batch as u64)
    }
}
