//! Destination names as small numbers, so that a reference is four bytes and a lane's key is fixed in size.
//!
//! Invariants
//! - A number stands for one name for the life of the process; names are never removed
//!   (at most [`crate::limits::DESTINATIONS_MAX`]).
//! - Looking a number up takes no lock (the table only grows, behind a `OnceLock` a slot).

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::limits::{DESTINATIONS_MAX, NAME_BYTES_MAX};

/// A destination of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DestinationId(u16);

struct Registry {
    names: Vec<OnceLock<String>>,
    numbers: Mutex<HashMap<String, u16>>,
}

fn registry() -> &'static Registry {
    static REGISTRY: OnceLock<Registry> = OnceLock::new();
    REGISTRY.get_or_init(|| Registry {
        names: (0..DESTINATIONS_MAX).map(|_| OnceLock::new()).collect(),
        numbers: Mutex::new(HashMap::new()),
    })
}

impl DestinationId {
    /// Stands where the database has a name that is given no number here: its references are dead letters.
    pub const UNNAMED: Self = Self(u16::MAX);

    /// The number of a name, made on first use. Takes a lock: keep the answer.
    ///
    /// # Errors
    /// The reason as text, when the name is empty, longer than 255 bytes or contains NUL, or when
    /// the process has used 4096 others.
    pub fn of(name: &str) -> Result<Self, String> {
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains('\0') {
            return Err(format!(
                "a destination's name has 1 to {NAME_BYTES_MAX} bytes and no NUL; this one has {}",
                name.len()
            ));
        }
        let registry = registry();
        let mut numbers = registry.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(number) = numbers.get(name) {
            return Ok(Self(*number));
        }
        let number = numbers.len();
        if number == DESTINATIONS_MAX {
            return Err(format!("a process uses at most {DESTINATIONS_MAX} destinations"));
        }
        let _ = registry.names[number].set(name.to_owned());
        numbers.insert(name.to_owned(), number as u16);
        Ok(Self(number as u16))
    }

    /// The name. Takes no lock.
    #[must_use]
    pub fn name(self) -> &'static str {
        registry().names.get(self.index()).and_then(OnceLock::get).map_or("", String::as_str)
    }

    /// The number itself, for tables indexed by it.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
