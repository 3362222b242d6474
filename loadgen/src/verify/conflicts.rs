//! Serialization failures and deadlocks that are made up: for a while a share of all calls of the engines' functions ends
//! in one, whatever connection they come by: shards, lease keeper, inbox, subscriptions.
//!
//! Invariants
//! - A call that is to fail has done nothing before; one that goes through is the function's own, one level below.
//! - The words are none of the server's: `verify` counts real conflicts by those, and none of these.

use corelane::store::postgres::statements;
use corelane::store::schema_name::SchemaName;
use tokio_postgres::Client;

use crate::failure::Result;
use crate::target::quoted;

/// What consumers and members of subscriptions call; what shards and keeper do is told by their statements.
const OF_OTHERS: [&str; 17] = [
    "consumer_number",
    "begin_inbox",
    "claim_inbox",
    "remember_inbox",
    "finish_inbox",
    "keep_inbox",
    "park_inbox",
    "bury_inbox",
    "unpark_inbox",
    "maintain_inbox",
    "join_subscription",
    "share_subscription",
    "read_subscription",
    "checkpoint_subscription",
    "release_subscription",
    "leave_subscription",
    "measure_subscription",
];

/// How many of a thousand calls fail, and what decides that.
const SWITCH: &str = "create table @.loadgen_conflicts (permille int4 not null);
    insert into @.loadgen_conflicts values (0);
    create function @.loadgen_conflict() returns void language plpgsql as $f$
    begin
        if random() * 1000 < (select permille from @.loadgen_conflicts) then
            raise exception 'made up' using errcode = (array['40001', '40P01'])[1 + (random() < 0.2)::int4];
        end if;
    end $f$";
/// Each function under another name, and one before it under its own.
const BEFORE_EACH: &str = "select format('alter function %1$s rename to %2$I;
        create function %3$I.%4$I(%5$s) returns %6$s language sql volatile as %7$L',
        p.oid::regprocedure, p.proname || '_below', n.nspname, p.proname, pg_get_function_arguments(p.oid),
        pg_get_function_result(p.oid), format('select %1$I.loadgen_conflict(); select * from %1$I.%2$I(%3$s)', n.nspname,
            p.proname || '_below', (select string_agg('$' || i, ', ' order by i) from generate_series(1, p.pronargs) i)))
    from pg_proc p join pg_namespace n on n.oid = p.pronamespace
    where n.nspname = $1 and p.proname = any ($2)";

/// Puts something before each function that engines call; it lets everything through.
///
/// # Errors
/// Of the server.
pub async fn prepare(client: &Client, schema: &str) -> Result<()> {
    client.batch_execute(&SWITCH.replace('@', &quoted(schema))).await?;
    let names = called(&SchemaName::new(schema)?);
    for row in client.query(BEFORE_EACH, &[&schema, &names]).await? {
        client.batch_execute(row.get(0)).await?;
    }
    Ok(())
}

/// So many of a thousand calls fail from now on.
///
/// # Errors
/// Of the server.
pub async fn switch(client: &Client, schema: &str, permille: i32) -> Result<()> {
    let sql = format!("update {}.loadgen_conflicts set permille = $1", quoted(schema));
    client.execute(&sql, &[&permille]).await?;
    Ok(())
}

/// The functions' names.
fn called(schema: &SchemaName) -> Vec<String> {
    let before = format!("{}.", schema.quoted());
    let mut names: Vec<String> = OF_OTHERS.map(str::to_owned).to_vec();
    for (text, _) in statements(schema) {
        let named = text.split(&before).skip(1).filter_map(|rest| rest.split_once('('));
        names.extend(named.map(|(name, _)| name.to_owned()));
    }
    names.retain(|name| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'));
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_shards_keeper_inbox_and_subscriptions_are_among_them() {
        let names = called(&SchemaName::new("x").unwrap());
        for name in ["store_shard_messages", "settle", "renew_lease", "remember_inbox", "checkpoint_subscription"] {
            assert!(names.iter().any(|of| of == name), "{name}: {names:?}");
        }
    }
}
