//! Appends with an expected version: through the shards, in a transaction of the caller's own, and in large units.

use std::time::Duration;

use corelane::message::Enqueue;
use corelane::{Engine, Error, Expected, RawMessage, Receipt, Result, Wishes};
use uuid::Uuid;

use crate::engine::{Sink, start};
use crate::support::{TestSchema, schema};

const END: Duration = Duration::from_secs(10);

fn expecting(stream: Uuid, expected: Expected) -> impl Enqueue {
    RawMessage::event("test.event", b"{}").stream(stream).to(&["sink"]).with(Wishes::new().expected(expected))
}

async fn append(engine: &Engine, stream: Uuid, expected: Expected) -> Result<i64> {
    engine.enqueue(&expecting(stream, expected)).await.map(|receipt| receipt.version)
}

fn conflict<T: std::fmt::Debug>(outcome: Result<T>) -> (Uuid, i64, i64) {
    match outcome {
        Err(Error::VersionConflict { stream_id, expected, found }) => (stream_id, expected, found),
        other => panic!("no conflict: {other:?}"),
    }
}

/// Stores an event on the stream as another program does.
async fn foreign_event(schema: &TestSchema, stream: Uuid) {
    let client = schema.client().await;
    let sql = "select version from append_events(array[gen_random_uuid()], array[$1]::uuid[], array['x'], array['{}'::bytea], \
               destinations => array['sink'])";
    client.query_one(sql, &[&stream]).await.unwrap();
}

async fn versions(schema: &TestSchema, stream: Uuid) -> Vec<i64> {
    let client = schema.client().await;
    let rows = client
        .query("select version from wh_event_store where stream_id = $1 order by version", &[&stream])
        .await
        .unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn expected_version_is_kept_and_a_conflict_names_both_versions() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let stream = Uuid::now_v7();
    assert_eq!(conflict(append(&engine, stream, Expected::Exact(1)).await), (stream, 1, 0));
    assert_eq!(append(&engine, stream, Expected::NoStream).await.unwrap(), 1);
    assert_eq!(conflict(append(&engine, stream, Expected::NoStream).await), (stream, 0, 1));
    assert_eq!(append(&engine, stream, Expected::Exact(1)).await.unwrap(), 2);
    assert_eq!(append(&engine, stream, Expected::Any).await.unwrap(), 3);
    for wrong in [0, 2, 4, 1 << 40] {
        assert_eq!(conflict(append(&engine, stream, Expected::Exact(wrong)).await), (stream, wrong, 3));
    }
    // A plain message takes no version.
    engine.enqueue(&RawMessage::command("test", b"{}").stream(stream).to(&["sink"])).await.unwrap();
    assert_eq!(append(&engine, stream, Expected::Exact(3)).await.unwrap(), 4);
    // What is remembered is old: another program has appended.
    foreign_event(&schema, stream).await;
    assert_eq!(conflict(append(&engine, stream, Expected::Exact(4)).await), (stream, 4, 5));
    assert_eq!(append(&engine, stream, Expected::Exact(5)).await.unwrap(), 6);
    sink.wait_for(7).await;
    engine.shutdown(END).await;
    assert_eq!(versions(&schema, stream).await, [1, 2, 3, 4, 5, 6]);
    sink.assert_ordered();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expectation_of_what_has_no_version_is_refused_by_message() {
    let schema = schema();
    let engine = start(&schema, Sink::default().transport()).await;
    let wishes = Wishes::new().expected(Expected::Exact(1));
    let stream = Uuid::now_v7();
    for refused in [
        engine.enqueue(&RawMessage::command("test", b"{}").stream(stream).with(wishes)).await,
        engine.enqueue(&RawMessage::event("test", b"{}").with(wishes)).await,
        engine.enqueue(&expecting(stream, Expected::Exact(-1))).await,
    ] {
        assert!(matches!(refused, Err(Error::MessageLimit { what: "expected version", .. })), "{refused:?}");
    }
    engine.shutdown(END).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conflict_ends_its_own_unit_and_all_of_it_and_its_neighbours_are_stored() {
    let schema = schema();
    let engine = start(&schema, Sink::default().transport()).await;
    let streams: Vec<Uuid> = (0..50).map(|_| Uuid::now_v7()).collect();
    // Every third expects what is not so.
    let messages = streams
        .iter()
        .enumerate()
        .map(|(n, stream)| expecting(*stream, if n % 3 == 0 { Expected::Exact(7) } else { Expected::NoStream }));
    let outcomes = engine.enqueue_many(messages).await;
    for (n, outcome) in outcomes.into_iter().enumerate() {
        match n % 3 {
            0 => assert_eq!(conflict(outcome), (streams[n], 7, 0)),
            _ => assert_eq!(outcome.unwrap().version, 1),
        }
    }
    // Several streams in one unit: all or nothing.
    let unit = async |second: Expected| {
        let mut unit = engine.unit_of_work();
        unit.push(&expecting(streams[1], Expected::Exact(1))).unwrap();
        unit.push(&expecting(streams[1], Expected::Any)).unwrap();
        unit.push(&expecting(streams[2], second)).unwrap();
        unit.commit().await
    };
    assert_eq!(conflict(unit(Expected::Exact(2)).await), (streams[2], 2, 1));
    let stored: Vec<i64> = unit(Expected::Exact(1)).await.unwrap().iter().map(|of| of.version).collect();
    assert_eq!(stored, [2, 3, 2]);
    engine.shutdown(END).await;
    assert_eq!(versions(&schema, streams[1]).await, [1, 2, 3]);
    assert_eq!(versions(&schema, streams[0]).await, Vec::<i64>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unit_that_contradicts_itself_is_a_conflict() {
    let schema = schema();
    let engine = start(&schema, Sink::default().transport()).await;
    let stream = Uuid::now_v7();
    for known in [0, 1] {
        let mut unit = engine.unit_of_work();
        unit.push(&expecting(stream, Expected::Exact(known))).unwrap();
        unit.push(&expecting(stream, Expected::Exact(known))).unwrap();
        assert_eq!(conflict(unit.commit().await), (stream, known, known + 1));
        let mut unit = engine.unit_of_work();
        unit.push(&expecting(stream, Expected::Any)).unwrap();
        unit.push(&expecting(stream, Expected::NoStream)).unwrap();
        assert_eq!(conflict(unit.commit().await), (stream, 0, 1), "its own event is before it, whatever else is");
        assert_eq!(append(&engine, stream, Expected::Exact(known)).await.unwrap(), known + 1);
    }
    engine.shutdown(END).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_appends_at_once_are_twenty_versions_and_one_of_twenty_that_expect_the_same() {
    let schema = schema();
    let engine = start(&schema, Sink::default().transport()).await;
    let stream = Uuid::now_v7();
    let at_once = async |expected: Expected| -> Vec<Result<i64>> {
        let tasks: Vec<_> = (0..20)
            .map(|_| {
                let engine = engine.clone();
                tokio::spawn(async move { append(&engine, stream, expected).await })
            })
            .collect();
        let mut outcomes = Vec::new();
        for task in tasks {
            outcomes.push(task.await.unwrap());
        }
        outcomes
    };
    let mut told: Vec<i64> = at_once(Expected::Any).await.into_iter().map(Result::unwrap).collect();
    told.sort_unstable();
    assert_eq!(told, (1..=20).collect::<Vec<_>>());
    let (stored, refused): (Vec<_>, Vec<_>) = at_once(Expected::Exact(20)).await.into_iter().partition(Result::is_ok);
    assert_eq!(stored.into_iter().map(Result::unwrap).collect::<Vec<_>>(), [21]);
    for outcome in refused {
        assert_eq!(conflict(outcome), (stream, 20, 21));
    }
    engine.shutdown(END).await;
    assert_eq!(versions(&schema, stream).await, (1..=21).collect::<Vec<_>>());
}

async fn enlisted(engine: &Engine, schema: &TestSchema, expected: &[(Uuid, Expected)]) -> Result<Vec<Receipt>> {
    let mut client = schema.client().await;
    let transaction = client.transaction().await.unwrap();
    let (first, others) = expected.split_first().unwrap();
    let mut push = engine.outbox().push(&expecting(first.0, first.1))?;
    for (stream, expected) in others {
        push = push.push(&expecting(*stream, *expected))?;
    }
    let enlisted = push.enlist(&transaction).await?;
    transaction.commit().await.unwrap();
    let receipts = enlisted.receipts.clone();
    enlisted.announce();
    Ok(receipts)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_enlisted_append_expects_as_well_and_its_conflict_rolls_everything_back() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let (a, b) = (Uuid::now_v7(), Uuid::now_v7());
    let both = [(a, Expected::NoStream), (b, Expected::Exact(0)), (a, Expected::Exact(1))];
    let versions_told: Vec<i64> =
        enlisted(&engine, &schema, &both).await.unwrap().iter().map(|receipt| receipt.version).collect();
    assert_eq!(versions_told, [1, 1, 2]);
    let wrong = [(a, Expected::Exact(2)), (b, Expected::Exact(3))];
    assert_eq!(conflict(enlisted(&engine, &schema, &wrong).await), (b, 3, 1));
    assert_eq!(versions(&schema, a).await, [1, 2]);
    // The owner's turn again: what it remembers is void by then.
    assert_eq!(append(&engine, a, Expected::Exact(2)).await.unwrap(), 3);
    sink.wait_for(4).await;
    engine.shutdown(END).await;
    sink.assert_ordered();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeatable_read_append_that_was_overtaken_fails_with_40001() {
    let schema = schema();
    let engine = start(&schema, Sink::default().transport()).await;
    let stream = Uuid::now_v7();
    append(&engine, stream, Expected::NoStream).await.unwrap();
    let mut client = schema.client().await;
    for overtaken in [true, false] {
        let isolation = tokio_postgres::IsolationLevel::RepeatableRead;
        let transaction = client.build_transaction().isolation_level(isolation).start().await.unwrap();
        transaction.query_one("select count(*) from wh_event_store", &[]).await.unwrap();
        if overtaken {
            append(&engine, stream, Expected::Exact(1)).await.unwrap();
        }
        let push = engine.outbox().push(&expecting(stream, Expected::Exact(if overtaken { 1 } else { 7 }))).unwrap();
        match push.enlist(&transaction).await {
            Err(Error::Enlist(error)) if overtaken => assert_eq!(error.code().unwrap().code(), "40001"),
            Err(error) if !overtaken => assert_eq!(conflict::<()>(Err(error)), (stream, 7, 2)),
            outcome => panic!("{:?}", outcome.map(|enlisted| enlisted.receipts.clone())),
        }
    }
    engine.shutdown(END).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_unit_expects_as_well() {
    let schema = schema();
    let engine = start(&schema, Sink::default().transport()).await;
    let large = async |streams: &[Uuid], expected: Expected| {
        let mut unit = engine.unit_of_work();
        for n in 0..5_000 {
            let expected = if n == 0 { expected } else { Expected::Any };
            unit.push(&expecting(streams[n % streams.len()], expected)).unwrap();
        }
        unit.commit().await.map(|receipts| receipts.last().unwrap().version)
    };
    let one = [Uuid::now_v7()];
    assert_eq!(conflict(large(&one, Expected::Exact(3)).await), (one[0], 3, 0));
    assert_eq!(large(&one, Expected::NoStream).await.unwrap(), 5_000);
    let many: Vec<Uuid> = (0..500).map(|_| Uuid::now_v7()).collect();
    assert_eq!(large(&many, Expected::NoStream).await.unwrap(), 10);
    assert_eq!(conflict(large(&many, Expected::Exact(9)).await), (many[0], 9, 10));
    engine.shutdown(END).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn append_events_in_sql_answers_versions_and_refuses_what_cannot_be() {
    let schema = schema();
    let engine = start(&schema, Sink::default().transport()).await;
    let client = schema.client().await;
    let (a, b) = (Uuid::now_v7(), Uuid::now_v7());
    let call = async |streams: &[Uuid], expected: &[Option<i64>]| {
        let sql = "select version from append_events((select array_agg(gen_random_uuid()) from unnest($1::uuid[])), $1, \
                   (select array_agg('x'::text) from unnest($1::uuid[])), \
                   (select array_agg('\\x7b7d'::bytea) from unnest($1::uuid[])), $2)";
        let rows = client.query(sql, &[&streams, &expected]).await?;
        Ok::<_, tokio_postgres::Error>(rows.iter().map(|row| row.get(0)).collect::<Vec<i64>>())
    };
    let code = |outcome: std::result::Result<Vec<i64>, tokio_postgres::Error>| {
        outcome.expect_err("refused").code().unwrap().code().to_owned()
    };
    assert_eq!(call(&[a, b, a], &[Some(0), None, Some(1)]).await.unwrap(), [1, 1, 2]);
    assert_eq!(code(call(&[a, b], &[Some(2), Some(0)]).await), "CL010");
    assert_eq!(code(call(&[a, a], &[Some(2), Some(2)]).await), "22023", "each event raises the version");
    assert_eq!(code(call(&[a, a], &[None, Some(0)]).await), "22023");
    assert_eq!(code(call(&[a], &[Some(-1)]).await), "22023");
    assert_eq!(code(call(&[Uuid::nil()], &[Some(0)]).await), "22023", "nil stream");
    assert_eq!(versions(&schema, a).await, [1, 2]);
    engine.shutdown(END).await;
}
