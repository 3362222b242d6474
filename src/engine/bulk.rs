//! Units of work larger than a flush: a connection of their own, one transaction, several calls.
//!
//! Invariants
//! - All or nothing: one transaction.
//! - After a connection lost at COMMIT the transaction's own status is asked for, until it is known.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_channel::oneshot;

use super::{Engine, Receipt, outbox};
use crate::batch::Rows;
use crate::error::{Error, Result};
use crate::runtime::probe::RuntimeKind;
use crate::runtime::thread::{self, ThreadMain, ThreadPlan};
use crate::seam::dial::Dial;
use crate::seam::store::StoreError;
use crate::store::connect::{Connect, ConnectPlan};
use crate::store::schema_name::SchemaName;

/// How long the fate of a transaction is asked for after a lost COMMIT.
const LOOK_UPS: u32 = 100;
const LOOK_UP_PAUSE_US: u64 = 100_000;

struct Commit {
    connect: ConnectPlan,
    schema: SchemaName,
    rows: Arc<Rows>,
    answer: oneshot::Sender<Result<Vec<Receipt>>>,
}

/// Stores a batch that is one unit of work. Runs on a thread of its own: rare, and long.
pub(super) async fn commit(engine: &Engine, rows: Arc<Rows>) -> Result<Vec<Receipt>> {
    engine.shared.check_running()?;
    let (answer, answered) = oneshot::channel();
    let main = Commit { connect: engine.shared.connect.clone(), schema: engine.shared.schema.clone(), rows, answer };
    let plan = ThreadPlan {
        kind: RuntimeKind::Tokio,
        core: None,
        name: "corelane-bulk".to_owned(),
        metrics: engine.shared.shards[0].metrics.clone(),
    };
    thread::start(plan, main).map_err(|error| {
        Error::Store(StoreError::ConnectionLost(format!("no thread for a large unit of work: {error}")))
    })?;
    answered.await.map_err(|_| Error::ShutDown)?
}

impl ThreadMain for Commit {
    type Output = ();

    async fn run<R: Dial>(self, runtime: R) {
        let connect: Rc<dyn Connect> = Rc::new(self.connect.on(runtime.clone()));
        let result = store_all(&*connect, &runtime, &self.schema, &self.rows).await;
        let _ = self.answer.send(result.map_err(Error::Store));
    }
}

async fn store_all<R: Dial>(
    connect: &dyn Connect,
    runtime: &R,
    schema: &SchemaName,
    rows: &Rows,
) -> std::result::Result<Vec<Receipt>, StoreError> {
    let client = connect.connect().await?;
    client.batch_execute("begin isolation level read committed").await?;
    let receipts = outbox::store(&client, schema, rows).await?;
    let xid: String = client.query_one("select pg_current_xact_id()::text", &[]).await?.try_get(0)?;
    match client.batch_execute("commit").await.map_err(StoreError::from) {
        Ok(()) => return Ok(receipts),
        Err(StoreError::ConnectionLost(_)) => {}
        Err(error) => return Err(error),
    }
    let mut last = StoreError::ConnectionLost("at COMMIT".to_owned());
    for _ in 0..LOOK_UPS {
        match status(connect, &xid).await {
            Ok(Some(true)) => return Ok(receipts),
            Ok(Some(false)) => {
                return Err(StoreError::Transient {
                    sqlstate: "08007".to_owned(),
                    text: "the connection was lost and the transaction did not commit: nothing was stored".to_owned(),
                });
            }
            Ok(None) => {}
            Err(error) => last = error,
        }
        runtime.sleep_until(runtime.now().plus_us(LOOK_UP_PAUSE_US)).await;
    }
    Err(StoreError::ConnectionLost(format!(
        "at COMMIT of transaction {xid}, and nobody could say for {:?} whether it took place: {last}",
        Duration::from_micros(LOOK_UP_PAUSE_US) * LOOK_UPS
    )))
}

/// Whether the transaction committed; `None` while it is under way.
async fn status(connect: &dyn Connect, xid: &str) -> std::result::Result<Option<bool>, StoreError> {
    let client = connect.connect().await?;
    let row = client.query_one("select pg_xact_status($1::text::xid8)", &[&xid]).await?;
    let status: Option<String> = row.try_get(0)?;
    Ok(match status.as_deref() {
        Some("committed") => Some(true),
        Some("in progress") => None,
        _ => Some(false),
    })
}
