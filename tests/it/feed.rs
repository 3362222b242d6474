//! The feed: whoever keeps a place reads every committed event once from it, whoever commits in whatever order.

use std::time::Duration;

use corelane::{Engine, Error, FeedPlace, FeedReader, RawMessage, StoredEvent};
use futures_util::StreamExt;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::engine::{Sink, start};
use crate::feed_kit::SqlFeed;
use crate::outbox_kit::call;
use crate::store_kit::{Message, Space, event, message};
use crate::subscription_kit::assert_complete;

const PATIENCE: Duration = Duration::from_secs(60);
const END: Duration = Duration::from_secs(10);

async fn begin(space: &Space) -> Client {
    let client = space.schema.client().await;
    client.batch_execute("begin").await.unwrap();
    client
}

fn texts(events: &[StoredEvent]) -> Vec<&str> {
    events.iter().map(|event| std::str::from_utf8(&event.payload).unwrap()).collect()
}

async fn space_and_engine() -> (Space, Engine) {
    let space = Space::new().await;
    let engine = start(&space.schema, Sink::default().transport()).await;
    (space, engine)
}

async fn feed(engine: &Engine) -> FeedReader {
    engine.event_store().feed().open().await.unwrap()
}

async fn put(client: &Client, stream: Uuid, type_name: &str, text: &str) -> i64 {
    let sql = "select position from store_outbox_messages(array[$1::uuid], array[$2::uuid], array[$3::text],
        array[convert_to($4, 'UTF8')], array[true], array[null::text])";
    client.query_one(sql, &[&Uuid::now_v7(), &stream, &type_name, &text]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn late_commit_is_read_by_the_feed_whichever_position_and_id_it_has() {
    let (space, engine) = space_and_engine().await;
    let mut reader = feed(&engine).await;
    let (a, b) = (begin(&space).await, begin(&space).await);
    let low = call(&a, &[event(Uuid::now_v7(), "a")]).await.unwrap()[0].position.unwrap();
    let high = call(&b, &[event(Uuid::now_v7(), "b")]).await.unwrap()[0].position.unwrap();
    assert!(low < high);
    b.batch_execute("commit").await.unwrap();
    assert_eq!(texts(&reader.next_page().await.unwrap().events), ["b"]);
    assert!(reader.next_page().await.unwrap().events.is_empty());
    // The newest transaction of all, which has drawn and not committed when the place is taken.
    let newest = begin(&space).await;
    call(&newest, &[event(Uuid::now_v7(), "newest")]).await.unwrap();
    assert!(reader.next_page().await.unwrap().events.is_empty());
    let place = reader.place().clone();
    a.batch_execute("commit").await.unwrap();
    newest.batch_execute("commit").await.unwrap();
    let late = reader.next_page().await.unwrap();
    assert_eq!(late.events.iter().map(|event| event.position).next(), Some(low));
    assert_eq!(texts(&late.events), ["a", "newest"]);
    // The place is a value: from it the same comes again, here after it was written down as text.
    let place: FeedPlace = serde_json::from_str(&serde_json::to_string(&place).unwrap()).unwrap();
    let mut again = engine.event_store().feed().from_place(place).open().await.unwrap();
    assert_eq!(texts(&again.next_page().await.unwrap().events), ["a", "newest"]);
    engine.shutdown(END).await;
    assert!(matches!(again.next_page().await, Err(Error::ShutDown)));
    assert!(again.next().await.unwrap().is_none());
}

#[tokio::test]
async fn rolled_back_appends_hold_up_no_feed() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let mut feed = SqlFeed { rows_max: 100, ..SqlFeed::new() };
    let streams: Vec<Uuid> = (0..10).map(|_| Uuid::now_v7()).collect();
    let (mut committed, mut read) = (0, Vec::new());
    for n in 0..1_000 {
        client.batch_execute("begin").await.unwrap();
        call(&client, &[event(streams[n % 10], "e")]).await.unwrap();
        if n % 10 == 0 || n % 10 == 4 {
            client.batch_execute("rollback").await.unwrap();
        } else {
            client.batch_execute("commit").await.unwrap();
            committed += 1;
        }
        if n % 100 == 50 {
            read.extend(feed.page(&client).await);
        }
    }
    // After the last commit there is nothing to wait for: as many pages as the events need, and one that finds no more.
    let pages_max = (committed - read.len()) / 100 + 12;
    let mut pages = 0;
    while !feed.is_whole || read.len() < committed {
        read.extend(feed.page(&client).await);
        pages += 1;
        assert!(pages <= pages_max, "{} of {committed} after {pages} pages", read.len());
    }
    assert_eq!((committed, assert_complete(&read)), (800, 800));
}

#[tokio::test(flavor = "multi_thread")]
async fn long_snapshot_and_open_writers_stall_no_feed() {
    let (space, engine) = space_and_engine().await;
    let client = space.schema.client().await;
    let mut reader = feed(&engine).await;
    let long = space.schema.client().await;
    long.batch_execute(
        "begin isolation level repeatable read; select pg_current_xact_id(), count(*) from wh_event_store",
    )
    .await
    .unwrap();
    let writer = begin(&space).await;
    call(&writer, &[event(Uuid::now_v7(), "open")]).await.unwrap();
    for n in 0..20 {
        let text = format!("e{n}");
        call(&client, &[event(Uuid::now_v7(), &text)]).await.unwrap();
        let page = reader.next_page().await.unwrap();
        assert_eq!((texts(&page.events), page.is_whole), (vec![&*text], true));
    }
    writer.batch_execute("commit").await.unwrap();
    long.batch_execute("commit").await.unwrap();
    assert_eq!(texts(&reader.next_page().await.unwrap().events), ["open"]);
    engine.shutdown(END).await;
}

#[tokio::test]
async fn a_feed_beside_live_appends_skips_and_doubles_nothing_and_costs_what_a_page_holds() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let streams: Vec<Uuid> = (0..500).map(|_| Uuid::now_v7()).collect();
    for part in 0..20 {
        let events: Vec<Message> = (0..2_000).map(|n| event(streams[(part * 2_000 + n) % 500], "old")).collect();
        call(&client, &events).await.unwrap();
    }
    client.batch_execute("vacuum analyze wh_event_store").await.unwrap();
    let mut feed = SqlFeed { rows_max: 500, ..SqlFeed::new() };
    let mut read = feed.page(&client).await;
    let mut sizes = Vec::new();
    for _ in 0..30 {
        sizes.push(feed.buffers_of_a_page(&client).await);
        read.extend(feed.page(&client).await);
    }
    // The same in the whole of it, however far it is: windows have found their size after some pages.
    let (first, last) = (sizes[5..10].iter().max().unwrap(), sizes[25..30].iter().max().unwrap());
    // Eight times as many events are looked at at most, each by its place.
    assert!(last <= &(2 * first) && *last < 8_000, "{sizes:?} buffers a page of 500");

    let (stop, stopped) = tokio::sync::watch::channel(false);
    let live = space.schema.client().await;
    let appended = tokio::spawn(async move {
        let mut count = 0;
        while !*stopped.borrow() {
            call(&live, &[event(streams[count % 500], "live"), event(Uuid::now_v7(), "live")]).await.unwrap();
            count += 2;
        }
        count
    });
    let mut pages = 0;
    while read.len() < 40_000 {
        read.extend(feed.page(&client).await);
        pages += 1;
        assert!(pages < 1_000, "{} events after {pages} pages", read.len());
    }
    stop.send_replace(true);
    let appended = appended.await.unwrap();
    read.extend(feed.drain(&client).await);
    assert_eq!(assert_complete(&read), 40_000 + appended);
    // What is left to look at when nothing has come: nothing of the store. (The least of some: see subscriptions.)
    let mut buffers = i64::MAX;
    for _ in 0..5 {
        feed.drain(&client).await;
        buffers = buffers.min(feed.buffers_of_a_page(&client).await);
    }
    assert!(buffers < 60, "{buffers} buffers for a quiet look");
}

#[tokio::test(flavor = "multi_thread")]
async fn it_begins_where_it_is_told_and_gives_what_is_wanted() {
    let (space, engine) = space_and_engine().await;
    let client = space.schema.client().await;
    let stream = Uuid::now_v7();
    put(&client, stream, "orders.Placed", "1").await;
    let middle = put(&client, stream, "orders.Paid", "2").await;
    put(&client, stream, "stock.Reserved", "3").await;
    put(&client, stream, "orders_archive.Moved", "4").await;
    call(&client, &[message(stream, "no event")]).await.unwrap();
    let store = engine.event_store();
    let all = async |feed: corelane::FeedBuilder| -> Vec<String> {
        let events = feed.open().await.unwrap().events();
        events.map(|event| String::from_utf8(event.unwrap().payload).unwrap()).collect().await
    };
    for rows_max in [1, 3, 500] {
        let feed = || store.feed().rows_max(rows_max);
        assert_eq!(all(feed()).await, ["1", "2", "3", "4"]);
        assert_eq!(all(feed().of_types(["orders.Paid", "stock.Reserved"])).await, ["2", "3"]);
        assert_eq!(all(feed().of_categories(["orders."])).await, ["1", "2"]);
        assert_eq!(all(feed().of_types(["stock.Reserved"]).of_categories(["orders."])).await, ["1", "2", "3"]);
        assert_eq!(all(feed().from_position(middle)).await, ["3", "4"]);
        assert_eq!(all(feed().of_types(["nothing"])).await, Vec::<String>::new());
    }
    let mut small = store.feed().bytes_max(1).open().await.unwrap();
    let first = small.next_page().await.unwrap();
    assert_eq!((first.events.len(), first.is_whole), (1, false), "one at least");
    let open = begin(&space).await;
    call(&open, &[event(Uuid::now_v7(), "open")]).await.unwrap();
    let mut now = store.feed().from_now().open().await.unwrap();
    assert!(now.next_page().await.unwrap().events.is_empty());
    put(&client, stream, "orders.Placed", "5").await;
    open.batch_execute("commit").await.unwrap();
    assert_eq!(texts(&now.next_page().await.unwrap().events), ["open", "5"], "what was open then is not past");
    assert!(matches!(store.feed().from_position(-1).open().await, Err(Error::Store(_))));
    engine.shutdown(END).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_followed_as_a_stream_of_pages_until_the_engine_ends() {
    let (_space, engine) = space_and_engine().await;
    let stream = Uuid::now_v7();
    let mut pages = std::pin::pin!(engine.event_store().feed().from_now().open().await.unwrap().follow());
    for n in 1..=20 {
        let payload = n.to_string();
        engine.enqueue(&RawMessage::event("test.event", payload.as_bytes()).stream(stream)).await.unwrap();
        let page = tokio::time::timeout(PATIENCE, pages.next()).await.expect("it comes").unwrap().unwrap();
        assert_eq!(texts(&page.events), [payload]);
        let [event] = &page.events[..] else { panic!("one event") };
        assert_eq!((event.stream_id, event.version), (stream, n));
        assert_eq!(event.type_name, "test.event");
    }
    // One that waits is told of the end.
    let (ended, _) = tokio::join!(tokio::time::timeout(PATIENCE, pages.next()), engine.shutdown(END));
    assert!(ended.expect("it ends").is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_that_is_none_is_refused_as_such_and_harms_nobody() {
    let (space, engine) = space_and_engine().await;
    let client = space.schema.client().await;
    put(&client, Uuid::now_v7(), "test.event", "1").await;
    let good = feed(&engine).await.place().as_str().to_owned();
    let ahead = good.replace("\"generation\": 1", "\"generation\": 2");
    assert_ne!(good, ahead);
    let deep = "[".repeat(100_000);
    for bad in [
        "",
        "x",
        "5",
        "{}",
        "{\"feed\": 2}",
        "{\"feed\": 1}",
        "{\"feed\": 1, \"at\": 5}",
        &good.replace("1:1:", "1:x:"),
        &good.replace("false", "null"),
        &good.replace("\"started\": 0", "\"started\": \"\\u0000\""),
        &good.replace("\"position\": 0", "\"position\": 99999999999999999999"),
        &good.replace("\"window\": null", "\"window\": 0"),
        &deep,
        &ahead,
    ] {
        assert_ne!(bad, good);
        let opened = engine.event_store().feed().from_place(FeedPlace::from_text(bad)).open().await;
        let refused = opened.unwrap().next_page().await;
        assert!(matches!(refused, Err(Error::FeedPlace(_))), "{bad:.80}: {refused:?}");
    }
    let mut reader = engine.event_store().feed().from_place(FeedPlace::from_text(good)).open().await.unwrap();
    assert_eq!(texts(&reader.next_page().await.unwrap().events), ["1"]);
    engine.shutdown(END).await;
}
