//! The keeper's other half: it keeps the listener proved, and says what is believed of it.
//!
//! Invariants
//! - The listener has a connection of its own: one that is deaf is connected again without the session lock being let
//!   go for a moment.
//! - Shards are told of every change: they poll at the base interval for as long as it is not healthy.
//! - A test waits for nothing but its own word, at most `listen.test_timeout_ms`; no renewal waits for a test.
//!
//! Cost when idle: a statement every `listen.test_interval_ms`.

use std::pin::pin;
use std::sync::{Mutex, PoisonError};

use futures_util::future::{Either, select};

use super::Control;
use super::tend::Keeper;
use crate::metrics::ListenerMetrics;
use crate::plan::listener::{Belief, Course, TestTimes};
use crate::seam::runtime::Runtime;
use crate::seam::store::{Coordination, StoreError};

/// What is believed of the listener; written by the keeper, read by anybody.
#[derive(Debug)]
pub struct Listener {
    /// By what it is tested.
    pub times: TestTimes,
    /// Its figures.
    pub metrics: ListenerMetrics,
    belief: Mutex<Belief>,
}

impl Listener {
    /// One that nobody has tested yet.
    #[must_use]
    pub fn new(times: TestTimes) -> Self {
        Self { times, metrics: ListenerMetrics::default(), belief: Mutex::default() }
    }

    /// What is believed now.
    #[must_use]
    pub fn belief(&self) -> Belief {
        self.belief.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn believe(&self, belief: Belief) {
        let number = match belief {
            Belief::Off => 0,
            Belief::Unproved => 1,
            Belief::Healthy => 2,
            Belief::Deaf { .. } => 3,
        };
        self.metrics.health_now.set(number);
        *self.belief.lock().unwrap_or_else(PoisonError::into_inner) = belief;
    }
}

impl<R: Runtime, C: Coordination, F: Fn(u16, Control)> Keeper<R, C, F> {
    /// Never ends.
    pub(super) async fn listen(&self) {
        if !self.owns {
            // Nothing that is said concerns one that owns nothing.
            return std::future::pending().await;
        }
        let mut course = Course::new(self.listener.times);
        self.listener.believe(course.belief().clone());
        loop {
            let outcome = match self.within_limit(self.coordination.listen()).await {
                Ok(false) => {
                    self.listener.believe(Belief::Off);
                    return std::future::pending().await;
                }
                Ok(true) => {
                    self.listener.metrics.tests.add(1);
                    let limit_ms = self.listener.times.limit_ms;
                    let test = pin!(self.coordination.test_listener());
                    let limit = pin!(self.runtime.sleep_until(self.runtime.now().plus_ms(limit_ms)));
                    match select(test, limit).await {
                        Either::Left((heard, _)) => heard,
                        Either::Right(_) => {
                            let what = format!("its own word was not heard within {limit_ms} ms");
                            Err(StoreError::ConnectionLost(what))
                        }
                    }
                }
                Err(error) => Err(error),
            };
            let was_healthy = *course.belief() == Belief::Healthy;
            match outcome {
                Ok(()) => {
                    let next = course.proved(self.runtime.now());
                    self.listener.believe(course.belief().clone());
                    if !was_healthy {
                        tracing::info!("the listener hears: polls are relaxed");
                        self.tell_all(|| Control::Listening(true));
                    }
                    if !self.hears_until(next).await {
                        self.deaf(&mut course, "its connection has ended".to_owned()).await;
                    }
                }
                // The keeper stands down by itself.
                Err(error @ StoreError::SchemaChanged { .. }) => {
                    self.lease.stand_down(&error);
                    return std::future::pending().await;
                }
                Err(error) => self.deaf(&mut course, error.to_string()).await,
            }
        }
    }

    /// Whether the connection was there until then.
    async fn hears_until(&self, next: crate::time::Tick) -> bool {
        let lost = pin!(self.coordination.listener_lost());
        matches!(select(lost, pin!(self.runtime.sleep_until(next))).await, Either::Right(_))
    }

    /// It has not proved itself: says so, and waits until it is connected again.
    async fn deaf(&self, course: &mut Course, reason: String) {
        let was_healthy = *course.belief() == Belief::Healthy;
        self.listener.metrics.tests_failed.add(1);
        tracing::warn!(%reason, "the listener is deaf: shards poll until it hears again");
        let again = course.failed(reason, self.runtime.now());
        self.listener.believe(course.belief().clone());
        if was_healthy {
            self.tell_all(|| Control::Listening(false));
        }
        self.runtime.sleep_until(again).await;
    }
}
