//! Installing, bringing up to date, and refusing what does not fit.

use std::cell::Cell;
use std::time::Duration;

use corelane::Error;
use corelane::store::install::{self, Migrated};
use corelane::store::schema_name::SchemaName;
use corelane::store::sql::{FUNCTIONS, MIGRATIONS, SCHEMA_VERSION};

use crate::support::{self, TestSchema};

const PARTITIONS: u32 = 8;

fn name_of(schema: &TestSchema) -> SchemaName {
    SchemaName::new(&schema.name).unwrap()
}

async fn migrate(schema: &TestSchema) -> Result<Migrated, Error> {
    let mut client = support::connect(&schema.url).await;
    install::migrate(&mut client, &name_of(schema), PARTITIONS).await
}

fn words(outcome: Result<impl std::fmt::Debug, Error>) -> String {
    match outcome {
        Err(Error::Schema(text)) => text,
        other => panic!("not refused as a schema: {other:?}"),
    }
}

#[tokio::test]
async fn once_is_enough_and_the_second_time_changes_nothing() {
    let schema = support::schema();
    let first = migrate(&schema).await.unwrap();
    assert!(first.installed);
    assert_eq!(first.migrations.len(), MIGRATIONS.len());
    assert_eq!(first.functions.len(), FUNCTIONS.len());
    assert!(!migrate(&schema).await.unwrap().changed());

    let client = schema.client().await;
    let row = client
        .query_one(
            "select (select count(*) from wh_partition), (select min(partition) from wh_partition), \
             (select count(*) from wh_segment), (select count(*) from wh_epoch)",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(
        (row.get::<_, i64>(0), row.get::<_, i32>(1), row.get::<_, i64>(2), row.get::<_, i64>(3)),
        (i64::from(PARTITIONS), 0, 1, 1)
    );
    let installed = install::verify(&client, &name_of(&schema), Some(PARTITIONS)).await.unwrap();
    assert_eq!((installed.partition_count, installed.generation), (PARTITIONS, 1));
}

#[tokio::test]
async fn many_that_start_at_once_install_once() {
    let schema = support::schema();
    let starting: Vec<_> = (0..8)
        .map(|_| {
            let (url, name) = (schema.url.clone(), name_of(&schema));
            tokio::spawn(async move {
                let mut client = support::connect(&url).await;
                install::migrate(&mut client, &name, PARTITIONS).await
            })
        })
        .collect();
    let mut installed = 0;
    for outcome in starting {
        installed += usize::from(outcome.await.unwrap().unwrap().installed);
    }
    assert_eq!(installed, 1);
}

#[tokio::test]
async fn any_legal_name_can_be_installed() {
    for odd in ["My \"odd\" schema", "it's", "$$", "$wh$ %s \\", "100%1$s", "ünïcödé", "select"] {
        let mut schema = support::schema();
        schema.name = format!("{odd} {}", schema.name);
        assert!(migrate(&schema).await.unwrap().installed, "{odd}");
        let client = schema.client().await;
        // Every function's body is compiled with the name in it.
        let classes = client
            .query_one(
                "select wh_lock_class(1), oid::int8, wh_epoch_token() from pg_namespace where nspname = $1::text",
                &[&schema.name],
            )
            .await
            .unwrap();
        let (class, oid): (i32, i64) = (classes.get(0), classes.get(1));
        assert_eq!(i64::from(class), oid * 8 + 1, "{odd}");
    }
}

#[tokio::test]
async fn another_partition_count_is_refused_with_both_figures() {
    let schema = support::schema();
    migrate(&schema).await.unwrap();
    let mut client = support::connect(&schema.url).await;
    let text = words(install::migrate(&mut client, &name_of(&schema), 16).await);
    assert!(text.contains("16") && text.contains("installed with 8"), "{text}");
    let text = words(install::verify(&client, &name_of(&schema), Some(16)).await);
    assert!(text.contains("16") && text.contains("installed with 8"), "{text}");
    for bad in [0, 65_537] {
        let text = words(install::migrate(&mut client, &name_of(&schema), bad).await);
        assert!(text.contains(&bad.to_string()) && text.contains("1..=65536"), "{text}");
    }
}

#[tokio::test]
async fn a_schema_of_a_newer_version_is_left_alone() {
    let schema = support::schema();
    migrate(&schema).await.unwrap();
    let client = schema.client().await;
    let newer = SCHEMA_VERSION + 1;
    let insert = "insert into wh_schema_migration values ('migration', '0999_later', 'abc', $1, '9.9.9')";
    client.execute(insert, &[&newer]).await.unwrap();
    client.batch_execute("update wh_schema_migration set hash = 'theirs' where kind = 'function'").await.unwrap();
    let text = words(migrate(&schema).await);
    assert!(text.contains(&format!("version {newer}")) && text.contains("9.9.9") && text.contains("upgrade"), "{text}");
    assert_eq!(words(install::verify(&client, &name_of(&schema), None).await), text);
    let theirs = "select count(*) from wh_schema_migration where hash = 'theirs'";
    assert_eq!(client.query_one(theirs, &[]).await.unwrap().get::<_, i64>(0), FUNCTIONS.len() as i64);
}

#[tokio::test]
async fn a_changed_function_is_replaced_and_a_changed_migration_is_an_error() {
    let schema = support::schema();
    migrate(&schema).await.unwrap();
    let client = schema.client().await;
    let change = "update wh_schema_migration set hash = 'other' where name = $1";
    client.execute(change, &[&"compute_partition"]).await.unwrap();
    let text = words(install::verify(&client, &name_of(&schema), None).await);
    assert!(text.contains("compute_partition") && text.contains("corelane migrate"), "{text}");
    assert_eq!(migrate(&schema).await.unwrap().functions, ["compute_partition"]);

    client.execute(change, &[&"0001_tables"]).await.unwrap();
    let text = words(migrate(&schema).await);
    assert!(text.contains("0001_tables") && text.contains("other"), "{text}");
}

#[tokio::test]
async fn without_an_installation_the_error_says_what_to_do() {
    let schema = support::schema();
    let client = support::connect(&schema.url).await;
    let text = words(install::verify(&client, &name_of(&schema), None).await);
    assert!(text.contains(&schema.name) && text.contains("corelane migrate"), "{text}");
}

#[tokio::test]
async fn a_failure_leaves_nothing() {
    let schema = support::schema();
    let client = schema.client().await;
    // Something of the operator's stands in the way of the second table.
    client
        .batch_execute(&format!("create schema {name}; create view {name}.wh_epoch as select 1", name = schema.name))
        .await
        .unwrap();
    let outcome = migrate(&schema).await;
    assert!(matches!(&outcome, Err(Error::Store(error)) if error.to_string().contains("wh_epoch")), "{outcome:?}");
    let left = "select string_agg(relname, ' ') from pg_class where relnamespace = $1::text::regnamespace";
    assert_eq!(client.query_one(left, &[&schema.name]).await.unwrap().get::<_, &str>(0), "wh_epoch");
}

#[tokio::test]
async fn a_lock_that_is_held_is_not_waited_for_without_end() {
    let schema = support::schema();
    migrate(&schema).await.unwrap();
    let holder = schema.client().await;
    holder.batch_execute("update wh_schema_migration set hash = 'old' where name = 'compute_partition'").await.unwrap();
    // Whoever reads a function's row is not stopped; a lock on the record itself is.
    holder.batch_execute("begin; lock table wh_schema_migration in share mode").await.unwrap();
    let waiting = {
        let (url, name) = (schema.url.clone(), name_of(&schema));
        tokio::spawn(async move {
            let mut client = support::connect(&url).await;
            install::migrate(&mut client, &name, PARTITIONS).await
        })
    };
    let watcher = schema.client().await;
    // It gives up its place in the queue at least once, so that others pass, and comes back.
    let (seen, left) = (Cell::new(false), Cell::new(false));
    let waiting_now =
        "select exists (select from pg_locks where not granted and relation = 'wh_schema_migration'::regclass)";
    support::eventually("the migration lets go of its place", Duration::from_secs(60), || async {
        let waits: bool = watcher.query_one(waiting_now, &[]).await.unwrap().get(0);
        left.set(left.get() || (seen.get() && !waits));
        seen.set(seen.get() || waits);
        left.get()
    })
    .await;
    holder.batch_execute("rollback").await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap().functions, ["compute_partition"]);
}

#[tokio::test]
async fn an_installation_of_before_gets_the_functions_whose_answers_have_changed() {
    let space = crate::store_kit::Space::new().await;
    let mut client = space.schema.client().await;
    // As it was left by a library that did not know the second migration.
    client
        .batch_execute(
            "drop table wh_flush_truncated;
             alter table wh_rotation drop column noted_to, drop column is_noted;
             drop function perform_maintenance;
             create function perform_maintenance(p_incarnation int4, out truncated int4) language sql as 'select 0';
             create function claim_work(p_incarnation int4) returns int4 language sql as 'select 0';
             delete from wh_schema_migration where name in ('0002_truncated_flushes', 'claim_work', 'find_flush',
                'perform_maintenance', 'store_shard_messages', 'claim_work_1', 'find_flush_1', 'store_shard_messages_1')",
        )
        .await
        .unwrap();
    let migrated = install::migrate(&mut client, &space.name, crate::store_kit::PARTITIONS).await.unwrap();
    assert_eq!(migrated.migrations, ["0002_truncated_flushes"]);
    let sql = "select count(*) from pg_proc where pronamespace = to_regnamespace($1) and proname in
        ('claim_work', 'perform_maintenance')";
    let count: i64 = client.query_one(sql, &[&space.name.quoted()]).await.unwrap().get(0);
    assert_eq!(count, 3, "one of each, and the signature of version 1 beside its successor");
}
