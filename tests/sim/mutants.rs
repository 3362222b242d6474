//! Mutants: each rule of the storage design broken in turn, and the scenario that goes red by it.
//!
//! A scenario that also goes red without its mutant, or never with it, is a defect of the test: both are checked.

use corelane::plan::mutants::{Mutant, activate};

use crate::chaos::Faults;
use crate::publisher::Manners;
use crate::scenario::{Scenario, run};

/// Seeds that a mutant has to be found in.
const SEEDS: u64 = 400;

/// A busy scenario of its own for each mutant; everything that the rule does not need is left out.
fn scenario(seed: u64, mutant: Mutant) -> Scenario {
    let calm = Scenario {
        seed,
        processes: 1,
        shards: 2,
        partition_count: 4,
        streams: 3,
        destinations: 1,
        messages: 150,
        run_ms: 3_000,
        pause_us: 4_000,
        strangers: 0,
        hold_us: 100_000,
        ordered: false,
        lane_rows_max: 10_000,
        claim_rows_max: 20,
        flush_rows_max: 16,
        scheduled_per_mille: 0,
        maintenance_ms: 60_000,
        rotate_rows: 10,
        view_us_max: 0,
        manners: Manners::default(),
        faults: Faults::default(),
    };
    match mutant {
        Mutant::OrderByXid => Scenario { strangers: 4, streams: 2, ..calm },
        Mutant::RawSnapshotPersisted => Scenario {
            manners: Manners { slow: 200, ..Manners::default() },
            faults: Faults { kill: 1, ..Faults::default() },
            ..calm
        },
        Mutant::CursorKeptOverCrash => {
            Scenario { strangers: 4, pause_us: 8_000, faults: Faults { crash: 1, ..Faults::default() }, ..calm }
        }
        // Others append meanwhile, so that remembered versions are old.
        Mutant::ExpectationUnchecked => Scenario { strangers: 4, streams: 2, ..calm },
        Mutant::AdmissionWithoutPredecessor => Scenario { strangers: 4, streams: 2, ..calm },
        Mutant::XidOnlyTruncation => Scenario {
            strangers: 8,
            streams: 200,
            messages: 300,
            pause_us: 12_000,
            hold_us: 300_000,
            maintenance_ms: 10,
            rotate_rows: 2,
            ..calm
        },
        Mutant::NoFenceLock => Scenario {
            processes: 3,
            shards: 1,
            partition_count: 2,
            streams: 2,
            messages: 800,
            run_ms: 10_000,
            faults: Faults { kill: 3, cut_per_mille: 150, ..Faults::default() },
            ..calm
        },
        // No flow of ours meets a taken number: the conformance script does.
        Mutant::DoNothingOnNumbers => calm,
        Mutant::BlindResend | Mutant::LookUpWithoutLocks => {
            Scenario { faults: Faults { cut_per_mille: 100, ..Faults::default() }, ..calm }
        }
        // A transport that is slow, so that messages stand in lanes when their partitions leave.
        Mutant::OpenHandedOver => Scenario {
            processes: 2,
            shards: 1,
            partition_count: 8,
            messages: 600,
            run_ms: 8_000,
            manners: Manners { slow: 400, ..Manners::default() },
            faults: Faults { leave: 10, add: 10, ..Faults::default() },
            ..calm
        },
        // A transport that is slow, so that runs are under way when their partitions leave.
        Mutant::HandedOverUnasked => {
            Scenario { manners: Manners { slow: 400, ..Manners::default() }, ..crate::views_late::scenario(seed) }
        }
        // Messages that die, and an operator who gives them back.
        Mutant::OwnersNotTold => Scenario { manners: Manners { permanent: 60, ..Manners::default() }, ..calm },
        // A destination that is away now and then, while others go on writing.
        Mutant::ClaimWithoutBound => Scenario {
            shards: 1,
            strangers: 12,
            streams: 4,
            messages: 3_000,
            pause_us: 500,
            hold_us: 500,
            lane_rows_max: 8,
            faults: Faults { away: 1, ..Faults::default() },
            ..calm
        },
        Mutant::NumberGivenAgain => Scenario { streams: 40, strangers: 2, maintenance_ms: 50, rotate_rows: 2, ..calm },
    }
}

/// The first seed that the mutant is seen in, with what was seen.
fn first_red(mutant: Mutant) -> Option<(u64, String)> {
    (0..SEEDS).find_map(|seed| {
        let scenario = scenario(seed, mutant);
        activate(Some(mutant));
        let outcome = run(&scenario);
        activate(None);
        outcome.err().map(|(failure, _)| (seed, failure.text))
    })
}

fn check(mutant: Mutant, expected: &[&str]) {
    let Some((seed, text)) = first_red(mutant) else { panic!("{mutant:?}: no seed of {SEEDS} went red") };
    println!("{mutant:?}: red at seed {seed}: {text}");
    assert!(
        expected.iter().any(|start| text.starts_with(start)),
        "{mutant:?} at seed {seed} went red by another rule: {text}"
    );
    for seed in 0..=seed {
        if let Err((failure, _)) = run(&scenario(seed, mutant)) {
            panic!("red without its mutant {mutant:?}: {failure}");
        }
    }
}

#[test]
fn order_by_xid_goes_red() {
    check(Mutant::OrderByXid, &["P2"]);
}

#[test]
fn a_raw_snapshot_as_cursor_goes_red() {
    check(Mutant::RawSnapshotPersisted, &["P3: after the quiet"]);
}

#[test]
fn a_cursor_kept_over_a_crash_goes_red() {
    check(Mutant::CursorKeptOverCrash, &["P2", "P3: after the quiet", "P5"]);
}

#[test]
fn admission_without_the_predecessor_goes_red() {
    check(Mutant::AdmissionWithoutPredecessor, &["P2"]);
}

#[test]
fn doing_nothing_on_taken_numbers_goes_red() {
    activate(Some(Mutant::DoNothingOnNumbers));
    let outcome = crate::model::run_script(1);
    activate(None);
    assert!(outcome.is_err_and(|failure| failure.text.contains("Stored")), "the script met no taken number");
}

#[test]
fn truncation_by_transaction_ids_alone_goes_red() {
    check(Mutant::XidOnlyTruncation, &["P3: after the quiet", "reference", "P2"]);
}

#[test]
fn no_fence_lock_goes_red() {
    check(Mutant::NoFenceLock, &["P2", "P3"]);
}

#[test]
fn a_blind_resend_goes_red() {
    check(Mutant::BlindResend, &["P2", "P3"]);
}

#[test]
fn a_look_up_without_locks_goes_red() {
    check(Mutant::LookUpWithoutLocks, &["P2", "P3"]);
}

#[test]
fn a_number_given_again_goes_red() {
    check(Mutant::NumberGivenAgain, &["P5", "number", "another message"]);
}

#[test]
fn a_claim_without_bound_goes_red() {
    check(Mutant::ClaimWithoutBound, &["P8"]);
}

#[test]
fn open_messages_handed_over_as_resolved_go_red() {
    check(Mutant::OpenHandedOver, &["P2", "P3"]);
}

#[test]
fn a_partition_handed_over_before_its_shard_let_go_goes_red() {
    check(Mutant::HandedOverUnasked, &["P2: partition"]);
}

#[test]
fn what_is_given_back_without_a_word_to_the_owner_goes_red() {
    check(Mutant::OwnersNotTold, &["P3"]);
}

#[test]
fn an_expectation_that_is_not_compared_goes_red() {
    check(Mutant::ExpectationUnchecked, &["P5"]);
}
