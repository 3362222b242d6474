//! Seeds: every promise of the outbox side, under every fault, as often as there is time.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::scenario::{Account, Scenario, run};

/// Seeds of a run without settings.
const SEEDS: u64 = 120;

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} = {text}: not a number")))
}

fn run_seed(seed: u64) -> Account {
    let mut scenario = Scenario::drawn(seed);
    if std::env::var("CORELANE_SIM_CRASHES").is_ok() {
        scenario.faults = crate::chaos::Faults { crash: 10, cut_per_mille: 30, ..Default::default() };
        scenario.strangers = 4;
        scenario.streams = 1 + seed % 3;
        scenario.messages = 300;
        scenario.pause_us = 3000;
        scenario.hold_us = 20_000;
        scenario.run_ms = 6000;
    }
    match run(&scenario) {
        Ok(account) => account,
        Err((failure, events)) => {
            let last = events[events.len().saturating_sub(60)..].join("\n");
            panic!("{failure}\nreplay: CORELANE_SIM_SEED={seed} cargo test --test sim\n{scenario:?}\n{last}");
        }
    }
}

#[test]
fn every_seed_keeps_the_promises() {
    if let Some(seed) = setting("CORELANE_SIM_SEED") {
        println!("{:?}", run_seed(seed));
        return;
    }
    let first = setting("CORELANE_SIM_FIRST").unwrap_or(0);
    let count = setting("CORELANE_SIM_SEEDS").unwrap_or(SEEDS);
    let next = AtomicU64::new(first);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let accounts: Vec<Account> = std::thread::scope(|scope| {
        let work = || {
            let mut accounts = Vec::new();
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= first + count {
                    return accounts;
                }
                accounts.push(run_seed(seed));
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    let committed: usize = accounts.iter().map(|of| of.committed).sum();
    let accepted: u64 = accounts.iter().map(|of| of.accepted).sum();
    let copies: u64 = accounts.iter().map(|of| of.copies).sum();
    println!("{count} seeds: {committed} messages committed, {accepted} accepted, {copies} of them copies");
    assert!(committed as u64 > count * 20, "the seeds do next to nothing: {committed} messages");
}
