//! The ceiling: the same event rows into the same event table with only its primary key, and nothing else.
//!
//! Invariants
//! - No lock, no look-up, no log, no second index, no claim: versions are counted by the caller, whom no
//!   other writer disturbs.
//! - Binary COPY and `unnest` are both tried first, in this run, with this batch; the faster is measured.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use futures_util::pin_mut;
use postgres_types::{ToSql, Type};
use tokio_postgres::binary_copy::BinaryCopyInWriter;
use tokio_postgres::{Client, Statement};
use uuid::Uuid;

use crate::baselines::{Connections, Ids, TYPE_NAME, with_schema};
use crate::drive::{Caller, Course, drive, measured};
use crate::engine_side;
use crate::failure::Result;
use crate::figures::Figures;
use crate::measure::{Meter, charge_counts};
use crate::progress::Tally;
use crate::scenario::Scenario;
use crate::shape::{Payload, StreamChoice, StreamFamily};
use crate::target::Target;

/// How rows get in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Copy,
    Unnest,
}

/// Measures the ceiling under a scenario.
///
/// # Errors
/// Of the server.
pub async fn measure(target: &Target, scenario: &Scenario, shards: usize) -> Result<Figures> {
    target.in_fresh_schema(async |schema| in_schema(target, scenario, shards, schema).await).await
}

async fn in_schema(target: &Target, scenario: &Scenario, shards: usize, schema: &str) -> Result<Figures> {
    let meter = Meter::new(target).await?;
    // The engine's own table is the model: whatever its columns are, the ceiling's are the same.
    engine_side::install(target, schema).await?;
    let setup = target.connect().await?;
    let create = with_schema(
        "create table @schema@.ceiling_event (like @schema@.wh_event_store including defaults, primary key (stream_id, version))",
        schema,
    );
    setup.batch_execute(&create).await?;
    meter.settle_server().await?;
    let counts = meter.counts(schema).await?;

    let tally = Arc::new(Tally::default());
    let connections = Connections::like_engine(shards, scenario).store;
    let position = Arc::new(AtomicI64::new(1));
    let family = StreamFamily::random();
    let mut trial = Vec::new();
    for way in [Way::Copy, Way::Unnest] {
        let callers = callers(target, scenario, schema, connections, way, &position, family).await?;
        let course = Course::of(scenario);
        let course = Course { calls_per_second: None, ..course }.lasting(Duration::from_millis(700));
        let before = tally.stored();
        let start = Instant::now();
        let (callers, _) = drive(callers, course, &tally).await?;
        trial.push(((tally.stored() - before) as f64 / start.elapsed().as_secs_f64(), way, callers));
        tally.published.store(tally.stored(), Ordering::Relaxed);
    }
    let faster = usize::from(trial[1].0 > trial[0].0);
    let (_, way, callers) = trial.swap_remove(faster);
    drop(trial);
    let callers = callers.into_iter().map(|caller| Stored { caller, tally: tally.clone() }).collect();
    let name = if way == Way::Copy { "insert ceiling (copy)" } else { "insert ceiling (unnest)" };
    let mut figures = measured(callers, scenario, &meter, &tally, name, async || Ok(())).await?;
    charge_counts(&mut figures, &counts, &meter.counts(schema).await?, tally.stored());
    figures.subject = format!("insert-ceiling ({})", if way == Way::Copy { "copy" } else { "unnest" });
    figures.runtime = "tokio".into();
    figures.connections = connections;
    figures.shards = shards;
    figures.scenario = scenario.name();
    Ok(figures)
}

/// Callers for a way in: over one connection several `unnest` calls can be under way, but only one COPY.
async fn callers(
    target: &Target,
    scenario: &Scenario,
    schema: &str,
    connections: usize,
    way: Way,
    position: &Arc<AtomicI64>,
    family: StreamFamily,
) -> Result<Vec<CeilingCaller>> {
    let count = if way == Way::Copy { connections.min(scenario.callers) } else { scenario.callers };
    let mut clients: Vec<(Arc<Client>, Statement)> = Vec::new();
    for _ in 0..connections.min(count) {
        let client = target.connect().await?;
        let statement = match way {
            Way::Copy => client.prepare(&with_schema(COPY, schema)).await?,
            Way::Unnest => client.prepare(&with_schema(include_str!("../../sql/ceiling_unnest.sql"), schema)).await?,
        };
        clients.push((Arc::new(client), statement));
    }
    let scenario = Scenario { callers: count, ..scenario.clone() };
    // The trial of the other way has used versions of the same streams.
    let first_version = if way == Way::Copy { 0 } else { 1 << 40 };
    let callers = (0..count).map(|index| {
        let (client, statement) = clients[index % clients.len()].clone();
        CeilingCaller {
            client,
            statement,
            way,
            rows: Columns::default(),
            versions: vec![first_version; scenario.streams as usize],
            streams: StreamChoice::new(&scenario, index, 7),
            family,
            payload: Payload::new(scenario.payload_bytes),
            ids: Ids::default(),
            position: position.clone(),
            batch: scenario.batch,
        }
    });
    Ok(callers.collect())
}

const COPY: &str = "copy @schema@.ceiling_event (position, stream_seq, version, xid, span_id, stored_at, stream_id, message_id, \
    correlation_id, causation_id, trace_id, partition, trace_flags, type_name, payload) from stdin (format binary)";
const COPY_TYPES: [Type; 15] = [
    Type::INT8,
    Type::INT8,
    Type::INT8,
    Type::INT8,
    Type::INT8,
    Type::TIMESTAMPTZ,
    Type::UUID,
    Type::UUID,
    Type::UUID,
    Type::UUID,
    Type::UUID,
    Type::INT4,
    Type::INT2,
    Type::TEXT,
    Type::BYTEA,
];

#[derive(Debug, Default)]
struct Columns {
    version: Vec<i64>,
    span_id: Vec<i64>,
    stream_id: Vec<Uuid>,
    message_id: Vec<Uuid>,
    correlation_id: Vec<Uuid>,
    causation_id: Vec<Uuid>,
    trace_id: Vec<Uuid>,
    partition: Vec<i32>,
    payload: Vec<Vec<u8>>,
}

struct CeilingCaller {
    client: Arc<Client>,
    statement: Statement,
    way: Way,
    rows: Columns,
    versions: Vec<i64>,
    streams: StreamChoice,
    family: StreamFamily,
    payload: Payload,
    ids: Ids,
    position: Arc<AtomicI64>,
    batch: usize,
}

impl CeilingCaller {
    fn fill(&mut self) {
        let rows = &mut self.rows;
        // Payload buffers stay: they are overwritten in place.
        rows.payload.resize_with(self.batch, Vec::new);
        for column in [
            &mut rows.stream_id,
            &mut rows.message_id,
            &mut rows.correlation_id,
            &mut rows.causation_id,
            &mut rows.trace_id,
        ] {
            column.clear();
        }
        rows.version.clear();
        rows.span_id.clear();
        rows.partition.clear();
        let correlation = self.ids.draw();
        for row in 0..self.batch {
            let stream = self.streams.draw();
            let stream_id = self.family.stream(stream);
            let version = &mut self.versions[stream as usize];
            *version += 1;
            let trace = self.ids.draw();
            rows.version.push(*version);
            rows.span_id.push(trace.as_u128() as i64);
            rows.stream_id.push(stream_id);
            rows.message_id.push(Uuid::now_v7());
            rows.correlation_id.push(correlation);
            rows.causation_id.push(self.ids.draw());
            rows.trace_id.push(trace);
            rows.partition.push(corelane::partition::partition_of(stream_id, 256) as i32);
            rows.payload[row].clear();
            rows.payload[row].extend_from_slice(self.payload.draw());
        }
    }

    async fn unnest(&self, position: i64) -> Result<()> {
        let rows = &self.rows;
        self.client
            .execute(
                &self.statement,
                &[
                    &position,
                    &XID,
                    &SystemTime::now(),
                    &TYPE_NAME,
                    &rows.version,
                    &rows.span_id,
                    &rows.stream_id,
                    &rows.message_id,
                    &rows.correlation_id,
                    &rows.causation_id,
                    &rows.trace_id,
                    &rows.partition,
                    &rows.payload,
                ],
            )
            .await?;
        Ok(())
    }

    async fn copy(&self, position: i64) -> Result<()> {
        let sink = self.client.copy_in(&self.statement).await?;
        let writer = BinaryCopyInWriter::new(sink, &COPY_TYPES);
        pin_mut!(writer);
        let (rows, stored_at) = (&self.rows, SystemTime::now());
        for row in 0..self.batch {
            let place = position + row as i64;
            let values: [&(dyn ToSql + Sync); 15] = [
                &place,
                &rows.version[row],
                &rows.version[row],
                &XID,
                &rows.span_id[row],
                &stored_at,
                &rows.stream_id[row],
                &rows.message_id[row],
                &rows.correlation_id[row],
                &rows.causation_id[row],
                &rows.trace_id[row],
                &rows.partition[row],
                &1i16,
                &TYPE_NAME,
                &rows.payload[row],
            ];
            writer.as_mut().write(&values).await?;
        }
        writer.finish().await?;
        Ok(())
    }
}

/// Any transaction id: the ceiling reads none.
const XID: i64 = 1_000;

impl Caller for CeilingCaller {
    async fn call(&mut self, _intended: Instant) -> Result<u64> {
        self.fill();
        let position = self.position.fetch_add(self.batch as i64, Ordering::Relaxed);
        match self.way {
            Way::Copy => self.copy(position).await?,
            Way::Unnest => self.unnest(position).await?,
        }
        Ok(self.batch as u64)
    }
}

/// Nothing is published here: what is stored counts as done.
struct Stored {
    caller: CeilingCaller,
    tally: Arc<Tally>,
}

impl Caller for Stored {
    async fn call(&mut self, intended: Instant) -> Result<u64> {
        let stored = self.caller.call(intended).await?;
        self.tally.published.fetch_add(stored, Ordering::Relaxed);
        Ok(stored)
    }
}
