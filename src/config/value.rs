//! What a config value can be: whole numbers, texts, choices and lists of cores, with their bounds.
//!
//! Invariants
//! - `Bounds::read` takes a value as a file gives it (typed) or as the environment gives it (text) and answers
//!   the same typed value for both.
//! - A number is compared before it is narrowed: no value wraps into its range.

use std::fmt;

/// Where a value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The table.
    Default,
    /// The config file.
    File,
    /// An environment variable.
    Environment,
    /// The embedding program (or a command line).
    Program,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "default",
            Self::File => "file",
            Self::Environment => "environment",
            Self::Program => "program",
        })
    }
}

/// Which executor the shards run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuntimeChoice {
    /// glommio where the kernel allows io_uring, tokio with the reason logged where not.
    Auto,
    /// glommio or no start.
    Glommio,
    /// Pinned tokio threads.
    Tokio,
}

impl RuntimeChoice {
    /// All of them, as written.
    pub const NAMES: &'static [&'static str] = &["auto", "glommio", "tokio"];

    /// As written.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// When a unit of work is handed to its shard. (What the shard then stores together is its flush gate's to say.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Each push at once, as a unit of its own.
    Immediate,
    /// When the unit of work ends, whole.
    Scoped,
    /// By a timer, together with what others have queued.
    Interval,
    /// When so many messages are queued, or none has come for a while, or the oldest has waited long enough.
    Batch,
}

impl Strategy {
    /// All of them, as written.
    pub const NAMES: &'static [&'static str] = &["immediate", "scoped", "interval", "batch"];
    /// All of them, in the order of their names.
    pub const ALL: [Self; 4] = [Self::Immediate, Self::Scoped, Self::Interval, Self::Batch];

    /// As written.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

impl std::str::FromStr for Strategy {
    type Err = crate::error::Error;

    /// Reads a name.
    ///
    /// # Errors
    /// [`crate::Error::Config`], which names all of them.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|strategy| strategy.name() == name);
        known.ok_or_else(|| {
            let shown: String = name.chars().take(200).collect();
            crate::error::Error::Config(format!("strategy {shown:?}: must be {}", Self::NAMES.join(" | ")))
        })
    }
}

/// Whether statements have names on the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prepared {
    /// On a connection of ours, not through a pooler.
    Auto,
    /// Everywhere: the pooler keeps them for its clients.
    On,
    /// Nowhere: each statement is sent whole.
    Off,
}

impl Prepared {
    /// All of them, as written.
    pub const NAMES: &'static [&'static str] = &["auto", "on", "off"];
}

/// What becomes of a stream whose message went to the dead letters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDead {
    /// It goes on with the next message.
    Continue,
    /// It waits until an operator retries or discards the dead letter.
    Hold,
}

impl OnDead {
    /// All of them, as written.
    pub const NAMES: &'static [&'static str] = &["continue", "hold"];

    /// As written.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// A value as a file or an environment variable gives it.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A whole number, wide enough for any mistake.
    Integer(i128),
    /// Text.
    Text(String),
    /// Whole numbers.
    List(Vec<i128>),
    /// Anything else, as written: always refused.
    Other(String),
}

impl Value {
    pub(super) fn from_toml(value: &toml::Value) -> Self {
        match value {
            toml::Value::Integer(number) => Self::Integer((*number).into()),
            toml::Value::String(text) => Self::Text(text.clone()),
            toml::Value::Boolean(word) => Self::Text(word.to_string()),
            toml::Value::Array(items) => {
                let numbers: Option<Vec<i128>> = items.iter().map(|item| item.as_integer().map(i128::from)).collect();
                numbers.map_or_else(|| Self::Other(value.to_string()), Self::List)
            }
            other => Self::Other(other.to_string()),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(number) => number.fmt(f),
            // A value is quoted back to who wrote it, not in full if it is a page long.
            Self::Text(text) | Self::Other(text) => text.chars().take(200).collect::<String>().fmt(f),
            Self::List(numbers) => {
                let texts: Vec<String> = numbers.iter().map(ToString::to_string).collect();
                write!(f, "[{}]", texts.join(", "))
            }
        }
    }
}

/// What a key accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bounds {
    /// A whole number of this range, and why the range is so.
    Integer {
        /// Smallest.
        min: u64,
        /// Largest.
        max: u64,
        /// Why.
        why: &'static str,
    },
    /// Text of so many bytes, without NUL.
    Text {
        /// Fewest.
        min: usize,
        /// Most.
        max: usize,
    },
    /// Text that is never shown.
    Secret,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A list of numbers below `below`.
    Numbers {
        /// Bound.
        below: u64,
    },
}

impl Bounds {
    /// The typed and checked value.
    ///
    /// # Errors
    /// What is allowed, in words.
    pub fn read(self, value: &Value) -> Result<Value, String> {
        let typed = match (self, value) {
            (Self::Integer { .. }, Value::Text(text)) => {
                text.trim().replace('_', "").parse().map(Value::Integer).unwrap_or_else(|_| value.clone())
            }
            (Self::Numbers { .. }, Value::Text(text)) => {
                let inner = text.trim().trim_start_matches('[').trim_end_matches(']');
                let parts = inner.split(',').map(str::trim).filter(|part| !part.is_empty());
                let numbers: Result<Vec<i128>, _> = parts.map(str::parse).collect();
                numbers.map_or_else(|_| value.clone(), Value::List)
            }
            _ => value.clone(),
        };
        self.check(&typed)?;
        Ok(typed)
    }

    /// Whether a typed value is within bounds.
    ///
    /// # Errors
    /// What is allowed, in words.
    pub fn check(self, value: &Value) -> Result<(), String> {
        let fits = match (self, value) {
            (Self::Integer { min, max, .. }, Value::Integer(number)) => {
                (i128::from(min)..=i128::from(max)).contains(number)
            }
            (Self::Text { min, max }, Value::Text(text)) => (min..=max).contains(&text.len()) && !text.contains('\0'),
            (Self::Secret, Value::Text(text)) => !text.contains('\0'),
            (Self::Choice(names), Value::Text(text)) => names.contains(&text.as_str()),
            (Self::Numbers { below }, Value::List(numbers)) => {
                numbers.iter().all(|number| (0..i128::from(below)).contains(number))
            }
            _ => false,
        };
        if fits { Ok(()) } else { Err(format!("must be {self}")) }
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer { min, max, why: "" } => write!(f, "{min}..={max}"),
            Self::Integer { min, max, why } => write!(f, "{min}..={max} ({why})"),
            Self::Text { min, max } => write!(f, "text of {min}..={max} bytes without NUL"),
            Self::Secret => f.write_str("text without NUL"),
            Self::Choice(names) => f.write_str(&names.join(" | ")),
            Self::Numbers { below } => write!(f, "a list of numbers in 0..{below}"),
        }
    }
}

/// A type that a field of the config can have.
pub(super) trait Field {
    fn value(&self) -> Value;
    fn assign(&mut self, value: &Value) -> Result<(), String>;
}

macro_rules! whole_number {
    ($($type:ty),*) => {$(
        impl Field for $type {
            fn value(&self) -> Value {
                Value::Integer(*self as i128)
            }
            fn assign(&mut self, value: &Value) -> Result<(), String> {
                let Value::Integer(number) = value else { return Err("must be a whole number".to_owned()) };
                *self = (*number).try_into().map_err(|_| format!("must be at most {}", <$type>::MAX))?;
                Ok(())
            }
        }
    )*};
}
whole_number!(u32, u64, usize);

impl Field for String {
    fn value(&self) -> Value {
        Value::Text(self.clone())
    }
    fn assign(&mut self, value: &Value) -> Result<(), String> {
        let Value::Text(text) = value else { return Err("must be text".to_owned()) };
        self.clone_from(text);
        Ok(())
    }
}

/// Enums whose variants are written as their `NAMES` say.
macro_rules! words {
    ($($type:ident { $($variant:ident),+ })*) => {$(
        impl Field for $type {
            fn value(&self) -> Value {
                Value::Text(Self::NAMES[*self as usize].to_owned())
            }
            fn assign(&mut self, value: &Value) -> Result<(), String> {
                let known = [$(Self::$variant),+];
                let meant = match value {
                    Value::Text(text) => known.into_iter().find(|word| Self::NAMES[*word as usize] == text),
                    _ => None,
                };
                *self = meant.ok_or_else(|| format!("must be {}", Self::NAMES.join(" | ")))?;
                Ok(())
            }
        }
    )*};
}
words! {
    RuntimeChoice { Auto, Glommio, Tokio }
    Strategy { Immediate, Scoped, Interval, Batch }
    Prepared { Auto, On, Off }
    OnDead { Continue, Hold }
}

impl Field for bool {
    fn value(&self) -> Value {
        Value::Text(self.to_string())
    }
    fn assign(&mut self, value: &Value) -> Result<(), String> {
        let Value::Text(text) = value else { return Err("must be true | false".to_owned()) };
        *self = text.parse().map_err(|_| "must be true | false".to_owned())?;
        Ok(())
    }
}

impl Field for Vec<usize> {
    fn value(&self) -> Value {
        Value::List(self.iter().map(|number| *number as i128).collect())
    }
    fn assign(&mut self, value: &Value) -> Result<(), String> {
        let Value::List(numbers) = value else { return Err("must be a list of whole numbers".to_owned()) };
        let narrowed: Result<Self, _> = numbers.iter().map(|number| usize::try_from(*number)).collect();
        *self = narrowed.map_err(|_| "must be a list of whole numbers from 0".to_owned())?;
        Ok(())
    }
}
