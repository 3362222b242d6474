//! A client of the broker: one connection on which it receives, others for what is asked beside it.
//!
//! Invariants
//! - The receiving connection is the client: when it ends, what the client holds comes again, and the next connection is
//!   another client.
//! - A connection on which an answer is missing is never used again.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use uuid::Uuid;

use super::frames::{Delivered, Order, QueueState, Settled, Whole};
use super::queue::Faults;
use crate::sink::connections::Connections;
use crate::sink::frames::{receive, send};

/// How long the broker may let a client wait for a message, in milliseconds.
const WAIT_MS: u32 = 1_000;

/// See the module.
#[derive(Debug)]
pub struct BrokerClient {
    socket: PathBuf,
    /// Changes when the receiving connection does: what the old one held has come back.
    client: AtomicU64,
    receiving: Mutex<Option<UnixStream>>,
    asking: Connections,
}

fn broken(error: impl std::fmt::Display) -> std::io::Error {
    std::io::Error::other(error.to_string())
}

impl BrokerClient {
    /// A client of the broker that listens there.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        let client = AtomicU64::new(Uuid::new_v4().as_u64_pair().0);
        Self { asking: Connections::new(socket.clone()), socket, client, receiving: Mutex::default() }
    }

    /// Publishes messages to a queue, in order; a byte each, as the sink answers.
    ///
    /// # Errors
    /// Of the socket: whether they were taken is not known.
    pub async fn publish(&self, queue: &str, messages: Vec<Whole>) -> std::io::Result<Vec<u8>> {
        self.ask_raw(&Order::Publish { queue: queue.to_owned(), messages }).await
    }

    /// Messages arrive in a queue from somebody who is no engine, in order.
    ///
    /// # Errors
    /// Of the socket: whether they were taken is not known.
    pub async fn arrive(&self, queue: &str, messages: Vec<Whole>) -> std::io::Result<()> {
        self.ask_raw(&Order::Arrive { queue: queue.to_owned(), messages }).await.map(drop)
    }

    /// Up to so many messages; none after a second without one. May be dropped: what was given comes again.
    ///
    /// # Errors
    /// Of the socket.
    pub async fn receive(&self, queue: &str, rows_max: usize) -> std::io::Result<Vec<Delivered>> {
        let mut slot = self.receiving.lock().await;
        // Taken out: if this call is dropped, its answer is never read by another.
        let mut socket = match slot.take() {
            Some(socket) => socket,
            None => {
                self.client.store(Uuid::new_v4().as_u64_pair().0, Ordering::Relaxed);
                UnixStream::connect(&self.socket).await?
            }
        };
        let client = self.client.load(Ordering::Relaxed);
        let rows_max = u32::try_from(rows_max).unwrap_or(u32::MAX);
        let order = Order::Receive { client, queue: queue.to_owned(), rows_max, wait_ms: WAIT_MS };
        send(&mut socket, &order.to_bytes().map_err(broken)?).await?;
        let answer = receive(&mut socket).await?;
        *slot = Some(socket);
        postcard::from_bytes(&answer).map_err(broken)
    }

    /// Says what became of messages; whether each was still ours.
    ///
    /// # Errors
    /// Of the socket: what the broker knows of it is not known.
    pub async fn settle(&self, settled: Vec<(u64, Settled)>) -> std::io::Result<Vec<bool>> {
        self.ask(&Order::Settle { client: self.client.load(Ordering::Relaxed), settled }).await
    }

    /// Keeps messages longer; which are still ours.
    ///
    /// # Errors
    /// Of the socket.
    pub async fn renew(&self, receipts: Vec<u64>) -> std::io::Result<Vec<bool>> {
        self.ask(&Order::Renew { client: self.client.load(Ordering::Relaxed), receipts }).await
    }

    /// Tells the broker to misbehave.
    ///
    /// # Errors
    /// Of the socket.
    pub async fn misbehave(&self, faults: Faults) -> std::io::Result<()> {
        self.ask_raw(&Order::Misbehave(faults)).await.map(drop)
    }

    /// Ends all connections to the broker, this one's as well.
    ///
    /// # Errors
    /// Where it cannot be reached.
    pub async fn hang_up(&self) -> std::io::Result<()> {
        let mut socket = UnixStream::connect(&self.socket).await?;
        send(&mut socket, &Order::HangUp.to_bytes().map_err(broken)?).await
    }

    /// The queues in figures.
    ///
    /// # Errors
    /// Of the socket.
    pub async fn states(&self) -> std::io::Result<Vec<QueueState>> {
        self.ask(&Order::States).await
    }

    async fn ask<T: DeserializeOwned>(&self, order: &Order) -> std::io::Result<T> {
        postcard::from_bytes(&self.ask_raw(order).await?).map_err(broken)
    }

    async fn ask_raw(&self, order: &Order) -> std::io::Result<Vec<u8>> {
        self.asking.ask(&order.to_bytes().map_err(broken)?).await.map_err(broken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::queue::LOCK_MS;
    use crate::sink::journal;
    use crate::sink::server::{SinkArgs, run};

    fn message(stream: u128, id: u128) -> Whole {
        Whole {
            message_id: Uuid::from_u128(id),
            stream_id: Some(Uuid::from_u128(stream)),
            payload: b"{}".to_vec(),
            ..Whole::default()
        }
    }

    fn ids(given: &[Delivered]) -> Vec<u128> {
        given.iter().map(|delivered| delivered.message.message_id.as_u128()).collect()
    }

    #[tokio::test]
    async fn what_one_publishes_another_receives_and_a_hang_up_brings_it_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let args = SinkArgs {
            socket: path("socket"),
            journal: path("journal"),
            queues: Some(path("queues")),
            lock_ms: LOCK_MS,
        };
        tokio::spawn(run(args));
        let (publisher, consumer) = (BrokerClient::new(path("socket")), BrokerClient::new(path("socket")));
        while publisher.states().await.is_err() {
            tokio::task::yield_now().await;
        }
        let waiting = tokio::spawn(async move { (consumer.receive("orders", 9).await, consumer) });
        let answers = publisher.publish("orders", vec![message(1, 1), message(1, 2), message(2, 3)]).await.unwrap();
        assert_eq!(answers, [0, 0, 0]);
        let (given, consumer) = waiting.await.unwrap();
        let given = given.unwrap();
        assert_eq!(ids(&given), [1, 2, 3]);
        assert_eq!(consumer.settle(vec![(given[0].receipt, Settled::Completed)]).await.unwrap(), [true]);
        publisher.hang_up().await.unwrap();
        let again = loop {
            // The hang-up is noticed by the next use.
            match consumer.receive("orders", 9).await {
                Ok(again) if !again.is_empty() => break again,
                _ => tokio::task::yield_now().await,
            }
        };
        let mut seen = ids(&again);
        seen.sort_unstable();
        assert_eq!(seen, [2, 3]);
        assert!(again.iter().all(|delivered| delivered.delivery_count == 2));
        let settlements = vec![(again[0].receipt, Settled::Completed), (given[1].receipt, Settled::Completed)];
        // The asking connection was hung up as well; the next one is new.
        let settled = match consumer.settle(settlements.clone()).await {
            Ok(settled) => settled,
            Err(_) => consumer.settle(settlements).await.unwrap(),
        };
        assert_eq!(settled, [true, false]);
        assert_eq!(journal::read(&path("journal")).unwrap().len(), 3, "the sink's journal has them as well");
    }
}
