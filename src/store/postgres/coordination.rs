//! The lease keeper's door: membership and partitions, over a direct connection that holds the session lock; and
//! maintenance, over another.
//!
//! Invariant: a renewed lease is only reported while the session lock is held again, or the server still shows it as
//! held by the connection that was lost.

use std::cell::Cell;
use std::rc::Rc;

use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::{Call, Line, Sql};
use crate::ids::Incarnation;
use crate::seam::store::{Coordination, HeldPartition, Maintenance, Member, Members, Renewed, StoreError, Taken};
use crate::store::connect::Connect;
use crate::store::schema_name::SchemaName;

/// The lease keeper's side of Postgres.
pub struct PostgresCoordination {
    line: Line,
    /// For maintenance alone: whatever it waits for, the session lock and the renewals are on the other.
    upkeep: Line,
    /// The `statement_timeout` that is set on it.
    upkeep_limit_ms: Cell<u64>,
    /// The incarnation whose session lock this connection has to hold.
    registered: Cell<Option<i32>>,
    /// Whether the current connection holds it.
    holds: Cell<bool>,
    sql: Texts,
}

struct Texts {
    register: Sql,
    hold: Sql,
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
                format!("select number, partition_count from {schema}.register_instance($1, $2, $3, $4, $5)"),
            ),
            hold: sql(1, format!("select {schema}.hold_instance($1)")),
            renew: sql(2, format!("select {schema}.renew_lease($1, $2)")),
            members: sql(
                3,
                format!(
                    "select number, id, counter, expired, free_partitions, connected, {position} \
                     from {schema}.members($1)"
                ),
            ),
            renew_and_look: sql(
                8,
                format!(
                    "with renewed as materialized (select {schema}.renew_lease($1, $2) as alive) \
                     select m.number, m.id, m.counter, m.expired, m.free_partitions, m.connected, \
                     {position}, r.alive \
                     from renewed r left join lateral {schema}.members($1) m on r.alive"
                ),
            ),
            mark_dead: sql(4, format!("select {schema}.mark_dead($1, $2, $3)")),
            take: sql(5, format!("select ownership, partition, fence from {schema}.take_partitions($1)")),
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
    let Texts { register, hold, renew, members, renew_and_look, mark_dead, take, deregister, maintenance } =
        Texts::of(schema);
    [register, hold, renew, members, renew_and_look, mark_dead, take, deregister, maintenance]
        .into_iter()
        .map(|sql| sql.text)
}

impl PostgresCoordination {
    /// Over an installed schema. The connection must be a direct one: a pooler would hand the session lock to
    /// somebody else.
    #[must_use]
    pub fn new(connect: Rc<dyn Connect>, schema: &SchemaName) -> Self {
        let (line, upkeep) = (Line::new(connect.clone(), schema), Line::new(connect, schema));
        Self {
            line,
            upkeep,
            upkeep_limit_ms: Cell::new(0),
            registered: Cell::new(None),
            holds: Cell::new(false),
            sql: Texts::of(schema),
        }
    }

    /// Begins a call; on a new connection the session lock is asked for first, and again until it is got: the server
    /// may not yet have seen the old connection end.
    async fn call(&self) -> Result<Call<'_>, StoreError> {
        let (call, new) = self.line.call().await?;
        if new {
            self.holds.set(false);
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

/// What every row of `members` says alike: how many partitions are free, and the last position.
type Common = (i32, i64);

/// A row of `members`, with another incarnation, if there is one.
fn member(row: &tokio_postgres::Row) -> Result<(Common, Option<Member>), tokio_postgres::Error> {
    let common = (row.try_get(4)?, row.try_get::<_, Option<i64>>(6)?.unwrap_or(0));
    let Some(number) = row.try_get::<_, Option<i32>>(0)? else { return Ok((common, None)) };
    let incarnation = Incarnation { number, id: row.try_get(1)? };
    let (counter, expired, connected) = (row.try_get(2)?, row.try_get(3)?, row.try_get(5)?);
    Ok((common, Some(Member { incarnation, counter, expired, connected })))
}

fn members_of(rows: Vec<(Common, Option<Member>)>) -> Members {
    let (free, position) = rows.first().map_or((0, 0), |(common, _)| *common);
    let others = rows.into_iter().filter_map(|(_, member)| member).collect();
    Members { others, free_partitions: free as u32, position }
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
        id: Uuid,
        service_name: &str,
        instance_name: &str,
        shards: u16,
        lease_ms: u64,
    ) -> Result<(Incarnation, u32), StoreError> {
        self.registered.set(None);
        let lease_ms = lease_ms as i64;
        let shards = i32::from(shards);
        let parameters: [&(dyn ToSql + Sync); 5] = [&id, &service_name, &instance_name, &lease_ms, &shards];
        let (number, count) = self
            .one(&self.sql.register, &parameters, |row| Ok((row.try_get::<_, i32>(0)?, row.try_get::<_, i32>(1)?)))
            .await?;
        self.registered.set(Some(number));
        self.holds.set(true);
        Ok((Incarnation { number, id }, count as u32))
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
                Ok(if row.try_get(7)? { Some(member(row)?) } else { None })
            })
            .await?;
        Ok(rows.into_iter().collect::<Option<Vec<_>>>().map(members_of))
    }

    async fn mark_dead(&self, dead: Member, early: bool) -> Result<bool, StoreError> {
        self.one(&self.sql.mark_dead, &[&dead.incarnation.number, &dead.counter, &early], |row| row.try_get(0)).await
    }

    async fn take_partitions(&self, incarnation: Incarnation) -> Result<Option<Taken>, StoreError> {
        let taken = self
            .many(&self.sql.take, &[&incarnation.number], |row| {
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
