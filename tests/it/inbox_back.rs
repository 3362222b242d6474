//! The inbox and what goes back to its broker: with what is behind it, in order, and nothing overtakes it.

use std::time::Duration;

use corelane::transport::memory_broker::SettleFault;
use corelane::{MemoryBroker, Settlement};

use crate::inbox_kit::{Calls, Inbox, SOURCE, consume, effect, fails, text_of, writes};
use crate::support::schema;

#[tokio::test(flavor = "multi_thread")]
async fn what_the_broker_is_to_retry_goes_back_with_those_behind_it_in_order() {
    let inbox = Inbox::new().set("inbox.retry", "broker");
    let engine = inbox.engine(inbox.broker.clone()).await;
    let calls = Calls::default();
    consume(&engine, fails("a2", 3, &calls)).await;
    for text in ["a1", "a2", "a3", "a4"] {
        inbox.put(1, text);
    }
    inbox.settled().await;
    assert_eq!(inbox.effects(4).await, ["a1", "a2", "a3", "a4"]);
    assert_eq!((calls.count(), inbox.broker.counts(SOURCE).completed), (4, 4));
    assert_eq!((inbox.count("wh_inbox_seen").await, inbox.count("wh_inbox_parked").await), (4, 0));
    engine.shutdown(Duration::from_secs(10)).await;
}

/// One that is given back does not reach the broker, or its answer is lost, while one behind it comes and goes back.
#[tokio::test(flavor = "multi_thread")]
async fn what_comes_behind_one_that_is_on_its_way_back_does_not_overtake_it() {
    // The last: it never reaches the broker, which has it back when its lock ends.
    for (fault, faulty) in [(SettleFault::Lost, 2), (SettleFault::AnswerLost, 1), (SettleFault::Lost, 3)] {
        let tried = Calls::default();
        let noted = tried.clone();
        let broker = MemoryBroker::with_faults(
            2_000,
            |_| 0,
            move |delivery, settlement| {
                let is_first = text_of(delivery) == "a1" && *settlement == Settlement::Abandon;
                if is_first && noted.note() < faulty { fault } else { SettleFault::None }
            },
        );
        let inbox = Inbox::in_schema(schema(), broker).set("inbox.retry", "broker");
        let engine = inbox.engine(inbox.broker.clone()).await;
        let calls = Calls::default();
        consume(&engine, fails("a1", 1, &calls)).await;
        inbox.put(1, "a1");
        tried.wait_for(1).await;
        for text in ["a2", "a3", "a4"] {
            inbox.put(1, text);
        }
        inbox.put(2, "b1");
        let effects = inbox.effects(5).await;
        let of_a: Vec<&String> = effects.iter().filter(|text| text.starts_with('a')).collect();
        assert_eq!(of_a, ["a1", "a2", "a3", "a4"], "{fault:?} {faulty} times");
        inbox.settled().await;
        assert_eq!(inbox.broker.counts(SOURCE).completed, 5);
        engine.shutdown(Duration::from_secs(10)).await;
    }
}

/// What goes back to the broker takes along what was decided of its stream for a later commit.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_decided_behind_one_that_goes_back_goes_back_too_also_beyond_its_commit() {
    for rows_max in ["1", "2", "3"] {
        let inbox = Inbox::new().set("inbox.retry", "broker").set("inbox.commit_rows_max", rows_max);
        let calls = Calls::default();
        let texts: Vec<String> = (1..=6).map(|n| format!("a{n}")).collect();
        for text in &texts {
            inbox.put(1, text);
        }
        let engine = inbox.engine(inbox.broker.clone()).await;
        consume(&engine, fails("a1", 2, &calls)).await;
        assert_eq!(inbox.effects(6).await, texts, "{rows_max} rows a commit");
        inbox.settled().await;
        engine.shutdown(Duration::from_secs(10)).await;
    }
}

/// The same of one that the database refuses only when its transaction commits.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_decided_behind_one_that_the_commit_refuses_goes_back_with_it() {
    for rows_max in ["1", "2", "6"] {
        let inbox = Inbox::new().set("inbox.retry", "broker").set("inbox.commit_rows_max", rows_max);
        let texts: Vec<String> = (1..=6).map(|n| format!("a{n}")).collect();
        for text in &texts {
            inbox.put(1, text);
        }
        let engine = inbox.engine(inbox.broker.clone()).await;
        let refuses = "create sequence refused;
            create function refuse() returns trigger language plpgsql as $$ begin
              if nextval('refused') <= 2 then raise exception 'not yet' using errcode = 'check_violation'; end if;
              return null;
            end $$;
            create constraint trigger refuse after insert on effect deferrable initially deferred
              for each row when (new.text = 'a1') execute function refuse();";
        inbox.client().await.batch_execute(refuses).await.unwrap();
        consume(&engine, writes(|delivery, context| Box::pin(effect(delivery, context)))).await;
        assert_eq!(inbox.effects(6).await, texts, "{rows_max} rows a commit");
        inbox.settled().await;
        engine.shutdown(Duration::from_secs(10)).await;
    }
}
