//! A unix socket between an engine and the server: it cuts a connection exactly at COMMIT, and is a bad network.
//!
//! Invariants
//! - It forwards whole protocol messages of the client, so it knows where a statement ends (`Sync`).
//! - When armed, the next statement that carries a batch (a long `Bind`) is cut: after its `Sync` was
//!   forwarded and before any byte of the answer (the server commits, the client does not learn it), or
//!   just before its `Sync` (nothing commits).
//! - While it swallows, connections stay open and nothing is forwarded either way, nor is anybody new let in; what was
//!   on its way arrives afterwards, or never ([`Proxy::drop_all`]).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;

use crate::failure::{Failure, Result};

const NOT_ARMED: u8 = 0;
const AFTER_SYNC: u8 = 1;
const BEFORE_SYNC: u8 = 2;

/// A `Bind` at least so long carries messages, not a cursor.
const BATCH_BYTES_MIN: usize = 1_000;
/// How often a swallowing network is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// The proxy.
#[derive(Clone, Debug)]
pub struct Proxy {
    directory: PathBuf,
    armed: Arc<AtomicU8>,
    cuts: Arc<AtomicU64>,
    network: Arc<Network>,
}

/// What becomes of bytes on their way.
#[derive(Debug)]
struct Network {
    delay_us: AtomicU64,
    swallows: AtomicBool,
    /// Grows when all connections are dropped.
    dropped: watch::Sender<u64>,
}

impl Network {
    /// Holds bytes up as this network does.
    async fn pass(&self) {
        let delay_us = self.delay_us.load(Ordering::Relaxed);
        if delay_us > 0 {
            tokio::time::sleep(Duration::from_micros(delay_us)).await;
        }
        while self.swallows.load(Ordering::Relaxed) {
            tokio::time::sleep(LOOK).await;
        }
    }
}

impl Proxy {
    /// Listens in `directory` as a server on port 5432 would, and forwards to the server's socket.
    ///
    /// # Errors
    /// Where it cannot listen.
    pub fn start(directory: &Path, server: PathBuf) -> Result<Self> {
        let path = directory.join(".s.PGSQL.5432");
        let listener = UnixListener::bind(&path).map_err(Failure::io(format!("listening on {}", path.display())))?;
        let network =
            Network { delay_us: AtomicU64::new(0), swallows: AtomicBool::new(false), dropped: watch::Sender::new(0) };
        let this = Self {
            directory: directory.to_owned(),
            armed: Arc::default(),
            cuts: Arc::default(),
            network: Arc::new(network),
        };
        let proxy = this.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (proxy, server) = (proxy.clone(), server.clone());
                tokio::spawn(async move {
                    let mut dropped = proxy.network.dropped.subscribe();
                    tokio::select! {
                        () = proxy.between(client, &server) => {}
                        _ = dropped.changed() => {}
                    }
                });
            }
        });
        Ok(this)
    }

    /// The URL of a database behind it.
    #[must_use]
    pub fn url(&self) -> String {
        let host = self.directory.display().to_string().replace('/', "%2F");
        format!("postgresql://postgres@{host}/postgres")
    }

    /// Cuts the next batch: after its COMMIT was asked for, or just before.
    pub fn arm(&self, after_commit: bool) {
        self.armed.store(if after_commit { AFTER_SYNC } else { BEFORE_SYNC }, Ordering::Relaxed);
    }

    /// Cuts made.
    #[must_use]
    pub fn cuts(&self) -> u64 {
        self.cuts.load(Ordering::Relaxed)
    }

    /// From now on each portion takes so much longer, either way.
    pub fn delay(&self, delay: Duration) {
        let delay_us = u64::try_from(delay.as_micros()).unwrap_or(u64::MAX);
        self.network.delay_us.store(delay_us, Ordering::Relaxed);
    }

    /// Nothing gets through any more, or does again.
    pub fn swallow(&self, swallows: bool) {
        self.network.swallows.store(swallows, Ordering::Relaxed);
    }

    /// All connections end; what was on its way is lost.
    pub fn drop_all(&self) {
        self.network.dropped.send_modify(|count| *count += 1);
    }

    async fn between(&self, client: UnixStream, server: &Path) {
        self.network.pass().await;
        // A server that is down refuses: so does this proxy, by closing.
        if let Ok(server) = UnixStream::connect(server).await {
            self.forward(client, server).await;
        }
    }

    async fn forward(&self, client: UnixStream, server: UnixStream) {
        let (client_read, mut client_write) = client.into_split();
        let (mut server_read, server_write) = server.into_split();
        let is_cut = tokio::select! {
            biased;
            // It is asked first: once the last byte of a statement is out, no byte of its answer comes back.
            is_cut = self.requests(client_read, server_write) => is_cut.unwrap_or(false),
            _ = answers(&self.network, &mut server_read, &mut client_write) => false,
        };
        drop(client_write);
        if is_cut {
            // A socket that is closed over unread answers is reset, and the server would not read the statement.
            let _ = tokio::io::copy(&mut server_read, &mut tokio::io::sink()).await;
        }
    }

    /// Forwards until the client's end or a cut; answers whether that was one behind a statement.
    async fn requests(&self, mut client: OwnedReadHalf, mut server: OwnedWriteHalf) -> std::io::Result<bool> {
        let mut buffer = Vec::with_capacity(64 * 1024);
        let mut started = false;
        let mut carries_batch = false;
        loop {
            let mut done = 0;
            while let Some((kind, length)) = next_message(&buffer[done..], started) {
                started = true;
                if kind == b'B' && length >= BATCH_BYTES_MIN {
                    carries_batch = true;
                }
                if kind == b'S' {
                    let armed = if carries_batch { self.armed.swap(NOT_ARMED, Ordering::Relaxed) } else { NOT_ARMED };
                    carries_batch = false;
                    if armed != NOT_ARMED {
                        self.cuts.fetch_add(1, Ordering::Relaxed);
                        let end = if armed == AFTER_SYNC { done + length } else { done };
                        server.write_all(&buffer[..end]).await?;
                        return Ok(armed == AFTER_SYNC);
                    }
                }
                done += length;
            }
            if done > 0 {
                self.network.pass().await;
                server.write_all(&buffer[..done]).await?;
                buffer.drain(..done);
            }
            if client.read_buf(&mut buffer).await? == 0 {
                return Ok(false);
            }
        }
    }
}

async fn answers(
    network: &Network,
    server: &mut (impl AsyncRead + Unpin),
    client: &mut (impl AsyncWrite + Unpin),
) -> std::io::Result<()> {
    let mut buffer = Vec::with_capacity(64 * 1024);
    while server.read_buf(&mut buffer).await? > 0 {
        network.pass().await;
        client.write_all(&buffer).await?;
        buffer.clear();
    }
    Ok(())
}

/// Kind and whole length of the first message, if it is complete. The start-up message has no kind.
fn next_message(bytes: &[u8], started: bool) -> Option<(u8, usize)> {
    let head = usize::from(started);
    let length: [u8; 4] = bytes.get(head..head + 4)?.try_into().ok()?;
    let whole = head + u32::from_be_bytes(length) as usize;
    let kind = if started { bytes[0] } else { 0 };
    (bytes.len() >= whole).then_some((kind, whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u8, body: usize) -> Vec<u8> {
        let mut bytes = vec![kind];
        bytes.extend_from_slice(&(body as u32 + 4).to_be_bytes());
        bytes.resize(bytes.len() + body, b'x');
        bytes
    }

    /// What the server got, and whether the client's connection was cut.
    async fn sent(armed: Option<bool>, bind_bytes: usize) -> (Vec<u8>, Vec<u8>, bool) {
        let directory = tempfile::tempdir().unwrap();
        let server = UnixListener::bind(directory.path().join("server")).unwrap();
        let proxy = Proxy::start(directory.path(), directory.path().join("server")).unwrap();
        let mut client = UnixStream::connect(directory.path().join(".s.PGSQL.5432")).await.unwrap();
        let (mut server, _) = server.accept().await.unwrap();
        if let Some(after) = armed {
            proxy.arm(after);
        }
        let mut all = vec![0, 0, 0, 8, 0, 3, 0, 0];
        for (kind, body) in [(b'B', bind_bytes), (b'E', 5), (b'S', 0)] {
            all.extend_from_slice(&message(kind, body));
        }
        client.write_all(&all).await.unwrap();
        let mut got = Vec::new();
        if armed.is_some() && proxy_cuts(&proxy, bind_bytes) {
            server.read_to_end(&mut got).await.unwrap();
            let cut = client.read(&mut [0; 1]).await.unwrap_or(0) == 0;
            return (all, got, cut);
        }
        got.resize(all.len(), 0);
        server.read_exact(&mut got).await.unwrap();
        assert_eq!(proxy.cuts(), 0);
        (all, got, false)
    }

    fn proxy_cuts(_: &Proxy, bind_bytes: usize) -> bool {
        bind_bytes >= BATCH_BYTES_MIN
    }

    #[tokio::test]
    async fn after_the_commit_was_asked_for_the_server_has_everything_and_the_client_nothing() {
        let (all, got, cut) = sent(Some(true), 2_000).await;
        assert_eq!((got, cut), (all, true));
    }

    #[tokio::test]
    async fn before_it_the_sync_is_missing() {
        let (all, got, cut) = sent(Some(false), 2_000).await;
        assert_eq!((got.as_slice(), cut), (&all[..all.len() - 5], true));
    }

    #[tokio::test]
    async fn without_orders_and_for_short_statements_it_only_forwards() {
        for (armed, bytes) in [(None, 2_000), (Some(true), 10)] {
            let (all, got, cut) = sent(armed, bytes).await;
            assert_eq!((got, cut), (all, false));
        }
    }

    /// What the client sends while the network swallows reaches the server afterwards, or never.
    #[tokio::test]
    async fn what_is_swallowed_arrives_late_or_is_dropped() {
        for arrives in [true, false] {
            let directory = tempfile::tempdir().unwrap();
            let server = UnixListener::bind(directory.path().join("server")).unwrap();
            let proxy = Proxy::start(directory.path(), directory.path().join("server")).unwrap();
            let mut client = UnixStream::connect(directory.path().join(".s.PGSQL.5432")).await.unwrap();
            let (mut server, _) = server.accept().await.unwrap();
            proxy.swallow(true);
            client.write_all(&[0, 0, 0, 8, 0, 3, 0, 0]).await.unwrap();
            let mut byte = [9; 1];
            let early = tokio::time::timeout(LOOK * 10, server.read(&mut byte)).await;
            assert!(early.is_err(), "nothing gets through: {early:?}");
            if !arrives {
                proxy.drop_all();
            }
            proxy.swallow(false);
            let got = server.read(&mut byte).await.unwrap();
            assert_eq!(got, usize::from(arrives), "a dropped connection ends without a byte");
            if !arrives {
                assert_eq!(client.read(&mut byte).await.unwrap_or(0), 0);
            }
        }
    }

    #[tokio::test]
    async fn a_slow_network_takes_its_time_either_way() {
        let directory = tempfile::tempdir().unwrap();
        let server = UnixListener::bind(directory.path().join("server")).unwrap();
        let proxy = Proxy::start(directory.path(), directory.path().join("server")).unwrap();
        let delay = Duration::from_millis(30);
        proxy.delay(delay);
        let begun = std::time::Instant::now();
        let mut client = UnixStream::connect(directory.path().join(".s.PGSQL.5432")).await.unwrap();
        let (mut server, _) = server.accept().await.unwrap();
        client.write_all(&[0, 0, 0, 8, 0, 3, 0, 0]).await.unwrap();
        server.read_exact(&mut [0; 8]).await.unwrap();
        server.write_all(b"N").await.unwrap();
        client.read_exact(&mut [0; 1]).await.unwrap();
        assert!(begun.elapsed() >= delay * 3, "the connection, the question and the answer");
    }
}
