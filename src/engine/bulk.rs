//! Units of work larger than a flush: a connection of their own, one transaction, several calls.
//!
//! Invariants
//! - All or nothing: one transaction.
//! - With more than 256 streams all partitions are locked first, ascending, in one statement: two such units never
//!   wait for each other in a circle.
//! - After a connection lost at COMMIT the transaction's own status is asked for, never sent again blindly. Where
//!   the server has crashed in between, transaction ids are given anew, so the answer is "not known".
//! - A message whose id is stored already is refused by its name, the first one where there are several: again would
//!   be the same.
//! - At most [`UNDER_WAY_MAX`] at the same time; the others wait.

use std::rc::Rc;
use std::sync::Arc;

use futures_channel::oneshot;
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::unit::has_many_streams;
use super::{Engine, Receipt, expected, outbox};
use crate::batch::Rows;
use crate::error::{Error, Result};
use crate::runtime::probe::RuntimeKind;
use crate::runtime::thread::{self, ThreadMain, ThreadPlan};
use crate::seam::dial::Dial;
use crate::seam::store::StoreError;
use crate::store::connect::{Connect, ConnectPlan, apply_settings};
use crate::store::schema_name::SchemaName;
use crate::store::sqlstate::number_taken;

/// Large units of work under way at the same time: each has a thread and a connection.
pub(super) const UNDER_WAY_MAX: usize = 4;
/// How often one that met a deadlock, a lock time-out or a server without room is tried.
const ATTEMPTS_MAX: u32 = 5;
/// How long the fate of a transaction is asked for after a lost COMMIT.
const LOOK_UPS: u32 = 100;
const LOOK_UP_PAUSE_MS: u64 = 100;

struct Commit {
    connect: ConnectPlan,
    schema: SchemaName,
    rows: Arc<Rows>,
    call_timeout_ms: u64,
    answer: oneshot::Sender<Result<Vec<Receipt>>>,
}

/// Stores a batch that is one unit of work. Runs on a thread of its own: rare, and long.
pub(super) async fn commit(engine: &Engine, rows: Arc<Rows>) -> Result<Vec<Receipt>> {
    engine.shared.check_running()?;
    expected::check(&rows)?;
    // The semaphore is never closed.
    let _turn = engine.shared.bulk_turns.acquire().await.map_err(|_| Error::ShutDown)?;
    engine.shared.check_running()?;
    let (answer, answered) = oneshot::channel();
    let main = Commit {
        connect: engine.shared.connect.clone(),
        schema: engine.shared.schema.clone(),
        rows,
        call_timeout_ms: engine.shared.config.database.call_timeout_ms,
        answer,
    };
    let plan = ThreadPlan {
        kind: RuntimeKind::Tokio,
        core: None,
        name: "corelane-bulk".to_owned(),
        metrics: engine.shared.shards[0].metrics.clone(),
    };
    thread::start(plan, main)
        .map_err(|source| Error::Thread { what: "the connection of a large unit of work", source })?;
    answered.await.map_err(|_| super::not_known())?
}

impl ThreadMain for Commit {
    type Output = ();

    async fn run<R: Dial>(self, runtime: R) {
        let connect: Rc<dyn Connect> = Rc::new(self.connect.on(runtime.clone()));
        let door = BulkDoor { connect, runtime, schema: self.schema, call_timeout_ms: self.call_timeout_ms };
        let result = door.store(&self.rows).await;
        let _ = self.answer.send(result);
    }
}

struct BulkDoor<R> {
    connect: Rc<dyn Connect>,
    runtime: R,
    schema: SchemaName,
    call_timeout_ms: u64,
}

/// A transaction before its COMMIT.
struct Prepared {
    receipts: Vec<Receipt>,
    xid: String,
    epoch: Uuid,
}

impl<R: Dial> BulkDoor<R> {
    async fn store(&self, rows: &Rows) -> Result<Vec<Receipt>> {
        let mut attempt = 1;
        loop {
            match self.store_once(rows).await {
                Err(Error::Store(error @ (StoreError::Transient { .. } | StoreError::NumberTaken)))
                    if attempt < ATTEMPTS_MAX =>
                {
                    tracing::debug!(%error, attempt, "a large unit of work: trying again");
                    self.pause_ms(20 * u64::from(attempt) + rand::random_range(0..20)).await;
                    attempt += 1;
                }
                Err(Error::Store(StoreError::DuplicateMessage { message_id })) => {
                    return Err(Error::DuplicateMessage { message_id });
                }
                outcome => return outcome,
            }
        }
    }

    async fn store_once(&self, rows: &Rows) -> Result<Vec<Receipt>> {
        let client = self.connect.connect().await?;
        let prepared = self.prepare(&client, rows).await?;
        let committed = self.within_deadline(client.batch_execute("commit")).await;
        // Not open on our side while its outcome is looked up.
        drop(client);
        match committed {
            Ok(()) => Ok(prepared.receipts),
            Err(StoreError::ConnectionLost(why)) => self.look_up(prepared, &why).await,
            Err(error) => Err(error.into()),
        }
    }

    async fn prepare(&self, client: &Client, rows: &Rows) -> Result<Prepared> {
        let schema = self.schema.quoted();
        self.within_deadline(client.batch_execute("begin isolation level read committed")).await?;
        if let Some(settings) = self.connect.manner().each_transaction {
            self.within_deadline(apply_settings(client, &settings, true)).await?;
        }
        if has_many_streams(rows) {
            let mut partitions: Vec<i32> = rows.partition.iter().map(|partition| *partition as i32).collect();
            partitions.sort_unstable();
            partitions.dedup();
            let lock = format!(
                "select count(pg_advisory_xact_lock({schema}.wh_lock_class(1), p)) \
                 from (select p from unnest($1::int4[]) p order by p) p"
            );
            self.within_deadline(client.query_typed_one(&lock, &[(&partitions, Type::INT4_ARRAY)])).await?;
        }
        // A deadline for all its calls together, by their number.
        let calls = 1 + (rows.len() / crate::limits::STORE_ROWS_MAX) as u64;
        let storing = async { Ok(outbox::store(client, &self.schema, rows).await) };
        let stored = self.within_ms(self.call_timeout_ms.saturating_mul(calls), storing).await?;
        let receipts = stored
            .map_err(|error| expected::conflict(&error).unwrap_or_else(|| number_taken(&error, [rows]).into()))?;
        let who = format!("select pg_current_xact_id()::text, {schema}.wh_epoch_token()");
        let row = self.within_deadline(client.query_typed_one(&who, &[])).await?;
        let read = || Ok::<_, tokio_postgres::Error>((row.try_get(0)?, row.try_get(1)?));
        let (xid, epoch) = read().map_err(StoreError::from)?;
        Ok(Prepared { receipts, xid, epoch })
    }

    /// What became of a COMMIT that had no answer.
    async fn look_up(&self, prepared: Prepared, why: &str) -> Result<Vec<Receipt>> {
        for _ in 0..LOOK_UPS {
            match self.status(&prepared).await.as_deref() {
                Ok("committed") => return Ok(prepared.receipts),
                Ok("aborted") => {
                    let text = format!("the connection was lost before the commit ({why}): nothing was stored");
                    return Err(StoreError::Transient { sqlstate: "08007".to_owned(), text }.into());
                }
                // Still committing, or the server is not back.
                Ok("in progress") | Err(_) => self.pause_ms(LOOK_UP_PAUSE_MS).await,
                Ok(_) => break,
            }
        }
        Err(Error::OutcomeUnknown { reason: why.to_owned() })
    }

    async fn status(&self, prepared: &Prepared) -> std::result::Result<String, StoreError> {
        let client = self.connect.connect().await?;
        let statement = format!(
            "select coalesce(case when exists (select from {}.wh_epoch where token = $2) \
             then pg_xact_status($1::text::xid8) end, 'not known')",
            self.schema.quoted()
        );
        let parameters: [(&(dyn ToSql + Sync), Type); 2] = [(&prepared.xid, Type::TEXT), (&prepared.epoch, Type::UUID)];
        let row = self.within_deadline(client.query_typed_one(&statement, &parameters)).await?;
        Ok(row.try_get(0)?)
    }

    async fn pause_ms(&self, ms: u64) {
        self.runtime.sleep_until(self.runtime.now().plus_ms(ms)).await;
    }

    async fn within_deadline<T>(
        &self,
        call: impl Future<Output = std::result::Result<T, tokio_postgres::Error>>,
    ) -> std::result::Result<T, StoreError> {
        self.within_ms(self.call_timeout_ms, call).await
    }

    async fn within_ms<T>(
        &self,
        ms: u64,
        call: impl Future<Output = std::result::Result<T, tokio_postgres::Error>>,
    ) -> std::result::Result<T, StoreError> {
        match futures_util::future::select(std::pin::pin!(call), std::pin::pin!(self.pause_ms(ms))).await {
            futures_util::future::Either::Left((answer, _)) => answer.map_err(StoreError::from),
            futures_util::future::Either::Right(_) => Err(StoreError::no_answer(ms.into())),
        }
    }
}
