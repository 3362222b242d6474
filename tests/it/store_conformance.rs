//! The conformance script on Postgres; `tests/sim` runs it on the model.

use std::rc::Rc;

use corelane::store::postgres::{Ear, PostgresCoordination, PostgresStore};

use crate::store_kit::{HearingDial, PARTITIONS, Space};

#[tokio::test]
async fn postgres_passes_the_conformance_script() {
    // Drivers of connections that hear stay on their thread.
    tokio::task::LocalSet::new().run_until(run_script()).await;
}

async fn run_script() {
    let space = Space::new().await;
    let store = PostgresStore::new(space.dial(), &space.name);
    let ear = Ear::default();
    let listening = Rc::new(HearingDial { url: space.schema.url.clone(), hear: ear.on_notification() });
    let keeper_a =
        PostgresCoordination::new(space.dial(), &space.name).listening(space.dial(), listening, &space.name, ear);
    let keeper_b = PostgresCoordination::new(space.dial(), &space.name);
    crate::conformance::run(&store, &keeper_a, &keeper_b, PARTITIONS).await;
}
