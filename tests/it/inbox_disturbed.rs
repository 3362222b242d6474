//! Handlers that others disturb: locks that are not had in time, deadlocks, cancelled statements, lost connections. That is
//! no fault of the message: it runs again, by itself, and its attempts are what they were. And transactions that stay short.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corelane::HandlerError;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::inbox_kit::{Calls, Inbox, SOURCE, consume, does_in, effect, message, text_of, writes};
use crate::support::{connect, eventually};

const PATIENCE: Duration = Duration::from_secs(60);

/// However slow the machine is.
const FOR_EVER: &str = "1000000";

/// What disturbs, by SQLSTATE: a failed serialization, a deadlock, a lock or statement that was given up, no memory, and
/// the end of the connection.
const DISTURBANCES: [&str; 6] = ["40001", "40P01", "55P03", "57014", "53200", "57P01"];

/// Says that to the caller.
async fn disturb(client: &impl tokio_postgres::GenericClient, sqlstate: &str) -> Result<(), HandlerError> {
    if sqlstate == "57P01" {
        client.execute("select pg_terminate_backend(pg_backend_pid())", &[]).await?;
    }
    client
        .batch_execute(&format!("do $$ begin raise exception 'disturbed' using errcode = '{sqlstate}'; end $$"))
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_others_disturb_runs_again_in_order_and_no_attempt_is_counted() {
    for (in_transaction, retry) in [(true, "database"), (true, "broker"), (false, "database"), (false, "broker")] {
        let inbox = Inbox::new().set("retry.attempts_max", "1").set("inbox.retry", retry).set("inbox.workers", "2");
        let engine = inbox.engine(inbox.broker.clone()).await;
        let seen: Arc<Mutex<HashMap<String, Vec<String>>>> = Arc::default();
        let (noted, calls) = (seen.clone(), Arc::new(Mutex::new(HashMap::<Uuid, usize>::new())));
        let url = inbox.schema.url.clone();
        let handler = does_in(in_transaction, move |delivery, context| {
            let (seen, url) = (noted.clone(), url.clone());
            let call = {
                let mut calls = calls.lock().unwrap();
                let call = calls.entry(delivery.message_id).or_default();
                *call += 1;
                *call
            };
            Box::pin(async move {
                assert_eq!(context.attempt(), 1);
                let text = text_of(delivery);
                let sqlstate = text.split(' ').next().unwrap();
                if call <= 3 && text.ends_with('1') && sqlstate != "none" {
                    match in_transaction {
                        true => disturb(context.transaction()?, sqlstate).await?,
                        false => disturb(&connect(&url).await, sqlstate).await?,
                    }
                }
                if in_transaction {
                    effect(delivery, context).await?;
                }
                seen.lock().unwrap().entry(sqlstate.to_owned()).or_default().push(text.clone());
                Ok(())
            })
        });
        for turn in 0..3 {
            for (stream, sqlstate) in (1..).zip(DISTURBANCES.into_iter().chain(["none"])) {
                inbox.put(stream, &format!("{sqlstate} {turn}"));
            }
        }
        let consumer = consume(&engine, handler).await;
        eventually("all are handled", PATIENCE, || async { consumer.metrics().handled.get() == 21 }).await;
        inbox.settled().await;
        let metrics = consumer.metrics();
        assert!(metrics.disturbed.get() >= 18, "{}", metrics.disturbed.get());
        let counts = (metrics.failed.get(), metrics.dead.get(), metrics.stored.get());
        assert_eq!(counts, (0, 0, 0), "in transaction: {in_transaction}, {retry}");
        assert_eq!((inbox.count("wh_inbox_dead_letter").await, inbox.broker.dead(SOURCE).len()), (0, 0));
        let counts = inbox.broker.counts(SOURCE);
        assert_eq!((counts.completed, counts.delivered), (21, 21), "nothing goes back to the broker");
        let mut order = seen.lock().unwrap().clone();
        if in_transaction {
            // What ran and was rolled back is in none of them.
            order.clear();
            for text in inbox.effects(21).await {
                order.entry(text[..text.len() - 2].to_owned()).or_default().push(text);
            }
        }
        assert_eq!(order.len(), 7);
        for (stream, texts) in order {
            assert_eq!(texts, [0, 1, 2].map(|turn| format!("{stream} {turn}")));
        }
        engine.shutdown(Duration::from_secs(10)).await;
    }
}

/// Somebody has a row for long: its message waits, its neighbours and their effects do not, and no attempt is counted.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_waits_for_a_hot_row_holds_up_nobody_else_and_does_not_die() {
    let inbox =
        Inbox::new().set("retry.attempts_max", "1").set("inbox.workers", "1").set("inbox.disturbed_max", FOR_EVER);
    let engine = inbox.engine(inbox.broker.clone()).await;
    let mut other: Client = inbox.client().await;
    other
        .batch_execute("create table hot (n int primary key, v int not null); insert into hot values (1, 0)")
        .await
        .unwrap();
    let holding = other.transaction().await.unwrap();
    holding.execute("update hot set v = 100", &[]).await.unwrap();
    let handler = writes(|delivery, context| {
        Box::pin(async move {
            if text_of(delivery).starts_with("hot") {
                context
                    .transaction()?
                    .batch_execute("set local lock_timeout = '5ms'; update hot set v = v + 1")
                    .await?;
            }
            effect(delivery, context).await
        })
    });
    for n in 0..30u128 {
        // Those behind it in its stream wait with it.
        inbox.put(n % 10 + 1, &if n % 10 == 4 { format!("hot {n}") } else { n.to_string() });
    }
    let consumer = consume(&engine, handler).await;
    let effects = inbox.effects(27).await;
    assert!(effects.iter().all(|text| !text.starts_with("hot")), "{effects:?}");
    eventually("it was tried again and again", PATIENCE, || async { consumer.metrics().disturbed.get() >= 5 }).await;
    assert_eq!(inbox.count("wh_inbox").await, 0, "nothing of it is stored");
    holding.commit().await.unwrap();
    let effects = inbox.effects(30).await;
    assert_eq!(effects[27..], ["hot 4", "hot 14", "hot 24"]);
    inbox.settled().await;
    let hot: i32 = inbox.client().await.query_one("select v from hot", &[]).await.unwrap().get(0);
    assert_eq!((hot, consumer.metrics().failed.get(), consumer.metrics().dead.get()), (103, 0, 0));
    engine.shutdown(Duration::from_secs(10)).await;
}

/// What always runs into a time limit is the message's own after a while: it dies as others do, and its stream goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_always_runs_into_a_time_limit_fails_and_its_stream_goes_on() {
    for in_transaction in [true, false] {
        let inbox =
            Inbox::new().set("retry.attempts_max", "2").set("retry.base_ms", "1").set("inbox.disturbed_max", "3");
        let engine = inbox.engine(inbox.broker.clone()).await;
        let url = inbox.schema.url.clone();
        let handler = does_in(in_transaction, move |delivery, context| {
            let url = url.clone();
            Box::pin(async move {
                let sql = "set local statement_timeout = '1ms'; select pg_sleep(60)";
                match (text_of(delivery).as_str(), in_transaction) {
                    ("slow", true) => context.transaction()?.batch_execute(sql).await?,
                    ("slow", false) => connect(&url).await.batch_execute(&format!("begin; {sql}")).await?,
                    (_, true) => effect(delivery, context).await?,
                    _ => {}
                }
                Ok(())
            })
        });
        let slow = inbox.put(1, "slow");
        inbox.put(1, "behind");
        inbox.put(2, "beside");
        let consumer = consume(&engine, handler).await;
        eventually("it is dead, and the others are handled", PATIENCE, || async {
            consumer.metrics().handled.get() == 2 && inbox.count("wh_inbox_dead_letter").await == 1
        })
        .await;
        let metrics = consumer.metrics();
        assert_eq!((metrics.failed.get(), metrics.dead.get()), (2, 1), "in transaction: {in_transaction}");
        assert!(metrics.disturbed.get() >= 6, "{}", metrics.disturbed.get());
        let sql = "select message_id, attempts, error from wh_inbox_dead_letter";
        let dead = inbox.client().await.query_one(sql, &[]).await.unwrap();
        assert_eq!((dead.get::<_, Uuid>(0), dead.get::<_, i32>(1)), (slow, 2));
        let text: &str = dead.get(2);
        assert!(text.contains("disturbed 3 times") && text.contains("statement timeout"), "{text}");
        inbox.nothing_kept().await;
        engine.shutdown(Duration::from_secs(10)).await;
    }
}

/// What rests when its consumer ends goes back to the broker.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_disturbed_goes_back_when_its_consumer_ends() {
    for in_transaction in [true, false] {
        let inbox = Inbox::new().set("inbox.disturbed_max", FOR_EVER);
        let engine = inbox.engine(inbox.broker.clone()).await;
        let calls = Calls::default();
        let noted = calls.clone();
        let handler = does_in(in_transaction, move |_, _| {
            noted.note();
            Box::pin(async { Err(HandlerError::disturbed("always")) })
        });
        let consumer = consume(&engine, handler).await;
        inbox.put(1, "0");
        inbox.put(1, "1");
        calls.wait_for(4).await;
        let report = consumer.stop(Duration::from_secs(10)).await;
        assert!(report.drained && report.left == 0 && report.abandoned == 2, "{report:?}");
        assert_eq!(inbox.broker.counts(SOURCE).waiting, 2);
        assert_eq!((inbox.count("wh_inbox_seen").await, inbox.count("wh_inbox").await), (0, 0));
        engine.shutdown(Duration::from_secs(10)).await;
    }
}

/// Handlers of 300 ms each: no other one starts in a transaction that is a second old.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_takes_no_further_handler_when_it_is_a_second_old() {
    let inbox = Inbox::new().set("inbox.workers", "1");
    let engine = inbox.engine(inbox.broker.clone()).await;
    let handler = writes(|delivery, context| {
        Box::pin(async move {
            // A savepoint has an id of its own: the transaction's is asked for.
            let sql =
                "insert into effect (message, text) select $1, $2 || ' ' || pg_current_xact_id() from pg_sleep(0.3)";
            context.transaction()?.execute(sql, &[&delivery.message_id, &text_of(delivery)]).await?;
            Ok(())
        })
    });
    for n in 0..16u128 {
        inbox.broker.put(SOURCE, message(n % 8 + 1, &n.to_string()));
    }
    let consumer = consume(&engine, handler).await;
    let effects = inbox.effects(16).await;
    inbox.settled().await;
    let sql = "select max(n) from (select count(*) as n from effect group by split_part(text, ' ', 2)) e";
    let most: i64 = inbox.client().await.query_one(sql, &[]).await.unwrap().get(0);
    assert!((1..=4).contains(&most), "{most} of 300 ms in one transaction");
    assert_eq!(consumer.metrics().handled.get(), 16);
    for stream in 0..8 {
        let of: Vec<u32> = effects
            .iter()
            .map(|text| text.split(' ').next().unwrap().parse().unwrap())
            .filter(|n| n % 8 == stream)
            .collect();
        assert!(of.is_sorted() && of.len() == 2, "{of:?}");
    }
    engine.shutdown(Duration::from_secs(10)).await;
}
