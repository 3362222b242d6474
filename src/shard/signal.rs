//! A wake-up inside one thread: "there is something to do", remembered until somebody looks.
//!
//! Invariant: a `raise` between two waits is not lost; any number of raises is one wake-up.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// One loop's wake-up. One waiter.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    raised: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Signal {
    /// There is something to do.
    pub(crate) fn raise(&self) {
        self.raised.set(true);
        if let Some(waker) = self.waker.borrow_mut().take() {
            waker.wake();
        }
    }

    /// Resolves when raised since the last wait.
    pub(crate) async fn wait(&self) {
        poll_fn(|context| {
            if self.raised.replace(false) {
                return Poll::Ready(());
            }
            *self.waker.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
