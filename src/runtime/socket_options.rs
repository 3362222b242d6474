//! What every TCP socket to a database gets, on either executor.
//!
//! Without keepalive a connection whose other end lost power stays "open" for hours; a shard would wait for
//! it until its own deadline, and the server would hold its locks.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

/// Idle time before the first probe; two more follow, so a silent peer is given up after some 25 s.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
#[cfg(target_os = "linux")]
const KEEPALIVE_PROBES: u32 = 3;
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(30);

pub(super) fn set_tcp(socket: &impl AsFd) -> io::Result<()> {
    let descriptor = socket.as_fd();
    let socket = SockRef::from(&descriptor);
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
    #[cfg(target_os = "linux")]
    let keepalive = keepalive.with_retries(KEEPALIVE_PROBES);
    socket.set_tcp_keepalive(&keepalive)?;
    // Keepalive is silent while sent bytes wait for their acknowledgement; this is the limit for those.
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED_MAX))?;
    Ok(())
}
