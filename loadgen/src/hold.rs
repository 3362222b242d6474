//! Transactions held open while a load runs: what a dump, a report or a slow user does to a database.
//!
//! Invariant: a hold has begun when [`Held::begin`] answers, and lasts until the value is dropped (its
//! connection ends and the server rolls back).

use tokio_postgres::Client;
use uuid::Uuid;

use crate::cli::Hold;
use crate::failure::Result;
use crate::target::{Target, quoted};

/// A transaction that is open.
#[derive(Debug)]
pub struct Held {
    _client: Client,
}

impl Held {
    /// Opens one on the engine's schema.
    ///
    /// # Errors
    /// Of the server.
    pub async fn begin(target: &Target, schema: &str, hold: Hold) -> Result<Self> {
        let client = target.connect().await?;
        let (name, schema) = (schema, quoted(schema));
        match hold {
            Hold::Snapshot => {
                client.batch_execute("begin isolation level repeatable read; select count(*) from pg_class").await?;
            }
            Hold::Writer => {
                // A table of somebody else: it shares nothing with the engine but the server.
                let make = format!("create table if not exists {schema}.loadgen_elsewhere (value int8)");
                client.batch_execute(&make).await?;
                client.batch_execute(&format!("begin; insert into {schema}.loadgen_elsewhere values (1)")).await?;
            }
            Hold::Enlisted => {
                client.batch_execute("begin").await?;
                let store = format!(
                    "select from {schema}.store_outbox_messages(array[$1]::uuid[], array[$2]::uuid[], array['loadgen.held'], \
                     array['{{}}'::bytea], array[true], array['orders'])"
                );
                client.execute(&store, &[&Uuid::now_v7(), &Uuid::new_v4()]).await?;
            }
            Hold::Locks => {
                client.batch_execute("begin").await?;
                const SEGMENTS: &str = "select string_agg(format('%I.%I', nspname, relname), ', ') from pg_class \
                     join pg_namespace on pg_namespace.oid = relnamespace \
                     where nspname = $1 and relname ~ '^wh_(log|outbox)_[0-9]+$' and relkind = 'r'";
                let names: String = client.query_one(SEGMENTS, &[&name]).await?.get(0);
                client.batch_execute(&format!("lock table {names} in access share mode")).await?;
            }
        }
        Ok(Self { _client: client })
    }
}
