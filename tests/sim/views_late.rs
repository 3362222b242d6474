//! The hard case *views-late*: instances whose view of the membership is delayed at random, while others come and go.
//!
//! Checked, beside all that every simulation checks
//! - At every instant one fence per partition: a run under one fence is over before one under another starts, and a fence
//!   is one incarnation's (`sink`).
//!
//! `CORELANE_SIM_SEEDS=10000 cargo test --release --test sim -- --nocapture views_late` runs the case at its full size.

use crate::chaos::Faults;
use crate::publisher::Manners;
use crate::scenario::Scenario;
use crate::seeds::{run_scenario, run_seeds, setting};

/// Seeds of a run without settings.
const SEEDS: u64 = 60;

/// Three instances; others come, and leave in good order. In one seed of three a view may come so late that whoever
/// waits for it has given it up, and its right to publish with it.
pub fn scenario(seed: u64) -> Scenario {
    let drawn = Scenario::drawn(seed);
    Scenario {
        processes: 3,
        partition_count: 3 + seed as u32 % 10,
        streams: 16,
        strangers: 0,
        messages: 500,
        pause_us: 60_000,
        run_ms: 8_000,
        lane_rows_max: 10_000,
        claim_rows_max: 40,
        maintenance_ms: 500,
        manners: Manners::default(),
        view_us_max: if seed.is_multiple_of(3) { 6_000_000 } else { 50_000 + seed % 7 * 250_000 },
        faults: Faults { leave: 10, add: 10, ..Faults::default() },
        ..drawn
    }
}

#[test]
fn views_late_there_is_one_fence_per_partition_at_every_instant() {
    if let Some(seed) = setting("CORELANE_SIM_SEED") {
        println!("{:?}", run_scenario(&scenario(seed)));
        return;
    }
    let accounts = run_seeds(SEEDS, scenario);
    let fences: i64 = accounts.iter().map(|of| of.fences).sum();
    let committed: usize = accounts.iter().map(|of| of.committed).sum();
    let seeds = accounts.len();
    println!("{seeds} seeds with late views: {committed} messages, {fences} changes of a partition's fence");
    assert!(fences as usize > seeds * 20, "partitions hardly change hands: {fences}");
    assert!(committed > seeds * 100, "next to nothing is published: {committed}");
}
