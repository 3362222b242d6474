//! The core seam's executors behave alike: every test runs on each that this machine allows.

#![allow(clippy::unwrap_used)] // A test says by it what it stands on.

use std::cell::RefCell;
use std::future::Future;
use std::io::{Read, Write};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use corelane::metrics::ShardMetrics;
use corelane::runtime::affinity;
use corelane::runtime::probe::{RuntimeKind, glommio_refused};
use corelane::runtime::ring::Ring;
use corelane::runtime::thread::{RunningThread, ThreadMain, ThreadPlan, start};
use corelane::seam::dial::{Dial, SocketPlace};
use corelane::seam::runtime::Runtime;
use corelane::time::{Tick, boot_time};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn kinds() -> Vec<RuntimeKind> {
    match glommio_refused() {
        None => vec![RuntimeKind::Tokio, RuntimeKind::Glommio],
        Some(why) => {
            eprintln!("on tokio only: {why}");
            vec![RuntimeKind::Tokio]
        }
    }
}

fn started<M: ThreadMain>(kind: RuntimeKind, metrics: &Arc<ShardMetrics>, main: M) -> RunningThread<M::Output> {
    let core = affinity::usable_cores().last().copied();
    start(ThreadPlan { kind, core, name: "test".to_owned(), metrics: Arc::clone(metrics) }, main).unwrap()
}

fn run<M: ThreadMain>(kind: RuntimeKind, main: M) -> M::Output {
    started(kind, &Arc::default(), main).join().unwrap()
}

/// Declares a main function: fields that move to the thread, and its body.
macro_rules! main_fn {
    ($name:ident { $($field:ident: $type:ty),* } ($runtime:ident: R) -> $output:ty $body:block) => {
        struct $name { $($field: $type),* }
        impl ThreadMain for $name {
            type Output = $output;
            fn run<R: Dial>(self, $runtime: R) -> impl Future<Output = $output> + 'static {
                let Self { $($field),* } = self;
                async move $body
            }
        }
    };
}

/// Waits on the executor until a condition holds that another task makes true.
async fn until<R: Runtime>(runtime: &R, what: &str, condition: impl Fn() -> bool) {
    let deadline = runtime.now().plus_ms(20_000);
    while !condition() {
        assert!(runtime.now() < deadline, "never: {what}");
        runtime.sleep_until(runtime.now().plus_us(500)).await;
    }
}

#[test]
fn sleepers_wake_in_their_order_and_never_early() {
    main_fn!(Sleepers {} (runtime: R) -> Vec<u64> {
        let woken = Rc::new(RefCell::new(Vec::new()));
        let start = runtime.now();
        for delay_ms in [1_600, 400, 0, 1_000] {
            let (clock, woken) = (runtime.clone(), Rc::clone(&woken));
            runtime.spawn(async move {
                clock.sleep_until(start.plus_ms(delay_ms)).await;
                assert!(clock.now() >= start.plus_ms(delay_ms), "early");
                woken.borrow_mut().push(delay_ms);
            });
        }
        let (never, late) = (runtime.sleep_until(Tick::NEVER), Rc::clone(&woken));
        runtime.spawn(async move { never.await; late.borrow_mut().push(u64::MAX) });
        until(&runtime, "all woken", || woken.borrow().len() >= 4).await;
        let woken = woken.borrow();
        woken.clone()
    });
    for kind in kinds() {
        assert_eq!(run(kind, Sleepers {}), [0, 400, 1_000, 1_600], "{kind:?}");
    }
}

#[test]
fn a_panic_ends_its_task_and_nothing_else() {
    struct PanicsWhenDropped;
    impl Drop for PanicsWhenDropped {
        fn drop(&mut self) {
            panic!("in a destructor");
        }
    }
    main_fn!(Panics { metrics: Arc<ShardMetrics> } (runtime: R) -> u64 {
        let healthy = Rc::new(RefCell::new(0));
        runtime.spawn(async { panic!("at once") });
        let clock = runtime.clone();
        runtime.spawn(async move { clock.yield_now().await; panic!("later: {}", 1) });
        let (clock, count) = (runtime.clone(), Rc::clone(&healthy));
        runtime.spawn(async move { loop { clock.sleep_until(clock.now().plus_us(200)).await; *count.borrow_mut() += 1 } });
        let clock = runtime.clone();
        runtime.spawn(async move { let _held = PanicsWhenDropped; clock.sleep_until(Tick::NEVER).await });
        until(&runtime, "two panics counted", || metrics.task_panics.get() == 2).await;
        let before = *healthy.borrow();
        until(&runtime, "the healthy task goes on", || *healthy.borrow() > before + 3).await;
        metrics.task_panics.get()
    });
    for kind in kinds() {
        let metrics = Arc::new(ShardMetrics::default());
        let during = started(kind, &metrics, Panics { metrics: Arc::clone(&metrics) }).join().unwrap();
        assert_eq!((during, metrics.task_panics.get()), (2, 3), "{kind:?}: the destructor's comes at the end");
    }
}

#[test]
fn all_tasks_end_with_their_thread_wherever_they_wait() {
    main_fn!(Leftovers {
        held: Arc<()>, never: futures_channel::oneshot::Receiver<()>, place: SocketPlace, panics: bool
    } (runtime: R) -> () {
        let (clock, guard) = (runtime.clone(), Arc::clone(&held));
        runtime.spawn(async move { clock.sleep_until(Tick::NEVER).await; drop(guard) });
        let (clock, guard) = (runtime.clone(), Arc::clone(&held));
        runtime.spawn(async move { clock.sleep_until(clock.now().plus_ms(60_000)).await; drop(guard) });
        let guard = Arc::clone(&held);
        runtime.spawn(async move { let _ = never.await; drop(guard) });
        let (dial, guard) = (runtime.clone(), Arc::clone(&held));
        runtime.spawn(async move {
            let mut stream = dial.dial(place).await.unwrap();
            // A task spawned by a task, and bytes that never come.
            let inner = Arc::clone(&guard);
            dial.spawn(async move { std::future::pending::<()>().await; drop(inner) });
            let _ = stream.read(&mut [0; 1]).await;
            drop(guard);
        });
        runtime.spawn(async move { std::future::pending::<()>().await; drop(held) });
        runtime.sleep_until(runtime.now().plus_ms(20)).await;
        assert!(!panics, "as asked");
    });
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for kind in kinds() {
        for panics in [false, true] {
            let held = Arc::new(());
            let (late_waker, never) = futures_channel::oneshot::channel();
            let place = SocketPlace::Tcp(server.local_addr().unwrap());
            let thread = started(kind, &Arc::default(), Leftovers { held: Arc::clone(&held), never, place, panics });
            let (mut accepted, _) = server.accept().unwrap();
            assert_eq!(thread.join().is_err(), panics, "{kind:?}");
            assert_eq!(Arc::strong_count(&held), 1, "{kind:?}: a task was forgotten");
            // Its socket is closed too, and a wake that comes too late hurts nobody.
            accepted.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            assert_eq!(accepted.read(&mut [0; 1]).unwrap_or(0), 0, "{kind:?}");
            assert!(late_waker.send(()).is_err());
        }
    }
}

#[test]
fn another_thread_wakes_a_shard_that_sleeps() {
    const ROUNDS: u32 = 2_000;
    main_fn!(Echo {
        ring: corelane::runtime::ring::RingReceiver<u32>, back: mpsc::Sender<u32>
    } (runtime: R) -> u32 {
        let (done, ended) = futures_channel::oneshot::channel();
        // In a task of its own, and inside a select: both are how shards wait.
        let clock = runtime.clone();
        runtime.spawn(async move {
            let mut count = 0;
            while count < ROUNDS {
                let timer = std::pin::pin!(clock.sleep_until(clock.now().plus_ms(20_000)));
                let arrival = std::pin::pin!(ring.wait());
                match futures_util::future::select(arrival, timer).await {
                    futures_util::future::Either::Left(_) => {}
                    futures_util::future::Either::Right(_) => panic!("a ring was lost"),
                }
                while let Some(value) = ring.pop() {
                    count += 1;
                    back.send(value).unwrap();
                }
            }
            let _ = done.send(count);
        });
        ended.await.unwrap()
    });
    for kind in kinds() {
        let (sender, ring) = Ring::new(8);
        let (back, answers) = mpsc::channel();
        let thread = started(kind, &Arc::default(), Echo { ring, back });
        for round in 0..ROUNDS {
            sender.push(round).unwrap();
            assert_eq!(answers.recv_timeout(Duration::from_secs(30)).unwrap(), round, "{kind:?}");
        }
        assert_eq!(thread.join().unwrap(), ROUNDS);
        assert!(sender.push(0).is_err() && sender.is_closed(), "{kind:?}: the ring of a thread that is gone");
    }
}

#[test]
fn a_task_that_yields_lets_the_others_and_their_sockets_run() {
    main_fn!(Busy { place: SocketPlace } (runtime: R) -> u64 {
        let (dial, answer) = (runtime.clone(), Rc::new(RefCell::new(None)));
        let slot = Rc::clone(&answer);
        runtime.spawn(async move {
            let mut stream = dial.dial(place).await.unwrap();
            stream.write_all(b"ping").await.unwrap();
            let mut read = [0; 4];
            stream.read_exact(&mut read).await.unwrap();
            *slot.borrow_mut() = Some(read);
        });
        let start = runtime.now();
        while answer.borrow().is_none() {
            assert!(runtime.now().since_us(start) < 20_000_000, "starved");
            runtime.yield_now().await;
        }
        assert_eq!(answer.borrow().unwrap(), *b"ping");
        runtime.now().since_us(start)
    });
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let (tcp, unix) =
        (std::net::TcpListener::bind("127.0.0.1:0").unwrap(), std::os::unix::net::UnixListener::bind(&path).unwrap());
    let address = tcp.local_addr().unwrap();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = tcp.accept() {
            let mut read = [0; 4];
            stream.read_exact(&mut read).unwrap();
            stream.write_all(&read).unwrap();
        }
    });
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = unix.accept() {
            let mut read = [0; 4];
            stream.read_exact(&mut read).unwrap();
            stream.write_all(&read).unwrap();
        }
    });
    for kind in kinds() {
        for place in [SocketPlace::Tcp(address), SocketPlace::Unix(path.clone())] {
            run(kind, Busy { place });
        }
    }
}

#[test]
fn who_is_not_there_is_an_error_and_not_a_panic() {
    main_fn!(Nobody { places: Vec<SocketPlace> } (runtime: R) -> Vec<std::io::ErrorKind> {
        let mut kinds = Vec::new();
        for place in places {
            kinds.push(runtime.dial(place).await.err().unwrap().kind());
        }
        kinds
    });
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let directory = tempfile::tempdir().unwrap();
    for kind in kinds() {
        let places = vec![SocketPlace::Tcp(free), SocketPlace::Unix(directory.path().join("none"))];
        let expected = [std::io::ErrorKind::ConnectionRefused, std::io::ErrorKind::NotFound];
        assert_eq!(run(kind, Nobody { places }), expected, "{kind:?}");
    }
}

#[test]
fn a_thread_runs_on_its_core_under_its_name_and_tells_its_executor() {
    main_fn!(Whoami {} (runtime: R) -> (&'static str, Option<String>, usize) {
        let now = runtime.now();
        assert!(now >= Tick(1) && boot_time() >= now);
        (runtime.name(), std::thread::current().name().map(str::to_owned), rustix::thread::sched_getcpu())
    });
    for kind in kinds() {
        let core = *affinity::usable_cores().last().unwrap();
        let plan = ThreadPlan { kind, core: Some(core), name: "shard-7".to_owned(), metrics: Arc::default() };
        let (name, thread, cpu) = start(plan, Whoami {}).unwrap().join().unwrap();
        assert_eq!((name, thread.as_deref(), cpu), (kind.name(), Some("shard-7"), core));
        // A core that is not there is a warning, not the end.
        let plan = ThreadPlan { kind, core: Some(1_000_000), name: "shard-8".to_owned(), metrics: Arc::default() };
        assert_eq!(start(plan, Whoami {}).unwrap().join().unwrap().0, kind.name());
    }
}

#[test]
fn many_executors_can_come_and_go() {
    main_fn!(Nothing {} (runtime: R) -> () { runtime.yield_now().await });
    for kind in kinds() {
        for _ in 0..8 {
            let threads: Vec<_> = (0..8).map(|_| started(kind, &Arc::default(), Nothing {})).collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        }
    }
}
