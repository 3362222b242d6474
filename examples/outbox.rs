//! The outbox in twenty lines: an event stored with the caller's own row, and published after its commit.
//!
//! `cargo run --example outbox --features private-postgres [-- postgres://…]`; without a URL it starts a private,
//! throw-away Postgres and removes it at the end.

use std::time::Duration;

use corelane::message::kind;
use corelane::private_postgres::{Options, PrivatePostgres};
use corelane::{Config, Engine, MemoryTransport, Message};
use uuid::Uuid;

#[derive(serde::Serialize)]
struct CartClosed {
    cart: Uuid,
    items: u32,
}

impl Message for CartClosed {
    type Kind = kind::Event;
    const NAME: &'static str = "shop.cart-closed";
    const DESTINATIONS: &'static [&'static str] = &["orders"];
    fn stream_id(&self) -> Option<Uuid> {
        Some(self.cart)
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let given = std::env::args().nth(1);
    // Lives as long as `main`: it is gone when this is dropped.
    let private = if given.is_none() { Some(PrivatePostgres::start(Options::default())?) } else { None };
    let url = given.or_else(|| private.as_ref().map(|server| server.url("postgres"))).unwrap_or_default();
    let (mut client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    client.batch_execute("create temporary table cart (id uuid primary key, closed bool not null)").await?;

    // From here on it is what a service does.
    let mut config = Config::default().overlay_env("CORELANE")?;
    config.set("database.url", &url)?;
    let (published, arrivals) = flume::unbounded();
    let transport = MemoryTransport::new(move |destination, message| {
        let payload = String::from_utf8_lossy(message.payload);
        let _ = published.send(format!("{destination}: {} version {} {payload}", message.type_name, message.version));
    });
    let engine = Engine::builder(config).transport(transport).migrate(true).start().await?;

    let cart = Uuid::now_v7();
    let receipt = engine.enqueue(&CartClosed { cart, items: 1 }).await?; // committed
    println!("stored as version {} of its stream", receipt.version);

    let transaction = client.transaction().await?; // the caller's own
    transaction.execute("insert into cart values ($1, true)", &[&cart]).await?;
    let enlisted = engine.outbox().push(&CartClosed { cart, items: 2 })?.enlist(&transaction).await?;
    transaction.commit().await?;
    enlisted.announce(); // forgotten: costs latency, never delivery

    for _ in 0..2 {
        println!("published {}", arrivals.recv_async().await?);
    }
    println!("{:?}", engine.shutdown(Duration::from_secs(10)).await);
    Ok(())
}
