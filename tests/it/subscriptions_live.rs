//! Following live: what a member does for those that come after it.

use std::time::Duration;

use tokio_postgres::Client;
use uuid::Uuid;

use crate::engine::{Sink, start};
use crate::outbox_kit::call;
use crate::store_kit::{Message, Space, event};
use crate::support::eventually;

/// Pages of the table, and those of them that a look reads that finds nothing.
async fn pages(client: &Client) -> (i64, i64) {
    let all = "select pg_relation_size('wh_event_store') / current_setting('block_size')::int8";
    let all = client.query_one(all, &[]).await.unwrap().get(0);
    client.batch_execute("set enable_seqscan = off").await.unwrap();
    let explain = "explain (analyze, timing off, costs off) select from wh_event_store where position = -1";
    let plan = client.query(explain, &[]).await.unwrap();
    let line =
        plan.iter().find_map(|row| row.get::<_, &str>(0).split_once("lossy=").map(|(_, count)| count.to_owned()));
    (all, line.map_or(0, |count| count.trim().parse().unwrap()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_follows_live_brings_the_indexes_up_to_what_came() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    // Nobody else does it.
    client.batch_execute("alter table wh_event_store set (autovacuum_enabled = off)").await.unwrap();
    let engine = start(&space.schema, Sink::default().transport()).await;
    let mut subscription = engine.subscribe("live").from_beginning().start().await.unwrap();
    for _ in 0..4 {
        let events: Vec<Message> = (0..4_000).map(|_| event(Uuid::now_v7(), &"x".repeat(200))).collect();
        call(&client, &events).await.unwrap();
        let mut seen = 0;
        while seen < 4_000 {
            let batch = subscription.next().await.unwrap().unwrap();
            seen += batch.events().len();
            batch.done();
        }
        assert_eq!(seen, 4_000);
    }
    eventually("the newest pages alone are not summarized", Duration::from_secs(60), async || {
        let (all, read) = pages(&client).await;
        assert!(all > 400, "{all} pages are too few to tell");
        read < 100
    })
    .await;
    engine.shutdown(Duration::from_secs(10)).await;
}

#[tokio::test]
async fn summarizing_goes_on_where_it_ended_and_waits_for_nobody() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    client.batch_execute("alter table wh_event_store set (autovacuum_enabled = off)").await.unwrap();
    let other = space.schema.client().await;
    let summarize = async |from: Option<i64>| -> Option<i64> {
        client.query_one("select summarize_events_from($1)", &[&from]).await.unwrap().get(0)
    };
    assert_eq!(summarize(None).await, None, "there is nothing");
    let mut from = None;
    for _ in 0..2 {
        let events: Vec<Message> = (0..4_000).map(|_| event(Uuid::now_v7(), &"x".repeat(200))).collect();
        call(&client, &events).await.unwrap();
        let (all, before) = pages(&client).await;
        let to = summarize(from).await;
        assert!(
            to > from && to.is_some_and(|to| to % 32 == 0 && to > all - 40 && to <= all),
            "{from:?} to {to:?} of {all}"
        );
        let (_, after) = pages(&client).await;
        assert!(before > 64 && after < 40, "of {all} pages {before} were read before, {after} after");
        assert_eq!(summarize(to).await, to, "nothing has come since");
        from = to;
    }
    other.batch_execute("begin; lock table wh_event_store in share update exclusive mode").await.unwrap();
    let events: Vec<Message> = (0..4_000).map(|_| event(Uuid::now_v7(), &"x".repeat(200))).collect();
    call(&client, &events).await.unwrap();
    assert_eq!(summarize(from).await, from, "somebody does something to the table");
    other.batch_execute("rollback").await.unwrap();
    assert!(summarize(from).await > from);
}
