//! A schema that is changed under running programs: those of the version before go on, and one that it does not fit
//! stands down and loses nothing.

use std::time::Duration;

use corelane::engine::event_store;
use corelane::inbox;
use corelane::seam::store::StoreError;
use corelane::store::postgres::statements;
use corelane::store::schema_name::SchemaName;
use corelane::store::sql::SCHEMA_VERSION;
use corelane::store::subscriptions::Statements;
use corelane::{Engine, Error, RawMessage};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::engine::{Sink, start};
use crate::outbox_kit::call;
use crate::store_kit::{Message, PARTITIONS, Space, message};
use crate::support::eventually;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/statements_");

/// What callers in other languages and operators send.
const OTHERS: [&str; 23] = [
    "select message_id, partition, stream_seq, version, position from @schema@.store_outbox_messages($1, $2, $3, $4, $5, \
     $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)",
    "select fits, why_not, partition_count, generation from @schema@.check_installation()",
    "select what, figure, note from @schema@.wh_status()",
    "select done, generation, pending, parked, scheduled, dead_letters from @schema@.rebase($1)",
    "select @schema@.expect_versions($1, $2)",
    "select * from @schema@.append_events($1, $2, $3, $4, expected_versions => $5)",
    "select dead_letter_id, dead_at, destination, lane_id, stream_id, stream_seq, version, message_id, type_name, attempts, \
     retried, reason, error, error_cut, error_fingerprint, holds, is_stored \
     from @schema@.list_dead_letters($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
    "select * from @schema@.show_dead_letter($1)",
    "select matched, retried, not_stored, lanes, released, more \
     from @schema@.retry_dead_letters($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
    "select matched, discarded, released, more \
     from @schema@.discard_dead_letters($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
    "select @schema@.release_lanes($1, $2)",
    "select dead_letter_id, dead_at, consumer, source, lane_id, stream_id, message_id, received_at, type_name, attempts, \
     retried, reason, error, error_cut, error_fingerprint, holds \
     from @schema@.list_inbox_dead_letters($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
    "select * from @schema@.show_inbox_dead_letter($1)",
    "select matched, retried, lanes, released, more \
     from @schema@.retry_inbox_dead_letters($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)",
    "select matched, discarded, released, more \
     from @schema@.discard_inbox_dead_letters($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)",
    "select consumers, days, days_skipped, oldest_day, seen_bytes, timeless_rows, other_rows, kept, kept_bytes, parked, held, \
     overdue, oldest_parked_ms, dead_letters from @schema@.inbox_statistics()",
    "select replay_id, matched, replayed, waiting, dead, lanes, last_position, more from @schema@.replay_events($1, $2, $3, \
     $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
    "select first_version, matched, truncated, waiting, dead, more from @schema@.truncate_stream($1, $2, $3, $4, $5)",
    "select events, messages, dead_letters, inbox, more from @schema@.erase_events($1, $2, $3, $4)",
    "select unpublished, unpublished_age_ms, overdue, stuck, stuck_age_ms, held from @schema@.wh_sentinel($1, $2)",
    "select * from @schema@.process_work_batch($1, $2, $3, $4)",
    "select * from @schema@.process_inbox_batch($1, $2, p_completions => $3, p_failures => $4, p_failure_errors => $5, \
     p_new_messages => $6, p_new_stream_ids => $7, p_new_types => $8, p_new_payloads => $9, p_new_source => $10)",
    "select @schema@.keep_inbox($1, $2, $3, $4, $5, $6, $7)",
];

/// A statement as it stands in a golden file: its text, what it takes, what it answers.
pub async fn described(client: &Client, name: &SchemaName, text: &str) -> String {
    let prepared = client.prepare(&text.replace("@schema@", name.quoted())).await;
    let prepared = prepared.unwrap_or_else(|error| panic!("{text}: {:?}", error.as_db_error()));
    let takes: Vec<&str> = prepared.params().iter().map(tokio_postgres::types::Type::name).collect();
    let answers: Vec<String> =
        prepared.columns().iter().map(|column| format!("{} {}", column.name(), column.type_().name())).collect();
    format!("{text}\n    takes: {}\n    answers: {}\n", takes.join(", "), answers.join(", "))
}

#[tokio::test]
async fn the_statements_of_this_version_are_the_golden_ones() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let shards = statements(&space.name).into_iter().map(|(text, _)| text);
    let subscriptions = Statements::of(&space.name);
    let followers = subscriptions.texts().into_iter().map(str::to_owned);
    let readers = event_store::statements(&space.name).into_iter();
    let own = shards.chain(inbox::statements(&space.name)).chain(followers).chain(readers);
    let mut all = Vec::new();
    for text in own.map(|text| text.replace(space.name.quoted(), "@schema@")).chain(OTHERS.map(str::to_owned)) {
        all.push(described(&client, &space.name, &text).await);
    }
    let (path, all) = (format!("{GOLDEN}{SCHEMA_VERSION}.txt"), all.join("\n"));
    if std::env::var_os("CORELANE_UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &all).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    for (is, should) in all.split("\n\n").zip(golden.split("\n\n")) {
        assert_eq!(is, should, "{path}: once a version is released, another signature belongs to the next one");
    }
    assert_eq!(all.len(), golden.len(), "{path}: CORELANE_UPDATE_GOLDEN=1 writes it anew");
}

/// Behind a pooler they are sent with these types and without a name.
#[tokio::test]
async fn the_types_that_statements_are_sent_with_are_those_that_the_server_finds() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    for (text, takes) in statements(&space.name) {
        assert_eq!(client.prepare(&text).await.unwrap().params(), takes, "{text}");
    }
}

#[tokio::test]
async fn what_a_program_of_the_version_before_sends_is_taken_and_answered_as_before() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let path = format!("{GOLDEN}{}.txt", SCHEMA_VERSION - 1);
    let golden = std::fs::read_to_string(&path).unwrap();
    let mut count = 0;
    for should in golden.trim_end().split("\n\n") {
        let (text, _) = should.split_once('\n').unwrap();
        assert_eq!(
            described(&client, &space.name, text).await.trim_end(),
            should,
            "expand first, contract a version later"
        );
        count += 1;
    }
    assert!(count > 15, "{count} statements in {path}");
}

/// The round of a shard and its keeper, in the words of version 1.
#[tokio::test]
async fn a_running_program_of_version_1_goes_on() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let one = async |sql: String| client.query_one(&sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    let id: i32 =
        one("select number from register_instance(gen_random_uuid(), 'tests', 'old', 60000, 1)".into()).await.get(0);
    let taken = one(format!("select ownership, partition, fence from take_partitions({id})")).await;
    let (ownership, held): (i64, Vec<i32>) = (taken.get(0), taken.get(1));
    assert_eq!(held.len(), PARTITIONS as usize);
    let (stream, alone) = (Uuid::now_v7(), Uuid::now_v7());
    // An event and a message of a stream, a message without, a scheduled one; the message goes to two destinations,
    // the event to none.
    let flush = |number: i64, known: bool, last: i64| {
        let (seq, version) = (last + 1, i64::from(known) + 1);
        let ids = format!("'{{{},{},{alone},{}}}'", Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
        let ids = if known { ids.replace(&alone.to_string(), &Uuid::now_v7().to_string()) } else { ids };
        let lane = if known { Uuid::now_v7() } else { alone };
        format!(
            "select busy, xid, epoch, position, owned, is_foreign, last_seq, last_version from store_shard_messages(
            {id}, 0::int2, {number}, {ownership}, 1, '{{}}', null, (select array_agg(p) from generate_series(0, 15) p),
            array['{stream}']::uuid[], array[compute_partition('{stream}', 16)], array[{last}]::int8[],
            array[{}]::int8[], {known}, 1, 2,
            '{{1,0,2,4}}', '{{1,1,0,1}}', '{{{seq},{},1,0}}', '{{{version},0,0,0}}', '{{null,null,null,null}}',
            '{{{stream},{stream},{lane},{stream}}}', {ids}, '{{null,null,null,null}}', '{{null,null,null,null}}',
            '{{null,null,null,null}}', array_fill(compute_partition('{stream}', 16), array[4]),
            '{{null,null,null,null}}', '{{e,m,s,d}}', '{{null,null,null,null}}', '{{null,null,null,null}}',
            array['e{number}', 'm{number}', 's{number}', 'd{number}']::bytea[],
            array[null, null, null, now()], '{{0,0,0,1}}', '{{later}}',
            '{{3}}', '{{true}}', '{{2}}', '{{x,y}}', array_fill(compute_partition('{stream}', 16), array[3]), '{{1,1,2}}',
            '{{{},1,{}}}', '{{0,0,0}}', '{{{stream},{lane},{stream}}}', '{{1,0,1}}')",
            i64::from(known),
            seq + 1,
            seq + 1,
            seq + 1,
        )
    };
    let stored = one(flush(1, false, 0)).await;
    assert_eq!(stored.get::<_, Option<Vec<Uuid>>>(0), None);
    assert!(stored.get::<_, bool>(4) && !stored.get::<_, bool>(5));
    assert_eq!(stored.get::<_, Option<Vec<i64>>>(6), Some(vec![0]));
    let stored = one(flush(2, true, 2)).await;
    assert_eq!((stored.get::<_, bool>(4), stored.get::<_, Option<Vec<i64>>>(6)), (true, None));

    let found = one(format!("select xid, epoch, position, owned, last_seq, last_version from find_flush({id}, 0::int2, 2, 0, array['{stream}']::uuid[])")).await;
    assert_eq!((found.get::<_, Vec<i64>>(4), found.get::<_, Vec<i64>>(5)), (vec![2], vec![1]));

    let page = format!(
        "select destination, stream_seq, version, convert_from(payload, 'UTF8'), page_xmax from claim_work({id}, 0::int2, 1,
        '{{}}', null, null, null, 0, 0, 0, (select array_agg(p) from generate_series(0, 15) p), '{{}}', 100)"
    );
    let rows = client.query(&page, &[]).await.unwrap();
    let claimed: Vec<(String, i64, i64, String)> =
        rows[1..].iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3))).collect();
    let of = |destination: &str, seq: i64, text: &str| (destination.to_owned(), seq, 0, text.to_owned());
    let expected =
        [of("x", 2, "m1"), of("x", 1, "s1"), of("y", 2, "m1"), of("x", 4, "m2"), of("x", 1, "s2"), of("y", 4, "m2")];
    assert_eq!(claimed, expected);
    assert_eq!(
        one(format!("select release_scheduled({id}, array_agg(p), 10) from generate_series(0, 15) p"))
            .await
            .get::<_, i32>(0),
        2
    );
    let kept =
        one(format!("select truncated, rotated, blocked_by, cursors_trimmed from perform_maintenance({id})")).await;
    assert_eq!(kept.get::<_, i32>(0), 0);
    assert!(one(format!("select renew_lease({id}, 60000)")).await.get::<_, bool>(0));
    assert!(one(format!("select deregister_instance({id})")).await.get::<_, bool>(0));
}

/// Gives a function of the schema, in all its signatures, another name, and records it: in one transaction, as a
/// migration does.
async fn rename(client: &Client, space: &Space, from: &str, to: &str, record: &str) {
    let sql = format!(
        "do $$ declare f regprocedure; begin for f in select p.oid from pg_proc p where p.pronamespace = '{}'::regnamespace
         and p.proname = '{from}' loop execute format('alter function %s rename to {to}', f); end loop; {record}; end $$",
        space.name
    );
    client.batch_execute(&sql).await.unwrap();
}

async fn enqueue(engine: &Engine, stream: Uuid, accepted: &mut usize) -> Result<(), Error> {
    let stored = engine.enqueue(&RawMessage::event("test.of", b"{}").stream(stream).to(&["sink"])).await;
    *accepted += usize::from(stored.is_ok());
    stored.map(|_| ())
}

/// A newer schema takes a function away under a running engine.
async fn stands_down(function: &str) {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let sink = Sink::default();
    let engine = start(&space.schema, sink.transport()).await;
    // Of both shards.
    let streams: Vec<Uuid> = (0..8).map(|_| Uuid::now_v7()).collect();
    let mut accepted = 0;
    for stream in &streams {
        enqueue(&engine, *stream, &mut accepted).await.unwrap();
    }
    sink.wait_for(accepted).await;

    let newer = SCHEMA_VERSION + 1;
    let record = format!("insert into wh_schema_migration values ('migration', '0999_later', 'abc', {newer}, '9.9.9')");
    rename(&client, &space, function, "taken_away", &record).await;
    let mut said = Vec::new();
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    // Every shard of the process, whichever of its threads has met it.
    while said.len() < streams.len() {
        said.clear();
        for stream in &streams {
            match enqueue(&engine, *stream, &mut accepted).await {
                Err(Error::StoodDown(StoreError::SchemaChanged { installed, wanted, .. })) => {
                    assert_eq!((installed, wanted), (Some(newer), SCHEMA_VERSION), "{function}");
                    said.push(());
                }
                Err(other) => panic!("{function}: {other}"),
                Ok(()) => {}
            }
        }
        assert!(std::time::Instant::now() < deadline, "{function}: the engine goes on");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let error = enqueue(&engine, streams[0], &mut accepted).await.unwrap_err().to_string();
    for word in [format!("version {newer}"), format!("version {SCHEMA_VERSION}"), "update the program".to_owned()] {
        assert!(error.contains(&word), "{function}: {error}");
    }
    eventually("it holds nothing any more", Duration::from_secs(60), || async { engine.partitions_held() == 0 }).await;
    let retries = || engine.shards().iter().map(|shard| shard.metrics.flush_retries.get()).sum::<u64>();
    let before = retries();
    let report = engine.shutdown(Duration::from_secs(10)).await;
    assert!(!report.drained && report.shards_lost == 0, "{function}: {report:?}");
    assert_eq!(retries(), before, "{function}: nothing is tried for ever");

    // Somebody else stores meanwhile; then a program that fits is there.
    let meanwhile = Message { destinations: vec!["sink"], ..message(streams[0], "meanwhile") };
    call(&client, &[meanwhile]).await.unwrap();
    accepted += 1;
    let record = "delete from wh_schema_migration where name = '0999_later'";
    rename(&client, &space, "taken_away", function, record).await;
    let engine = start(&space.schema, sink.transport()).await;
    let distinct = || {
        let mut ids: Vec<Uuid> = sink.all().iter().map(|seen| seen.message_id).collect();
        ids.sort();
        ids.dedup();
        ids.len()
    };
    eventually(&format!("{function}: all {accepted} came"), Duration::from_secs(60), || async {
        distinct() == accepted
    })
    .await;
    engine.shutdown(Duration::from_secs(10)).await;
    sink.assert_ordered();
    let rows: i64 = client
        .query_one("select (select count(*) from wh_event_store) + (select count(*) from wh_outbox)", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(rows as usize, accepted, "{function}: what was refused was not stored");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_whose_schema_was_changed_under_it_stands_down_and_nothing_is_lost() {
    tokio::join!(stands_down("store_shard_messages"), stands_down("claim_work"), stands_down("settle"));
    tokio::join!(stands_down("renew_lease"), stands_down("perform_maintenance"));
}
