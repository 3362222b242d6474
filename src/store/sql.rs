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
    "0004_dead_letters",
    "0005_workers",
    "0007_replay",
    "0009_inbox",
    "0010_subscriptions",
    "0011_inbox_misdated",
    "0013_reading",
    "0014_retention",
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
    "queue_for_streams",
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
    "test_listener",
    "wait_for_end",
    "announce",
    "renew_lease",
    "members",
    "wh_require",
    "wh_enter_service",
    "mark_dead",
    "take_partitions",
    "release_partitions",
    "withdraw_instance",
    "keep_resolved",
    "deregister_instance",
    "wh_check_messages",
    "wh_prove_last",
    "wh_store_locked",
    "store_outbox_messages",
    "expect_versions",
    "append_events",
    "read_stream",
    "release_scheduled",
    "wh_check_resolved",
    "wh_carry_numbers",
    "wh_note_flushes",
    "wh_truncate_segment",
    "perform_maintenance",
    "rebase",
    "wh_match_dead_letters",
    "list_dead_letters",
    "show_dead_letter",
    "count_dead_letters",
    "wh_lock_owners",
    "wh_tell_lanes",
    "wh_take_dead_letters",
    "retry_dead_letters",
    "wh_match_events",
    "replay_events",
    "release_lanes",
    "discard_dead_letters",
    "truncate_stream",
    "erase_events",
    "wh_sentinel",
    "inspect",
    "wh_snapshot_of",
    "wh_cut_error",
    "wh_begin_work",
    "wh_settle_work",
    "wh_match_in_hand",
    "wh_complete_work",
    "wh_fail_work",
    "wh_share_partitions",
    "wh_read_undecided",
    "wh_hand_out",
    "wh_work_in_hand",
    "process_work_batch",
    "heartbeat",
    "claim_outbox_messages",
    "complete_outbox_messages",
    "fail_outbox_messages",
    "move_to_dead_letters",
    "renew_outbox_messages",
    "maintain_work",
    "inspect_work",
    "end_work",
    "wh_inbox_day",
    "wh_inbox_place",
    "wh_inbox_key",
    "wh_make_inbox_days",
    "consumer_number",
    "begin_inbox",
    "remember_inbox",
    "finish_inbox",
    "lock_inbox",
    "keep_inbox",
    "park_inbox",
    "unpark_inbox",
    "bury_inbox",
    "claim_inbox",
    "maintain_inbox",
    "wh_decide_inbox",
    "wh_receive_inbox",
    "wh_lease_inbox",
    "process_inbox_batch",
    "inbox_statistics",
    "wh_match_inbox_dead_letters",
    "wh_take_inbox_dead_letters",
    "list_inbox_dead_letters",
    "show_inbox_dead_letter",
    "retry_inbox_dead_letters",
    "discard_inbox_dead_letters",
    "wh_subscription_channel",
    "wh_read_edge",
    "join_subscription",
    "share_subscription",
    "wh_find_events",
    "read_subscription",
    "summarize_events",
    "summarize_events_from",
    "checkpoint_subscription",
    "release_subscription",
    "leave_subscription",
    "remove_subscription",
    "measure_subscription",
    "wh_status",
    "wh_prove_place",
    "begin_feed",
    "wh_open_place",
    "read_feed",
    "wh_json",
    "claim_work_1",
    "find_flush_1",
    "store_shard_messages_1",
];
