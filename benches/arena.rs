//! Columns and one arena beside a vector of structs: filling, walking, and encoding as Postgres parameters.
//!
//! `cargo bench --bench arena`

mod measure;

use std::hint::black_box;
use std::sync::Arc;

use bytes::BytesMut;
use corelane::batch::{NewRow, Rows};
use corelane::envelope::Trace;
use corelane::store::columns::Batches;
use measure::{heading, measure};
use postgres_types::{ToSql, Type};
use uuid::Uuid;

const COUNT: usize = 1_000;

#[derive(Clone)]
struct Message {
    message_id: Uuid,
    stream_id: Option<Uuid>,
    _partition: u32,
    _type_name: String,
    payload: Vec<u8>,
}

fn fill(rows: &mut Rows, ids: &[Uuid], payload: &[u8]) {
    for id in ids {
        let row = NewRow {
            message_id: *id,
            stream_id: Some(*id),
            partition: 7,
            is_event: true,
            type_name: "shop.order-placed",
            content_type: "",
            correlation_id: *id,
            causation_id: *id,
            trace: Trace::default(),
            metadata: &[],
            payload,
            due_unix_us: 0,
        };
        rows.push(&row, &[]);
        rows.end_unit();
    }
}

fn main() {
    let ids: Vec<Uuid> = (0..COUNT).map(|_| Uuid::now_v7()).collect();
    let payload = [b'x'; 200];

    heading("filling 1,000 messages of 200 bytes", "message");
    let mut rows = Rows::default();
    measure("columns and arena, warm", COUNT as u64, || {
        rows.clear();
        fill(&mut rows, &ids, &payload);
        black_box(rows.len());
    });
    measure("columns and arena, new each time", COUNT as u64, || {
        let mut fresh = Rows::default();
        fill(&mut fresh, &ids, &payload);
        black_box(fresh.len());
    });
    let message = |id: &Uuid| Message {
        message_id: *id,
        stream_id: Some(*id),
        _partition: 7,
        _type_name: "shop.order-placed".to_owned(),
        payload: payload.to_vec(),
    };
    let mut messages: Vec<Message> = Vec::with_capacity(COUNT);
    measure("a vector of structs", COUNT as u64, || {
        messages.clear();
        messages.extend(ids.iter().map(message));
        black_box(messages.len());
    });

    heading("walking one column", "message");
    measure("column", COUNT as u64, || {
        black_box(rows.lane_id.iter().fold(0u128, |sum, id| sum ^ id.as_u128()));
    });
    measure("field of structs", COUNT as u64, || {
        let streams = messages.iter().filter_map(|message| message.stream_id);
        black_box(streams.fold(0u128, |sum, id| sum ^ id.as_u128()));
    });

    heading("encoding ids and payloads as uuid[] and bytea[]", "message");
    let batches = [Arc::new(rows)];
    let mut out = BytesMut::with_capacity(1 << 20);
    measure("columns, straight into the connection's buffer", COUNT as u64, || {
        out.clear();
        let rows = Batches::new(&batches);
        let written = [
            rows.uuids(|rows| &rows.message_id, false).to_sql(&Type::UUID_ARRAY, &mut out).is_ok(),
            rows.spans(Type::BYTEA, |rows| &rows.payload, false).to_sql(&Type::BYTEA_ARRAY, &mut out).is_ok(),
        ];
        assert_eq!(written, [true; 2]);
        black_box(out.len());
    });
    measure("vectors collected from structs, then to_sql", COUNT as u64, || {
        out.clear();
        let ids: Vec<Uuid> = messages.iter().map(|message| message.message_id).collect();
        let payloads: Vec<&[u8]> = messages.iter().map(|message| message.payload.as_slice()).collect();
        let written =
            [ids.to_sql(&Type::UUID_ARRAY, &mut out).is_ok(), payloads.to_sql(&Type::BYTEA_ARRAY, &mut out).is_ok()];
        assert_eq!(written, [true; 2]);
        black_box(out.len());
    });
}
