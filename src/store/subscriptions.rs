//! A subscription's calls to the database, over one connection.
//!
//! Invariants
//! - Every call is a transaction of its own, but for the checkpoint that joins the caller's.
//! - No statement has a name on the server: it works through a pooler too.

use std::sync::Arc;

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, GenericClient};
use uuid::Uuid;

use super::schema_name::SchemaName;
use super::stored_event::StoredEvent;
use crate::message::event_types::EventTypes;
use crate::plan::follow::{Ahead, Followed, Run, Written};
use crate::seam::store::StoreError;

/// Which events, and how many at a time.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Names of types; with prefixes: either. Empty: all.
    pub types: Vec<String>,
    /// Beginnings of names of types.
    pub prefixes: Vec<String>,
    /// Events of a batch at most.
    pub rows_max: i32,
    /// Bytes of payloads and metadata of a batch at most, but for a single event that has more.
    pub bytes_max: i64,
}

/// A page of events.
#[derive(Debug)]
pub struct EventPage {
    /// They, by position.
    pub events: Vec<StoredEvent>,
    /// The life of the server.
    pub epoch: Uuid,
    /// The place behind them.
    pub ahead: Ahead,
}

/// What a look at the members says.
#[derive(Debug)]
pub struct Shared {
    /// The life of the server.
    pub epoch: Uuid,
    /// Whether this is a member still.
    pub alive: bool,
    /// What it has.
    pub written: Vec<Written>,
}

/// How far a subscription is behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lag {
    /// Events that are committed and not read, of whatever type; counting ends at a million.
    pub events: u64,
    /// Milliseconds since the oldest of them was stored; 0 if there is none.
    pub oldest_age_ms: u64,
}

/// A member, as its calls name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The subscription.
    pub subscription: i32,
    /// The member's incarnation.
    pub incarnation: i32,
}

/// Who registers.
#[derive(Clone, Debug)]
pub struct Registering {
    /// The service.
    pub service_name: String,
    /// The instance.
    pub instance_name: String,
    /// The lease.
    pub lease_ms: i64,
    /// Whether the connection is this process's own.
    pub direct: bool,
}

type Answer<T> = Result<T, StoreError>;
type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// The statements of a schema.
#[derive(Clone, Debug)]
pub struct Statements {
    register: String,
    join: String,
    share: String,
    read: String,
    summarize: String,
    checkpoint: String,
    fences: String,
    release: String,
    leave: String,
    measure: String,
    listen: String,
    types: EventTypes,
}

impl Statements {
    /// For a schema.
    #[must_use]
    pub fn of(schema: &SchemaName) -> Self {
        let s = schema.quoted();
        Self {
            register: format!("select number from {s}.register_instance($1, $2, $3, $4, 1, false, $5)"),
            join: format!("select subscription from {s}.join_subscription($1, $2, $3)"),
            share: format!(
                "select epoch, alive, partition, fence, resolved, floor, target, target_floor, position, before, give_up \
                 from {s}.share_subscription($1, $2, $3)"
            ),
            read: format!(
                "select stream_id, version, stream_seq, message_id, correlation_id, causation_id, trace_id, span_id, \
                 trace_flags, partition, type_name, content_type, metadata, payload, stored_at, position, epoch, whole, \
                 target, target_floor, ceiling, next_window \
                 from {s}.read_subscription($1, $2, $3::text[]::pg_snapshot[], $4, $5::text::pg_snapshot, $6, $7, $8, $9, \
                 $10, $11, $12, $13, $14, $15)"
            ),
            summarize: format!("select {s}.summarize_events_from($1)"),
            checkpoint: format!(
                "select {s}.checkpoint_subscription($1, $2, $3, $4, $5::text[]::pg_snapshot[], $6, \
                 $7::text::pg_snapshot, $8, $9, $10)"
            ),
            fences: format!(
                "select partition, fence from {s}.wh_subscription_partition \
                 where subscription = $1 and owner = $2 and partition = any ($3)"
            ),
            release: format!("select {s}.release_subscription($1, $2, $3)"),
            leave: format!("select {s}.leave_subscription($1, $2), {s}.deregister_instance($2)"),
            measure: format!("select events, oldest_age_ms from {s}.measure_subscription($1, $2)"),
            listen: format!("select {s}.wh_subscription_channel(), {s}.wh_channel()"),
            types: EventTypes::default(),
        }
    }

    /// Their texts.
    #[must_use]
    pub fn texts(&self) -> Vec<&str> {
        let Self { register, join, share, read, summarize, checkpoint, .. } = self;
        let Self { fences, release, leave, measure, listen, .. } = self;
        [register, join, share, read, summarize, checkpoint, fences, release, leave, measure, listen]
            .map(String::as_str)
            .to_vec()
    }

    /// The same, with the types that events are read by.
    #[must_use]
    pub fn with_types(self, types: EventTypes) -> Self {
        Self { types, ..self }
    }

    /// Makes this connection an incarnation that owns nothing.
    ///
    /// # Errors
    /// What the database said; so for all of these.
    pub async fn register(&self, client: &Client, who: &Registering) -> Answer<i32> {
        let id = Uuid::new_v4();
        let parameters: [Parameter<'_>; 5] = [
            (&id, Type::UUID),
            (&who.service_name, Type::TEXT),
            (&who.instance_name, Type::TEXT),
            (&who.lease_ms, Type::INT8),
            (&who.direct, Type::BOOL),
        ];
        Ok(client.query_typed_one(&self.register, &parameters).await?.try_get(0)?)
    }

    /// Joins, or makes the subscription.
    pub async fn join(&self, client: &Client, name: &str, incarnation: i32, from: Option<i64>) -> Answer<i32> {
        let parameters: [Parameter<'_>; 3] = [(&name, Type::TEXT), (&incarnation, Type::INT4), (&from, Type::INT8)];
        Ok(client.query_typed_one(&self.join, &parameters).await?.try_get(0)?)
    }

    /// Listens to what is said of subscriptions and of work.
    pub async fn listen(&self, client: &Client) -> Answer<()> {
        let row = client.query_typed_one(&self.listen, &[]).await?;
        let (one, other): (&str, &str) = (row.try_get(0)?, row.try_get(1)?);
        Ok(client.batch_execute(&format!("listen {one}; listen {other}")).await?)
    }

    /// Renews the lease, takes and answers what is this member's.
    pub async fn share(&self, client: &Client, member: Membership, lease_ms: i64) -> Answer<Shared> {
        let parameters: [Parameter<'_>; 3] =
            [(&member.subscription, Type::INT4), (&member.incarnation, Type::INT4), (&lease_ms, Type::INT8)];
        let rows = client.query_typed(&self.share, &parameters).await?;
        let first = rows.first().ok_or_else(|| StoreError::ConnectionLost("no answer".to_owned()))?;
        let mut written = Vec::with_capacity(rows.len() - 1);
        for row in &rows[1..] {
            written.push(Written {
                held: Followed {
                    partition: row.try_get(2)?,
                    fence: row.try_get(3)?,
                    resolved: row.try_get::<_, &str>(4)?.into(),
                },
                floor: row.try_get(5)?,
                target: row.try_get::<_, Option<&str>>(6)?.map(Arc::from),
                target_floor: row.try_get(7)?,
                position: row.try_get(8)?,
                before: row.try_get(9)?,
                give_up: row.try_get(10)?,
            });
        }
        Ok(Shared { epoch: first.try_get(0)?, alive: first.try_get(1)?, written })
    }

    /// Brings the indexes that pages are read by up to the newest events, from where the last call ended. Answers where this
    /// one did.
    pub async fn summarize(&self, client: &Client, from: Option<i64>) -> Answer<Option<i64>> {
        let parameters: [Parameter<'_>; 1] = [(&from, Type::INT8)];
        Ok(client.query_typed_one(&self.summarize, &parameters).await?.try_get(0)?)
    }

    /// Reads a page.
    pub async fn read(&self, client: &Client, subscription: i32, run: &Run, filter: &Filter) -> Answer<EventPage> {
        let (partitions, _, resolved) = columns(run);
        let some = |names: &[String]| (!names.is_empty()).then(|| names.to_vec());
        let (types, prefixes) = (some(&filter.types), some(&filter.prefixes));
        let target = run.target.as_deref();
        let parameters: [Parameter<'_>; 15] = [
            (&subscription, Type::INT4),
            (&partitions, Type::INT4_ARRAY),
            (&resolved, Type::TEXT_ARRAY),
            (&run.floor, Type::INT8),
            (&target, Type::TEXT),
            (&run.target_floor, Type::INT8),
            (&run.position, Type::INT8),
            (&run.before, Type::BOOL),
            (&run.ceiling, Type::INT8),
            (&run.window, Type::INT8),
            (&run.quiet, Type::BOOL),
            (&types, Type::TEXT_ARRAY),
            (&prefixes, Type::TEXT_ARRAY),
            (&filter.rows_max, Type::INT4),
            (&filter.bytes_max, Type::INT8),
        ];
        let mut rows = client.query_typed(&self.read, &parameters).await?;
        let last = rows.pop().ok_or_else(|| StoreError::ConnectionLost("no answer".to_owned()))?;
        let ahead = Ahead {
            position: last.try_get(15)?,
            whole: last.try_get(17)?,
            target: last.try_get::<_, &str>(18)?.into(),
            target_floor: last.try_get(19)?,
            ceiling: last.try_get(20)?,
            window: last.try_get(21)?,
        };
        let events = rows.iter().map(|row| StoredEvent::of_feed(&self.types, row)).collect::<Result<_, _>>()?;
        Ok(EventPage { events, epoch: last.try_get(16)?, ahead })
    }

    /// Writes where a run stands, in whatever transaction the client is in. The driver's own error: the caller's
    /// transaction may be the one that has failed.
    pub async fn checkpoint(
        &self,
        client: &impl GenericClient,
        member: Membership,
        run: &Run,
    ) -> Result<(), tokio_postgres::Error> {
        let (partitions, fences, resolved) = columns(run);
        let target = run.target.as_deref();
        let parameters: [Parameter<'_>; 10] = [
            (&member.subscription, Type::INT4),
            (&member.incarnation, Type::INT4),
            (&partitions, Type::INT4_ARRAY),
            (&fences, Type::INT8_ARRAY),
            (&resolved, Type::TEXT_ARRAY),
            (&run.floor, Type::INT8),
            (&target, Type::TEXT),
            (&run.target_floor, Type::INT8),
            (&run.position, Type::INT8),
            (&run.before, Type::BOOL),
        ];
        client.query_typed(&self.checkpoint, &parameters).await.map(|_| ())
    }

    /// Partitions of the run that are this member's still, with their fences.
    pub async fn fences(&self, client: &Client, member: Membership, run: &Run) -> Answer<Vec<(i32, i64)>> {
        let (partitions, _, _) = columns(run);
        let parameters: [Parameter<'_>; 3] =
            [(&member.subscription, Type::INT4), (&member.incarnation, Type::INT4), (&partitions, Type::INT4_ARRAY)];
        let rows = client.query_typed(&self.fences, &parameters).await?;
        Ok(rows
            .iter()
            .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
            .collect::<Result<_, tokio_postgres::Error>>()?)
    }

    /// Gives partitions up.
    pub async fn release(&self, client: &Client, member: Membership, partitions: &[i32]) -> Answer<()> {
        let parameters: [Parameter<'_>; 3] =
            [(&member.subscription, Type::INT4), (&member.incarnation, Type::INT4), (&partitions, Type::INT4_ARRAY)];
        client.query_typed(&self.release, &parameters).await?;
        Ok(())
    }

    /// Leaves, and ends the incarnation.
    pub async fn leave(&self, client: &Client, member: Membership) -> Answer<()> {
        let parameters: [Parameter<'_>; 2] = [(&member.subscription, Type::INT4), (&member.incarnation, Type::INT4)];
        client.query_typed(&self.leave, &parameters).await?;
        Ok(())
    }

    /// How far it is behind.
    pub async fn measure(&self, client: &Client, name: &str, events_max: i32) -> Answer<Lag> {
        let parameters: [Parameter<'_>; 2] = [(&name, Type::TEXT), (&events_max, Type::INT4)];
        let row = client.query_typed_one(&self.measure, &parameters).await?;
        let number = |value: Option<i64>| value.unwrap_or_default().unsigned_abs();
        Ok(Lag { events: number(row.try_get(0)?), oldest_age_ms: number(row.try_get(1)?) })
    }
}

fn columns(run: &Run) -> (Vec<i32>, Vec<i64>, Vec<&str>) {
    let partitions = run.held.iter().map(|held| held.partition).collect();
    let fences = run.held.iter().map(|held| held.fence).collect();
    (partitions, fences, run.held.iter().map(|held| &*held.resolved).collect())
}
