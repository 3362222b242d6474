//! The inbox's memory of ids: which part each stands in, what is forgotten and when, and that nothing else is.

use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use crate::inbox_sql_kit::{DAY_MS, Session, id_at, id_of, past_day, remember, today};
use crate::outbox_kit::code;
use crate::store_kit::Space;
use crate::support::eventually;

/// Ids of the cleanup case in its short form.
const MANY: i32 = 200_000;

async fn days(session: &Session) -> Vec<(i32, bool)> {
    let rows = session.client.query("select day, is_made from wh_inbox_part order by day", &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[tokio::test]
async fn an_id_of_any_kind_is_remembered_where_its_bytes_say_and_once() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    let day = today();
    let first_ms = u64::try_from(day + 1).unwrap() * DAY_MS;
    let named = |part: &str| part.to_owned();
    let of = [
        (Uuid::nil(), named("timeless")),
        (Uuid::max(), named("timeless")),
        (Uuid::new_v4(), named("timeless")),
        // A version 4 that begins as an id of today, and a version 7 of another variant.
        (Uuid::from_u128(id_of(day, 7).as_u128() & !(0xf << 76) | (4 << 76)), named("timeless")),
        (Uuid::from_u128(id_of(day, 8).as_u128() & !(3 << 62)), named("timeless")),
        (id_at(0, 0), named("misdated")),
        (id_of(day - 2, 1), named("misdated other")),
        (id_of(day - 1, 1), named("other")),
        (id_at(first_ms - 1, 1), day.to_string()),
        (id_at(first_ms, 0), (day + 1).to_string()),
        (id_at(first_ms + DAY_MS - 1, (1 << 62) - 1), (day + 1).to_string()),
        (id_at(first_ms + DAY_MS, 0), format!("misdated {}", day + 2)),
        (id_of(day + 3, 1), named("misdated")),
        (id_of(day + 4, 1), named("misdated")),
        (id_at((1 << 48) - 1, (1 << 62) - 1), named("misdated")),
    ];
    let ids = of.each_ref().map(|(id, _)| *id);
    let by_server = "select array(select wh_inbox_day(g) from unnest($1::uuid[]) with ordinality g(g, n) order by n)";
    let by_server: Vec<i32> = session.client.query_one(by_server, &[&ids.as_slice()]).await.unwrap().get(0);
    let by_library: Vec<i32> = ids.iter().map(|id| corelane::ids::inbox_day(*id)).collect();
    assert_eq!(by_server, by_library, "one rule in two places");
    assert_eq!(session.remember(&ids).await, [true; 15]);
    for (id, part) in &of {
        assert_eq!((id, session.parts_of(*id).await), (id, part.clone()));
    }
    assert_eq!(session.remember(&ids).await, [false; 15]);
    // The next days come, also that of which there are ids; what is remembered stays so.
    let row = session.client.query_one("select made, skipped from maintain_inbox(interval '30 days', 6)", &[]).await;
    let row = row.unwrap();
    assert_eq!((row.get::<_, i32>(0), row.get::<_, i32>(1)), (3, 0));
    let known = days(&session).await;
    assert_eq!(known, (0..=6).map(|ahead| (day + ahead, true)).collect::<Vec<_>>());
    assert_eq!(session.remember(&ids).await, [false; 15]);
    assert_eq!(session.begin(&ids.map(|id| (id, id))).await, [1; 15]);
    let row =
        session.client.query_one("select days, days_skipped, oldest_day from inbox_statistics()", &[]).await.unwrap();
    assert_eq!((row.get::<_, i32>(0), row.get::<_, i32>(1), row.get::<_, i32>(2)), (7, 0, day));
}

#[tokio::test]
async fn ids_of_days_to_come_keep_no_day_from_its_part_and_are_forgotten_when_their_window_is_over() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    let forged: Vec<Uuid> = (2..=60).map(|ahead| id_of(today() + ahead, 1)).collect();
    let old: Vec<Uuid> = (31..=60).map(|back| id_of(today() - back, 1)).collect();
    let all = [forged.clone(), old].concat();
    assert_eq!(session.remember(&all).await, vec![true; 89]);
    let row = session.client.query_one("select made, skipped from maintain_inbox(interval '30 days', 30)", &[]).await;
    let row = row.unwrap();
    assert_eq!((row.get::<_, i32>(0), row.get::<_, i32>(1)), (27, 0), "no day waits for a stranger's id");
    assert_eq!(session.count("wh_inbox_seen_other").await, 0, "nothing that the making of a day would have to read");
    let age = async |by: &str| {
        let sql = format!("update wh_inbox_seen set received_at = received_at - interval '{by}' where day = -2");
        session.client.batch_execute(&sql).await.unwrap();
    };
    age("29 days").await;
    session.maintain("30 days").await;
    assert_eq!(session.remember(&all).await, vec![false; 89], "within its window, from its receipt");
    age("2 days").await;
    session.maintain("30 days").await;
    assert_eq!(session.count("wh_inbox_seen_misdated").await, 0);
    assert_eq!(session.remember(&forged[1..]).await, vec![true; 58]);
    // In bounded steps.
    let many: Vec<Uuid> = (0..1500).map(|rest| id_of(today() + 40, rest)).collect();
    session.client.batch_execute("truncate wh_inbox_seen_misdated").await.unwrap();
    assert_eq!(session.remember(&many).await, vec![true; 1500]);
    age("31 days").await;
    assert!(session.maintain("30 days").await.3, "there is more");
    assert_eq!(session.count("wh_inbox_seen_misdated").await, 500);
    assert!(!session.maintain("30 days").await.3);
    assert_eq!(session.count("wh_inbox_seen_misdated").await, 0);
}

/// Of a publisher whose clock was ahead.
#[tokio::test]
async fn an_id_that_came_before_its_time_is_known_when_its_time_has_come() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    let [early, honest] = [id_of(today(), 1), id_of(today(), 2)];
    let sql = "insert into wh_inbox_seen values (clock_timestamp() - interval '5 days', $1, -2, $2)";
    session.client.execute(sql, &[&early, &session.consumer]).await.unwrap();
    assert_eq!(session.begin(&[(early, early), (honest, honest)]).await, [1, 0]);
    assert_eq!(session.remember(&[early, honest]).await, [false, true]);
    let other: i16 = session.client.query_one("select consumer_number('other')", &[]).await.unwrap().get(0);
    assert_eq!(remember(&session.client, other, &[early, honest]).await.unwrap(), [true, true]);
}

/// Wherever it is remembered, the second of two at the same moment waits for the first.
#[tokio::test]
async fn copies_of_a_misdated_id_at_the_same_moment_are_one() {
    let space = Space::new().await;
    let (mut one, other) = (Session::new(&space).await, Session::new(&space).await);
    let watch = space.schema.client().await;
    let pid: i32 = other.client.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
    for (rest, day) in [today() - 50, today() - 2, today() + 2, today() + 3, today() + 50].into_iter().enumerate() {
        for commits in [true, false] {
            let copies = [id_of(day, 2 * rest as u64 + u64::from(commits))];
            let consumer = one.consumer;
            let transaction = one.client.transaction().await.unwrap();
            assert_eq!(remember(&transaction, consumer, &copies).await.unwrap(), [true]);
            let end = async {
                eventually("the copy waits", Duration::from_secs(20), || async {
                    let sql = "select exists (select from pg_locks where pid = $1 and not granted)";
                    watch.query_one(sql, &[&pid]).await.unwrap().get(0)
                })
                .await;
                if commits { transaction.commit().await.unwrap() } else { transaction.rollback().await.unwrap() }
            };
            let (copy, ()) = tokio::join!(other.remember(&copies), end);
            assert_eq!(copy, [!commits], "{day}");
        }
    }
}

#[tokio::test]
async fn a_day_is_forgotten_when_its_newest_receipt_is_older_than_the_window() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    let consumer = session.consumer;
    let (young, old, late) = (today() - 30, today() - 33, today() - 35);
    past_day(&session.client, consumer, young, 10, 30.0).await;
    past_day(&session.client, consumer, old, 10, 32.5).await;
    past_day(&session.client, consumer, late, 10, 34.0).await;
    // Of the oldest day one was received first 29 days ago: it has to be known for a day more.
    let straggler = id_of(late, 1);
    assert_eq!(session.remember(&[straggler]).await, [true]);
    let sql = "update wh_inbox_seen set received_at = clock_timestamp() - interval '29 days' where message_id = $1";
    session.client.execute(sql, &[&straggler]).await.unwrap();

    assert_eq!(session.maintain("30 days").await, (0, 1, false, true));
    assert_eq!(session.maintain("30 days").await, (0, 0, false, false), "no more than that");
    let of = days(&session).await;
    assert_eq!(of[..3], [(late, true), (young, true), (today(), true)]);
    assert_eq!(session.remember(&[straggler]).await, [false]);
    assert_eq!(session.maintain("28 days").await, (0, 1, false, true), "the straggler's window is over");
    // Its day is gone for good: what comes now is remembered apart from all days.
    assert_eq!(session.remember(&[straggler]).await, [true]);
    assert_eq!(session.parts_of(straggler).await, "misdated");
    assert_eq!(session.maintain("28 days").await, (0, 1, false, true), "the young one");
    for _ in 0..3 {
        assert_eq!(session.maintain("1 hour").await, (0, 0, false, false), "today and the days ahead stay");
    }
    assert_eq!(session.remember(&[straggler]).await, [false]);
    for window in ["59 minutes", "-1 days"] {
        let sql = format!("select maintain_inbox(interval '{window}')");
        assert_eq!(code(session.client.query(&sql, &[]).await), "22023");
    }
}

/// What makes the part of the day that begins has to find the default one empty of it, so the ends are looked at.
#[tokio::test]
async fn the_borders_of_a_day_and_of_the_window_are_exact() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    for day in [0, 1, 20_000, today(), 3_257_812] {
        let begins = u64::try_from(day).unwrap() * DAY_MS;
        let sql = "select wh_inbox_day($1), wh_inbox_day($2), wh_inbox_day($3)";
        let (first, last) = (id_at(begins, 0), id_at((begins + DAY_MS - 1).min((1 << 48) - 1), (1 << 62) - 1));
        let before = id_at(begins.saturating_sub(1), (1 << 62) - 1);
        let row = session.client.query_one(sql, &[&first, &last, &before]).await.unwrap();
        let of: [i32; 3] = [row.get(0), row.get(1), row.get(2)];
        assert_eq!(of, [day, day, (day - 1).max(0)]);
    }
    // Received a second inside the window, and a second outside.
    let day = today() - 40;
    past_day(&session.client, session.consumer, day, 1, 30.0 - 60.0 / 86_400.0).await;
    assert_eq!(session.maintain("30 days").await, (0, 0, false, false));
    let sql = "update wh_inbox_seen set received_at = received_at - interval '61 s' where day = $1";
    session.client.execute(sql, &[&day]).await.unwrap();
    assert_eq!(session.maintain("30 days").await, (0, 1, false, true));
}

#[tokio::test]
async fn a_day_whose_parent_is_in_use_is_made_empty_and_dropped_later() {
    let space = Space::new().await;
    let (session, mut user) = (Session::new(&space).await, Session::new(&space).await);
    let consumer = user.consumer;
    let (first, second) = (today() - 41, today() - 40);
    for day in [first, second] {
        past_day(&session.client, consumer, day, 100, 40.0).await;
    }
    let transaction = user.client.transaction().await.unwrap();
    let late = id_of(second, 1);
    remember(&transaction, consumer, &[Uuid::now_v7(), late]).await.unwrap();
    // The transaction has the parent and the second day, in which it has remembered one just now.
    assert_eq!(session.maintain("30 days").await, (1, 0, true, true));
    assert_eq!(session.count(&format!("wh_inbox_seen_{first}")).await, 0);
    assert_eq!(session.maintain("30 days").await, (0, 0, true, false), "the other is locked itself");
    transaction.commit().await.unwrap();
    assert_eq!(session.maintain("30 days").await, (0, 1, false, true));
    assert_eq!(session.maintain("30 days").await, (0, 0, false, false));
    assert_eq!(session.count(&format!("wh_inbox_seen_{second}")).await, 101, "in use again: its window begins anew");
    assert_eq!(session.remember(&[late]).await, [false]);
}

/// The case's long form is in the test below.
#[tokio::test]
async fn cleanup_by_several_at_once_gets_on_in_short_steps_without_a_deadlock() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    for back in 0..4 {
        past_day(&session.client, session.consumer, today() - 40 - back, MANY / 4, 40.0).await;
    }
    let until = Instant::now() + Duration::from_secs(60);
    let clean = async {
        let cleaner = Session::new(&space).await;
        cleaner.client.batch_execute("set statement_timeout = '200ms'").await.unwrap();
        let mut dropped = 0;
        while days(&cleaner).await.len() > 4 {
            assert!(Instant::now() < until, "no progress");
            match cleaner.client.query_one("select dropped from maintain_inbox(interval '30 days')", &[]).await {
                Ok(row) => dropped += row.get::<_, i32>(0),
                // A slow machine: what was read is kept.
                Err(error) => assert_eq!(error.code().unwrap().code(), "57014", "{error:?}"),
            }
            tokio::task::yield_now().await;
        }
        dropped
    };
    let insert = async {
        let inserter = Session::new(&space).await;
        while days(&inserter).await.len() > 4 {
            let ids: Vec<Uuid> = (0..100).map(|_| Uuid::now_v7()).collect();
            let lanes: Vec<_> = ids.iter().map(|id| (*id, *id)).collect();
            assert_eq!(inserter.begin(&lanes).await, [0; 100]);
            assert_eq!(inserter.remember(&ids).await, [true; 100]);
            inserter.unlock(&ids).await;
        }
    };
    // Three further instances, without a limit.
    let again = || async {
        let cleaner = Session::new(&space).await;
        let mut dropped = 0;
        while days(&cleaner).await.len() > 4 {
            dropped += cleaner.maintain("30 days").await.1;
            tokio::task::yield_now().await;
        }
        dropped
    };
    let (one, two, three, four, ()) = tokio::join!(clean, again(), again(), again(), insert);
    assert_eq!(one + two + three + four, 4, "each day once");
}

/// cargo test --test it -- --ignored --nocapture ten_million
/// CORELANE_TEST_IDS: fewer of them.
#[tokio::test]
#[ignore = "writes 10,000,000 ids: about two minutes and 2 GB"]
async fn ten_million_remembered_ids_cost_nothing_and_go_in_a_moment() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    let insert = async |what: &str| {
        let mut micros = Vec::new();
        for _ in 0..200 {
            let ids: Vec<Uuid> = (0..1000).map(|_| Uuid::now_v7()).collect();
            let began = Instant::now();
            assert_eq!(session.remember(&ids).await, [true; 1000]);
            micros.push(began.elapsed().as_micros());
        }
        micros.sort_unstable();
        println!("{what}: 1000 ids in {} us (median), {} us (p99)", micros[100], micros[197]);
    };
    insert("with none").await;
    let ids = std::env::var("CORELANE_TEST_IDS").map_or(10_000_000, |ids| ids.parse().unwrap());
    for back in 0..10 {
        past_day(&session.client, session.consumer, today() - 40 - back, ids / 10, 40.0).await;
    }
    insert(&format!("beside {ids} of other days")).await;
    let sql = format!(
        "insert into wh_inbox_seen select clock_timestamp(), id, {0}, 1 from (
            select overlay(gen_random_uuid()::text placing '7' from 15)::uuid as id from generate_series(1, {1})) g
        on conflict do nothing",
        today(),
        ids / 5
    );
    session.client.batch_execute(&sql).await.unwrap();
    insert(&format!("and {} of today", ids / 5)).await;
    session.client.batch_execute("set statement_timeout = '200ms'").await.unwrap();
    let (mut steps, mut worst) = (0, 0);
    let began = Instant::now();
    while days(&session).await.len() > 4 {
        let step = Instant::now();
        let _ = session.client.query_one("select maintain_inbox(interval '30 days')", &[]).await;
        worst = worst.max(step.elapsed().as_millis());
        steps += 1;
    }
    println!(
        "10 days of {} forgotten in {} ms, {steps} steps, the longest {worst} ms",
        ids / 10,
        began.elapsed().as_millis()
    );
}

#[tokio::test]
async fn never_lost_what_a_consumer_has_not_handled_outlives_every_cleaning() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    let (lane, day) = (Uuid::now_v7(), today() - 40);
    past_day(&session.client, session.consumer, day, 0, 40.0).await;
    let of = [id_of(day, 1), id_of(day, 2)].map(|id| (id, lane));
    session.keep(&of).await;
    session.park(lane, of[0].0, 1, "away", 0).await;
    // The consumer is away for 38 days, longer than the window.
    session
        .client
        .batch_execute(
            "update wh_inbox set received_at = received_at - interval '38 days';
            update wh_inbox_parked set parked_at = parked_at - interval '38 days', due = due - interval '38 days';
            update wh_inbox_seen set received_at = received_at - interval '38 days'",
        )
        .await
        .unwrap();
    assert_eq!(session.maintain("30 days").await, (0, 1, false, true));
    assert_eq!(session.maintain("1 hour").await, (0, 0, false, false));
    let row = session.client.query_one("select kept, parked, overdue, oldest_parked_ms from inbox_statistics()", &[]);
    let row = row.await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1), row.get::<_, i64>(2)), (2, 1, 1));
    assert!(row.get::<_, i64>(3) >= i64::try_from(38 * DAY_MS).unwrap());
    assert_eq!(session.claim_all().await.iter().map(|of| of.id).collect::<Vec<_>>(), of.map(|(id, _)| id));
    assert!(session.bury(of[0].0, "too late", false).await);
    session.maintain("1 hour").await;
    assert_eq!(session.count("wh_inbox_dead_letter").await, 1);
}

#[tokio::test]
async fn inboxes_of_two_schemas_do_not_notice_each_other() {
    let (one, other) = (Space::new().await, Space::new().await);
    let (mine, theirs) = (Session::new(&one).await, Session::new(&other).await);
    let [id, lane] = [Uuid::now_v7(), Uuid::now_v7()];
    assert_eq!(mine.begin(&[(id, lane)]).await, [0]);
    assert_eq!(theirs.begin(&[(id, lane)]).await, [0], "the same lane, locked over there");
    past_day(&mine.client, 1, today() - 40, 10, 40.0).await;
    past_day(&theirs.client, 1, today() - 40, 10, 40.0).await;
    let mut user = Session::new(&one).await;
    let transaction = user.client.transaction().await.unwrap();
    remember(&transaction, 1, &[id]).await.unwrap();
    transaction.query_one("select maintain_inbox(interval '30 days')", &[]).await.unwrap();
    assert_eq!(theirs.maintain("30 days").await, (0, 1, false, true));
    assert_eq!(theirs.remember(&[id]).await, [true]);
    transaction.commit().await.unwrap();
    assert_eq!(mine.remember(&[id]).await, [false]);
}

/// The server refuses a row of a day for the default part when the day's own part is made between the look and the row.
#[tokio::test]
async fn an_id_of_today_is_remembered_while_the_part_of_today_is_made() {
    let space = Space::new().await;
    let (session, mut other) = (Session::new(&space).await, Session::new(&space).await);
    let day = today();
    let unmade = format!("drop table wh_inbox_seen_{day}; delete from wh_inbox_part where day = {day}");
    session.client.batch_execute(&unmade).await.unwrap();
    let making = other.client.transaction().await.unwrap();
    let made = making.query_one("select made from wh_make_inbox_days(3)", &[]).await.unwrap();
    assert_eq!(made.get::<_, i32>(0), 1);
    let pid: i32 = session.client.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
    let id = id_of(day, 1);
    let watch = space.schema.client().await;
    let make = async {
        eventually("it waits for the parts", Duration::from_secs(60), || async {
            let sql = "select exists (select from pg_locks where pid = $1 and not granted)";
            watch.query_one(sql, &[&pid]).await.unwrap().get(0)
        })
        .await;
        making.commit().await.unwrap();
    };
    let ids = [id];
    let (new, ()) = tokio::join!(session.remember(&ids), make);
    assert_eq!(new, [true]);
    assert_eq!(session.parts_of(id).await, day.to_string(), "where whoever looks for it looks");
    assert_eq!(other.remember(&ids).await, [false]);
}
