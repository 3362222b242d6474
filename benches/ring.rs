//! The way into a shard beside the queues it was chosen over: values a second, and how long a value travels.
//!
//! `cargo bench --bench ring [-- seconds]`. Producers are threads, the consumer is a tokio current-thread
//! runtime on a pinned thread, as a shard is. "full speed": producers push as fast as there is room, and give
//! way when there is none. "one at a time": the next value goes when the last has arrived, so every value finds
//! the consumer asleep. Percentiles are of the time from push to pop.

#![allow(clippy::unwrap_used)] // A benchmark that cannot go on ends.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use corelane::runtime::affinity;
use corelane::runtime::ring::Ring;
use hdrhistogram::Histogram;

const CAPACITY: usize = 1024;

/// What travels: as large as a shard's arrival is.
struct Value {
    sent: Instant,
    _payload: [u64; 4],
}

impl Value {
    fn now() -> Self {
        Self { sent: Instant::now(), _payload: [0; 4] }
    }
}

type Push = Box<dyn Fn(Value) -> Result<(), Value> + Send>;

struct Measured {
    histogram: Histogram<u64>,
    wakes: u64,
    elapsed: Duration,
}

/// Runs the producers until the time is over, and the consumer until they are done and the queue is empty.
fn measure<C, F>(pushes: Vec<Push>, seconds: f64, one_at_a_time: bool, consume: C) -> Measured
where
    C: FnOnce(Consumer) -> F + Send + 'static,
    F: Future<Output = Consumer> + 'static,
{
    let arrived = Arc::new(AtomicU64::new(0));
    let sent = Arc::new(AtomicU64::new(0));
    let producing = Arc::new(AtomicBool::new(true));
    let consumer = Consumer {
        histogram: Histogram::new_with_bounds(1, 60_000_000_000, 3).unwrap(),
        wakes: 0,
        arrived: Arc::clone(&arrived),
        sent: Arc::clone(&sent),
        producing: Arc::clone(&producing),
    };
    let start = Instant::now();
    let consuming = std::thread::spawn(move || {
        // As a shard is; where it cannot be, the figures are of an unpinned one.
        if let Some(core) = affinity::usable_cores().last() {
            let _ = affinity::pin_current_thread(*core);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(consume(consumer))
    });
    let end = start + Duration::from_secs_f64(seconds);
    let producers: Vec<_> = pushes
        .into_iter()
        .map(|push| {
            let (arrived, sent) = (Arc::clone(&arrived), Arc::clone(&sent));
            std::thread::spawn(move || {
                while Instant::now() < end {
                    let next = sent.fetch_add(1, Ordering::AcqRel) + 1;
                    let mut value = Value::now();
                    while let Err(back) = push(value) {
                        value = back;
                        std::thread::yield_now();
                    }
                    // Long enough for the consumer to have gone to sleep again.
                    while one_at_a_time && arrived.load(Ordering::Acquire) < next {
                        std::thread::sleep(Duration::from_micros(100));
                    }
                }
                push
            })
        })
        .collect();
    let mut pushes: Vec<Push> = producers.into_iter().map(|producer| producer.join().unwrap()).collect();
    producing.store(false, Ordering::Release);
    // A last value wakes the consumer, should it sleep.
    sent.fetch_add(1, Ordering::AcqRel);
    let push = pushes.pop().unwrap();
    while push(Value::now()).is_err() {
        std::thread::yield_now();
    }
    let consumer = consuming.join().unwrap();
    Measured { histogram: consumer.histogram, wakes: consumer.wakes, elapsed: start.elapsed() }
}

struct Consumer {
    histogram: Histogram<u64>,
    wakes: u64,
    arrived: Arc<AtomicU64>,
    sent: Arc<AtomicU64>,
    producing: Arc<AtomicBool>,
}

impl Consumer {
    fn take(&mut self, value: &Value) {
        let nanoseconds = u64::try_from(value.sent.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.histogram.saturating_record(nanoseconds);
        self.arrived.fetch_add(1, Ordering::AcqRel);
    }

    fn is_done(&self) -> bool {
        !self.producing.load(Ordering::Acquire)
            && self.arrived.load(Ordering::Acquire) == self.sent.load(Ordering::Acquire)
    }
}

fn ring(producers: usize, seconds: f64, one_at_a_time: bool) -> Measured {
    let (sender, receiver) = Ring::new(CAPACITY);
    let pushes = (0..producers)
        .map(|_| {
            let sender = sender.clone();
            Box::new(move |value| sender.push(value)) as Push
        })
        .collect();
    measure(pushes, seconds, one_at_a_time, move |mut consumer| async move {
        while !consumer.is_done() {
            receiver.wait().await;
            consumer.wakes += 1;
            while let Some(value) = receiver.pop() {
                consumer.take(&value);
            }
        }
        consumer
    })
}

fn flume(producers: usize, seconds: f64, one_at_a_time: bool) -> Measured {
    let (sender, receiver) = flume::bounded(CAPACITY);
    let pushes = (0..producers)
        .map(|_| {
            let sender = sender.clone();
            Box::new(move |value| sender.try_send(value).map_err(flume::TrySendError::into_inner)) as Push
        })
        .collect();
    measure(pushes, seconds, one_at_a_time, move |mut consumer| async move {
        while !consumer.is_done() {
            let Ok(first) = receiver.recv_async().await else { break };
            consumer.wakes += 1;
            consumer.take(&first);
            while let Ok(value) = receiver.try_recv() {
                consumer.take(&value);
            }
        }
        consumer
    })
}

fn tokio_mpsc(producers: usize, seconds: f64, one_at_a_time: bool) -> Measured {
    let (sender, mut receiver) = tokio::sync::mpsc::channel(CAPACITY);
    let pushes = (0..producers)
        .map(|_| {
            let sender = sender.clone();
            Box::new(move |value| sender.try_send(value).map_err(tokio::sync::mpsc::error::TrySendError::into_inner))
                as Push
        })
        .collect();
    measure(pushes, seconds, one_at_a_time, move |mut consumer| async move {
        let mut values = Vec::with_capacity(CAPACITY);
        while !consumer.is_done() {
            receiver.recv_many(&mut values, CAPACITY).await;
            consumer.wakes += 1;
            for value in values.drain(..) {
                consumer.take(&value);
            }
        }
        consumer
    })
}

fn main() {
    // `cargo bench` passes `--bench`.
    let seconds = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(1.0);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("capacity {CAPACITY}, {seconds} s each, {cores} cores; percentiles in microseconds");
    println!(
        "{:<14}{:<16}{:>10}{:>14}{:>12}{:>10}{:>10}{:>10}",
        "queue", "load", "producers", "values/s", "per wake", "p50", "p99", "p99.9"
    );
    for (load, one_at_a_time, producers) in
        [("full speed", false, 1), ("full speed", false, 3), ("one at a time", true, 1)]
    {
        type Run = fn(usize, f64, bool) -> Measured;
        for (name, run) in [("ring", ring as Run), ("flume", flume as Run), ("tokio mpsc", tokio_mpsc as Run)] {
            let measured = run(producers, seconds, one_at_a_time);
            let count = measured.histogram.len() as f64;
            let at = |quantile| measured.histogram.value_at_quantile(quantile) as f64 / 1e3;
            println!(
                "{name:<14}{load:<16}{producers:>10}{:>14.0}{:>12.1}{:>10.1}{:>10.1}{:>10.1}",
                count / measured.elapsed.as_secs_f64(),
                count / measured.wakes.max(1) as f64,
                at(0.5),
                at(0.99),
                at(0.999),
            );
        }
    }
}
