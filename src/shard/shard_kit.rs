//! A shard around a store that a test has written, without rings, lease or transport.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use super::signal::Signal;
use super::state::State;
use super::{LeaseCell, Shard};
use crate::runtime::budget::Budget;
use crate::runtime::sim::SimRuntime;
use crate::seam::publisher::{PublishRun, Publisher};
use crate::seam::runtime::Runtime;
use crate::seam::store::Store;
use crate::seam::transport::TransportLimits;

/// Publishes nothing, and says nothing of it.
pub(super) struct Nowhere(TransportLimits);

impl Publisher for Nowhere {
    fn limits(&self) -> &TransportLimits {
        &self.0
    }

    fn publish(&self, run: Box<PublishRun>) -> impl Future<Output = Box<PublishRun>> + 'static {
        std::future::ready(run)
    }
}

/// A shard whose loops a test runs one by one.
pub(super) type Kit<S> = Rc<Shard<SimRuntime, S, Nowhere>>;

pub(super) fn shard_around<S: Store>(state: State, store: S, steps_max: u64) -> Kit<S> {
    Rc::new(Shard {
        runtime: SimRuntime::new(1, steps_max),
        store: Rc::new(store),
        publisher: Nowhere(TransportLimits::default()),
        budget: Arc::new(Budget::default()),
        others: Arc::default(),
        left_behind: Cell::new(None),
        lease: Arc::new(LeaseCell::default()),
        state: RefCell::new(state),
        announced: Cell::new(false),
        suspected: Cell::new(false),
        listening: Cell::new(false),
        call_timeout_us: 1_000_000,
        flush_signal: Signal::default(),
        claim_signal: Signal::default(),
        publish_signal: Signal::default(),
        settle_signal: Signal::default(),
    })
}

/// Runs what is given for so long; answers whether it came to its end before.
pub(super) fn run_for<S: Store, F: Future + 'static>(
    shard: &Kit<S>,
    ms: u64,
    what: impl FnOnce(Kit<S>) -> F + 'static,
) -> bool {
    let (of, clock) = (shard.clone(), shard.runtime.clone());
    let ended = shard.runtime.block_on(async move {
        let deadline = std::pin::pin!(clock.sleep_until(clock.now().plus_ms(ms)));
        let what = std::pin::pin!(what(of));
        matches!(futures_util::future::select(what, deadline).await, futures_util::future::Either::Left(_))
    });
    ended.unwrap()
}
