//! Stories of the lease keeper: what happens at which millisecond in, what it asks of the database and tells the
//! shards out. The words are those of `tend_town`.

use super::tend_town::{lines, play};

#[test]
fn it_registers_takes_what_is_free_and_looks_every_step() {
    let told = play(true, "0 well; 6000 lease");
    let expected = lines(
        "0 register
         0 shard 0: 1/-1 []
         0 shard 1: 1/-1 []
         0 members
         0 take
         0 shard 0: 1/1 [0, 2]
         0 shard 1: 1/1 [1, 3]
         2500 renew
         2500 members
         5000 renew
         5000 members
         5000 maintain
         6000 lease until 10000",
    );
    assert_eq!(told, expected);
}

#[test]
fn one_that_only_stores_renews_and_takes_nothing() {
    let told = play(false, "0 well; 3000 lease");
    assert_eq!(
        told,
        lines("0 register\n 0 shard 0: 1/-1 []\n 0 shard 1: 1/-1 []\n 2500 renew\n 3000 lease until 7500")
    );
}

#[test]
fn a_lost_connection_ends_the_right_to_publish_until_a_renewal_is_answered() {
    let told = play(true, "0 well; 2000 lose; 2600 lease; 3000 well; 3600 lease");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    let expected = lines(
        "2500 renew
         2600 lease over
         2750 renew
         3250 renew
         3250 members
         3600 lease until 8250",
    );
    assert_eq!(told, expected);
}

#[test]
fn a_server_that_refuses_for_now_does_not_end_the_lease_before_its_time() {
    let told = play(true, "0 well; 2000 refuse; 4000 lease; 9000 lease");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    // The waits double up to the usual step; the shards stop by themselves at 5000.
    let expected = lines(
        "2500 renew
         2750 renew
         3250 renew
         4000 lease until 5000
         4250 renew
         6250 renew
         8750 renew
         9000 lease until 5000",
    );
    assert_eq!(told, expected);
}

#[test]
fn a_renewal_without_an_answer_is_given_up_and_counts_from_before_it_was_sent() {
    let told = play(true, "0 well; 2000 hang; 7000 lease; 7600 lease; 7700 well; 8000 lease");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    let expected = lines(
        "2500 renew
         7000 lease until 5000
         7600 lease over
         7750 renew
         7750 members
         7750 maintain
         8000 lease until 12750",
    );
    assert_eq!(told, expected);
}

#[test]
fn a_dead_incarnation_stands_down_and_comes_back_as_another() {
    let told = play(true, "0 well; 2000 kill; 2600 lease; 3000 lease");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    let expected = lines(
        "2500 renew
         2500 shard 0: 1/-1 []
         2500 shard 1: 1/-1 []
         2500 deregister
         2600 lease over
         2750 register
         2750 shard 0: 2/-1 []
         2750 shard 1: 2/-1 []
         2750 members
         2750 take
         2750 shard 0: 2/2 [0, 2]
         2750 shard 1: 2/2 [1, 3]
         3000 lease until 7750",
    );
    assert_eq!(told, expected);
}

#[test]
fn a_member_whose_connection_ended_is_taken_over_at_the_next_look() {
    let told = play(true, "0 member 9; 3000 cut 9; 6000 lease");
    let expected = lines(
        "0 register
         0 shard 0: 1/-1 []
         0 shard 1: 1/-1 []
         0 members
         0 take
         0 shard 0: 1/0 []
         0 shard 1: 1/0 []
         2500 renew
         2500 members
         5000 renew
         5000 members
         5000 early 9 dead
         5000 members
         5000 take
         5000 shard 0: 1/1 [0, 2]
         5000 shard 1: 1/1 [1, 3]
         5000 maintain
         6000 lease until 10000",
    );
    assert_eq!(told, expected);
}

#[test]
fn a_member_that_holds_its_connection_is_taken_over_only_after_a_whole_lease_of_silence() {
    // Its lease is past by the database's clock from the start; it renews once more at 4000, which the look at 5000
    // sees.
    let told = play(true, "0 member 9; 1 still 9; 4000 beat 9; 20000 lease");
    let late: Vec<&str> = told.lines().filter(|line| line.contains("dead") || line.contains("[0, 2]")).collect();
    assert_eq!(late, ["15000 late 9 dead", "15000 shard 0: 1/1 [0, 2]"]);
}

#[test]
fn a_member_whose_lease_runs_by_the_databases_clock_is_left_alone_however_long_it_is_silent() {
    let told = play(true, "0 member 9; 60000 lease");
    assert!(!told.contains("dead"), "{told}");
}

#[test]
fn a_stop_frees_the_partitions() {
    let told = play(true, "0 well; 3000 stop");
    let (_, told) = told.split_once("2500 members\n").unwrap();
    let told: Vec<&str> = told.lines().map(|line| line.split_once(' ').unwrap().1).collect();
    assert_eq!(told, ["deregister", "ended", "lease over"]);
}

#[test]
fn a_conflict_at_a_stop_costs_nobody_a_lease() {
    let told = play(true, "0 well; 2999 conflicts 3; 3000 stop");
    let (_, told) = told.split_once("2500 members\n").unwrap();
    let told: Vec<&str> = told.lines().map(|line| line.split_once(' ').unwrap().1).collect();
    assert_eq!(told, ["deregister", "deregister", "deregister", "deregister", "ended", "lease over"]);
    // The same at the words before it: each is said until it is heard.
    let told = play(true, "0 peer 9; 2600 conflicts 3; 2700 part 1; 3000 stop");
    let told: Vec<&str> = told.lines().map(|line| line.split_once(' ').unwrap().1).collect();
    let end = told.iter().position(|line| *line == "withdraw").unwrap();
    let expected =
        ["withdraw", "withdraw", "withdraw", "withdraw", "hand over [0, 2]", "deregister", "ended", "lease over"];
    assert_eq!(told[end..], expected);
}

#[test]
fn a_stop_ends_also_when_the_database_does_not_answer() {
    let told = play(true, "0 well; 2000 hang; 3000 stop");
    assert!(told.contains("deregister\n") && told.ends_with("lease over") && !told.contains("did not end"), "{told}");
}

#[test]
fn a_stop_leaves_the_rest_only_to_others_that_hear_of_it_at_once() {
    let said = |script| {
        let told = play(true, script);
        told.lines().last().unwrap().to_owned()
    };
    assert_eq!(said("0 well; 3000 others"), "3000 others false");
    assert_eq!(said("0 peer 5; 3000 others"), "3000 others true");
    // It may never come again; who is silent can be followed when its lease is over.
    assert_eq!(said("0 worker 5; 3000 others"), "3000 others false");
    assert_eq!(said("0 worker 5; 1 peer 6; 3000 others"), "3000 others true");
    assert_eq!(said("0 peer 5; 1000 cut 5; 3000 others"), "3000 others false");
}

#[test]
fn maintenance_comes_soon_while_something_is_in_the_log_and_once_a_minute_otherwise() {
    let told = play(true, "0 log; 16000 empty; 145000 lease");
    let times: Vec<&str> = told.lines().filter_map(|line| line.strip_suffix(" maintain")).collect();
    assert_eq!(times, ["5000", "10000", "15000", "20000", "80000", "140000"]);
}

#[test]
fn maintenance_that_had_nothing_to_do_comes_soon_after_somebody_has_stored() {
    let told = play(true, "0 well; 8000 store; 16000 empty; 31000 store; 41000 lease");
    let times: Vec<&str> = told.lines().filter_map(|line| line.strip_suffix(" maintain")).collect();
    assert_eq!(times, ["5000", "10000", "15000", "20000", "32500", "37500"]);
}

#[test]
fn a_stop_does_not_wait_for_maintenance() {
    let told = play(true, "0 log; 1 stuck; 5100 stop");
    let (_, told) = told.split_once("5000 maintain\n").unwrap();
    let at: Vec<u64> = told.lines().map(|line| line.split_once(' ').unwrap().0.parse().unwrap()).collect();
    assert!(told.contains("deregister\n") && at.iter().all(|ms| *ms < 5_110), "{told}");
}

#[test]
fn maintenance_goes_on_at_once_while_it_gets_on() {
    let told = play(true, "0 log; 1 steps 2; 11000 lease");
    let times: Vec<&str> = told.lines().filter_map(|line| line.strip_suffix(" maintain")).collect();
    assert_eq!(times, ["5000", "5000", "5000", "10000"]);
}

#[test]
fn maintenance_without_an_answer_makes_no_renewal_late() {
    let told = play(true, "0 log; 1 stuck; 26000 lease");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    let renewals: Vec<u64> =
        told.lines().filter_map(|line| line.strip_suffix(" renew")).map(|ms| ms.parse().unwrap()).collect();
    assert_eq!(renewals, (1..=10).map(|step| step * 2_500).collect::<Vec<u64>>());
    assert!(told.matches("maintain").count() >= 2 && told.ends_with("lease until 30000"), "{told}");
}

#[test]
fn half_is_handed_over_to_one_that_comes_when_the_shards_have_let_go() {
    let told = play(true, "0 well; 1000 peer 5; 1100 heard; 1500 let; 2000 lease");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    // At once when it is said, not at the next step. Which two, its id decides. Nothing changes before the database says
    // so; the others of the partitions stay.
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(lines[..2], ["1100 renew", "1100 members"]);
    let of = |what: &str| lines.iter().filter(|line| line.contains(what)).count();
    let partitions = |what: &str| -> usize {
        let listed = lines.iter().filter(|line| line.contains(what)).filter_map(|line| line.split_once('['));
        listed.map(|(_, list)| list.matches(|of: char| of.is_ascii_digit()).count()).sum()
    };
    assert_eq!((partitions("1100 shard"), partitions("1500 hand over"), partitions("1500 shard")), (2, 2, 2), "{told}");
    assert_eq!((of("1500 shard"), of(" shard")), (2, 2 + of("go")), "each hears of it once: {told}");
}

#[test]
fn what_a_shard_cannot_let_go_stays() {
    let told = play(true, "0 well; 1000 peer 5; 1100 heard; 1500 cannot; 2000 lease");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    assert!(!told.contains("hand over"), "{told}");
    assert!(told.contains("shard 0: 1/1 [0, 2]") && told.contains("shard 1: 1/1 [1, 3]"), "{told}");
}

#[test]
fn one_that_is_ended_while_it_parts_comes_back_to_own_nothing() {
    let told = play(true, "0 well; 1000 part 1; 2000 kill; 3000 others");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    assert!(told.contains("2750 register to own nothing\n") && !told.contains("take"), "{told}");
}

#[test]
fn a_hand_over_at_a_stop_that_loses_its_connection_ends_the_lease_and_takes_nothing_of_the_others_along() {
    // The renewal is refused for now, which by itself ends no lease.
    let told = play(true, "0 well; 999 slip; 1000 part 2; 1001 lease; 1400 lease");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    let expected = lines(
        "1000 withdraw
         1000 hand over [0, 2]
         1000 hand over [1, 3]
         1000 renew
         1001 lease over
         1250 renew
         1250 members
         1250 withdraw
         1250 hand over [0, 2]
         1400 lease until 6250",
    );
    assert_eq!(told, expected);
}

#[test]
fn what_could_not_be_handed_over_is_handed_over_before_the_end() {
    let told = play(true, "0 well; 999 slip; 1000 part 2; 1100 stop");
    let (_, told) = told.split_once("1000 renew\n").unwrap();
    let told: Vec<&str> = told.lines().map(|line| line.split_once(' ').unwrap().1).collect();
    assert_eq!(told, ["withdraw", "hand over [0, 2]", "deregister", "ended", "lease over"]);
}

#[test]
fn what_the_shards_have_let_go_of_and_nobody_was_told_is_handed_over_at_a_stop() {
    // Which partitions they are, the other's id decides; told in vain at 1500, and not again before the stop.
    let told = play(true, "0 well; 1000 peer 5; 1100 heard; 1499 refuse; 1500 let; 1510 well; 1515 stop");
    let handed = |told: &str| -> Vec<String> {
        let lists = told.lines().filter_map(|line| line.split_once("hand over ")).map(|(_, list)| list.to_owned());
        let mut lists: Vec<String> = lists.collect();
        lists.sort();
        lists
    };
    let (before, end) = told.split_once("withdraw\n").unwrap_or_else(|| panic!("nothing was handed over: {told}"));
    let in_vain = handed(before);
    assert!(!in_vain.is_empty() && in_vain.iter().all(|list| handed(end).contains(list)), "{told}");
    let partitions: usize = handed(end).iter().map(|list| list.matches(|of: char| of.is_ascii_digit()).count()).sum();
    assert_eq!((partitions, end.contains("deregister")), (2, true), "{told}");
}

#[test]
fn a_hand_over_at_a_stop_does_not_wait_for_maintenance() {
    let told = play(true, "0 log; 1 stuck; 5100 part 2; 5110 lease");
    let (_, told) = told.split_once("5000 maintain\n").unwrap();
    assert!(told.starts_with(&lines("5100 withdraw\n 5100 hand over [0, 2]\n 5100 hand over [1, 3]")), "{told}");
}

#[test]
fn the_end_of_a_neighbours_connection_is_noticed_at_once() {
    let told = play(true, "0 member 9; 3000 cut 9; 3001 ended 9; 4000 lease");
    let taken: Vec<&str> = told.lines().filter(|line| line.contains("dead") || line.contains("[0, 2]")).collect();
    assert_eq!(taken, ["3001 early 9 dead", "3001 shard 0: 1/1 [0, 2]"]);
}

#[test]
fn where_the_schema_is_another_one_the_shards_are_told_and_the_keeper_ends() {
    let told = play(true, "0 well; 2000 gone; 2600 lease; 9000 well; 9100 stop");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    let expected = lines(
        "2500 renew
         2500 shard 0: 1/-1 []
         2500 shard 1: 1/-1 []
         2500 deregister
         2600 lease over
         9100 ended
         9100 lease over",
    );
    assert_eq!(told, expected);
}

/// What is told of the listener alone.
fn of_the_listener(told: &str) -> String {
    let of_it = |line: &&str| line.ends_with("test") || line.contains("listening");
    told.lines().filter(of_it).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_listener_is_tested_at_intervals_and_the_shards_are_told_once() {
    let told = play(true, "0 listens; 65000 lease");
    let expected = lines(
        "0 test
         0 shard 0: listening true
         0 shard 1: listening true
         30000 test
         60000 test",
    );
    assert_eq!(of_the_listener(&told), expected);
    // Nobody is tested where nobody listens, or where nothing is owned.
    assert_eq!(of_the_listener(&play(true, "0 well; 35000 lease")), "");
    assert_eq!(of_the_listener(&play(false, "0 listens; 35000 lease")), "");
}

#[test]
fn a_deaf_listener_is_known_after_the_tests_limit_and_connected_again_ever_later_while_renewals_go_on() {
    let told = play(true, "0 listens; 20000 deaf; 52000 hears; 60000 lease");
    let expected = lines(
        "0 test
         0 shard 0: listening true
         0 shard 1: listening true
         30000 test
         32000 shard 0: listening false
         32000 shard 1: listening false
         33000 test
         37000 test
         43000 test
         53000 test
         53000 shard 0: listening true
         53000 shard 1: listening true",
    );
    assert_eq!(of_the_listener(&told), expected);
    let renewed = told.lines().filter(|line| line.ends_with("renew")).count();
    assert_eq!(renewed, 23, "every 2.5 s:\n{told}");
    assert!(told.ends_with("60000 lease until 62500") || told.ends_with("60000 lease until 65000"), "{told}");
}

#[test]
fn a_listener_whose_connection_ends_is_deaf_at_once_and_connected_again_after_a_second() {
    let told = play(true, "0 listens; 20000 unplugged; 25000 lease");
    let expected = lines(
        "0 test
         0 shard 0: listening true
         0 shard 1: listening true
         20000 shard 0: listening false
         20000 shard 1: listening false
         21000 test
         21000 shard 0: listening true
         21000 shard 1: listening true",
    );
    assert_eq!(of_the_listener(&told), expected);
}

#[test]
fn a_position_that_moves_makes_the_shards_look_though_nobody_has_said_so() {
    // And once more: the transaction may have been about to commit when its position was seen.
    let told = play(true, "0 well; 6000 store; 14000 lease");
    let looks = lines(
        "7500 shard 0: look
         7500 shard 1: look
         10000 shard 0: look
         10000 shard 1: look",
    );
    assert_eq!(told.lines().filter(|line| line.ends_with("look")).collect::<Vec<_>>().join("\n"), looks);
}
