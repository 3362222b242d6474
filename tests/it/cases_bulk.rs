//! Units of work larger than a flush, which go over a connection of their own: ids that are stored already, and a
//! COMMIT whose answer was lost.

use std::time::Duration;

use corelane::message::Enqueue;
use corelane::private_postgres::StopMode;
use corelane::{Engine, Error, RawMessage, Receipt, Result, Wishes};
use uuid::Uuid;

use crate::cut_proxy::{CutProxy, Where};
use crate::engine::{Sink, config, start};
use crate::support::{TestSchema, eventually, own_cluster, schema, schema_on};

const END: Duration = Duration::from_secs(10);
/// More than a flush takes.
const LARGE: usize = 5_000;
/// The large unit's own end of its transaction; nobody else writes it so.
const COMMIT: &[u8] = b"commit\0";

fn loose(id: Uuid) -> impl Enqueue {
    RawMessage::command("test.bulk", b"{}").to(&["sink"]).with(Wishes::new().message_id(id))
}

/// A unit of so many events on one stream.
async fn commit_events(engine: &Engine, stream: Uuid, count: usize) -> Result<Vec<Receipt>> {
    let mut unit = engine.unit_of_work();
    for n in 0..count {
        let payload = n.to_string();
        unit.push(&RawMessage::event("test.bulk", payload.as_bytes()).stream(stream).to(&["sink"])).unwrap();
    }
    unit.commit().await
}

#[tokio::test(flavor = "multi_thread")]
async fn duplicates_in_a_large_unit_are_refused_by_the_first_ones_name() {
    let schema = schema();
    let sink = Sink::default();
    let engine = start(&schema, sink.transport()).await;
    let stored: Vec<Uuid> = (0..2).map(|_| Uuid::now_v7()).collect();
    for id in &stored {
        engine.enqueue(&loose(*id)).await.expect("stored");
    }
    let twice = Uuid::now_v7();
    // At which places which ids stand, and who is named: also beyond the first call of 4,096.
    for (places, named) in [
        (vec![(17, stored[1]), (400, stored[0])], stored[1]),
        (vec![(4_500, stored[0])], stored[0]),
        (vec![(10, twice), (4_700, twice)], twice),
        (vec![(10, twice), (20, twice), (30, stored[0])], twice),
    ] {
        let mut unit = engine.unit_of_work();
        for n in 0..LARGE {
            let id = places.iter().find(|(place, _)| *place == n).map_or_else(Uuid::now_v7, |(_, id)| *id);
            unit.push(&loose(id)).unwrap();
        }
        let refused = unit.commit().await.expect_err("an id of it is stored");
        assert!(
            matches!(refused, Error::DuplicateMessage { message_id } if message_id == named),
            "{places:?}, expected {named}: {refused:?}"
        );
    }
    let client = schema.client().await;
    let rows: i64 = client.query_one("select count(*) from wh_outbox", &[]).await.unwrap().get(0);
    assert_eq!(rows, 2, "nothing of a refused unit is stored");
    // The connections of the refused are gone and their turns are free: as many as there are turns, and more.
    let receipts = commit_events(&engine, Uuid::now_v7(), LARGE).await.expect("stored");
    assert_eq!(receipts.len(), LARGE);
    sink.wait_for(2 + LARGE).await;
    engine.shutdown(END).await;
    assert_eq!(sink.len(), 2 + LARGE);
}

/// An engine behind a proxy, on a server of its own.
async fn behind(proxy: &CutProxy, server: &TestSchema, sink: &Sink) -> Engine {
    let mut through = config(server);
    through.database.url = proxy.url();
    let engine = Engine::builder(through).transport(sink.transport()).migrate(true).start().await.expect("start");
    eventually("partitions are held", Duration::from_secs(60), async || engine.partitions_held() == 16).await;
    engine
}

async fn stored(schema: &TestSchema) -> i64 {
    schema.client().await.query_one("select count(*) from wh_event_store", &[]).await.unwrap().get(0)
}

/// The connection ends exactly at COMMIT, before it and behind it: either way the unit is stored once, and its caller
/// is told so.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_commit_of_a_large_unit_is_looked_up_and_stored_once() {
    let cluster = own_cluster();
    let schema = schema_on(cluster.url("postgres"));
    let proxy = CutProxy::before(&cluster);
    let sink = Sink::default();
    let engine = behind(&proxy, &schema, &sink).await;
    let mut units = 0;
    for at in [Where::After, Where::Before] {
        proxy.arm(COMMIT, at);
        let receipts = commit_events(&engine, Uuid::now_v7(), LARGE).await.expect("stored, and known to be");
        units += 1;
        assert_eq!(proxy.cuts(), units, "{at:?}: the case was met");
        let numbers: Vec<i64> = receipts.iter().map(|receipt| receipt.version).collect();
        assert_eq!(numbers, (1..=LARGE as i64).collect::<Vec<_>>(), "{at:?}");
        assert_eq!(stored(&schema).await, units as i64 * LARGE as i64, "{at:?}: once, and all of it");
    }
    sink.wait_for(2 * LARGE).await;
    engine.shutdown(END).await;
    sink.assert_ordered();
    assert_eq!(sink.len(), 2 * LARGE, "no copy");
}

/// The server crashes behind the lost COMMIT: transaction ids are given anew, so its status proves nothing, and that
/// is what the caller is told, whether it was stored or not. Nothing is sent again.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_commit_before_a_crash_is_not_known_and_not_sent_again() {
    let mut cluster = own_cluster();
    let schema = schema_on(cluster.url("postgres"));
    let proxy = CutProxy::before(&cluster);
    let sink = Sink::default();
    let engine = behind(&proxy, &schema, &sink).await;
    for (round, at) in [Where::After, Where::Before].into_iter().enumerate() {
        let before = stored(&schema).await;
        proxy.arm_and_go_away(COMMIT, at);
        let committing = tokio::spawn({
            let engine = engine.clone();
            async move { commit_events(&engine, Uuid::now_v7(), LARGE).await }
        });
        eventually("the connection was cut", END, async || proxy.cuts() == round as u64 + 1).await;
        if at == Where::After {
            // The commit that the server has got is done; a crash before that would be the other case.
            eventually("it is committed", END, async || stored(&schema).await == before + LARGE as i64).await;
        }
        cluster.restart(StopMode::Immediate).expect("the server comes back");
        proxy.come_back();
        let answer = committing.await.unwrap();
        assert!(matches!(answer, Err(Error::OutcomeUnknown { .. })), "{at:?}: {:?}", answer.map(|all| all.len()));
        let expected = if at == Where::After { before + LARGE as i64 } else { before };
        assert_eq!(stored(&schema).await, expected, "{at:?}: all or nothing, and never twice");
    }
    sink.wait_for(LARGE).await;
    // It goes on: the crashed server is an ordinary one again.
    commit_events(&engine, Uuid::now_v7(), LARGE).await.expect("stored");
    sink.wait_for(2 * LARGE).await;
    engine.shutdown(END).await;
    sink.assert_ordered();
    let unique: std::collections::HashSet<Uuid> = sink.all().into_iter().map(|seen| seen.message_id).collect();
    assert_eq!(unique.len(), 2 * LARGE);
    drop(schema);
}
