//! The inbox and the world: connections cut at each step, brokers and databases that go away, settlements that are
//! lost, and its end. Effects once, nothing lost, in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use corelane::private_postgres::StopMode;
use corelane::transport::memory_broker::SettleFault;
use corelane::{Engine, MemoryBroker, RawMessage};
use tokio::sync::Semaphore;

use crate::cut_proxy::{CutProxy, Where};
use crate::inbox_kit::{
    CONSUMER, Calls, Inbox, SOURCE, consume, does, does_in, effect, effects_and_emits, message, texts, writes,
};
use crate::support::{eventually, own_cluster, schema, schema_on};

const PATIENCE: Duration = Duration::from_secs(60);

async fn end(engine: Engine) {
    engine.shutdown(Duration::from_secs(10)).await;
}

/// The effects of the messages `0..count`, each once, and as many events.
async fn assert_once(inbox: &Inbox, count: usize) {
    let mut all: Vec<u32> = inbox.effects(count).await.iter().map(|text| text.parse().unwrap()).collect();
    all.sort_unstable();
    assert_eq!(all, (0..count as u32).collect::<Vec<_>>());
    assert_eq!(inbox.count("wh_event_store").await, count as i64);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_cut_at_any_step_costs_no_effect_and_makes_none_twice() {
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Step {
        Begin(Where),
        Remember(Where),
        Running,
        Commit(Where),
    }
    let cluster = own_cluster();
    let proxy = Arc::new(CutProxy::before(&cluster));
    for step in [
        Step::Begin(Where::Before),
        Step::Begin(Where::After),
        Step::Remember(Where::Before),
        Step::Remember(Where::After),
        Step::Running,
        Step::Commit(Where::Before),
        Step::Commit(Where::After),
    ] {
        let schema = schema_on(cluster.url("postgres"));
        let direct = format!("{}?options=-csearch_path%3D{}", proxy.url(), schema.name);
        let inbox = Inbox::in_schema(schema, MemoryBroker::new(30_000)).set("database.direct_url", &direct);
        let engine = inbox.engine(inbox.broker.clone()).await;
        let first = message(1, "0");
        let (cutting, id, cuts) = (proxy.clone(), first.message_id, Calls::default());
        let admin = Arc::new(inbox.client().await);
        // Emits, and writes its effect as an event: its own SQL would be part of the commit.
        let handler = does(move |delivery, context| {
            let is_first = delivery.message_id == id && cuts.note() == 0;
            let (cutting, admin) = (cutting.clone(), admin.clone());
            Box::pin(async move {
                if is_first {
                    match step {
                        Step::Remember(at) => cutting.arm(id.as_bytes(), at),
                        Step::Commit(at) => cutting.arm(b"COMMIT", at),
                        Step::Running => {
                            let sql = "select pg_terminate_backend(pid) from pg_stat_activity \
                                       where application_name like '%/inbox'";
                            admin.execute(sql, &[]).await.unwrap();
                        }
                        Step::Begin(_) => {}
                    }
                }
                let stream = delivery.stream_id.unwrap();
                context.push(&RawMessage::event("test.handled", &delivery.payload).stream(stream).to(&["sink"]))?;
                Ok(())
            })
        });
        let before = proxy.cuts();
        if let Step::Begin(at) = step {
            proxy.arm(first.message_id.as_bytes(), at);
        }
        inbox.broker.put(SOURCE, first);
        for n in 1..20u128 {
            inbox.put(n % 4 + 1, &n.to_string());
        }
        let consumer = consume(&engine, handler).await;
        inbox.settled().await;
        let read = "select convert_from(payload, 'UTF8') from wh_event_store order by position";
        let events: Vec<u32> =
            texts(&inbox.client().await, read).await.iter().map(|text| text.parse().unwrap()).collect();
        let mut sorted = events.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..20).collect::<Vec<u32>>(), "{step:?}");
        for stream in 0..4 {
            let of: Vec<&u32> = events.iter().filter(|n| *n % 4 == stream).collect();
            assert!(of.is_sorted(), "{step:?}: {of:?}");
        }
        assert_eq!(inbox.broker.counts(SOURCE).completed, 20, "{step:?}");
        assert_eq!(inbox.count("wh_inbox_seen").await, 20, "{step:?}");
        assert!(consumer.metrics().reconnects.get() > 0, "{step:?}");
        assert!(step == Step::Running || proxy.cuts() == before + 1, "{step:?}");
        end(engine).await;
    }
}

/// As a process that is killed between its commit and its settlement leaves it: the broker delivers it again, to another.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_committed_and_not_settled_comes_again_and_is_completed_as_a_copy() {
    let hangs = Arc::new(AtomicBool::new(true));
    let asked = hangs.clone();
    let fault = move |_: &corelane::Delivery, _: &corelane::Settlement| {
        if asked.load(Ordering::Acquire) { SettleFault::Hang } else { SettleFault::None }
    };
    let inbox = Inbox::in_schema(schema(), MemoryBroker::with_faults(500, |_| 0, fault));
    let first = inbox.engine(inbox.broker.clone()).await;
    consume(&first, effects_and_emits()).await;
    for n in 0..20u128 {
        inbox.put(n % 4, &n.to_string());
    }
    inbox.effects(20).await;
    assert_eq!(inbox.broker.counts(SOURCE).completed, 0);
    // Without an end: its tasks go, its settlements with them.
    drop(first);
    hangs.store(false, Ordering::Release);
    let second = inbox.engine(inbox.broker.clone()).await;
    let consumer = consume(&second, effects_and_emits()).await;
    inbox.settled().await;
    assert_once(&inbox, 20).await;
    assert_eq!(inbox.broker.counts(SOURCE).completed, 20);
    eventually("all are known as copies", PATIENCE, || async { consumer.metrics().duplicates.get() >= 20 }).await;
    assert_eq!(consumer.metrics().handled.get(), 0);
    end(second).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_loses_settlements_and_connections_gets_each_effect_once() {
    let lost = Calls::default();
    let noted = lost.clone();
    let fault = move |_: &corelane::Delivery, _: &corelane::Settlement| match noted.note() % 5 {
        0 => SettleFault::Lost,
        1 => SettleFault::AnswerLost,
        _ => SettleFault::None,
    };
    let inbox = Inbox::in_schema(schema(), MemoryBroker::with_faults(300, |_| 0, fault));
    let engine = inbox.engine(inbox.broker.clone()).await;
    let consumer = consume(&engine, effects_and_emits()).await;
    for n in 0..200u128 {
        inbox.put(n % 10 + 1, &n.to_string());
        if n % 50 == 25 {
            inbox.broker.disconnect(SOURCE);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    inbox.settled().await;
    assert_once(&inbox, 200).await;
    assert!(consumer.metrics().disconnects.get() >= 4);
    let effects: Vec<u32> = inbox.effects(200).await.iter().map(|text| text.parse().unwrap()).collect();
    for stream in 0..10 {
        assert!(effects.iter().filter(|n| *n % 10 == stream).is_sorted());
    }
    end(engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_takes_longer_than_the_brokers_lock_is_kept_ours_by_renewal() {
    let inbox = Inbox::in_schema(schema(), MemoryBroker::new(2_000));
    let engine = inbox.engine(inbox.broker.clone()).await;
    let handler = writes(|delivery, context| {
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(4_500)).await;
            effect(delivery, context).await
        })
    });
    consume(&engine, handler).await;
    inbox.put(1, "0");
    inbox.settled().await;
    let counts = inbox.broker.counts(SOURCE);
    assert_eq!((counts.delivered, counts.completed, counts.taken_back), (1, 1, 0));
    end(engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_database_is_away_deliveries_are_kept_within_bounds_or_given_back_and_none_is_lost() {
    for gives_back in [false, true] {
        let mut cluster = own_cluster();
        let schema = schema_on(cluster.url("postgres"));
        let inbox = Inbox::in_schema(schema, MemoryBroker::new(30_000))
            .set("inbox.rows_max", "30")
            .set("inbox.busy_ms_max", if gives_back { "100" } else { "60000" });
        let engine = inbox.engine(inbox.broker.clone()).await;
        let consumer = consume(&engine, effects_and_emits()).await;
        for n in 0..20u128 {
            inbox.put(n % 4 + 1, &n.to_string());
        }
        inbox.effects(20).await;
        cluster.stop(StopMode::Immediate).unwrap();
        for n in 20..100u128 {
            inbox.put(n % 4 + 1, &n.to_string());
        }
        if gives_back {
            eventually("they are given back", PATIENCE, || async {
                consumer.metrics().abandoned.get() > 0 && inbox.broker.counts(SOURCE).in_hand == 0
            })
            .await;
        } else {
            eventually("they are kept", PATIENCE, || async { inbox.broker.counts(SOURCE).in_hand == 30 }).await;
        }
        cluster.start_again().unwrap();
        inbox.settled().await;
        assert_once(&inbox, 100).await;
        let effects: Vec<u32> = inbox.effects(100).await.iter().map(|text| text.parse().unwrap()).collect();
        for stream in 0..4 {
            assert!(effects.iter().filter(|n| *n % 4 == stream).is_sorted(), "gives back: {gives_back}: {effects:?}");
        }
        end(engine).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_lets_what_runs_finish_and_gives_the_rest_back() {
    let inbox = Inbox::new();
    let engine = inbox.engine(inbox.broker.clone()).await;
    static OPEN: Semaphore = Semaphore::const_new(0);
    let calls = Calls::default();
    let noted = calls.clone();
    let handler = does(move |_, _| {
        noted.note();
        Box::pin(async move {
            drop(OPEN.acquire().await.unwrap());
            Ok(())
        })
    });
    let consumer = consume(&engine, handler).await;
    for n in 0..6u128 {
        inbox.put(n % 2 + 1, &n.to_string());
    }
    calls.wait_for(2).await;
    let stopping = tokio::spawn({
        let consumer = consumer.clone();
        async move { consumer.stop(Duration::from_secs(10)).await }
    });
    eventually("those behind are given back", PATIENCE, || async { inbox.broker.counts(SOURCE).in_hand <= 2 }).await;
    OPEN.add_permits(1);
    let report = stopping.await.unwrap();
    assert!(report.drained && report.left == 0 && report.abandoned == 4, "{report:?}");
    let counts = inbox.broker.counts(SOURCE);
    assert_eq!((counts.completed, counts.waiting, counts.in_hand), (2, 4, 0));
    assert_eq!(inbox.count("wh_inbox_seen").await, 2);
    end(engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_is_over_in_its_time_and_says_what_it_leaves() {
    let inbox = Inbox::new();
    let engine = inbox.engine(inbox.broker.clone()).await;
    let calls = Calls::default();
    let noted = calls.clone();
    let handler = does(move |_, _| {
        noted.note();
        Box::pin(std::future::pending())
    });
    consume(&engine, handler).await;
    inbox.put(1, "0");
    calls.wait_for(1).await;
    let report = engine.shutdown(Duration::from_secs(2)).await;
    assert!(!report.drained && report.handlers_left == 1, "{report:?}");
    assert!(report.took < PATIENCE, "{report:?}");
    eventually("it comes again", PATIENCE, || async { inbox.broker.counts(SOURCE).waiting == 1 }).await;
    assert_eq!(inbox.count("wh_inbox_seen").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_is_paused_receives_nothing_and_goes_on_when_it_is_told() {
    let inbox = Inbox::new();
    let engine = inbox.engine(inbox.broker.clone()).await;
    let consumer = consume(&engine, effects_and_emits()).await;
    inbox.put(1, "0");
    inbox.effects(1).await;
    consumer.pause();
    inbox.put(1, "1");
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!((inbox.broker.counts(SOURCE).waiting, inbox.count("effect").await), (1, 1));
    consumer.resume();
    assert_once(&inbox, 2).await;
    end(engine).await;
}

/// Another session has the stream's lane: it is waited for, then given back, and handled when it is free.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_in_others_hands_is_waited_for_then_given_back_whole() {
    let inbox = Inbox::new().set("inbox.busy_ms_max", "200");
    let engine = inbox.engine(inbox.broker.clone()).await;
    let other = inbox.client().await;
    let lock = "select begin_inbox(consumer_number($1), array[gen_random_uuid()], array[$2]::uuid[])";
    other.execute(lock, &[&CONSUMER, &uuid::Uuid::from_u128(1)]).await.unwrap();
    let handler = writes(|delivery, context| Box::pin(effect(delivery, context)));
    let consumer = consume(&engine, handler).await;
    for text in ["0", "1", "2"] {
        inbox.put(1, text);
    }
    inbox.put(2, "b");
    assert_eq!(inbox.effects(1).await, ["b"]);
    eventually("they are given back", PATIENCE, || async { consumer.metrics().abandoned.get() >= 3 }).await;
    assert!(consumer.metrics().busy.get() >= 3);
    drop(other);
    inbox.settled().await;
    assert_eq!(inbox.effects(4).await, ["b", "0", "1", "2"]);
    end(engine).await;
}

/// A broker that takes deliveries back to be settled and does not answer: no further ones are received than may be in
/// hand.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_being_settled_is_in_hand_and_bounded_with_it() {
    let hangs = Arc::new(AtomicBool::new(true));
    let asked = hangs.clone();
    let fault = move |_: &corelane::Delivery, _: &corelane::Settlement| {
        if asked.load(Ordering::Acquire) { SettleFault::Hang } else { SettleFault::None }
    };
    let broker = MemoryBroker::with_faults(30_000, |_| 0, fault);
    let inbox = Inbox::in_schema(schema(), broker).set("inbox.rows_max", "20");
    let engine = inbox.engine(inbox.broker.clone()).await;
    let consumer = consume(&engine, writes(|delivery, context| Box::pin(effect(delivery, context)))).await;
    for n in 0..200u128 {
        inbox.put(n % 7, &n.to_string());
    }
    inbox.effects(20).await;
    // Whoever would receive more has had the time for it.
    for _ in 0..50 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert!(inbox.broker.counts(SOURCE).delivered <= 20 && consumer.metrics().in_hand_now.get() <= 20);
    }
    assert_eq!(inbox.count("effect").await, 20);
    drop(engine);
    // Its deliveries come again, to another.
    hangs.store(false, Ordering::Release);
    inbox.broker.disconnect(SOURCE);
    let engine = inbox.engine(inbox.broker.clone()).await;
    let consumer = consume(&engine, writes(|delivery, context| Box::pin(effect(delivery, context)))).await;
    inbox.settled().await;
    assert_eq!(inbox.count("effect").await, 200);
    eventually("nothing is in hand", PATIENCE, || async { consumer.metrics().in_hand_now.get() == 0 }).await;
    engine.shutdown(Duration::from_secs(10)).await;
}

/// A failover has left its connection on a server that only reads (25006): it is given up, whatever its handlers write, and
/// one that can write is dialled. To commit the same again over it would hold the worker for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_server_has_come_to_only_read_leaves_it_and_commits_elsewhere() {
    for in_transaction in [true, false] {
        let cluster = own_cluster();
        let inbox =
            Inbox::in_schema(schema_on(cluster.url("postgres")), MemoryBroker::new(30_000)).set("inbox.workers", "1");
        let engine = inbox.engine(inbox.broker.clone()).await;
        let handler = does_in(in_transaction, move |delivery, context| {
            Box::pin(async move { if in_transaction { effect(delivery, context).await } else { Ok(()) } })
        });
        let consumer = consume(&engine, handler).await;
        inbox.put(1, "0");
        let (probe, admin) = (inbox.client().await, inbox.client().await);
        let handled = async |count: u64| {
            eventually(&format!("{count} are handled"), PATIENCE, async || consumer.metrics().handled.get() == count)
                .await;
        };
        handled(1).await;
        // New sessions write, those that are there only read.
        admin.batch_execute("set default_transaction_read_only = off").await.unwrap();
        admin.batch_execute("alter database postgres set default_transaction_read_only = off").await.unwrap();
        admin.batch_execute("alter system set default_transaction_read_only = on").await.unwrap();
        admin.batch_execute("select pg_reload_conf()").await.unwrap();
        eventually("the server only reads", PATIENCE, async || {
            probe.query_one("show transaction_read_only", &[]).await.unwrap().get::<_, &str>(0) == "on"
        })
        .await;
        for n in 1..=4 {
            inbox.put(n, &n.to_string());
        }
        handled(5).await;
        inbox.settled().await;
        assert_eq!(consumer.metrics().failed.get(), 0, "in transaction: {in_transaction}");
        end(engine).await;
        drop(inbox);
    }
}
