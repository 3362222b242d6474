//! What a service's role needs in the schema, and no more: it neither owns the tables nor may it change them.
//!
//! The role that migrates owns schema, tables and functions (it needs CREATE on the database, or an empty schema that
//! it owns). The role the engine connects as needs what is listed here; functions are open to everybody who may enter
//! the schema, and run with their caller's rights, but for [`FUNCTIONS`]: those make and drop the days of the inbox's
//! memory, or bring the event store's indexes up to date, which only the tables' owner can, and run with the owner's rights. A program that only calls `store_outbox_messages` needs, of these,
//! SELECT and INSERT, UPDATE on `wh_stream` (for higher isolation levels), and USAGE on the sequence.
//! Who may SELECT from the event store, outbox, inbox, parked references, dead letters and scheduled messages can read
//! payloads.

use tokio_postgres::Client;

use super::answer::column;
use super::install::store;
use super::schema_name::SchemaName;
use crate::error::Result;

/// Tables and views by name, with the privileges on them.
pub const GRANTS: &[(&str, &[&str])] = &[
    ("wh_schema_migration wh_installation wh_resolved wh_message_status wh_event_json", &["select"]),
    ("wh_event_store wh_outbox wh_log", &["select", "insert"]),
    ("wh_outbox_0 wh_outbox_1 wh_outbox_2", &["select", "truncate"]),
    ("wh_log_0 wh_log_1 wh_log_2", &["select", "insert", "truncate"]),
    ("wh_epoch", &["select", "insert"]),
    ("wh_partition wh_segment wh_inspection", &["select", "update"]),
    ("wh_stream", &["select", "insert", "update"]),
    ("wh_cursor", &["select", "insert", "delete"]),
    ("wh_consumer wh_inbox_seen", &["select", "insert"]),
    ("wh_inbox_seen_other", &["insert"]),
    ("wh_inbox_part wh_tombstone", &["select"]),
    (
        "wh_instance wh_rotation wh_parked wh_parked_reference wh_dead_letter wh_scheduled wh_flush_given_up \
         wh_flush_truncated wh_handed_out wh_worker_watch wh_replay wh_inbox wh_inbox_parked wh_inbox_dead_letter \
         wh_subscription wh_subscription_member wh_subscription_partition",
        &["select", "insert", "update", "delete"],
    ),
];

/// Sequences, with USAGE.
pub const SEQUENCES: &[&str] = &["wh_position"];

/// Functions that run as the owner, with EXECUTE. Those of [`OPERATOR_FUNCTIONS`] are not among them: a service never
/// deletes or overwrites events.
pub const FUNCTIONS: &[&str] = &[
    "wh_make_inbox_days(int4)",
    "maintain_inbox(interval, int4)",
    "summarize_events()",
    "summarize_events_from(int8)",
];

/// Functions that delete or overwrite events, as the owner: an operator's role gets EXECUTE on them and nothing else.
pub const OPERATOR_FUNCTIONS: &[&str] =
    &["truncate_stream(uuid, int8, text, int4, bool)", "erase_events(uuid[], int8[], int4, bool)"];

fn each() -> impl Iterator<Item = (&'static str, &'static str)> {
    GRANTS.iter().flat_map(|(names, privileges)| {
        names.split(' ').flat_map(move |name| privileges.iter().map(move |privilege| (name, *privilege)))
    })
}

/// The statements that give them to a role.
#[must_use]
pub fn statements(schema: &SchemaName, role: &str) -> String {
    let role = quoted(role);
    let mut text = format!("grant usage on schema {schema} to {role};\n");
    for (names, privileges) in GRANTS {
        let names: Vec<String> = names.split(' ').map(|name| format!("{schema}.{name}")).collect();
        text.push_str(&format!("grant {} on {} to {role};\n", privileges.join(", "), names.join(", ")));
    }
    for sequence in SEQUENCES {
        text.push_str(&format!("grant usage on sequence {schema}.{sequence} to {role};\n"));
    }
    text.push_str(&execute(schema, FUNCTIONS, &role));
    text
}

/// The statements that let a role truncate streams and erase events, and no more: what it is to read needs grants of its
/// own.
#[must_use]
pub fn operator_statements(schema: &SchemaName, role: &str) -> String {
    let role = quoted(role);
    format!("grant usage on schema {schema} to {role};\n{}", execute(schema, OPERATOR_FUNCTIONS, &role))
}

fn quoted(role: &str) -> String {
    format!("\"{}\"", role.replace('"', "\"\""))
}

fn execute(schema: &SchemaName, functions: &[&str], role: &str) -> String {
    functions.iter().map(|function| format!("grant execute on function {schema}.{function} to {role};\n")).collect()
}

/// Gives them to a role.
///
/// # Errors
/// [`crate::Error::Store`] if the role is not there or this one may not grant.
pub async fn grant(client: &Client, schema: &SchemaName, role: &str) -> Result<()> {
    client.batch_execute(&statements(schema, role)).await.map_err(store)
}

/// Gives a role what an operator needs who truncates streams and erases events.
///
/// # Errors
/// [`crate::Error::Store`] if the role is not there or this one may not grant.
pub async fn grant_operator(client: &Client, schema: &SchemaName, role: &str) -> Result<()> {
    client.batch_execute(&operator_statements(schema, role)).await.map_err(store)
}

/// Those that the connection's own role lacks, in words.
///
/// # Errors
/// [`crate::Error::Store`] if the database refuses.
pub async fn missing(client: &Client, schema: &SchemaName) -> Result<Vec<String>> {
    let (names, privileges): (Vec<&str>, Vec<&str>) = each().unzip();
    let rows = client
        .query(
            "select upper(g.privilege) || ' on ' || g.name from unnest($2::text[], $3::text[]) g(name, privilege) \
             where not has_table_privilege(format('%s.%s', $1::text, g.name)::regclass, g.privilege) \
             union all select 'USAGE on ' || s from unnest($4::text[]) s \
             where not has_sequence_privilege(format('%s.%s', $1::text, s)::regclass, 'usage') \
             union all select 'EXECUTE on ' || f from unnest($5::text[]) f \
             where not has_function_privilege(format('%s.%s', $1::text, f)::regprocedure, 'execute')",
            &[&schema.quoted(), &names, &privileges, &SEQUENCES, &FUNCTIONS],
        )
        .await
        .map_err(store)?;
    rows.iter().map(|row| column(row, 0)).collect()
}
