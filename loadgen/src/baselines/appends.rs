//! Appends with expected versions, as one writes them without an engine: by the unique index, or over a counter row.
//!
//! Invariants
//! - One statement a batch, one commit; the same events, streams and share of conflicts as the engine's.
//! - A batch has at most one event of a stream.
//! - Every event of a call is stored in the end: a conflict costs what it costs to try again.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Instant;

use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Statement};
use uuid::Uuid;

use crate::baselines::{Connections, TYPE_NAME, with_schema};
use crate::drive::{Caller, measured};
use crate::engine_side;
use crate::failure::Result;
use crate::figures::Figures;
use crate::measure::{Meter, charge_counts};
use crate::progress::Tally;
use crate::scenario::Scenario;
use crate::shape::{OwnStreams, Payload, StreamFamily};
use crate::target::Target;

/// How numbers are kept right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By the unique index of the events.
    Plain,
    /// By a row a stream.
    Counter,
}

impl Way {
    fn sql(self) -> &'static str {
        match self {
            Self::Plain => include_str!("../../sql/append_plain.sql"),
            Self::Counter => include_str!("../../sql/append_counter.sql"),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "append-plain",
            Self::Counter => "append-counter",
        }
    }
}

/// Measures a way under a scenario.
///
/// # Errors
/// Of the server.
pub async fn measure(target: &Target, scenario: &Scenario, shards: usize, way: Way) -> Result<Figures> {
    target.in_fresh_schema(async |schema| in_schema(target, scenario, shards, way, schema).await).await
}

async fn in_schema(target: &Target, scenario: &Scenario, shards: usize, way: Way, schema: &str) -> Result<Figures> {
    let meter = Meter::new(target).await?;
    engine_side::install(target, schema).await?;
    let setup = target.connect().await?;
    setup.batch_execute(&with_schema(include_str!("../../sql/append_tables.sql"), schema)).await?;
    meter.settle_server().await?;
    let counts = meter.counts(schema).await?;
    let connections = Connections::like_engine(shards, scenario).store;
    let mut clients: Vec<(Arc<Client>, Statement, Statement)> = Vec::new();
    for _ in 0..connections.min(scenario.callers) {
        let client = target.connect().await?;
        let append = client.prepare(&with_schema(way.sql(), schema)).await?;
        let look_up = client.prepare(&with_schema(include_str!("../../sql/append_versions.sql"), schema)).await?;
        clients.push((Arc::new(client), append, look_up));
    }
    let (tally, family) = (Arc::new(Tally::default()), StreamFamily::random());
    let position = Arc::new(AtomicI64::new(1));
    let callers = (0..scenario.callers).map(|index| {
        let (client, append, look_up) = clients[index % clients.len()].clone();
        AppendCaller {
            client,
            append,
            look_up,
            way,
            streams: OwnStreams::new(scenario, index, family),
            payload: Payload::new(scenario.payload_bytes),
            position: position.clone(),
            batch: scenario.batch,
            conflicts_percent: scenario.conflicts_percent,
            tally: tally.clone(),
        }
    });
    let callers = callers.collect();
    let mut figures = measured(callers, scenario, &meter, &tally, way.name(), async || Ok(())).await?;
    drop(setup);
    charge_counts(&mut figures, &counts, &meter.counts(schema).await?, tally.stored());
    figures.subject = way.name().into();
    figures.runtime = "tokio".into();
    figures.connections = connections;
    figures.shards = shards;
    figures.scenario = scenario.name();
    Ok(figures)
}

struct AppendCaller {
    client: Arc<Client>,
    append: Statement,
    look_up: Statement,
    way: Way,
    streams: OwnStreams,
    payload: Payload,
    position: Arc<AtomicI64>,
    batch: usize,
    conflicts_percent: u32,
    tally: Arc<Tally>,
}

/// Columns of a call.
#[derive(Default)]
struct Events {
    stream_id: Vec<Uuid>,
    expected: Vec<i64>,
    message_id: Vec<Uuid>,
    partition: Vec<i32>,
    payload: Vec<Vec<u8>>,
}

impl Events {
    fn retain(&mut self, keep: impl Fn(&Uuid) -> bool) {
        let kept: Vec<bool> = self.stream_id.iter().map(keep).collect();
        fn only<T>(column: &mut Vec<T>, kept: &[bool]) {
            let mut kept = kept.iter();
            column.retain(|_| kept.next().is_some_and(|kept| *kept));
        }
        only(&mut self.stream_id, &kept);
        only(&mut self.expected, &kept);
        only(&mut self.message_id, &kept);
        only(&mut self.partition, &kept);
        only(&mut self.payload, &kept);
    }
}

impl AppendCaller {
    fn events(&mut self) -> Events {
        let mut events = Events::default();
        for row in 0..self.batch {
            let (stream_id, version) = self.streams.draw();
            // Who is wrong expects the version before: as if somebody else had been faster.
            let is_wrong = row * 100 < self.batch * self.conflicts_percent as usize && version > 0;
            events.stream_id.push(stream_id);
            events.expected.push(version - i64::from(is_wrong));
            events.message_id.push(Uuid::now_v7());
            events.partition.push(corelane::partition::partition_of(stream_id, 256) as i32);
            events.payload.push(self.payload.draw().to_vec());
        }
        events
    }

    /// Stores what is expected rightly; what is left was not.
    async fn append(&self, events: &mut Events) -> Result<()> {
        let position = self.position.fetch_add(events.stream_id.len() as i64, Ordering::Relaxed);
        let correlation_id = Uuid::nil();
        let parameters: [&(dyn postgres_types::ToSql + Sync); 8] = [
            &position,
            &correlation_id,
            &TYPE_NAME,
            &events.stream_id,
            &events.expected,
            &events.message_id,
            &events.partition,
            &events.payload,
        ];
        match (self.way, self.client.query(&self.append, &parameters).await) {
            (Way::Plain, Ok(_)) => events.retain(|_| false),
            (Way::Counter, Ok(rows)) => {
                let stored: std::collections::HashSet<Uuid> = rows.iter().map(|row| row.get(0)).collect();
                events.retain(|stream| !stored.contains(stream));
            }
            (_, Err(error)) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => {}
            (_, Err(error)) => return Err(error.into()),
        }
        Ok(())
    }
}

impl Caller for AppendCaller {
    async fn call(&mut self, _intended: Instant) -> Result<u64> {
        let mut events = self.events();
        self.append(&mut events).await?;
        while !events.stream_id.is_empty() {
            let rows = self.client.query(&self.look_up, &[&events.stream_id]).await?;
            let versions: std::collections::HashMap<Uuid, i64> =
                rows.iter().map(|row| (row.get(0), row.get(1))).collect();
            for (stream, expected) in events.stream_id.iter().zip(&mut events.expected) {
                *expected = versions.get(stream).copied().unwrap_or(0);
            }
            self.append(&mut events).await?;
        }
        // Nothing is published here: what is stored counts as done.
        self.tally.published.fetch_add(self.batch as u64, Ordering::Relaxed);
        Ok(self.batch as u64)
    }
}
