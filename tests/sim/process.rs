//! One simulated process: shards, a lease keeper, and the way in for its callers.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use corelane::batch::Pool;
use corelane::metrics::ShardMetrics;
use corelane::plan::lease::LeaseTimes;
use corelane::plan::listener::TestTimes;
use corelane::runtime::budget::Budget;
use corelane::runtime::ring::{Ring, RingSender};
use corelane::runtime::sim::SimRuntime;
use corelane::seam::runtime::Runtime;
use corelane::seam::transport::TransportLimits;
use corelane::shard::listen::Listener;
use corelane::shard::tend::{Keeper, Stop};
use corelane::shard::upkeep::Sentinel;
use corelane::shard::{Arrival, Control, LeaseCell, OthersBell, ShardParts, ShardReport, ShardSettings, run};
use corelane::store::model::Model;

use crate::memory::Memory;
use crate::publisher::{Broker, SimPublisher};

/// What every process of a scenario is made by.
#[derive(Clone)]
pub struct ProcessPlan {
    pub shards: u16,
    pub times: LeaseTimes,
    pub settings: ShardSettings,
    pub limits: TransportLimits,
    pub budget_rows: usize,
    pub memory: Memory,
}

/// A running process.
pub struct Process {
    pub runtime: SimRuntime,
    pub rings: Vec<RingSender<Arrival>>,
    pub budgets: Vec<Arc<Budget>>,
    pub reports: Rc<RefCell<Vec<ShardReport>>>,
    stop: StopFlag,
    ended: Rc<Cell<bool>>,
}

#[derive(Clone)]
struct StopFlag {
    runtime: SimRuntime,
    raised: Rc<Cell<bool>>,
}

impl Stop for StopFlag {
    async fn stopped(&self) {
        while !self.raised.get() {
            self.runtime.sleep_until(self.runtime.now().plus_ms(5)).await;
        }
    }

    fn is_stopped(&self) -> bool {
        self.raised.get()
    }
}

impl Process {
    /// Starts a process in the world of `runtime`.
    pub fn start(runtime: &SimRuntime, model: &Model, broker: &Broker, plan: &ProcessPlan) -> Self {
        let runtime = runtime.new_process();
        runtime.trace(|| "process: started".into());
        let lease = Arc::new(LeaseCell::default());
        let others = Arc::new(OthersBell::default());
        let incarnation = Rc::new(Cell::new(0));
        let reports = Rc::new(RefCell::new(Vec::new()));
        let (mut rings, mut budgets) = (Vec::new(), Vec::new());
        for shard in 0..plan.shards {
            let (sender, receiver) = Ring::new(1024);
            let budget = Arc::new(Budget::default());
            let metrics = Arc::new(ShardMetrics::default());
            plan.memory.watch(&metrics);
            let parts = ShardParts {
                runtime: runtime.clone(),
                store: Rc::new(model.store()),
                publisher: SimPublisher::new(broker, plan.limits.clone(), incarnation.clone()),
                ring: receiver,
                budget: budget.clone(),
                lease: lease.clone(),
                others: others.clone(),
                metrics,
                pool: Arc::new(Pool::new(64, 1 << 20, 64 << 20)),
                settings: ShardSettings { shard, ..plan.settings.clone() },
            };
            let reports = reports.clone();
            runtime.spawn(async move {
                let report = run(parts).await;
                reports.borrow_mut().push(report);
            });
            rings.push(sender);
            budgets.push(budget);
        }
        let stop = StopFlag { runtime: runtime.clone(), raised: Rc::new(Cell::new(false)) };
        let ended = Rc::new(Cell::new(false));
        let to_shards = rings.clone();
        let clock = runtime.clone();
        let keeper = Keeper {
            runtime: runtime.clone(),
            coordination: model.coordination(),
            service_name: "simulated".into(),
            instance_name: format!("process {}", runtime.process()),
            shards: plan.shards,
            times: plan.times,
            owns: true,
            lease,
            others,
            listener: Arc::new(Listener::new(TestTimes { interval_ms: 2_000, limit_ms: 200 })),
            sentinel: Sentinel::default(),
            tell: move |shard: u16, control: Control| {
                if let Control::Partitions { incarnation: of, held, .. } = &control {
                    incarnation.set(of.number);
                    clock.trace(|| format!("shard {shard}: {} partitions, incarnation {}", held.len(), of.number));
                }
                // A shard that has ended needs no word.
                let _ = to_shards[usize::from(shard)].push(Arrival::Control(control));
            },
        };
        let (flag, has_ended) = (stop.clone(), ended.clone());
        runtime.spawn(async move {
            keeper.keep(flag).await;
            has_ended.set(true);
        });
        Self { runtime, rings, budgets, reports, stop, ended }
    }

    /// An orderly stop: shards first, then the keeper. It goes on by itself.
    pub fn stop(&self, timeout_ms: u64) {
        self.runtime.trace(|| "process: stopping".into());
        let deadline = self.runtime.now().plus_ms(timeout_ms);
        for ring in &self.rings {
            let _ = ring.push(Arrival::Control(Control::Stop { deadline }));
        }
        let (runtime, reports, stop) = (self.runtime.clone(), self.reports.clone(), self.stop.clone());
        let shards = self.rings.len();
        self.runtime.spawn(async move {
            while reports.borrow().len() < shards {
                runtime.sleep_until(runtime.now().plus_ms(1)).await;
            }
            stop.raised.set(true);
        });
    }

    /// Whether an orderly stop has come to its end.
    pub fn has_stopped(&self) -> bool {
        self.ended.get()
    }

    /// Everything of it is gone at once.
    pub fn kill(&self) {
        self.runtime.trace(|| "process: killed".into());
        self.runtime.kill();
    }
}
