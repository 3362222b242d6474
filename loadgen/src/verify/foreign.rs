//! Writers that know nothing of the engine: plain SQL on the same streams, in the shapes that have broken
//! simpler designs.
//!
//! Invariants
//! - What a writer was told is stored is written down after its commit was acknowledged, never before.
//! - A writer whose commit's outcome is unknown writes nothing down: the database decides.
//! - A writer never gives up: a server that is away is tried again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use uuid::Uuid;

use super::oracle::Stored;
use crate::baselines::DESTINATION;
use crate::failure::{Failure, Result};
use crate::shape::{Payload, StreamFamily};
use crate::sink::frames::hash_of;
use crate::target::{Target, quoted};

/// What the server's log shows of a writer's statement.
pub const MARK: &str = "/* foreign */";

/// How a writer works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One statement, autocommit.
    Plain,
    /// Two calls in the caller's own transaction, with a pause; three of ten are rolled back.
    Enlisted,
    /// Has a transaction id from a write elsewhere before it asks for the stream: lower id, later number.
    LowerXid,
    /// REPEATABLE READ, its snapshot older than a rotation; 40001 is repeated.
    RepeatableRead,
}

/// What all writers share.
#[derive(Clone, Debug)]
pub struct Foreign {
    /// Where.
    pub target: Arc<Target>,
    /// The engine's schema.
    pub schema: String,
    /// The streams.
    pub family: StreamFamily,
    /// How many of them.
    pub streams: u32,
    /// Set to end.
    pub stop: Arc<AtomicBool>,
    /// What is stored for sure.
    pub acknowledged: Arc<Mutex<Vec<Stored>>>,
}

impl Foreign {
    /// Writes in a shape until it is told to stop. Answers how many commits it made.
    pub async fn run(self, shape: Shape, seed: u64) -> u64 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut payload = Payload::new(120);
        let mut commits = 0;
        let mut client: Option<Client> = None;
        while !self.stop.load(Ordering::Relaxed) {
            let connected = match client.take() {
                Some(client) if !client.is_closed() => client,
                _ => match self.connect().await {
                    Ok(client) => client,
                    Err(_) => {
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                },
            };
            match self.once(&connected, shape, &mut random, &mut payload).await {
                Ok(stored) => {
                    commits += u64::from(!stored.is_empty());
                    self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner).extend(stored);
                    client = Some(connected);
                }
                // 40001 and cuts alike: from the beginning, on a fresh connection.
                Err(failure) => tracing::debug!(?shape, %failure, "a foreign writer starts again"),
            }
            tokio::time::sleep(Duration::from_millis(random.random_range(5..40))).await;
        }
        commits
    }

    /// Under a name by which `verify` finds it when it cuts connections.
    async fn connect(&self) -> Result<Client> {
        let client = self.target.connect().await?;
        client.batch_execute(&format!("set application_name = 'loadgen/{}'", self.schema)).await?;
        Ok(client)
    }

    async fn once(
        &self,
        client: &Client,
        shape: Shape,
        random: &mut StdRng,
        payload: &mut Payload,
    ) -> Result<Vec<Stored>> {
        let pause = Duration::from_millis(random.random_range(1..30));
        match shape {
            Shape::Plain => {
                let count = random.random_range(1..6);
                self.store(client, random, payload, count).await
            }
            Shape::Enlisted => {
                client.batch_execute("begin").await?;
                let mut stored = self.store(client, random, payload, 1).await?;
                tokio::time::sleep(pause).await;
                // Locks of later calls in another order than these can deadlock (40P01): that is documented, and repeated.
                stored.extend(self.store(client, random, payload, 2).await?);
                if random.random_bool(0.3) {
                    client.batch_execute("rollback").await?;
                    return Ok(Vec::new());
                }
                client.batch_execute("commit").await?;
                Ok(stored)
            }
            Shape::LowerXid => {
                let elsewhere = format!("{}.loadgen_elsewhere", quoted(&self.schema));
                client.batch_execute(&format!("begin; insert into {elsewhere} values (1)")).await?;
                tokio::time::sleep(pause).await;
                let stored = self.store(client, random, payload, 2).await?;
                client.batch_execute("commit").await?;
                Ok(stored)
            }
            Shape::RepeatableRead => {
                let segment = format!("select current from {}.wh_segment", quoted(&self.schema));
                client.batch_execute(&format!("begin isolation level repeatable read; {segment}")).await?;
                // Sometimes long enough for a rotation, sometimes not.
                let wait = Duration::from_millis(random.random_range(0..6_000));
                self.sleep(wait).await;
                let stored = match self.store(client, random, payload, 1).await {
                    Err(Failure::Database(error)) if error.code() == Some(&SqlState::T_R_SERIALIZATION_FAILURE) => {
                        client.batch_execute("rollback").await?;
                        return Ok(Vec::new());
                    }
                    other => other?,
                };
                client.batch_execute("commit").await?;
                Ok(stored)
            }
        }
    }

    async fn sleep(&self, wait: Duration) {
        let until = tokio::time::Instant::now() + wait;
        while tokio::time::Instant::now() < until && !self.stop.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn store(
        &self,
        client: &Client,
        random: &mut StdRng,
        payload: &mut Payload,
        count: usize,
    ) -> Result<Vec<Stored>> {
        let sql = format!(
            "{MARK} select message_id, stream_seq, version from {}.store_outbox_messages($1, $2, $3, $4, $5, $6)",
            quoted(&self.schema)
        );
        let messages: Vec<Uuid> = (0..count).map(|_| Uuid::now_v7()).collect();
        let streams: Vec<Uuid> = (0..count).map(|_| self.family.stream(random.random_range(0..self.streams))).collect();
        let payloads: Vec<Vec<u8>> = (0..count).map(|_| payload.draw().to_vec()).collect();
        let events: Vec<bool> = (0..count).map(|_| random.random_bool(0.5)).collect();
        let rows = client
            .query(
                &sql,
                &[&messages, &streams, &vec!["loadgen.foreign"; count], &payloads, &events, &vec![DESTINATION; count]],
            )
            .await?;
        let stored = rows.iter().enumerate().map(|(index, row)| Stored {
            message_id: row.get(0),
            stream_id: streams[index],
            stream_seq: row.get(1),
            version: row.get(2),
            payload_hash: hash_of(&payloads[index]),
        });
        Ok(stored.collect())
    }
}
