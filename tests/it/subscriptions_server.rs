//! Places of subscriptions when the server crashes and gives transaction ids again, and when a database is restored
//! elsewhere.

use std::time::Duration;

use corelane::seam::store::StoreError;
use corelane::store::rebase;
use corelane::{Engine, Error};
use uuid::Uuid;

use crate::cut_proxy::{CutProxy, Where};
use crate::engine::{Sink, start};
use crate::outbox_kit::call;
use crate::store_kit::{Space, event};
use crate::subscription_kit::{Follower, read};
use crate::support::{connect, eventually, own_cluster, own_cluster_with, quoted, schema_on};

#[tokio::test(flavor = "multi_thread")]
async fn an_event_under_a_transaction_id_that_was_given_before_a_crash_is_read() {
    let cluster = own_cluster_with(&["wal_writer_delay=10s"]);
    let space = Space::in_schema(schema_on(cluster.url("postgres"))).await;
    let schema = &space.schema;
    let engine = start(schema, Sink::default().transport()).await;
    let mut subscription = engine.subscribe("reborn").start().await.unwrap();
    let mut reborn = 0;
    for attempt in 1..=10 {
        let client = schema.client().await;
        let mut burnt = 0;
        for _ in 0..50 {
            client.batch_execute("begin").await.unwrap();
            burnt = client.query_one("select pg_current_xact_id()::text::int8", &[]).await.unwrap().get::<_, i64>(0);
            client.batch_execute("rollback").await.unwrap();
        }
        // Its reader has read past them: nothing comes, and it keeps on looking.
        let nothing = tokio::time::timeout(Duration::from_millis(100), subscription.next()).await;
        assert!(nothing.is_err(), "there are no events");
        let pid: i32 = client.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
        let witness = schema.client().await;
        std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
        eventually("all are gone", Duration::from_secs(10), async || client.is_closed() && witness.is_closed()).await;
        let url = schema.url.clone();
        eventually("the server is back", Duration::from_secs(60), async || {
            tokio_postgres::connect(&url, tokio_postgres::NoTls).await.is_ok()
        })
        .await;
        let mut client = connect(&url).await;
        client.batch_execute(&format!("set search_path = {}", quoted(&schema.name))).await.unwrap();
        let transaction = client.transaction().await.unwrap();
        call(&transaction, &[event(Uuid::now_v7(), &attempt.to_string())]).await.expect("stored");
        let xid: i64 = transaction.query_one("select pg_current_xact_id()::text::int8", &[]).await.unwrap().get(0);
        transaction.commit().await.unwrap();
        reborn += usize::from(xid <= burnt);
        let next = tokio::time::timeout(Duration::from_secs(30), subscription.next()).await;
        let batch = next.expect("it is read").unwrap().unwrap();
        assert_eq!(batch.events().iter().map(|event| read(event).text).collect::<Vec<_>>(), [attempt.to_string()]);
        // Done and written down before the next crash.
        batch.done();
        assert_eq!(subscription.lag().await.unwrap().events, 0);
        if reborn >= 2 {
            break;
        }
    }
    assert!(reborn > 0, "no transaction id came again: the case was not met");
    engine.shutdown(Duration::from_secs(10)).await;
}

/// Whoever asks for the lag, or for the end, does not wait for the database; the next events are waited for.
#[tokio::test(flavor = "multi_thread")]
async fn while_the_database_is_away_the_lag_is_an_error_and_a_stop_is_over() {
    const PATIENCE: Duration = Duration::from_secs(60);
    let cluster = own_cluster();
    let proxy = CutProxy::before(&cluster);
    let space = Space::in_schema(schema_on(cluster.url("postgres"))).await;
    let mut config = crate::engine::config(&space.schema);
    config.set("database.direct_url", &proxy.url()).unwrap();
    let engine = Engine::builder(config).transport(Sink::default().transport()).migrate(true).start().await.unwrap();
    let mut subscription = engine.subscribe("away").start().await.unwrap();
    let metrics = subscription.metrics().clone();
    for round in 1..=2 {
        let before = metrics.reconnects.get();
        proxy.arm_and_go_away(b"read_subscription", Where::Before);
        let lost = eventually("it has lost its connection", PATIENCE, async || metrics.reconnects.get() > before);
        tokio::select! {
            _ = subscription.next() => panic!("there are no events"),
            () = lost => {}
        }
        let lag = tokio::time::timeout(PATIENCE, subscription.lag()).await.expect("an answer");
        assert!(matches!(lag, Err(Error::Store(StoreError::ConnectionLost(_)))), "{lag:?}");
        if round == 1 {
            let client = space.schema.client().await;
            call(&client, &[event(Uuid::now_v7(), "there again")]).await.unwrap();
            let back = async {
                tokio::task::yield_now().await;
                proxy.come_back();
            };
            let (next, ()) = tokio::join!(tokio::time::timeout(PATIENCE, subscription.next()), back);
            let batch = next.expect("it is read").unwrap().unwrap();
            assert_eq!(batch.events().len(), 1);
            batch.done();
        }
    }
    tokio::time::timeout(PATIENCE, subscription.stop()).await.expect("it is over");
    proxy.come_back();
    engine.shutdown(Duration::from_secs(10)).await;
}

#[tokio::test]
async fn a_place_in_memory_says_which_life_of_the_server_it_is_of() {
    let cluster = own_cluster();
    let space = Space::in_schema(schema_on(cluster.url("postgres"))).await;
    let follower = Follower::join(&space, "epoch", Some(0)).await;
    let page = async || {
        let run = follower.run();
        let page = follower.statements.read(&follower.client, follower.member.subscription, run, &follower.filter);
        page.await.unwrap().epoch
    };
    let first = page().await;
    assert_eq!(page().await, first);
    // As crash recovery leaves it.
    follower.client.batch_execute("truncate wh_epoch").await.unwrap();
    assert_ne!(page().await, first);
}

#[tokio::test]
async fn what_was_read_before_a_rebase_is_read_and_the_rest_comes() {
    let (old, new) = (own_cluster(), own_cluster());
    let space = Space::in_schema(schema_on(old.url("postgres"))).await;
    let client = space.schema.client().await;
    for _ in 0..50 {
        client.batch_execute("select pg_current_xact_id()").await.unwrap();
    }
    let (one, two) = (Uuid::now_v7(), Uuid::now_v7());
    call(&client, &[event(one, "a1"), event(two, "b1")]).await.unwrap();
    let mut whole = Follower::join(&space, "whole", Some(0)).await;
    let mut middle = Follower::join(&space, "middle", Some(0)).await;
    let mut unread = Follower::join(&space, "unread", Some(0)).await;
    let open = space.schema.client().await;
    open.batch_execute("begin").await.unwrap();
    call(&open, &[event(Uuid::now_v7(), "late")]).await.unwrap();
    call(&client, &[event(one, "a2"), event(two, "b2")]).await.unwrap();
    assert_eq!(whole.texts().await, ["a1", "b1", "a2", "b2"]);
    middle.filter.rows_max = 1;
    let mut half = middle.page().await;
    half.extend(middle.page().await);
    assert_eq!(half.iter().map(|read| &*read.text).collect::<Vec<_>>(), ["a1", "b1"]);
    open.batch_execute("commit").await.unwrap();
    for follower in [&mut whole, &mut middle, &mut unread] {
        follower.write().await.unwrap();
    }
    call(&client, &[event(one, "a3")]).await.unwrap();
    drop((whole, middle, unread));

    let moved = crate::rebase::moved(&old, &space, &new);
    let mut there = moved.schema.client().await;
    // Stored by a program in SQL before the rebase.
    call(&there, &[event(two, "early")]).await.unwrap();
    rebase::rebase(&mut there, &moved.name, false).await.unwrap().expect("it was needed");
    call(&there, &[event(one, "a4")]).await.unwrap();
    let mut goes_on = Vec::new();
    for (name, expected) in [
        ("whole", &["late", "a3", "early", "a4"][..]),
        ("middle", &["late", "a2", "b2", "a3", "early", "a4"]),
        ("unread", &["a1", "b1", "late", "a2", "b2", "a3", "early", "a4"]),
    ] {
        let mut follower = Follower::join(&moved, name, None).await;
        let lag = follower.statements.measure(&follower.client, name, 1_000).await.unwrap();
        assert_eq!(lag.events as usize, expected.len(), "{name}");
        assert_eq!(follower.texts().await, expected, "{name}");
        assert_eq!(follower.texts().await, Vec::<String>::new(), "{name}");
        follower.write().await.unwrap();
        goes_on.push(follower);
    }
    call(&there, &[event(two, "b4")]).await.unwrap();
    for follower in &mut goes_on {
        assert_eq!(follower.texts().await, ["b4"]);
        follower.write().await.unwrap();
        follower.statements.leave(&follower.client, follower.member).await.unwrap();
    }
    // Restored in place: once more, on the same server.
    rebase::rebase(&mut there, &moved.name, true).await.unwrap().expect("forced");
    call(&there, &[event(two, "b5")]).await.unwrap();
    let mut again = Follower::join(&moved, "whole", None).await;
    assert_eq!(again.texts().await, ["b5"]);
}
