//! Hard cases of listening: a connection that hears nothing, and writers who say nothing.

use std::time::{Duration, Instant};

use corelane::{Engine, ListenerHealth};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::cut_proxy::{CutProxy, Swallowed};
use crate::engine::{Sink, config};
use crate::outbox_kit::call;
use crate::store_kit::message;
use crate::support::{eventually, own_cluster, schema, schema_on};

const END: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(60);
/// Of the default lease: how often an owner looks whatever it hears.
const HEARTBEAT: Duration = Duration::from_millis(2_500);
/// By default: the interval of polls while the listener is believed healthy.
const POLL: Duration = Duration::from_millis(5_000);

async fn healthy(engine: &Engine) {
    eventually("it hears", PATIENCE, || async { engine.listener_health() == ListenerHealth::Healthy }).await;
}

/// Another process stores and says so; answers how long it takes until each is published.
async fn wake_ups(client: &Client, sink: &Sink, count: usize) -> Vec<Duration> {
    let mut all = Vec::new();
    for _ in 0..count {
        let stored = call(client, &[message(Uuid::new_v4(), "said")]).await.unwrap();
        client.query_one("select announce()", &[]).await.unwrap();
        let (since, id) = (Instant::now(), stored[0].message_id);
        let is_there = || async { sink.all().iter().any(|seen| seen.message_id == id) };
        eventually("it is published", PATIENCE, is_there).await;
        all.push(since.elapsed());
    }
    all.sort();
    all
}

async fn deaf_listener(swallowed: Swallowed) {
    let cluster = own_cluster();
    let schema = schema_on(cluster.url("postgres"));
    let (sink, proxy) = (Sink::default(), CutProxy::before(&cluster));
    let mut config = config(&schema);
    // Between lease keeper and server alone.
    config.database.direct_url = proxy.url();
    for (key, value) in [
        ("claim.poll_ms", "250"),
        ("claim.poll_relaxed_ms", "5000"),
        ("claim.poll_ms_max", "10000"),
        ("listen.test_interval_ms", "4000"),
        ("listen.test_timeout_ms", "1000"),
    ] {
        config.set(key, value).unwrap();
    }
    let engine = Engine::builder(config).transport(sink.transport()).migrate(true).start().await.unwrap();
    let client = schema.client().await;
    healthy(&engine).await;
    assert_eq!(engine.listener_metrics().health_now.get(), 2);
    proxy.swallow(swallowed);
    // From before anybody knows until it is known, and on.
    let mut all = wake_ups(&client, &sink, 4).await;
    let is_deaf = || async { matches!(engine.listener_health(), ListenerHealth::Deaf { .. }) };
    eventually("health says so", PATIENCE, is_deaf).await;
    assert!(engine.listener_health().to_string().contains("own word"), "{}", engine.listener_health());
    assert_eq!(engine.listener_metrics().health_now.get(), 3);
    all.extend(wake_ups(&client, &sink, 30).await);
    all.sort();
    let p99 = all[all.len() * 99 / 100];
    assert!(p99 <= HEARTBEAT + POLL, "{all:?}");
    // The lease did not suffer: it is the same incarnation, and held on.
    let lives = "select count(*) from wh_instance";
    assert_eq!(client.query_one(lives, &[]).await.unwrap().get::<_, i64>(0), 1);
    proxy.swallow(Swallowed::Nothing);
    healthy(&engine).await;
    engine.shutdown(END).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deaf_listener_whose_notifications_are_swallowed_is_known_and_costs_a_poll() {
    deaf_listener(Swallowed::Notifications).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deaf_listener_whose_packets_are_swallowed_is_known_and_costs_a_poll() {
    deaf_listener(Swallowed::Everything).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_stored_without_a_word_is_published_with_the_next_look_at_the_members() {
    let schema = schema();
    let (sink, mut config) = (Sink::default(), config(&schema));
    // While it hears, no poll is due for as long as this test waits.
    for key in ["claim.poll_relaxed_ms", "claim.poll_ms_max"] {
        config.set(key, "600000").unwrap();
    }
    config.set("claim.poll_ms", "60000").unwrap();
    let engine = Engine::builder(config).transport(sink.transport()).migrate(true).start().await.unwrap();
    let client = schema.client().await;
    healthy(&engine).await;
    call(&client, &[message(Uuid::new_v4(), "nobody has said so")]).await.unwrap();
    sink.wait_for(1).await;
    engine.shutdown(END).await;
}
