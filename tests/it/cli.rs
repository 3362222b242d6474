//! The operators' binary, as an operator runs it.

use std::process::{Command, Output};

use uuid::Uuid;

use crate::inbox_sql_kit::Session;
use crate::outbox_kit::call;
use crate::store_kit::{PARTITIONS, Space, event, message};
use crate::subscription_kit::Follower;
use crate::support::{self, own_cluster, schema_on};

fn corelane(url: &str, schema: &str, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_corelane"))
        .args(arguments)
        .env("CORELANE_DATABASE_URL", url)
        .env("CORELANE_SCHEMA", schema)
        .output()
        .unwrap()
}

fn partitions() -> String {
    PARTITIONS.to_string()
}

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn refused(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "one line: {text}");
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_says_what_it_did_and_does_it_once() {
    let mut schema = support::schema();
    schema.name = format!("{} \"odd\"", schema.name);
    let run = |arguments: &[&str]| corelane(&schema.url, &schema.name, arguments);
    for look in ["doctor", "status"] {
        let text = refused(&run(&[look]));
        assert!(text.contains("corelane migrate"), "{look}: {text}");
    }
    let text = said(&run(&["migrate", "--partitions", "8"]));
    assert!(text.contains("installed") && text.contains("8 partitions"), "{text}");
    let text = said(&run(&["migrate", "--partitions", "8"]));
    assert!(text.contains("up to date"), "{text}");
    let text = refused(&run(&["migrate", "--partitions", "9"]));
    assert!(text.contains("installed with 8"), "{text}");
    let text = said(&run(&["rebase"]));
    assert!(text.contains("nothing to rebase"), "{text}");
    let text = said(&run(&["doctor"]));
    for line in
        ["runtime", "cores", "server        PostgreSQL", "8 partitions, generation 1", "may do what an engine does"]
    {
        assert!(text.contains(line), "{line}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn status_counts_what_waits() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    call(&client, &[message(Uuid::now_v7(), "a"), message(Uuid::now_v7(), "b")]).await.unwrap();
    let text = said(&corelane(&space.schema.url, &space.schema.name, &["status"]));
    let figure = |what: &str| -> String {
        let line = text.lines().find(|line| line.starts_with(what)).unwrap_or_else(|| panic!("{what}: {text}"));
        line.split_whitespace().nth(1).unwrap().to_owned()
    };
    assert_eq!((figure("pending"), figure("parked"), figure("dead_letters")), ("2".into(), "0".into(), "0".into()));
    assert_eq!(figure("partitions_free"), crate::store_kit::PARTITIONS.to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn status_and_doctor_tell_of_consumers_and_subscriptions() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    let (lane, of) = (Uuid::now_v7(), [Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7()]);
    assert_eq!(session.begin(&of.map(|id| (id, lane))).await, [0, 0, 0]);
    session.keep(&of.map(|id| (id, lane))).await;
    assert!(session.bury(of[0], "ill", true).await);
    let follower = Follower::join(&space, "order \"summary\"", Some(0)).await;
    call(&session.client, &[event(Uuid::now_v7(), "a"), event(Uuid::now_v7(), "b")]).await.unwrap();
    let run = |what: &str| said(&corelane(&space.schema.url, &space.schema.name, &[what]));
    let line_of = |text: &str, begin: &str| -> String {
        text.lines().find(|line| line.starts_with(begin)).unwrap_or_else(|| panic!("{begin}: {text}")).to_owned()
    };
    let text = run("status");
    let consumer = line_of(&text, "consumer_");
    assert_eq!(consumer.split_whitespace().nth(1), Some("2"), "{consumer}");
    for words in ["kept for billing; 1 lanes wait, 1 of them for an operator, the longest since 2", "; 1 dead letters"]
    {
        assert!(consumer.contains(words), "{words}: {consumer}");
    }
    let subscription = line_of(&text, "subscription_");
    assert_eq!(subscription.split_whitespace().nth(1), Some("2"), "{subscription}");
    for words in ["events not read by order \"summary\", the oldest ", "read to position ", "; 1 members"] {
        assert!(subscription.contains(words), "{words}: {subscription}");
    }
    let text = run("doctor");
    let inbox = "1 consumers: 2 messages kept, 1 streams wait, 1 of them for an operator; 1 dead letters";
    for words in [inbox, "retry_inbox_dead_letters", "order \"summary\": 2 events behind", "; 1 members"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    drop(follower);
}

/// A role that was granted nothing, and one that misses something.
#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_look_is_told_what_it_needs() {
    let cluster = own_cluster();
    let space = Space::in_schema(schema_on(cluster.url("postgres"))).await;
    let client = space.schema.client().await;
    client.batch_execute("create role visitor login").await.unwrap();
    let url = cluster.url("postgres").replacen("postgres@", "visitor@", 1);
    let run = |what: &str| corelane(&url, &space.schema.name, &[what]);
    for what in ["doctor", "status"] {
        let text = refused(&run(what));
        assert!(text.contains("visitor may not look into schema") && text.contains("--grant-to visitor"), "{text}");
    }
    let granted = corelane(
        &space.schema.url,
        &space.schema.name,
        &["migrate", "--partitions", &partitions(), "--grant-to", "visitor"],
    );
    assert!(said(&granted).contains("may work with it"));
    assert!(said(&run("doctor")).contains("may do what an engine does"));
    let revoke = "revoke execute on function maintain_inbox(interval, int4) from visitor";
    client.batch_execute(revoke).await.unwrap();
    let output = run("doctor");
    assert!(String::from_utf8_lossy(&output.stdout).contains("EXECUTE on maintain_inbox(interval, int4) is missing"));
    assert!(refused(&output).contains("1 privileges are missing"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_is_one_line_without_the_password() {
    for url in ["postgres://someone:secret@127.0.0.1:1/none", "postgres//secret", "host=/nowhere password=secret"] {
        let text = refused(&corelane(url, "corelane", &["status"]));
        assert!(!text.contains("secret") && text.starts_with("corelane: "), "{text}");
    }
    let output = corelane("", "corelane", &["rebuild"]);
    assert_eq!(output.status.code(), Some(2));
}
