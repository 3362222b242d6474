//! What waits longer than it should is counted and seen, by one instance; and dead letters go when their time is over.

use corelane::config::OnDead;
use corelane::dead_letters;
use corelane::seam::store::{Coordination, InspectRules, Inspection};
use corelane::{Engine, RawMessage};
use uuid::Uuid;

use crate::dead_letters::{SOON, Ward, count, until_dead};
use crate::engine::{Sink, config, start};
use crate::outbox_kit::call;
use crate::store_kit::{Message, Space, event, loose, message, stream_in};
use crate::support::{eventually, schema};
use crate::work_kit::Worker;

const LONG_MS: i64 = 3_600_000;

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_too_long_is_counted_until_it_is_published() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let stream = Uuid::now_v7();
    let both = Message { destinations: vec!["somewhere", "elsewhere"], ..event(stream, "1") };
    call(&client, &[both, message(stream, "2"), loose("3")]).await.unwrap();
    let due = Message { due_unix_us: 1, ..loose("late") };
    call(&client, &[due]).await.unwrap();
    let found = async |unpublished_ms, stuck_ms| {
        dead_letters::sentinel(&client, &space.name, unpublished_ms, stuck_ms).await.unwrap()
    };
    let now = found(0, 0).await;
    assert_eq!((now.unpublished, now.overdue, now.stuck, now.held), (4, 1, 0, 0));
    assert_eq!(found(LONG_MS, LONG_MS).await.unpublished, 0, "not for long");
    let sql = "insert into wh_parked (stream_seq, due, lane_id, partition, attempts, reason, destination, held, parked_at)
        select 1, now() + interval '1 day', gen_random_uuid(), 1, 1, 2, 'somewhere', h, now() - h::int * interval '1 day'
        from unnest('{true,false}'::bool[]) h";
    client.execute(sql, &[]).await.unwrap();
    let parked = found(LONG_MS, LONG_MS).await;
    assert_eq!((parked.stuck, parked.held), (1, 1));
    assert!(parked.stuck_age_ms > 86_000_000, "{parked:?}");

    let sink = Sink::default();
    let engine = start(&space.schema, sink.transport()).await;
    sink.wait_for(5).await;
    let nothing = || async { found(0, LONG_MS).await.unpublished == 0 };
    eventually("the cursor has passed them", SOON, nothing).await;
    assert_eq!(found(0, LONG_MS).await.overdue, 0);
    engine.shutdown(SOON).await;
}

#[tokio::test]
async fn one_instance_inspects_and_another_when_it_is_gone() {
    let space = Space::new().await;
    let (first, second) = (space.owner(1).await, space.owner(1).await);
    let rules = InspectRules { dead_letters_days: 0, unpublished_ms: 1_000, stuck_ms: 1_000 };
    let inspect =
        async |of: &crate::store_kit::Owner| of.coordination.inspect(of.incarnation, &rules, 10_000).await.unwrap();
    assert_eq!((inspect(&first).await, inspect(&second).await), (Some(Inspection::default()), None));
    space.expire(&first).await;
    assert_eq!((inspect(&first).await, inspect(&second).await), (None, Some(Inspection::default())));
}

/// Whoever never inspects is in nobody's way: workers that speak SQL, programs of the version before, and one that lives
/// and does it no more. And two at once do it once.
#[tokio::test]
async fn who_never_inspects_silences_nobody() {
    let space = Space::new().await;
    let mut client = space.schema.client().await;
    let worker = Worker::new(&space).await;
    worker.claim().await;
    let old = "select number from register_instance(gen_random_uuid(), 'tests', 'old', 60000, 1)";
    let old: i32 = client.query_one(old, &[]).await.unwrap().get(0);
    client.execute("select take_partitions($1)", &[&old]).await.unwrap();
    let (first, second) = (space.owner(1).await, space.owner(1).await);
    assert!(worker.number().await < old && old < first.incarnation.number);
    let rules = InspectRules { dead_letters_days: 0, unpublished_ms: 1_000, stuck_ms: 1_000 };
    let inspect = async |of: &crate::store_kit::Owner| {
        of.coordination.inspect(of.incarnation, &rules, 10_000).await.unwrap().is_some()
    };
    assert_eq!((inspect(&second).await, inspect(&first).await, inspect(&second).await), (true, false, true));
    let ago = async |seconds: i32| {
        let sql = "update wh_inspection set inspected_at = clock_timestamp() - $1::int4 * interval '1 s'";
        space.schema.client().await.execute(sql, &[&seconds]).await.unwrap();
    };
    ago(100).await;
    assert!(!inspect(&first).await, "it may be a round late");
    ago(200).await;
    assert_eq!((inspect(&first).await, inspect(&second).await), (true, false));

    let transaction = client.transaction().await.unwrap();
    let sql = "select inspected from inspect($1, 0, 1000, 1000)";
    ago(200).await;
    assert!(transaction.query_one(sql, &[&second.incarnation.number]).await.unwrap().get::<_, bool>(0));
    assert!(!inspect(&first).await, "somebody is at it");
    transaction.rollback().await.unwrap();
    assert!(inspect(&first).await, "what did not come to its end does not count");
}

#[tokio::test]
async fn dead_letters_go_when_their_time_is_over_but_for_those_that_hold_a_stream() {
    let space = Space::new().await;
    let (client, owner) = (space.schema.client().await, space.owner(1).await);
    let held = stream_in(1);
    let sql = "insert into wh_dead_letter (stream_seq, version, lane_id, partition, attempts, reason, destination,
            error_fingerprint, dead_at)
        select 1, 0, case n when 1 then $1 else gen_random_uuid() end, 1, 1, 2, 'somewhere', '',
            now() - case when n <= 1200 then 10 else 1 end * interval '1 day'
        from generate_series(1, 1203) n";
    client.execute(sql, &[&held]).await.unwrap();
    let sql = "insert into wh_parked (stream_seq, due, lane_id, partition, attempts, reason, destination, held)
        values (1, now(), $1, 1, 1, 2, 'somewhere', true)";
    client.execute(sql, &[&held]).await.unwrap();
    let trimmed = async |days: u32| {
        let rules = InspectRules { dead_letters_days: days, unpublished_ms: 1_000, stuck_ms: 1_000 };
        let found = owner.coordination.inspect(owner.incarnation, &rules, 10_000).await.unwrap();
        found.unwrap().dead_letters_trimmed
    };
    assert_eq!((trimmed(0).await, trimmed(11).await), (0, 0));
    assert_eq!((trimmed(5).await, trimmed(5).await, trimmed(5).await), (1_000, 199, 0), "a bounded step at a time");
    assert_eq!(count(&client, "wh_dead_letter").await, 4);
    client.execute("update wh_parked set held = false", &[]).await.unwrap();
    let mut operator = space.schema.client().await;
    let transaction = operator.transaction().await.unwrap();
    transaction.execute("select from wh_dead_letter for update", &[]).await.unwrap();
    assert_eq!(trimmed(5).await, 0, "an operator has it in hand");
    transaction.rollback().await.unwrap();
    assert_eq!(trimmed(5).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_shows_what_its_sentinel_found() {
    let schema = schema();
    let (ward, mut config) = (Ward::default(), config(&schema));
    config.retry.on_dead = OnDead::Hold;
    config.sentinel.stuck_ms = 1_000;
    let engine = Engine::builder(config).transport(ward.transport()).migrate(true).start().await.unwrap();
    let client = schema.client().await;
    let ill = RawMessage::event("ward.told", b"ill").stream(Uuid::now_v7()).to(&["ward"]);
    engine.enqueue(&ill).await.unwrap();
    until_dead(&client, 1).await;
    let seen = || async { engine.sentinel().stuck_now.get() == 1 };
    eventually("it is seen", SOON, seen).await;
    assert_eq!(engine.sentinel().held_now.get(), 1);
    assert!(engine.sentinel().stuck_age_ms_now.get() >= 1_000);
    engine.shutdown(SOON).await;
}
