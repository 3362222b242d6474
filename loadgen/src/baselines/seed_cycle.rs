//! The seed's cycle (ARCHITECTURE.md says what the seed is), the usual one of outboxes, set-based and fair: store with
//! event store copy, claim by row lease, complete by DELETE.
//!
//! Invariants
//! - One statement a batch, one commit; jsonb in and out, as the seed does.
//! - Claims and completions go by 1000 on connections of their own, pipelined: the next claim is sent
//!   together with the last one's completion.
//! - Expired leases are not looked for (nobody dies here): that would cost the seed a second index.

use std::error::Error;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::{BufMut, BytesMut};
use postgres_types::{FromSql, IsNull, ToSql, Type, to_sql_checked};
use tokio_postgres::{Client, Statement};
use uuid::Uuid;

use crate::baselines::{Connections, DESTINATION, Ids, TYPE_NAME, with_schema};
use crate::checks::Findings;
use crate::drive::{Caller, measured};
use crate::failure::{Failure, Result};
use crate::figures::Figures;
use crate::measure::{Meter, charge_counts};
use crate::progress::Tally;
use crate::scenario::Scenario;
use crate::shape::{Payload, StreamChoice, StreamFamily};
use crate::target::{Target, quoted};

const CLAIM_ROWS: i64 = 1000;
/// Index scans and nested loops: the best plan for 1000 rows of a queue, whatever its size is taken for.
const BEST_PLAN: &str =
    "set enable_seqscan = off; set enable_bitmapscan = off; set enable_hashjoin = off; set enable_mergejoin = off";
const LEASE_SECONDS: f64 = 300.0;
const PARTITIONS: i32 = 10_000;

/// Measures the seed's cycle under a scenario.
///
/// # Errors
/// Of the server.
pub async fn measure(target: &Target, scenario: &Scenario, shards: usize) -> Result<Figures> {
    let connections = Connections::like_engine(shards, scenario);
    let figures = target.in_fresh_schema(async |schema| in_schema(target, scenario, connections, schema).await).await?;
    Ok(Figures { shards, ..figures })
}

async fn in_schema(target: &Target, scenario: &Scenario, connections: Connections, schema: &str) -> Result<Figures> {
    let meter = Meter::new(target).await?;
    let setup = target.connect().await?;
    setup.batch_execute(&format!("create schema {}", quoted(schema))).await?;
    setup.batch_execute(&with_schema(include_str!("../../sql/seed_tables.sql"), schema)).await?;
    meter.settle_server().await?;
    let counts = meter.counts(schema).await?;

    let tally = Arc::new(Tally::default());
    let family = StreamFamily::random();
    let mut stores = Vec::new();
    for _ in 0..connections.store {
        stores.push(Store::open(target, schema).await?);
    }
    let callers = (0..scenario.callers)
        .map(|index| SeedCaller {
            store: stores[index % stores.len()].clone(),
            streams: StreamChoice::new(scenario, index, 7),
            family,
            payload: Payload::new(scenario.payload_bytes),
            ids: Ids::default(),
            json: String::new(),
            batch: scenario.batch,
        })
        .collect();
    let stop = Arc::new(AtomicBool::new(false));
    let mut claimers = Vec::new();
    for index in 0..connections.claim {
        let claimer = Claimer {
            client: target.connect().await?,
            instance: Uuid::new_v4(),
            index: index as i32,
            claimers: connections.claim as i32,
            tally: tally.clone(),
            family,
            last_counter: vec![0; scenario.streams as usize],
            findings: Findings::default(),
            stop: stop.clone(),
        };
        let claim = with_schema(include_str!("../../sql/seed_claim.sql"), schema);
        let complete = with_schema(include_str!("../../sql/seed_complete.sql"), schema);
        claimers.push(tokio::spawn(claimer.run(claim, complete)));
    }
    drop(stores);
    let outcome = measured(callers, scenario, &meter, &tally, "seed cycle", async || Ok(())).await;
    stop.store(true, Ordering::Relaxed);
    let mut findings = Findings::default();
    for claimer in claimers {
        let found =
            claimer.await.map_err(|panic| Failure::Broken(format!("a claimer ended in a panic: {panic}")))??;
        findings.order_violations += found.order_violations;
    }
    findings.lost = tally.stored().saturating_sub(tally.published());
    let mut figures = outcome?;
    drop(setup);
    charge_counts(&mut figures, &counts, &meter.counts(schema).await?, tally.stored());
    figures.judge(findings);
    figures.subject = "seed-cycle".into();
    figures.runtime = "tokio".into();
    figures.connections = connections.total();
    figures.scenario = scenario.name();
    Ok(figures)
}

#[derive(Clone, Debug)]
struct Store {
    client: Arc<Client>,
    statement: Statement,
}

impl Store {
    async fn open(target: &Target, schema: &str) -> Result<Self> {
        let client = target.connect().await?;
        let sql = with_schema(include_str!("../../sql/seed_store.sql"), schema);
        client.batch_execute(BEST_PLAN).await?;
        let statement = client.prepare_typed(&sql, &[Type::JSONB, Type::INT4]).await?;
        Ok(Self { client: Arc::new(client), statement })
    }
}

struct SeedCaller {
    store: Store,
    streams: StreamChoice,
    family: StreamFamily,
    payload: Payload,
    ids: Ids,
    json: String,
    batch: usize,
}

impl Caller for SeedCaller {
    async fn call(&mut self, _intended: Instant) -> Result<u64> {
        self.json.clear();
        self.json.push('[');
        let correlation = self.ids.draw();
        for row in 0..self.batch {
            let separator = if row == 0 { "" } else { "," };
            let stream_id = self.family.stream(self.streams.draw());
            let (message_id, causation, trace) = (Uuid::now_v7(), self.ids.draw(), self.ids.draw());
            // Writing to a String cannot fail. Envelope and metadata as in the seed: id, payload, hops.
            let traceparent = (trace.simple(), trace.as_u128() as u64);
            let _ = write!(
                self.json,
                "{separator}{{\"message_id\":\"{message_id}\",\"stream_id\":\"{stream_id}\",\"destination\":\"{DESTINATION}\",\
                 \"message_type\":\"{TYPE_NAME}\",\"is_event\":true,\"event_data\":{{\"Payload\":{},",
                self.payload.next_text(),
            );
            let start = self.json.len();
            let _ = write!(
                self.json,
                "\"MessageId\":\"{message_id}\",\"Hops\":[{{\"CorrelationId\":\"{correlation}\",\
                 \"CausationId\":\"{causation}\",\"TraceParent\":\"00-{}-{:016x}-01\"}}]}}",
                traceparent.0, traceparent.1,
            );
            let end = self.json.len();
            self.json.push_str(",\"metadata\":{");
            let hops = self.json[start..end].to_owned();
            self.json.push_str(&hops);
            self.json.push('}');
        }
        self.json.push(']');
        self.store.client.execute(&self.store.statement, &[&JsonText(&self.json), &PARTITIONS]).await?;
        Ok(self.batch as u64)
    }
}

struct Claimer {
    client: Client,
    instance: Uuid,
    index: i32,
    claimers: i32,
    tally: Arc<Tally>,
    family: StreamFamily,
    /// The payload's counter of each stream's last message: a stream has one caller, whose counter grows.
    last_counter: Vec<u64>,
    findings: Findings,
    stop: Arc<AtomicBool>,
}

impl Claimer {
    async fn run(mut self, claim: String, complete: String) -> Result<Findings> {
        // The statements are planned while the tables are empty, and no statistics would come in time.
        self.client.batch_execute(BEST_PLAN).await?;
        let claim = self.client.prepare(&claim).await?;
        let complete = self.client.prepare(&complete).await?;
        let mut done: Vec<Uuid> = Vec::new();
        let mut backoff_ms = 1;
        loop {
            let deleted = async {
                match done.is_empty() {
                    true => Ok(0),
                    false => self.client.execute(&complete, &[&done]).await,
                }
            };
            let parameters: [&(dyn ToSql + Sync); 5] =
                [&self.instance, &LEASE_SECONDS, &CLAIM_ROWS, &self.claimers, &self.index];
            let claimed = self.client.query(&claim, &parameters);
            let (deleted, claimed) = futures_util::join!(deleted, claimed);
            self.tally.published.fetch_add(deleted?, Ordering::Relaxed);
            let mut claimed = claimed?;
            done.clear();
            if claimed.is_empty() {
                if self.stop.load(Ordering::Relaxed) {
                    return Ok(self.findings);
                }
                tokio::time::sleep(Duration::from_millis(backoff_ms)).await;
                backoff_ms = (backoff_ms * 2).min(16);
                continue;
            }
            backoff_ms = 1;
            // RETURNING gives them in no order; the seed sorts by stream and place before it publishes.
            claimed.sort_by_key(|row| row.get::<_, i64>(2));
            for row in &claimed {
                done.push(row.get(0));
                let counter = counter_of(row.get(5));
                if let Some(stream) = self.family.index_of(row.get(1)) {
                    let last = &mut self.last_counter[stream as usize];
                    self.findings.order_violations += u64::from(counter <= *last);
                    *last = counter;
                }
            }
        }
    }
}

/// The counter in a payload of [`Payload`], wherever jsonb has put it in the envelope: `"n": "000000000042"`.
fn counter_of(body: JsonBytes<'_>) -> u64 {
    const KEY: &[u8] = b"\"n\": \"";
    let start = body.0.windows(KEY.len()).position(|bytes| bytes == KEY).map_or(0, |at| at + KEY.len());
    let digits = body.0.get(start..start + 12).unwrap_or_default();
    digits.iter().fold(0, |number, digit| number * 10 + u64::from(digit.wrapping_sub(b'0')))
}

/// JSON text sent as jsonb: a version byte and the text.
#[derive(Debug)]
struct JsonText<'a>(&'a str);

impl ToSql for JsonText<'_> {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.put_u8(1);
        out.put_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSONB
    }

    to_sql_checked!();
}

/// jsonb as it came.
#[derive(Debug)]
struct JsonBytes<'a>(&'a [u8]);

impl<'a> FromSql<'a> for JsonBytes<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(raw.get(1..).unwrap_or_default()))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSONB
    }
}
