//! Several engines on one schema: they share the partitions, hand them over without a copy, and follow the one that
//! ends.

use std::time::Duration;

use corelane::{Config, Engine, ListenerHealth, RawMessage};
use uuid::Uuid;

use crate::engine::{Sink, config};
use crate::support::{TestSchema, eventually, schema};

const PARTITIONS: usize = 16;

/// A lease so long that nothing in these tests waits for one of its steps: only what is noticed at once is in time.
fn patient(schema: &TestSchema) -> Config {
    let mut config = config(schema);
    for (key, value) in [("lease.ttl_ms", "120000"), ("lease.margin_ms", "5000"), ("publish.timeout_ms", "4000")] {
        config.set(key, value).unwrap();
    }
    config
}

async fn start(config: &Config, sink: &Sink) -> Engine {
    Engine::builder(config.clone()).transport(sink.transport()).migrate(true).start().await.unwrap()
}

async fn holds(what: &str, engine: &Engine, partitions: usize) {
    eventually(what, Duration::from_secs(10), || async { engine.partitions_held() == partitions }).await;
}

/// Stores on 40 streams until told to stop, now by the one and now by the other; answers how many.
async fn store(engines: &[&Engine], rounds: usize) -> usize {
    let streams: Vec<Uuid> = (0..40).map(|_| Uuid::new_v4()).collect();
    let mut stored = 0;
    for round in 0..rounds {
        let messages: Vec<RawMessage<'_>> = streams
            .iter()
            .map(|stream| RawMessage::event("test.counted", b"{}").stream(*stream).to(&["somewhere"]))
            .collect();
        for outcome in engines[round % engines.len()].enqueue_many(messages).await {
            outcome.unwrap();
            stored += 1;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    stored
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_comes_gets_its_share_and_one_that_goes_leaves_it_without_a_copy() {
    let schema = schema();
    let (sink, config) = (Sink::default(), patient(&schema));
    let first = start(&config, &sink).await;
    holds("the first has all", &first, PARTITIONS).await;
    let one = [&first];
    let (second, stored) = tokio::join!(start(&config, &sink), store(&one, 200));
    holds("the first has half", &first, PARTITIONS / 2).await;
    holds("the second has half", &second, PARTITIONS / 2).await;
    let both = store(&[&first, &second], 200).await;
    let third = start(&config, &sink).await;
    holds("the third has its share", &third, PARTITIONS / 3).await;
    let two = [&first, &third];
    let (report, three) = tokio::join!(second.shutdown(Duration::from_secs(10)), store(&two, 300));
    assert!(report.drained, "{report:?}");
    holds("the first has half again", &first, PARTITIONS / 2).await;
    holds("the third has the other half", &third, PARTITIONS / 2).await;
    let stored = stored + both + three;
    sink.wait_for(stored).await;
    sink.assert_ordered();
    // A call's messages are a transaction: of one that had to wait for the claim a part may be out already.
    let copies = sink.len() - stored;
    assert!(copies <= 3 * 40, "{copies} copies in three changes of the partitions");
    for engine in [first, third] {
        engine.shutdown(Duration::from_secs(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_whose_connection_ends_is_followed_or_proves_itself_alive_at_once() {
    let schema = schema();
    let (sink, config) = (Sink::default(), patient(&schema));
    let first = start(&config, &sink).await;
    holds("the first has all", &first, PARTITIONS).await;
    let second = start(&config, &sink).await;
    holds("the second has half", &second, PARTITIONS / 2).await;
    let client = schema.client().await;
    let holder = "select l.pid, l.objid::int8 from pg_locks l where l.locktype = 'advisory' and l.granted
        and l.classid = wh_lock_class(4)::oid and l.objsubid = 2 and l.mode = 'ExclusiveLock'
        and l.objid::int8 = (select max(number) from wh_instance where state = 0)";
    let before = client.query_one(holder, &[]).await.unwrap();
    let (pid, number): (i32, i64) = (before.get(0), before.get(1));
    client.execute("select pg_terminate_backend($1)", &[&pid]).await.unwrap();
    // It is followed and comes back as another incarnation, or has its lock again before that: its lease runs for two
    // minutes, so nothing waits for it.
    eventually("it has a connection again, and they share", Duration::from_secs(60), || async {
        let now = client.query_opt(holder, &[]).await.unwrap();
        now.is_some_and(|now| now.get::<_, i32>(0) != pid && now.get::<_, i64>(1) >= number)
            && first.partitions_held() == PARTITIONS / 2
            && second.partitions_held() == PARTITIONS / 2
    })
    .await;
    let stored = store(&[&first, &second], 50).await;
    sink.wait_for(stored).await;
    sink.assert_ordered();
    for engine in [second, first] {
        engine.shutdown(Duration::from_secs(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_process_stored_is_published_without_waiting_for_a_poll() {
    let schema = schema();
    let sink = Sink::default();
    let mut config = patient(&schema);
    // No poll and no look at the members is due while this test waits: only what is heard is in time.
    for key in ["claim.poll_relaxed_ms", "claim.poll_ms_max", "lease.ttl_ms"] {
        config.set(key, "600000").unwrap();
    }
    config.set("claim.poll_ms", "60000").unwrap();
    let owner = start(&config, &sink).await;
    holds("the owner has all", &owner, PARTITIONS).await;
    let hears = || async { owner.listener_health() == ListenerHealth::Healthy };
    eventually("the owner hears", Duration::from_secs(60), hears).await;
    let producer = Engine::builder(config.clone()).produce_only().start().await.unwrap();
    assert_eq!(producer.partitions_held(), 0);
    let stored = store(&[&producer], 5).await;
    sink.wait_for(stored).await;
    sink.assert_ordered();
    assert_eq!(producer.partitions_held(), 0, "one that only stores owns nothing");
    for engine in [producer, owner] {
        engine.shutdown(Duration::from_secs(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_service_does_not_share_the_partitions() {
    let schema = schema();
    let (sink, config) = (Sink::default(), patient(&schema));
    let owner = start(&config, &sink).await;
    holds("the owner has all", &owner, PARTITIONS).await;
    let client = schema.client().await;
    let register = "select * from register_instance(gen_random_uuid(), 'another', 'x', 10000, 1, $1)";
    let refused = client.query(register, &[&true]).await.unwrap_err();
    assert_eq!(refused.code().unwrap().code(), "CL008");
    client.query(register, &[&false]).await.unwrap();
    holds("the owner has all", &owner, PARTITIONS).await;
    owner.shutdown(Duration::from_secs(10)).await;
}

/// A stop does not keep the partitions until the last call is answered: what waits for a stream that a transaction
/// elsewhere holds is stored later, by one who owns nothing any more.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_stops_hands_over_at_once_and_stores_what_still_waits() {
    let schema = schema();
    let (sink, config) = (Sink::default(), patient(&schema));
    let leaver = start(&config, &sink).await;
    holds("the first has all", &leaver, PARTITIONS).await;
    let stayer = start(&config, &sink).await;
    holds("they share", &stayer, PARTITIONS / 2).await;
    holds("they share", &leaver, PARTITIONS / 2).await;
    let stored = store(&[&leaver, &stayer], 20).await;
    sink.wait_for(stored).await;

    let stream = Uuid::new_v4();
    let client = schema.client().await;
    client.batch_execute("begin").await.unwrap();
    let call = "select * from store_outbox_messages(array[gen_random_uuid()], array[$1::uuid], array['test.counted'], \
                array['{}'::bytea], array[true], array['somewhere'])";
    client.execute(call, &[&stream]).await.unwrap();
    let waits = leaver.clone();
    let waiting = tokio::spawn(async move {
        waits.enqueue(&RawMessage::event("test.counted", b"{}").stream(stream).to(&["somewhere"])).await
    });
    eventually("it waits for the stream", Duration::from_secs(10), || async {
        leaver.shards().iter().any(|shard| shard.metrics.units_busy.get() > 0)
    })
    .await;
    let leaving = tokio::spawn(async move { leaver.shutdown(Duration::from_secs(20)).await });
    holds("the other has all, though the call still waits", &stayer, PARTITIONS).await;
    assert!(!waiting.is_finished());
    client.batch_execute("commit").await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap().stream_seq, 2);
    assert!(leaving.await.unwrap().drained);
    sink.wait_for(stored + 2).await;
    sink.assert_ordered();
    assert_eq!(sink.len(), stored + 2, "no copy");
    stayer.shutdown(Duration::from_secs(10)).await;
}

/// A worker that speaks SQL and calls no more counts as a member until its lease is over: nothing is left to it.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_stops_beside_a_silent_worker_publishes_what_is_its_own() {
    let schema = schema();
    let (sink, mut config) = (Sink::default(), patient(&schema));
    for key in ["claim.poll_ms", "claim.poll_ms_max"] {
        config.set(key, "60000").unwrap();
    }
    let leaver = start(&config, &sink).await;
    holds("it has all", &leaver, PARTITIONS).await;
    let client = schema.client().await;
    let worker = "select * from process_work_batch(gen_random_uuid(), (select min(service_name) from wh_instance), 'worker', 1, p_lease_seconds => 600)";
    client.query(worker, &[]).await.unwrap();
    holds("they are to share", &leaver, PARTITIONS / 2).await;
    let call = "select * from store_outbox_messages(array[gen_random_uuid()], array[$1::uuid], array['test.counted'], \
                array['{}'::bytea], array[true], array['somewhere'])";
    let held = leaver.held_partitions();
    let mut stored = 0;
    for stream in (0..200).map(|_| Uuid::new_v4()).filter(|stream| held.contains(&leaver.partition_of(*stream))) {
        client.execute(call, &[&stream]).await.unwrap();
        stored += 1;
    }
    let report = leaver.shutdown(Duration::from_secs(10)).await;
    assert!(report.drained, "{report:?}");
    assert_eq!(sink.len(), stored, "what it held is published, and not left to one that does not come");
}
