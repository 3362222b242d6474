//! What becomes of a stream whose message died: it goes on, or is held until an operator decides; and of the others of
//! a destination that fails altogether.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use corelane::config::OnDead;
use corelane::dead_letters::{self, Filter, Mode};
use corelane::transport::memory::Fault;
use corelane::{Config, Engine, MemoryTransport, RawMessage};
use uuid::Uuid;

use crate::dead_letters::{SOON, Ward, count, name_of, until_dead};
use crate::engine::{Sink, config};
use crate::support::{TestSchema, eventually, schema};

fn holding(schema: &TestSchema) -> Config {
    let mut config = config(schema);
    config.retry.on_dead = OnDead::Hold;
    config.destinations.set_on_dead("bin", OnDead::Continue);
    config
}

async fn start(config: &Config, transport: MemoryTransport) -> Engine {
    Engine::builder(config.clone()).transport(transport).migrate(true).start().await.unwrap()
}

async fn enqueue(engine: &Engine, stream: Uuid, to: &[&str], payloads: &[&str]) {
    for payload in payloads {
        engine.enqueue(&RawMessage::event("ward.told", payload.as_bytes()).stream(stream).to(to)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_stream_waits_for_an_operator_across_restarts_and_hand_overs() {
    let schema = schema();
    let (ward, config) = (Ward::default(), holding(&schema));
    let first = start(&config, ward.transport()).await;
    let (client, name) = (schema.client().await, name_of(&schema));
    let (stream, doomed, other, loose) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
    enqueue(&first, stream, &["ward"], &["well", "ill", "well"]).await;
    enqueue(&first, doomed, &["ward"], &["ill", "well"]).await;
    // Its own destination lets it go on.
    enqueue(&first, loose, &["bin"], &["ill", "well"]).await;
    until_dead(&client, 3).await;
    enqueue(&first, stream, &["ward"], &["well"]).await;
    enqueue(&first, other, &["ward"], &["well"]).await;
    ward.sink.wait_for(3).await;
    let held = || async { count(&client, "wh_parked where held").await };
    let kept = || async { count(&client, "wh_parked_reference").await };
    eventually("three wait behind two dead ones", SOON, || async { held().await == 2 && kept().await == 3 }).await;
    first.shutdown(SOON).await;

    // Who comes after finds them held; who takes over as well.
    let second = start(&config, ward.transport()).await;
    enqueue(&second, stream, &["ward"], &["well"]).await;
    let third = start(&config, ward.transport()).await;
    eventually("it has its share", SOON, || async { third.partitions_held() == 8 }).await;
    second.shutdown(SOON).await;
    eventually("it has all", SOON, || async { third.partitions_held() == 16 }).await;
    enqueue(&third, other, &["ward"], &["well"]).await;
    ward.sink.wait_for(4).await;
    eventually("the fourth waits as well", SOON, || async { kept().await == 4 }).await;
    assert_eq!((ward.numbers(stream), ward.numbers(doomed)), (vec![1], vec![]));
    let listed = dead_letters::list(&client, &name, &Filter::new().destination("ward"), 10).await.unwrap();
    assert!(listed.iter().all(|of| of.holds), "{listed:?}");

    ward.cure(true);
    let dry = dead_letters::retry(&client, &name, &Filter::new().stream(stream), 10, Mode::DryRun).await.unwrap();
    assert_eq!((dry.matched, dry.released), (1, 1));
    assert_eq!(held().await, 2);
    let done = dead_letters::retry(&client, &name, &Filter::new().stream(stream), 10, Mode::Apply).await.unwrap();
    assert_eq!((done.retried, done.released), (1, 1));
    let done = dead_letters::discard(&client, &name, &Filter::new().stream(doomed), 10, Mode::Apply).await.unwrap();
    assert_eq!((done.discarded, done.released), (1, 1));
    ward.sink.wait_for(9).await;
    eventually("nothing stands beside the log", SOON, || async { count(&client, "wh_parked").await == 0 }).await;
    third.shutdown(SOON).await;
    assert_eq!(ward.numbers(stream), [1, 2, 3, 4, 5]);
    assert_eq!(ward.numbers(doomed), [2], "what was discarded is gone");
    assert_eq!((ward.numbers(loose), ward.sink.len()), (vec![2], 9));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_stream_goes_on_when_its_lane_is_released_or_its_message_dies_again() {
    let schema = schema();
    let (ward, config) = (Ward::default(), holding(&schema));
    let engine = start(&config, ward.transport()).await;
    let (client, name) = (schema.client().await, name_of(&schema));
    let stream = Uuid::now_v7();
    enqueue(&engine, stream, &["ward"], &["ill", "well"]).await;
    until_dead(&client, 1).await;
    // Still ill: it dies again, and its stream is held again.
    dead_letters::retry(&client, &name, &Filter::all(), 10, Mode::Apply).await.unwrap();
    let again = || async { count(&client, "wh_dead_letter where retried = 1").await == 1 };
    eventually("it died again", SOON, again).await;
    assert_eq!((count(&client, "wh_parked where held").await, ward.sink.len()), (1, 0));
    assert_eq!(dead_letters::release_lanes(&client, &name, &[(stream, "ward"), (stream, "bin")]).await.unwrap(), 1);
    ward.sink.wait_for(1).await;
    eventually("nothing stands beside the log", SOON, || async { count(&client, "wh_parked").await == 0 }).await;
    engine.shutdown(SOON).await;
    assert_eq!(ward.numbers(stream), [2]);
    assert_eq!(count(&client, "wh_dead_letter").await, 1, "it stays");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_that_fails_gets_a_probe_at_a_time_and_everything_in_order_when_it_is_back() {
    let schema = schema();
    let mut config = config(&schema);
    for (key, value) in [("breaker.base_ms", "200"), ("breaker.cap_ms", "400"), ("shards.count", "1")] {
        config.set(key, value).unwrap();
    }
    config.publish.run_rows_max = 8;
    config.retry.attempts_max = 1_000;
    let sink = Sink::default();
    let (down, sent) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
    let (is_down, counted) = (down.clone(), sent.clone());
    let transport = sink.transport().with_faults(move |destination, _| {
        if destination == "down" && is_down.load(Ordering::SeqCst) {
            counted.fetch_add(1, Ordering::SeqCst);
            return Fault::Refuse("connection refused".to_owned());
        }
        Fault::None
    });
    let engine = start(&config, transport).await;
    let streams: Vec<Uuid> = (0..200).map(|_| Uuid::now_v7()).collect();
    for _ in 0..2 {
        let message = |stream: &Uuid| RawMessage::event("test.sent", b"{}").stream(*stream).to(&["down", "up"]);
        for receipt in engine.enqueue_many(streams.iter().map(message)).await {
            receipt.unwrap();
        }
    }
    // The other destination does not notice.
    sink.wait_for(400).await;
    let metrics = engine.shards()[0].metrics.clone();
    eventually("the breaker is open", SOON, || async { metrics.breakers_open_now.get() == 1 }).await;
    // What was out when it opened, and a probe now and then.
    let before = sent.load(Ordering::SeqCst);
    assert!(before <= 4 * 8 + 16, "{before} were sent to it");
    let slept = std::time::Instant::now();
    tokio::time::sleep(Duration::from_millis(1_000)).await;
    let probes = sent.load(Ordering::SeqCst) - before;
    let probes_max = 3 + slept.elapsed().as_millis() as usize / 200;
    assert!(probes <= probes_max, "{probes} probes, at most {probes_max}");
    down.store(false, Ordering::SeqCst);
    sink.wait_for(800).await;
    assert_eq!((metrics.breakers_open_now.get(), metrics.dead_letters.get()), (0, 0));
    let report = engine.shutdown(SOON).await;
    assert!(report.drained, "{report:?}");
    sink.assert_ordered();
    assert_eq!(sink.len(), 800, "no copies");
}
