//! Every limit of a message by itself, each with its neighbours left alone.

use std::time::SystemTime;

use serde::Serialize;

use super::*;
use crate::message::{Message, RawMessage, Wishes, kind};

const ROUTER: Router = Router { partitions: 16, shards: 2 };

fn write(rows: &mut Rows, message: &impl Enqueue) -> Result<()> {
    let id = message.header().wishes.message_id.unwrap_or_else(Uuid::now_v7);
    ROUTER.write(rows, message, id)
}

#[test]
fn what_breaks_a_limit_is_named_and_leaves_the_rows_as_they_were() {
    let stream = Uuid::from_u128(7);
    let id = Uuid::from_u128(9);
    let long = "n".repeat(256);
    let many: Vec<String> = (0..65).map(|n| format!("d{n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let metadata = vec![b' '; METADATA_BYTES_MAX + 1];
    let payload = vec![b' '; PAYLOAD_BYTES_MAX + 1];
    let wishes = Wishes::new().message_id(id);
    let good = RawMessage::command("t", b"{}").stream(stream).to(&["a"]);
    let mut rows = Rows::default();
    write(&mut rows, &good).unwrap();
    let before = format!("{rows:?}");
    for (message, wishes, expected) in [
        (RawMessage::command("", b""), wishes, "type name is 0, allowed is 1..=255 bytes"),
        (RawMessage::command(&long, b""), wishes, "type name is 256, allowed is 1..=255 bytes"),
        (RawMessage::command("a\0", b""), wishes, "type name is a text with NUL, allowed is a text without NUL"),
        (good.content_type(&long), wishes, "content type is 256, allowed is 0..=255 bytes"),
        (good.to(&many), wishes, "number of destinations is 65, allowed is 0..=64"),
        (good.to(&[""]), wishes, "destination is \"\", allowed is a destination's name has 1 to 255 bytes"),
        (good, wishes.metadata(&metadata), "metadata is 65537, allowed is 0..=65536 bytes"),
        (RawMessage::command("t", &payload), wishes, "payload is longer, allowed is 0..=67108864 bytes"),
        (good, wishes.message_id(Uuid::nil()), "message id is the nil UUID, allowed is any other"),
    ] {
        let error = write(&mut rows, &message.with(wishes)).unwrap_err().to_string();
        let id = wishes.message_id.unwrap();
        assert!(error.starts_with(&format!("message {id}: {expected}")), "{error}");
        assert_eq!(format!("{rows:?}"), before, "after: {expected}");
    }
}

#[test]
fn a_nil_stream_is_refused_and_none_is_a_lane_of_its_own() {
    let mut rows = Rows::default();
    let nil = RawMessage::event("t", b"{}").stream(Uuid::nil());
    assert!(matches!(write(&mut rows, &nil), Err(Error::InvalidStreamId)));
    write(&mut rows, &RawMessage::event("t", b"{}")).unwrap();
    assert_eq!((rows.stream_id(0), rows.lane_id[0]), (None, crate::ids::lane_of_message(rows.message_id[0])));
    assert!(!rows.is_event(0), "without a stream there is no version");
}

#[test]
fn json_that_is_none_is_refused_with_its_place_and_only_on_request() {
    let mut rows = Rows::default();
    let bad = RawMessage::event("t", b"{\"a\":}").stream(Uuid::from_u128(1));
    assert!(matches!(write(&mut rows, &bad.checked()), Err(Error::InvalidJson { offset: 5, .. })));
    assert!(rows.is_empty() && rows.arena.is_empty());
    write(&mut rows, &bad).unwrap();
    write(&mut rows, &bad.content_type("text/plain").checked()).unwrap();
    assert_eq!(rows.bytes(rows.payload[0]), b"{\"a\":}");
}

#[test]
fn an_event_cannot_be_scheduled_and_a_command_can() {
    let mut rows = Rows::default();
    let wishes = Wishes::new().due(SystemTime::now());
    for event in [RawMessage::event("t", b""), RawMessage::event("t", b"").stream(Uuid::from_u128(1))] {
        assert!(matches!(write(&mut rows, &event.with(wishes)), Err(Error::ScheduledEvent { .. })));
    }
    write(&mut rows, &RawMessage::command("t", b"").with(wishes)).unwrap();
    assert!(rows.due_unix_us[0] > 0);
}

#[test]
fn a_due_time_before_1970_is_refused_with_its_value_and_range() {
    let mut rows = Rows::default();
    for due_unix_us in [-1, i64::MIN] {
        let wishes = Wishes { due_unix_us, ..Wishes::new() };
        for message in [RawMessage::command("t", b""), RawMessage::event("t", b"").stream(Uuid::from_u128(1))] {
            let error = write(&mut rows, &message.with(wishes)).unwrap_err();
            assert!(matches!(error, Error::MessageLimit { what: "due time", .. }), "{error}");
            let expected = format!("due time is {due_unix_us} us since 1970, allowed is 0..=9223372036854775807 us");
            assert!(error.to_string().contains(&expected), "{error}");
        }
    }
    assert!(rows.is_empty());
    for due_unix_us in [1, i64::MAX] {
        write(&mut rows, &RawMessage::command("t", b"").with(Wishes { due_unix_us, ..Wishes::new() })).unwrap();
    }
    write(&mut rows, &RawMessage::command("t", b"")).unwrap();
    assert_eq!([0, 1, 2].map(|row| rows.is_scheduled(row)), [true, true, false]);
}

#[test]
fn a_destination_named_twice_is_one_reference() {
    let mut rows = Rows::default();
    write(&mut rows, &RawMessage::command("t", b"").to(&["a", "b", "a"])).unwrap();
    let names: Vec<&str> = rows.reference_destination.iter().map(|id| id.name()).collect();
    assert_eq!(names, ["a", "b"]);
}

#[derive(Serialize)]
struct Counted {
    n: u32,
}

impl Message for Counted {
    type Kind = kind::Event;
    const NAME: &'static str = "test.counted";
    const DESTINATIONS: &'static [&'static str] = &["by-type"];
    fn stream_id(&self) -> Option<Uuid> {
        Some(Uuid::from_u128(self.n.into()))
    }
}

#[test]
fn a_type_states_name_kind_stream_and_destinations_and_a_push_may_state_others() {
    let mut rows = Rows::default();
    write(&mut rows, &Counted { n: 3 }).unwrap();
    write(&mut rows, &Counted { n: 3 }.with(Wishes::new().to(&["by-push"]))).unwrap();
    write(&mut rows, &Counted { n: 3 }.with(Wishes::new().to(&[]))).unwrap();
    let names: Vec<&str> = rows.reference_destination.iter().map(|id| id.name()).collect();
    assert_eq!(names, ["by-type", "by-push"]);
    assert_eq!(rows.text(rows.type_name[0]), "test.counted");
    assert_eq!(rows.bytes(rows.payload[0]), b"{\"n\":3}");
    assert!(rows.is_event(0) && rows.partition[0] == partition_of(Uuid::from_u128(3), 16));
}

/// Pushes another message while it is written, as a user's `Serialize` may.
struct Nested;

impl Serialize for Nested {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut inner = Rows::default();
        write(&mut inner, &Counted { n: 1 }).map_err(serde::ser::Error::custom)?;
        serializer.serialize_u64(inner.len() as u64)
    }
}

impl Message for Nested {
    type Kind = kind::Command;
    const NAME: &'static str = "test.nested";
    const DESTINATIONS: &'static [&'static str] = &["outer"];
    fn stream_id(&self) -> Option<Uuid> {
        None
    }
}

/// Refuses to be serialized.
struct Unserializable;

impl Serialize for Unserializable {
    fn serialize<S: serde::Serializer>(&self, _: S) -> std::result::Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("by design"))
    }
}

impl Message for Unserializable {
    type Kind = kind::Command;
    const NAME: &'static str = "test.unserializable";
    const DESTINATIONS: &'static [&'static str] = &[];
    fn stream_id(&self) -> Option<Uuid> {
        None
    }
}

#[test]
fn code_of_the_users_may_push_and_may_fail_while_it_is_written() {
    let mut rows = Rows::default();
    write(&mut rows, &Nested).unwrap();
    assert_eq!(rows.bytes(rows.payload[0]), b"1");
    assert_eq!(rows.reference_destination[0].name(), "outer");
    let error = write(&mut rows, &Unserializable).unwrap_err().to_string();
    assert!(error.contains("not to be serialized (by design)"), "{error}");
    assert_eq!(rows.len(), 1);
}
