//! Parameters of a flush written straight from the batches, beside collecting each column into a vector first.
//!
//! `cargo bench --bench columns [-- seconds]`. A cycle writes six columns (two of ids, a number, a name, a payload
//! and nulls for an id that nobody gave) of a flush made of batches of 10 messages, into a buffer that is kept.
//! Percentiles are of cycles, in nanoseconds a message.

#![allow(clippy::unwrap_used)] // A benchmark that cannot go on ends.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use corelane::batch::{NewRow, Rows};
use corelane::envelope::Trace;
use corelane::store::columns::Batches;
use hdrhistogram::Histogram;
use postgres_types::{ToSql, Type};
use uuid::Uuid;

const ROWS_OF_BATCH: usize = 10;

fn batches(rows: usize, payload: &[u8]) -> Vec<Arc<Rows>> {
    let batch = |_| {
        let mut batch = Rows::default();
        for _ in 0..ROWS_OF_BATCH.min(rows) {
            let row = NewRow {
                message_id: Uuid::now_v7(),
                stream_id: Some(Uuid::new_v4()),
                partition: 1,
                is_event: true,
                type_name: "OrderPlaced",
                content_type: "",
                correlation_id: Uuid::nil(),
                causation_id: Uuid::nil(),
                trace: Trace::default(),
                metadata: b"",
                payload,
                due_unix_us: 0,
            };
            batch.push(&row, &[]);
        }
        batch.end_unit();
        Arc::new(batch)
    };
    (0..rows.div_ceil(ROWS_OF_BATCH)).map(batch).collect()
}

fn ours(batches: &[Arc<Rows>], out: &mut BytesMut) {
    let all = Batches::new(batches);
    let put = |column: &dyn ToSql, of: &Type, out: &mut BytesMut| column.to_sql_checked(of, out).map(drop).unwrap();
    put(&all.uuids(|rows| &rows.message_id, false), &Type::UUID_ARRAY, out);
    put(&all.uuids(|rows| &rows.lane_id, false), &Type::UUID_ARRAY, out);
    put(&all.uuids(|rows| &rows.correlation_id, true), &Type::UUID_ARRAY, out);
    put(&all.numbers(|rows| &rows.stream_seq), &Type::INT8_ARRAY, out);
    put(&all.spans(Type::TEXT, |rows| &rows.type_name, false), &Type::TEXT_ARRAY, out);
    put(&all.spans(Type::BYTEA, |rows| &rows.payload, false), &Type::BYTEA_ARRAY, out);
}

fn collected(batches: &[Arc<Rows>], out: &mut BytesMut) {
    let put = |column: &dyn ToSql, of: &Type, out: &mut BytesMut| column.to_sql_checked(of, out).map(drop).unwrap();
    let each = || batches.iter().flat_map(|rows| (0..rows.len()).map(move |row| (rows, row)));
    let ids: Vec<Uuid> = each().map(|(rows, row)| rows.message_id[row]).collect();
    put(&ids, &Type::UUID_ARRAY, out);
    let streams: Vec<Uuid> = each().map(|(rows, row)| rows.lane_id[row]).collect();
    put(&streams, &Type::UUID_ARRAY, out);
    let given = |id: Uuid| Some(id).filter(|id| !id.is_nil());
    let correlations: Vec<Option<Uuid>> = each().map(|(rows, row)| given(rows.correlation_id[row])).collect();
    put(&correlations, &Type::UUID_ARRAY, out);
    let numbers: Vec<i64> = each().map(|(rows, row)| rows.stream_seq[row]).collect();
    put(&numbers, &Type::INT8_ARRAY, out);
    let names: Vec<&str> = each().map(|(rows, row)| rows.text(rows.type_name[row])).collect();
    put(&names, &Type::TEXT_ARRAY, out);
    let payloads: Vec<&[u8]> = each().map(|(rows, row)| rows.bytes(rows.payload[row])).collect();
    put(&payloads, &Type::BYTEA_ARRAY, out);
}

fn measure(write: fn(&[Arc<Rows>], &mut BytesMut), batches: &[Arc<Rows>], seconds: f64) -> Histogram<u64> {
    let rows: usize = batches.iter().map(|rows| rows.len()).sum();
    let mut histogram = Histogram::new_with_bounds(1, 1_000_000_000, 3).unwrap();
    let mut out = BytesMut::new();
    let warm = Instant::now() + Duration::from_secs_f64(seconds / 4.0);
    let end = warm + Duration::from_secs_f64(seconds);
    loop {
        out.clear();
        let start = Instant::now();
        write(batches, &mut out);
        black_box(&out);
        let now = Instant::now();
        if now > warm {
            histogram.record((now - start).as_nanos() as u64 / rows as u64).unwrap();
        }
        if now > end {
            return histogram;
        }
    }
}

fn main() {
    let seconds = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(1.0);
    println!("{:<8} {:<8} {:<10} {:>8} {:>8} {:>8}   ns a message", "rows", "payload", "", "p50", "p99", "p99.9");
    for (rows, payload) in [(1, 200), (100, 200), (1_000, 200), (1_000, 1_000)] {
        let batches = batches(rows, &vec![b'x'; payload]);
        let (mut one, mut other) = (BytesMut::new(), BytesMut::new());
        ours(&batches, &mut one);
        collected(&batches, &mut other);
        // The flag word "may hold nulls" is not the same; everything else is.
        assert_eq!(one.len(), other.len());
        for (name, write) in [("columns", ours as fn(&[Arc<Rows>], &mut BytesMut)), ("collected", collected)] {
            let histogram = measure(write, &batches, seconds);
            let at = |quantile| histogram.value_at_quantile(quantile);
            println!("{rows:<8} {payload:<8} {name:<10} {:>8} {:>8} {:>8}", at(0.5), at(0.99), at(0.999));
        }
    }
}
