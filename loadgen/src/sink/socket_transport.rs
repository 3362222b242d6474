//! The engine's way to the sink, as a broker client would be: a few connections, one batch at a time on each.
//!
//! Invariant: could not connect: the sink has not got it (`NotReady`). Sent, no answer: nobody knows (`Unknown`).

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;

use corelane::error::FailureReason;
use corelane::seam::transport::{OutgoingBatch, PublishOutcome, Transport, TransportLimits};
use tokio::net::UnixStream;
use uuid::Uuid;

use super::connections::{Connections, NoAnswer};
use super::frames::{Answer, Mode, Request, SinkMessage, hash_of, receive, send};
use crate::failure::{self, Failure};

/// The client.
#[derive(Debug)]
pub struct SocketTransport {
    connections: Connections,
}

impl SocketTransport {
    /// A client of the sink that listens there.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Self { connections: Connections::new(socket) }
    }

    async fn send(&self, batch: &dyn OutgoingBatch) -> Vec<PublishOutcome> {
        let messages = (0..batch.len()).map(|index| message_of(batch, index)).collect();
        outcomes(self.connections.ask(&Request::Publish(messages).to_bytes()).await, batch.len())
    }
}

/// What the sink's answer to a batch means.
pub fn outcomes(answer: Result<Vec<u8>, NoAnswer>, count: usize) -> Vec<PublishOutcome> {
    match answer {
        Ok(answers) => answers.iter().map(|byte| outcome_of(Answer::of(*byte))).collect(),
        Err(NoAnswer::NotSent) => vec![PublishOutcome::NotReady; count],
        Err(NoAnswer::Unknown(error)) => vec![PublishOutcome::Unknown { text: error.to_string() }; count],
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
    pub async fn mode(&self, mode: Mode, ms: u32) -> failure::Result<()> {
        self.ask(&Request::Mode(mode, ms)).await.map(|_| ())
    }

    /// How many messages stand in the journal, and of how many the sender was told nothing certain.
    ///
    /// # Errors
    /// Where it does not answer.
    pub async fn count(&self) -> failure::Result<(u64, u64)> {
        let answer = self.ask(&Request::Count).await?;
        let number = |at: usize| answer.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes);
        number(0).zip(number(8)).ok_or_else(|| Failure::TimedOut("the sink's answer is too short".into()))
    }

    async fn ask(&self, request: &Request) -> failure::Result<Vec<u8>> {
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
                replayed: false,
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
        match tokio::time::timeout(Duration::from_millis(3_000), transport.publish(&One(seq), &mut outcomes)).await {
            Ok(()) => outcomes.remove(0),
            Err(_) => PublishOutcome::Unknown { text: "timed out".into() },
        }
    }

    /// Connections that were idle over a restart of the sink cost nobody anything: a breaker would take each for a probe
    /// that failed.
    #[tokio::test]
    async fn a_restart_of_the_sink_leaves_no_dead_connection_behind() {
        let directory = tempfile::tempdir().unwrap();
        let (socket, journal) = (directory.path().join("sink"), directory.path().join("journal"));
        let transport = SocketTransport::new(socket.clone());
        let control = SinkControl { socket: socket.clone() };
        for life in 0..2_i64 {
            let sink = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            sink.spawn(run(SinkArgs { socket: socket.clone(), journal: journal.clone(), queues: None, lock_ms: 1 }));
            while control.count().await.is_err() {
                tokio::task::yield_now().await;
            }
            // Three at a time, so that three connections are kept.
            let outcomes = futures_util::future::join_all((1..=3).map(|seq| outcome(&transport, life * 3 + seq))).await;
            assert_eq!(outcomes, vec![PublishOutcome::Accepted; 3], "life {life}");
            sink.shutdown_background();
            while control.count().await.is_ok() {
                tokio::task::yield_now().await;
            }
        }
    }

    #[tokio::test]
    async fn every_mode_answers_and_journals_as_it_says() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("sink");
        let path = directory.path().join("journal");
        let transport = SocketTransport::new(socket.clone());
        assert_eq!(outcome(&transport, 1).await, PublishOutcome::NotReady, "nobody listens yet");
        tokio::spawn(run(SinkArgs { socket: socket.clone(), journal: path.clone(), queues: None, lock_ms: 1 }));
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
