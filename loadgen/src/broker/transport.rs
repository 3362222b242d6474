//! The broker as a transport of the engine: both ways.
//!
//! Invariants
//! - What is published carries its body; what comes of it is as for the sink (`sink::socket_transport`).
//! - A receiver that is paused asks for nothing; what was given before stays given.

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use corelane::envelope::Trace;
use corelane::seam::receiver::{
    Delivery, OnDisconnected, Receipt, ReceiveError, Receiver, Receiving, SettleOutcome, Settlement,
};
use corelane::seam::transport::{OutgoingBatch, PublishOutcome, Transport, TransportLimits};
use tokio::sync::watch;

use super::client::BrokerClient;
use super::frames::{Delivered, Order, Settled, Whole};
use super::queue::LOCK_MS;
use crate::sink::connections::{Connections, NoAnswer};
use crate::sink::socket_transport::outcomes;

/// The broker at a socket.
#[derive(Debug)]
pub struct BrokerTransport {
    socket: PathBuf,
    connections: Connections,
    /// How long its locks last, in milliseconds.
    lock_ms: u64,
}

impl BrokerTransport {
    /// The broker that listens there.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Self { connections: Connections::new(socket.clone()), socket, lock_ms: LOCK_MS }
    }

    /// Tells receivers how long locks last, where that is not as usual.
    #[must_use]
    pub fn with_lock_ms(self, lock_ms: u64) -> Self {
        Self { lock_ms, ..self }
    }
}

fn whole(batch: &dyn OutgoingBatch, index: usize) -> Whole {
    let message = batch.get(index);
    Whole {
        message_id: message.message_id,
        stream_id: message.stream_id,
        stream_seq: message.stream_seq,
        version: message.version,
        fence: message.fence,
        type_name: message.type_name.to_owned(),
        content_type: message.content_type.to_owned(),
        correlation_id: message.correlation_id,
        causation_id: message.causation_id,
        trace_id: message.trace.trace_id,
        span_id: message.trace.span_id,
        trace_flags: message.trace.flags,
        metadata: message.metadata.to_vec(),
        payload: message.payload.to_vec(),
    }
}

impl Transport for BrokerTransport {
    fn limits(&self) -> TransportLimits {
        TransportLimits { timeout_ms: 1_000, ..TransportLimits::default() }
    }

    fn publish<'a>(
        &'a self,
        batch: &'a dyn OutgoingBatch,
        into: &'a mut Vec<PublishOutcome>,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(async move {
            let messages = (0..batch.len()).map(|index| whole(batch, index)).collect();
            let answer = match (Order::Publish { queue: batch.destination().to_owned(), messages }).to_bytes() {
                Ok(body) => self.connections.ask(&body).await,
                Err(_) => Err(NoAnswer::NotSent),
            };
            *into = outcomes(answer, batch.len());
        })
    }

    fn name(&self) -> &str {
        "broker"
    }

    fn receiver(&self, source: &str) -> Option<Arc<dyn Receiver>> {
        Some(Arc::new(BrokerReceiver {
            client: BrokerClient::new(self.socket.clone()),
            source: source.to_owned(),
            lock_ms: self.lock_ms,
            paused: watch::Sender::new(false),
            on_disconnected: Mutex::new(None),
        }))
    }
}

struct BrokerReceiver {
    client: BrokerClient,
    source: String,
    lock_ms: u64,
    paused: watch::Sender<bool>,
    on_disconnected: Mutex<Option<OnDisconnected>>,
}

fn delivery(delivered: Delivered) -> Delivery {
    let Whole {
        message_id,
        stream_id,
        type_name,
        content_type,
        correlation_id,
        causation_id,
        trace_id,
        span_id,
        trace_flags,
        metadata,
        payload,
        ..
    } = delivered.message;
    Delivery {
        message_id,
        stream_id,
        type_name,
        content_type,
        correlation_id,
        causation_id,
        trace: Trace { trace_id, span_id, flags: trace_flags },
        metadata,
        payload,
        delivery_count: delivered.delivery_count,
        turn: delivered.turn,
        receipt: Receipt(delivered.receipt),
    }
}

impl Receiver for BrokerReceiver {
    fn receive(&self, rows_max: usize) -> Receiving<'_, Result<Vec<Delivery>, ReceiveError>> {
        Box::pin(async move {
            let mut paused = self.paused.subscribe();
            loop {
                if paused.wait_for(|paused| !paused).await.is_err() {
                    return Err(ReceiveError::Disconnected("the receiver has gone".to_owned()));
                }
                match self.client.receive(&self.source, rows_max).await {
                    Ok(given) if given.is_empty() => {}
                    Ok(given) => return Ok(given.into_iter().map(delivery).collect()),
                    Err(error) => {
                        let text = error.to_string();
                        let told = self.on_disconnected.lock().unwrap_or_else(PoisonError::into_inner).clone();
                        if let Some(told) = told {
                            told(&text);
                        }
                        return Err(ReceiveError::Disconnected(text));
                    }
                }
            }
        })
    }

    fn settle<'a>(&'a self, settlements: &'a [(Receipt, Settlement)]) -> Receiving<'a, Vec<SettleOutcome>> {
        Box::pin(async move {
            let settled = settlements.iter().map(|(receipt, settlement)| {
                let settled = match settlement {
                    Settlement::Complete => Settled::Completed,
                    Settlement::Abandon => Settled::Abandoned,
                    Settlement::DeadLetter { .. } => Settled::Dead,
                };
                (receipt.0, settled)
            });
            match self.client.settle(settled.collect()).await {
                Ok(held) => held
                    .into_iter()
                    .map(|held| if held { SettleOutcome::Settled } else { SettleOutcome::LockLost })
                    .collect(),
                Err(_) => vec![SettleOutcome::Failed; settlements.len()],
            }
        })
    }

    fn renew<'a>(&'a self, receipts: &'a [Receipt]) -> Receiving<'a, ()> {
        Box::pin(async move {
            // What cannot be renewed is found when it is settled.
            let _ = self.client.renew(receipts.iter().map(|receipt| receipt.0).collect()).await;
        })
    }

    fn lock_ms(&self) -> u64 {
        self.lock_ms
    }

    fn pause(&self) {
        self.paused.send_replace(true);
    }

    fn resume(&self) {
        self.paused.send_replace(false);
    }

    fn on_disconnected(&self, callback: OnDisconnected) {
        *self.on_disconnected.lock().unwrap_or_else(PoisonError::into_inner) = Some(callback);
    }

    fn name(&self) -> &str {
        &self.source
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::server::{SinkArgs, run};
    use corelane::seam::transport::OutgoingMessage;
    use uuid::Uuid;

    struct Two;
    impl OutgoingBatch for Two {
        fn destination(&self) -> &str {
            "orders"
        }
        fn len(&self) -> usize {
            2
        }
        fn get(&self, index: usize) -> OutgoingMessage<'_> {
            OutgoingMessage {
                message_id: Uuid::from_u128(index as u128 + 1),
                stream_id: Some(Uuid::from_u128(9)),
                stream_seq: index as i64 + 1,
                version: 0,
                fence: 1,
                type_name: "OrderPlaced",
                content_type: "application/json",
                correlation_id: Uuid::from_u128(5),
                causation_id: Uuid::nil(),
                trace: Trace::default(),
                metadata: b"",
                replayed: false,
                payload: b"\xff\x00",
            }
        }
    }

    #[tokio::test]
    async fn what_goes_out_one_way_comes_in_the_other_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        tokio::spawn(run(SinkArgs {
            socket: path("socket"),
            journal: path("journal"),
            queues: Some(path("queues")),
            lock_ms: LOCK_MS,
        }));
        let transport = BrokerTransport::new(path("socket"));
        let mut into = Vec::new();
        while into.is_empty() || into[0] == PublishOutcome::NotReady {
            tokio::task::yield_now().await;
            transport.publish(&Two, &mut into).await;
        }
        assert_eq!(into, [PublishOutcome::Accepted, PublishOutcome::Accepted]);
        let receiver = transport.receiver("orders").unwrap();
        let given = receiver.receive(10).await.unwrap();
        let of: Vec<_> = given.iter().map(|one| (one.message_id.as_u128(), one.payload.as_slice())).collect();
        assert_eq!(of, [(1, b"\xff\x00".as_slice()), (2, b"\xff\x00".as_slice())]);
        assert_eq!((given[0].correlation_id, given[0].delivery_count), (Uuid::from_u128(5), 1));
        let settlements = [(given[0].receipt, Settlement::Complete), (Receipt(77), Settlement::Complete)];
        assert_eq!(receiver.settle(&settlements).await, [SettleOutcome::Settled, SettleOutcome::LockLost]);
        receiver.pause();
        assert_eq!(receiver.settle(&[(given[1].receipt, Settlement::Abandon)]).await, [SettleOutcome::Settled]);
        let while_paused = tokio::time::timeout(std::time::Duration::from_millis(100), receiver.receive(10)).await;
        assert!(while_paused.is_err(), "paused");
        receiver.resume();
        assert_eq!(receiver.receive(10).await.unwrap()[0].delivery_count, 2);
    }
}
