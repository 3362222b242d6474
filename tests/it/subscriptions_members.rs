//! Members of a subscription share its partitions, follow each other, and never write for one another.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corelane::seam::store::StoreError;
use corelane::{Engine, Error, EventBatch, MemoryTransport, RawMessage, Subscription};
use uuid::Uuid;

use crate::engine::{Sink, config, start};
use crate::outbox_kit::call;
use crate::store_kit::{Message, PARTITIONS, Space, event};
use crate::subscription_kit::{Follower, Read, assert_at_least_once, assert_complete, read};
use crate::support::{TestSchema, eventually, schema};

const PATIENCE: Duration = Duration::from_secs(60);

fn refused_with(outcome: Result<(), StoreError>) -> String {
    match outcome {
        Err(StoreError::Refused { sqlstate, .. }) => sqlstate,
        other => panic!("not refused: {other:?}"),
    }
}

#[tokio::test]
async fn members_share_evenly_and_one_that_is_gone_is_followed() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let streams: Vec<Uuid> = (0..40).map(|_| Uuid::now_v7()).collect();
    let append = async || {
        let events: Vec<Message> = streams.iter().map(|stream| event(*stream, "e")).collect();
        call(&client, &events).await.unwrap();
    };
    append().await;
    let mut a = Follower::join(&space, "shared", Some(0)).await;
    assert_eq!(a.runs.partition_count(), PARTITIONS as usize);
    let mut read = a.drain().await;
    let mut b = Follower::join(&space, "shared", Some(0)).await;
    assert_eq!((b.runs.partition_count(), a.share().await, b.share().await), (0, 8, 8));
    append().await;
    read.extend(a.drain().await);
    read.extend(b.drain().await);
    assert_eq!(assert_complete(&read), 80, "nothing twice: the place was handed over");
    // A third one moves its own share only.
    let fences = |follower: &Follower| -> HashMap<i32, i64> {
        follower.runs.runs.iter().flat_map(|run| &run.held).map(|held| (held.partition, held.fence)).collect()
    };
    let mut c = Follower::join(&space, "shared", Some(0)).await;
    for _ in 0..3 {
        let _ = (a.share().await, b.share().await, c.share().await);
    }
    let mut held = [&a, &b, &c].map(|of| of.runs.partition_count());
    held.sort_unstable();
    assert_eq!(held, [5, 5, 6]);

    // One writes and reads on, and its connection ends: what it has not written down comes again.
    a.write().await.unwrap();
    let before = fences(&b);
    append().await;
    read.extend(a.drain().await);
    let held = a.runs.partition_count();
    let gone = a.member.incarnation;
    drop(a);
    let is_gone = "select not exists (select from pg_locks where locktype = 'advisory' and objid = $1::int4::oid
        and classid = wh_lock_class(4)::oid)";
    eventually("its end is seen", PATIENCE, async || client.query_one(is_gone, &[&gone]).await.unwrap().get(0)).await;
    // Its session lock is free: the next looks take what it had.
    b.share().await;
    assert_eq!(c.share().await + b.share().await, PARTITIONS as usize);
    assert!(before.keys().all(|partition| fences(&b).contains_key(partition)), "what b had stays with it");
    assert!(held >= 5);
    read.extend(b.drain().await);
    read.extend(c.drain().await);
    assert_eq!(assert_at_least_once(&read), 120);
    let members = "select array_agg(incarnation order by incarnation) from wh_subscription_member";
    let members: Vec<i32> = client.query_one(members, &[]).await.unwrap().get(0);
    assert_eq!(members, [b.member.incarnation, c.member.incarnation]);
}

#[tokio::test]
async fn a_checkpoint_of_an_owner_before_is_refused() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    call(&client, &[event(Uuid::now_v7(), "e")]).await.unwrap();
    let mut old = Follower::join(&space, "fenced", Some(0)).await;
    assert_eq!(old.page().await.len(), 1);
    // It sleeps: its lease is over by the database's clock, though its connection lives.
    let sleeps = "update wh_instance set lease_until = '-infinity' where number = $1";
    client.execute(sleeps, &[&old.member.incarnation]).await.unwrap();
    let mut new = Follower::join(&space, "fenced", Some(0)).await;
    assert_eq!(new.runs.partition_count(), PARTITIONS as usize);
    assert_eq!(refused_with(old.write().await), "CL020");
    assert_eq!(new.texts().await, ["e"], "its place was not moved by the other");
    new.write().await.unwrap();
    let shared = old.statements.share(&old.client, old.member, 1_000).await.unwrap();
    assert!(!shared.alive && shared.written.is_empty());

    // A transaction that is still to commit holds the row: whoever takes waits for the next look.
    let mut holder = space.schema.client().await;
    let transaction = holder.transaction().await.unwrap();
    for run in &new.runs.runs {
        new.statements.checkpoint(&transaction, new.member, run).await.unwrap();
    }
    client.execute(sleeps, &[&new.member.incarnation]).await.unwrap();
    let mut third = Follower::join(&space, "fenced", Some(0)).await;
    assert_eq!(third.runs.partition_count(), 0, "nothing is taken under it");
    transaction.commit().await.unwrap();
    assert_eq!(third.share().await, PARTITIONS as usize);
    assert_eq!(third.texts().await, Vec::<String>::new());
}

#[tokio::test]
async fn a_checkpoint_twice_or_before_the_events_is_refused() {
    let space = Space::new().await;
    let mut client = space.schema.client().await;
    let mut follower = Follower::join(&space, "twice", Some(0)).await;
    let early = client.transaction().await.unwrap();
    early.batch_execute("select pg_current_xact_id()").await.unwrap();
    let other = space.schema.client().await;
    call(&other, &[event(Uuid::now_v7(), "e")]).await.unwrap();
    follower.page().await;
    let run = follower.run().clone();
    let refusal = follower.statements.checkpoint(&early, follower.member, &run).await;
    assert_eq!(crate::outbox_kit::code(refusal), "CL021");
    drop(early);
    follower.statements.checkpoint(&other, follower.member, &run).await.unwrap();
    let refusal = follower.statements.checkpoint(&other, follower.member, &run).await;
    assert_eq!(crate::outbox_kit::code(refusal), "CL020");
}

#[tokio::test]
async fn subscriptions_of_two_schemas_and_odd_names_are_strangers() {
    let odd = schema();
    let odd = TestSchema { name: format!("{} \"it's\" $$", odd.name), url: odd.url.clone() };
    let (one, other) = (Space::new().await, Space::in_schema(odd).await);
    let name = "it's \"odd\" $$ ünï";
    let (mut a, mut b) = (Follower::join(&one, name, Some(0)).await, Follower::join(&other, name, Some(0)).await);
    assert_eq!((a.runs.partition_count(), b.runs.partition_count()), (16, 16));
    let client = one.schema.client().await;
    call(&client, &[event(Uuid::now_v7(), "one")]).await.unwrap();
    assert_eq!((a.texts().await, b.texts().await), (vec!["one".to_owned()], Vec::new()));
    let remove = async || client.query_one("select remove_subscription($1)", &[&name]).await.unwrap().get::<_, bool>(0);
    assert_eq!((remove().await, remove().await), (true, false));
    assert!(!a.statements.share(&a.client, a.member, 1_000).await.unwrap().alive, "removed under it");
    assert_eq!(b.share().await, 16);
}

/// As `sql/README.md` tells a program in any language.
#[tokio::test]
async fn a_follower_that_speaks_sql_alone_has_each_effect_once() {
    let space = Space::new().await;
    let (client, mut effects) = (space.schema.client().await, space.schema.client().await);
    let stream = Uuid::now_v7();
    call(&client, &(1..=5).map(|n| event(stream, &n.to_string())).collect::<Vec<_>>()).await.unwrap();
    client.batch_execute("create table effects (text text)").await.unwrap();
    let incarnation: i32 = client
        .query_one(
            "select number from register_instance(gen_random_uuid(), 'billing', 'host-7', 10000, 1, false, true)",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    let sql = "select subscription from join_subscription('order-summary', $1, 0)";
    let subscription: i32 = client.query_one(sql, &[&incarnation]).await.unwrap().get(0);
    for rolls_back in [true, false] {
        let sql = "select array_agg(partition order by partition), array_agg(fence order by partition),
            array_agg(resolved order by partition), min(floor) from share_subscription($1, $2, 10000)
            where partition is not null";
        let row = client.query_one(sql, &[&subscription, &incarnation]).await.unwrap();
        let (partitions, fences): (Vec<i32>, Vec<i64>) = (row.get(0), row.get(1));
        let (resolved, floor): (Vec<String>, i64) = (row.get(2), row.get(3));
        let sql = "select convert_from(payload, 'UTF8'), target, target_floor, whole, epoch is not null
            from read_subscription($1, $2, $3::text[]::pg_snapshot[], $4, null, 0, 0, false, null, null, false, null,
            '{test.}', 1000, 1000000)";
        let mut page = client.query(sql, &[&subscription, &partitions, &resolved, &floor]).await.unwrap();
        let place = page.pop().unwrap();
        assert!(place.get::<_, bool>(3) && place.get::<_, bool>(4), "everything is read");
        let transaction = effects.transaction().await.unwrap();
        for row in &page {
            transaction.execute("insert into effects values ($1)", &[&row.get::<_, &str>(0)]).await.unwrap();
        }
        let sql = "select checkpoint_subscription($1, $2, $3, $4, array_fill($5::text, array[cardinality($3::int4[])])::pg_snapshot[],
            $6, null, 0, 0, false)";
        let (target, floor): (String, i64) = (place.get(1), place.get(2));
        let own = (&subscription, &incarnation);
        transaction.execute(sql, &[own.0, own.1, &partitions, &fences, &target, &floor]).await.unwrap();
        if rolls_back {
            transaction.rollback().await.unwrap();
        } else {
            transaction.commit().await.unwrap();
        }
    }
    let texts: Vec<String> = client.query_one("select array_agg(text) from effects", &[]).await.unwrap().get(0);
    assert_eq!(texts, ["1", "2", "3", "4", "5"]);
    let behind = "select events from measure_subscription('order-summary')";
    assert_eq!(client.query_one(behind, &[]).await.unwrap().get::<_, i64>(0), 0);
    let left: i32 =
        client.query_one("select leave_subscription($1, $2)", &[&subscription, &incarnation]).await.unwrap().get(0);
    assert_eq!(left, PARTITIONS as i32);
}

async fn append(engine: &Engine, stream: Uuid, text: &str) {
    engine.enqueue(&RawMessage::event("test.seen", text.as_bytes()).stream(stream).to(&["sink"])).await.unwrap();
}

fn take(batch: &EventBatch, into: &Arc<Mutex<Vec<Read>>>) {
    into.lock().unwrap().extend(batch.events().iter().map(read));
}

async fn only_follows(space: &Space) -> Engine {
    let engine = Engine::builder(config(&space.schema)).transport(MemoryTransport::new(|_, _| {})).produce_only();
    engine.start().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engines_subscription_catches_up_then_follows_and_goes_on_where_it_stopped() {
    let space = Space::new().await;
    let engine = start(&space.schema, Sink::default().transport()).await;
    let stream = Uuid::now_v7();
    append(&engine, stream, "1").await;
    append(&engine, stream, "2").await;
    let mut subscription = engine.subscribe("orders").from_beginning().of_categories(["test."]).start().await.unwrap();
    let texts = |batch: &EventBatch| batch.events().iter().map(|event| read(event).text).collect::<Vec<_>>();
    let mut seen = Vec::new();
    while seen.len() < 2 {
        let batch = subscription.next().await.unwrap().unwrap();
        assert_eq!((batch.events()[0].type_name.as_str(), batch.attempt()), ("test.seen", 1));
        seen.extend(texts(&batch));
        batch.done();
    }
    assert_eq!(seen, ["1", "2"]);
    let mut appending = tokio::spawn({
        let engine = engine.clone();
        async move { append(&engine, stream, "3").await }
    });
    let batch = subscription.next().await.unwrap().unwrap();
    assert_eq!(texts(&batch), ["3"]);
    (&mut appending).await.unwrap();
    // One that is not done comes again, the same.
    drop(batch);
    let batch = subscription.next().await.unwrap().unwrap();
    assert_eq!((texts(&batch), batch.attempt()), (vec!["3".to_owned()], 2));
    batch.done();
    assert_eq!(subscription.lag().await.unwrap().events, 0);
    append(&engine, stream, "4").await;
    assert_eq!(subscription.lag().await.unwrap().events, 1);
    subscription.stop().await;

    let mut again = engine.subscribe("orders").from_beginning().start().await.unwrap();
    let batch = again.next().await.unwrap().unwrap();
    assert_eq!(texts(&batch), ["4"]);
    batch.done();
    engine.shutdown(Duration::from_secs(10)).await;
    assert!(again.next().await.unwrap().is_none(), "it ends with its engine");
    assert!(matches!(engine.subscribe("orders").start().await.err(), Some(Error::ShutDown)));
}

/// Follows until the engine ends: the effect and the checkpoint in one transaction, some of which do not commit.
fn consume(mut subscription: Subscription, schema: &TestSchema, failing: bool) -> tokio::task::JoinHandle<()> {
    let (url, name) = (schema.url.clone(), schema.name.clone());
    tokio::spawn(async move {
        let schema = std::mem::ManuallyDrop::new(TestSchema { url, name });
        let mut client = schema.client().await;
        let mut turn = 0;
        while let Some(batch) = subscription.next().await.unwrap() {
            turn += 1;
            let transaction = client.transaction().await.unwrap();
            for event in batch.events() {
                let sql = "insert into effects (stream_id, version, consumer) values ($1, $2, pg_backend_pid())";
                transaction.execute(sql, &[&event.stream_id, &event.version]).await.unwrap();
            }
            match batch.checkpoint(&transaction).await {
                Ok(()) if failing && turn % 3 == 0 => transaction.rollback().await.unwrap(),
                Ok(()) => transaction.commit().await.unwrap(),
                Err(Error::CheckpointLost) => transaction.rollback().await.unwrap(),
                Err(error) => panic!("{error}"),
            }
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn effects_with_the_checkpoint_happen_exactly_once_whoever_is_killed() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    client.batch_execute("create table effects (stream_id uuid, version int8, consumer int4)").await.unwrap();
    let publisher = start(&space.schema, Sink::default().transport()).await;
    let streams: Vec<Uuid> = (0..20).map(|_| Uuid::now_v7()).collect();
    let (mut engines, mut consumers) = (Vec::new(), Vec::new());
    for n in 0..3 {
        let engine = only_follows(&space).await;
        let subscription = engine.subscribe("effects").from_beginning().rows_max(7).start().await.unwrap();
        consumers.push(consume(subscription, &space.schema, n == 0));
        engines.push(engine);
    }
    let mut appended = 0_i64;
    for round in 0..30 {
        for stream in &streams {
            append(&publisher, *stream, "e").await;
            appended += 1;
        }
        if round % 6 == 5 {
            // The connection of a member ends under it, in whatever it is doing.
            let kill = "select pg_terminate_backend(a.pid) from pg_stat_activity a join pg_locks l using (pid)
                join wh_subscription_member m on l.objid = m.incarnation::oid
                where l.locktype = 'advisory' and l.classid = wh_lock_class(4)::oid order by random() limit 1";
            client.execute(kill, &[]).await.unwrap();
        }
    }
    let count = async || client.query_one("select count(*) from effects", &[]).await.unwrap().get::<_, i64>(0);
    eventually("all have had their effect", PATIENCE, async || count().await >= appended).await;
    // One that goes in order, and one without.
    let last = engines.pop().unwrap();
    last.shutdown(Duration::from_secs(10)).await;
    drop(engines.pop());
    for stream in &streams {
        append(&publisher, *stream, "e").await;
        appended += 1;
    }
    eventually("the others go on", PATIENCE, async || count().await >= appended).await;
    for engine in engines {
        engine.shutdown(Duration::from_secs(10)).await;
    }
    publisher.shutdown(Duration::from_secs(10)).await;
    for consumer in consumers {
        consumer.await.unwrap();
    }
    let sql = "select count(*), count(distinct (stream_id, version)), max(version) from effects";
    let row = client.query_one(sql, &[]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1), row.get::<_, i64>(2)), (appended, appended, 31));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_that_does_not_run_the_subscription_takes_nothing_of_it() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    // The program of the version before: it publishes, and knows nothing of the subscription.
    let old = start(&space.schema, Sink::default().transport()).await;
    let new = only_follows(&space).await;
    let mut subscription = new.subscribe("rolling").start().await.unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    for n in 0..20 {
        append(&old, Uuid::now_v7(), &n.to_string()).await;
    }
    while seen.lock().unwrap().len() < 20 {
        let batch = subscription.next().await.unwrap().unwrap();
        take(&batch, &seen);
        batch.done();
    }
    assert_eq!(assert_complete(&seen.lock().unwrap()), 20);
    let owners = "select count(*), count(distinct owner) from wh_subscription_partition where owner is not null";
    let row = client.query_one(owners, &[]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (16, 1));
    // The next instance is of the new version, and gets its share while the first one waits for events.
    let newer = only_follows(&space).await;
    let mut second = newer.subscribe("rolling").start().await.unwrap();
    let shares = async || {
        let row = client.query_one(owners, &[]).await.unwrap();
        (row.get::<_, i64>(0), row.get::<_, i64>(1)) == (16, 2)
    };
    eventually("both have a share", PATIENCE, shares).await;
    for _ in 0..40 {
        append(&old, Uuid::now_v7(), "e").await;
    }
    let mut count = [0, 0];
    while count[0] + count[1] < 40 {
        let (index, batch) = tokio::select! {
            batch = subscription.next() => (0, batch),
            batch = second.next() => (1, batch),
        };
        let batch = batch.unwrap().unwrap();
        count[index] += batch.events().len();
        batch.done();
    }
    assert!(count[0] > 0 && count[1] > 0, "{count:?}");
    assert_eq!(old.partitions_held(), 16, "the outbox's partitions are others");
    for engine in [old, new, newer] {
        engine.shutdown(Duration::from_secs(10)).await;
    }
}
