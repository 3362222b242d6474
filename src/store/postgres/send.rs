//! One connection, and how a statement goes over it.
//!
//! Invariants
//! - On a connection of ours a statement is prepared once and sent by its name; it commits by itself.
//! - Behind a pooler it is a transaction with the settings it needs, sent whole and without waiting in between: one way
//!   there and back. What it answers counts only after that transaction's commit was answered.
//! - Unnamed statements say the types of their parameters ([`Sql::takes`]): the server leaves nothing behind.

use std::cell::RefCell;
use std::pin::pin;

use futures_util::TryStreamExt;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Row, RowStream, Statement};

use crate::seam::store::StoreError;
use crate::store::connect::{Manner, Setting, apply_settings};

/// A statement of the engine and its place in a connection's cache.
#[derive(Clone, Debug)]
pub(super) struct Sql {
    pub(super) slot: usize,
    pub(super) text: String,
    /// The types of its parameters.
    pub(super) takes: &'static [Type],
}

/// Types of parameters, as a statement takes them.
macro_rules! takes {
    ($($kind:ident),* $(,)?) => {{
        const TAKES: &[tokio_postgres::types::Type] = &[$(tokio_postgres::types::Type::$kind),*];
        TAKES
    }};
}
pub(super) use takes;

const STATEMENTS_MAX: usize = 13;

pub(super) struct Connection {
    pub(super) client: Client,
    prepared: RefCell<[Option<Statement>; STATEMENTS_MAX]>,
    unnamed: bool,
    /// Made in each transaction; `None`: the session has them.
    settings: Option<RefCell<Vec<Setting>>>,
}

impl Connection {
    pub(super) fn new(client: Client, manner: Manner) -> Self {
        let settings = manner.each_transaction.map(RefCell::new);
        Self { client, prepared: RefCell::default(), unnamed: manner.unnamed, settings }
    }

    /// Bounds what follows on this connection, by a setting in milliseconds.
    pub(super) async fn limit(&self, setting: &str, ms: u64) -> Result<(), StoreError> {
        match &self.settings {
            None => Ok(self.client.batch_execute(&format!("set {setting} = {ms}")).await?),
            Some(settings) => {
                let mut settings = settings.borrow_mut();
                settings.retain(|(name, _)| name != setting);
                settings.push((setting.to_owned(), ms.to_string()));
                Ok(())
            }
        }
    }

    /// Sends a statement and has its rows read.
    pub(super) async fn send<T, E: From<Error>>(
        &self,
        sql: &Sql,
        parameters: &[&(dyn ToSql + Sync)],
        read: impl AsyncFnOnce(RowStream) -> Result<T, E>,
    ) -> Result<T, E> {
        let statement = if self.unnamed { None } else { Some(self.prepare(sql).await?) };
        let answer = async {
            let rows = match &statement {
                Some(statement) => self.client.query_raw(statement, parameters.iter().copied()).await?,
                None => {
                    let typed = parameters.iter().copied().zip(sql.takes.iter().cloned());
                    self.client.query_typed_raw(&sql.text, typed).await?
                }
            };
            read(rows).await
        };
        let Some(settings) = &self.settings else { return answer.await };
        let settings = settings.borrow().clone();
        let (begun, set, answer, committed) = futures_util::join!(
            // What is set in a transaction is too late for its own isolation.
            self.client.batch_execute("begin isolation level read committed"),
            apply_settings(&self.client, &settings, true),
            answer,
            self.client.batch_execute("commit")
        );
        begun?;
        set?;
        let answer = answer?;
        committed?;
        Ok(answer)
    }

    /// All rows of a statement.
    pub(super) async fn rows(&self, sql: &Sql, parameters: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, Error> {
        self.send(sql, parameters, async |rows| pin!(rows).try_collect().await).await
    }

    async fn prepare(&self, sql: &Sql) -> Result<Statement, Error> {
        if let Some(statement) = &self.prepared.borrow()[sql.slot] {
            return Ok(statement.clone());
        }
        let statement = self.client.prepare_typed(&sql.text, sql.takes).await?;
        self.prepared.borrow_mut()[sql.slot] = Some(statement.clone());
        Ok(statement)
    }
}

/// The row of a statement that answers one.
pub(super) fn only(rows: Vec<Row>) -> Result<Row, StoreError> {
    rows.into_iter().next().ok_or_else(|| malformed("no row"))
}

pub(super) fn malformed(what: &str) -> StoreError {
    StoreError::Refused { sqlstate: "CL000".to_owned(), text: format!("unexpected answer: {what}") }
}
