//! Latencies: recorders a thread owns and hands in at the end, and the pace of an open loop.
//!
//! Invariants
//! - A recorder is shared by nobody while it records; merging happens once.
//! - In an open loop a latency counts from the moment the call was **meant** to start: a stalled engine
//!   cannot make its own figures better by delaying the calls that would have met the stall.
//! - Values above the highest trackable one are recorded as that one, never lost.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;

/// Ten minutes: longer than any run waits.
const HIGHEST_US: u64 = 600_000_000;

/// One kind of latency, in microseconds, three digits.
#[derive(Clone, Debug)]
pub struct Recorder(Histogram<u64>);

impl Default for Recorder {
    fn default() -> Self {
        Self(match Histogram::new_with_bounds(1, HIGHEST_US, 3) {
            Ok(histogram) => histogram,
            Err(error) => unreachable!("the bounds are constants and right: {error}"),
        })
    }
}

impl Recorder {
    /// Records `count` messages that took so long.
    pub fn record_us(&mut self, us: u64, count: u64) {
        self.0.saturating_record_n(us.clamp(1, HIGHEST_US), count);
    }

    /// Adds another thread's.
    pub fn merge(&mut self, other: &Self) {
        // Same bounds everywhere, so it cannot fail.
        let _ = self.0.add(&other.0);
    }

    /// What an engine's shard has recorded between two moments.
    #[must_use]
    pub fn between(mut now: Histogram<u64>, then: Option<&Histogram<u64>>) -> Self {
        if let Some(then) = then {
            // Of the same histogram, earlier: it cannot fail.
            let _ = now.subtract(then);
        }
        let mut recorder = Self::default();
        let _ = recorder.0.add(&now);
        recorder
    }

    /// The figures, or `None` where nothing was recorded.
    #[must_use]
    pub fn percentiles(&self) -> Option<Percentiles> {
        if self.0.is_empty() {
            return None;
        }
        let at = |quantile| self.0.value_at_quantile(quantile) as f64 / 1000.0;
        Some(Percentiles { p50: at(0.5), p99: at(0.99), p999: at(0.999), max: self.0.max() as f64 / 1000.0 })
    }
}

/// What is printed of a recorder, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)] // The names say it.
pub struct Percentiles {
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

/// When a caller's calls are meant to start.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    start: Instant,
    /// `None`: at once, whenever the last one has ended.
    interval: Option<Duration>,
    next: u32,
}

impl Pace {
    /// Caller `index` of `callers`, together `calls_per_second`; callers start evenly spread over the interval.
    #[must_use]
    pub fn new(start: Instant, calls_per_second: Option<f64>, index: usize, callers: usize) -> Self {
        let interval = calls_per_second.map(|rate| Duration::from_secs_f64(callers as f64 / rate));
        let offset = interval.map_or(Duration::ZERO, |interval| interval.mul_f64(index as f64 / callers as f64));
        Self { start: start + offset, interval, next: 0 }
    }

    /// When the next call is meant to start, given the time now: in a closed loop that is now.
    pub fn next(&mut self, now: Instant) -> Instant {
        let Some(interval) = self.interval else { return now };
        let intended = self.start + interval.mul_f64(f64::from(self.next));
        self.next += 1;
        intended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_loop_does_not_forget_the_calls_it_is_late_for() {
        let start = Instant::now();
        let mut pace = Pace::new(start, Some(100.0), 0, 1);
        let late = start + Duration::from_secs(1);
        let intended: Vec<_> = (0..3).map(|_| (pace.next(late) - start).as_millis()).collect();
        assert_eq!(intended, [0, 10, 20]);
    }

    #[test]
    fn callers_share_a_rate_and_start_spread_out() {
        let start = Instant::now();
        let second: Vec<_> = (0..4).map(|index| Pace::new(start, Some(8.0), index, 4).next(start) - start).collect();
        assert_eq!(second, [0, 125, 250, 375].map(Duration::from_millis));
    }

    #[test]
    fn percentiles_are_in_milliseconds_and_merge() {
        let (mut one, mut other) = (Recorder::default(), Recorder::default());
        one.record_us(1_000, 99);
        other.record_us(50_000, 1);
        one.merge(&other);
        let figures = one.percentiles().unwrap();
        assert!((figures.p50 - 1.0).abs() < 0.01 && (figures.max - 50.0).abs() < 0.1, "{figures:?}");
        assert!(Recorder::default().percentiles().is_none());
    }

    #[test]
    fn what_a_shard_recorded_before_the_clock_started_does_not_count() {
        let shard = corelane::metrics::Durations::default();
        shard.record_us(90_000);
        let then = shard.copy();
        shard.record_us(2_000);
        let figures = Recorder::between(shard.copy(), Some(&then)).percentiles().unwrap();
        assert!((figures.max - 2.0).abs() < 0.01, "{figures:?}");
        assert!(Recorder::between(then.clone(), Some(&then)).percentiles().is_none());
    }
}
