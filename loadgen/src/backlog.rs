//! Messages that stand in the database before the engine starts, stored as a stranger would: by plain SQL.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use uuid::Uuid;

use crate::baselines::{DESTINATION, Ids, TYPE_NAME};
use crate::failure::{Failure, Result};
use crate::scenario::Scenario;
use crate::shape::{Payload, StreamFamily};
use crate::target::{Target, quoted};

/// Messages of one call: as many as the engine itself stores at once.
const CALL_ROWS: u64 = 1_000;
const CONNECTIONS: usize = 2;

/// Stores `count` events over the scenario's streams. Answers the last number of each stream.
///
/// # Errors
/// Of the server.
pub async fn store(
    target: &Target,
    schema: &str,
    scenario: &Scenario,
    family: StreamFamily,
    count: u64,
) -> Result<Vec<u64>> {
    let sql = format!(
        "select from {}.store_outbox_messages($1, $2, $3, $4, $5, $6, correlation_ids => $7, causation_ids => $8, \
         trace_ids => $9, span_ids => $10, trace_flags => $11)",
        quoted(schema)
    );
    let streams = u64::from(scenario.streams);
    let next = Arc::new(AtomicU64::new(0));
    let mut tasks = Vec::new();
    for _ in 0..CONNECTIONS {
        let client = target.connect().await?;
        let statement = client.prepare(&sql).await?;
        let next = next.clone();
        let mut payload = Payload::new(scenario.payload_bytes);
        let mut ids = Ids::default();
        tasks.push(tokio::spawn(async move {
            loop {
                let from = next.fetch_add(CALL_ROWS, Ordering::Relaxed);
                if from >= count {
                    return Ok::<(), Failure>(());
                }
                let rows = from..(from + CALL_ROWS).min(count);
                let len = (rows.end - rows.start) as usize;
                let mut make = || (0..len).map(|_| ids.draw()).collect::<Vec<Uuid>>();
                let (correlation, causation, trace) = (make(), make(), make());
                let message: Vec<Uuid> = (0..len).map(|_| Uuid::now_v7()).collect();
                let stream: Vec<Uuid> = rows.map(|row| family.stream((row % streams) as u32)).collect();
                let payloads: Vec<Vec<u8>> = (0..len).map(|_| payload.draw().to_vec()).collect();
                let span: Vec<i64> = trace.iter().map(|id| id.as_u128() as i64).collect();
                client
                    .execute(
                        &statement,
                        &[
                            &message,
                            &stream,
                            &vec![TYPE_NAME; len],
                            &payloads,
                            &vec![true; len],
                            &vec![DESTINATION; len],
                            &correlation,
                            &causation,
                            &trace,
                            &span,
                            &vec![1i16; len],
                        ],
                    )
                    .await?;
            }
        }));
    }
    for task in tasks {
        task.await.map_err(|panic| Failure::Broken(format!("storing the backlog ended in a panic: {panic}")))??;
    }
    Ok((0..streams).map(|stream| count / streams + u64::from(stream < count % streams)).collect())
}
