//! Places in the feed when the server crashes and gives transaction ids again, and when a database is restored elsewhere.

use std::time::Duration;

use corelane::store::rebase;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::feed_kit::SqlFeed;
use crate::outbox_kit::call;
use crate::store_kit::{Space, event};
use crate::support::{eventually, own_cluster, own_cluster_with, schema_on};

const PATIENCE: Duration = Duration::from_secs(60);

/// Kills one backend: the server ends all others, and recovers.
async fn crash(space: &Space, client: &Client) -> Client {
    let pid: i32 = client.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
    let witness = space.schema.client().await;
    std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    eventually("all are gone", PATIENCE, async || client.is_closed() && witness.is_closed()).await;
    let url = space.schema.url.clone();
    eventually("the server is back", PATIENCE, async || {
        tokio_postgres::connect(&url, tokio_postgres::NoTls).await.is_ok()
    })
    .await;
    space.schema.client().await
}

#[tokio::test]
async fn an_event_under_an_id_that_was_given_before_a_crash_is_read_from_a_place_of_before() {
    let cluster = own_cluster_with(&["wal_writer_delay=10s"]);
    let space = Space::in_schema(schema_on(cluster.url("postgres"))).await;
    let mut client = space.schema.client().await;
    let (mut reborn, mut appended) = (0, 0);
    // A place that no page proves: its own commit would write down the ids that are to come again.
    let mut feed = SqlFeed { prove_ms: 86_400_000, ..SqlFeed::begin(&client, Some(0)).await };
    for attempt in 1..=10 {
        let mut burnt = 0;
        for _ in 0..50 {
            client.batch_execute("begin").await.unwrap();
            burnt = client.query_one("select pg_current_xact_id()::text::int8", &[]).await.unwrap().get::<_, i64>(0);
            client.batch_execute("rollback").await.unwrap();
        }
        // It has read past them.
        assert_eq!(feed.texts(&client).await, Vec::<String>::new());
        client = crash(&space, &client).await;
        let transaction = client.transaction().await.unwrap();
        call(&transaction, &[event(Uuid::now_v7(), &attempt.to_string())]).await.expect("stored");
        let xid: i64 = transaction.query_one("select pg_current_xact_id()::text::int8", &[]).await.unwrap().get(0);
        transaction.commit().await.unwrap();
        appended += 1;
        reborn += usize::from(xid <= burnt);
        // Where it was never proved it begins anew: what was read comes again, and what was not is there.
        let read = feed.texts(&client).await;
        assert_eq!(read.last(), Some(&attempt.to_string()), "{read:?}");
        assert_eq!(read.len(), appended);
        if reborn >= 2 {
            break;
        }
    }
    assert!(reborn > 0, "no transaction id came again: the case was not met");
}

#[tokio::test]
async fn from_a_place_that_is_proved_nothing_comes_again_after_a_crash() {
    let cluster = own_cluster_with(&["wal_writer_delay=10s"]);
    let space = Space::in_schema(schema_on(cluster.url("postgres"))).await;
    let mut client = space.schema.client().await;
    // Proved in spite of it.
    let off = "set synchronous_commit = off";
    client.batch_execute(off).await.unwrap();
    let mut feed = SqlFeed { prove_ms: 0, rows_max: 2, ..SqlFeed::new() };
    let streams = [Uuid::now_v7(), Uuid::now_v7()];
    for round in ["1", "2", "3"] {
        call(&client, &[event(streams[0], round), event(streams[1], round), event(streams[0], round)]).await.unwrap();
        // In the middle of a snapshot, and at its end.
        let page = feed.page(&client).await;
        assert_eq!(page.iter().map(|read| &*read.text).collect::<Vec<_>>(), [round, round]);
        client = crash(&space, &client).await;
        client.batch_execute(off).await.unwrap();
        assert_eq!(feed.texts(&client).await, [round]);
        // What it proves is that no id below comes again: one that a rolled back transaction had would be passed over.
        for _ in 0..50 {
            client.batch_execute("begin; select pg_current_xact_id(); rollback").await.unwrap();
        }
        assert_eq!(feed.texts(&client).await, Vec::<String>::new());
        client = crash(&space, &client).await;
        client.batch_execute(off).await.unwrap();
        call(&client, &[event(Uuid::now_v7(), "after")]).await.unwrap();
        assert_eq!(feed.texts(&client).await, ["after"]);
    }
}

#[tokio::test]
async fn a_place_that_was_proved_on_a_server_further_on_is_refused() {
    let cluster = own_cluster();
    let space = Space::in_schema(schema_on(cluster.url("postgres"))).await;
    let client = space.schema.client().await;
    let mut feed = SqlFeed::begin(&client, None).await;
    // As if the server had been set back behind it, in another life.
    let place = feed.place.take().unwrap();
    let xid: i64 = client.query_one("select pg_current_xact_id()::text::int8", &[]).await.unwrap().get(0);
    let start = place.find("\"read\": \"").expect("what is read") + 9;
    let end = start + place[start..].find('"').unwrap();
    let ahead = format!("{0}:{0}:", xid + 1_000);
    feed.place = Some(place.replace(&place[start..end], &ahead));
    client.batch_execute("truncate wh_epoch").await.unwrap();
    let refused = feed.try_page(&client).await.unwrap_err();
    assert_eq!(refused.code().unwrap().code(), "CL023");
}

#[tokio::test]
async fn a_place_goes_on_after_a_rebase() {
    let (old, new) = (own_cluster(), own_cluster());
    let space = Space::in_schema(schema_on(old.url("postgres"))).await;
    let client = space.schema.client().await;
    for _ in 0..50 {
        client.batch_execute("select pg_current_xact_id()").await.unwrap();
    }
    let (one, two) = (Uuid::now_v7(), Uuid::now_v7());
    call(&client, &[event(one, "a1"), event(two, "b1")]).await.unwrap();
    let proves = || SqlFeed { prove_ms: 0, ..SqlFeed::new() };
    let (mut whole, mut middle, mut unread) = (proves(), proves(), SqlFeed::begin(&client, Some(0)).await);
    let open = space.schema.client().await;
    open.batch_execute("begin").await.unwrap();
    call(&open, &[event(Uuid::now_v7(), "late")]).await.unwrap();
    call(&client, &[event(one, "a2"), event(two, "b2")]).await.unwrap();
    assert_eq!(whole.texts(&client).await, ["a1", "b1", "a2", "b2"]);
    middle.rows_max = 1;
    let mut half = middle.page(&client).await;
    half.extend(middle.page(&client).await);
    assert_eq!(half.iter().map(|read| &*read.text).collect::<Vec<_>>(), ["a1", "b1"]);
    open.batch_execute("commit").await.unwrap();
    call(&client, &[event(one, "a3")]).await.unwrap();

    let moved = crate::rebase::moved(&old, &space, &new);
    let mut there = moved.schema.client().await;
    // Stored by a program in SQL before the rebase.
    call(&there, &[event(two, "early")]).await.unwrap();
    rebase::rebase(&mut there, &moved.name, false).await.unwrap().expect("it was needed");
    call(&there, &[event(one, "a4")]).await.unwrap();
    let mut begun_here = proves();
    for (what, feed, expected) in [
        ("whole", &mut whole, &["late", "a3", "early", "a4"][..]),
        ("middle", &mut middle, &["late", "a2", "b2", "a3", "early", "a4"]),
        ("unread", &mut unread, &["a1", "b1", "late", "a2", "b2", "a3", "early", "a4"]),
        ("begun here", &mut begun_here, &["a1", "b1", "late", "a2", "b2", "a3", "early", "a4"]),
    ] {
        assert_eq!(feed.texts(&there).await, expected, "{what}");
        assert_eq!(feed.texts(&there).await, Vec::<String>::new(), "{what}");
    }
    call(&there, &[event(two, "b4")]).await.unwrap();
    for feed in [&mut whole, &mut middle, &mut unread] {
        assert_eq!(feed.texts(&there).await, ["b4"]);
    }
    // Restored in place: once more, on the same server. One has not read since the first time.
    assert_eq!(begun_here.texts(&there).await, ["b4"]);
    let mut stayed_away = SqlFeed { place: begun_here.place.clone(), ..proves() };
    call(&there, &[event(two, "b5")]).await.unwrap();
    rebase::rebase(&mut there, &moved.name, true).await.unwrap().expect("forced");
    call(&there, &[event(two, "b6")]).await.unwrap();
    for feed in [&mut whole, &mut middle, &mut begun_here] {
        assert_eq!(feed.texts(&there).await, ["b5", "b6"]);
    }
    rebase::rebase(&mut there, &moved.name, true).await.unwrap().expect("forced");
    call(&there, &[event(two, "b7")]).await.unwrap();
    // Two rebases on: what came between the one before its place and the last may come again, and nothing is missing.
    let read = stayed_away.texts(&there).await;
    assert_eq!(read[read.len() - 3..], ["b5", "b6", "b7"], "{read:?}");
    assert_eq!(whole.texts(&there).await, ["b7"]);
}
