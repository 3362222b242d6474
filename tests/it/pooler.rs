//! Engines behind a pooler in transaction mode: everything but LISTEN and the session lock goes through it, and with no
//! direct connection at all those two are done without.

use std::time::{Duration, Instant};

use corelane::message::Enqueue;
use corelane::private_postgres::PrivatePostgres;
use corelane::{Config, Engine, ListenerHealth, RawMessage, Wishes};
use uuid::Uuid;

use crate::engine::{Sink, config};
use crate::outbox_kit::call;
use crate::pooler_kit::Pooler;
use crate::process_kit::{CasePlan, CaseProcess, Manner, assert_ordered, first_copies, journal};
use crate::store_kit::message;
use crate::support::{TestSchema, connect, eventually, own_cluster, schema_on};

const PARTITIONS: usize = 16;
const END: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(60);

/// A server, a pooler before it and a schema; `None` where there is no pooler.
fn place() -> Option<(TestSchema, Pooler, PrivatePostgres)> {
    let cluster = own_cluster();
    let pooler = Pooler::before(&cluster)?;
    Some((schema_on(cluster.url("postgres")), pooler, cluster))
}

/// Without a direct connection.
fn alone(schema: &TestSchema, pooler: &Pooler) -> Config {
    let mut config = config(schema);
    config.database.url = pooler.url();
    config.set("database.direct", "false").unwrap();
    config
}

async fn start(config: &Config, sink: &Sink) -> Engine {
    Engine::builder(config.clone()).transport(sink.transport()).migrate(true).start().await.unwrap()
}

async fn hold(what: &str, held: &[(&Engine, usize)]) {
    eventually(what, PATIENCE, || async { held.iter().all(|(engine, count)| engine.partitions_held() == *count) })
        .await;
}

async fn store(engines: &[&Engine], streams: &[Uuid], rounds: usize) -> usize {
    for round in 0..rounds {
        let of = |stream: &Uuid| RawMessage::event("test.counted", b"{}").stream(*stream).to(&["somewhere"]);
        for outcome in engines[round % engines.len()].enqueue_many(streams.iter().map(of).collect::<Vec<_>>()).await {
            outcome.unwrap();
        }
    }
    streams.len() * rounds
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_pooler_alone_everything_is_stored_published_in_order_and_handed_over() {
    let Some((schema, pooler, _cluster)) = place() else { return };
    let (sink, config) = (Sink::default(), alone(&schema, &pooler));
    let first = start(&config, &sink).await;
    hold("the first has all", &[(&first, PARTITIONS)]).await;
    assert_eq!(first.listener_health(), ListenerHealth::Off);
    let streams: Vec<Uuid> = (0..40).map(|_| Uuid::new_v4()).collect();
    let one = [&first];
    // Stored while the second comes and takes its half.
    let (second, mut stored) = tokio::join!(start(&config, &sink), store(&one, &streams, 60));
    hold("they share", &[(&first, PARTITIONS / 2), (&second, PARTITIONS / 2)]).await;
    stored += store(&[&first, &second], &streams, 60).await;
    // A unit larger than a flush, in a transaction of several calls.
    let mut large = second.unit_of_work();
    for turn in 0..6_000 {
        let message = RawMessage::event("test.large", b"{}").stream(streams[turn % streams.len()]);
        large.push(&message.to(&["somewhere"])).unwrap();
    }
    stored += large.commit().await.unwrap().len();
    // A transaction of the caller's own, through the pooler too; and one that is due later.
    let mut client = connect(&pooler.url()).await;
    let transaction = client.transaction().await.unwrap();
    let enlisted = RawMessage::event("test.enlisted", b"{}").stream(streams[0]).to(&["somewhere"]);
    let pushed = first.outbox().push(&enlisted).unwrap().enlist(&transaction).await.unwrap();
    transaction.commit().await.unwrap();
    pushed.announce();
    let due = Wishes::new().due(std::time::SystemTime::now() + Duration::from_millis(300));
    first.enqueue(&RawMessage::command("test.later", b"{}").to(&["somewhere"]).with(due)).await.unwrap();
    stored += 2;
    // One leaves: the other has all again.
    let two = [&first];
    let (report, more) = tokio::join!(second.shutdown(END), store(&two, &streams, 60));
    assert!(report.drained, "{report:?}");
    stored += more;
    hold("the first has all again", &[(&first, PARTITIONS)]).await;
    sink.wait_for(stored).await;
    sink.assert_ordered();
    assert!(first.shutdown(END).await.drained);
    // No session setting of theirs is left on the pooler's connections, nor a statement's name.
    for _ in 0..8 {
        let client = connect(&pooler.url()).await;
        let left = "select current_setting('lock_timeout') || (select count(*) from pg_prepared_statements)";
        let rows = client.query_typed(left, &[]).await.unwrap();
        assert_eq!(rows[0].get::<_, String>(0), "00");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_behind_a_pooler_alone_that_is_killed_is_followed_within_15_s() {
    let Some((schema, pooler, _cluster)) = place() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal");
    let url = pooler.url();
    let settings = [("database.url", url.as_str()), ("database.direct", "false")];
    let plan = |instance| CasePlan {
        schema: &schema,
        instance,
        journal: &path,
        manner: Manner::Accept,
        settings: &settings,
        environment: &[],
    };
    let mut first = CaseProcess::start(&plan("a"));
    let second = CaseProcess::start(&plan("b"));
    eventually("they share", PATIENCE, || async {
        first.status().0 == PARTITIONS / 2 && second.status().0 == PARTITIONS / 2
    })
    .await;
    let streams: Vec<Uuid> = (0..PARTITIONS * 4).map(|_| Uuid::new_v4()).collect();
    let texts: Vec<(Uuid, &str)> = streams.iter().map(|stream| (*stream, "before")).collect();
    first.store(&texts);
    first.kill();
    let killed = Instant::now();
    // Stored by the one that is left; half of it is the dead one's to publish.
    let texts: Vec<(Uuid, &str)> = streams.iter().map(|stream| (*stream, "after")).collect();
    second.store(&texts);
    let all = 2 * streams.len();
    eventually("all is published", PATIENCE, || async { first_copies(&journal(&path)).len() >= all }).await;
    let took = killed.elapsed();
    assert!(took <= Duration::from_secs(40), "{took:?}");
    assert_ordered(&journal(&path));
}

#[tokio::test(flavor = "multi_thread")]
async fn beside_a_pooler_a_direct_connection_listens_and_holds_the_session_lock() {
    let Some((schema, pooler, cluster)) = place() else { return };
    let sink = Sink::default();
    let mut config = config(&schema);
    config.database.url = pooler.url();
    config.database.direct_url = cluster.url("postgres");
    for key in ["claim.poll_relaxed_ms", "claim.poll_ms_max", "lease.ttl_ms"] {
        config.set(key, "600000").unwrap();
    }
    config.set("claim.poll_ms", "60000").unwrap();
    let engine = start(&config, &sink).await;
    hold("it has all", &[(&engine, PARTITIONS)]).await;
    eventually("it listens", PATIENCE, || async { engine.listener_health() == ListenerHealth::Healthy }).await;
    let client = schema.client().await;
    let locked = "select i.direct and i.number::oid in (select objid from pg_locks where locktype = 'advisory' and \
                  classid = wh_lock_class(4)::oid) from wh_instance i where i.state = 0";
    assert!(client.query_one(locked, &[]).await.unwrap().get::<_, bool>(0));
    // Nobody polls for ten minutes, nobody looks at the members for two: it is heard.
    let stored = call(&client, &[message(Uuid::new_v4(), "said")]).await.unwrap().len();
    client.query_one("select announce()", &[]).await.unwrap();
    sink.wait_for(stored).await;
    engine.shutdown(END).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn statements_without_names_do_on_a_connection_of_ours_too() {
    let schema = crate::support::schema();
    let (sink, mut config) = (Sink::default(), config(&schema));
    config.set("database.prepared_statements", "off").unwrap();
    let engine = start(&config, &sink).await;
    hold("it has all", &[(&engine, PARTITIONS)]).await;
    let streams: Vec<Uuid> = (0..8).map(|_| Uuid::new_v4()).collect();
    let stored = store(&[&engine], &streams, 5).await;
    sink.wait_for(stored).await;
    sink.assert_ordered();
    engine.shutdown(END).await;
}
