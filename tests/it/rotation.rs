//! A segment's way: filled, left, found resolved, carried, truncated; and who may hold it up.

use corelane::plan::snapshot::Snapshot;
use corelane::seam::store::{
    Coordination, LastNumbers, Maintenance, ReadPosition, Renewed, SettleReply, SettleRequest, Store, StoreError,
};
use tokio_postgres::{Client, IsolationLevel};
use uuid::Uuid;

use crate::outbox_kit::call;
use crate::store_kit::{Message, Owner, Space, event, loose, message, stream_in};

/// Makes the last switch of segments look old.
async fn a_minute_passes(client: &Client) {
    client.batch_execute("update wh_segment set switched_at = switched_at - interval '61 s'").await.unwrap();
}

async fn current(client: &Client) -> i16 {
    client.query_one("select current from wh_segment", &[]).await.unwrap().get(0)
}

async fn rows_in(client: &Client, segment: i16) -> i64 {
    let count = format!("select (select count(*) from wh_log_{segment}) + (select count(*) from wh_outbox_{segment})");
    client.query_one(&count, &[]).await.unwrap().get(0)
}

async fn pid(client: &impl tokio_postgres::GenericClient) -> i32 {
    client.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0)
}

async fn maintain(owner: &Owner) -> Maintenance {
    owner.coordination.perform_maintenance(owner.incarnation, 10_000).await.unwrap()
}

/// Steps until one has nothing more to say; answers them summed up.
async fn maintain_to_the_end(owner: &Owner) -> Maintenance {
    let mut sum = Maintenance::default();
    for _ in 0..8 {
        let step = maintain(owner).await;
        sum.truncated += step.truncated;
        sum.rotated |= step.rotated;
        sum.blocked_by = step.blocked_by;
        sum.cursors_trimmed += step.cursors_trimmed;
    }
    sum
}

/// Publishes whatever there is: claims it and writes the cursor behind it.
async fn publish(owner: &Owner, shard: u16, position: &ReadPosition) -> (Vec<String>, ReadPosition) {
    let (texts, position) = owner.drain(position, 100).await;
    settle(owner, shard, position.read.clone()).await;
    (texts, position)
}

pub async fn settle(owner: &Owner, shard: u16, cursor: Snapshot) {
    let request =
        SettleRequest { shard, ownership: owner.taken.ownership, cursor: Some(cursor), ..SettleRequest::default() };
    let reply = owner.store.settle(owner.incarnation, &request).await.unwrap();
    assert!(matches!(reply, SettleReply::Settled { .. }), "{reply:?}");
}

#[tokio::test]
async fn what_is_published_is_truncated_and_its_numbers_live_on() {
    let space = Space::new().await;
    let (client, owner) = (space.schema.client().await, space.owner(1).await);
    let (mixed, plain) = (Uuid::now_v7(), Uuid::now_v7());
    let mut at = ReadPosition::default();
    let mut expected = 0;
    for round in 0..4_i64 {
        let messages = [event(mixed, "e"), message(mixed, "m"), message(plain, "p"), loose("l")];
        let numbered = call(&client, &messages).await.unwrap();
        assert_eq!(
            numbered.iter().map(|one| one.seq.unwrap()).collect::<Vec<_>>(),
            [2 * round + 1, 2 * round + 2, round + 1, 1]
        );
        assert_eq!(numbered[0].version, Some(round + 1));
        let (texts, position) = publish(&owner, 0, &at).await;
        assert_eq!(texts, ["e", "m", "p", "l"]);
        at = position;
        let before = current(&client).await;
        assert_eq!(maintain_to_the_end(&owner).await.truncated, 0, "it is current");
        a_minute_passes(&client).await;
        let done = maintain_to_the_end(&owner).await;
        assert_eq!((done.rotated, done.truncated, done.blocked_by), (true, 1, None));
        assert_eq!(rows_in(&client, before).await, 0);
        assert_ne!(current(&client).await, before);
        expected += 1;
        let events: i64 = client.query_one("select count(*) from wh_event_store", &[]).await.unwrap().get(0);
        assert_eq!(events, expected);
    }
    // Idle: nothing is switched, nothing to do, and that is said.
    a_minute_passes(&client).await;
    assert_eq!(maintain_to_the_end(&owner).await, Maintenance::default());
    assert!(!maintain(&owner).await.work_left);
    call(&client, &[loose("l")]).await.unwrap();
    let step = maintain(&owner).await;
    assert!(step.work_left && step.rotated && step.more, "{step:?}");
    let step = maintain(&owner).await;
    assert!(step.work_left && !step.more, "unpublished: {step:?}");
}

#[tokio::test]
async fn what_is_not_resolved_stays() {
    let space = Space::new().await;
    let (client, owner) = (space.schema.client().await, space.owner(1).await);
    call(&client, &[message(Uuid::now_v7(), "m1")]).await.unwrap();
    let (_, at) = publish(&owner, 0, &ReadPosition::default()).await;
    call(&client, &[message(Uuid::now_v7(), "m2")]).await.unwrap();
    let unread = client.query_one("select max(xid) from wh_log", &[]).await.unwrap().get::<_, i64>(0) as u64;
    let (_, read) = owner.drain(&at, 100).await;
    // Read, but not acknowledged: the cursor lists it.
    settle(&owner, 0, Snapshot::new(read.read.xmax(), [read.read.listed(), &[unread]].concat())).await;
    a_minute_passes(&client).await;
    let done = maintain_to_the_end(&owner).await;
    assert_eq!((done.rotated, done.truncated), (true, 0));
    assert_eq!(rows_in(&client, 0).await, 4);
    settle(&owner, 0, read.read).await;
    assert_eq!(maintain_to_the_end(&owner).await.truncated, 1);
    assert_eq!(rows_in(&client, 0).await, 0);
}

#[tokio::test]
async fn a_late_writer_into_a_left_segment_is_published() {
    for level in [IsolationLevel::ReadCommitted, IsolationLevel::RepeatableRead] {
        let space = Space::new().await;
        let (client, owner) = (space.schema.client().await, space.owner(1).await);
        let mut late = space.schema.client().await;
        let transaction = late.build_transaction().isolation_level(level).start().await.unwrap();
        // A snapshot in which segment 0 is current. At READ COMMITTED it writes before the switch instead.
        let first = Message { payload: b"late 1".to_vec(), ..message(Uuid::now_v7(), "") };
        transaction.query_one("select current from wh_segment", &[]).await.unwrap();
        if matches!(level, IsolationLevel::ReadCommitted) {
            call(&transaction, std::slice::from_ref(&first)).await.unwrap();
        }
        call(&client, &[message(Uuid::now_v7(), "m")]).await.unwrap();
        let (texts, at) = publish(&owner, 0, &ReadPosition::default()).await;
        assert_eq!(texts, ["m"]);
        a_minute_passes(&client).await;
        assert!(maintain(&owner).await.rotated);
        assert_eq!(maintain(&owner).await.truncated, 0, "this step carries");
        // Found resolved and carried; now it writes where nobody expects it any more.
        if matches!(level, IsolationLevel::RepeatableRead) {
            call(&transaction, &[first]).await.unwrap();
        }
        let stopped = maintain(&owner).await;
        assert_eq!((stopped.truncated, stopped.blocked_by), (0, Some(pid(&transaction).await)));
        transaction.commit().await.unwrap();
        assert_eq!(rows_in(&client, 0).await, 4, "{level:?}");

        assert_eq!(maintain_to_the_end(&owner).await.truncated, 0, "the late row is not published yet");
        let (texts, _) = publish(&owner, 0, &at).await;
        assert_eq!(texts, ["late 1"], "{level:?}");
        assert_eq!(maintain_to_the_end(&owner).await.truncated, 1);
    }
}

#[tokio::test]
async fn a_reader_with_a_lock_on_a_segment_holds_nobody_up_but_the_truncation() {
    let space = Space::new().await;
    let (client, owner) = (space.schema.client().await, space.owner(1).await);
    let mut dump = space.schema.client().await;
    let stream = Uuid::now_v7();
    call(&client, &[message(stream, "m1")]).await.unwrap();
    let (_, at) = publish(&owner, 0, &ReadPosition::default()).await;
    a_minute_passes(&client).await;
    let transaction = dump.transaction().await.unwrap();
    transaction.batch_execute("lock table wh_log_0, wh_outbox_0 in access share mode").await.unwrap();
    let blocker = pid(&transaction).await;
    assert_eq!(maintain_to_the_end(&owner).await.blocked_by, Some(blocker));
    // Nobody waits behind the try.
    client.batch_execute("set statement_timeout = '5s'").await.unwrap();
    assert_eq!(call(&client, &[message(stream, "m2")]).await.unwrap()[0].seq, Some(2));
    assert_eq!(publish(&owner, 0, &at).await.0, ["m2"]);
    transaction.rollback().await.unwrap();
    assert_eq!(maintain_to_the_end(&owner).await.truncated, 1);
}

#[tokio::test]
async fn a_shard_without_work_does_not_hold_the_segment_of_another() {
    let space = Space::new().await;
    let (client, owner) = (space.schema.client().await, space.owner(2).await);
    // Shard 0 has its cursor from before; only partition 1, which is shard 1's, gets messages.
    settle(&owner, 0, Snapshot::new(1, vec![])).await;
    for _ in 0..3 {
        call(&client, &[message(stream_in(1), "m")]).await.unwrap();
    }
    let read = client
        .query_one("select pg_snapshot_xmax(pg_current_snapshot())::text::int8", &[])
        .await
        .unwrap()
        .get::<_, i64>(0) as u64;
    a_minute_passes(&client).await;
    assert_eq!(maintain_to_the_end(&owner).await.truncated, 0, "shard 1 has resolved nothing");
    settle(&owner, 1, Snapshot::new(read, vec![])).await;
    assert_eq!(maintain_to_the_end(&owner).await.truncated, 1);
}

#[tokio::test]
async fn superseded_cursors_and_those_of_the_dead_go() {
    let space = Space::new().await;
    let (client, owner) = (space.schema.client().await, space.owner(1).await);
    for xmax in 1..=5 {
        settle(&owner, 0, Snapshot::new(xmax, vec![])).await;
    }
    assert_eq!(maintain(&owner).await.cursors_trimmed, 4);
    let left = "select min(resolved::text), count(*) from wh_cursor";
    let row = client.query_one(left, &[]).await.unwrap();
    assert_eq!((row.get::<_, &str>(0), row.get::<_, i64>(1)), ("5:5:", 1));

    owner.coordination.deregister_instance(owner.incarnation).await.unwrap();
    let base: String = client.query_one("select min(base::text) from wh_partition", &[]).await.unwrap().get(0);
    assert_eq!(base, "5:5:", "the base has what the cursor had");
    assert_eq!(maintain(&owner).await, Maintenance::default(), "the dead do nothing");
    let next = space.owner(1).await;
    assert_eq!(maintain(&next).await.cursors_trimmed, 1);
    client
        .batch_execute("update wh_instance set lease_until = now() - interval '2 days' where state <> 0")
        .await
        .unwrap();
    maintain(&next).await;
    let instances: i64 = client.query_one("select count(*) from wh_instance", &[]).await.unwrap().get(0);
    assert_eq!(instances, 1);
}

#[tokio::test]
async fn a_due_message_whose_id_is_stored_is_dead_and_the_others_are_released() {
    let space = Space::new().await;
    let (client, owner) = (space.schema.client().await, space.owner(1).await);
    let stored = loose("stored");
    let due = |id: Uuid, text: &str| Message { id, due_unix_us: 1, ..loose(text) };
    let twice = Uuid::now_v7();
    let scheduled = [due(stored.id, "double"), due(twice, "first"), due(twice, "second"), due(Uuid::now_v7(), "other")];
    call(&client, std::slice::from_ref(&stored)).await.unwrap();
    call(&client, &scheduled).await.unwrap();
    assert_eq!(owner.store.release_scheduled(owner.incarnation, &owner.held(), 100).await.unwrap(), 2);
    let (texts, _) = owner.drain(&ReadPosition::default(), 100).await;
    assert_eq!(texts, ["stored", "first", "other"]);
    let sql = "select convert_from(payload, 'UTF8'), error from wh_dead_letter order by dead_letter_id";
    let dead = client.query(sql, &[]).await.unwrap();
    let dead: Vec<(&str, &str)> = dead.iter().map(|row| (row.get(0), row.get(1))).collect();
    let why = "a message of this id is stored already";
    assert_eq!(dead, [("double", why), ("second", why)]);
}

#[tokio::test]
async fn due_messages_get_their_numbers_when_they_are_due() {
    let space = Space::new().await;
    let (client, owner) = (space.schema.client().await, space.owner(1).await);
    let stream = Uuid::now_v7();
    let due = |text: &str, second: i64| Message { due_unix_us: second * 1_000_000, ..message(stream, text) };
    let later = Message { due_unix_us: 4_000_000_000_000_000, ..message(stream, "not yet") };
    let free = Message { due_unix_us: 1, destinations: vec!["b", "a"], ..loose("free") };
    let numbered = call(&client, &[due("second", 20), due("first", 10), later, free]).await.unwrap();
    assert!(numbered.iter().all(|one| one.seq.is_none() && one.position.is_none()));
    call(&client, &[message(stream, "now")]).await.unwrap();

    // A user's open transaction on the stream: what is not its own is released, the rest later.
    let mut user = space.schema.client().await;
    let transaction = user.transaction().await.unwrap();
    call(&transaction, &[message(stream, "users")]).await.unwrap();
    let release = async || owner.store.release_scheduled(owner.incarnation, &owner.held(), 100).await.unwrap();
    assert_eq!(release().await, 1);
    transaction.commit().await.unwrap();
    assert_eq!(release().await, 2);
    assert_eq!(release().await, 0);
    let (texts, _) = owner.drain(&ReadPosition::default(), 100).await;
    assert_eq!(texts, ["now", "users", "free", "free", "first", "second"]);
    let left: i64 = client.query_one("select count(*) from wh_scheduled", &[]).await.unwrap().get(0);
    assert_eq!(left, 1);
}

/// A rotation's whole way, for what is published.
async fn rotate(client: &Client, owner: &Owner) {
    a_minute_passes(client).await;
    assert_eq!(maintain_to_the_end(owner).await.truncated, 1);
}

#[tokio::test]
async fn a_flush_is_found_when_its_log_rows_are_truncated() {
    let space = Space::new().await;
    let (client, mut owner) = (space.schema.client().await, space.owner(1).await);
    let only_stored = |stream, text| Message { destinations: Vec::new(), ..event(stream, text) };
    let (stream, other) = (Uuid::now_v7(), Uuid::now_v7());
    owner.store(&[only_stored(stream, "1")]).await;
    // Without any destination: nothing of it is ever met by a claim.
    let flush = owner.store(&[only_stored(stream, "2"), only_stored(stream, "3"), only_stored(other, "1")]).await;
    let (_, at) = publish(&owner, 0, &ReadPosition::default()).await;
    rotate(&client, &owner).await;
    assert_eq!(rows_in(&client, 0).await, 0);
    let find = async |owner: &Owner, rows: &[u32]| {
        let streams = [stream, other];
        owner.store.find_flush(owner.origin(), &streams[..rows.len()], rows, 0).await
    };
    let found = find(&owner, &[2, 1]).await.unwrap().expect("it is stored: sent again it would be stored twice");
    assert_eq!((found.xid, found.position, found.owned), (flush.xid, flush.position, true));
    let last = |seq, version| LastNumbers { seq, version };
    assert_eq!(found.looked_up, Some(vec![last(1, 1), last(0, 0)]));
    let events: i64 = client.query_one("select count(*) from wh_event_store", &[]).await.unwrap().get(0);
    assert_eq!(events, 4);

    // With other messages of a stream its numbers went with them: stored, and that is all that can be said.
    owner.store(&[only_stored(stream, "4"), message(stream, "5")]).await;
    publish(&owner, 0, &at).await;
    rotate(&client, &owner).await;
    let found = find(&owner, &[2]).await;
    assert!(matches!(&found, Err(StoreError::Refused { sqlstate, .. }) if sqlstate == "CL006"), "{found:?}");

    // One that did not commit is given up as ever.
    owner.flush_number += 1;
    assert_eq!(find(&owner, &[1]).await.unwrap(), None);
}

#[tokio::test]
async fn maintenance_that_is_held_up_ends_by_itself_and_no_renewal_waits_for_it() {
    let space = Space::new().await;
    let owner = space.owner(1).await;
    let mut user = space.schema.client().await;
    let transaction = user.transaction().await.unwrap();
    transaction.batch_execute("lock table wh_cursor in access exclusive mode").await.unwrap();
    let held_up = owner.coordination.perform_maintenance(owner.incarnation, 800);
    let is_over = std::cell::Cell::new(false);
    let held_up = async {
        let held_up = held_up.await;
        is_over.set(true);
        held_up
    };
    let renewed = async {
        let renewed = owner.coordination.renew_lease(owner.incarnation, 10_000).await.unwrap();
        (renewed, is_over.get())
    };
    let (held_up, (renewed, was_over)) = tokio::join!(held_up, renewed);
    assert!(matches!(&held_up, Err(StoreError::Transient { sqlstate, .. }) if sqlstate == "57014"), "{held_up:?}");
    assert_eq!(renewed, Renewed::Alive);
    assert!(!was_over, "it had a connection to itself");
    // Whoever does not wait for it, because the process ends, leaves no statement behind beyond its limit.
    let abandoned = owner.coordination.perform_maintenance(owner.incarnation, 800);
    assert!(tokio::time::timeout(std::time::Duration::from_millis(50), abandoned).await.is_err());
    let watch = space.schema.client().await;
    let sql =
        format!("select count(*) from pg_stat_activity where query like '%{}%perform_maintenance%'", space.schema.name);
    // One is this look itself.
    let gone = || async { watch.query_one(&sql, &[]).await.unwrap().get::<_, i64>(0) == 1 };
    crate::support::eventually("its connection is closed", std::time::Duration::from_secs(10), gone).await;
    transaction.rollback().await.unwrap();
    maintain(&owner).await;
}
