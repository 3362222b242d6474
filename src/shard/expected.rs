//! Versions that callers expect of their streams: which units of a flush may go, and what became of those that may not.
//!
//! Invariants
//! - Nobody is refused by memory alone. A version that is remembered may be old: the store compares wherever it looks
//!   numbers up, and remembered ones are right where it does not (a flush that relied on a wrong one fails whole).
//! - Who expects less than the flush's own units lead to is refused after that flush is stored, with the version it led
//!   to. Who expects more goes into a flush of its own turn, for which the stream is looked up.
//! - A unit that is set aside holds up those behind it on its streams, unless it can only be refused.
//! - A conflict ends its own unit; everything else of the flush goes into the next.
//!
//! Cost: nothing for a flush without expectations; one look a row for one that has any.

use std::collections::HashSet;

use hashbrown::HashMap;
use uuid::Uuid;

use super::numbering::FlushColumns;
use super::pending::Pending;
use super::state::State;
use crate::batch::Rows;
use crate::error::Error;
use crate::seam::store::Stored;

/// A stream of the flush.
#[derive(Clone, Copy)]
struct Seen {
    /// Its version before the flush: remembered, or what the first unit on it expects.
    base: i64,
    /// Events of the flush so far.
    events: i64,
    /// Nothing is known of it, and its first unit expects nothing.
    is_open: bool,
    /// The unit that came first, counted over the flush.
    first_unit: usize,
}

/// Why a unit is not in the flush.
#[derive(Clone, Copy)]
enum Doubt {
    /// It expects less than what is before it in the flush leads to.
    Lower { stream: Uuid, expected: i64 },
    /// It expects more than is remembered: look first.
    Higher { stream: Uuid },
    /// What is before it has to be stored first.
    Behind,
    /// Its own events contradict each other.
    Never { stream: Uuid, expected: i64, found: i64 },
}

/// A batch of which no unit is in the flush.
pub(super) struct Aside {
    pending: Pending,
    doubts: Vec<Doubt>,
}

impl Aside {
    /// The batch, where nothing was sent.
    pub(super) fn give_back(self) -> Pending {
        self.pending
    }
}

/// The expectations of the flush that is being made up.
#[derive(Default)]
pub(super) struct Expectations {
    streams: HashMap<Uuid, Seen>,
    behind: HashSet<Uuid>,
    units: usize,
}

impl Expectations {
    /// The version that a stream is taken to have, of which nothing is remembered.
    pub(super) fn base(&self, stream: Uuid) -> i64 {
        self.streams.get(&stream).map_or(0, |seen| seen.base)
    }

    /// Takes out what cannot go into this flush.
    pub(super) fn part(&mut self, state: &mut State, taken: &mut Vec<Pending>) -> Vec<Aside> {
        self.streams.clear();
        if !taken.iter().any(|pending| pending.rows.has_expectations()) {
            return Vec::new();
        }
        self.behind.clear();
        self.units = 0;
        let mut aside = Vec::new();
        for pending in std::mem::take(taken) {
            let doubts = self.doubts(state, &pending.rows);
            let (out, now) = pending.split(|unit| doubts[unit].is_some());
            aside.extend(out.map(|pending| Aside { pending, doubts: doubts.into_iter().flatten().collect() }));
            taken.extend(now);
        }
        aside
    }

    fn doubts(&mut self, state: &mut State, rows: &Rows) -> Vec<Option<Doubt>> {
        let mut start = 0;
        let mut doubts = Vec::with_capacity(rows.unit_end.len());
        for end in &rows.unit_end {
            let unit = start..*end as usize;
            let doubt = if rows.lane_id[unit.clone()].iter().any(|lane| self.behind.contains(lane)) {
                Some(Doubt::Behind)
            } else {
                self.doubt(state, rows, unit.clone())
            };
            if matches!(doubt, Some(Doubt::Higher { .. } | Doubt::Behind)) {
                self.behind.extend(rows.lane_id[unit].iter().copied());
            }
            doubts.push(doubt);
            self.units += 1;
            start = *end as usize;
        }
        doubts
    }

    /// Adds a unit, unless there is a doubt.
    fn doubt(&mut self, state: &mut State, rows: &Rows, unit: std::ops::Range<usize>) -> Option<Doubt> {
        for row in unit.clone().filter(|row| rows.is_event(*row)) {
            let stream = rows.lane_id[row];
            let seen = *self.streams.entry(stream).or_insert_with(|| {
                let entry = *state.numbers.entry(stream);
                let known = state.numbers.is_known(&entry) && state.holds(rows.partition[row]);
                let expected = first_expectation(rows, row..unit.end, stream);
                Seen {
                    base: if known { entry.last_version } else { expected.unwrap_or(0) },
                    events: 0,
                    is_open: !known && expected.is_none(),
                    first_unit: self.units,
                }
            });
            let leads_to = seen.base + seen.events;
            let doubt = match rows.expected(row) {
                _ if seen.base < 0 => {
                    let expected = rows.expected(first_expecting(rows, row..unit.end, stream)).unwrap_or(0);
                    Some(Doubt::Never { stream, expected, found: expected - seen.base })
                }
                None => None,
                Some(_) if seen.is_open => Some(Doubt::Behind),
                Some(expected) if expected == leads_to => None,
                Some(expected) if seen.first_unit == self.units && !self.is_remembered(state, rows, row) => {
                    Some(Doubt::Never { stream, expected, found: leads_to })
                }
                Some(expected) if expected < leads_to => Some(Doubt::Lower { stream, expected }),
                Some(_) => Some(Doubt::Higher { stream }),
            };
            if doubt.is_some() {
                self.take_back(rows, unit.start..row);
                self.streams.retain(|_, seen| seen.events > 0 || seen.first_unit != self.units);
                return doubt;
            }
            if let Some(seen) = self.streams.get_mut(&stream) {
                seen.events += 1;
            }
        }
        None
    }

    fn is_remembered(&self, state: &mut State, rows: &Rows, row: usize) -> bool {
        let entry = *state.numbers.entry(rows.lane_id[row]);
        state.numbers.is_known(&entry) && state.holds(rows.partition[row])
    }

    fn take_back(&mut self, rows: &Rows, done: std::ops::Range<usize>) {
        for row in done.filter(|row| rows.is_event(*row)) {
            if let Some(seen) = self.streams.get_mut(&rows.lane_id[row]) {
                seen.events -= 1;
            }
        }
    }
}

/// The first row from here on that expects a version of the stream.
fn first_expecting(rows: &Rows, of: std::ops::Range<usize>, stream: Uuid) -> usize {
    let mut wanted = of.clone().filter(|row| rows.lane_id[*row] == stream && rows.expected(*row).is_some());
    wanted.next().unwrap_or(of.start)
}

/// The version before the first of these rows that the unit expects of the stream, by the first row that says so.
fn first_expectation(rows: &Rows, of: std::ops::Range<usize>, stream: Uuid) -> Option<i64> {
    let row = first_expecting(rows, of.clone(), stream);
    let before = (of.start..row).filter(|row| rows.lane_id[*row] == stream && rows.is_event(*row)).count();
    Some(rows.expected(row)? - before as i64)
}

/// A stream, the version expected, and the one found.
type Conflict = (Uuid, i64, i64);

/// What became of units that were set aside.
pub(super) struct Judged {
    /// To be answered: a batch, and the error of each of its units.
    pub refused: Vec<(Pending, Vec<Conflict>)>,
    /// To be tried again, in their order.
    pub again: Vec<Pending>,
}

/// Judges what was set aside, after the flush: `stored` is its answer if it was stored and its numbers are remembered.
/// Streams of which it is not known enough are forgotten: the next flush looks them up.
pub(super) fn judge(state: &mut State, columns: &FlushColumns, asides: Vec<Aside>, stored: Option<&Stored>) -> Judged {
    let mut judged = Judged { refused: Vec::new(), again: Vec::new() };
    for Aside { pending, doubts } in asides {
        let verdicts: Vec<Option<Conflict>> = doubts
            .iter()
            .map(|doubt| match *doubt {
                Doubt::Never { stream, expected, found } => Some((stream, expected, found)),
                Doubt::Lower { stream, expected } => {
                    let found = stored.and_then(|stored| version_after(state, columns, stored, stream));
                    let verdict = found.filter(|found| *found > expected).map(|found| (stream, expected, found));
                    if verdict.is_none() {
                        state.numbers.forget(stream);
                    }
                    verdict
                }
                Doubt::Higher { stream } => {
                    state.numbers.forget(stream);
                    None
                }
                Doubt::Behind => None,
            })
            .collect();
        let (out, again) = pending.split(|unit| verdicts[unit].is_some());
        judged.refused.extend(out.map(|out| (out, verdicts.into_iter().flatten().collect())));
        judged.again.extend(again);
    }
    judged
}

/// A stream's version after a stored flush, as far as that flush has proved it.
fn version_after(state: &mut State, columns: &FlushColumns, stored: &Stored, stream: Uuid) -> Option<i64> {
    if let Some(version) = columns.version_after(stream, stored.looked_up.as_deref()) {
        return Some(version);
    }
    let entry = *state.numbers.entry(stream);
    let is_proved = stored.looked_up.is_none() && stored.owned && state.numbers.is_known(&entry);
    is_proved.then_some(entry.last_version)
}

/// Parts a flush that was refused for these versions: units that are refused, and the others in their order.
pub(super) fn refuse(taken: Vec<Pending>, found: &[(Uuid, i64)]) -> Judged {
    let mut judged = Judged { refused: Vec::new(), again: Vec::new() };
    let mut open: HashMap<Uuid, i64> = found.iter().copied().collect();
    for pending in taken {
        let rows = &pending.rows;
        let mut start = 0;
        let mut verdicts = Vec::with_capacity(rows.unit_end.len());
        for end in &rows.unit_end {
            let unit = start..*end as usize;
            start = *end as usize;
            let mut verdict = None;
            for row in unit.clone().filter(|row| rows.is_event(*row)) {
                // The first unit on the stream is the one that it was taken to be at another version for.
                let stream = rows.lane_id[row];
                let Some(found) = open.remove(&stream) else { continue };
                let wanted = first_expectation(rows, row..unit.end, stream).filter(|wanted| *wanted != found);
                verdict = verdict.or(wanted.map(|wanted| {
                    let expected = rows.expected(first_expecting(rows, row..unit.end, stream)).unwrap_or(wanted);
                    (stream, expected, found + expected - wanted)
                }));
            }
            verdicts.push(verdict);
        }
        let (out, again) = pending.split(|unit| verdicts[unit].is_some());
        judged.refused.extend(out.map(|out| (out, verdicts.into_iter().flatten().collect())));
        judged.again.extend(again);
    }
    judged
}

/// The error of a unit.
pub(super) fn error((stream_id, expected, found): Conflict) -> Error {
    Error::VersionConflict { stream_id, expected, found }
}
