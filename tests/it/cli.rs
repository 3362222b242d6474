//! The operators' binary, as an operator runs it.

use std::process::{Command, Output};

use uuid::Uuid;

use crate::outbox_kit::call;
use crate::store_kit::{Space, message};
use crate::support;

fn corelane(url: &str, schema: &str, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_corelane"))
        .args(arguments)
        .env("CORELANE_DATABASE_URL", url)
        .env("CORELANE_SCHEMA", schema)
        .output()
        .unwrap()
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
async fn an_error_is_one_line_without_the_password() {
    for url in ["postgres://someone:secret@127.0.0.1:1/none", "postgres//secret", "host=/nowhere password=secret"] {
        let text = refused(&corelane(url, "corelane", &["status"]));
        assert!(!text.contains("secret") && text.starts_with("corelane: "), "{text}");
    }
    let output = corelane("", "corelane", &["rebuild"]);
    assert_eq!(output.status.code(), Some(2));
}
