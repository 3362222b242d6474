//! Units of work that cannot be stored, because a message without stream in them has the id of another one.
//!
//! Invariants
//! - All of a flush are found at once: those of stored messages by one look-up, those of the flush itself by comparing.
//!   However many there are, they cost the transaction that was refused, the look-up, and the one that goes through.
//! - Of two units with one id the first is stored, unless it is refused itself.
//! - The message that the database has named is out in any case: each round gets on.

use std::collections::HashSet;

use uuid::Uuid;

use super::pending::Pending;

/// What is known of a flush's duplicates.
pub(super) struct Duplicates {
    named: Uuid,
    stored: HashSet<Uuid>,
}

/// Messages that have no stream, and so are told apart by their id. Scheduled ones are when they are due.
fn is_told_by_id(pending: &Pending, row: usize) -> bool {
    pending.rows.stream_id(row).is_none() && !pending.rows.is_scheduled(row)
}

/// The ids of a flush that can be duplicates.
pub(super) fn ids_without_stream(taken: &[Pending]) -> Vec<Uuid> {
    let mut ids = Vec::new();
    for pending in taken {
        let rows = (0..pending.rows.len()).filter(|row| is_told_by_id(pending, *row));
        ids.extend(rows.map(|row| pending.rows.message_id[row]));
    }
    ids
}

/// A batch whose units are all refused, each for a message of it.
type Refused = (Pending, Vec<Uuid>);

impl Duplicates {
    /// The one that the database has refused, and those of the flush that it has.
    pub(super) fn new(named: Uuid, stored: Vec<Uuid>) -> Self {
        Self { named, stored: stored.into_iter().collect() }
    }

    /// Parts a flush: units that are refused, with the message of each, and the others in their order.
    pub(super) fn part(&self, taken: Vec<Pending>) -> (Vec<Refused>, Vec<Pending>) {
        let mut seen = HashSet::new();
        let mut refused_for: Vec<Vec<Option<Uuid>>> =
            taken.iter().map(|of| self.refused_units(of, &mut seen)).collect();
        if refused_for.iter().flatten().all(Option::is_none) {
            // Its row is gone again, or is one of a stream that has its id.
            self.refuse_named(&taken, &mut refused_for);
        }
        let (mut refused, mut rest) = (Vec::new(), Vec::with_capacity(taken.len()));
        for (pending, refused_for) in taken.into_iter().zip(refused_for) {
            let (out, others) = pending.split(|unit| refused_for[unit].is_some());
            refused.extend(out.map(|out| (out, refused_for.into_iter().flatten().collect())));
            rest.extend(others);
        }
        (refused, rest)
    }

    /// For each unit the message it is refused for. The ids of the others are seen from then on.
    fn refused_units(&self, pending: &Pending, seen: &mut HashSet<Uuid>) -> Vec<Option<Uuid>> {
        let rows = &pending.rows;
        let mut start = 0;
        let mut refused_for = Vec::with_capacity(rows.unit_end.len());
        for end in &rows.unit_end {
            let of_unit = (start..*end as usize).filter(|row| is_told_by_id(pending, *row));
            let mut ids: Vec<Uuid> = of_unit.map(|row| rows.message_id[row]).collect();
            let mut taken = ids.iter().find(|id| self.stored.contains(id) || seen.contains(id)).copied();
            if taken.is_none() {
                ids.sort_unstable();
                taken = ids.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
            }
            if taken.is_none() {
                seen.extend(ids);
            }
            refused_for.push(taken);
            start = *end as usize;
        }
        refused_for
    }

    fn refuse_named(&self, taken: &[Pending], refused_for: &mut [Vec<Option<Uuid>>]) {
        for (pending, refused_for) in taken.iter().zip(refused_for) {
            let rows = &pending.rows;
            let is_it = |row: &usize| rows.message_id[*row] == self.named && rows.stream_id(*row).is_none();
            if let Some(row) = (0..rows.len()).find(is_it) {
                let unit = rows.unit_end.partition_point(|end| (*end as usize) <= row);
                refused_for[unit] = Some(self.named);
                return;
            }
        }
    }
}
