//! The lease keeper's door: membership and partitions, over a direct connection that holds the session lock; and
//! maintenance, over another.
//!
//! Invariant: a renewed lease is only reported while the session lock is held again, or the server still shows it as
//! held by the connection that was lost.

use std::cell::Cell;
use std::rc::Rc;

use tokio_postgres::types::ToSql;

use super::ear::Ear;
use super::send::{Sql, only, takes};
use super::{Call, Line};
use crate::ids::Incarnation;
use crate::seam::store::{
    Coordination, Heard, HeldPartition, InspectRules, Inspection, Maintenance, Member, Members, Registration, Release,
    Renewed, StoreError, Taken,
};
use crate::store::columns;
use crate::store::connect::Connect;
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
    /// Whether the connection is this process's own, and can hold a session lock.
    direct: bool,
    /// The incarnation whose session lock this connection has to hold.
    registered: Cell<Option<i32>>,
    /// Whether the current connection holds it.
    holds: Cell<bool>,
    /// What it hears, and over which connection: not the one that holds the session lock, which stays as it is while
    /// a deaf listener is connected again.
    ear: Option<(Ear, Line)>,
    sql: Texts,
}

struct Texts {
    register: Sql,
    hold: Sql,
    listen: Sql,
    test: Sql,
    wait: Sql,
    announce: Sql,
    release: Sql,
    renew: Sql,
    members: Sql,
    renew_and_look: Sql,
    mark_dead: Sql,
    take: Sql,
    withdraw: Sql,
    deregister: Sql,
    maintenance: Sql,
    inspect: Sql,
}

impl Texts {
    fn of(schema: &SchemaName) -> Self {
        // Not whether the log is empty: a renewal waits for no lock on a table of messages.
        let position = schema.render("pg_sequence_last_value('@schema@.wh_position')");
        let schema = schema.quoted();
        let direct = format!("(select i.direct from {schema}.wh_instance i where i.number = m.number)");
        let sql = |slot, text: String, takes| Sql { slot, text, takes };
        Self {
            register: sql(
                0,
                format!("select number, partition_count from {schema}.register_instance($1, $2, $3, $4, $5, $6, $7)"),
                takes![UUID, TEXT, TEXT, INT8, INT4, BOOL, BOOL],
            ),
            hold: sql(1, format!("select {schema}.hold_instance($1)"), takes![INT4]),
            listen: sql(0, format!("select {schema}.listen_instance()"), takes![]),
            test: sql(1, format!("select {schema}.test_listener($1)"), takes![INT8]),
            announce: sql(11, format!("select {schema}.announce($1)"), takes![INT4]),
            wait: sql(0, format!("select {schema}.wait_for_end($1)"), takes![INT4]),
            release: sql(
                10,
                format!("select {schema}.release_partitions($1, $2, $3, $4::text[]::pg_snapshot[])"),
                takes![INT4, UUID, INT4_ARRAY, TEXT_ARRAY],
            ),
            renew: sql(2, format!("select {schema}.renew_lease($1, $2)"), takes![INT4, INT8]),
            members: sql(
                3,
                format!(
                    "select m.number, m.id, m.counter, m.expired, m.free, m.connected, m.owns, m.held, \
                     {position}, {direct} \
                     from {schema}.members($1) m"
                ),
                takes![INT4],
            ),
            renew_and_look: sql(
                8,
                format!(
                    "with renewed as materialized (select {schema}.renew_lease($1, $2) as alive) \
                     select m.number, m.id, m.counter, m.expired, m.free, m.connected, m.owns, m.held, \
                     {position}, {direct}, r.alive \
                     from renewed r left join lateral {schema}.members($1) m on r.alive"
                ),
                takes![INT4, INT8],
            ),
            mark_dead: sql(4, format!("select {schema}.mark_dead($1, $2, $3)"), takes![INT4, INT8, BOOL]),
            take: sql(
                5,
                format!("select ownership, partition, fence from {schema}.take_partitions($1, $2)"),
                takes![INT4, INT4_ARRAY],
            ),
            withdraw: sql(12, format!("select {schema}.withdraw_instance($1)"), takes![INT4]),
            deregister: sql(6, format!("select {schema}.deregister_instance($1)"), takes![INT4]),
            maintenance: sql(
                7,
                format!(
                    "select truncated, rotated, blocked_by, cursors_trimmed, work_left, more \
                     from {schema}.perform_maintenance($1)"
                ),
                takes![INT4],
            ),
            // On the connection of maintenance.
            inspect: sql(
                0,
                format!(
                    "select inspected, dead_letters_trimmed, unpublished, unpublished_age_ms, overdue, stuck, \
                     stuck_age_ms, held from {schema}.inspect($1, $2, $3, $4)"
                ),
                takes![INT4, INT4, INT8, INT8],
            ),
        }
    }
}

pub(super) fn statements(schema: &SchemaName) -> impl Iterator<Item = Sql> {
    let Texts {
        register,
        hold,
        listen,
        test,
        wait,
        announce,
        release,
        renew,
        members,
        renew_and_look,
        mark_dead,
        take,
        withdraw,
        deregister,
        maintenance,
        inspect,
    } = Texts::of(schema);
    let membership = [register, hold, listen, test, wait, renew, members, renew_and_look, mark_dead, deregister];
    let partitions = [take, release, withdraw, announce, maintenance, inspect];
    membership.into_iter().chain(partitions)
}

impl PostgresCoordination {
    /// Over an installed schema. Behind a pooler ([`Connect::manner`]) there is no session lock, and nobody's end is
    /// waited for: who dies there is followed when its lease has ended.
    #[must_use]
    pub fn new(connect: Rc<dyn Connect>, schema: &SchemaName) -> Self {
        let direct = connect.manner().each_transaction.is_none();
        let (line, upkeep) = (Line::new(connect.clone(), schema), Line::new(connect.clone(), schema));
        let vigil = Line::new(connect, schema);
        Self {
            line,
            upkeep,
            upkeep_limit_ms: Cell::new(0),
            vigil,
            vigil_limit_ms: Cell::new(0),
            direct,
            registered: Cell::new(None),
            holds: Cell::new(false),
            ear: None,
            sql: Texts::of(schema),
        }
    }

    /// The same; it listens. `holding` gives the connection that holds the session lock, and its end to the ear;
    /// `listening` the one that listens, and what it hears.
    #[must_use]
    pub fn listening(
        mut self,
        holding: Rc<dyn Connect>,
        listening: Rc<dyn Connect>,
        schema: &SchemaName,
        ear: Ear,
    ) -> Self {
        self.line = Line::new(holding, schema);
        self.ear = Some((ear, Line::new(listening, schema)));
        self
    }

    /// Begins a call; on a new connection the session lock is asked for first, and again until it is got: the server
    /// may not yet have seen the old connection end.
    async fn call(&self) -> Result<Call<'_>, StoreError> {
        let (call, new) = self.line.call().await?;
        if new {
            self.holds.set(false);
        }
        if let (Some(number), false, true) = (self.registered.get(), self.holds.get(), self.direct) {
            let held = async {
                let row = only(call.connection.rows(&self.sql.hold, &[&number]).await?)?;
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
            call.connection.limit("statement_timeout", limit_ms).await?;
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
            let rows = call.connection.rows(sql, parameters).await?;
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
    let direct = row.try_get::<_, Option<bool>>(9)?.unwrap_or(false);
    Ok((common, Some(Member { incarnation, counter, expired, connected, direct, owns, held })))
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
        let row = only(call.connection.rows(sql, parameters).await?)?;
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
        let parameters: [&(dyn ToSql + Sync); 7] =
            [id, service_name, instance_name, &lease_ms, &shards, owns, &self.direct];
        let (number, count) = self
            .one(&self.sql.register, &parameters, |row| Ok((row.try_get::<_, i32>(0)?, row.try_get::<_, i32>(1)?)))
            .await?;
        self.registered.set(Some(number));
        if let Some((ear, _)) = &self.ear {
            ear.is_of(number);
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
                Ok(if row.try_get(10)? { Some(member(row)?) } else { None })
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
        if !self.direct {
            // It would occupy a connection of the pool all the time.
            return std::future::pending().await;
        }
        let (call, new) = self.vigil.call().await?;
        if new || self.vigil_limit_ms.get() != limit_ms {
            call.connection.limit("lock_timeout", limit_ms).await?;
            self.vigil_limit_ms.set(limit_ms);
        }
        match one(call, &self.sql.wait, &[&member.incarnation.number], |row| row.try_get(0)).await {
            Err(StoreError::Transient { sqlstate, .. }) if sqlstate == "55P03" => Ok(false),
            // It holds none.
            Ok(None) => std::future::pending().await,
            Ok(Some(ended)) => Ok(ended),
            Err(error) => Err(error),
        }
    }

    async fn announce(&self, incarnation: Incarnation) -> Result<(), StoreError> {
        let call = self.call().await?;
        one(call, &self.sql.announce, &[&incarnation.number], |_| Ok(())).await
    }

    async fn listen(&self) -> Result<bool, StoreError> {
        let Some((ear, line)) = &self.ear else { return Ok(false) };
        let (call, new) = line.call().await?;
        if !new {
            return call.end(Ok(true)).await;
        }
        ear.begins();
        one(call, &self.sql.listen, &[], |_| Ok(())).await?;
        ear.missed_everything();
        Ok(true)
    }

    async fn test_listener(&self) -> Result<(), StoreError> {
        let Some((ear, line)) = &self.ear else { return std::future::pending().await };
        let (call, new) = line.call().await?;
        let ended = || Err(StoreError::ConnectionLost("its connection has ended".to_owned()));
        if new {
            return ended();
        }
        let word = ear.next_word();
        match call.connection.rows(&self.sql.test, &[&word]).await {
            // Given up before, the call takes the connection along.
            Ok(_) if ear.has_heard(word).await => call.end(Ok(())).await,
            Ok(_) => ended(),
            Err(error) => call.end(Err(error.into())).await,
        }
    }

    async fn listener_lost(&self) {
        match &self.ear {
            Some((ear, _)) => ear.lost().await,
            None => std::future::pending().await,
        }
    }

    async fn heard(&self) -> Heard {
        match &self.ear {
            Some((ear, _)) => ear.heard().await,
            None => std::future::pending().await,
        }
    }

    async fn withdraw_instance(&self, incarnation: Incarnation) -> Result<bool, StoreError> {
        self.one(&self.sql.withdraw, &[&incarnation.number], |row| row.try_get(0)).await
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

    async fn inspect(
        &self,
        incarnation: Incarnation,
        rules: &InspectRules,
        limit_ms: u64,
    ) -> Result<Option<Inspection>, StoreError> {
        let call = self.call_upkeep(limit_ms).await?;
        let days = i32::try_from(rules.dead_letters_days).unwrap_or(i32::MAX);
        let (unpublished_ms, stuck_ms) = (rules.unpublished_ms as i64, rules.stuck_ms as i64);
        one(call, &self.sql.inspect, &[&incarnation.number, &days, &unpublished_ms, &stuck_ms], |row| {
            if !row.try_get::<_, bool>(0)? {
                return Ok(None);
            }
            Ok(Some(Inspection {
                dead_letters_trimmed: row.try_get::<_, i32>(1)? as u32,
                unpublished: row.try_get::<_, i32>(2)? as u32,
                unpublished_age_ms: row.try_get::<_, i64>(3)? as u64,
                overdue: row.try_get::<_, i32>(4)? as u32,
                stuck: row.try_get::<_, i32>(5)? as u32,
                stuck_age_ms: row.try_get::<_, i64>(6)? as u64,
                held: row.try_get::<_, i32>(7)? as u32,
            }))
        })
        .await
    }
}
