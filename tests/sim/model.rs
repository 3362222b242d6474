//! The model itself: it passes the conformance script at every pace.

use corelane::runtime::sim::{Failure, SimRuntime};
use corelane::store::model::{Model, ModelSettings};

/// Runs the script at the pace of a seed.
pub fn run_script(seed: u64) -> Result<(), Failure> {
    let runtime = SimRuntime::new(seed, 1_000_000);
    let settings = ModelSettings { rotate_rows: 5, ..ModelSettings::default() };
    let model = Model::new(&runtime, settings);
    let done = runtime.block_on(async move {
        let (store, a, b) = (model.store(), model.coordination(), model.coordination());
        crate::conformance::run(&store, &a, &b, settings.partition_count).await;
    });
    runtime.end_world();
    done
}

#[test]
fn the_model_passes_the_conformance_script() {
    for seed in 0..50 {
        assert_eq!(run_script(seed), Ok(()));
    }
}
