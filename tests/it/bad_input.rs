//! Bad input, each with one clear typed error, and nothing lost: what was good beside it is stored and published.

use std::time::Duration;

use corelane::message::Enqueue;
use corelane::seam::store::StoreError;
use corelane::store::sql::SCHEMA_VERSION;
use corelane::{Config, Engine, Error, MemoryTransport, RawMessage, TransportLimits, Wishes};
use uuid::Uuid;

use crate::engine::{Sink, config, start};
use crate::support::{eventually, own_cluster, schema};

async fn refused(config: Config) -> Error {
    let started = Engine::builder(config).transport(MemoryTransport::new(|_, _| {})).start().await;
    started.map(|_| ()).expect_err("must not start")
}

#[tokio::test]
async fn an_engine_that_cannot_be_right_does_not_start() {
    let schema = schema();
    let mut wrong = config(&schema);
    wrong.flush.rows_max = 90_000;
    let error = refused(wrong).await;
    assert!(
        matches!(&error, Error::Config(text) if text.starts_with("flush.rows_max = 90000: must be 1..=4096")),
        "{error}"
    );

    let mut elsewhere = config(&schema);
    elsewhere.shards.cores = vec![0, 4_095];
    let error = refused(elsewhere).await;
    assert!(
        matches!(&error, Error::Config(text) if text.starts_with("shards.cores = [0, 4095]: core ") && text.contains("must be out of ")),
        "{error}"
    );

    let error = refused(Config::default()).await;
    assert!(matches!(&error, Error::Config(text) if text.starts_with("database.url: ")), "{error}");

    // Installed by nobody yet.
    let error = refused(config(&schema)).await;
    assert!(matches!(&error, Error::Schema(text) if text.contains("migrate")), "{error}");

    let sink = Sink::default();
    start(&schema, sink.transport()).await.shutdown(Duration::from_secs(10)).await;
    let mut other = config(&schema);
    other.partitions.count = 32;
    let error = refused(other).await;
    assert!(matches!(&error, Error::Schema(text) if text.contains("32") && text.contains("16")), "{error}");

    let insert = "insert into wh_schema_migration values ('migration', '0999_later', 'abc', $1, '9.9.9')";
    schema.client().await.execute(insert, &[&(SCHEMA_VERSION + 1)]).await.unwrap();
    let error = refused(config(&schema)).await;
    assert!(matches!(&error, Error::Schema(text) if text.contains("9.9.9")), "{error}");
}

#[tokio::test]
async fn a_database_that_is_down_or_denies_is_named_without_the_password() {
    let mut down = Config::default();
    down.set("database.url", "host=127.0.0.1 port=1 user=someone password=secret dbname=none").unwrap();
    let error = refused(down).await;
    assert!(matches!(&error, Error::Store(StoreError::ConnectionLost(_))), "{error:?}");
    assert!(!error.to_string().contains("secret"), "{error}");

    let schema = schema();
    let mut nobody = config(&schema);
    nobody.set("database.url", &format!("{} user=no_such_role password=secret", keywords(&schema.url))).unwrap();
    let error = refused(nobody).await;
    assert!(matches!(&error, Error::Store(StoreError::Denied { .. })), "{error:?}");
    assert!(!error.to_string().contains("secret"), "{error}");
}

#[tokio::test]
async fn a_wrong_setting_of_the_database_names_its_key_once() {
    let schema = schema();
    for (key, value, expected) in [
        ("database.url", "dbname=none", "database.url names no host"),
        ("database.url", "host=h sslmode=often", "database.url: sslmode must be"),
        ("database.schema", "pg_mine", "database.schema: schema \"pg_mine\": the name begins with pg_"),
    ] {
        let mut wrong = config(&schema);
        wrong.set(key, value).unwrap();
        let error = refused(wrong).await;
        assert!(matches!(&error, Error::Config(text) if text.starts_with(expected)), "{error:?}");
        assert_eq!(error.to_string().matches(key).count(), 1, "{error}");
    }
}

#[tokio::test]
async fn a_unit_of_work_is_bounded_by_its_rows_as_well_as_by_its_bytes() {
    let schema = schema();
    let mut small = config(&schema);
    small.set("unit.bytes_max", "65536").unwrap();
    let engine = Engine::builder(small).migrate(true).transport(Sink::default().transport()).start().await.unwrap();
    let mut unit = engine.unit_of_work();
    // Hardly a byte of their own: what they take is their rows.
    let refused = (0..1_000).find_map(|_| unit.push(&RawMessage::command("t", b"")).err());
    let Some(Error::MessageLimit { what, allowed, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!((what, allowed.as_str()), ("size of its unit of work", "0..=65536 bytes (unit.bytes_max)"));
    let kept = unit.len();
    assert!((200..500).contains(&kept), "{kept} messages");
    assert_eq!(unit.commit().await.unwrap().len(), kept);
}

/// A URL's host and database as a `key=value` line.
fn keywords(url: &str) -> String {
    let parsed: tokio_postgres::Config = url.parse().expect("url");
    let host = match &parsed.get_hosts()[0] {
        tokio_postgres::config::Host::Tcp(host) => host.clone(),
        tokio_postgres::config::Host::Unix(path) => path.display().to_string(),
    };
    let port = parsed.get_ports().first().copied().unwrap_or(5432);
    format!("host={host} port={port} dbname={}", parsed.get_dbname().unwrap_or("postgres"))
}

#[tokio::test]
async fn a_wrong_password_is_denied() {
    let cluster = own_cluster();
    let client = crate::support::connect(&cluster.url("postgres")).await;
    client.batch_execute("create role guarded login password 'right'").await.unwrap();
    let rules = cluster.data_directory().join("pg_hba.conf");
    let before = std::fs::read_to_string(&rules).unwrap();
    std::fs::write(&rules, format!("local all guarded scram-sha-256\n{before}")).unwrap();
    client.batch_execute("select pg_reload_conf()").await.unwrap();
    let line = keywords(&cluster.url("postgres"));
    // The reload is done by the server when it gets to it.
    eventually("the rule is in force", Duration::from_secs(10), || async {
        let mut wrong = Config::default();
        wrong.set("database.url", &format!("{line} user=guarded password=wrong-one")).unwrap();
        let error = refused(wrong).await;
        assert!(!error.to_string().contains("wrong-one"), "{error}");
        matches!(&error, Error::Store(StoreError::Denied { sqlstate, .. }) if sqlstate == "28P01")
    })
    .await;
    let mut right = Config::default();
    right.set("database.url", &format!("{line} user=guarded password=right")).unwrap();
    let error = refused(right).await;
    assert!(matches!(&error, Error::Schema(_)), "past the password: {error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_bad_message_gets_its_error_and_its_neighbours_their_receipts() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let stream = Uuid::new_v4();
    let huge = vec![b' '; corelane::limits::PAYLOAD_BYTES_MAX + 1];
    let event = |payload| RawMessage::event("test.bad-input", payload).stream(stream).to(&["sink"]);
    let none = Wishes::new();
    let messages = vec![
        event(b"{\"n\":1}").with(none),
        event(b"{\"n\":").checked().with(none),
        event(b"{}").stream(Uuid::nil()).with(none),
        event(&huge).with(none),
        event(b"{}").with(none.due(std::time::SystemTime::now())),
        event(b"{}").with(none.message_id(Uuid::nil())),
        // Case nul: as bytes they are stored as they came.
        event(b"{\"a\":\"\\u0000\"}").checked().with(none),
        event(b"\0\xff\xfe").with(none),
        RawMessage::event("test.bad-input", b"{}").to(&["sink"]).with(none),
    ];
    let outcomes = engine.enqueue_many(messages).await;
    let kinds: Vec<String> = outcomes
        .iter()
        .map(|outcome| match outcome {
            Ok(receipt) => format!("{}.{}", receipt.stream_seq, receipt.version),
            Err(Error::InvalidJson { offset, .. }) => format!("json at {offset}"),
            Err(Error::InvalidStreamId) => "stream".to_owned(),
            Err(Error::MessageLimit { what, .. }) => (*what).to_owned(),
            Err(Error::ScheduledEvent { .. }) => "scheduled".to_owned(),
            Err(other) => other.to_string(),
        })
        .collect();
    assert_eq!(kinds, ["1.1", "json at 5", "stream", "payload", "scheduled", "message id", "2.2", "3.3", "1.0"]);
    sink.wait_for(4).await;
    engine.shutdown(Duration::from_secs(10)).await;
    let mut payloads: Vec<_> = sink.all().into_iter().filter(|seen| seen.stream_id.is_some()).collect();
    payloads.sort_by_key(|seen| seen.stream_seq);
    let payloads: Vec<&[u8]> = payloads.iter().map(|seen| seen.payload.as_slice()).collect();
    assert_eq!(payloads, [&b"{\"n\":1}"[..], b"{\"a\":\"\\u0000\"}", b"\0\xff\xfe"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_message_in_a_unit_of_work_leaves_the_rest_to_the_caller() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let good = RawMessage::event("test.unit", b"{}").stream(Uuid::new_v4()).to(&["sink"]);
    let mut unit = engine.unit_of_work();
    unit.push(&good).unwrap();
    assert!(matches!(unit.push(&good.stream(Uuid::nil())), Err(Error::InvalidStreamId)));
    drop(unit);
    assert!(corelane::UnitOfWork::dropped_count() > 0);
    let mut unit = engine.unit_of_work();
    unit.push(&good).unwrap();
    assert_eq!(unit.commit().await.unwrap()[0].version, 1, "the dropped one stored nothing");
    sink.wait_for(1).await;
    engine.shutdown(Duration::from_secs(10)).await;
    assert_eq!(sink.len(), 1);
    assert!(matches!(engine.enqueue(&good).await, Err(Error::ShutDown)));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_transport_cannot_take_goes_to_the_dead_letters_and_its_neighbours_go_out() {
    let schema = schema();
    let sink = Sink::default();
    let limits = TransportLimits { message_bytes_max: 2_000, ..TransportLimits::default() };
    let engine = start(&schema, sink.transport().with_limits(limits)).await;
    let large = vec![b'1'; 5_000];
    let message = |payload| RawMessage::command("test.size", payload).stream(Uuid::new_v4()).to(&["sink"]);
    let outcomes = engine.enqueue_many([message(b"1"), message(&large), message(b"2")]).await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    sink.wait_for(2).await;
    let client = schema.client().await;
    let dead = || async {
        let statement = "select message_id, reason, attempts, octet_length(payload), error from wh_dead_letter";
        client.query(statement, &[]).await.unwrap()
    };
    eventually("a dead letter", Duration::from_secs(10), || async { dead().await.len() == 1 }).await;
    engine.shutdown(Duration::from_secs(10)).await;
    let rows = dead().await;
    assert_eq!(rows[0].get::<_, Uuid>(0), outcomes[1].as_ref().unwrap().message_id);
    assert_eq!((rows[0].get::<_, i16>(1), rows[0].get::<_, i32>(3)), (12, 5_000), "its reason, and its body kept");
    assert!(rows[0].get::<_, &str>(4).contains("the transport takes 2000"), "{}", rows[0].get::<_, &str>(4));
    assert_eq!(sink.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_shard_refuses_one_and_makes_many_wait() {
    let schema = schema();
    let sink = Sink::default();
    let mut narrow = config(&schema);
    narrow.ring.rows_max = 1;
    narrow.shards.count = 1;
    let engine = Engine::builder(narrow).transport(sink.transport()).migrate(true).start().await.expect("start");
    let stream = Uuid::new_v4();
    let message = RawMessage::event("test.full", b"{}").stream(stream).to(&["sink"]);
    // A caller's open transaction holds the stream: the engine's message on it waits, and fills the shard.
    let mut client = schema.client().await;
    let transaction = client.transaction().await.unwrap();
    let enlisted = engine.outbox().push(&message).unwrap().enlist(&transaction).await.unwrap();
    let waiting = tokio::spawn({
        let engine = engine.clone();
        async move {
            loop {
                // The other callers below may be in first: then it is this one's turn again.
                match engine.enqueue(&RawMessage::event("test.full", b"{}").stream(stream).to(&["sink"])).await {
                    Err(Error::Overloaded { .. }) => tokio::task::yield_now().await,
                    answer => return answer,
                }
            }
        }
    });
    let free = RawMessage::event("test.full", b"{}").stream(Uuid::new_v4()).to(&["sink"]);
    eventually("the shard is full", Duration::from_secs(10), || async {
        matches!(engine.enqueue(&free).await, Err(Error::Overloaded { shard: 0, rows_max: 1 }))
    })
    .await;
    let before = sink.len();
    let many = tokio::spawn({
        let engine = engine.clone();
        async move { engine.enqueue_many((0..10).map(|_| RawMessage::command("test.full", b"{}").to(&["sink"]))).await }
    });
    transaction.commit().await.unwrap();
    enlisted.announce();
    assert_eq!(waiting.await.unwrap().unwrap().version, 2);
    assert!(many.await.unwrap().iter().all(Result::is_ok));
    sink.wait_for(before + 12).await;
    engine.shutdown(Duration::from_secs(10)).await;
    sink.assert_ordered();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_goes_to_all_of_64_destinations_when_enlisted() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let names: Vec<String> = (0..64).map(|n| format!("destination-{n:02}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let message = RawMessage::event("test.wide", b"{}").stream(Uuid::new_v4()).to(&names);
    let mut client = schema.client().await;
    let transaction = client.transaction().await.unwrap();
    let enlisted = engine.outbox().push(&message).unwrap().enlist(&transaction).await.unwrap();
    transaction.commit().await.unwrap();
    enlisted.announce();
    sink.wait_for(64).await;
    engine.shutdown(Duration::from_secs(10)).await;
    let mut seen: Vec<String> = sink.all().into_iter().map(|seen| seen.destination).collect();
    seen.sort();
    assert_eq!(seen, names);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_whose_id_is_stored_is_refused_by_name_and_its_neighbours_are_stored() {
    let schema = schema();
    let sink = Sink::default();
    let mut slow = config(&schema);
    slow.shards.count = 1;
    // All of a call in one flush.
    slow.flush.age_us_max = 20_000;
    let engine = Engine::builder(slow).transport(sink.transport()).migrate(true).start().await.expect("start");
    let id = Uuid::now_v7();
    let loose = |id| RawMessage::command("test.twice", b"{}").to(&["sink"]).with(Wishes::new().message_id(id));
    let streamed = || {
        let message = RawMessage::command("test.neighbour", b"{}").stream(Uuid::from_u128(9)).to(&["sink"]);
        message.with(Wishes::new())
    };
    engine.enqueue(&loose(id)).await.expect("stored");

    let (other, twice) = (Uuid::now_v7(), Uuid::now_v7());
    let messages = vec![streamed(), loose(id), loose(other), loose(twice), loose(twice), streamed()];
    let outcomes = tokio::time::timeout(Duration::from_secs(10), engine.enqueue_many(messages)).await;
    let kinds: Vec<String> = outcomes
        .expect("an answer: it is not tried for ever")
        .into_iter()
        .map(|outcome| match outcome {
            Ok(receipt) => receipt.stream_seq.to_string(),
            Err(Error::DuplicateMessage { message_id }) if message_id == id => "stored".to_owned(),
            Err(Error::DuplicateMessage { message_id }) if message_id == twice => "twice".to_owned(),
            Err(other) => other.to_string(),
        })
        .collect();
    assert_eq!(kinds, ["1", "stored", "1", "1", "twice", "2"]);

    // A unit of work is refused whole, and the error names the message in it.
    let mut unit = engine.unit_of_work();
    unit.push(&streamed()).unwrap();
    unit.push(&loose(other)).unwrap();
    let refused = unit.commit().await;
    assert!(matches!(&refused, Err(Error::DuplicateMessage { message_id }) if *message_id == other), "{refused:?}");
    assert_eq!(engine.enqueue(&streamed()).await.expect("stored").stream_seq, 3);
    sink.wait_for(6).await;
    engine.shutdown(Duration::from_secs(10)).await;
    assert_eq!(sink.len(), 6);
}
