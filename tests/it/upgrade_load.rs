//! Case upgrade: a schema that is migrated to the next version under two processes of this one and plain SQL callers, all at
//! work. As there is no next version, its migrations are the test's.
//!
//! Nothing here is bounded by a time: the load is what the machine bears, of the 2,000 messages a second that are asked.

use std::path::{Path, PathBuf};
use std::time::Duration;

use corelane::Error;
use corelane::private_postgres::PrivatePostgres;
use corelane::store::install::{self, ATTEMPTS_MAX, Migrated};
use corelane::store::schema_name::SchemaName;
use corelane::store::sql::{SCHEMA_VERSION, SqlFile};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::outbox_kit::call;
use crate::process_kit::{CasePlan, CaseProcess, Manner, assert_ordered, first_copies, journal};
use crate::store_kit::{Message, PARTITIONS, Space, message};
use crate::support::{TestSchema, connect, eventually, own_cluster, own_cluster_with, schema_on};

const PATIENCE: Duration = Duration::from_secs(60);

/// What a next version may do: a column for every table.
const EXPANDS: SqlFile = SqlFile {
    name: "9000_expands",
    text: "do $$ declare t record; begin for t in
        select c.oid::regclass as name from pg_catalog.pg_class c
        where c.relnamespace = '@schema@'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
        order by c.relname loop execute format('alter table %s add column later int4 not null default 7', t.name); end loop; end $$",
};

/// What it must not do while programs of this version run: what they call has another name.
const TAKES_AWAY: SqlFile = SqlFile {
    name: "9000_takes_away",
    text: "do $$ declare f regprocedure; begin for f in select p.oid from pg_catalog.pg_proc p
        where p.pronamespace = '@schema@'::regnamespace and p.proname = 'store_shard_messages'
        loop execute format('alter function %s rename to taken_away', f); end loop; end $$",
};

async fn migrate(schema: &TestSchema, to: SqlFile, attempts_max: u32) -> Result<Migrated, Error> {
    let mut client = connect(&schema.url).await;
    let name = SchemaName::new(&schema.name).unwrap();
    install::migrate_as_next_version(&mut client, &name, PARTITIONS, &[to], attempts_max).await
}

/// Two processes of this version that store and publish, each what the other stores as well.
struct Old {
    cluster: PrivatePostgres,
    schema: TestSchema,
    journal: PathBuf,
    processes: Vec<CaseProcess>,
    _directory: tempfile::TempDir,
}

impl Old {
    async fn at_work() -> Self {
        let cluster = own_cluster();
        let schema = schema_on(cluster.url("postgres"));
        let directory = tempfile::tempdir().unwrap();
        let journal = directory.path().join("journal");
        let mut old = Self { cluster, schema, journal, processes: Vec::new(), _directory: directory };
        for instance in ["a", "b"] {
            old.processes.push(old.start(instance));
        }
        eventually("they share", PATIENCE, async || old.held() == [PARTITIONS as usize / 2; 2]).await;
        for process in &old.processes {
            let streams: Vec<Uuid> = (0..10).map(|_| Uuid::now_v7()).collect();
            process.begin_load(&streams);
        }
        old.goes_on("the load is on").await;
        old
    }

    fn start(&self, instance: &str) -> CaseProcess {
        let (schema, journal) = (&self.schema, self.journal.as_path());
        CaseProcess::start(&CasePlan {
            schema,
            instance,
            journal,
            manner: Manner::Accept,
            settings: &[("shards.count", "1")],
            environment: &[],
        })
    }

    fn held(&self) -> Vec<usize> {
        self.processes.iter().map(|process| process.status().0).collect()
    }

    /// Waits until the sink has some hundred messages more.
    async fn goes_on(&self, what: &str) {
        let length = |path: &Path| path.metadata().map_or(0, |of| of.len());
        let before = length(&self.journal);
        eventually(what, PATIENCE, async || length(&self.journal) > before + 20_000).await;
    }

    /// Everything that is stored comes, in order.
    async fn all_comes(&self, client: &Client) -> usize {
        let stored = "select (select count(*) from wh_event_store) + (select count(*) from wh_outbox)";
        let stored = client.query_one(stored, &[]).await.unwrap().get::<_, i64>(0) as usize;
        eventually("all that is stored comes", PATIENCE, async || {
            first_copies(&journal(&self.journal)).len() >= stored
        })
        .await;
        let lines = journal(&self.journal);
        assert_ordered(&lines);
        assert_eq!(first_copies(&lines).len(), stored);
        stored
    }

    /// Lines of the server's log with these words.
    fn logged(&self, words: &str) -> usize {
        let log = std::fs::read_to_string(self.cluster.log_path()).unwrap();
        log.lines().filter(|line| line.contains(words)).count()
    }
}

#[tokio::test]
async fn a_migration_that_gets_no_lock_says_who_is_in_its_way_and_changes_nothing() {
    let space = Space::new().await;
    let mut holder = space.schema.client().await;
    let held = holder.transaction().await.unwrap();
    held.query("select from wh_outbox", &[]).await.unwrap();
    let refused = migrate(&space.schema, EXPANDS, 2).await.unwrap_err().to_string();
    for word in ["was not changed", "2 tries", "1000 ms", "pg_stat_activity"] {
        assert!(refused.contains(word), "{refused}");
    }
    held.commit().await.unwrap();
    let later = "select count(*) from pg_attribute where attname = 'later' and attrelid = 'wh_outbox'::regclass";
    assert_eq!(holder.query_one(later, &[]).await.unwrap().get::<_, i64>(0), 0);
    assert_eq!(migrate(&space.schema, EXPANDS, 2).await.unwrap().migrations, ["9000_expands"]);
    assert_eq!(holder.query_one(later, &[]).await.unwrap().get::<_, i64>(0), 1);
}

/// Somebody reads a late table, and when the migration waits for that one, an early table: one of the two has to give way,
/// and it is the migration, before the server looks for a deadlock.
#[tokio::test]
async fn a_migration_gives_way_to_who_holds_one_table_and_wants_another() {
    // Shorter than the lock timeout: a migration that only kept to that one would be found to be one side of a deadlock.
    let cluster = own_cluster_with(&["deadlock_timeout=300ms"]);
    let space = Space::in_schema(schema_on(cluster.url("postgres"))).await;
    let (mut holder, mut reader) = (space.schema.client().await, space.schema.client().await);
    let watch = space.schema.client().await;
    let is_waited_for = async |table: &str, mode: &str| {
        let sql =
            "select exists (select from pg_locks where not granted and mode = $1 and relation = $2::text::regclass)";
        watch.query_one(sql, &[&mode, &table]).await.unwrap().get::<_, bool>(0)
    };
    // Keeps the migration from its end while the reader has not met it in time.
    let held = holder.transaction().await.unwrap();
    held.query("select from wh_stream", &[]).await.unwrap();
    let meets = async {
        loop {
            let both = reader.transaction().await.unwrap();
            both.query("select from wh_stream", &[]).await.unwrap();
            eventually("the migration waits for the late one", PATIENCE, async || {
                is_waited_for("wh_stream", "AccessExclusiveLock").await
            })
            .await;
            let read = std::cell::Cell::new(false);
            let reads = async {
                both.query("select from wh_dead_letter", &[]).await.expect("it is no side of a deadlock");
                read.set(true);
            };
            let sees = async {
                let mut met = false;
                while !read.get() {
                    met |= is_waited_for("wh_dead_letter", "AccessShareLock").await;
                }
                met
            };
            let met = tokio::join!(reads, sees).1;
            both.rollback().await.unwrap();
            if met {
                return held.rollback().await.unwrap();
            }
        }
    };
    let (migrated, ()) = tokio::join!(migrate(&space.schema, EXPANDS, ATTEMPTS_MAX), meets);
    assert_eq!(migrated.unwrap().migrations, ["9000_expands"]);
    let log = std::fs::read_to_string(cluster.log_path()).unwrap();
    assert!(!log.contains("deadlock detected"), "{log}");
}

/// Somebody reads one table and does not end: the migration waits, gives up, lets the others pass, and comes back.
#[tokio::test(flavor = "multi_thread")]
async fn upgrade_under_load_honours_its_lock_timeout_and_the_old_ones_go_on() {
    let old = Old::at_work().await;
    let schema = &old.schema;
    let (mut holder, watch, plain) = (schema.client().await, schema.client().await, schema.client().await);
    let held = holder.transaction().await.unwrap();
    held.query("select from wh_stream limit 1", &[]).await.unwrap();
    let upgrade = async {
        // A table before it in the order of the locks is locked by then: whoever stores waits behind the migration.
        let waiting = "select exists (select from pg_locks where not granted and mode = 'AccessExclusiveLock'
            and relation = 'wh_stream'::regclass)";
        for turn in 1..=2 {
            for wanted in [true, false] {
                eventually(&format!("turn {turn}: it waits: {wanted}"), PATIENCE, async || {
                    watch.query_one(waiting, &[]).await.unwrap().get::<_, bool>(0) == wanted
                })
                .await;
            }
            old.goes_on("the others go on between two tries").await;
        }
        held.rollback().await.unwrap();
    };
    let finished = std::cell::Cell::new(false);
    let migration = async {
        let migrated = migrate(schema, EXPANDS, ATTEMPTS_MAX).await;
        finished.set(true);
        migrated
    };
    // Callers of version N's own door, meanwhile.
    let callers = async {
        let (stream, mut called) = (Uuid::now_v7(), 0);
        while !finished.get() {
            let of = Message { destinations: vec!["sink"], ..message(stream, "plain") };
            call(&plain, &[of]).await.expect("stored");
            called += 1;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        called
    };
    let (migrated, (), called) = tokio::join!(migration, upgrade, callers);
    assert_eq!(migrated.unwrap().migrations, ["9000_expands"]);
    old.goes_on("and afterwards").await;

    let loaded: Vec<_> = old.processes.iter().map(CaseProcess::end_load).collect();
    assert!(loaded.iter().all(|of| of.refused == 0), "the old ones go on: {loaded:?}");
    let acknowledged = called + loaded.iter().map(|of| of.stored).sum::<usize>();
    assert_eq!(old.all_comes(&watch).await, acknowledged);
    eventually("they share as before", PATIENCE, async || old.held() == [PARTITIONS as usize / 2; 2]).await;
    assert!(called > 0 && old.logged("canceling statement due to lock timeout") >= 2);
    assert_eq!(old.logged("deadlock detected"), 0);
    let later = "select count(*) from pg_attribute where attname = 'later' and attnum > 0
        and attrelid in ('wh_log'::regclass, 'wh_event_store'::regclass)";
    assert_eq!(watch.query_one(later, &[]).await.unwrap().get::<_, i64>(0), 2);
}

/// A next version that takes away what the old ones call: they stand down and say so, and what they have acknowledged is
/// published by a program that fits.
#[tokio::test(flavor = "multi_thread")]
async fn upgrade_that_takes_away_what_is_called_stands_the_old_ones_down_loudly() {
    let mut old = Old::at_work().await;
    assert_eq!(migrate(&old.schema, TAKES_AWAY, ATTEMPTS_MAX).await.unwrap().migrations, ["9000_takes_away"]);
    eventually("they hold nothing any more", PATIENCE, async || old.held() == [0, 0]).await;
    let loaded: Vec<_> = old.processes.iter().map(CaseProcess::end_load).collect();
    for of in &loaded {
        assert!(of.stored > 0 && of.refused > 0, "{of:?}");
        for word in [format!("version {}", SCHEMA_VERSION + 1), format!("version {SCHEMA_VERSION}")] {
            assert!(of.words.contains(&word), "{of:?}");
        }
    }
    let client = old.schema.client().await;
    let stored = client.query_one("select count(*) from wh_event_store", &[]).await.unwrap().get::<_, i64>(0);
    assert_eq!(stored as usize, loaded.iter().map(|of| of.stored).sum::<usize>(), "what was refused is not stored");
    client
        .batch_execute(
            "do $$ declare f regprocedure; begin for f in select p.oid from pg_proc p
             where p.proname = 'taken_away' and p.pronamespace = (select relnamespace from pg_class
                where oid = 'wh_log'::regclass)
             loop execute format('alter function %s rename to store_shard_messages', f); end loop; end $$;
             delete from wh_schema_migration where name = '9000_takes_away'",
        )
        .await
        .unwrap();
    let fits = old.start("c");
    old.processes.push(fits);
    old.all_comes(&client).await;
    assert_eq!(old.logged("deadlock detected"), 0);
}
