//! Events under names and in shapes of before: every way of reading brings them up to date, and one that it cannot read is
//! that one's own outcome.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use corelane::message::kind;
use corelane::{Decoded, Delivery, Engine, EventTypes, HandlerError, Message, RawMessage, StoredEvent};
use futures_util::StreamExt;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::engine::{Sink, config};
use crate::inbox_kit::{Inbox, SOURCE, consumer};
use crate::support::schema;

const END: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct Placed {
    cents: u64,
}

impl Message for Placed {
    type Kind = kind::Event;
    const NAME: &'static str = "shop.placed.2";
    const DESTINATIONS: &'static [&'static str] = &[];
    fn stream_id(&self) -> Option<Uuid> {
        None
    }
}

/// Two shapes, three names.
fn types() -> EventTypes {
    EventTypes::builder()
        .event::<Placed>()
        .alias("Shop.Placed", "shop.placed.1")
        .upcast("shop.placed.1", Placed::NAME, |old: Value| match old["euros"].as_u64() {
            Some(euros) => Ok(json!({ "cents": euros * 100 })),
            None => Err("no euros"),
        })
        .build()
        .unwrap()
}

/// What is stored or sent: name, payload, and what it is read as.
const CASES: [(&str, &str, Option<u64>); 7] = [
    ("shop.placed.2", r#"{"cents": 1}"#, Some(1)),
    ("shop.placed.1", r#"{"euros": 2}"#, Some(200)),
    ("Shop.Placed", r#"{"euros": 3}"#, Some(300)),
    ("Shop.Placed", r#"{"cents": 4}"#, None),
    ("shop.shipped", "{}", None),
    ("shop.placed.2", "{", None),
    ("shop.placed.2", r#"{"cents": 7}"#, Some(7)),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_typed_handler_gets_what_was_sent_under_older_names_and_shapes() {
    let inbox = Inbox { types: types(), ..Inbox::new() };
    let engine = inbox.engine(inbox.broker.clone()).await;
    let seen: Arc<Mutex<Vec<u64>>> = Arc::default();
    let noted = seen.clone();
    consumer(&engine)
        .handler::<Placed>(move |placed, _| {
            noted.lock().unwrap().push(placed.cents);
            Box::pin(async { Ok::<(), HandlerError>(()) })
        })
        .start()
        .await
        .unwrap();
    for (type_name, payload, _) in CASES {
        let delivery = Delivery {
            message_id: Uuid::now_v7(),
            type_name: type_name.to_owned(),
            payload: payload.as_bytes().to_vec(),
            ..Delivery::default()
        };
        inbox.broker.put(SOURCE, delivery);
    }
    inbox.settled().await;
    let mut seen = seen.lock().unwrap().clone();
    seen.sort_unstable();
    assert_eq!(seen, [1, 7, 200, 300]);
    let mut dead: Vec<String> = inbox.broker.dead(SOURCE).into_iter().map(|dead| dead.text).collect();
    dead.sort_unstable();
    assert_eq!(dead.len(), 3, "{dead:?}");
    for text in ["no euros", "shop.shipped", "EOF"] {
        assert!(dead.iter().any(|dead| dead.contains(text)), "{text} in {dead:?}");
    }
    engine.shutdown(END).await;
}

/// What an event of a case is read as.
fn outcome(event: &StoredEvent) -> Result<u64, String> {
    match event.decode::<Placed>() {
        Decoded::Known(placed) => Ok(placed.cents),
        other => Err(format!("{other:?}")),
    }
}

fn assert_outcomes(what: &str, events: &[StoredEvent]) {
    assert_eq!(events.len(), CASES.len(), "{what}");
    for (event, (type_name, payload, cents)) in events.iter().zip(CASES) {
        assert_eq!((&*event.type_name, &*event.payload), (type_name, payload.as_bytes()), "{what}: as it was stored");
        assert_eq!(outcome(event).ok(), cents, "{what}: {type_name} {payload}");
        assert_eq!(event.current_name(), (type_name != "shop.shipped").then_some(Placed::NAME), "{what}");
    }
    assert_eq!(events[4].decode::<Placed>(), Decoded::Unknown, "{what}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_way_of_reading_brings_events_up_to_date_and_none_stops_at_one_that_it_cannot_read() {
    let schema = schema();
    let builder = Engine::builder(config(&schema)).transport(Sink::default().transport()).event_types(types());
    let engine = builder.migrate(true).start().await.unwrap();
    let stream = Uuid::now_v7();
    for (type_name, payload, _) in CASES {
        engine.enqueue(&RawMessage::event(type_name, payload.as_bytes()).stream(stream)).await.unwrap();
    }
    let store = engine.event_store();
    assert_outcomes("a stream", &store.read_forwards(stream, 1).next_page().await.unwrap());
    assert_outcomes("the feed", &store.feed().open().await.unwrap().next_page().await.unwrap().events);
    let mut subscription = engine.subscribe("types").start().await.unwrap();
    let batch = subscription.next().await.unwrap().unwrap();
    assert_outcomes("a subscription", batch.events());

    // Asked for by the name of today, older ones come as well; by the beginning of it too.
    let names = async |feed: corelane::FeedBuilder| -> Vec<String> {
        let events = feed.open().await.unwrap().events();
        events.map(|event| event.unwrap().type_name).collect().await
    };
    let all_placed: Vec<&str> = CASES.iter().map(|case| case.0).filter(|name| *name != "shop.shipped").collect();
    assert_eq!(names(store.feed().of_types([Placed::NAME])).await, all_placed);
    assert_eq!(names(store.feed().of_categories(["shop.placed."])).await, all_placed);
    assert_eq!(names(store.feed().of_types(["shop.placed.1"])).await, ["shop.placed.1"]);
    let mut subscription = engine.subscribe("placed").of_types([Placed::NAME]).start().await.unwrap();
    let batch = subscription.next().await.unwrap().unwrap();
    let read: Vec<&str> = batch.events().iter().map(|event| &*event.type_name).collect();
    assert_eq!(read, all_placed);
    engine.shutdown(END).await;
}
