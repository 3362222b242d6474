//! The feed: all events of the store, or those of some types, read from a place that the reader's program keeps.
//!
//! Invariants
//! - Nothing is stored of a reader: its place is a value, and whatever was read from one can be read from it again.
//! - On the way from place to place every committed event comes once, each stream's in order, and nothing waits for a
//!   transaction that is open. (After a crash of the server what was read within its last second comes again.)
//! - Memory is bounded by the page (rows and bytes), however much there is to read.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::event_store::{EventStore, PAGE_BYTES_MAX, PAGE_ROWS, StoredEvent};
use crate::error::{Error, Result};
use crate::seam::store::StoreError;
use crate::store::subscriptions::Filter;

/// SQLSTATEs of a place that is none, and of one that lies ahead of the server.
const PLACE_REFUSED: [&str; 2] = ["CL022", "CL023"];
/// Events of a page at most.
const ROWS_MAX: u32 = 10_000;
/// How often a page is asked for again, at once, whose events were erased or truncated while it was read.
const AGAIN_MAX: u32 = 5;
/// How old the last proved place may get: after a crash of the server what was read since comes again.
const PROVE_EVERY: Duration = Duration::from_secs(1);

/// Where a reader of the feed stands. A text of some hundred bytes, to be kept as it is, with serde or otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FeedPlace(String);

impl FeedPlace {
    /// A place that was kept as text. Whether it is one is told by the first page.
    #[must_use]
    pub fn from_text(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for FeedPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

enum Start {
    Position(i64),
    Now,
    Place(FeedPlace),
}

/// From where the feed is read, and what of it. Made by [`EventStore::feed`].
#[must_use = "open() begins it"]
pub struct FeedBuilder {
    store: EventStore,
    from: Start,
    filter: Filter,
    prove_every: Duration,
}

/// Reads the feed page by page.
pub struct FeedReader {
    store: EventStore,
    place: FeedPlace,
    filter: Filter,
    prove_every: Duration,
    poll: Duration,
    stored: watch::Receiver<u64>,
    stopped: watch::Receiver<bool>,
}

/// A part of the feed.
#[derive(Clone, Debug)]
pub struct FeedPage {
    /// The events by position; each stream's in order.
    pub events: Vec<StoredEvent>,
    /// The place behind them.
    pub place: FeedPlace,
    /// There was nothing more when it was read.
    pub is_whole: bool,
}

/// What the readers' thread is asked for.
pub(super) struct FeedWanted {
    pub place: FeedPlace,
    pub filter: Filter,
    pub prove_ms: i32,
}

impl EventStore {
    /// The feed: every event of every stream, in no order across streams that a reader may rely on, each stream's in its
    /// own. From the beginning, unless the builder says otherwise. Who wants the work shared, or the place kept, has
    /// [`super::Engine::subscribe`].
    pub fn feed(&self) -> FeedBuilder {
        let filter = Filter { rows_max: PAGE_ROWS as i32, bytes_max: PAGE_BYTES_MAX, ..Filter::default() };
        FeedBuilder { store: self.clone(), from: Start::Position(0), filter, prove_every: PROVE_EVERY }
    }
}

impl FeedBuilder {
    /// From the first event there is.
    pub fn from_beginning(self) -> Self {
        self.from_position(0)
    }

    /// From behind a position (0 or more), as events and receipts of older readers name it. Where transactions were open
    /// when it was read, what they had drawn below it is passed over: a place says more.
    pub fn from_position(mut self, position: i64) -> Self {
        self.from = Start::Position(position);
        self
    }

    /// From what is not committed yet.
    pub fn from_now(mut self) -> Self {
        self.from = Start::Now;
        self
    }

    /// From where a reader stood. Its filter has to be the same: what is passed over is read.
    pub fn from_place(mut self, place: FeedPlace) -> Self {
        self.from = Start::Place(place);
        self
    }

    /// Only events of types with these names, or with older names that [`crate::EventTypes`] has of them; together with
    /// [`FeedBuilder::of_categories`]: of either.
    pub fn of_types<S: AsRef<str>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.filter.types.extend(names.into_iter().map(|name| name.as_ref().to_owned()));
        self
    }

    /// Only events of types whose names begin so (`orders.`), or begin so today. A stream has no category of its own.
    pub fn of_categories<S: AsRef<str>>(mut self, prefixes: impl IntoIterator<Item = S>) -> Self {
        self.filter.prefixes.extend(prefixes.into_iter().map(|prefix| prefix.as_ref().to_owned()));
        self
    }

    /// Events of a page, 1 to 10,000 instead of 500.
    pub fn rows_max(mut self, rows_max: u32) -> Self {
        self.filter.rows_max = rows_max.clamp(1, ROWS_MAX) as i32;
        self
    }

    /// Bytes of payloads and metadata of a page at most, instead of 4 MiB; a single event may have more.
    pub fn bytes_max(mut self, bytes_max: u64) -> Self {
        self.filter.bytes_max = bytes_max.clamp(1, 1 << 30) as i64;
        self
    }

    /// After a crash of the server, a reader goes back to the last place that was proved to survive one: by the commit of a
    /// page that comes so long after the last proof (1 s; 0: each page, which waits for the server's disk then).
    pub fn prove_every(mut self, time: Duration) -> Self {
        self.prove_every = time;
        self
    }

    /// Begins. Reading shares the connections of [`EventStore`]'s readers.
    ///
    /// # Errors
    /// [`Error::ShutDown`]; what the database said (a negative position among it).
    pub async fn open(mut self) -> Result<FeedReader> {
        let shared = &self.store.engine.shared;
        shared.check_running()?;
        shared.event_types.widen(&mut self.filter.types, &self.filter.prefixes);
        let (stored, stopped) = (shared.stored.subscribe(), shared.stopped.subscribe());
        let poll = Duration::from_millis(shared.config.claim.poll_ms);
        let place = match self.from {
            Start::Place(place) => place,
            Start::Position(position) => self.store.begin_feed(Some(position)).await?,
            Start::Now => self.store.begin_feed(None).await?,
        };
        let Self { store, filter, prove_every, .. } = self;
        Ok(FeedReader { store, place, filter, prove_every, poll, stored, stopped })
    }
}

impl FeedReader {
    /// Where it stands: behind the last page.
    #[must_use]
    pub fn place(&self) -> &FeedPlace {
        &self.place
    }

    /// The next events; an empty page at the end. Asked again later, it has what was stored meanwhile.
    ///
    /// # Errors
    /// [`Error::FeedPlace`] for a place that cannot be read from; [`Error::ShutDown`]; what the database said. The page can
    /// be asked for again.
    pub async fn next_page(&mut self) -> Result<FeedPage> {
        let mut again = 0;
        loop {
            let wanted = FeedWanted {
                place: self.place.clone(),
                filter: self.filter.clone(),
                prove_ms: self.prove_every.as_millis().min(86_400_000) as i32,
            };
            let page = match self.store.feed_page(wanted).await.map_err(refused) {
                Err(Error::Store(StoreError::Transient { sqlstate, .. }))
                    if sqlstate == "40001" && again < AGAIN_MAX =>
                {
                    again += 1;
                    continue;
                }
                page => page?,
            };
            self.place = page.place.clone();
            // An empty one in the middle: a part of the store in which there is nothing of what is wanted.
            if page.is_whole || !page.events.is_empty() {
                return Ok(page);
            }
        }
    }

    /// The next events; waits until there are any: until something is stored here, else looking each `claim.poll_ms`.
    /// `None` when the engine has been shut down. It has to be awaited on a tokio runtime.
    ///
    /// # Errors
    /// As [`FeedReader::next_page`].
    pub async fn next(&mut self) -> Result<Option<FeedPage>> {
        loop {
            self.stored.borrow_and_update();
            match self.next_page().await {
                Ok(page) if !page.events.is_empty() => return Ok(Some(page)),
                Ok(_) => {}
                Err(Error::ShutDown) => return Ok(None),
                Err(error) => return Err(error),
            }
            tokio::select! {
                _ = self.stopped.wait_for(|stopped| *stopped) => return Ok(None),
                // The engine's last handle has gone with its sender.
                stored = self.stored.changed() => if stored.is_err() { return Ok(None) },
                () = tokio::time::sleep(self.poll) => {}
            }
        }
    }

    /// The events one by one, up to the end. After an error it ends.
    pub fn events(self) -> impl futures_util::Stream<Item = Result<StoredEvent>> + Send + 'static {
        let start = Some((self, Vec::new().into_iter()));
        futures_util::stream::unfold(start, |state| async move {
            let (mut reader, mut page) = state?;
            if let Some(event) = page.next() {
                return Some((Ok(event), Some((reader, page))));
            }
            match reader.next_page().await {
                Ok(next) => {
                    page = next.events.into_iter();
                    page.next().map(|event| (Ok(event), Some((reader, page))))
                }
                Err(error) => Some((Err(error), None)),
            }
        })
    }

    /// The pages, and on with what comes, until the engine has been shut down. After an error it goes on, when it is
    /// polled again, from the last page.
    pub fn follow(self) -> impl futures_util::Stream<Item = Result<FeedPage>> + Send + 'static {
        futures_util::stream::unfold((self, false), |(mut reader, has_failed)| async move {
            if has_failed {
                tokio::time::sleep(reader.poll).await;
            }
            match reader.next().await {
                Ok(page) => page.map(|page| (Ok(page), (reader, false))),
                Err(error) => Some((Err(error), (reader, true))),
            }
        })
    }
}

fn refused(error: Error) -> Error {
    match error {
        Error::Store(StoreError::Refused { sqlstate, text }) if PLACE_REFUSED.contains(&&*sqlstate) => {
            Error::FeedPlace(text)
        }
        error => error,
    }
}
