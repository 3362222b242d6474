//! A worker that speaks SQL only, as a program in any language would be.

use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Error, Row};
use uuid::Uuid;

use crate::outbox_kit::call;
use crate::store_kit::{Message, Space};

/// One incarnation of a worker, and its connection.
pub struct Worker {
    pub client: Client,
    pub id: Uuid,
}

/// What was handed out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handed {
    pub message_id: Uuid,
    pub destination: String,
    pub stream_id: Option<Uuid>,
    pub stream_seq: i64,
    pub partition: i32,
    pub attempts: i32,
    pub status: i32,
    pub flags: i32,
    pub payload: String,
}

/// An answer of `process_work_batch`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub lease_lost: bool,
    pub members: Option<i32>,
    pub partitions: Option<i32>,
    pub completed: Option<i32>,
    pub failed: Option<i32>,
    pub unknown: Option<i32>,
    /// Message, number and version of each that was stored.
    pub stored: Vec<(Uuid, Option<i64>, Option<i64>)>,
    pub handed: Vec<Handed>,
}

impl Answer {
    pub fn payloads(&self) -> Vec<&str> {
        self.handed.iter().map(|handed| handed.payload.as_str()).collect()
    }

    pub fn ids(&self) -> Vec<Uuid> {
        self.handed.iter().map(|handed| handed.message_id).collect()
    }
}

fn handed(row: &Row) -> Handed {
    Handed {
        message_id: row.get("message_id"),
        destination: row.get("destination"),
        stream_id: row.get("stream_id"),
        stream_seq: row.get("stream_seq"),
        partition: row.get("partition"),
        attempts: row.get("attempts"),
        status: row.get("status"),
        flags: row.get("flags"),
        payload: String::from_utf8(row.get("payload")).unwrap(),
    }
}

impl Worker {
    pub async fn new(space: &Space) -> Self {
        Self { client: space.schema.client().await, id: Uuid::now_v7() }
    }

    /// One call with further arguments by name, their values from `$2` on.
    pub async fn try_call(&self, named: &str, values: &[&(dyn ToSql + Sync)]) -> Result<Answer, Error> {
        let comma = if named.is_empty() { "" } else { ", " };
        let text = format!("select * from process_work_batch($1, 'tests', 'host', 7{comma}{named})");
        let mut all: Vec<&(dyn ToSql + Sync)> = vec![&self.id];
        all.extend(values);
        let rows = self.client.query(&text, &all).await?;
        let of = |source: &'static str| rows.iter().filter(move |row| row.get::<_, &str>("source") == source);
        let summary = of("call").next().expect("every answer has one");
        Ok(Answer {
            lease_lost: summary.get("lease_lost"),
            members: summary.get("members"),
            partitions: summary.get("partitions"),
            completed: summary.get("completed"),
            failed: summary.get("failed"),
            unknown: summary.get("unknown"),
            stored: of("stored")
                .map(|row| (row.get("message_id"), row.get("stream_seq"), row.get("version")))
                .collect(),
            handed: of("outbox").map(handed).collect(),
        })
    }

    pub async fn call(&self, named: &str, values: &[&(dyn ToSql + Sync)]) -> Answer {
        self.try_call(named, values).await.unwrap_or_else(|error| panic!("{named}: {:?}", error.as_db_error()))
    }

    /// Asks for work.
    pub async fn claim(&self) -> Answer {
        self.call("", &[]).await
    }

    /// Reports what was published, and asks for more.
    pub async fn complete(&self, ids: &[Uuid]) -> Answer {
        self.call("p_outbox_completions => $2", &[&ids]).await
    }

    /// Reports a failure that is due again at once, and asks for more.
    pub async fn fail(&self, id: Uuid, reason: i32, error: &str) -> Answer {
        let named = "p_outbox_failures => array[$2::uuid], p_outbox_failure_reasons => array[$3::int4],
            p_outbox_failure_errors => array[$4::text], p_retry_base_ms => 0, p_attempts_max => 3";
        self.call(named, &[&id, &reason, &error]).await
    }

    /// Stores, as anybody may.
    pub async fn store(&self, messages: &[Message]) -> Vec<Uuid> {
        call(&self.client, messages).await.unwrap().iter().map(|numbered| numbered.message_id).collect()
    }

    /// Its incarnation's number.
    pub async fn number(&self) -> i32 {
        let sql = "select number from wh_instance where id = $1";
        self.client.query_one(sql, &[&self.id]).await.unwrap().get(0)
    }

    /// Status bits, attempts, reason and error of a message.
    pub async fn status(&self, id: Uuid) -> (i32, i32, i16, String) {
        let sql = "select status, attempts, reason, error from wh_message_status where message_id = $1";
        let row = self.client.query_one(sql, &[&id]).await.unwrap();
        (row.get(0), row.get(1), row.get(2), row.get(3))
    }

    /// A figure.
    pub async fn count(&self, what: &str) -> i64 {
        self.client.query_one(&format!("select count(*) from {what}"), &[]).await.unwrap().get(0)
    }
}
