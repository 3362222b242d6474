//! The doorbell of the ring into a shard, under every interleaving that the memory model allows.
//!
//! It is the library's own source, compiled with loom's words in place of the real ones. A lost wake-up shows
//! as a deadlock. The same check on a doorbell without its fences must fail: that is what shows that it can.

#![allow(clippy::unwrap_used)] // loom's locks are never poisoned.
#![allow(clippy::duplicate_mod)] // The doorbell twice: as it is, and broken.

#[path = "."]
mod real {
    mod sync {
        pub use loom::sync::atomic::{AtomicBool, Ordering, fence};

        pub use crate::LoomWaker as AtomicWaker;
    }

    #[path = "../src/runtime/doorbell.rs"]
    pub mod doorbell;
}

#[path = "."]
mod without_fences {
    mod sync {
        pub use loom::sync::atomic::{AtomicBool, Ordering};

        pub use crate::LoomWaker as AtomicWaker;

        pub fn fence(_: Ordering) {}
    }

    #[path = "../src/runtime/doorbell.rs"]
    pub mod doorbell;
}

use std::task::Waker;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};

/// One place for a waker, as the real one behaves: taken by whoever wakes.
#[derive(Debug, Default)]
pub struct LoomWaker(loom::sync::Mutex<Option<Waker>>);

impl LoomWaker {
    fn register(&self, waker: &Waker) {
        *self.0.lock().unwrap() = Some(waker.clone());
    }

    fn take(&self) -> Option<Waker> {
        self.0.lock().unwrap().take()
    }

    fn wake(&self) {
        if let Some(waker) = self.take() {
            waker.wake();
        }
    }
}

/// `ringers` threads put one value in and ring; the sleeper waits until it has taken them all. The queue is
/// a counter with the weakest ordering, so that the doorbell's own is what carries.
macro_rules! check {
    ($doorbell:ty, $ringers:expr, $given_up:expr) => {{
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let shared = Arc::new((AtomicUsize::new(0), <$doorbell>::default()));
            for _ in 0..$ringers {
                let shared = Arc::clone(&shared);
                loom::thread::spawn(move || {
                    shared.0.fetch_add(1, Ordering::Relaxed);
                    shared.1.ring();
                });
            }
            let mut taken = 0;
            while taken < $ringers {
                if $given_up {
                    // A wait that is given up: what it left behind must not hide a later ring.
                    let mut context = std::task::Context::from_waker(Waker::noop());
                    let _ = shared.1.poll_work(&mut context, || shared.0.load(Ordering::Relaxed) > 0);
                }
                loom::future::block_on(std::future::poll_fn(|context| {
                    shared.1.poll_work(context, || shared.0.load(Ordering::Relaxed) > 0)
                }));
                taken += shared.0.swap(0, Ordering::Relaxed);
            }
            shared.1.forget_waker();
        });
    }};
}

#[test]
fn no_ring_is_lost() {
    check!(real::doorbell::Doorbell, 1, false);
    check!(real::doorbell::Doorbell, 2, false);
}

#[test]
fn no_ring_is_lost_after_a_wait_was_given_up() {
    check!(real::doorbell::Doorbell, 1, true);
}

#[test]
fn without_its_fences_a_ring_is_lost() {
    let outcome = std::panic::catch_unwind(|| check!(without_fences::doorbell::Doorbell, 1, false));
    assert!(outcome.is_err(), "the model does not notice a lost wake-up");
}
