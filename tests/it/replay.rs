//! What was published is published once more when an operator asks for it: marked, in its stream's order, and without a
//! trace on what is published for the first time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use corelane::dead_letters::{self, Mode};
use corelane::replay::{self, Filter};
use corelane::transport::memory::Fault;
use corelane::{Engine, MemoryTransport, RawMessage};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::dead_letters::{SOON, count, name_of, until_dead};
use crate::engine::{config, start};
use crate::support::{TestSchema, eventually, schema};

/// One message at the sink.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Heard {
    destination: String,
    stream: Option<Uuid>,
    seq: i64,
    version: i64,
    message_id: Uuid,
    payload: String,
    replayed: bool,
}

/// A sink that knows copies that were asked for. It refuses what bears "ill" until it is cured, and copies while it is
/// told to.
#[derive(Clone, Default)]
struct Ear {
    heard: Arc<Mutex<Vec<Heard>>>,
    cured: Arc<AtomicBool>,
    no_copies: Arc<AtomicBool>,
}

impl Ear {
    fn transport(&self) -> MemoryTransport {
        let (to, of) = (self.heard.clone(), self.clone());
        MemoryTransport::new(move |destination, message| {
            to.lock().unwrap().push(Heard {
                destination: destination.to_owned(),
                stream: message.stream_id,
                seq: message.stream_seq,
                version: message.version,
                message_id: message.message_id,
                payload: String::from_utf8_lossy(message.payload).into_owned(),
                replayed: message.replayed,
            });
        })
        .with_faults(move |_, message| {
            if !of.cured.load(Ordering::SeqCst) && message.payload.starts_with(b"ill") {
                return Fault::RefuseForGood("no such bed".to_owned());
            }
            if message.replayed && of.no_copies.load(Ordering::SeqCst) {
                return Fault::Refuse("no copies today".to_owned());
            }
            Fault::None
        })
    }

    fn of(&self, stream: Uuid, replayed: bool) -> Vec<i64> {
        let heard = self.heard.lock().unwrap();
        heard.iter().filter(|of| of.stream == Some(stream) && of.replayed == replayed).map(|of| of.seq).collect()
    }

    async fn wait_for(&self, stream: Uuid, replayed: bool, seq: &[i64]) {
        eventually(&format!("{seq:?} of {stream}, replayed: {replayed}"), SOON, || async {
            self.of(stream, replayed) == seq
        })
        .await;
    }
}

async fn store(engine: &Engine, stream: Uuid, payload: &str) {
    let message = RawMessage::event("told.event", payload.as_bytes()).stream(stream).to(&["ear"]);
    engine.enqueue(&message).await.unwrap();
}

/// Until the cursors say that everything is published.
pub async fn until_resolved(client: &Client, schema: &TestSchema, events: i32) {
    eventually("the cursors have passed all of it", SOON, || async {
        let dry = replay::events(client, &name_of(schema), "ear", &Filter::all(), None, 10_000, Mode::DryRun).await;
        let dry = dry.unwrap();
        (dry.matched, dry.waiting) == (events, 0)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_of_a_parked_message_is_marked_and_moves_no_cursor() {
    let schema = schema();
    let ear = Ear::default();
    let engine = start(&schema, ear.transport()).await;
    let (client, name) = (schema.client().await, name_of(&schema));
    let stream = Uuid::now_v7();
    for number in 1..=20 {
        store(&engine, stream, if number == 5 { "ill" } else { "well" }).await;
    }
    until_dead(&client, 1).await;
    let others: Vec<i64> = (1..=20).filter(|number| *number != 5).collect();
    ear.wait_for(stream, false, &others).await;
    ear.cured.store(true, Ordering::SeqCst);

    let this = dead_letters::Filter::new().stream(stream);
    let refused = dead_letters::retry(&client, &name, &dead_letters::Filter::new(), 10, Mode::Apply).await;
    assert!(refused.unwrap_err().to_string().contains("filter"), "a filter is asked for");
    let dry = dead_letters::retry(&client, &name, &this, 10, Mode::DryRun).await.unwrap();
    assert_eq!((dry.matched, dry.retried), (1, 0), "the count comes first");
    let nothing = dead_letters::Filter::new().stream(Uuid::now_v7());
    let none = dead_letters::retry(&client, &name, &nothing, 10, Mode::Apply).await.unwrap();
    assert_eq!(none, dead_letters::Retried::default(), "a replay of nothing");
    assert_eq!(dead_letters::retry(&client, &name, &this, 10, Mode::Apply).await.unwrap().retried, 1);

    ear.wait_for(stream, true, &[5]).await;
    store(&engine, stream, "well").await;
    let others: Vec<i64> = (1..=21).filter(|number| *number != 5).collect();
    ear.wait_for(stream, false, &others).await;
    let report = engine.shutdown(SOON).await;
    assert!(report.drained, "{report:?}");
    assert_eq!(ear.heard.lock().unwrap().len(), 21, "once each");
    // Whoever comes next finds nothing to publish: the cursor has not gone back.
    let next = start(&schema, ear.transport()).await;
    store(&next, stream, "well").await;
    eventually("the next one", SOON, || async { ear.of(stream, false).last() == Some(&22) }).await;
    next.shutdown(SOON).await;
    assert_eq!(ear.heard.lock().unwrap().len(), 22);
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_of_a_stream_goes_beside_what_is_published_for_the_first_time() {
    let schema = schema();
    let ear = Ear::default();
    let engine = start(&schema, ear.transport()).await;
    let (client, name) = (schema.client().await, name_of(&schema));
    let (stream, other) = (Uuid::now_v7(), Uuid::now_v7());
    for of in [stream, other] {
        for payload in ["1", "2", "3", "4"] {
            store(&engine, of, payload).await;
        }
    }
    until_resolved(&client, &schema, 8).await;

    // Copies are refused for a while: what comes now does not wait for them.
    ear.no_copies.store(true, Ordering::SeqCst);
    let filter = Filter::new().streams(&[stream]).versions(2, 4);
    let dry = replay::events(&client, &name, "ear", &filter, None, 2, Mode::DryRun).await.unwrap();
    assert_eq!((dry.matched, dry.replayed, dry.lanes, dry.more, dry.replay_id), (2, 0, 1, true, None));
    let rest = filter.clone().after(dry.last_position);
    let dry = replay::events(&client, &name, "ear", &rest, None, 2, Mode::DryRun).await.unwrap();
    assert_eq!((dry.matched, dry.more), (1, false));
    assert_eq!((count(&client, "wh_replay").await, count(&client, "wh_parked").await), (0, 0), "only counted");

    let id = Uuid::now_v7();
    let first = replay::events(&client, &name, "ear", &filter, Some(id), 2, Mode::Apply).await.unwrap();
    assert_eq!((first.replay_id, first.matched, first.replayed, first.more), (Some(id), 2, 2, true));
    // Its answer may have been lost: the same call again goes on behind it.
    let second = replay::events(&client, &name, "ear", &filter, Some(id), 2, Mode::Apply).await.unwrap();
    assert_eq!((second.matched, second.replayed, second.more), (1, 1, false));
    let third = replay::events(&client, &name, "ear", &filter, Some(id), 2, Mode::Apply).await.unwrap();
    assert_eq!((third.matched, third.replayed, third.more), (0, 0, false));
    let changed = Filter::new().streams(&[other]);
    let refused = replay::events(&client, &name, "ear", &changed, Some(id), 2, Mode::Apply).await.unwrap_err();
    assert!(refused.to_string().contains("another one"), "{refused}");

    eventually("a copy was refused", SOON, || async { count(&client, "wh_parked where attempts > 0").await == 1 })
        .await;
    for payload in ["5", "6"] {
        store(&engine, stream, payload).await;
    }
    ear.wait_for(stream, false, &[1, 2, 3, 4, 5, 6]).await;
    assert_eq!(ear.of(stream, true), [0; 0]);
    ear.no_copies.store(false, Ordering::SeqCst);
    ear.wait_for(stream, true, &[2, 3, 4]).await;
    eventually("nothing stands beside the log", SOON, || async { count(&client, "wh_parked").await == 0 }).await;
    store(&engine, stream, "7").await;
    ear.wait_for(stream, false, &[1, 2, 3, 4, 5, 6, 7]).await;
    let report = engine.shutdown(SOON).await;
    assert!(report.drained, "{report:?}");
    let heard = ear.heard.lock().unwrap().clone();
    assert!(heard.iter().all(|of| of.payload == of.seq.to_string() && of.version == of.seq), "{heard:?}");
    assert!(heard.iter().all(|of| of.stream != Some(other) || !of.replayed));
    let ids = |replayed: bool| -> Vec<Uuid> {
        let of_stream = heard.iter().filter(|of| of.stream == Some(stream) && (2..=4).contains(&of.seq));
        of_stream.filter(|of| of.replayed == replayed).map(|of| of.message_id).collect()
    };
    assert_eq!(ids(true), ids(false), "under their own ids");
    assert_eq!(count(&client, "wh_parked_reference").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_of_a_range_goes_to_another_destination_in_order_page_by_page() {
    let schema = schema();
    let ear = Ear::default();
    let engine = start(&schema, ear.transport()).await;
    let (client, name) = (schema.client().await, name_of(&schema));
    let streams: Vec<Uuid> = (0..5).map(|_| Uuid::now_v7()).collect();
    for _ in 0..10 {
        for stream in &streams {
            store(&engine, *stream, "{}").await;
        }
    }
    until_resolved(&client, &schema, 50).await;
    let refused = replay::events(&client, &name, "late", &Filter::new().after(7), None, 7, Mode::Apply).await;
    assert!(refused.unwrap_err().to_string().contains("empty"), "a filter is asked for");
    let none = Filter::new().type_name("no.such*");
    let none = replay::events(&client, &name, "late", &none, None, 7, Mode::Apply).await.unwrap();
    assert_eq!((none.replay_id, none.matched, none.replayed, none.more), (None, 0, 0, false));
    assert_eq!(count(&client, "wh_replay").await, 0, "a replay of nothing leaves nothing");

    let sql = "select min(position), max(position) from wh_event_store where version between 3 and 8";
    let range = client.query_one(sql, &[]).await.unwrap();
    let filter = Filter::new().positions(range.get(0), range.get(1)).type_name("told.*");
    let (mut replay, mut replayed) = (None, 0);
    loop {
        let page = replay::events(&client, &name, "late", &filter, replay, 7, Mode::Apply).await.unwrap();
        (replay, replayed) = (page.replay_id, replayed + page.replayed);
        if !page.more {
            break;
        }
    }
    assert_eq!(replayed, 30);
    for stream in &streams {
        ear.wait_for(*stream, true, &[3, 4, 5, 6, 7, 8]).await;
    }
    engine.shutdown(SOON).await;
    let heard = ear.heard.lock().unwrap().clone();
    assert!(heard.iter().all(|of| of.replayed == (of.destination == "late")), "{heard:?}");
    assert_eq!(heard.len(), 80);
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_leaves_alone_what_is_not_published_yet_and_what_is_dead() {
    let schema = schema();
    let ear = Ear::default();
    let engine = start(&schema, ear.transport()).await;
    let (client, name) = (schema.client().await, name_of(&schema));
    let stream = Uuid::now_v7();
    for payload in ["well", "ill", "well"] {
        store(&engine, stream, payload).await;
    }
    until_dead(&client, 1).await;
    until_resolved(&client, &schema, 3).await;
    engine.shutdown(SOON).await;
    let sql = "select * from store_outbox_messages(array[gen_random_uuid()], array[$1::uuid], '{told.event}', \
               array['late'::bytea], '{true}', '{ear}')";
    client.query(sql, &[&stream]).await.unwrap();

    let all = Filter::new().streams(&[stream]);
    let done = replay::events(&client, &name, "ear", &all, None, 10, Mode::Apply).await.unwrap();
    assert_eq!((done.matched, done.waiting, done.dead, done.replayed), (4, 1, 1, 2));
    // Nobody owned the stream: the next owner finds the copies.
    let next = start(&schema, ear.transport()).await;
    ear.wait_for(stream, true, &[1, 3]).await;
    ear.wait_for(stream, false, &[1, 3, 4]).await;
    next.shutdown(SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_that_dies_is_a_dead_letter_of_its_own_and_can_be_given_back() {
    let schema = schema();
    let ear = Ear::default();
    ear.cured.store(true, Ordering::SeqCst);
    let engine = start(&schema, ear.transport()).await;
    let (client, name) = (schema.client().await, name_of(&schema));
    let stream = Uuid::now_v7();
    for payload in ["well", "ill", "well"] {
        store(&engine, stream, payload).await;
    }
    until_resolved(&client, &schema, 3).await;
    ear.cured.store(false, Ordering::SeqCst);
    let all = Filter::new().streams(&[stream]);
    assert_eq!(replay::events(&client, &name, "ear", &all, None, 10, Mode::Apply).await.unwrap().replayed, 3);
    until_dead(&client, 1).await;
    ear.wait_for(stream, true, &[1, 3]).await;
    let of_stream = dead_letters::Filter::new().stream(stream);
    let listed = dead_letters::list(&client, &name, &of_stream, 10).await.unwrap();
    assert!(listed[0].is_stored && listed[0].stream_seq == 2, "{listed:?}");
    let shown = dead_letters::show(&client, &name, listed[0].dead_letter_id).await.unwrap().unwrap();
    assert_eq!(shown.payload.as_deref(), Some(&b"ill"[..]));
    ear.cured.store(true, Ordering::SeqCst);
    assert_eq!(dead_letters::retry(&client, &name, &of_stream, 10, Mode::Apply).await.unwrap().retried, 1);
    ear.wait_for(stream, true, &[1, 3, 2]).await;
    engine.shutdown(SOON).await;
    assert_eq!(ear.of(stream, false), [1, 2, 3]);
    assert_eq!((count(&client, "wh_dead_letter").await, count(&client, "wh_parked_reference").await), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_survives_hand_overs_and_a_program_of_version_1_forbids_it() {
    let schema = schema();
    let ear = Ear::default();
    let first = start(&schema, ear.transport()).await;
    let (client, name) = (schema.client().await, name_of(&schema));
    let streams: Vec<Uuid> = (0..40).map(|_| Uuid::now_v7()).collect();
    for stream in &streams {
        for _ in 0..3 {
            store(&first, *stream, "{}").await;
        }
    }
    until_resolved(&client, &schema, 120).await;
    let give = async |many: &[Uuid]| {
        for stream in many {
            let filter = Filter::new().streams(&[*stream]);
            replay::events(&client, &name, "ear", &filter, None, 10, Mode::Apply).await.unwrap();
        }
    };
    let join = async || Engine::builder(config(&schema)).transport(ear.transport()).start().await.unwrap();
    let (second, ()) = tokio::join!(join(), give(&streams[..15]));
    tokio::join!(eventually("they share", SOON, || async { second.partitions_held() == 8 }), give(&streams[15..30]));
    tokio::join!(async { first.shutdown(SOON).await }, give(&streams[30..]));
    for stream in &streams {
        eventually("copies of each", SOON, || async {
            let mut firsts = ear.of(*stream, true);
            let mut known = std::collections::HashSet::new();
            firsts.retain(|seq| known.insert(*seq));
            firsts == [1, 2, 3]
        })
        .await;
        assert_eq!(ear.of(*stream, false), [1, 2, 3], "no first copy twice");
    }
    second.shutdown(SOON).await;
    client.execute("select register_instance(gen_random_uuid(), 'tests', 'old', 60000, 1)", &[]).await.unwrap();
    let refused = replay::events(&client, &name, "ear", &Filter::all(), None, 10, Mode::Apply).await.unwrap_err();
    assert!(refused.to_string().contains("version 1"), "{refused}");
}
