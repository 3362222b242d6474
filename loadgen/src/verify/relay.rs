//! What arrives in `verify --scenario relay`: senders put messages into a queue of the broker, some of them twice.
//!
//! Invariants
//! - A sender is the only one of its streams, and goes on when the broker has said that it took a batch: the first copies
//!   of a stream stand in the queue in the order in which they are noted here.
//! - What is noted was sent for sure: a sender tries again until it is told so, also when it is to end.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinHandle;
use uuid::Uuid;

use super::relay_oracle::Sent;
use crate::baselines::TYPE_NAME;
use crate::broker::client::BrokerClient;
use crate::broker::frames::{QueueState, Whole};
use crate::failure::{Failure, Result};
use crate::shape::StreamFamily;
use crate::sink::frames::hash_of;

/// The queue that messages arrive in.
pub const SOURCE: &str = "arrivals";
/// How long the broker's locks last: less than a stall, so that what a stalled process holds comes to another.
pub const LOCK_MS: u64 = 5_000;
/// The handlers' own table: without a unique key, so that a second effect is a second row.
pub const TABLE: &str = "create table @.loadgen_effects (at int8 generated always as identity, message_id uuid, \
     attempt int4, written_at timestamptz default clock_timestamp(), backend int4 default pg_backend_pid())";
/// Its rows in the order in which they were written; along a stream that is the order of the handlers.
pub const EFFECTS: &str = "select message_id, extract(epoch from written_at)::float8, backend, attempt \
     from @.loadgen_effects order by at";

const SENDERS: u32 = 3;
/// Streams of a sender.
const STREAMS: u32 = 50;
/// Of so many messages one has no stream.
const STREAMLESS: u32 = 20;

/// The queue's figures; none while it is not known or the broker is away.
pub async fn arrivals(broker: &BrokerClient) -> Option<QueueState> {
    broker.states().await.ok()?.into_iter().find(|state| state.name == SOURCE)
}

/// The senders.
#[derive(Debug)]
pub struct Arrivals {
    stop: Arc<AtomicBool>,
    senders: Vec<JoinHandle<Result<Vec<Sent>>>>,
}

impl Arrivals {
    /// Starts them.
    #[must_use]
    pub fn start(socket: PathBuf, family: StreamFamily, seed: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let senders = (0..SENDERS).map(|index| {
            let sender = Sender {
                broker: BrokerClient::new(socket.clone()),
                family,
                index,
                random: StdRng::seed_from_u64(seed ^ u64::from(index + 1).rotate_right(8)),
                sent: Vec::new(),
            };
            tokio::spawn(sender.run(stop.clone()))
        });
        Self { senders: senders.collect(), stop }
    }

    /// Ends them; what they have sent, each stream in its order.
    ///
    /// # Errors
    /// If the broker is away for long.
    pub async fn end(self) -> Result<Vec<Sent>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut sent = Vec::new();
        for sender in self.senders {
            sent.extend(sender.await.map_err(|error| Failure::Broken(error.to_string()))??);
        }
        Ok(sent)
    }
}

struct Sender {
    broker: BrokerClient,
    family: StreamFamily,
    index: u32,
    random: StdRng,
    sent: Vec<Sent>,
}

impl Sender {
    async fn run(mut self, stop: Arc<AtomicBool>) -> Result<Vec<Sent>> {
        // Those whose second copy is still to come, behind others of their stream.
        let mut later: Vec<Whole> = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let mut batch: Vec<Whole> = (0..self.random.random_range(1..20)).map(|_| self.make()).collect();
            // Ten of a hundred come twice: at once, at the end of their batch, or in a later one.
            for at in (0..batch.len()).rev() {
                match self.random.random_range(0..30) {
                    0 => batch.insert(at + 1, batch[at].clone()),
                    1 => batch.push(batch[at].clone()),
                    2 => later.push(batch[at].clone()),
                    _ => {}
                }
            }
            if self.random.random_bool(0.3) {
                batch.append(&mut later);
            }
            self.put(batch).await?;
            tokio::time::sleep(Duration::from_millis(self.random.random_range(5..25))).await;
        }
        Ok(self.sent)
    }

    /// A new message; it is noted.
    fn make(&mut self) -> Whole {
        let message_id = Uuid::now_v7();
        let stream = self.family.stream(self.index + SENDERS * self.random.random_range(0..STREAMS));
        let stream_id = (self.random.random_range(0..STREAMLESS) > 0).then_some(stream);
        let word = ["placed", "paid", "shipped"].choose(&mut self.random).copied().unwrap_or_default();
        let payload = format!("{{\"order\":\"{message_id}\",\"is\":\"{word}\"}}").into_bytes();
        self.sent.push(Sent { message_id, stream_id, payload_hash: hash_of(&payload) });
        Whole { message_id, stream_id, type_name: TYPE_NAME.to_owned(), payload, ..Whole::default() }
    }

    async fn put(&self, batch: Vec<Whole>) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(20);
        // A batch whose answer is missing is sent again: then all of it may come twice.
        while let Err(error) = self.broker.arrive(SOURCE, batch.clone()).await {
            if Instant::now() > deadline {
                return Err(Failure::Io { what: "sending to the broker".to_owned(), source: error });
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }
}
