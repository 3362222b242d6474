//! The inbox in SQL: who is handled, by whom, in which order, and that each leaves its effects once.

use std::time::Duration;

use corelane::store::grants;
use corelane::store::sql::FUNCTIONS;
use uuid::Uuid;

use crate::inbox_sql_kit::{Session, finish, remember, unpark};
use crate::outbox_kit::{code, refusal};
use crate::store_kit::Space;
use crate::support::{connect, eventually};

const NEW: i16 = 0;
const DUPLICATE: i16 = 1;
const BUSY: i16 = 2;
const BEHIND: i16 = 3;
const SOON: Duration = Duration::from_secs(60);

fn ids<const N: usize>() -> [Uuid; N] {
    std::array::from_fn(|_| Uuid::now_v7())
}

/// A copy of what is remembered is a duplicate, and leaves one row.
#[tokio::test]
async fn mixed_batch_old_and_new_and_the_old_again_have_outcomes_in_input_order() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    let [lane, old, new, other] = ids();
    assert_eq!(session.remember(&[old]).await, [true]);
    let batch = [old, new, old, other];
    assert_eq!(session.begin(&batch.map(|id| (id, lane))).await, [DUPLICATE, NEW, DUPLICATE, NEW]);
    assert_eq!(session.remember(&batch).await, [false, true, false, true]);
    assert_eq!(session.count("wh_inbox_seen").await, 3, "two rows for the four");

    // {m1, m1, m2}: the first wins. And in either order of the ids.
    for swapped in [false, true] {
        let [mut one, mut two] = ids();
        if swapped {
            (one, two) = (two, one);
        }
        assert_eq!(session.begin(&[(one, lane), (one, lane), (two, lane)]).await, [NEW, DUPLICATE, NEW]);
        assert_eq!(session.remember(&[one, one, two]).await, [true, false, true]);
    }
    // Another consumer has decided nothing of it.
    let consumer: i16 = session.client.query_one("select consumer_number('other')", &[]).await.unwrap().get(0);
    assert_eq!(remember(&session.client, consumer, &batch).await.unwrap(), [true, true, false, true]);
    assert_eq!(session.remember(&[]).await, [false; 0]);
}

/// One of two that have got the same message: begins until it may handle it, takes 200 ms, and commits or rolls back.
async fn deliver(space: &Space, message: (Uuid, Uuid), commits: bool, begun: Option<tokio::sync::oneshot::Sender<()>>) {
    let mut session = Session::new(space).await;
    loop {
        match session.begin(&[message]).await[0] {
            DUPLICATE => return,
            NEW => break,
            state => assert_eq!(state, BUSY),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    if let Some(begun) = begun {
        begun.send(()).unwrap();
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    let consumer = session.consumer;
    let transaction = session.client.transaction().await.unwrap();
    assert_eq!(remember(&transaction, consumer, &[message.0]).await.unwrap(), [true]);
    transaction.execute("insert into effect values ($1)", &[&commits]).await.unwrap();
    if commits {
        transaction.commit().await.unwrap();
    } else {
        transaction.rollback().await.unwrap();
    }
    session.unlock(&[message.1]).await;
}

#[tokio::test]
async fn same_moment_it_runs_once_and_again_only_if_the_first_rolls_back() {
    let space = Space::new().await;
    let watch = space.schema.client().await;
    watch.batch_execute("create table effect (committed bool)").await.unwrap();
    for first_commits in [true, false] {
        let [id, lane] = ids();
        let (begun, waiting) = tokio::sync::oneshot::channel();
        let second = async {
            waiting.await.unwrap();
            deliver(&space, (id, lane), true, None).await;
        };
        tokio::join!(deliver(&space, (id, lane), first_commits, Some(begun)), second);
        let row = watch.query_one("select count(*), bool_and(committed) from effect", &[]).await.unwrap();
        assert_eq!((row.get::<_, i64>(0), row.get::<_, bool>(1)), (1, true), "the first commits: {first_commits}");
        watch.batch_execute("truncate effect").await.unwrap();
    }
}

#[tokio::test]
async fn a_forged_copy_in_another_lane_is_stopped_by_the_memory() {
    let space = Space::new().await;
    for commits in [true, false] {
        let (mut one, other) = (Session::new(&space).await, Session::new(&space).await);
        let [id, lane, forged] = ids();
        assert_eq!((one.begin(&[(id, lane)]).await, other.begin(&[(id, forged)]).await), (vec![NEW], vec![NEW]));
        let pid: i32 = other.client.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
        let consumer = one.consumer;
        let transaction = one.client.transaction().await.unwrap();
        assert_eq!(remember(&transaction, consumer, &[id]).await.unwrap(), [true]);
        let watch = space.schema.client().await;
        let end = async {
            eventually("the copy waits", SOON, || async {
                let sql = "select exists (select from pg_locks where pid = $1 and not granted)";
                watch.query_one(sql, &[&pid]).await.unwrap().get(0)
            })
            .await;
            if commits { transaction.commit().await.unwrap() } else { transaction.rollback().await.unwrap() }
        };
        let copies = [id];
        let (copy, ()) = tokio::join!(other.remember(&copies), end);
        assert_eq!(copy, [!commits]);
    }
}

/// Everything is told by values and SQLSTATE: nothing reads a text of the server.
#[tokio::test]
async fn other_language_duplicates_and_refusals_are_known_without_reading_a_text() {
    for file in FUNCTIONS.iter().filter(|file| file.text.contains("wh_inbox")) {
        let text = file.text.to_lowercase();
        assert!(!text.contains("sqlerrm") && !text.contains("message_text"), "{} reads a text", file.name);
    }
    let space = Space::new().await;
    let session = Session::new(&space).await;
    for locale in ["C", "de_DE.UTF-8", "de_DE.utf8", "ru_RU.UTF-8", "ru_RU.utf8"] {
        if session.client.batch_execute(&format!("set lc_messages = '{locale}'")).await.is_err() {
            assert_ne!(locale, "C"); // Not every machine has the others.
            continue;
        }
        let [lane, old, new] = ids();
        session.remember(&[old]).await;
        assert_eq!(session.begin(&[(old, lane), (new, lane)]).await, [DUPLICATE, NEW]);
        assert_eq!(session.remember(&[old, new]).await, [false, true]);
        let none: [Option<Uuid>; 1] = [None];
        let refused = session.client.query_one("select remember_inbox($1, $2)", &[&session.consumer, &&none[..]]).await;
        assert_eq!(code(refused), "23502", "{locale}");
    }
}

#[tokio::test]
async fn a_lane_belongs_to_one_session_until_it_gives_it_back_or_ends() {
    let space = Space::new().await;
    let (one, other) = (Session::new(&space).await, Session::new(&space).await);
    let [a, b, m1, m2, m3, m4] = ids();
    assert_eq!(one.begin(&[(m1, a), (m2, a)]).await, [NEW, NEW]);
    assert_eq!(one.locked().await, 1, "once a lane");
    assert_eq!(other.begin(&[(m3, a), (m4, b)]).await, [BUSY, NEW]);
    // A lane that it has already is not locked again; one of nothing but duplicates does not stay locked.
    assert_eq!(one.try_begin(&[(m3, a)], &[a], &[]).await.unwrap(), [NEW]);
    assert_eq!(one.locked().await, 1);
    let [c] = ids();
    one.remember(&[m1]).await;
    assert_eq!(one.try_begin(&[(m1, c)], &[a], &[]).await.unwrap(), [DUPLICATE]);
    assert_eq!(one.locked().await, 1);
    // A duplicate is one though its lane is another's; m2 was never decided.
    assert_eq!(other.try_begin(&[(m1, a), (m2, a)], &[b], &[]).await.unwrap(), [DUPLICATE, BUSY]);
    one.unlock(&[a]).await;
    assert_eq!(one.locked().await, 0);
    assert_eq!(other.try_begin(&[(m2, a)], &[b], &[]).await.unwrap(), [NEW]);
    assert_eq!(one.begin(&[(m2, a)]).await, [BUSY]);
    drop(other);
    eventually("the ended session's lanes are free", SOON, || async { one.begin(&[(m2, a)]).await == [NEW] }).await;
    // Another consumer's lane of the same id is another lane.
    let mut stranger = Session::new(&space).await;
    stranger.consumer = stranger.client.query_one("select consumer_number('other')", &[]).await.unwrap().get(0);
    assert_eq!(stranger.begin(&[(m2, a)]).await, [NEW]);
}

/// A failure keeps its body and its reason; what is done leaves the inbox.
#[tokio::test]
async fn a_failed_head_holds_its_lane_back_and_all_comes_again_in_order() {
    let space = Space::new().await;
    let (session, other) = (Session::new(&space).await, Session::new(&space).await);
    let [a, b, m1, m2, m3, x] = ids();
    assert_eq!(session.begin(&[(m1, a), (m2, a), (x, b)]).await, [NEW; 3]);
    session.keep(&[(m1, a), (m2, a)]).await;
    session.park(a, m1, 1, "not today", 0).await;
    assert_eq!(session.try_begin(&[(m3, a)], &[a, b], &[]).await.unwrap(), [BEHIND]);
    session.keep(&[(m3, a)]).await;
    assert!(session.claim(&[a, b], 10, 10, 1 << 20).await.0.is_empty(), "it has that lane in hand");
    assert!(other.claim_all().await.is_empty(), "and nobody else gets it");
    session.unlock(&[a, b]).await;

    let claimed = other.claim_all().await;
    assert_eq!(claimed.iter().map(|of| (of.id, of.attempts)).collect::<Vec<_>>(), [(m1, 1), (m2, 0), (m3, 0)]);
    assert_eq!(other.locked().await, 1);
    assert_eq!(session.begin(&[(x, a)]).await, [BUSY]);
    // It fails again, and is not due for an hour.
    other.park(a, m1, 2, "nor today", 3_600_000).await;
    other.unlock(&[a]).await;
    assert!(session.claim_all().await.is_empty());
    session.client.batch_execute("update wh_inbox_parked set due = clock_timestamp()").await.unwrap();
    assert_eq!(session.claim_all().await[0].attempts, 2);
    assert_eq!(finish(&session.client, session.consumer, &[m1, m1, x]).await, [true, false, false]);
    assert_eq!(unpark(&session.client, session.consumer, &[a]).await, [false]);
    session.unlock(&[a]).await;
    let rest = session.claim_all().await;
    assert_eq!(rest.iter().map(|of| (of.id, of.attempts)).collect::<Vec<_>>(), [(m2, 0), (m3, 0)]);
    assert_eq!(finish(&session.client, session.consumer, &[m3, m2]).await, [true, true]);
    assert_eq!(unpark(&session.client, session.consumer, &[b, a]).await, [true, true]);
    assert_eq!(session.count("wh_inbox").await + session.count("wh_inbox_parked").await, 0);
    assert_eq!(session.try_begin(&[(m1, a), (Uuid::now_v7(), a)], &[a], &[]).await.unwrap(), [DUPLICATE, NEW]);
}

#[tokio::test]
async fn a_claim_is_bounded_and_keeps_no_lane_locked_of_which_it_answers_nothing() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    let lanes: [Uuid; 4] = ids();
    for (turn, lane) in lanes.iter().enumerate() {
        let of: [Uuid; 3] = ids();
        session.keep(&of.map(|id| (id, *lane))).await;
        session.park(*lane, of[0], 1, "", -100 + turn as i64).await;
    }
    let (claimed, more) = session.claim(&[], 2, 100, 1 << 20).await;
    assert_eq!((claimed.len(), more, session.locked().await), (6, true, 2));
    assert_eq!((claimed[0].lane, claimed[3].lane), (lanes[0], lanes[1]), "by due time");
    session.unlock(&lanes[..2]).await;
    let (claimed, more) = session.claim(&[], 10, 4, 1 << 20).await;
    assert_eq!((claimed.len(), more, session.locked().await), (4, true, 2), "rows");
    session.unlock(&lanes[..2]).await;
    let (claimed, more) = session.claim(&[], 10, 100, 1).await;
    assert_eq!((claimed.len(), more, session.locked().await), (1, true, 1), "bytes: one at least");
    session.unlock(&lanes[..1]).await;
    let (claimed, more) = session.claim(&[lanes[2]], 10, 9, 1 << 20).await;
    assert_eq!((claimed.len(), more), (9, false));
    session.unlock(&[lanes[0], lanes[1], lanes[3]]).await;
    // Of a lane whose messages somebody has deleted nothing remains.
    session.client.batch_execute("delete from wh_inbox").await.unwrap();
    assert!(session.claim_all().await.is_empty());
    assert_eq!((session.count("wh_inbox_parked").await, session.locked().await), (0, 0));
    for bounds in ["0, 1, 1", "1, 0, 1", "1, 1, 0"] {
        let sql = format!("select * from claim_inbox(1::int2, null, '{{}}', {bounds})");
        assert_eq!(code(session.client.query(&sql, &[]).await), "22023");
    }
}

/// Keeps and parks lanes with a message each, due one after the other.
async fn park_lanes(session: &Session, lanes: &[Uuid]) {
    let of: Vec<(Uuid, Uuid)> = lanes.iter().map(|lane| (Uuid::now_v7(), *lane)).collect();
    session.keep(&of).await;
    for (turn, (id, lane)) in of.iter().enumerate() {
        session.park(*lane, *id, 1, "", -1000 + turn as i64).await;
    }
}

#[tokio::test]
async fn lanes_in_others_hands_hold_back_no_lane_that_is_due_behind_them() {
    let space = Space::new().await;
    let (holder, session) = (Session::new(&space).await, Session::new(&space).await);
    let lanes: [Uuid; 105] = ids();
    park_lanes(&session, &lanes).await;
    // A hundred lanes, as many as a claim takes, that are due for longer.
    assert_eq!(holder.claim(&[], 100, 200, 1 << 20).await.0.len(), 100);
    let claimed = session.claim_all().await;
    assert_eq!(claimed.iter().map(|of| of.lane).collect::<Vec<_>>(), lanes[100..]);
    assert_eq!(session.locked().await, 5);
}

#[tokio::test]
async fn a_claim_looks_at_a_bounded_number_of_lanes_and_the_next_one_goes_on_behind_them() {
    let space = Space::new().await;
    let (holder, session) = (Session::new(&space).await, Session::new(&space).await);
    let lanes: [Uuid; 203] = ids();
    park_lanes(&session, &lanes).await;
    assert_eq!(holder.claim(&[], 201, 300, 1 << 20).await.0.len(), 201);
    let one = async || -> Vec<Uuid> { session.claim(&[], 1, 10, 1 << 20).await.0.iter().map(|of| of.lane).collect() };
    assert!(one().await.is_empty(), "a hundred");
    assert!(one().await.is_empty(), "and another hundred");
    assert_eq!(one().await, lanes[201..202], "and on");
    session.unlock(&lanes[201..202]).await;
    holder.unlock(&lanes[..1]).await;
    // The walk was over: the next one begins with what is due longest.
    assert_eq!(one().await, lanes[..1]);
    assert_eq!(session.locked().await, 1);
}

/// Pages of the inbox that a claim touches, of so many rows.
async fn pages_of_a_claim(session: &Session, rows_max: i32) -> i64 {
    let pages = "select sum(pg_stat_get_xact_blocks_fetched(c.oid))::int8 from pg_class c
        where c.oid in ('wh_inbox'::regclass, 'wh_inbox_lane'::regclass, 'wh_inbox_pkey'::regclass)";
    let pages = async || session.client.query_one(pages, &[]).await.unwrap().get::<_, i64>(0);
    session.client.batch_execute("begin").await.unwrap();
    let before = pages().await;
    let (claimed, _) = session.claim(&[], 100, rows_max, 1 << 30).await;
    assert_eq!(claimed.len(), rows_max as usize);
    let pages = pages().await - before;
    session.client.batch_execute("commit; select pg_advisory_unlock_all()").await.unwrap();
    pages
}

#[tokio::test]
async fn a_claim_reads_as_many_messages_as_it_answers_however_long_its_lanes_are() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    let lanes: [Uuid; 50] = ids();
    park_lanes(&session, &lanes).await;
    for _ in 0..200 {
        let of: Vec<(Uuid, Uuid)> = lanes.iter().map(|lane| (Uuid::now_v7(), *lane)).collect();
        session.keep(&of).await;
    }
    session.client.batch_execute("vacuum analyze wh_inbox").await.unwrap();
    let pages = pages_of_a_claim(&session, 100).await;
    assert!(pages < 1_500, "{pages} pages for 100 messages of 10,000");
    // In the order of their lanes, and of each lane from its first message on.
    let (claimed, more) = session.claim(&[], 100, 250, 1 << 30).await;
    assert!(more);
    let turns: Vec<Uuid> = claimed.iter().map(|of| of.lane).collect();
    assert_eq!(turns, [[lanes[0]; 201].as_slice(), [lanes[1]; 49].as_slice()].concat());
    assert_eq!(session.locked().await, 2);
}

#[tokio::test]
async fn what_begin_cannot_answer_truly_it_refuses() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    for level in ["repeatable read", "serializable"] {
        session.client.batch_execute(&format!("begin isolation level {level}")).await.unwrap();
        let [id, lane] = ids();
        let (state, text) = refusal(session.try_begin(&[(id, lane)], &[], &[]).await);
        assert_eq!(state, "22023");
        assert!(text.contains("READ COMMITTED"), "{text}");
        session.client.batch_execute("rollback").await.unwrap();
    }
    for arrays in ["'{}', array[gen_random_uuid()]", "array[null]::uuid[], array[gen_random_uuid()]", "null, null"] {
        let sql = format!("select begin_inbox(1::int2, {arrays})");
        assert_eq!(code(session.client.query(&sql, &[]).await), "22023", "{arrays}");
    }
    assert_eq!(session.locked().await, 0);
}

#[tokio::test]
async fn bodies_come_back_as_they_went_in_and_errors_are_cut() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    let all: Vec<u8> = (0..=255).collect();
    let bodies = [all.clone(), Vec::new(), b"{\"b\":1,\"a\":2,\"a\":1e400}".to_vec(), vec![0; 300_000]];
    let [lane, m1, m2, m3, m4] = ids();
    let of = [m1, m2, m3, m4].map(|id| (id, lane));
    session.remember(&[m1, m2, m3, m4]).await;
    assert_eq!(session.try_keep(&of, |index| bodies[index].clone()).await.unwrap(), 4);
    assert_eq!(session.try_keep(&of, |_| b"another".to_vec()).await.unwrap(), 0, "kept already");
    let huge = "\u{1f600}".repeat(250_000);
    session.park(lane, m1, 1, &huge, 0).await;
    let claimed = session.claim_all().await;
    assert_eq!(claimed.iter().map(|of| of.payload.clone()).collect::<Vec<_>>(), bodies);
    assert!(session.bury(m1, &huge, false).await);
    for table in ["wh_inbox_parked", "wh_inbox_dead_letter"] {
        let row = session.client.query_one(&format!("select error, error_cut from {table}"), &[]).await.unwrap();
        assert_eq!((row.get::<_, &str>(0), row.get::<_, bool>(1)), (&huge[..8192], true), "{table}");
    }
    // One bad element is the call's error, by its state; the caller halves the batch.
    let nothing: [Option<Vec<u8>>; 1] = [None];
    let sql = "select keep_inbox($1, 'orders', array[$2::uuid], array[$2::uuid], array[$2::uuid], '{t}', $3)";
    let refused = session.client.query_one(sql, &[&session.consumer, &m1, &&nothing[..]]).await;
    assert_eq!(code(refused), "23502");
}

#[tokio::test]
async fn a_consumer_has_one_number_whoever_asks_first() {
    let space = Space::new().await;
    let clients = [space.schema.client().await, space.schema.client().await, space.schema.client().await];
    let ask = async |client: &tokio_postgres::Client, name: &str| -> Result<i16, tokio_postgres::Error> {
        Ok(client.query_one("select consumer_number($1)", &[&name]).await?.get(0))
    };
    let (a, b, c) = tokio::join!(ask(&clients[0], "one"), ask(&clients[1], "one"), ask(&clients[2], "one"));
    let number = a.unwrap();
    assert_eq!((b.unwrap(), c.unwrap()), (number, number));
    assert_ne!(ask(&clients[0], "two").await.unwrap(), number);
    for name in ["", &"x".repeat(256)] {
        assert_eq!(code(ask(&clients[0], name).await), "22023");
    }
    let fill = "insert into wh_consumer (name) select 'c' || n from generate_series(1, 998) n";
    clients[0].batch_execute(fill).await.unwrap();
    assert_eq!(code(ask(&clients[0], "one too many").await), "22023");
    assert_eq!(ask(&clients[0], "one").await.unwrap(), number);
}

#[tokio::test]
async fn a_services_role_can_do_a_consumers_work_and_strangers_can_not_forget() {
    let space = Space::new().await;
    let admin = space.schema.client().await;
    let (role, stranger) = (format!("service_{}", space.schema.name), format!("stranger_{}", space.schema.name));
    let roles =
        format!("create role {role}; create role {stranger}; grant usage on schema {} to {stranger}", space.name);
    admin.batch_execute(&roles).await.unwrap();
    grants::grant(&admin, &space.name, &role).await.unwrap();
    let service = connect(&space.schema.url).await;
    service.batch_execute(&format!("set search_path = {}; set role {role}", space.name)).await.unwrap();
    let consumer: i16 = service.query_one("select consumer_number('billing')", &[]).await.unwrap().get(0);
    let session = Session { client: service, consumer };
    let [lane, m1, m2, m3] = ids();
    assert_eq!(session.begin(&[(m1, lane), (m2, lane)]).await, [NEW, NEW]);
    session.keep(&[(m1, lane), (m2, lane), (m3, lane)]).await;
    session.park(lane, m1, 1, "x", 0).await;
    session.unlock(&[lane]).await;
    assert_eq!(session.claim_all().await.len(), 3);
    assert_eq!(finish(&session.client, consumer, &[m1]).await, [true]);
    assert!(session.bury(m2, "x", true).await);
    assert_eq!(unpark(&session.client, consumer, &[lane]).await, [false]);
    for call in [
        "list_inbox_dead_letters(true)",
        "retry_inbox_dead_letters(true, p_dry_run => false)",
        "discard_inbox_dead_letters(true, p_dry_run => false)",
        "inbox_statistics()",
        "maintain_inbox(interval '1 hour')",
    ] {
        session.client.query(&format!("select * from {call}"), &[]).await.unwrap();
    }
    assert_eq!(code(session.client.execute("delete from wh_inbox_seen", &[]).await), "42501");
    session.client.batch_execute(&format!("reset role; set role {stranger}")).await.unwrap();
    for call in ["maintain_inbox(interval '1 hour')", "wh_make_inbox_days(3)"] {
        assert_eq!(code(session.client.query(&format!("select {call}"), &[]).await), "42501");
    }
    drop(session);
    let _ = admin.batch_execute(&format!("drop owned by {role}, {stranger}; drop role {role}, {stranger}")).await;
}
