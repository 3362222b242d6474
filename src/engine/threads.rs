//! The engine's threads: one a shard, one for the lease keeper, and the bridge.
//!
//! Invariants
//! - They end in this order: shards (they publish, and write their cursors), then the keeper (it frees the
//!   partitions), then the bridge. While a shard may still publish, the partitions are not freed: the keeper of a
//!   shard that does not end in time goes on until it has.
//! - Ending takes no longer than it was given, and a little: what does not end is let go and said.
//! - Every shard is told to end. One whose ring is full holds up no other, and is told when there is room.

use std::rc::Rc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
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
use crate::shard::listen::Listener;
use crate::shard::tend::{Keeper, Stop};
use crate::shard::upkeep::Sentinel;
use crate::shard::{self, Arrival, Control, LeaseCell, OthersBell, ShardParts, ShardReport, ShardSettings};
use crate::store::connect::ConnectPlan;
use crate::store::postgres::{Ear, PostgresCoordination, PostgresStore};
use crate::store::schema_name::SchemaName;
use crate::time::{Tick, boot_time};

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
    pub others: Arc<OthersBell>,
    pub metrics: Arc<ShardMetrics>,
    pub pool: Arc<Pool>,
    pub settings: ShardSettings,
    pub clock: Arc<ThreadClock>,
}

impl ThreadMain for ShardMain {
    type Output = ShardReport;

    async fn run<R: Dial>(self, runtime: R) -> ShardReport {
        self.clock.attach();
        let connect = Rc::new(self.connect.on(runtime.clone()));
        let store = Rc::new(PostgresStore::new(connect, &self.schema));
        let report = shard::run(ShardParts {
            runtime,
            store,
            publisher: self.publisher,
            ring: self.ring,
            budget: self.budget,
            lease: self.lease,
            others: self.others,
            metrics: self.metrics,
            pool: self.pool,
            settings: self.settings,
        })
        .await;
        self.clock.detach();
        report
    }
}

/// The partitions a shard holds, for whoever looks from outside.
type HeldView = Arc<Mutex<Vec<HeldPartition>>>;

/// The lease keeper's thread.
pub(super) struct KeeperMain {
    pub connect: ConnectPlan,
    pub schema: SchemaName,
    pub service_name: String,
    pub instance_name: String,
    pub times: LeaseTimes,
    pub owns: bool,
    pub lease: Arc<LeaseCell>,
    pub others: Arc<OthersBell>,
    /// Whether its connections are this process's own.
    pub listens: bool,
    pub listener: Arc<Listener>,
    pub sentinel: Sentinel,
    pub shards: Vec<(RingSender<Arrival>, HeldView)>,
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
        let ear = Ear::default();
        let connect = Rc::new(self.connect.on(runtime.clone()));
        let holding = Rc::new(self.connect.on(runtime.clone()).on_notification(ear.on_end()));
        let listening = Rc::new(self.connect.on(runtime.clone()).on_notification(ear.on_notification()));
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
        let coordination = PostgresCoordination::new(connect, &self.schema);
        let coordination =
            if self.listens { coordination.listening(holding, listening, &self.schema, ear) } else { coordination };
        let keeper = Keeper {
            runtime,
            coordination,
            service_name: self.service_name,
            instance_name: self.instance_name,
            shards: count,
            times: self.times,
            owns: self.owns,
            lease: self.lease,
            others: self.others,
            listener: self.listener,
            sentinel: self.sentinel,
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
        let until = Instant::now() + timeout;
        let deadline = until + GRACE;
        let stop_at = boot_time().plus_us(u64::try_from(timeout.as_micros()).unwrap_or(u64::MAX));
        let rings = shared.shards.iter().map(|shard| shard.ring.clone()).collect();
        let untold = tell_to_stop(rings, stop_at, Some(until));
        let mut reports = Vec::with_capacity(self.shards.len());
        let mut late = Vec::new();
        for shard in self.shards {
            if ended_by(|| shard.is_finished(), deadline) {
                reports.push(shard.join().ok());
            } else {
                reports.push(None);
                late.push(shard);
            }
        }
        let (keeper, stop_keeper, bridge) = (self.keeper, self.stop_keeper, self.bridge);
        let finish = move || {
            let _ = stop_keeper.send(true);
            if ended_by(|| keeper.is_finished(), Instant::now() + GRACE) {
                let _ = keeper.join();
            } else {
                tracing::warn!(
                    "the lease keeper did not end in time: the partitions are taken over when its lease ends"
                );
            }
            drop(bridge);
        };
        if late.is_empty() {
            finish();
            return reports;
        }
        tracing::warn!(shards = late.len(), "shards did not end in time: their partitions are kept until they do");
        let waiting = std::thread::Builder::new().name("corelane-late".to_owned()).spawn(move || {
            tell_to_stop(untold, stop_at, None);
            for shard in late {
                let _ = shard.join();
            }
            finish();
        });
        if let Err(error) = waiting {
            tracing::warn!(%error, "no thread to wait for them: the partitions are taken over when the lease ends");
        }
        reports
    }
}

/// Tells shards to end by `stop_at`, each as soon as its ring has room, until `until`. Answers those that could not be
/// told by then.
fn tell_to_stop(
    mut rings: Vec<RingSender<Arrival>>,
    stop_at: Tick,
    until: Option<Instant>,
) -> Vec<RingSender<Arrival>> {
    let stop = || Arrival::Control(Control::Stop { deadline: stop_at });
    loop {
        rings.retain(|ring| ring.push(stop()).is_err() && !ring.is_closed());
        if rings.is_empty() || until.is_some_and(|until| Instant::now() >= until) {
            return rings;
        }
        std::thread::sleep(Duration::from_millis(1));
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

/// The threads for as long as there is a handle of the engine.
pub(super) struct Life {
    pub shared: Arc<Shared>,
    pub threads: Mutex<Option<Threads>>,
}

impl Life {
    /// The threads, for who ends them.
    pub(super) fn take(&self) -> Option<Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        // The last handle: without an orderly end the threads must not go on for ever.
        let Some(threads) = self.take() else { return };
        tracing::warn!("the engine was dropped without shutdown(): ending at once");
        self.shared.stopped.send_replace(true);
        self.shared.consumers.end_at_once();
        self.shared.strategies.end_at_once(&self.shared);
        let shared = self.shared.clone();
        let end = move || {
            threads.end(&shared, Duration::from_millis(200));
        };
        // Not on the caller's thread, which may be an executor's.
        if let Err(error) = std::thread::Builder::new().name("corelane-end".to_owned()).spawn(end) {
            tracing::warn!(%error, "no thread to end the engine");
        }
    }
}

/// Shards that were started, until all of the engine is: dropped before, they are told to end.
#[derive(Default)]
pub(super) struct Starting {
    pub rings: Vec<RingSender<Arrival>>,
}

impl Drop for Starting {
    fn drop(&mut self) {
        for ring in &self.rings {
            // Just made: there is room.
            let _ = ring.push(Arrival::Control(Control::Stop { deadline: Tick(0) }));
        }
    }
}

/// A thread's CPU time, read from anywhere.
#[derive(Debug, Default)]
pub(super) struct ThreadClock {
    /// The kernel's number of the clock; 0 before the thread runs and after its end.
    id: AtomicI32,
    last_us: AtomicU64,
}

impl ThreadClock {
    fn attach(&self) {
        let mut id = 0;
        // SAFETY: the calling thread is alive, and `id` is a place of the right type.
        if unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut id) } == 0 {
            self.id.store(id, Ordering::Release);
        }
    }

    fn detach(&self) {
        self.last_us.store(self.read_us(), Ordering::Release);
        self.id.store(0, Ordering::Release);
    }

    pub(super) fn read_us(&self) -> u64 {
        let id = self.id.load(Ordering::Acquire);
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is a place of the right type; the clock of a thread that has ended is refused.
        if id != 0 && unsafe { libc::clock_gettime(id, &raw mut time) } == 0 {
            return time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1_000;
        }
        self.last_us.load(Ordering::Acquire)
    }
}

/// A shard's handle for callers.
pub(super) fn handle(
    ring: RingSender<Arrival>,
    budget: Arc<Budget>,
    metrics: Arc<ShardMetrics>,
    core: Option<usize>,
    clock: Arc<ThreadClock>,
) -> ShardHandle {
    ShardHandle { ring, budget, metrics, core, clock, held: Arc::default() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::runtime::ring::Ring;

    fn is_stop(arrival: Option<Arrival>) -> bool {
        matches!(arrival, Some(Arrival::Control(Control::Stop { deadline: Tick(7) })))
    }

    #[test]
    fn a_full_ring_holds_up_no_other_shard_and_is_told_when_it_has_room() {
        let (rings, receivers): (Vec<_>, Vec<_>) = (0..4).map(|_| Ring::<Arrival>::new(1)).unzip();
        rings[1].push(Arrival::Control(Control::Look)).unwrap();
        let mut receivers = receivers.into_iter();
        let (first, full, last) = (receivers.next().unwrap(), receivers.next().unwrap(), receivers.next().unwrap());
        drop(receivers);
        // No time at all is enough for those that have room; the fourth has ended.
        let untold = tell_to_stop(rings, Tick(7), Some(Instant::now()));
        assert_eq!(untold.len(), 1, "the full one");
        assert!(is_stop(first.pop()) && is_stop(last.pop()));
        let telling = std::thread::spawn(move || tell_to_stop(untold, Tick(7), None).len());
        assert!(matches!(full.pop(), Some(Arrival::Control(Control::Look))));
        assert_eq!(telling.join().unwrap(), 0);
        assert!(is_stop(full.pop()));
    }
}
