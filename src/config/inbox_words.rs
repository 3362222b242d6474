//! The words of the inbox's keys.
//!
//! Invariant: a word is read as it is shown.

use super::value::{Field, Value};

/// When a delivery is settled at the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettleWhen {
    /// After the commit that holds its effects, or its failure.
    Effects,
    /// As soon as it is stored here: handled from there.
    Stored,
}

impl SettleWhen {
    /// All of them, as written.
    pub const NAMES: &'static [&'static str] = &["effects", "stored"];
}

/// Who tries a failed delivery again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryBy {
    /// The inbox: its body is stored here, its stream parked, its attempts are counted by `retry.*`.
    Database,
    /// The broker: it is abandoned, and the broker counts.
    Broker,
}

impl RetryBy {
    /// All of them, as written.
    pub const NAMES: &'static [&'static str] = &["database", "broker"];
}

impl Field for SettleWhen {
    fn value(&self) -> Value {
        Value::Text(Self::NAMES[*self as usize].to_owned())
    }
    fn assign(&mut self, value: &Value) -> Result<(), String> {
        *self = match value {
            Value::Text(text) if text == "effects" => Self::Effects,
            Value::Text(text) if text == "stored" => Self::Stored,
            _ => return Err(format!("must be {}", Self::NAMES.join(" | "))),
        };
        Ok(())
    }
}

impl Field for RetryBy {
    fn value(&self) -> Value {
        Value::Text(Self::NAMES[*self as usize].to_owned())
    }
    fn assign(&mut self, value: &Value) -> Result<(), String> {
        *self = match value {
            Value::Text(text) if text == "database" => Self::Database,
            Value::Text(text) if text == "broker" => Self::Broker,
            _ => return Err(format!("must be {}", Self::NAMES.join(" | "))),
        };
        Ok(())
    }
}
