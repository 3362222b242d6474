//! Engines and workers that speak SQL, on one schema: they share, hand over and follow each other.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use corelane::transport::memory::Fault;
use corelane::{Config, Engine, MemoryTransport};
use uuid::Uuid;

use crate::dump::program;
use crate::engine::{Seen, Sink, config};
use crate::outbox_kit::call;
use crate::process_kit::{CasePlan, CaseProcess, Manner, assert_ordered, first_copies, journal};
use crate::store_kit::{Message, Space, event};
use crate::support::eventually;
use crate::work_kit::{Answer, Worker};

const PATIENCE: Duration = Duration::from_secs(60);

fn quick(space: &Space) -> Config {
    let mut config = config(&space.schema);
    for (key, value) in [
        ("lease.ttl_ms", "4000"),
        ("lease.margin_ms", "1500"),
        ("publish.timeout_ms", "500"),
        ("service.name", "tests"),
    ] {
        config.set(key, value).unwrap();
    }
    config
}

async fn engine(space: &Space, transport: MemoryTransport) -> Engine {
    Engine::builder(quick(space)).transport(transport).migrate(true).start().await.unwrap()
}

/// The worker's sink is the engines'.
fn publish(sink: &Sink, answer: &Answer) {
    let mut seen = sink.0.lock().unwrap();
    seen.extend(answer.handed.iter().map(|handed| Seen {
        destination: handed.destination.clone(),
        message_id: handed.message_id,
        stream_id: handed.stream_id,
        stream_seq: handed.stream_seq,
        version: 0,
        payload: handed.payload.clone().into_bytes(),
    }));
}

/// Workers with engines: shares settle and stay, under load, without a lost message or a wrong order;
/// whoever goes leaves its share to the others.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_and_two_engines_share_the_partitions_and_nothing_moves_for_nothing() {
    let space = Space::new().await;
    let sink = Sink::default();
    let (one, two) = (engine(&space, sink.transport()).await, engine(&space, sink.transport()).await);
    let worker = Worker::new(&space).await;
    let store = space.schema.client().await;
    let streams: Vec<Uuid> = (0..60).map(|_| Uuid::now_v7()).collect();
    let (mut stored, mut done, mut settled_at) = (0, Vec::new(), None);
    let fences = "select sum(fence)::int8 from wh_partition";
    let (started, mut history) = (Instant::now(), Vec::new());
    loop {
        let messages: Vec<Message> = streams.iter().map(|stream| event(*stream, "x")).collect();
        call(&store, &messages).await.unwrap();
        stored += messages.len();
        let answer = worker.complete(&done).await;
        assert!(!answer.lease_lost);
        publish(&sink, &answer);
        done = answer.ids();
        let mut shares = [one.partitions_held(), two.partitions_held(), answer.partitions.unwrap() as usize];
        let of_each = shares;
        shares.sort_unstable();
        let moved: i64 = store.query_one(fences, &[]).await.unwrap().get(0);
        if history.last().is_none_or(|(_, of, fences)| (*of, *fences) != (of_each, moved)) {
            history.push((started.elapsed(), of_each, moved));
        }
        match settled_at {
            None if shares == [5, 5, 6] => settled_at = Some((Instant::now(), moved)),
            // What somebody gives up by a look at an older state may still be on its way. Not for ever, and not often: 16
            // are taken, 8 and then 5 go from one to another, each by two changes of its fence.
            Some((_, before)) if moved != before => {
                assert!(moved <= 16 + 2 * (8 + 5 + 2), "what is even stays: {history:?}");
                settled_at = None;
            }
            // Longer than an engine's look.
            Some((at, _)) if at.elapsed() > Duration::from_millis(2500) => {
                assert_eq!(shares, [5, 5, 6], "{history:?}");
                break;
            }
            _ => assert!(started.elapsed() < PATIENCE, "{history:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    publish(&sink, &worker.complete(&done).await);
    // Who goes.
    one.shutdown(Duration::from_secs(10)).await;
    eventually("the worker has half", PATIENCE, || async {
        let answer = worker.claim().await;
        publish(&sink, &answer);
        let next = worker.complete(&answer.ids()).await;
        publish(&sink, &next);
        next.partitions == Some(8)
    })
    .await;
    worker.client.query_one("select end_work($1)", &[&worker.id]).await.unwrap();
    eventually("the engine has all", PATIENCE, || async { two.partitions_held() == 16 }).await;
    sink.wait_for(stored).await;
    sink.assert_ordered();
    eventually("nothing is lost", PATIENCE, || async {
        sink.all().iter().map(|seen| seen.message_id).collect::<HashSet<_>>().len() == stored
    })
    .await;
    sink.assert_ordered();
    let copies = sink.len() - stored;
    assert!(copies <= 5 * streams.len(), "{copies} copies in five changes of the partitions");
    two.shutdown(Duration::from_secs(10)).await;
}

/// An engine follows a worker that calls no more, as soon as its lease is over.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_follows_a_worker_that_calls_no_more_when_its_lease_is_over() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let streams: Vec<Uuid> = (0..50).map(|_| Uuid::now_v7()).collect();
    worker.call("p_lease_seconds => 5", &[]).await;
    worker.store(&streams.iter().map(|stream| event(*stream, "1")).collect::<Vec<_>>()).await;
    let sink = Sink::default();
    let last = Instant::now();
    let answer = worker.call("p_lease_seconds => 5", &[]).await;
    assert_eq!(answer.handed.len(), 50);
    publish(&sink, &answer);
    let engine = engine(&space, sink.transport()).await;
    // It has said nothing of what it published.
    eventually("the engine has all", PATIENCE, || async { engine.partitions_held() == 16 }).await;
    assert!(last.elapsed() >= Duration::from_millis(4900), "not before its lease is over");
    sink.wait_for(100).await;
    sink.assert_ordered();
    assert!(worker.claim().await.lease_lost);
    engine.shutdown(Duration::from_secs(10)).await;
}

/// A parked stream keeps its head, its order and its attempts, whoever has parked it and whoever goes on.
#[tokio::test(flavor = "multi_thread")]
async fn parked_streams_go_from_engine_to_worker_and_back_with_their_attempts() {
    let space = Space::new().await;
    let (sink, refuses) = (Sink::default(), Arc::new(AtomicBool::new(true)));
    let transport = || {
        let refuses = refuses.clone();
        sink.transport().with_faults(move |_, message| {
            let is_bad = message.payload == b"1" && refuses.load(Ordering::Relaxed);
            if is_bad { Fault::Refuse("not today".into()) } else { Fault::None }
        })
    };
    let mut patient = quick(&space);
    patient.set("retry.base_ms", "60000").unwrap();
    patient.set("retry.cap_ms", "60000").unwrap();
    let first = Engine::builder(patient.clone()).transport(transport()).migrate(true).start().await.unwrap();
    let (stream, client) = (Uuid::now_v7(), space.schema.client().await);
    call(&client, &[event(stream, "1"), event(stream, "2")]).await.unwrap();
    let parked = "select count(*) from wh_parked where attempts = 1 and error = 'not today'";
    eventually("it is parked", PATIENCE, || async {
        client.query_one(parked, &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
    call(&client, &[event(stream, "3")]).await.unwrap();
    first.shutdown(Duration::from_secs(10)).await;

    let worker = Worker::new(&space).await;
    let answer = worker.claim().await;
    assert_eq!((answer.partitions, answer.handed.len()), (Some(16), 0), "not before it is due");
    client.execute("update wh_parked set due = clock_timestamp()", &[]).await.unwrap();
    let answer = worker.claim().await;
    assert_eq!((answer.payloads(), answer.handed[0].attempts), (vec!["1", "2", "3"], 1));
    let named = "p_outbox_failures => array[$2::uuid], p_outbox_failure_errors => array['still not'],
        p_outbox_failure_reasons => array[2]";
    worker.call(named, &[&answer.ids()[0]]).await;
    assert_eq!(worker.status(answer.ids()[0]).await, (32771, 2, 2, "still not".to_owned()));
    worker.store(&[event(stream, "4")]).await;
    worker.claim().await;
    worker.client.query_one("select end_work($1)", &[&worker.id]).await.unwrap();

    refuses.store(false, Ordering::Relaxed);
    client.execute("update wh_parked set due = clock_timestamp()", &[]).await.unwrap();
    let second = Engine::builder(patient).transport(transport()).migrate(true).start().await.unwrap();
    sink.wait_for(4).await;
    let texts: Vec<Vec<u8>> = sink.all().into_iter().map(|seen| seen.payload).collect();
    assert_eq!(texts, [b"1", b"2", b"3", b"4"]);
    eventually("nothing is parked", PATIENCE, || async {
        worker.count("wh_parked").await + worker.count("wh_parked_reference").await == 0
    })
    .await;
    second.shutdown(Duration::from_secs(10)).await;
}

/// A running example; it does not outlive its test.
struct Example(Option<std::process::Child>);

impl Example {
    fn kill(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The example, beside two engines in processes of their own, under load; killed in the middle of it.
#[tokio::test(flavor = "multi_thread")]
async fn the_worker_of_the_example_shares_with_two_engines_and_is_killed() {
    const ROUNDS: usize = 150;
    let Some(binaries) = corelane::private_postgres::find() else { return };
    let space = Space::new().await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal");
    let publisher = directory.path().join("publish.sh");
    let script = format!("printf 'w %s %s %s %s\\n' \"$5\" \"$3\" \"$4\" \"$(cat)\" >>'{}'\n", path.display());
    std::fs::write(&publisher, script).unwrap();
    let plan = |instance| CasePlan {
        schema: &space.schema,
        instance,
        journal: &path,
        manner: Manner::Accept,
        settings: &[("service.name", "tests")],
        environment: &[],
    };
    let engines = [CaseProcess::start(&plan("a")), CaseProcess::start(&plan("b"))];
    let mut search = std::env::var_os("PATH").unwrap_or_default();
    search.push(":");
    search.push(program(&binaries, "psql").parent().unwrap());
    let mut worker = Example(Some(
        std::process::Command::new("sh")
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/worker.sh"))
            .args([&space.schema.url, &space.schema.name, "tests"])
            .arg(format!("sh {}", publisher.display()))
            .env("PATH", search)
            .env("WORKER_LEASE_SECONDS", "5")
            .env("WORKER_PAUSE_SECONDS", "0.05")
            .spawn()
            .unwrap(),
    ));
    let client = space.schema.client().await;
    let owned = "select count(*) from wh_partition p join wh_instance i on i.number = p.owner where not i.direct";
    let of_the_worker = || async { client.query_one(owned, &[]).await.unwrap().get::<_, i64>(0) };
    eventually("they share", PATIENCE, || async {
        (5..=6).contains(&of_the_worker().await) && engines.iter().all(|engine| engine.status().0 <= 6)
    })
    .await;

    let streams: Vec<Uuid> = (0..20).map(|_| Uuid::now_v7()).collect();
    let store = space.schema.client().await;
    let mut killed = None;
    for round in 0..ROUNDS {
        let text = round.to_string();
        let messages: Vec<Message> = streams.iter().map(|stream| event(*stream, &text)).collect();
        call(&store, &messages).await.unwrap();
        let by_worker = journal(&path).iter().filter(|line| line.instance == "w").count();
        if killed.is_none() && by_worker >= 60 {
            worker.kill();
            killed = Some(Instant::now());
        }
        if killed.is_none() || round % 8 == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    if killed.is_none() {
        eventually("it publishes", PATIENCE, || async {
            journal(&path).iter().filter(|line| line.instance == "w").count() >= 60
        })
        .await;
        worker.kill();
    }
    let killed = killed.unwrap_or_else(Instant::now);
    eventually("its partitions are followed", PATIENCE, || async { of_the_worker().await == 0 }).await;
    let took = killed.elapsed();
    assert!(took < Duration::from_secs(40), "its lease of 5 s, and a look: {took:?}");
    let all = ROUNDS * streams.len();
    eventually("all is published", PATIENCE, || async { first_copies(&journal(&path)).len() == all }).await;
    let lines = journal(&path);
    assert_ordered(&lines);
    let copies = lines.len() - all;
    // What the worker had in hand, and a part of a call's messages at each hand-over; again for everybody who had to
    // come back, because the machine stood still for a lease.
    let lives = client.query_one("select max(number) from wh_instance", &[]).await.unwrap().get::<_, i32>(0) as usize;
    let copies_max = (50 + 4 * streams.len()) * (1 + lives.saturating_sub(3));
    assert!(copies <= copies_max, "{copies} copies, {lives} incarnations");
    assert!(lines.iter().filter(|line| line.instance == "w").count() >= 60);
    let dead = "select count(*) from wh_dead_letter";
    assert_eq!(client.query_one(dead, &[]).await.unwrap().get::<_, i64>(0), 0);
}
