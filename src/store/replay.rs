//! Events of the event store, published once more: to a destination that lost them, or to one that comes later.
//!
//! Needs a connection and the schema's name, no engine; each call is a call of `replay_events`, and joins the caller's
//! transaction if it is given one (keep that short: owners of the partitions wait for it). Dead letters are given back by
//! [`super::dead_letters::retry`]. What is neither an event nor dead is not kept once it is published.
//!
//! Invariants
//! - Whoever replays says what: a filter without anything in it is refused, [`Filter::all`] is one.
//! - A copy bears [`crate::OutgoingMessage::replayed`], goes out in its stream's order among those of its replay, and moves
//!   or delays nothing that is published for the first time.
//! - A call is bounded: at most [`ROWS_MAX`] events; `more` says whether to call again. One that is repeated after a lost
//!   answer, with the replay's id, does nothing twice.

use std::time::SystemTime;

use tokio_postgres::GenericClient;
use uuid::Uuid;

use super::answer::column;
use super::dead_letters::Mode;
use super::install::store;
use super::schema_name::SchemaName;
use crate::error::Result;

/// Events that one call replays at most.
pub const ROWS_MAX: i32 = 10_000;

/// Which events. Everything that is said has to be true of one.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    all: bool,
    streams: Option<Vec<Uuid>>,
    version_from: Option<i64>,
    version_to: Option<i64>,
    position_from: Option<i64>,
    position_to: Option<i64>,
    type_name: Option<String>,
    stored_from: Option<SystemTime>,
    stored_before: Option<SystemTime>,
    after: i64,
}

impl Filter {
    /// A filter that says nothing yet: refused as it is.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Every event.
    #[must_use]
    pub fn all() -> Self {
        Self { all: true, ..Self::default() }
    }

    /// Of these streams, at most 1,000.
    #[must_use]
    pub fn streams(mut self, streams: &[Uuid]) -> Self {
        self.streams = Some(streams.to_vec());
        self
    }

    /// Of these versions, both included: with [`Filter::streams`] only.
    #[must_use]
    pub fn versions(mut self, from: i64, to: i64) -> Self {
        (self.version_from, self.version_to) = (Some(from), Some(to));
        self
    }

    /// Stored at these positions, both included.
    #[must_use]
    pub fn positions(mut self, from: i64, to: i64) -> Self {
        (self.position_from, self.position_to) = (Some(from), Some(to));
        self
    }

    /// Of this type; with `*` at the end, of types that begin so.
    #[must_use]
    pub fn type_name(mut self, name: &str) -> Self {
        self.type_name = Some(name.to_owned());
        self
    }

    /// Stored at this time or later, by the database's clock.
    #[must_use]
    pub fn stored_from(mut self, from: SystemTime) -> Self {
        self.stored_from = Some(from);
        self
    }

    /// Stored before this time.
    #[must_use]
    pub fn stored_before(mut self, before: SystemTime) -> Self {
        self.stored_before = Some(before);
        self
    }

    /// Behind this position: the next page of a dry run. By itself no filter.
    #[must_use]
    pub fn after(mut self, position: i64) -> Self {
        self.after = position;
        self
    }
}

/// What a call did, or would do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// What to go on with while there is `more`; `None` if nothing was done.
    pub replay_id: Option<Uuid>,
    /// Events that the filter names, of those that were looked at.
    pub matched: i32,
    /// To be published once more.
    pub replayed: i32,
    /// Left alone: they are to be published for the first time yet.
    pub waiting: i32,
    /// Left alone: dead letters of this destination.
    pub dead: i32,
    /// Streams that get copies.
    pub lanes: i32,
    /// Looked at up to this position.
    pub last_position: i64,
    /// There may be further ones: call again.
    pub more: bool,
}

/// Publishes events once more to `destination`. `replay`: the id that an earlier call of the same replay answered, or one
/// of the caller's own, so that a call whose answer was lost can be repeated.
///
/// # Errors
/// [`crate::Error::Store`] if the filter is empty, `rows_max` is not 1 to [`ROWS_MAX`], the replay began with another filter
/// or destination, a program of schema version 1 works here, the partitions change their owners too often meanwhile (run it
/// again), or the database refuses. Nothing is changed then.
pub async fn events(
    client: &impl GenericClient,
    schema: &SchemaName,
    destination: &str,
    filter: &Filter,
    replay: Option<Uuid>,
    rows_max: i32,
    mode: Mode,
) -> Result<Replayed> {
    let statement = format!(
        "select replay_id, matched, replayed, waiting, dead, lanes, last_position, more \
         from {schema}.replay_events($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)"
    );
    let dry_run = mode == Mode::DryRun;
    let row = client
        .query_one(
            &statement,
            &[
                &destination,
                &replay,
                &filter.all,
                &filter.streams,
                &filter.version_from,
                &filter.version_to,
                &filter.position_from,
                &filter.position_to,
                &filter.type_name,
                &filter.stored_from,
                &filter.stored_before,
                &filter.after,
                &rows_max,
                &dry_run,
            ],
        )
        .await
        .map_err(store)?;
    Ok(Replayed {
        replay_id: column(&row, 0)?,
        matched: column(&row, 1)?,
        replayed: column(&row, 2)?,
        waiting: column(&row, 3)?,
        dead: column(&row, 4)?,
        lanes: column(&row, 5)?,
        last_position: column(&row, 6)?,
        more: column(&row, 7)?,
    })
}
