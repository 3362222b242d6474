//! The inbox's promises together: two processes, one broker that sends copies, loses settlements and connections, a
//! database that ends sessions, and handlers of both kinds that fail now and then.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use corelane::transport::memory_broker::SettleFault;
use corelane::{Delivery, Handler, HandlerError, MemoryBroker, RawMessage};
use uuid::Uuid;

use crate::inbox_kit::{Calls, Inbox, SOURCE, consumer, does_in, effect, message};
use crate::support::schema;

/// Fails now and then; emits an event of its stream, and writes an effect where it has a transaction.
fn moody(in_transaction: bool, calls: &Calls) -> impl Handler + use<> {
    let calls = calls.clone();
    does_in(in_transaction, move |delivery, context| {
        let nth = calls.note();
        Box::pin(async move {
            if nth % 16 == 3 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let stream = delivery.stream_id.unwrap_or(delivery.message_id);
            context.push(&RawMessage::event("test.handled", &delivery.payload).stream(stream).to(&["sink"]))?;
            if in_transaction {
                effect(delivery, context).await?;
            }
            match nth % 29 {
                7 => Err(HandlerError::retry("now and then")),
                11 => panic!("now and then"),
                _ => Ok(()),
            }
        })
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_faults_cuts_and_two_processes_cost_no_effect_no_order_and_make_none_twice() {
    const MESSAGES: u128 = 900;
    const STREAMS: u128 = 30;
    let (copies, faults) = (Calls::default(), Calls::default());
    let broker = MemoryBroker::with_faults(
        400,
        move |_| usize::from(copies.note() % 10 == 0),
        move |_, _| match faults.note() % 23 {
            5 => SettleFault::Lost,
            9 => SettleFault::AnswerLost,
            _ => SettleFault::None,
        },
    );
    let inbox = Inbox::in_schema(schema(), broker).set("retry.attempts_max", "1000").set("retry.base_ms", "5");
    let mut engines = Vec::new();
    let calls = Calls::default();
    for _ in 0..2 {
        let engine = inbox.engine(inbox.broker.clone()).await;
        let moods = (moody(false, &calls), moody(true, &calls));
        consumer(&engine).raw_handler("test.plain", moods.0).raw_handler("test.writes", moods.1).start().await.unwrap();
        engines.push(engine);
    }
    let admin = Arc::new(inbox.client().await);
    for n in 0..MESSAGES {
        let type_name = if n % 5 < 3 { "test.plain" } else { "test.writes" };
        // The first stream is none: messages without order.
        let delivery = Delivery { type_name: type_name.to_owned(), ..message(n % STREAMS, &format!("{{\"n\":{n}}}")) };
        inbox.broker.put(SOURCE, delivery);
        match n % 150 {
            50 => inbox.broker.disconnect(SOURCE),
            100 => {
                let name = format!("corelane/{}/inbox", inbox.schema.name);
                let end = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = $1";
                admin.execute(end, &[&name]).await.unwrap();
            }
            at if at % 10 == 0 => tokio::time::sleep(Duration::from_millis(5)).await,
            _ => {}
        }
    }
    inbox.settled().await;
    inbox.nothing_kept().await;
    for engine in engines {
        engine.shutdown(Duration::from_secs(10)).await;
    }
    let client = inbox.client().await;
    let number = |text: &str| text["{\"n\":".len()..text.len() - 1].parse::<u128>().unwrap();
    let mut events: HashMap<Uuid, Vec<u128>> = HashMap::new();
    let sql = "select stream_id, convert_from(payload, 'UTF8') from wh_event_store order by stream_id, version";
    for row in client.query(sql, &[]).await.unwrap() {
        events.entry(row.get(0)).or_default().push(number(row.get(1)));
    }
    assert!(events.values().all(|of| of.is_sorted_by(|one, next| one < next)), "{events:?}");
    assert_eq!(events.values().map(Vec::len).sum::<usize>(), MESSAGES as usize);
    let effects = crate::inbox_kit::texts(&client, "select text from effect order by turn").await;
    let mut of_each: Vec<u128> = effects.iter().map(|text| number(text)).collect();
    of_each.sort_unstable();
    assert_eq!(of_each, (0..MESSAGES).filter(|n| n % 5 >= 3).collect::<Vec<_>>());
}
