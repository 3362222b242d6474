//! What a caller sends: which streams, which bytes.
//!
//! Invariants
//! - Each caller has streams of its own (its index and every `callers`-th after it), so that a baseline
//!   that numbers by MAX + 1 does not collide with itself; the engine would not need it.
//! - A stream's index can be read from its id without a table: the last four bytes of a family.
//! - A payload is built once; each message changes only its counter, in place.

use std::sync::Arc;

use corelane::message::PayloadError;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use uuid::Uuid;

use crate::cli::Distribution;
use crate::scenario::Scenario;

/// Stream ids that belong together: one random prefix, the index in the last four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamFamily {
    prefix: u128,
}

impl StreamFamily {
    /// A family nobody else has.
    #[must_use]
    pub fn random() -> Self {
        Self { prefix: Uuid::new_v4().as_u128() & !0xffff_ffff }
    }

    /// A family known to another process.
    #[must_use]
    pub fn of(id: Uuid) -> Self {
        Self { prefix: id.as_u128() & !0xffff_ffff }
    }

    /// The id of stream `index`.
    #[must_use]
    pub fn stream(self, index: u32) -> Uuid {
        Uuid::from_u128(self.prefix | u128::from(index))
    }

    /// The index of a stream of this family.
    #[must_use]
    pub fn index_of(self, stream_id: Uuid) -> Option<u32> {
        let bits = stream_id.as_u128();
        (bits & !0xffff_ffff == self.prefix).then_some(bits as u32)
    }
}

/// Which stream comes next.
#[derive(Debug)]
pub struct StreamChoice {
    random: StdRng,
    caller: u32,
    callers: u32,
    /// Streams of this caller.
    own: u32,
    /// Zipf: the sum of weights up to each stream of this caller, scaled to 1. Shared by callers of equal `own`.
    cumulative: Option<Arc<[f64]>>,
}

impl StreamChoice {
    /// The choice of one caller.
    #[must_use]
    pub fn new(scenario: &Scenario, caller: usize, seed: u64) -> Self {
        let callers = scenario.callers as u32;
        let caller = caller as u32;
        let own = (scenario.streams - caller).div_ceil(callers);
        let cumulative = (scenario.distribution == Distribution::Zipf).then(|| zipf(own, scenario.zipf_exponent));
        let random = StdRng::seed_from_u64(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ u64::from(caller));
        Self { random, caller, callers, own, cumulative }
    }

    /// The next stream's index.
    pub fn draw(&mut self) -> u32 {
        let place = match &self.cumulative {
            None => self.random.random_range(0..self.own),
            Some(cumulative) => {
                let point: f64 = self.random.random();
                (cumulative.partition_point(|sum| *sum < point) as u32).min(self.own - 1)
            }
        };
        self.caller + place * self.callers
    }
}

/// The streams of one caller, one after the other, with their versions: a batch meets none twice while there are enough.
#[derive(Debug)]
pub struct OwnStreams {
    family: StreamFamily,
    caller: u32,
    callers: u32,
    versions: Vec<i64>,
    next: usize,
}

impl OwnStreams {
    /// Those of one caller.
    #[must_use]
    pub fn new(scenario: &Scenario, caller: usize, family: StreamFamily) -> Self {
        let (callers, caller) = (scenario.callers as u32, caller as u32);
        let own = (scenario.streams - caller).div_ceil(callers) as usize;
        Self { family, caller, callers, versions: vec![0; own], next: 0 }
    }

    /// The next stream and its version; it has one event more from now on.
    pub fn draw(&mut self) -> (Uuid, i64) {
        let place = self.next;
        self.next = (place + 1) % self.versions.len();
        let version = self.versions[place];
        self.versions[place] += 1;
        (self.family.stream(self.caller + place as u32 * self.callers), version)
    }
}

fn zipf(streams: u32, exponent: f64) -> Arc<[f64]> {
    let mut sum = 0.0;
    let mut sums: Vec<f64> = (1..=streams)
        .map(|rank| {
            sum += f64::from(rank).powf(-exponent);
            sum
        })
        .collect();
    for value in &mut sums {
        *value /= sum;
    }
    sums.into()
}

/// A JSON payload of a given size whose counter changes in place.
#[derive(Clone, Debug)]
pub struct Payload {
    bytes: Arc<[u8]>,
    own: Vec<u8>,
    counter: u64,
}

/// One message's payload: the bytes of a [`Payload`] with a counter, put together when it is written.
#[derive(Clone, Debug)]
pub struct PayloadView {
    bytes: Arc<[u8]>,
    counter: u64,
}

const HEAD: &[u8] = b"{\"n\":\"";
const DIGITS: usize = 12;
const MIDDLE: &[u8] = b"\",\"text\":\"";
const TAIL: &[u8] = b"\"}";

impl Payload {
    /// A payload of exactly `bytes` bytes (at least [`crate::scenario::PAYLOAD_BYTES_MIN`]).
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let frame = HEAD.len() + DIGITS + MIDDLE.len() + TAIL.len();
        let mut all = Vec::with_capacity(bytes);
        all.extend_from_slice(HEAD);
        all.resize(HEAD.len() + DIGITS, b'0');
        all.extend_from_slice(MIDDLE);
        // Words rather than one letter: a page of one letter would compress unlike anybody's data.
        const WORDS: &[u8] = b"the order was placed by a customer who pays on delivery and wants it before noon; ";
        all.extend(WORDS.iter().cycle().take(bytes.saturating_sub(frame)));
        all.extend_from_slice(TAIL);
        Self { bytes: all.as_slice().into(), own: all, counter: 0 }
    }

    /// Goes on to the next message.
    pub fn count(&mut self) {
        self.counter += 1;
    }

    /// The message counted last.
    #[must_use]
    pub fn view(&self) -> PayloadView {
        PayloadView { bytes: self.bytes.clone(), counter: self.counter }
    }

    /// The bytes of the next message.
    pub fn draw(&mut self) -> &[u8] {
        self.count();
        write_counter(&mut self.own, self.counter);
        &self.own
    }

    /// The next message's bytes as text: they are ASCII.
    pub fn next_text(&mut self) -> &str {
        self.draw();
        std::str::from_utf8(&self.own).unwrap_or_default()
    }
}

impl PayloadView {
    /// Bytes of it.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // A payload is never empty.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Appends it.
    ///
    /// # Errors
    /// [`PayloadError::TooLong`] if it has more than `bytes_max` bytes.
    pub fn write(&self, buffer: &mut Vec<u8>, bytes_max: usize) -> Result<(), PayloadError> {
        if self.bytes.len() > bytes_max {
            return Err(PayloadError::TooLong);
        }
        let start = buffer.len();
        buffer.extend_from_slice(&self.bytes);
        write_counter(&mut buffer[start..], self.counter);
        Ok(())
    }
}

fn write_counter(bytes: &mut [u8], mut counter: u64) {
    for digit in bytes[HEAD.len()..HEAD.len() + DIGITS].iter_mut().rev() {
        *digit = b'0' + (counter % 10) as u8;
        counter /= 10;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::Parser;

    fn scenario(line: &str) -> Scenario {
        let cli = Cli::try_parse_from(std::iter::once("loadgen").chain(line.split_whitespace())).unwrap();
        Scenario::check(&cli.run).unwrap()
    }

    #[test]
    fn a_payload_is_json_of_the_size_asked_for_and_changes() {
        let mut payload = Payload::new(200);
        let first = payload.draw().to_vec();
        let second = payload.draw().to_vec();
        assert_eq!((first.len(), second.len()), (200, 200));
        assert_ne!(first, second);
        let value: serde_json::Value = serde_json::from_slice(&second).unwrap();
        assert_eq!(value["n"], "000000000002");
        let mut written = b"before".to_vec();
        payload.view().write(&mut written, usize::MAX).unwrap();
        assert_eq!(written[6..], second[..]);
        assert_eq!(Payload::new(crate::scenario::PAYLOAD_BYTES_MIN).draw().len(), 32);
    }

    #[test]
    fn callers_never_share_a_stream_and_reach_all_of_theirs() {
        let scenario = scenario("--streams 10 --callers 3");
        let mut owner = [None; 10];
        for caller in 0..3 {
            let mut choice = StreamChoice::new(&scenario, caller, 1);
            for _ in 0..500 {
                let stream = choice.draw() as usize;
                assert!(owner[stream].is_none_or(|other| other == caller), "stream {stream}");
                owner[stream] = Some(caller);
            }
        }
        assert!(owner.iter().all(Option::is_some));
    }

    #[test]
    fn zipf_prefers_few() {
        let scenario = scenario("--streams 1000 --callers 1 --distribution zipf");
        let mut choice = StreamChoice::new(&scenario, 0, 1);
        let first = (0..10_000).filter(|_| choice.draw() == 0).count();
        assert!((1000..2000).contains(&first), "1 / H(1000) is 13 %: {first}");
    }

    #[test]
    fn an_index_survives_the_way_through_an_id() {
        let family = StreamFamily::random();
        assert_eq!(family.index_of(family.stream(77)), Some(77));
        assert_eq!(StreamFamily::random().index_of(family.stream(77)), None);
    }
}
