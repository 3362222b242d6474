//! The inbox's dead letters: what operators see, give back and discard, and what becomes of the lanes behind them.

use std::time::Duration;

use uuid::Uuid;

use crate::inbox_sql_kit::{Session, finish, unpark};
use crate::outbox_kit::refusal;
use crate::store_kit::Space;
use crate::support::eventually;

/// Matched, done, released, more.
async fn act(session: &Session, call: &str) -> (i32, i32, i32, bool) {
    let done = if call.starts_with("retry") { "retried" } else { "discarded" };
    let sql = format!("select matched, {done}, released, more from {call}");
    let row = session.client.query_one(&sql, &[]).await.unwrap();
    (row.get(0), row.get(1), row.get(2), row.get(3))
}

/// Three messages of a lane, of which the first has died; what is behind it waits if it holds.
async fn dead_head(session: &Session, hold: bool) -> (Uuid, [Uuid; 3]) {
    let (lane, of) = (Uuid::now_v7(), [Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7()]);
    assert_eq!(session.begin(&of.map(|id| (id, lane))).await, [0; 3]);
    session.keep(&of.map(|id| (id, lane))).await;
    session.park(lane, of[0], 2, "", 0).await;
    assert!(session.bury(of[0], "order 17 is odd", hold).await);
    assert!(!session.bury(of[0], "again", hold).await, "it is there no more");
    assert_eq!(unpark(&session.client, session.consumer, &[lane]).await, [false]);
    session.unlock(&[lane]).await;
    (lane, of)
}

#[tokio::test]
async fn what_died_is_listed_shown_and_given_back_in_its_place() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    let (lane, of) = dead_head(&session, false).await;
    let claimed = session.claim_all().await;
    assert_eq!(claimed.iter().map(|of| of.id).collect::<Vec<_>>(), of[1..], "the lane goes on");
    session.unlock(&[lane]).await;

    for refused in ["list_inbox_dead_letters()", "retry_inbox_dead_letters()", "discard_inbox_dead_letters()"] {
        let outcome = session.client.query(&format!("select * from {refused}"), &[]).await;
        let (state, text) = refusal(outcome);
        assert!(state == "22023" && text.contains("filter of dead letters is empty"), "{refused}: {state} {text}");
    }
    let filter = "p_consumer => 'billing', p_source => 'orders', p_type => 'billing.*', p_reason => 4::int2";
    let listed = session.client.query(&format!("select * from list_inbox_dead_letters({filter})"), &[]).await.unwrap();
    assert_eq!(listed.len(), 1);
    let (row, id) = (&listed[0], listed[0].get::<_, i64>("dead_letter_id"));
    assert_eq!((row.get::<_, Uuid>("message_id"), row.get::<_, Uuid>("lane_id")), (of[0], lane));
    assert_eq!((row.get::<_, i32>("attempts"), row.get::<_, i32>("retried")), (3, 0));
    assert_eq!((row.get::<_, &str>("error"), row.get::<_, bool>("holds")), ("order 17 is odd", false));
    for other in
        ["p_consumer => 'nobody'", "p_source => 'x'", "p_type => 'told'", "p_reason => 5::int2", "p_ids => '{0}'"]
    {
        let none = session.client.query(&format!("select from list_inbox_dead_letters({other})"), &[]).await.unwrap();
        assert!(none.is_empty(), "{other}");
    }
    let shown = session.client.query_one("select * from show_inbox_dead_letter($1)", &[&id]).await.unwrap();
    assert_eq!(
        (shown.get::<_, &[u8]>("payload"), shown.get::<_, &str>("content_type")),
        (&b"0"[..], "application/json")
    );

    assert_eq!(act(&session, &format!("retry_inbox_dead_letters({filter})")).await, (1, 0, 0, false), "a dry run");
    assert_eq!(session.count("wh_inbox_dead_letter").await, 1);
    let retry = format!("retry_inbox_dead_letters({filter}, p_dry_run => false)");
    assert_eq!(act(&session, &retry).await, (1, 1, 0, false));
    let claimed = session.claim_all().await;
    assert_eq!(claimed.iter().map(|of| of.id).collect::<Vec<_>>(), of, "before what waits in its lane");
    assert_eq!(claimed[0].attempts, 0);
    // It dies again, and knows how often.
    assert!(session.bury(of[0], "still odd", false).await);
    let row = session.client.query_one("select retried from list_inbox_dead_letters(true)", &[]).await.unwrap();
    assert_eq!(row.get::<_, i32>(0), 1);
    assert_eq!(act(&session, &retry.replace(filter, "p_ids => '{}'")).await, (0, 0, 0, false), "nothing is a no-op");
}

#[tokio::test]
async fn a_lane_held_behind_a_dead_message_goes_on_when_an_operator_says_so() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    let (lane, of) = dead_head(&session, true).await;
    assert!(session.claim_all().await.is_empty(), "held");
    let next = Uuid::now_v7();
    assert_eq!(session.begin(&[(next, lane)]).await, [3], "and so is what arrives");
    session.unlock(&[lane]).await;
    // Another failure in it (of what was in hand) does not let it go.
    session.park(lane, of[1], 1, "", 0).await;
    assert!(session.claim_all().await.is_empty());
    session.client.execute("update wh_inbox_parked set message_id = $1", &[&of[0]]).await.unwrap();
    let holds: bool =
        session.client.query_one("select holds from list_inbox_dead_letters(true)", &[]).await.unwrap().get(0);
    assert!(holds);
    assert_eq!(act(&session, "retry_inbox_dead_letters(true, p_dry_run => false)").await, (1, 1, 1, false));
    assert_eq!(session.claim_all().await.iter().map(|of| of.id).collect::<Vec<_>>(), of);
    session.unlock(&[lane]).await;

    let (other, of) = dead_head(&session, true).await;
    let discard = format!("discard_inbox_dead_letters(p_stream => '{other}', p_dry_run => false)");
    assert_eq!(act(&session, &discard.replace("false", "true")).await, (1, 0, 1, false));
    assert_eq!(act(&session, &discard).await, (1, 1, 1, false));
    let claimed = session.claim(&[lane], 10, 10, 1 << 20).await.0;
    assert_eq!(claimed.iter().map(|of| of.id).collect::<Vec<_>>(), of[1..]);
    assert_eq!(session.try_begin(&[(of[0], other)], &[other], &[]).await.unwrap(), [1], "it is remembered");
}

#[tokio::test]
async fn many_are_given_back_in_portions() {
    let space = Space::new().await;
    let session = Session::new(&space).await;
    for _ in 0..5 {
        dead_head(&session, true).await;
    }
    let retry = "retry_inbox_dead_letters(true, p_rows_max => 2, p_dry_run => false)";
    assert_eq!(act(&session, retry).await, (2, 2, 2, true));
    assert_eq!(act(&session, retry).await, (2, 2, 2, true));
    assert_eq!(act(&session, retry).await, (1, 1, 1, false));
    assert_eq!(session.claim_all().await.len(), 15);
}

/// Whoever frees the lane looks again after it has waited for the operator.
#[tokio::test]
async fn a_lane_is_not_freed_under_what_is_given_back_to_it() {
    let space = Space::new().await;
    let (mut session, mut operator) = (Session::new(&space).await, Session::new(&space).await);
    let (lane, of) = dead_head(&session, false).await;
    assert_eq!(session.claim_all().await.len(), 2);
    let consumer = session.consumer;
    let pid: i32 = session.client.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
    let transaction = session.client.transaction().await.unwrap();
    assert_eq!(finish(&transaction, consumer, &of[1..]).await, [true, true]);
    let giving_back = operator.client.transaction().await.unwrap();
    giving_back.query_one("select retry_inbox_dead_letters(true, p_dry_run => false)", &[]).await.unwrap();
    let watch = space.schema.client().await;
    let give_back = async {
        eventually("the worker waits for the operator", Duration::from_secs(60), || async {
            let sql = "select exists (select from pg_locks where pid = $1 and not granted)";
            watch.query_one(sql, &[&pid]).await.unwrap().get(0)
        })
        .await;
        giving_back.commit().await.unwrap();
    };
    let lanes = [lane];
    let (freed, ()) = tokio::join!(unpark(&transaction, consumer, &lanes), give_back);
    assert_eq!(freed, [false]);
    transaction.commit().await.unwrap();
    session.unlock(&[lane]).await;
    assert_eq!(operator.claim_all().await.iter().map(|of| of.id).collect::<Vec<_>>(), of[..1]);
}
