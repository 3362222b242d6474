//! `claim_work`: snapshots, pages, what is passed over; by two connections where the schedule matters.

use std::collections::HashSet;

use corelane::plan::snapshot::Snapshot;
use corelane::seam::store::{ClaimRequest, ReadPosition, ReadRange, Store};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::store_kit::*;

/// A caller's transaction that has stored messages of streams, each in a log row of its own, and is still open.
/// `first_number` is the number of each stream's message.
async fn enlist(client: &Client, messages: &[(Uuid, i64, &str)]) {
    for (stream, number, text) in messages {
        let partition = corelane::partition::partition_of(*stream, PARTITIONS) as i32;
        client
            .execute(
                "with p as materialized (select * from wh_draw_position()), o as (
                    insert into wh_outbox (position, stream_seq, xid, stored_at, lane_id, stream_id, message_id,
                        partition, segment, type_name, payload)
                    select position, $2, xid, now(), $1, $1, gen_random_uuid(), $3, 0, 'test.message',
                        convert_to($4::text, 'UTF8') from p)
                 insert into wh_log (position, xid, floor, segment, owned, partition, destination_index, stream_seq,
                    version, lane_id, destination)
                 select position, xid, floor, 0, false, array[$3], '{1}', array[$2], '{0}', array[$1], '{somewhere}'
                 from p",
                &[stream, number, &partition, text],
            )
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn a_reader_waits_for_nobody_and_skips_nobody() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let user = space.schema.client().await;
    user.batch_execute("begin").await.unwrap();
    let slow = Uuid::now_v7();
    enlist(&user, &[(slow, 1, "slow")]).await;
    owner.store(&[loose("quick 1")]).await;
    let (texts, position) = owner.drain(&ReadPosition::default(), 10).await;
    assert_eq!(texts, ["quick 1"], "an open transaction holds nothing up");
    owner.store(&[loose("quick 2")]).await;
    user.batch_execute("commit").await.unwrap();
    let (texts, position) = owner.drain(&position, 10).await;
    assert_eq!(texts, ["slow", "quick 2"], "what was listed is read when it commits, by position");
    assert!(owner.drain(&position, 10).await.0.is_empty(), "and once");
}

#[tokio::test]
async fn a_rolled_back_transaction_is_passed_without_waiting() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let user = space.schema.client().await;
    user.batch_execute("begin").await.unwrap();
    let never: i64 = user.query_one("select pg_current_xact_id()::text::int8", &[]).await.unwrap().get(0);
    enlist(&user, &[(Uuid::now_v7(), 1, "never")]).await;
    owner.store(&[loose("1")]).await;
    let (_, position) = owner.drain(&ReadPosition::default(), 10).await;
    user.batch_execute("rollback").await.unwrap();
    owner.store(&[loose("2")]).await;
    let (texts, position) = owner.drain(&position, 10).await;
    assert_eq!(texts, ["2"]);
    assert!(position.read.contains(never as u64), "it is behind the reader: {}", position.read);
}

#[tokio::test]
async fn a_lower_transaction_id_with_the_later_message_comes_later() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let stream = Uuid::now_v7();
    let user = space.schema.client().await;
    user.batch_execute("begin; create table elsewhere (x int); select pg_current_xact_id()").await.unwrap();
    owner.store(&[message(stream, "1")]).await;
    owner.store(&[message(stream, "2")]).await;
    enlist(&user, &[(stream, 3, "3")]).await;
    user.batch_execute("commit").await.unwrap();
    assert_eq!(owner.drain(&ReadPosition::default(), 1).await.0, ["1", "2", "3"], "a page a message");
    assert_eq!(owner.drain(&ReadPosition::default(), 10).await.0, ["1", "2", "3"]);
}

#[tokio::test]
async fn all_pages_are_cut_from_one_snapshot() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    for n in 0..5 {
        owner.store(&[loose(&n.to_string())]).await;
    }
    let first = owner.claim(&ReadPosition::default(), &[], 2).await;
    assert_eq!(payloads(&first.rows), ["0", "1"]);
    assert!(first.more && first.position.page.is_some() && first.position.read == Snapshot::empty());
    owner.store(&[loose("later")]).await;
    let second = owner.claim(&first.position, &[], 2).await;
    assert_eq!(payloads(&second.rows), ["2", "3"]);
    let third = owner.claim(&second.position, &[], 2).await;
    assert_eq!(payloads(&third.rows), ["4"], "what came later is not in the snapshot");
    assert!(!third.more);
    assert_eq!(third.position.read, first.position.page.unwrap().0);
    assert_eq!(owner.drain(&third.position, 2).await.0, ["later"]);
}

/// Log rows without references, and own rows in memory, take no room in a page: none of them may end the reading.
#[tokio::test]
async fn empty_log_rows_end_no_page_early() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let mut silent = loose("stored only");
    silent.destinations.clear();
    for _ in 0..40 {
        owner.store(&[silent.clone(), Message { id: Uuid::now_v7(), ..silent.clone() }]).await;
        silent.id = Uuid::now_v7();
    }
    owner.store(&[loose("behind them")]).await;
    for rows_max in [1, 3, 39, 40, 41, 1000] {
        assert_eq!(owner.drain(&ReadPosition::default(), rows_max).await.0, ["behind them"], "pages of {rows_max}");
    }
}

/// Few new rows are found by transaction id, many by walking; both must find the same.
#[tokio::test]
async fn a_deep_backlog_is_walked_whole_in_order_with_and_without_a_floor() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let stream = Uuid::now_v7();
    let late = Uuid::now_v7();
    owner.store(&[loose("before")]).await;
    let (_, mut position) = owner.drain(&ReadPosition::default(), 10).await;
    assert!(position.range.read_floor >= 0);
    // Open while the reader takes its snapshots: the lowest positions of all that is to come.
    let user = space.schema.client().await;
    user.batch_execute("begin").await.unwrap();
    enlist(&user, &[(late, 1, "late 1"), (late, 2, "late 2")]).await;
    let mut expected = Vec::new();
    for n in 0..400 {
        owner.store(&[message(stream, &n.to_string())]).await;
        expected.push(n.to_string());
        if n == 150 {
            let (texts, after) = owner.drain(&position, 50).await;
            assert_eq!(texts, expected);
            assert!(after.range.read_floor > 0, "the shard's rows bear a floor");
            expected.clear();
            position = after;
        }
    }
    user.batch_execute("commit").await.unwrap();
    enlist(&user, &[(late, 3, "late 3")]).await;
    expected.insert(0, "late 1".to_owned());
    expected.insert(1, "late 2".to_owned());
    expected.push("late 3".to_owned());
    for rows_max in [1, 7, 64, 5000] {
        assert_eq!(owner.drain(&position, rows_max).await.0, expected, "pages of {rows_max}");
        let unknown = ReadPosition { range: ReadRange::default(), ..position.clone() };
        assert_eq!(owner.drain(&unknown, rows_max).await.0, expected, "pages of {rows_max}, no floor");
    }
}

/// X has its id first and draws its position last, Y the other way round, and Y ends after the reader has read X:
/// what X says of positions must not hide Y, whose id no snapshot has listed.
#[tokio::test]
async fn who_had_its_id_before_says_nothing_of_positions() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let stream = Uuid::now_v7();
    let (x, y) = (space.schema.client().await, space.schema.client().await);
    x.batch_execute("begin; select pg_current_xact_id()").await.unwrap();
    y.batch_execute("begin").await.unwrap();
    enlist(&y, &[(Uuid::now_v7(), 1, "y")]).await;
    enlist(&x, &[(Uuid::now_v7(), 1, "x")]).await;
    x.batch_execute("commit").await.unwrap();
    let (texts, position) = owner.drain(&ReadPosition::default(), 10).await;
    assert_eq!(texts, ["x"]);
    y.batch_execute("commit").await.unwrap();
    // Enough for the reader to walk by position.
    let mut expected = vec!["y".to_owned()];
    for n in 0..200 {
        owner.store(&[message(stream, &n.to_string())]).await;
        expected.push(n.to_string());
    }
    assert_eq!(owner.drain(&position, 10).await.0, expected);
}

/// Writers of every kind, and a reader that never stops: each message once, each stream in order.
#[tokio::test]
async fn nothing_is_skipped_or_read_twice_while_others_write() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let reader = space.owner(1).await;
    let held = owner.held();
    let streams: Vec<Uuid> = (0..8).map(|_| Uuid::now_v7()).collect();
    let writing = async {
        for round in 0..150i64 {
            let batch: Vec<_> = streams[..4].iter().map(|s| message(*s, &format!("{s} {round}"))).collect();
            owner.store(&batch).await;
        }
    };
    let enlisting = async {
        for stream in &streams[4..] {
            let user = space.schema.client().await;
            for round in 0..60i64 {
                user.batch_execute("begin").await.unwrap();
                if round % 3 == 0 {
                    user.batch_execute("select pg_current_xact_id()").await.unwrap();
                }
                let rolled_back = round % 4 == 0;
                let number = if rolled_back { 1000 + round } else { round };
                enlist(&user, &[(*stream, number, &format!("{stream} {round}"))]).await;
                tokio::task::yield_now().await;
                user.batch_execute(if rolled_back { "rollback" } else { "commit" }).await.unwrap();
            }
        }
    };
    let done = std::cell::Cell::new(false);
    let reading = async {
        let (mut seen, mut position) = (Vec::new(), ReadPosition::default());
        loop {
            let last = done.get();
            let request = ClaimRequest {
                incarnation: reader.incarnation,
                shard: 0,
                position: &position,
                partitions: &held,
                flushes_in_memory: &[],
                rows_max: 5,
                streams_max: 4_096,
            };
            let reply = reader.store.claim_work(&request).await.unwrap();
            seen.extend(payloads(&reply.rows));
            position = reply.position;
            if last && !reply.more {
                return seen;
            }
        }
    };
    let writers = async {
        tokio::join!(writing, enlisting);
        done.set(true);
    };
    let ((), seen) = tokio::join!(writers, reading);
    assert_eq!(seen.len(), 4 * 150 + 4 * 45);
    assert_eq!(seen.iter().collect::<HashSet<_>>().len(), seen.len(), "none twice");
    for stream in &streams {
        let prefix = stream.to_string();
        let rounds: Vec<i64> =
            seen.iter().filter_map(|text| text.strip_prefix(&prefix)).map(|n| n.trim().parse().unwrap()).collect();
        assert!(rounds.is_sorted(), "{stream}: {rounds:?}");
    }
}

#[tokio::test]
async fn own_rows_in_memory_come_without_references_and_other_shards_not_at_all() {
    let space = Space::new().await;
    let mut owner = space.owner(2).await;
    let stored = owner.store(&[loose("in memory")]).await;
    let in_memory = owner.flush_number;
    owner.store(&[loose("forgotten")]).await;
    let reply = owner.claim(&ReadPosition::default(), &[in_memory], 10).await;
    assert_eq!(payloads(&reply.rows), ["forgotten"]);
    assert_eq!(reply.logs.len(), 2);
    assert_eq!(
        (reply.logs[0].xid, reply.logs[0].own_flush, reply.logs[0].reference_count),
        (stored.xid, Some(in_memory), 0)
    );
    assert_eq!((reply.logs[1].own_flush, reply.logs[1].reference_count), (None, 1));
    let held = owner.held();
    let request = ClaimRequest {
        incarnation: owner.incarnation,
        shard: 1,
        position: &ReadPosition::default(),
        partitions: &held,
        flushes_in_memory: &[in_memory],
        rows_max: 10,
        streams_max: 4_096,
    };
    let reply = owner.store.claim_work(&request).await.unwrap();
    assert!(reply.logs.is_empty() && reply.rows.is_empty(), "shard 0's rows are no concern of shard 1");
}

#[tokio::test]
async fn only_references_of_the_partitions_asked_for_are_handed_over() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    owner.store(&[event(stream_in(1), "1"), event(stream_in(2), "2"), event(stream_in(3), "3")]).await;
    let request = ClaimRequest {
        incarnation: owner.incarnation,
        shard: 0,
        position: &ReadPosition::default(),
        partitions: &[1, 3],
        flushes_in_memory: &[],
        rows_max: 10,
        streams_max: 4_096,
    };
    let reply = owner.store.claim_work(&request).await.unwrap();
    assert_eq!(payloads(&reply.rows), ["1", "3"]);
    assert_eq!(reply.logs[0].reference_count, 2);
}

#[tokio::test]
async fn a_reference_without_its_message_says_so_and_its_neighbours_are_whole() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let stream = Uuid::now_v7();
    owner.store(&[event(stream, "1"), event(stream, "gone"), event(stream, "3")]).await;
    space.schema.client().await.batch_execute("delete from wh_event_store where version = 2").await.unwrap();
    let reply = owner.claim(&ReadPosition::default(), &[], 10).await;
    let rows = &reply.rows;
    assert_eq!([0, 1, 2].map(|row| rows.is_missing(row)), [false, true, false]);
    assert_eq!((rows.stream_seq[1], rows.version[1], rows.lane_id[1]), (2, 2, stream));
    assert_eq!((payloads(rows), reply.logs[0].reference_count), (["1", "", "3"].map(str::to_owned).to_vec(), 3));
}

#[tokio::test]
async fn messages_of_every_segment_are_read() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let stream = Uuid::now_v7();
    let client = space.schema.client().await;
    for segment in 0..3i16 {
        client.execute("update wh_segment set current = $1", &[&segment]).await.unwrap();
        owner
            .store(&[event(stream, &format!("event {segment}")), message(stream, &format!("message {segment}"))])
            .await;
    }
    let (texts, _) = owner.drain(&ReadPosition::default(), 2).await;
    assert_eq!(texts, ["event 0", "message 0", "event 1", "message 1", "event 2", "message 2"]);
}

/// A page of a backlog costs what it holds, however long the backlog is, and a held snapshot changes nothing.
#[tokio::test]
async fn a_page_of_a_long_backlog_touches_few_pages() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let stream = Uuid::now_v7();
    owner.store(&[event(stream, "template")]).await;
    let client = space.schema.client().await;
    client
        .batch_execute(
            "insert into wh_log (position, xid, floor, segment, owned, partition, destination_index, stream_seq,
                version, lane_id, destination)
             select 10000 + n * 4096, 3 + n % 500, 0, n % 3, false, l.partition, l.destination_index, l.stream_seq,
                l.version, l.lane_id, l.destination
             from generate_series(1, 60000) n, (select * from wh_log limit 1) l;
             select setval('wh_position', 10000 + 60001::int8 * 4096)",
        )
        .await
        .unwrap();
    let holder = space.schema.client().await;
    holder.batch_execute("begin isolation level repeatable read; select count(*) from wh_segment").await.unwrap();
    let mut position = ReadPosition::default();
    for _ in 0..3 {
        position = owner.claim(&position, &[], 100).await.position;
    }
    let held: Vec<i32> = owner.held().iter().map(|p| *p as i32).collect();
    let (page, at) = position.page.clone().unwrap();
    // A session's first call reads the catalogue as well, and so does one that another test's tables came between: what is
    // asked for is what the page costs.
    let mut least = u64::MAX;
    for _ in 0..3 {
        let plan = client
            .query(
                "explain (analyze, buffers, timing off, costs off)
                 select * from claim_work($1, 0::int2, 0, '{}', $2, $3, $4, 0, 0, $5, $6, '{}', 100, 4096)",
                &[
                    &owner.incarnation.number,
                    &(page.xmax() as i64),
                    &page.listed().iter().map(|xid| *xid as i64).collect::<Vec<_>>(),
                    &at,
                    &position.range.page_ceiling,
                    &held,
                ],
            )
            .await
            .unwrap();
        let lines: Vec<&str> = plan.iter().map(|row| row.get(0)).collect();
        let line = lines.iter().find(|line| line.trim().starts_with("Buffers: shared")).unwrap();
        let counts = line.split(' ').filter_map(|word| word.split_once('='));
        let buffers: u64 =
            counts.filter(|(kind, _)| ["hit", "read"].contains(kind)).map(|(_, n)| n.parse::<u64>().unwrap()).sum();
        least = least.min(buffers);
    }
    assert!(least < 2_000, "{least} buffers for a page of 100");
}

#[tokio::test]
async fn a_page_ends_where_it_has_its_streams() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let (a, b, c, d) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
    // A log row each.
    for (stream, text) in [(a, "a1"), (a, "a2"), (b, "b1"), (a, "a3"), (c, "c1"), (d, "d1"), (d, "d2")] {
        owner.store(&[event(stream, text)]).await;
    }
    let held = owner.held();
    let mut position = ReadPosition::default();
    let mut pages = Vec::new();
    loop {
        let request = ClaimRequest {
            incarnation: owner.incarnation,
            shard: 0,
            position: &position,
            partitions: &held,
            flushes_in_memory: &[],
            rows_max: 100,
            streams_max: 2,
        };
        let reply = owner.store.claim_work(&request).await.unwrap();
        pages.push(payloads(&reply.rows).join(" "));
        assert_eq!(reply.logs.len(), reply.rows.len(), "what is behind the end was not passed");
        position = reply.position;
        if !reply.more {
            break;
        }
    }
    assert_eq!(pages, ["a1 a2 b1", "a3 c1", "d1 d2"]);
}
