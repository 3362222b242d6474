//! The Postgres implementation of both seams: [`PostgresStore`] for a shard, [`PostgresCoordination`] for the lease
//! keeper.
//!
//! Invariants
//! - A call that is dropped before its answer takes its connection along: the server may still be at work on it, and
//!   nothing may be sent behind it. The next call dials anew.
//! - Deadlines belong to the callers: nothing here waits on a clock.
//! - Everything is named with its schema: no connection state is relied upon, except for the lease keeper's session
//!   lock and its listener.

mod claim;
mod coordination;
mod ear;
mod log;
mod send;
mod settle;
mod store;

use std::cell::RefCell;
use std::rc::Rc;

use tokio_postgres::types::Type;
use uuid::Uuid;

pub use coordination::PostgresCoordination;
pub use ear::Ear;
use send::{Connection, Sql};

use crate::batch::{DestinationId, Rows};
use crate::ids::Incarnation;
use crate::seam::store::{
    ClaimReply, ClaimRequest, LoadReply, Origin, Release, SettleReply, SettleRequest, Store, StoreError, StoreReply,
    StoreRequest, Stored,
};
use crate::store::connect::Connect;
use crate::store::schema_name::SchemaName;
use crate::store::sql::SCHEMA_VERSION;
use crate::store::sqlstate::is_missing_object;

/// A connection that is dialled when it is needed.
struct Line {
    connect: Rc<dyn Connect>,
    connection: RefCell<Option<Rc<Connection>>>,
    /// Asks for the installed schema's version.
    version_sql: String,
}

/// A call under way: unless it ends, the line loses its connection.
struct Call<'a> {
    line: &'a Line,
    connection: Rc<Connection>,
    ended: bool,
}

impl Call<'_> {
    /// The server has answered: the connection is good, unless the answer says otherwise.
    async fn end<T>(mut self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        let result = match result {
            Err(StoreError::Refused { sqlstate, text }) if is_missing_object(&sqlstate) => {
                let rows = self.connection.client.query_typed(&self.line.version_sql, &[]).await.unwrap_or_default();
                let installed = rows.first().and_then(|row| row.try_get(0).ok()).flatten();
                Err(StoreError::SchemaChanged { installed, wanted: SCHEMA_VERSION, sqlstate, text })
            }
            result => result,
        };
        self.ended = !self.connection.client.is_closed()
            && !matches!(result, Err(StoreError::ConnectionLost(_) | StoreError::Denied { .. }))
            && !is_read_only(&result);
        result
    }
}

/// The primary has become another server: dialling finds it, this connection never will.
fn is_read_only<T>(result: &Result<T, StoreError>) -> bool {
    matches!(result, Err(StoreError::Transient { sqlstate, .. }) if sqlstate == "25006")
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let mut slot = self.line.connection.borrow_mut();
            if slot.as_ref().is_some_and(|current| Rc::ptr_eq(current, &self.connection)) {
                *slot = None;
            }
        }
    }
}

impl Line {
    fn new(connect: Rc<dyn Connect>, schema: &SchemaName) -> Self {
        let version_sql = format!("select max(schema_version) from {schema}.wh_schema_migration");
        Self { connect, connection: RefCell::new(None), version_sql }
    }

    /// Begins a call; answers whether the connection is a new one as well.
    async fn call(&self) -> Result<(Call<'_>, bool), StoreError> {
        let current = self.connection.borrow().clone().filter(|connection| !connection.client.is_closed());
        if let Some(connection) = current {
            return Ok((Call { line: self, connection, ended: false }, false));
        }
        let client = self.connect.connect().await?;
        let connection = Rc::new(Connection::new(client, self.connect.manner()));
        // Another call may have dialled meanwhile: one of the two connections serves its call and goes.
        *self.connection.borrow_mut() = Some(connection.clone());
        Ok((Call { line: self, connection, ended: false }, true))
    }
}

/// A shard's door to Postgres: one connection for flushes and settlements, one for what it reads. The latter also
/// writes the scheduled messages whose time has come: a claim may wait for them, a flush must not.
pub struct PostgresStore {
    writing: Line,
    reading: Line,
    sql: Texts,
}

struct Texts {
    store: Sql,
    store_patiently: Sql,
    find_flush: Sql,
    find_duplicates: Sql,
    settle: Sql,
    claim: Sql,
    claim_parked: Sql,
    release_scheduled: Sql,
    load: Sql,
    keep: Sql,
}

impl PostgresStore {
    /// A store over an installed schema. Nothing is dialled yet.
    #[must_use]
    pub fn new(connect: Rc<dyn Connect>, schema: &SchemaName) -> Self {
        let (writing, reading) = (Line::new(connect.clone(), schema), Line::new(connect, schema));
        Self { writing, reading, sql: Texts::of(schema) }
    }
}

impl Texts {
    fn of(schema: &SchemaName) -> Self {
        let schema = schema.quoted();
        Self {
            store: store::store_sql(schema),
            store_patiently: store::store_patiently_sql(schema),
            find_flush: store::find_flush_sql(schema),
            find_duplicates: store::find_duplicates_sql(schema),
            settle: settle::settle_sql(schema),
            claim: claim::claim_sql(schema),
            claim_parked: claim::claim_parked_sql(schema),
            release_scheduled: claim::release_scheduled_sql(schema),
            load: claim::load_sql(schema),
            keep: claim::keep_sql(schema),
        }
    }
}

/// Every statement that shards and lease keeper send, with the types of its parameters: what a schema has to answer for
/// as long as a program of this version may run on it (see `store::sql`).
#[must_use]
pub fn statements(schema: &SchemaName) -> Vec<(String, &'static [Type])> {
    let Texts {
        store,
        store_patiently,
        find_flush,
        find_duplicates,
        settle,
        claim,
        claim_parked,
        release_scheduled,
        load,
        keep,
    } = Texts::of(schema);
    let writing = [store, store_patiently, find_flush, find_duplicates, settle];
    let reading = [claim, claim_parked, release_scheduled, load, keep];
    writing
        .into_iter()
        .chain(reading)
        .chain(coordination::statements(schema))
        .map(|sql| (sql.text, sql.takes))
        .collect()
}

impl Store for PostgresStore {
    async fn store_shard_messages(&self, request: &StoreRequest<'_>) -> Result<StoreReply, StoreError> {
        let (call, _) = self.writing.call().await?;
        let result = store::store(&call.connection, &self.sql.store, &self.sql.store_patiently, request).await;
        call.end(result).await
    }

    async fn find_flush(
        &self,
        origin: Origin,
        stream_id: &[Uuid],
        stream_rows: &[u32],
        since: u64,
    ) -> Result<Option<Stored>, StoreError> {
        let (call, _) = self.writing.call().await?;
        let sql = &self.sql.find_flush;
        let result = store::find_flush(&call.connection, sql, origin, stream_id, stream_rows, since).await;
        call.end(result).await
    }

    async fn find_duplicates(&self, message_id: &[Uuid]) -> Result<Vec<Uuid>, StoreError> {
        let (call, _) = self.writing.call().await?;
        let result = store::find_duplicates(&call.connection, &self.sql.find_duplicates, message_id).await;
        call.end(result).await
    }

    async fn settle(&self, incarnation: Incarnation, request: &SettleRequest) -> Result<SettleReply, StoreError> {
        let (call, _) = self.writing.call().await?;
        let result = settle::settle(&call.connection, &self.sql.settle, incarnation, request).await;
        call.end(result).await
    }

    async fn claim_work(&self, request: &ClaimRequest<'_>) -> Result<ClaimReply, StoreError> {
        let (call, _) = self.reading.call().await?;
        let result = claim::claim_work(&call.connection, &self.sql.claim, request).await;
        call.end(result).await
    }

    async fn claim_parked(
        &self,
        lane_id: Uuid,
        destination: DestinationId,
        _partition: u32,
        rows_max: usize,
    ) -> Result<Rows, StoreError> {
        let (call, _) = self.reading.call().await?;
        let result =
            claim::claim_parked(&call.connection, &self.sql.claim_parked, lane_id, destination, rows_max).await;
        call.end(result).await
    }

    async fn release_scheduled(
        &self,
        incarnation: Incarnation,
        partitions: &[u32],
        rows_max: usize,
    ) -> Result<usize, StoreError> {
        let (call, _) = self.reading.call().await?;
        let sql = &self.sql.release_scheduled;
        let result = claim::release_scheduled(&call.connection, sql, incarnation, partitions, rows_max).await;
        call.end(result).await
    }

    async fn keep_resolved(&self, incarnation: Incarnation, kept: &Release) -> Result<(), StoreError> {
        let (call, _) = self.reading.call().await?;
        let result = claim::keep(&call.connection, &self.sql.keep, incarnation, kept).await;
        call.end(result).await
    }

    async fn load(&self, incarnation: Incarnation, partitions: &[u32]) -> Result<LoadReply, StoreError> {
        let (call, _) = self.reading.call().await?;
        let result = claim::load(&call.connection, &self.sql.load, incarnation, partitions).await;
        call.end(result).await
    }
}
