//! Handlers that start together, as they do where they end at once: nobody waits for a neighbour.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Barrier;

use crate::inbox_kit::{Calls, Inbox, consume, does, text_of};
use crate::support::eventually;

const PATIENCE: Duration = Duration::from_secs(60);
/// So many quick ones that a worker starts many together.
const QUICK: u64 = 1_000;
/// Of as many streams as a process handles at a time.
const STREAMS: u128 = 40;

/// One blocks its thread, and one waits for long: those behind them are handled meanwhile, by the same worker.
#[tokio::test(flavor = "multi_thread")]
async fn behind_one_that_does_not_end_at_once_nothing_waits_that_was_started_with_it() {
    for blocks in [true, false] {
        let inbox = Inbox::new();
        let engine = inbox.engine(inbox.broker.clone()).await;
        let open = Arc::new(AtomicBool::new(false));
        let opened = open.clone();
        let handler = does(move |delivery, _| {
            let (opened, waits) = (opened.clone(), text_of(delivery) == "waits");
            Box::pin(async move {
                while waits && !opened.load(Ordering::Acquire) {
                    if blocks {
                        std::thread::sleep(Duration::from_millis(5));
                    } else {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                }
                Ok(())
            })
        });
        let consumer = consume(&engine, handler).await;
        for n in 0..QUICK {
            inbox.put(u128::from(n) % STREAMS + 1, "quick");
        }
        eventually("the quick ones are handled", PATIENCE, || async { consumer.metrics().handled.get() == QUICK })
            .await;
        consumer.pause();
        for stream in 1..=STREAMS {
            inbox.put(stream, if stream == 1 { "waits" } else { "behind" });
        }
        consumer.resume();
        let others = QUICK + STREAMS as u64 - 1;
        eventually("the others are handled", PATIENCE, || async { consumer.metrics().handled.get() == others }).await;
        assert!(!open.swap(true, Ordering::AcqRel));
        inbox.settled().await;
        let metrics = consumer.metrics();
        assert_eq!((metrics.handled.get(), metrics.timed_out.get(), metrics.failed.get()), (others + 1, 0, 0));
        engine.shutdown(Duration::from_secs(10)).await;
    }
}

/// All wait for each other: none can end before the last has begun.
#[tokio::test(flavor = "multi_thread")]
async fn handlers_that_wait_run_beside_each_other_though_those_before_them_did_not() {
    let inbox = Inbox::new();
    let engine = inbox.engine(inbox.broker.clone()).await;
    let (calls, all) = (Calls::default(), Arc::new(Barrier::new(STREAMS as usize)));
    let noted = calls.clone();
    let handler = does(move |delivery, _| {
        let (waits, all) = (text_of(delivery) == "waits", all.clone());
        noted.note();
        Box::pin(async move {
            if waits {
                all.wait().await;
            }
            Ok(())
        })
    });
    let consumer = consume(&engine, handler).await;
    for n in 0..QUICK {
        inbox.put(u128::from(n) % STREAMS + 1, "quick");
    }
    eventually("the quick ones are handled", PATIENCE, || async { consumer.metrics().handled.get() == QUICK }).await;
    consumer.pause();
    (1..=STREAMS).for_each(|stream| _ = inbox.put(stream, "waits"));
    consumer.resume();
    inbox.settled().await;
    let count = QUICK + STREAMS as u64;
    assert_eq!((consumer.metrics().handled.get(), calls.count() as u64), (count, count), "each ran once");
    engine.shutdown(Duration::from_secs(10)).await;
}
