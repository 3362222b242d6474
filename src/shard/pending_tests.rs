//! What one flush takes from the queue, what is held back behind what, and how batches that were taken apart are
//! answered.
//!
//! A batch is written `a b+c a`: units of work parted by spaces, messages by `+`, each the letter of its stream.

use std::collections::HashSet;
use std::sync::Arc;

use futures_channel::oneshot;
use futures_util::FutureExt;
use uuid::Uuid;

use super::duplicates::Duplicates;
use super::pending::{Pending, split_by_streams};
use super::state::State;
use super::{ShardSettings, Submission, SubmissionReply};
use crate::batch::{NewRow, Pool, Rows};
use crate::envelope::Trace;
use crate::error::Error;
use crate::metrics::ShardMetrics;
use crate::plan::cadence::Intervals;
use crate::plan::pause::BreakerRules;
use crate::plan::retry::OnDeath;
use crate::time::Tick;

fn stream(letter: char) -> Uuid {
    Uuid::from_u128(letter as u128)
}

fn rows_of(text: &str) -> Rows {
    let mut rows = Rows::default();
    for unit in text.split_whitespace() {
        for letter in unit.split('+') {
            let row = NewRow {
                message_id: Uuid::now_v7(),
                stream_id: Some(stream(letter.chars().next().unwrap())),
                partition: 0,
                is_event: false,
                type_name: "",
                content_type: "",
                correlation_id: Uuid::nil(),
                causation_id: Uuid::nil(),
                trace: Trace::default(),
                metadata: b"",
                payload: b"0123456789",
                due_unix_us: 0,
            };
            rows.push(&row, &[]);
        }
        rows.end_unit();
    }
    rows
}

fn text_of(rows: &Rows) -> String {
    let mut units = Vec::new();
    let mut start = 0;
    for end in &rows.unit_end {
        let unit: Vec<String> = rows.lane_id[start..*end as usize]
            .iter()
            .map(|lane| char::from(lane.as_u128() as u8).to_string())
            .collect();
        units.push(unit.join("+"));
        start = *end as usize;
    }
    units.join(" ")
}

fn texts_of<'a>(batches: impl IntoIterator<Item = &'a Pending>) -> String {
    batches.into_iter().map(|pending| text_of(&pending.rows)).collect::<Vec<_>>().join(" | ")
}

fn pending(rows: Rows) -> (Pending, oneshot::Receiver<SubmissionReply>) {
    let (reply, answer) = oneshot::channel();
    (Pending::new(Submission { rows: Arc::new(rows), reply }, Tick(0)), answer)
}

pub(super) fn state(rows_max: usize, bytes_max: usize) -> State {
    let settings = ShardSettings {
        shard: 0,
        flush_rows_max: rows_max,
        flush_bytes_max: bytes_max,
        flush_age_us_max: 0,
        claim_rows_max: 1_000,
        claim_streams_max: 1_000,
        claim_intervals: Intervals { base_ms: 250, relaxed_ms: 5_000, max_ms: 10_000 },
        lane_rows_max: 1_000,
        lane_streams_max: 1_000,
        lane_crowd_ms: super::CROWD_MS,
        publish_run_rows_max: 100,
        publish_in_flight_max: 2,
        retry_base_ms: 30_000,
        retry_cap_ms: 300_000,
        retry_attempts_max: 10,
        retry_jitter_percent: 10,
        on_death: OnDeath::default(),
        breaker: BreakerRules { failures_max: 0, base_ms: 3_000, cap_ms: 300_000 },
        cursor_interval_ms: 50,
        call_timeout_ms: 5_000,
    };
    State::new(settings, Arc::new(ShardMetrics::default()), Arc::new(Pool::new(4, 1 << 20, 4 << 20)))
}

/// Flushes of the batches, one after the other, until the queue is empty.
fn flushes(rows_max: usize, bytes_max: usize, units_max: usize, batches: &[&str]) -> Vec<String> {
    let mut state = state(rows_max, bytes_max);
    let mut answers = Vec::new();
    for text in batches {
        let (pending, answer) = pending(rows_of(text));
        state.put_last(pending);
        answers.push(answer);
    }
    let mut flushes = Vec::new();
    while !state.pending.is_empty() {
        let (taken, refused) = state.collect(units_max);
        flushes.push(texts_of(&taken) + if refused > 0 { " (refused some)" } else { "" });
    }
    assert_eq!((state.pending_rows, state.pending_bytes), (0, 0), "what was taken is not counted any more");
    flushes
}

#[test]
fn a_flush_takes_whole_batches_in_their_order_up_to_its_bounds() {
    assert_eq!(flushes(4, 1000, 99, &["a b", "c", "d", "e f g"]), ["a b | c | d", "e f g"]);
    assert_eq!(flushes(99, 30, 99, &["a b", "c", "d"]), ["a b | c", "d"]);
    assert_eq!(flushes(99, 1000, 2, &["a", "b", "c"]), ["a | b", "c"]);
}

#[test]
fn a_batch_larger_than_a_flush_goes_by_units() {
    assert_eq!(flushes(3, 1000, 99, &["a b+b c d+d+d e", "f"]), ["a b+b", "c", "d+d+d", "e | f"]);
    assert_eq!(flushes(99, 1000, 1, &["a b+b c"]), ["a", "b+b", "c"]);
}

#[test]
fn a_unit_that_no_flush_can_hold_is_refused_and_its_neighbours_go_on() {
    assert_eq!(flushes(2, 1000, 99, &["b+b+b", "a b+b+b c", "d"]), ["a (refused some)", "c | d (refused some)"]);
}

#[test]
fn a_refused_unit_is_answered_by_its_index_and_given_back() {
    let mut state = state(2, 1000);
    let (pending, mut answer) = pending(rows_of("a b+b+b c"));
    state.put_last(pending);
    let mut given_back = 0;
    while !state.pending.is_empty() {
        let (taken, refused) = state.collect(99);
        given_back += refused + taken.into_iter().map(|pending| pending.answer(None)).sum::<usize>();
    }
    assert_eq!(given_back, 5, "every row of the budget comes back");
    let reply = answer.try_recv().unwrap().unwrap();
    assert_eq!(text_of(&reply.rows), "a b+b+b c");
    let refused: Vec<u32> = reply.refused.iter().map(|(unit, _)| *unit).collect();
    assert_eq!(refused, [1]);
    assert!(matches!(reply.refused[0].1, Error::MessageLimit { .. }), "{:?}", reply.refused);
}

#[test]
fn what_comes_after_a_busy_stream_queues_behind_it_with_all_its_streams() {
    let mut state = state(99, 1000);
    let (first, _first) = pending(rows_of("a b+c d"));
    let mut held = HashSet::from([stream('b')]);
    let (free, behind) = split_by_streams(first, &mut held);
    assert_eq!((texts_of(&free), texts_of(&behind)), ("a d".into(), "b+c".into()));
    state.held_back.extend(behind);
    // c waits behind b, and e behind c.
    let answers: Vec<_> = ["c+e", "e f", "a b"]
        .map(|text| {
            let (pending, answer) = pending(rows_of(text));
            state.put_last(pending);
            answer
        })
        .into();
    let (taken, _) = state.collect(99);
    assert_eq!(texts_of(&taken), "f | a");
    assert_eq!(texts_of(&state.held_back), "b+c | c+e | e | b");
    state.recall_held_back();
    let (taken, _) = state.collect(99);
    assert_eq!(texts_of(&taken), "b+c | c+e | e | b", "in their order");
    assert_eq!(answers.len(), 3);
}

#[test]
fn a_batch_in_parts_is_answered_once_with_every_part_in_its_place() {
    // The caller keeps a handle to its batch: it gets a copy with the numbers.
    let kept = Arc::new(rows_of("a b+c a"));
    let (reply, mut answer) = oneshot::channel();
    let whole = Pending::new(Submission { rows: kept.clone(), reply }, Tick(0));
    let (free, behind) = split_by_streams(whole, &mut HashSet::from([stream('c')]));
    let (mut free, mut behind) = (free.unwrap(), behind.unwrap());
    Arc::get_mut(&mut free.rows).unwrap().stream_seq.copy_from_slice(&[7, 8]);
    Arc::get_mut(&mut behind.rows).unwrap().stream_seq.copy_from_slice(&[5, 6]);
    assert_eq!(behind.answer(None), 2);
    assert!(answer.try_recv().unwrap().is_none(), "a part is on its way");
    assert_eq!(free.answer(None), 2);
    let reply = answer.try_recv().unwrap().unwrap();
    assert_eq!((text_of(&reply.rows).as_str(), &reply.rows.stream_seq[..]), ("a b+c a", &[7, 5, 6, 8][..]));
    assert!(reply.refused.is_empty());
    assert_eq!(kept.stream_seq, [0; 4], "nobody writes into what somebody else reads");
}

#[test]
fn of_two_units_with_the_same_message_the_last_is_taken_out_and_the_others_keep_their_order() {
    let twice = Uuid::from_u128(0xd0);
    let loose = |rows: &mut Rows| {
        let row = NewRow {
            message_id: twice,
            stream_id: None,
            partition: 0,
            is_event: false,
            type_name: "",
            content_type: "",
            correlation_id: Uuid::nil(),
            causation_id: Uuid::nil(),
            trace: Trace::default(),
            metadata: b"",
            payload: b"",
            due_unix_us: 0,
        };
        rows.push(&row, &[]);
        rows.end_unit();
    };
    let mut first = rows_of("a b");
    loose(&mut first);
    let mut second = rows_of("c d");
    loose(&mut second);
    second.push_copy(&rows_of("e"), 0);
    second.end_unit();
    let (first, _first_answer) = pending(first);
    let (second, second_answer) = pending(second);
    let (last, _last_answer) = pending(rows_of("f"));
    let (out, rest) = Duplicates::new(twice, Vec::new()).part(vec![first, second, last]);
    let letter = char::from(0xd0_u8);
    assert_eq!(texts_of(&rest), format!("a b {letter} | c d e | f"));
    assert_eq!((out.len(), &out[0].1), (1, &vec![twice]));
    out.into_iter().for_each(|(unit, _)| {
        unit.answer(Some(&|| Error::DuplicateMessage { message_id: twice }));
    });
    rest.into_iter().for_each(|pending| {
        pending.answer(None);
    });
    let reply = second_answer.now_or_never().unwrap().unwrap();
    assert!(matches!(reply.refused[..], [(2, Error::DuplicateMessage { message_id })] if message_id == twice));
    let (only, _answer) = pending(rows_of("a"));
    let (none, rest) = Duplicates::new(twice, Vec::new()).part(vec![only]);
    assert!(none.is_empty() && texts_of(&rest) == "a");
}
