//! Names of types over time: what an event was stored under stays readable after its type was renamed or changed.
//!
//! Invariants
//! - A name leads, by aliases and upcasters, to exactly one type of the program, or nowhere. What would be ambiguous,
//!   endless or lead to nothing is refused when the declaration is built, all of it at once.
//! - A shape is a name: a change that old payloads do not read as gets a new name, and an upcaster from the old one.
//! - Stored bytes are never changed: a reader's copy is brought up to date, each time it is read.
//! - What cannot be read is an outcome of that one event ([`Decoded`]), whatever is read beside it.
//! - Looking a name up allocates nothing.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display};
use std::sync::Arc;

use hashbrown::HashMap;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Command, Event, Message, is_json, json};
use crate::error::{Error, Result};
use crate::limits::NAME_BYTES_MAX;

/// Content type of a payload that was erased, whatever it had been.
const ERASED: &str = "application/vnd.corelane.erased";

type ConvertValue = dyn Fn(Value) -> Result<Value, String> + Send + Sync;
type ConvertBytes = dyn Fn(&[u8]) -> Result<Vec<u8>, String> + Send + Sync;

enum Convert {
    Value(Box<ConvertValue>),
    Bytes(Box<ConvertBytes>),
}

/// One upcaster.
struct Step {
    from: Box<str>,
    to: Box<str>,
    convert: Convert,
}

/// Where a name leads.
struct Known {
    current: &'static str,
    steps: Vec<Arc<Step>>,
}

/// The types a program reads, with the names and shapes they had before. Given to
/// [`Builder::event_types`](crate::engine::Builder::event_types), it holds for whatever the engine reads: streams, the
/// feed, subscriptions, and the inbox's typed handlers. Clones share it.
///
/// ```
/// use corelane::message::event_types::{Decoded, EventTypes};
/// use corelane::message::{Message, kind};
/// use serde_json::{Value, json};
/// use uuid::Uuid;
///
/// #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
/// struct OrderPlaced { order: Uuid, total_cents: u64, currency: String }
///
/// impl Message for OrderPlaced {
///     type Kind = kind::Event;
///     const NAME: &'static str = "shop.order-placed.3";
///     const DESTINATIONS: &'static [&'static str] = &["orders"];
///     fn stream_id(&self) -> Option<Uuid> { Some(self.order) }
/// }
///
/// # fn main() -> Result<(), corelane::Error> {
/// let types = EventTypes::builder()
///     .event::<OrderPlaced>()
///     // It once had another name; what it looked like did not change.
///     .alias("Shop.OrderPlaced", "shop.order-placed.1")
///     // Then it changed, twice: each step knows the next shape only.
///     .upcast("shop.order-placed.1", "shop.order-placed.2", |mut old: Value| {
///         let total = old["total"].as_u64().ok_or("no total")?;
///         old["total_cents"] = json!(total * 100);
///         Ok::<_, &str>(old)
///     })
///     .upcast("shop.order-placed.2", OrderPlaced::NAME, |mut old: Value| {
///         old["currency"] = json!("EUR");
///         Ok::<_, String>(old)
///     })
///     .build()?;
///
/// // What a reader does with an event, here with one from the first days: `event.decode::<OrderPlaced>()`.
/// let stored = br#"{"order": "018f3c00-0000-7000-8000-0000000000aa", "total": 42}"#;
/// match types.decode::<OrderPlaced>("Shop.OrderPlaced", "", stored) {
///     Decoded::Known(placed) => assert_eq!((placed.total_cents, &*placed.currency), (4200, "EUR")),
///     Decoded::OtherType(name) => println!("a {name}"),
///     Decoded::Unknown => println!("of a type that this program does not know: passed over"),
///     Decoded::Erased => println!("what it said was erased"),
///     Decoded::Failed(error) => println!("{error}"),
/// }
/// assert_eq!(types.current_name("shop.order-placed.2"), Some(OrderPlaced::NAME));
/// # Ok(()) }
/// ```
#[derive(Clone, Default)]
pub struct EventTypes {
    /// `None`: nothing is declared.
    known: Option<Arc<HashMap<Box<str>, Known>>>,
}

/// What an event is, read as a type.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "an event that cannot be read is told by it alone"]
pub enum Decoded<T> {
    /// It is of the type, brought up to date.
    Known(T),
    /// It is of another type of this program, by this name.
    OtherType(&'static str),
    /// No type of this program has or had its name.
    Unknown,
    /// What it said was erased.
    Erased,
    /// It is of the type and cannot be read as it.
    Failed(DecodeError),
}

/// Why an event could not be read. Its bytes are as they were.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stored as {stored_as}, not read as {read_as}: {text}")]
pub struct DecodeError {
    /// The name it is stored under.
    pub stored_as: String,
    /// Where it failed: the type, or the name that an upcaster leads to.
    pub read_as: String,
    /// What was wrong.
    pub text: String,
}

impl<T> Decoded<T> {
    /// The value, if it is of the type and could be read.
    pub fn known(self) -> Option<T> {
        match self {
            Self::Known(value) => Some(value),
            _ => None,
        }
    }
}

/// Declares [`EventTypes`]. The order of the calls means nothing.
#[derive(Default)]
pub struct EventTypesBuilder {
    declared: Vec<(Box<str>, Edge)>,
}

/// What a name is.
enum Edge {
    Current(&'static str),
    Alias(Box<str>),
    Upcast(Arc<Step>),
}

impl Edge {
    fn next(&self) -> Option<&str> {
        match self {
            Self::Current(_) => None,
            Self::Alias(of) => Some(of),
            Self::Upcast(step) => Some(&step.to),
        }
    }
}

impl Display for Edge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Current(_) => f.write_str("a type"),
            Self::Alias(of) => write!(f, "an alias of {of:?}"),
            Self::Upcast(step) => write!(f, "upcast to {:?}", step.to),
        }
    }
}

impl EventTypesBuilder {
    /// A type of events as the program has it now.
    #[must_use]
    pub fn event<E: Event>(self) -> Self {
        self.with(E::NAME, Edge::Current(E::NAME))
    }

    /// The same for another message that the inbox's handlers get.
    #[must_use]
    pub fn command<C: Command>(self) -> Self {
        self.with(C::NAME, Edge::Current(C::NAME))
    }

    /// Another name for the same payload, from before a rename: of a type, or of an older shape that has an upcaster.
    #[must_use]
    pub fn alias(self, old_name: &str, of: &str) -> Self {
        self.with(old_name, Edge::Alias(of.into()))
    }

    /// Makes a JSON payload of an older shape one of the next. (Integers beyond 64 bits become floating-point numbers:
    /// where there are such, use one of the others.)
    #[must_use]
    pub fn upcast<E: Display>(
        self,
        from: &str,
        to: &str,
        upcaster: impl Fn(Value) -> Result<Value, E> + Send + Sync + 'static,
    ) -> Self {
        let convert = move |old| upcaster(old).map_err(|error| error.to_string());
        self.step(from, to, Convert::Value(Box::new(convert)))
    }

    /// The same for any bytes. What it answers is taken to be JSON.
    #[must_use]
    pub fn upcast_bytes<E: Display>(
        self,
        from: &str,
        to: &str,
        upcaster: impl Fn(&[u8]) -> Result<Vec<u8>, E> + Send + Sync + 'static,
    ) -> Self {
        let convert = move |old: &[u8]| upcaster(old).map_err(|error| error.to_string());
        self.step(from, to, Convert::Bytes(Box::new(convert)))
    }

    /// The same for an older type that the program still has. It is not declared beside: its name leads on.
    #[must_use]
    pub fn upcast_typed<Old, New, E>(self, upcaster: impl Fn(Old) -> Result<New, E> + Send + Sync + 'static) -> Self
    where
        Old: Message + DeserializeOwned,
        New: Message,
        E: Display,
    {
        self.upcast_bytes(Old::NAME, New::NAME, move |old| {
            let old = json::read::<Old>(old).map_err(|error| format!("not a {}: {error}", Old::NAME))?;
            let new = upcaster(old).map_err(|error| error.to_string())?;
            serde_json::to_vec(&new).map_err(|error| error.to_string())
        })
    }

    fn step(self, from: &str, to: &str, convert: Convert) -> Self {
        let step = Step { from: from.into(), to: to.into(), convert };
        self.with(from, Edge::Upcast(Arc::new(step)))
    }

    fn with(mut self, name: &str, edge: Edge) -> Self {
        self.declared.push((name.into(), edge));
        self
    }

    /// Looks where each name leads.
    ///
    /// # Errors
    /// [`Error::EventTypes`] with everything that is wrong: a name that is declared twice, that leads to nothing or in a
    /// circle, or that no type can have.
    pub fn build(self) -> Result<EventTypes> {
        let mut problems = BTreeSet::new();
        let mut edges: BTreeMap<Box<str>, Edge> = BTreeMap::new();
        for (name, edge) in self.declared {
            if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains('\0') {
                problems.insert(format!("{name:?}: a name has 1..={NAME_BYTES_MAX} bytes without NUL"));
            }
            match edges.get(&name) {
                Some(other) => {
                    problems.insert(format!("{name:?} is declared twice: as {other} and as {edge}"));
                }
                None => {
                    edges.insert(name, edge);
                }
            }
        }
        let mut known = HashMap::with_capacity(edges.len());
        for name in edges.keys() {
            match resolve(&edges, name) {
                Ok(leads) => {
                    known.insert(name.clone(), leads);
                }
                Err(problem) => {
                    problems.insert(problem);
                }
            }
        }
        if problems.is_empty() {
            return Ok(EventTypes { known: Some(Arc::new(known)) });
        }
        Err(Error::EventTypes(problems.into_iter().collect::<Vec<_>>().join("; ")))
    }
}

/// Follows a name to its type. What is wrong on the way is said in the same words from wherever one comes.
fn resolve(edges: &BTreeMap<Box<str>, Edge>, name: &str) -> Result<Known, String> {
    let mut steps = Vec::new();
    let mut way = vec![name];
    loop {
        let at = way[way.len() - 1];
        let edge = match edges.get(at) {
            Some(edge) => edge,
            None => {
                let before = way[way.len() - 2];
                return Err(format!("{before:?} leads to {at:?}, which is not declared"));
            }
        };
        if let Edge::Upcast(step) = edge {
            steps.push(step.clone());
        }
        match (edge, edge.next()) {
            (Edge::Current(current), _) => return Ok(Known { current, steps }),
            (_, Some(next)) => {
                if let Some(start) = way.iter().position(|on_the_way| *on_the_way == next) {
                    let mut circle = way.split_off(start);
                    let first = circle.iter().enumerate().min_by_key(|(_, name)| **name).map_or(0, |(at, _)| at);
                    circle.rotate_left(first);
                    circle.push(circle[0]);
                    return Err(format!("a circle: {}", circle.join(" -> ")));
                }
                way.push(next);
            }
            (_, None) => return Err(format!("{at:?} leads nowhere")),
        }
    }
}

/// A payload on its way from the stored shape to that of today.
enum Body<'a> {
    Stored(&'a [u8]),
    Bytes(Vec<u8>),
    Value(Value),
}

impl EventTypes {
    /// Begins a declaration.
    #[must_use]
    pub fn builder() -> EventTypesBuilder {
        EventTypesBuilder::default()
    }

    /// The name that a stored name has today; `None` for one that no declared type has or had. (A type that was never
    /// renamed or changed need not be declared to be decoded.)
    #[must_use]
    pub fn current_name(&self, stored: &str) -> Option<&'static str> {
        self.get(stored).map(|known| known.current)
    }

    /// The stored names, in any order, that lead to a type whose name of today is wanted: itself, and older ones.
    pub fn stored_names<'a>(&'a self, is_wanted: impl Fn(&str) -> bool + 'a) -> impl Iterator<Item = &'a str> + 'a {
        let known = self.known.iter().flat_map(|known| known.iter());
        known.filter(move |(_, known)| is_wanted(known.current)).map(|(name, _)| &**name)
    }

    fn get(&self, stored: &str) -> Option<&Known> {
        self.known.as_ref().and_then(|known| known.get(stored))
    }

    /// Adds the older names of the types that are wanted by name, or by the beginning of the name they have today.
    pub(crate) fn widen(&self, names: &mut Vec<String>, prefixes: &[String]) {
        let wanted = names.clone();
        let is_wanted = |current: &str| {
            wanted.iter().any(|name| name == current) || prefixes.iter().any(|prefix| current.starts_with(prefix))
        };
        let is_new = |name: &&str| !wanted.iter().any(|wanted| wanted == name);
        names.extend(self.stored_names(is_wanted).filter(is_new).map(str::to_owned));
    }

    /// Reads a payload as a type, whatever it was stored as; a content type that is empty says JSON.
    pub fn decode<T: Message + DeserializeOwned>(
        &self,
        stored_as: &str,
        content_type: &str,
        payload: &[u8],
    ) -> Decoded<T> {
        if content_type == ERASED {
            return Decoded::Erased;
        }
        let steps = match self.get(stored_as) {
            Some(known) if known.current == T::NAME => &known.steps[..],
            Some(known) => return Decoded::OtherType(known.current),
            None if stored_as == T::NAME => &[],
            None => return Decoded::Unknown,
        };
        match read(steps, content_type, payload) {
            Ok(value) => Decoded::Known(value),
            Err((read_as, text)) => Decoded::Failed(DecodeError {
                stored_as: stored_as.to_owned(),
                read_as: read_as.unwrap_or(T::NAME).to_owned(),
                text,
            }),
        }
    }
}

/// The same declaration, not one that says the same.
impl PartialEq for EventTypes {
    fn eq(&self, other: &Self) -> bool {
        match (&self.known, &other.known) {
            (None, None) => true,
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl Eq for EventTypes {}

impl fmt::Debug for EventTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.known.iter().flat_map(|known| known.iter()).map(|(name, known)| (name, known.current)))
            .finish()
    }
}

/// An error says at which step it was; `None`: at the end.
fn read<'a, T: DeserializeOwned>(
    steps: &'a [Arc<Step>],
    content_type: &str,
    payload: &[u8],
) -> Result<T, (Option<&'a str>, String)> {
    let not_json = || format!("it is read from JSON, and its content type is {content_type:.100}");
    let mut body = Body::Stored(payload);
    for step in steps {
        let failed = |text: String| (Some(&*step.to), format!("from {}: {text}", step.from));
        body = match &step.convert {
            Convert::Value(convert) => {
                let value = match body {
                    Body::Stored(_) if !is_json(content_type) => return Err(failed(not_json())),
                    Body::Stored(bytes) => serde_json::from_slice(bytes),
                    Body::Bytes(bytes) => serde_json::from_slice(&bytes),
                    Body::Value(value) => Ok(value),
                };
                let value = value.map_err(|error| failed(error.to_string()))?;
                Body::Value(convert(value).map_err(failed)?)
            }
            Convert::Bytes(convert) => {
                let bytes = match body {
                    Body::Stored(bytes) => Cow::Borrowed(bytes),
                    Body::Bytes(bytes) => Cow::Owned(bytes),
                    Body::Value(value) => {
                        Cow::Owned(serde_json::to_vec(&value).map_err(|error| failed(error.to_string()))?)
                    }
                };
                Body::Bytes(convert(&bytes).map_err(failed)?)
            }
        };
    }
    let read = match body {
        Body::Stored(_) if !is_json(content_type) => return Err((None, not_json())),
        Body::Stored(bytes) => json::read(bytes),
        Body::Bytes(bytes) => json::read(&bytes),
        Body::Value(value) => T::deserialize(value),
    };
    read.map_err(|error| (None, error.to_string()))
}
