//! What is said of a subject is overwritten wherever it stands, and everybody who reads sees the mark.

use std::sync::atomic::{AtomicBool, Ordering};

use corelane::message::Enqueue;
use corelane::retention::{self, ERASED, Erased, Subject};
use corelane::seam::store::StoreError;
use corelane::{RawMessage, Wishes, dead_letters::Mode};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::dead_letters::{SOON, Ward, count, until_dead};
use crate::engine::start;
use crate::inbox_sql_kit::Session;
use crate::outbox_kit::{call, code};
use crate::store_kit::{Message, Space, event, message};
use crate::subscription_kit::Follower;
use crate::support::eventually;

/// Nothing else in the schema says this.
const SECRET: &str = "c0ffee-of-a-person";

/// Tables in whose rows the secret stands.
async fn rows_with_it(client: &Client, schema: &str) -> Vec<String> {
    let tables = "select c.relname from pg_class c where c.relnamespace = $1::text::regnamespace and c.relkind = 'r'";
    let hex: String = SECRET.bytes().map(|byte| format!("{byte:02x}")).collect();
    let mut found = Vec::new();
    for table in client.query(tables, &[&schema]).await.unwrap() {
        let name: String = table.get(0);
        let sql = format!("select exists (select from {name} t where t::text like $1 or t::text like $2)");
        let it = (format!("%{hex}%"), format!("%{SECRET}%"));
        if client.query_one(&sql, &[&it.0, &it.1]).await.unwrap().get(0) {
            found.push(name);
        }
    }
    found.sort();
    found
}

/// Tables in whose files it stands, now that they are written.
async fn files_with_it(client: &Client, schema: &str) -> Vec<String> {
    client.batch_execute("checkpoint").await.unwrap();
    let sql = "select c.relname from pg_class c
        where c.relnamespace in ($1::text::regnamespace, 'pg_toast'::regnamespace) and c.relkind in ('r', 't', 'i')
            and position(convert_to($2, 'UTF8') in pg_read_binary_file(pg_relation_filepath(c.oid))) > 0
        order by 1";
    client.query(sql, &[&schema, &SECRET]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_said_of_a_subject_is_gone_from_tables_dead_letters_segments_and_files() {
    let space = Space::new().await;
    let (ward, schema) = (Ward::default(), space.name.quoted().to_owned());
    let engine = start(&space.schema, ward.transport()).await;
    let mut client = space.schema.client().await;
    let (stream, shared, other) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
    let metadata = format!(r#"{{"user":"{SECRET}"}}"#);
    let wishes = Wishes::new().metadata(metadata.as_bytes());
    let ill = format!("ill {SECRET}");
    // Published, and dead: an event and a message.
    for of in [
        RawMessage::event("test.event", SECRET.as_bytes()),
        RawMessage::command("test.told", SECRET.as_bytes()),
        RawMessage::event("test.event", ill.as_bytes()),
        RawMessage::command("test.told", ill.as_bytes()),
    ] {
        engine.enqueue(&of.stream(stream).to(&["ward"]).with(wishes)).await.unwrap();
    }
    // Of a stream of many subjects one event is his.
    for payload in ["theirs", SECRET, "theirs"] {
        let of = RawMessage::event("test.event", payload.as_bytes()).stream(shared).to(&["ward"]);
        engine.enqueue(&of).await.unwrap();
    }
    until_dead(&client, 2).await;
    ward.sink.wait_for(5).await;
    engine.shutdown(SOON).await;
    // Not published: in the log, scheduled, beside the log (a replay's copy).
    let to = |of: Message| Message { destinations: vec!["ward"], ..of };
    let due = Message { due_unix_us: 32_503_680_000_000_000, ..to(message(stream, SECRET)) };
    call(&client, &[to(event(stream, SECRET)), to(message(stream, SECRET)), to(message(other, "his")), due])
        .await
        .unwrap();
    let replay = "select replayed from replay_events('other', p_streams => array[$1::uuid], p_version_to => 1, p_dry_run => false)";
    assert_eq!(client.query_one(replay, &[&stream]).await.unwrap().get::<_, i32>(0), 1);
    let kept = "insert into wh_inbox (lane_id, stream_id, message_id, consumer, source, type_name, payload)
        select $1, $1, $1, 1, 's', 't', convert_to($2, 'UTF8')";
    client.execute(kept, &[&stream, &SECRET]).await.unwrap();
    let everywhere =
        ["wh_dead_letter", "wh_event_store", "wh_inbox", "wh_outbox_0", "wh_parked_reference", "wh_scheduled"];
    assert_eq!(rows_with_it(&client, &schema).await, everywhere);

    for wrong in ["'{}'", "array[null]::uuid[]", "array[gen_random_uuid()], '{1,2}'"] {
        let refused = client.query(&format!("select * from erase_events({wrong})"), &[]).await;
        assert_eq!(code(refused), "22023", "{wrong}");
    }
    let subject = Subject::new().stream(stream).event(shared, 2);
    let before =
        client.query("select stream_id, version, stream_seq, message_id from wh_event_store order by 1, 2", &[]);
    let before = before.await.unwrap();
    let dry = retention::erase_events(&client, &space.name, &subject, 1, Mode::DryRun).await.unwrap();
    assert_eq!(dry, Erased { events: 4, messages: 5, dead_letters: 2, inbox: 1, more: false });
    assert_eq!(rows_with_it(&client, &schema).await, everywhere, "only counted");
    let transaction = client.transaction().await.unwrap();
    retention::erase_events(&transaction, &space.name, &subject, 100, Mode::Apply).await.unwrap();
    transaction.rollback().await.unwrap();
    assert_eq!(rows_with_it(&client, &schema).await, everywhere, "rolled back");
    let (mut calls, mut sum) = (0, Erased::default());
    loop {
        let step = retention::erase_events(&client, &space.name, &subject, 2, Mode::Apply).await.unwrap();
        assert!(step.events <= 2 && step.dead_letters <= 2, "{step:?}");
        sum.events += step.events;
        sum.messages += step.messages;
        sum.dead_letters += step.dead_letters;
        sum.inbox += step.inbox;
        calls += 1;
        if !step.more {
            break;
        }
    }
    assert_eq!((sum, calls > 1), (dry, true));
    let none = retention::erase_events(&client, &space.name, &subject, 100, Mode::DryRun).await.unwrap();
    assert_eq!(none, Erased::default());
    assert_eq!(rows_with_it(&client, &schema).await, Vec::<String>::new());
    // What the rows were stands in the files until they are written anew.
    assert!(files_with_it(&client, &schema).await.contains(&"wh_event_store".to_owned()), "the look finds something");
    for table in everywhere {
        client.batch_execute(&format!("vacuum full {table}")).await.unwrap();
    }
    assert_eq!(files_with_it(&client, &schema).await, Vec::<String>::new());

    // Nothing but the content has changed, and what waits goes out with the mark.
    let after =
        client.query("select stream_id, version, stream_seq, message_id from wh_event_store order by 1, 2", &[]);
    let of = |row: &tokio_postgres::Row| -> (Uuid, i64, i64, Uuid) { (row.get(0), row.get(1), row.get(2), row.get(3)) };
    assert_eq!(after.await.unwrap().iter().map(of).collect::<Vec<_>>(), before.iter().map(of).collect::<Vec<_>>());
    ward.cure(true);
    let retried = "select retried from retry_dead_letters(true, p_dry_run => false)";
    assert_eq!(client.query_one(retried, &[]).await.unwrap().get::<_, i32>(0), 2);
    let heard = std::sync::Arc::new(std::sync::Mutex::new(Vec::<(Option<Uuid>, String, Vec<u8>)>::new()));
    let to = heard.clone();
    let transport = corelane::MemoryTransport::new(move |_, of| {
        to.lock().unwrap().push((of.stream_id, of.content_type.to_owned(), of.payload.to_vec()));
    });
    let engine = start(&space.schema, transport).await;
    eventually("what waited goes out", SOON, || async { heard.lock().unwrap().len() == 6 }).await;
    for (of, content_type, payload) in heard.lock().unwrap().iter() {
        let expected: (&str, &[u8]) = if *of == Some(other) { ("application/json", b"his") } else { (ERASED, b"") };
        assert_eq!((content_type.as_str(), payload.as_slice()), expected);
    }
    let read = engine.event_store().read_forwards(shared, 1).next_page().await.unwrap();
    assert_eq!(
        read.iter().map(|of| (of.version, of.is_erased())).collect::<Vec<_>>(),
        [(1, false), (2, true), (3, false)]
    );
    engine.shutdown(SOON).await;
    let mut follower = Follower::join(&space, "marks", Some(0)).await;
    let marks = follower.drain().await.iter().filter(|of| of.text.is_empty()).count();
    assert_eq!((marks, count(&client, "wh_event_store").await), (4, 6));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_a_subscription_passes_over_nothing_while_events_are_erased() {
    const STREAMS: usize = 20;
    const EVENTS: usize = 50;
    let space = Space::new().await;
    let client = space.schema.client().await;
    let streams: Vec<Uuid> = (0..STREAMS).map(|_| Uuid::now_v7()).collect();
    for stream in &streams {
        let events: Vec<Message> = (0..EVENTS).map(|n| event(*stream, &n.to_string())).collect();
        call(&client, &events).await.unwrap();
    }
    let done = AtomicBool::new(false);
    let erase = async {
        for version in 1..=EVENTS as i64 {
            for stream in &streams {
                let one = Subject::new().event(*stream, version);
                let step = retention::erase_events(&client, &space.name, &one, 10, Mode::Apply).await.unwrap();
                assert_eq!(step.events, 1);
            }
        }
        done.store(true, Ordering::SeqCst);
    };
    let follow = async {
        let (mut rounds, mut again) = (0, 0);
        while !done.load(Ordering::SeqCst) {
            let mut follower = Follower::join(&space, &format!("round {rounds}"), Some(0)).await;
            let mut read = 0;
            loop {
                let (subscription, run) = (follower.member.subscription, &follower.runs.runs[0]);
                match follower.statements.read(&follower.client, subscription, run, &follower.filter).await {
                    Ok(page) => {
                        read += page.events.len();
                        follower.runs.runs[0].advance(&page.ahead);
                        if page.events.is_empty() && follower.runs.runs[0].quiet {
                            break;
                        }
                    }
                    Err(StoreError::Transient { sqlstate, .. }) if sqlstate == "40001" => again += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            assert_eq!(read, STREAMS * EVENTS, "round {rounds}, {again} pages were asked for again");
            rounds += 1;
        }
    };
    tokio::join!(erase, follow);
}

/// A producer cannot say of its own message that it is erased already.
#[tokio::test]
async fn a_content_type_of_the_producers_own_keeps_nothing_from_being_erased() {
    let space = Space::new().await;
    let (client, schema) = (space.schema.client().await, space.name.quoted().to_owned());
    let (stream, with_metadata) = (Uuid::now_v7(), Uuid::now_v7());
    let sql =
        "select from append_events(array[$1::uuid, $2], array[$3::uuid, $4], '{t,t}', array[$5::bytea, ''::bytea],
        content_types => array[$6::text, $6], metadata => array[null, $5::bytea])";
    let ids = [Uuid::now_v7(), Uuid::now_v7()];
    client.execute(sql, &[&ids[0], &ids[1], &stream, &with_metadata, &SECRET.as_bytes(), &ERASED]).await.unwrap();
    assert_eq!(rows_with_it(&client, &schema).await, ["wh_event_store"]);
    let subject = Subject::new().stream(stream).event(with_metadata, 1);
    let erased = retention::erase_events(&client, &space.name, &subject, 10, Mode::Apply).await.unwrap();
    assert_eq!(erased.events, 2);
    assert_eq!(rows_with_it(&client, &schema).await, Vec::<String>::new());
}

/// While it goes from the inbox's dead letters back to what is kept, it is seen in one of them.
#[tokio::test]
async fn a_body_on_its_way_back_from_the_inboxes_dead_letters_is_not_passed_over() {
    let space = Space::new().await;
    let (session, schema) = (Session::new(&space).await, space.name.quoted().to_owned());
    let (stream, id) = (Uuid::now_v7(), Uuid::now_v7());
    assert_eq!(session.begin(&[(id, stream)]).await, [0]);
    assert_eq!(session.remember(&[id]).await, [true]);
    assert_eq!(session.try_keep(&[(id, stream)], |_| SECRET.as_bytes().to_vec()).await.unwrap(), 1);
    assert!(session.bury(id, "ill", false).await);
    let (mut operator, eraser, watch) =
        (space.schema.client().await, space.schema.client().await, space.schema.client().await);
    let pid: i32 = eraser.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
    let giving_back = operator.transaction().await.unwrap();
    let retry = "select retried from retry_inbox_dead_letters(true, p_dry_run => false)";
    assert_eq!(giving_back.query_one(retry, &[]).await.unwrap().get::<_, i32>(0), 1);
    let give_back = async {
        eventually("the eraser waits for the operator", SOON, || async {
            let sql = "select exists (select from pg_locks where pid = $1 and not granted)";
            watch.query_one(sql, &[&pid]).await.unwrap().get(0)
        })
        .await;
        giving_back.commit().await.unwrap();
    };
    let subject = Subject::new().stream(stream);
    let erase = retention::erase_events(&eraser, &space.name, &subject, 10, Mode::Apply);
    let (erased, ()) = tokio::join!(erase, give_back);
    assert_eq!(erased.unwrap().inbox, 1);
    assert_eq!(rows_with_it(&watch, &schema).await, Vec::<String>::new());
    assert_eq!(count(&watch, "wh_inbox").await, 1, "the row is there");
}
