//! What a service's role needs in the schema, and no more: it neither owns the tables nor may it change them.
//!
//! The role that migrates owns schema, tables and functions (it needs CREATE on the database, or an empty schema that
//! it owns). The role the engine connects as needs what is listed here; functions are open to everybody who may enter
//! the schema, and run with their caller's rights. A program that only calls `store_outbox_messages` needs, of these,
//! SELECT and INSERT, UPDATE on `wh_stream` (for higher isolation levels), and USAGE on the sequence.
//! Who may SELECT from the event store, the outbox, parked references, dead letters and scheduled messages can read
//! payloads.

use tokio_postgres::Client;

use super::install::store;
use super::schema_name::SchemaName;
use crate::error::Result;

/// Tables and views by name, with the privileges on them.
pub const GRANTS: &[(&str, &[&str])] = &[
    ("wh_schema_migration wh_installation wh_resolved", &["select"]),
    ("wh_event_store wh_outbox wh_log", &["select", "insert"]),
    ("wh_outbox_0 wh_outbox_1 wh_outbox_2", &["select", "truncate"]),
    ("wh_log_0 wh_log_1 wh_log_2", &["select", "insert", "truncate"]),
    ("wh_epoch", &["select", "insert"]),
    ("wh_partition wh_segment", &["select", "update"]),
    ("wh_stream wh_dead_letter", &["select", "insert", "update"]),
    ("wh_cursor", &["select", "insert", "delete"]),
    (
        "wh_instance wh_rotation wh_parked wh_parked_reference wh_scheduled wh_flush_given_up wh_flush_truncated",
        &["select", "insert", "update", "delete"],
    ),
];

/// Sequences, with USAGE.
pub const SEQUENCES: &[&str] = &["wh_position"];

fn each() -> impl Iterator<Item = (&'static str, &'static str)> {
    GRANTS.iter().flat_map(|(names, privileges)| {
        names.split(' ').flat_map(move |name| privileges.iter().map(move |privilege| (name, *privilege)))
    })
}

/// The statements that give them to a role.
#[must_use]
pub fn statements(schema: &SchemaName, role: &str) -> String {
    let role = format!("\"{}\"", role.replace('"', "\"\""));
    let mut text = format!("grant usage on schema {schema} to {role};\n");
    for (names, privileges) in GRANTS {
        let names: Vec<String> = names.split(' ').map(|name| format!("{schema}.{name}")).collect();
        text.push_str(&format!("grant {} on {} to {role};\n", privileges.join(", "), names.join(", ")));
    }
    for sequence in SEQUENCES {
        text.push_str(&format!("grant usage on sequence {schema}.{sequence} to {role};\n"));
    }
    text
}

/// Gives them to a role.
///
/// # Errors
/// [`crate::Error::Store`] if the role is not there or this one may not grant.
pub async fn grant(client: &Client, schema: &SchemaName, role: &str) -> Result<()> {
    client.batch_execute(&statements(schema, role)).await.map_err(store)
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
             where not has_sequence_privilege(format('%s.%s', $1::text, s)::regclass, 'usage')",
            &[&schema.quoted(), &names, &privileges, &SEQUENCES],
        )
        .await
        .map_err(store)?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}
