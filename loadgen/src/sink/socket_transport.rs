//! The engine's way to the sink, as a broker client would be: a few connections, one batch at a time on each.
//!
//! Invariants
//! - A connection on which an answer is missing is never used again: the next answer would be the wrong one.
//! - Could not connect or send: the sink has not got it (`NotReady`). Sent, no answer: nobody knows (`Unknown`).

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};

use corelane::error::FailureReason;
use corelane::seam::transport::{OutgoingBatch, PublishOutcome, Transport, TransportLimits};
use tokio::net::UnixStream;
use uuid::Uuid;

use super::frames::{Answer, Mode, Request, SinkMessage, hash_of, receive, send};
use crate::failure::{Failure, Result};

/// The client.
#[derive(Debug)]
pub struct SocketTransport {
    socket: PathBuf,
    idle: Mutex<Vec<UnixStream>>,
}

const IDLE_MAX: usize = 8;

impl SocketTransport {
    /// A client of the sink that listens there.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Self { socket, idle: Mutex::default() }
    }

    async fn connection(&self) -> std::io::Result<UnixStream> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match idle {
            Some(connection) => Ok(connection),
            None => UnixStream::connect(&self.socket).await,
        }
    }

    fn keep(&self, connection: UnixStream) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_MAX {
            idle.push(connection);
        }
    }

    async fn send(&self, batch: &dyn OutgoingBatch) -> Vec<PublishOutcome> {
        let messages = (0..batch.len()).map(|index| message_of(batch, index)).collect();
        let body = Request::Publish(messages).to_bytes();
        let Ok(mut connection) = self.connection().await else {
            return vec![PublishOutcome::NotReady; batch.len()];
        };
        // A send into a socket whose other end was killed may succeed: from here on nobody knows.
        let answers = match send(&mut connection, &body).await {
            Ok(()) => receive(&mut connection).await,
            Err(error) => Err(error),
        };
        match answers {
            Ok(answers) => {
                self.keep(connection);
                answers.iter().map(|byte| outcome_of(Answer::of(*byte))).collect()
            }
            Err(error) => vec![PublishOutcome::Unknown { text: error.to_string() }; batch.len()],
        }
    }
}

fn message_of(batch: &dyn OutgoingBatch, index: usize) -> SinkMessage {
    let message = batch.get(index);
    SinkMessage {
        message_id: message.message_id,
        stream_id: message.stream_id.unwrap_or(Uuid::nil()),
        stream_seq: message.stream_seq,
        version: message.version,
        fence: message.fence,
        destination_hash: hash_of(batch.destination().as_bytes()),
        payload_hash: hash_of(message.payload),
    }
}

fn outcome_of(answer: Answer) -> PublishOutcome {
    match answer {
        Answer::Accepted => PublishOutcome::Accepted,
        Answer::NotReady => PublishOutcome::NotReady,
        Answer::Refused => {
            PublishOutcome::Failed { reason: FailureReason::TransportException, text: "refused by the sink".into() }
        }
        Answer::Unknown => PublishOutcome::Unknown { text: "the sink does not know".into() },
    }
}

impl Transport for SocketTransport {
    fn limits(&self) -> TransportLimits {
        TransportLimits { timeout_ms: 1_000, ..TransportLimits::default() }
    }

    fn publish<'a>(
        &'a self,
        batch: &'a dyn OutgoingBatch,
        outcomes: &'a mut Vec<PublishOutcome>,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(async move { *outcomes = self.send(batch).await })
    }

    fn name(&self) -> &str {
        "sink"
    }
}

/// The verifier's way to the sink: orders and questions.
#[derive(Clone, Debug)]
pub struct SinkControl {
    /// Where it listens.
    pub socket: PathBuf,
}

impl SinkControl {
    /// Tells the sink how to behave, for so long.
    ///
    /// # Errors
    /// Where it does not answer.
    pub async fn mode(&self, mode: Mode, ms: u32) -> Result<()> {
        self.ask(&Request::Mode(mode, ms)).await.map(|_| ())
    }

    /// How many messages stand in the journal, and of how many the sender was told nothing certain.
    ///
    /// # Errors
    /// Where it does not answer.
    pub async fn count(&self) -> Result<(u64, u64)> {
        let answer = self.ask(&Request::Count).await?;
        let number = |at: usize| answer.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes);
        number(0).zip(number(8)).ok_or_else(|| Failure::TimedOut("the sink's answer is too short".into()))
    }

    async fn ask(&self, request: &Request) -> Result<Vec<u8>> {
        let what = || format!("the sink at {}", self.socket.display());
        let mut socket = UnixStream::connect(&self.socket).await.map_err(Failure::io(what()))?;
        send(&mut socket, &request.to_bytes()).await.map_err(Failure::io(what()))?;
        receive(&mut socket).await.map_err(Failure::io(what()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::journal;
    use super::super::server::{SinkArgs, run};
    use super::*;
    use corelane::envelope::Trace;
    use corelane::seam::transport::OutgoingMessage;
    use std::time::Duration;

    struct One(i64);
    impl OutgoingBatch for One {
        fn destination(&self) -> &str {
            "orders"
        }
        fn len(&self) -> usize {
            1
        }
        fn get(&self, _: usize) -> OutgoingMessage<'_> {
            OutgoingMessage {
                message_id: Uuid::from_u128(self.0 as u128),
                stream_id: None,
                stream_seq: self.0,
                version: 0,
                fence: 1,
                type_name: "t",
                content_type: "",
                correlation_id: Uuid::nil(),
                causation_id: Uuid::nil(),
                trace: Trace::default(),
                metadata: b"",
                payload: b"x",
            }
        }
    }

    async fn outcome(transport: &SocketTransport, seq: i64) -> PublishOutcome {
        let mut outcomes = Vec::new();
        match tokio::time::timeout(Duration::from_millis(600), transport.publish(&One(seq), &mut outcomes)).await {
            Ok(()) => outcomes.remove(0),
            Err(_) => PublishOutcome::Unknown { text: "timed out".into() },
        }
    }

    #[tokio::test]
    async fn every_mode_answers_and_journals_as_it_says() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("sink");
        let path = directory.path().join("journal");
        let transport = SocketTransport::new(socket.clone());
        assert_eq!(outcome(&transport, 1).await, PublishOutcome::NotReady, "nobody listens yet");
        tokio::spawn(run(SinkArgs { socket: socket.clone(), journal: path.clone() }));
        let control = SinkControl { socket };
        while control.count().await.is_err() {
            tokio::task::yield_now().await;
        }
        assert_eq!(outcome(&transport, 2).await, PublishOutcome::Accepted);
        for (mode, seq) in [
            (Mode::NotReady, 3),
            (Mode::Refuse, 4),
            (Mode::UnknownBefore, 5),
            (Mode::UnknownAfter, 6),
            (Mode::Silent, 7),
            (Mode::Late, 8),
        ] {
            control.mode(mode, 60_000).await.unwrap();
            let outcome = outcome(&transport, seq).await;
            let fits = match mode {
                Mode::NotReady => outcome == PublishOutcome::NotReady,
                Mode::Refuse => matches!(outcome, PublishOutcome::Failed { .. }),
                Mode::Late => outcome == PublishOutcome::Accepted,
                _ => matches!(outcome, PublishOutcome::Unknown { .. }),
            };
            assert!(fits, "{mode:?}: {outcome:?}");
        }
        let entries = journal::read(&path).unwrap();
        let written: Vec<_> = entries.iter().map(|entry| (entry.message.stream_seq, entry.answered_unknown)).collect();
        assert_eq!(written, [(2, false), (6, true), (7, true), (8, false)]);
        assert_eq!(control.count().await.unwrap(), (4, 2));
    }
}
