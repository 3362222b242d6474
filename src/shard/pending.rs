//! Batches that wait for their flush, and how they are taken apart when they must be.
//!
//! Invariants
//! - A unit of work stays whole; units of one stream stay in the order in which they came.
//! - Every row is answered exactly once. A batch that was taken apart is answered when its last part is.

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;

use uuid::Uuid;

use super::numbering::unique;
use super::state::State;
use super::{Submission, SubmissionReply};
use crate::batch::Rows;
use crate::error::Error;
use crate::time::Tick;

/// A batch that waits for its flush.
pub(super) struct Pending {
    pub rows: Arc<Rows>,
    pub arrived: Tick,
    reply: Reply,
}

enum Reply {
    Whole(futures_channel::oneshot::Sender<SubmissionReply>),
    /// A part of a batch that had to be taken apart: the original row and unit of each of its own.
    Part {
        shared: Rc<RefCell<SharedReply>>,
        row_of: Vec<u32>,
        unit_of: Vec<u32>,
    },
}

struct SharedReply {
    rows: Arc<Rows>,
    refused: Vec<(u32, Error)>,
    parts_left: u32,
    sender: Option<futures_channel::oneshot::Sender<SubmissionReply>>,
}

impl Pending {
    pub(super) fn new(submission: Submission, arrived: Tick) -> Self {
        Self { rows: submission.rows, arrived, reply: Reply::Whole(submission.reply) }
    }

    pub(super) fn unit_count(&self) -> usize {
        self.rows.unit_end.len()
    }

    /// Answers the caller: stored, or refused for this reason. Answers how many rows are off the shard's hands.
    pub(super) fn answer(self, refused: Option<&dyn Fn() -> Error>) -> usize {
        match refused {
            Some(error) => self.answer_by_unit(Some(&|_| error())),
            None => self.answer_by_unit(None),
        }
    }

    /// The same with a reason for each unit, by its index.
    pub(super) fn answer_by_unit(self, refused: Option<&dyn Fn(usize) -> Error>) -> usize {
        let count = self.rows.len();
        match self.reply {
            Reply::Whole(sender) => {
                let units = 0..self.rows.unit_end.len();
                let refused =
                    refused.map_or_else(Vec::new, |error| units.map(|unit| (unit as u32, error(unit))).collect());
                // A caller that has gone away does not mind.
                let _ = sender.send(SubmissionReply { rows: self.rows, refused });
            }
            Reply::Part { shared, row_of, unit_of } => {
                let mut shared = shared.borrow_mut();
                match refused {
                    Some(error) => {
                        shared.refused.extend(unit_of.iter().enumerate().map(|(unit, of)| (*of, error(unit))));
                    }
                    None => {
                        let original = unique(&mut shared.rows);
                        for (row, of) in row_of.iter().enumerate() {
                            original.stream_seq[*of as usize] = self.rows.stream_seq[row];
                            original.version[*of as usize] = self.rows.version[row];
                        }
                    }
                }
                shared.parts_left -= 1;
                if shared.parts_left == 0
                    && let Some(sender) = shared.sender.take()
                {
                    shared.refused.sort_by_key(|(unit, _)| *unit);
                    let refused = std::mem::take(&mut shared.refused);
                    let _ = sender.send(SubmissionReply { rows: std::mem::take(&mut shared.rows), refused });
                }
            }
        }
        count
    }

    /// Takes the batch apart by units: those for which `first` holds, and the others. Rare: a lock held
    /// elsewhere, a refused row, a batch larger than a flush.
    pub(super) fn split(self, mut first: impl FnMut(usize) -> bool) -> (Option<Self>, Option<Self>) {
        let chosen: Vec<bool> = (0..self.unit_count()).map(&mut first).collect();
        if chosen.iter().all(|first| *first) {
            return (Some(self), None);
        }
        if !chosen.iter().any(|first| *first) {
            return (None, Some(self));
        }
        let arrived = self.arrived;
        let rows = self.rows;
        let (shared, row_of, unit_of) = match self.reply {
            Reply::Whole(sender) => {
                let row_of = (0..rows.len() as u32).collect();
                let unit_of = (0..rows.unit_end.len() as u32).collect();
                let shared =
                    SharedReply { rows: rows.clone(), refused: Vec::new(), parts_left: 1, sender: Some(sender) };
                (Rc::new(RefCell::new(shared)), row_of, unit_of)
            }
            Reply::Part { shared, row_of, unit_of } => (shared, row_of, unit_of),
        };
        shared.borrow_mut().parts_left += 1;
        let half = |wanted: bool| {
            let mut part = Rows::default();
            let (mut part_row_of, mut part_unit_of) = (Vec::<u32>::new(), Vec::<u32>::new());
            let mut start = 0;
            for (unit, end) in rows.unit_end.iter().enumerate() {
                if chosen[unit] == wanted {
                    let of_unit = start..*end as usize;
                    of_unit.clone().for_each(|row| part.push_copy(&rows, row));
                    part_row_of.extend_from_slice(&row_of[of_unit]);
                    part.end_unit();
                    part_unit_of.push(unit_of[unit]);
                }
                start = *end as usize;
            }
            let reply = Reply::Part { shared: shared.clone(), row_of: part_row_of, unit_of: part_unit_of };
            Some(Self { rows: Arc::new(part), arrived, reply })
        };
        let halves = (half(true), half(false));
        drop(rows);
        halves
    }
}

impl State {
    /// Takes from the queue what one flush may hold: whole units, within rows, bytes and `units_max`. Units that no
    /// flush can hold are refused; answers also how many rows were.
    pub(super) fn collect(&mut self, units_max: usize) -> (Vec<Pending>, usize) {
        let rows_max = self.settings.flush_rows_max.min(crate::limits::STORE_ROWS_MAX);
        let mut taken: Vec<Pending> = Vec::with_capacity(self.pending.len().min(64));
        let (mut rows, mut bytes, mut units, mut refused) = (0, 0, 0, 0);
        let mut held_streams: Option<HashSet<Uuid>> = (!self.held_back.is_empty())
            .then(|| self.held_back.iter().flat_map(|pending| pending.rows.lane_id.iter().copied()).collect());
        while let Some(next) = self.pending.pop_front() {
            let size = next.rows.len();
            let next_bytes = next.rows.arena.len();
            self.pending_rows -= size;
            self.pending_bytes -= next_bytes;
            let next = match &mut held_streams {
                None => next,
                Some(held) => {
                    let (free, behind) = split_by_streams(next, held);
                    if let Some(behind) = behind {
                        self.held_back.push_back(behind);
                    }
                    let Some(free) = free else { continue };
                    free
                }
            };
            let room = rows_max - rows;
            let fits = next.rows.len() <= room && units + next.unit_count() <= units_max;
            if fits && (taken.is_empty() || bytes + next_bytes <= self.settings.flush_bytes_max) {
                rows += next.rows.len();
                bytes += next_bytes;
                units += next.unit_count();
                taken.push(next);
                continue;
            }
            if !taken.is_empty() {
                self.put_first(next);
                break;
            }
            // One batch larger than a flush: as many of its units as fit.
            let ends = next.rows.unit_end.clone();
            let (now, later) = next.split(|unit| unit < units_max && ends[unit] as usize <= room);
            if let Some(later) = later {
                match &now {
                    Some(_) => self.put_first(later),
                    None => {
                        // A unit that no flush can hold: `engine` sends such units another way.
                        let (whole, rest) = later.split(|unit| unit == 0);
                        if let Some(rest) = rest {
                            self.put_first(rest);
                        }
                        if let Some(whole) = whole {
                            let (message_id, size) = (whole.rows.message_id[0], whole.rows.len());
                            refused += whole.answer(Some(&|| Error::MessageLimit {
                                message_id,
                                what: "number of messages in its unit of work",
                                value: size.to_string(),
                                allowed: format!("1..={rows_max}"),
                            }));
                        }
                        continue;
                    }
                }
            }
            taken.extend(now);
            break;
        }
        (taken, refused)
    }

    pub(super) fn put_last(&mut self, pending: Pending) {
        self.pending_rows += pending.rows.len();
        self.pending_bytes += pending.rows.arena.len();
        self.pending.push_back(pending);
    }

    pub(super) fn put_first(&mut self, pending: Pending) {
        self.pending_rows += pending.rows.len();
        self.pending_bytes += pending.rows.arena.len();
        self.pending.push_front(pending);
    }

    /// Puts what was held back first again, in its order.
    pub(super) fn recall_held_back(&mut self) {
        while let Some(pending) = self.held_back.pop_back() {
            self.put_first(pending);
        }
    }
}

/// Units without any of the streams, and the others, whose streams join the set: order by stream stays.
pub(super) fn split_by_streams(pending: Pending, held: &mut HashSet<Uuid>) -> (Option<Pending>, Option<Pending>) {
    let rows = pending.rows.clone();
    let mut start = 0;
    let ends = rows.unit_end.clone();
    let mut free = Vec::with_capacity(ends.len());
    for end in &ends {
        let lanes = &rows.lane_id[start..*end as usize];
        let is_held = lanes.iter().any(|lane| held.contains(lane));
        if is_held {
            held.extend(lanes.iter().copied());
        }
        free.push(!is_held);
        start = *end as usize;
    }
    drop(rows);
    pending.split(|unit| free[unit])
}
