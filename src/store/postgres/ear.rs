//! What the lease keeper's connections have heard and nobody has looked at yet: some flags, however much is said.
//!
//! Invariants
//! - A word of another is remembered until somebody looks; own words are not, but for the one that proves the listener.
//! - The end of the connection that holds the session lock, and that of the one that listens, are different things.

use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use futures_util::task::AtomicWaker;

use crate::seam::store::Heard;
use crate::store::connect::OnNotification;

/// One keeper's ear.
#[derive(Clone, Default)]
pub struct Ear(Rc<State>);

#[derive(Default)]
struct State {
    heard: Cell<Heard>,
    /// Whose own words these are not.
    own: Cell<i32>,
    /// The last word said to itself, and the last that came back.
    said: Cell<i64>,
    proved: Cell<i64>,
    /// The connection that listens has ended.
    lost: Cell<bool>,
    waker: AtomicWaker,
    listener_waker: AtomicWaker,
}

impl Ear {
    /// For the connection that listens.
    #[must_use]
    pub fn on_notification(&self) -> OnNotification {
        let ear = self.0.clone();
        Rc::new(move |said| {
            let Some(said) = said else {
                ear.lost.set(true);
                return ear.listener_waker.wake();
            };
            if let Some(word) = said.strip_prefix("self:") {
                ear.proved.set(word.parse().unwrap_or_default());
                return ear.listener_waker.wake();
            }
            let mut heard = ear.heard.get();
            match said.strip_prefix("work:") {
                Some(who) if who.parse() == Ok(ear.own.get()) => return,
                Some(_) => heard.work = true,
                // What a newer version says is worth a look too.
                None => heard.members = true,
            }
            ear.heard.set(heard);
            ear.waker.wake();
        })
    }

    /// For the connection that holds the session lock: its end.
    #[must_use]
    pub fn on_end(&self) -> OnNotification {
        let ear = self.0.clone();
        Rc::new(move |said| {
            if said.is_none() {
                ear.heard.set(Heard { lost: true, ..ear.heard.get() });
                ear.waker.wake();
            }
        })
    }

    pub(super) fn is_of(&self, number: i32) {
        self.0.own.set(number);
    }

    /// A new connection is to listen: what became of the one before is no news any more.
    pub(super) fn begins(&self) {
        self.0.lost.set(false);
    }

    /// Whatever was said before was not heard.
    pub(super) fn missed_everything(&self) {
        self.0.heard.set(Heard { members: true, work: true, ..self.0.heard.get() });
        self.0.waker.wake();
    }

    /// A word to say to itself; none is said twice.
    pub(super) fn next_word(&self) -> i64 {
        self.0.said.set(self.0.said.get() + 1);
        self.0.said.get()
    }

    /// Resolves when the word has come back, or cannot any more; answers which.
    pub(super) async fn has_heard(&self, word: i64) -> bool {
        poll_fn(|context| {
            self.0.listener_waker.register(context.waker());
            match (self.0.proved.get() == word, self.0.lost.get()) {
                (true, _) => Poll::Ready(true),
                (false, true) => Poll::Ready(false),
                (false, false) => Poll::Pending,
            }
        })
        .await
    }

    /// Resolves when the connection that listens has ended.
    pub(super) async fn lost(&self) {
        poll_fn(|context| {
            self.0.listener_waker.register(context.waker());
            if self.0.lost.get() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    pub(super) async fn heard(&self) -> Heard {
        poll_fn(|context| {
            self.0.waker.register(context.waker());
            let heard = self.0.heard.take();
            if heard == Heard::default() { Poll::Pending } else { Poll::Ready(heard) }
        })
        .await
    }
}
