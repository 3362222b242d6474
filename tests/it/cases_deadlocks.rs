//! Hard case deadlocks: eight connections that want the same in opposite order, and conflicts that are forced at every
//! statement.
//!
//! The server looks for a deadlock at once, so none is missed because somebody was quick; and its log is the witness.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use corelane::message::Enqueue;
use corelane::private_postgres::PrivatePostgres;
use corelane::store::postgres::statements;
use corelane::transport::memory::Fault;
use corelane::{Config, Engine, Error, RawMessage, Wishes};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::engine::{Sink, config};
use crate::outbox_kit::call;
use crate::store_kit::{Message, Space, event, message};
use crate::support::{eventually, own_cluster_with, schema_on};
use crate::work_kit::Worker;

const PATIENCE: Duration = Duration::from_secs(60);
const ROUNDS: usize = 40;
/// So many messages die once.
const FAILURES: usize = 100;

/// Lines of the server's log that are errors, without those that the test allows.
fn errors(cluster: &PrivatePostgres, allowed: &[&str]) -> Vec<String> {
    let log = std::fs::read_to_string(cluster.log_path()).unwrap();
    let is_allowed = |line: &&str| !allowed.iter().any(|words| line.contains(words));
    log.lines().filter(|line| line.contains("ERROR:")).filter(is_allowed).map(str::to_owned).collect()
}

async fn with_patience(schema: &crate::support::TestSchema) -> Config {
    let mut config = config(schema);
    // Nothing moves because a slow machine was late.
    for (key, value) in [("lease.ttl_ms", "120000"), ("service.name", "tests")] {
        config.set(key, value).unwrap();
    }
    config
}

/// What all of them work on.
struct Field {
    streams: Vec<Uuid>,
    /// Of everything that a call has stored.
    stored: Mutex<HashSet<Uuid>>,
    /// Handed out to a worker, or at the engine's sink.
    seen: Mutex<HashSet<Uuid>>,
    failed: Mutex<HashSet<Uuid>>,
    storing: AtomicUsize,
    over: AtomicBool,
}

impl Field {
    /// A message a stream, the streams from either end.
    fn messages(&self, backwards: bool, of: impl Fn(Uuid) -> Message) -> Vec<Message> {
        let mut messages: Vec<Message> = self.streams.iter().map(|stream| of(*stream)).collect();
        if backwards {
            messages.reverse();
        }
        messages
    }

    fn note(&self, messages: &[Message]) {
        self.stored.lock().unwrap().extend(messages.iter().map(|message| message.id));
    }

    /// Two connections that store, from either end; of every third call more streams than locks: their partitions.
    async fn store(&self, client: &Client, backwards: bool) {
        for round in 0..ROUNDS {
            let mut messages = self.messages(backwards ^ (round % 2 == 0), |stream| event(stream, "{}"));
            if round % 3 == 0 {
                messages.extend((0..300).map(|_| event(Uuid::now_v7(), "{}")));
            }
            call(client, &messages).await.expect("stored");
            self.note(&messages);
        }
        self.storing.fetch_sub(1, Ordering::SeqCst);
    }

    /// One that stores what is due a moment later, and one that has it due at once.
    async fn schedule(&self, client: &Client) {
        for round in 0..ROUNDS {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as i64;
            let due = now + if round % 2 == 0 { 20_000 } else { 1 };
            let of = |stream| Message { due_unix_us: due, ..message(stream, "{}") };
            let messages = self.messages(round % 4 < 2, of);
            call(client, &messages).await.expect("stored");
            self.note(&messages);
        }
        self.storing.fetch_sub(1, Ordering::SeqCst);
    }

    /// The engine's own connections, by a unit of work from either end.
    async fn enqueue(&self, engine: &Engine) {
        for round in 0..ROUNDS {
            let messages = self.messages(round % 2 == 0, |stream| event(stream, "{}"));
            let of = |message: &Message| {
                let raw = RawMessage::event("test.case", b"{}").stream(message.stream.unwrap()).to(&["somewhere"]);
                raw.with(Wishes::new().message_id(message.id))
            };
            let mut unit = engine.unit_of_work();
            for message in &messages {
                unit.push(&of(message)).unwrap();
            }
            unit.commit().await.expect("stored");
            self.note(&messages);
        }
        self.storing.fetch_sub(1, Ordering::SeqCst);
    }

    /// A worker that completes and gives back from either end, refuses for good what comes first, and stores as well.
    async fn work(&self, worker: &Worker, backwards: bool) {
        let (mut answer, mut calls) = (worker.claim().await, 0);
        while !(self.over.load(Ordering::SeqCst) && answer.handed.is_empty()) {
            let mut ids = answer.ids();
            self.seen.lock().unwrap().extend(&ids);
            if backwards {
                ids.reverse();
            }
            let fails: Vec<Uuid> = {
                let mut failed = self.failed.lock().unwrap();
                let dies = |id: &&Uuid| failed.len() < FAILURES && failed.insert(**id);
                ids.first().filter(dies).copied().into_iter().collect()
            };
            ids.retain(|id| !fails.contains(id));
            // Not for as long as the others do: an owner only tries for a stream that callers queue for.
            calls += 1;
            let stores =
                if calls <= ROUNDS { self.messages(backwards, |stream| event(stream, "{}")) } else { Vec::new() };
            let new: Vec<Uuid> = stores.iter().map(|message| message.id).collect();
            let streams: Vec<Uuid> = stores.iter().filter_map(|message| message.stream).collect();
            answer = worker
                .call(
                    "p_outbox_completions => $2, p_outbox_failures => $3, p_outbox_failure_reasons => array_fill(4,
                        array[cardinality($3::uuid[])]), p_new_outbox_messages => $4, p_new_outbox_stream_ids => $5,
                    p_new_outbox_types => array_fill('t'::text, array[cardinality($4::uuid[])]),
                    p_new_outbox_payloads => array_fill('\\x7b7d'::bytea, array[cardinality($4::uuid[])]),
                    p_new_outbox_is_event => array_fill(true, array[cardinality($4::uuid[])]),
                    p_new_outbox_destinations => array_fill('somewhere'::text, array[cardinality($4::uuid[])])",
                    &[&ids, &fails, &new, &streams],
                )
                .await;
            assert!(!answer.lease_lost);
            self.note(&stores);
        }
        worker.client.query_one("select end_work($1)", &[&worker.id]).await.unwrap();
    }

    /// One that rotates and cleans, and operators' calls that give back what died.
    async fn clean(&self, client: &Client) {
        let step = "select perform_maintenance((select max(number) from wh_instance where state = 0 and direct))";
        let leave = "update wh_segment set switched_at = switched_at - interval '61 s'";
        let retry = "select retried from retry_dead_letters(p_all => true, p_dry_run => false)";
        while !self.over.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(5)).await;
            for sql in [leave, step, retry] {
                match client.execute(sql, &[]).await {
                    Ok(_) => {}
                    // The owners of the partitions changed meanwhile: it says that it is to be run again.
                    Err(error) if sql == retry && error.code().is_some_and(|code| code.code() == "40001") => {}
                    Err(error) => panic!("{sql}: {error:?}"),
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deadlocks_are_none_among_eight_that_want_the_same_in_opposite_order() {
    let cluster = own_cluster_with(&["deadlock_timeout=10ms"]);
    let space = Space::in_schema(schema_on(cluster.url("postgres"))).await;
    let sink = Sink::default();
    let config = with_patience(&space.schema).await;
    let engine = Engine::builder(config).transport(sink.transport()).start().await.unwrap();
    let field = Field {
        streams: (0..40).map(|_| Uuid::now_v7()).collect(),
        stored: Mutex::default(),
        seen: Mutex::default(),
        failed: Mutex::default(),
        storing: AtomicUsize::new(4),
        over: AtomicBool::new(false),
    };
    let (first, last, later) = (space.schema.client().await, space.schema.client().await, space.schema.client().await);
    let (one, two) = (Worker::new(&space).await, Worker::new(&space).await);
    let (cleaner, watch) = (space.schema.client().await, space.schema.client().await);
    let ends = async {
        eventually("all is stored and seen, and nothing is dead", PATIENCE, async || {
            let dead: i64 = watch.query_one("select count(*) from wh_dead_letter", &[]).await.unwrap().get(0);
            let mut seen = field.seen.lock().unwrap();
            seen.extend(sink.all().iter().map(|seen| seen.message_id));
            field.storing.load(Ordering::SeqCst) == 0 && dead == 0 && field.stored.lock().unwrap().is_subset(&seen)
        })
        .await;
        field.over.store(true, Ordering::SeqCst);
    };
    tokio::join!(
        field.store(&first, false),
        field.store(&last, true),
        field.schedule(&later),
        field.enqueue(&engine),
        field.work(&one, false),
        field.work(&two, true),
        field.clean(&cleaner),
        ends,
    );
    let report = engine.shutdown(Duration::from_secs(20)).await;
    assert!(report.drained, "{report:?}");
    assert_eq!(errors(&cluster, &["the partitions change their owners"]), [""; 0], "no deadlock, no conflict");
    let deadlocks = "select deadlocks from pg_stat_database where datname = current_database()";
    assert_eq!(watch.query_one(deadlocks, &[]).await.unwrap().get::<_, i64>(0), 0);
    let events =
        "select count(*), count(distinct message_id), count(distinct (stream_id, version)) from wh_event_store";
    let events = watch.query_one(events, &[]).await.unwrap();
    let (rows, ids, versions): (i64, i64, i64) = (events.get(0), events.get(1), events.get(2));
    assert_eq!((ids, versions), (rows, rows), "one effect");
    assert!(!field.failed.lock().unwrap().is_empty(), "some died and were given back");
}

/// Puts a function before each of these: its n-th call fails with 40001, or with 40P01 if it is the third, where the condition
/// holds; the others go through. What a sequence has counted is not rolled back.
pub async fn force(client: &Client, names: &[String], condition: &str) {
    force_where(client, condition).await;
    let each = "select format('create sequence if not exists %1$I.%2$I; alter function %3$s rename to %4$I;
            create function %1$I.%5$I(%6$s) returns %7$s language sql volatile as %8$L',
            n.nspname, 'forced_' || p.proname, p.oid::regprocedure, p.proname || '_unforced', p.proname,
            pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
            format('select %1$I.force(%2$L); select * from %1$I.%3$I(%4$s)', n.nspname,
                format('%I.%I', n.nspname, 'forced_' || p.proname), p.proname || '_unforced',
                (select string_agg('$' || i, ', ' order by i) from generate_series(1, p.pronargs) i)))
        from pg_proc p join pg_namespace n on n.oid = p.pronamespace
        where n.nspname = current_schema() and p.proname = any ($1)";
    for row in client.query(each, &[&names]).await.unwrap() {
        let text: &str = row.get(0);
        client.batch_execute(text).await.unwrap_or_else(|error| panic!("{text}: {error:?}"));
    }
}

/// From now on only calls of this one, its first and its third.
pub async fn force_only(client: &Client, name: &str) {
    force_where(client, &format!("n in (1, 3) and counter::text like '%forced_{name}'")).await;
}

async fn force_where(client: &Client, condition: &str) {
    let sql = "create or replace function force(counter regclass) returns void language plpgsql as $f$
        declare n constant int8 := nextval(counter);
        begin
            if CONDITION then
                raise exception 'forced' using errcode = case n when 3 then '40P01' else '40001' end;
            end if;
        end $f$;";
    client.batch_execute(&sql.replace("CONDITION", condition)).await.unwrap();
}

/// How often it was called.
pub async fn called(client: &Client, name: &str) -> i64 {
    let counted = format!("select case when is_called then last_value else 0 end from forced_{name}");
    client.query_one(&counted, &[]).await.unwrap().get(0)
}

/// Functions that engines name in their statements.
fn called_by_engines(space: &Space) -> Vec<String> {
    let prefix = format!("{}.", space.name.quoted());
    let mut names: Vec<String> = statements(&space.name)
        .iter()
        .flat_map(|(text, _)| {
            text.split(&prefix)
                .skip(1)
                .filter_map(|rest| rest.split_once('('))
                .map(|(name, _)| name.to_owned())
                .collect::<Vec<_>>()
        })
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'))
        .collect();
    names.sort();
    names.dedup();
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn deadlocks_and_conflicts_forced_at_every_statement_are_tried_again_with_one_effect() {
    let cluster = own_cluster_with(&[]);
    let space = Space::in_schema(schema_on(cluster.url("postgres"))).await;
    let client = space.schema.client().await;
    let names = called_by_engines(&space);
    force(&client, &names, "n in (1, 3)").await;
    let mut config = with_patience(&space.schema).await;
    for (key, value) in [("shards.count", "1"), ("listen.test_interval_ms", "200"), ("retry.attempts_max", "3")] {
        config.set(key, value).unwrap();
    }
    let sink = Sink::default();
    let refused = std::sync::Arc::new(Mutex::new(HashSet::new()));
    let transport = || {
        let refused = refused.clone();
        sink.transport().with_faults(move |_, message| match message.payload {
            b"fails once" if refused.lock().unwrap().insert(message.message_id) => Fault::Refuse("once".into()),
            b"dies" => Fault::RefuseForGood("for good".into()),
            _ => Fault::None,
        })
    };
    let start = async || Engine::builder(config.clone()).transport(transport()).start().await.unwrap();
    let one = start().await;
    eventually("the one has all", PATIENCE, async || one.partitions_held() == 16).await;
    let two = start().await;
    eventually("they share", PATIENCE, async || [one.partitions_held(), two.partitions_held()] == [8, 8]).await;

    let streams: Vec<Uuid> = (0..20).map(|_| Uuid::now_v7()).collect();
    let (mut stored, loose) = (0, Uuid::now_v7());
    for engine in [&one, &two, &one] {
        for payload in ["1", "fails once", "dies", "2"] {
            let all = streams
                .iter()
                .map(|stream| RawMessage::event("test.case", payload.as_bytes()).stream(*stream).to(&["sink"]));
            for outcome in engine.enqueue_many(all).await {
                outcome.expect("stored");
                stored += 1;
            }
        }
        let due = RawMessage::command("test.case", b"due").stream(streams[0]).to(&["sink"]);
        engine.enqueue(&due.with(Wishes::new().due(SystemTime::now()))).await.expect("stored");
        let doubled = engine
            .enqueue(&RawMessage::command("test.case", b"{}").to(&["sink"]).with(Wishes::new().message_id(loose)))
            .await;
        assert!(matches!(doubled, Ok(_) | Err(Error::DuplicateMessage { .. })), "{doubled:?}");
    }
    let published = stored - 3 * streams.len() + 4;
    sink.wait_for(published).await;
    let report = two.shutdown(Duration::from_secs(20)).await;
    assert!(report.drained, "{report:?}");
    eventually("the one has all again", PATIENCE, async || one.partitions_held() == 16).await;
    let dead = async || client.query_one("select count(*) from wh_dead_letter", &[]).await.unwrap().get::<_, i64>(0);
    eventually("all that died is written down", PATIENCE, async || dead().await == 3 * streams.len() as i64).await;
    // The first one was refused.
    let maintained = async || called(&client, "perform_maintenance").await > 1;
    eventually("maintenance comes again", Duration::from_secs(150), maintained).await;
    let report = one.shutdown(Duration::from_secs(20)).await;
    assert!(report.drained, "{report:?}");

    let mut seen: Vec<Uuid> = sink.all().iter().map(|seen| seen.message_id).collect();
    assert_eq!(seen.len(), published, "one effect: no copy went out");
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), published);
    let events = "select count(*), count(distinct message_id) from wh_event_store";
    let events = client.query_one(events, &[]).await.unwrap();
    assert_eq!(
        (events.get::<_, i64>(0), events.get::<_, i64>(1)),
        (stored as i64, stored as i64),
        "none is stored twice"
    );
    let parked: i64 = client.query_one("select count(*) from wh_parked", &[]).await.unwrap().get(0);
    assert_eq!(parked, 0);
    let mut calls = Vec::new();
    for name in &names {
        calls.push((name.as_str(), called(&client, name).await));
    }
    // Forced once and called again, but for those that this run may have no use for.
    let may_be_left_out = ["find_flush", "hold_instance", "inspect", "mark_dead", "queue_for_streams"];
    let left_out = calls.iter().filter(|(name, calls)| *calls < 2 && !may_be_left_out.contains(name));
    assert_eq!(left_out.count(), 0, "{calls:?}");
}
