//! `process_inbox_batch`: a consumer in another language, without a session, beside others and beside sessions.

use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Error};
use uuid::Uuid;

use crate::inbox_sql_kit::Session;
use crate::outbox_kit::{code, refusal};
use crate::store_kit::Space;

const NEW: i16 = 0;
const DUPLICATE: i16 = 1;
const BUSY: i16 = 2;

/// A worker: an id, and whatever connection there is.
struct Worker {
    client: Client,
    id: Uuid,
    consumer: i16,
}

/// What one call said.
#[derive(Debug, Default, PartialEq, Eq)]
struct Said {
    states: Vec<i16>,
    completed: i32,
    failed: i32,
    unknown: i32,
    more: bool,
    /// Payloads, with the attempts of each.
    handed: Vec<(String, i32)>,
}

impl Said {
    fn payloads(&self) -> Vec<&str> {
        self.handed.iter().map(|(payload, _)| payload.as_str()).collect()
    }
}

impl Worker {
    async fn new(space: &Space) -> Self {
        let client = space.schema.client().await;
        let consumer = client.query_one("select consumer_number('billing')", &[]).await.unwrap().get(0);
        Self { client, id: Uuid::now_v7(), consumer }
    }

    /// A call with further arguments by name, their values from `$3` on, in whatever transaction the client is in.
    async fn try_call(&self, named: &str, values: &[&(dyn ToSql + Sync)]) -> Result<Said, Error> {
        let comma = if named.is_empty() { "" } else { ", " };
        let sql = format!("select * from process_inbox_batch($1, $2{comma}{named})");
        let mut all: Vec<&(dyn ToSql + Sync)> = vec![&self.id, &self.consumer];
        all.extend(values);
        let mut said = Said::default();
        for row in self.client.query(&sql, &all).await? {
            match row.get("source") {
                "new" => said.states.push(row.get("state")),
                "inbox" => said.handed.push((String::from_utf8(row.get("payload")).unwrap(), row.get("attempts"))),
                _ => {
                    (said.completed, said.failed) = (row.get("completed"), row.get("failed"));
                    (said.unknown, said.more) = (row.get("unknown"), row.get("more"));
                }
            }
        }
        Ok(said)
    }

    async fn call(&self, named: &str, values: &[&(dyn ToSql + Sync)]) -> Said {
        self.try_call(named, values).await.unwrap_or_else(|error| panic!("{named}: {:?}", error.as_db_error()))
    }

    /// Deliveries: id and stream; the payload is the id. Nothing is handed out.
    async fn receive(&self, of: &[(Uuid, Option<Uuid>)]) -> Vec<i16> {
        let (ids, streams): (Vec<Uuid>, Vec<Option<Uuid>>) = of.iter().copied().unzip();
        let payloads: Vec<Vec<u8>> = ids.iter().map(|id| id.to_string().into_bytes()).collect();
        let named = "p_max_lanes => 0, p_new_messages => $3, p_new_stream_ids => $4, p_new_payloads => $5,
            p_new_types => array_fill('billing.told'::text, array[cardinality($3::uuid[])]), p_new_source => 'orders'";
        self.call(named, &[&ids, &streams, &payloads]).await.states
    }

    async fn claim(&self) -> Vec<String> {
        self.call("", &[]).await.handed.into_iter().map(|(payload, _)| payload).collect()
    }

    /// Handles a message: its effect and its completion commit together, or not at all.
    async fn handle(&self, id: Uuid) -> Result<Said, Error> {
        self.client.batch_execute("begin").await?;
        self.client.execute("insert into effect values ($1, $2)", &[&id, &self.id]).await?;
        let said = self.try_call("p_completions => array[$3::uuid], p_max_lanes => 0", &[&id]).await;
        self.client.batch_execute(if said.is_ok() { "commit" } else { "rollback" }).await?;
        said
    }

    async fn fail(&self, id: Uuid, reason: i32, more: &str) -> Said {
        let named = format!(
            "p_failures => array[$3::uuid], p_failure_reasons => array[$4::int4], p_failure_errors => array['no'],
            p_retry_base_ms => 0, p_max_lanes => 0{more}"
        );
        self.call(&named, &[&id, &reason]).await
    }

    /// As if the leases were over.
    async fn expire(&self) {
        let sql = "update wh_inbox_parked set due = clock_timestamp() - interval '1 s' where leased_to is not null";
        self.client.execute(sql, &[]).await.unwrap();
    }

    async fn count(&self, what: &str) -> i64 {
        self.client.query_one(&format!("select count(*) from {what}"), &[]).await.unwrap().get(0)
    }
}

async fn with_effects(space: &Space) {
    space.schema.client().await.batch_execute("create table effect (message_id uuid, worker uuid)").await.unwrap();
}

fn texts(ids: &[Uuid]) -> Vec<String> {
    ids.iter().map(Uuid::to_string).collect()
}

fn ids<const N: usize>() -> [Uuid; N] {
    std::array::from_fn(|_| Uuid::now_v7())
}

#[tokio::test]
async fn what_is_received_is_stored_once_handed_out_in_order_and_finished_with_its_effects() {
    let space = Space::new().await;
    with_effects(&space).await;
    let (worker, other) = (Worker::new(&space).await, Worker::new(&space).await);
    let [stream, second, a1, a2, a3, b1, alone] = ids();
    let (of, beside) = (Some(stream), Some(second));
    // Lanes are due in the order of the calls.
    assert_eq!(worker.receive(&[(a1, of), (a2, of), (a1, of)]).await, [NEW, NEW, DUPLICATE]);
    assert_eq!(worker.receive(&[(b1, beside)]).await, [NEW]);
    assert_eq!(worker.receive(&[(b1, beside), (alone, None)]).await, [DUPLICATE, NEW]);

    // Lane after lane, at most so many; what one has in hand no other gets.
    let said = worker.call("p_max_rows => 2", &[]).await;
    assert_eq!((said.payloads(), said.more), (texts(&[a1, a2]).iter().map(String::as_str).collect(), true));
    assert_eq!(other.receive(&[(a2, of), (a3, of)]).await, [DUPLICATE, NEW], "one memory");
    assert_eq!(other.call("p_max_lanes => 1", &[]).await.payloads(), [b1.to_string()]);
    assert_eq!(worker.claim().await, texts(&[alone]));
    assert!(other.claim().await.is_empty() && worker.claim().await.is_empty());

    // One at a time: the rest of the lane stays in hand, what came behind it comes after it.
    assert_eq!(worker.handle(a1).await.unwrap().completed, 1);
    assert!(other.claim().await.is_empty(), "the second is still in hand");
    worker.client.batch_execute("begin").await.unwrap();
    assert_eq!(worker.call("p_completions => array[$3::uuid]", &[&a2]).await.payloads(), [a3.to_string()]);
    worker.client.batch_execute("rollback").await.unwrap();
    assert!(other.claim().await.is_empty(), "nothing of it was");
    assert_eq!(worker.handle(a2).await.unwrap().completed, 1);
    assert_eq!(other.claim().await, texts(&[a3]));
    for (by, id) in [(&other, a3), (&other, b1), (&worker, alone)] {
        assert_eq!(by.handle(id).await.unwrap().completed, 1);
    }
    assert_eq!((worker.count("wh_inbox").await, worker.count("wh_inbox_parked").await), (0, 0));
    assert_eq!(worker.receive(&[(a1, of), (b1, beside), (a3, of)]).await, [DUPLICATE; 3], "and remembered");
    assert_eq!(refusal(worker.handle(a1).await).0, "CL040", "decided is decided");
    assert_eq!(worker.count("effect").await, 5);
}

#[tokio::test]
async fn a_failure_keeps_its_lane_in_order_until_it_is_dead_and_others_go_on() {
    let space = Space::new().await;
    with_effects(&space).await;
    let worker = Worker::new(&space).await;
    let [stream, second, a1, a2, b1] = ids();
    worker.receive(&[(a1, Some(stream)), (a2, Some(stream))]).await;
    worker.receive(&[(b1, Some(second))]).await;
    assert_eq!(worker.claim().await, texts(&[a1, a2, b1]));
    // Not ready costs no attempt. Of the lane the second was handled too soon: it comes again.
    let both =
        "p_failures => array[$3, $4]::uuid[], p_failure_reasons => array[4, 1], p_retry_base_ms => 0, p_max_lanes => 0";
    let said = worker.call(both, &[&a2, &a1]).await;
    assert_eq!((said.failed, said.unknown), (1, 0));
    let attempts = async || {
        let said = worker.call("", &[]).await;
        assert_eq!(said.payloads(), texts(&[a1, a2]), "in order");
        said.handed[0].1
    };
    assert_eq!(attempts().await, 0);
    assert_eq!(worker.fail(a1, 2, ", p_attempts_max => 2").await.failed, 1);
    assert_eq!(attempts().await, 1);
    assert_eq!(worker.fail(a1, 2, ", p_attempts_max => 2").await.failed, 1);
    let dead = "select message_id, attempts, reason, error from wh_inbox_dead_letter";
    let row = worker.client.query_one(dead, &[]).await.unwrap();
    assert_eq!((row.get::<_, Uuid>(0), row.get::<_, i32>(1), row.get::<_, i16>(2)), (a1, 2, 2));
    assert_eq!(row.get::<_, String>(3), "no");
    assert_eq!(worker.claim().await, texts(&[a2]), "its lane goes on");
    // One that cannot be read is dead at once; here its lane waits for an operator.
    assert_eq!(worker.fail(a2, 3, ", p_hold => true").await.failed, 1);
    let [a3] = ids();
    assert_eq!(worker.receive(&[(a3, Some(stream))]).await, [NEW]);
    assert!(worker.claim().await.is_empty(), "held");
    assert_eq!(worker.handle(b1).await.unwrap().completed, 1);
    let retried = "select retried from retry_inbox_dead_letters(true, p_dry_run => false)";
    assert_eq!(worker.client.query_one(retried, &[]).await.unwrap().get::<_, i32>(0), 2);
    let again = worker.claim().await;
    assert_eq!(again.len(), 3, "{again:?}");
    for id in again {
        worker.handle(Uuid::parse_str(&id).unwrap()).await.unwrap();
    }
    assert_eq!((worker.count("effect").await, worker.count("wh_inbox_parked").await), (4, 0));
    assert_eq!(worker.fail(a1, 2, "").await.unknown, 1);
}

#[tokio::test]
async fn after_its_lease_another_has_the_lane_and_the_first_ones_effects_are_refused() {
    let space = Space::new().await;
    with_effects(&space).await;
    let (slow, quick) = (Worker::new(&space).await, Worker::new(&space).await);
    let [stream, second, a1, a2, b1] = ids();
    slow.receive(&[(a1, Some(stream)), (a2, Some(stream)), (b1, Some(second))]).await;
    assert_eq!(slow.claim().await.len(), 3);
    slow.expire().await;
    // It has said in time that it is still at one of them.
    let renewed = slow.call("p_renewals => array[$3::uuid], p_max_lanes => 0, p_lease_seconds => 60", &[&b1]).await;
    assert_eq!(renewed.unknown, 0);
    assert_eq!(quick.claim().await, texts(&[a1, a2]));
    assert_eq!(refusal(slow.handle(a1).await).0, "CL040");
    assert_eq!(quick.handle(a1).await.unwrap().completed, 1);
    assert_eq!(refusal(slow.handle(a1).await).0, "CL040");
    assert_eq!(slow.fail(a2, 2, "").await.unknown, 1, "not its own");
    assert_eq!(slow.handle(b1).await.unwrap().completed, 1);
    // One that is over and nobody has taken is as good as before.
    quick.expire().await;
    assert_eq!(quick.handle(a2).await.unwrap().completed, 1);
    let effects = "effect e where (select count(*) from effect x where x.message_id = e.message_id) = 1";
    assert_eq!((slow.count(effects).await, slow.count("effect").await), (3, 3));
}

#[tokio::test]
async fn what_is_given_back_to_a_leased_lane_waits_for_its_worker() {
    let space = Space::new().await;
    with_effects(&space).await;
    let (worker, other) = (Worker::new(&space).await, Worker::new(&space).await);
    let [stream, a1, a2] = ids();
    worker.receive(&[(a1, Some(stream)), (a2, Some(stream))]).await;
    assert_eq!(worker.claim().await, texts(&[a1, a2]));
    worker.fail(a1, 3, "").await;
    assert_eq!(worker.claim().await, texts(&[a2]));
    let retried = "select retried from retry_inbox_dead_letters(true, p_dry_run => false)";
    assert_eq!(worker.client.query_one(retried, &[]).await.unwrap().get::<_, i32>(0), 1);
    assert!(other.claim().await.is_empty(), "the lane is in hand");
    assert_eq!(worker.handle(a2).await.unwrap().completed, 1);
    worker.expire().await;
    assert_eq!(other.claim().await, texts(&[a1]));
    assert_eq!(other.handle(a1).await.unwrap().completed, 1);
    assert_eq!(worker.count("wh_inbox_parked").await, 0);
}

#[tokio::test]
async fn a_worker_and_a_session_never_have_one_lane_at_a_time() {
    let space = Space::new().await;
    with_effects(&space).await;
    let (worker, session) = (Worker::new(&space).await, Session::new(&space).await);
    let [stream, a1, a2, a3] = ids();
    assert_eq!(session.begin(&[(a1, stream)]).await, [0], "the session has it");
    assert_eq!(worker.receive(&[(a2, Some(stream))]).await, [BUSY]);
    assert_eq!(session.remember(&[a1]).await, [true]);
    session.unlock(&[stream]).await;
    assert_eq!(worker.receive(&[(a1, Some(stream)), (a2, Some(stream))]).await, [DUPLICATE, NEW]);
    assert_eq!(worker.claim().await, texts(&[a2]));
    assert_eq!(session.begin(&[(a3, stream)]).await, [3], "behind what the worker has in hand");
    session.keep(&[(a3, stream)]).await;
    session.unlock(&[stream]).await;
    assert!(session.claim_all().await.is_empty(), "leased");
    worker.expire().await;
    let claimed: Vec<Uuid> = session.claim_all().await.iter().map(|of| of.id).collect();
    assert_eq!(claimed, [a2, a3]);
    assert!(worker.claim().await.is_empty());
    assert_eq!(refusal(worker.handle(a2).await).0, "CL040", "the session handles it");
    session.unlock(&[stream]).await;
    assert_eq!(worker.handle(a2).await.unwrap().completed, 1);
    assert_eq!(worker.claim().await.len(), 1);
}

#[tokio::test]
async fn a_lease_that_is_over_is_nothing_once_a_session_has_decided_something_of_its_lane() {
    let space = Space::new().await;
    with_effects(&space).await;
    let (worker, session) = (Worker::new(&space).await, Session::new(&space).await);
    let [stream, a1, a2] = ids();
    worker.receive(&[(a1, Some(stream)), (a2, Some(stream))]).await;
    assert_eq!(worker.claim().await, texts(&[a1, a2]));
    worker.expire().await;
    assert_eq!(session.claim_all().await.len(), 2);
    session.park(stream, a1, 1, "failed in the session", 30_000).await;
    session.unlock(&[stream]).await;
    assert_eq!(refusal(worker.handle(a2).await).0, "CL040", "a1 is to be first");
    assert_eq!(worker.count("effect").await, 0);
    worker.expire().await;
    assert_eq!(worker.count("wh_inbox").await, 2);
}

#[tokio::test]
async fn lanes_in_others_hands_keep_no_worker_from_those_that_are_due_behind_them() {
    let space = Space::new().await;
    let (worker, session) = (Worker::new(&space).await, Session::new(&space).await);
    let streams: Vec<Uuid> = (0..30).map(|_| Uuid::now_v7()).collect();
    for stream in &streams {
        worker.receive(&[(Uuid::now_v7(), Some(*stream))]).await;
    }
    assert_eq!(session.claim(&[], 29, 200, 1 << 20).await.0.len(), 29);
    let said = worker.call("p_max_lanes => 1", &[]).await;
    assert_eq!(said.handed.len(), 1, "the thirtieth is free: {said:?}");
}

#[tokio::test]
async fn what_is_out_of_its_range_is_refused_by_name_and_neighbours_of_nothing_are_stored() {
    let space = Space::new().await;
    let worker = Worker::new(&space).await;
    let many = "array_fill(gen_random_uuid(), array[10001])";
    for (named, text) in [
        ("p_max_lanes => 1001".to_owned(), "p_max_lanes = 1001: must be 0 to 1000"),
        ("p_max_rows => 0".to_owned(), "p_max_rows = 0: must be 1 to 10000"),
        ("p_lease_seconds => null".to_owned(), "p_lease_seconds = null: must be 1 to 3600"),
        ("p_attempts_max => 0".to_owned(), "p_attempts_max = 0: must be 1 to 1000000"),
        (format!("p_completions => {many}"), "length of p_completions = 10001: must be 0 to 10000"),
        (format!("p_new_messages => {many}"), "length of p_new_messages = 10001: must be 0 to 10000"),
    ] {
        assert_eq!(refusal(worker.try_call(&named, &[]).await), ("22023".to_owned(), text.to_owned()), "{named}");
    }
    let new = |stream: &str, types: &str, payload: &str| {
        format!(
            "p_new_messages => array[gen_random_uuid()], p_new_stream_ids => array[{stream}]::uuid[],
            p_new_types => {types}, p_new_payloads => array[{payload}]::bytea[]"
        )
    };
    for (named, sqlstate) in [
        (new("'00000000-0000-0000-0000-000000000000'", "'{t}'", "''"), "22023"),
        (new("null", "'{}'", "''"), "22023"),
        (new("null", "'{t}'", "null"), "23502"),
    ] {
        assert_eq!(code(worker.try_call(&named, &[]).await), sqlstate, "{named}");
    }
    worker.client.batch_execute("begin isolation level repeatable read").await.unwrap();
    assert_eq!(code(worker.try_call("", &[]).await), "22023");
    worker.client.batch_execute("rollback").await.unwrap();
    assert_eq!((worker.count("wh_inbox").await, worker.count("wh_inbox_seen").await), (0, 0));
}

/// What an operator gives back before what is in hand is not in hand.
#[tokio::test]
async fn a_lane_goes_on_when_what_was_handed_is_decided_with_what_was_given_back_meanwhile() {
    let space = Space::new().await;
    with_effects(&space).await;
    let worker = Worker::new(&space).await;
    let [stream, first, second, third] = ids();
    worker.receive(&[(first, Some(stream))]).await;
    assert_eq!(worker.claim().await, texts(&[first]));
    assert_eq!(worker.fail(first, 4, "").await.failed, 1);
    worker.receive(&[(second, Some(stream)), (third, Some(stream))]).await;
    assert_eq!(worker.claim().await, texts(&[second, third]));
    let retry = "select retried from retry_inbox_dead_letters(true, p_dry_run => false)";
    assert_eq!(worker.client.query_one(retry, &[]).await.unwrap().get::<_, i32>(0), 1);
    assert_eq!(worker.claim().await, texts(&[]), "the lane is in hand");
    worker.handle(second).await.unwrap();
    assert_eq!(worker.claim().await, texts(&[]), "as long as one of it is");
    worker.handle(third).await.unwrap();
    assert_eq!(worker.claim().await, texts(&[first]), "and no longer: its lease is not waited for");
    worker.handle(first).await.unwrap();
    assert_eq!(worker.count("wh_inbox_parked").await, 0);
}
