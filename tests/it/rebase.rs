//! A database is dumped with everything in it that waits, restored on another server, and goes on there.

use std::path::Path;

use corelane::Error;
use corelane::plan::snapshot::Snapshot;
use corelane::private_postgres::PrivatePostgres;
use corelane::seam::store::{Coordination, DeadLetter, Park, ReadPosition, SettleReply, SettleRequest, Spill, Store};
use corelane::store::{install, rebase};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::dump::{program, run};
use crate::outbox_kit::call;
use crate::store_kit::{Message, Owner, PARTITIONS, Space, destination, event, loose, message};
use crate::support;

/// Dumps a schema of one server and restores it on another (or in another database), as an operator would.
fn copy(from: &PrivatePostgres, schema: &str, to: &PrivatePostgres, database: &str) {
    let file = from.data_directory().parent().expect("a place").join(format!("{schema}.dump"));
    let [dump, restore] = ["pg_dump", "pg_restore"].map(|name| program(from.binaries(), name));
    let mut dumping = from.command(&dump.to_string_lossy());
    dumping
        .args(["--format=custom", "--schema", schema, "--file"])
        .arg(&file)
        .arg("--dbname")
        .arg(from.url("postgres"));
    run(&mut dumping);
    // Each server has a user and a directory of its own.
    let there = to.data_directory().parent().expect("a place").join("restore.dump");
    std::fs::copy(&file, &there).expect("copied");
    readable(&there);
    let mut restoring = to.command(&restore.to_string_lossy());
    restoring.args(["--no-owner", "--exit-on-error", "--dbname"]).arg(to.url(database)).arg(&there);
    run(&mut restoring);
}

fn readable(file: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o644)).expect("permissions");
}

/// A space on a server of its own.
async fn space_on(server: &PrivatePostgres) -> Space {
    Space::in_schema(support::schema_on(server.url("postgres"))).await
}

/// The same schema where it was restored.
fn restored(space: &Space, server: &PrivatePostgres, database: &str) -> Space {
    let mut schema = support::schema_on(server.url(database));
    schema.name = space.schema.name.clone();
    Space { schema, name: space.name.clone() }
}

/// The space as it is after a dump of it was restored on another server.
pub fn moved(from: &PrivatePostgres, space: &Space, to: &PrivatePostgres) -> Space {
    copy(from, &space.schema.name, to, "postgres");
    restored(space, to, "postgres")
}

struct Story {
    published: Uuid,
    waiting: Uuid,
    plain: Uuid,
    parked: Uuid,
    dead: Uuid,
}

/// Some messages are published, some wait, one stream is parked, one message is dead, one is scheduled.
async fn tell(owner: &Owner, client: &Client) -> Story {
    let story = Story {
        published: Uuid::now_v7(),
        waiting: Uuid::now_v7(),
        plain: Uuid::now_v7(),
        parked: Uuid::now_v7(),
        dead: Uuid::now_v7(),
    };
    // Away from low transaction ids, so that old ones would be "not yet" on a young server.
    for _ in 0..50 {
        client.batch_execute("select pg_current_xact_id()").await.unwrap();
    }
    call(client, &[event(story.published, "done 1"), message(story.published, "done 2")]).await.unwrap();
    call(client, &[message(story.parked, "parked 1"), event(story.dead, "dead 1")]).await.unwrap();
    let (_, read) = owner.drain(&ReadPosition::default(), 100).await;
    let there = destination("somewhere");
    let partition = |stream| corelane::partition::partition_of(stream, PARTITIONS);
    let request = SettleRequest {
        shard: 0,
        ownership: owner.taken.ownership,
        cursor: Some(read.read.clone()),
        park: vec![Park {
            lane_id: story.parked,
            destination: there,
            partition: partition(story.parked),
            stream_seq: 1,
            attempts: 3,
            reason: 2,
            error: "refused".to_owned(),
            error_cut: false,
            due_in_ms: 0,
        }],
        spill: vec![Spill {
            lane_id: story.parked,
            destination: there,
            partition: partition(story.parked),
            stream_seq: 1,
            version: 0,
        }],
        dead: vec![DeadLetter {
            lane_id: story.dead,
            destination: there,
            unnamed: None,
            partition: partition(story.dead),
            stream_seq: 1,
            version: 1,
            attempts: 10,
            reason: 5,
            error: "refused".to_owned(),
            error_cut: false,
        }],
        ..SettleRequest::default()
    };
    let reply = owner.store.settle(owner.incarnation, &request).await.unwrap();
    assert!(matches!(reply, SettleReply::Settled { .. }), "{reply:?}");

    // One transaction with a message that is resolved and one that is not: its cursor lists it.
    call(client, &[event(story.waiting, "w1"), message(story.waiting, "w2")]).await.unwrap();
    let listed = client.query_one("select max(xid) from wh_log", &[]).await.unwrap().get::<_, i64>(0) as u64;
    call(client, &[event(story.published, "done 3")]).await.unwrap();
    let (_, read) = owner.drain(&read, 100).await;
    let cursor = Snapshot::new(read.read.xmax(), [read.read.listed(), &[listed]].concat());
    let request =
        SettleRequest { shard: 0, ownership: owner.taken.ownership, cursor: Some(cursor), ..SettleRequest::default() };
    owner.store.settle(owner.incarnation, &request).await.unwrap();

    call(client, &[message(story.plain, "p1"), message(story.waiting, "w3"), loose("l1")]).await.unwrap();
    let later = Message { due_unix_us: 1, ..message(story.plain, "scheduled") };
    call(client, &[later]).await.unwrap();
    story
}

const WAITING: [&str; 5] = ["w1", "w2", "p1", "w3", "l1"];

async fn goes_on(space: &Space, story: &Story) {
    let (client, owner) = (space.schema.client().await, space.owner(1).await);
    let (texts, read) = owner.drain(&ReadPosition::default(), 2).await;
    assert_eq!(texts, WAITING);

    let parked = owner.store.claim_parked(story.parked, destination("somewhere"), 0, 10).await.unwrap();
    assert_eq!(crate::store_kit::payloads(&parked), ["parked 1"]);
    let load = owner.store.load(owner.incarnation, &owner.held()).await.unwrap();
    assert_eq!(load.parked.iter().map(|lane| (lane.lane_id, lane.attempts)).collect::<Vec<_>>(), [(story.parked, 3)]);
    let dead: i64 = client.query_one("select count(*) from wh_dead_letter", &[]).await.unwrap().get(0);
    assert_eq!(dead, 1);

    // Numbers go on, also where nothing but published messages stood.
    let numbered = call(
        &client,
        &[
            event(story.published, "e"),
            message(story.waiting, "w4"),
            message(story.parked, "k2"),
            event(story.dead, "d2"),
        ],
    )
    .await
    .unwrap();
    let shown: Vec<_> = numbered.iter().map(|one| (one.seq.unwrap(), one.version.unwrap())).collect();
    assert_eq!(shown, [(4, 3), (4, 0), (2, 0), (2, 2)]);
    let highest: i64 =
        client.query_one("select max(position) from wh_event_store where payload = 'w1'", &[]).await.unwrap().get(0);
    assert!(numbered.iter().all(|one| one.position.unwrap() > highest));
    assert_eq!(owner.store.release_scheduled(owner.incarnation, &owner.held(), 10).await.unwrap(), 1);
    let (texts, _) = owner.drain(&read, 2).await;
    assert_eq!(texts, ["e", "w4", "k2", "d2", "scheduled"]);
}

fn refused(outcome: Result<impl std::fmt::Debug, Error>) -> String {
    match outcome {
        Err(Error::Schema(text)) => text,
        other => panic!("not refused: {other:?}"),
    }
}

#[tokio::test]
async fn a_dump_restored_on_a_fresh_server_goes_on_after_a_rebase() {
    let (old, new) = (support::own_cluster(), support::own_cluster());
    let space = space_on(&old).await;
    let (client, owner) = (space.schema.client().await, space.owner(1).await);
    let story = tell(&owner, &client).await;
    copy(&old, &space.schema.name, &new, "postgres");

    let moved = restored(&space, &new, "postgres");
    let mut there = moved.schema.client().await;
    // It does not start before.
    let text = refused(install::verify(&there, &moved.name, Some(PARTITIONS)).await);
    assert!(text.contains("corelane rebase") && text.contains("was made on server"), "{text}");
    // What a program in SQL stored too early is not lost, although the old cursors say it is resolved.
    call(&there, &[message(story.plain, "early")]).await.unwrap();

    let rebased = rebase::rebase(&mut there, &moved.name, false).await.unwrap().expect("it was needed");
    assert_eq!((rebased.generation, rebased.pending), (2, 6));
    assert_eq!((rebased.parked, rebased.scheduled, rebased.dead_letters), (1, 1, 1));
    assert_eq!(install::verify(&there, &moved.name, Some(PARTITIONS)).await.unwrap().generation, 2);
    assert_eq!(rebase::rebase(&mut there, &moved.name, false).await.unwrap(), None, "once is enough");

    let reader = moved.owner(1).await;
    assert!(reader.incarnation.number > owner.incarnation.number, "no incarnation is given twice");
    let (texts, read) = reader.drain(&ReadPosition::default(), 2).await;
    assert_eq!(texts, [&WAITING[..], &["early"]].concat());
    // Published to here; the rest of the story without it.
    let request = SettleRequest {
        shard: 0,
        ownership: reader.taken.ownership,
        cursor: Some(read.read),
        ..SettleRequest::default()
    };
    reader.store.settle(reader.incarnation, &request).await.unwrap();
    let numbered = call(&there, &[event(story.published, "e"), message(story.plain, "p")]).await.unwrap();
    assert_eq!((numbered[0].seq, numbered[0].version, numbered[1].seq), (Some(4), Some(3), Some(3)));
}

#[tokio::test]
async fn a_copy_in_another_database_of_the_server_is_rebased_alike() {
    let server = support::own_cluster();
    let space = space_on(&server).await;
    let (client, owner) = (space.schema.client().await, space.owner(1).await);
    let story = tell(&owner, &client).await;
    client.batch_execute("create database other").await.unwrap();
    copy(&server, &space.schema.name, &server, "other");
    let moved = restored(&space, &server, "other");
    let mut there = moved.schema.client().await;
    let text = refused(install::verify(&there, &moved.name, None).await);
    assert!(text.contains("another database") && text.contains("corelane rebase"), "{text}");
    let rebased = rebase::rebase(&mut there, &moved.name, false).await.unwrap().expect("it was needed");
    assert_eq!(rebased.pending, 5);
    goes_on(&moved, &story).await;
}

#[tokio::test]
async fn it_is_refused_while_an_instance_works() {
    let space = Space::new().await;
    let (mut client, owner) = (space.schema.client().await, space.owner(1).await);
    call(&client, &[message(Uuid::now_v7(), "m")]).await.unwrap();
    let outcome = rebase::rebase(&mut client, &space.name, true).await;
    let text = match outcome {
        Err(error @ Error::Store(_)) => error.to_string(),
        other => panic!("not refused: {other:?}"),
    };
    assert!(text.contains("stop it first") && text.contains(&owner.incarnation.number.to_string()), "{text}");
    owner.coordination.deregister_instance(owner.incarnation).await.unwrap();
    let rebased = rebase::rebase(&mut client, &space.name, true).await.unwrap().expect("forced");
    assert_eq!((rebased.generation, rebased.pending), (2, 1));
    assert_eq!(space.owner(1).await.drain(&ReadPosition::default(), 10).await.0, ["m"]);
}
