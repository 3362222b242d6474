//! The service of `verify --scenario relay`, in a process of its own that can be killed: it receives, writes a row of its
//! own for each message, and emits one on the same stream.
//!
//! Invariants
//! - What it emits bears the bytes of what arrived, under an id of its own: a message that was handled twice is seen twice.
//! - Handlers fail at times, after they wrote: by an error of theirs and by a statement that breaks their transaction.

use std::time::Duration;

use clap::Args;
use corelane::engine::Engine;
use corelane::inbox::Handling;
use corelane::message::{Enqueue, Header, PayloadError, Wishes};
use corelane::{Consumer, Delivery, Handler, HandlerContext, HandlerError};
use rand::RngExt;
use tokio::io::{AsyncBufReadExt, BufReader};
use uuid::Uuid;

use super::engine_process::{ServiceArgs, config, start_when_possible};
use super::relay::{LOCK_MS, SOURCE};
use crate::baselines::{DESTINATION, TYPE_NAME};
use crate::broker::transport::BrokerTransport;
use crate::failure::{Failure, Result};
use crate::target::quoted;

/// Options of the service's process.
#[derive(Clone, Debug, Args)]
pub struct RelayArgs {
    /// The engine.
    #[command(flatten)]
    pub service: ServiceArgs,
}

/// Runs until told to stop, or until the parent is gone.
///
/// # Errors
/// Where the engine cannot be started.
pub async fn run(args: RelayArgs) -> Result<()> {
    let config = config(&args.service, &[("inbox.poll_ms", "200"), ("inbox.busy_ms_max", "2000")])?;
    let transport = || BrokerTransport::new(args.service.sink.clone()).with_lock_ms(LOCK_MS);
    let engine = start_when_possible(&config, transport).await?;
    let consumer = consume_when_possible(&engine, &args.service.schema).await?;
    println!("started");
    let mut orders = BufReader::new(tokio::io::stdin()).lines();
    while let Ok(Some(order)) = orders.next_line().await {
        match order.as_str() {
            // It makes nothing by itself.
            "quiet" => println!("quiet"),
            "stop" => break,
            _ => return Err(Failure::Broken(format!("no order of ours: {order}"))),
        }
    }
    let consumed = consumer.stop(Duration::from_secs(5)).await;
    let report = engine.shutdown(Duration::from_secs(10)).await;
    println!("stopped drained={} left={} handlers={}", report.drained, report.rows_left, consumed.left);
    Ok(())
}

async fn consume_when_possible(engine: &Engine, schema: &str) -> Result<Consumer> {
    for _ in 0..200 {
        match engine.consumer("relay").source(SOURCE).other_types(Relay::new(schema)).start().await {
            Ok(consumer) => return Ok(consumer),
            Err(corelane::Error::Store(error)) => {
                tracing::debug!(%error, "not yet");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(Failure::TimedOut("the consumer could not be started within 20 s".into()))
}

/// The handler.
#[derive(Debug)]
pub struct Relay {
    insert: String,
    /// Of a thousand tries so many end in each kind of failure.
    failures_permille: u32,
}

impl Relay {
    /// One that fails at times.
    #[must_use]
    pub fn new(schema: &str) -> Self {
        let insert = format!("insert into {}.loadgen_effects (message_id, attempt) values ($1, $2)", quoted(schema));
        Self { insert, failures_permille: 5 }
    }

    /// One that does not.
    #[must_use]
    pub fn without_failures(self) -> Self {
        Self { failures_permille: 0, ..self }
    }
}

impl Handler for Relay {
    fn handle<'a>(&'a self, delivery: &'a Delivery, context: &'a mut HandlerContext<'_>) -> Handling<'a> {
        Box::pin(async move {
            let transaction = context.transaction()?;
            let attempt = i32::try_from(context.attempt()).unwrap_or(i32::MAX);
            let insert = transaction.prepare(&self.insert).await?;
            transaction.execute(&insert, &[&delivery.message_id, &attempt]).await?;
            context.push(&Emitted {
                stream_id: delivery.stream_id,
                payload: &delivery.payload,
                // The same at each try.
                is_event: delivery.stream_id.is_some() && delivery.message_id.as_u128() % 10 < 7,
            })?;
            let permille = rand::rng().random_range(0..1_000);
            if permille < self.failures_permille {
                return Err(HandlerError::retry("not this time"));
            }
            if permille < 2 * self.failures_permille {
                transaction.batch_execute("select 1 / 0").await?;
            }
            Ok(())
        })
    }

    fn needs_transaction(&self) -> bool {
        true
    }
}

struct Emitted<'a> {
    stream_id: Option<Uuid>,
    payload: &'a [u8],
    is_event: bool,
}

impl Enqueue for Emitted<'_> {
    fn header(&self) -> Header<'_> {
        Header {
            type_name: TYPE_NAME,
            content_type: "",
            is_event: self.is_event,
            stream_id: self.stream_id,
            destinations: &[DESTINATION],
            wishes: Wishes::default(),
            check_json: false,
        }
    }

    fn write_payload(&self, buffer: &mut Vec<u8>, bytes_max: usize) -> std::result::Result<(), PayloadError> {
        if self.payload.len() > bytes_max {
            return Err(PayloadError::TooLong);
        }
        buffer.extend_from_slice(self.payload);
        Ok(())
    }
}
