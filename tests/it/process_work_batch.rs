//! `process_work_batch`: what a worker in any language gets, in which order, and what becomes of what it reports.

use uuid::Uuid;

use crate::outbox_kit::refusal;
use crate::store_kit::{PARTITIONS, Space, event, loose, message};
use crate::work_kit::Worker;

/// The first call registers, each call renews, with nothing to do it answers nothing.
#[tokio::test]
async fn the_first_call_registers_and_each_call_renews() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let answer = worker.claim().await;
    assert!(!answer.lease_lost && answer.handed.is_empty(), "{answer:?}");
    assert_eq!((answer.members, answer.partitions), (Some(1), Some(PARTITIONS as i32)));
    let of =
        "select counter, lease_until > clock_timestamp() + interval '25 s', service_name, instance_name, shards, owns,
        direct from wh_instance where id = $1";
    let first = worker.client.query_one(of, &[&worker.id]).await.unwrap();
    assert_eq!((first.get::<_, &str>(2), first.get::<_, &str>(3)), ("tests", "host:7"));
    assert_eq!((first.get::<_, i32>(4), first.get::<_, bool>(5), first.get::<_, bool>(6)), (1, true, false));
    assert!(first.get::<_, bool>(1), "the lease runs for 30 s");
    worker.claim().await;
    let second = worker.client.query_one(of, &[&worker.id]).await.unwrap();
    assert_eq!(second.get::<_, i64>(0), first.get::<_, i64>(0) + 1);
    assert_eq!(worker.count("wh_instance").await, 1);
}

/// Stored messages come in order, are published, and are gone.
#[tokio::test]
async fn what_is_stored_is_handed_out_in_order_once_and_is_resolved_when_completed() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    worker.claim().await;
    let (one, other) = (Uuid::now_v7(), Uuid::now_v7());
    worker.store(&[event(one, "1"), message(other, "a"), event(one, "2"), message(one, "3"), loose("x")]).await;
    worker.store(&[event(other, "b"), event(one, "4")]).await;
    let first = worker.claim().await;
    assert_eq!(first.payloads(), ["1", "a", "2", "3", "x", "b", "4"]);
    assert_eq!(first.handed[0].stream_id, Some(one));
    assert_eq!((first.handed[0].status, first.handed[1].status), (3, 1), "Stored, and EventStored");
    assert_eq!(first.handed.iter().map(|handed| handed.attempts).max(), Some(0));
    assert_eq!(worker.claim().await.payloads(), [""; 0], "in hand is in hand");
    assert_eq!(worker.status(first.handed[0].message_id).await.0, 3);

    let done = worker.complete(&first.ids()).await;
    assert_eq!((done.completed, done.unknown), (Some(7), Some(0)));
    assert!(done.handed.is_empty());
    assert_eq!(worker.count("wh_handed_out").await, 0, "the cursor has passed all");
    assert_eq!(worker.status(first.handed[0].message_id).await.0, 7, "Published");
    let pending = "wh_status() where what = 'pending' and figure > 0";
    assert_eq!(worker.count(pending).await, 0);
    let again = worker.complete(&first.ids()).await;
    assert_eq!((again.completed, again.unknown), (Some(0), Some(7)), "twice does no harm");
}

/// In any order, over several calls and a take-over of the place where the reader stands.
#[tokio::test]
async fn completions_out_of_order_are_remembered_until_their_transaction_is_done() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    worker.claim().await;
    let streams: Vec<Uuid> = (0..20).map(|_| Uuid::now_v7()).collect();
    for round in 0..3 {
        let texts: Vec<String> = (0..20).map(|stream| format!("{round}-{stream}")).collect();
        let messages: Vec<_> = streams.iter().zip(&texts).map(|(stream, text)| event(*stream, text)).collect();
        worker.store(&messages).await;
    }
    let handed = worker.claim().await;
    assert_eq!(handed.handed.len(), 60);
    // The last first; of each transaction one is left until the end.
    let (late, early): (Vec<_>, Vec<_>) =
        handed.ids().into_iter().enumerate().rev().partition(|(place, _)| place % 20 == 7);
    let ids = |of: &[(usize, Uuid)]| of.iter().map(|(_, id)| *id).collect::<Vec<_>>();
    for part in ids(&early).chunks(10) {
        let answer = worker.complete(part).await;
        assert_eq!((answer.completed, answer.handed.len()), (Some(part.len() as i32), 0));
    }
    assert_eq!(worker.count("wh_handed_out where decided").await, 57);
    worker.store(&[event(streams[7], "3-7")]).await;
    assert_eq!(worker.claim().await.payloads(), ["3-7"]);
    worker.complete(&ids(&late)).await;
    assert_eq!(worker.count("wh_handed_out").await, 1, "only the newest is in hand");
}

/// What the caller of the transaction has stored in it is not handed out in it: nobody publishes what may roll back.
#[tokio::test]
async fn a_call_stores_numbers_and_hands_out_only_what_is_committed() {
    let space = Space::new().await;
    let mut worker = Worker::new(&space).await;
    worker.claim().await;
    let (stream, first, second) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
    let named = "p_new_outbox_messages => $2, p_new_outbox_stream_ids => array[$3, $3]::uuid[], p_new_outbox_types =>
        array['t', 't'], p_new_outbox_payloads => array['1', '2']::bytea[], p_new_outbox_is_event => array[true, true],
        p_new_outbox_destinations => array['d', 'd']";
    let answer = worker.call(named, &[&vec![first, second], &stream]).await;
    assert_eq!(answer.stored, [(first, Some(1), Some(1)), (second, Some(2), Some(2))]);
    assert!(answer.handed.is_empty());
    assert_eq!(worker.claim().await.payloads(), ["1", "2"], "and the cursor has not passed its own transaction");

    let id = worker.id;
    let transaction = worker.client.transaction().await.unwrap();
    crate::outbox_kit::call(&transaction, &[message(stream, "3")]).await.unwrap();
    let sql = "select message_id from process_work_batch($1, 'tests') where source = 'outbox'";
    assert!(transaction.query(sql, &[&id]).await.unwrap().is_empty());
    assert!(transaction.query(sql, &[&id]).await.unwrap().is_empty());
    transaction.commit().await.unwrap();
    assert_eq!(worker.claim().await.payloads(), ["3"]);
    // A claim that is rolled back has handed out nothing.
    worker.store(&[message(stream, "4")]).await;
    let transaction = worker.client.transaction().await.unwrap();
    assert_eq!(transaction.query(sql, &[&id]).await.unwrap().len(), 1);
    transaction.rollback().await.unwrap();
    assert_eq!(worker.claim().await.payloads(), ["4"]);
}

/// Bounds on streams, rows, and rows of one stream; a busy stream leaves room for the others.
#[tokio::test]
async fn bounds_on_streams_and_rows_hold_and_a_busy_stream_leaves_room() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let (busy, quiet) = (Uuid::now_v7(), Uuid::now_v7());
    let many: Vec<_> = (0..40).map(|_| message(busy, "busy")).collect();
    worker.store(&many).await;
    worker.store(&vec![message(quiet, "quiet"); 1]).await;
    let few = "p_max_rows => 30, p_max_rows_per_stream => 25";
    let answer = worker.call(few, &[]).await;
    assert_eq!(answer.payloads().iter().filter(|text| **text == "busy").count(), 25);
    assert_eq!(answer.payloads().last(), Some(&"quiet"));
    assert_eq!(worker.call(few, &[]).await.handed.len(), 4, "30 may be in hand");
    assert_eq!(worker.call(few, &[]).await.handed.len(), 0);
    for _ in 0..5 {
        worker.store(&[loose("each its own")]).await;
    }
    assert_eq!(worker.call("p_max_streams_per_batch => 2, p_max_rows_per_stream => 1", &[]).await.handed.len(), 2);
    assert_eq!(worker.call("p_max_streams_per_batch => 0", &[]).await.handed.len(), 0);
}

/// Status 0 gives a message back; what neither ends it nor gives it back is refused.
#[tokio::test]
async fn status_0_gives_back_and_one_that_is_no_end_is_refused() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let stream = Uuid::now_v7();
    worker.store(&[event(stream, "1"), event(stream, "2"), event(stream, "3")]).await;
    let ids = worker.claim().await.ids();
    let named = "p_outbox_completions => $2, p_outbox_completion_statuses => $3";
    let answer = worker.call(named, &[&ids, &vec![7, 0, 0]]).await;
    assert_eq!((answer.completed, answer.payloads()), (Some(1), vec!["2", "3"]));
    assert_eq!(worker.status(ids[1]).await.0, 3);
    let refused = worker.try_call(named, &[&ids[1..2].to_vec(), &vec![2]]).await;
    assert_eq!(refusal(refused).0, "22023");
    // Lost answers: everything in hand once more.
    let again = worker.call("p_flags => 2", &[]).await;
    assert_eq!((again.payloads(), again.handed[0].flags & 2), (vec!["2", "3"], 2));
}

#[tokio::test]
async fn unknown_flags_another_partition_count_and_inbox_parameters_are_refused() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let (code, text) = refusal(worker.try_call("p_flags => 128", &[]).await);
    assert_eq!((code.as_str(), text.contains("128")), ("22023", true), "{text}");
    assert!(worker.try_call("p_flags => 127", &[]).await.is_ok());
    let (code, text) = refusal(worker.try_call("p_partition_count => 10000", &[]).await);
    assert_eq!((code.as_str(), text.contains("16") && text.contains("10000")), ("22023", true), "{text}");
    assert!(worker.try_call("p_partition_count => 16", &[]).await.is_ok());
    for inbox in ["p_inbox_completions", "p_inbox_failures", "p_new_inbox_messages", "p_renew_inbox_lease_ids"] {
        let named = format!("{inbox} => array[$2::uuid]");
        assert_eq!(refusal(worker.try_call(&named, &[&Uuid::now_v7()]).await).0, "0A000", "{inbox}");
        assert!(worker.try_call(&format!("{inbox} => '{{}}'"), &[]).await.is_ok());
    }
    assert_eq!(refusal(worker.try_call("p_lease_seconds => 0", &[]).await).0, "22023");
}

/// What is scheduled comes when it is due. (It has no number before: what is stored meanwhile goes first.)
#[tokio::test]
async fn a_scheduled_message_comes_when_it_is_due_and_holds_up_nothing_before() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let stream = Uuid::now_v7();
    let mut later = message(stream, "later");
    later.due_unix_us = 4_000_000_000_000_000;
    worker.store(&[later, message(stream, "now")]).await;
    let first = worker.claim().await;
    assert_eq!(first.payloads(), ["now"]);
    worker.complete(&first.ids()).await;
    worker.client.execute("update wh_scheduled set due = clock_timestamp()", &[]).await.unwrap();
    assert!(worker.claim().await.handed.is_empty(), "its number is not committed yet");
    let second = worker.claim().await;
    assert_eq!((second.payloads(), second.handed[0].stream_seq), (vec!["later"], 2));
}

/// A backlog of many calls is read in pages, in order, beside a transaction that stays open.
#[tokio::test]
async fn a_backlog_is_read_in_pages_beside_a_transaction_that_stays_open() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let streams: Vec<Uuid> = (0..10).map(|_| Uuid::now_v7()).collect();
    let mut holder = space.schema.client().await;
    let open = holder.transaction().await.unwrap();
    let held = Uuid::now_v7();
    crate::outbox_kit::call(&open, &[event(held, "held")]).await.unwrap();
    for stream in &streams {
        // A transaction a message.
        let each = format!(
            "do $$ begin for n in 1..300 loop perform store_outbox_messages(array[gen_random_uuid()],
            array['{stream}'::uuid], array['t'], array[convert_to(n::text, 'UTF8')], array[true], array['d']); commit;
            end loop; end $$"
        );
        worker.client.batch_execute(&each).await.unwrap();
    }
    let mut numbers = std::collections::HashMap::new();
    let (mut answer, mut calls) = (worker.call("p_max_rows => 200", &[]).await, 0);
    while !answer.handed.is_empty() {
        for handed in &answer.handed {
            let last = numbers.entry(handed.stream_id.unwrap()).or_insert(0);
            assert_eq!(handed.stream_seq, *last + 1);
            *last = handed.stream_seq;
        }
        calls += 1;
        answer = worker.call("p_max_rows => 200, p_outbox_completions => $2", &[&answer.ids()]).await;
    }
    assert_eq!((numbers.len(), numbers.values().sum::<i64>()), (10, 3000));
    assert!((15..200).contains(&calls), "{calls} calls");
    assert_eq!(worker.count("wh_handed_out").await, 0);
    open.commit().await.unwrap();
    assert_eq!(worker.claim().await.payloads(), ["held"], "a late one is not passed over");
}
