//! What instances cost the database that have nothing to do.

use std::time::Duration;

use corelane::{Config, Engine};

use crate::cut_proxy::CutProxy;
use crate::engine::Sink;
use crate::support::{eventually, own_cluster, schema_on};

const PATIENCE: Duration = Duration::from_secs(120);
/// The keeper renews each quarter of a lease of 10 s.
const RENEWALS_A_SECOND: f64 = 0.4;
/// Renewals until it is called idle, and while it is watched: 10 s and 30 s.
const SETTLES: i64 = 4;
const WATCHED: i64 = 12;

/// By the renewals of its lease, not by a clock: on a slow machine both come later.
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_instance_sends_at_most_a_statement_a_second() {
    let cluster = own_cluster();
    let schema = schema_on(cluster.url("postgres"));
    let (sink, mut instances) = (Sink::default(), Vec::new());
    for name in ["a", "b"] {
        let proxy = CutProxy::before(&cluster);
        // All else as it comes, but for the number of shards, which is the machine's.
        let mut config = Config::default();
        for (key, value) in [
            ("database.url", proxy.url().as_str()),
            ("database.schema", schema.name.as_str()),
            ("service.instance", name),
            ("shards.count", "1"),
        ] {
            config.set(key, value).unwrap();
        }
        let engine = Engine::builder(config).transport(sink.transport()).migrate(true).start().await.unwrap();
        instances.push((name, proxy, engine));
    }
    eventually("they share", PATIENCE, async || instances.iter().all(|(_, _, engine)| engine.partitions_held() == 32))
        .await;
    let client = schema.client().await;
    let renewals = async |name: &str| -> i64 {
        let sql = "select counter from wh_instance where instance_name = $1 and state = 0";
        client.query_one(sql, &[&name]).await.unwrap().get(0)
    };
    let watches = instances.iter().map(|(name, proxy, _)| {
        let renewals = &renewals;
        async move {
            let began = renewals(name).await;
            eventually("it is idle", PATIENCE, async || renewals(name).await >= began + SETTLES).await;
            let (from, before) = (renewals(name).await, proxy.statements());
            eventually("it was watched", PATIENCE, async || renewals(name).await >= from + WATCHED).await;
            let (sent, seconds) =
                (proxy.statements() - before, (renewals(name).await - from) as f64 / RENEWALS_A_SECOND);
            println!("{name}: {sent} statements in what should be {seconds} s");
            assert!(sent as f64 <= seconds, "{name}: {sent} statements in what should be {seconds} s");
            assert!(sent >= WATCHED as u64, "{name}: they go through the proxy");
        }
    });
    futures_util::future::join_all(watches).await;
    for (_, _, engine) in instances {
        engine.shutdown(Duration::from_secs(10)).await;
    }
}
