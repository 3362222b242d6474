//! Dead letters in an operator's hands: looked at, given back to be published in order, discarded. Engines run
//! meanwhile, hand over, or come later.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corelane::dead_letters::{self, Filter, Mode};
use corelane::error::FailureReason;
use corelane::seam::store::{SettleReply, SettleRequest, Store};
use corelane::store::schema_name::SchemaName;
use corelane::transport::memory::Fault;
use corelane::{Engine, Error, MemoryTransport, RawMessage};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::engine::{Sink, config, start};
use crate::outbox_kit::call;
use crate::store_kit::{Message, Space, destination, event, loose, message, stream_in};
use crate::support::{TestSchema, eventually, schema};

pub const SOON: Duration = Duration::from_secs(60);

/// A sink behind a door, which refuses what bears "ill" for good until it is cured, and everything while it is shut.
#[derive(Clone, Default)]
pub struct Ward {
    pub sink: Sink,
    cured: Arc<AtomicBool>,
    shut: Arc<AtomicBool>,
    tried: Arc<Mutex<Vec<Uuid>>>,
}

impl Ward {
    pub fn transport(&self) -> MemoryTransport {
        let of = self.clone();
        self.sink.transport().with_faults(move |_, message| {
            if of.shut.load(Ordering::SeqCst) {
                return Fault::NotReady;
            }
            of.tried.lock().unwrap().push(message.message_id);
            if !of.cured.load(Ordering::SeqCst) && message.payload.starts_with(b"ill") {
                return Fault::RefuseForGood(format!("ward {}: no such bed 4711", message.stream_seq));
            }
            Fault::None
        })
    }

    pub fn cure(&self, cured: bool) {
        self.cured.store(cured, Ordering::SeqCst);
    }

    pub fn shut(&self, shut: bool) {
        self.shut.store(shut, Ordering::SeqCst);
    }

    /// Numbers of a stream, in the order of the first copies.
    pub fn numbers(&self, stream: Uuid) -> Vec<i64> {
        let mut known = HashSet::new();
        let of_stream = self.sink.all().into_iter().filter(|seen| seen.stream_id == Some(stream));
        of_stream.map(|seen| seen.stream_seq).filter(|number| known.insert(*number)).collect()
    }
}

pub fn name_of(schema: &TestSchema) -> SchemaName {
    SchemaName::new(&schema.name).unwrap()
}

pub async fn count(client: &Client, table: &str) -> i64 {
    client.query_one(&format!("select count(*) from {table}"), &[]).await.unwrap().get(0)
}

pub async fn until_dead(client: &Client, dead_letters: i64) {
    let what = format!("{dead_letters} dead letters");
    eventually(&what, SOON, || async { count(client, "wh_dead_letter").await == dead_letters }).await;
}

async fn enqueue(engine: &Engine, stream: Uuid, payload: &str) {
    let message = RawMessage::command("ward.told", payload.as_bytes()).stream(stream).to(&["ward"]);
    engine.enqueue(&message).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_died_is_listed_shown_counted_and_given_back_while_the_engine_runs() {
    let schema = schema();
    let ward = Ward::default();
    let engine = start(&schema, ward.transport()).await;
    let (client, name) = (schema.client().await, name_of(&schema));
    let stream = Uuid::now_v7();
    // An event, a message of its stream, one without stream; and a healthy one behind.
    let to = |payload: &str, of: Message| Message { destinations: vec!["ward"], payload: payload.into(), ..of };
    let ill = [to("ill 1", event(stream, "")), to("ill 2", message(stream, "")), to("ill 3", loose(""))];
    call(&client, &ill).await.unwrap();
    call(&client, &[to("well", message(stream, ""))]).await.unwrap();
    until_dead(&client, 3).await;
    ward.sink.wait_for(1).await;

    let refused = dead_letters::list(&client, &name, &Filter::new(), 100).await.unwrap_err();
    assert!(refused.to_string().contains("filter of dead letters is empty"), "{refused}");
    let listed = dead_letters::list(&client, &name, &Filter::all(), 2).await.unwrap();
    assert_eq!(listed.len(), 2);
    let rest = Filter::all().after(listed[1].dead_letter_id);
    assert_eq!(dead_letters::list(&client, &name, &rest, 2).await.unwrap().len(), 1);
    let first =
        Filter::new().stream(stream).type_name("test.*").destination("ward").reason(FailureReason::ValidationError);
    let listed = dead_letters::list(&client, &name, &first, 100).await.unwrap();
    assert_eq!(listed.iter().map(|of| (of.stream_seq, of.version)).collect::<Vec<_>>(), [(1, 1), (2, 0)]);
    assert!(listed.iter().all(|of| of.is_stored && !of.holds && of.retried == 0 && of.attempts == 1), "{listed:?}");
    for (of, payload) in listed.iter().zip(["ill 1", "ill 2"]) {
        let shown = dead_letters::show(&client, &name, of.dead_letter_id).await.unwrap().unwrap();
        assert_eq!((&shown.dead_letter, shown.payload.as_deref()), (of, Some(payload.as_bytes())));
    }
    let kinds = dead_letters::count(&client, &name, &Filter::all(), 10).await.unwrap();
    assert_eq!(kinds.iter().map(|of| of.dead_letters).collect::<Vec<_>>(), [3], "one fingerprint: {kinds:?}");
    let alike = Filter::new().fingerprint(&kinds[0].error_fingerprint);

    let dry = dead_letters::retry(&client, &name, &alike, 2, Mode::DryRun).await.unwrap();
    assert_eq!((dry.matched, dry.retried, dry.more), (2, 0, true));
    assert_eq!(count(&client, "wh_dead_letter").await, 3);
    ward.cure(true);
    let done = dead_letters::retry(&client, &name, &alike, 100, Mode::Apply).await.unwrap();
    assert_eq!((done.matched, done.retried, done.lanes, done.released, done.more), (3, 3, 2, 0, false));
    ward.sink.wait_for(4).await;
    eventually("nothing stands beside the log", SOON, || async { count(&client, "wh_parked").await == 0 }).await;
    let report = engine.shutdown(SOON).await;
    assert!(report.drained, "{report:?}");
    assert_eq!(ward.numbers(stream), [3, 1, 2], "their successor went out while they were dead");
    let ids: HashSet<Uuid> = ward.sink.all().iter().map(|seen| seen.message_id).collect();
    assert!(ill.iter().all(|of| ids.contains(&of.id)), "under their own ids");
    assert_eq!((ward.sink.len(), count(&client, "wh_dead_letter").await), (4, 0));
    assert_eq!(count(&client, "wh_parked_reference").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_given_back_comes_before_what_its_stream_has_not_published() {
    let schema = schema();
    let ward = Ward::default();
    let engine = start(&schema, ward.transport()).await;
    let (client, name) = (schema.client().await, name_of(&schema));
    let stream = Uuid::now_v7();
    for payload in ["ill", "well", "ill"] {
        enqueue(&engine, stream, payload).await;
    }
    until_dead(&client, 2).await;
    ward.shut(true);
    for payload in ["well", "well"] {
        enqueue(&engine, stream, payload).await;
    }
    ward.cure(true);
    let done = dead_letters::retry(&client, &name, &Filter::new().stream(stream), 10, Mode::Apply).await.unwrap();
    assert_eq!(done.retried, 2);
    // The lane has made room for them: four stand beside the log.
    eventually("the lane is recalled", SOON, || async { count(&client, "wh_parked_reference").await == 4 }).await;
    enqueue(&engine, stream, "well").await;
    ward.shut(false);
    ward.sink.wait_for(6).await;
    engine.shutdown(SOON).await;
    assert_eq!(ward.numbers(stream), [2, 1, 3, 4, 5, 6]);
    assert_eq!(ward.sink.len(), 6, "no copies");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_given_back_to_a_busy_stream_is_published_soon() {
    let schema = schema();
    let ward = Ward::default();
    let engine = start(&schema, ward.transport().with_delay(|| Duration::from_millis(3))).await;
    let (client, name) = (schema.client().await, name_of(&schema));
    let stream = Uuid::now_v7();
    enqueue(&engine, stream, "ill").await;
    until_dead(&client, 1).await;
    ward.cure(true);
    for _ in 0..400 {
        enqueue(&engine, stream, "well").await;
        if ward.numbers(stream).len() == 20 {
            dead_letters::retry(&client, &name, &Filter::all(), 10, Mode::Apply).await.unwrap();
        }
        if ward.numbers(stream).contains(&1) {
            break;
        }
    }
    if count(&client, "wh_dead_letter").await > 0 {
        dead_letters::retry(&client, &name, &Filter::all(), 10, Mode::Apply).await.unwrap();
    }
    eventually("it is published", SOON, || async { ward.numbers(stream).contains(&1) }).await;
    let report = engine.shutdown(SOON).await;
    assert!(report.drained, "{report:?}");
    let mut others = ward.numbers(stream);
    others.retain(|number| *number > 1);
    assert!(others.is_sorted(), "the others keep their order: {others:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_dies_again_knows_how_often_and_what_is_discarded_is_gone() {
    let schema = schema();
    let ward = Ward::default();
    let engine = start(&schema, ward.transport()).await;
    let (client, name) = (schema.client().await, name_of(&schema));
    let (stream, other) = (Uuid::now_v7(), Uuid::now_v7());
    for of in [stream, other] {
        enqueue(&engine, of, "ill").await;
    }
    until_dead(&client, 2).await;
    for retried in 1..=2 {
        let before = dead_letters::list(&client, &name, &Filter::new().stream(stream), 10).await.unwrap();
        let this = Filter::new().ids(&[before[0].dead_letter_id]);
        assert_eq!(dead_letters::retry(&client, &name, &this, 1, Mode::Apply).await.unwrap().retried, 1);
        until_dead(&client, 2).await;
        let again = dead_letters::list(&client, &name, &Filter::new().stream(stream), 10).await.unwrap();
        assert_eq!((again.len(), again[0].retried), (1, retried));
    }
    client.execute("update wh_dead_letter set payload = null where stream_id = $1", &[&other]).await.unwrap();
    let done = dead_letters::retry(&client, &name, &Filter::new().stream(other), 10, Mode::Apply).await.unwrap();
    assert_eq!((done.matched, done.retried, done.not_stored), (1, 0, 1), "there is nothing to give back");
    let refused = dead_letters::discard(&client, &name, &Filter::new().after(1), 10, Mode::Apply).await.unwrap_err();
    assert!(matches!(refused, Error::Store(_)), "{refused}");
    let dry = dead_letters::discard(&client, &name, &Filter::all(), 10, Mode::DryRun).await.unwrap();
    assert_eq!((dry.matched, dry.discarded), (2, 0));
    let done = dead_letters::discard(&client, &name, &Filter::all(), 10, Mode::Apply).await.unwrap();
    assert_eq!((done.matched, done.discarded, done.released, done.more), (2, 2, 0, false));
    assert_eq!(count(&client, "wh_dead_letter").await, 0);
    let report = engine.shutdown(SOON).await;
    assert!(report.drained, "{report:?}");
    assert_eq!(ward.sink.len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_given_back_while_partitions_change_hands_is_published() {
    let schema = schema();
    let ward = Ward::default();
    let first = start(&schema, ward.transport()).await;
    let (client, name) = (schema.client().await, name_of(&schema));
    let streams: Vec<Uuid> = (0..60).map(|_| Uuid::now_v7()).collect();
    for stream in &streams {
        enqueue(&first, *stream, "ill").await;
        enqueue(&first, *stream, "well").await;
    }
    until_dead(&client, 60).await;
    ward.cure(true);
    let give_back = async |many: &[Uuid]| {
        for stream in many {
            dead_letters::retry(&client, &name, &Filter::new().stream(*stream), 10, Mode::Apply).await.unwrap();
        }
    };
    let join = async || Engine::builder(config(&schema)).transport(ward.transport()).start().await.unwrap();
    let (second, ()) = tokio::join!(join(), give_back(&streams[..20]));
    tokio::join!(
        eventually("they share", SOON, || async { second.partitions_held() == 8 }),
        give_back(&streams[20..40])
    );
    tokio::join!(async { first.shutdown(SOON).await }, give_back(&streams[40..]));
    ward.sink.wait_for(120).await;
    eventually("nothing stands beside the log", SOON, || async { count(&client, "wh_parked").await == 0 }).await;
    second.shutdown(SOON).await;
    for stream in &streams {
        assert_eq!(ward.numbers(*stream), [2, 1]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_given_back_while_nobody_owns_it_is_published_by_the_next_owner() {
    let schema = schema();
    let ward = Ward::default();
    let first = start(&schema, ward.transport()).await;
    let (client, name) = (schema.client().await, name_of(&schema));
    let stream = Uuid::now_v7();
    enqueue(&first, stream, "ill").await;
    until_dead(&client, 1).await;
    first.shutdown(SOON).await;
    ward.cure(true);
    dead_letters::retry(&client, &name, &Filter::all(), 10, Mode::Apply).await.unwrap();
    call(&client, &[Message { destinations: vec!["ward"], ..message(stream, "well") }]).await.unwrap();
    let second = start(&schema, ward.transport()).await;
    ward.sink.wait_for(2).await;
    second.shutdown(SOON).await;
    assert_eq!(ward.numbers(stream), [1, 2]);
}

#[tokio::test]
async fn a_lane_is_not_unparked_under_what_is_given_back_to_it() {
    let space = Space::new().await;
    let mut client = space.schema.client().await;
    let owner = space.owner(1).await;
    let stream = stream_in(3);
    call(&client, &[message(stream, "1")]).await.unwrap();
    let partition = 3;
    let outcome = |change: &dyn Fn(&mut SettleRequest)| {
        let mut request = SettleRequest { ownership: owner.taken.ownership, ..SettleRequest::default() };
        change(&mut request);
        request
    };
    let to = destination("somewhere");
    let buried = outcome(&|request| {
        request.dead.push(corelane::seam::store::DeadLetter {
            lane_id: stream,
            destination: to,
            unnamed: None,
            partition,
            stream_seq: 1,
            version: 0,
            attempts: 1,
            reason: 2,
            error: String::new(),
            error_cut: false,
        });
        request.park.push(corelane::seam::store::Park {
            lane_id: stream,
            destination: to,
            partition,
            stream_seq: 2,
            attempts: 1,
            reason: 2,
            error: String::new(),
            error_cut: false,
            due_in_ms: 0,
        });
    });
    assert!(matches!(owner.store.settle(owner.incarnation, &buried).await.unwrap(), SettleReply::Settled { .. }));
    let giving = client.transaction().await.unwrap();
    let done = dead_letters::retry(&giving, &space.name, &Filter::all(), 10, Mode::Apply).await.unwrap();
    assert_eq!((done.retried, done.lanes), (1, 1));
    let unpark = outcome(&|request| request.unpark.push((stream, to, partition)));
    let watch = space.schema.client().await;
    let (reply, ()) = tokio::join!(owner.store.settle(owner.incarnation, &unpark), async {
        eventually("the owner waits", SOON, || async { crate::store_kit::waits_for_class(&watch, 3).await }).await;
        giving.commit().await.unwrap();
    });
    let SettleReply::Settled { unparked, .. } = reply.unwrap() else { panic!("fenced") };
    assert_eq!(unparked, [false], "there is something beside the log again");
}

/// A lane that an owner begins to hold meanwhile is seen: whoever acts on dead letters waits for what is under way first.
#[tokio::test]
async fn a_lane_that_is_held_while_its_dead_letter_is_discarded_goes_on() {
    let space = Space::new().await;
    let (mut owning, operator, watch) =
        (space.schema.client().await, space.schema.client().await, space.schema.client().await);
    let owner = space.owner(1).await;
    let stream = stream_in(3);
    let bury = "insert into wh_dead_letter (stream_seq, version, lane_id, partition, attempts, reason, destination,
        error_fingerprint) values (1, 0, $1, 3, 1, 2, 'somewhere', '')";
    operator.execute(bury, &[&stream]).await.unwrap();
    // The owner has met it once more, and holds its lane again.
    let settling = owning.transaction().await.unwrap();
    let fence = "select pg_advisory_xact_lock_shared(wh_lock_class(3), $1)";
    settling.execute(fence, &[&owner.incarnation.number]).await.unwrap();
    let hold = "insert into wh_parked (stream_seq, due, lane_id, partition, attempts, reason, destination, held)
        values (1, now() + interval '100 years', $1, 3, 1, 2, 'somewhere', true)";
    settling.execute(hold, &[&stream]).await.unwrap();
    let all = Filter::all();
    let (done, ()) = tokio::join!(dead_letters::discard(&operator, &space.name, &all, 10, Mode::Apply), async {
        eventually("it waits", SOON, || async { crate::store_kit::waits_for_class(&watch, 3).await }).await;
        settling.commit().await.unwrap();
    });
    let done = done.unwrap();
    assert_eq!((done.matched, done.discarded, done.released), (1, 1, 1));
    assert_eq!(count(&watch, "wh_parked where held").await, 0, "or it would wait for nothing, for ever");
}

/// Only lanes whose owner has stopped are let go: one that began to be held meanwhile is another call's.
#[tokio::test]
async fn a_lane_is_released_only_under_its_owners_fence() {
    let space = Space::new().await;
    let (mut owning, operator, watch) =
        (space.schema.client().await, space.schema.client().await, space.schema.client().await);
    let first = space.owner(1).await;
    let second = space.owner(1).await.incarnation.number;
    watch.execute("update wh_partition set owner = $1 where partition = 4", &[&second]).await.unwrap();
    let (held, later) = (stream_in(3), stream_in(4));
    let hold = async |stream: Uuid, partition: i32| {
        let sql = "insert into wh_parked (stream_seq, due, lane_id, partition, attempts, reason, destination, held)
            values (1, now() + interval '100 years', $1, $2, 1, 2, 'somewhere', true)";
        watch.execute(sql, &[&stream, &partition]).await.unwrap();
    };
    hold(held, 3).await;
    let settling = owning.transaction().await.unwrap();
    let fence = "select pg_advisory_xact_lock_shared(wh_lock_class(3), $1)";
    settling.execute(fence, &[&first.incarnation.number]).await.unwrap();
    let lanes = [held, later].map(|stream| (stream, "somewhere"));
    let (released, ()) = tokio::join!(dead_letters::release_lanes(&operator, &space.name, &lanes), async {
        eventually("it waits", SOON, || async { crate::store_kit::waits_for_class(&watch, 3).await }).await;
        hold(later, 4).await;
        settling.commit().await.unwrap();
    });
    assert_eq!(released.unwrap(), 1);
    let left: Uuid = watch.query_one("select lane_id from wh_parked where held", &[]).await.unwrap().get(0);
    assert_eq!(left, later);
}

/// Another version's schema answers with other types, or without a column: an error that says so, and no panic.
#[tokio::test]
async fn an_answer_of_another_schema_is_an_error_that_says_what_to_do() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let others = "drop function release_lanes(uuid[], text[]);
        create function release_lanes(uuid[], text[]) returns int8 language sql as 'select 1::int8';
        alter function wh_sentinel(int8, int8) rename to wh_sentinel_before;
        create function wh_sentinel(int8, int8, out unpublished int8, out unpublished_age_ms int8, out overdue int4,
            out stuck int4, out stuck_age_ms int8, out held int4) language sql as 'select 0::int8, 0::int8, 0, 0, 0::int8, 0'";
    client.batch_execute(others).await.unwrap();
    let schema = name_of(&space.schema);
    let released = dead_letters::release_lanes(&client, &schema, &[(Uuid::now_v7(), "x")]).await.map(|_| ());
    let looked = dead_letters::sentinel(&client, &schema, 1_000, 1_000).await.map(|_| ());
    for (refused, column) in [(released, "release_lanes"), (looked, "unpublished")] {
        let Err(Error::Schema(text)) = refused else { panic!("{refused:?}") };
        assert!(text.contains("corelane migrate") && text.contains(&format!("column {column}")), "{text}");
    }
}
