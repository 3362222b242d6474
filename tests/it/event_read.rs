//! Reading streams: forwards, backwards, from a version, by pages, the newest, and the bytes as they went in.

use std::time::Duration;

use corelane::RawMessage;
use corelane::message::{Enqueue, Wishes};
use futures_util::StreamExt;
use uuid::Uuid;

use crate::engine::{Sink, start};
use crate::support::schema;

const END: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_read_forwards_backwards_from_a_version_and_by_pages() {
    let schema = schema();
    let engine = start(&schema, Sink::default().transport()).await;
    let stream = Uuid::now_v7();
    for n in 1..=25 {
        let payload = n.to_string();
        // A plain message in between takes no version.
        engine.enqueue(&RawMessage::command("test", b"{}").stream(stream)).await.unwrap();
        let stored = engine.enqueue(&RawMessage::event("test.event", payload.as_bytes()).stream(stream)).await.unwrap();
        assert_eq!((stored.version, stored.stream_seq), (n, 2 * n));
    }
    engine.enqueue(&RawMessage::event("test.event", b"{}").stream(Uuid::now_v7())).await.unwrap();
    let store = engine.event_store();
    for page_rows in [1, 7, 25, 500] {
        for (from, backwards, expected) in [
            (0, false, (1..=25).collect::<Vec<i64>>()),
            (1, false, (1..=25).collect()),
            (20, false, (20..=25).collect()),
            (26, false, Vec::new()),
            (i64::MAX, true, (1..=25).rev().collect()),
            (6, true, (1..=6).rev().collect()),
            (0, true, Vec::new()),
        ] {
            let reader = if backwards { store.read_backwards(stream, from) } else { store.read_forwards(stream, from) };
            let events: Vec<_> = reader.page_rows(page_rows).events().map(Result::unwrap).collect().await;
            let versions: Vec<i64> = events.iter().map(|event| event.version).collect();
            assert_eq!(versions, expected, "from {from}, backwards {backwards}, pages of {page_rows}");
            for event in &events {
                assert_eq!((event.stream_id, event.stream_seq), (stream, 2 * event.version));
                assert_eq!(event.payload, event.version.to_string().into_bytes());
            }
        }
    }
    let newest: Vec<i64> = store.read_newest(stream, 3).await.unwrap().iter().map(|event| event.version).collect();
    assert_eq!(newest, [25, 24, 23]);
    assert!(store.read_newest(stream, 0).await.unwrap().is_empty());
    assert_eq!(store.read_event(stream, 4).await.unwrap().unwrap().payload, b"4");
    assert_eq!(store.read_event(stream, 26).await.unwrap(), None);
    assert_eq!(store.read_event(stream, 0).await.unwrap(), None);
    engine.shutdown(END).await;
    assert!(matches!(store.read_newest(stream, 1).await, Err(corelane::Error::ShutDown)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_at_the_end_goes_on_with_what_is_appended_later() {
    let schema = schema();
    let engine = start(&schema, Sink::default().transport()).await;
    let stream = Uuid::now_v7();
    let mut reader = engine.event_store().read_forwards(stream, 1);
    assert!(reader.next_page().await.unwrap().is_empty());
    for n in 1..=3 {
        engine.enqueue(&RawMessage::event("test.event", b"{}").stream(stream)).await.unwrap();
        let page = reader.next_page().await.unwrap();
        assert_eq!(page.iter().map(|event| event.version).collect::<Vec<_>>(), [n]);
    }
    engine.shutdown(END).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_and_everything_beside_the_payload_are_read_as_they_went_in() {
    let schema = schema();
    let engine = start(&schema, Sink::default().transport()).await;
    let stream = Uuid::now_v7();
    let payloads: [&[u8]; 9] = [
        b"12345678901234567890",
        b"0.1234567890123456789",
        b"1e400",
        b"1E+2",
        b"-0",
        br#"{"a":1,"a":2}"#,
        br#"{"b":1,"a":2}"#,
        br#"{"a":"\u0000"}"#,
        b"",
    ];
    let (correlation, causation) = (Uuid::now_v7(), Uuid::now_v7());
    let wishes = Wishes::new()
        .correlation_id(correlation)
        .causation_id(causation)
        .traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        .metadata(br#"{"tenant":"x"}"#);
    for payload in payloads {
        let event = RawMessage::event("test.event", payload).stream(stream).content_type("application/x-test");
        engine.enqueue(&event.with(wishes)).await.unwrap();
    }
    let events = engine.event_store().read_forwards(stream, 1).next_page().await.unwrap();
    assert_eq!(events.iter().map(|event| event.payload.as_slice()).collect::<Vec<_>>(), payloads);
    for event in &events {
        assert_eq!((event.correlation_id, event.causation_id), (correlation, causation));
        assert_eq!((event.type_name.as_str(), event.content_type.as_str()), ("test.event", "application/x-test"));
        assert_eq!((event.trace, event.metadata.as_slice()), (wishes.trace, wishes.metadata));
    }
    assert!(events.windows(2).all(|pair| pair[0].position < pair[1].position));
    engine.shutdown(END).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_ends_by_bytes_as_well_and_nothing_is_passed_over() {
    let schema = schema();
    let engine = start(&schema, Sink::default().transport()).await;
    let stream = Uuid::now_v7();
    let large = vec![b'x'; 3 << 20];
    for _ in 0..5 {
        engine.enqueue(&RawMessage::event("test.event", &large).stream(stream)).await.unwrap();
    }
    let mut reader = engine.event_store().read_forwards(stream, 1);
    let mut pages = Vec::new();
    loop {
        let page = reader.next_page().await.unwrap();
        if page.is_empty() {
            break;
        }
        pages.push(page.iter().map(|event| event.version).collect::<Vec<_>>());
    }
    assert_eq!(pages, [vec![1, 2], vec![3, 4], vec![5]]);
    engine.shutdown(END).await;
}
