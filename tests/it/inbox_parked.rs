//! What the inbox keeps and the rows that bring it back: a body without its lane's row is a message that nobody handles
//! again. They are never apart, whatever a commit is cut into, whoever fails in it, and whoever frees the lane meanwhile.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corelane::{Delivery, FailureReason, HandlerError, MemoryBroker};
use tokio::sync::Semaphore;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::inbox_kit::{
    Calls, Inbox, SOURCE, consume, consumer, does, does_in, effect, message, text_of, texts, writes,
};
use crate::inbox_sql_kit::{Session, finish, unpark};
use crate::store_kit::Space;
use crate::support::eventually;

const PATIENCE: Duration = Duration::from_secs(60);

/// Bodies that no claim will ever find.
const STRANDED: &str = "select convert_from(i.payload, 'UTF8') from wh_inbox i where not exists (
    select from wh_inbox_parked k where k.consumer = i.consumer and k.lane_id = i.lane_id)";

/// What commits in a transaction that holds 7 is refused.
const DEFERRED: &str =
    "create table deferred (n int primary key deferrable initially deferred); insert into deferred values (7)";

fn of_type(type_name: &str, stream: u128, text: &str) -> Delivery {
    Delivery { type_name: type_name.to_owned(), ..message(stream, text) }
}

/// A transaction with the last stored message of a lane, one that came behind it, and one that the database refuses is
/// taken apart between the first two: the first frees the lane before the second is kept.
#[tokio::test(flavor = "multi_thread")]
async fn what_came_behind_a_lane_that_a_part_of_its_commit_freed_is_handled() {
    let inbox =
        Inbox::new().set("inbox.workers", "1").set("inbox.commit_age_ms_max", "60000").set("retry.attempts_max", "2");
    let engine = inbox.engine(inbox.broker.clone()).await;
    inbox.client().await.batch_execute(DEFERRED).await.unwrap();
    static HEAD: Semaphore = Semaphore::const_new(0);
    static OTHER: Semaphore = Semaphore::const_new(0);
    let (calls, heads) = (Calls::default(), Calls::default());
    let (noted, noted_heads, ended) = (calls.clone(), heads.clone(), Calls::default());
    let noted_ended = ended.clone();
    let plain = does(move |delivery, context| {
        let (calls, heads, ended) = (noted.clone(), noted_heads.clone(), noted_ended.clone());
        Box::pin(async move {
            match text_of(delivery).as_str() {
                "head" if context.attempt() == 1 => return Err(HandlerError::retry("once")),
                "head" => {
                    heads.note();
                    drop(HEAD.acquire().await.unwrap());
                    ended.note();
                }
                "other" => {
                    calls.note();
                    drop(OTHER.acquire().await.unwrap());
                }
                _ => _ = calls.note(),
            }
            Ok(())
        })
    });
    let refused = writes(|_, context| {
        Box::pin(async move {
            context.transaction()?.execute("insert into deferred values (7)", &[]).await?;
            Ok(())
        })
    });
    let consumer =
        consumer(&engine).raw_handler("test.order", plain).raw_handler("test.refused", refused).start().await.unwrap();
    inbox.put(1, "head");
    heads.wait_for(1).await;
    // One still runs: nothing commits before it has ended. Two more than the head are decided before it.
    for (stream, text) in [(2, "other"), (3, "done"), (4, "done")] {
        inbox.put(stream, text);
    }
    calls.wait_for(3).await;
    HEAD.add_permits(1);
    ended.wait_for(1).await;
    inbox.put(1, "behind");
    inbox.broker.put(SOURCE, of_type("test.refused", 5, "refused"));
    inbox.put(6, "last");
    calls.wait_for(4).await;
    OTHER.add_permits(1);
    inbox.settled().await;
    assert!(consumer.metrics().bisections.get() > 0);
    assert_eq!(texts(&inbox.client().await, STRANDED).await, [""; 0]);
    calls.wait_for(5).await;
    inbox.nothing_kept().await;
    assert_eq!((consumer.metrics().handled.get(), inbox.count("wh_inbox_dead_letter").await), (6, 1));
    engine.shutdown(Duration::from_secs(10)).await;
}

/// A plan of one message: how it is handled, and how often it fails first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fails {
    Never,
    Retry,
    Dead,
    /// At the commit of its transaction.
    Refused,
}

/// The same for whatever commits are cut into: small ones, refused ones, messages that fail and die, lanes that are held
/// and given back by an operator, two engines, bodies that are stored first. No body is ever without its lane's row.
#[tokio::test(flavor = "multi_thread")]
async fn every_body_kept_has_its_lanes_row_at_every_moment_and_all_are_handled() {
    for (seed, (rows_max, settle, on_dead)) in [
        ("1", "effects", "continue"),
        ("2", "effects", "hold"),
        ("3", "stored", "continue"),
        ("1", "stored", "hold"),
        ("500", "effects", "continue"),
        ("500", "stored", "continue"),
        ("500", "stored", "continue"),
    ]
    .into_iter()
    .enumerate()
    {
        let inbox = Inbox::new()
            .set("inbox.workers", "1")
            .set("inbox.commit_rows_max", rows_max)
            .set("inbox.batch_quiet_ms", "0")
            .set("inbox.commit_age_ms_max", "100")
            .set("inbox.settle", settle)
            .set("inbox.on_dead", on_dead)
            .set("retry.base_ms", "5")
            .set("retry.cap_ms", "20")
            .set("inbox.poll_ms", "5");
        let mut engines = vec![inbox.engine(inbox.broker.clone()).await];
        if seed % 2 == 1 {
            engines.push(inbox.engine(inbox.broker.clone()).await);
        }
        let client = inbox.client().await;
        client.batch_execute(DEFERRED).await.unwrap();
        let mut random = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed as u64 + 1);
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let mut plan = HashMap::new();
        let mut deliveries = Vec::new();
        for n in 0..200 {
            let fails = match next(8) {
                0 | 1 => Fails::Retry,
                2 => Fails::Dead,
                3 | 4 => Fails::Refused,
                _ => Fails::Never,
            };
            let in_transaction = fails == Fails::Refused || next(2) == 0;
            let delivery = of_type(
                if in_transaction { "test.writes" } else { "test.plain" },
                (next(12) + 1).into(),
                &n.to_string(),
            );
            plan.insert(delivery.message_id, (fails, 0));
            deliveries.push(delivery);
        }
        let plan: Arc<Mutex<HashMap<Uuid, (Fails, u32)>>> = Arc::new(Mutex::new(plan));
        let mut consumers = Vec::new();
        for engine in &engines {
            let (of_writes, of_plain) = (plan.clone(), plan.clone());
            let writes = writes(move |delivery, context| {
                let fails = turn_of(&of_writes, delivery);
                Box::pin(async move {
                    effect(delivery, context).await?;
                    match fails {
                        Fails::Refused => {
                            context.transaction()?.execute("insert into deferred values (7)", &[]).await?;
                            Ok(())
                        }
                        fails => outcome(fails),
                    }
                })
            });
            let plain = does(move |delivery, _| {
                let fails = turn_of(&of_plain, delivery);
                let pause = Duration::from_millis(u64::from(delivery.payload[0] % 4) * 10);
                Box::pin(async move {
                    tokio::time::sleep(pause).await;
                    outcome(fails)
                })
            });
            let builder = consumer(engine).raw_handler("test.writes", writes).raw_handler("test.plain", plain);
            consumers.push(builder.start().await.unwrap());
        }
        let over = Arc::new(AtomicBool::new(false));
        let watching = tokio::spawn(watch(inbox.client().await, over.clone()));
        for (n, delivery) in deliveries.into_iter().enumerate() {
            inbox.broker.put(SOURCE, delivery);
            // So that some come while what failed before them is tried again.
            if n % 3 == 0 {
                tokio::time::sleep(Duration::from_millis(next(20))).await;
            }
        }
        eventually("all are handled", PATIENCE, || async {
            assert!(!watching.is_finished(), "a body stands without its lane's row");
            let handled: u64 = consumers.iter().map(|consumer| consumer.metrics().handled.get()).sum();
            handled == 200
        })
        .await;
        over.store(true, Ordering::Release);
        watching.await.unwrap();
        inbox.settled().await;
        inbox.nothing_kept().await;
        for engine in engines {
            engine.shutdown(Duration::from_secs(10)).await;
        }
        let twice = "select text from effect group by text having count(*) > 1";
        assert_eq!(texts(&client, twice).await, [""; 0]);
    }
}

/// How this call of a message is to end: as planned the first two times, well then.
fn turn_of(plan: &Mutex<HashMap<Uuid, (Fails, u32)>>, delivery: &Delivery) -> Fails {
    let mut plan = plan.lock().unwrap();
    let of = plan.get_mut(&delivery.message_id).unwrap();
    of.1 += 1;
    if of.1 <= 2 { of.0 } else { Fails::Never }
}

fn outcome(fails: Fails) -> Result<(), HandlerError> {
    match fails {
        Fails::Retry => Err(HandlerError::retry("now and then")),
        Fails::Dead => Err(HandlerError::permanent(FailureReason::ValidationError, "never, for now")),
        Fails::Never | Fails::Refused => Ok(()),
    }
}

/// Looks for bodies without their lane's row until it is told, and gives the dead letters back meanwhile.
async fn watch(client: Client, over: Arc<AtomicBool>) {
    let retry = "select retried from retry_inbox_dead_letters(p_all => true, p_dry_run => false)";
    let mut turn = 0;
    while !over.load(Ordering::Acquire) {
        assert_eq!(texts(&client, STRANDED).await, [""; 0]);
        turn += 1;
        if turn % 20 == 0 {
            // An operator may be the one that a deadlock ends.
            let _ = client.query(retry, &[]).await;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// In SQL: who keeps a body writes its lane's row, and leaves one that is there as it is.
#[tokio::test]
async fn what_is_kept_has_its_lanes_row_and_one_that_is_parked_stays_as_it_is() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    let [lane, parked, first, second] = std::array::from_fn(|_| Uuid::now_v7());
    session.keep(&[(first, lane)]).await;
    let due = "wh_inbox_parked where due <= clock_timestamp() and attempts = 0 and not held";
    assert_eq!(session.count(due).await, 1);
    let claimed: Vec<Uuid> = session.claim_all().await.into_iter().map(|of| of.id).collect();
    assert_eq!(claimed, [first]);
    // One that waits until later goes on waiting, with its attempts.
    let [head, behind, again] = std::array::from_fn(|_| Uuid::now_v7());
    session.keep(&[(head, parked)]).await;
    session.park(parked, head, 3, "not yet", 3_600_000).await;
    session.keep(&[(behind, parked), (second, lane), (again, parked)]).await;
    assert_eq!(
        session.count("wh_inbox_parked where attempts = 3 and due > clock_timestamp() + interval '59 min'").await,
        1
    );
    assert_eq!((session.count("wh_inbox").await, session.count("wh_inbox_parked").await), (5, 2));
}

/// In SQL: one frees the lane while another keeps a body in it, without the lane's lock. Whoever is first, they meet at
/// the lane's row.
#[tokio::test]
async fn a_lane_that_is_freed_while_a_body_is_kept_in_it_is_parked_again() {
    for keeps_first in [false, true] {
        let space = Space::new().await;
        let mut frees = Session::new(&space).await;
        let mut keeps = Session::new(&space).await;
        let (consumer, watcher) = (frees.consumer, space.schema.client().await);
        let [lane, head, behind] = std::array::from_fn(|_| Uuid::now_v7());
        frees.keep(&[(head, lane)]).await;
        let keeping = "select keep_inbox($1, 'orders', array[$2::uuid], array[$3::uuid], array[$2::uuid], '{test.order}', '{behind}')";
        let pid = "select pg_backend_pid()";
        let waiter = if keeps_first { &frees } else { &keeps };
        let waiter: i32 = waiter.client.query_one(pid, &[]).await.unwrap().get(0);
        let waits = || async {
            let sql = "select cardinality(pg_blocking_pids($1)) > 0";
            watcher.query_one(sql, &[&waiter]).await.unwrap().get::<_, bool>(0)
        };
        let first = frees.client.transaction().await.unwrap();
        let second = keeps.client.transaction().await.unwrap();
        assert_eq!(finish(&first, consumer, &[head]).await, [true]);
        if keeps_first {
            second.execute(keeping, &[&consumer, &lane, &behind]).await.unwrap();
            let freed = async {
                let free = unpark(&first, consumer, &[lane]).await;
                first.commit().await.unwrap();
                free
            };
            let kept = async {
                eventually("who frees waits", PATIENCE, waits).await;
                second.commit().await.unwrap();
            };
            assert_eq!(tokio::join!(freed, kept).0, [false]);
        } else {
            assert_eq!(unpark(&first, consumer, &[lane]).await, [true]);
            let kept = async {
                second.execute(keeping, &[&consumer, &lane, &behind]).await.unwrap();
                second.commit().await.unwrap();
            };
            let freed = async {
                eventually("who keeps waits", PATIENCE, waits).await;
                first.commit().await.unwrap();
            };
            tokio::join!(kept, freed);
        }
        assert_eq!(texts(&watcher, STRANDED).await, [""; 0], "keeps first: {keeps_first}");
        let claimed: Vec<Uuid> = Session::new(&space).await.claim_all().await.into_iter().map(|of| of.id).collect();
        assert_eq!(claimed, [behind]);
    }
}

/// A backlog of one lane that is larger than a look takes: the next look follows, no poll is waited for.
#[tokio::test(flavor = "multi_thread")]
async fn a_parked_backlog_is_handled_without_waiting_for_a_poll() {
    for in_transaction in [true, false] {
        let space = Space::new().await;
        let session = Session::new(&space).await;
        let lane = Uuid::from_u128(1);
        let kept: Vec<(Uuid, Uuid)> = (0..1_000).map(|_| (Uuid::now_v7(), lane)).collect();
        session.keep(&kept).await;
        let inbox = Inbox::in_schema(space.schema, MemoryBroker::new(30_000));
        let mut inbox = inbox.set("inbox.workers", "1");
        let engine = {
            inbox.settings.push(("inbox.poll_ms", "60000".to_owned()));
            inbox.engine(inbox.broker.clone()).await
        };
        let handler = does_in(in_transaction, move |delivery, context| {
            Box::pin(async move {
                if in_transaction {
                    effect(delivery, context).await?;
                }
                Ok(())
            })
        });
        let consumer = consume(&engine, handler).await;
        eventually("all are handled", PATIENCE, || async { consumer.metrics().handled.get() == 1_000 }).await;
        inbox.nothing_kept().await;
        if in_transaction {
            let order: Vec<usize> = inbox.effects(1_000).await.iter().map(|text| text.parse().unwrap()).collect();
            assert_eq!(order, (0..1_000).collect::<Vec<_>>());
        }
        engine.shutdown(Duration::from_secs(10)).await;
    }
}
