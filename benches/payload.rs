//! Payloads: parsing with simd-json on reused buffers beside serde_json, the check of raw JSON, and the envelope's
//! trace header.
//!
//! `cargo bench --bench payload`

mod measure;

use std::hint::black_box;

use corelane::envelope::Trace;
use corelane::message::json;
use measure::{heading, measure};
use serde::de::IgnoredAny;

#[derive(serde::Deserialize)]
#[allow(dead_code)] // Parsed, not read.
struct Order {
    order: String,
    total_cents: u64,
    items: Vec<Item>,
}

#[derive(serde::Deserialize)]
#[allow(dead_code)] // Parsed, not read.
struct Item {
    sku: String,
    quantity: u32,
    price: f64,
    note: Option<String>,
}

fn order(items: usize) -> String {
    let item = |n: usize| {
        format!(r#"{{"sku":"SKU-{n:06}","quantity":{},"price":{}.25,"note":"gift wrap, caf\u00e9"}}"#, n % 9 + 1, n * 3)
    };
    let items: Vec<String> = (0..items).map(item).collect();
    format!(r#"{{"order":"018f3c4e-7b1a-7c3d-9e2f-0a1b2c3d4e5f","total_cents":129900,"items":[{}]}}"#, items.join(","))
}

fn main() {
    for items in [3, 11, 130] {
        let text = order(items);
        let bytes = text.as_bytes();
        heading(&format!("{} bytes of JSON", bytes.len()), "payload");
        measure("serde_json into a type", 1, || {
            assert!(black_box(serde_json::from_slice::<Order>(black_box(bytes))).is_ok());
        });
        let mut copy = Vec::new();
        let mut buffers = simd_json::Buffers::default();
        measure("simd-json into a type, reused buffers, copy counted", 1, || {
            copy.clear();
            copy.extend_from_slice(black_box(bytes));
            assert!(black_box(simd_json::serde::from_slice_with_buffers::<Order>(&mut copy, &mut buffers)).is_ok());
        });
        measure("check: is it JSON? (simd-json, reused buffers)", 1, || {
            assert!(json::check(black_box(bytes)).is_ok());
        });
        measure("the same by serde_json alone", 1, || {
            assert!(serde_json::from_slice::<IgnoredAny>(black_box(bytes)).is_ok());
        });
    }
    heading("traceparent", "header");
    let header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    measure("parse into 25 bytes", 1_000, || {
        for _ in 0..1_000 {
            assert!(black_box(Trace::parse(black_box(header))).is_some());
        }
    });
    measure("keep as text", 1_000, || {
        for _ in 0..1_000 {
            black_box(black_box(header).to_owned());
        }
    });
}
