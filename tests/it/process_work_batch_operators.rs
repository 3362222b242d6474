//! `process_work_batch`: what operators do to dead letters and held lanes of partitions that a worker owns.
//!
//! What must stay true: the words by which owners are told (log rows with numbers that no message has) are no messages.

use uuid::Uuid;

use crate::store_kit::{Message, Space, event, loose, message};
use crate::work_kit::Worker;

const NOTHING_BESIDE: [&str; 4] = ["wh_parked", "wh_parked_reference", "wh_dead_letter", "wh_handed_out"];

async fn retry(worker: &Worker) -> i32 {
    let sql = "select retried from retry_dead_letters(p_all => true, p_dry_run => false)";
    worker.client.query_one(sql, &[]).await.unwrap().get(0)
}

/// The lane waits for an operator behind this number.
async fn hold(worker: &Worker, stream: Uuid, stream_seq: i64) {
    let sql = "insert into wh_parked (stream_seq, due, lane_id, partition, attempts, reason, destination, held)
        values ($2, now() + interval '100 years', $1,
            compute_partition($1, (select partition_count from wh_installation)), 1, 3, 'somewhere', true)";
    worker.client.execute(sql, &[&stream, &stream_seq]).await.unwrap();
}

/// No message has a number below 1, wherever one looks.
async fn assert_no_phantoms(worker: &Worker) {
    for table in ["wh_message_status", "wh_parked_reference", "wh_dead_letter", "wh_handed_out"] {
        assert_eq!(worker.count(&format!("{table} where stream_seq < 1")).await, 0, "{table}");
    }
}

async fn assert_nothing_left(worker: &Worker) {
    assert_no_phantoms(worker).await;
    for table in NOTHING_BESIDE {
        assert_eq!(worker.count(table).await, 0, "{table}");
    }
    assert_eq!(worker.count("wh_status() where what = 'pending' and figure > 0").await, 0);
}

#[tokio::test]
async fn what_is_given_back_to_a_workers_stream_comes_in_its_place_and_nothing_with_it() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let stream = Uuid::now_v7();
    worker.store(&[event(stream, "1"), message(stream, "2"), event(stream, "3"), loose("x")]).await;
    let handed = worker.claim().await;
    worker.fail(handed.ids()[0], 3, "ill").await;
    worker.fail(handed.ids()[3], 3, "ill").await;
    assert_eq!(retry(&worker).await, 2);
    let pending = "wh_status() where what = 'pending' and figure = 4";
    assert_eq!(worker.count(pending).await, 1, "words are not counted among what is pending");
    worker.store(&[event(stream, "4")]).await;
    assert_eq!(worker.claim().await.payloads(), ["x"], "behind what is in hand");
    let again = worker.complete(&handed.ids()[1..3]).await;
    assert_eq!(again.payloads(), ["1", "4"]);
    assert_no_phantoms(&worker).await;
    worker.complete(&again.ids()).await;
    worker.complete(&handed.ids()[3..]).await;
    assert_nothing_left(&worker).await;
}

/// However much else is to be read.
#[tokio::test]
async fn what_is_given_back_does_not_wait_for_a_backlog_that_is_read_in_pages() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let stream = Uuid::now_v7();
    worker.store(&[message(stream, "1"), message(stream, "2")]).await;
    let ids = worker.claim().await.ids();
    worker.fail(ids[0], 3, "ill").await;
    worker.complete(&ids[1..]).await;
    assert_eq!(retry(&worker).await, 1);
    for _ in 0..600 {
        worker.store(&[message(Uuid::now_v7(), "else")]).await;
    }
    let answer = worker.call("p_max_rows => 2", &[]).await;
    assert_eq!(answer.payloads(), ["1", "else"]);
    let more = worker.call("p_outbox_completions => $2, p_max_rows => 2", &[&answer.ids()]).await;
    assert_eq!(more.payloads(), ["else", "else"]);
    assert_no_phantoms(&worker).await;
    assert_eq!(worker.count("wh_dead_letter").await, 0);
}

#[tokio::test]
async fn a_lane_that_is_released_or_whose_dead_letter_is_discarded_goes_on_with_its_worker() {
    for discarded in [false, true] {
        for followers in [true, false] {
            let space = Space::new().await;
            let worker = Worker::new(&space).await;
            let stream = Uuid::now_v7();
            worker.store(&[message(stream, "1")]).await;
            let id = worker.claim().await.ids()[0];
            worker.fail(id, 3, "ill").await;
            hold(&worker, stream, 1).await;
            if followers {
                worker.store(&[event(stream, "2"), message(stream, "3")]).await;
            }
            assert_eq!(worker.claim().await.payloads(), [""; 0], "it is held");
            let sql = if discarded {
                "select released from discard_dead_letters(p_all => true, p_dry_run => false)".to_owned()
            } else {
                format!("select release_lanes(array['{stream}']::uuid[], array['somewhere'])")
            };
            assert_eq!(worker.client.query_one(&sql, &[]).await.unwrap().get::<_, i32>(0), 1);
            let answer = worker.claim().await;
            assert_eq!(answer.payloads(), if followers { &["2", "3"][..] } else { &[] });
            worker.complete(&answer.ids()).await;
            assert_no_phantoms(&worker).await;
            assert_eq!(worker.count("wh_dead_letter").await, i64::from(!discarded));
            worker.client.execute("delete from wh_dead_letter", &[]).await.unwrap();
            assert_nothing_left(&worker).await;
        }
    }
}

/// Which messages to which destination wait behind which.
async fn handed(worker: &Worker, of: &str) -> Vec<String> {
    let answer = worker.call("p_retry_base_ms => 0", &[]).await;
    let ids: Vec<Uuid> =
        answer.handed.iter().filter(|handed| handed.destination != of).map(|of| of.message_id).collect();
    let names: Vec<&str> =
        answer.handed.iter().map(|of| of.destination.as_str()).filter(|destination| *destination != of).collect();
    let named = "p_outbox_completions => $2, p_outbox_completion_destinations => $3, p_max_streams_per_batch => 0";
    worker.call(named, &[&ids, &names]).await;
    answer.handed.into_iter().filter(|handed| handed.destination == of).map(|handed| handed.payload).collect()
}

const DIES: &str =
    "p_outbox_failures => $2, p_outbox_failure_reasons => $3, p_retry_base_ms => 0, p_max_streams_per_batch => 0,
    p_hold_destinations => array['somewhere']";

#[tokio::test]
async fn a_stream_waits_behind_its_dead_message_where_a_failure_says_so() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let stream = Uuid::now_v7();
    let both = |payload| Message { destinations: vec!["somewhere", "elsewhere"], ..message(stream, payload) };
    worker.store(&[both("1"), both("2"), both("3"), loose("x")]).await;
    let ids = worker.claim().await.ids();
    let dying = [ids[0], ids[2], ids[6]];
    let answer = worker.call(DIES, &[&dying.to_vec(), &vec![3, 3, 3]]).await;
    assert_eq!(answer.failed, Some(5), "{answer:?}");
    let dead = "select array_agg(destination || ' ' || convert_from(payload, 'UTF8') order by destination, payload)
        from wh_dead_letter";
    let dead: Vec<String> = worker.client.query_one(dead, &[]).await.unwrap().get(0);
    assert_eq!(dead, ["elsewhere 1", "elsewhere 2", "somewhere 1", "somewhere x"], "behind it nothing dies");
    assert_eq!((worker.count("wh_parked").await, worker.count("wh_parked where held").await), (1, 1), "one stream");
    worker.store(&[both("4")]).await;
    assert_eq!(handed(&worker, "somewhere").await, [""; 0]);
    assert_eq!(worker.count("wh_parked_reference").await, 3);

    // Whoever follows finds it so.
    worker.client.query_one("select end_work($1)", &[&worker.id]).await.unwrap();
    let worker = Worker::new(&space).await;
    assert_eq!(handed(&worker, "somewhere").await, [""; 0]);
    let retry =
        "select released from retry_dead_letters(p_destination => 'somewhere', p_stream => $1, p_dry_run => false)";
    assert_eq!(worker.client.query_one(retry, &[&stream]).await.unwrap().get::<_, i32>(0), 1);
    assert_eq!(handed(&worker, "somewhere").await, ["1", "2", "3", "4"]);

    // It dies once more, of its attempts now, by the function for failures; an operator lets its stream go on.
    let fail = "select failed, dead from fail_outbox_messages($1, array[$2::uuid], p_attempts_max => 1,
        p_hold_destinations => array['elsewhere', 'somewhere'])";
    let failed = worker.client.query_one(fail, &[&worker.id, &ids[0]]).await.unwrap();
    assert_eq!((failed.get::<_, i32>(0), failed.get::<_, i32>(1)), (0, 1));
    assert_eq!(handed(&worker, "somewhere").await, [""; 0]);
    let release = "select release_lanes(array[$1::uuid], array['somewhere'])";
    assert_eq!(worker.client.query_one(release, &[&stream]).await.unwrap().get::<_, i32>(0), 1);
    assert_eq!(handed(&worker, "somewhere").await, ["2", "3", "4"]);
}

/// What was in hand before the dead one fails later: it waits as well, and comes first.
#[tokio::test]
async fn a_failure_before_a_dead_message_does_not_let_its_stream_go_on() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let stream = Uuid::now_v7();
    worker.store(&[event(stream, "1"), message(stream, "2"), event(stream, "3")]).await;
    let ids = worker.claim().await.ids();
    worker.call(DIES, &[&vec![ids[1]], &vec![3]]).await;
    worker.call(DIES, &[&vec![ids[0]], &vec![2]]).await;
    assert_eq!(worker.claim().await.payloads(), [""; 0]);
    assert_eq!((worker.count("wh_parked where held").await, worker.count("wh_parked_reference").await), (1, 2));
    assert_eq!(retry(&worker).await, 1);
    assert_eq!(worker.claim().await.payloads(), ["1", "2", "3"]);
    worker.complete(&ids).await;
    assert_nothing_left(&worker).await;
}

/// It is held though nothing stands behind it.
#[tokio::test]
async fn the_last_message_of_a_stream_holds_what_comes_later() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let stream = Uuid::now_v7();
    worker.store(&[event(stream, "1")]).await;
    let ids = worker.claim().await.ids();
    worker.call(DIES, &[&ids, &vec![4]]).await;
    worker.store(&[event(stream, "2")]).await;
    assert_eq!(worker.claim().await.payloads(), [""; 0]);
    assert_eq!(retry(&worker).await, 1);
    assert_eq!(worker.claim().await.payloads(), ["1", "2"]);
}

#[tokio::test]
async fn a_worker_alone_trims_old_dead_letters_and_says_what_waits() {
    let space = Space::new().await;
    let (worker, other) = (Worker::new(&space).await, Worker::new(&space).await);
    worker.store(&[loose("old"), loose("new"), event(Uuid::now_v7(), "held"), loose("waits")]).await;
    let handed = worker.call("p_max_rows => 3", &[]).await;
    for id in handed.ids() {
        worker.fail(id, 3, "ill").await;
    }
    worker
        .client
        .execute("update wh_dead_letter set dead_at = dead_at - interval '31 days' where payload <> 'new'", &[])
        .await
        .unwrap();
    worker
        .client
        .execute("update wh_dead_letter set dead_at = dead_at - interval '31 days' where payload is null", &[])
        .await
        .unwrap();
    let stream = "select stream_id from wh_dead_letter where payload is null";
    hold(&worker, worker.client.query_one(stream, &[]).await.unwrap().get(0), 1).await;
    let inspect = async |of: &Worker, days: i32| {
        let sql = "select lease_lost, inspected, dead_letters_trimmed, held from inspect_work($1, $2, 1, 3600000)";
        let row = of.client.query_one(sql, &[&of.id, &days]).await.unwrap();
        let figures: (bool, Option<bool>, Option<i32>, Option<i32>) = (row.get(0), row.get(1), row.get(2), row.get(3));
        figures
    };
    other.call("p_max_streams_per_batch => 0", &[]).await;
    assert_eq!(inspect(&worker, 0).await, (false, Some(true), Some(0), Some(1)), "none ever goes");
    assert_eq!(inspect(&other, 30).await, (false, Some(false), Some(0), None), "it is another's turn");
    assert_eq!(inspect(&worker, 30).await, (false, Some(true), Some(1), Some(1)));
    assert_eq!(worker.count("wh_dead_letter where payload = 'new' or payload is null").await, 2, "young, and held");
    assert_eq!(worker.count("wh_dead_letter").await, 2);
    worker.client.query("select end_work($1)", &[&worker.id]).await.unwrap();
    assert_eq!(inspect(&worker, 30).await, (true, None, None, None));
    assert_eq!(inspect(&other, 30).await, (false, Some(true), Some(0), Some(1)), "who comes after it goes on");
}
