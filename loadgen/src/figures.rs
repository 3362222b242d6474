//! The figures of a measurement, as they go into the JSON file: the names here are the keys there.
//!
//! Invariants
//! - A figure that could not be measured is `null`, never 0.
//! - "a message" means: a message stored and published between the two readings.

use serde::Serialize;

use crate::checks::Findings;
use crate::latency::Percentiles;

/// Latencies in milliseconds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Latencies {
    /// From the intended start of a call to its acknowledgement.
    pub store: Option<Percentiles>,
    /// From the acknowledgement to the transport's acceptance; 0 where that came first.
    pub publish: Option<Percentiles>,
    /// From the intended start of the call to the transport's acceptance.
    pub end_to_end: Option<Percentiles>,
    /// One claim, from the request to its last row, where the engine claimed.
    pub claim: Option<Percentiles>,
}

/// A shard's share.
#[derive(Clone, Debug, Default, Serialize)]
#[allow(missing_docs)] // The names say it.
pub struct ShardFigures {
    pub core: Option<usize>,
    pub partitions: u64,
    pub rows: u64,
    pub flushes: u64,
    pub rows_per_flush: f64,
    pub ring_fill_max: u64,
    pub claims: u64,
    pub runs: u64,
    pub cpu_us: u64,
}

/// A part of the measurement, to see a trend.
#[derive(Clone, Copy, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Window {
    pub from_s: f64,
    pub to_s: f64,
    pub messages: u64,
    pub messages_per_second: f64,
    pub server_cpu_us_per_message: Option<f64>,
    pub client_cpu_us_per_message: Option<f64>,
}

/// One value of the configuration and where it came from: `default`, `file`, `environment` or `program`
/// (a command-line option is the last).
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct ConfigValue {
    pub key: String,
    pub value: String,
    pub origin: String,
}

/// Everything about one subject under one load.
#[derive(Clone, Debug, Default, Serialize)]
#[allow(missing_docs)]
pub struct Figures {
    pub scenario: String,
    pub subject: String,
    pub runtime: String,
    pub shards: usize,
    pub connections: usize,
    pub batch: usize,
    pub messages: u64,
    pub seconds: f64,
    pub messages_per_second: f64,
    pub server_cpu_us_per_message: Option<f64>,
    pub client_cpu_us_per_message: Option<f64>,
    pub latency_ms: Latencies,
    pub wal_bytes_per_message: Option<f64>,
    pub commits_per_message: Option<f64>,
    pub rows_updated_or_deleted_per_message: Option<f64>,
    pub allocations_per_message: Option<f64>,
    pub order_violations: u64,
    pub lost: u64,
    pub copies: u64,
    /// Calls the engine refused because it was full.
    pub overloaded: u64,
    /// Streams whose versions are not 1 to n (`events`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gaps: Option<u64>,
    /// Appends that were told of another version, and made again (`events`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conflicts: Option<u64>,
    /// Deliveries whose effect was there already, and stayed as it was (`inbox`, `relay`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duplicates: Option<u64>,
    /// Messages with two effects (`inbox`, `relay`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub double_effects: Option<u64>,
    /// Events that a subscription passed over (`subscribe`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skips: Option<u64>,
    /// Most that a subscription was behind at one of its looks: events, and the age of the oldest of them (`subscribe`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lag_events: Option<u64>,
    /// See there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lag_age_ms: Option<u64>,
    /// By claim, of all published.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claimed_messages: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<Window>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub per_shard: Vec<ShardFigures>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub config: Vec<ConfigValue>,
}

impl Figures {
    /// Puts the verdict in.
    pub fn judge(&mut self, findings: Findings) {
        self.order_violations = findings.order_violations;
        self.lost = findings.lost;
        self.copies = findings.copies;
    }

    /// Server and client CPU of a message, where the server's is known.
    #[must_use]
    pub fn cpu_us_per_message(&self) -> Option<f64> {
        Some(self.server_cpu_us_per_message? + self.client_cpu_us_per_message?)
    }

    /// The medians of several rounds of one subject; what is no number comes from the last round, and
    /// findings are summed: a violation in one round is not averaged away.
    #[must_use]
    pub fn median_of(rounds: &[Self]) -> Self {
        let Some(last) = rounds.last() else { return Self::default() };
        let number = |of: fn(&Self) -> f64| median(rounds.iter().map(of).collect()).unwrap_or(0.0);
        let maybe = |of: fn(&Self) -> Option<f64>| median(rounds.iter().filter_map(of).collect());
        let sum = |of: fn(&Self) -> Option<u64>| rounds.iter().filter_map(of).reduce(|sum, one| sum + one);
        let latency = |of: fn(&Latencies) -> Option<Percentiles>| {
            let each: Vec<Percentiles> = rounds.iter().filter_map(|round| of(&round.latency_ms)).collect();
            let part = |of: fn(&Percentiles) -> f64| median(each.iter().map(of).collect());
            Some(Percentiles {
                p50: part(|p| p.p50)?,
                p99: part(|p| p.p99)?,
                p999: part(|p| p.p999)?,
                max: part(|p| p.max)?,
            })
        };
        Self {
            messages: number(|f| f.messages as f64) as u64,
            seconds: number(|f| f.seconds),
            messages_per_second: number(|f| f.messages_per_second),
            server_cpu_us_per_message: maybe(|f| f.server_cpu_us_per_message),
            client_cpu_us_per_message: maybe(|f| f.client_cpu_us_per_message),
            latency_ms: Latencies {
                store: latency(|l| l.store),
                publish: latency(|l| l.publish),
                end_to_end: latency(|l| l.end_to_end),
                claim: latency(|l| l.claim),
            },
            wal_bytes_per_message: maybe(|f| f.wal_bytes_per_message),
            commits_per_message: maybe(|f| f.commits_per_message),
            rows_updated_or_deleted_per_message: maybe(|f| f.rows_updated_or_deleted_per_message),
            allocations_per_message: maybe(|f| f.allocations_per_message),
            order_violations: rounds.iter().map(|f| f.order_violations).sum(),
            lost: rounds.iter().map(|f| f.lost).sum(),
            copies: rounds.iter().map(|f| f.copies).sum(),
            overloaded: rounds.iter().map(|f| f.overloaded).sum(),
            gaps: sum(|f| f.gaps),
            conflicts: sum(|f| f.conflicts),
            duplicates: sum(|f| f.duplicates),
            double_effects: sum(|f| f.double_effects),
            skips: sum(|f| f.skips),
            lag_events: rounds.iter().filter_map(|f| f.lag_events).max(),
            lag_age_ms: rounds.iter().filter_map(|f| f.lag_age_ms).max(),
            ..last.clone()
        }
    }
}

/// The middle value; of an even number the mean of the middle two.
#[must_use]
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    Some(if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_medians_and_findings_are_sums() {
        let round = |rate: f64, lost: u64| Figures { messages_per_second: rate, lost, ..Figures::default() };
        let all = Figures::median_of(&[round(10.0, 0), round(1000.0, 2), round(20.0, 0)]);
        assert_eq!((all.messages_per_second, all.lost), (20.0, 2));
        assert_eq!(all.server_cpu_us_per_message, None);
        assert_eq!(median(vec![1.0, 4.0]), Some(2.5));
    }
}
