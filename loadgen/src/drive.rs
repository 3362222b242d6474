//! Callers in a loop, closed or at a pace, and the measurement around them: the same for every subject.
//!
//! Invariants
//! - A caller has one call under way; the next starts after its answer (closed loop) or at its own time
//!   (open loop), late calls at once and with their intended start.
//! - The measurement ends when everything stored in it has been published: no subject can leave work behind.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::failure::{Failure, Result};
use crate::figures::Figures;
use crate::latency::{Pace, Recorder};
use crate::measure::{Meter, charge};
use crate::progress::{Tally, Watch};
use crate::scenario::{Rate, Scenario, Until};

/// Somebody who stores one batch after the other.
pub trait Caller: Send + 'static {
    /// Stores one batch that was meant to start at `intended`, and waits for its acknowledgement. Answers
    /// how many messages were stored; 0 when the subject was full and the call is to be repeated.
    fn call(&mut self, intended: Instant) -> impl Future<Output = Result<u64>> + Send;
}

/// How callers are to be driven.
#[derive(Clone, Copy, Debug)]
pub struct Course {
    /// Calls a second over all callers; as fast as answers come without it.
    pub calls_per_second: Option<f64>,
    /// When to stop.
    pub until: Until,
    /// Messages of a call.
    pub batch: usize,
}

impl Course {
    /// The course of a scenario's measured part.
    #[must_use]
    pub fn of(scenario: &Scenario) -> Self {
        let calls_per_second = match scenario.rate {
            Rate::PerSecond(rate) => Some(rate / scenario.batch as f64),
            Rate::Top | Rate::ShareOfTop(_) => None,
        };
        Self { calls_per_second, until: scenario.until, batch: scenario.batch }
    }

    /// The same for another time.
    #[must_use]
    pub fn lasting(self, duration: Duration) -> Self {
        Self { until: Until::Elapsed(duration), ..self }
    }

    /// How long it should take, where that is known.
    #[must_use]
    pub fn expected(&self) -> Option<Duration> {
        match (self.until, self.calls_per_second) {
            (Until::Elapsed(duration), _) => Some(duration),
            (Until::Count(count), Some(rate)) => Some(Duration::from_secs_f64(count as f64 / self.batch as f64 / rate)),
            (Until::Count(_), None) => None,
        }
    }
}

/// Drives callers to the end of a course. Gives them back, with the latencies of their calls by message.
///
/// # Errors
/// The first failure of a caller; the others end with their next call.
pub async fn drive<C: Caller>(callers: Vec<C>, course: Course, tally: &Arc<Tally>) -> Result<(Vec<C>, Recorder)> {
    let start = Instant::now();
    let calls_left = Arc::new(AtomicU64::new(match course.until {
        Until::Count(count) => count.div_ceil(course.batch as u64),
        Until::Elapsed(_) => u64::MAX,
    }));
    let end = match course.until {
        Until::Elapsed(duration) => Some(start + duration),
        Until::Count(_) => None,
    };
    let count = callers.len();
    let mut tasks = Vec::with_capacity(count);
    for (index, mut caller) in callers.into_iter().enumerate() {
        let (tally, calls_left) = (tally.clone(), calls_left.clone());
        let mut pace = Pace::new(start, course.calls_per_second, index, count);
        tasks.push(tokio::spawn(async move {
            let mut recorder = Recorder::default();
            loop {
                let now = Instant::now();
                let intended = pace.next(now);
                if end.is_some_and(|end| intended.max(now) >= end) || !take_one(&calls_left) {
                    return Ok((caller, recorder));
                }
                if intended > now {
                    tokio::time::sleep_until(intended.into()).await;
                }
                let outcome = repeat_while_full(&mut caller, intended, end).await;
                let stored = match outcome {
                    Ok(stored) => stored,
                    Err(failure) => {
                        calls_left.store(0, Ordering::Relaxed);
                        return Err(failure);
                    }
                };
                if stored > 0 {
                    recorder.record_us(intended.elapsed().as_micros() as u64, stored);
                    tally.stored.fetch_add(stored, Ordering::Relaxed);
                }
            }
        }));
    }
    let mut back = Vec::with_capacity(count);
    let mut all = Recorder::default();
    let mut failure = None;
    for task in tasks {
        match task.await {
            Ok(Ok((caller, recorder))) => {
                all.merge(&recorder);
                back.push(caller);
            }
            Ok(Err(error)) => failure = failure.or(Some(error)),
            Err(panic) => failure = failure.or(Some(Failure::Broken(format!("a caller ended in a panic: {panic}")))),
        }
    }
    failure.map_or(Ok((back, all)), Err)
}

fn take_one(calls_left: &AtomicU64) -> bool {
    calls_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

/// A full subject is asked again a millisecond later; the latency goes on from the intended start.
async fn repeat_while_full<C: Caller>(caller: &mut C, intended: Instant, end: Option<Instant>) -> Result<u64> {
    loop {
        let stored = caller.call(intended).await?;
        if stored > 0 || end.is_some_and(|end| Instant::now() >= end) {
            return Ok(stored);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Waits until everything stored has been published.
///
/// # Errors
/// [`Failure::TimedOut`] if nothing moves for `patience`; what has not come by then is for the checks to judge.
pub async fn quiet(tally: &Tally, patience: Duration) -> Result<()> {
    let mut last = (tally.published(), Instant::now());
    while tally.published() < tally.stored() {
        tokio::time::sleep(Duration::from_millis(2)).await;
        let published = tally.published();
        if published != last.0 {
            last = (published, Instant::now());
        } else if last.1.elapsed() > patience {
            return Err(Failure::TimedOut(format!(
                "{} of {} stored messages were published, and nothing has moved for {patience:?}",
                published,
                tally.stored()
            )));
        }
    }
    Ok(())
}

/// Measures callers: a warm-up, silence, the course, silence. Fills in what every subject has in common.
///
/// # Errors
/// Of the callers and the server. Messages that never come are no error here: `checks` count them.
pub async fn measured<C: Caller>(
    callers: Vec<C>,
    scenario: &Scenario,
    meter: &Meter,
    tally: &Arc<Tally>,
    title: &str,
    before_measuring: impl AsyncFnOnce() -> Result<()>,
) -> Result<Figures> {
    const PATIENCE: Duration = Duration::from_secs(15);
    let course = Course::of(scenario);
    let callers = if scenario.warm_up.is_zero() {
        callers
    } else {
        let (callers, _) = drive(callers, course.lasting(scenario.warm_up), tally).await?;
        quiet(tally, PATIENCE).await?;
        callers
    };
    before_measuring().await?;
    let stored_before = tally.stored();
    let watch = Watch::start(title.to_owned(), tally.clone(), meter.server(), course.expected());
    let from = meter.read().await?;
    let (_, store) = drive(callers, course, tally).await?;
    let silence = quiet(tally, PATIENCE).await;
    let to = meter.read().await?;
    if let Err(failure) = silence {
        tracing::warn!("{failure}");
    }
    let mut figures = Figures { batch: scenario.batch, windows: watch.stop().await, ..Figures::default() };
    charge(&mut figures, &from, &to, tally.stored() - stored_before);
    figures.latency_ms.store = store.percentiles();
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Counting(Arc<AtomicU64>);

    impl Caller for Counting {
        async fn call(&mut self, _: Instant) -> Result<u64> {
            self.0.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
            Ok(10)
        }
    }

    #[tokio::test]
    async fn a_count_is_met_exactly_whatever_the_number_of_callers() {
        let calls = Arc::new(AtomicU64::new(0));
        let callers: Vec<_> = (0..3).map(|_| Counting(calls.clone())).collect();
        let tally = Arc::new(Tally::default());
        let course = Course { calls_per_second: None, until: Until::Count(95), batch: 10 };
        let (callers, _) = drive(callers, course, &tally).await.unwrap();
        assert_eq!((calls.load(Ordering::Relaxed), tally.stored(), callers.len()), (10, 100, 3));
    }

    #[tokio::test]
    async fn a_pace_is_kept() {
        let calls = Arc::new(AtomicU64::new(0));
        let callers: Vec<_> = (0..4).map(|_| Counting(calls.clone())).collect();
        let tally = Arc::new(Tally::default());
        let course =
            Course { calls_per_second: Some(200.0), until: Until::Elapsed(Duration::from_millis(500)), batch: 10 };
        drive(callers, course, &tally).await.unwrap();
        let made = calls.load(Ordering::Relaxed);
        assert!((90..=104).contains(&made), "200 a second for half a second are 100 calls: {made}");
    }
}
