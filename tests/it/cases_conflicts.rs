//! Hard case deadlocks, of the inbox and of subscriptions: conflicts that are forced at every call of theirs.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corelane::{Engine, FailureReason, HandlerError, RawMessage, Subscription};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::cases_deadlocks::{called, force, force_only};
use crate::inbox_kit::{Inbox, SOURCE, consumer, effect, text_of, texts, writes};
use crate::support::eventually;

const PATIENCE: Duration = Duration::from_secs(60);
/// What workers of a consumer call, and members of a subscription.
const CALLED: [&str; 19] = [
    "consumer_number",
    "begin_inbox",
    "remember_inbox",
    "keep_inbox",
    "park_inbox",
    "claim_inbox",
    "finish_inbox",
    "bury_inbox",
    "unpark_inbox",
    "maintain_inbox",
    "register_instance",
    "join_subscription",
    "share_subscription",
    "read_subscription",
    "summarize_events_from",
    "checkpoint_subscription",
    "release_subscription",
    "leave_subscription",
    "measure_subscription",
];
const STREAMS: u128 = 12;
const TURNS: usize = 20;

/// Starts what says that somebody else was in its way until it starts.
async fn started<T>(start: impl AsyncFn() -> corelane::Result<T>) -> T {
    for _ in 0..10 {
        match start().await {
            Ok(started) => return started,
            Err(error) => assert!(error.to_string().contains("forced"), "{error}"),
        }
    }
    panic!("not started")
}

/// Each event with the checkpoint, in a transaction that is made again where something came between.
fn follow(mut subscription: Subscription, mut client: Client) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        while let Some(batch) = subscription.next().await.unwrap() {
            let transaction = client.transaction().await.unwrap();
            for event in batch.events() {
                let sql = "insert into followed (stream_id, version) values ($1, $2)";
                transaction.execute(sql, &[&event.stream_id, &event.version]).await.unwrap();
            }
            match batch.checkpoint(&transaction).await {
                Ok(()) => transaction.commit().await.unwrap(),
                Err(_) => transaction.rollback().await.unwrap(),
            }
        }
    })
}

async fn member(engine: &Engine, inbox: &Inbox) -> tokio::task::JoinHandle<()> {
    let subscription = started(async || engine.subscribe("effects").from_beginning().rows_max(7).start().await).await;
    follow(subscription, inbox.client().await)
}

/// What was put in of each stream, in order; every third message of a stream fails once, every seventh dies.
async fn put(inbox: &Inbox, turns: std::ops::Range<usize>) {
    for turn in turns {
        for stream in 1..=STREAMS {
            let kind = if turn % 7 == 6 {
                "dies"
            } else if turn % 3 == 2 {
                "fails"
            } else {
                "works"
            };
            inbox.put(stream, &format!("{turn:02} {kind}"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn conflicts_forced_at_every_call_of_inbox_and_subscriptions_cost_no_effect_and_no_order() {
    let inbox = Inbox::new().set("inbox.workers", "2").set("lease.ttl_ms", "12000");
    let engine = inbox.engine(inbox.broker.clone()).await;
    let client = inbox.client().await;
    let table = "create table followed (at int8 generated always as identity, stream_id uuid, version int8)";
    client.batch_execute(table).await.unwrap();
    force(&client, &CALLED.map(str::to_owned), "n in (1, 3) or n % 25 = 0").await;
    let failed = Arc::new(Mutex::new(HashSet::new()));
    let handler = || {
        let failed = failed.clone();
        writes(move |delivery, context| {
            let failed = failed.clone();
            Box::pin(async move {
                let text = text_of(delivery);
                effect(delivery, context).await?;
                let stream = delivery.stream_id.unwrap();
                context.push(&RawMessage::event("test.handled", &delivery.payload).stream(stream))?;
                if text.ends_with("dies") {
                    return Err(HandlerError::permanent(FailureReason::Unknown, "for good"));
                }
                if text.ends_with("fails") && failed.lock().unwrap().insert(delivery.message_id) {
                    return Err(HandlerError::retry("once"));
                }
                Ok(())
            })
        })
    };
    put(&inbox, 0..TURNS / 2).await;
    let consumer = started(async || consumer(&engine).other_types(handler()).start().await).await;
    let one = member(&engine, &inbox).await;
    let other = inbox.engine(inbox.broker.clone()).await;
    let two = member(&other, &inbox).await;
    put(&inbox, TURNS / 2..TURNS).await;
    let dying = (0..TURNS).filter(|turn| turn % 7 == 6).count();
    let expected = (TURNS - dying) * STREAMS as usize;
    let effects = inbox.effects(expected).await;
    inbox.settled().await;
    inbox.nothing_kept().await;
    let followed = "select count(*) from followed";
    let followed = async || client.query_one(followed, &[]).await.unwrap().get::<_, i64>(0);
    eventually("all is followed", PATIENCE, async || followed().await >= expected as i64).await;
    eventually("the memory is tended again", PATIENCE, async || called(&client, "maintain_inbox").await > 1).await;
    assert_eq!(consumer.metrics().handled.get() as usize, expected);
    // Now only who leaves is disturbed, and somebody is there to leave.
    force_only(&client, "leave_subscription").await;
    let read = async || called(&client, "read_subscription").await;
    let before = read().await;
    eventually("it is read again", PATIENCE, async || read().await > before + 10).await;
    other.shutdown(Duration::from_secs(10)).await;
    engine.shutdown(Duration::from_secs(10)).await;
    one.await.unwrap();
    two.await.unwrap();

    assert_eq!(effects.len(), expected);
    let ids = inbox.client().await.query_one("select count(distinct message) from effect", &[]).await.unwrap();
    assert_eq!(ids.get::<_, i64>(0) as usize, expected, "one effect each");
    assert_eq!(inbox.count("wh_inbox_dead_letter").await as usize, dying * STREAMS as usize);
    assert_eq!(inbox.broker.dead(SOURCE).len(), 0);
    // Events have the order of their stream, and so has whoever follows.
    let events = "select stream_id::text || ' ' || convert_from(payload, 'UTF8') from wh_event_store order by position";
    let mut of_stream: HashMap<String, Vec<String>> = HashMap::new();
    for line in texts(&client, events).await {
        let (stream, text) = line.split_once(' ').unwrap();
        of_stream.entry(stream.to_owned()).or_default().push(text.to_owned());
    }
    assert_eq!(of_stream.len(), STREAMS as usize);
    assert!(of_stream.values().all(|of| of.is_sorted() && of.len() == TURNS - dying), "{of_stream:?}");
    let mut last: HashMap<Uuid, i64> = HashMap::new();
    for row in client.query("select stream_id, version from followed order by at", &[]).await.unwrap() {
        let last = last.entry(row.get(0)).or_default();
        assert_eq!(row.get::<_, i64>(1), *last + 1, "once and in order");
        *last += 1;
    }
    assert!(last.len() == STREAMS as usize && last.values().all(|last| *last as usize == TURNS - dying));
    let mut calls = Vec::new();
    for name in CALLED {
        calls.push((name, called(&client, name).await));
    }
    // Forced once and called again.
    assert!(calls.iter().all(|(_, calls)| *calls >= 2), "{calls:?}");
}
