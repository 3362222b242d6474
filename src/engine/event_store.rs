//! The event store as readers see it: a stream's events, forwards and backwards, page by page. And the readers' thread,
//! which reads pages of the feed as well.
//!
//! Invariants
//! - Memory is bounded by the page (rows and bytes), whatever the length of the stream.
//! - Pages go by version from where the last one ended: each costs the same, the first as the millionth.
//! - Versions have no gap, so no event of a stream is passed over: what commits while it is read has a higher version.
//! - Readers have connections of their own, at most [`CONNECTIONS_MAX`]: they hold up no shard.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_channel::oneshot;
use futures_util::future::{Either, select};
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::Engine;
use super::feed::{FeedPage, FeedPlace, FeedWanted};
use crate::error::{Error, Result};
use crate::message::event_types::EventTypes;
use crate::runtime::probe::RuntimeKind;
use crate::runtime::thread::{self, ThreadMain, ThreadPlan};
use crate::seam::dial::Dial;
use crate::seam::store::StoreError;
use crate::store::connect::{Connect, ConnectPlan};
use crate::store::schema_name::SchemaName;
pub use crate::store::stored_event::StoredEvent;

/// Connections that readers of one engine use at the same time; further pages wait.
pub const CONNECTIONS_MAX: usize = 4;
/// Events of a page, unless a reader asks for fewer or more.
pub const PAGE_ROWS: u32 = 500;
/// Events of a page at most.
pub const PAGE_ROWS_MAX: u32 = 4_096;
/// Bytes of payload and metadata after which a page ends; one event is always in it.
pub const PAGE_BYTES_MAX: i64 = 4 << 20;

/// Reads events. Made by [`Engine::event_store`]; clones are cheap.
#[derive(Clone)]
pub struct EventStore {
    pub(super) engine: Engine,
}

/// Reads one stream page by page.
pub struct StreamReader {
    store: EventStore,
    stream_id: Uuid,
    next: i64,
    backwards: bool,
    page_rows: u32,
    ended: bool,
}

#[derive(Clone, Copy)]
struct Wanted {
    stream_id: Uuid,
    from: i64,
    backwards: bool,
    rows_max: u32,
}

/// How often readers of the feed bring the store's indexes up to date, at most, all together.
const SUMMARIZE_EVERY: Duration = Duration::from_millis(25);

type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);
type Answer<T> = oneshot::Sender<Result<T, StoreError>>;

enum Request {
    Stream(Wanted, Answer<Vec<StoredEvent>>),
    Feed(FeedWanted, Answer<FeedPage>),
    /// A place behind a position; `None`: from now on.
    Place(Option<i64>, Answer<FeedPlace>),
}

/// The way to the readers' thread, which starts with the first page.
#[derive(Default)]
pub(super) struct ReaderThread(Mutex<Option<flume::Sender<Request>>>);

impl EventStore {
    pub(super) fn new(engine: Engine) -> Self {
        Self { engine }
    }

    /// A stream's events from a version on (from 1, or 0: from its first), in their order.
    #[must_use]
    pub fn read_forwards(&self, stream_id: Uuid, from: i64) -> StreamReader {
        self.reader(stream_id, from, false)
    }

    /// A stream's events from a version back to its first (`i64::MAX`: from its last).
    #[must_use]
    pub fn read_backwards(&self, stream_id: Uuid, from: i64) -> StreamReader {
        self.reader(stream_id, from, true)
    }

    fn reader(&self, stream_id: Uuid, next: i64, backwards: bool) -> StreamReader {
        StreamReader { store: self.clone(), stream_id, next, backwards, page_rows: PAGE_ROWS, ended: false }
    }

    /// The newest `count` events of a stream (at most 4,096, and about 4 MiB), the newest first.
    ///
    /// # Errors
    /// As [`StreamReader::next_page`].
    pub async fn read_newest(&self, stream_id: Uuid, count: u32) -> Result<Vec<StoredEvent>> {
        if count == 0 { Ok(Vec::new()) } else { self.page(stream_id, i64::MAX, true, count).await }
    }

    /// One event; `None` if the stream has none of this version.
    ///
    /// # Errors
    /// As [`StreamReader::next_page`].
    pub async fn read_event(&self, stream_id: Uuid, version: i64) -> Result<Option<StoredEvent>> {
        let page = self.page(stream_id, version, false, 1).await?;
        Ok(page.into_iter().next().filter(|event| event.version == version))
    }

    async fn page(&self, stream_id: Uuid, from: i64, backwards: bool, rows: u32) -> Result<Vec<StoredEvent>> {
        let wanted = Wanted { stream_id, from, backwards, rows_max: rows.clamp(1, PAGE_ROWS_MAX) };
        self.ask(|answer| Request::Stream(wanted, answer)).await
    }

    pub(super) async fn feed_page(&self, wanted: FeedWanted) -> Result<FeedPage> {
        self.ask(|answer| Request::Feed(wanted, answer)).await
    }

    pub(super) async fn begin_feed(&self, from: Option<i64>) -> Result<FeedPlace> {
        self.ask(|answer| Request::Place(from, answer)).await
    }

    async fn ask<T>(&self, request: impl FnOnce(Answer<T>) -> Request) -> Result<T> {
        let (answer, answered) = oneshot::channel();
        let sender = self.engine.shared.readers.sender(&self.engine)?;
        sender.send_async(request(answer)).await.map_err(|_| Error::ShutDown)?;
        Ok(answered.await.map_err(|_| Error::ShutDown)??)
    }
}

impl StreamReader {
    /// Events of a page, 1 to 4,096 instead of 500. A page ends after 4 MiB, too.
    #[must_use]
    pub fn page_rows(mut self, rows: u32) -> Self {
        self.page_rows = rows;
        self
    }

    /// The next events; empty at the end. Read forwards, it may be asked again later: what was appended meanwhile comes.
    ///
    /// # Errors
    /// [`Error::ShutDown`]; what the database said. The page can be asked for again.
    pub async fn next_page(&mut self) -> Result<Vec<StoredEvent>> {
        if self.ended {
            return Ok(Vec::new());
        }
        let page = self.store.page(self.stream_id, self.next, self.backwards, self.page_rows).await?;
        if let Some(last) = page.last() {
            self.next = if self.backwards { last.version - 1 } else { last.version + 1 };
            self.ended = self.backwards && self.next < 1;
        }
        Ok(page)
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
                    page = next.into_iter();
                    page.next().map(|event| (Ok(event), Some((reader, page))))
                }
                Err(error) => Some((Err(error), None)),
            }
        })
    }
}

impl ReaderThread {
    /// Ends the thread, once nobody waits for a page.
    pub(super) fn end(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn sender(&self, engine: &Engine) -> Result<flume::Sender<Request>> {
        engine.shared.check_running()?;
        let mut place = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = &*place {
            return Ok(sender.clone());
        }
        let (sender, requests) = flume::bounded(CONNECTIONS_MAX);
        let main = Readers {
            connect: engine.shared.connect.clone(),
            statements: Arc::new(Statements::of(&engine.shared.schema, engine.event_types().clone())),
            summarized: Arc::default(),
            call_timeout_ms: engine.shared.config.database.call_timeout_ms,
            requests,
        };
        let plan = ThreadPlan {
            kind: RuntimeKind::Tokio,
            core: None,
            name: "corelane-read".to_owned(),
            metrics: engine.shared.shards[0].metrics.clone(),
        };
        thread::start(plan, main).map_err(|source| Error::Thread { what: "the event store's readers", source })?;
        *place = Some(sender.clone());
        Ok(sender)
    }
}

#[derive(Clone)]
struct Readers {
    connect: ConnectPlan,
    statements: Arc<Statements>,
    summarized: Arc<Summarized>,
    call_timeout_ms: u64,
    requests: flume::Receiver<Request>,
}

impl ThreadMain for Readers {
    type Output = ();

    /// Until the engine's last handle has gone: nobody waits for a page any more then.
    async fn run<R: Dial>(self, runtime: R) {
        for _ in 1..CONNECTIONS_MAX {
            runtime.spawn(self.clone().read(runtime.clone()));
        }
        self.read(runtime).await;
    }
}

impl Readers {
    async fn read<R: Dial>(self, runtime: R) {
        let mut line = Line { connect: self.connect.on(runtime.clone()), runtime, client: None };
        let (statements, limit_ms) = (&*self.statements, self.call_timeout_ms);
        while let Ok(request) = self.requests.recv_async().await {
            // Who does not wait any more does not mind.
            match request {
                Request::Stream(wanted, answer) => {
                    let page = async |client: &Client| statements.stream(client, wanted).await;
                    let _ = answer.send(line.call(limit_ms, page).await);
                }
                Request::Feed(wanted, answer) => {
                    let page = line.call(limit_ms, async |client| statements.feed(client, &wanted).await).await;
                    let has_moved = page.as_ref().is_ok_and(|page| page.place != wanted.place);
                    let _ = answer.send(page);
                    // After a page, whose reader is busy with it, and not before one.
                    if has_moved && let Some(from) = self.summarized.begin() {
                        let summarize = async |client: &Client| statements.summarize(client, from).await;
                        match line.call(limit_ms, summarize).await {
                            // It costs time, not events: pages are found without it.
                            Err(error) => {
                                tracing::debug!(%error, "the event store's indexes could not be brought up to date")
                            }
                            Ok(to) => self.summarized.end(to),
                        }
                    }
                }
                Request::Place(from, answer) => {
                    let place = async |client: &Client| statements.begin_feed(client, from).await;
                    let _ = answer.send(line.call(limit_ms, place).await);
                }
            }
        }
    }
}

/// How far the indexes that the feed is read by are up to date: what is newer is read whole for each page.
#[derive(Default)]
struct Summarized(Mutex<(Option<Instant>, Option<i64>)>);

impl Summarized {
    /// From which page of the table on they are to be; `None`: not yet again.
    fn begin(&self) -> Option<Option<i64>> {
        let (begun_at, to) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if begun_at.is_some_and(|at| at.elapsed() < SUMMARIZE_EVERY) {
            return None;
        }
        *begun_at = Some(Instant::now());
        Some(*to)
    }

    fn end(&self, to: Option<i64>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1 = to;
    }
}

/// A reader's connection.
struct Line<R, C> {
    runtime: R,
    connect: C,
    client: Option<Client>,
}

impl<R: Dial, C: Connect> Line<R, C> {
    /// Makes a call within its time, and keeps the connection if it is still good. One that was found closed is dialled
    /// again, once.
    async fn call<T>(
        &mut self,
        limit_ms: u64,
        call: impl AsyncFnOnce(&Client) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let deadline = self.runtime.sleep_until(self.runtime.now().plus_ms(limit_ms));
        let kept = self.client.take().filter(|client| !client.is_closed());
        let connect = &self.connect;
        let calling = async {
            let client = match kept {
                Some(client) => client,
                None => connect.connect().await?,
            };
            let outcome = call(&client).await;
            Ok::<_, StoreError>((client, outcome))
        };
        match select(std::pin::pin!(calling), std::pin::pin!(deadline)).await {
            Either::Left((Ok((client, outcome)), _)) => {
                let is_lost = matches!(&outcome, Err(StoreError::ConnectionLost(_)));
                self.client = (!is_lost).then_some(client);
                outcome
            }
            Either::Left((Err(error), _)) => Err(error),
            Either::Right(_) => Err(StoreError::no_answer(limit_ms.into())),
        }
    }
}

/// Every statement that readers of streams and of the feed send.
#[must_use]
pub fn statements(schema: &SchemaName) -> Vec<String> {
    let Statements { stream, feed, begin_feed, summarize, .. } = Statements::of(schema, EventTypes::default());
    vec![stream, feed, begin_feed, summarize]
}

/// What the readers say. None of it has a name on the server: it may be behind a pooler.
struct Statements {
    stream: String,
    feed: String,
    begin_feed: String,
    summarize: String,
    types: EventTypes,
}

impl Statements {
    fn of(schema: &SchemaName, types: EventTypes) -> Self {
        let s = schema.quoted();
        Self {
            stream: format!("select * from {s}.read_stream($1, $2, $3, $4, $5)"),
            feed: format!(
                "select stream_id, version, stream_seq, message_id, correlation_id, causation_id, trace_id, span_id, \
                 trace_flags, partition, type_name, content_type, metadata, payload, stored_at, position, place, whole \
                 from {s}.read_feed($1, $2, $3, $4, $5, $6)"
            ),
            begin_feed: format!("select {s}.begin_feed($1)"),
            summarize: format!("select {s}.summarize_events_from($1)"),
            types,
        }
    }

    async fn stream(&self, client: &Client, wanted: Wanted) -> Result<Vec<StoredEvent>, StoreError> {
        let rows_max = wanted.rows_max as i32;
        let parameters: [Parameter<'_>; 5] = [
            (&wanted.stream_id, Type::UUID),
            (&wanted.from, Type::INT8),
            (&wanted.backwards, Type::BOOL),
            (&rows_max, Type::INT4),
            (&PAGE_BYTES_MAX, Type::INT8),
        ];
        let rows = client.query_typed(&self.stream, &parameters).await?;
        let event = |row| StoredEvent::of_stream(&self.types, wanted.stream_id, row);
        Ok(rows.iter().map(event).collect::<Result<_, _>>()?)
    }

    async fn begin_feed(&self, client: &Client, from: Option<i64>) -> Result<FeedPlace, StoreError> {
        let row = client.query_typed_one(&self.begin_feed, &[(&from, Type::INT8)]).await?;
        Ok(FeedPlace::from_text(row.try_get::<_, &str>(0)?))
    }

    async fn summarize(&self, client: &Client, from: Option<i64>) -> Result<Option<i64>, StoreError> {
        Ok(client.query_typed_one(&self.summarize, &[(&from, Type::INT8)]).await?.try_get(0)?)
    }

    async fn feed(&self, client: &Client, wanted: &FeedWanted) -> Result<FeedPage, StoreError> {
        let some = |names: &[String]| (!names.is_empty()).then(|| names.to_vec());
        let (types, prefixes) = (some(&wanted.filter.types), some(&wanted.filter.prefixes));
        let parameters: [Parameter<'_>; 6] = [
            (&wanted.place.as_str(), Type::TEXT),
            (&types, Type::TEXT_ARRAY),
            (&prefixes, Type::TEXT_ARRAY),
            (&wanted.filter.rows_max, Type::INT4),
            (&wanted.filter.bytes_max, Type::INT8),
            (&wanted.prove_ms, Type::INT4),
        ];
        let mut rows = client.query_typed(&self.feed, &parameters).await?;
        let last = rows.pop().ok_or_else(|| StoreError::ConnectionLost("no answer".to_owned()))?;
        let events = rows.iter().map(|row| StoredEvent::of_feed(&self.types, row)).collect::<Result<_, _>>()?;
        let place = FeedPlace::from_text(last.try_get::<_, &str>(16)?);
        Ok(FeedPage { events, place, is_whole: last.try_get(17)? })
    }
}
