//! What Corelane is compared with. Their SQL stands in `loadgen/sql`.
//!
//! Invariant: a baseline is driven by the same callers, over as many connections, with the same messages
//! and the same end of the measurement as the engine. Where a choice was open, the baseline got the better one.

use crate::scenario::Scenario;
use crate::target::quoted;

pub mod appends;
pub mod dedup;
pub mod insert_ceiling;
pub mod seed_cycle;

/// Connections of a baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connections {
    /// For storing.
    pub store: usize,
    /// For claiming and completing.
    pub claim: usize,
}

impl Connections {
    /// As many as an engine of so many shards has: one to flush and one to claim each. At batch 1 a caller
    /// without an engine needs a connection of its own to be heard at all.
    #[must_use]
    pub fn like_engine(shards: usize, scenario: &Scenario) -> Self {
        let store = if scenario.batch == 1 { scenario.callers } else { shards };
        Self { store, claim: shards }
    }

    /// All together.
    #[must_use]
    pub fn total(self) -> usize {
        self.store + self.claim
    }
}

/// The type name of every message: as long as a real one.
pub const TYPE_NAME: &str = "orders.order_placed";
/// The one destination.
pub const DESTINATION: &str = "orders";

fn with_schema(sql: &str, schema: &str) -> String {
    sql.replace("@schema@", &quoted(schema))
}

/// Ids of a message's surroundings: random enough not to compress, cheap enough not to be measured.
#[derive(Debug)]
pub struct Ids(u128);

impl Default for Ids {
    fn default() -> Self {
        Self(uuid::Uuid::new_v4().as_u128() | 1)
    }
}

impl Ids {
    /// The next id.
    pub fn draw(&mut self) -> uuid::Uuid {
        // A Weyl sequence with an odd constant: never repeats within 2^128 and spreads over all bytes.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835);
        uuid::Uuid::from_u128(self.0)
    }
}
