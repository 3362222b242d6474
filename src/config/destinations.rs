//! What is said of single destinations: `[destinations."orders"] on_dead = "hold"`.
//!
//! Invariants
//! - A destination's name may hold any characters, dots too: only the last part of a key is the property.
//! - A program may set what a file can; the environment can for names in lower case.

use super::value::{Field, OnDead, Value};
use crate::error::{Error, Result};
use crate::limits::NAME_BYTES_MAX;

/// Before the name, and what can be said of it.
const SECTION: &str = "destinations.";
const ON_DEAD: &str = ".on_dead";

/// Destinations of which something is said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Destinations {
    on_dead: Vec<(String, OnDead)>,
}

impl Destinations {
    /// Says what becomes of the streams of a destination whose message died; the last word counts.
    pub fn set_on_dead(&mut self, destination: &str, on_dead: OnDead) {
        match self.on_dead.iter_mut().find(|(name, _)| name == destination) {
            Some((_, known)) => *known = on_dead,
            None => self.on_dead.push((destination.to_owned(), on_dead)),
        }
    }

    /// What is said.
    pub fn on_dead(&self) -> impl Iterator<Item = (&str, OnDead)> {
        self.on_dead.iter().map(|(name, on_dead)| (name.as_str(), *on_dead))
    }

    /// Takes a key, if it is one of a destination.
    pub(super) fn assign(&mut self, key: &str, value: &Value, source: &str) -> Result<bool> {
        let Some(rest) = key.strip_prefix(SECTION) else { return Ok(false) };
        let Some(name) = rest.strip_suffix(ON_DEAD) else {
            return Err(Error::Config(format!(
                "{key} = {value}: unknown key in {source}; [destinations.\"name\"] has on_dead"
            )));
        };
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(Error::Config(format!("{key} = {value}: a destination's name has 1..={NAME_BYTES_MAX} bytes")));
        }
        let mut on_dead = OnDead::Continue;
        on_dead.assign(value).map_err(|problem| Error::Config(format!("{key} = {value}: {problem}")))?;
        self.set_on_dead(name, on_dead);
        Ok(true)
    }
}
