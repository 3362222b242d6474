//! Which dead letters are meant: the same for those of the outbox and of the inbox, but for where they were to go or came from.
//!
//! Invariant: a filter names dead letters of one side only; a word that the other side alone understands cannot be said.

use std::fmt::Debug;
use std::time::SystemTime;

use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::inbox::Received;
use crate::error::{FailureReason, Result};

/// Dead letters of the outbox.
pub type Filter = FilterOf<Sent>;

/// The outbox or the inbox. There are no others.
pub trait Side: Clone + Debug + Default + sealed::Sealed {
    /// A dead letter, without its body.
    type DeadLetter;
    /// Of the functions' names.
    #[doc(hidden)]
    const INFIX: &'static str;
    /// What [`Side::read`] reads.
    #[doc(hidden)]
    const COLUMNS: &'static str;
    /// What is read of an answer to giving back.
    #[doc(hidden)]
    const RETRIED: &'static str;

    /// Parameters of this side alone.
    #[doc(hidden)]
    fn place(&self) -> Vec<&(dyn ToSql + Sync)>;
    #[doc(hidden)]
    fn read(row: &Row) -> Result<Self::DeadLetter>;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Sent {}
    impl Sealed for super::Received {}
}

/// What was to be published.
#[derive(Clone, Debug, Default)]
pub struct Sent {
    pub(super) destination: Option<String>,
}

/// Which dead letters. Everything that is said has to be true of one.
#[derive(Clone, Debug, Default)]
pub struct FilterOf<S> {
    all: bool,
    ids: Option<Vec<i64>>,
    place: S,
    type_name: Option<String>,
    reason: Option<i16>,
    fingerprint: Option<String>,
    stream: Option<Uuid>,
    dead_from: Option<SystemTime>,
    dead_before: Option<SystemTime>,
    after: i64,
}

impl<S: Side> FilterOf<S> {
    /// A filter that says nothing yet: refused as it is.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Every dead letter.
    #[must_use]
    pub fn all() -> Self {
        Self { all: true, ..Self::default() }
    }

    /// These, by `dead_letter_id`.
    #[must_use]
    pub fn ids(mut self, ids: &[i64]) -> Self {
        self.ids = Some(ids.to_vec());
        self
    }

    /// Of this type; with `*` at the end, of types that begin so.
    #[must_use]
    pub fn type_name(mut self, name: &str) -> Self {
        self.type_name = Some(name.to_owned());
        self
    }

    /// For this reason.
    #[must_use]
    pub fn reason(mut self, reason: FailureReason) -> Self {
        self.reason = Some(reason as i16);
        self
    }

    /// With an error of this fingerprint: its text without numbers and ids.
    #[must_use]
    pub fn fingerprint(mut self, fingerprint: &str) -> Self {
        self.fingerprint = Some(fingerprint.to_owned());
        self
    }

    /// Of this stream.
    #[must_use]
    pub fn stream(mut self, stream: Uuid) -> Self {
        self.stream = Some(stream);
        self
    }

    /// That died at this time or later, by the database's clock.
    #[must_use]
    pub fn dead_from(mut self, from: SystemTime) -> Self {
        self.dead_from = Some(from);
        self
    }

    /// That died before this time.
    #[must_use]
    pub fn dead_before(mut self, before: SystemTime) -> Self {
        self.dead_before = Some(before);
        self
    }

    /// With a higher `dead_letter_id`: the next page. By itself no filter.
    #[must_use]
    pub fn after(mut self, dead_letter_id: i64) -> Self {
        self.after = dead_letter_id;
        self
    }

    /// In the order in which the functions take them.
    pub(super) fn parameters(&self) -> Vec<&(dyn ToSql + Sync)> {
        let mut parameters: Vec<&(dyn ToSql + Sync)> = vec![&self.all, &self.ids];
        parameters.extend(self.place.place());
        let others: [&(dyn ToSql + Sync); 7] = [
            &self.type_name,
            &self.reason,
            &self.fingerprint,
            &self.stream,
            &self.dead_from,
            &self.dead_before,
            &self.after,
        ];
        parameters.extend(others);
        parameters
    }
}

impl FilterOf<Sent> {
    /// To this destination.
    #[must_use]
    pub fn destination(mut self, name: &str) -> Self {
        self.place.destination = Some(name.to_owned());
        self
    }
}

impl FilterOf<Received> {
    /// Of this consumer.
    #[must_use]
    pub fn consumer(mut self, name: &str) -> Self {
        self.place.consumer = Some(name.to_owned());
        self
    }

    /// That came from this source.
    #[must_use]
    pub fn source(mut self, name: &str) -> Self {
        self.place.source = Some(name.to_owned());
        self
    }
}
