//! Commits of the inbox beside operators who give its dead letters back, discard them, and beside workers without a
//! session: all of them want the same lanes, and none meets another over two of them. The server looks for a deadlock at
//! once, and its log is the witness.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corelane::{FailureReason, HandlerError};
use tokio::sync::Semaphore;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::inbox_kit::{CONSUMER, Inbox, consume, does, effect, text_of, writes};
use crate::support::{eventually, own_cluster_with, schema_on};

const STREAMS: u128 = 40;
const ROUNDS: usize = 6;
const PATIENCE: Duration = Duration::from_secs(60);

/// Gives back whatever is dead, in portions, until it is told that all is over.
async fn give_back(client: &Client, over: &AtomicBool) {
    let retry = "select retried from retry_inbox_dead_letters(true, p_rows_max => 40, p_dry_run => false)";
    while !over.load(Ordering::SeqCst) {
        let retried: i32 = client.query_one(retry, &[]).await.unwrap_or_else(|error| panic!("{error:?}")).get(0);
        if retried == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// A worker without a session: each call says what it has handled, fails some for good, and brings new ones of all streams,
/// the streams from either end. Its messages die once, in the hands of whoever has them. Answers how many it has stored (of streams
/// that are busy it may not), and how many it has handled.
async fn work(client: &Client, consumer: i16, fed: &AtomicBool, over: &AtomicBool) -> (usize, usize) {
    let (mut stored, mut handled) = (0, 0);
    let (worker, mut in_hand, mut calls): (Uuid, Vec<Uuid>, usize) = (Uuid::now_v7(), Vec::new(), 0);
    let mut failed: HashMap<Uuid, ()> = HashMap::new();
    let sql = "select source, message_id, state, completed from process_inbox_batch($1, $2, p_completions => $3, p_failures => $4,
        p_failure_reasons => array_fill(4, array[cardinality($4::uuid[])]), p_new_messages => $5, p_new_stream_ids => $6,
        p_new_types => array_fill('test.order'::text, array[cardinality($5::uuid[])]),
        p_new_payloads => array_fill('\\x77'::bytea, array[cardinality($5::uuid[])]), p_new_source => 'orders',
        p_max_rows => 60, p_max_lanes => 20, p_retry_base_ms => 0)";
    while !over.load(Ordering::SeqCst) {
        fed.fetch_or(calls >= ROUNDS, Ordering::SeqCst);
        let (done, fails): (Vec<Uuid>, Vec<Uuid>) = in_hand.iter().partition(|id| failed.contains_key(*id));
        let streams: Vec<Uuid> = if calls < ROUNDS {
            (1..=STREAMS).map(|n| Uuid::from_u128(if calls % 2 == 0 { n } else { STREAMS + 1 - n })).collect()
        } else {
            Vec::new()
        };
        let new: Vec<Uuid> = streams.iter().map(|_| Uuid::now_v7()).collect();
        match client.query(sql, &[&worker, &consumer, &done, &fails, &new, &streams]).await {
            Ok(rows) => {
                calls += 1;
                failed.extend(fails.into_iter().map(|id| (id, ())));
                let call = rows.iter().find(|row| row.get::<_, &str>(0) == "call").unwrap();
                handled += usize::try_from(call.get::<_, i32>(3)).unwrap();
                stored += rows.iter().filter(|row| row.get::<_, Option<i16>>(2) == Some(0)).count();
                let handed = rows.iter().filter(|row| row.get::<_, &str>(0) == "inbox");
                in_hand = handed.map(|row| row.get(1)).collect();
            }
            // Somebody stores in a stream of this worker's: again, as it says.
            Err(error) if error.code().is_some_and(|code| code.code() == "55P03") => {}
            Err(error) => panic!("{error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    (stored, handled)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_and_an_operator_who_gives_dead_letters_back_meet_over_no_two_lanes() {
    let cluster = own_cluster_with(&["deadlock_timeout=10ms"]);
    let inbox = Inbox::in_schema(schema_on(cluster.url("postgres")), corelane::MemoryBroker::new(30_000))
        .set("inbox.workers", "3")
        .set("inbox.poll_ms", "5")
        .set("retry.base_ms", "1")
        .set("retry.cap_ms", "1")
        .set("retry.attempts_max", "1000");
    let engine = inbox.engine(inbox.broker.clone()).await;
    let calls: Arc<Mutex<HashMap<Uuid, usize>>> = Arc::default();
    let handler = writes(move |delivery, context| {
        // Some fail first, then all die once; what is given back is handled.
        let call = {
            let mut calls = calls.lock().unwrap();
            let call = calls.entry(delivery.message_id).or_default();
            *call += 1;
            *call
        };
        let fails = delivery.message_id.as_bytes()[15] % 2 == 0;
        Box::pin(async move {
            match (call, fails) {
                (1, true) => Err(HandlerError::retry("the first time")),
                (1, false) | (2, true) => Err(HandlerError::permanent(FailureReason::ValidationError, "dies once")),
                _ => effect(delivery, context).await,
            }
        })
    });
    let _consumer = consume(&engine, handler).await;
    let (client, watch) = (inbox.client().await, inbox.client().await);
    let number: i16 = client.query_one("select consumer_number($1)", &[&CONSUMER]).await.unwrap().get(0);
    let (operator, other) = (inbox.client().await, inbox.client().await);
    let (fed, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let feed = async {
        for _ in 0..ROUNDS {
            for stream in 1..=STREAMS {
                inbox.put(stream, "of the broker");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        inbox.settled().await;
        let left = "select (select count(*) from wh_inbox_dead_letter) + (select count(*) from wh_inbox)";
        eventually("everything is handled", PATIENCE * 5, async || {
            fed.load(Ordering::SeqCst) && watch.query_one(left, &[]).await.unwrap().get::<_, i64>(0) == 0
        })
        .await;
        over.store(true, Ordering::SeqCst);
    };
    let working = work(&client, number, &fed, &over);
    let ((), (), (stored, handled), ()) =
        tokio::join!(give_back(&operator, &over), give_back(&other, &over), working, feed);
    engine.shutdown(Duration::from_secs(10)).await;
    let log = std::fs::read_to_string(cluster.log_path()).unwrap();
    let deadlocks: Vec<&str> = log.lines().filter(|line| line.contains("deadlock")).collect();
    assert_eq!(deadlocks, [""; 0]);
    let effects: i64 = watch.query_one("select count(distinct message) from effect", &[]).await.unwrap().get(0);
    let stored = stored + ROUNDS * STREAMS as usize;
    assert_eq!(usize::try_from(effects).unwrap() + handled, stored, "each once: {effects} here, {handled} there");
    assert_eq!(inbox.count("wh_inbox_parked").await, 0, "every lane is free");
}

/// A commit that keeps what failed in the higher lane and frees the lower one, while an operator has the lower one and then
/// wants the higher: it waits for the lower with nothing in its hands.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_takes_the_lower_of_its_lanes_first_as_an_operator_does() {
    let cluster = own_cluster_with(&["deadlock_timeout=10ms"]);
    let inbox = Inbox::in_schema(schema_on(cluster.url("postgres")), corelane::MemoryBroker::new(300_000))
        .set("inbox.workers", "1")
        .set("inbox.commit_age_ms_max", "60000")
        .set("inbox.handler_timeout_ms", "300000")
        .set("retry.base_ms", "1");
    let engine = inbox.engine(inbox.broker.clone()).await;
    let calls: Arc<Mutex<HashMap<String, usize>>> = Arc::default();
    let (noted, gate) = (calls.clone(), Arc::new(Semaphore::new(0)));
    let doors = gate.clone();
    let handler = does(move |delivery, _| {
        let (text, gate) = (text_of(delivery), doors.clone());
        let call = {
            let mut calls = noted.lock().unwrap();
            let call = calls.entry(text.clone()).or_default();
            *call += 1;
            *call
        };
        Box::pin(async move {
            let waits = async || gate.acquire().await.unwrap().forget();
            match (text.as_str(), call) {
                ("dies low" | "dies high", 1) => {
                    Err(HandlerError::permanent(FailureReason::ValidationError, "dies once"))
                }
                ("low", 1) => Err(HandlerError::retry("the first time")),
                ("low", 2) => {
                    waits().await;
                    Ok(())
                }
                ("high", 1) => {
                    waits().await;
                    Err(HandlerError::retry("the first time"))
                }
                _ => Ok(()),
            }
        })
    });
    let consumer = consume(&engine, handler).await;
    let (watch, mut operator) = (inbox.client().await, inbox.client().await);
    let called = async |text: &str, times: usize| {
        let count = || async { calls.lock().unwrap().get(text).copied().unwrap_or_default() == times };
        eventually(&format!("{text} is called {times} times"), PATIENCE, count).await;
    };
    inbox.put(1, "dies low");
    inbox.put(2, "dies high");
    let dead = "select count(*) from wh_inbox_dead_letter";
    let are_dead = async || watch.query_one(dead, &[]).await.unwrap().get::<_, i64>(0) == 2;
    eventually("both are dead", PATIENCE, are_dead).await;
    inbox.put(1, "low");
    called("low", 2).await;
    inbox.put(2, "high");
    called("high", 1).await;
    let giving_back = operator.transaction().await.unwrap();
    let retry = "select retried from retry_inbox_dead_letters(p_stream => $1, p_dry_run => false)";
    for stream in [1, 2] {
        let retried = giving_back.query_one(retry, &[&Uuid::from_u128(stream)]).await.unwrap().get::<_, i32>(0);
        assert_eq!(retried, 1);
        gate.add_permits(if stream == 1 { 2 } else { 0 });
        eventually("the commit waits for the operator", PATIENCE, async || {
            let sql = "select exists (select from pg_locks where not granted)";
            watch.query_one(sql, &[]).await.unwrap().get(0)
        })
        .await;
    }
    giving_back.commit().await.unwrap();
    eventually("all four are handled", PATIENCE, async || consumer.metrics().handled.get() == 4).await;
    inbox.nothing_kept().await;
    engine.shutdown(Duration::from_secs(10)).await;
    let log = std::fs::read_to_string(cluster.log_path()).unwrap();
    assert!(!log.contains("deadlock detected"), "{log}");
}
