//! The engines of this process that run, so that they end in order also when the work is broken off.
//!
//! Invariant: whatever ends the work, an engine ends before its server goes, also one that has only begun to start.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use corelane::engine::{Builder, Engine};

use crate::failure::{Failure, Result};

/// Longest time an engine may take to end.
const SHUTDOWN: Duration = Duration::from_secs(20);
static RUNNING: Mutex<Vec<Engine>> = Mutex::new(Vec::new());
/// Held while one starts.
static STARTING: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
/// What an engine gets that is told to end because a person waits for the prompt.
const SHUTDOWN_SOON: Duration = Duration::from_secs(3);

/// Starts an engine that [`end_running`] finds.
///
/// # Errors
/// Of the engine.
pub async fn start_one(builder: Builder) -> Result<Engine> {
    // A task of its own: one that has begun to start is not dropped half way, it is ended when it runs.
    let starting = tokio::spawn(async move {
        let _one = STARTING.lock().await;
        let engine = builder.start().await?;
        RUNNING.lock().unwrap_or_else(PoisonError::into_inner).push(engine.clone());
        Ok(engine)
    });
    starting.await.map_err(|panic| Failure::Broken(format!("an engine's start ended in a panic: {panic}")))?
}

/// Ends engines that [`start_one`] started, one after the other.
pub async fn end(engines: &[Engine]) {
    for engine in engines {
        let report = engine.shutdown(SHUTDOWN).await;
        if report.shards_lost > 0 {
            eprintln!("loadgen: {} shards did not end within {SHUTDOWN:?}", report.shards_lost);
        }
    }
    // One measurement at a time: no other engine runs.
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// Ends every engine of this process, while its server is still there.
pub async fn end_running() {
    let _none = STARTING.lock().await;
    let running = std::mem::take(&mut *RUNNING.lock().unwrap_or_else(PoisonError::into_inner));
    futures_util::future::join_all(running.iter().map(|engine| engine.shutdown(SHUTDOWN_SOON))).await;
}
