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
    let sink = Arc::new(Mutex::new(Sink { journal, mode: Mode::Accept, mode_until: Instant::now() }));
    // A sink that was killed leaves its socket behind.
    let _ = std::fs::remove_file(&args.socket);
    let what = format!("listening on {}", args.socket.display());
    let listener = UnixListener::bind(&args.socket).map_err(Failure::io(what))?;
    loop {
        let (socket, _) = listener.accept().await.map_err(Failure::io("accepting"))?;
        let sink = sink.clone();
        tokio::spawn(async move {
            if let Err(error) = serve(socket, &sink).await {
                tracing::debug!(%error, "a client of the sink went away");
            }
        });
    }
}

async fn serve(mut socket: UnixStream, sink: &Mutex<Sink>) -> std::io::Result<()> {
    loop {
        let frame = receive(&mut socket).await?;
        let Some(request) = Request::parse(&frame) else { return Err(std::io::Error::other("no request of ours")) };
        match request {
            Request::Publish(messages) => {
                let (mode, answers) = decide(sink, &messages)?;
                match mode {
                    Mode::Silent => std::future::pending().await,
                    Mode::Late => tokio::time::sleep(LATE).await,
                    _ => {}
                }
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

fn decide(sink: &Mutex<Sink>, messages: &[SinkMessage]) -> std::io::Result<(Mode, Vec<u8>)> {
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
    let accepted: Vec<SinkMessage> = match mode {
        Mode::UnknownBefore | Mode::NotReady => Vec::new(),
        Mode::Refuse => {
            let kept = messages.iter().enumerate().filter(|(index, _)| answer(*index) == Answer::Accepted);
            kept.map(|(_, message)| *message).collect()
        }
        _ => messages.to_vec(),
    };
    let unknown = matches!(mode, Mode::UnknownAfter | Mode::Silent);
    sink.journal.append(&accepted, unknown).map_err(std::io::Error::other)?;
    Ok((mode, answers))
}
