//! `process_work_batch`: several callers, their shares, and what becomes of one whose lease ends.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use corelane::seam::store::Coordination;
use corelane::store::postgres::PostgresCoordination;
use uuid::Uuid;

use crate::outbox_kit::refusal;
use crate::store_kit::{ALL, PARTITIONS, Space, event, registration, stream_in};
use crate::support::eventually;
use crate::work_kit::Worker;

async fn expire(worker: &Worker) {
    let sql = "update wh_instance set lease_until = clock_timestamp() - interval '1 s' where id = $1";
    worker.client.execute(sql, &[&worker.id]).await.unwrap();
}

async fn store_on(worker: &Worker, streams: &[Uuid], rounds: usize) {
    for round in 0..rounds {
        let text = round.to_string();
        let messages: Vec<_> = streams.iter().map(|stream| event(*stream, &text)).collect();
        worker.store(&messages).await;
    }
}

/// Claims are disjoint and complete, and a stream has one caller. (By
/// leases of partitions, not by `partition % 2`.)
#[tokio::test]
async fn callers_share_the_partitions_and_hand_over_without_a_copy() {
    let space = Space::new().await;
    let mut workers = vec![Worker::new(&space).await];
    let streams: Vec<Uuid> = (0..100).map(|_| Uuid::now_v7()).collect();
    let (mut seen, mut copies): (HashMap<Uuid, Vec<i64>>, usize) = (HashMap::new(), 0);
    for round in 0..12 {
        if round == 3 || round == 6 {
            workers.push(Worker::new(&space).await);
        }
        store_on(&workers[0], &streams, 2).await;
        let mut owners: HashMap<Uuid, usize> = HashMap::new();
        for (number, worker) in workers.iter().enumerate() {
            let answer = worker.claim().await;
            for handed in &answer.handed {
                let stream = handed.stream_id.unwrap();
                assert_eq!(*owners.entry(stream).or_insert(number), number, "one caller a stream");
                let of = seen.entry(stream).or_default();
                copies += usize::from(of.contains(&handed.stream_seq));
                of.push(handed.stream_seq);
            }
            worker.complete(&answer.ids()).await;
        }
    }
    for _ in 0..6 {
        for worker in &workers {
            let answer = worker.claim().await;
            for handed in &answer.handed {
                let of = seen.entry(handed.stream_id.unwrap()).or_default();
                copies += usize::from(of.contains(&handed.stream_seq));
                of.push(handed.stream_seq);
            }
            worker.complete(&answer.ids()).await;
        }
    }
    assert_eq!(copies, 0);
    for stream in &streams {
        assert_eq!(seen[stream], (1..=24).collect::<Vec<i64>>());
    }
    let shares = "select array_agg(held order by held) from
        (select count(*) as held from wh_partition group by owner) o";
    let shares: Vec<i64> = workers[0].client.query_one(shares, &[]).await.unwrap().get(0);
    assert_eq!(shares, [5, 5, 6]);
    assert_eq!(workers[2].claim().await.members, Some(3));
}

/// A hand-over waits for what is in hand, and no longer than a lease.
#[tokio::test]
async fn a_hand_over_waits_for_what_is_in_hand_for_a_lease() {
    let space = Space::new().await;
    let (first, second) = (Worker::new(&space).await, Worker::new(&space).await);
    let streams: Vec<Uuid> = (0..96).map(|number| stream_in(number % PARTITIONS)).collect();
    store_on(&first, &streams, 1).await;
    let handed = first.claim().await;
    assert_eq!(handed.handed.len(), 96);
    second.claim().await;
    first.claim().await;
    assert_eq!(second.claim().await.partitions, Some(0), "all of them have something in hand");
    let decided: Vec<Uuid> =
        handed.handed.iter().filter(|of| of.partition < 4).map(|handed| handed.message_id).collect();
    first.complete(&decided).await;
    assert_eq!(second.claim().await.partitions, Some(4));
    let old = "update wh_handed_out set handed_at = clock_timestamp() - interval '31 s'";
    first.client.execute(old, &[]).await.unwrap();
    let renewed: Vec<Uuid> =
        handed.handed.iter().filter(|of| of.partition < 12).map(|handed| handed.message_id).collect();
    first.call("p_renew_outbox_lease_ids => $2", &[&renewed]).await;
    let answer = second.claim().await;
    assert_eq!(answer.partitions, Some(8), "four more, which were not renewed");
    let gone: HashSet<Uuid> = answer.ids().into_iter().collect();
    assert!(!gone.is_empty(), "published by the next owner");
    let late = first.complete(&handed.ids()).await;
    assert_eq!(late.completed, Some((96 - decided.len() - gone.len()) as i32), "the others are not its own any more");
}

/// After its lease ended a call answers so, stores only what is new, and never works again.
#[tokio::test]
async fn after_its_lease_ended_a_call_stores_only_what_is_new() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let stream = Uuid::now_v7();
    store_on(&worker, &[stream], 2).await;
    let ids = worker.claim().await.ids();
    expire(&worker).await;
    let named =
        "p_outbox_completions => $2, p_outbox_failures => array[$3::uuid], p_new_outbox_messages => array[$4::uuid],
        p_new_outbox_stream_ids => array[$5::uuid], p_new_outbox_types => array['t'], p_new_outbox_payloads =>
        array['new'::bytea], p_new_outbox_is_event => array[true], p_new_outbox_destinations => array['d']";
    let new = Uuid::now_v7();
    let answer = worker.call(named, &[&ids[..1].to_vec(), &ids[1], &new, &stream]).await;
    assert!(answer.lease_lost && answer.handed.is_empty());
    assert_eq!((answer.completed, answer.stored), (None, vec![(new, Some(3), Some(3))]));
    assert_eq!(worker.count("wh_partition where owner is not null").await, 0, "its partitions are free at once");
    assert_eq!(worker.count("wh_parked").await + worker.count("wh_handed_out").await, 0);
    assert!(worker.claim().await.lease_lost, "for ever");
    let next = Worker::new(&space).await.claim().await;
    assert_eq!(next.payloads(), ["0", "1", "new"], "what was not decided in time comes again, in order");
}

/// A dead caller's work is taken over when its lease and another of the survivor's calls
/// are over, and not before; a step of the clock ends nobody.
#[tokio::test]
async fn the_survivor_of_two_callers_takes_over_when_the_lease_is_over() {
    let space = Space::new().await;
    let (dead, alive) = (Worker::new(&space).await, Worker::new(&space).await);
    dead.claim().await;
    let streams: Vec<Uuid> = (0..30).map(|_| Uuid::now_v7()).collect();
    store_on(&dead, &streams, 1).await;
    assert_eq!(dead.claim().await.handed.len(), 30);
    let short = "p_lease_seconds => 1";
    for _ in 0..3 {
        assert_eq!(alive.call(short, &[]).await.partitions, Some(0), "not before its lease is over");
    }
    expire(&dead).await;
    assert_eq!(alive.call(short, &[]).await.partitions, Some(0), "not at the first look");
    eventually("the survivor has all", Duration::from_secs(10), || async {
        alive.call(short, &[]).await.partitions == Some(PARTITIONS as i32)
    })
    .await;
    let again = alive.call("p_lease_seconds => 1, p_flags => 2", &[]).await;
    assert_eq!(again.handed.len(), 30);
    assert!(dead.claim().await.lease_lost);
}

/// A step of the database's clock, seen from one call to the next, counts for a second.
#[tokio::test]
async fn a_step_of_the_clock_ends_nobody() {
    let space = Space::new().await;
    let (sleeper, other) = (Worker::new(&space).await, Worker::new(&space).await);
    sleeper.claim().await;
    expire(&sleeper).await;
    other.claim().await;
    let long_ago = "update wh_worker_watch set looked_at = looked_at - interval '1 h'";
    assert_eq!(other.client.execute(long_ago, &[]).await.unwrap(), 1);
    assert_eq!(other.claim().await.partitions, Some(0));
    let watched = other.client.query_one("select watched_ms from wh_worker_watch", &[]).await.unwrap();
    assert_eq!(watched.get::<_, i64>(0), 1000);
    // It goes on before the other is sure: nothing is left of that.
    let alive = "update wh_instance set lease_until = clock_timestamp() + interval '30 s' where id = $1";
    other.client.execute(alive, &[&sleeper.id]).await.unwrap();
    assert!(!sleeper.claim().await.lease_lost);
    other.claim().await;
    assert_eq!(other.count("wh_worker_watch").await, 0);
}

/// The fence: who declares a caller dead waits for its call, and then reads all of what it wrote.
#[tokio::test]
async fn whoever_declares_a_caller_dead_waits_for_its_call() {
    let space = Space::new().await;
    let mut worker = Worker::new(&space).await;
    let stream = Uuid::now_v7();
    store_on(&worker, &[stream], 1).await;
    let ids = worker.claim().await.ids();
    let (id, number) = (worker.id, worker.number().await);
    let watch = space.schema.client().await;
    let transaction = worker.client.transaction().await.unwrap();
    let sql = "select * from process_work_batch($1, 'tests', p_outbox_completions => $2)";
    transaction.query(sql, &[&id, &ids]).await.unwrap();
    // The call's renewal is not visible: the lease that others see is over.
    let taker = space.schema.client().await;
    let marking = tokio::spawn(async move {
        let sql = "select mark_dead($1, (select counter from wh_instance where number = $1), false)";
        taker.query_one(sql, &[&number]).await.unwrap().get::<_, bool>(0)
    });
    eventually("the taker waits", Duration::from_secs(10), || crate::store_kit::waits_for_class(&watch, 3)).await;
    transaction.commit().await.unwrap();
    assert!(!marking.await.unwrap(), "it has renewed");
    expire(&worker).await;
    let sql = "select mark_dead($1, (select counter from wh_instance where number = $1), false)";
    assert!(watch.query_one(sql, &[&number]).await.unwrap().get::<_, bool>(0));
    assert!(Worker::new(&space).await.claim().await.handed.is_empty(), "what it had decided is resolved");
}

#[tokio::test]
async fn ids_of_engines_and_of_those_that_only_store_are_refused() {
    let space = Space::new().await;
    let owner = space.owner(2).await;
    let worker = Worker { id: owner.incarnation.id, ..Worker::new(&space).await };
    let (code, text) = refusal(worker.try_call("", &[]).await);
    assert_eq!((code.as_str(), text.contains("engine")), ("22023", true), "{text}");
    assert_eq!(owner.coordination.take_partitions(owner.incarnation, &ALL).await.unwrap().unwrap().held.len(), 16);
    let only_stores = Worker::new(&space).await;
    assert_eq!(only_stores.call("p_max_streams_per_batch => 0", &[]).await.members, None);
    assert_eq!(refusal(only_stores.try_call("", &[]).await).0, "22023");
    let other = PostgresCoordination::new(space.dial(), &space.name);
    let (engine, _) = other.register_instance(&registration("another", 1), 60_000).await.unwrap();
    let members = other.members(engine).await.unwrap();
    assert!(members.others.iter().all(|member| member.incarnation.id != only_stores.id), "it counts for no share");
}

/// At a higher level a call that has not seen the one before fails, and can be run again.
#[tokio::test]
async fn a_call_at_a_higher_level_that_missed_the_one_before_is_told_to_try_again() {
    let space = Space::new().await;
    let (worker, mut other) = (Worker::new(&space).await, space.schema.client().await);
    worker.claim().await;
    store_on(&worker, &[Uuid::now_v7()], 1).await;
    let level = tokio_postgres::IsolationLevel::RepeatableRead;
    let transaction = other.build_transaction().isolation_level(level).start().await.unwrap();
    transaction.query("select 1 from wh_epoch", &[]).await.unwrap();
    let ids = worker.claim().await.ids();
    worker.complete(&ids).await;
    let late = transaction.query("select * from process_work_batch($1, 'tests')", &[&worker.id]).await;
    assert_eq!(refusal(late).0, "40001");
}

/// A clean end leaves what is in hand to the next owner, and nothing of what is decided.
#[tokio::test]
async fn a_clean_end_leaves_what_is_in_hand_to_the_next_owner() {
    let space = Space::new().await;
    let (first, second) = (Worker::new(&space).await, Worker::new(&space).await);
    let streams: Vec<Uuid> = (0..30).map(|_| Uuid::now_v7()).collect();
    store_on(&first, &streams, 2).await;
    let handed = first.claim().await;
    assert_eq!(handed.handed.len(), 60);
    first.complete(&handed.ids()[..30]).await;
    store_on(&first, &streams, 1).await;
    first.claim().await;
    assert!(first.client.query_one("select end_work($1)", &[&first.id]).await.unwrap().get::<_, bool>(0));
    assert_eq!(first.count("wh_handed_out").await, 0);
    let left = second.claim().await;
    assert_eq!(left.ids()[..30], handed.ids()[30..]);
    assert_eq!(left.handed.len(), 60);
}

/// A worker owns from its first claim on: one that only says that it lives takes no share of anybody's.
#[tokio::test]
async fn who_has_never_claimed_owns_nothing_and_leaves_no_share_behind() {
    let space = Space::new().await;
    let (first, beating) = (Worker::new(&space).await, Worker::new(&space).await);
    let beat = async |worker: &Worker, named: &str| {
        let sql = format!("select lease_lost, partitions from heartbeat($1, 'tests'{named})");
        let row = worker.client.query_one(&sql, &[&worker.id]).await.unwrap();
        (row.get::<_, bool>(0), row.get::<_, i32>(1))
    };
    assert_eq!((beat(&beating, "").await, beat(&beating, "").await), ((false, 0), (false, 0)));
    let answer = first.claim().await;
    assert_eq!((answer.members, answer.partitions), (Some(1), Some(PARTITIONS as i32)));
    let coordination = PostgresCoordination::new(space.dial(), &space.name);
    let engine = coordination.register_instance(&registration("engine", 1), 60_000).await.unwrap().0;
    let members = coordination.members(engine).await.unwrap();
    let members: Vec<i32> = members.others.iter().map(|of| of.incarnation.number).collect();
    assert_eq!(members, [first.number().await], "nor does an engine wait for it");
    coordination.deregister_instance(engine).await.unwrap();

    let claim = "select count(*) from claim_outbox_messages($1)";
    beating.client.query_one(claim, &[&beating.id]).await.unwrap();
    let answer = first.claim().await;
    assert_eq!((answer.members, answer.partitions), (Some(2), Some(8)));
    beating.client.query_one(claim, &[&beating.id]).await.unwrap();
    assert_eq!(beat(&beating, "").await, (false, 8));

    // Who says so never owns; and who claims for another service is refused then, not before.
    let (storing, foreign) = (Worker::new(&space).await, Worker::new(&space).await);
    assert_eq!(beat(&storing, ", p_owns => false").await, (false, 0));
    assert_eq!(refusal(storing.client.query(claim, &[&storing.id]).await).0, "22023");
    let other = "select * from heartbeat($1, 'others')";
    foreign.client.query_one(other, &[&foreign.id]).await.unwrap();
    assert_eq!(refusal(foreign.client.query(claim, &[&foreign.id]).await).0, "CL008");
    assert!(!beat(&foreign, "").await.0, "it lives, and may store");
}
