//! The lease keeper's door: membership and partitions, over a direct connection that holds the session lock; and
//! maintenance, over another.
//!
//! Invariant: a renewed lease is only reported while the session lock is held again, or the server still shows it as
//! held by the connection that was lost.

use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use futures_util::task::AtomicWaker;

use tokio_postgres::types::ToSql;

use super::{Call, Line, Sql};
use crate::ids::Incarnation;
use crate::seam::store::{
    Coordination, Heard, HeldPartition, Maintenance, Member, Members, Registration, Release, Renewed, StoreError, Taken,
};
use crate::store::columns;
use crate::store::connect::{Connect, OnNotification};
use crate::store::schema_name::SchemaName;

/// The lease keeper's side of Postgres.
pub struct PostgresCoordination {
    line: Line,
    /// For maintenance alone: whatever it waits for, the session lock and the renewals are on the other.
    upkeep: Line,
    /// The `statement_timeout` that is set on it.
    upkeep_limit_ms: Cell<u64>,
    /// Waits for the end of another incarnation's connection.
    vigil: Line,
    /// The `lock_timeout` that is set on it.
    vigil_limit_ms: Cell<u64>,
    /// The incarnation whose session lock this connection has to hold.
    registered: Cell<Option<i32>>,
    /// Whether the current connection holds it.
    holds: Cell<bool>,
    ear: Option<Ear>,
    sql: Texts,
}

/// What the connection has heard and nobody has looked at yet: two flags, however much is said.
#[derive(Clone, Default)]
pub struct Ear(Rc<EarState>);

#[derive(Default)]
struct EarState {
    heard: Cell<Heard>,
    /// Whose own words these are not.
    own: Cell<i32>,
    waker: AtomicWaker,
}

impl Ear {
    /// For the connections that listen.
    #[must_use]
    pub fn on_notification(&self) -> OnNotification {
        let ear = self.0.clone();
        Rc::new(move |said| {
            let mut heard = ear.heard.get();
            match said.map(|said| said.strip_prefix("work:")) {
                Some(Some(who)) if who.parse() == Ok(ear.own.get()) => return,
                Some(Some(_)) => heard.work = true,
                // What a newer version says is worth a look too.
                Some(None) => heard.members = true,
                None => heard.lost = true,
            }
            ear.heard.set(heard);
            ear.waker.wake();
        })
    }

    async fn heard(&self) -> Heard {
        poll_fn(|context| {
            self.0.waker.register(context.waker());
            let heard = self.0.heard.take();
            if heard == Heard::default() { Poll::Pending } else { Poll::Ready(heard) }
        })
        .await
    }
}

struct Texts {
    register: Sql,
    hold: Sql,
    listen: Sql,
    wait: Sql,
    announce: Sql,
    release: Sql,
    renew: Sql,
    members: Sql,
    renew_and_look: Sql,
    mark_dead: Sql,
    take: Sql,
    deregister: Sql,
    maintenance: Sql,
}

impl Texts {
    fn of(schema: &SchemaName) -> Self {
        // Not whether the log is empty: a renewal waits for no lock on a table of messages.
        let position = schema.render("pg_sequence_last_value('@schema@.wh_position')");
        let schema = schema.quoted();
        let sql = |slot, text: String| Sql { slot, text };
        Self {
            register: sql(
                0,
                format!("select number, partition_count from {schema}.register_instance($1, $2, $3, $4, $5, $6)"),
            ),
            hold: sql(1, format!("select {schema}.hold_instance($1)")),
            listen: sql(9, format!("select {schema}.listen_instance()")),
            announce: sql(11, format!("select {schema}.announce($1)")),
            wait: sql(0, format!("select {schema}.wait_for_end($1)")),
            release: sql(10, format!("select {schema}.release_partitions($1, $2, $3, $4::text[]::pg_snapshot[])")),
            renew: sql(2, format!("select {schema}.renew_lease($1, $2)")),
            members: sql(
                3,
                format!(
                    "select number, id, counter, expired, free, connected, owns, held, {position} \
                     from {schema}.members($1)"
                ),
            ),
            renew_and_look: sql(
                8,
                format!(
                    "with renewed as materialized (select {schema}.renew_lease($1, $2) as alive) \
                     select m.number, m.id, m.counter, m.expired, m.free, m.connected, m.owns, m.held, \
                     {position}, r.alive \
                     from renewed r left join lateral {schema}.members($1) m on r.alive"
                ),
            ),
            mark_dead: sql(4, format!("select {schema}.mark_dead($1, $2, $3)")),
            take: sql(5, format!("select ownership, partition, fence from {schema}.take_partitions($1, $2)")),
            deregister: sql(6, format!("select {schema}.deregister_instance($1)")),
            maintenance: sql(
                7,
                format!(
                    "select truncated, rotated, blocked_by, cursors_trimmed, work_left, more \
                     from {schema}.perform_maintenance($1)"
                ),
            ),
        }
    }
}

pub(super) fn statements(schema: &SchemaName) -> impl Iterator<Item = String> {
    let Texts {
        register,
        hold,
        listen,
        wait,
        announce,
        release,
        renew,
        members,
        renew_and_look,
        mark_dead,
        take,
        deregister,
        maintenance,
    } = Texts::of(schema);
    let membership = [register, hold, listen, wait, renew, members, renew_and_look, mark_dead, deregister];
    let partitions = [take, release, announce, maintenance];
    membership.into_iter().chain(partitions).map(|sql| sql.text)
}

impl PostgresCoordination {
    /// Over an installed schema. The connection must be a direct one: a pooler would hand the session lock to
    /// somebody else.
    #[must_use]
    pub fn new(connect: Rc<dyn Connect>, schema: &SchemaName) -> Self {
        let (line, upkeep) = (Line::new(connect.clone(), schema), Line::new(connect.clone(), schema));
        let vigil = Line::new(connect, schema);
        Self {
            line,
            upkeep,
            upkeep_limit_ms: Cell::new(0),
            vigil,
            vigil_limit_ms: Cell::new(0),
            registered: Cell::new(None),
            holds: Cell::new(false),
            ear: None,
            sql: Texts::of(schema),
        }
    }

    /// The same; it listens. `connect` gives its connections, and what they hear to the ear.
    #[must_use]
    pub fn listening(mut self, connect: Rc<dyn Connect>, schema: &SchemaName, ear: Ear) -> Self {
        self.line = Line::new(connect, schema);
        self.ear = Some(ear);
        self
    }

    /// Begins a call; on a new connection the session lock is asked for first, and again until it is got: the server
    /// may not yet have seen the old connection end.
    async fn call(&self) -> Result<Call<'_>, StoreError> {
        let (call, new) = self.line.call().await?;
        if new {
            self.holds.set(false);
            if let Some(ear) = &self.ear {
                let listening = async {
                    let statement = call.connection.prepare(&self.sql.listen).await?;
                    call.connection.client.query_one(&statement, &[]).await?;
                    Ok::<(), StoreError>(())
                }
                .await;
                if let Err(error) = listening {
                    return call.end(Err(error)).await;
                }
                // Whatever was said before was not heard.
                ear.0.heard.set(Heard { members: true, work: true, lost: false });
            }
        }
        if let (Some(number), false) = (self.registered.get(), self.holds.get()) {
            let held = async {
                let statement = call.connection.prepare(&self.sql.hold).await?;
                let row = call.connection.client.query_one(&statement, &[&number]).await?;
                Ok(row.try_get(0)?)
            }
            .await;
            match held {
                Ok(held) => self.holds.set(held),
                Err(error) => return call.end(Err(error)).await,
            }
        }
        Ok(call)
    }

    /// Begins a step of maintenance: the limit is set once a connection.
    async fn call_upkeep(&self, limit_ms: u64) -> Result<Call<'_>, StoreError> {
        let (call, new) = self.upkeep.call().await?;
        if new || self.upkeep_limit_ms.get() != limit_ms {
            call.connection.client.batch_execute(&format!("set statement_timeout = {limit_ms}")).await?;
            self.upkeep_limit_ms.set(limit_ms);
        }
        Ok(call)
    }

    async fn one<T>(
        &self,
        sql: &Sql,
        parameters: &[&(dyn ToSql + Sync)],
        decode: impl Fn(&tokio_postgres::Row) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, StoreError> {
        one(self.call().await?, sql, parameters, decode).await
    }

    async fn many<T>(
        &self,
        sql: &Sql,
        parameters: &[&(dyn ToSql + Sync)],
        decode: impl Fn(&tokio_postgres::Row) -> Result<T, tokio_postgres::Error>,
    ) -> Result<Vec<T>, StoreError> {
        let call = self.call().await?;
        let result = async {
            let statement = call.connection.prepare(sql).await?;
            let rows = call.connection.client.query(&statement, parameters).await?;
            Ok(rows.iter().map(decode).collect::<Result<Vec<_>, _>>()?)
        }
        .await;
        call.end(result).await
    }
}

/// What every row of `members` says alike: the partitions that are free, and the last position.
type Common = (Vec<i32>, i64);

/// A row of `members`, with another incarnation, if there is one.
fn member(row: &tokio_postgres::Row) -> Result<(Common, Option<Member>), tokio_postgres::Error> {
    let common = (row.try_get(4)?, row.try_get::<_, Option<i64>>(8)?.unwrap_or(0));
    let Some(number) = row.try_get::<_, Option<i32>>(0)? else { return Ok((common, None)) };
    let incarnation = Incarnation { number, id: row.try_get(1)? };
    let (counter, expired, connected) = (row.try_get(2)?, row.try_get(3)?, row.try_get(5)?);
    let (owns, held) = (row.try_get(6)?, row.try_get::<_, i32>(7)? as u32);
    Ok((common, Some(Member { incarnation, counter, expired, connected, owns, held })))
}

fn members_of(rows: Vec<(Common, Option<Member>)>) -> Members {
    let (free, position) = rows.first().map(|(common, _)| common.clone()).unwrap_or_default();
    let others = rows.into_iter().filter_map(|(_, member)| member).collect();
    Members { others, free: free.into_iter().map(|partition| partition as u32).collect(), position }
}

async fn one<T>(
    call: Call<'_>,
    sql: &Sql,
    parameters: &[&(dyn ToSql + Sync)],
    decode: impl Fn(&tokio_postgres::Row) -> Result<T, tokio_postgres::Error>,
) -> Result<T, StoreError> {
    let result = async {
        let statement = call.connection.prepare(sql).await?;
        let row = call.connection.client.query_one(&statement, parameters).await?;
        Ok(decode(&row)?)
    }
    .await;
    call.end(result).await
}

impl Coordination for PostgresCoordination {
    async fn register_instance(
        &self,
        registration: &Registration,
        lease_ms: u64,
    ) -> Result<(Incarnation, u32), StoreError> {
        self.registered.set(None);
        let lease_ms = lease_ms as i64;
        let Registration { id, service_name, instance_name, shards, owns } = registration;
        let shards = i32::from(*shards);
        let parameters: [&(dyn ToSql + Sync); 6] = [id, service_name, instance_name, &lease_ms, &shards, owns];
        let (number, count) = self
            .one(&self.sql.register, &parameters, |row| Ok((row.try_get::<_, i32>(0)?, row.try_get::<_, i32>(1)?)))
            .await?;
        self.registered.set(Some(number));
        if let Some(ear) = &self.ear {
            ear.0.own.set(number);
        }
        self.holds.set(true);
        Ok((Incarnation { number, id: *id }, count as u32))
    }

    async fn renew_lease(&self, incarnation: Incarnation, lease_ms: u64) -> Result<Renewed, StoreError> {
        let lease_ms = lease_ms as i64;
        let alive =
            self.one(&self.sql.renew, &[&incarnation.number, &lease_ms], |row| row.try_get::<_, bool>(0)).await?;
        Ok(if alive { Renewed::Alive } else { Renewed::Dead })
    }

    async fn members(&self, incarnation: Incarnation) -> Result<Members, StoreError> {
        Ok(members_of(self.many(&self.sql.members, &[&incarnation.number], member).await?))
    }

    async fn renew_and_look(&self, incarnation: Incarnation, lease_ms: u64) -> Result<Option<Members>, StoreError> {
        let lease_ms = lease_ms as i64;
        let rows = self
            .many(&self.sql.renew_and_look, &[&incarnation.number, &lease_ms], |row| {
                Ok(if row.try_get(9)? { Some(member(row)?) } else { None })
            })
            .await?;
        Ok(rows.into_iter().collect::<Option<Vec<_>>>().map(members_of))
    }

    async fn mark_dead(&self, dead: Member, early: bool) -> Result<bool, StoreError> {
        self.one(&self.sql.mark_dead, &[&dead.incarnation.number, &dead.counter, &early], |row| row.try_get(0)).await
    }

    async fn take_partitions(&self, incarnation: Incarnation, partitions: &[u32]) -> Result<Option<Taken>, StoreError> {
        let wanted: Vec<i32> = partitions.iter().map(|partition| *partition as i32).collect();
        let taken = self
            .many(&self.sql.take, &[&incarnation.number, &wanted], |row| {
                let partition: Vec<i32> = row.try_get(1)?;
                let fence: Vec<i64> = row.try_get(2)?;
                let held = partition
                    .into_iter()
                    .zip(fence)
                    .map(|(partition, fence)| HeldPartition { partition: partition as u32, fence })
                    .collect();
                Ok(Taken { ownership: row.try_get(0)?, held })
            })
            .await?;
        Ok(taken.into_iter().next())
    }

    async fn release_partitions(&self, incarnation: Incarnation, release: &Release) -> Result<Option<i64>, StoreError> {
        let epoch = release.epoch.map(|epoch| epoch.0);
        let (partitions, resolved) = columns::of_resolved(&release.partitions);
        let parameters: [&(dyn ToSql + Sync); 4] = [&incarnation.number, &epoch, &partitions, &resolved];
        self.one(&self.sql.release, &parameters, |row| row.try_get(0)).await
    }

    async fn wait_for_end(&self, member: Member, limit_ms: u64) -> Result<bool, StoreError> {
        let (call, new) = self.vigil.call().await?;
        if new || self.vigil_limit_ms.get() != limit_ms {
            call.connection.client.batch_execute(&format!("set lock_timeout = {limit_ms}")).await?;
            self.vigil_limit_ms.set(limit_ms);
        }
        match one(call, &self.sql.wait, &[&member.incarnation.number], |row| row.try_get(0)).await {
            Err(StoreError::Transient { sqlstate, .. }) if sqlstate == "55P03" => Ok(false),
            answer => answer,
        }
    }

    async fn announce(&self, incarnation: Incarnation) -> Result<(), StoreError> {
        let call = self.call().await?;
        one(call, &self.sql.announce, &[&incarnation.number], |_| Ok(())).await
    }

    async fn heard(&self) -> Heard {
        match &self.ear {
            Some(ear) => ear.heard().await,
            None => std::future::pending().await,
        }
    }

    async fn deregister_instance(&self, incarnation: Incarnation) -> Result<(), StoreError> {
        self.one(&self.sql.deregister, &[&incarnation.number], |row| row.try_get::<_, bool>(0)).await?;
        self.registered.set(None);
        Ok(())
    }

    async fn perform_maintenance(&self, incarnation: Incarnation, limit_ms: u64) -> Result<Maintenance, StoreError> {
        let call = self.call_upkeep(limit_ms).await?;
        one(call, &self.sql.maintenance, &[&incarnation.number], |row| {
            Ok(Maintenance {
                truncated: row.try_get::<_, i32>(0)? as u32,
                rotated: row.try_get(1)?,
                blocked_by: row.try_get(2)?,
                cursors_trimmed: row.try_get::<_, i32>(3)? as u32,
                work_left: row.try_get(4)?,
                more: row.try_get(5)?,
            })
        })
        .await
    }
}
