//! The tasks of one shard thread, alike on every executor: panics stay in their task, and all tasks end
//! before the executor does.
//!
//! Executors differ in what they do with tasks that are left over: tokio drops them with its local set,
//! glommio forgets sleeping ones with everything they own, sockets included. So neither is asked: every task
//! is wrapped, and when the thread's main future has ended each wrapper drops its task.
//!
//! Invariants
//! - A panic in a task (or in the destructor of what it owns) is caught, logged and counted, and ends that
//!   task only.
//! - [`Tasks::end`] resolves when no task's state is left.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::metrics::ShardMetrics;

/// The tasks of one thread.
#[derive(Clone, Debug)]
pub(super) struct Tasks(Rc<Inner>);

#[derive(Debug)]
struct Inner {
    metrics: Arc<ShardMetrics>,
    ending: Cell<bool>,
    /// One slot a task that lives, reused: its waker, once it has been polled.
    slots: RefCell<Vec<Slot>>,
    /// Slots in use.
    live: Cell<usize>,
    /// How often a task has been polled; it wraps.
    polls: Cell<u64>,
    /// Who waits for the last task to end.
    last: RefCell<Option<Waker>>,
}

#[derive(Debug)]
enum Slot {
    Free,
    Live(Option<Waker>),
}

impl Tasks {
    pub(super) fn new(metrics: Arc<ShardMetrics>) -> Self {
        Self(Rc::new(Inner {
            metrics,
            ending: Cell::new(false),
            slots: RefCell::default(),
            live: Cell::new(0),
            polls: Cell::new(0),
            last: RefCell::default(),
        }))
    }

    /// The task as the executor is to run it.
    pub(super) fn supervise(&self, task: impl Future<Output = ()> + 'static) -> impl Future<Output = ()> + 'static {
        let place = Place::take(self.clone());
        async move {
            // Boxed so that it can be dropped inside the catch, and early.
            let mut task = Some(Box::pin(task));
            std::future::poll_fn(|context| {
                place.tasks.count_poll();
                if !place.tasks.0.ending.get() {
                    place.remember(context);
                    let Some(running) = task.as_mut() else { return Poll::Ready(()) };
                    match catch_unwind(AssertUnwindSafe(|| running.as_mut().poll(context))) {
                        Ok(Poll::Pending) if !place.tasks.0.ending.get() => return Poll::Pending,
                        Ok(_) => {}
                        Err(panic) => place.tasks.count_panic(&*panic),
                    }
                }
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(task.take()))) {
                    place.tasks.count_panic(&*panic);
                }
                Poll::Ready(())
            })
            .await;
        }
    }

    /// Runs the thread's main future, then ends all tasks. A panic of the main future comes back after that.
    pub(super) async fn run_main<T>(&self, main: impl Future<Output = T>) -> std::thread::Result<T> {
        let result = {
            let mut main = pin!(main);
            std::future::poll_fn(|context| {
                self.count_poll();
                match catch_unwind(AssertUnwindSafe(|| main.as_mut().poll(context))) {
                    Ok(Poll::Pending) => Poll::Pending,
                    Ok(Poll::Ready(value)) => Poll::Ready(Ok(value)),
                    Err(panic) => {
                        self.count_panic(&*panic);
                        Poll::Ready(Err(panic))
                    }
                }
            })
            .await
        };
        self.end().await;
        result
    }

    /// Ends every task, also those that are spawned meanwhile.
    async fn end(&self) {
        self.0.ending.set(true);
        let wakers: Vec<Waker> = self.0.slots.borrow_mut().iter_mut().filter_map(Slot::take_waker).collect();
        wakers.into_iter().for_each(Waker::wake);
        std::future::poll_fn(|context| {
            if self.0.live.get() == 0 {
                return Poll::Ready(());
            }
            *self.0.last.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// How often a task has been polled: equal numbers mean that none has.
    #[cfg(all(feature = "glommio", target_os = "linux"))]
    pub(super) fn polls(&self) -> u64 {
        self.0.polls.get()
    }

    fn count_poll(&self) {
        self.0.polls.set(self.0.polls.get().wrapping_add(1));
    }

    fn count_panic(&self, panic: &(dyn std::any::Any + Send)) {
        self.0.metrics.task_panics.add(1);
        tracing::error!(panic = panic_text(panic), "a task of a shard panicked and has ended; the others go on");
    }
}

/// A panic's words, if it has any.
pub(super) fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&'static str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(not a text)")
}

/// Lets the other tasks of the thread run once.
pub(super) async fn yield_once() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

impl Slot {
    fn take_waker(&mut self) -> Option<Waker> {
        match self {
            Self::Free => None,
            Self::Live(waker) => waker.take(),
        }
    }
}

/// A task's slot, given back when the wrapper goes, however it goes.
struct Place {
    tasks: Tasks,
    index: usize,
}

impl Place {
    fn take(tasks: Tasks) -> Self {
        let index = {
            let mut slots = tasks.0.slots.borrow_mut();
            // Tasks are few and long-lived: a search costs nothing.
            match slots.iter().position(|slot| matches!(slot, Slot::Free)) {
                Some(index) => {
                    slots[index] = Slot::Live(None);
                    index
                }
                None => {
                    slots.push(Slot::Live(None));
                    slots.len() - 1
                }
            }
        };
        tasks.0.live.set(tasks.0.live.get() + 1);
        Self { tasks, index }
    }

    fn remember(&self, context: &Context<'_>) {
        let mut slots = self.tasks.0.slots.borrow_mut();
        match &slots[self.index] {
            Slot::Live(Some(waker)) if waker.will_wake(context.waker()) => {}
            _ => slots[self.index] = Slot::Live(Some(context.waker().clone())),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let slot = std::mem::replace(&mut self.tasks.0.slots.borrow_mut()[self.index], Slot::Free);
        drop(slot);
        self.tasks.0.live.set(self.tasks.0.live.get() - 1);
        if self.tasks.0.live.get() == 0
            && let Some(waker) = self.tasks.0.last.borrow_mut().take()
        {
            waker.wake();
        }
    }
}
