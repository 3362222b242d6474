//! Callers of `store_outbox_messages` as a program in any language would be: through SQL only.

use tokio_postgres::{Error, GenericClient};
use uuid::Uuid;

use crate::store_kit::Message;

/// What was answered for one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbered {
    pub message_id: Uuid,
    pub partition: i32,
    pub seq: Option<i64>,
    pub version: Option<i64>,
    pub position: Option<i64>,
}

/// The call, in whatever transaction the client is in; the schema is in its `search_path`.
pub async fn call(client: &impl GenericClient, messages: &[Message]) -> Result<Vec<Numbered>, Error> {
    let ids: Vec<Uuid> = messages.iter().map(|message| message.id).collect();
    let streams: Vec<Option<Uuid>> = messages.iter().map(|message| message.stream).collect();
    let types: Vec<&str> = messages.iter().map(|_| "test.message").collect();
    let payloads: Vec<&[u8]> = messages.iter().map(|message| message.payload.as_slice()).collect();
    let events: Vec<bool> = messages.iter().map(|message| message.event).collect();
    let firsts: Vec<Option<&str>> = messages.iter().map(|message| message.destinations.first().copied()).collect();
    let dues: Vec<Option<i64>> =
        messages.iter().map(|message| (message.due_unix_us > 0).then_some(message.due_unix_us)).collect();
    let (mut reference_message, mut reference_destination): (Vec<i32>, Vec<&str>) = (Vec::new(), Vec::new());
    for (index, message) in messages.iter().enumerate() {
        for name in message.destinations.iter().skip(1) {
            reference_message.push(index as i32 + 1);
            reference_destination.push(name);
        }
    }
    let rows = client
        .query(
            "select * from store_outbox_messages($1, $2, $3, $4, $5, $6, $7, $8, dues => (select array_agg( \
             to_timestamp(due / 1e6) order by turn) from unnest($9::int8[]) with ordinality d(due, turn)))",
            &[&ids, &streams, &types, &payloads, &events, &firsts, &reference_message, &reference_destination, &dues],
        )
        .await?;
    Ok(rows
        .iter()
        .map(|row| Numbered {
            message_id: row.get(0),
            partition: row.get(1),
            seq: row.get(2),
            version: row.get(3),
            position: row.get(4),
        })
        .collect())
}

/// SQLSTATE of a refusal.
pub fn code<T: std::fmt::Debug>(outcome: Result<T, Error>) -> String {
    outcome.expect_err("refused").code().expect("by the server").code().to_owned()
}

/// Code and message of a refusal.
pub fn refusal<T: std::fmt::Debug>(outcome: Result<T, Error>) -> (String, String) {
    let error = outcome.expect_err("refused");
    let refusal = error.as_db_error().expect("by the server");
    (refusal.code().code().to_owned(), refusal.message().to_owned())
}
