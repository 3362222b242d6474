//! How the engine is, for whoever watches it from outside.
//!
//! Invariant: an answer is what its thread has last proved or seen fail; asking costs no call to the database.

use std::fmt;
use std::time::{Duration, SystemTime};

use super::Engine;
use crate::metrics::ListenerMetrics;
use crate::plan::listener::Belief;
use crate::time::boot_time;

/// How the connection is that hears what other processes say. Messages are found without it too: then their latency is
/// that of a poll (`claim.poll_ms`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenerHealth {
    /// Nobody listens: this process owns no partitions, or has no direct connection (`database.direct = false`).
    Off,
    /// It is being connected for the first time, and has not proved itself yet.
    Unproved,
    /// It has heard its own word at the last test, and its connection has not ended since.
    Healthy,
    /// It hears nothing, or its connection cannot be made; it is connected again at growing intervals.
    Deaf {
        /// Since when.
        since: SystemTime,
        /// What the last attempt ended with.
        reason: String,
    },
}

impl fmt::Display for ListenerHealth {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => formatter.write_str("off"),
            Self::Unproved => formatter.write_str("not proved yet"),
            Self::Healthy => formatter.write_str("healthy"),
            Self::Deaf { reason, .. } => write!(formatter, "deaf: {reason}"),
        }
    }
}

impl Engine {
    /// How the listening connection is.
    #[must_use]
    pub fn listener_health(&self) -> ListenerHealth {
        match self.shared.listener.belief() {
            Belief::Off => ListenerHealth::Off,
            Belief::Unproved => ListenerHealth::Unproved,
            Belief::Healthy => ListenerHealth::Healthy,
            Belief::Deaf { since, reason } => {
                let ago = Duration::from_micros(boot_time().since_us(since));
                ListenerHealth::Deaf { since: SystemTime::now() - ago, reason }
            }
        }
    }

    /// The listener's figures.
    #[must_use]
    pub fn listener_metrics(&self) -> &ListenerMetrics {
        &self.shared.listener.metrics
    }
}
