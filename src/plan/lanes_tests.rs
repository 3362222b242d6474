//! Stories of lanes: a script in, what goes out when.
//!
//! `a1` is message 1 of stream a (destination `x`; `a1>y` another one). Words: `admit`, `run` (takes every
//! ready head), `ok`, `fail` (parks), `die`, `buried`, `back` (not ready), `due` (drain: copies come back).

use std::collections::BTreeMap;

use uuid::Uuid;

use super::lanes::*;
use super::ledger::TransactionIndex;
use crate::batch::DestinationId;
use crate::time::Tick;

struct World {
    lanes: Lanes,
    out: BTreeMap<String, SlotIndex>,
    beside: Vec<String>,
}

fn parse(word: &str) -> (Uuid, i64, DestinationId) {
    let (name, destination) = word.split_once('>').unwrap_or((word, "x"));
    let stream = Uuid::from_u128(u128::from(name.as_bytes()[0]));
    (
        stream,
        name[1..].parse().expect("number"),
        DestinationId::of(&format!("lanes-{destination}")).expect("destination"),
    )
}

fn name(lane: &Lane, seq: i64) -> String {
    let destination = lane.destination.name().trim_start_matches("lanes-");
    let stream = lane.lane_id.as_u128() as u8 as char;
    if destination == "x" { format!("{stream}{seq}") } else { format!("{stream}{seq}>{destination}") }
}

/// Runs the script; answers what each `run` took and what each `fail` sent beside the log.
fn play(script: &str) -> String {
    let mut world = World { lanes: Lanes::with_capacity(64, 64), out: BTreeMap::new(), beside: Vec::new() };
    let mut told = Vec::new();
    let source = |seq: i64, copy: bool| Source {
        batch: 0,
        reference: seq as u32,
        transaction: if copy { TransactionIndex::NONE } else { super::ledger::Ledger::default().open(1, 1) },
    };
    for step in script.split(';') {
        let mut words = step.split_whitespace();
        let verb = words.next().unwrap_or("");
        let World { lanes, out, beside } = &mut world;
        match verb {
            "admit" => {
                for word in words {
                    let (lane_id, stream_seq, destination) = parse(word);
                    let admission = Admission {
                        lane_id,
                        destination,
                        partition: 0,
                        stream_seq,
                        single: false,
                        source: source(stream_seq, false),
                    };
                    match lanes.admit(&admission) {
                        Admitted::Queued => {}
                        Admitted::Known => told.push(format!("known {word}")),
                        Admitted::Beside(_) => beside.push(word.to_owned()),
                    }
                }
            }
            "run" => {
                let per_lane = words.next().map_or(1, |count| count.parse().expect("count"));
                let mut took = Vec::new();
                for index in 0..lanes.destination_count() {
                    let destination = lanes.destination_at(index).expect("destination");
                    let mut slots = Vec::new();
                    lanes.take(destination, usize::MAX, per_lane, |slot, _| slots.push(slot));
                    for slot in slots {
                        let key = name(lanes.lane(lanes.lane_of(slot)), lanes.stream_seq_of(slot));
                        took.push(key.clone());
                        out.insert(key, slot);
                    }
                }
                told.push(format!("run {}", if took.is_empty() { "-".into() } else { took.join(" ") }));
            }
            "ok" => {
                for word in words {
                    let slot = out.remove(word).expect("in flight");
                    let lane = lanes.lane_of(slot);
                    lanes.acknowledge(slot);
                    let more_of_lane = out.values().any(|other| lanes.lane_of(*other) == lane);
                    if !more_of_lane {
                        lanes.release(lane);
                    }
                }
            }
            "fail" => {
                for word in words {
                    let slot = out.remove(word).expect("in flight");
                    let lane = lanes.lane_of(slot);
                    let attempts = lanes.lane(lane).attempts + 1;
                    let of = *lanes.lane(lane);
                    let mut copied = 0;
                    lanes.park(lane, attempts, Tick(10), |seq, source| {
                        if source.transaction != TransactionIndex::NONE {
                            beside.push(name(&of, seq));
                            copied += 1;
                        }
                    });
                    lanes.copied(lane, copied);
                }
            }
            "due" => {
                let first = words.next().expect("copies");
                let (lane_id, _, destination) = parse(first);
                let lane = lanes.find(lane_id, destination).expect("lane");
                lanes.begin_drain(lane);
                for word in std::iter::once(first).chain(words) {
                    let (_, seq, _) = parse(word);
                    lanes.admit_copy(lane, seq, source(seq, true));
                }
            }
            "unpark" | "buried" | "back" | "die" => {
                let word = words.next().expect("message");
                let (lane_id, _, destination) = parse(word);
                let lane = lanes.find(lane_id, destination).expect("lane");
                match verb {
                    "unpark" => lanes.unparked(lane),
                    "die" => lanes.die(lane),
                    "back" => {
                        out.remove(word);
                        lanes.put_back(lane);
                    }
                    _ => {
                        out.remove(word);
                        lanes.buried(lane);
                        lanes.release(lane);
                    }
                }
            }
            "" => {}
            other => panic!("no such word: {other}"),
        }
    }
    if !world.beside.is_empty() {
        told.push(format!("beside {}", world.beside.join(" ")));
    }
    told.join(" | ")
}

#[test]
fn one_message_of_a_lane_is_in_flight_and_lanes_do_not_wait_for_each_other() {
    assert_eq!(
        play("admit a1 a2 b1 a1>y; run; run; ok a1; run; ok b1 a2; run"),
        "run a1 b1 a1>y | run - | run a2 | run -"
    );
}

#[test]
fn a_failed_head_parks_its_lane_and_nothing_overtakes_it() {
    assert_eq!(
        play("admit a1 a2 a3 b1 b2; run; fail a1; ok b1; admit a4; run; due a1 a2; run; ok a1; run; ok a2; run"),
        "run a1 b1 | run b2 | run a1 | run a2 | run - | beside a1 a2 a3 a4"
    );
}

#[test]
fn a_parked_lane_goes_on_from_memory_only_after_its_row_is_gone() {
    assert_eq!(
        play("admit a1; run; fail a1; due a1; run; ok a1; admit a2; run; due a2; run; ok a2; unpark a2; admit a3; run"),
        "run a1 | run a1 | run - | run a2 | run a3 | beside a1 a2"
    );
}

#[test]
fn a_dying_head_blocks_its_lane_until_it_is_buried() {
    assert_eq!(play("admit a1 a2; run; die a1; run; buried a1; run"), "run a1 | run - | run a2");
}

#[test]
fn a_destination_that_is_not_ready_gets_the_same_head_first_again() {
    assert_eq!(play("admit a1 a2 b1; run; back a1; run; ok a1; run"), "run a1 b1 | run a1 | run a2");
}

#[test]
fn numbers_at_or_below_the_last_are_passed_over() {
    assert_eq!(play("admit a1 a2; admit a2 a1; run"), "known a2 | known a1 | run a1");
}

#[test]
fn ordered_batches_take_consecutive_messages_of_a_lane() {
    assert_eq!(play("admit a1 a2 a3 b1; run 2; ok a1 a2; run 2"), "run a1 a2 b1 | run a3");
}

#[test]
fn a_lane_of_a_message_without_stream_goes_away() {
    let mut lanes = Lanes::with_capacity(4, 4);
    let destination = DestinationId::of("lanes-x").expect("destination");
    for id in 1..100u128 {
        let source = Source { batch: 0, reference: 0, transaction: TransactionIndex::NONE };
        let admission =
            Admission { lane_id: Uuid::from_u128(id), destination, partition: 0, stream_seq: 1, single: true, source };
        assert_eq!(lanes.admit(&admission), Admitted::Queued);
        let mut slot = None;
        lanes.take(destination, 1, 1, |taken, _| slot = Some(taken));
        let slot = slot.expect("taken");
        let lane = lanes.lane_of(slot);
        lanes.acknowledge(slot);
        lanes.release(lane);
        assert!(lanes.find(Uuid::from_u128(id), destination).is_none());
    }
    assert_eq!(lanes.rows(), 0);
}

#[test]
fn the_search_for_a_lane_begins_where_it_was_left_and_goes_round() {
    let mut lanes = Lanes::with_capacity(4, 4);
    let destination = DestinationId::of("lanes-x").expect("destination");
    for id in 0..4u128 {
        let source = Source { batch: 0, reference: 0, transaction: TransactionIndex::NONE };
        let admission =
            Admission { lane_id: Uuid::from_u128(id), destination, partition: 0, stream_seq: 1, single: true, source };
        lanes.admit(&admission);
    }
    let asked = std::cell::RefCell::new(Vec::new());
    let find = |place: u32, wanted: &[u128]| {
        asked.borrow_mut().clear();
        lanes.find_from(LaneIndex(place), |lane| {
            asked.borrow_mut().push(lane.lane_id.as_u128());
            wanted.contains(&lane.lane_id.as_u128())
        })
    };
    assert_eq!((find(2, &[1, 2]), asked.take()), (Some(LaneIndex(2)), vec![2]));
    assert_eq!((find(2, &[1]), asked.take()), (Some(LaneIndex(1)), vec![2, 3, 0, 1]));
    // Every lane is asked before there is none; lanes may have gone since.
    assert_eq!((find(3, &[]), asked.take()), (None, vec![3, 0, 1, 2]));
    assert_eq!((find(9, &[3]), asked.take()), (Some(LaneIndex(3)), vec![0, 1, 2, 3]));
}
