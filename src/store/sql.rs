//! The SQL of this library, carried in the binary: migrations in their order, functions in the order they are made.
//!
//! Invariants
//! - Migrations are forward only: an applied file is never edited, a new one is added at the end.
//! - A function's file is named as the function and makes that one only. A change that `create or replace` cannot
//!   make (arguments, columns of the answer) is a function beside it: the old signature moves to a file with the number
//!   of the last schema version that calls it, `claim_work_1.sql`, as a wrapper.
//! - Expand, then contract: no version takes away, or answers otherwise, what programs of the version before call, nor
//!   writes what they cannot read. What they call stands in `tests/golden/statements_N.txt`; a later version may drop
//!   it. (0002 dropped signatures of version 1; version 2 has them again.)
//! - Whatever changes in here after a release raises [`SCHEMA_VERSION`]: an older library must not put its own
//!   functions back.
//! - In the files `@schema@` stands for the quoted schema, `$$` quotes bodies, and nothing uses `E''` strings or
//!   a string literal over several lines.

/// One file.
#[derive(Clone, Copy, Debug)]
pub struct SqlFile {
    /// File name without `.sql`.
    pub name: &'static str,
    /// Content.
    pub text: &'static str,
}

/// What this library installs; recorded in `wh_schema_migration`.
pub const SCHEMA_VERSION: i32 = 2;

macro_rules! sql_files {
    ($directory:literal: $($name:literal,)*) => {
        &[$(SqlFile { name: $name, text: include_str!(concat!("../../sql/", $directory, "/", $name, ".sql")) },)*]
    };
}

/// The record of what is applied; made before anything else.
pub const RECORD: SqlFile =
    SqlFile { name: "0000_schema_migration", text: include_str!("../../sql/migrations/0000_schema_migration.sql") };

/// Migrations, in order.
pub const MIGRATIONS: &[SqlFile] = sql_files!["migrations":
    "0001_tables",
    "0002_truncated_flushes",
    "0003_members",
];

/// Functions. Those written in SQL come after what they call; for the others the order is free.
pub const FUNCTIONS: &[SqlFile] = sql_files!["functions":
    "wh_lock_class",
    "wh_channel",
    "wh_stream_key",
    "wh_lane",
    "wh_flush_key",
    "wh_snapshot_union",
    "wh_epoch_token",
    "wh_draw_position",
    "compute_partition",
    "check_installation",
    "store_shard_messages",
    "claim_work",
    "find_flush",
    "find_duplicates",
    "settle",
    "claim_parked",
    "load_shard",
    "wh_free_partitions",
    "register_instance",
    "hold_instance",
    "listen_instance",
    "wait_for_end",
    "announce",
    "renew_lease",
    "members",
    "mark_dead",
    "take_partitions",
    "release_partitions",
    "keep_resolved",
    "deregister_instance",
    "wh_check_messages",
    "wh_prove_last",
    "wh_store_locked",
    "store_outbox_messages",
    "release_scheduled",
    "wh_check_resolved",
    "wh_carry_numbers",
    "wh_note_flushes",
    "wh_truncate_segment",
    "perform_maintenance",
    "rebase",
    "wh_status",
    "claim_work_1",
    "find_flush_1",
    "store_shard_messages_1",
];
