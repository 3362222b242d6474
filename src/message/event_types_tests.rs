//! Names, aliases, upcasters: what leads where, what is refused, what one event's reader is told.

use serde_json::{Value, json};
use uuid::Uuid;

use super::event_types::{Decoded, EventTypes};
use super::{Message, kind};
use crate::error::Error;

#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct Placed {
    total_cents: u64,
    currency: String,
}

#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct PlacedBefore {
    total_cents: u64,
}

#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct Paid {}

macro_rules! event {
    ($type:ty, $name:literal) => {
        impl Message for $type {
            type Kind = kind::Event;
            const NAME: &'static str = $name;
            const DESTINATIONS: &'static [&'static str] = &[];
            fn stream_id(&self) -> Option<Uuid> {
                None
            }
        }
    };
}
event!(Placed, "placed.3");
event!(PlacedBefore, "placed.2");
event!(Paid, "paid");

fn types() -> EventTypes {
    EventTypes::builder()
        .upcast_typed(|old: PlacedBefore| {
            if old.total_cents == 13 {
                return Err("13 is no total");
            }
            Ok(Placed { total_cents: old.total_cents, currency: "EUR".to_owned() })
        })
        .alias("Placed", "placed.1")
        .upcast("placed.1", "placed.2", |old: Value| match old["total"].as_u64() {
            Some(total) => Ok(json!({ "total_cents": total * 100 })),
            None => Err("no total"),
        })
        .upcast_bytes("placed.csv", "placed.1", |old| {
            let text = std::str::from_utf8(old).map_err(|error| error.to_string())?;
            Ok::<_, String>(format!(r#"{{"total": {text}}}"#).into_bytes())
        })
        .event::<Placed>()
        .event::<Paid>()
        .alias("Paid", "paid")
        .build()
        .expect("they hold together")
}

fn placed(total_cents: u64) -> Decoded<Placed> {
    Decoded::Known(Placed { total_cents, currency: "EUR".to_owned() })
}

fn failed<T: std::fmt::Debug>(decoded: Decoded<T>) -> String {
    match decoded {
        Decoded::Failed(error) => error.to_string(),
        other => panic!("it did not fail: {other:?}"),
    }
}

#[test]
fn every_older_name_and_shape_is_read_as_the_type_of_today() {
    let types = types();
    for (name, content_type, payload, total_cents) in [
        ("placed.3", "", r#"{"total_cents": 7, "currency": "EUR"}"#, 7),
        ("placed.2", "application/json", r#"{"total_cents": 8}"#, 8),
        ("placed.1", "", r#"{"total": 9}"#, 900),
        ("Placed", "", r#"{"total": 10}"#, 1_000),
        ("placed.csv", "text/csv", "11", 1_100),
    ] {
        assert_eq!(types.decode::<Placed>(name, content_type, payload.as_bytes()), placed(total_cents), "{name}");
        assert_eq!(types.current_name(name), Some("placed.3"));
    }
    assert_eq!(types.decode::<Paid>("Paid", "", b"{}"), Decoded::Known(Paid {}));
    let mut names: Vec<&str> = types.stored_names(|name| name == "placed.3").collect();
    names.sort_unstable();
    assert_eq!(names, ["Placed", "placed.1", "placed.2", "placed.3", "placed.csv"]);
}

#[test]
fn a_type_that_is_not_known_is_an_outcome_and_so_is_another_one() {
    let types = types();
    assert_eq!(types.decode::<Placed>("shipped", "", b"{}"), Decoded::Unknown);
    assert_eq!(types.current_name("shipped"), None);
    assert_eq!(types.decode::<Placed>("Paid", "", b"{}"), Decoded::OtherType("paid"));
    assert_eq!(types.decode::<Placed>("Placed", "application/vnd.corelane.erased", b""), Decoded::Erased);
    // What was never renamed need not be declared; what leads elsewhere is not of the old type any more.
    assert_eq!(EventTypes::default().decode::<Paid>("paid", "", b"{}"), Decoded::Known(Paid {}));
    assert_eq!(EventTypes::default().decode::<Paid>("Paid", "", b"{}"), Decoded::Unknown);
    assert_eq!(types.decode::<PlacedBefore>("placed.2", "", br#"{"total_cents": 8}"#), Decoded::OtherType("placed.3"));
}

#[test]
fn what_cannot_be_read_says_at_which_step_and_why() {
    let types = types();
    let of =
        |name: &str, content_type: &str, payload: &[u8]| failed(types.decode::<Placed>(name, content_type, payload));
    for (text, words) in [
        (of("placed.3", "", b"{"), &["stored as placed.3, not read as placed.3", "EOF"][..]),
        (of("placed.3", "", b""), &["EOF"]),
        (of("placed.3", "text/csv", b"{}"), &["content type is text/csv"]),
        (of("Placed", "", b"{}"), &["stored as Placed, not read as placed.2", "from placed.1", "no total"]),
        (of("Placed", "text/csv", b"{}"), &["not read as placed.2", "content type is text/csv"]),
        (of("placed.1", "", b"\xff"), &["not read as placed.2"]),
        (of("placed.2", "", br#"{"total_cents": 13}"#), &["not read as placed.3", "from placed.2", "13 is no total"]),
        (of("placed.csv", "text/csv", b"x"), &["not read as placed.2", "from placed.1", "expected value"]),
    ] {
        for word in words {
            assert!(text.contains(word), "{text:?} does not say {word:?}");
        }
    }
}

#[test]
fn what_does_not_hold_together_is_refused_with_all_of_it() {
    let step = |old: Value| Ok::<_, String>(old);
    let refused = EventTypes::builder()
        .event::<Paid>()
        .event::<Paid>()
        .alias("Paid", "paid")
        .upcast("Paid", "paid.2", step)
        .upcast("c", "a", step)
        .alias("a", "b")
        .upcast("b", "c", step)
        .alias("enters", "b")
        .alias("lost", "nothing")
        .alias("also lost", "lost")
        .alias("", "paid")
        .build();
    let Err(Error::EventTypes(text)) = refused else { panic!("{refused:?}") };
    let problems: Vec<&str> = text.split("; ").collect();
    assert_eq!(
        problems,
        [
            r#""": a name has 1..=255 bytes without NUL"#,
            r#""Paid" is declared twice: as an alias of "paid" and as upcast to "paid.2""#,
            r#""lost" leads to "nothing", which is not declared"#,
            r#""paid" is declared twice: as a type and as a type"#,
            "a circle: a -> b -> c -> a",
        ]
    );
    let itself = EventTypes::builder().alias("x", "x").build();
    assert!(matches!(itself, Err(Error::EventTypes(text)) if text == "a circle: x -> x"));
}

#[test]
fn a_chain_of_many_steps_is_gone_whole_and_a_number_beyond_64_bits_survives_bytes() {
    let mut builder = EventTypes::builder().event::<Placed>();
    let names: Vec<String> = (0..200).map(|n| format!("s{n}")).chain(["placed.3".to_owned()]).collect();
    for pair in names.windows(2) {
        builder = builder.upcast(&pair[0], &pair[1], |mut old: Value| {
            old["total_cents"] = json!(old["total_cents"].as_u64().unwrap_or_default() + 1);
            Ok::<_, String>(old)
        });
    }
    let types = builder.build().expect("a long one");
    let stored = br#"{"total_cents": 0, "currency": "EUR"}"#;
    assert_eq!(types.decode::<Placed>("s0", "", stored), placed(200));
    assert_eq!(types.decode::<Placed>("s199", "", stored), placed(1));

    #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    struct Large {
        n: i128,
    }
    event!(Large, "large");
    let types = EventTypes::builder()
        .event::<Large>()
        .upcast_bytes("large.1", "large", |old| Ok::<_, String>(old.to_vec()))
        .build()
        .expect("one");
    let stored = br#"{"n": 123456789012345678901234567890}"#;
    let read = types.decode::<Large>("large.1", "", stored);
    assert_eq!(read, Decoded::Known(Large { n: 123_456_789_012_345_678_901_234_567_890 }));
}
