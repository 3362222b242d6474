//! Lanes beside the obvious: a hash map of queues, one a stream. Nanoseconds a message, from admission to release.
//!
//! `cargo bench --bench lanes [-- seconds]`. A cycle admits a batch of 1,000 messages over so many streams, takes
//! runs of up to 100 heads until nothing is ready, and acknowledges each run before the next. Percentiles are of
//! cycles. The other side keeps the same promise (one message of a stream in flight), with the standard library's
//! map and the stream's id as the handle of everything.

#![allow(clippy::unwrap_used)] // A benchmark that cannot go on ends.

use std::collections::{HashMap, VecDeque};
use std::hint::black_box;
use std::time::{Duration, Instant};

use corelane::batch::DestinationId;
use corelane::plan::lanes::{Admission, Lanes, SlotIndex, Source};
use corelane::plan::ledger::TransactionIndex;
use corelane::runtime::sim::Random;
use hdrhistogram::Histogram;
use uuid::Uuid;

const BATCH: usize = 1_000;
const RUN: usize = 100;

/// Something that keeps the messages of a stream in order.
trait Order {
    fn admit(&mut self, stream: Uuid, seq: i64, reference: u32);
    /// Takes a run and acknowledges it; how many messages it had.
    fn run(&mut self) -> usize;
}

struct Ours {
    lanes: Lanes,
    destination: DestinationId,
    out: Vec<SlotIndex>,
}

impl Order for Ours {
    fn admit(&mut self, stream: Uuid, seq: i64, reference: u32) {
        let source = Source { batch: 0, reference, transaction: TransactionIndex::NONE };
        let admission = Admission {
            lane_id: stream,
            destination: self.destination,
            partition: 0,
            stream_seq: seq,
            single: false,
            source,
        };
        black_box(self.lanes.admit(&admission));
    }

    fn run(&mut self) -> usize {
        let Self { lanes, destination, out } = self;
        out.clear();
        lanes.take(*destination, RUN, 1, |slot, source| {
            black_box(source);
            out.push(slot);
        });
        for slot in out.iter() {
            let lane = lanes.lane_of(*slot);
            black_box(lanes.acknowledge(*slot));
            lanes.release(lane);
        }
        out.len()
    }
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<(i64, u32)>,
    last_seq: i64,
    is_ready: bool,
}

/// A map of queues and a queue of streams that are ready.
#[derive(Default)]
struct Obvious {
    queues: HashMap<Uuid, Queue>,
    ready: VecDeque<Uuid>,
    out: Vec<Uuid>,
}

impl Order for Obvious {
    fn admit(&mut self, stream: Uuid, seq: i64, reference: u32) {
        let queue = self.queues.entry(stream).or_default();
        if seq <= queue.last_seq {
            return;
        }
        queue.last_seq = seq;
        queue.waiting.push_back((seq, reference));
        if !queue.is_ready {
            queue.is_ready = true;
            self.ready.push_back(stream);
        }
    }

    fn run(&mut self) -> usize {
        self.out.clear();
        while self.out.len() < RUN {
            let Some(stream) = self.ready.pop_front() else { break };
            black_box(self.queues[&stream].waiting.front());
            self.out.push(stream);
        }
        for stream in &self.out {
            let queue = self.queues.get_mut(stream).unwrap();
            black_box(queue.waiting.pop_front());
            queue.is_ready = !queue.waiting.is_empty();
            if queue.is_ready {
                self.ready.push_back(*stream);
            }
        }
        self.out.len()
    }
}

/// Cycles for so long; nanoseconds a message of each.
fn measure(order: &mut impl Order, streams: usize, seconds: f64) -> Histogram<u64> {
    let mut random = Random::new(7);
    let ids: Vec<Uuid> = (0..streams).map(|_| Uuid::now_v7()).collect();
    let mut last = vec![0; streams];
    let mut batch = Vec::with_capacity(BATCH);
    let mut histogram = Histogram::new_with_bounds(1, 1_000_000_000, 3).unwrap();
    let warm = Instant::now() + Duration::from_secs_f64(seconds / 4.0);
    let end = warm + Duration::from_secs_f64(seconds);
    loop {
        batch.clear();
        for reference in 0..BATCH as u32 {
            let stream = random.below(streams as u64) as usize;
            last[stream] += 1;
            batch.push((ids[stream], last[stream], reference));
        }
        let start = Instant::now();
        for (stream, seq, reference) in &batch {
            order.admit(*stream, *seq, *reference);
        }
        let mut published = 0;
        loop {
            match order.run() {
                0 => break,
                count => published += count,
            }
        }
        let now = Instant::now();
        assert_eq!(published, BATCH, "every message goes out once");
        if now > warm {
            histogram.record((now - start).as_nanos() as u64 / BATCH as u64).unwrap();
        }
        if now > end {
            return histogram;
        }
    }
}

fn main() {
    let seconds = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(1.0);
    println!("{:<10} {:<8} {:>8} {:>8} {:>8} {:>8}   ns a message", "streams", "", "p50", "p99", "p99.9", "max");
    for streams in [1, 100, 10_000, 100_000] {
        let destination = DestinationId::of("bench").unwrap();
        let mut ours = Ours { lanes: Lanes::with_capacity(BATCH, 200_000), destination, out: Vec::new() };
        let mut obvious = Obvious::default();
        for (name, histogram) in
            [("lanes", measure(&mut ours, streams, seconds)), ("map", measure(&mut obvious, streams, seconds))]
        {
            let at = |quantile| histogram.value_at_quantile(quantile);
            let (p50, p99, p999, max) = (at(0.5), at(0.99), at(0.999), histogram.max());
            println!("{streams:<10} {name:<8} {p50:>8} {p99:>8} {p999:>8} {max:>8}");
        }
    }
}
