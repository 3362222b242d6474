//! A worker's connection and what it says over it: the functions of `sql/functions/*_inbox.sql`, by their names.
//!
//! Invariants
//! - A connection belongs to one worker: the locks of its lanes are its session's.
//! - After any error outside a transaction the connection is given up: nobody knows which lanes it has locked.
//! - No call takes longer than `database.call_timeout_ms`; after that the connection is given up.
//!
//! The driver of each connection runs on a thread of its own (`corelane-inbox`), with those of all workers: no handler
//! that blocks its thread keeps a connection from being served.

use std::future::Future;
use std::time::Duration;

use futures_channel::oneshot;
use tokio_postgres::{Client, Statement, Transaction};
use uuid::Uuid;

use super::commit::{Decision, Rules};
use super::lane::Found;
use crate::envelope::Trace;
use crate::error::FailureReason;
use crate::ids::inbox_day;
use crate::runtime::thread::ThreadMain;
use crate::seam::dial::Dial;
use crate::seam::receiver::{Delivery, Receipt};
use crate::seam::store::StoreError;
use crate::store::connect::{Connect, ConnectPlan};
use crate::store::schema_name::SchemaName;

/// What a worker asks the connections' thread for.
pub(crate) type Dialled = oneshot::Sender<Result<Client, StoreError>>;

/// The connections' thread.
pub(crate) struct Connections {
    pub plan: ConnectPlan,
    pub requests: flume::Receiver<Dialled>,
}

impl ThreadMain for Connections {
    type Output = ();

    async fn run<R: Dial>(self, runtime: R) {
        while let Ok(answer) = self.requests.recv_async().await {
            let connector = self.plan.on(runtime.clone());
            runtime.spawn(async move {
                let connected = connector.connect().await;
                // Who has asked may have gone.
                let _ = answer.send(connected);
            });
        }
    }
}

/// A connection of the thread's.
pub(super) async fn dial(requests: &flume::Sender<Dialled>) -> Result<Client, StoreError> {
    let gone = || StoreError::ConnectionLost("the engine has ended".to_owned());
    let (answer, answered) = oneshot::channel();
    requests.send(answer).map_err(|_| gone())?;
    answered.await.map_err(|_| gone())?
}

/// How long a call may take.
#[derive(Clone, Copy)]
pub(super) struct Limit(Duration);

impl Limit {
    /// A limit with more time.
    pub(super) fn longer_by(self, time: Duration) -> Self {
        Self(self.0 + time)
    }

    /// The answer of a call, within its time.
    pub(super) async fn of<T>(
        self,
        call: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, StoreError> {
        self.of_store(async { call.await.map_err(StoreError::from) }).await
    }

    /// The same for several calls.
    pub(super) async fn of_store<T>(self, call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        match tokio::time::timeout(self.0, call).await {
            Ok(answer) => answer,
            Err(_) => Err(StoreError::no_answer(self.0.as_millis())),
        }
    }
}

/// A lane to be parked.
pub(super) struct Parking<'a> {
    pub lane_id: Uuid,
    pub message_id: Uuid,
    pub attempts: i32,
    pub due_in_ms: u64,
    pub reason: FailureReason,
    pub text: &'a str,
}

/// A message for the dead letters.
pub(super) struct Burial<'a> {
    pub message_id: Uuid,
    pub attempts: i32,
    pub reason: FailureReason,
    pub text: &'a str,
}

/// A stored message that is to be tried again; its lane is locked.
pub(super) struct Claimed {
    pub lane_id: Uuid,
    pub attempts: i32,
    pub source: String,
    pub delivery: Delivery,
}

/// The statements, prepared on the connection.
pub(super) struct Statements {
    begin: Statement,
    claim: Statement,
    remember: Statement,
    finish: Statement,
    lock: Statement,
    keep: Statement,
    park: Statement,
    bury: Statement,
    unpark: Statement,
}

/// What workers say.
pub(super) fn texts(schema: &SchemaName) -> [String; 10] {
    let call = |what: &str, name: &str, parameters: usize| {
        let holders: Vec<String> = (1..=parameters).map(|number| format!("${number}")).collect();
        format!("select {what}{}.{name}({})", schema.quoted(), holders.join(", "))
    };
    [
        call("", "consumer_number", 1),
        call("", "begin_inbox", 6),
        call("* from ", "claim_inbox", 6),
        call("", "remember_inbox", 3),
        call("", "finish_inbox", 2),
        call("", "lock_inbox", 3),
        call("", "keep_inbox", 14),
        call("", "park_inbox", 7),
        call("", "bury_inbox", 6),
        call("", "unpark_inbox", 2),
    ]
}

/// See the module.
pub(super) struct Door {
    client: Client,
    statements: Statements,
    limit: Limit,
}

impl Door {
    /// Connects, and looks the consumer's number up.
    pub(super) async fn open(
        requests: &flume::Sender<Dialled>,
        schema: &SchemaName,
        consumer: &str,
        call_timeout: Duration,
    ) -> Result<(Self, i16), StoreError> {
        let client = dial(requests).await?;
        let limit = Limit(call_timeout);
        let [number, begin, claim, remember, finish, lock, keep, park, bury, unpark] = texts(schema);
        let prepare = |text: String| {
            let client = &client;
            async move { limit.of(client.prepare(&text)).await }
        };
        let statements = Statements {
            begin: prepare(begin).await?,
            claim: prepare(claim).await?,
            remember: prepare(remember).await?,
            finish: prepare(finish).await?,
            lock: prepare(lock).await?,
            keep: prepare(keep).await?,
            park: prepare(park).await?,
            bury: prepare(bury).await?,
            unpark: prepare(unpark).await?,
        };
        let number: i16 = limit.of(client.query_one(&number, &[&consumer])).await?.try_get(0)?;
        Ok((Self { client, statements, limit }, number))
    }

    pub(super) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Asks for nothing but an answer.
    pub(super) async fn ping(&self) -> Result<(), StoreError> {
        self.limit.of(self.client.batch_execute("")).await
    }

    pub(super) fn limit(&self) -> Limit {
        self.limit
    }

    pub(super) fn parts(&mut self) -> (&mut Client, &Statements) {
        (&mut self.client, &self.statements)
    }

    /// Locks the lanes of deliveries and says what each is; gives lanes back first.
    pub(super) async fn begin_inbox(
        &self,
        consumer: i16,
        messages: &[Uuid],
        lanes: &[Uuid],
        held: &[Uuid],
        unlock: &[Uuid],
    ) -> Result<Vec<Found>, StoreError> {
        let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 6] =
            [&consumer, &messages, &lanes, &held, &unlock, &days_of(messages)];
        let call = self.client.query_one(&self.statements.begin, &parameters);
        let states: Vec<i16> = self.limit.of(call).await?.try_get(0)?;
        let found = |state: &i16| match state {
            0 => Found::New,
            1 => Found::Duplicate,
            2 => Found::Busy,
            _ => Found::Behind,
        };
        Ok(states.iter().map(found).collect())
    }

    /// Stored messages of lanes that are due, lane after lane, and whether more is due.
    pub(super) async fn claim_inbox(
        &self,
        consumer: i16,
        partitions: &[i32],
        held: &[Uuid],
        lanes_max: i32,
        rows_max: i32,
        bytes_max: i64,
    ) -> Result<(Vec<Claimed>, bool), StoreError> {
        let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 6] =
            [&consumer, &partitions, &held, &lanes_max, &rows_max, &bytes_max];
        let rows = self.limit.of(self.client.query(&self.statements.claim, &parameters)).await?;
        let more = rows.first().map_or(Ok(false), |row| row.try_get("more"))?;
        let mut claimed = Vec::with_capacity(rows.len());
        for row in rows {
            let id = |name| row.try_get::<_, Option<Uuid>>(name).map(Option::unwrap_or_default);
            let bytes = |name| row.try_get::<_, Option<Vec<u8>>>(name).map(Option::unwrap_or_default);
            claimed.push(Claimed {
                lane_id: row.try_get("lane_id")?,
                attempts: row.try_get("attempts")?,
                source: row.try_get("source")?,
                delivery: Delivery {
                    message_id: row.try_get("message_id")?,
                    stream_id: row.try_get("stream_id")?,
                    type_name: row.try_get("type_name")?,
                    content_type: row.try_get::<_, Option<String>>("content_type")?.unwrap_or_default(),
                    correlation_id: id("correlation_id")?,
                    causation_id: id("causation_id")?,
                    trace: Trace::from_columns(
                        row.try_get("trace_id")?,
                        row.try_get("span_id")?,
                        row.try_get("trace_flags")?,
                    ),
                    metadata: bytes("metadata")?,
                    payload: bytes("payload")?,
                    delivery_count: 0,
                    turn: 0,
                    receipt: Receipt::default(),
                },
            });
        }
        Ok((claimed, more))
    }
}

/// The day of each id, which the server takes three microseconds to find.
fn days_of(messages: &[Uuid]) -> Vec<i32> {
    messages.iter().map(|id| inbox_day(*id)).collect()
}

type Answer<T> = Result<T, tokio_postgres::Error>;

impl Statements {
    /// Who of these is new to the consumer: written down.
    pub(super) async fn remember_inbox(
        &self,
        client: &Transaction<'_>,
        consumer: i16,
        messages: &[Uuid],
    ) -> Answer<Vec<bool>> {
        client.query_one(&self.remember, &[&consumer, &messages, &days_of(messages)]).await?.try_get(0)
    }

    /// Deletes stored messages that were handled: who was there.
    pub(super) async fn finish_inbox(
        &self,
        client: &Transaction<'_>,
        consumer: i16,
        messages: &[Uuid],
    ) -> Answer<Vec<bool>> {
        client.query_one(&self.finish, &[&consumer, &messages]).await?.try_get(0)
    }

    /// Takes the rows of lanes, each with one of its messages, in their order.
    pub(super) async fn lock_inbox(
        &self,
        client: &Transaction<'_>,
        consumer: i16,
        lanes: &[(Uuid, Uuid)],
    ) -> Answer<()> {
        let (lanes, messages): (Vec<Uuid>, Vec<Uuid>) = lanes.iter().copied().unzip();
        client.query_one(&self.lock, &[&consumer, &lanes, &messages]).await.map(|_| ())
    }

    /// Stores bodies, those of one source by a call.
    pub(super) async fn keep_inbox(&self, client: &Transaction<'_>, rules: &Rules, kept: &[&Decision]) -> Answer<()> {
        let mut left = kept.to_vec();
        while let Some(source) = left.first().map(|decision| decision.source.clone()) {
            // Of a lane with several sources the order is that of the sources' calls: they have none of their own.
            let (of, others): (Vec<&Decision>, Vec<&Decision>) =
                left.into_iter().partition(|decision| decision.source == source);
            left = others;
            let some = |id: Uuid| (!id.is_nil()).then_some(id);
            let of_each = || of.iter().map(|decision| &*decision.delivery);
            let lanes: Vec<Uuid> = of.iter().map(|decision| decision.lane_id).collect();
            let messages: Vec<Uuid> = of_each().map(|delivery| delivery.message_id).collect();
            let streams: Vec<Option<Uuid>> = of_each().map(|delivery| delivery.stream_id).collect();
            let types: Vec<&str> = of_each().map(|delivery| delivery.type_name.as_str()).collect();
            let payloads: Vec<&[u8]> = of_each().map(|delivery| delivery.payload.as_slice()).collect();
            let contents: Vec<Option<&str>> =
                of_each().map(|of| (!of.content_type.is_empty()).then_some(of.content_type.as_str())).collect();
            let metadata: Vec<Option<&[u8]>> =
                of_each().map(|of| (!of.metadata.is_empty()).then_some(of.metadata.as_slice())).collect();
            let correlations: Vec<Option<Uuid>> = of_each().map(|of| some(of.correlation_id)).collect();
            let causations: Vec<Option<Uuid>> = of_each().map(|of| some(of.causation_id)).collect();
            let traces: Vec<Option<Uuid>> = of_each().map(|of| some(of.trace.trace_id)).collect();
            let traced = || of_each().map(|of| (!of.trace.is_none()).then_some(of.trace));
            let spans: Vec<Option<i64>> = traced().map(|trace| trace.map(|of| of.span_id.cast_signed())).collect();
            let flags: Vec<Option<i16>> = traced().map(|trace| trace.map(|of| i16::from(of.flags))).collect();
            let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 14] = [
                &rules.number,
                &&*source,
                &lanes,
                &messages,
                &streams,
                &types,
                &payloads,
                &contents,
                &metadata,
                &correlations,
                &causations,
                &traces,
                &spans,
                &flags,
            ];
            client.query_one(&self.keep, &parameters).await?;
        }
        Ok(())
    }

    /// Parks lanes.
    pub(super) async fn park_inbox(
        &self,
        client: &Transaction<'_>,
        consumer: i16,
        parked: &[Parking<'_>],
    ) -> Answer<()> {
        let lanes: Vec<Uuid> = parked.iter().map(|lane| lane.lane_id).collect();
        let messages: Vec<Uuid> = parked.iter().map(|lane| lane.message_id).collect();
        let attempts: Vec<i32> = parked.iter().map(|lane| lane.attempts).collect();
        let reasons: Vec<i16> = parked.iter().map(|lane| lane.reason as i16).collect();
        let errors: Vec<&str> = parked.iter().map(|lane| lane.text).collect();
        let dues: Vec<i64> = parked.iter().map(|lane| lane.due_in_ms.min(i64::MAX as u64) as i64).collect();
        let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 7] =
            [&consumer, &lanes, &messages, &attempts, &reasons, &errors, &dues];
        client.query_one(&self.park, &parameters).await.map(|_| ())
    }

    /// Puts stored messages to the dead letters.
    pub(super) async fn bury_inbox(
        &self,
        client: &Transaction<'_>,
        consumer: i16,
        dead: &[Burial<'_>],
        hold: bool,
    ) -> Answer<()> {
        let messages: Vec<Uuid> = dead.iter().map(|of| of.message_id).collect();
        let attempts: Vec<i32> = dead.iter().map(|of| of.attempts).collect();
        let reasons: Vec<i16> = dead.iter().map(|of| of.reason as i16).collect();
        let errors: Vec<&str> = dead.iter().map(|of| of.text).collect();
        let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 6] =
            [&consumer, &messages, &attempts, &reasons, &errors, &hold];
        client.query_one(&self.bury, &parameters).await.map(|_| ())
    }

    /// Lets lanes go on: which of them are free.
    pub(super) async fn unpark_inbox(
        &self,
        client: &Transaction<'_>,
        consumer: i16,
        lanes: &[Uuid],
    ) -> Answer<Vec<bool>> {
        client.query_one(&self.unpark, &[&consumer, &lanes]).await?.try_get(0)
    }
}
