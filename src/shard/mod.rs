//! One core's life: the loops that do what `plan` decides.
//!
//! A shard owns its partitions' lanes. It is given messages through its ring, its partitions through
//! [`Control`], and its right to publish through [`LeaseCell`].

pub mod claim;
pub mod flush;
pub mod publish;
pub mod settle;
pub mod state;
pub mod tend;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::batch::Rows;
use crate::error::Error;
use crate::seam::store::HeldPartition;
use crate::time::Tick;

/// A batch on its way from a caller to a shard.
#[derive(Debug)]
pub struct Submission {
    /// The messages, in units of work.
    pub rows: Arc<Rows>,
    /// Answered once, after the commit that holds the last of its units.
    pub reply: futures_channel::oneshot::Sender<SubmissionReply>,
}

/// What a caller gets back: the same rows, numbered, and the units that were not stored.
#[derive(Debug)]
pub struct SubmissionReply {
    /// The rows. `stream_seq` and `version` are set for units that were stored.
    pub rows: Arc<Rows>,
    /// Unit index and why it was not stored; empty when all were.
    pub refused: Vec<(u32, Error)>,
}

/// What the engine and the lease keeper tell a shard.
#[derive(Debug)]
pub enum Control {
    /// The partitions of the incarnation have changed: here is this shard's whole set.
    Partitions {
        /// Sent with every flush.
        ownership: i64,
        /// This shard's, ascending.
        held: Vec<HeldPartition>,
    },
    /// Messages were stored by somebody else in this process (enlisted): claim soon.
    Announce,
    /// Take no more submissions, publish what is in hand until `deadline`, write the cursor, end.
    Stop {
        /// When to end at the latest.
        deadline: Tick,
    },
}

/// What crosses the ring.
#[derive(Debug)]
pub enum Arrival {
    /// New messages.
    Submission(Submission),
    /// An order.
    Control(Control),
}

/// The lease as the shards see it: until when this process may start to publish. Written by the lease
/// keeper, read by every shard before every run.
#[derive(Debug, Default)]
pub struct LeaseCell {
    /// Boot-time microseconds; 0 = not alive.
    deadline_us: AtomicU64,
}

impl LeaseCell {
    /// A run that ends by this moment may start.
    #[must_use]
    pub fn deadline(&self) -> Tick {
        Tick(self.deadline_us.load(Ordering::Acquire))
    }

    /// Sets the deadline (already less the margin).
    pub fn set(&self, deadline: Tick) {
        self.deadline_us.store(deadline.0, Ordering::Release);
    }

    /// Nothing may start any more.
    pub fn end(&self) {
        self.deadline_us.store(0, Ordering::Release);
    }
}
