//! The core seam on tokio: a current-thread runtime on a pinned thread.
//!
//! First-class, not a stop-gap: in a container under the default seccomp profile every shard runs on this.
//!
//! Its timers count whole milliseconds and stop while the machine is suspended; [`Runtime::now`] does not, so
//! what must not outlive a suspend is judged by `now`, never by a timer having fired. A sleep lies in the
//! future of its caller: it allocates nothing.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::LocalSet;

use super::socket_options;
use super::tasks::{Tasks, yield_once};
use crate::metrics::ShardMetrics;
use crate::seam::dial::{Dial, SocketPlace};
use crate::seam::runtime::Runtime;
use crate::time::{Tick, boot_time};

/// A handle to the runtime of this thread.
#[derive(Clone, Debug)]
pub struct TokioRuntime {
    tasks: Tasks,
}

/// Longest single timer: what is further away is reached in steps, so that no deadline overflows a clock.
const SLEEP_STEP_US_MAX: u64 = 3_600_000_000;

impl TokioRuntime {
    /// Runs `main` on the calling thread until it ends, then ends every task it has spawned.
    ///
    /// # Errors
    /// The outer one says why no runtime could be made; the inner one is a panic of `main`.
    pub fn run<F: Future>(
        metrics: Arc<ShardMetrics>,
        main: impl FnOnce(Self) -> F,
    ) -> io::Result<std::thread::Result<F::Output>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let tasks = Tasks::new(metrics);
        let handle = Self { tasks: tasks.clone() };
        let local = LocalSet::new();
        // The future is made inside the runtime: constructors may need it.
        Ok(runtime.block_on(local.run_until(async move { tasks.run_main(async { main(handle).await }).await })))
    }
}

impl Runtime for TokioRuntime {
    fn now(&self) -> Tick {
        boot_time()
    }

    fn sleep_until(&self, at: Tick) -> impl Future<Output = ()> + 'static {
        async move {
            if at == Tick::NEVER {
                return std::future::pending().await;
            }
            loop {
                let left_us = at.since_us(boot_time());
                if left_us == 0 {
                    return;
                }
                tokio::time::sleep(Duration::from_micros(left_us.min(SLEEP_STEP_US_MAX))).await;
            }
        }
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        // The handle is dropped: a tokio task goes on without it.
        drop(tokio::task::spawn_local(self.tasks.supervise(task)));
    }

    fn yield_now(&self) -> impl Future<Output = ()> + 'static {
        yield_once()
    }

    fn name(&self) -> &'static str {
        "tokio"
    }
}

impl Dial for TokioRuntime {
    type Stream = TokioStream;

    fn dial(&self, place: SocketPlace) -> impl Future<Output = io::Result<TokioStream>> + 'static {
        async move {
            Ok(match place {
                SocketPlace::Tcp(address) => {
                    let stream = TcpStream::connect(address).await?;
                    socket_options::set_tcp(&stream)?;
                    TokioStream::Tcp(stream)
                }
                SocketPlace::Unix(path) => TokioStream::Unix(UnixStream::connect(path).await?),
            })
        }
    }
}

/// A connected socket of tokio's reactor.
#[derive(Debug)]
pub enum TokioStream {
    /// TCP.
    Tcp(TcpStream),
    /// Unix.
    Unix(UnixStream),
}

impl AsyncRead for TokioStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for TokioStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Unix(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
