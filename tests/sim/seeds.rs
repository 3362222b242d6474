//! Seeds: every promise of the outbox side, under every fault, as often as there is time.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::chaos::Faults;
use crate::publisher::Manners;
use crate::scenario::{Account, Scenario, run};

/// Seeds of a run without settings.
const SEEDS: u64 = 120;

pub fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} = {text}: not a number")))
}

/// Runs the seeds that the environment asks for, `count` from 0 on without its word, on all cores.
pub fn run_seeds(count: u64, scenario: impl Fn(u64) -> Scenario + Sync) -> Vec<Account> {
    let first = setting("CORELANE_SIM_FIRST").unwrap_or(0);
    let count = setting("CORELANE_SIM_SEEDS").unwrap_or(count);
    let next = AtomicU64::new(first);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let work = || {
            let mut accounts = Vec::new();
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= first + count {
                    return accounts;
                }
                accounts.push(run_scenario(&scenario(seed)));
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    })
}

fn run_seed(seed: u64) -> Account {
    run_scenario(&Scenario::drawn(seed))
}

/// Runs one; says where it stopped, and how to see it again.
pub fn run_scenario(scenario: &Scenario) -> Account {
    let seed = scenario.seed;
    match run(scenario) {
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
    let accounts = run_seeds(SEEDS, Scenario::drawn);
    let count = accounts.len() as u64;
    let committed: usize = accounts.iter().map(|of| of.committed).sum();
    let accepted: u64 = accounts.iter().map(|of| of.accepted).sum();
    let copies: u64 = accounts.iter().map(|of| of.copies).sum();
    let appends: u64 = accounts.iter().map(|of| of.appends).sum();
    let conflicts: u64 = accounts.iter().map(|of| of.conflicts).sum();
    println!("{count} seeds: {committed} messages committed, {accepted} accepted, {copies} of them copies");
    println!("{appends} appends with an expected version, {conflicts} conflicts");
    assert!(appends > count && conflicts > count, "the seeds expect next to nothing");
    assert!(committed as u64 > count * 20, "the seeds do next to nothing: {committed} messages");
}

/// Seeds that once found a bug, each with what it was.
#[test]
fn seeds_that_found_something_stay_green() {
    let found = [
        (107_808, "a copy: what left was read anew though everything of it was written"),
        (109_446, "the same, with a run under way"),
        (121_673, "the same, around a take-over"),
        (2_200, "a stream held again let go by the word of the time before: its lane had been read anew meanwhile"),
        (114_084, "partitions that could not be added in time: read from the beginning before they were loaded"),
    ];
    for (seed, what) in found {
        println!("{seed}: {what}");
        run_seed(seed);
    }
}

/// The server crashes again and again while strangers write: transaction ids are given twice.
#[test]
fn crashes_of_the_server_lose_and_reorder_nothing() {
    for seed in 0..40 {
        let faults = Faults { crash: 10, cut_per_mille: 30, ..Faults::default() };
        let drawn = Scenario::drawn(seed);
        let scenario = Scenario {
            faults,
            strangers: 4,
            streams: 1 + seed % 3,
            messages: 300,
            pause_us: 3_000,
            hold_us: 20_000,
            run_ms: 6_000,
            ..drawn
        };
        run_scenario(&scenario);
    }
}

/// A few streams have more waiting than memory has room for, and the transport takes its time: their lanes make room, and
/// everything that holds without that does so with it, whatever ends in the middle of it.
#[test]
fn lanes_that_make_room_lose_and_reorder_nothing() {
    let accounts = run_seeds(60, |seed| {
        let drawn = Scenario::drawn(seed);
        Scenario {
            streams: 2 + seed % 4,
            destinations: 1 + seed % 2,
            strangers: 3,
            hold_us: 10_000,
            messages: 400,
            pause_us: 4_000,
            run_ms: 4_000,
            lane_rows_max: 16 + (seed % 3) as usize * 24,
            manners: Manners { pace_us: 100_000, failed: seed % 20, ..drawn.manners },
            ..drawn
        }
    });
    let made_room: u64 = accounts.iter().map(|of| of.made_room).sum();
    println!("{} seeds: lanes made room {made_room} times", accounts.len());
    assert!(made_room > accounts.len() as u64, "hardly a lane made room: {made_room}");
}

/// Without faults and with a transport that keeps its word no message goes out twice.
#[test]
fn without_faults_no_copy_goes_out() {
    for seed in 0..40 {
        let drawn = Scenario::drawn(seed);
        let scenario = Scenario { faults: Faults::default(), manners: Manners::default(), processes: 3, ..drawn };
        let account = run_scenario(&scenario);
        assert_eq!(account.copies, 0, "seed {seed}");
    }
}

/// Members come and go in good order: partitions are handed over, and no message goes out twice, but for what little of a
/// transaction had been published when the rest of it, waiting for the claim, was frozen (about one change in a thousand).
#[test]
fn members_that_come_and_go_cost_next_to_no_copies() {
    let (mut moved, mut copies) = (0, 0);
    let first = setting("CORELANE_SIM_FIRST").unwrap_or(0);
    for seed in first..first + setting("CORELANE_SIM_SEEDS").map_or(40, |count| count / 4) {
        let drawn = Scenario::drawn(seed);
        let scenario = Scenario {
            faults: Faults { leave: 10, add: 10, ..Faults::default() },
            manners: Manners::default(),
            processes: 2,
            partition_count: 4 + seed as u32 % 9,
            lane_rows_max: 10_000,
            claim_rows_max: 40,
            run_ms: 6_000,
            messages: 600,
            pause_us: 10_000,
            ..drawn
        };
        let account = run_scenario(&scenario);
        copies += account.copies;
        moved += account.fences;
    }
    assert!(moved > 400, "partitions hardly change hands: {moved}");
    assert!(copies * 200 <= moved as u64, "{copies} copies in {moved} changes of a partition's fence");
}
