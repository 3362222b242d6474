//! A reader of the feed that speaks SQL, as a program in any language would: its place is a text in its hands.

use tokio_postgres::Client;
use uuid::Uuid;

use crate::subscription_kit::Read;

/// One reader.
pub struct SqlFeed {
    pub place: Option<String>,
    pub rows_max: i32,
    pub prove_ms: i32,
    pub is_whole: bool,
}

impl SqlFeed {
    /// From the beginning.
    pub fn new() -> Self {
        Self { place: None, rows_max: 1_000, prove_ms: 1_000, is_whole: false }
    }

    /// From a position; `None`: from now on.
    pub async fn begin(client: &Client, from: Option<i64>) -> Self {
        let place = client.query_one("select begin_feed($1)", &[&from]).await.unwrap().get(0);
        Self { place: Some(place), ..Self::new() }
    }

    /// One page; the place has moved when it answers.
    pub async fn page(&mut self, client: &Client) -> Vec<Read> {
        self.try_page(client).await.unwrap()
    }

    pub async fn try_page(&mut self, client: &Client) -> Result<Vec<Read>, tokio_postgres::Error> {
        let sql = "select stream_id, version, position, payload, place, whole
            from read_feed($1, p_rows_max => $2, p_prove_ms => $3)";
        let mut rows = client.query(sql, &[&self.place, &self.rows_max, &self.prove_ms]).await?;
        let last = rows.pop().unwrap();
        (self.place, self.is_whole) = (last.get(4), last.get(5));
        let read = |row: &tokio_postgres::Row| Read {
            stream_id: row.get::<_, Uuid>(0),
            version: row.get(1),
            position: row.get(2),
            text: String::from_utf8(row.get(3)).unwrap(),
        };
        Ok(rows.iter().map(read).collect())
    }

    /// Pages until there is nothing more.
    pub async fn drain(&mut self, client: &Client) -> Vec<Read> {
        let mut all = Vec::new();
        loop {
            all.extend(self.page(client).await);
            if self.is_whole {
                return all;
            }
        }
    }

    pub async fn texts(&mut self, client: &Client) -> Vec<String> {
        self.drain(client).await.into_iter().map(|read| read.text).collect()
    }

    /// Buffers of the server that its next page touches; the page is not taken.
    pub async fn buffers_of_a_page(&self, client: &Client) -> i64 {
        let place = self.place.as_deref().unwrap_or_default();
        let explain = format!(
            "explain (analyze, buffers, format text) select * from read_feed('{place}', p_rows_max => {}, p_prove_ms => 86400000)",
            self.rows_max
        );
        let plan = client.query(&explain, &[]).await.unwrap();
        let line = plan.iter().map(|row| row.get::<_, &str>(0)).find(|line| line.contains("Buffers:")).unwrap_or("");
        ["hit=", "read="]
            .iter()
            .filter_map(|word| line.split_once(word))
            .map(|(_, rest)| rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse::<i64>().unwrap())
            .sum()
    }
}
