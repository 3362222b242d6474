//! `process_work_batch`: failures, retries, dead letters, and the view that shows them.

use uuid::Uuid;

use crate::outbox_kit::refusal;
use crate::store_kit::{Space, event, loose, message};
use crate::work_kit::Worker;

const PUT_OFF: &str = "p_outbox_failures => array[$2::uuid], p_outbox_failure_errors => array['no'],
    p_retry_base_ms => 60000, p_retry_cap_ms => 60000";

/// Makes every parked lane due.
async fn make_due(worker: &Worker) {
    worker.client.execute("update wh_parked set due = clock_timestamp()", &[]).await.unwrap();
}

/// A failed message holds up what is behind it in its stream, handed
/// out already or not, and nothing else; when it is due all of it comes in order.
#[tokio::test]
async fn a_failure_holds_up_its_stream_and_nothing_else_and_comes_back_in_order() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let (stream, other) = (Uuid::now_v7(), Uuid::now_v7());
    worker.store(&[event(stream, "1"), message(stream, "2"), event(stream, "3"), message(other, "a")]).await;
    let handed = worker.claim().await;
    assert_eq!(handed.payloads(), ["1", "2", "3", "a"]);
    let failed = worker.call(PUT_OFF, &[&handed.ids()[0]]).await;
    assert_eq!((failed.failed, failed.handed.len()), (Some(1), 0));
    worker.store(&[event(stream, "4"), message(other, "b")]).await;
    assert_eq!(worker.claim().await.payloads(), ["b"], "the other stream goes on");
    assert_eq!(worker.status(handed.ids()[0]).await, (32771, 1, 99, "no".to_owned()));
    assert_eq!(worker.status(handed.ids()[1]).await.0, 1, "behind it: stored, no more");
    let due = "wh_message_status where due between now() + interval '50 s' and now() + interval '70 s'";
    assert_eq!(worker.count(due).await, 1);
    let late = worker.complete(&handed.ids()[1..3]).await;
    assert_eq!(late.unknown, Some(2), "withdrawn: not in hand any more");

    make_due(&worker).await;
    let again = worker.claim().await;
    assert_eq!(again.payloads(), ["1", "2", "3", "4"]);
    assert_eq!((again.handed[0].attempts, again.handed[1].attempts), (1, 0));
    assert_eq!((again.handed[0].flags & 32, again.handed[0].stream_seq), (32, 1));
    worker.store(&[event(stream, "5")]).await;
    let rest = worker.claim().await;
    assert_eq!(rest.payloads(), ["5"], "behind those that are in hand");
    assert_eq!(worker.count("wh_parked_reference").await, 5);
    worker.complete(&rest.ids()).await;
    worker.complete(&again.ids()).await;
    for table in ["wh_parked", "wh_parked_reference", "wh_dead_letter"] {
        assert_eq!(worker.count(table).await, 0, "{table}");
    }
}

/// Attempts grow to those allowed, then it is a dead letter and its stream goes on. (The reference tries
/// for ever.)
#[tokio::test]
async fn after_the_attempts_allowed_it_is_a_dead_letter_and_its_stream_goes_on() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let stream = Uuid::now_v7();
    worker.store(&[message(stream, "1"), message(stream, "2")]).await;
    let id = worker.claim().await.ids()[0];
    for attempt in 1..=2 {
        let again = worker.fail(id, 2, "refused").await;
        assert_eq!(again.payloads(), ["1", "2"], "due at once");
        assert_eq!(again.handed[0].attempts, attempt);
    }
    let last = worker.fail(id, 2, "refused").await;
    assert_eq!((last.failed, last.payloads()), (Some(1), vec!["2"]));
    let dead = "select message_id, attempts, reason, error, payload from wh_dead_letter";
    let dead = worker.client.query_one(dead, &[]).await.unwrap();
    assert_eq!((dead.get::<_, Uuid>(0), dead.get::<_, i32>(1), dead.get::<_, i16>(2)), (id, 3, 2));
    assert_eq!((dead.get::<_, &str>(3), dead.get::<_, &[u8]>(4)), ("refused", b"1".as_slice()));
    assert_eq!(worker.status(id).await, (32769, 3, 2, "refused".to_owned()));
    worker.complete(&last.ids()).await;
    assert_eq!(worker.count("wh_parked").await + worker.count("wh_parked_reference").await, 0);
}

/// What cannot get better is dead at once; what is not the message's fault costs no attempt.
#[tokio::test]
async fn reasons_decide_what_a_failure_costs() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    worker.claim().await;
    for (reason, dead, attempts) in [(3, 1, 1), (4, 1, 1), (12, 1, 1), (1, 0, 0), (8, 0, 0), (2, 0, 1), (1234, 0, 1)] {
        worker.store(&[loose("x")]).await;
        let id = worker.claim().await.ids()[0];
        worker.fail(id, reason, "why").await;
        let of = format!("wh_dead_letter where message_id = '{id}'");
        assert_eq!((worker.count(&of).await, worker.status(id).await.1), (dead, attempts), "reason {reason}");
        worker.complete(&[id]).await;
    }
    let unknown = "wh_dead_letter where reason not in (3, 4, 12)";
    assert_eq!(worker.count(unknown).await, 0);
}

/// Whatever the error's text is, it is kept, up to 8 KiB and on a character's border.
#[tokio::test]
async fn error_texts_are_kept_as_they_are_and_cut_on_a_characters_border() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    worker.claim().await;
    let strange = "'quoted' \"twice\"\n\\backslash\t{} € 🦀".to_owned();
    for (text, kept) in [
        (strange.clone(), strange.len()),
        ("x".repeat(8192), 8192),
        ("é".repeat(5000), 8192),
        (format!("x{}", "é".repeat(5000)), 8191),
        (format!("x{}", "🦀".repeat(3000)), 8189),
    ] {
        worker.store(&[loose("x")]).await;
        let id = worker.claim().await.ids()[0];
        worker.fail(id, 3, &text).await;
        let error = worker.status(id).await.3;
        assert_eq!((error.len(), text.starts_with(&error)), (kept, true));
    }
}

/// Completions, failures and messages given back in one call, each ends as it should.
#[tokio::test]
async fn completed_failed_and_given_back_in_one_call() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let (stream, other) = (Uuid::now_v7(), Uuid::now_v7());
    worker.store(&[event(stream, "1"), event(stream, "2"), event(stream, "3"), event(other, "a")]).await;
    let ids = worker.claim().await.ids();
    let named = format!("{PUT_OFF}, p_outbox_completions => $3, p_outbox_completion_statuses => array[0, 0, 4]");
    let answer = worker.call(&named, &[&ids[0], &ids[1..].to_vec()]).await;
    assert_eq!((answer.completed, answer.failed, answer.handed.len()), (Some(1), Some(1), 0), "{answer:?}");
    let mut bits = Vec::new();
    for id in &ids {
        bits.push(worker.status(*id).await.0);
    }
    assert_eq!(bits, [32771, 3, 3, 7]);
    // The same with the second failing and the first published: nothing of it comes out of order.
    make_due(&worker).await;
    assert_eq!(worker.claim().await.payloads(), ["1", "2", "3"]);
    let named = format!("{PUT_OFF}, p_outbox_completions => array[$3::uuid]");
    worker.call(&named, &[&ids[1], &ids[0]]).await;
    make_due(&worker).await;
    let again = worker.claim().await;
    assert_eq!((again.payloads(), again.handed[0].attempts), (vec!["2", "3"], 1));
}

/// A failure behind one that is still in hand waits for that one, due or not.
#[tokio::test]
async fn a_failed_one_does_not_come_again_before_those_in_hand_before_it_are_decided() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let stream = Uuid::now_v7();
    worker.store(&[message(stream, "1"), message(stream, "2"), message(stream, "3")]).await;
    let ids = worker.claim().await.ids();
    assert_eq!(worker.fail(ids[1], 2, "no").await.payloads(), [""; 0]);
    assert_eq!(worker.complete(&ids[..1]).await.payloads(), ["2", "3"]);
}

/// One message to several destinations: each has an order and outcomes of its own.
#[tokio::test]
async fn destinations_of_one_message_are_decided_one_by_one() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let mut two = loose("x");
    two.destinations = vec!["here", "there"];
    worker.store(std::slice::from_ref(&two)).await;
    let handed = worker.claim().await;
    assert_eq!(handed.handed.iter().map(|of| of.destination.as_str()).collect::<Vec<_>>(), ["here", "there"]);
    let named = "p_outbox_completions => array[$2::uuid], p_outbox_completion_destinations => array['here'],
        p_outbox_failures => array[$2], p_outbox_failure_destinations => array['there'], p_outbox_failure_reasons => array[4]";
    let answer = worker.call(named, &[&two.id]).await;
    assert_eq!((answer.completed, answer.failed, answer.unknown), (Some(1), Some(1), Some(0)));
    let bits = "select array_agg(status order by destination) from wh_message_status";
    let bits: Vec<i32> = worker.client.query_one(bits, &[]).await.unwrap().get(0);
    assert_eq!(bits, [5, 32769]);
}

/// What was deleted before it was handed out is a dead letter, alone.
#[tokio::test]
async fn a_message_that_is_not_there_any_more_is_a_dead_letter() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let stream = Uuid::now_v7();
    worker.store(&[message(stream, "1"), event(stream, "2"), message(stream, "3")]).await;
    worker.client.execute("delete from wh_event_store", &[]).await.unwrap();
    assert_eq!(worker.claim().await.payloads(), ["1", "3"]);
    assert_eq!(worker.count("wh_dead_letter where reason = 7 and error like 'CL001:%'").await, 1);
}

/// The focused functions do what the whole does.
#[tokio::test]
async fn the_focused_functions_do_what_the_whole_does() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let (client, id) = (&worker.client, &worker.id);
    let unknown = client.query("select * from claim_outbox_messages($1)", &[id]).await;
    assert_eq!(refusal(unknown).0, "22023", "heartbeat comes first");
    let beat = client.query_one("select * from heartbeat($1, 'tests')", &[id]).await.unwrap();
    assert!(!beat.get::<_, bool>(0) && beat.get::<_, i32>(2) == 0);
    let stream = Uuid::now_v7();
    worker.store(&[event(stream, "1"), event(stream, "2"), event(stream, "3"), loose("a")]).await;
    let claim = "select array_agg(convert_from(payload, 'UTF8')), array_agg(message_id) from claim_outbox_messages($1)";
    let claimed = client.query_one(claim, &[id]).await.unwrap();
    assert_eq!(claimed.get::<_, Vec<String>>(0), ["1", "2", "3", "a"]);
    let ids: Vec<Uuid> = claimed.get(1);
    let renewed = client.query_one("select * from renew_outbox_messages($1)", &[id]).await.unwrap();
    assert_eq!((renewed.get::<_, bool>(0), renewed.get::<_, i32>(1)), (false, 4));
    let done = "select completed, returned, unknown from complete_outbox_messages($1, array[$2, $3]::uuid[])";
    let done = client.query_one(done, &[id, &ids[0], &Uuid::nil()]).await.unwrap();
    assert_eq!((done.get::<_, i32>(0), done.get::<_, i32>(1), done.get::<_, i32>(2)), (1, 0, 1));
    let failed = "select failed, dead from fail_outbox_messages($1, array[$2::uuid], p_retry_base_ms => 0)";
    let failed = client.query_one(failed, &[id, &ids[1]]).await.unwrap();
    assert_eq!((failed.get::<_, i32>(0), failed.get::<_, i32>(1)), (1, 0));
    let claimed = client.query_one(claim, &[id]).await.unwrap();
    assert_eq!(claimed.get::<_, Vec<String>>(0), ["2", "3"]);
    let dead = "select dead, unknown from move_to_dead_letters($1, $2, p_errors => array['by hand', 'by hand'])";
    let dead = client.query_one(dead, &[id, &vec![ids[1], ids[3]]]).await.unwrap();
    assert_eq!((dead.get::<_, i32>(0), dead.get::<_, i32>(1)), (2, 0));
    assert_eq!(worker.status(ids[1]).await, (32771, 2, 99, "by hand".to_owned()));
    let claimed = client.query_one(claim, &[id]).await.unwrap();
    assert_eq!(claimed.get::<_, Vec<String>>(0), ["3"], "what was withdrawn behind it comes again");
    client.execute("update wh_segment set switched_at = switched_at - interval '61 s'", &[]).await.unwrap();
    let maintained = client.query_one("select rotated from maintain_work($1)", &[id]).await.unwrap();
    assert!(maintained.get::<_, bool>(0));
    assert!(client.query_one("select end_work($1)", &[id]).await.unwrap().get::<_, bool>(0));
    assert!(!client.query_one("select end_work($1)", &[id]).await.unwrap().get::<_, bool>(0));
    assert!(client.query_one("select lease_lost from heartbeat($1, 'tests')", &[id]).await.unwrap().get::<_, bool>(0));
    assert_eq!(worker.count("wh_partition where owner is not null").await, 0);
}
