//! The inbox in thirty lines: an order that arrives twice is billed once, in the commit that also emits the bill.
//!
//! `cargo run --example inbox --features private-postgres [-- postgres://…]`; without a URL it starts a private,
//! throw-away Postgres and removes it at the end.

use std::time::Duration;

use corelane::message::kind;
use corelane::private_postgres::{Options, PrivatePostgres};
use corelane::{Config, Delivery, Engine, MemoryBroker, Message};
use uuid::Uuid;

#[derive(serde::Serialize, serde::Deserialize)]
struct OrderPlaced {
    order: Uuid,
    total: i64,
}

impl Message for OrderPlaced {
    type Kind = kind::Event;
    const NAME: &'static str = "shop.order-placed";
    const DESTINATIONS: &'static [&'static str] = &["orders"];
    fn stream_id(&self) -> Option<Uuid> {
        Some(self.order)
    }
}

#[derive(serde::Serialize, serde::Deserialize)]
struct OrderBilled {
    order: Uuid,
    total: i64,
}

impl Message for OrderBilled {
    type Kind = kind::Event;
    const NAME: &'static str = "billing.order-billed";
    const DESTINATIONS: &'static [&'static str] = &["bills"];
    fn stream_id(&self) -> Option<Uuid> {
        Some(self.order)
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let given = std::env::args().nth(1);
    // Lives as long as `main`: it is gone when this is dropped.
    let private = if given.is_none() { Some(PrivatePostgres::start(Options::default())?) } else { None };
    let url = given.or_else(|| private.as_ref().map(|server| server.url("postgres"))).unwrap_or_default();
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    client.batch_execute("create table if not exists bill (shop_order uuid primary key, total int8 not null)").await?;

    // From here on it is what a service does; the broker is one in this process.
    let mut config = Config::default().overlay_env("CORELANE")?;
    config.set("database.url", &url)?;
    let broker = MemoryBroker::new(30_000);
    let engine = Engine::builder(config).transport(broker.clone()).migrate(true).start().await?;
    let consumer = engine
        .consumer("billing")
        .source("orders")
        .handler_in_transaction::<OrderPlaced>(|order, context| {
            Box::pin(async move {
                let OrderPlaced { order, total } = order;
                // The handler's own SQL, its event and the memory of its message: one commit.
                context.transaction()?.execute("insert into bill values ($1, $2)", &[&order, &total]).await?;
                context.push(&OrderBilled { order, total })?;
                Ok(())
            })
        })
        .start()
        .await?;

    let order = OrderPlaced { order: Uuid::now_v7(), total: 42 };
    let delivery = Delivery {
        message_id: Uuid::now_v7(),
        stream_id: order.stream_id(),
        type_name: OrderPlaced::NAME.to_owned(),
        payload: serde_json::to_vec(&order)?,
        ..Delivery::default()
    };
    broker.put("orders", delivery.clone());
    broker.put("orders", delivery); // a copy, as brokers send them

    let bills = broker.receiver_of("bills").receive(10).await?;
    println!("published to bills: {} {}", bills[0].type_name, String::from_utf8_lossy(&bills[0].payload));
    println!("handled {}, copies {}", consumer.metrics().handled.get(), consumer.metrics().duplicates.get());
    println!("{:?}", engine.shutdown(Duration::from_secs(10)).await);
    Ok(())
}
