//! Roles and databases whose transactions are of another isolation level unless they say so: every connection of an engine
//! says so.

use std::time::Duration;

use corelane::{HandlerError, RawMessage};
use uuid::Uuid;

use crate::inbox_kit::{Calls, Inbox, consume, effect, text_of, writes};
use crate::subscription_kit::read;
use crate::support::{connect, database_url, quoted};

const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_role_of_another_isolation_level_makes_no_difference() {
    for level in ["repeatable read", "serializable"] {
        let inbox = Inbox::new();
        let role = format!("strict_{}", inbox.schema.name);
        let admin = connect(&database_url()).await;
        let sql = format!(
            "create role {0} login superuser; alter role {0} set default_transaction_isolation = '{level}'",
            quoted(&role)
        );
        admin.batch_execute(&sql).await.unwrap();
        let url = inbox.schema.url.replace("://postgres@", &format!("://{role}@"));
        assert_ne!(url, inbox.schema.url, "a server of our own");
        let url = format!("{url}?options=-csearch_path%3D{}", inbox.schema.name);
        let inbox = inbox.set("database.url", &url);
        let engine = inbox.engine(inbox.broker.clone()).await;
        let mut subscription = engine.subscribe("strict").start().await.unwrap();
        // One fails at first, so that it is kept, and looked for.
        let calls = Calls::default();
        let called = calls.clone();
        let consumer = consume(
            &engine,
            writes(move |delivery, context| {
                let is_first = text_of(delivery) == "again" && called.note() == 0;
                Box::pin(async move {
                    effect(delivery, context).await?;
                    if is_first { Err(HandlerError::retry("not yet")) } else { Ok(()) }
                })
            }),
        )
        .await;
        inbox.put(1, "once");
        inbox.put(2, "again");
        let mut effects = inbox.effects(2).await;
        effects.sort();
        assert_eq!(effects, ["again", "once"], "{level}");
        inbox.nothing_kept().await;
        engine.enqueue(&RawMessage::event("test.of", b"told").stream(Uuid::now_v7()).to(&["sink"])).await.unwrap();
        let next = tokio::time::timeout(PATIENCE, subscription.next()).await;
        let batch = next.expect("it is read").unwrap().unwrap();
        assert_eq!(batch.events().iter().map(|event| read(event).text).collect::<Vec<_>>(), ["told"], "{level}");
        assert_eq!((consumer.metrics().reconnects.get(), subscription.metrics().reconnects.get()), (0, 0), "{level}");
        engine.shutdown(Duration::from_secs(10)).await;
        drop((subscription, engine, consumer, inbox));
        // What the schema leaves behind is nothing of the role's.
        let _ = admin.batch_execute(&format!("drop owned by {0}; drop role {0}", quoted(&role))).await;
    }
}
