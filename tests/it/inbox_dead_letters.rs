//! A consumer's dead letters in an operator's hands, by the library's calls: looked at, given back to a running consumer,
//! discarded; and the inbox's figures.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use corelane::dead_letters::inbox::{Filter, show};
use corelane::dead_letters::{Discarded, Mode, Retried, discard, list, retry};
use corelane::{Error, FailureReason, HandlerError, inbox_statistics};
use uuid::Uuid;

use crate::dead_letters::name_of;
use crate::inbox_kit::{CONSUMER, Inbox, SOURCE, consume, effect, text_of, writes};
use crate::support::eventually;

const SOON: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread")]
async fn what_a_consumer_gave_up_is_listed_shown_given_back_and_discarded() {
    let inbox = Inbox::new();
    let (engine, schema) = (inbox.engine(inbox.broker.clone()).await, name_of(&inbox.schema));
    let is_cured = Arc::new(AtomicBool::new(false));
    let cured = is_cured.clone();
    let consumer = consume(
        &engine,
        writes(move |delivery, context| {
            let is_ill = text_of(delivery).starts_with("ill") && !cured.load(Ordering::SeqCst);
            Box::pin(async move {
                if is_ill {
                    let text = format!("no such bed {}", text_of(delivery));
                    return Err(HandlerError::permanent(FailureReason::ValidationError, text));
                }
                effect(delivery, context).await
            })
        }),
    )
    .await;
    let ids = [inbox.put(1, "ill 1"), inbox.put(2, "ill 2"), inbox.put(0, "ill 3")];
    inbox.put(1, "well");
    let client = inbox.client().await;
    let of_all = Filter::all();
    eventually("three are dead", SOON, async || list(&client, &schema, &of_all, 10).await.unwrap().len() == 3).await;
    assert_eq!(inbox.effects(1).await, ["well"]);

    for refused in [
        list(&client, &schema, &Filter::new(), 10).await.map(|_| ()),
        retry(&client, &schema, &Filter::new().after(0), 10, Mode::Apply).await.map(|_| ()),
        discard(&client, &schema, &Filter::new(), 10, Mode::DryRun).await.map(|_| ()),
        list(&client, &schema, &Filter::all(), 0).await.map(|_| ()),
    ] {
        assert!(matches!(refused, Err(Error::Store(_))), "{refused:?}");
    }
    let mut dead = list(&client, &schema, &Filter::new().consumer(CONSUMER).source(SOURCE), 10).await.unwrap();
    dead.sort_by_key(|of| ids.iter().position(|id| *id == of.message_id));
    assert_eq!(dead.iter().map(|of| of.message_id).collect::<Vec<_>>(), ids);
    let first = &dead[0];
    assert_eq!((first.consumer.as_str(), first.source.as_str()), (CONSUMER, SOURCE));
    assert_eq!((first.stream_id, first.lane_id), (Some(Uuid::from_u128(1)), Uuid::from_u128(1)));
    assert_eq!((first.type_name.as_str(), first.attempts, first.retried), ("test.order", 1, 0));
    assert_eq!((first.reason, first.error.as_str()), (FailureReason::ValidationError, "no such bed ill 1"));
    assert!(!first.error_cut && !first.holds && first.received_at <= first.dead_at);
    assert_eq!(dead[2].stream_id, None);
    assert_eq!(dead[1].error_fingerprint, first.error_fingerprint, "numbers make no difference");
    let shown = show(&client, &schema, first.dead_letter_id).await.unwrap().unwrap();
    assert_eq!((&shown.dead_letter, shown.payload.as_slice()), (first, &b"ill 1"[..]));
    assert_eq!((shown.content_type.as_str(), shown.metadata), ("application/json", None));
    assert_eq!(show(&client, &schema, i64::MAX).await.unwrap(), None);

    // Each word of a filter by itself.
    let named = async |filter: Filter| -> usize { list(&client, &schema, &filter, 10).await.unwrap().len() };
    for (filter, count) in [
        (Filter::new().consumer("nobody"), 0),
        (Filter::new().source("elsewhere"), 0),
        (Filter::new().consumer(CONSUMER), 3),
        (Filter::new().ids(&[first.dead_letter_id]), 1),
        (Filter::new().type_name("test.*"), 3),
        (Filter::new().type_name("order"), 0),
        (Filter::new().reason(FailureReason::ValidationError), 3),
        (Filter::new().reason(FailureReason::Throttled), 0),
        (Filter::new().fingerprint(&first.error_fingerprint), 3),
        (Filter::new().stream(Uuid::from_u128(2)), 1),
        (Filter::new().dead_from(first.dead_at), 3),
        (Filter::new().dead_before(dead.iter().map(|of| of.dead_at).min().unwrap()), 0),
        (Filter::all().after(dead.iter().map(|of| of.dead_letter_id).max().unwrap()), 0),
    ] {
        let said = format!("{filter:?}");
        let found = named(filter).await;
        // The first may not have died first.
        assert!(if said.contains("dead_from: Some") { found >= 1 } else { found == count }, "{said}: {found}");
    }
    let figures = inbox_statistics(&client, &schema).await.unwrap();
    assert_eq!((figures.consumers, figures.dead_letters, figures.kept, figures.parked), (1, 3, 0, 0));
    assert!(figures.days >= 4 && figures.days_skipped == 0 && figures.oldest_day.is_some() && figures.seen_bytes > 0);
    assert_eq!(figures.oldest_parked_ms, None);

    // A dry run says what it would do, and does nothing.
    let ill = Filter::new().fingerprint(&first.error_fingerprint);
    let would = retry(&client, &schema, &ill, 2, Mode::DryRun).await.unwrap();
    assert_eq!(would, Retried { matched: 2, lanes: 2, more: true, ..Retried::default() });
    let would = discard(&client, &schema, &ill, 10, Mode::DryRun).await.unwrap();
    assert_eq!(would, Discarded { matched: 3, ..Discarded::default() });
    assert_eq!(named(ill.clone()).await, 3);

    // Given back, it dies again, and knows how often. Then it is cured.
    let one = Filter::new().stream(Uuid::from_u128(1));
    let done = retry(&client, &schema, &one, 10, Mode::Apply).await.unwrap();
    assert_eq!(done, Retried { matched: 1, retried: 1, lanes: 1, ..Retried::default() });
    eventually("it is dead again", SOON, async || {
        list(&client, &schema, &one, 10).await.unwrap().first().is_some_and(|of| of.retried == 1)
    })
    .await;
    is_cured.store(true, Ordering::SeqCst);
    assert_eq!(retry(&client, &schema, &one, 10, Mode::Apply).await.unwrap().retried, 1);
    assert_eq!(inbox.effects(2).await, ["well", "ill 1"]);
    inbox.nothing_kept().await;
    // Discarded, it is gone for good: a copy is one.
    let done = discard(&client, &schema, &ill, 10, Mode::Apply).await.unwrap();
    assert_eq!(done, Discarded { matched: 2, discarded: 2, ..Discarded::default() });
    assert_eq!(named(Filter::all()).await, 0);
    let before = consumer.metrics().duplicates.get();
    let copy = corelane::Delivery { message_id: ids[1], ..crate::inbox_kit::message(2, "ill 2") };
    inbox.broker.put(SOURCE, copy);
    inbox.settled().await;
    assert_eq!(consumer.metrics().duplicates.get(), before + 1);
    assert_eq!(inbox.effects(2).await.len(), 2);
    engine.shutdown(Duration::from_secs(10)).await;
}

/// The streams behind them wait for an operator, who lets them go on by either.
#[tokio::test(flavor = "multi_thread")]
async fn streams_held_behind_a_consumers_dead_letters_go_on_when_they_are_given_back_or_discarded() {
    let inbox = Inbox::new().set("inbox.on_dead", "hold");
    let (engine, schema) = (inbox.engine(inbox.broker.clone()).await, name_of(&inbox.schema));
    let is_cured = Arc::new(AtomicBool::new(false));
    let cured = is_cured.clone();
    let handler = writes(move |delivery, context| {
        let is_ill = text_of(delivery).starts_with("ill") && !cured.load(Ordering::SeqCst);
        Box::pin(async move {
            if is_ill {
                Err(HandlerError::permanent(FailureReason::Unknown, "ill"))
            } else {
                effect(delivery, context).await
            }
        })
    });
    let _consumer = consume(&engine, handler).await;
    let client = inbox.client().await;
    for (stream, text) in [(1, "ill"), (2, "ill"), (1, "behind"), (2, "behind")] {
        inbox.put(stream, text);
    }
    let held = async || inbox_statistics(&client, &schema).await.unwrap();
    eventually("both streams are held", SOON, async || (held().await.held, held().await.kept) == (2, 2)).await;
    let dead = list(&client, &schema, &Filter::all(), 10).await.unwrap();
    assert_eq!(dead.iter().map(|of| of.holds).collect::<Vec<_>>(), [true, true]);
    is_cured.store(true, Ordering::SeqCst);
    let of = |stream| Filter::new().stream(Uuid::from_u128(stream));
    let done = retry(&client, &schema, &of(1), 10, Mode::Apply).await.unwrap();
    assert_eq!((done.retried, done.released), (1, 1));
    assert_eq!(inbox.effects(2).await, ["ill", "behind"]);
    let done = discard(&client, &schema, &of(2), 10, Mode::Apply).await.unwrap();
    assert_eq!((done.discarded, done.released), (1, 1));
    assert_eq!(inbox.effects(3).await, ["ill", "behind", "behind"]);
    inbox.nothing_kept().await;
    assert_eq!(held().await.dead_letters, 0);
    engine.shutdown(Duration::from_secs(10)).await;
}
