//! A process that is killed between a commit and its settlement, or stands still in the middle of its work: this test
//! binary again, running one test that is ignored otherwise.

use std::io::{BufRead, BufReader};
use std::mem::ManuallyDrop;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use corelane::transport::memory_broker::SettleFault;
use corelane::{Delivery, MemoryBroker, RawMessage};
use uuid::Uuid;

use crate::inbox_kit::{Inbox, SOURCE, consume, does_in, effect, effects_and_emits, message, text_of};
use crate::support::{TestSchema, eventually};

const COMMITTED: &str = "case: committed";
const PATIENCE: Duration = Duration::from_secs(60);

/// The child's whole life. Without its environment it has nothing to do.
#[test]
#[ignore = "the process of another test"]
fn consumer_of_a_case() {
    let setting = |name: &str| std::env::var(name).unwrap_or_default();
    if setting("INBOX_URL").is_empty() {
        return;
    }
    let broker = MemoryBroker::with_faults(30_000, |_| 0, |_, _| SettleFault::Hang);
    let schema = TestSchema { url: setting("INBOX_URL"), name: setting("INBOX_SCHEMA") };
    // The parent drops the schema.
    let inbox = ManuallyDrop::new(Inbox::in_schema(schema, broker));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let engine = inbox.engine(inbox.broker.clone()).await;
        let consumer = consume(&engine, effects_and_emits()).await;
        let message_id = setting("INBOX_MESSAGE").parse().unwrap();
        inbox.broker.put(SOURCE, Delivery { message_id, ..message(1, "0") });
        eventually("it is committed", PATIENCE, || async { consumer.metrics().handled.get() == 1 }).await;
        println!("\n{COMMITTED}");
        // Until it is killed; should nobody do so it ends by itself.
        tokio::time::sleep(PATIENCE).await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_between_commit_and_settlement_leaves_a_copy_that_has_no_effect() {
    let inbox = Inbox::new();
    let message_id = Uuid::now_v7();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "inbox_killed::consumer_of_a_case", "--ignored", "--nocapture", "--test-threads=1"])
        .env("INBOX_URL", &inbox.schema.url)
        .env("INBOX_SCHEMA", &inbox.schema.name)
        .env("INBOX_MESSAGE", message_id.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("this binary again");
    let output = BufReader::new(child.stdout.take().unwrap());
    let committed =
        tokio::task::spawn_blocking(move || output.lines().map_while(Result::ok).any(|line| line.contains(COMMITTED)));
    let committed = committed.await.unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(committed, "it has committed and not settled");
    // The broker, which was never answered, delivers it again: to another process, with the one that follows it.
    let engine = inbox.engine(inbox.broker.clone()).await;
    let consumer = consume(&engine, effects_and_emits()).await;
    inbox.broker.put(SOURCE, Delivery { message_id, ..message(1, "0") });
    inbox.put(1, "1");
    assert_eq!(inbox.effects(2).await, ["0", "1"]);
    inbox.settled().await;
    assert_eq!((consumer.metrics().duplicates.get(), consumer.metrics().handled.get()), (1, 1));
    assert_eq!((inbox.count("wh_event_store").await, inbox.broker.counts(SOURCE).completed), (2, 2));
    engine.shutdown(Duration::from_secs(10)).await;
}

const ANSWER: &str = "case: awake";
/// What makes the child's handler stop the whole process, as by SIGSTOP.
const STOP: &str = "stop";
/// A handler's time, so that what is silent is known after the least time there is.
const HANDLER_MS: &str = "1000";

/// The child's whole life. Without its environment it has nothing to do.
#[test]
#[ignore = "the process of another test"]
fn consumer_that_stands_still() {
    let setting = |name: &str| std::env::var(name).unwrap_or_default();
    if setting("STILL_URL").is_empty() {
        return;
    }
    let schema = TestSchema { url: setting("STILL_URL"), name: setting("STILL_SCHEMA") };
    // The parent drops the schema.
    let inbox = Inbox::in_schema(schema, MemoryBroker::new(120_000)).set("inbox.handler_timeout_ms", HANDLER_MS);
    let inbox = ManuallyDrop::new(inbox);
    let in_transaction = setting("STILL_IN_TRANSACTION") == "true";
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let engine = inbox.engine(inbox.broker.clone()).await;
        let handler = does_in(in_transaction, move |delivery, context| {
            Box::pin(async move {
                if text_of(delivery) == STOP {
                    // SAFETY: a signal to this process itself.
                    unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
                    // Another thread may get the signal.
                    std::thread::sleep(Duration::from_millis(200));
                }
                if in_transaction {
                    effect(delivery, context).await?;
                }
                let stream = delivery.stream_id.unwrap_or_default();
                context.push(&RawMessage::event("test.handled", &delivery.payload).stream(stream).to(&["sink"]))?;
                Ok(())
            })
        });
        let consumer = consume(&engine, handler).await;
        for (id, text) in [("STILL_FIRST", STOP), ("STILL_SECOND", "behind")] {
            let message_id = setting(id).parse().unwrap();
            inbox.broker.put(SOURCE, Delivery { message_id, ..message(1, text) });
        }
        eventually("both are settled", 4 * PATIENCE, async || {
            let counts = inbox.broker.counts(SOURCE);
            counts.waiting + counts.in_hand == 0
        })
        .await;
        let metrics = consumer.metrics();
        let counts = inbox.broker.counts(SOURCE);
        println!(
            "\n{ANSWER} {} {} {}",
            metrics.handled.get(),
            counts.completed,
            u8::from(metrics.reconnects.get() > 0)
        );
        // Until it is killed; should nobody do so it ends by itself.
        tokio::time::sleep(PATIENCE).await;
    });
}

fn is_stopped(child: &Child) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_stands_still_loses_its_streams_and_does_nothing_wrong_when_it_wakes() {
    for in_transaction in [false, true] {
        let inbox = Inbox::new().set("inbox.handler_timeout_ms", HANDLER_MS);
        let [first, second] = [Uuid::now_v7(), Uuid::now_v7()];
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "inbox_killed::consumer_that_stands_still",
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("STILL_URL", &inbox.schema.url)
            .env("STILL_SCHEMA", &inbox.schema.name)
            .env("STILL_FIRST", first.to_string())
            .env("STILL_SECOND", second.to_string())
            .env("STILL_IN_TRANSACTION", in_transaction.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("this binary again");
        let output = BufReader::new(child.stdout.take().unwrap());
        let (said, heard) = mpsc::channel();
        std::thread::spawn(move || {
            let mut lines = output.lines().map_while(Result::ok);
            if let Some(line) = lines.find(|line| line.contains(ANSWER)) {
                let _ = said.send(line);
            }
        });
        eventually("the child stands still", PATIENCE, async || is_stopped(&child)).await;
        // Copies come to another process, which waits until the stream is free.
        let engine = inbox.engine(inbox.broker.clone()).await;
        let consumer = consume(&engine, effects_and_emits()).await;
        for (message_id, text) in [(first, STOP), (second, "behind")] {
            inbox.broker.put(SOURCE, Delivery { message_id, ..message(1, text) });
        }
        assert_eq!(inbox.effects(2).await, [STOP, "behind"], "in a transaction: {in_transaction}");
        inbox.settled().await;
        // SAFETY: a child of ours that has not been waited for, so the number is its.
        assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGCONT) }, 0);
        let answer = tokio::task::spawn_blocking(move || heard.recv_timeout(PATIENCE)).await.unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let answer = answer.expect("it has noticed, and settled what it had as copies");
        assert!(answer.ends_with(&format!("{ANSWER} 0 2 1")), "handled, completed, noticed: {answer}");
        assert_eq!((inbox.count("effect").await, inbox.count("wh_event_store").await), (2, 2));
        assert_eq!(consumer.metrics().handled.get(), 2);
        engine.shutdown(Duration::from_secs(10)).await;
    }
}
