//! Installing and checking the schema: `corelane migrate`, and the engine on request.
//!
//! Invariants
//! - One transaction under one advisory lock: several that start at once do it once, and a failure leaves nothing.
//! - The lock's key is made of the schema's name, since the schema may not be there yet.
//! - Nothing is waited for longer than [`LOCK_TIMEOUT_MS`] at a time, and that only [`ATTEMPTS_MAX`] times:
//!   a waiting DDL statement stalls everybody who comes after it.
//! - Before a migration changes a table it has locked all of them, or has given up, in less time than the server waits
//!   before it looks for a deadlock: none is found with those who work meanwhile, whatever they lock in which order.
//! - A migration that was applied is never applied again; if its file has changed, that is an error.
//! - A schema made by a newer library is left alone.
//! - No statement has a name on the server: it works through a pooler too.

use std::collections::HashMap;
use std::fmt::Write;

use sha2::{Digest, Sha256};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, GenericClient, IsolationLevel, Transaction};

use super::answer::column;
use super::schema_name::SchemaName;
use super::sql::{FUNCTIONS, MIGRATIONS, RECORD, SCHEMA_VERSION, SqlFile};
use super::sqlstate::classify;
use crate::error::{Error, Result};
use crate::limits::PARTITIONS_MAX;
use crate::seam::store::StoreError;

/// Longest wait for one lock.
pub const LOCK_TIMEOUT_MS: u32 = 1_000;
/// How often the whole is tried.
pub const ATTEMPTS_MAX: u32 = 60;
/// Between two tries everybody else goes on.
const PAUSE_MS: u32 = 250;
/// First key of the installer's advisory lock ("core").
const LOCK_CLASS: i32 = 0x636f_7265;

/// What a migration did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Migrated {
    /// Whether the schema was installed just now.
    pub installed: bool,
    /// Migrations applied just now.
    pub migrations: Vec<&'static str>,
    /// Functions made or replaced just now.
    pub functions: Vec<&'static str>,
}

impl Migrated {
    /// Whether anything was changed.
    #[must_use]
    pub fn changed(&self) -> bool {
        self.installed || !self.migrations.is_empty() || !self.functions.is_empty()
    }
}

/// An installation that fits this library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Installed {
    /// Fixed at install.
    pub partition_count: u32,
    /// Grows with every rebase.
    pub generation: i32,
}

/// Brings the schema to this library's version, or installs it.
///
/// # Errors
/// [`Error::Schema`] if what is there is newer, was changed, or has another partition count;
/// [`Error::Store`] if the database refuses.
pub async fn migrate(client: &mut Client, schema: &SchemaName, partition_count: u32) -> Result<Migrated> {
    bring_up(client, schema, partition_count, Plan::own()).await
}

/// As [`migrate`], the way a later version would: with migrations behind this library's own, recorded under the number of
/// the next version, and with a bound of the caller's on the number of tries. What an upgrade does to running engines is
/// tested by it.
///
/// # Errors
/// As [`migrate`].
#[cfg(feature = "private-postgres")]
pub async fn migrate_as_next_version(
    client: &mut Client,
    schema: &SchemaName,
    partition_count: u32,
    further: &[SqlFile],
    attempts_max: u32,
) -> Result<Migrated> {
    bring_up(client, schema, partition_count, Plan { further, version: SCHEMA_VERSION + 1, attempts_max }).await
}

/// What an installation is brought up to.
#[derive(Clone, Copy)]
struct Plan<'a> {
    /// Migrations behind [`MIGRATIONS`].
    further: &'a [SqlFile],
    /// Recorded with what is applied; a schema of a higher one is left alone.
    version: i32,
    attempts_max: u32,
}

impl Plan<'_> {
    const fn own() -> Self {
        Self { further: &[], version: SCHEMA_VERSION, attempts_max: ATTEMPTS_MAX }
    }
}

async fn bring_up(client: &mut Client, schema: &SchemaName, partition_count: u32, plan: Plan<'_>) -> Result<Migrated> {
    if !(1..=PARTITIONS_MAX).contains(&partition_count) {
        return Err(Error::Schema(format!("partitions.count = {partition_count}: must be 1..={PARTITIONS_MAX}")));
    }
    let mut attempt = 1;
    loop {
        match migrate_once(client, schema, partition_count, plan).await {
            Err(error) if retry_locks(&error) && attempt < plan.attempts_max => attempt += 1,
            Err(error) if retry_locks(&error) => {
                return Err(Error::Schema(format!(
                    "schema {schema} was not changed: in {attempt} tries of at most {LOCK_TIMEOUT_MS} ms each somebody \
                     held a lock that is in the way ({error}); end what pg_stat_activity shows to be open for long, \
                     autovacuum of a large table too, and run it again"
                )));
            }
            outcome => return outcome,
        }
        client.batch_execute(&format!("select pg_sleep({PAUSE_MS} / 1000.0)")).await.map_err(store)?;
    }
}

/// Checks, without changing anything, that the schema is installed, fits this library and belongs to this server.
///
/// # Errors
/// [`Error::Schema`] with what to do about it.
pub async fn verify(client: &Client, schema: &SchemaName, partition_count: Option<u32>) -> Result<Installed> {
    check_version(client, schema).await?;
    check_place(client, schema, partition_count).await
}

/// Checks that the schema is installed in this library's version.
pub(super) async fn check_version(client: &Client, schema: &SchemaName) -> Result<()> {
    let Some(applied) = read_record(client, schema).await? else {
        return Err(Error::Schema(format!(
            "schema {schema} has no Corelane installation: run `corelane migrate`, or start the engine with migrate(true)"
        )));
    };
    applied.refuse_newer(schema, SCHEMA_VERSION)?;
    let missing: Vec<&str> = (MIGRATIONS.iter().map(|file| ("migration", file)))
        .chain(FUNCTIONS.iter().map(|file| ("function", file)))
        .filter(|(kind, file)| applied.hash(kind, file.name) != Some(&hash_of(file)))
        .map(|(_, file)| file.name)
        .collect();
    if let Some(first) = missing.first() {
        return Err(Error::Schema(format!(
            "schema {schema} (version {}) is older than this library (version {SCHEMA_VERSION}): {} of its files are \
             missing or differ, the first is {first}; run `corelane migrate`, or start the engine with migrate(true)",
            applied.version,
            missing.len()
        )));
    }
    Ok(())
}

async fn check_place(client: &Client, schema: &SchemaName, partition_count: Option<u32>) -> Result<Installed> {
    let statement = format!("select fits, why_not, partition_count, generation from {schema}.check_installation()");
    let row = client.query_typed_one(&statement, &[]).await.map_err(store)?;
    if !column::<bool>(&row, 0)? {
        let why: &str = column(&row, 1)?;
        return Err(Error::Schema(format!("schema {schema} cannot be worked with here: {why}")));
    }
    let installed = Installed { partition_count: column::<i32>(&row, 2)?.unsigned_abs(), generation: column(&row, 3)? };
    match partition_count {
        Some(wanted) if wanted != installed.partition_count => {
            Err(other_count(schema, wanted, installed.partition_count))
        }
        _ => Ok(installed),
    }
}

/// The count alone: a restored schema is migrated before it is rebased.
async fn check_count(transaction: &Transaction<'_>, schema: &SchemaName, wanted: u32) -> Result<()> {
    let statement = format!("select partition_count from {schema}.wh_installation");
    let row = transaction.query_typed_one(&statement, &[]).await.map_err(store)?;
    let installed = column::<i32>(&row, 0)?.unsigned_abs();
    if wanted == installed { Ok(()) } else { Err(other_count(schema, wanted, installed)) }
}

fn other_count(schema: &SchemaName, wanted: u32, installed: u32) -> Error {
    Error::Schema(format!(
        "partitions.count = {wanted}, but schema {schema} was installed with {installed}: the count is fixed at \
         install, configure {installed} or install into another schema"
    ))
}

/// Whether an attempt failed at somebody's lock. The wait for it was the pause before the next.
pub(super) fn retry_locks(error: &Error) -> bool {
    matches!(error, Error::Store(StoreError::Transient { sqlstate, .. })
        if matches!(sqlstate.as_str(), "55P03" | "40P01" | "40001"))
}

/// A transaction with the installer's lock and bounded waits.
pub(super) async fn begin_locked<'a>(client: &'a mut Client, schema: &SchemaName) -> Result<Transaction<'a>> {
    let transaction =
        client.build_transaction().isolation_level(IsolationLevel::ReadCommitted).start().await.map_err(store)?;
    let settings = format!(
        "set local lock_timeout = {LOCK_TIMEOUT_MS}; set local client_min_messages = warning; \
         set local search_path = pg_catalog"
    );
    transaction.batch_execute(&settings).await.map_err(store)?;
    let key = lock_key(schema);
    let keys: [(&(dyn ToSql + Sync), Type); 2] = [(&LOCK_CLASS, Type::INT4), (&key, Type::INT4)];
    transaction.query_typed("select pg_advisory_xact_lock($1, $2)", &keys).await.map_err(store)?;
    Ok(transaction)
}

/// All tables of the schema, exclusively, before the first is changed: a migration that came to them one by one could be
/// one side of a deadlock with each flush. The whole takes less time than the server lets a wait last before it looks
/// for one, so whoever holds a table and waits for another meanwhile gets it, and the migration comes again.
async fn lock_tables(transaction: &Transaction<'_>, schema: &SchemaName) -> Result<()> {
    let name = schema.name().replace('\'', "''");
    let all = format!(
        "do $lock$ declare
            of_table record;
            deadline constant timestamptz := clock_timestamp() + least({LOCK_TIMEOUT_MS} * 0.8, 0.8 * (
                select s.setting::numeric from pg_settings s where s.name = 'deadlock_timeout')) * interval '1 ms';
        begin
            for of_table in
                select c.oid::regclass as name from pg_class c join pg_namespace n on n.oid = c.relnamespace
                where n.nspname = '{name}' and c.relkind in ('r', 'p') and not c.relispartition order by c.relname
            loop
                perform set_config('lock_timeout',
                    greatest(1, floor(extract(epoch from deadline - clock_timestamp()) * 1000))::text, true);
                execute format('lock table %s in access exclusive mode', of_table.name);
            end loop;
            perform set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true);
        end $lock$"
    );
    transaction.batch_execute(&all).await.map_err(store)
}

async fn migrate_once(
    client: &mut Client,
    schema: &SchemaName,
    partition_count: u32,
    plan: Plan<'_>,
) -> Result<Migrated> {
    let transaction = begin_locked(client, schema).await?;
    // Later statements than the lock: they see what another migration has done meanwhile.
    let migrated = apply_missing(&transaction, schema, partition_count, plan).await?;
    check_count(&transaction, schema, partition_count).await?;
    transaction.commit().await.map_err(store)?;
    Ok(migrated)
}

async fn apply_missing(
    transaction: &Transaction<'_>,
    schema: &SchemaName,
    partition_count: u32,
    plan: Plan<'_>,
) -> Result<Migrated> {
    let mut migrated = Migrated::default();
    let applied = match read_record(transaction, schema).await? {
        Some(applied) => applied,
        None => {
            create_schema(transaction, schema).await?;
            migrated.installed = true;
            Applied::default()
        }
    };
    applied.refuse_newer(schema, plan.version)?;
    let missing = |file: &SqlFile| applied.hash("migration", file.name).is_none();
    if !migrated.installed && MIGRATIONS.iter().chain(plan.further).any(missing) {
        lock_tables(transaction, schema).await?;
    }
    for file in MIGRATIONS.iter().chain(plan.further) {
        let hash = hash_of(file);
        match applied.hash("migration", file.name) {
            None => {
                apply(transaction, schema, "migration", file, &hash, plan.version).await?;
                migrated.migrations.push(file.name);
            }
            Some(then) if *then != hash => {
                return Err(Error::Schema(format!(
                    "schema {schema}: migration {} was applied with SHA-256 {then}, in this library it has {hash}: an \
                     applied migration never changes; use the library that installed it",
                    file.name
                )));
            }
            Some(_) => {}
        }
    }
    for file in FUNCTIONS {
        let hash = hash_of(file);
        if applied.hash("function", file.name) != Some(&hash) {
            apply(transaction, schema, "function", file, &hash, plan.version).await?;
            migrated.functions.push(file.name);
        }
    }
    if migrated.installed {
        fill(transaction, schema, partition_count).await?;
    }
    Ok(migrated)
}

/// The rows that an installation begins with.
async fn fill(transaction: &Transaction<'_>, schema: &SchemaName, partition_count: u32) -> Result<()> {
    let rows = format!(
        "insert into {schema}.wh_installation (system_identifier, database_oid, partition_count) \
         select c.system_identifier, d.oid, {partition_count} from pg_control_system() c, pg_database d \
         where d.datname = current_database(); \
         insert into {schema}.wh_partition (partition) select generate_series(0, {partition_count} - 1); \
         insert into {schema}.wh_segment default values; \
         select {schema}.wh_epoch_token();"
    );
    transaction.batch_execute(&rows).await.map_err(store)
}

async fn create_schema(transaction: &Transaction<'_>, schema: &SchemaName) -> Result<()> {
    // Not `if not exists`: that asks for the right to create schemas even where an operator has made it.
    let there = transaction
        .query_typed_one(
            "select exists (select from pg_namespace where nspname = $1::text)",
            &[(&schema.name(), Type::TEXT)],
        )
        .await
        .map_err(store)?;
    if !column::<bool>(&there, 0)? {
        transaction.batch_execute(&format!("create schema {schema}")).await.map_err(store)?;
    }
    transaction.batch_execute(&schema.render(RECORD.text)).await.map_err(store)
}

async fn apply(
    transaction: &Transaction<'_>,
    schema: &SchemaName,
    kind: &str,
    file: &SqlFile,
    hash: &str,
    schema_version: i32,
) -> Result<()> {
    transaction.batch_execute(&schema.render(file.text)).await.map_err(|error| match classify(&error) {
        StoreError::Refused { sqlstate, text } => {
            Error::Store(StoreError::Refused { sqlstate, text: format!("{kind} {}: {text}", file.name) })
        }
        other => Error::Store(other),
    })?;
    let statement = format!(
        "insert into {schema}.wh_schema_migration (kind, name, hash, schema_version, library_version) \
         values ($1, $2, $3, $4, $5) on conflict (kind, name) do update set hash = excluded.hash, \
         schema_version = excluded.schema_version, library_version = excluded.library_version, \
         applied_at = clock_timestamp()"
    );
    let version = env!("CARGO_PKG_VERSION");
    let values: [(&(dyn ToSql + Sync), Type); 5] = [
        (&kind, Type::TEXT),
        (&file.name, Type::TEXT),
        (&hash, Type::TEXT),
        (&schema_version, Type::INT4),
        (&version, Type::TEXT),
    ];
    transaction.query_typed(&statement, &values).await.map(|_| ()).map_err(store)
}

/// What is recorded as applied.
#[derive(Debug, Default)]
struct Applied {
    version: i32,
    library: String,
    hashes: HashMap<(String, String), String>,
}

impl Applied {
    fn hash(&self, kind: &str, name: &str) -> Option<&String> {
        self.hashes.get(&(kind.to_owned(), name.to_owned()))
    }

    fn refuse_newer(&self, schema: &SchemaName, known: i32) -> Result<()> {
        if self.version <= known {
            return Ok(());
        }
        Err(Error::Schema(format!(
            "schema {schema} has version {} (made by corelane {}), this library knows up to {known} (it is \
             corelane {}): upgrade the library; nothing was changed",
            self.version,
            self.library,
            env!("CARGO_PKG_VERSION")
        )))
    }
}

async fn read_record(client: &impl GenericClient, schema: &SchemaName) -> Result<Option<Applied>> {
    let there = client
        .query_typed_one(
            "select exists (select from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
             where n.nspname = $1::text and c.relname = 'wh_schema_migration')",
            &[(&schema.name(), Type::TEXT)],
        )
        .await
        .map_err(store)?;
    if !column::<bool>(&there, 0)? {
        return Ok(None);
    }
    let statement =
        format!("select kind, name, hash, schema_version, library_version from {schema}.wh_schema_migration");
    let mut applied = Applied::default();
    for row in client.query_typed(&statement, &[]).await.map_err(store)? {
        let version: i32 = column(&row, 3)?;
        if version >= applied.version {
            applied.version = version;
            applied.library = column(&row, 4)?;
        }
        applied.hashes.insert((column(&row, 0)?, column(&row, 1)?), column(&row, 2)?);
    }
    Ok(Some(applied))
}

fn hash_of(file: &SqlFile) -> String {
    let mut hex = String::with_capacity(64);
    for byte in Sha256::digest(file.text.as_bytes()) {
        let _ = write!(hex, "{byte:02x}");
    }
    hex
}

fn lock_key(schema: &SchemaName) -> i32 {
    let digest = Sha256::digest(schema.name().as_bytes());
    i32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]])
}

pub(super) fn store(error: tokio_postgres::Error) -> Error {
    Error::Store(classify(&error))
}
