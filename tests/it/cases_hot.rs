//! Hard case hot-stream, small: one stream with 100,000 waiting messages, stored before 10,000 streams with one each. A page
//! of the claim costs what it holds, and the cold streams are published while the hot one is at its beginning.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corelane::plan::snapshot::Snapshot;
use corelane::seam::store::ReadPosition;
use corelane::{Engine, MemoryTransport};
use tokio_postgres::{AsyncMessage, Client, NoTls};
use uuid::Uuid;

use crate::engine::config;
use crate::store_kit::{Owner, Space};
use crate::support::eventually;

const HOT: usize = 100_000;
const COLD: usize = 10_000;
const PAGE: usize = 1_000;
/// References of one log row, at most.
const LOG_ROW: usize = 180;
const PATIENCE: Duration = Duration::from_secs(60);

/// By set-based calls of a thousand messages, a transaction each, as a service's own bulk work would: all of the hot
/// stream first, which is the worst order for the others.
async fn fill(client: &Client, hot: Uuid) {
    fill_with(client, hot, HOT, COLD).await;
}

async fn fill_with(client: &Client, hot: Uuid, hot_count: usize, cold_count: usize) {
    let fill = format!(
        "do $$ begin
            for n in 1..{hot_count} / {PAGE} loop
                perform store_outbox_messages(array_agg(gen_random_uuid()), array_agg('{hot}'::uuid), array_agg('t'::text),
                    array_agg('\\x7b7d'::bytea), array_agg(true), array_agg('sink'::text)) from generate_series(1, {PAGE});
                commit;
            end loop;
            for n in 1..{cold_count} / {PAGE} loop
                perform store_outbox_messages(array_agg(gen_random_uuid()), array_agg(gen_random_uuid()),
                    array_agg('t'::text), array_agg('\\x7b7d'::bytea), array_agg(true), array_agg('sink'::text))
                from generate_series(1, {PAGE});
                commit;
            end loop;
        end $$"
    );
    client.batch_execute(&fill).await.unwrap();
}

/// A client, and what it is told: the plans of all statements inside the functions that it calls, with what they did.
struct Told {
    client: Client,
    plans: Arc<Mutex<Vec<String>>>,
}

impl Told {
    /// `None` where the server has no `auto_explain`, or does not let this role load it.
    async fn new(space: &Space) -> Option<Self> {
        let (client, mut connection) = tokio_postgres::connect(&space.schema.url, NoTls).await.expect("connect");
        let plans = Arc::new(Mutex::new(Vec::new()));
        let told = plans.clone();
        tokio::spawn(async move {
            while let Some(Ok(said)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
                if let AsyncMessage::Notice(notice) = said {
                    told.lock().unwrap().push(notice.message().to_owned());
                }
            }
        });
        let settings = "load 'auto_explain'; set auto_explain.log_min_duration = 0; set auto_explain.log_analyze = on;
            set auto_explain.log_timing = off; set auto_explain.log_nested_statements = on;
            set auto_explain.log_level = notice";
        match client.batch_execute(settings).await {
            Ok(()) => Some(Self { client, plans }),
            Err(error) => {
                println!("left out, since there is no auto_explain: {error}");
                None
            }
        }
    }

    /// Rows that each sort of a page at this place was given.
    async fn sorted(&self, space: &Space, owner: &Owner, position: &ReadPosition) -> Vec<usize> {
        self.plans.lock().unwrap().clear();
        claim(&self.client, "select count(*)", space, owner, position).await;
        let plans = std::mem::take(&mut *self.plans.lock().unwrap());
        assert!(plans.iter().any(|plan| plan.contains("wh_log")), "it is told: {plans:?}");
        let of = |line: &str| {
            let (_, did) = line.split_once("(actual rows=")?;
            let (rows, loops) = did.split_once(" loops=")?;
            let loops: usize = loops.split(')').next()?.parse().ok()?;
            // PostgreSQL 18 answers fractions.
            Some(rows.parse::<f64>().ok()? as usize * loops)
        };
        let sorts = plans.iter().flat_map(|plan| plan.lines()).filter(|line| line.contains("Sort  ("));
        sorts.filter(|line| !line.contains("never executed")).map(|line| of(line).expect(line)).collect()
    }
}

/// A claim of a page at this place, as a shard's reader asks for it.
async fn claim(
    client: &Client,
    select: &str,
    space: &Space,
    owner: &Owner,
    position: &ReadPosition,
) -> Vec<tokio_postgres::Row> {
    let held: Vec<i32> = owner.held().iter().map(|p| *p as i32).collect();
    let listed = |of: &Snapshot| of.listed().iter().map(|xid| *xid as i64).collect::<Vec<_>>();
    let page = position.page.as_ref();
    let (xmax, at) = (page.map(|(of, _)| of.xmax() as i64), page.map(|(_, at)| *at));
    let range = position.range;
    let sql = format!(
        "{select} from {}.claim_work($1, 0::int2, $2, $3, $4, $5, $6, $7, $8, $9, $10, '{{}}', $11, 4096)",
        space.name.quoted()
    );
    client
        .query(
            &sql,
            &[
                &owner.incarnation.number,
                &(position.read.xmax() as i64),
                &listed(&position.read),
                &xmax,
                &page.map(|(of, _)| listed(of)),
                &at,
                &range.read_floor,
                &range.page_floor,
                &range.page_ceiling,
                &held,
                &(PAGE as i32),
            ],
        )
        .await
        .unwrap()
}

/// Blocks that a page at this place touches.
async fn blocks(client: &Client, space: &Space, owner: &Owner, position: &ReadPosition) -> u64 {
    let plan =
        claim(client, "explain (analyze, buffers, timing off, costs off) select *", space, owner, position).await;
    let lines: Vec<&str> = plan.iter().map(|row| row.get(0)).collect();
    let line = lines.iter().find(|line| line.trim().starts_with("Buffers: ")).unwrap();
    let counts = line.split(' ').filter_map(|word| word.split_once('='));
    let touched = counts.filter(|(kind, _)| ["hit", "read"].contains(kind));
    touched.map(|(_, n)| n.trim_end_matches(',').parse::<u64>().unwrap()).sum()
}

#[tokio::test]
async fn hot_stream_a_page_costs_what_it_holds_wherever_it_lies() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    fill(&client, Uuid::now_v7()).await;
    client.batch_execute("analyze wh_log; analyze wh_event_store").await.unwrap();
    let (owner, told) = (space.owner(1).await, Told::new(&space).await);
    let (mut position, mut touched, mut sorted, mut rows) = (ReadPosition::default(), Vec::new(), Vec::new(), 0);
    loop {
        touched.push(blocks(&client, &space, &owner, &position).await);
        if let Some(told) = &told {
            sorted.extend(told.sorted(&space, &owner, &position).await);
        }
        let reply = owner.claim(&position, &[], PAGE).await;
        assert!(reply.rows.len() < PAGE + LOG_ROW, "a page, and the rest of its last log row: {}", reply.rows.len());
        rows += reply.rows.len();
        position = reply.position;
        if !reply.more {
            break;
        }
    }
    assert_eq!(rows, HOT + COLD);
    let (most, largest) = (touched.iter().max().unwrap(), sorted.iter().max());
    println!("{} pages, at most {most} blocks; {} sorts, at most {largest:?} rows", touched.len(), sorted.len());
    // A way down an index and a block of the table, for each message and for each look behind the page.
    assert!(*most < 12 * PAGE as u64, "{most} blocks for a page of {PAGE}: {touched:?}");
    if told.is_some() {
        assert!(largest.is_some_and(|rows| *rows < PAGE + LOG_ROW), "more than a page is sorted: {sorted:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hot_stream_cold_ones_are_published_before_it_is_through() {
    let space = Space::new().await;
    let hot = Uuid::now_v7();
    fill(&space.schema.client().await, hot).await;
    let (hot_seen, ordered) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(true)));
    let cold_seen = Arc::new(Mutex::new(HashSet::new()));
    let (count, in_order, cold) = (hot_seen.clone(), ordered.clone(), cold_seen.clone());
    let transport = MemoryTransport::new(move |_, message| {
        if message.stream_id == Some(hot) {
            let before = count.fetch_add(1, Ordering::SeqCst) as i64;
            in_order.fetch_and(message.stream_seq == before + 1, Ordering::SeqCst);
        } else {
            cold.lock().unwrap().insert(message.stream_id);
        }
    })
    // One of the hot stream's at a time: a hundred seconds of work.
    .with_delay(|| Duration::from_millis(1));
    let engine = Engine::builder(config(&space.schema)).transport(transport).start().await.unwrap();
    eventually("all cold ones are out", PATIENCE, async || cold_seen.lock().unwrap().len() == COLD).await;
    let before = hot_seen.load(Ordering::SeqCst);
    println!("{before} of the hot stream's were out before the last of the cold ones");
    assert!(before < HOT, "the hot one went first");
    eventually("the hot one goes on", PATIENCE, async || hot_seen.load(Ordering::SeqCst) > before).await;
    engine.shutdown(Duration::from_millis(500)).await;
    assert!(ordered.load(Ordering::SeqCst), "and in order");
}

/// The hot stream has many times as much waiting as memory has room for.
#[tokio::test(flavor = "multi_thread")]
async fn hot_stream_larger_than_memory_makes_room_for_the_cold_ones() {
    let (room, cold_count) = (2_000, 2_000);
    let space = Space::new().await;
    let (hot, client) = (Uuid::now_v7(), space.schema.client().await);
    fill_with(&client, hot, 5 * room, cold_count).await;
    let seen = Arc::new(Mutex::new(Seen::default()));
    let delay_ms = Arc::new(AtomicUsize::new(20));
    let (sees, pace) = (seen.clone(), delay_ms.clone());
    let transport = MemoryTransport::new(move |_, message| {
        let mut seen = sees.lock().unwrap();
        if message.stream_id == Some(hot) {
            seen.hot.push(message.stream_seq);
        } else {
            seen.cold.insert(message.stream_id);
        }
    })
    // Ten thousand of the hot stream's at this pace: three minutes and more.
    .with_delay(move || Duration::from_millis(pace.load(Ordering::SeqCst) as u64));
    let mut config = config(&space.schema);
    config.set("lane.rows_max", &room.to_string()).unwrap();
    config.set("shards.count", "1").unwrap();
    let engine = Engine::builder(config).transport(transport).start().await.unwrap();
    eventually("all cold ones are out", PATIENCE, async || seen.lock().unwrap().cold.len() == cold_count).await;
    // Further ones of the hot stream's go beside the log behind those that are there; a cold one does not wait for them.
    fill_with(&client, hot, room, PAGE).await;
    eventually("nor do later ones", PATIENCE, async || seen.lock().unwrap().cold.len() == cold_count + PAGE).await;
    let before = seen.lock().unwrap().hot.len();
    println!("{before} of the hot stream's were out before the last of the cold ones");
    assert!(before < room, "the cold ones waited for {before} of the hot stream's");
    let metrics = engine.shards()[0].metrics.clone();
    let most = metrics.memory.rows_max.get() as usize;
    assert!(most < 2 * room + 2 * PAGE, "{most} messages in memory at once");
    assert!(metrics.lanes_made_room.get() > 0);
    delay_ms.store(0, Ordering::SeqCst);
    eventually("the hot one is through", PATIENCE, async || seen.lock().unwrap().hot.len() >= 6 * room).await;
    engine.shutdown(Duration::from_secs(10)).await;
    let seen = seen.lock().unwrap();
    assert!(seen.hot.iter().copied().eq(1..=6 * room as i64), "each once and in order");
}

#[derive(Default)]
struct Seen {
    hot: Vec<i64>,
    cold: HashSet<Option<Uuid>>,
}
