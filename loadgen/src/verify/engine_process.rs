//! The engine of `verify`, in a process of its own that can be killed, with producers inside.
//!
//! Invariants
//! - An acknowledgement is written down (one `write`) after it was given, before the next call: a kill loses
//!   at most one note a caller, never invents one.
//! - Orders come by standard input; its end means that the parent is gone, and this process ends too.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Args;
use corelane::config::Config;
use corelane::engine::{Engine, Receipt};
use corelane::seam::transport::Transport;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::io::{AsyncBufReadExt, BufReader};
use uuid::Uuid;

use crate::baselines::Ids;
use crate::engine_side::Message;
use crate::failure::{Failure, Result};
use crate::shape::{Payload, StreamFamily};
use crate::sink::frames::{SinkMessage, hash_of};
use crate::sink::journal::Journal;
use crate::sink::socket_transport::SocketTransport;

/// What every process with an engine is told.
#[derive(Clone, Debug, Args)]
pub struct ServiceArgs {
    /// The database.
    #[arg(long, env = "LOADGEN_ENGINE_DATABASE_URL", hide_env_values = true)]
    pub database_url: String,
    /// The engine's schema.
    #[arg(long)]
    pub schema: String,
    /// The sink's socket.
    #[arg(long)]
    pub sink: PathBuf,
    /// The engine's config file.
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// `shards.count`.
    #[arg(long)]
    pub shards: Option<usize>,
    /// `shards.runtime`.
    #[arg(long)]
    pub runtime: Option<String>,
}

/// Options of the engine's process.
#[derive(Clone, Debug, Args)]
pub struct EngineArgs {
    /// The engine.
    #[command(flatten)]
    pub service: ServiceArgs,
    /// Where acknowledgements are written down.
    #[arg(long)]
    pub acknowledged: PathBuf,
    /// Any stream of the family to write to.
    #[arg(long)]
    pub family: Uuid,
    /// How many streams.
    #[arg(long)]
    pub streams: u32,
    /// How many callers.
    #[arg(long)]
    pub callers: usize,
    /// Messages of a call.
    #[arg(long)]
    pub batch: usize,
    /// Pause of a caller between calls.
    #[arg(long)]
    pub pause_ms: u64,
}

/// Runs until told to stop, or until the parent is gone.
///
/// # Errors
/// Where the engine cannot be started.
pub async fn run(args: EngineArgs) -> Result<()> {
    let config = config(&args.service, &[])?;
    let engine = start_when_possible(&config, || SocketTransport::new(args.service.sink.clone())).await?;
    let journal = Arc::new(Mutex::new(Journal::open(&args.acknowledged)?));
    let quiet = Arc::new(AtomicBool::new(false));
    let mut callers = tokio::task::JoinSet::new();
    for index in 0..args.callers {
        let caller = Producer {
            engine: engine.clone(),
            family: StreamFamily::of(args.family),
            journal: journal.clone(),
            quiet: quiet.clone(),
            args: args.clone(),
        };
        // The third of the callers enlists in a transaction of its own.
        callers.spawn(caller.run(index % 3 == 2));
    }
    println!("started");
    let mut orders = BufReader::new(tokio::io::stdin()).lines();
    while let Ok(Some(order)) = orders.next_line().await {
        match order.as_str() {
            "quiet" => {
                quiet.store(true, Ordering::Relaxed);
                while callers.join_next().await.is_some() {}
                println!("quiet");
            }
            "stop" => break,
            _ => return Err(Failure::Broken(format!("no order of ours: {order}"))),
        }
    }
    quiet.store(true, Ordering::Relaxed);
    let report = engine.shutdown(Duration::from_secs(10)).await;
    println!("stopped drained={} left={}", report.drained, report.rows_left);
    Ok(())
}

/// The engine's configuration, with values beside those of every verification.
///
/// # Errors
/// Naming the key.
pub fn config(args: &ServiceArgs, beside: &[(&str, &str)]) -> Result<Config> {
    let config = match &args.config {
        Some(path) => Config::from_file(path)?,
        None => Config::default(),
    };
    let mut config = config.overlay_env("CORELANE")?;
    let of_all = [
        ("database.url", args.database_url.as_str()),
        ("database.schema", &args.schema),
        ("service.name", "loadgen-verify"),
        // A refused head is to be tried again while the run lasts, and never to end as a dead letter.
        ("retry.base_ms", "50"),
        ("retry.cap_ms", "500"),
        ("retry.attempts_max", "1000000"),
        ("publish.timeout_ms", "1000"),
        ("lease.margin_ms", "2000"),
        ("claim.poll_ms_max", "1000"),
    ];
    for (key, value) in of_all.iter().chain(beside) {
        config.set(key, value)?;
    }
    if let Some(shards) = args.shards {
        config.set("shards.count", &shards.to_string())?;
    }
    if let Some(runtime) = &args.runtime {
        config.set("shards.runtime", runtime)?;
    }
    config.validate()?;
    Ok(config)
}

/// A service is restarted while its database is away, too.
///
/// # Errors
/// Of the configuration; [`Failure::TimedOut`] if the database does not come.
pub async fn start_when_possible<T: Transport>(config: &Config, transport: impl Fn() -> T) -> Result<Engine> {
    for _ in 0..200 {
        let builder = Engine::builder(config.clone()).transport(transport());
        match builder.start().await {
            Ok(engine) => return Ok(engine),
            Err(corelane::Error::Store(error)) => {
                tracing::debug!(%error, "not yet");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(Failure::TimedOut("the engine could not be started within 20 s".into()))
}

struct Producer {
    engine: Engine,
    family: StreamFamily,
    journal: Arc<Mutex<Journal>>,
    quiet: Arc<AtomicBool>,
    args: EngineArgs,
}

/// A message and what the oracle is to know of it.
struct Prepared {
    message: Message,
    stream_id: Uuid,
    payload_hash: u64,
}

impl Producer {
    async fn run(self, enlists: bool) {
        let mut random = StdRng::seed_from_u64(Uuid::new_v4().as_u128() as u64);
        let (mut payload, mut ids) = (Payload::new(100 + random.random_range(0..100)), Ids::default());
        let mut client = None;
        while !self.quiet.load(Ordering::Relaxed) {
            let prepared: Vec<Prepared> =
                (0..self.args.batch).map(|_| self.prepare(&mut random, &mut payload, &mut ids)).collect();
            let receipts = if enlists {
                self.enlist(&mut client, &prepared).await
            } else {
                self.enqueue(&prepared, random.random_bool(0.3)).await
            };
            self.note(&prepared, &receipts);
            let pause = self.args.pause_ms.max(1);
            tokio::time::sleep(Duration::from_millis(random.random_range(pause / 2..=pause))).await;
        }
    }

    fn prepare(&self, random: &mut StdRng, payload: &mut Payload, ids: &mut Ids) -> Prepared {
        let stream_id = self.family.stream(random.random_range(0..self.args.streams));
        let payload_hash = hash_of(payload.draw());
        let message = Message::new(stream_id, payload, ids.draw(), ids);
        Prepared { message: message.identified(Uuid::now_v7(), random.random_bool(0.7)), stream_id, payload_hash }
    }

    /// Independent messages, or one unit of work. `None`: not stored, or not known to be.
    async fn enqueue(&self, prepared: &[Prepared], unit: bool) -> Vec<Option<Receipt>> {
        let none = || prepared.iter().map(|_| None).collect();
        if !unit {
            let messages: Vec<Message> = prepared.iter().map(|prepared| prepared.message.clone()).collect();
            return self.engine.enqueue_many(messages).await.into_iter().map(corelane::Result::ok).collect();
        }
        let mut unit = self.engine.unit_of_work();
        for prepared in prepared {
            if unit.push(&prepared.message).is_err() {
                return none();
            }
        }
        unit.commit().await.map_or_else(|_| none(), |receipts| receipts.into_iter().map(Some).collect())
    }

    /// In a transaction of the caller's own, over a plain connection.
    async fn enlist(&self, client: &mut Option<tokio_postgres::Client>, prepared: &[Prepared]) -> Vec<Option<Receipt>> {
        match self.try_enlist(client, prepared).await {
            Ok(receipts) => receipts.into_iter().map(Some).collect(),
            Err(failure) => {
                tracing::debug!(%failure, "an enlisted unit was not committed for sure");
                *client = None;
                prepared.iter().map(|_| None).collect()
            }
        }
    }

    async fn try_enlist(
        &self,
        kept: &mut Option<tokio_postgres::Client>,
        prepared: &[Prepared],
    ) -> Result<Vec<Receipt>> {
        let client = match kept {
            Some(client) if !client.is_closed() => client,
            _ => {
                let (client, connection) =
                    tokio_postgres::connect(&self.args.service.database_url, tokio_postgres::NoTls).await?;
                tokio::spawn(connection);
                kept.insert(client)
            }
        };
        let transaction = client.transaction().await?;
        let mut push: Option<corelane::engine::Push> = None;
        for prepared in prepared {
            push = Some(match push {
                None => self.engine.outbox().push(&prepared.message)?,
                Some(push) => push.push(&prepared.message)?,
            });
        }
        let Some(push) = push else { return Ok(Vec::new()) };
        let enlisted = push.enlist(&transaction).await?;
        let receipts = enlisted.receipts.clone();
        transaction.commit().await?;
        enlisted.announce();
        Ok(receipts)
    }

    fn note(&self, prepared: &[Prepared], receipts: &[Option<Receipt>]) {
        let stored: Vec<SinkMessage> = prepared
            .iter()
            .zip(receipts)
            .filter_map(|(prepared, receipt)| {
                let receipt = (*receipt)?;
                Some(SinkMessage {
                    message_id: receipt.message_id,
                    stream_id: prepared.stream_id,
                    stream_seq: receipt.stream_seq,
                    version: receipt.version,
                    fence: 0,
                    destination_hash: 0,
                    payload_hash: prepared.payload_hash,
                })
            })
            .collect();
        if let Err(failure) = self.journal.lock().unwrap_or_else(PoisonError::into_inner).append(&stored, false) {
            tracing::error!(%failure, "an acknowledgement could not be written down");
        }
    }
}
