//! Allocations of a message, counted: none on a shard's thread between the ring and the acknowledgement, none in `push`
//! into a warm arena, none in looking up what an event's type is called today. What a flush allocates is allowed and
//! printed.
//!
//! How: every allocation is counted under its thread. The same 10,000 messages go through in flushes of 100 and of
//! 1,000 rows; what depends on rows and not on flushes would show as a difference.

#![allow(clippy::expect_used)] // A test says by it what it stands on.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use corelane::message::kind;
use corelane::private_postgres::{Options, PrivatePostgres};
use corelane::{Config, Decoded, Engine, EventTypes, MemoryTransport, Message, RawMessage, Strategy, UnitOfWork};
use uuid::Uuid;

const THREADS: usize = 1 << 16;
const MESSAGES: usize = 10_000;

/// Allocations and growths by thread id, modulo the table's length.
static BY_THREAD: [AtomicU64; THREADS] = [const { AtomicU64::new(0) }; THREADS];

thread_local! {
    static THREAD: Cell<usize> = const { Cell::new(usize::MAX) };
}

fn this_thread() -> usize {
    THREAD.with(|thread| {
        if thread.get() == usize::MAX {
            // SAFETY: a plain system call.
            thread.set(unsafe { libc::syscall(libc::SYS_gettid) } as usize % THREADS);
        }
        thread.get()
    })
}

struct Counting;

// SAFETY: every call goes to `System` unchanged; the counter neither allocates nor locks.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BY_THREAD[this_thread()].fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are `System`'s.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        BY_THREAD[this_thread()].fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The shard's threads, by their name: its own, and those that its executor made in its image.
fn shard_threads() -> Vec<usize> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads").flatten();
    let named = tasks
        .filter(|task| std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == "corelane-0"));
    let found: Vec<usize> =
        named.map(|task| task.file_name().to_string_lossy().parse::<usize>().expect("an id") % THREADS).collect();
    assert!(!found.is_empty(), "the shard's thread");
    found
}

fn count(thread: usize) -> u64 {
    BY_THREAD[thread].load(Ordering::Relaxed)
}

struct Load {
    engine: Engine,
    streams: Vec<Uuid>,
    shard: Vec<usize>,
}

/// What a round of all messages allocated.
#[derive(Debug)]
struct Round {
    in_shard: u64,
    in_push: u64,
    flushes: u64,
}

impl Load {
    fn in_shard(&self) -> u64 {
        self.shard.iter().map(|thread| count(*thread)).sum()
    }

    fn push(&self, unit: &mut UnitOfWork, from: usize, rows: usize, to: &[&str]) -> u64 {
        let payload = [b'7'; 200];
        let before = count(this_thread());
        for n in from..from + rows {
            let stream = self.streams[n % self.streams.len()];
            unit.push(&RawMessage::event("alloc.test", &payload).stream(stream).to(to)).expect("room");
        }
        count(this_thread()) - before
    }

    /// All messages in flushes of so many rows, one after the other.
    async fn round(&self, rows: usize, to: &[&str]) -> Round {
        let flushes = || self.engine.shards()[0].metrics.flushes.get();
        let published = || self.engine.shards()[0].metrics.rows_published.get();
        let (shard_before, flushes_before, published_before) = (self.in_shard(), flushes(), published());
        let mut in_push = 0;
        for from in (0..MESSAGES).step_by(rows) {
            let mut unit = self.engine.unit_of_work();
            in_push += self.push(&mut unit, from, rows, to);
            unit.commit().await.expect("stored");
        }
        if !to.is_empty() {
            let deadline = Instant::now() + Duration::from_secs(30);
            while published() - published_before < MESSAGES as u64 {
                assert!(Instant::now() < deadline, "not published");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        Round { in_shard: self.in_shard() - shard_before, in_push, flushes: flushes() - flushes_before }
    }
}

#[test]
fn what_an_events_type_is_called_today_is_found_without_allocating() {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Small(u64);
    impl Message for Small {
        type Kind = kind::Event;
        const NAME: &'static str = "small";
        const DESTINATIONS: &'static [&'static str] = &[];
        fn stream_id(&self) -> Option<Uuid> {
            None
        }
    }
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Other;
    impl Message for Other {
        type Kind = kind::Event;
        const NAME: &'static str = "other";
        const DESTINATIONS: &'static [&'static str] = &[];
        fn stream_id(&self) -> Option<Uuid> {
            None
        }
    }
    let types = EventTypes::builder()
        .event::<Small>()
        .alias("Small", "small")
        .event::<Other>()
        .alias("Other", "other")
        .build()
        .expect("types");
    assert_eq!(types.decode::<Small>("Small", "", b"7").known().map(|small| small.0), Some(7));
    let before = count(this_thread());
    for n in 0..1_000 {
        assert_eq!(types.current_name(["small", "Small", "Large"][n % 3]), [Some("small"), Some("small"), None][n % 3]);
        assert!(matches!(types.decode::<Small>("Large", "", b"1"), Decoded::Unknown));
        assert!(matches!(types.decode::<Small>("Other", "", b"1"), Decoded::OtherType("other")));
    }
    assert_eq!(count(this_thread()) - before, 0, "allocations of 3,000 look-ups");
}

#[tokio::test]
async fn no_message_allocates_between_ring_and_acknowledgement_nor_in_a_warm_push() {
    let server = PrivatePostgres::start(Options::default()).expect("a private Postgres");
    let mut config = Config::default();
    config.database.url = server.url("postgres");
    config.shards.count = 1;
    config.claim.poll_ms = 10_000;
    config.strategy.batch_size = 4_000;
    config.strategy.batch_debounce_ms = 60_000;
    config.strategy.batch_age_ms_max = 60_000;
    let config = config.overlay_env("CORELANE").expect("a configuration");
    let transport = MemoryTransport::new(|_, _| {});
    let engine = Engine::builder(config).transport(transport).migrate(true).start().await.expect("start");
    let deadline = Instant::now() + Duration::from_secs(20);
    while engine.partitions_held() < 64 {
        assert!(Instant::now() < deadline, "no partitions");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let load = Load { engine, streams: (0..100).map(|_| Uuid::now_v7()).collect(), shard: shard_threads() };

    // Warm: every stream known, every buffer grown.
    for rows in [1_000, 100, 1_000] {
        load.round(rows, &[]).await;
        load.round(rows, &["somewhere"]).await;
    }
    for (what, to) in [("stored", &[][..]), ("stored and published", &["somewhere"][..])] {
        // The least of three rounds: what a message allocates is in each of them, a look at the log or a beat of the lease
        // that falls into one is not.
        let mut least = [u64::MAX; 2];
        for (which, rows) in [(0, 100), (1, 1_000)].repeat(3) {
            let round = load.round(rows, to).await;
            println!(
                "{what}: {} flushes of {} rows, {:.1} allocations a flush, {:.4} a message, {} in push (batches that the engine still had in hand were replaced by new ones)",
                round.flushes,
                MESSAGES as u64 / round.flushes.max(1),
                round.in_shard as f64 / round.flushes.max(1) as f64,
                round.in_shard as f64 / MESSAGES as f64,
                round.in_push,
            );
            least[which] = least[which].min(round.in_shard / round.flushes.max(1));
        }
        // 900 rows more in a flush: one allocation of each would be 900 more. What is left is one for each 180
        // references (a row of the log), each run of the transport, each read of the socket.
        let [of_small, of_large] = least;
        assert!(
            of_large < of_small + 900 / 5,
            "{what}: {of_small} allocations in a flush of 100, {of_large} in one of 1,000"
        );
    }

    // Every batch that the engine keeps, and some more, has been filled once: 10,000 pushes into them.
    let warm: Vec<UnitOfWork> = (0..256)
        .map(|_| {
            let mut unit = load.engine.unit_of_work();
            load.push(&mut unit, 0, 1_000, &["somewhere"]);
            unit
        })
        .collect();
    drop(warm);
    let in_push: u64 = (0..MESSAGES)
        .step_by(1_000)
        .map(|from| load.push(&mut load.engine.unit_of_work(), from, 1_000, &["somewhere"]))
        .sum();
    assert_eq!(in_push, 0, "allocations of {MESSAGES} pushes into warm arenas");

    // Queued ones join a batch that is warm, too: a ticket a batch, and the column of units, which has had one until now,
    // doubles ten times. Nothing a message.
    let mut queued = Vec::with_capacity(1_000);
    let before = count(this_thread());
    for n in 0..1_000 {
        let message =
            RawMessage::event("alloc.test", b"7").stream(load.streams[n % load.streams.len()]).to(&["somewhere"]);
        queued.push(load.engine.push_with(Strategy::Batch, &message).expect("room"));
    }
    let in_push = count(this_thread()) - before;
    assert!(in_push <= 12, "{in_push} allocations of 1,000 queued pushes");
    assert_eq!(load.engine.flush().await.stored, 1_000);
    drop(queued);
    load.engine.shutdown(Duration::from_secs(10)).await;
}
