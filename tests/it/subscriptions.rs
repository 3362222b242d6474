//! What a subscription reads, and when: nothing is skipped, nothing stalls, whoever commits in whatever order.

use corelane::store::subscriptions::Filter;
use uuid::Uuid;

use crate::outbox_kit::call;
use crate::store_kit::{Message, Space, event, message};
use crate::subscription_kit::{Follower, assert_complete};

async fn begin(space: &Space) -> tokio_postgres::Client {
    let client = space.schema.client().await;
    client.batch_execute("begin").await.unwrap();
    client
}

#[tokio::test]
async fn late_commit_of_the_lower_position_is_read() {
    let space = Space::new().await;
    let mut follower = Follower::join(&space, "late-commit", Some(0)).await;
    let (a, b) = (begin(&space).await, begin(&space).await);
    let low = call(&a, &[event(Uuid::now_v7(), "a")]).await.unwrap()[0].position.unwrap();
    let high = call(&b, &[event(Uuid::now_v7(), "b")]).await.unwrap()[0].position.unwrap();
    assert!(low < high);
    b.batch_execute("commit").await.unwrap();
    assert_eq!(follower.texts().await, ["b"]);
    // Written down and read anew meanwhile: the place knows it too.
    follower.write().await.unwrap();
    assert_eq!(follower.texts().await, Vec::<String>::new());
    a.batch_execute("commit").await.unwrap();
    let mut other = Follower::join(&space, "late-commit", Some(0)).await;
    follower.share().await;
    other.share().await;
    let read = [follower.drain().await, other.drain().await].concat();
    assert_eq!(read.iter().map(|read| (read.position, &*read.text)).collect::<Vec<_>>(), [(low, "a")]);
}

/// A snapshot ends with the newest transaction that has completed: one beyond it may have drawn its positions long ago.
#[tokio::test]
async fn late_commit_of_the_newest_transaction_is_read() {
    let space = Space::new().await;
    let mut follower = Follower::join(&space, "newest", Some(0)).await;
    let client = space.schema.client().await;
    call(&client, &[event(Uuid::now_v7(), "before")]).await.unwrap();
    let newest = begin(&space).await;
    call(&newest, &[event(Uuid::now_v7(), "newest")]).await.unwrap();
    assert_eq!(follower.texts().await, ["before"]);
    assert_eq!(follower.texts().await, Vec::<String>::new());
    newest.batch_execute("commit").await.unwrap();
    // No position was drawn since: only the transactions that were open at the last look can tell.
    assert_eq!(follower.texts().await, ["newest"]);
}

#[tokio::test]
async fn rolled_back_appends_hold_up_nothing() {
    let space = Space::new().await;
    let mut follower = Follower::join(&space, "rolled-back", Some(0)).await;
    follower.filter.rows_max = 100;
    let client = space.schema.client().await;
    let streams: Vec<Uuid> = (0..10).map(|_| Uuid::now_v7()).collect();
    let (mut committed, mut read) = (0, Vec::new());
    for n in 0..1_000 {
        client.batch_execute("begin").await.unwrap();
        call(&client, &[event(streams[n % 10], "e")]).await.unwrap();
        match n % 10 {
            0 | 4 => client.batch_execute("rollback").await.unwrap(),
            // One that loses a race: the server ends it.
            7 => {
                let again = "insert into wh_event_store select * from wh_event_store order by xid desc limit 1";
                assert!(client.batch_execute(again).await.is_err() || committed == 0);
                client.batch_execute("rollback").await.unwrap();
            }
            _ => {
                client.batch_execute("commit").await.unwrap();
                committed += 1;
            }
        }
        if n % 100 == 50 {
            read.extend(follower.page().await);
        }
    }
    // After the last commit there is nothing to wait for: as many pages as the events need, and one that finds no more.
    let pages_max = (committed - read.len()) / 100 + 12;
    let mut pages = 0;
    while read.len() < committed {
        read.extend(follower.page().await);
        pages += 1;
        assert!(pages <= pages_max, "{} of {committed} after {pages} pages", read.len());
    }
    assert_eq!((committed, assert_complete(&read)), (700, 700));
    follower.drain().await;
    follower.write().await.unwrap();
    let lag = follower.statements.measure(&follower.client, "rolled-back", 1_000).await.unwrap();
    assert_eq!((lag.events, lag.oldest_age_ms), (0, 0));
}

#[tokio::test]
async fn long_snapshot_and_open_writers_stall_nothing() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    call(&client, &[event(Uuid::now_v7(), "first")]).await.unwrap();
    let mut follower = Follower::join(&space, "long-snapshot", Some(0)).await;
    // One that reads for long, with an id of its own; and one that writes another stream and never ends.
    let long = space.schema.client().await;
    long.batch_execute(
        "begin isolation level repeatable read; select pg_current_xact_id(), count(*) from wh_event_store",
    )
    .await
    .unwrap();
    let writer = begin(&space).await;
    call(&writer, &[event(Uuid::now_v7(), "open")]).await.unwrap();
    assert_eq!(follower.texts().await, ["first"]);
    for n in 0..20 {
        let text = format!("e{n}");
        call(&client, &[event(Uuid::now_v7(), &text)]).await.unwrap();
        assert_eq!(follower.page().await.into_iter().map(|read| read.text).collect::<Vec<_>>(), [text]);
    }
    follower.drain().await;
    follower.write().await.unwrap();
    let behind =
        || async { follower.statements.measure(&follower.client, "long-snapshot", 1_000).await.unwrap().events };
    assert_eq!(behind().await, 0);
    writer.batch_execute("commit").await.unwrap();
    long.batch_execute("commit").await.unwrap();
    assert_eq!(behind().await, 1, "what has come late is counted");
    assert_eq!(follower.texts().await, ["open"]);
}

#[tokio::test]
async fn a_catch_up_beside_live_appends_skips_and_doubles_nothing() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let streams: Vec<Uuid> = (0..500).map(|_| Uuid::now_v7()).collect();
    for part in 0..25 {
        let events: Vec<Message> = (0..2_000).map(|n| event(streams[(part * 2_000 + n) % 500], "old")).collect();
        call(&client, &events).await.unwrap();
    }
    let mut follower = Follower::join(&space, "catch-up", Some(0)).await;
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
    let (mut read, mut pages) = (Vec::new(), 0);
    while read.len() < 50_000 {
        read.extend(follower.page().await);
        pages += 1;
        if pages % 7 == 0 {
            follower.write().await.unwrap();
        }
        assert!(pages < 500, "{} events after {pages} pages", read.len());
    }
    stop.send_replace(true);
    let appended = appended.await.unwrap();
    read.extend(follower.drain().await);
    assert_eq!(assert_complete(&read), 50_000 + appended);
    // What is left to look at when nothing has come: nothing of the store.
    assert!(follower.run().quiet);
    // The least of some: the server reads its catalogue anew when other tests change theirs, and what they had open at
    // the last look is looked for when it has committed.
    let mut buffers = i64::MAX;
    for _ in 0..5 {
        follower.drain().await;
        buffers = buffers.min(follower.buffers_of_a_page().await);
    }
    assert!(buffers < 30, "{buffers} buffers for a quiet look");
}

#[tokio::test]
async fn it_filters_by_type_and_category_and_begins_where_it_is_told() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let stream = Uuid::now_v7();
    let put = async |type_name: &str, text: &str| {
        let sql = "select position from store_outbox_messages(array[$1::uuid], array[$2::uuid], array[$3::text],
            array[convert_to($4, 'UTF8')], array[true], array[null::text])";
        let position: i64 = client.query_one(sql, &[&Uuid::now_v7(), &stream, &type_name, &text]).await.unwrap().get(0);
        position
    };
    put("orders.Placed", "1").await;
    let middle = put("orders.Paid", "2").await;
    put("stock.Reserved", "3").await;
    put("orders_archive.Moved", "4").await;
    call(&client, &[message(stream, "no event")]).await.unwrap();
    let open = begin(&space).await;
    call(&open, &[event(Uuid::now_v7(), "open")]).await.unwrap();

    let of = async |name: &str, from: Option<i64>, types: &[&str], prefixes: &[&str]| {
        let mut follower = Follower::join(&space, name, from).await;
        let names = |of: &[&str]| of.iter().map(|name| (*name).to_owned()).collect();
        follower.filter = Filter { types: names(types), prefixes: names(prefixes), ..follower.filter };
        follower
    };
    assert_eq!(of("all", Some(0), &[], &[]).await.texts().await, ["1", "2", "3", "4"]);
    assert_eq!(of("types", Some(0), &["orders.Paid", "stock.Reserved"], &[]).await.texts().await, ["2", "3"]);
    assert_eq!(of("prefix", Some(0), &[], &["orders."]).await.texts().await, ["1", "2"]);
    assert_eq!(of("either", Some(0), &["stock.Reserved"], &["orders."]).await.texts().await, ["1", "2", "3"]);
    assert_eq!(of("behind", Some(middle), &[], &[]).await.texts().await, ["3", "4"]);
    let mut small = of("small", Some(0), &[], &["orders"]).await;
    small.filter.bytes_max = 1;
    assert_eq!(small.page().await.len(), 1, "one at least");
    assert_eq!(small.texts().await, ["2", "4"]);
    let mut now = of("now", None, &[], &[]).await;
    assert_eq!(now.texts().await, Vec::<String>::new());
    put("orders.Placed", "5").await;
    open.batch_execute("commit").await.unwrap();
    assert_eq!(now.texts().await, ["open", "5"], "what was open then is not past");
    let sql = "select join_subscription($1, 1, -1)";
    assert_eq!(crate::outbox_kit::code(client.execute(sql, &[&"negative"]).await), "22023");
}

#[tokio::test]
async fn a_page_reads_a_bounded_part_of_the_store() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let mut sizes = Vec::new();
    for round in 0..2 {
        for _ in 0..[5, 25][round] {
            let events: Vec<Message> = (0..4_000).map(|_| event(Uuid::now_v7(), &"x".repeat(200))).collect();
            call(&client, &events).await.unwrap();
        }
        client.batch_execute("vacuum analyze wh_event_store").await.unwrap();
        let mut follower = Follower::join(&space, &format!("bounded {round}"), Some(0)).await;
        follower.filter.rows_max = 100;
        // Into the middle, so that windows have found their size.
        for _ in 0..20 {
            assert!(!follower.page().await.is_empty());
        }
        sizes.push(follower.buffers_of_a_page().await);
    }
    assert!(sizes[1] < 2 * sizes[0] + 200, "six times the store: {sizes:?} buffers a page");
}
