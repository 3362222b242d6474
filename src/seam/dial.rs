//! The core seam's sockets: how a thread of ours reaches a server on whatever executor it runs.
//!
//! Implementations: `runtime::glommio` and `runtime::tokio`; the simulation has no sockets. Separate from
//! [`Runtime`], so that what needs none does not ask for any.

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;

use tokio::io::{AsyncRead, AsyncWrite};

use super::runtime::Runtime;

/// Where to: names have been resolved before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SocketPlace {
    /// Address and port.
    Tcp(SocketAddr),
    /// A unix socket's path.
    Unix(PathBuf),
}

/// A thread's executor that has sockets.
pub trait Dial: Runtime {
    /// What connects; it stays on this thread. The traits are tokio's, the reactor need not be.
    type Stream: AsyncRead + AsyncWrite + Unpin + 'static;

    /// Connects, with nodelay and keepalive where the socket knows them. Without a deadline of its own:
    /// the caller drops it.
    fn dial(&self, place: SocketPlace) -> impl Future<Output = std::io::Result<Self::Stream>> + 'static;
}
