//! The model itself: it passes the conformance script at every pace.

use corelane::runtime::sim::SimRuntime;
use corelane::store::model::{Model, ModelSettings};

#[test]
fn the_model_passes_the_conformance_script() {
    for seed in 0..50 {
        let runtime = SimRuntime::new(seed, 1_000_000);
        let settings = ModelSettings { rotate_rows: 5, ..ModelSettings::default() };
        let model = Model::new(&runtime, settings);
        let done = runtime.block_on(async move {
            let (store, a, b) = (model.store(), model.coordination(), model.coordination());
            crate::conformance::run(&store, &a, &b, settings.partition_count).await;
        });
        assert_eq!(done, Ok(()));
        runtime.end_world();
    }
}
