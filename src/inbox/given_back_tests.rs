//! What may be taken of a stream of which something has been given back, by small stories.

use super::*;

const LOCK: u64 = 30_000_000;

fn stream(name: u128) -> Stream {
    (0, Uuid::from_u128(name))
}

/// A delivery of stream 1: its message, its turn (receipts are both), and when it was asked for.
fn judged(message: u64, turn: u64, asked: u64) -> Judged {
    Judged {
        stream: stream(1),
        message_id: Uuid::from_u128(message.into()),
        receipt: receipt(message, turn),
        turn,
        asked: Tick(asked),
    }
}

fn receipt(message: u64, turn: u64) -> Receipt {
    Receipt(message * 1_000 + turn)
}

fn note(back: &mut GivenBack, messages: &[u64], turn: u64, now: u64) {
    back.begin();
    for message in messages {
        let id = Uuid::from_u128((*message).into());
        back.note(stream(1), id, turn, receipt(*message, turn), Tick(now));
    }
}

fn answer(back: &mut GivenBack, of: Receipt, outcome: SettleOutcome, at: u64) -> Vec<Receipt> {
    let (at, locks_end) = (Tick(at), Tick(at + LOCK));
    back.answered(&Answered { source: 0, at, locks_end, outcomes: vec![(of, outcome)] })
}

#[test]
fn what_is_behind_an_unanswered_one_is_left_whatever_its_turn_until_that_comes_again() {
    let mut back = GivenBack::default();
    note(&mut back, &[1, 2], 5, 0);
    assert_eq!(back.judge(judged(3, 5, 1), Tick(1)), Ruling::Leave);
    assert_eq!(back.judge(judged(3, 6, 2), Tick(2)), Ruling::Leave, "it has overtaken the first");
    assert_eq!(back.judge(judged(2, 7, 3), Tick(3)), Ruling::Leave, "so has it: the first is 1");
    assert_eq!(back.judge(judged(1, 7, 3), Tick(3)), Ruling::Leave, "of a turn that was seen");
    assert_eq!(back.judge(judged(1, 8, 4), Tick(4)), Ruling::Fine);
    assert_eq!(back.judge(judged(2, 8, 4), Tick(4)), Ruling::Fine);
    assert!(answer(&mut back, receipt(1, 5), SettleOutcome::LockLost, 5).is_empty(), "what was left has gone back");
    assert!(back.streams.is_empty() && back.open.is_empty());
    let other = Judged { stream: stream(2), ..judged(9, 1, 0) };
    assert_eq!(back.judge(other, Tick(4)), Ruling::Fine);
}

#[test]
fn what_was_asked_for_after_the_answer_is_fine_and_what_was_before_it_goes_back_once() {
    for is_late in [false, true] {
        let mut back = GivenBack::default();
        note(&mut back, &[1], 5, 0);
        assert!(answer(&mut back, receipt(1, 5), SettleOutcome::Settled, 10).is_empty());
        if is_late {
            // Somebody else has handled 1.
            assert_eq!(back.judge(judged(3, 7, 11), Tick(12)), Ruling::Fine);
            continue;
        }
        assert_eq!(back.judge(judged(3, 6, 10), Tick(12)), Ruling::GiveBack, "perhaps it has overtaken 1");
        assert_eq!(back.judge(judged(4, 6, 10), Tick(12)), Ruling::Leave);
        let mut sooner = judged(1, 7, 10);
        assert_eq!(back.judge(sooner, Tick(13)), Ruling::Fine, "it had");
        // Or it had not.
        note(&mut back, &[1], 7, 14);
        assert!(answer(&mut back, receipt(1, 7), SettleOutcome::Settled, 15).is_empty());
        sooner = judged(3, 9, 15);
        assert_eq!(back.judge(sooner, Tick(16)), Ruling::GiveBack);
        assert_eq!(back.judge(judged(3, 10, 15), Tick(17)), Ruling::Fine, "it comes again first");
    }
}

#[test]
fn what_was_left_behind_one_that_was_not_ours_any_more_is_given_back_by_its_first() {
    let mut back = GivenBack::default();
    note(&mut back, &[1], 5, 0);
    for message in [3, 4] {
        assert_eq!(back.judge(judged(message, 7, 1), Tick(1)), Ruling::Leave);
    }
    assert_eq!(answer(&mut back, receipt(1, 5), SettleOutcome::LockLost, 2), [receipt(3, 7)]);
    assert_eq!(back.judge(judged(4, 8, 3), Tick(3)), Ruling::Leave, "that is unanswered now");
    assert_eq!(back.judge(judged(3, 9, 3), Tick(3)), Ruling::Fine);
}

#[test]
fn one_that_failed_for_good_is_over_with_its_lock_time() {
    let mut back = GivenBack::default();
    note(&mut back, &[1], 5, 0);
    assert_eq!(back.judge(judged(3, 6, 1), Tick(1)), Ruling::Leave);
    assert!(
        answer(&mut back, receipt(1, 5), SettleOutcome::Failed, 2).is_empty(),
        "what is behind it may not overtake"
    );
    assert_eq!(back.judge(judged(3, 7, LOCK), Tick(LOCK)), Ruling::Leave);
    assert_eq!(back.judge(judged(3, 8, LOCK + 3), Tick(LOCK + 3)), Ruling::Fine);
}

#[test]
fn of_two_that_are_under_way_both_answers_are_waited_for() {
    let mut back = GivenBack::default();
    note(&mut back, &[2, 3], 5, 0);
    note(&mut back, &[1], 5, 1);
    assert_eq!(back.judge(judged(2, 6, 2), Tick(2)), Ruling::Leave);
    answer(&mut back, receipt(1, 5), SettleOutcome::Settled, 3);
    assert_eq!(back.judge(judged(2, 7, 4), Tick(4)), Ruling::Leave);
    let left = answer(&mut back, receipt(2, 5), SettleOutcome::Settled, 5);
    assert_eq!(left, [receipt(2, 6), receipt(2, 7)], "whether they have gone back with the others is not known");
    for left in left {
        assert_eq!(back.judge(judged(1, 8, 6), Tick(6)), Ruling::Leave);
        let next = answer(&mut back, left, SettleOutcome::LockLost, 7);
        assert_eq!(next, if left == receipt(2, 6) { vec![] } else { vec![receipt(1, 8)] });
    }
    assert_eq!(back.judge(judged(1, 9, 7), Tick(8)), Ruling::Fine);
}

/// Each settled, and delivered again before their answers are read: nothing waits for its lock time.
#[test]
fn what_came_again_before_the_answers_of_two_were_read_goes_back_once_more() {
    let mut back = GivenBack::default();
    note(&mut back, &[1], 5, 0);
    note(&mut back, &[2], 5, 0);
    for message in 1..4 {
        assert_eq!(back.judge(judged(message, 7, 1), Tick(2)), Ruling::Leave, "which was in front is not known");
    }
    assert!(answer(&mut back, receipt(1, 5), SettleOutcome::Settled, 3).is_empty());
    assert_eq!(answer(&mut back, receipt(2, 5), SettleOutcome::Settled, 3), [receipt(1, 7)]);
    for message in 1..4 {
        assert_eq!(back.judge(judged(message, 8, 3), Tick(4)), Ruling::Fine);
    }
    assert!(answer(&mut back, receipt(1, 7), SettleOutcome::Settled, 5).is_empty());
    assert!(back.streams.is_empty() && back.open.is_empty());
}

/// A turn that began behind what was left before: neither waits for its lock time.
#[test]
fn the_first_that_was_left_of_each_turn_goes_back() {
    let mut back = GivenBack::default();
    note(&mut back, &[1], 5, 0);
    for (message, turn) in [(2, 5), (3, 5), (4, 6), (5, 6)] {
        assert_eq!(back.judge(judged(message, turn, 1), Tick(1)), Ruling::Leave);
    }
    assert_eq!(answer(&mut back, receipt(1, 5), SettleOutcome::LockLost, 2), [receipt(2, 5), receipt(4, 6)]);
    assert!(answer(&mut back, receipt(2, 5), SettleOutcome::Settled, 3).is_empty());
    assert!(answer(&mut back, receipt(4, 6), SettleOutcome::LockLost, 3).is_empty());
    assert_eq!(back.judge(judged(2, 7, 4), Tick(4)), Ruling::Fine);
}

#[test]
fn streams_that_are_remembered_are_bounded_and_the_newest_are_among_them() {
    for step_us in [0, 1] {
        let mut back = GivenBack::default();
        for name in 0..50_000u64 {
            back.begin();
            let now = Tick(1_000_000 + name * step_us);
            back.note(stream(name.into()), Uuid::from_u128(1), 1, Receipt(name), now);
            assert!(back.streams.len() <= STREAMS_MAX && back.open.len() <= STREAMS_MAX, "{}", back.streams.len());
        }
        if step_us > 0 {
            let newest = Judged { stream: stream(49_999), ..judged(1, 1, 0) };
            assert_eq!(back.judge(newest, Tick(2_000_000)), Ruling::Leave);
        }
    }
}

#[test]
fn what_is_remembered_of_a_stream_is_bounded() {
    let mut back = GivenBack::default();
    note(&mut back, &[1], 1, 0);
    let mut open = receipt(1, 1);
    for n in 2..100 {
        answer(&mut back, open, SettleOutcome::LockLost, n);
        assert_eq!(back.judge(judged(n, n, 0), Tick(n)), Ruling::GiveBack);
        open = receipt(n, n);
        let of = &back.streams[&stream(1)];
        assert!(of.firsts.len() <= FIRSTS_MAX && of.open.len() == 1 && back.open.len() == 1);
    }
}
