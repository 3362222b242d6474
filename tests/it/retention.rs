//! Streams that are truncated say where they begin, and go on as if nothing had gone; only an operator does that.

use corelane::message::{Enqueue, Expected};
use corelane::retention::{self, Truncated};
use corelane::store::grants;
use corelane::{Engine, Error, RawMessage, Wishes, dead_letters::Mode};
use futures_util::StreamExt;
use uuid::Uuid;

use crate::dead_letters::{SOON, Ward, count, until_dead};
use crate::engine::{Sink, start};
use crate::outbox_kit::{call, code};
use crate::replay::until_resolved;
use crate::store_kit::{Space, event};
use crate::subscription_kit::Follower;
use crate::support::{connect, eventually};

async fn append(engine: &Engine, stream: Uuid, payload: &str) -> i64 {
    let event = RawMessage::event("test.event", payload.as_bytes()).stream(stream).to(&["ear"]);
    engine.enqueue(&event).await.unwrap().version
}

/// Where a read was told that its stream begins, and what was noted.
fn beginning<T: std::fmt::Debug>(outcome: Result<T, Error>, stream: Uuid) -> (i64, String) {
    match outcome.unwrap_err() {
        Error::StreamTruncated { stream_id, first_version, note } if stream_id == stream => (first_version, note),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_truncated_stream_says_where_it_begins_and_goes_on_with_its_versions() {
    let space = Space::new().await;
    let engine = start(&space.schema, Sink::default().transport()).await;
    let (client, store) = (space.schema.client().await, engine.event_store());
    let (stream, other) = (Uuid::now_v7(), Uuid::now_v7());
    for n in 1..=10 {
        append(&engine, stream, &n.to_string()).await;
    }
    append(&engine, other, "other").await;
    until_resolved(&client, &space.schema, 11).await;

    let dry = store.truncate_stream(&client, stream, 8, None, Mode::DryRun).await.unwrap();
    assert_eq!(dry, Truncated { first_version: 8, matched: 7, ..Truncated::default() });
    assert_eq!((count(&client, "wh_event_store").await, count(&client, "wh_tombstone").await), (11, 0), "only counted");
    let mut truncated = Vec::new();
    for _ in 0..4 {
        let note = truncated.is_empty().then_some("archive/7");
        let step = retention::truncate_stream(&client, &space.name, stream, 8, note, 3, Mode::Apply).await.unwrap();
        truncated.push((step.truncated, step.first_version, step.more));
    }
    assert_eq!(truncated, [(3, 4, true), (3, 7, true), (1, 8, false), (0, 8, false)]);
    assert_eq!(count(&client, "wh_event_store").await, 4);
    for beyond in [12, i64::MAX] {
        let refused = store.truncate_stream(&client, stream, beyond, None, Mode::Apply).await.unwrap_err();
        assert!(refused.to_string().contains("at version 10"), "{refused}");
    }
    assert!(store.truncate_stream(&client, Uuid::now_v7(), 1, None, Mode::Apply).await.is_err(), "no such stream");

    // From below: forwards, one event, backwards at the border. From it on: all.
    let told = (8, "archive/7".to_owned());
    for from in [0, 1, 7] {
        assert_eq!(beginning(store.read_forwards(stream, from).next_page().await, stream), told);
        assert_eq!(beginning(store.read_event(stream, from).await, stream), told);
        assert_eq!(beginning(store.read_backwards(stream, from).next_page().await, stream), told);
    }
    let read: Vec<i64> = store.read_forwards(stream, 8).events().map(|event| event.unwrap().version).collect().await;
    assert_eq!(read, [8, 9, 10]);
    for page_rows in [1, 3, 500] {
        let mut backwards = Box::pin(store.read_backwards(stream, i64::MAX).page_rows(page_rows).events());
        for version in [10, 9, 8] {
            assert_eq!(backwards.next().await.unwrap().unwrap().version, version);
        }
        assert_eq!(beginning(backwards.next().await.unwrap(), stream), told, "pages of {page_rows}");
        assert!(backwards.next().await.is_none());
    }
    assert_eq!(store.read_newest(stream, 2).await.unwrap().len(), 2);
    assert_eq!(store.read_forwards(other, 0).next_page().await.unwrap().len(), 1, "others know nothing of it");

    // Versions go on, from the owner's memory and looked up anew.
    let expects = |expected| {
        RawMessage::event("test.event", b"more").stream(stream).to(&["ear"]).with(Wishes::new().expected(expected))
    };
    let conflict = engine.enqueue(&expects(Expected::NoStream)).await;
    assert!(matches!(conflict, Err(Error::VersionConflict { found: 10, .. })), "{conflict:?}");
    assert_eq!(engine.enqueue(&expects(Expected::Exact(10))).await.unwrap().version, 11);
    until_resolved(&client, &space.schema, 5).await;
    let all_but_one = store.truncate_stream(&client, stream, 11, None, Mode::Apply).await.unwrap();
    assert_eq!((all_but_one.truncated, all_but_one.first_version, all_but_one.more), (3, 11, false));
    assert_eq!(beginning(store.read_forwards(stream, 9).next_page().await, stream), (11, "archive/7".to_owned()));
    engine.shutdown(SOON).await;
    let numbered = call(&client, &[event(stream, "twelve")]).await.unwrap();
    assert_eq!((numbered[0].version, numbered[0].seq), (Some(12), Some(12)));
    let events: i64 = client.query_one("select events from wh_tombstone", &[]).await.unwrap().get(0);
    assert_eq!(events, 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_published_yet_or_dead_is_not_truncated() {
    let space = Space::new().await;
    let ward = Ward::default();
    let engine = start(&space.schema, ward.transport()).await;
    let client = space.schema.client().await;
    let stream = Uuid::now_v7();
    for payload in ["1", "2", "ill 3", "4", "5"] {
        append(&engine, stream, payload).await;
    }
    until_dead(&client, 1).await;
    // Dead letters are no waiting ones: the cursor passes them.
    until_resolved(&client, &space.schema, 5).await;
    ward.shut(true);
    append(&engine, stream, "6").await;
    append(&engine, stream, "7").await;
    let truncate = async |before, mode| {
        let step = engine.event_store().truncate_stream(&client, stream, before, None, mode).await.unwrap();
        (step.first_version, step.truncated, step.waiting, step.dead, step.more)
    };
    assert_eq!(truncate(7, Mode::DryRun).await, (3, 0, 1, 1, false), "the sixth waits, the third is dead");
    assert_eq!(truncate(7, Mode::Apply).await, (3, 2, 1, 1, false));
    assert_eq!(truncate(7, Mode::Apply).await, (3, 0, 1, 1, false));
    // Its dead letter can be given back still; then it waits beside the log, as those behind it do.
    let retried = "select retried from retry_dead_letters(true, p_dry_run => false)";
    assert_eq!(client.query_one(retried, &[]).await.unwrap().get::<_, i32>(0), 1);
    assert_eq!(truncate(7, Mode::DryRun).await, (3, 0, 2, 0, false));
    ward.cure(true);
    ward.shut(false);
    eventually("all are published", SOON, || async { ward.numbers(stream).len() == 7 }).await;
    until_resolved(&client, &space.schema, 5).await;
    eventually("nothing stands beside the log", SOON, || async { count(&client, "wh_parked_reference").await == 0 })
        .await;
    assert_eq!(truncate(7, Mode::Apply).await, (7, 4, 0, 0, false));
    assert_eq!(count(&client, "wh_dead_letter").await, 0);
    engine.shutdown(SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_passes_over_what_is_truncated_without_waiting_or_counting_it() {
    let space = Space::new().await;
    let engine = start(&space.schema, Sink::default().transport()).await;
    let client = space.schema.client().await;
    let streams = [Uuid::now_v7(), Uuid::now_v7()];
    for n in 1..=40 {
        for stream in streams {
            append(&engine, stream, &n.to_string()).await;
        }
    }
    until_resolved(&client, &space.schema, 80).await;
    let mut follower = Follower::join(&space, "late", Some(0)).await;
    follower.filter.rows_max = 10;
    let mut read = follower.page().await;
    assert_eq!(read.len(), 10);
    follower.write().await.unwrap();

    let step = engine.event_store().truncate_stream(&client, streams[0], 31, None, Mode::Apply).await.unwrap();
    assert_eq!(step.truncated, 30);
    let lag = "select events from measure_subscription('late')";
    assert_eq!(client.query_one(lag, &[]).await.unwrap().get::<_, i64>(0), 10 + 35, "what there is to read");
    read.extend(follower.drain().await);
    follower.write().await.unwrap();
    assert_eq!(client.query_one(lag, &[]).await.unwrap().get::<_, i64>(0), 0);
    let versions = |stream| read.iter().filter(|of| of.stream_id == stream).map(|of| of.version).collect::<Vec<_>>();
    assert_eq!(versions(streams[0]), (1..=5).chain(31..=40).collect::<Vec<_>>());
    assert_eq!(versions(streams[1]), (1..=40).collect::<Vec<_>>());
    append(&engine, streams[0], "live").await;
    assert_eq!(follower.texts().await, ["live"]);
    engine.shutdown(SOON).await;
}

#[tokio::test]
async fn only_an_operator_truncates_and_erases_and_he_may_do_nothing_else() {
    let space = Space::new().await;
    let admin = space.schema.client().await;
    let (service, operator) = (format!("service_{}", space.schema.name), format!("operator_{}", space.schema.name));
    admin.batch_execute(&format!("create role {service}; create role {operator}")).await.unwrap();
    grants::grant(&admin, &space.name, &service).await.unwrap();
    grants::grant_operator(&admin, &space.name, &operator).await.unwrap();
    let stream = Uuid::now_v7();
    call(&admin, &[event(stream, "1"), event(stream, "2")]).await.unwrap();
    let client = connect(&space.schema.url).await;
    let calls = [
        format!("truncate_stream('{stream}', 2, p_dry_run => false)"),
        format!("erase_events('{{{stream}}}', p_dry_run => false)"),
    ];
    client.batch_execute(&format!("set search_path = {}; set role {service}", space.name)).await.unwrap();
    for call in &calls {
        assert_eq!(code(client.query(&format!("select * from {call}"), &[]).await), "42501", "{call}");
    }
    // A reader that was granted before: nothing else is needed to be told.
    client.query(&format!("select * from read_stream('{stream}')"), &[]).await.unwrap();
    client.batch_execute(&format!("reset role; set role {operator}")).await.unwrap();
    for call in &calls {
        client.query(&format!("select * from {call}"), &[]).await.unwrap();
    }
    for forbidden in ["select payload from wh_event_store", "delete from wh_event_store", "delete from wh_tombstone"] {
        assert_eq!(code(client.execute(forbidden, &[]).await), "42501", "{forbidden}");
    }
    drop(client);
    let _ = admin.batch_execute(&format!("drop owned by {service}, {operator}; drop role {service}, {operator}")).await;
}
