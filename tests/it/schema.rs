//! The schema as a whole: what a dump of it looks like, who may use it, and that two of them are strangers.

use std::process::Command;

use corelane::private_postgres::find;
use corelane::seam::store::{Coordination, ReadPosition, Store};
use corelane::store::grants;
use corelane::store::sql::FUNCTIONS;
use uuid::Uuid;

use crate::dump::{program, run};
use crate::outbox_kit::call;
use crate::store_kit::{Message, Space, event, message};
use crate::support;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/sql/schema.golden.sql");

/// What the golden file is for.
const HEADER: &str = "-- What pg_dump shows of a fresh schema. Written by tests/it/schema.rs with CORELANE_UPDATE_GOLDEN=1, never by hand.";

/// A dump without what differs from server to server and from run to run.
fn normalized(dump: &str, schema: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    for line in dump.lines() {
        let line = line.replace(&format!("{schema}."), "corelane.").replace(schema, "corelane");
        // From 18 on the constraint of a partition's column that is not null has a name.
        let line = match line.split_once(" CONSTRAINT ").zip(line.split_once("_not_null NOT NULL")) {
            Some(((before, _), (_, after))) => format!("{before} NOT NULL{after}"),
            None => line,
        };
        // Comments, settings of the session, and psql's own restrictions (with a random key).
        let noise = line.starts_with("--")
            || line.starts_with("SET ")
            || line.starts_with('\\')
            || line.starts_with("SELECT pg_catalog.set_config");
        if !(noise || line.is_empty() && lines.last().is_none_or(String::is_empty)) {
            lines.push(line);
        }
    }
    format!("{HEADER}\n{}\n", lines.join("\n").trim())
}

#[tokio::test]
async fn a_dump_of_a_fresh_schema_is_the_golden_one() {
    let space = Space::new().await;
    let Some(binaries) = find() else { return };
    let mut dumping = Command::new(program(&binaries, "pg_dump"));
    dumping
        .args(["--schema-only", "--no-owner", "--no-privileges", "--no-comments", "--schema", &space.schema.name])
        .arg("--dbname")
        .arg(&space.schema.url);
    let dump = normalized(&run(&mut dumping), &space.schema.name);
    if std::env::var_os("CORELANE_UPDATE_GOLDEN").is_some() {
        std::fs::write(GOLDEN, &dump).unwrap();
    }
    let golden = std::fs::read_to_string(GOLDEN).unwrap();
    for (number, (is, should)) in dump.lines().zip(golden.lines()).enumerate() {
        assert_eq!(
            is,
            should,
            "line {} of sql/schema.golden.sql (CORELANE_UPDATE_GOLDEN=1 writes it anew)",
            number + 1
        );
    }
    assert_eq!(dump.lines().count(), golden.lines().count(), "CORELANE_UPDATE_GOLDEN=1 writes it anew");
}

#[test]
fn every_function_says_what_goes_in_and_out_what_it_locks_and_costs() {
    let mut wrong = Vec::new();
    for file in FUNCTIONS {
        let header: Vec<&str> = file.text.lines().take_while(|line| line.starts_with("--")).collect();
        for word in ["in:", "out:", "locks:", "cost:"] {
            // At a line's begin, or after the gap that stands between two short ones.
            let says = |line: &&str| line[2..].trim_start().starts_with(word) || line.contains(&format!("    {word}"));
            if !header.iter().any(says) {
                wrong.push(format!("{}: no `{word}`", file.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Without sequential scans a plan that reads a table of one row is taken for one that costs 10^10, and the server compiles
/// it: 0.5 s a statement.
#[test]
fn what_forbids_sequential_scans_forbids_compiled_plans_too() {
    let says = |text: &str, what: &str| text.lines().any(|line| line == what);
    let forbidding: Vec<_> = FUNCTIONS.iter().filter(|file| says(file.text, "set enable_seqscan = off")).collect();
    let compiled: Vec<_> =
        forbidding.iter().filter(|file| !says(file.text, "set jit = off")).map(|of| of.name).collect();
    assert!(forbidding.len() > 20 && compiled.is_empty(), "{compiled:?}");
}

#[tokio::test]
async fn two_schemas_of_one_database_do_not_notice_each_other() {
    let (one, other) = (Space::new().await, Space::new().await);
    let (owner, mut stranger) = (one.owner(1).await, other.owner(1).await);
    let client = one.schema.client().await;
    let mut user = other.schema.client().await;
    let stream = Uuid::now_v7();

    // The same stream, the same partitions, the same incarnation numbers, all locked in the other schema.
    let transaction = user.transaction().await.unwrap();
    let many: Vec<_> = (0..300).map(|_| message(Uuid::now_v7(), "x")).chain([message(stream, "theirs")]).collect();
    call(&transaction, &many).await.unwrap();
    let fence = format!("select pg_advisory_xact_lock(wh_lock_class(3), {})", owner.incarnation.number);
    transaction.batch_execute(&fence).await.unwrap();
    transaction.batch_execute("select pg_advisory_xact_lock(wh_lock_class(6), 0)").await.unwrap();
    client.batch_execute("set lock_timeout = '2s'; set statement_timeout = '5s'").await.unwrap();

    let numbered = call(&client, &[message(stream, "ours")]).await.unwrap();
    assert_eq!(numbered[0].seq, Some(1));
    assert_eq!(owner.drain(&ReadPosition::default(), 10).await.0, ["ours"]);
    client.batch_execute("update wh_segment set switched_at = switched_at - interval '61 s'").await.unwrap();
    assert!(owner.coordination.perform_maintenance(owner.incarnation, 10_000).await.unwrap().rotated);
    owner.coordination.deregister_instance(owner.incarnation).await.unwrap();
    let classes = "select array_agg(wh_lock_class(k) order by k) from generate_series(0, 7) k";
    let ours: Vec<i32> = client.query_one(classes, &[]).await.unwrap().get(0);
    let theirs: Vec<i32> = transaction.query_one(classes, &[]).await.unwrap().get(0);
    assert!(ours.iter().all(|class| !theirs.contains(class)), "{ours:?} {theirs:?}");
    transaction.commit().await.unwrap();

    assert_eq!(stranger.store(&[message(stream, "theirs 2")]).await.looked_up.unwrap()[0].seq, 1);
    assert_eq!(stranger.drain(&ReadPosition::default(), 1000).await.0.len(), 302);
}

#[tokio::test]
async fn a_role_with_exactly_the_listed_privileges_can_do_an_engines_work() {
    let space = Space::new().await;
    let admin = space.schema.client().await;
    let role = format!("service_{}", space.schema.name);
    admin.batch_execute(&format!("create role {role} login")).await.unwrap();
    let as_service = format!("set role {role}");
    let service = support::connect(&space.schema.url).await;
    service.batch_execute(&as_service).await.unwrap();
    assert!(!grants::missing(&admin, &space.name).await.unwrap().iter().any(|_| true), "the owner lacks nothing");
    admin.batch_execute(&format!("grant usage on schema {} to {role}", space.name)).await.unwrap();
    let missing = grants::missing(&service, &space.name).await.unwrap();
    assert!(missing.contains(&"TRUNCATE on wh_log_0".to_owned()) && missing.len() > 30, "{missing:?}");
    grants::grant(&admin, &space.name, &role).await.unwrap();
    assert_eq!(grants::missing(&service, &space.name).await.unwrap(), Vec::<String>::new());

    // The engine's connections log in as postgres in the tests: `role` in the URL makes them the service.
    let separator = if space.schema.url.contains('?') { '&' } else { '?' };
    let mut schema = support::schema_on(format!("{}{separator}options=-c%20role%3D{role}", space.schema.url));
    schema.name = space.schema.name.clone();
    let limited = Space { schema, name: space.name.clone() };
    let client = limited.schema.client().await;
    let who: String = client.query_one("select current_user::text", &[]).await.unwrap().get(0);
    assert_eq!(who, role);

    let mut owner = limited.owner(1).await;
    let stream = Uuid::now_v7();
    owner.store(&[event(stream, "e1"), message(stream, "m2")]).await;
    let due = Message { due_unix_us: 1, ..message(stream, "s4") };
    call(&client, &[message(stream, "m3"), due]).await.unwrap();
    client.batch_execute("begin isolation level repeatable read").await.unwrap();
    call(&client, &[event(Uuid::now_v7(), "rr")]).await.unwrap();
    client.batch_execute("commit").await.unwrap();
    assert_eq!(owner.store.release_scheduled(owner.incarnation, &owner.held(), 10).await.unwrap(), 1);
    let (texts, read) = owner.drain(&ReadPosition::default(), 100).await;
    assert_eq!(texts, ["e1", "m2", "m3", "rr", "s4"]);
    crate::rotation::settle(&owner, 0, read.read).await;
    admin.batch_execute("update wh_segment set switched_at = switched_at - interval '61 s'").await.unwrap();
    let mut truncated = 0;
    for _ in 0..5 {
        truncated += owner.coordination.perform_maintenance(owner.incarnation, 10_000).await.unwrap().truncated;
    }
    assert_eq!(truncated, 1);
    owner.store.load(owner.incarnation, &owner.held()).await.unwrap();
    owner.coordination.deregister_instance(owner.incarnation).await.unwrap();

    let feed: Vec<bool> = client
        .query("select place is null from read_feed(begin_feed(null), p_prove_ms => 0)", &[])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(feed, [false], "a place, and no event yet");
    assert_eq!(client.query("select payload from wh_event_json", &[]).await.unwrap().len(), 2);

    // And nothing else.
    for forbidden in [
        "delete from wh_event_store",
        "update wh_event_store set payload = ''",
        "drop table wh_parked",
        "create table x ()",
    ] {
        let refused = client.batch_execute(forbidden).await.unwrap_err();
        assert_eq!(refused.code().unwrap().code(), "42501", "{forbidden}");
    }
    drop((client, owner, limited, service));
    let _ = admin.batch_execute(&format!("drop owned by {role}; drop role {role}")).await;
}

/// A call with some of the arguments left out means one function: "is not unique" is no answer for a program in the field.
#[tokio::test]
async fn no_call_with_arguments_left_out_could_mean_two_functions() {
    let space = Space::new().await;
    // Two of one name could both be meant by n arguments, each from those it needs to all it has, if the types of those n
    // fit both.
    let sql = "select a.oid::regprocedure || ' and ' || b.oid::regprocedure || ' by ' || n || ' arguments'
        from pg_proc a
        join pg_proc b on b.pronamespace = a.pronamespace and b.proname = a.proname and b.oid > a.oid
        cross join lateral generate_series(
            greatest(a.pronargs - a.pronargdefaults, b.pronargs - b.pronargdefaults)::int4,
            least(a.pronargs, b.pronargs)::int4) n
        where a.pronamespace = $1::text::regnamespace
            and (select coalesce(bool_and(x is not distinct from y), true)
                from unnest((a.proargtypes::oid[])[0 : n - 1], (b.proargtypes::oid[])[0 : n - 1]) t(x, y))";
    let client = space.schema.client().await;
    let ambiguous = async || -> Vec<String> {
        let rows = client.query(sql, &[&space.name.quoted()]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    };
    assert_eq!(ambiguous().await, [""; 0]);
    // It would be seen.
    let beside =
        "create function renew_lease(int4, int8, bool default false) returns bool language sql as 'select true'";
    client.batch_execute(beside).await.unwrap();
    assert_eq!(ambiguous().await.len(), 1);
}
