//! What a run looks like while it runs, and its figures by the second.
//!
//! Invariants
//! - Samples read counters and /proc only: looking costs the server no statement.
//! - Without a terminal, lines are printed instead of a moving bar, at most one in five seconds.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tokio::task::JoinHandle;

use crate::cpu::{self, ServerCpu};
use crate::figures::Window;

/// Counters that the parts of a load add to.
#[derive(Debug, Default)]
pub struct Tally {
    /// Messages whose store was acknowledged.
    pub stored: AtomicU64,
    /// Messages the transport accepted for the first time (for a baseline: completed).
    pub published: AtomicU64,
}

impl Tally {
    /// Acknowledged so far.
    #[must_use]
    pub fn stored(&self) -> u64 {
        self.stored.load(Ordering::Relaxed)
    }

    /// Published so far.
    #[must_use]
    pub fn published(&self) -> u64 {
        self.published.load(Ordering::Relaxed)
    }
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    published: u64,
    server_cpu_us: Option<u64>,
    client_cpu_us: u64,
}

/// Shows a run and samples it until it is stopped.
#[derive(Debug)]
pub struct Watch {
    task: JoinHandle<Vec<Sample>>,
    stop: tokio::sync::oneshot::Sender<()>,
}

/// The length of a window: the first ten seconds beside the last ten show a trend.
const WINDOW: Duration = Duration::from_secs(10);

impl Watch {
    /// Begins to watch. `expected` is how long it should take, for the bar.
    #[must_use]
    pub fn start(title: String, tally: Arc<Tally>, server: Option<ServerCpu>, expected: Option<Duration>) -> Self {
        let (stop, mut stopped) = tokio::sync::oneshot::channel();
        let task = tokio::spawn(async move {
            let display = Display::new(title, expected);
            let sample = || Sample {
                at: Instant::now(),
                published: tally.published(),
                server_cpu_us: server.and_then(ServerCpu::read_us),
                client_cpu_us: cpu::of_this_process_us(),
            };
            let mut samples = vec![sample()];
            let mut tick = tokio::time::interval(Duration::from_secs(1));
            tick.tick().await;
            loop {
                tokio::select! {
                    _ = tick.tick() => {}
                    _ = &mut stopped => break,
                }
                samples.push(sample());
                display.show(&samples, tally.stored());
            }
            samples.push(sample());
            display.end();
            samples
        });
        Self { task, stop }
    }

    /// Ends it and answers the windows of ten seconds, if there were at least two.
    pub async fn stop(self) -> Vec<Window> {
        let _ = self.stop.send(());
        windows(&self.task.await.unwrap_or_default())
    }
}

fn windows(samples: &[Sample]) -> Vec<Window> {
    let Some(first) = samples.first() else { return Vec::new() };
    let mut found = Vec::new();
    let mut from = *first;
    for sample in samples {
        // Half a tick of tolerance: the timer's ticks are not exact.
        if sample.at.duration_since(from.at) + Duration::from_millis(500) >= WINDOW {
            found.push(window(first.at, &from, sample));
            from = *sample;
        }
    }
    if found.len() < 2 { Vec::new() } else { found }
}

fn window(start: Instant, from: &Sample, to: &Sample) -> Window {
    let messages = to.published - from.published;
    let each = |total: u64| (messages > 0).then(|| total as f64 / messages as f64);
    Window {
        from_s: from.at.duration_since(start).as_secs_f64(),
        to_s: to.at.duration_since(start).as_secs_f64(),
        messages,
        messages_per_second: messages as f64 / to.at.duration_since(from.at).as_secs_f64().max(1e-9),
        server_cpu_us_per_message: from.server_cpu_us.zip(to.server_cpu_us).and_then(|(from, to)| each(to - from)),
        client_cpu_us_per_message: each(to.client_cpu_us - from.client_cpu_us),
    }
}

enum Display {
    Bar(ProgressBar),
    Lines { title: String },
}

impl Display {
    fn new(title: String, expected: Option<Duration>) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self::Lines { title };
        }
        let bar = match expected {
            Some(expected) => ProgressBar::new(expected.as_secs().max(1)),
            None => ProgressBar::new_spinner(),
        };
        if let Ok(style) = ProgressStyle::with_template("{prefix:24} {bar:24} {elapsed} {msg}") {
            bar.set_style(style);
        }
        bar.set_prefix(title);
        Self::Bar(bar)
    }

    fn show(&self, samples: &[Sample], stored: u64) {
        let [.., before, last] = samples else { return };
        let seconds = last.at.duration_since(before.at).as_secs_f64().max(1e-9);
        let rate = (last.published - before.published) as f64 / seconds;
        let behind = stored.saturating_sub(last.published);
        match self {
            Self::Bar(bar) => {
                bar.set_position(samples.len() as u64 - 1);
                bar.set_message(format!("{rate:>9.0}/s  {} published  {behind} on their way", last.published));
            }
            Self::Lines { title } => {
                if (samples.len() - 1).is_multiple_of(5) {
                    let elapsed = last.at.duration_since(samples[0].at).as_secs();
                    eprintln!("{title}: {elapsed} s, {rate:.0}/s, {} published, {behind} on their way", last.published);
                }
            }
        }
    }

    fn end(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_ten_seconds_and_tell_a_trend() {
        let start = Instant::now();
        let samples: Vec<_> = (0..=20)
            .map(|second: u64| Sample {
                at: start + Duration::from_secs(second),
                published: second * 100,
                server_cpu_us: Some(second * second * 100),
                client_cpu_us: second * 50,
            })
            .collect();
        let found = windows(&samples);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].messages, 1000);
        assert_eq!(found[0].server_cpu_us_per_message, Some(10.0));
        assert_eq!(found[1].server_cpu_us_per_message, Some(30.0));
        assert!(windows(&samples[..15]).is_empty(), "one window shows no trend");
    }
}
