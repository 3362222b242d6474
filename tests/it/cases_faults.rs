//! Hard cases of faults: a cut at the worst moment, a server that has become read-only, a sink that is never ready, an
//! outcome that the database refuses, a message that fails for ever.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use corelane::transport::memory::Fault;
use corelane::{Engine, Error, RawMessage};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::cut_proxy::{CutProxy, Where};
use crate::engine::{Sink, config};
use crate::support::{connect, eventually, own_cluster, schema, schema_on};

const END: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(60);

async fn count(client: &Client, what: &str) -> i64 {
    client.query_one(&format!("select count(*) from {what}"), &[]).await.unwrap().get(0)
}

/// Exactly between "this was the last attempt" and "the stream is free": before the server has the dead letter, while
/// it writes it, and when it has it and the answer is lost. The stream goes on each time, and there is one dead letter.
#[tokio::test(flavor = "multi_thread")]
async fn mid_failure_a_cut_at_the_last_attempt_leaves_no_stream_stuck() {
    let cluster = own_cluster();
    let schema = schema_on(cluster.url("postgres"));
    let proxy = CutProxy::before(&cluster);
    let sink = Sink::default();
    let tries = Arc::new(AtomicUsize::new(0));
    let counting = tries.clone();
    let transport = sink.transport().with_faults(move |_, message| match message.payload {
        b"head" if counting.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) => Fault::Refuse("not yet".into()),
        b"head" => Fault::Refuse("the last words".into()),
        _ => Fault::None,
    });
    let mut through = config(&schema);
    through.database.url = proxy.url();
    through.retry.attempts_max = 2;
    let engine = Engine::builder(through).transport(transport).migrate(true).start().await.expect("start");
    let (client, mut holder) = (schema.client().await, schema.client().await);
    for (round, cut) in [Some(Where::Before), None, Some(Where::After)].into_iter().enumerate() {
        let stream = Uuid::now_v7();
        let held = holder.transaction().await.unwrap();
        match cut {
            Some(at) => proxy.arm(b"the last words", at),
            None => held.batch_execute("lock table wh_dead_letter in exclusive mode").await.unwrap(),
        }
        for text in ["head", "behind", "last"] {
            let message = RawMessage::event("test.case", text.as_bytes()).stream(stream).to(&["sink"]);
            engine.enqueue(&message).await.expect("stored");
        }
        if cut.is_none() {
            let writing = "select pid from pg_stat_activity where wait_event_type = 'Lock' and query like '%settle(%'";
            eventually("it is written", PATIENCE, async || !client.query(writing, &[]).await.unwrap().is_empty()).await;
            let pid: i32 = client.query_one(writing, &[]).await.unwrap().get(0);
            client.query_one("select pg_terminate_backend($1)", &[&pid]).await.unwrap();
        }
        held.rollback().await.unwrap();
        sink.wait_for(2 * (round + 1)).await;
        eventually("one dead letter a stream", PATIENCE, async || {
            count(&client, "wh_dead_letter").await == round as i64 + 1 && count(&client, "wh_parked").await == 0
        })
        .await;
    }
    assert_eq!((proxy.cuts(), tries.load(Ordering::Relaxed)), (2, 6), "the case was met, and no try was made again");
    engine.shutdown(END).await;
    let texts: Vec<Vec<u8>> = sink.all().into_iter().map(|seen| seen.payload).collect();
    assert_eq!(texts, [&b"behind"[..], b"last"].repeat(3));
    let whole = "wh_dead_letter where attempts = 2 and error = 'the last words'";
    assert_eq!(count(&client, whole).await, 3);
    drop(schema);
}

/// A failover has left the engine on a server that only reads (25006): its connections to that one are given up, and
/// when there is a primary again all goes on. What callers were told meanwhile is true.
#[tokio::test(flavor = "multi_thread")]
async fn mid_failure_a_read_only_server_is_left_and_the_primary_found_again() {
    let cluster = own_cluster();
    let schema = schema_on(cluster.url("postgres"));
    let sink = Sink::default();
    let engine = Engine::builder(config(&schema)).transport(sink.transport()).migrate(true).start();
    let engine = engine.await.expect("start");
    let stream = Uuid::now_v7();
    let message = RawMessage::event("test.case", b"{}").stream(stream).to(&["sink"]);
    engine.enqueue(&message).await.expect("stored");
    sink.wait_for(1).await;
    let client = connect(&schema.url).await;
    client.batch_execute("set default_transaction_read_only = off").await.unwrap();
    let of_engine = "select pid from pg_stat_activity where pid <> pg_backend_pid() \
         and (query like '%store_shard_messages%' or query like '%settle(%')";
    eventually("it has written", PATIENCE, async || !client.query(of_engine, &[]).await.unwrap().is_empty()).await;
    let writing: HashSet<i32> = client.query(of_engine, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    let become_read_only = async |value: &str| {
        client.batch_execute(&format!("alter system set default_transaction_read_only = {value}")).await.unwrap();
        client.batch_execute("select pg_reload_conf()").await.unwrap();
    };
    become_read_only("on").await;
    let probe = connect(&schema.url).await;
    eventually("the server only reads", PATIENCE, async || {
        probe.query_one("show transaction_read_only", &[]).await.unwrap().get::<_, &str>(0) == "on"
    })
    .await;
    let storing: Vec<_> = (0..20)
        .map(|_| {
            let engine = engine.clone();
            tokio::spawn(async move {
                engine.enqueue(&RawMessage::event("test.case", b"{}").stream(stream).to(&["sink"])).await
            })
        })
        .collect();
    eventually("the connections that cannot write are given up", PATIENCE, async || {
        let now = client.query("select pid from pg_stat_activity", &[]).await.unwrap();
        let now: HashSet<i32> = now.iter().map(|row| row.get(0)).collect();
        // One of two shards had nothing to write meanwhile.
        writing.iter().any(|pid| !now.contains(pid))
    })
    .await;
    become_read_only("off").await;
    let mut stored = 1;
    for answer in storing {
        match answer.await.unwrap() {
            Ok(_) => stored += 1,
            Err(Error::Store(_)) => {} // "Nothing was stored", which is counted below.
            Err(other) => panic!("{other}"),
        }
    }
    eventually("it stores again", PATIENCE, async || engine.enqueue(&message).await.is_ok()).await;
    sink.wait_for(stored + 1).await;
    engine.shutdown(END).await;
    sink.assert_ordered();
    let client = schema.client().await;
    let rows = count(&client, "wh_event_store").await;
    assert_eq!((rows as usize, sink.len()), (stored + 1, stored + 1), "told the truth; nothing is lost or doubled");
    drop(schema);
}

/// Of five destinations the fifth is never ready, for more messages than memory may hold; the four do not notice.
#[tokio::test(flavor = "multi_thread")]
async fn five_sinks_of_which_one_is_never_ready_and_four_flow() {
    five_sinks(|| Fault::NotReady).await;
}

/// The same, where the fifth refuses each message: its lanes are parked, and their messages go out of memory.
#[tokio::test(flavor = "multi_thread")]
async fn five_sinks_of_which_one_refuses_for_ever_and_four_flow() {
    five_sinks(|| Fault::Refuse("the handshake is refused".into())).await;
}

async fn five_sinks(fifth: fn() -> Fault) {
    const STREAMS: usize = 50;
    const MESSAGES: usize = 2_000;
    let schema = schema();
    let sink = Sink::default();
    let away = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let flag = away.clone();
    let transport = sink.transport().with_faults(move |destination, _| {
        if destination == "e" && flag.load(Ordering::Relaxed) { fifth() } else { Fault::None }
    });
    let mut narrow = config(&schema);
    narrow.shards.count = 1;
    narrow.lane.rows_max = 500;
    narrow.retry.attempts_max = 1_000_000;
    let engine = Engine::builder(narrow).transport(transport).migrate(true).start().await.expect("start");
    let streams: Vec<Uuid> = (0..STREAMS).map(|_| Uuid::now_v7()).collect();
    for first in (0..MESSAGES).step_by(200) {
        let messages = (first..first + 200)
            .map(|n| RawMessage::event("test.five", b"{}").stream(streams[n % STREAMS]).to(&["a", "b", "c", "d", "e"]));
        for receipt in engine.enqueue_many(messages).await {
            receipt.expect("stored: nobody is held up");
        }
        sink.wait_for(4 * (first + 200)).await;
    }
    assert!(sink.all().iter().all(|seen| seen.destination != "e"));
    away.store(false, Ordering::Relaxed);
    sink.wait_for(5 * MESSAGES).await;
    engine.shutdown(END).await;
    sink.assert_ordered();
    assert_eq!(sink.len(), 5 * MESSAGES, "no copy");
}

/// 500 outcomes are written at once, of which the database refuses the 137th for good.
#[tokio::test(flavor = "multi_thread")]
async fn one_bad_row_among_500_outcomes_is_quarantined_and_the_others_are_written() {
    let schema = schema();
    let sink = Sink::default();
    let transport = sink.transport().with_faults(|_, message| match message.payload {
        b"fine" => Fault::None,
        _ => Fault::RefuseForGood("for good".into()),
    });
    let mut one = config(&schema);
    one.shards.count = 1;
    one.retry.base_ms = 20_000;
    one.retry.cap_ms = 20_000;
    let engine = Engine::builder(one).transport(transport).migrate(true).start().await.expect("start");
    let client = schema.client().await;
    let streams: Vec<Uuid> = (0..500).map(|_| Uuid::now_v7()).collect();
    let bad = streams[137];
    let rule = format!("alter table wh_dead_letter add constraint bad check (lane_id <> '{bad}')");
    client.batch_execute(&rule).await.unwrap();
    let doomed = streams.iter().map(|stream| RawMessage::event("test.bad", b"doomed").stream(*stream).to(&["sink"]));
    for receipt in engine.enqueue_many(doomed).await {
        receipt.expect("stored");
    }
    eventually("499 are done", PATIENCE, async || count(&client, "wh_dead_letter").await == 499).await;
    eventually("one is set apart", PATIENCE, async || count(&client, "wh_parked").await == 1).await;
    let parked: Uuid = client.query_one("select lane_id from wh_parked", &[]).await.unwrap().get(0);
    assert_eq!(parked, bad);

    // The next ones are clean: nothing is refused again, and the streams of the 499 go on.
    let refused = || engine.shards()[0].metrics.settles_refused.get();
    let before = refused();
    for (n, stream) in streams.iter().enumerate().filter(|(_, stream)| **stream != bad) {
        let message = RawMessage::event("test.bad", b"fine").stream(*stream).to(&["sink"]);
        engine.enqueue(&message).await.unwrap_or_else(|error| panic!("{n}: {error}"));
    }
    sink.wait_for(499).await;
    let cursors = || engine.shards()[0].metrics.cursors.get();
    let written = cursors();
    engine.enqueue(&RawMessage::event("test.bad", b"fine").to(&["sink"])).await.expect("stored");
    eventually("a cursor more", PATIENCE, async || cursors() > written).await;
    assert_eq!(refused(), before);
    engine.shutdown(END).await;
    assert_eq!((sink.len(), count(&client, "wh_dead_letter").await), (500, 499));
}

/// One message that fails for ever, and twelve engines one after the other, three at a time: its tries keep their
/// distance and their count, whoever makes them.
#[tokio::test(flavor = "multi_thread")]
async fn poison_pace_is_kept_by_twelve_engines_one_after_the_other() {
    const BACKOFF: Duration = Duration::from_millis(400);
    let schema = schema();
    let tries: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let start = async |index: usize| {
        let tries = tries.clone();
        let transport = Sink::default().transport().with_faults(move |_, _| {
            tries.lock().unwrap().push(Instant::now());
            Fault::Refuse("poison".into())
        });
        let mut one = config(&schema);
        one.set("service.instance", &format!("node-{index}")).unwrap();
        one.shards.count = 1;
        one.retry.base_ms = BACKOFF.as_millis() as u64;
        one.retry.cap_ms = BACKOFF.as_millis() as u64;
        one.retry.attempts_max = 10;
        Engine::builder(one).transport(transport).migrate(true).start().await.expect("start")
    };
    let mut engines = std::collections::VecDeque::new();
    for index in 0..3 {
        engines.push_back(start(index).await);
    }
    let message = RawMessage::event("test.poison", b"poison").stream(Uuid::now_v7()).to(&["sink"]);
    engines[0].enqueue(&message).await.expect("stored");
    let client = schema.client().await;
    for index in 3..12 {
        // Its owner goes behind each try; once the lease is free another is it.
        let before = tries.lock().unwrap().len();
        eventually("a further try", PATIENCE, async || tries.lock().unwrap().len() > before.min(index - 3)).await;
        engines.pop_front().unwrap().shutdown(END).await;
        engines.push_back(start(index).await);
    }
    eventually("it is dead", PATIENCE, async || count(&client, "wh_dead_letter").await == 1).await;
    for engine in engines {
        engine.shutdown(END).await;
    }
    let tries = tries.lock().unwrap().clone();
    let attempts: i32 = client.query_one("select attempts from wh_dead_letter", &[]).await.unwrap().get(0);
    assert_eq!((tries.len(), attempts), (10, 10), "a try is an attempt, and a change of the owner is none");
    for pair in tries.windows(2) {
        // Ten per cent of jitter, and what the clocks round.
        assert!(pair[1] - pair[0] >= BACKOFF.mul_f64(0.88), "{:?} after the try before", pair[1] - pair[0]);
    }
}
