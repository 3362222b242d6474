//! The inbox and what fails: a stream waits behind its head and no other does, attempts, dead letters, and what an
//! operator's choice makes of the stream.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use corelane::{Consumer, FailureReason, HandlerError};
use uuid::Uuid;

use crate::inbox_kit::{
    CONSUMER, Calls, Inbox, SOURCE, consume, does, does_in, effect, fails, message, text_of, texts, writes,
};
use crate::support::eventually;

const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_waits_behind_its_failed_head_in_order_and_others_go_on() {
    let inbox = Inbox::new();
    let engine = inbox.engine(inbox.broker.clone()).await;
    let calls = Calls::default();
    let consumer = consume(&engine, fails("a1", 3, &calls)).await;
    for text in ["a1", "a2", "a3"] {
        inbox.put(1, text);
    }
    inbox.put(2, "b1");
    calls.wait_for(2).await;
    // Those that come while it waits are stored behind it, and completed.
    inbox.put(1, "a4");
    inbox.settled().await;
    inbox.put(1, "a5");
    let effects = inbox.effects(6).await;
    let of_a: Vec<&String> = effects.iter().filter(|text| text.starts_with('a')).collect();
    assert_eq!(of_a, ["a1", "a2", "a3", "a4", "a5"]);
    inbox.nothing_kept().await;
    inbox.settled().await;
    assert_eq!(calls.count(), 4, "three failures and a success");
    assert_eq!(inbox.broker.counts(SOURCE).completed, 6);
    assert_eq!(consumer.metrics().handled.get(), 6);
    engine.shutdown(Duration::from_secs(10)).await;
    assert_eq!(inbox.count("effect").await, 6);
}

/// The same of a handler that runs beside others, without a transaction.
#[tokio::test(flavor = "multi_thread")]
async fn handlers_without_a_transaction_keep_the_order_of_a_failing_stream_too() {
    let inbox = Inbox::new();
    let engine = inbox.engine(inbox.broker.clone()).await;
    let seen: Arc<Mutex<HashMap<Uuid, Vec<String>>>> = Arc::default();
    let (noted, calls) = (seen.clone(), Calls::default());
    let handler = does(move |delivery, context| {
        let (fails, seen) = (calls.note() % 3 == 0, noted.clone());
        Box::pin(async move {
            tokio::task::yield_now().await;
            if fails && context.attempt() < 3 {
                return Err(HandlerError::retry("now and then"));
            }
            seen.lock().unwrap().entry(delivery.stream_id.unwrap()).or_default().push(text_of(delivery));
            Ok(())
        })
    });
    let consumer = consume(&engine, handler).await;
    for n in 0..120u128 {
        inbox.put(n % 6 + 1, &format!("{n:03}"));
        if n % 20 == 0 {
            tokio::task::yield_now().await;
        }
    }
    inbox.settled().await;
    eventually("all are handled", PATIENCE, || async { consumer.metrics().handled.get() == 120 }).await;
    inbox.nothing_kept().await;
    for (stream, texts) in seen.lock().unwrap().iter() {
        assert!(texts.is_sorted() && texts.len() == 20, "{stream}: {texts:?}");
    }
    engine.shutdown(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_attempts_allowed_it_is_a_dead_letter_with_its_body_and_the_stream_goes_on() {
    let inbox = Inbox::new().set("retry.attempts_max", "3");
    let engine = inbox.engine(inbox.broker.clone()).await;
    let calls = Calls::default();
    consume(&engine, fails("a1", usize::MAX, &calls)).await;
    let dead = inbox.put(1, "a1");
    inbox.put(1, "a2");
    assert_eq!(inbox.effects(1).await, ["a2"]);
    inbox.nothing_kept().await;
    let sql = "select message_id, attempts, reason, error, payload from wh_inbox_dead_letter";
    let row = inbox.client().await.query_one(sql, &[]).await.unwrap();
    assert_eq!((row.get::<_, Uuid>(0), row.get::<_, i32>(1), row.get::<_, i16>(2)), (dead, 3, 99));
    assert_eq!((row.get::<_, String>(3), row.get::<_, Vec<u8>>(4)), ("not yet".to_owned(), b"a1".to_vec()));
    assert_eq!(calls.count(), 3);
    inbox.settled().await;
    assert_eq!(inbox.broker.counts(SOURCE).completed, 2);
    engine.shutdown(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_held_waits_behind_its_dead_message() {
    let inbox = Inbox::new().set("inbox.on_dead", "hold");
    let engine = inbox.engine(inbox.broker.clone()).await;
    let handler = writes(|delivery, context| {
        Box::pin(async move {
            if text_of(delivery) == "a1" {
                return Err(HandlerError::permanent(FailureReason::ValidationError, "never"));
            }
            effect(delivery, context).await
        })
    });
    let consumer = consume(&engine, handler).await;
    inbox.put(1, "a1");
    inbox.put(1, "a2");
    inbox.settled().await;
    inbox.put(1, "a3");
    inbox.put(2, "b1");
    inbox.settled().await;
    assert_eq!(inbox.effects(1).await, ["b1"]);
    let kept =
        texts(&inbox.client().await, "select convert_from(payload, 'UTF8') from wh_inbox order by arrival").await;
    assert_eq!(kept, ["a2", "a3"]);
    assert_eq!((inbox.count("wh_inbox_dead_letter").await, consumer.metrics().dead.get()), (1, 1));
    assert_eq!(inbox.count("wh_inbox_parked where held and due = 'infinity'").await, 1);
    engine.shutdown(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_hangs_is_a_failure_of_its_message_and_others_go_on() {
    let inbox = Inbox::new().set("inbox.handler_timeout_ms", "300").set("inbox.workers", "1");
    let engine = inbox.engine(inbox.broker.clone()).await;
    for in_transaction in [false, true] {
        let calls = Calls::default();
        let hangs = calls.clone();
        let handler = does_in(in_transaction, move |delivery, _| {
            let hangs = text_of(delivery) == "hangs" && hangs.note() == 0;
            Box::pin(async move {
                if hangs {
                    std::future::pending::<()>().await;
                }
                Ok(())
            })
        });
        let consumer = consume(&engine, handler).await;
        inbox.put(1, "hangs");
        inbox.put(2, "b1");
        inbox.put(1, "a2");
        inbox.settled().await;
        eventually("all are handled", PATIENCE, || async { consumer.metrics().handled.get() == 3 }).await;
        inbox.nothing_kept().await;
        assert_eq!((consumer.metrics().timed_out.get(), consumer.metrics().failed.get()), (1, 1));
        assert_eq!(calls.count(), 2);
        consumer.stop(Duration::from_secs(5)).await;
    }
    engine.shutdown(Duration::from_secs(10)).await;
}

/// One that never comes back to its executor cannot be dropped: it is given up.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_blocks_its_thread_is_given_up_and_others_go_on() {
    let inbox = Inbox::new().set("inbox.handler_timeout_ms", "100");
    let engine = inbox.engine(inbox.broker.clone()).await;
    static OPEN: AtomicBool = AtomicBool::new(false);
    let calls = Calls::default();
    let noted = calls.clone();
    let handler = does(move |delivery, _| {
        let blocks = text_of(delivery) == "blocks" && noted.note() == 0;
        Box::pin(async move {
            while blocks && !OPEN.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(())
        })
    });
    let consumer = consume(&engine, handler).await;
    inbox.put(1, "blocks");
    for stream in 2..20 {
        inbox.put(stream, "goes on");
    }
    eventually("all are handled", PATIENCE, || async { consumer.metrics().handled.get() == 19 }).await;
    inbox.nothing_kept().await;
    inbox.settled().await;
    assert_eq!((calls.count(), consumer.metrics().timed_out.get()), (2, 1));
    OPEN.store(true, Ordering::Release);
    engine.shutdown(Duration::from_secs(10)).await;
}

/// What two handlers of one stream emit to it has their order, though one of them runs in the commit.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_stream_emits_has_its_order_whichever_way_its_handlers_run() {
    let inbox = Inbox::new();
    let engine = inbox.engine(inbox.broker.clone()).await;
    let emits = |in_transaction| {
        does_in(in_transaction, |delivery, context| {
            Box::pin(async move {
                let stream = delivery.stream_id.unwrap();
                context.push(&corelane::RawMessage::event("test.handled", &delivery.payload).stream(stream))?;
                Ok(())
            })
        })
    };
    let mut texts_of = Vec::new();
    for n in 0..60u128 {
        let type_name = if n % 7 < 3 { "test.plain" } else { "test.writes" };
        inbox.broker.put(
            SOURCE,
            corelane::Delivery { type_name: type_name.to_owned(), ..message(n % 2 + 1, &format!("{n:02}")) },
        );
        texts_of.push(format!("{n:02}"));
    }
    let consumer = crate::inbox_kit::consumer(&engine);
    consumer.raw_handler("test.plain", emits(false)).raw_handler("test.writes", emits(true)).start().await.unwrap();
    inbox.settled().await;
    let sql = "select convert_from(payload, 'UTF8') from wh_event_store order by stream_id, version";
    let emitted = texts(&inbox.client().await, sql).await;
    let even = texts_of.iter().step_by(2);
    assert_eq!(emitted, even.chain(texts_of.iter().skip(1).step_by(2)).cloned().collect::<Vec<_>>());
    engine.shutdown(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_whose_effects_the_database_refuses_is_found_among_its_neighbours() {
    let inbox = Inbox::new().set("retry.attempts_max", "1");
    let engine = inbox.engine(inbox.broker.clone()).await;
    let sql =
        "create table deferred (n int primary key deferrable initially deferred); insert into deferred values (7)";
    inbox.client().await.batch_execute(sql).await.unwrap();
    let handler = writes(|delivery, context| {
        Box::pin(async move {
            let n: i32 = text_of(delivery).parse().unwrap();
            context.transaction()?.execute("insert into deferred values ($1)", &[&n]).await?;
            effect(delivery, context).await
        })
    });
    for n in 0..16 {
        inbox.put(n % 4, &n.to_string());
    }
    let consumer = consume(&engine, handler).await;
    inbox.settled().await;
    inbox.nothing_kept().await;
    assert_eq!(inbox.effects(15).await.len(), 15);
    assert_eq!(inbox.count("deferred").await, 16);
    let dead = texts(&inbox.client().await, "select convert_from(payload, 'UTF8') from wh_inbox_dead_letter").await;
    assert_eq!(dead, ["7"]);
    assert!(consumer.metrics().bisections.get() > 0);
    engine.shutdown(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_settled_when_stored_is_handled_from_here_in_order() {
    let inbox = Inbox::new().set("inbox.settle", "stored");
    let engine = inbox.engine(inbox.broker.clone()).await;
    static OPEN: tokio::sync::Semaphore = tokio::sync::Semaphore::const_new(0);
    let handler = writes(|delivery, context| {
        Box::pin(async move {
            drop(OPEN.acquire().await.unwrap());
            if text_of(delivery) == "5" && context.attempt() == 1 {
                return Err(HandlerError::retry("once"));
            }
            effect(delivery, context).await
        })
    });
    consume(&engine, handler).await;
    for n in 0..40 {
        inbox.put(n % 4 + 1, &n.to_string());
    }
    inbox.settled().await;
    assert_eq!((inbox.broker.counts(SOURCE).completed, inbox.count("effect").await), (40, 0), "before its effects");
    OPEN.add_permits(1);
    let effects = inbox.effects(40).await;
    inbox.nothing_kept().await;
    for stream in 0..4 {
        let of: Vec<u32> = effects.iter().map(|text| text.parse().unwrap()).filter(|n| n % 4 == stream).collect();
        assert!(of.is_sorted() && of.len() == 10, "{of:?}");
    }
    engine.shutdown(Duration::from_secs(10)).await;
}

/// Stored, handled at once, while two engines look for retries every millisecond: each is handled once.
#[tokio::test(flavor = "multi_thread")]
async fn sweep_race_handles_each_once_while_retries_are_looked_for_every_millisecond() {
    let inbox = Inbox::new().set("inbox.settle", "stored").set("inbox.poll_ms", "1");
    let mut engines = Vec::new();
    for _ in 0..2 {
        let engine = inbox.engine(inbox.broker.clone()).await;
        consume(&engine, writes(|delivery, context| Box::pin(effect(delivery, context)))).await;
        engines.push(engine);
    }
    for n in 0..1_000u128 {
        inbox.put(n % 50, &n.to_string());
    }
    inbox.settled().await;
    inbox.nothing_kept().await;
    for engine in engines {
        engine.shutdown(Duration::from_secs(10)).await;
    }
    let distinct: i64 =
        inbox.client().await.query_one("select count(distinct message) from effect", &[]).await.unwrap().get(0);
    assert_eq!((inbox.count("effect").await, distinct), (1_000, 1_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_bad_delivery_is_its_own_outcome_and_its_neighbours_are_handled() {
    let inbox = Inbox::new();
    let engine = inbox.engine(inbox.broker.clone()).await;
    consume(&engine, writes(|delivery, context| Box::pin(effect(delivery, context)))).await;
    let good = || message(1, "good");
    let bad = [
        corelane::Delivery { message_id: Uuid::nil(), ..good() },
        corelane::Delivery { stream_id: Some(Uuid::nil()), ..good() },
        corelane::Delivery { type_name: String::new(), ..good() },
        corelane::Delivery { type_name: "x".repeat(256), ..good() },
        corelane::Delivery { type_name: "a\0b".to_owned(), ..good() },
        corelane::Delivery { content_type: "x".repeat(300), ..good() },
        corelane::Delivery { metadata: vec![b' '; 65_537], ..good() },
        corelane::Delivery { payload: vec![0; 64 * 1024 * 1024 + 1], ..good() },
    ];
    for delivery in bad.clone() {
        inbox.broker.put(SOURCE, good());
        inbox.broker.put(SOURCE, delivery);
    }
    inbox.settled().await;
    assert_eq!(inbox.effects(bad.len()).await.len(), bad.len());
    let dead = inbox.broker.dead(SOURCE);
    assert_eq!(dead.len(), bad.len());
    let too_large = dead.iter().filter(|dead| dead.reason == FailureReason::MessageBodyTooLarge).count();
    assert_eq!(too_large, 2, "metadata and payload");
    assert!(dead.iter().all(|dead| !dead.text.is_empty()));
    engine.shutdown(Duration::from_secs(10)).await;
}

/// Case nul and numbers: through the first try, through the tables, and through the dead letters.
#[tokio::test(flavor = "multi_thread")]
async fn nul_and_numbers_are_handled_kept_and_buried_as_the_bytes_that_came() {
    let inbox = Inbox::new().set("retry.attempts_max", "3");
    let engine = inbox.engine(inbox.broker.clone()).await;
    let seen: Arc<Mutex<HashMap<Uuid, Vec<Vec<u8>>>>> = Arc::default();
    let noted = seen.clone();
    let handler = does(move |delivery, _| {
        noted.lock().unwrap().entry(delivery.message_id).or_default().push(delivery.payload.clone());
        Box::pin(async { Err(HandlerError::retry("a text with \0 and \u{1f980}")) })
    });
    consume(&engine, handler).await;
    let payloads: [&[u8]; 8] = [
        br#"{"a":"\u0000"}"#,
        b"12345678901234567890",
        b"0.1234567890123456789",
        b"1e400",
        b"-0",
        br#"{"a":1,"a":2}"#,
        b"\xff\xfe\0raw",
        b"",
    ];
    let mut sent = HashMap::new();
    for (n, payload) in payloads.into_iter().enumerate() {
        let delivery = corelane::Delivery {
            payload: payload.to_vec(),
            metadata: b"{\"m\":\"\\u0000\"}".to_vec(),
            ..message(n as u128, "")
        };
        sent.insert(delivery.message_id, payload.to_vec());
        inbox.broker.put(SOURCE, delivery);
    }
    inbox.settled().await;
    eventually("all are dead", PATIENCE, || async { inbox.count("wh_inbox_dead_letter").await == 8 }).await;
    for (id, payload) in &sent {
        assert_eq!(seen.lock().unwrap()[id], [payload.clone(), payload.clone(), payload.clone()]);
    }
    let rows =
        inbox.client().await.query("select message_id, payload, metadata, error from wh_inbox_dead_letter", &[]).await;
    for row in rows.unwrap() {
        assert_eq!(row.get::<_, Vec<u8>>(1), sent[&row.get::<_, Uuid>(0)]);
        assert_eq!(row.get::<_, &[u8]>(2), b"{\"m\":\"\\u0000\"}");
        assert_eq!(row.get::<_, &str>(3), "a text with \u{fffd} and \u{1f980}");
    }
    engine.shutdown(Duration::from_secs(10)).await;
}

/// Nobody holds in memory, nor under locks, what its handlers come to much later.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_due_is_claimed_as_it_is_handled_and_no_sooner() {
    const DUE: usize = 8_000;
    // Of each of the workers: what it may have before a look, and what one look brings.
    const IN_HAND_MAX: u64 = 4 * (400 + 200);
    let inbox = Inbox::new();
    let engine = inbox.engine(inbox.broker.clone()).await;
    let client = inbox.client().await;
    let sql = format!(
        "select consumer_number('{CONSUMER}');
        insert into wh_inbox (lane_id, message_id, consumer, source, type_name, payload)
        select md5(n::text)::uuid, md5(n::text)::uuid, c.consumer, '{SOURCE}', 'test.order', 'due'
        from generate_series(1, {DUE}) n, wh_consumer c;
        insert into wh_inbox_parked (due, lane_id, message_id, partition, attempts, consumer, reason)
        select now(), i.lane_id, i.message_id, compute_partition(i.lane_id, 16), 1, i.consumer, 99 from wh_inbox i"
    );
    client.batch_execute(&sql).await.unwrap();
    let running: Arc<OnceLock<Consumer>> = Arc::default();
    let (of, most) = (running.clone(), Arc::new(AtomicU64::new(0)));
    let seen = most.clone();
    let handler = does(move |_, _| {
        let (of, seen) = (of.clone(), seen.clone());
        Box::pin(async move {
            if let Some(consumer) = of.get() {
                // In this order, so that what happens in between makes it less.
                let claimed = consumer.metrics().rows_claimed.get();
                seen.fetch_max(claimed.saturating_sub(consumer.metrics().handled.get()), Ordering::SeqCst);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
            Ok(())
        })
    });
    assert!(running.set(consume(&engine, handler).await).is_ok());
    inbox.nothing_kept().await;
    let (most, metrics) = (most.load(Ordering::SeqCst), running.get().unwrap().metrics());
    assert_eq!((metrics.rows_claimed.get(), metrics.handled.get()), (DUE as u64, DUE as u64));
    assert!(most > 0 && most <= IN_HAND_MAX, "{most} in hand");
    engine.shutdown(Duration::from_secs(10)).await;
}
