//! The server and the schema of a test.
//!
//! Invariants
//! - No two tests share a schema; it is dropped when its [`TestSchema`] is.
//! - The shared cluster goes with the process, its directory too.
//! - A process that hangs ends: the tests take a minute, and it is given [`MINUTES_MAX`].

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use corelane::private_postgres::{Options, PrivatePostgres};
use tokio_postgres::{Client, NoTls};

/// Many times what the slowest machine needs.
const MINUTES_MAX: u64 = 15;

static SHARED: OnceLock<Mutex<Option<PrivatePostgres>>> = OnceLock::new();

/// The URL of the shared server.
pub fn database_url() -> String {
    if let Ok(url) = std::env::var("CORELANE_TEST_DATABASE_URL") {
        return url;
    }
    let shared = SHARED.get_or_init(|| {
        extern "C" fn remove() {
            if let Some(shared) = SHARED.get() {
                drop(shared.lock().unwrap_or_else(PoisonError::into_inner).take());
            }
        }
        // SAFETY: the handler only takes a lock that no test holds at the end of the process, and drops.
        unsafe { libc::atexit(remove) };
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_secs(60 * MINUTES_MAX));
            eprintln!("the tests hang: those that are running above never ended");
            std::process::exit(101);
        });
        Mutex::new(Some(own_cluster()))
    });
    shared.lock().unwrap_or_else(PoisonError::into_inner).as_ref().expect("the shared server").url("postgres")
}

/// A cluster for one test alone.
pub fn own_cluster() -> PrivatePostgres {
    PrivatePostgres::start(Options::default()).expect("a private Postgres")
}

/// A cluster for one test alone, with settings of its own.
pub fn own_cluster_with(settings: &[&str]) -> PrivatePostgres {
    let settings = settings.iter().map(|setting| (*setting).to_owned()).collect();
    PrivatePostgres::start(Options { settings, ..Options::default() }).expect("a private Postgres")
}

/// A fresh schema name on a server, dropped at the end.
pub struct TestSchema {
    pub url: String,
    pub name: String,
}

/// A schema of its own on the shared server.
pub fn schema() -> TestSchema {
    schema_on(database_url())
}

/// A schema of its own on a server.
pub fn schema_on(url: String) -> TestSchema {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("t{}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    TestSchema { url, name }
}

impl TestSchema {
    /// A client on the server; its `search_path` is the schema.
    pub async fn client(&self) -> Client {
        let client = connect(&self.url).await;
        client.batch_execute(&format!("set search_path = {}, public", quoted(&self.name))).await.expect("search_path");
        client
    }
}

impl Drop for TestSchema {
    fn drop(&mut self) {
        let (url, name) = (self.url.clone(), self.name.clone());
        // A runtime of its own: the test's may be gone, or be the one this runs on.
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
            runtime.block_on(async {
                if let Ok((client, connection)) = tokio_postgres::connect(&url, NoTls).await {
                    tokio::spawn(connection);
                    let _ = client.batch_execute("set lock_timeout = '5s'").await;
                    let _ = client.batch_execute(&format!("drop schema if exists {} cascade", quoted(&name))).await;
                }
            });
        });
        let _ = dropping.join();
    }
}

/// A client on a server.
pub async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("connect");
    tokio::spawn(connection);
    client
}

/// An identifier as SQL quotes it.
pub fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// How long what has to come is waited for at least: a machine that is slow, or whose disk stands still, is no failure.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until the condition holds, at most so long, or a minute.
pub async fn eventually<F: Future<Output = bool>>(what: &str, within: Duration, mut condition: impl FnMut() -> F) {
    let within = within.max(PATIENCE);
    let deadline = Instant::now() + within;
    while !condition().await {
        assert!(Instant::now() < deadline, "not within {within:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
