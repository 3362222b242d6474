//! The core seam on glommio: an io_uring executor on a pinned thread. With `probe`, the only file that names it.
//!
//! What has to be known about glommio, and is done about it here:
//! - It panics where io_uring is refused, and for good: `probe` asks the kernel first.
//! - A panic in a task ends its executor, and sleeping tasks are forgotten with all they own: `tasks` wraps them.
//! - It can park with runnable tasks: if its preempt timer fires between the arming and the first look at the
//!   queue (the thread was descheduled there), it takes "preempted" for "nothing to run" and sleeps until the next
//!   event, for ever if none comes. Mended upstream after 0.9.0, not released. So the timer is long, which makes
//!   that rare, and the keepers below bound how long it lasts. Seen with a timer of 1 ms on a loaded machine: one
//!   connection in 80 never got its answer.
//! - A task that is always ready starves all input and output until the preempt timer: [`Runtime::yield_now`]
//!   goes by way of the reactor.
//! - Its first sleep is some 10 ms late: one is slept before `main` begins.
//! - By default it pins 10 MiB for file buffers, and a ring of depth 1024 needs 0.34 MiB of locked memory; neither
//!   is of use to sockets.
//! - A task whose wakers exceed 32,767 aborts the process: callers never hold wakers into a shard, the ring's
//!   doorbell has one.
//! - Its own queues and pinning (it reads the whole topology from /sys) are not used.
//!
//! A sleep allocates once: its timers are reference-counted.

use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ::glommio::net::{TcpStream, UnixStream};
use ::glommio::timer::Timer;
use ::glommio::{LocalExecutorBuilder, Placement};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::compat::{Compat, FuturesAsyncReadCompatExt};

use super::socket_options;
use super::tasks::{Tasks, panic_text};
use crate::metrics::ShardMetrics;
use crate::seam::dial::{Dial, SocketPlace};
use crate::seam::runtime::Runtime;
use crate::time::{Tick, boot_time};

/// 64 executors of this depth fit into 8 MiB of locked memory.
const RING_DEPTH: usize = 128;
const PREEMPT_TIMER: Duration = Duration::from_millis(100);
/// Timers of `keep_awake`. One loss may swallow one of them, so that all being swallowed needs as many losses in
/// a row.
const KEEPERS: u32 = 4;
/// How often each of them fires while the thread works, and at rest.
const KEEPER_PERIOD: Duration = Duration::from_millis(20);
const KEEPER_PERIOD_MAX: Duration = Duration::from_millis(320);
const YIELD: Duration = Duration::from_micros(1);
const WARM_UP: Duration = Duration::from_millis(1);
/// Longest single timer, so that no deadline overflows a clock.
const SLEEP_STEP_US_MAX: u64 = 3_600_000_000;

/// A handle to the executor of this thread.
#[derive(Clone, Debug)]
pub struct GlommioRuntime {
    tasks: Tasks,
}

impl GlommioRuntime {
    /// Runs `main` on the calling thread until it ends, then ends every task it has spawned.
    ///
    /// # Errors
    /// The outer one says why no executor could be made; the inner one is a panic of `main`.
    pub fn run<F: Future>(
        metrics: Arc<ShardMetrics>,
        main: impl FnOnce(Self) -> F,
    ) -> io::Result<std::thread::Result<F::Output>> {
        let executor = catch_unwind(|| {
            LocalExecutorBuilder::new(Placement::Unbound)
                .io_memory(0)
                .ring_depth(RING_DEPTH)
                .preempt_timer(PREEMPT_TIMER)
                .make()
                .map_err(io::Error::from)
        })
        .unwrap_or_else(|panic| Err(io::Error::other(panic_text(&*panic).to_owned())))?;
        let tasks = Tasks::new(metrics);
        let watched = tasks.clone();
        let handle = Self { tasks: tasks.clone() };
        let result = catch_unwind(AssertUnwindSafe(|| {
            executor.run(async move {
                let keepers: Vec<_> =
                    (1..=KEEPERS).map(|number| ::glommio::spawn_local(keep_awake(watched.clone(), number))).collect();
                Timer::new(WARM_UP).await;
                let result = tasks.run_main(async { main(handle).await }).await;
                for keeper in keepers {
                    keeper.cancel().await;
                }
                result
            })
        }));
        // The outer catch is for the executor's own: a ring that the kernel gave and then does not serve.
        Ok(result.unwrap_or_else(Err))
    }
}

/// Wakes the executor now and then, so that tasks it has parked with are run.
async fn keep_awake(tasks: Tasks, number: u32) {
    let mut period = KEEPER_PERIOD;
    let mut polls = tasks.polls();
    // Spread out, so that they do not fire together.
    Timer::new(KEEPER_PERIOD * number / KEEPERS).await;
    loop {
        Timer::new(period).await;
        let now = tasks.polls();
        period = if now == polls { (period * 2).min(KEEPER_PERIOD_MAX) } else { KEEPER_PERIOD };
        polls = now;
    }
}

impl Runtime for GlommioRuntime {
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
                Timer::new(Duration::from_micros(left_us.min(SLEEP_STEP_US_MAX))).await;
            }
        }
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        // Detached: a task that is dropped would be cancelled.
        drop(::glommio::spawn_local(self.tasks.supervise(task)).detach());
    }

    fn yield_now(&self) -> impl Future<Output = ()> + 'static {
        // Due almost at once, but it is the reactor's next turn that says so.
        async {
            Timer::new(YIELD).await;
        }
    }

    fn name(&self) -> &'static str {
        "glommio"
    }
}

impl Dial for GlommioRuntime {
    type Stream = GlommioStream;

    fn dial(&self, place: SocketPlace) -> impl Future<Output = io::Result<GlommioStream>> + 'static {
        async move {
            Ok(match place {
                SocketPlace::Tcp(address) => {
                    let stream = TcpStream::connect(address).await?;
                    // SAFETY: the descriptor is the stream's own, which outlives this borrow.
                    socket_options::set_tcp(&unsafe { BorrowedFd::borrow_raw(stream.as_raw_fd()) })?;
                    GlommioStream::Tcp(stream.compat())
                }
                SocketPlace::Unix(path) => GlommioStream::Unix(UnixStream::connect(path).await?.compat()),
            })
        }
    }
}

/// A connected socket of glommio's reactor, with tokio's traits.
#[derive(Debug)]
pub enum GlommioStream {
    /// TCP.
    Tcp(Compat<TcpStream>),
    /// Unix.
    Unix(Compat<UnixStream>),
}

impl AsyncRead for GlommioStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for GlommioStream {
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
