//! `settle`, `load_shard`, `claim_parked`: what did not go well, the cursor, and the fence.

use std::time::Duration;

use corelane::plan::snapshot::Snapshot;
use corelane::seam::store::{
    Coordination, DeadLetter, Drained, Park, ReadPosition, SettleReply, SettleRequest, Spill, Store,
};
use uuid::Uuid;

use crate::store_kit::*;
use crate::support::eventually;

fn spill(lane_id: Uuid, stream_seq: i64, version: i64) -> Spill {
    Spill { lane_id, destination: destination("somewhere"), partition: partition(lane_id), stream_seq, version }
}

fn partition(lane: Uuid) -> u32 {
    corelane::partition::partition_of(lane, PARTITIONS)
}

fn park(lane_id: Uuid, attempts: i32, due_in_ms: i64) -> Park {
    Park {
        lane_id,
        destination: destination("somewhere"),
        partition: partition(lane_id),
        stream_seq: 1,
        attempts,
        reason: 3,
        error: "refused".to_owned(),
        error_cut: false,
        due_in_ms,
    }
}

fn dead(lane_id: Uuid, stream_seq: i64, version: i64) -> DeadLetter {
    DeadLetter {
        lane_id,
        destination: destination("somewhere"),
        unnamed: None,
        partition: partition(lane_id),
        stream_seq,
        version,
        attempts: 10,
        reason: 3,
        error: format!("order 4711 at {stream_seq} refused"),
        error_cut: true,
    }
}

fn drained(lane_id: Uuid, stream_seq: i64) -> Drained {
    Drained { lane_id, destination: destination("somewhere"), partition: partition(lane_id), stream_seq }
}

impl Owner {
    async fn settled(&self, request: &SettleRequest) -> Vec<bool> {
        match self.store.settle(self.incarnation, request).await.unwrap() {
            SettleReply::Settled { unparked, .. } => unparked,
            SettleReply::Fenced => panic!("fenced"),
        }
    }

    async fn kept(&self, lane: Uuid) -> Vec<String> {
        payloads(&self.store.claim_parked(lane, destination("somewhere"), partition(lane), 100).await.unwrap())
    }
}

#[tokio::test]
async fn a_parked_lane_is_kept_beside_the_log_and_drained_by_number() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let lane = Uuid::now_v7();
    owner.store(&[event(lane, "e1"), message(lane, "m2"), event(lane, "e3")]).await;
    let request = SettleRequest {
        park: vec![park(lane, 1, 60_000)],
        spill: vec![spill(lane, 1, 1), spill(lane, 2, 0), spill(lane, 3, 2)],
        ..SettleRequest::default()
    };
    owner.settled(&request).await;
    owner.settled(&request).await; // Sent twice it is the same.
    let client = space.schema.client().await;
    client.batch_execute("truncate wh_outbox_0, wh_log_0").await.unwrap();
    assert_eq!(owner.kept(lane).await, ["e1", "m2", "e3"], "the body of m2 was copied");
    let rows = owner.store.claim_parked(lane, destination("somewhere"), partition(lane), 2).await.unwrap();
    assert_eq!((rows.stream_seq.as_slice(), rows.version.as_slice()), (&[1, 2][..], &[1, 0][..]));
    assert_eq!((rows.stream_id(0), rows.stream_id(1)), (Some(lane), Some(lane)));

    let parked = owner.store.load(owner.incarnation, &owner.held()).await.unwrap().parked;
    assert_eq!(parked.len(), 1);
    assert_eq!((parked[0].lane_id, parked[0].attempts), (lane, 1));
    assert!((1..=60_000).contains(&parked[0].due_in_ms), "{}", parked[0].due_in_ms);

    let unpark = vec![(lane, destination("somewhere"), partition(lane))];
    let request =
        SettleRequest { drained: vec![drained(lane, 1), drained(lane, 2)], unpark, ..SettleRequest::default() };
    assert_eq!(owner.settled(&request).await, [false], "e3 is left");
    let request = SettleRequest { drained: vec![drained(lane, 3)], ..request };
    assert_eq!(owner.settled(&request).await, [true]);
    assert_eq!(owner.settled(&request).await, [true], "and gone it stays");
    assert!(owner.store.load(owner.incarnation, &owner.held()).await.unwrap().parked.is_empty());
}

#[tokio::test]
async fn parking_again_overwrites_and_the_last_of_two_wins() {
    let space = Space::new().await;
    let owner = space.owner(1).await;
    let lane = Uuid::now_v7();
    let request =
        SettleRequest { park: vec![park(lane, 1, 1_000), park(lane, 2, 500_000)], ..SettleRequest::default() };
    owner.settled(&request).await;
    let parked = owner.store.load(owner.incarnation, &owner.held()).await.unwrap().parked;
    assert_eq!((parked.len(), parked[0].attempts), (1, 2));
    assert!(parked[0].due_in_ms > 100_000);
}

#[tokio::test]
async fn what_is_kept_beside_the_log_never_stands_without_its_lane() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let lane = Uuid::now_v7();
    owner.store(&[message(lane, "m1"), message(lane, "m2")]).await;
    let request = SettleRequest { spill: vec![spill(lane, 2, 0), spill(lane, 1, 0)], ..SettleRequest::default() };
    owner.settled(&request).await;
    let parked = owner.store.load(owner.incarnation, &owner.held()).await.unwrap().parked;
    assert_eq!((parked.len(), parked[0].lane_id, parked[0].attempts), (1, lane, 0));
    assert!(parked[0].due_in_ms <= 0, "due at once");
    // A row that is there already is not touched by it.
    owner.settled(&SettleRequest { park: vec![park(lane, 4, 60_000)], ..SettleRequest::default() }).await;
    owner.settled(&request).await;
    let parked = owner.store.load(owner.incarnation, &owner.held()).await.unwrap().parked;
    assert_eq!((parked.len(), parked[0].attempts), (1, 4));
}

#[tokio::test]
async fn a_dead_letter_takes_its_body_along_and_comes_once() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let lane = Uuid::now_v7();
    owner.store(&[event(lane, "e1"), message(lane, "m2"), message(lane, "m3")]).await;
    // m3 is kept beside the log, and its segment is gone.
    owner.settled(&SettleRequest { spill: vec![spill(lane, 3, 0)], ..SettleRequest::default() }).await;
    let client = space.schema.client().await;
    client.batch_execute("create table saved as table wh_outbox; truncate wh_outbox_0").await.unwrap();
    client.batch_execute("insert into wh_outbox select * from saved where stream_seq = 2").await.unwrap();
    let request =
        SettleRequest { dead: vec![dead(lane, 1, 1), dead(lane, 2, 0), dead(lane, 3, 0)], ..SettleRequest::default() };
    owner.settled(&request).await;
    owner.settled(&request).await;
    let rows = client
        .query(
            "select stream_seq, convert_from(payload, 'UTF8'), message_id is not null, attempts, error_cut,
                error_fingerprint from wh_dead_letter order by stream_seq",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(rows.len(), 3);
    let bodies: Vec<Option<&str>> = rows.iter().map(|row| row.get(1)).collect();
    assert_eq!(bodies, [None, Some("m2"), Some("m3")], "an event's body stays in the event store");
    assert!(rows.iter().all(|row| row.get::<_, bool>(2) && row.get::<_, i32>(3) == 10 && row.get::<_, bool>(4)));
    let prints: std::collections::HashSet<&str> = rows.iter().map(|row| row.get(5)).collect();
    assert_eq!(prints.len(), 1, "numbers do not make errors different");
    assert!(owner.kept(lane).await.is_empty());
}

#[tokio::test]
async fn a_reference_whose_body_is_gone_is_kept_as_missing_and_holds_up_no_outcome() {
    let space = Space::new().await;
    let owner = space.owner(1).await;
    let lane = Uuid::now_v7();
    let request = SettleRequest { spill: vec![spill(lane, 1, 0)], ..SettleRequest::default() };
    owner.settled(&request).await;
    owner.settled(&request).await;
    let partition = request.spill[0].partition;
    let kept = owner.store.claim_parked(lane, request.spill[0].destination, partition, 10).await.unwrap();
    assert_eq!((kept.len(), kept.is_missing(0), kept.stream_seq[0]), (1, true, 1));
}

#[tokio::test]
async fn what_is_resolved_is_the_base_and_the_latest_cursor() {
    let space = Space::new().await;
    let owner = space.owner(1).await;
    let cursor = |text: &str| SettleRequest {
        ownership: owner.taken.ownership,
        cursor: Snapshot::parse(text),
        ..SettleRequest::default()
    };
    owner.settled(&cursor("5:9:5")).await;
    owner.settled(&cursor("7:30:7,20")).await;
    let loaded = owner.store.load(owner.incarnation, &[3, 4]).await.unwrap();
    assert_eq!(loaded.resolved.iter().map(ToString::to_string).collect::<Vec<_>>(), ["7:30:7,20", "7:30:7,20"]);
    let client = space.schema.client().await;
    client.batch_execute("update wh_partition set base = '7:15:7,11' where partition = 4").await.unwrap();
    let loaded = owner.store.load(owner.incarnation, &[3, 4]).await.unwrap();
    assert_eq!(loaded.resolved[1].to_string(), "7:30:7,20", "11 is below the cursor's 20, and not listed there");
    client.batch_execute("update wh_partition set base = '20:40:35' where partition = 4").await.unwrap();
    let loaded = owner.store.load(owner.incarnation, &[4]).await.unwrap();
    assert_eq!(loaded.resolved[0].to_string(), "35:40:35", "7 and 20 are in the base");
}

#[tokio::test]
async fn sql_and_rust_unite_snapshots_alike() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let sets = ["1:1:", "5:5:", "10:20:10,14,15", "14:18:14", "3:30:3,15,29", "15:15:", "2:16:2,14,15"];
    for a in sets {
        for b in sets {
            let sql = "select wh_snapshot_union($1::text::pg_snapshot, $2::text::pg_snapshot)::text";
            let united: String = client.query_one(sql, &[&a, &b]).await.unwrap().get(0);
            let expected = Snapshot::parse(a).unwrap().union(&Snapshot::parse(b).unwrap());
            assert_eq!(Snapshot::parse(&united).unwrap(), expected, "{a} and {b}: {united}");
        }
    }
}

/// A cursor made before a partition was taken has passed that partition's transactions without reading them.
#[tokio::test]
async fn a_cursor_says_nothing_of_partitions_taken_later() {
    let space = Space::new().await;
    let mut first = space.owner(1).await;
    let heir = space.owner(1).await;
    let stream = stream_in(5);
    let stored = first.store(&[event(stream, "unpublished")]).await;
    let beyond = stored.xid + 100;
    let cursor = SettleRequest {
        ownership: heir.taken.ownership,
        cursor: Some(Snapshot::new(beyond, vec![])),
        ..SettleRequest::default()
    };
    heir.settled(&cursor).await;
    first.coordination.deregister_instance(first.incarnation).await.unwrap();
    let taken = heir.coordination.take_partitions(heir.incarnation, &ALL).await.unwrap().unwrap();
    assert!(taken.ownership > heir.taken.ownership);
    let resolved = |loaded: corelane::seam::store::LoadReply| loaded.resolved[0].contains(stored.xid);
    assert!(!resolved(heir.store.load(heir.incarnation, &[5]).await.unwrap()));
    // The shard has not heard of it yet and writes another cursor of the same kind.
    heir.settled(&cursor).await;
    assert!(!resolved(heir.store.load(heir.incarnation, &[5]).await.unwrap()));
    heir.settled(&SettleRequest { ownership: taken.ownership, ..cursor }).await;
    assert!(resolved(heir.store.load(heir.incarnation, &[5]).await.unwrap()), "this one was made for it");
}

#[tokio::test]
async fn who_is_dead_or_does_not_own_writes_nothing() {
    let space = Space::new().await;
    let owner = space.owner(1).await;
    let stranger = space.owner(1).await;
    let lane = Uuid::now_v7();
    let cursor = Some(Snapshot::new(50, vec![]));
    let request = SettleRequest { park: vec![park(lane, 1, 0)], cursor: cursor.clone(), ..SettleRequest::default() };
    assert_eq!(stranger.store.settle(stranger.incarnation, &request).await.unwrap(), SettleReply::Fenced);
    owner.coordination.deregister_instance(owner.incarnation).await.unwrap();
    assert_eq!(owner.store.settle(owner.incarnation, &request).await.unwrap(), SettleReply::Fenced);
    let request = SettleRequest { cursor, ..SettleRequest::default() };
    assert_eq!(owner.store.settle(owner.incarnation, &request).await.unwrap(), SettleReply::Fenced);
    let client = space.schema.client().await;
    let written: i64 = client
        .query_one("select (select count(*) from wh_parked) + (select count(*) from wh_cursor)", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(written, 0);
}

/// The taker's exclusive lock: a settlement under way ends first and is seen, one that comes later is refused.
#[tokio::test]
async fn a_taker_waits_for_settlements_under_way() {
    let space = Space::new().await;
    let owner = space.owner(1).await;
    let heir = space.owner(1).await;
    let under_way = space.schema.client().await;
    under_way.batch_execute("begin").await.unwrap();
    let cursor = "70:70:";
    let lists = ["'{}'"; 30].join(",");
    under_way
        .query(
            &format!("select fenced from settle($1, 0::int2, $2, null, $3::text::pg_snapshot, {lists})"),
            &[&owner.incarnation.number, &owner.taken.ownership, &cursor],
        )
        .await
        .unwrap();
    space.expire(&owner).await;
    let member = heir.coordination.members(heir.incarnation).await.unwrap().others[0];
    let marking = heir.coordination.mark_dead(member, false);
    let ending = async {
        let watch = space.schema.client().await;
        eventually("the taker waits", Duration::from_secs(5), || async { waits_for_class(&watch, 3).await }).await;
        under_way.batch_execute("commit").await.unwrap();
    };
    let (marked, ()) = tokio::join!(marking, ending);
    assert!(marked.unwrap());
    let base: String = space
        .schema
        .client()
        .await
        .query_one("select distinct base::text from wh_partition where owner is null", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(base, cursor, "what was under way became the base");
    let late = SettleRequest { cursor: Some(Snapshot::new(90, vec![])), ..SettleRequest::default() };
    assert_eq!(owner.store.settle(owner.incarnation, &late).await.unwrap(), SettleReply::Fenced);
}

#[tokio::test]
async fn only_a_lone_cursor_commits_without_waiting_for_the_disk() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let owner = space.owner(1).await;
    let call = |spilled: &str| {
        let (park, rest) = (["'{}'"; 9].join(","), ["'{}'"; 16].join(","));
        let number = owner.incarnation.number;
        format!("select settle({number}, 0::int2, 1, null, '9:9:', {park}, {spilled}, {rest})")
    };
    let none = "'{}','{}','{}','{}','{}'";
    let some = format!("array['{}'::uuid],'{{x}}','{{1}}','{{1}}','{{1}}'", Uuid::now_v7());
    for (spilled, setting) in [(none, "off"), (some.as_str(), "on")] {
        client.batch_execute("begin").await.unwrap();
        client.batch_execute(&call(spilled)).await.unwrap();
        let now: String = client.query_one("show synchronous_commit", &[]).await.unwrap().get(0);
        assert_eq!(now, setting);
        client.batch_execute("rollback").await.unwrap();
    }
}

#[tokio::test]
async fn errors_of_any_text_are_stored() {
    let space = Space::new().await;
    let owner = space.owner(1).await;
    let lane = Uuid::now_v7();
    let error = "\u{1b}[31m\u{10FFFF}".repeat(1000) + "'; drop table wh_parked; --";
    let request =
        SettleRequest { park: vec![Park { error: error.clone(), ..park(lane, 1, 0) }], ..SettleRequest::default() };
    owner.settled(&request).await;
    let stored: String =
        space.schema.client().await.query_one("select error from wh_parked", &[]).await.unwrap().get(0);
    assert_eq!(stored, error);
    assert_eq!(owner.claim(&ReadPosition::default(), &[], 1).await.rows.len(), 0);
}
