//! What one delivery's handler emits, and what one commit takes: bounded by bytes as well as by rows.

use std::sync::Arc;
use std::time::Duration;

use corelane::{Error, RawMessage};
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::inbox_kit::{Calls, Inbox, consume, does_in, text_of, texts};

/// A third of the bounds of these tests, about.
static PART: [u8; 20_000] = [b'x'; 20_000];

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_whose_handler_emits_too_much_dies_by_itself_and_is_told_why() {
    for in_transaction in [false, true] {
        let inbox = Inbox::new().set("inbox.emit_bytes_max", "65536");
        let engine = inbox.engine(inbox.broker.clone()).await;
        let handler = does_in(in_transaction, |delivery, context| {
            Box::pin(async move {
                let stream = delivery.stream_id.unwrap();
                let mut emitted = 0;
                loop {
                    let event = RawMessage::event("test.part", &PART).stream(stream);
                    match context.push(&event) {
                        Ok(_) => emitted += 1,
                        // One that makes do with less leaves what there was room for.
                        Err(Error::MessageLimit { .. }) if text_of(delivery) == "modest" => break,
                        Err(error) => return Err(error.into()),
                    }
                }
                assert_eq!(emitted, 3);
                Ok(())
            })
        });
        let dead = inbox.put(1, "greedy");
        inbox.put(1, "modest");
        inbox.put(2, "modest");
        let consumer = consume(&engine, handler).await;
        inbox.settled().await;
        inbox.nothing_kept().await;
        assert_eq!((consumer.metrics().handled.get(), consumer.metrics().dead.get()), (2, 1));
        let sql = "select error from wh_inbox_dead_letter where attempts = 1";
        let error = texts(&inbox.client().await, sql).await.pop().unwrap();
        for part in [&dead.to_string(), "inbox.emit_bytes_max", "65536 bytes"] {
            assert!(error.contains(part), "{error}");
        }
        let sql = "select stream_id::text from wh_event_store where length(payload) = 20000 order by 1";
        let events = texts(&inbox.client().await, sql).await;
        assert_eq!(events, [1, 1, 1, 2, 2, 2].map(|stream| Uuid::from_u128(stream).to_string()));
        engine.shutdown(Duration::from_secs(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_takes_no_further_result_beyond_its_bytes() {
    for in_transaction in [false, true] {
        let inbox = Inbox::new()
            .set("inbox.commit_bytes_max", "65536")
            .set("inbox.workers", "1")
            .set("inbox.commit_age_ms_max", "60000");
        let engine = inbox.engine(inbox.broker.clone()).await;
        let (calls, open) = (Calls::default(), Arc::new(Semaphore::new(0)));
        let (noted, opens) = (calls.clone(), open.clone());
        let handler = does_in(in_transaction, move |delivery, context| {
            let (call, open) = (noted.note(), opens.clone());
            Box::pin(async move {
                if !in_transaction {
                    // All of them end together, for one commit.
                    if call + 1 == 20 {
                        open.add_permits(20);
                    }
                    open.acquire().await.unwrap().forget();
                }
                context.push(&RawMessage::event("test.part", &PART).stream(delivery.stream_id.unwrap()))?;
                Ok(())
            })
        });
        for n in 1..=20u128 {
            inbox.put(n, "");
        }
        let consumer = consume(&engine, handler).await;
        inbox.settled().await;
        assert_eq!((inbox.count("wh_event_store").await, consumer.metrics().emitted.get()), (20, 20));
        let sql = "select max(n)::int8 from (select sum(length(payload)) as n from wh_event_store group by xmin) e";
        let most: i64 = inbox.client().await.query_one(sql, &[]).await.unwrap().get(0);
        // One that runs in the transaction shows its size when it has run.
        let allowed = if in_transaction { 4 * 20_000 } else { 3 * 20_000 };
        assert!(most <= allowed, "in transaction: {in_transaction}: {most} bytes in one");
        engine.shutdown(Duration::from_secs(10)).await;
    }
}
