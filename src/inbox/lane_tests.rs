//! What a worker's lanes allow, by small stories.

use super::*;

fn id(name: char) -> Uuid {
    Uuid::from_u128(name as u128)
}

/// Lanes with these messages looked up and new: `a` is lane a, its slots count on.
fn with(names: &str) -> Lanes {
    let mut lanes = Lanes::default();
    for (slot, name) in names.chars().enumerate() {
        lanes.arrive(id(name), slot);
    }
    for (lane, slot) in lanes.to_begin(Tick(0), 100) {
        lanes.began(lane, slot, Found::New, Tick(0), 0);
    }
    lanes
}

fn start_all(lanes: &mut Lanes) -> Vec<Slot> {
    let mut started: Vec<Slot> = std::iter::from_fn(|| lanes.start_next()).map(|(_, slot)| slot).collect();
    started.sort_unstable();
    started
}

#[test]
fn of_a_lane_one_runs_at_a_time_and_lanes_do_not_wait_for_each_other() {
    let mut lanes = with("aab");
    assert_eq!(start_all(&mut lanes), [0, 2]);
    assert!(lanes.decided(id('a')));
    assert_eq!(start_all(&mut lanes), [1]);
    assert_eq!(lanes.running(), 2);
}

#[test]
fn behind_a_failure_nothing_starts_before_it_is_committed_and_then_it_is_looked_up_anew() {
    let mut lanes = with("aaa");
    assert_eq!(start_all(&mut lanes), [0]);
    lanes.arrive(id('a'), 3);
    assert!(lanes.decided(id('a')));
    assert_eq!(lanes.fail(id('a')), [1, 2], "what was looked up waits behind it");
    assert_eq!(start_all(&mut lanes), [0; 0]);
    assert!(lanes.to_begin(Tick(0), 100).is_empty(), "what came since is not looked up before the commit");
    lanes.committed(id('a'), 3);
    assert_eq!(lanes.to_begin(Tick(0), 100), [(id('a'), 3)]);
}

#[test]
fn a_lane_is_let_go_when_nothing_of_it_is_in_hand() {
    let mut lanes = with("ab");
    start_all(&mut lanes);
    assert!(lanes.take_idle().is_empty());
    lanes.decided(id('a'));
    assert!(lanes.take_idle().is_empty(), "decided is not committed");
    lanes.committed(id('a'), 1);
    assert_eq!(lanes.take_idle(), [id('a')]);
    assert!(!lanes.is_empty() && lanes.is_locked(id('b')));
}

#[test]
fn a_duplicate_leaves_its_lane_and_the_next_is_handled() {
    let mut lanes = Lanes::default();
    lanes.arrive(id('a'), 0);
    lanes.arrive(id('a'), 1);
    lanes.began(id('a'), 0, Found::Duplicate, Tick(0), 0);
    lanes.began(id('a'), 1, Found::New, Tick(0), 0);
    assert_eq!(start_all(&mut lanes), [1]);
}

#[test]
fn a_busy_lane_is_looked_at_again_later_whole() {
    let mut lanes = Lanes::default();
    lanes.arrive(id('a'), 0);
    lanes.arrive(id('a'), 1);
    for slot in 0..2 {
        lanes.began(id('a'), slot, Found::Busy, Tick(1_000), 50);
    }
    assert!(lanes.to_begin(Tick(2_000), 100).is_empty());
    assert_eq!(lanes.next_look(), Some(Tick(51_000)));
    assert_eq!(lanes.to_begin(Tick(51_000), 100), [(id('a'), 0), (id('a'), 1)]);
    assert_eq!(lanes.busy_since(Tick(1_000)), [id('a')]);
    assert_eq!(lanes.clear(id('a')), [0, 1]);
    assert!(lanes.is_empty() && lanes.take_idle().is_empty(), "it was never locked");
}

#[test]
fn what_runs_when_the_connection_is_lost_is_waited_for_counts_for_nothing_and_keeps_its_place() {
    let mut lanes = with("aaab");
    start_all(&mut lanes);
    // Of a the first is decided and the second runs, of b the only one is decided.
    lanes.decided(id('a'));
    lanes.decided(id('b'));
    assert_eq!(start_all(&mut lanes), [1]);
    for _ in 0..2 {
        lanes.reset();
    }
    lanes.put_back(id('b'), 3);
    lanes.put_back(id('a'), 0);
    assert_eq!(lanes.to_begin(Tick(0), 100), [(id('b'), 3)], "of lane a something still runs");
    assert!(!lanes.decided(id('a')));
    let mut again = lanes.to_begin(Tick(0), 100);
    again.retain(|(lane, _)| *lane == id('a'));
    assert_eq!(again, [(id('a'), 0), (id('a'), 1), (id('a'), 2)], "in its order");
    assert_eq!(lanes.running(), 0);
}

#[test]
fn what_has_to_wait_behind_leaves_its_lane_which_stays_locked_until_that_is_committed() {
    let mut lanes = Lanes::default();
    lanes.arrive(id('a'), 0);
    lanes.began(id('a'), 0, Found::Behind, Tick(0), 0);
    assert!(lanes.start_next().is_none() && lanes.take_idle().is_empty());
    lanes.committed(id('a'), 1);
    assert_eq!(lanes.take_idle(), [id('a')]);
}

#[test]
fn stored_messages_are_handled_before_what_has_come_since() {
    let mut lanes = Lanes::default();
    lanes.arrive(id('a'), 9);
    lanes.claimed(id('a'), 0);
    lanes.claimed(id('a'), 1);
    assert_eq!(start_all(&mut lanes), [0]);
    assert_eq!(lanes.peek(id('a')), Some(1));
    lanes.take_along(id('a'));
    assert_eq!(lanes.peek(id('a')), None, "9 is not looked up");
}

#[test]
fn a_duplicate_leaves_a_busy_lane_and_no_other_does() {
    let mut lanes = Lanes::default();
    for slot in 0..3 {
        lanes.arrive(id('a'), slot);
    }
    for (slot, found) in [(0, Found::Busy), (1, Found::Duplicate), (2, Found::Busy)] {
        lanes.began(id('a'), slot, found, Tick(0), 50);
    }
    assert_eq!(lanes.to_begin(Tick(50_000), 100), [(id('a'), 0), (id('a'), 2)]);
    assert_eq!(lanes.busy_since(Tick(0)), [id('a')]);
}

#[test]
fn a_lane_whose_head_was_disturbed_rests_with_what_was_decided_behind_it_and_goes_on_in_order() {
    let mut lanes = with("aaa");
    assert_eq!(lanes.start_next(), Some((id('a'), 0)));
    lanes.decided(id('a'));
    lanes.take_along(id('a'));
    lanes.bar(id('a'));
    lanes.rest(id('a'), &[0, 1], Tick(100));
    assert_eq!((lanes.next_wake(), lanes.is_locked(id('a'))), (Tick(100), true));
    lanes.arrive(id('b'), 3);
    lanes.began(id('b'), 3, Found::New, Tick(0), 0);
    assert_eq!(start_all(&mut lanes), [3], "another lane goes on");
    lanes.wake(Tick(99));
    assert!(!lanes.has_ready());
    lanes.wake(Tick(100));
    assert_eq!(lanes.next_wake(), Tick::NEVER);
    for slot in 0..3 {
        assert_eq!(lanes.start_next(), Some((id('a'), slot)));
        assert!(lanes.decided(id('a')));
    }
    // What is given back, or was of a lost connection, rests no more.
    let mut lanes = with("a");
    start_all(&mut lanes);
    lanes.decided(id('a'));
    lanes.rest(id('a'), &[0], Tick(100));
    lanes.reset();
    assert_eq!((lanes.next_wake(), lanes.to_begin(Tick(0), 100)), (Tick::NEVER, vec![(id('a'), 0)]));
    lanes.began(id('a'), 0, Found::New, Tick(0), 0);
    assert_eq!(start_all(&mut lanes), [0]);
}
