//! Keeps the memory of ids in shape: days are made ahead of time, and forgotten when their window is over.
//!
//! Invariants
//! - It runs over a connection of its own, in bounded steps: no worker waits for it.
//! - Each instance does it; steps of several do not disturb each other. Failures in a row are said in the log.

use std::time::Duration;

use tokio_postgres::Client;

use super::door::{Dialled, dial};
use crate::seam::store::StoreError;
use crate::store::schema_name::SchemaName;

/// Between two looks.
const PERIOD: Duration = Duration::from_secs(10);
/// Longest time of a step.
const STEP_TIME_MAX: Duration = Duration::from_secs(30);
/// So many failures in a row are an alarm.
const FAILURES_ALARM: u32 = 3;

/// What is said for it.
pub(super) fn text(schema: &SchemaName) -> String {
    format!("select more from {}.maintain_inbox(make_interval(days => $1::int4))", schema.quoted())
}

/// Tends until its future is dropped.
pub(super) async fn tend(requests: flume::Sender<Dialled>, schema: SchemaName, window_days: u32) {
    let text = text(&schema);
    let days = i32::try_from(window_days).unwrap_or(i32::MAX);
    let mut connection: Option<Client> = None;
    let mut failures = 0;
    loop {
        let step = async {
            let client = match connection.take() {
                // The server may have ended one that was silent between two looks.
                Some(client) if !client.is_closed() => client,
                _ => dial(&requests).await?,
            };
            let more: bool = client.query_one(&text, &[&days]).await?.try_get(0)?;
            Ok::<_, StoreError>((client, more))
        };
        let outcome = tokio::time::timeout(STEP_TIME_MAX, step).await;
        match outcome.unwrap_or_else(|_| Err(StoreError::ConnectionLost("no answer in time".to_owned()))) {
            Ok((client, more)) => {
                failures = 0;
                connection = Some(client);
                if more {
                    continue;
                }
            }
            Err(error) => {
                failures += 1;
                if failures % FAILURES_ALARM == 0 {
                    tracing::error!(failures, %error, "the inbox's memory cannot be tended: nothing is forgotten");
                }
            }
        }
        tokio::time::sleep(PERIOD).await;
    }
}
