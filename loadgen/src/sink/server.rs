//! The sink's process: takes batches over a unix socket, writes them down, answers; misbehaves when told to.
//!
//! Invariants
//! - Batches are written in the order in which they are answered: one lock around both decisions.
//! - A mode lasts for the time it was given and no longer, so that a lost "back to normal" hurts nobody.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use tokio::net::{UnixListener, UnixStream};

use super::frames::{Answer, Mode, Request, SinkMessage, receive, send};
use super::journal::Journal;
use crate::broker::frames::{Order, Whole};
use crate::broker::queue::LOCK_MS;
use crate::broker::server::Broker;
use crate::failure::{Failure, Result};

/// Options of the sink's process.
#[derive(Clone, Debug, Args)]
pub struct SinkArgs {
    /// Where to listen.
    #[arg(long)]
    pub socket: PathBuf,
    /// Where to write.
    #[arg(long)]
    pub journal: PathBuf,
    /// Be a broker as well: where its queues are written.
    #[arg(long)]
    pub queues: Option<PathBuf>,
    /// How long a broker's locks last, in milliseconds.
    #[arg(long, default_value_t = LOCK_MS)]
    pub lock_ms: u64,
}

#[derive(Debug)]
struct Sink {
    journal: Journal,
    mode: Mode,
    mode_until: Instant,
}

/// How long `Late` takes: well within a publish's time limit, far beyond a good answer.
const LATE: Duration = Duration::from_millis(300);

/// Runs until killed.
///
/// # Errors
/// Where it cannot listen or open its journal.
pub async fn run(args: SinkArgs) -> Result<()> {
    let journal = Journal::open(&args.journal)?;
    let broker = args.queues.as_deref().map(|path| Broker::open(path, args.lock_ms)).transpose()?.map(Arc::new);
    let sink = Arc::new(Mutex::new(Sink { journal, mode: Mode::Accept, mode_until: Instant::now() }));
    // A sink that was killed leaves its socket behind.
    let _ = std::fs::remove_file(&args.socket);
    let what = format!("listening on {}", args.socket.display());
    let listener = UnixListener::bind(&args.socket).map_err(Failure::io(what))?;
    loop {
        let (socket, _) = listener.accept().await.map_err(Failure::io("accepting"))?;
        let (sink, broker) = (sink.clone(), broker.clone());
        tokio::spawn(async move {
            let mut client = None;
            let served = serve(socket, &sink, broker.as_deref(), &mut client);
            let ended = match &broker {
                None => served.await,
                Some(broker) => tokio::select! {
                    ended = served => ended,
                    () = broker.hung_up() => Err(std::io::Error::other("hung up")),
                },
            };
            if let Some((broker, client)) = broker.zip(client) {
                broker.disconnect(client);
            }
            if let Err(error) = ended {
                tracing::debug!(%error, "a client of the sink went away");
            }
        });
    }
}

async fn serve(
    mut socket: UnixStream,
    sink: &Mutex<Sink>,
    broker: Option<&Broker>,
    client: &mut Option<u64>,
) -> std::io::Result<()> {
    loop {
        let frame = receive(&mut socket).await?;
        if let Some(broker) = broker
            && let Some(order) = Order::parse(&frame)
        {
            if let Order::Receive { client: receiving, .. } = &order {
                *client = Some(*receiving);
            }
            let answer = match order {
                Order::Publish { queue, messages } => publish(sink, broker, &queue, messages).await?,
                order => broker.answer(order).await.map_err(std::io::Error::other)?,
            };
            send(&mut socket, &answer).await?;
            continue;
        }
        let Some(request) = Request::parse(&frame) else { return Err(std::io::Error::other("no request of ours")) };
        match request {
            Request::Publish(messages) => {
                let (mode, answers) = decide(sink, &messages, |_| Ok(()))?;
                hesitate(mode).await;
                send(&mut socket, &answers).await?;
            }
            Request::Mode(mode, ms) => {
                {
                    let mut sink = sink.lock().unwrap_or_else(PoisonError::into_inner);
                    (sink.mode, sink.mode_until) = (mode, Instant::now() + Duration::from_millis(ms.into()));
                }
                send(&mut socket, &[]).await?;
            }
            Request::Count => {
                let counts = {
                    let sink = sink.lock().unwrap_or_else(PoisonError::into_inner);
                    [sink.journal.count().to_be_bytes(), sink.journal.unknown().to_be_bytes()].concat()
                };
                send(&mut socket, &counts).await?;
            }
        }
    }
}

async fn hesitate(mode: Mode) {
    match mode {
        Mode::Silent => std::future::pending().await,
        Mode::Late => tokio::time::sleep(LATE).await,
        _ => {}
    }
}

/// Into the journal as hashes, and whole into the queue.
async fn publish(sink: &Mutex<Sink>, broker: &Broker, queue: &str, messages: Vec<Whole>) -> std::io::Result<Vec<u8>> {
    let hashed: Vec<SinkMessage> = messages.iter().map(|message| message.hashed(queue)).collect();
    let (mode, answers) = decide(sink, &hashed, |accepted| {
        let taken = messages.iter().enumerate().filter(|(index, _)| accepted.contains(index));
        broker.publish(queue, taken.map(|(_, message)| message.clone()).collect())
    })?;
    hesitate(mode).await;
    Ok(answers)
}

/// How each message fares; `take` is given the indexes of those that are taken, under the lock that orders the journal.
fn decide(
    sink: &Mutex<Sink>,
    messages: &[SinkMessage],
    take: impl FnOnce(&[usize]) -> Result<()>,
) -> std::io::Result<(Mode, Vec<u8>)> {
    let mut sink = sink.lock().unwrap_or_else(PoisonError::into_inner);
    let mode = if Instant::now() < sink.mode_until { sink.mode } else { Mode::Accept };
    let answer = |index: usize| match mode {
        Mode::Accept | Mode::Late | Mode::Silent => Answer::Accepted,
        Mode::Refuse if index.is_multiple_of(3) => Answer::Refused,
        Mode::Refuse => Answer::Accepted,
        Mode::NotReady => Answer::NotReady,
        Mode::UnknownAfter | Mode::UnknownBefore => Answer::Unknown,
    };
    let answers: Vec<u8> = (0..messages.len()).map(|index| answer(index) as u8).collect();
    let accepted: Vec<usize> = match mode {
        Mode::UnknownBefore | Mode::NotReady => Vec::new(),
        _ => (0..messages.len()).filter(|index| answer(*index) != Answer::Refused).collect(),
    };
    let entries: Vec<SinkMessage> = accepted.iter().map(|index| messages[*index]).collect();
    let unknown = matches!(mode, Mode::UnknownAfter | Mode::Silent);
    take(&accepted).map_err(std::io::Error::other)?;
    sink.journal.append(&entries, unknown).map_err(std::io::Error::other)?;
    Ok((mode, answers))
}
