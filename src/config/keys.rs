//! The table of keys: the one place where a key, its unit, bounds, default, effect and reason stand.
//!
//! Invariant: units stand last in the names; every bound has a reason where it is not plain.
//!
//! A line reads: `name: type = default, unit, bounds, figure of loadgen's report that moves, reason`.

use super::destinations::Destinations;
use super::inbox_words::{RetryBy, SettleWhen};
use super::value::{Bounds, Field, OnDead, Origin, Prepared, RuntimeChoice, Strategy, Value};
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
            /// What is said of single destinations.
            pub destinations: Destinations,
            pub(super) origins: Vec<Origin>,
        }

        impl Default for Config {
            fn default() -> Self {
                Self {
                    $($section: $Section { $($field: $default,)* },)*
                    destinations: Destinations::default(),
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
            "`postgres://user@host/database`, or a `host=… dbname=…` line; a transaction pooler's, if `database.direct_url` is set or `database.direct` is false";
        direct_url: String = String::new(), "URL", Bounds::Secret, "time to take over, latency of foreign messages",
            "the same database without the pooler: the lease keeper's connections (session lock, LISTEN). Empty: `database.url` is direct";
        direct: bool = true, "word", Bounds::Choice(&["true", "false"]), "time to take over, latency of foreign messages",
            "false: there is no direct connection at all; a dead process is followed when its lease ends, and messages of others are found by polling";
        prepared_statements: Prepared = Prepared::Auto, "word", Bounds::Choice(Prepared::NAMES), "CPU of the server",
            "auto: on, but off through a pooler; on: for a pooler that keeps them for its clients; off: each statement is sent whole";
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
    /// When a unit of work is handed to its shard.
    strategy: Strategies {
        default: Strategy = Strategy::Scoped, "word", Bounds::Choice(Strategy::NAMES), "strategies[]",
            "for `push` and `unit_of_work`, where the program names none; a unit of work stays whole whatever is set here";
        interval_ms: u64 = 100, "ms", whole(1, 60_000, ""), "calls and latency of `interval`",
            "longer: fewer commits; shorter: earlier acknowledgements, on average after half of it";
        batch_size: usize = 100, "messages", whole(1, STORE_ROWS_MAX as u64, "one store call takes no more"), "calls and latency of `batch`",
            "so many queued messages are handed over at once";
        batch_debounce_ms: u64 = 100, "ms", whole(1, 60_000, ""), "latency of `batch`",
            "fewer are handed over when none has come for so long";
        batch_age_ms_max: u64 = 1_000, "ms", whole(1, 600_000, ""), "latency of `batch`",
            "or when the oldest has waited so long: a trickle cannot put the flush off for ever";
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
        poll_relaxed_ms: u64 = 5_000, "ms", whole(0, 600_000, "at most `claim.poll_ms_max` counts"), "statements a second when idle",
            "first interval while the listener has proved itself (if it is longer than `claim.poll_ms`); while it has not, every interval is `claim.poll_ms`";
    }
    /// Hearing what other processes say.
    listen: Listen {
        test_interval_ms: u64 = 30_000, "ms", whole(100, 600_000, ""), "statements a second when idle",
            "how often the listening connection says something to itself; one that does not hear it is connected again";
        test_timeout_ms: u64 = 2_000, "ms", whole(10, 60_000, ""), "time until a deaf listener is known",
            "how long its own word may be on its way";
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
        on_dead: OnDead = OnDead::Continue, "word", Bounds::Choice(OnDead::NAMES), "streams that are held",
            "what becomes of a stream whose message died: it goes on, or waits for an operator; `[destinations.\"name\"] on_dead` says otherwise for one";
    }
    /// Destinations that fail.
    breaker: Breaker {
        failures_max: u32 = 5, "failures", whole(0, 1_000_000, "0 = never"), "attempts while a destination is down",
            "so many in a row, of several streams, and nothing is sent to the destination for a while but a probe";
        base_ms: u64 = 3_000, "ms", whole(1, 3_600_000, ""), "time to notice that it is back",
            "the first pause; doubles with each probe that fails";
        cap_ms: u64 = 300_000, "ms", whole(1, 3_600_000, ""), "time to notice that it is back",
            "longest pause";
    }
    /// What is kept, and for how long.
    retention: Retention {
        dead_letters_days: u32 = 0, "days", whole(0, 36_500, "0 = for ever"), "",
            "dead letters that are older are deleted; one that holds its stream stays";
    }
    /// What waits longer than it should.
    sentinel: Sentinel {
        unpublished_ms: u64 = 60_000, "ms", whole(1_000, 31_536_000_000, ""), "unpublished messages",
            "stored longer ago and not published, beside the log or dead: counted once a minute, and said in the log";
        stuck_ms: u64 = 3_600_000, "ms", whole(1_000, 31_536_000_000, ""), "stuck streams",
            "streams that are parked or held for longer: counted once a minute, and said in the log";
    }
    /// How far a shard has come, as the database knows it.
    cursor: Cursor {
        interval_ms: u64 = 50, "ms", whole(1, 10_000, ""), "commits_per_message, copies after a crash",
            "a crash publishes again at most what was acknowledged since the last cursor";
    }
    /// Messages that come from brokers.
    inbox: Inbox {
        workers: usize = 4, "tasks a consumer, threads", whole(1, 64, ""), "inbox throughput",
            "a stream is handled by one of them; each has a connection of its own, and user code runs on as many threads";
        concurrency_max: usize = 40, "handlers", whole(1, 10_000, ""), "handlers at once",
            "handlers of all consumers of this process that run at the same time; of a stream one at a time";
        rows_max: usize = 2_000, "deliveries a consumer", whole(1, 1_000_000, ""), "memory while handlers are slow",
            "back-pressure: with so many in hand nothing more is received";
        bytes_max: usize = 67_108_864, "bytes a consumer", whole(65_536, 1_099_511_627_776, ""), "memory while handlers are slow",
            "the same by size; one delivery may pass it";
        batch_rows_max: usize = 200, "deliveries", whole(1, STORE_ROWS_MAX as u64, "arrays of one call"), "rows a commit",
            "so many arrivals are looked at together, at most";
        batch_quiet_ms: u64 = 20, "ms", whole(0, 60_000, "0 = at once"), "rows a commit",
            "or as many as came until none has come for so long; a worker with nothing in hand waits for nothing";
        batch_age_ms_max: u64 = 1_000, "ms", whole(0, 60_000, "0 = at once"), "latency of the inbox",
            "or those that are there when the first has waited so long";
        commit_rows_max: usize = 500, "results", whole(1, STORE_ROWS_MAX as u64, "arrays of one call"), "rows a commit",
            "so many results share a commit, at most";
        commit_bytes_max: usize = 67_108_864, "bytes", whole(65_536, 536_870_912, "a statement's parameters stay below 1 GiB"), "rows a commit",
            "what the results of one commit emit and keep, at most; one result may pass it";
        commit_age_ms_max: u64 = 10, "ms", whole(0, 60_000, "0 = at once"), "latency of the inbox",
            "a result waits so long for those of handlers that still run, at most";
        emit_bytes_max: usize = 134_217_728, "bytes a delivery", whole(65_536, 1_073_741_824, "it is held in memory whole"), "memory",
            "what the handler of one delivery emits, at most: beyond it a push is refused, and a handler that lets it be has failed for good";
        window_days: u32 = 30, "days", whole(1, 3_650, ""), "rows of `wh_inbox_seen`",
            "how long the ids of messages are remembered, from their first receipt: a copy that comes later is handled again";
        settle: SettleWhen = SettleWhen::Effects, "word", Bounds::Choice(SettleWhen::NAMES), "time until the broker has its answer",
            "effects: the broker's message is settled after the commit of its effects; stored: once its body is stored here";
        retry: RetryBy = RetryBy::Database, "word", Bounds::Choice(RetryBy::NAMES), "deliveries that come again",
            "database: a failed delivery is kept here, by the rules of `retry`; broker: it is abandoned, by the broker's rules";
        on_dead: OnDead = OnDead::Continue, "word", Bounds::Choice(OnDead::NAMES), "streams that are held",
            "what becomes of a consumer's stream whose message died: it goes on, or waits for an operator";
        handler_timeout_ms: u64 = 30_000, "ms", whole(1, 3_600_000, ""), "streams behind a handler that hangs",
            "a handler that takes longer is dropped, which is a failure of its message; a process of which nothing is heard for so long and a quarter of `lease.ttl_ms` (5 s at least) loses its streams";
        disturbed_max: u32 = 10, "times", whole(1, 1_000_000, ""), "streams behind a handler that others disturb",
            "a handler that others have disturbed so often though it ran by itself (locks, deadlocks, `statement_timeout`: some 8 s of pauses) has failed: an attempt is counted, and its stream waits beside the others";
        busy_ms_max: u64 = 10_000, "ms", whole(0, 3_600_000, ""), "deliveries that come again",
            "how long a delivery waits here for a stream that another process works on, or for the database, before it is abandoned";
        poll_ms: u64 = 1_000, "ms", whole(1, 60_000, ""), "latency of retries",
            "how often failed messages whose time has come are looked for";
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
