//! Hard cases of real processes: killed and started again under the same name, stopped for longer than their lease,
//! with a wrong clock, and coming and going all the time.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use corelane::partition::partition_of;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::outbox_kit::call;
use crate::process_kit::{CasePlan, CaseProcess, Manner, assert_ordered, first_copies, journal};
use crate::store_kit::event;
use crate::support::{TestSchema, eventually, schema};

const PATIENCE: Duration = Duration::from_secs(60);
const PARTITIONS: i64 = 16;

async fn holds_all(process: &CaseProcess) {
    eventually("it holds all partitions", PATIENCE, async || process.status().0 == PARTITIONS as usize).await;
}

/// Partitions of the living incarnations of this name.
async fn owned_by(client: &Client, instance: &str) -> i64 {
    let owned = "select count(*) from wh_partition p join wh_instance i on i.number = p.owner \
                 where i.instance_name = $1 and i.state = 0";
    client.query_one(owned, &[&instance]).await.unwrap().get(0)
}

/// What the killed one had stored and not published, and what it had published and not written down, is the work of
/// the next one, whose name is the same: a name is no identity.
#[tokio::test(flavor = "multi_thread")]
async fn same_name_killed_and_started_again_recovers_the_old_ones_work() {
    const BEFORE: usize = 20;
    let schema = schema();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal");
    let plan = |manner| CasePlan {
        schema: &schema,
        instance: "node-0",
        journal: &path,
        manner,
        settings: &[("shards.count", "1")],
        environment: &[],
    };
    let mut first = CaseProcess::start(&plan(Manner::HangAfter(BEFORE)));
    holds_all(&first).await;
    let streams: Vec<Uuid> = (0..10).map(|_| Uuid::now_v7()).collect();
    let texts: Vec<String> = (0..200).map(|n| n.to_string()).collect();
    let messages: Vec<(Uuid, &str)> =
        texts.iter().enumerate().map(|(n, text)| (streams[n % 10], text.as_str())).collect();
    first.store(&messages);
    eventually("some are published", PATIENCE, async || !journal(&path).is_empty()).await;
    first.kill();
    let killed = Instant::now();
    let accepted = journal(&path).len();
    assert!(accepted <= BEFORE, "most of it is still to be published: {accepted}");

    let second = CaseProcess::start(&plan(Manner::Accept));
    eventually("all is published", PATIENCE, async || first_copies(&journal(&path)).len() == 200).await;
    assert!(killed.elapsed() < PATIENCE);
    second.store(&[(streams[0], "after")]);
    eventually("and what comes after", PATIENCE, async || first_copies(&journal(&path)).len() == 201).await;
    let lines = journal(&path);
    assert_ordered(&lines);
    assert!(lines.len() - 201 <= accepted, "copies only of what the killed one had sent: {}", lines.len() - 201);
    assert_eq!((lines.last().unwrap().stream_seq, lines.last().unwrap().text.as_str()), (21, "after"));

    // A third under the name of a living one shares with it as any other, and its work is published all the same.
    let client = schema.client().await;
    let third = CaseProcess::start(&plan(Manner::Accept));
    third.store(&[(streams[0], "third")]);
    eventually("its work too", PATIENCE, async || first_copies(&journal(&path)).len() == 202).await;
    eventually("they share", PATIENCE, async || {
        (second.status().0, third.status().0) == (PARTITIONS as usize / 2, PARTITIONS as usize / 2)
    })
    .await;
    let states = "select array_agg(state::int4 order by number) from wh_instance where instance_name = 'node-0'";
    let states: Vec<i32> = client.query_one(states, &[]).await.unwrap().get(0);
    assert_eq!(states, [1, 0, 0], "dead, alive, alive: each start is an incarnation of its own");
    assert_ordered(&journal(&path));
}

/// A stops when the sink has m1, for longer than its lease; B takes over and publishes. A wakes in the middle of its
/// run, of which it has an outcome to write down: that is refused, and it starts no other run.
#[tokio::test(flavor = "multi_thread")]
async fn stall_takeover_keeps_the_order_and_the_sleeper_writes_and_sends_nothing() {
    let schema = schema();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal");
    let plan = |instance, manner| CasePlan {
        schema: &schema,
        instance,
        journal: &path,
        manner,
        settings: &[
            ("shards.count", "1"),
            ("lease.ttl_ms", "4000"),
            ("lease.margin_ms", "1500"),
            ("publish.timeout_ms", "500"),
        ],
        environment: &[],
    };
    let sleeper = CaseProcess::start(&plan("a", Manner::StopAtM1));
    holds_all(&sleeper).await;
    let taker = CaseProcess::start(&plan("b", Manner::Accept));
    eventually("they share", PATIENCE, async || {
        (sleeper.status().0, taker.status().0) == (PARTITIONS as usize / 2, PARTITIONS as usize / 2)
    })
    .await;
    let client = schema.client().await;
    let owned = "select array_agg(p.partition) from wh_partition p join wh_instance i on i.number = p.owner \
                 where i.instance_name = 'a'";
    let owned: Vec<i32> = client.query_one(owned, &[]).await.unwrap().get(0);
    let of_the_sleeper = || -> Uuid {
        let is_its = |stream: &Uuid| owned.contains(&(partition_of(*stream, PARTITIONS as u32) as i32));
        std::iter::repeat_with(Uuid::now_v7).find(is_its).unwrap()
    };
    let (stream, other) = (of_the_sleeper(), of_the_sleeper());
    // In one run with m1: it will be refused for good, which has to be written down.
    sleeper.begin_store(&[(stream, "m1"), (other, "x"), (stream, "m2"), (stream, "m3")]);
    eventually("the sleeper sleeps", PATIENCE, async || sleeper.is_stopped()).await;
    assert_eq!(journal(&path).iter().map(|line| line.text.as_str()).collect::<Vec<_>>(), ["m1"]);

    eventually("the other has published all", PATIENCE, async || first_copies(&journal(&path)).len() == 4).await;
    sleeper.signal(libc::SIGCONT);
    eventually("the sleeper comes back as another", PATIENCE, async || {
        let of_it = "select count(*) from wh_instance where instance_name = 'a'";
        client.query_one(of_it, &[]).await.unwrap().get::<_, i64>(0) == 2
            && sleeper.status().0 == PARTITIONS as usize / 2
    })
    .await;
    // Both live, and the work goes on.
    for text in ["m4", "m5"] {
        sleeper.store(&[(stream, text)]);
        let count = if text == "m4" { 5 } else { 6 };
        eventually("what comes after", PATIENCE, async || first_copies(&journal(&path)).len() == count).await;
    }
    let lines = journal(&path);
    assert_ordered(&lines);
    let of_stream: Vec<String> =
        first_copies(&lines).into_iter().filter(|line| line.stream == stream).map(|line| line.text).collect();
    assert_eq!(of_stream, ["m1", "m2", "m3", "m4", "m5"]);
    let fence = lines[0].fence;
    let by_sleeper: Vec<&str> = lines
        .iter()
        .filter(|line| line.instance == "a" && line.stream == stream && line.fence == fence)
        .map(|line| line.text.as_str())
        .collect();
    assert_eq!(by_sleeper, ["m1"], "what it was before starts no run after it woke");
    assert!(lines.iter().skip(1).all(|line| line.stream != stream || line.fence > fence), "{lines:?}");
    for table in ["wh_dead_letter", "wh_parked"] {
        let rows: i64 = client.query_one(&format!("select count(*) from {table}"), &[]).await.unwrap().get(0);
        assert_eq!(rows, 0, "{table}: the sleeper's outcome is refused");
    }
}

/// What a process asks for as the time of day is moved by what a file says, in seconds.
const CLOCK: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *time) {
    int answer = syscall(SYS_clock_gettime, id, time);
    const char *path = getenv("CASE_CLOCK");
    if (answer == 0 && id == CLOCK_REALTIME && path) {
        char text[32] = {0};
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file >= 0) {
            if (read(file, text, sizeof text - 1) > 0) time->tv_sec += atol(text);
            close(file);
        }
    }
    return answer;
}
"#;

fn moved_clock(directory: &Path, name: &str, library: &Path, seconds: i64) -> [(&'static str, String); 2] {
    let file = directory.join(name);
    std::fs::write(&file, seconds.to_string()).unwrap();
    [("LD_PRELOAD", library.display().to_string()), ("CASE_CLOCK", file.display().to_string())]
}

/// Clocks that are ten minutes wrong either way, and one that steps during its lease: nobody takes over early, and no
/// lease is endless.
#[tokio::test(flavor = "multi_thread")]
async fn skew_of_a_process_clock_steals_no_lease_and_makes_none_endless() {
    let schema = schema();
    let directory = tempfile::tempdir().unwrap();
    let (path, source, library) =
        (directory.path().join("journal"), directory.path().join("clock.c"), directory.path().join("clock.so"));
    std::fs::write(&source, CLOCK).unwrap();
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).status();
    assert!(compiled.expect("cc, which the build needs as well").success());
    let start = |instance, seconds| {
        CaseProcess::start(&CasePlan {
            schema: &schema,
            instance,
            journal: &path,
            manner: Manner::Accept,
            settings: &[
                ("shards.count", "1"),
                ("lease.ttl_ms", "2400"),
                ("lease.margin_ms", "1100"),
                ("publish.timeout_ms", "100"),
            ],
            environment: &moved_clock(directory.path(), instance, &library, seconds),
        })
    };
    let (ahead, behind) = (start("ahead", 600), start("behind", -600));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    for (process, wrong) in [(&ahead, now + 600), (&behind, now - 600)] {
        assert!(process.status().1.abs_diff(wrong) < 100, "the case is met: its clock is wrong");
    }
    let client = schema.client().await;
    watch(&client, &schema, &directory.path().join("ahead")).await;

    // The owner falls silent: it is taken over in its time, by the other's own elapsed time and the database's clock.
    let (owner, other) = if owned_by(&client, "ahead").await > 0 { (&ahead, "behind") } else { (&behind, "ahead") };
    owner.signal(libc::SIGSTOP);
    eventually("the other takes over", PATIENCE, async || owned_by(&client, other).await == PARTITIONS).await;
    let stream = Uuid::now_v7();
    call(&client, &[event(stream, "1"), event(stream, "2")]).await.expect("stored");
    eventually("it publishes", PATIENCE, async || first_copies(&journal(&path)).len() == 2).await;
    assert_ordered(&journal(&path));
}

/// Over two leases, the clock of one stepping twenty minutes in the middle, the owners stay who they are.
async fn watch(client: &Client, schema: &TestSchema, clock: &Path) {
    eventually("they share", PATIENCE, async || {
        owned_by(client, "ahead").await == PARTITIONS / 2 && owned_by(client, "behind").await == PARTITIONS / 2
    })
    .await;
    let fences = async || -> HashMap<i32, (i64, i32)> {
        let rows = client.query("select partition, fence, owner from wh_partition", &[]).await.unwrap();
        rows.iter().map(|row| (row.get(0), (row.get(1), row.get(2)))).collect()
    };
    let renewals = async || -> i64 {
        client.query_one("select min(counter) from wh_instance where state = 0", &[]).await.unwrap().get(0)
    };
    let (before, begun) = (fences().await, renewals().await);
    eventually("one lease has passed", PATIENCE, async || renewals().await >= begun + 4).await;
    std::fs::write(clock, "-600").unwrap();
    eventually("two leases more have passed", PATIENCE, async || renewals().await >= begun + 12).await;
    assert_eq!(fences().await, before, "nobody has taken anything over in {}", schema.name);
}

/// Of each partition, its fence and its owner.
async fn owners(client: &Client) -> HashMap<i32, (i64, Option<i32>)> {
    let rows = client.query("select partition, fence, owner from wh_partition", &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), (row.get(1), row.get(2)))).collect()
}

/// Stores 100 messages a second on these streams until told to stop; answers how many.
fn store_steadily(process: &CaseProcess, streams: &[Uuid], stop: &AtomicBool) -> usize {
    const AT_ONCE: usize = 5;
    let mut stored = 0;
    while !stop.load(Ordering::Acquire) {
        let next = Instant::now() + Duration::from_millis(50);
        let at = |n: usize| (streams[(stored + n) % streams.len()], "x");
        process.store(&(0..AT_ONCE).map(at).collect::<Vec<_>>());
        stored += AT_ONCE;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    stored
}

/// One publishes all the time; every half second three others come and two go.
#[tokio::test(flavor = "multi_thread")]
async fn churn_of_instances_keeps_the_order_and_copies_at_most_what_was_in_flight() {
    const ROUNDS: usize = 5;
    let schema = schema();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal");
    let start = &|instance: &str| {
        CaseProcess::start(&CasePlan {
            schema: &schema,
            instance,
            journal: &path,
            manner: Manner::Accept,
            settings: &[("shards.count", "1")],
            environment: &[],
        })
    };
    let steady = start("steady");
    holds_all(&steady).await;
    let client = schema.client().await;
    let before = owners(&client).await;
    let streams: Vec<Uuid> = (0..50).map(|_| Uuid::now_v7()).collect();
    let (streams, has_ended) = (&streams, &AtomicBool::new(false));
    // On threads of their own: a process that starts, stops or stores is waited for.
    let (stored, _steady, others) = tokio::task::block_in_place(|| {
        std::thread::scope(|scope| {
            let storing = scope.spawn(move || (store_steadily(&steady, streams, has_ended), steady));
            let mut others: Vec<CaseProcess> = Vec::new();
            for round in 0..ROUNDS {
                let next = Instant::now() + Duration::from_millis(500);
                let names = (0..3).map(|n| format!("other-{round}-{n}"));
                let coming: Vec<_> = names.map(|name| scope.spawn(move || start(&name))).collect();
                let going: Vec<CaseProcess> = others.drain(..others.len().min(2)).collect();
                let going: Vec<_> = going.into_iter().map(|other| scope.spawn(move || other.stop())).collect();
                others.extend(coming.into_iter().map(|other| other.join().unwrap()));
                going.into_iter().for_each(|other| other.join().unwrap());
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
            }
            has_ended.store(true, Ordering::Release);
            let (stored, steady) = storing.join().unwrap();
            (stored, steady, others)
        })
    });
    assert_eq!(others.len(), 3 * ROUNDS - 2 * (ROUNDS - 1));
    eventually("all is published", PATIENCE, async || first_copies(&journal(&path)).len() == stored).await;
    let lines = journal(&path);
    assert_ordered(&lines);
    let senders: std::collections::HashSet<&str> = lines.iter().map(|line| line.instance.as_str()).collect();
    assert!(senders.len() > 2, "the work moves: {senders:?}");

    // A lane has one message in flight at most: that may go out twice when its partition changes hands, which are two steps
    // of its fence.
    let after = owners(&client).await;
    let changes = |partition: i32| (after[&partition].0 - before[&partition].0) / 2;
    let in_flight: i64 = streams.iter().map(|stream| changes(partition_of(*stream, PARTITIONS as u32) as i32)).sum();
    let copies = lines.len() - stored;
    println!("{stored} messages, {copies} copies, {in_flight} times a stream changed hands");
    assert!(copies as i64 <= in_flight, "{copies} copies, where streams have changed hands {in_flight} times");
}

/// Shares are as even as can be, with the fewest moves.
#[tokio::test(flavor = "multi_thread")]
async fn churn_from_four_instances_to_five_moves_at_most_a_fifth_of_the_partitions() {
    const OF: i64 = 64;
    let schema = schema();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal");
    let start = &|instance: &str| {
        CaseProcess::start(&CasePlan {
            schema: &schema,
            instance,
            journal: &path,
            manner: Manner::Accept,
            settings: &[("shards.count", "1"), ("partitions.count", "64")],
            environment: &[],
        })
    };
    let mut members = vec![start("first")];
    let others = tokio::task::block_in_place(|| {
        std::thread::scope(|scope| {
            let others = ["second", "third", "fourth"].map(|name| scope.spawn(move || start(name)));
            others.into_iter().map(|other| other.join().unwrap()).collect::<Vec<_>>()
        })
    });
    members.extend(others);
    let client = schema.client().await;
    let shares = async || -> Vec<i64> {
        let held = "select count(*) from wh_partition where owner is not null group by owner order by count(*)";
        client.query(held, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
    };
    eventually("four share", PATIENCE, async || shares().await == [OF / 4; 4]).await;
    let before = owners(&client).await;
    members.push(start("fifth"));
    eventually("five share", PATIENCE, async || shares().await == [12, 13, 13, 13, 13]).await;
    let after = owners(&client).await;
    let moved = after.iter().filter(|(partition, of)| before[*partition].1 != of.1).count() as i64;
    // Let go of and taken: two steps of a fence. One may have gone to and fro while views differed.
    let changes: i64 = after.iter().map(|(partition, of)| (of.0 - before[partition].0) / 2).sum();
    println!("{moved} of {OF} moved in {changes} changes");
    assert!(moved <= OF / 5 + 1 && changes <= moved + 1, "{moved} of {OF} moved, in {changes} changes");
}
