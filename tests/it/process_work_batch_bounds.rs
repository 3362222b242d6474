//! `process_work_batch`: what is out of its range is refused by name, value and range; and nothing is left of a worker
//! that is gone.

use uuid::Uuid;

use crate::outbox_kit::refusal;
use crate::store_kit::{Space, message};
use crate::work_kit::Worker;

#[tokio::test]
async fn what_is_out_of_its_range_is_refused_by_name_value_and_range() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    worker.claim().await;
    let many = "array_fill(gen_random_uuid(), array[10001])";
    for (name, value, range) in [
        ("p_lease_seconds", "0", "1 to 3600"),
        ("p_lease_seconds", "null", "1 to 3600"),
        ("p_max_streams_per_batch", "-1", "0 to 1000000"),
        ("p_max_rows", "10001", "1 to 10000"),
        ("p_max_rows", "null", "1 to 10000"),
        ("p_max_rows_per_stream", "0", "1 to 10000"),
        ("p_attempts_max", "0", "1 to 1000000"),
        ("p_attempts_max", "null", "1 to 1000000"),
        ("p_retry_base_ms", "-1", "0 to 86400000"),
        ("p_retry_cap_ms", "86400001", "0 to 86400000"),
        ("p_retry_cap_ms", "null", "0 to 86400000"),
        ("p_outbox_completions", many, "0 to 10000"),
        ("p_outbox_failures", many, "0 to 10000"),
        ("p_new_outbox_messages", many, "0 to 10000"),
        ("p_renew_outbox_lease_ids", many, "0 to 10000"),
    ] {
        let (code, text) = refusal(worker.try_call(&format!("{name} => {value}"), &[]).await);
        let is = if value == many { "10001" } else { value };
        let of = if value == many { format!("length of {name}") } else { name.to_owned() };
        assert_eq!((code.as_str(), text), ("22023", format!("{of} = {is}: must be {range}")));
    }
    for (call, text) in [
        (format!("complete_outbox_messages($1, {many})"), "length of p_message_ids = 10001: must be 0 to 10000"),
        (format!("fail_outbox_messages($1, {many})"), "length of p_message_ids = 10001: must be 0 to 10000"),
        (format!("move_to_dead_letters($1, {many})"), "length of p_message_ids = 10001: must be 0 to 10000"),
        (format!("renew_outbox_messages($1, {many})"), "length of p_message_ids = 10001: must be 0 to 10000"),
        (
            "fail_outbox_messages($1, '{}', p_retry_cap_ms => 86400001)".into(),
            "p_retry_cap_ms = 86400001: must be 0 to 86400000",
        ),
        ("claim_outbox_messages($1, p_max_streams => 0)".into(), "p_max_streams = 0: must be 1 to 1000000"),
        ("heartbeat($1, 'tests', p_lease_seconds => 3601)".into(), "p_lease_seconds = 3601: must be 1 to 3600"),
        ("maintain_work($1, null)".into(), "p_lease_seconds = null: must be 1 to 3600"),
        ("inspect_work($1, -1)".into(), "p_dead_letters_days = -1: must be 0 to 36500"),
        ("inspect_work($1, 30, null)".into(), "p_unpublished_ms = null: must be 1 to 31536000000"),
        ("inspect_work($1, 30, 1, 0)".into(), "p_stuck_ms = 0: must be 1 to 31536000000"),
    ] {
        let refused = worker.client.query(&format!("select * from {call}"), &[&worker.id]).await;
        assert_eq!(refusal(refused), ("22023".to_owned(), text.to_owned()), "{call}");
    }
    assert!(!worker.claim().await.lease_lost, "and the worker goes on");
}

/// Behind the head of a parked lane nothing is in its attempts' way.
#[tokio::test]
async fn what_is_given_back_behind_a_parked_head_leaves_its_attempts() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let stream = Uuid::now_v7();
    worker.store(&[message(stream, "1"), message(stream, "2"), message(stream, "3")]).await;
    let ids = worker.claim().await.ids();
    let named =
        "p_outbox_failures => array[$2, $3]::uuid[], p_outbox_failure_reasons => array[2, 3], p_retry_base_ms => 0";
    worker.call(named, &[&ids[0], &ids[1]]).await;
    worker.fail(ids[0], 2, "no").await;
    let retry = "select retried from retry_dead_letters(p_all => true, p_dry_run => false)";
    assert_eq!(worker.client.query_one(retry, &[]).await.unwrap().get::<_, i32>(0), 1);
    assert_eq!((worker.status(ids[0]).await.1, worker.status(ids[1]).await.1), (2, 0));
    let flagged = worker.call("p_flags => 2", &[]).await;
    assert_eq!(
        flagged.handed.iter().map(|of| (of.stream_seq, of.attempts)).collect::<Vec<_>>(),
        [(1, 2), (2, 0), (3, 0)]
    );
    worker.fail(ids[0], 2, "no").await;
    assert_eq!(worker.count("wh_dead_letter where attempts = 3").await, 1, "the third was the last");
}

/// What a worker had in hand, and whom it watched, goes with the next maintenance, and with a rebase.
#[tokio::test]
async fn nothing_is_left_of_a_worker_that_is_gone() {
    let space = Space::new().await;
    let (gone, lives) = (Worker::new(&space).await, Worker::new(&space).await);
    for worker in [&gone, &lives] {
        worker.call("p_max_streams_per_batch => 1", &[]).await;
    }
    let (number, living) = (gone.number().await, lives.number().await);
    let sql = "insert into wh_handed_out (xid, stream_seq, version, handed_at, lane_id, incarnation, partition, beside,
            destination)
        select 1, n, 0, now(), gen_random_uuid(), i, 1, false, 'd' from unnest(array[$1, $2, 4711]) i, generate_series(1, 3) n";
    lives.client.execute(sql, &[&number, &living]).await.unwrap();
    let sql = "insert into wh_worker_watch (counter, looked_at, incarnation, watched)
        select 1, now(), i, w from unnest(array[$1, $2, 4711]) i, unnest(array[1001, 1002]) w";
    lives.client.execute(sql, &[&number, &living]).await.unwrap();
    lives.client.execute("update wh_instance set state = 1 where number = $1", &[&number]).await.unwrap();
    let maintain = "select perform_maintenance($1)";
    lives.client.execute(maintain, &[&living]).await.unwrap();
    for (table, left) in [("wh_handed_out", 3), ("wh_worker_watch", 2)] {
        assert_eq!(lives.count(table).await, left, "{table}");
        assert_eq!(lives.count(&format!("{table} where incarnation = {living}")).await, left, "{table}");
    }
    lives.client.execute("update wh_instance set state = 1", &[]).await.unwrap();
    lives.client.execute("select rebase(true)", &[]).await.unwrap();
    assert_eq!(lives.count("wh_handed_out").await + lives.count("wh_worker_watch").await, 0);
}
