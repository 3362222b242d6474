//! One seed, one run: processes, callers, strangers and faults, then quiet, then the account.
//!
//! Checked at the end
//! - Everything committed was accepted by the transport or lies in the dead letters (P3), nothing is left parked
//!   or scheduled, versions have no gaps, and no number was given twice (P5).
//! - Callers were told the truth: stored under these numbers, or not stored.
//! - No transaction of ours was ended by a deadlock, and memory stayed within its bounds (P8), also on the way.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use corelane::batch::DestinationId;
use corelane::plan::cadence::Intervals;
use corelane::plan::lease::LeaseTimes;
use corelane::plan::pause::BreakerRules;
use corelane::plan::retry::OnDeath;
use corelane::runtime::sim::{Failure, SimRuntime};
use corelane::seam::runtime::Runtime;
use corelane::seam::store::Coordination;
use corelane::seam::transport::TransportLimits;
use corelane::shard::ShardSettings;
use corelane::store::model::{Model, ModelSettings};
use uuid::Uuid;

use crate::chaos::{Chaos, Faults};
use crate::memory::Memory;
use crate::process::{Process, ProcessPlan};
use crate::publisher::{Broker, Manners};
use crate::sink::Sink;
use crate::writers::{Ids, Pace, Subjects, Told, spawn_caller, spawn_stranger};

/// Steps of one run, beyond which it is taken for a livelock.
const STEPS_MAX: u64 = 4_000_000;
/// Virtual time that the quiet at the end may take until everything is done.
const QUIET_MS: u64 = 120_000;

/// What a run is made of. `Scenario::drawn` draws it from the seed; a test may then fix parts of it.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub seed: u64,
    pub processes: u64,
    pub shards: u16,
    pub partition_count: u32,
    pub streams: u64,
    pub destinations: u64,
    pub messages: u64,
    pub run_ms: u64,
    pub pause_us: u64,
    pub strangers: u64,
    pub hold_us: u64,
    pub ordered: bool,
    pub lane_rows_max: usize,
    pub claim_rows_max: usize,
    pub flush_rows_max: usize,
    pub scheduled_per_mille: u64,
    pub maintenance_ms: u64,
    pub rotate_rows: usize,
    /// Longest time until an instance knows what it asked of the members; 0: at once. Then nobody's connection may end
    /// but in good order: nobody is followed early, and a partition has one fence at every instant.
    pub view_us_max: u64,
    pub manners: Manners,
    pub faults: Faults,
}

/// What came of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Account {
    pub committed: usize,
    pub accepted: u64,
    pub copies: u64,
    /// Steps of all partitions' fences.
    pub fences: i64,
    /// Appends with an expected version that were stored, and that were refused for it.
    pub appends: u64,
    pub conflicts: u64,
    /// Lanes that were put beside the log because memory was full of them.
    pub made_room: u64,
}

impl Scenario {
    /// The scenario of a seed: its shape is drawn as well.
    pub fn drawn(seed: u64) -> Self {
        let mut random = corelane::runtime::sim::Random::new(seed ^ 0x5EED);
        let mut below = |bound: u64| random.below(bound);
        let wild = below(4) > 0;
        let faults = if wild { Faults::drawn(&mut below) } else { Faults::default() };
        let manners = if below(3) > 0 {
            Manners {
                failed: below(120),
                permanent: below(10),
                unknown: below(60),
                short: below(40),
                slow: below(30),
                pace_us: 0,
            }
        } else {
            Manners::default()
        };
        Self {
            seed,
            processes: 1 + below(3),
            shards: 1 + below(3) as u16,
            partition_count: 1 + below(12) as u32,
            streams: 1 + below(12),
            destinations: 1 + below(3),
            messages: 60 + below(240),
            run_ms: 1_500 + below(6_000),
            pause_us: 500 + below(40_000),
            strangers: below(4),
            hold_us: 1_000 + below(1_500_000),
            ordered: below(4) == 0,
            lane_rows_max: if below(3) == 0 { 8 + below(24) as usize } else { 10_000 },
            claim_rows_max: 1 + below(40) as usize,
            flush_rows_max: 2 + below(60) as usize,
            scheduled_per_mille: if below(3) == 0 { 100 } else { 0 },
            maintenance_ms: 20 + below(500),
            rotate_rows: 1 + below(40) as usize,
            view_us_max: 0,
            manners,
            faults,
        }
    }

    /// Not drawn: what was drawn for a seed before there were operators stays, as do all draws of those that are kept.
    fn is_kept(&self) -> bool {
        (100_000..130_000).contains(&self.seed)
    }

    fn breaks(&self) -> bool {
        self.seed.is_multiple_of(2) && !self.is_kept()
    }

    /// Streams are held behind their dead until an operator comes.
    fn holds(&self) -> bool {
        self.seed % 3 == 1 && !self.is_kept()
    }

    fn has_operator(&self) -> bool {
        !self.seed.is_multiple_of(3) && !self.is_kept()
    }

    fn plan(&self) -> ProcessPlan {
        let publish_timeout_ms = 500;
        let times = LeaseTimes::new(4_000, 1_500, publish_timeout_ms).unwrap();
        let settings = ShardSettings {
            shard: 0,
            flush_rows_max: self.flush_rows_max,
            flush_bytes_max: 1 << 20,
            flush_age_us_max: 200,
            claim_rows_max: self.claim_rows_max,
            claim_streams_max: self.claim_rows_max.div_ceil(2),
            claim_intervals: Intervals { base_ms: 50, relaxed_ms: 200, max_ms: 400 },
            lane_rows_max: self.lane_rows_max,
            // Now and then fewer than there are: they are shed.
            lane_streams_max: if self.seed % 4 == 3 { 3 } else { 1_000 },
            // Shorter than a run takes, so that memory is full for as long now and then.
            lane_crowd_ms: if self.is_kept() { 1_000 } else { 20 },
            publish_run_rows_max: 16,
            publish_in_flight_max: 4,
            retry_base_ms: 40,
            retry_cap_ms: 300,
            retry_attempts_max: 4,
            // Drawn from the thread's randomness, which no seed replays.
            retry_jitter_percent: 0,
            on_death: OnDeath { hold: self.holds(), of: Vec::new() },
            // In half of the runs; short, as the tries are.
            breaker: BreakerRules { failures_max: if self.breaks() { 5 } else { 0 }, base_ms: 60, cap_ms: 400 },
            cursor_interval_ms: 50,
            call_timeout_ms: 3_000,
        };
        let limits = TransportLimits {
            timeout_ms: publish_timeout_ms,
            ordered_atomic_batches: self.ordered,
            ..TransportLimits::default()
        };
        ProcessPlan { shards: self.shards, times, settings, limits, budget_rows: 64, memory: Memory::default() }
    }

    fn subjects(&self) -> Subjects {
        // Ids first: their order of registration is the same in every run.
        let destinations = (0..self.destinations)
            .map(|number| DestinationId::of(["alpha", "beta", "gamma"][number as usize]).unwrap())
            .collect();
        let stream = |number: u64| Uuid::from_u128(u128::from(number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C));
        Subjects {
            streams: (0..self.streams).map(stream).collect(),
            destinations,
            partition_count: self.partition_count,
            rows_max: 6,
            events_per_mille: 500,
            streamless_per_mille: 100,
            scheduled_per_mille: self.scheduled_per_mille,
            expected_per_mille: 300,
        }
    }
}

/// Runs a scenario to its end.
pub fn run(scenario: &Scenario) -> Result<Account, (Failure, Vec<String>)> {
    for name in ["alpha", "beta", "gamma"] {
        DestinationId::of(name).unwrap();
    }
    let runtime = SimRuntime::new(scenario.seed, STEPS_MAX);
    runtime.echo_trace(std::env::var("CORELANE_SIM_TRACE").is_ok());
    let outcome = {
        let (runtime, scenario) = (runtime.clone(), scenario.clone());
        runtime.clone().block_on(live(runtime, scenario))
    };
    let events = runtime.last_events();
    runtime.end_world();
    outcome.map_err(|failure| (failure, events))
}

async fn live(runtime: SimRuntime, scenario: Scenario) -> Account {
    let model = Model::new(
        &runtime,
        ModelSettings {
            partition_count: scenario.partition_count,
            rotate_rows: scenario.rotate_rows,
            rotate_ms: 1_000,
            cut_per_mille: scenario.faults.cut_per_mille,
            view_us_max: scenario.view_us_max,
            ..ModelSettings::default()
        },
    );
    let plan = scenario.plan();
    let sink = Sink::new(&runtime, &model, plan.times.ttl_ms());
    if scenario.view_us_max > 0 {
        sink.allow_one_fence_at_once();
    }
    let broker = Broker {
        runtime: runtime.new_process(),
        sink: sink.clone(),
        manners: Rc::new(Cell::new(scenario.manners)),
        away: Rc::new(RefCell::new(BTreeMap::new())),
    };
    let subjects = scenario.subjects();
    let (ids, told) = (Ids::default(), Rc::new(RefCell::new(Told::default())));
    let pace = Pace {
        pause_us: scenario.pause_us,
        budget_rows: plan.budget_rows,
        left: Rc::new(Cell::new(scenario.messages)),
        open: Rc::new(Cell::new(true)),
    };
    let start = {
        let (runtime, model, broker, plan) = (runtime.clone(), model.clone(), broker.clone(), plan.clone());
        let (subjects, ids, told, pace) = (subjects.clone(), ids.clone(), told.clone(), pace.clone());
        move || {
            let process = Process::start(&runtime, &model, &broker, &plan);
            for _ in 0..2 {
                spawn_caller(&process, &model, &subjects, &ids, &told, pace.clone());
            }
            process
        }
    };
    for _ in 0..scenario.strangers {
        spawn_stranger(&runtime, &model, &subjects, &ids, pace.clone(), scenario.hold_us);
    }
    spawn_maintenance(&runtime, &model, scenario.maintenance_ms);
    if scenario.has_operator() {
        if scenario.holds() {
            sink.hold();
        }
        spawn_operator(&runtime, &model, &sink);
    }
    let mut chaos = Chaos::new(&runtime, &model, &broker, &sink, scenario.faults, start);
    chaos.start_processes(scenario.processes).await;
    let end = runtime.now().plus_ms(scenario.run_ms);
    while runtime.now() < end && pace.left.get() > 0 {
        chaos.strike().await;
        plan.memory.check(&runtime, &plan, scenario.destinations as usize);
    }
    pace.open.set(false);
    chaos.quiet().await;
    broker.manners.set(Manners::default());
    let give_up = runtime.now().plus_ms(QUIET_MS);
    while !(sink.missing().is_empty() && model.left_over() == (0, 0, 0)) {
        if runtime.now() > give_up {
            let (parked, kept, scheduled) = model.left_over();
            let missing = sink.missing();
            runtime.fail(format!(
                "P3: after the quiet {} are missing ({:?}), {parked} lanes parked, {kept} references kept, {scheduled} scheduled",
                missing.len(),
                missing.iter().take(5).collect::<Vec<_>>()
            ));
        }
        runtime.sleep_until(runtime.now().plus_ms(100)).await;
        plan.memory.check(&runtime, &plan, scenario.destinations as usize);
    }
    chaos.stop_all().await;
    plan.memory.check(&runtime, &plan, scenario.destinations as usize);
    check_told(&runtime, &model, &told.borrow());
    check_versions(&runtime, &model);
    if model.deadlocks() > 0 {
        runtime.fail(format!("{} transactions were ended by a deadlock", model.deadlocks()));
    }
    let (copies, accepted) = sink.counts();
    let Told { appends, conflicts, .. } = *told.borrow();
    Account {
        committed: model.history().len(),
        accepted,
        copies,
        fences: model.fences(),
        appends,
        conflicts,
        made_room: plan.memory.made_room(),
    }
}

fn spawn_maintenance(runtime: &SimRuntime, model: &Model, every_ms: u64) {
    let keeper = model.coordination();
    let clock = runtime.new_process();
    let nobody = corelane::ids::Incarnation { number: 0, id: Uuid::nil() };
    clock.clone().spawn(async move {
        loop {
            clock.sleep_until(clock.now().plus_ms(every_ms)).await;
            if let Ok(done) = keeper.perform_maintenance(nobody, 10_000).await
                && (done.truncated > 0 || done.rotated)
            {
                clock.trace(|| format!("maintenance: {done:?}"));
            }
        }
    });
}

/// Gives dead letters back now and then, some of them again and again, and discards a few.
fn spawn_operator(runtime: &SimRuntime, model: &Model, sink: &Sink) {
    let clock = runtime.new_process();
    let (model, sink) = (model.clone(), sink.clone());
    clock.clone().spawn(async move {
        loop {
            clock.dawdle(400_000).await;
            let discards = clock.per_mille(200);
            let mut keys = model.dead_letters();
            keys.retain(|_| clock.per_mille(400));
            if keys.is_empty() {
                continue;
            }
            sink.given_back(&keys);
            let done = model.decide_dead_letters(&keys, discards).await;
            clock.trace(|| format!("operator: {} dead letters, discards {discards}: {done:?}", keys.len()));
        }
    });
}

fn check_told(runtime: &SimRuntime, model: &Model, told: &Told) {
    let history: BTreeMap<Uuid, (i64, i64)> =
        model.history().into_iter().map(|of| (of.message_id, (of.stream_seq, of.version))).collect();
    for (message, seq, version) in &told.stored {
        if history.get(message) != Some(&(*seq, *version)) {
            let found = history.get(message);
            runtime.fail(format!("P3: {message} was acknowledged as {seq}/{version}, stored is {found:?}"));
        }
    }
    for message in &told.refused {
        if history.contains_key(message) {
            runtime.fail(format!("P3: {message} was refused, and is stored"));
        }
    }
    for message in &told.unnumbered {
        if !history.contains_key(message) && !model.is_scheduled(*message) {
            runtime.fail(format!("P3: {message} was said to be stored, and is not"));
        }
    }
    for message in &told.scheduled {
        // What was stored by the very last flush may not be due yet.
        if !history.contains_key(message) && !model.is_scheduled(*message) {
            runtime.fail(format!("P3: scheduled {message} was acknowledged, and never came"));
        }
    }
}

fn check_versions(runtime: &SimRuntime, model: &Model) {
    let mut versions: BTreeMap<Uuid, BTreeSet<i64>> = BTreeMap::new();
    let mut messages = BTreeSet::new();
    let mut numbers = BTreeSet::new();
    for of in model.history() {
        if !messages.insert(of.message_id) {
            runtime.fail(format!("P3: {} is stored twice", of.message_id));
        }
        if !numbers.insert((of.lane_id, of.stream_seq)) {
            runtime.fail(format!("P5: number {} of {} was given twice", of.stream_seq, of.lane_id));
        }
        if of.version > 0 && !versions.entry(of.lane_id).or_default().insert(of.version) {
            runtime.fail(format!("P5: version {} of {} was given twice", of.version, of.lane_id));
        }
    }
    for (stream, versions) in versions {
        if versions.last() != Some(&(versions.len() as i64)) {
            runtime.fail(format!("P5: versions of {stream} have a gap: {versions:?}"));
        }
    }
}
