//! Membership: leases, take-over, hand-over, and the life of the server.

use std::time::Duration;

use corelane::private_postgres::{Options, PrivatePostgres};
use corelane::seam::store::{Coordination, Member, ReadPosition, Renewed, Store};
use tokio_postgres::NoTls;

use crate::store_kit::*;
use crate::support::{eventually, schema_on};

#[tokio::test]
async fn the_first_takes_all_and_the_next_nothing() {
    let space = Space::new().await;
    let first = space.owner(1).await;
    assert_eq!(first.held(), (0..PARTITIONS).collect::<Vec<_>>());
    assert!(first.taken.held.iter().all(|held| held.fence == 1));
    let again = first.coordination.take_partitions(first.incarnation, &ALL).await.unwrap().unwrap();
    assert_eq!(again, first.taken, "nothing new: the ownership stays");
    let second = space.owner(1).await;
    assert!(second.taken.held.is_empty());
    let members = second.coordination.members(second.incarnation).await.unwrap();
    assert_eq!((members.free.len() as u32, members.others.len()), (0, 1));
    assert_eq!(members.others[0].incarnation, first.incarnation);
    assert!(!members.others[0].expired);
    let members = first.coordination.members(first.incarnation).await.unwrap();
    let seen = members.others[0];
    assert_eq!((seen.incarnation, seen.owns, seen.held), (second.incarnation, true, 0), "it may own some");
}

#[tokio::test]
async fn two_takers_share_without_waiting_or_doubling() {
    let space = Space::new().await;
    let owner = space.owner(1).await;
    let (a, b) = (space.owner(1).await, space.owner(1).await);
    owner.coordination.deregister_instance(owner.incarnation).await.unwrap();
    let members = a.coordination.members(a.incarnation).await.unwrap();
    assert_eq!((members.free, members.others.len()), (ALL.to_vec(), 1));
    let (of_a, of_b) = tokio::join!(
        a.coordination.take_partitions(a.incarnation, &ALL),
        b.coordination.take_partitions(b.incarnation, &ALL)
    );
    let mut all: Vec<u32> = [of_a, of_b]
        .into_iter()
        .flat_map(|taken| taken.unwrap().unwrap().held)
        .map(|held| {
            assert_eq!(held.fence, 3, "taken, freed, taken");
            held.partition
        })
        .collect();
    all.sort_unstable();
    assert_eq!(all, (0..PARTITIONS).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_lease_that_is_past_is_never_renewed() {
    let space = Space::new().await;
    let owner = space.owner(1).await;
    assert_eq!(owner.coordination.renew_lease(owner.incarnation, 10_000).await.unwrap(), Renewed::Alive);
    space.expire(&owner).await;
    assert_eq!(owner.coordination.renew_lease(owner.incarnation, 10_000).await.unwrap(), Renewed::Dead);
    assert_eq!(owner.coordination.take_partitions(owner.incarnation, &ALL).await.unwrap(), None);
}

#[tokio::test]
async fn a_late_take_over_needs_the_same_counter_and_a_past_lease() {
    let space = Space::new().await;
    let owner = space.owner(1).await;
    let heir = space.owner(1).await;
    let seen = heir.coordination.members(heir.incarnation).await.unwrap().others[0];
    assert!(!heir.coordination.mark_dead(seen, false).await.unwrap(), "the lease runs");
    owner.coordination.renew_lease(owner.incarnation, 10_000).await.unwrap();
    space.expire(&owner).await;
    assert!(!heir.coordination.mark_dead(seen, false).await.unwrap(), "the counter has moved since it was seen");
    let seen = heir.coordination.members(heir.incarnation).await.unwrap().others[0];
    assert!(seen.expired);
    assert!(heir.coordination.mark_dead(seen, false).await.unwrap());
    assert!(!heir.coordination.mark_dead(seen, false).await.unwrap(), "done is done");
    let taken = heir.coordination.take_partitions(heir.incarnation, &ALL).await.unwrap().unwrap();
    assert_eq!(taken.held.len(), PARTITIONS as usize);
    assert_eq!(owner.coordination.renew_lease(owner.incarnation, 10_000).await.unwrap(), Renewed::Dead);
}

#[tokio::test]
async fn an_early_take_over_needs_the_end_of_the_owners_connection() {
    let space = Space::new().await;
    let owner = space.owner(1).await;
    let heir = space.owner(1).await;
    let seen = heir.coordination.members(heir.incarnation).await.unwrap().others[0];
    assert!(seen.connected);
    assert!(!heir.coordination.mark_dead(seen, true).await.unwrap(), "its session lock is held");
    let dead = owner.incarnation;
    drop(owner);
    eventually("the server sees the connection end", Duration::from_secs(5), || async {
        !heir.coordination.members(heir.incarnation).await.unwrap().others[0].connected
    })
    .await;
    eventually("the lock can be had", Duration::from_secs(5), || async {
        heir.coordination.mark_dead(Member { incarnation: dead, ..seen }, true).await.unwrap()
    })
    .await;
    assert_eq!(heir.coordination.members(heir.incarnation).await.unwrap().free.len() as u32, PARTITIONS);
}

#[tokio::test]
async fn a_lost_lease_connection_takes_its_session_lock_again() {
    let space = Space::new().await;
    let owner = space.owner(1).await;
    let heir = space.owner(1).await;
    let seen = heir.coordination.members(heir.incarnation).await.unwrap().others[0];
    let client = space.schema.client().await;
    let holder = "select pid from pg_locks where locktype = 'advisory' and classid = wh_lock_class(4)::oid
        and objid = $1::int4::oid and granted";
    let pid: i32 = client.query_one(holder, &[&owner.incarnation.number]).await.unwrap().get(0);
    client.query("select pg_terminate_backend($1)", &[&pid]).await.unwrap();
    eventually("the connection ends", Duration::from_secs(5), || async {
        client.query_opt(holder, &[&owner.incarnation.number]).await.unwrap().is_none()
    })
    .await;
    eventually("renewed over a new connection", Duration::from_secs(5), || async {
        matches!(owner.coordination.renew_lease(owner.incarnation, 60_000).await, Ok(Renewed::Alive))
    })
    .await;
    assert!(!heir.coordination.mark_dead(seen, true).await.unwrap(), "held again");
}

#[tokio::test]
async fn a_clean_end_frees_everything_at_once() {
    let space = Space::new().await;
    let mut owner = space.owner(1).await;
    let heir = space.owner(1).await;
    owner.store(&[event(stream_in(1), "left")]).await;
    owner.coordination.deregister_instance(owner.incarnation).await.unwrap();
    let taken = heir.coordination.take_partitions(heir.incarnation, &ALL).await.unwrap().unwrap();
    assert_eq!(taken.held.len(), PARTITIONS as usize);
    let loaded = heir.store.load(heir.incarnation, &[1]).await.unwrap();
    let position = ReadPosition { read: loaded.resolved[0].clone(), ..ReadPosition::default() };
    let mut heir = heir;
    heir.taken = taken;
    assert_eq!(heir.drain(&position, 10).await.0, ["left"]);
    let lost = owner.store.load(owner.incarnation, &[1]).await;
    assert!(lost.is_err(), "a partition that is not owned has no cursor to start from: {lost:?}");
}

#[tokio::test]
async fn a_copied_installation_is_refused() {
    let space = Space::new().await;
    space.schema.client().await.batch_execute("update wh_installation set system_identifier = 1").await.unwrap();
    let coordination = corelane::store::postgres::PostgresCoordination::new(space.dial(), &space.name);
    let refused = coordination.register_instance(&registration("copy", 1), 1_000).await.unwrap_err();
    assert!(refused.to_string().contains("rebase"), "{refused}");
}

/// One backend is killed, the server recovers: transaction ids may be given again, and everybody learns of it.
#[tokio::test]
async fn a_crash_of_the_server_begins_a_new_epoch() {
    let mut cluster = PrivatePostgres::start(Options::default()).unwrap();
    let space = Space::in_schema(schema_on(cluster.url("postgres"))).await;
    let mut owner = space.owner(1).await;
    let before = owner.store(&[loose("before")]).await;
    let reply = owner.claim(&ReadPosition::default(), &[], 10).await;
    assert_eq!(before.epoch, reply.epoch);

    let victim = space.schema.client().await;
    let pid: i32 = victim.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
    // Not killed itself: when it is gone, the server knows, and lets nobody in until it has recovered.
    let witness = space.schema.client().await;
    let kill = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    assert!(kill.success());
    drop(victim);
    eventually("the server ends all", Duration::from_secs(10), || async { witness.is_closed() }).await;
    eventually("the server is back", Duration::from_secs(30), || async {
        match tokio_postgres::connect(&space.schema.url, NoTls).await {
            Ok((client, connection)) => {
                tokio::spawn(connection);
                client.simple_query("select 1").await.is_ok()
            }
            Err(_) => false,
        }
    })
    .await;

    let mut after = None;
    eventually("the store has dialled anew", Duration::from_secs(10), || {
        let call = owner.store.load(owner.incarnation, &[0]);
        async { call.await.is_ok() }
    })
    .await;
    while after.is_none() {
        after = owner.try_store(&[loose("after")]).await.ok();
    }
    let corelane::seam::store::StoreReply::Stored(after) = after.unwrap() else { panic!("busy") };
    assert_ne!(after.epoch, before.epoch, "a flush tells");
    let reply = owner.claim(&ReadPosition::default(), &[], 10).await;
    assert_eq!(reply.epoch, after.epoch, "a claim tells the same");
    assert_eq!(owner.store.load(owner.incarnation, &[0]).await.unwrap().epoch, after.epoch);
    assert_eq!(payloads(&reply.rows), ["before", "after"]);
    // A clean restart is the same life: no id is given twice.
    cluster.restart(corelane::private_postgres::StopMode::Fast).unwrap();
    let mut again = None;
    eventually("after the restart", Duration::from_secs(10), || async {
        owner.store.load(owner.incarnation, &[0]).await.is_ok()
    })
    .await;
    again.replace(owner.store.load(owner.incarnation, &[0]).await.unwrap().epoch);
    assert_eq!(again, Some(after.epoch));
}

#[tokio::test]
async fn owners_in_two_schemas_of_one_database_do_not_notice_each_other() {
    let (one, two) = (Space::new().await, Space::new().await);
    let (mut a, mut b) = (one.owner(1).await, two.owner(1).await);
    assert_eq!(a.incarnation.number, b.incarnation.number, "the same key in another class");
    let holder = one.schema.client().await;
    holder
        .batch_execute("begin; select pg_advisory_xact_lock(wh_lock_class(1), p) from generate_series(0, 15) p")
        .await
        .unwrap();
    b.store(&[event(stream_in(1), "free")]).await;
    let stream = stream_in(1);
    assert_eq!(a.busy(&[event(stream, "held")]).await, [stream]);
}

#[tokio::test]
async fn a_renewal_and_a_look_at_the_others_are_one_statement() {
    let space = Space::new().await;
    let (owner, other) = (space.owner(1).await, space.owner(1).await);
    let counter = async |of: &Owner| {
        let client = space.schema.client().await;
        let sql = "select counter from wh_instance where number = $1";
        client.query_one(sql, &[&of.incarnation.number]).await.unwrap().get::<_, i64>(0)
    };
    let before = counter(&other).await;
    let seen = other.coordination.renew_and_look(other.incarnation, 10_000).await.unwrap().expect("alive");
    assert_eq!(counter(&other).await, before + 1);
    assert_eq!(seen, other.coordination.members(other.incarnation).await.unwrap());
    assert_eq!((seen.others[0].incarnation, seen.free.len() as u32), (owner.incarnation, 0));
    let seen = owner.coordination.renew_and_look(owner.incarnation, 10_000).await.unwrap().expect("alive");
    assert_eq!((seen.others.len(), seen.others[0].held), (1, 0), "one that owns nothing, and may");
    space.expire(&owner).await;
    assert_eq!(owner.coordination.renew_and_look(owner.incarnation, 10_000).await.unwrap(), None);
}
