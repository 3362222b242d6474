//! The inbox end to end: what a broker delivers has its effects once, in one commit, in the order of its stream.

use std::time::Duration;

use corelane::message::{Message, kind};
use corelane::{HandlerError, RawMessage, SettleOutcome, Settlement, Transport};
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::engine::Sink;
use crate::inbox_kit::{
    Calls, Inbox, SOURCE, consume, consumer, does, effect, effects_and_emits, message, text_of, writes,
};
use crate::support::eventually;

/// The broker of the source, and a sink for everything else.
struct Both(corelane::MemoryBroker, corelane::MemoryTransport);

impl Transport for Both {
    fn limits(&self) -> corelane::TransportLimits {
        self.1.limits()
    }

    fn publish<'a>(
        &'a self,
        batch: &'a dyn corelane::OutgoingBatch,
        outcomes: &'a mut Vec<corelane::PublishOutcome>,
    ) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        self.1.publish(batch, outcomes)
    }

    fn name(&self) -> &str {
        "both"
    }

    fn receiver(&self, source: &str) -> Option<std::sync::Arc<dyn corelane::Receiver>> {
        self.0.receiver(source)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_delivered_has_its_effects_once_and_what_it_emits_is_published() {
    let inbox = Inbox::new();
    let sink = Sink::default();
    let engine = inbox.engine(Both(inbox.broker.clone(), sink.transport())).await;
    let consumer = consume(&engine, effects_and_emits()).await;
    for n in 0..200u128 {
        inbox.put(n % 10 + 1, &format!("{{\"n\":{n}}}"));
    }
    inbox.effects(200).await;
    inbox.settled().await;
    sink.wait_for(200).await;
    assert_eq!(inbox.count("wh_inbox_seen").await, 200);
    assert_eq!(inbox.broker.counts(SOURCE).completed, 200);
    let report = engine.shutdown(Duration::from_secs(10)).await;
    assert!(report.drained, "{report:?}");
    assert_eq!((inbox.count("effect").await, sink.len()), (200, 200));
    sink.assert_ordered();
    assert_eq!(consumer.metrics().handled.get(), 200);
    // The order of each stream, by the effects too.
    let read = "select text from effect order by turn";
    let effects = crate::inbox_kit::texts(&inbox.client().await, read).await;
    for stream in 0..10 {
        let of: Vec<u128> = (effects.iter())
            .map(|text| text[5..text.len() - 1].parse().unwrap())
            .filter(|n: &u128| n % 10 == stream)
            .collect();
        assert!(of.is_sorted(), "{of:?}");
    }
}

/// A type of the tests.
#[derive(serde::Serialize, serde::Deserialize)]
struct OrderPlaced {
    order: Uuid,
    total: u64,
}

impl Message for OrderPlaced {
    type Kind = kind::Event;
    const NAME: &'static str = "test.order-placed";
    const DESTINATIONS: &'static [&'static str] = &["sink"];
    fn stream_id(&self) -> Option<Uuid> {
        Some(self.order)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_typed_handler_reads_its_message_and_its_emissions_bear_the_conversation() {
    let inbox = Inbox::new();
    let engine = inbox.engine(inbox.broker.clone()).await;
    consumer(&engine)
        .handler::<OrderPlaced>(|order, context| {
            Box::pin(async move {
                context.push(&OrderPlaced { order: order.order, total: order.total + 1 })?;
                Ok(())
            })
        })
        .start()
        .await
        .unwrap();
    let order = Uuid::new_v4();
    let payload = serde_json::to_vec(&OrderPlaced { order, total: 41 }).unwrap();
    let correlation_id = Uuid::new_v4();
    let placed = corelane::Delivery {
        type_name: OrderPlaced::NAME.to_owned(),
        stream_id: Some(order),
        correlation_id,
        payload,
        ..message(0, "")
    };
    let cause = placed.message_id;
    let unreadable = corelane::Delivery { type_name: OrderPlaced::NAME.to_owned(), ..message(0, "{\"order\":7}") };
    let unknown = message(0, "{}");
    for delivery in [unreadable.clone(), placed, unknown.clone()] {
        inbox.broker.put(SOURCE, delivery);
    }
    inbox.settled().await;
    // Published to the same broker, where nobody receives from it.
    eventually("it is published", Duration::from_secs(60), || async { inbox.broker.counts("sink").waiting == 1 }).await;
    let sink = inbox.broker.receiver("sink").unwrap();
    let emitted = sink.receive(10).await.unwrap().remove(0);
    assert_eq!((emitted.correlation_id, emitted.causation_id), (correlation_id, cause));
    assert_eq!(emitted.payload, serde_json::to_vec(&OrderPlaced { order, total: 42 }).unwrap());
    assert_eq!(sink.settle(&[(emitted.receipt, Settlement::Complete)]).await, [SettleOutcome::Settled]);
    // What cannot be understood is dead at the broker, alone, and nothing of it is remembered here.
    let mut dead: Vec<Uuid> = inbox.broker.dead(SOURCE).iter().map(|dead| dead.delivery.message_id).collect();
    dead.sort();
    let mut expected = vec![unreadable.message_id, unknown.message_id];
    expected.sort();
    assert_eq!(dead, expected);
    assert_eq!(inbox.count("wh_inbox_seen").await, 1);
    engine.shutdown(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_fails_leaves_nothing_of_its_effects_and_takes_no_neighbour_along() {
    let inbox = Inbox::new().set("retry.attempts_max", "2");
    let engine = inbox.engine(inbox.broker.clone()).await;
    consume(
        &engine,
        writes(|delivery, context| {
            Box::pin(async move {
                effect(delivery, context).await?;
                context.push(&RawMessage::event("test.handled", b"{}").stream(delivery.message_id).to(&["sink"]))?;
                match text_of(delivery).as_str() {
                    "fails" => Err(HandlerError::retry("as it was told")),
                    "panics" => panic!("as it was told"),
                    "errs" => {
                        // An error of its SQL that it swallows.
                        let _ = context.transaction()?.execute("select 1 / 0", &[]).await;
                        Ok(())
                    }
                    _ => Ok(()),
                }
            })
        }),
    )
    .await;
    for (n, text) in ["one", "fails", "two", "panics", "three", "errs", "four"].into_iter().enumerate() {
        inbox.put(n as u128 + 1, text);
    }
    inbox.settled().await;
    let mut effects = inbox.effects(4).await;
    effects.sort();
    assert_eq!(effects, ["four", "one", "three", "two"]);
    eventually("they are dead", Duration::from_secs(60), || async { inbox.count("wh_inbox_dead_letter").await == 3 })
        .await;
    inbox.nothing_kept().await;
    assert_eq!((inbox.count("effect").await, inbox.count("wh_event_store").await), (4, 4));
    assert_eq!((inbox.count("wh_inbox_seen").await, inbox.broker.counts(SOURCE).completed), (7, 7));
    engine.shutdown(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_in_one_batch_are_one_and_all_of_them_are_completed() {
    let broker = corelane::MemoryBroker::with_faults(
        30_000,
        |_| 2,
        |_, _| corelane::transport::memory_broker::SettleFault::None,
    );
    let inbox = Inbox::in_schema(crate::support::schema(), broker);
    let engine = inbox.engine(inbox.broker.clone()).await;
    for n in 0..50 {
        inbox.put(n % 5, &n.to_string());
    }
    let consumer = consume(&engine, effects_and_emits()).await;
    inbox.settled().await;
    assert_eq!(inbox.effects(50).await.len(), 50);
    assert_eq!(inbox.broker.counts(SOURCE).completed, 150);
    assert_eq!(consumer.metrics().duplicates.get(), 100);
    engine.shutdown(Duration::from_secs(10)).await;
    assert_eq!((inbox.count("effect").await, inbox.count("wh_event_store").await), (50, 50));
}

/// Two brokers that do not know of each other deliver the same message to two engines at once.
#[tokio::test(flavor = "multi_thread")]
async fn same_moment_at_two_engines_runs_once_and_if_the_first_rolls_back_the_second_runs() {
    for first_fails in [false, true] {
        let here = Inbox::new().set("inbox.retry", "broker");
        let there = corelane::MemoryBroker::new(30_000);
        let engines = [here.engine(here.broker.clone()).await, here.engine(there.clone()).await];
        let calls = Calls::default();
        for engine in &engines {
            let calls = calls.clone();
            let handler = writes(move |delivery, context| {
                let nth = calls.note();
                Box::pin(async move {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    effect(delivery, context).await?;
                    if nth == 0 && first_fails { Err(HandlerError::retry("the first")) } else { Ok(()) }
                })
            });
            consume(engine, handler).await;
        }
        let message = message(1, "m1");
        here.broker.put(SOURCE, message.clone());
        there.put(SOURCE, message);
        here.settled().await;
        eventually("the other broker's copy is completed", Duration::from_secs(60), || async {
            there.counts(SOURCE).completed == 1
        })
        .await;
        assert_eq!(here.effects(1).await, ["m1"]);
        assert_eq!(calls.count(), if first_fails { 2 } else { 1 });
        for engine in engines {
            engine.shutdown(Duration::from_secs(10)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn handlers_of_several_streams_run_beside_each_other_and_those_of_one_do_not() {
    let inbox = Inbox::new();
    let engine = inbox.engine(inbox.broker.clone()).await;
    static OPEN: Semaphore = Semaphore::const_new(0);
    let running = Calls::default();
    let noted = running.clone();
    let handler = does(move |_, _| {
        noted.note();
        Box::pin(async move {
            OPEN.acquire().await.unwrap().forget();
            Ok(())
        })
    });
    let consumer = consume(&engine, handler).await;
    for stream in 1..=8 {
        inbox.put(stream, "first");
        inbox.put(stream, "second");
    }
    running.wait_for(8).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(running.count(), 8, "of each stream the first only");
    OPEN.add_permits(16);
    inbox.settled().await;
    assert_eq!(consumer.metrics().handled.get(), 16);
    engine.shutdown(Duration::from_secs(10)).await;
}
