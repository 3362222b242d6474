//! The arena's bounds, and rows that are taken away again.

use super::*;

fn row(id: u128, payload: &[u8]) -> NewRow<'_> {
    NewRow {
        message_id: Uuid::from_u128(id),
        stream_id: Some(Uuid::from_u128(7)),
        partition: 3,
        is_event: true,
        type_name: "test.type",
        content_type: "",
        correlation_id: Uuid::nil(),
        causation_id: Uuid::nil(),
        trace: Trace::default(),
        metadata: b"{}",
        payload,
        due_unix_us: 0,
    }
}

#[test]
fn offsets_of_32_bits_are_never_passed() {
    assert!(has_room(0, u32::MAX as usize) && has_room(u32::MAX as usize, 0));
    assert!(!has_room(u32::MAX as usize, 1) && !has_room(1, u32::MAX as usize) && !has_room(usize::MAX, 1));
}

/// The pages of the arena are never touched: it costs addresses, no memory.
#[test]
fn what_a_full_batch_has_no_room_for_is_refused_by_name_and_changes_nothing() {
    let mut from = Rows::default();
    from.push(&row(1, b"abc"), &[]);
    let mut full = Rows { arena: vec![0; u32::MAX as usize - 5], ..Rows::default() };
    let refused = ArenaFull { message_id: Uuid::from_u128(1), bytes: full.arena.len() + 14 };
    assert_eq!(full.try_push_copy(&from, 0), Err(refused));
    assert_eq!((full.len(), full.arena.len()), (0, u32::MAX as usize - 5));
    let written: Result<usize, ArenaFull> = full.push_written(&row(1, b""), &[], |_| Ok(()));
    assert_eq!(written, Err(ArenaFull { bytes: refused.bytes - 3, ..refused }));
    assert_eq!((full.len(), full.arena.len()), (0, u32::MAX as usize - 5));
    full.arena.clear();
    assert_eq!(full.try_push_copy(&from, 0), Ok(()));
}

#[test]
fn a_row_that_is_taken_away_leaves_nothing() {
    let to = DestinationId::of("rows.pop").unwrap();
    let mut rows = Rows::default();
    rows.push(&row(1, b"first"), &[to]);
    let bytes = rows.bytes_in_memory();
    rows.push(&row(2, b"second"), &[to, to]);
    rows.expect_version(4);
    rows.pop();
    assert_eq!((rows.len(), rows.reference_count(), rows.bytes_in_memory()), (1, 1, bytes));
    assert!(!rows.has_expectations());
    assert_eq!(rows.bytes(rows.payload[0]), b"first");
    rows.push_copy(&copy(&rows), 0);
    rows.pop();
    assert_eq!((rows.len(), rows.bytes_in_memory()), (1, bytes));
    rows.pop();
    rows.pop();
    assert!(rows.is_empty() && rows.arena.is_empty() && rows.reference_row.is_empty());
}

fn copy(rows: &Rows) -> Rows {
    let mut copy = Rows::default();
    (0..rows.len()).for_each(|row| copy.push_copy(rows, row));
    copy
}
