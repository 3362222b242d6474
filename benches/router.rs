//! From a message to its shard's batch: the partition function beside the standard library's hash, and a typed
//! message written straight into the arena beside one serialized into buffers of its own.
//!
//! `cargo bench --bench router`

mod measure;

use std::hash::{BuildHasher, RandomState};
use std::hint::black_box;

use corelane::batch::Rows;
use corelane::engine::router::Router;
use corelane::message::kind;
use corelane::partition::partition_of;
use corelane::{Message, Result};
use measure::{heading, measure};
use uuid::Uuid;

const COUNT: usize = 1_000;

#[derive(serde::Serialize)]
struct OrderPlaced {
    order: Uuid,
    customer: Uuid,
    items: u32,
    total_cents: u64,
    note: &'static str,
}

impl Message for OrderPlaced {
    type Kind = kind::Event;
    const NAME: &'static str = "shop.order-placed";
    const DESTINATIONS: &'static [&'static str] = &["orders"];
    fn stream_id(&self) -> Option<Uuid> {
        Some(self.order)
    }
}

/// What a design of one struct a message would hold.
struct Boxed {
    _id: Uuid,
    _stream: Uuid,
    _partition: u32,
    _type_name: String,
    _destinations: Vec<String>,
    _payload: Vec<u8>,
}

fn main() -> Result<()> {
    let ids: Vec<Uuid> = (0..COUNT).map(|_| Uuid::now_v7()).collect();
    heading("partition of a stream", "id");
    measure("partition_of (64)", COUNT as u64, || {
        black_box(ids.iter().map(|id| partition_of(black_box(*id), 64)).sum::<u32>());
    });
    let sip = RandomState::new();
    measure("SipHash of the standard library, modulo 64", COUNT as u64, || {
        black_box(ids.iter().map(|id| (sip.hash_one(black_box(id)) % 64) as u32).sum::<u32>());
    });

    let message = |id: &Uuid| OrderPlaced {
        order: *id,
        customer: *id,
        items: 3,
        total_cents: 129_900,
        note: "leave it with the neighbours on the left",
    };
    let messages: Vec<OrderPlaced> = ids.iter().map(message).collect();
    let router = Router { partitions: 64, shards: 2 };
    heading("a typed message of some 200 bytes into its batch", "message");
    let mut rows = Rows::default();
    let mut refused = 0;
    measure("Router::write into a warm batch", COUNT as u64, || {
        rows.clear();
        for message in &messages {
            refused += usize::from(router.write(&mut rows, message, message.order).is_err());
            rows.end_unit();
        }
        black_box(rows.len());
    });
    assert_eq!(refused, 0, "all messages are good");
    let mut boxes = Vec::with_capacity(COUNT);
    measure("a struct each, with buffers of its own", COUNT as u64, || {
        boxes.clear();
        for message in &messages {
            boxes.push(Boxed {
                _id: message.order,
                _stream: message.order,
                _partition: partition_of(message.order, 64),
                _type_name: OrderPlaced::NAME.to_owned(),
                _destinations: OrderPlaced::DESTINATIONS.iter().map(|name| (*name).to_owned()).collect(),
                _payload: serde_json::to_vec(message).unwrap_or_default(),
            });
        }
        black_box(boxes.len());
    });
    Ok(())
}
