//! Events as SQL sees them: JSON where they are, null where they are not, never an error, and an index on them at will.

use uuid::Uuid;

use crate::store_kit::Space;

async fn put(client: &tokio_postgres::Client, type_name: &str, content_type: Option<&str>, payload: &[u8]) {
    let sql = "select position from store_outbox_messages(array[gen_random_uuid()], array[$1::uuid], array[$2::text],
        array[$3::bytea], array[true], array[null::text], content_types => array[$4::text])";
    client.query_one(sql, &[&Uuid::now_v7(), &type_name, &payload, &content_type]).await.unwrap();
}

#[tokio::test]
async fn events_are_json_where_they_are_it_and_null_where_not() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    let deep = "[".repeat(100_000) + &"]".repeat(100_000);
    let cases: [(Option<&str>, &[u8], Option<&str>); 15] = [
        (None, br#"{"a": 1}"#, Some(r#"{"a": 1}"#)),
        (Some("application/json; charset=utf-8"), b"[1, 2]", Some("[1, 2]")),
        (Some("Application/CloudEvents+JSON"), b"\"x\"", Some("\"x\"")),
        (None, b"12345678901234567890", Some("12345678901234567890")),
        (None, br#"{"b": 1, "a": 2, "b": 3}"#, Some(r#"{"a": 2, "b": 3}"#)),
        (Some("text/plain"), b"{}", None),
        (Some("application/x-json"), b"{}", None),
        (None, b"", None),
        (None, b"{", None),
        (None, b"\xff\xfe", None),
        (None, b"\0", None),
        (None, br#"{"a": "\u0000"}"#, None),
        (None, br#"{"a": "\ud800"}"#, None),
        (None, b"1e400000", None),
        (None, deep.as_bytes(), None),
    ];
    for (content_type, payload, _) in cases {
        put(&client, "json.case", content_type, payload).await;
    }
    let rows = client
        .query(
            "select payload::text, payload_bytes, content_type, metadata::text from wh_event_json order by position",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(rows.len(), cases.len());
    for (row, (content_type, payload, json)) in rows.iter().zip(cases) {
        let what = payload[..payload.len().min(40)].escape_ascii().to_string();
        assert_eq!(row.get::<_, Option<&str>>(0), json, "{what}");
        assert_eq!(row.get::<_, &[u8]>(1), payload, "{what}");
        assert_eq!(row.get::<_, &str>(2), content_type.unwrap_or("application/json"));
        assert_eq!(row.get::<_, Option<&str>>(3), None);
    }
}

#[tokio::test]
async fn an_index_on_json_is_used_and_no_payload_stops_an_append() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    // As sql/README.md has it.
    let index = "create index event_by_customer on wh_event_store ((wh_json(content_type, payload) ->> 'customer'))
        where type_name = 'orders.placed'";
    client.batch_execute(index).await.unwrap();
    for n in 0..50 {
        put(&client, "orders.placed", None, format!(r#"{{"customer": "c{n}"}}"#).as_bytes()).await;
        put(&client, "orders.placed", None, b"{\"customer\": \"\\u0000").await;
        put(&client, "stock.counted", None, br#"{"customer": "c7"}"#).await;
    }
    client.batch_execute("analyze wh_event_store; set enable_seqscan = off").await.unwrap();
    let query = "select version from wh_event_json where type_name = 'orders.placed' and payload ->> 'customer' = 'c7'";
    assert_eq!(client.query(query, &[]).await.unwrap().len(), 1);
    let plan = client.query(&format!("explain {query}"), &[]).await.unwrap();
    let plan: Vec<&str> = plan.iter().map(|row| row.get(0)).collect();
    assert!(plan.iter().any(|line| line.contains("event_by_customer")), "{plan:?}");
}

#[tokio::test]
async fn the_view_shows_payloads_only_to_those_who_may_read_the_table() {
    let space = Space::new().await;
    let client = space.schema.client().await;
    put(&client, "json.case", None, b"{}").await;
    let role = format!("reader_{}", space.schema.name);
    client
        .batch_execute(&format!(
            "create role {role}; grant usage on schema {0} to {role}; grant select on wh_event_json to {role}; set role {role}",
            space.name
        ))
        .await
        .unwrap();
    let refused = client.query("select payload from wh_event_json", &[]).await.unwrap_err();
    assert_eq!(refused.code().unwrap().code(), "42501");
    client
        .batch_execute(&format!("reset role; grant select on wh_event_store to {role}; set role {role}"))
        .await
        .unwrap();
    assert_eq!(client.query("select payload from wh_event_json", &[]).await.unwrap().len(), 1);
    client.batch_execute(&format!("reset role; drop owned by {role}; drop role {role}")).await.unwrap();
}
