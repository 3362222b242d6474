//! The callers' door in SQL: numbers, refusals, and what other transactions do at the same time.

use std::time::Duration;

use corelane::private_postgres::{Options, PrivatePostgres};
use corelane::seam::store::ReadPosition;
use tokio_postgres::{Client, IsolationLevel};
use uuid::Uuid;

use crate::outbox_kit::{call, code, refusal};
use crate::store_kit::{Message, PARTITIONS, Space, event, loose, message, payloads};
use crate::support::eventually;

fn stream() -> Uuid {
    Uuid::now_v7()
}

/// Everything of a stream by its number, as payloads; numbers and versions must have no gap and no double.
async fn story(client: &Client, stream: Uuid) -> Vec<String> {
    let rows = client
        .query(
            "select stream_seq, payload from wh_event_store where stream_id = $1 \
             union all select stream_seq, payload from wh_outbox where lane_id = $1 order by 1",
            &[&stream],
        )
        .await
        .unwrap();
    let numbers: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(numbers, (1..=rows.len() as i64).collect::<Vec<_>>(), "numbers of {stream}");
    let versions: Vec<i64> = client
        .query("select version from wh_event_store where stream_id = $1 order by stream_seq", &[&stream])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(versions, (1..=versions.len() as i64).collect::<Vec<_>>(), "versions of {stream}");
    rows.iter().map(|row| String::from_utf8(row.get(1)).unwrap()).collect()
}

async fn count(client: &Client, what: &str) -> i64 {
    client.query_one(&format!("select count(*) from {what}"), &[]).await.unwrap().get(0)
}

/// Rows of every table a call writes to.
async fn rows_written(client: &Client) -> i64 {
    let mut rows = 0;
    for table in ["wh_event_store", "wh_outbox", "wh_log", "wh_scheduled", "wh_stream"] {
        rows += count(client, table).await;
    }
    rows
}

/// Waits until a backend waits for an advisory lock.
async fn somebody_waits(watcher: &Client, pid: i32) {
    eventually("it waits for the lock", Duration::from_secs(10), || async {
        let waits = "select exists (select from pg_locks where locktype = 'advisory' and not granted and pid = $1)";
        watcher.query_one(waits, &[&pid]).await.unwrap().get(0)
    })
    .await;
}

async fn pid(client: &Client) -> i32 {
    client.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn one_call_numbers_events_and_messages_of_a_stream_together() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let (a, b) = (stream(), stream());
    let only_stored = Message { destinations: vec![], ..event(a, "a3") };
    let two = Message { destinations: vec!["east", "west"], ..message(a, "a4") };
    let calls = [event(a, "a1"), message(a, "a2"), event(b, "b1"), loose("free"), only_stored, two];
    let numbered = call(&client, &calls).await.unwrap();
    let shown: Vec<_> = numbered.iter().map(|one| (one.seq.unwrap(), one.version.unwrap())).collect();
    assert_eq!(shown, [(1, 1), (2, 0), (1, 1), (1, 0), (3, 2), (4, 0)]);
    assert!(numbered.iter().zip(&calls).all(|(one, asked)| one.message_id == asked.id));
    assert!(numbered.is_sorted_by_key(|one| one.position));
    assert_eq!(story(&client, a).await, ["a1", "a2", "a3", "a4"]);
    let numbered = call(&client, &[event(a, "a5")]).await.unwrap();
    assert_eq!((numbered[0].seq, numbered[0].version), (Some(5), Some(3)));

    let owner = space.owner(1).await;
    let (texts, _) = owner.drain(&Default::default(), 1000).await;
    assert_eq!(texts, ["a1", "a2", "b1", "free", "a4", "a4", "a5"]);
}

#[tokio::test]
async fn a_rollback_leaves_no_row_in_any_table() {
    let space = Space::new().await;
    let mut client = space.schema.client().await;
    let in_an_hour = Message { due_unix_us: 4_000_000_000_000_000, ..loose("later") };
    let transaction = client.transaction().await.unwrap();
    call(&transaction, &[event(stream(), "e"), message(stream(), "m"), loose("f"), in_an_hour]).await.unwrap();
    transaction.rollback().await.unwrap();
    assert_eq!(rows_written(&client).await, 0);
}

#[tokio::test]
async fn nil_stream_and_its_neighbours_are_refused_by_element_and_message() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let long: &'static str = Box::leak("d".repeat(256).into_boxed_str());
    let due = 4_000_000_000_000_000;
    for (bad, expected) in [
        (message(Uuid::nil(), "x"), "nil UUID is not a stream id"),
        (Message { id: Uuid::nil(), ..loose("x") }, "nil UUID is not a message id"),
        (Message { destinations: vec![""], ..loose("x") }, "destination has 0 bytes"),
        (Message { destinations: vec![long], ..loose("x") }, "destination has 256 bytes"),
        (Message { due_unix_us: due, ..event(stream(), "x") }, "an event cannot be scheduled"),
    ] {
        let outcome = call(&client, &[loose("good"), bad.clone(), message(stream(), "good")]).await;
        let (code, text) = refusal(outcome);
        assert_eq!(code, "22023", "{text}");
        assert!(text.starts_with(&format!("element 2 (message {})", bad.id)) && text.contains(expected), "{text}");
    }
    for (broken, expected) in [
        (
            "array[null]::uuid[], array[null]::uuid[], array['t'], array['\\x'::bytea], array[true], array['d']",
            "element 1 (message null)",
        ),
        ("null, null, null, null, null, null", "message_ids is null"),
        (
            "array[gen_random_uuid()], '{}', array['t'], array['\\x'::bytea], array[true], array['d']",
            "stream_ids has 0 elements, message_ids has 1",
        ),
        (
            "array[gen_random_uuid()], array[null]::uuid[], array[null]::text[], array['\\x'::bytea], array[true], array['d']",
            "type name is null",
        ),
        (
            "array[gen_random_uuid()], array[null]::uuid[], array['t'], array[null]::bytea[], array[true], array['d']",
            "payload is null",
        ),
        (
            "array[gen_random_uuid()], array[null]::uuid[], array['t'], array['\\x'::bytea], array[null]::bool[], array['d']",
            "event is null",
        ),
        (
            "array[gen_random_uuid()], array[null]::uuid[], array['t'], array['\\x'::bytea], array[false], array['d'], array[2], array['e']",
            "there is no message 2",
        ),
        (
            "array[gen_random_uuid()], array[null]::uuid[], array['t'], array['\\x'::bytea], array[false], array['d'], array[1], array[null]::text[]",
            "destination is null",
        ),
        (
            "array[gen_random_uuid()], array[null]::uuid[], array['t'], array['\\x'::bytea], array[false], array['d'], array[1], array['a', 'b']",
            "reference_messages has 1 elements",
        ),
        (
            "array[gen_random_uuid()], array[null]::uuid[], array['t'], array['\\x'::bytea], array[false], array['d'], dues => array['infinity'::timestamptz]",
            "not finite",
        ),
        (
            "array[gen_random_uuid()], array[null]::uuid[], array['t'], array['\\x'::bytea], array[false], array['d'], array_fill(1, array[64]), array_fill('x'::text, array[64])",
            "it has 65 destinations",
        ),
        (
            "array[gen_random_uuid()], array[null]::uuid[], array['t'], array['\\x'::bytea], array[false], array['d'], metadata => array[convert_to(repeat('m', 65537), 'UTF8')]",
            "metadata have 65537 bytes",
        ),
    ] {
        let (code, text) = refusal(client.query(&format!("select * from store_outbox_messages({broken})"), &[]).await);
        assert_eq!(code, "22023", "{text}");
        assert!(text.contains(expected), "{text}");
    }
    assert_eq!(rows_written(&client).await, 0);
    // And the neighbours alone are fine.
    call(&client, &[loose("good"), message(stream(), "good")]).await.unwrap();
}

#[tokio::test]
async fn nul_and_numbers_come_out_as_the_bytes_that_went_in() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let bodies: [&[u8]; 9] = [
        br#"{"a":"fine"}"#,
        br#"{"a":"\u0000"}"#,
        b"a\0b",
        &[0xff, 0xfe, 0x00],
        b"12345678901234567890",
        b"0.1234567890123456789",
        b"1e400",
        br#"[-0,1E+2,{"a":1,"a":2},{"b":1,"a":2}]"#,
        b"",
    ];
    let stream = stream();
    let messages: Vec<_> = bodies.iter().map(|body| Message { payload: body.to_vec(), ..event(stream, "") }).collect();
    call(&client, &messages).await.unwrap();
    let owner = space.owner(1).await;
    let reply = owner.claim(&Default::default(), &[], 100).await;
    let out: Vec<&[u8]> = reply.rows.payload.iter().map(|span| reply.rows.bytes(*span)).collect();
    assert_eq!(out, bodies);
}

#[tokio::test]
async fn two_writers_of_one_stream_lose_nobody_and_keep_their_order() {
    let space = Space::new().await;
    let stream = stream();
    let writing: Vec<_> = ["x", "y"]
        .into_iter()
        .map(|who| {
            let schema = space.schema.url.clone();
            let name = space.schema.name.clone();
            tokio::spawn(async move {
                let client = crate::support::connect(&schema).await;
                client.batch_execute(&format!("set search_path = {name}")).await.unwrap();
                for batch in 0..10 {
                    let messages: Vec<_> =
                        (0..10).map(|i| event(stream, &format!("{who}{}", batch * 10 + i))).collect();
                    call(&client, &messages).await.unwrap();
                }
            })
        })
        .collect();
    for writer in writing {
        writer.await.unwrap();
    }
    let client = space.schema.client().await;
    let story = story(&client, stream).await;
    assert_eq!(story.len(), 200);
    for who in ["x", "y"] {
        let own: Vec<&String> = story.iter().filter(|text| text.starts_with(who)).collect();
        let expected: Vec<String> = (0..100).map(|n| format!("{who}{n}")).collect();
        assert!(own.iter().zip(&expected).all(|(is, should)| *is == should) && own.len() == 100, "{own:?}");
    }
}

#[tokio::test]
async fn the_lower_transaction_id_can_hold_the_later_message() {
    let space = Space::new().await;
    let (mut low, mut high) = (space.schema.client().await, space.schema.client().await);
    let watcher = space.schema.client().await;
    let stream = stream();
    let low_pid = pid(&low).await;
    // `low` has its transaction id, and nothing of the stream.
    let low = low.transaction().await.unwrap();
    let low_xid: i64 = low.query_one("select pg_current_xact_id()::text::int8", &[]).await.unwrap().get(0);
    let high = high.transaction().await.unwrap();
    call(&high, &[message(stream, "first")]).await.unwrap();
    let high_xid: i64 = high.query_one("select pg_current_xact_id()::text::int8", &[]).await.unwrap().get(0);
    assert!(low_xid < high_xid);
    let messages = [message(stream, "second")];
    let (numbered, ()) = tokio::join!(call(&low, &messages), async {
        somebody_waits(&watcher, low_pid).await;
        high.commit().await.unwrap();
    });
    assert_eq!(numbered.unwrap()[0].seq, Some(2));
    low.commit().await.unwrap();
    let owner = space.owner(1).await;
    assert_eq!(payloads(&owner.claim(&Default::default(), &[], 1).await.rows), ["first"]);
    assert_eq!(owner.drain(&Default::default(), 1).await.0, ["first", "second"]);
}

#[tokio::test]
async fn an_old_snapshot_is_told_to_try_again_and_a_true_one_goes_through() {
    for level in [IsolationLevel::RepeatableRead, IsolationLevel::Serializable] {
        let space = Space::new().await;
        let (mut old, other) = (space.schema.client().await, space.schema.client().await);
        let stream = stream();
        // A number that its snapshot does not show: given to an event, or to a message; on a stream with and without
        // rows before.
        let mut cases = Vec::new();
        for second in [event, message, event, message] {
            for mine in [event, message] {
                cases.extend([true, false].map(|stale| (second, mine, stale)));
            }
        }
        for (number, (second, mine, stale)) in cases.into_iter().enumerate() {
            {
                let transaction = old.build_transaction().isolation_level(level).start().await.unwrap();
                transaction.query_one("select 1", &[]).await.unwrap();
                if stale {
                    call(&other, &[second(stream, "second")]).await.unwrap();
                }
                let outcome = call(&transaction, &[mine(stream, "late")]).await;
                if stale {
                    assert_eq!(code(outcome), "40001", "case {number}");
                    transaction.rollback().await.unwrap();
                } else {
                    outcome.unwrap();
                    transaction.commit().await.unwrap();
                }
            }
        }
        let told = story(&other, stream).await;
        assert_eq!(told.iter().filter(|text| *text == "late").count(), 8, "{told:?}");
    }
}

#[tokio::test]
async fn an_old_snapshot_sees_no_number_that_was_truncated_since() {
    for carried_before in [false, true] {
        let space = Space::new().await;
        let (mut old, other) = (space.schema.client().await, space.schema.client().await);
        let stream = stream();
        if carried_before {
            // Then the stream's row in wh_stream is visible to the old snapshot, with an old number.
            call(&other, &[message(stream, "m1")]).await.unwrap();
            truncate_as_rotation_does(&other).await;
        }
        let transaction =
            old.build_transaction().isolation_level(IsolationLevel::RepeatableRead).start().await.unwrap();
        transaction.query_one("select 1", &[]).await.unwrap();
        call(&other, &[message(stream, "m2")]).await.unwrap();
        truncate_as_rotation_does(&other).await;
        assert_eq!(code(call(&transaction, &[message(stream, "m3")]).await), "40001", "{carried_before}");
        transaction.rollback().await.unwrap();
        let numbered = call(&other, &[message(stream, "m3")]).await.unwrap();
        assert_eq!(numbered[0].seq, Some(2 + i64::from(carried_before)));
    }
}

/// Carries the numbers of the current segment and truncates it, in two transactions.
async fn truncate_as_rotation_does(client: &Client) {
    client.batch_execute("insert into wh_rotation (segment, seen) values (0, pg_current_snapshot())").await.unwrap();
    assert!(client.query_one("select wh_carry_numbers(0::int2)", &[]).await.unwrap().get::<_, bool>(0));
    let row = client.query_one("select truncated, blocked_by from wh_truncate_segment(0::int2)", &[]).await.unwrap();
    assert_eq!((row.get::<_, bool>(0), row.get::<_, Option<i32>>(1)), (true, None));
}

#[tokio::test]
async fn a_writer_waits_for_its_own_stream_only() {
    let space = Space::new().await;
    let (mut holder, waiter, other) =
        (space.schema.client().await, space.schema.client().await, space.schema.client().await);
    let (held, free) = (stream(), stream());
    let transaction = holder.transaction().await.unwrap();
    call(&transaction, &[event(held, "1")]).await.unwrap();
    let waiting_pid = pid(&waiter).await;
    let waiting = [event(held, "2")];
    let (numbered, ()) = tokio::join!(call(&waiter, &waiting), async {
        somebody_waits(&other, waiting_pid).await;
        // Everybody else goes on, whatever partition they are in.
        let others: Vec<_> = (0..100).map(|_| event(stream(), "x")).chain([event(free, "y"), loose("z")]).collect();
        call(&other, &others).await.unwrap();
        transaction.commit().await.unwrap();
    });
    assert_eq!(numbered.unwrap()[0].seq, Some(2));
}

#[tokio::test]
async fn more_streams_than_locks_lock_partitions_instead() {
    let space = Space::new().await;
    let mut client = space.schema.client().await;
    for (streams, expected_locks) in [(256, 256 + i64::from(PARTITIONS)), (257, i64::from(PARTITIONS))] {
        let transaction = client.transaction().await.unwrap();
        let messages: Vec<_> = (0..streams).map(|_| event(stream(), "x")).collect();
        call(&transaction, &messages).await.unwrap();
        let held = "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()";
        let locks: i64 = transaction.query_one(held, &[]).await.unwrap().get(0);
        assert_eq!(locks, expected_locks, "{streams} streams");
        transaction.commit().await.unwrap();
    }
}

#[tokio::test]
async fn many_in_one_call() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    // The subquery keeps the arrays out of the sort for `distinct`, which since 16 is of whole rows.
    for (rows, streams) in [(4_097, 3), (65_535, 10_000), (65_536, 300), (1_000_000, 10_000)] {
        client.batch_execute("truncate wh_event_store, wh_log, wh_outbox").await.unwrap();
        let row = client
            .query_one(
                "with made as (select i, gen_random_uuid() as id, ('10000000-0000-7000-8000-' || \
                 lpad((i % $2)::text, 12, '0'))::uuid as stream from generate_series(1, $1::int4) i), \
                 arrays as (select array_agg(id order by i) as ids, array_agg(stream order by i) as streams, \
                 array_agg(i % 3 > 0 order by i) as events, \
                 array_agg(convert_to(i::text, 'UTF8') order by i) as payloads from made) \
                 select count(*), count(distinct position), bool_and(is_same), max(stream_seq) from ( \
                 select s.*, s.message_id = ids[turn] as is_same \
                 from arrays, store_outbox_messages(ids, streams, array_fill('t'::text, array[$1]), payloads, events, \
                 array_fill('there'::text, array[$1])) with ordinality \
                 s(message_id, partition, stream_seq, version, position, turn) offset 0) s",
                &[&rows, &streams],
            )
            .await
            .unwrap();
        let rows = i64::from(rows);
        assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1), row.get::<_, bool>(2)), (rows, rows, true));
        assert_eq!(row.get::<_, i64>(3), (rows + i64::from(streams) - 1) / i64::from(streams));
        let log = client
            .query_one(
                "select sum(cardinality(partition)), max(cardinality(partition)), count(*) - count(distinct position) from wh_log",
                &[],
            )
            .await
            .unwrap();
        assert_eq!((log.get::<_, i64>(0), log.get::<_, i32>(1), log.get::<_, i64>(2)), (rows, 180, 0));
        // Numbers without gap, and in the order given.
        let wrong: i64 = client
            .query_one(
                "select count(*) from (select stream_seq, position, row_number() over (partition by lane order by position) \
                 as should from (select stream_id as lane, stream_seq, position from wh_event_store union all \
                 select lane_id, stream_seq, position from wh_outbox) s) s where stream_seq <> should",
                &[],
            )
            .await
            .unwrap()
            .get(0);
        assert_eq!(wrong, 0);
    }
}

#[tokio::test]
async fn destinations_of_one_message_stay_in_one_row_of_the_log() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let names: Vec<&'static str> = (0..64).map(|n| &*Box::leak(format!("d{n:02}").into_boxed_str())).collect();
    let messages: Vec<_> =
        (0..5).map(|n| Message { destinations: names.clone(), ..event(stream(), &n.to_string()) }).collect();
    call(&client, &messages).await.unwrap();
    let rows = client
        .query("select cardinality(partition), cardinality(destination), position from wh_log order by position", &[])
        .await
        .unwrap();
    let shape: Vec<(i32, i32)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(shape, [(128, 64), (128, 64), (64, 64)]);
    let owner = space.owner(1).await;
    let reply = owner.claim(&Default::default(), &[], 1000).await;
    assert_eq!(payloads(&reply.rows).len(), 320);
}

#[tokio::test]
async fn it_works_under_a_savepoint() {
    let space = Space::new().await;
    let mut client = space.schema.client().await;
    let stream = stream();
    let mut transaction = client.transaction().await.unwrap();
    let savepoint = transaction.savepoint("lost").await.unwrap();
    call(&savepoint, &[event(stream, "lost")]).await.unwrap();
    savepoint.rollback().await.unwrap();
    let savepoint = transaction.savepoint("kept").await.unwrap();
    call(&savepoint, &[event(stream, "kept")]).await.unwrap();
    savepoint.commit().await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(story(&client, stream).await, ["kept"]);
}

#[tokio::test]
async fn the_calls_that_the_documentation_shows_do_what_it_says() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let script = include_str!("../../sql/tests/store_outbox_messages.sql");
    client.batch_execute(&space.name.render(script)).await.unwrap();
}

#[tokio::test]
async fn a_prepared_transaction_is_published_when_it_is_committed() {
    let settings = vec!["max_prepared_transactions=4".to_owned()];
    let server = PrivatePostgres::start(Options { settings, ..Options::default() }).unwrap();
    let space = Space::in_schema(crate::support::schema_on(server.url("postgres"))).await;
    let (client, owner) = (space.schema.client().await, space.owner(1).await);
    let stream = stream();
    client.batch_execute("begin").await.unwrap();
    call(&client, &[event(stream, "prepared")]).await.unwrap();
    client.batch_execute("prepare transaction 'two phases'").await.unwrap();
    let (texts, at) = owner.drain(&ReadPosition::default(), 10).await;
    assert!(texts.is_empty(), "{texts:?}");
    // Its stream waits for the second phase, also without a session.
    let other = space.schema.client().await;
    other.batch_execute("set lock_timeout = '50ms'").await.unwrap();
    assert_eq!(code(call(&other, &[event(stream, "next")]).await), "55P03");
    client.batch_execute("commit prepared 'two phases'").await.unwrap();
    assert_eq!(call(&other, &[event(stream, "next")]).await.unwrap()[0].seq, Some(2));
    assert_eq!(owner.drain(&at, 10).await.0, ["prepared", "next"]);
}
