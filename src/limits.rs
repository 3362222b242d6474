//! Hard limits, each with its reason. Config may lower them, nothing raises them.

/// References in one row of `wh_log`: the row stays in one 8 KiB page without TOAST
/// (40 bytes a reference and about 300 for the rest).
pub const LOG_REFERENCES_MAX: usize = 180;

/// Messages in one store call: positions of one call are `first + index`, drawn from a sequence
/// that steps by this number.
pub const STORE_ROWS_MAX: usize = 4096;

/// Bytes of the messages of one store call, beyond which a further message is the next call's: with one more of the largest
/// size its parameters stay far below the server's 1 GiB for one.
pub const STORE_CALL_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Streams locked one by one in one transaction. Beyond it the lock table of the whole server is at
/// risk (53200 at about 9,250 locks with stock settings); partitions are locked instead.
pub const STREAM_LOCKS_MAX: usize = 256;

/// Bytes of a stored error text.
pub const ERROR_TEXT_BYTES_MAX: usize = 8 * 1024;

/// Bytes of a message type name, a destination name, a content type.
pub const NAME_BYTES_MAX: usize = 255;

/// Bytes of one payload (the transport may declare less). Postgres' own limit is 1 GiB a value.
pub const PAYLOAD_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Bytes of one message's metadata.
pub const METADATA_BYTES_MAX: usize = 64 * 1024;

/// Destinations one process may use.
pub const DESTINATIONS_MAX: usize = 4096;

/// Destinations of one message.
pub const DESTINATIONS_OF_MESSAGE_MAX: usize = 64;

/// Transactions that a shard leaves before its cursor for good, because the database takes neither an outcome of theirs
/// nor anything instead. Each costs eight bytes in every cursor, twenty times a second.
pub const SET_ASIDE_TRANSACTIONS_MAX: usize = 1_000;

/// The largest partition count that can be installed.
pub const PARTITIONS_MAX: u32 = 65_536;

/// Shortest and longest lease in milliseconds.
pub const LEASE_TTL_MS: (u64, u64) = (1_000, 600_000);

/// No further handler starts in a transaction of the inbox that is older, in milliseconds: what it has locked is free
/// after so long, and the time of one handler. Long enough for hundreds of short ones.
pub const INBOX_TRANSACTION_MS: u64 = 1_000;

/// How long a flush may wait for the lock of one stream that others queue for without a pause, in milliseconds, at first
/// and where their queue has been longer than that; a twentieth of it where nobody else waits.
pub const STREAM_PATIENCE_MS: (u64, u64) = (250, 2_000);
