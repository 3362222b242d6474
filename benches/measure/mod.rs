//! Percentiles of a piece of work: each sample is many turns, since one is shorter than a look at the clock.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

/// How long each work is measured, after a tenth of it for warming up.
const TIME: Duration = Duration::from_millis(700);

/// Prints the heading.
pub fn heading(what: &str, unit: &str) {
    println!("\n{what}: nanoseconds a {unit}\n{:<52} {:>9} {:>9} {:>9} {:>9}", "", "p50", "p99", "p99.9", "max");
}

/// Runs `work`, which does `count` things, again and again; prints nanoseconds a thing and answers the median.
pub fn measure(name: &str, count: u64, mut work: impl FnMut()) -> f64 {
    let warm_until = Instant::now() + TIME / 10;
    while Instant::now() < warm_until {
        work();
    }
    // Picoseconds, so that a whole-number histogram keeps fractions of a nanosecond.
    // With bounds: one that grows would clamp what it is given to where it stands.
    let Ok(mut histogram) = Histogram::<u64>::new_with_bounds(1, 60_000_000_000_000, 3) else { return f64::NAN };
    let until = Instant::now() + TIME;
    while Instant::now() < until {
        let began = Instant::now();
        work();
        histogram.saturating_record(began.elapsed().as_nanos() as u64 * 1_000 / count);
    }
    let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1_000.0;
    println!("{name:<52} {:>9.1} {:>9.1} {:>9.1} {:>9.1}", at(0.5), at(0.99), at(0.999), at(1.0));
    at(0.5)
}
