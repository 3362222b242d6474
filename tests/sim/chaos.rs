//! Faults: processes killed, stalled and stopped, the server crashed, connections cut, destinations away.

use corelane::batch::DestinationId;
use corelane::runtime::sim::SimRuntime;
use corelane::seam::runtime::Runtime;
use corelane::store::model::Model;
use corelane::time::Tick;

use crate::process::Process;
use crate::publisher::Broker;
use crate::sink::Sink;

/// Longest time an orderly stop is given.
const STOP_MS: u64 = 3_000;
/// Longest time until a process has noticed what befell it or the server.
const NOTICE_MS: u64 = 3_000;

/// Which faults a run has; weights of a draw.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub kill: u64,
    pub stop: u64,
    pub stall: u64,
    pub crash: u64,
    pub cut: u64,
    pub away: u64,
    pub skew: u64,
    pub add: u64,
    /// Orderly stops that are given time enough: no reason for a copy.
    pub leave: u64,
    /// Calls in a thousand that lose their connection.
    pub cut_per_mille: u64,
}

impl Faults {
    /// Some of them.
    pub fn drawn(below: &mut impl FnMut(u64) -> u64) -> Self {
        Self {
            kill: below(2) * below(10),
            stop: below(2) * below(10),
            stall: below(2) * below(10),
            crash: below(2) * below(6),
            cut: below(2) * below(10),
            away: below(2) * below(10),
            skew: below(4) / 3 * below(6),
            add: below(2) * below(4),
            leave: 0,
            cut_per_mille: below(2) * below(40),
        }
    }

    fn total(&self) -> u64 {
        self.kill + self.stop + self.stall + self.crash + self.cut + self.away + self.skew + self.add + self.leave
    }
}

/// The hand of fate.
pub struct Chaos<F> {
    runtime: SimRuntime,
    model: Model,
    broker: Broker,
    sink: Sink,
    faults: Faults,
    start: F,
    processes: Vec<Process>,
    /// Processes that are to be started again.
    due: Vec<Tick>,
}

impl<F: Fn() -> Process> Chaos<F> {
    pub fn new(runtime: &SimRuntime, model: &Model, broker: &Broker, sink: &Sink, faults: Faults, start: F) -> Self {
        Self {
            runtime: runtime.clone(),
            model: model.clone(),
            broker: broker.clone(),
            sink: sink.clone(),
            faults,
            start,
            processes: Vec::new(),
            due: Vec::new(),
        }
    }

    pub async fn start_processes(&mut self, count: u64) {
        for _ in 0..count {
            self.processes.push((self.start)());
            self.runtime.dawdle(200_000).await;
        }
    }

    /// Waits a moment, and strikes.
    pub async fn strike(&mut self) {
        self.runtime.dawdle(600_000).await;
        let now = self.runtime.now();
        let again = self.due.iter().filter(|at| **at <= now).count();
        self.due.retain(|at| *at > now);
        for _ in 0..again {
            self.processes.push((self.start)());
        }
        let total = self.faults.total();
        if total == 0 {
            return;
        }
        let mut draw = self.runtime.below(total);
        let faults = self.faults;
        for (weight, strike) in [
            (faults.kill, Self::kill as fn(&mut Self)),
            (faults.stop, Self::stop),
            (faults.stall, Self::stall),
            (faults.crash, Self::crash),
            (faults.cut, Self::cut),
            (faults.away, Self::away),
            (faults.skew, Self::skew),
            (faults.add, Self::add),
            (faults.leave, Self::leave),
        ] {
            if draw < weight {
                return strike(self);
            }
            draw -= weight;
        }
    }

    fn take_one(&mut self) -> Option<Process> {
        let count = self.processes.len() as u64;
        if count == 0 {
            return None;
        }
        let at = self.runtime.below(count) as usize;
        self.due.push(self.runtime.now().plus_us(self.runtime.below(2_500_000)));
        Some(self.processes.swap_remove(at))
    }

    fn kill(&mut self) {
        if let Some(process) = self.take_one() {
            self.sink.fault("kill", 0);
            process.kill();
        }
    }

    fn stop(&mut self) {
        if let Some(process) = self.take_one() {
            // A stop that runs out of time may leave copies behind.
            self.sink.fault("stop", STOP_MS);
            process.stop(self.runtime.below(STOP_MS));
        }
    }

    fn stall(&mut self) {
        if self.processes.is_empty() {
            return;
        }
        let at = self.runtime.below(self.processes.len() as u64) as usize;
        let ms = 10 + self.runtime.below(if self.runtime.per_mille(400) { 9_000 } else { 400 });
        self.sink.fault("stall", ms + NOTICE_MS);
        self.processes[at].runtime.stall_until(self.runtime.now().plus_ms(ms));
    }

    fn crash(&mut self) {
        self.sink.fault("crash", NOTICE_MS);
        let us = self.runtime.below(300_000);
        self.model.crash(us);
    }

    fn cut(&mut self) {
        self.sink.fault("cut", 0);
        self.model.cut_connections(500);
    }

    fn away(&mut self) {
        let names = ["alpha", "beta", "gamma"];
        let destination = DestinationId::of(names[self.runtime.below(3) as usize]).unwrap();
        let until = self.runtime.now().plus_us(self.runtime.below(1_500_000));
        let throttles = self.runtime.per_mille(300);
        self.broker.away.borrow_mut().insert(destination, (until, throttles));
    }

    fn skew(&mut self) {
        self.sink.fault("skew", 0);
        let by = self.runtime.below(20_000_000) as i64 - 10_000_000;
        self.model.skew_clock_us(by);
    }

    fn add(&mut self) {
        if self.processes.len() < 4 {
            self.processes.push((self.start)());
        }
    }

    fn leave(&mut self) {
        if self.processes.len() > 1
            && let Some(process) = self.take_one()
        {
            self.runtime.trace(|| "a process leaves".into());
            process.stop(20_000);
        }
    }

    /// No further fault; at least one process runs.
    pub async fn quiet(&mut self) {
        self.model.set_cut_per_mille(0);
        self.model.end_late_views();
        self.broker.away.borrow_mut().clear();
        if self.processes.is_empty() {
            self.processes.push((self.start)());
        }
        self.runtime.trace(|| "quiet".into());
    }

    /// Stops what runs, in order.
    pub async fn stop_all(&mut self) {
        for process in &self.processes {
            process.stop(20_000);
        }
        for process in &self.processes {
            let give_up = self.runtime.now().plus_ms(30_000);
            while !process.has_stopped() && self.runtime.now() < give_up {
                self.runtime.sleep_until(self.runtime.now().plus_ms(10)).await;
            }
            if !process.has_stopped() {
                self.runtime.fail("P11: a process does not stop");
            }
            if process.reports.borrow().iter().any(|report| !report.drained || report.rows_left > 0) {
                let reports = process.reports.borrow().clone();
                self.runtime.fail(format!("P11: not drained after the quiet: {reports:?}"));
            }
        }
    }
}
