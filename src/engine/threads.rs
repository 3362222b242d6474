//! The engine's threads: one a shard, one for the lease keeper, and the bridge.
//!
//! Invariants
//! - They end in this order: shards (they publish, and write their cursors), then the keeper (it frees the
//!   partitions), then the bridge.
//! - Ending takes no longer than it was given, and a little: what does not end is let go and said.

use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::bridge::{Bridge, BridgePublisher};
use super::{ShardHandle, Shared};
use crate::batch::Pool;
use crate::metrics::ShardMetrics;
use crate::plan::lease::LeaseTimes;
use crate::runtime::budget::Budget;
use crate::runtime::ring::{RingReceiver, RingSender};
use crate::runtime::thread::{RunningThread, ThreadMain};
use crate::seam::dial::Dial;
use crate::seam::store::HeldPartition;
use crate::shard::tend::{Keeper, Stop};
use crate::shard::{self, Arrival, Control, LeaseCell, ShardParts, ShardReport, ShardSettings};
use crate::store::connect::ConnectPlan;
use crate::store::postgres::{PostgresCoordination, PostgresStore};
use crate::store::schema_name::SchemaName;

/// What a thread gets beyond its time before it is let go.
const GRACE: Duration = Duration::from_millis(1_000);

/// A shard's thread.
pub(super) struct ShardMain {
    pub connect: ConnectPlan,
    pub schema: SchemaName,
    pub publisher: BridgePublisher,
    pub ring: RingReceiver<Arrival>,
    pub budget: Arc<Budget>,
    pub lease: Arc<LeaseCell>,
    pub metrics: Arc<ShardMetrics>,
    pub pool: Arc<Pool>,
    pub settings: ShardSettings,
}

impl ThreadMain for ShardMain {
    type Output = ShardReport;

    async fn run<R: Dial>(self, runtime: R) -> ShardReport {
        let connect = Rc::new(self.connect.on(runtime.clone()));
        let store = Rc::new(PostgresStore::new(connect, &self.schema));
        shard::run(ShardParts {
            runtime,
            store,
            publisher: self.publisher,
            ring: self.ring,
            budget: self.budget,
            lease: self.lease,
            metrics: self.metrics,
            pool: self.pool,
            settings: self.settings,
        })
        .await
    }
}

/// The lease keeper's thread.
pub(super) struct KeeperMain {
    pub connect: ConnectPlan,
    pub schema: SchemaName,
    pub service_name: String,
    pub instance_name: String,
    pub times: LeaseTimes,
    pub owns: bool,
    pub lease: Arc<LeaseCell>,
    pub shards: Vec<(RingSender<Arrival>, Arc<Mutex<Vec<HeldPartition>>>)>,
    pub stop: tokio::sync::watch::Receiver<bool>,
}

struct StopFlag(tokio::sync::watch::Receiver<bool>);

impl Stop for StopFlag {
    async fn stopped(&self) {
        let mut stop = self.0.clone();
        // A sender that has gone is a stop too.
        let _ = stop.wait_for(|stop| *stop).await;
    }

    fn is_stopped(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }
}

impl ThreadMain for KeeperMain {
    type Output = ();

    async fn run<R: Dial>(self, runtime: R) {
        let connect = Rc::new(self.connect.on(runtime.clone()));
        let shards = self.shards;
        let count = shards.len() as u16;
        let tell = move |shard: u16, control: Control| {
            let (ring, view) = &shards[shard as usize];
            if let Control::Partitions { held, .. } = &control {
                *view.lock().unwrap_or_else(PoisonError::into_inner) = held.clone();
            }
            let mut arrival = Arrival::Control(control);
            // The ring has room for more entries than callers may have rows: full, it is being emptied.
            while let Err(back) = ring.push(arrival) {
                if ring.is_closed() {
                    return;
                }
                arrival = back;
                std::thread::yield_now();
            }
        };
        let keeper = Keeper {
            runtime,
            coordination: PostgresCoordination::new(connect, &self.schema),
            service_name: self.service_name,
            instance_name: self.instance_name,
            shards: count,
            times: self.times,
            owns: self.owns,
            lease: self.lease,
            tell,
        };
        keeper.keep(StopFlag(self.stop)).await;
    }
}

/// The running threads.
pub(super) struct Threads {
    pub shards: Vec<RunningThread<ShardReport>>,
    pub keeper: RunningThread<()>,
    pub stop_keeper: tokio::sync::watch::Sender<bool>,
    pub bridge: Bridge,
}

impl Threads {
    /// Ends them; blocks for at most about `timeout`. A shard without report did not end in time, or panicked.
    pub(super) fn end(self, shared: &Shared, timeout: Duration) -> Vec<Option<ShardReport>> {
        let deadline = Instant::now() + timeout + GRACE;
        shared.tell_to_stop(timeout);
        let mut reports = Vec::with_capacity(self.shards.len());
        for shard in self.shards {
            reports.push(if ended_by(|| shard.is_finished(), deadline) { shard.join().ok() } else { None });
        }
        let _ = self.stop_keeper.send(true);
        if ended_by(|| self.keeper.is_finished(), Instant::now() + GRACE) {
            let _ = self.keeper.join();
        } else {
            tracing::warn!("the lease keeper did not end in time: the partitions are taken over when its lease ends");
        }
        drop(self.bridge);
        reports
    }
}

fn ended_by(ended: impl Fn() -> bool, deadline: Instant) -> bool {
    while !ended() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

impl Drop for super::Engine {
    fn drop(&mut self) {
        // The last handle: without an orderly end the threads must not go on for ever.
        if Arc::strong_count(&self.threads) > 1 {
            return;
        }
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(threads) = threads {
            tracing::warn!("the engine was dropped without shutdown(): ending at once");
            self.shared.stopped.send_replace(true);
            let shared = self.shared.clone();
            let end = move || {
                threads.end(&shared, Duration::from_millis(200));
            };
            // Not on the caller's thread, which may be an executor's.
            if let Ok(thread) = std::thread::Builder::new().name("corelane-end".to_owned()).spawn(end) {
                let _ = thread.join();
            }
        }
    }
}

/// A shard's handle for callers.
pub(super) fn handle(
    ring: RingSender<Arrival>,
    budget: Arc<Budget>,
    metrics: Arc<ShardMetrics>,
    core: Option<usize>,
) -> ShardHandle {
    ShardHandle { ring, budget, metrics, core, held: Arc::default() }
}
