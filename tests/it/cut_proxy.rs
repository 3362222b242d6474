//! A unix socket between an engine and its server that cuts a connection at a statement of the test's choice, or
//! swallows what a listening one is to hear.
//!
//! Invariants
//! - What the client sends is forwarded by whole protocol messages, so it is known what the server has got.
//! - Armed, it cuts once: before the message that holds the words (the server never sees it), or behind its statement
//!   and before any byte of the answer (the server does it, the client does not learn so).
//! - Kept away, it lets nobody in after that cut until the test says so.
//! - What the server says is swallowed on connections that have begun to listen only, and without a sign of it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use corelane::private_postgres::PrivatePostgres;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};

/// Where the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// The statement does not reach the server.
    Before,
    /// It does, whole; its answer does not come back.
    After,
}

/// What a connection that listens does not get of what the server says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swallowed {
    /// It gets everything.
    Nothing,
    /// Notifications.
    Notifications,
    /// Any packet.
    Everything,
}

/// How a statement begins to listen.
const LISTENS: &[u8] = b"listen_instance()";

struct State {
    server: PathBuf,
    swallowed: Mutex<Swallowed>,
    order: Mutex<Option<(Vec<u8>, Where)>>,
    cuts: AtomicU64,
    statements: AtomicU64,
    away_after_cut: AtomicBool,
    away: AtomicBool,
}

/// The proxy; its socket goes with it.
pub struct CutProxy {
    directory: tempfile::TempDir,
    state: Arc<State>,
}

impl CutProxy {
    /// Listens as the cluster's server would.
    pub fn before(cluster: &PrivatePostgres) -> Self {
        const SOCKET: &str = ".s.PGSQL.5432";
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join(SOCKET)).unwrap();
        let state = Arc::new(State {
            server: cluster.socket_directory().join(SOCKET),
            swallowed: Mutex::new(Swallowed::Nothing),
            order: Mutex::default(),
            cuts: AtomicU64::new(0),
            statements: AtomicU64::new(0),
            away_after_cut: AtomicBool::new(false),
            away: AtomicBool::new(false),
        });
        let shared = state.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if shared.away.load(Ordering::Acquire) {
                    continue; // Dropped: as a server that is not there.
                }
                let shared = shared.clone();
                tokio::spawn(async move {
                    if let Ok(server) = UnixStream::connect(&shared.server).await {
                        forward(&shared, client, server).await;
                    }
                });
            }
        });
        Self { directory, state }
    }

    /// The URL of a database behind it.
    pub fn url(&self) -> String {
        let host = self.directory.path().display().to_string().replace('/', "%2F");
        format!("postgresql://postgres@{host}/postgres")
    }

    /// Cuts the connection whose next message holds these words.
    pub fn arm(&self, words: &[u8], at: Where) {
        *self.state.order.lock().unwrap() = Some((words.to_vec(), at));
    }

    /// As [`CutProxy::arm`]; and nobody gets in after the cut until [`CutProxy::come_back`].
    pub fn arm_and_go_away(&self, words: &[u8], at: Where) {
        self.state.away_after_cut.store(true, Ordering::Release);
        self.arm(words, at);
    }

    /// Lets everybody in again.
    pub fn come_back(&self) {
        self.state.away_after_cut.store(false, Ordering::Release);
        self.state.away.store(false, Ordering::Release);
    }

    /// Swallows from here on.
    pub fn swallow(&self, swallowed: Swallowed) {
        *self.state.swallowed.lock().unwrap() = swallowed;
    }

    /// Statements that were sent to the server, on all connections: simple queries, and executions of prepared ones.
    pub fn statements(&self) -> u64 {
        self.state.statements.load(Ordering::Acquire)
    }

    /// Cuts made.
    pub fn cuts(&self) -> u64 {
        self.state.cuts.load(Ordering::Acquire)
    }
}

async fn forward(state: &State, client: UnixStream, server: UnixStream) {
    let (client_read, mut client_write) = client.into_split();
    let (mut server_read, server_write) = server.into_split();
    let listens = AtomicBool::new(false);
    let behind = tokio::select! {
        biased;
        // It is asked first: once the last byte of a statement is out, no byte of its answer comes back.
        behind = requests(state, &listens, client_read, server_write) => behind.unwrap_or(false),
        _ = answers(state, &listens, &mut server_read, &mut client_write) => false,
    };
    drop(client_write);
    if behind {
        // A socket that is closed over unread answers is reset, and the server would not read the statement.
        let _ = tokio::io::copy(&mut server_read, &mut tokio::io::sink()).await;
    }
}

/// Forwards until the client's end or a cut; answers whether that was one behind a statement.
async fn requests(
    state: &State,
    listens: &AtomicBool,
    mut client: OwnedReadHalf,
    mut server: OwnedWriteHalf,
) -> std::io::Result<bool> {
    let (mut buffer, mut started, mut cutting) = (Vec::new(), false, false);
    loop {
        let mut done = 0;
        while let Some((kind, length)) = next_message(&buffer[done..], started) {
            if started && matches!(kind, b'Q' | b'E') {
                state.statements.fetch_add(1, Ordering::AcqRel);
            }
            started = true;
            let message = &buffer[done..done + length];
            if message.windows(LISTENS.len()).any(|part| part == LISTENS) {
                listens.store(true, Ordering::Release);
            }
            let taken = take_order(state, message);
            if taken == Some(Where::Before) {
                note_cut(state);
                return server.write_all(&buffer[..done]).await.map(|()| false);
            }
            cutting |= taken.is_some();
            done += length;
            // A simple query is a statement by itself; one of the extended protocol ends with its Sync.
            if cutting && matches!(kind, b'Q' | b'S') {
                note_cut(state);
                return server.write_all(&buffer[..done]).await.map(|()| true);
            }
        }
        server.write_all(&buffer[..done]).await?;
        buffer.drain(..done);
        if client.read_buf(&mut buffer).await? == 0 {
            return Ok(false);
        }
    }
}

/// Hands over what the server says, by whole messages, less what is swallowed.
async fn answers(
    state: &State,
    listens: &AtomicBool,
    server: &mut OwnedReadHalf,
    client: &mut OwnedWriteHalf,
) -> std::io::Result<()> {
    let mut buffer = Vec::new();
    loop {
        let (mut done, mut kept) = (0, Vec::new());
        while let Some((kind, length)) = next_message(&buffer[done..], true) {
            let swallowed = match *state.swallowed.lock().unwrap() {
                Swallowed::Nothing => false,
                Swallowed::Notifications => kind == b'A',
                Swallowed::Everything => true,
            };
            if !(swallowed && listens.load(Ordering::Acquire)) {
                kept.extend_from_slice(&buffer[done..done + length]);
            }
            done += length;
        }
        client.write_all(&kept).await?;
        buffer.drain(..done);
        if server.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
    }
}

/// The order, if this message is the one that it waits for.
fn take_order(state: &State, message: &[u8]) -> Option<Where> {
    let mut order = state.order.lock().unwrap();
    let (_, at) = order.take_if(|(words, _)| message.windows(words.len()).any(|part| part == words))?;
    Some(at)
}

fn note_cut(state: &State) {
    if state.away_after_cut.load(Ordering::Acquire) {
        state.away.store(true, Ordering::Release);
    }
    state.cuts.fetch_add(1, Ordering::AcqRel);
}

/// Kind and whole length of the first message, if it is complete. The start-up message has no kind.
fn next_message(bytes: &[u8], started: bool) -> Option<(u8, usize)> {
    let head = usize::from(started);
    let length: [u8; 4] = bytes.get(head..head + 4)?.try_into().ok()?;
    let whole = head + u32::from_be_bytes(length) as usize;
    (bytes.len() >= whole).then(|| (if started { bytes[0] } else { 0 }, whole))
}
