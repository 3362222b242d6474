//! Strategies, end to end: when what callers give is stored, and by how many calls. The words IMM-, SCO-, INT-, BAT- and
//! FAC- are the acceptance lines of the reference; docs/differences.md says which test holds each, and what stands for
//! those that do not hold here. What depends on time alone is tested in `plan/strategy.rs`, under virtual time.

use std::time::Duration;

use corelane::engine::{Flushed, Trigger};
use corelane::message::Enqueue;
use corelane::{Config, Engine, Error, RawMessage, Strategy, Wishes};
use uuid::Uuid;

use crate::engine::{Sink, config};
use crate::support::{TestSchema, eventually, schema};

pub const END: Duration = Duration::from_secs(10);
pub const PATIENCE: Duration = Duration::from_secs(60);

/// One shard; timers that do not fire by themselves.
pub fn slow_timers(schema: &TestSchema) -> Config {
    let mut config = config(schema);
    for (key, value) in [
        ("shards.count", "1"),
        ("strategy.interval_ms", "60000"),
        ("strategy.batch_size", "10"),
        ("strategy.batch_debounce_ms", "60000"),
        ("strategy.batch_age_ms_max", "600000"),
    ] {
        config.set(key, value).unwrap();
    }
    config
}

/// An engine that only stores.
pub async fn store_only(config: Config) -> Engine {
    Engine::builder(config).migrate(true).start().await.expect("start")
}

pub fn message<'a>(text: &'a str) -> RawMessage<'a> {
    RawMessage::event("test.strategy", text.as_bytes()).stream(Uuid::from_u128(7)).to(&["sink"])
}

/// A message without stream, under this id.
pub fn loose(id: Uuid) -> impl Enqueue {
    RawMessage::command("test.strategy", b"loose").to(&["sink"]).with(Wishes::new().message_id(id))
}

/// Store calls, one transaction each.
pub fn calls(engine: &Engine) -> u64 {
    engine.shards().iter().map(|shard| shard.metrics.flushes.get()).sum()
}

pub fn handed_over(engine: &Engine, trigger: Trigger) -> u64 {
    engine.strategy_metrics().handed_over[trigger as usize].get()
}

pub async fn stored_texts(schema: &TestSchema) -> Vec<String> {
    let rows = schema.client().await.query("select payload from wh_event_store order by position", &[]).await.unwrap();
    rows.iter().map(|row| String::from_utf8(row.get(0)).unwrap()).collect()
}

/// A push is a call, and exactly that message; nothing is left for a second one; no
/// transport is needed for it.
#[tokio::test(flavor = "multi_thread")]
async fn immediate_stores_each_push_at_once_by_a_call_of_its_own() {
    let schema = schema();
    let engine = store_only(slow_timers(&schema)).await;
    for (turn, text) in ["a", "b", "c"].into_iter().enumerate() {
        let pushed = engine.push_with(Strategy::Immediate, &message(text)).unwrap();
        let id = pushed.message_id();
        let receipt = pushed.stored().await.unwrap();
        assert_eq!((receipt.message_id, receipt.version), (id, turn as i64 + 1));
        assert_eq!((calls(&engine), engine.queued()), (turn as u64 + 1, 0));
    }
    assert_eq!((engine.flush().await, calls(&engine)), (Flushed::default(), 3));
    let mut unit = engine.unit_with(Strategy::Immediate);
    let pushed = unit.push(&message("d")).unwrap();
    assert_eq!(unit.len(), 0, "handed over");
    assert_eq!(unit.flush().await.unwrap()[0].message_id, pushed);
    unit.push(&message("e")).unwrap();
    drop(unit); // It is its shard's already: nothing is rolled back.
    assert_eq!(engine.flush().await.refused, 0);
    assert_eq!(stored_texts(&schema).await, ["a", "b", "c", "d", "e"]);
    assert_eq!(engine.strategy_metrics().units_dropped.get(), 0);
    engine.shutdown(END).await;
}

/// One call whatever is in it, none for nothing, and what was flushed
/// before is not sent again.
#[tokio::test(flavor = "multi_thread")]
async fn scoped_stores_a_unit_by_one_call_when_it_ends() {
    let schema = schema();
    let engine = store_only(slow_timers(&schema)).await;
    let (answer, receipts) = engine
        .scope(async |unit| {
            unit.push(&message("event"))?;
            unit.push(&loose(Uuid::now_v7()))?;
            assert_eq!((calls(&engine), unit.len()), (0, 2), "nothing before the end");
            Ok::<_, Error>("done")
        })
        .await
        .unwrap();
    assert_eq!((answer, receipts.len(), calls(&engine)), ("done", 2, 1));
    engine
        .scope(async |unit| {
            for text in ["first", "second", "third"] {
                unit.push(&message(text))?;
                unit.flush().await?;
            }
            Ok::<_, Error>(())
        })
        .await
        .unwrap();
    assert_eq!(calls(&engine), 4, "three rounds are three calls, and the end has nothing to add");
    engine.scope(async |_| Ok::<_, Error>(())).await.unwrap();
    assert_eq!((engine.unit_of_work().commit().await.unwrap(), calls(&engine)), (Vec::new(), 4));
    assert_eq!(stored_texts(&schema).await, ["event", "first", "second", "third"]);
    engine.shutdown(END).await;
}

/// What does not end well stores nothing, its error is the caller's, and
/// what was forgotten is counted.
#[tokio::test(flavor = "multi_thread")]
async fn a_scope_that_fails_rolls_back_and_a_unit_that_is_dropped_is_counted() {
    let schema = schema();
    let engine = store_only(slow_timers(&schema)).await;
    let dropped = || engine.strategy_metrics().units_dropped.get();
    let failed: Result<((), _), Error> = engine
        .scope(async |unit| {
            unit.push(&message("lost"))?;
            Err(Error::ShutDown)
        })
        .await;
    assert!(matches!(failed, Err(Error::ShutDown)));
    let mut unit = engine.unit_of_work();
    unit.push(&message("taken back")).unwrap();
    unit.roll_back();
    drop(engine.unit_of_work());
    assert_eq!(dropped(), 0, "these ended in order");

    let mut unit = engine.unit_of_work();
    unit.push(&message("forgotten")).unwrap();
    drop(unit);
    let engine_of_task = engine.clone();
    let panicked = tokio::spawn(async move {
        engine_of_task
            .scope(async |unit| {
                unit.push(&message("unwound"))?;
                panic!("a caller's own");
                #[allow(unreachable_code)]
                Ok::<_, Error>(())
            })
            .await
    });
    assert!(panicked.await.is_err());
    assert_eq!((dropped(), calls(&engine)), (2, 0));
    let id = Uuid::now_v7();
    engine.enqueue(&loose(id)).await.unwrap();
    let refused = engine.scope(async |unit| unit.push(&loose(id))).await;
    assert!(matches!(refused, Err(Error::DuplicateMessage { message_id }) if message_id == id), "{refused:?}");
    assert_eq!((dropped(), stored_texts(&schema).await.len()), (2, 0));
    engine.shutdown(END).await;
}

/// Nothing is lost when a flush fails: what a failed flush carried is still in the unit, under the same
/// ids, and the next flush stores it.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_failed_flush_carried_is_still_in_its_unit() {
    for strategy in [Strategy::Scoped, Strategy::Interval] {
        let schema = schema();
        let mut config = slow_timers(&schema);
        config.strategy.interval_ms = 20;
        let engine = store_only(config).await;
        let id = Uuid::now_v7();
        engine.enqueue(&loose(id)).await.unwrap();
        let mut unit = engine.unit_with(strategy);
        let first = unit.push(&message("first")).unwrap();
        unit.push(&loose(id)).unwrap();
        assert!(matches!(unit.flush().await, Err(Error::DuplicateMessage { .. })));
        assert_eq!((unit.len(), stored_texts(&schema).await.len()), (2, 0));
        let client = schema.client().await;
        client.execute("delete from wh_outbox where message_id = $1", &[&id]).await.unwrap();
        client.execute("delete from wh_log", &[]).await.unwrap();
        unit.push(&message("third")).unwrap();
        let receipts = unit.commit().await.expect("stored now");
        assert_eq!((receipts.len(), receipts[0].message_id, receipts[2].version), (3, first, 2));
        engine.shutdown(END).await;
        let mut unit = engine.unit_with(strategy);
        unit.push(&message("too late")).unwrap();
        assert!(matches!(unit.flush().await, Err(Error::ShutDown)));
        assert_eq!(unit.len(), 1, "still the caller's");
    }
}

/// The same of a unit larger than a flush, which goes its own way; and of one whose caller stops waiting for room.
#[tokio::test(flavor = "multi_thread")]
async fn a_unit_that_was_not_stored_is_whole_whatever_its_size_and_whenever_its_caller_goes() {
    let schema = schema();
    let mut config = slow_timers(&schema);
    (config.ring.rows_max, config.flush.rows_max) = (2_000, 4_000);
    let engine = store_only(config).await;
    let id = Uuid::now_v7();
    engine.enqueue(&loose(id)).await.unwrap();
    let mut large = engine.unit_of_work();
    for _ in 0..3_000 {
        large.push(&message("large")).unwrap();
    }
    large.push(&loose(id)).unwrap();
    assert!(matches!(large.flush().await, Err(Error::DuplicateMessage { .. })));
    assert_eq!(large.len(), 3_001);
    schema.client().await.execute("delete from wh_outbox where message_id = $1", &[&id]).await.unwrap();
    schema.client().await.execute("delete from wh_log", &[]).await.unwrap();
    assert_eq!(large.commit().await.expect("stored now").len(), 3_001);

    let queued: Vec<_> = std::iter::from_fn(|| engine.push_with(Strategy::Interval, &message("full")).ok()).collect();
    let mut unit = engine.unit_of_work();
    unit.push(&message("first")).unwrap();
    let waiting = tokio::time::timeout(Duration::from_millis(20), unit.flush()).await;
    assert!(waiting.is_err() && unit.len() == 1, "there was no room");
    unit.push(&message("second")).unwrap();
    assert_eq!(engine.flush().await.stored, queued.len());
    assert_eq!(unit.commit().await.expect("one unit").len(), 2);
    engine.shutdown(END).await;
}

/// The nil UUID is refused by every strategy, no stream is fine.
#[tokio::test(flavor = "multi_thread")]
async fn nil_streams_are_refused_by_every_strategy() {
    let schema = schema();
    let engine = store_only(slow_timers(&schema)).await;
    for strategy in Strategy::ALL {
        let nil = message("nil").stream(Uuid::nil());
        assert!(matches!(engine.push_with(strategy, &nil), Err(Error::InvalidStreamId)));
        assert!(matches!(engine.unit_with(strategy).push(&nil), Err(Error::InvalidStreamId)));
        engine.push_with(strategy, &loose(Uuid::now_v7())).unwrap();
    }
    assert_eq!(engine.flush().await, Flushed { stored: 4, refused: 0 });
    engine.shutdown(END).await;
}

/// The units of many callers share commits, whatever their strategy: that is the flush gate's.
#[tokio::test(flavor = "multi_thread")]
async fn units_of_many_callers_share_commits() {
    let schema = schema();
    let sink = Sink::default();
    let engine = Engine::builder(slow_timers(&schema)).transport(sink.transport()).migrate(true).start().await.unwrap();
    let callers: Vec<_> = (0..64_u128)
        .map(|caller| {
            let engine = engine.clone();
            // That the future may move between threads is half of what is shown.
            tokio::spawn(async move {
                let message = message("shared").stream(Uuid::from_u128(caller + 1));
                engine.scope(async |unit| unit.push(&message)).await.expect("stored");
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    assert!(calls(&engine) < 64, "{} calls for 64 units", calls(&engine));
    sink.wait_for(64).await;
    engine.shutdown(END).await;
}

/// Scoped unless told otherwise, each of the four by its name, and an unknown name is an error that lists them.
#[tokio::test(flavor = "multi_thread")]
async fn the_strategy_is_the_configurations_or_the_programs() {
    let unknown = "must be immediate | scoped | interval | batch";
    let error = Config::from_toml("[strategy]\ndefault = \"lazy\"").expect_err("unknown");
    assert_eq!(error.to_string(), format!("strategy.default = lazy: {unknown}"));
    assert_eq!("lazy".parse::<Strategy>().expect_err("unknown").to_string(), format!("strategy \"lazy\": {unknown}"));
    assert_eq!(Config::default().strategy.default, Strategy::Scoped);
    let partly = Config::from_toml("[strategy]\nbatch_size = 7").unwrap().strategy;
    assert_eq!((partly.batch_size, partly.interval_ms, partly.default), (7, 100, Strategy::Scoped));

    let schema = schema();
    for strategy in Strategy::ALL {
        let mut config = slow_timers(&schema);
        config.set("strategy.default", strategy.name()).unwrap();
        let engine = store_only(config).await;
        let pushed = engine.push(&message("x")).unwrap();
        let waits = matches!(strategy, Strategy::Interval | Strategy::Batch);
        assert_eq!(engine.queued(), usize::from(waits), "{strategy:?}");
        engine.flush().await;
        pushed.stored().await.expect("stored");
        // No configuration takes a unit of work apart.
        let whole = if strategy == Strategy::Immediate { Strategy::Scoped } else { strategy };
        assert_eq!(engine.unit_of_work().strategy(), whole);
        for of_its_own in Strategy::ALL {
            assert_eq!(engine.unit_with(of_its_own).strategy(), of_its_own);
        }
        engine.shutdown(END).await;
    }
}

/// A refusal that nobody reads is not silent.
#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_that_nobody_reads_is_counted() {
    let schema = schema();
    let engine = store_only(slow_timers(&schema)).await;
    let id = Uuid::now_v7();
    engine.enqueue(&loose(id)).await.unwrap();
    drop(engine.push_with(Strategy::Interval, &loose(id)).unwrap());
    let read = engine.push_with(Strategy::Interval, &loose(Uuid::now_v7())).unwrap();
    assert_eq!(engine.flush().await, Flushed { stored: 1, refused: 1 });
    read.stored().await.expect("its neighbour is stored");
    eventually("it is counted", PATIENCE, async || engine.strategy_metrics().refusals_unread.get() == 1).await;
    engine.shutdown(END).await;
}
