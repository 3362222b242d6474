//! The strategies that queue, `Interval` and `Batch`: timers, sizes, limits, flushes that meet, failures, and the end.
//! (IMM-, SCO- and FAC- stand in `strategies.rs`, with what these words are.)

use std::time::Duration;

use corelane::engine::{Flushed, Trigger};
use corelane::{Engine, Error, Strategy};
use uuid::Uuid;

use crate::cut_proxy::{CutProxy, Where};
use crate::engine::Sink;
use crate::strategies::{END, PATIENCE, calls, handed_over, message, slow_timers, store_only, stored_texts};
use crate::support::{eventually, own_cluster, schema, schema_on};

const QUEUED: [Strategy; 2] = [Strategy::Interval, Strategy::Batch];

/// Nobody flushes by hand, and it is stored; the default is 100 ms.
#[tokio::test(flavor = "multi_thread")]
async fn interval_is_handed_over_by_its_timer() {
    let schema = schema();
    let mut config = slow_timers(&schema);
    config.strategy.interval_ms = corelane::Config::default().strategy.interval_ms;
    assert_eq!(config.strategy.interval_ms, 100);
    let sink = Sink::default();
    let engine = Engine::builder(config).transport(sink.transport()).migrate(true).start().await.unwrap();
    let pushed = [message("a"), message("b")].map(|message| engine.push_with(Strategy::Interval, &message).unwrap());
    let [first, second] = pushed.map(|pushed| (pushed.message_id(), pushed));
    assert_eq!(second.1.stored().await.unwrap().version, 2);
    assert_eq!(first.1.stored().await.unwrap().message_id, first.0);
    assert!((1..=2).contains(&handed_over(&engine, Trigger::Timer)));
    sink.wait_for(2).await;
    engine.shutdown(END).await;
    sink.assert_ordered();
}

/// A flush by hand does not wait for the timer, one call carries all that was
/// queued, and nothing queued is no call.
#[tokio::test(flavor = "multi_thread")]
async fn a_flush_by_hand_carries_all_in_one_call_and_nothing_is_no_call() {
    for strategy in QUEUED {
        let schema = schema();
        let engine = store_only(slow_timers(&schema)).await;
        assert_eq!((engine.flush().await, calls(&engine)), (Flushed::default(), 0));
        let texts: Vec<String> = (0..9).map(|n| n.to_string()).collect();
        let pushed: Vec<_> = texts.iter().map(|text| engine.push_with(strategy, &message(text)).unwrap()).collect();
        assert_eq!((engine.queued(), calls(&engine)), (9, 0), "{strategy:?} waits");
        assert_eq!(engine.flush().await, Flushed { stored: 9, refused: 0 });
        assert_eq!((engine.queued(), calls(&engine), handed_over(&engine, Trigger::Manual)), (0, 1, 1));
        for (n, pushed) in pushed.into_iter().enumerate() {
            assert!(pushed.is_decided());
            assert_eq!(pushed.stored().await.unwrap().version, n as i64 + 1);
        }
        assert_eq!((engine.flush().await, calls(&engine)), (Flushed::default(), 1));
        assert_eq!(stored_texts(&schema).await, texts);
        engine.shutdown(END).await;
    }
}

/// So many are handed over at once, by one call; one less waits.
#[tokio::test(flavor = "multi_thread")]
async fn batch_is_handed_over_at_its_size() {
    let schema = schema();
    let engine = store_only(slow_timers(&schema)).await;
    let mut pushed: Vec<_> = (0..9).map(|_| engine.push_with(Strategy::Batch, &message("x")).unwrap()).collect();
    assert_eq!((engine.queued(), handed_over(&engine, Trigger::Size)), (9, 0));
    pushed.push(engine.push_with(Strategy::Batch, &message("x")).unwrap());
    assert_eq!((engine.queued(), handed_over(&engine, Trigger::Size)), (0, 1));
    for pushed in pushed {
        pushed.stored().await.expect("stored");
    }
    assert_eq!(calls(&engine), 1);
    // Units count by their messages.
    let mut unit = engine.unit_with(Strategy::Batch);
    for _ in 0..10 {
        unit.push(&message("of a unit")).unwrap();
    }
    assert_eq!(unit.commit().await.unwrap().len(), 10);
    assert_eq!(handed_over(&engine, Trigger::Size), 2);
    engine.shutdown(END).await;
}

/// A quiet while hands over what is there. And what the reference lacks: a trickle that never pauses is handed over
/// by its age.
#[tokio::test(flavor = "multi_thread")]
async fn batch_is_handed_over_by_a_pause_or_by_age() {
    let schema = schema();
    let mut config = slow_timers(&schema);
    (config.strategy.batch_size, config.strategy.batch_debounce_ms) = (4_000, 20);
    let engine = store_only(config).await;
    let pushed = engine.push_with(Strategy::Batch, &message("alone")).unwrap();
    pushed.stored().await.expect("stored");
    assert_eq!(handed_over(&engine, Trigger::Debounce), 1);
    engine.shutdown(END).await;

    let mut config = slow_timers(&schema);
    (config.strategy.batch_size, config.strategy.batch_debounce_ms, config.strategy.batch_age_ms_max) =
        (4_000, 250, 300);
    let engine = store_only(config).await;
    eventually("the oldest is old enough", PATIENCE, async || {
        engine.push_with(Strategy::Batch, &message("trickle")).unwrap();
        handed_over(&engine, Trigger::Age) > 0
    })
    .await;
    engine.shutdown(END).await;
}

/// Queue and shard are bounded together: beyond that a push is refused, and a unit waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_is_overloaded_and_a_flush_makes_room() {
    let schema = schema();
    let mut config = slow_timers(&schema);
    (config.ring.rows_max, config.flush.rows_max, config.strategy.batch_size) = (8, 8, 4_000);
    let engine = store_only(config).await;
    for strategy in QUEUED {
        for _ in 0..8 {
            // A shard answers first, and gives the room back a moment later.
            eventually("there is room", PATIENCE, async || engine.push_with(strategy, &message("x")).is_ok()).await;
        }
        for also in Strategy::ALL {
            let refused = engine.push_with(also, &message("one too many"));
            assert!(matches!(refused, Err(Error::Overloaded { shard: 0, rows_max: 8 })), "{refused:?}");
        }
        let mut unit = engine.unit_of_work();
        unit.push(&message("waits")).unwrap();
        let (committed, flushed) = tokio::join!(unit.commit(), engine.flush());
        assert_eq!((committed.expect("there was room").len(), flushed.stored), (1, 8));
    }
    assert_eq!(stored_texts(&schema).await.len(), 18);
    engine.shutdown(END).await;
}

/// In the reference a second flush answers at once and leaves its messages: here it
/// waits for what it found, and carries its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_flush_at_the_same_time_carries_its_own() {
    for strategy in QUEUED {
        let schema = schema();
        let engine = store_only(slow_timers(&schema)).await;
        let mut holder = schema.client().await;
        let held = holder.transaction().await.unwrap();
        held.batch_execute("lock table wh_event_store in exclusive mode").await.unwrap();
        let flush = || {
            let engine = engine.clone();
            tokio::spawn(async move { engine.flush().await })
        };
        let first = engine.push_with(strategy, &message("first")).unwrap();
        let flushing = flush();
        eventually("the first is at the database", PATIENCE, async || calls(&engine) == 1).await;
        let second = engine.push_with(strategy, &message("second")).unwrap();
        let also = flush();
        eventually("the second is handed over", PATIENCE, async || engine.queued() == 0).await;
        assert!(!flushing.is_finished() && !also.is_finished() && !first.is_decided() && !second.is_decided());
        held.rollback().await.unwrap();
        assert_eq!(flushing.await.unwrap(), Flushed { stored: 1, refused: 0 });
        assert_eq!(also.await.unwrap(), Flushed { stored: 2, refused: 0 });
        assert_eq!((first.stored().await.unwrap().version, second.stored().await.unwrap().version), (1, 2));
        engine.shutdown(END).await;
    }
}

/// In the reference a failed flush is logged, and its messages are gone. Here they are stored, once: whether the
/// server got the call or not.
#[tokio::test(flavor = "multi_thread")]
async fn a_flush_that_is_cut_loses_nothing_and_stores_nothing_twice() {
    let cluster = own_cluster();
    for (strategy, at) in QUEUED.into_iter().flat_map(|strategy| [(strategy, Where::Before), (strategy, Where::After)])
    {
        let schema = schema_on(cluster.url("postgres"));
        let proxy = CutProxy::before(&cluster);
        let mut config = slow_timers(&schema);
        config.database.url = proxy.url();
        let engine = store_only(config).await;
        engine.enqueue(&message("before")).await.unwrap();
        proxy.arm(b"cut here", at);
        let pushed = ["cut here", "behind"].map(|text| engine.push_with(strategy, &message(text)).unwrap());
        assert_eq!(engine.flush().await, Flushed { stored: 2, refused: 0 });
        assert_eq!(proxy.cuts(), 1, "the case was met");
        for (version, pushed) in (2..).zip(pushed) {
            assert_eq!(pushed.stored().await.unwrap().version, version);
        }
        assert_eq!(stored_texts(&schema).await, ["before", "cut here", "behind"]);
        engine.shutdown(END).await;
    }
}

/// The end stores what is queued at once, and takes nothing more; a second end does nothing.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_stores_what_is_queued_and_takes_nothing_more() {
    let schema = schema();
    let engine = store_only(slow_timers(&schema)).await;
    let pushed: Vec<_> = QUEUED
        .into_iter()
        .flat_map(|strategy| ["a", "b"].map(|text| engine.push_with(strategy, &message(text)).unwrap()))
        .collect();
    let report = engine.shutdown(END).await;
    assert_eq!((report.queued, report.queued_unwritten, report.drained), (4, 0, true), "{report:?}");
    for pushed in pushed {
        pushed.stored().await.expect("stored");
    }
    assert_eq!(stored_texts(&schema).await.len(), 4);
    for strategy in Strategy::ALL {
        assert!(matches!(engine.push_with(strategy, &message("late")), Err(Error::ShutDown)));
        let mut unit = engine.unit_with(strategy);
        let late = unit.push(&message("late")).and(Ok(()));
        assert!(matches!(late.and(unit.commit().await.and(Ok(()))), Err(Error::ShutDown)));
    }
    assert_eq!(engine.flush().await, Flushed::default());
    assert_eq!(engine.shutdown(END).await.queued, 0);
}

/// The end of an engine without database says which messages it could not write, in its time, and so do their callers'
/// errors.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_reports_what_it_could_not_write() {
    let cluster = own_cluster();
    let schema = schema_on(cluster.url("postgres"));
    let proxy = CutProxy::before(&cluster);
    let mut config = slow_timers(&schema);
    config.database.url = proxy.url();
    let engine = store_only(config).await;
    engine.enqueue(&message("before")).await.unwrap();
    proxy.arm_and_go_away(b"never", Where::Before);
    let pushed: Vec<_> = QUEUED
        .into_iter()
        .flat_map(|strategy| ["never", "either"].map(|text| engine.push_with(strategy, &message(text)).unwrap()))
        .collect();
    let mut ids: Vec<Uuid> = pushed.iter().map(corelane::Pushed::message_id).collect();
    let report = engine.shutdown(Duration::from_millis(500)).await;
    let mut unwritten = report.unwritten.clone();
    ids.sort();
    unwritten.sort();
    assert_eq!((report.queued, report.queued_unwritten, unwritten), (4, 4, ids), "{report:?}");
    for pushed in pushed {
        let error = pushed.stored().await.expect_err("not stored");
        assert!(matches!(error, Error::Store(_) | Error::OutcomeUnknown { .. } | Error::ShutDown), "{error}");
    }
}

/// A dropped engine hands over what is queued, too.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_is_dropped_stores_what_is_queued() {
    let schema = schema();
    let engine = store_only(slow_timers(&schema)).await;
    engine.enqueue(&message("before")).await.unwrap();
    let pushed = engine.push_with(Strategy::Interval, &message("queued")).unwrap();
    drop(engine);
    pushed.stored().await.expect("stored");
    assert_eq!(stored_texts(&schema).await, ["before", "queued"]);
}

/// Units stay whole in a queue: each has its own outcome, and a refused one costs its neighbours nothing.
#[tokio::test(flavor = "multi_thread")]
async fn queued_units_stay_whole_and_have_their_own_outcomes() {
    let schema = schema();
    let engine = store_only(slow_timers(&schema)).await;
    let doubled = Uuid::now_v7();
    let commit = |texts: [&'static str; 2], id: Uuid| {
        let mut unit = engine.unit_with(Strategy::Interval);
        for text in texts {
            unit.push(&message(text)).unwrap();
        }
        unit.push(&crate::strategies::loose(id)).unwrap();
        unit.commit()
    };
    engine.enqueue(&crate::strategies::loose(doubled)).await.unwrap();
    let flushing = async {
        eventually("they are queued", PATIENCE, async || engine.queued() == 9).await;
        engine.flush().await
    };
    let (first, refused, last, flushed) = tokio::join!(
        commit(["a", "b"], Uuid::now_v7()),
        commit(["never", "never"], doubled),
        commit(["c", "d"], Uuid::now_v7()),
        flushing,
    );
    assert_eq!(first.unwrap().iter().map(|receipt| receipt.version).collect::<Vec<_>>(), [1, 2, 0]);
    assert!(matches!(refused, Err(Error::DuplicateMessage { message_id }) if message_id == doubled), "{refused:?}");
    assert_eq!(last.unwrap().iter().map(|receipt| receipt.version).collect::<Vec<_>>(), [3, 4, 0]);
    assert_eq!(flushed, Flushed { stored: 6, refused: 3 });
    assert_eq!(stored_texts(&schema).await, ["a", "b", "c", "d"]);
    engine.shutdown(END).await;
}
