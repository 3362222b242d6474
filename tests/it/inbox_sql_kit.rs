//! A consumer of the inbox that speaks SQL only: one session and its calls.

use std::time::{SystemTime, UNIX_EPOCH};

use tokio_postgres::{Client, Error, GenericClient};
use uuid::Uuid;

use crate::store_kit::Space;

pub const DAY_MS: u64 = 86_400_000;

/// What is kept of one message in these tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimed {
    pub lane: Uuid,
    pub id: Uuid,
    pub attempts: i32,
    pub payload: Vec<u8>,
}

/// One session of a consumer.
pub struct Session {
    pub client: Client,
    pub consumer: i16,
}

/// A message id of a time, as UUIDv7.
pub fn id_at(unix_ms: u64, rest: u64) -> Uuid {
    Uuid::from_u128((u128::from(unix_ms) << 80) | (7 << 76) | (2 << 62) | u128::from(rest))
}

pub fn now_ms() -> u64 {
    u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap()
}

/// Today, as the memory's parts count.
pub fn today() -> i32 {
    i32::try_from(now_ms() / DAY_MS).unwrap()
}

/// An id of the middle of a day.
pub fn id_of(day: i32, rest: u64) -> Uuid {
    id_at(u64::try_from(day).unwrap() * DAY_MS + DAY_MS / 2, rest)
}

/// The calls, in whatever transaction the client is in.
pub async fn remember(client: &impl GenericClient, consumer: i16, ids: &[Uuid]) -> Result<Vec<bool>, Error> {
    Ok(client.query_one("select remember_inbox($1, $2)", &[&consumer, &ids]).await?.get(0))
}

pub async fn finish(client: &impl GenericClient, consumer: i16, ids: &[Uuid]) -> Vec<bool> {
    client.query_one("select finish_inbox($1, $2)", &[&consumer, &ids]).await.unwrap().get(0)
}

pub async fn unpark(client: &impl GenericClient, consumer: i16, lanes: &[Uuid]) -> Vec<bool> {
    client.query_one("select unpark_inbox($1, $2)", &[&consumer, &lanes]).await.unwrap().get(0)
}

/// Makes a day's part as if the day had come and gone, with so many ids received so long ago.
pub async fn past_day(client: &Client, consumer: i16, day: i32, ids: i32, received_days_ago: f64) {
    let sql = format!(
        "create table wh_inbox_seen_{day} partition of wh_inbox_seen for values in ({day});
        insert into wh_inbox_part (day, is_made) values ({day}, true);
        insert into wh_inbox_seen (received_at, message_id, day, consumer)
        select clock_timestamp() - {received_days_ago} * interval '1 day', gen_random_uuid(), {day}, {consumer}
        from generate_series(1, {ids})"
    );
    client.batch_execute(&sql).await.unwrap();
}

impl Session {
    pub async fn new(space: &Space) -> Self {
        let client = space.schema.client().await;
        let consumer = client.query_one("select consumer_number('billing')", &[]).await.unwrap().get(0);
        Self { client, consumer }
    }

    pub async fn try_begin(&self, of: &[(Uuid, Uuid)], held: &[Uuid], unlock: &[Uuid]) -> Result<Vec<i16>, Error> {
        let (ids, lanes): (Vec<Uuid>, Vec<Uuid>) = of.iter().copied().unzip();
        let sql = "select begin_inbox($1, $2, $3, $4, $5)";
        Ok(self.client.query_one(sql, &[&self.consumer, &ids, &lanes, &held, &unlock]).await?.get(0))
    }

    /// Messages with their lanes.
    pub async fn begin(&self, of: &[(Uuid, Uuid)]) -> Vec<i16> {
        self.try_begin(of, &[], &[]).await.unwrap()
    }

    pub async fn unlock(&self, lanes: &[Uuid]) {
        assert!(self.try_begin(&[], &[], lanes).await.unwrap().is_empty());
    }

    pub async fn remember(&self, ids: &[Uuid]) -> Vec<bool> {
        remember(&self.client, self.consumer, ids).await.unwrap()
    }

    pub async fn try_keep(&self, of: &[(Uuid, Uuid)], payload: impl Fn(usize) -> Vec<u8>) -> Result<i32, Error> {
        let (ids, lanes): (Vec<Uuid>, Vec<Uuid>) = of.iter().copied().unzip();
        let types = vec!["billing.told"; ids.len()];
        let payloads: Vec<Vec<u8>> = (0..ids.len()).map(payload).collect();
        let sql = "select keep_inbox($1, 'orders', $2, $3, $2, $4, $5)";
        Ok(self.client.query_one(sql, &[&self.consumer, &lanes, &ids, &types, &payloads]).await?.get(0))
    }

    /// Remembers and keeps; the payload is the number in the call.
    pub async fn keep(&self, of: &[(Uuid, Uuid)]) {
        let ids: Vec<Uuid> = of.iter().map(|(id, _)| *id).collect();
        assert!(self.remember(&ids).await.iter().all(|new| *new));
        let kept = self.try_keep(of, |index| index.to_string().into_bytes()).await.unwrap();
        assert_eq!(kept, i32::try_from(of.len()).unwrap());
    }

    pub async fn park(&self, lane: Uuid, id: Uuid, attempts: i32, error: &str, due_in_ms: i64) {
        let sql = "select park_inbox($1, array[$2::uuid], array[$3::uuid], array[$4::int4], array[99]::int2[],
            array[$5::text], array[$6::int8])";
        let values: [&(dyn tokio_postgres::types::ToSql + Sync); 6] =
            [&self.consumer, &lane, &id, &attempts, &error, &due_in_ms];
        assert_eq!(self.client.query_one(sql, &values).await.unwrap().get::<_, i32>(0), 1);
    }

    pub async fn bury(&self, id: Uuid, error: &str, hold: bool) -> bool {
        let sql = "select bury_inbox($1, array[$2::uuid], array[3], array[4]::int2[], array[$3::text], $4)";
        let row = self.client.query_one(sql, &[&self.consumer, &id, &error, &hold]).await.unwrap();
        row.get::<_, Vec<bool>>(0)[0]
    }

    /// With `rows_max` and `bytes_max`; and whether there is more.
    pub async fn claim(&self, held: &[Uuid], lanes_max: i32, rows_max: i32, bytes_max: i64) -> (Vec<Claimed>, bool) {
        let sql = "select * from claim_inbox($1, null, $2, $3, $4, $5)";
        let values: [&(dyn tokio_postgres::types::ToSql + Sync); 5] =
            [&self.consumer, &held, &lanes_max, &rows_max, &bytes_max];
        let rows = self.client.query(sql, &values).await.unwrap();
        let more = rows.first().is_some_and(|row| row.get("more"));
        let of = |row: &tokio_postgres::Row| Claimed {
            lane: row.get("lane_id"),
            id: row.get("message_id"),
            attempts: row.get("attempts"),
            payload: row.get("payload"),
        };
        (rows.iter().map(of).collect(), more)
    }

    pub async fn claim_all(&self) -> Vec<Claimed> {
        self.claim(&[], 100, 200, 1 << 20).await.0
    }

    /// Lanes that this session has locked.
    pub async fn locked(&self) -> i64 {
        self.count("pg_locks where locktype = 'advisory' and pid = pg_backend_pid()").await
    }

    pub async fn count(&self, what: &str) -> i64 {
        self.client.query_one(&format!("select count(*) from {what}"), &[]).await.unwrap().get(0)
    }

    /// A step: truncated, dropped, blocked, more.
    pub async fn maintain(&self, window: &str) -> (i32, i32, bool, bool) {
        let sql = format!("select truncated, dropped, blocked, more from maintain_inbox(interval '{window}')");
        let row = self.client.query_one(&sql, &[]).await.unwrap();
        (row.get(0), row.get(1), row.get(2), row.get(3))
    }

    /// The parts that an id stands in, without their prefix.
    pub async fn parts_of(&self, id: Uuid) -> String {
        let sql = "select string_agg(substr(tableoid::regclass::text, length('wh_inbox_seen_') + 1), ' ' order by day)
            from wh_inbox_seen where message_id = $1";
        self.client.query_one(sql, &[&id]).await.unwrap().get(0)
    }
}
