//! The table of keys: the one place where a key, its unit, bounds, default, effect and reason stand.
//!
//! Invariant: units stand last in the names; every bound has a reason where it is not plain.
//!
//! A line reads: `name: type = default, unit, bounds, figure of loadgen's report that moves, reason`.

use super::value::{Bounds, Field, Origin, RuntimeChoice, Value};
use crate::limits::{LEASE_TTL_MS, NAME_BYTES_MAX, PARTITIONS_MAX, STORE_ROWS_MAX};

/// A key as the table has it.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Full name, such as `flush.rows_max`.
    pub name: &'static str,
    /// Unit of the value.
    pub unit: &'static str,
    /// What is accepted.
    pub bounds: Bounds,
    /// The figure that moves with it.
    pub moves: &'static str,
    /// Why it exists and why it is what it is.
    pub reason: &'static str,
}

const fn whole(min: u64, max: u64, why: &'static str) -> Bounds {
    Bounds::Integer { min, max, why }
}

const NAME: Bounds = Bounds::Text { min: 1, max: NAME_BYTES_MAX };

macro_rules! keys {
    ($(
        $(#[$section_doc:meta])*
        $section:ident: $Section:ident {$(
            $field:ident: $type:ty = $default:expr, $unit:literal, $bounds:expr, $moves:literal, $reason:literal;
        )*}
    )*) => {
        $(
            $(#[$section_doc])*
            #[derive(Clone, Debug, PartialEq)]
            pub struct $Section {$(
                #[doc = $reason]
                pub $field: $type,
            )*}
        )*

        const KEYS: &[Key] = &[$($(
            Key {
                name: concat!(stringify!($section), ".", stringify!($field)),
                unit: $unit,
                bounds: $bounds,
                moves: $moves,
                reason: $reason,
            },
        )*)*];

        /// The whole configuration. Fields may be set by the program; `Engine::builder` validates them.
        #[derive(Clone, Debug)]
        pub struct Config {
            $(
                $(#[$section_doc])*
                pub $section: $Section,
            )*
            pub(super) origins: Vec<Origin>,
        }

        impl Default for Config {
            fn default() -> Self {
                Self {
                    $($section: $Section { $($field: $default,)* },)*
                    origins: vec![Origin::Default; KEYS.len()],
                }
            }
        }

        impl Config {
            /// The table.
            #[must_use]
            pub fn keys() -> &'static [Key] {
                KEYS
            }

            pub(super) fn value(&self, index: usize) -> Value {
                let fields: [&dyn Field; KEYS.len()] = [$($(&self.$section.$field,)*)*];
                fields[index].value()
            }

            pub(super) fn assign(&mut self, index: usize, value: &Value) -> Result<(), String> {
                let fields: [&mut dyn Field; KEYS.len()] = [$($(&mut self.$section.$field,)*)*];
                match fields.into_iter().nth(index) {
                    Some(field) => field.assign(value),
                    None => Ok(()),
                }
            }
        }
    };
}

keys! {
    /// Which database.
    database: Database {
        url: String = String::new(), "URL", Bounds::Secret, "",
            "`postgres://user@host/database`, or a `host=… dbname=…` line; a direct connection, not a transaction pool";
        schema: String = "corelane".to_owned(), "name", Bounds::Text { min: 1, max: 63 }, "",
            "two services in two schemas of one database do not notice each other";
        connect_timeout_ms: u64 = 5_000, "ms", whole(100, 60_000, ""), "",
            "a server that does not answer is tried again, not waited for";
        call_timeout_ms: u64 = 30_000, "ms", whole(100, 600_000, ""), "",
            "deadline of one call; after it the connection is dropped and the outcome looked up";
    }
    /// How this process is called in the cluster.
    service: Service {
        name: String = "service".to_owned(), "name", NAME, "",
            "shown in `wh_instance`, in `application_name` and by the operators' tool";
        instance: String = String::new(), "name", Bounds::Text { min: 0, max: NAME_BYTES_MAX }, "",
            "empty: the host's name; each start is an incarnation of its own whatever the name";
    }
    /// Threads.
    shards: Shards {
        count: usize = 0, "threads", whole(0, 1_024, "0 = one for each of shards.cores, or for every second core"), "messages_per_second, per_shard[]",
            "a pinned thread with its own connections each; fewer make larger flushes, which cost the server less";
        cores: Vec<usize> = Vec::new(), "core numbers", Bounds::Numbers { below: 4_096 }, "per_shard[].core",
            "shard i runs on entry i modulo the list's length; empty: the usable cores in turn";
        runtime: RuntimeChoice = RuntimeChoice::Auto, "word", Bounds::Choice(RuntimeChoice::NAMES), "runtime",
            "auto: glommio where io_uring is allowed, else tokio with the reason in the log";
    }
    /// Slices of the stream space.
    partitions: Partitions {
        count: u32 = 64, "partitions", whole(1, PARTITIONS_MAX as u64, "fixed at install"), "per_shard[].partitions",
            "unit of lease and take-over; another value than the installed one is an error";
    }
    /// The way into a shard.
    ring: Ring {
        rows_max: usize = 65_536, "rows a shard", whole(1, 16_777_216, ""), "per_shard[].ring_fill_max",
            "back-pressure: `enqueue` answers `Overloaded` beyond it, `enqueue_many` waits";
    }
    /// When a batch of new messages is stored.
    flush: Flush {
        rows_max: usize = 1_024, "rows", whole(1, STORE_ROWS_MAX as u64, "positions of one store call"),
            "per_shard[].rows_per_flush",
            "larger: fewer commits and less CPU a message; smaller: less waiting behind a big batch";
        bytes_max: usize = 4_194_304, "bytes", whole(1_024, 1_073_741_824, "a statement's parameters stay far below 2 GiB"),
            "per_shard[].rows_per_flush",
            "bounds the memory and the WAL burst of one transaction when payloads are large";
        age_us_max: u64 = 500, "µs", whole(0, 1_000_000, "0 = at once"), "latency_ms.store",
            "longest wait for company; the rows that came meanwhile share one commit";
    }
    /// How committed messages are found that were not published from memory.
    claim: Claim {
        rows_max: usize = 1_000, "references", whole(1, STORE_ROWS_MAX as u64, ""), "claim p99",
            "size of one page: work a claim does is bounded by it, whatever the backlog";
        streams_max: usize = 1_000, "streams", whole(1, STORE_ROWS_MAX as u64, ""), "claim p99",
            "a page ends where it comes to so many streams; below `claim.rows_max` it makes pages smaller, at or above it nothing";
        poll_ms: u64 = 250, "ms", whole(1, 60_000, ""), "latency of foreign messages",
            "first interval of looking for messages of other processes";
        poll_ms_max: u64 = 10_000, "ms", whole(1, 600_000, ""), "statements a second when idle",
            "the interval doubles up to this while nothing is found";
    }
    /// Messages in memory that wait for their turn.
    lane: Lane {
        rows_max: usize = 131_072, "rows a shard", whole(1, 16_777_216, ""), "memory while the transport is slow or away",
            "stored messages kept in memory until they are published; beyond it they are left to the claim";
        streams_max: usize = 262_144, "lanes a shard", whole(16, 16_777_216, ""), "looked-up flushes",
            "remembered streams; beyond it the idle ones are forgotten and looked up again";
    }
    /// How messages go to the transport.
    publish: Publish {
        run_rows_max: usize = 512, "messages", whole(1, STORE_ROWS_MAX as u64, ""), "latency_ms.publish",
            "messages of different lanes handed to the transport at once, for one destination";
        in_flight_max: usize = 4, "runs a shard", whole(1, 256, ""), "messages_per_second with a slow transport",
            "hides the transport's round trip; copies after a crash are bounded by it";
        timeout_ms: u64 = 4_000, "ms", whole(10, 60_000, "fits twice into a lease"), "copies after a hanging transport",
            "after it the call is dropped and what has no outcome is unknown: tried again";
    }
    /// The right to publish.
    lease: Lease {
        ttl_ms: u64 = 10_000, "ms", whole(LEASE_TTL_MS.0, LEASE_TTL_MS.1, "renewed every quarter; a dead owner's work waits for it"),
            "time to take over",
            "how long a silent process keeps its partitions; judged by the database's clock";
        margin_ms: u64 = 5_000, "ms", whole(500, 300_000, ""), "time to take over",
            "no run starts that could outlive the lease less this; at least `publish.timeout_ms` + 1000";
    }
    /// What follows a failure.
    retry: Retry {
        base_ms: u64 = 30_000, "ms", whole(1, 86_400_000, ""), "time to the second try",
            "wait after the first failure; doubles with each further one";
        cap_ms: u64 = 300_000, "ms", whole(1, 86_400_000, ""), "time between later tries",
            "longest wait";
        attempts_max: u32 = 10, "failures", whole(1, 1_000_000, ""), "dead letters",
            "so many failures, then the dead letters; not ready and throttled count none";
        jitter_percent: u32 = 10, "% of the wait", whole(0, 50, ""), "",
            "spreads the tries of what failed together";
    }
    /// How far a shard has come, as the database knows it.
    cursor: Cursor {
        interval_ms: u64 = 50, "ms", whole(1, 10_000, ""), "commits_per_message, copies after a crash",
            "a crash publishes again at most what was acknowledged since the last cursor";
    }
    /// The threads transports run on.
    bridge: Bridge {
        threads: usize = 2, "threads", whole(1, 64, ""), "latency_ms.publish",
            "a small tokio runtime beside the shards; user code never holds a shard";
    }
    /// Units of work in the caller's memory.
    unit: Unit {
        bytes_max: usize = 1_073_741_824, "bytes", whole(65_536, 3_221_225_472, "offsets in a batch have 32 bits"), "",
            "a unit of work commits whole, so it is held whole until then; beyond this a push is refused";
    }
}
