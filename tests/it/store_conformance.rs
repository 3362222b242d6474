//! The conformance script on Postgres; `tests/sim` runs it on the model.

use corelane::store::postgres::{PostgresCoordination, PostgresStore};

use crate::store_kit::{PARTITIONS, Space};

#[tokio::test]
async fn postgres_passes_the_conformance_script() {
    let space = Space::new().await;
    let store = PostgresStore::new(space.dial(), &space.name);
    let keeper_a = PostgresCoordination::new(space.dial(), &space.name);
    let keeper_b = PostgresCoordination::new(space.dial(), &space.name);
    crate::conformance::run(&store, &keeper_a, &keeper_b, PARTITIONS).await;
}
