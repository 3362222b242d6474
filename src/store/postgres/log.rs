//! How a flush's references are cut into rows of `wh_log`.
//!
//! Invariants
//! - References of one stream keep their order, within a row and across rows.
//! - A row holds references of held partitions only, or of others only, at most `LOG_REFERENCES_MAX` of them, and
//!   stays in one page with its names.
//! - There is at least one row, so that the flush can be found again, and one that is not owned if anything is
//!   stored in a partition that is not held: its owner's remembered numbers are void from then on.

use crate::batch::DestinationId;
use crate::limits::LOG_REFERENCES_MAX;
use crate::seam::store::StoreRequest;

/// Bytes of names in one log row: with 180 references of 38 bytes the row stays below 8,160.
const DICTIONARY_BYTES_MAX: usize = 900;

/// One reference of the request.
#[derive(Clone, Copy, Debug)]
pub struct Reference {
    /// Row in the request.
    pub request_row: u32,
    /// 1-based place of the destination in the log row's names.
    pub destination: i16,
}

/// The log rows of a flush.
#[derive(Debug, Default)]
pub struct LogRows {
    /// References, log row by log row.
    pub references: Vec<Reference>,
    /// One past the last reference of each log row.
    pub end: Vec<i32>,
    /// Whether the log row's partitions are held.
    pub owned: Vec<bool>,
    /// Names, log row by log row.
    pub dictionary: Vec<DestinationId>,
    /// One past the last name of each log row.
    pub dictionary_end: Vec<i32>,
}

impl LogRows {
    /// Cuts a request's references.
    pub fn of(request: &StoreRequest<'_>) -> Self {
        let mut this = Self::default();
        let count = request.batches.iter().map(|rows| rows.reference_count()).sum();
        this.references.reserve(count);
        let held_all = request.partitions.iter().all(|partition| request.held.binary_search(partition).is_ok());
        this.append(request, true, |partition| held_all || request.held.binary_search(&partition).is_ok());
        if !held_all {
            this.append(request, false, |partition| request.held.binary_search(&partition).is_err());
            if this.owned.last() != Some(&false) {
                // Messages without a destination, in streams of another owner: it has to learn from the log that the
                // numbers it remembers are old.
                this.close(false);
            }
        }
        if this.end.is_empty() {
            this.close(true);
        }
        this
    }

    /// Whether the references are the rows of the request: one each, in order.
    pub fn is_row_by_row(&self, rows: usize) -> bool {
        self.references.len() == rows
            && self.references.iter().enumerate().all(|(turn, reference)| reference.request_row as usize == turn)
    }

    fn append(&mut self, request: &StoreRequest<'_>, owned: bool, takes: impl Fn(u32) -> bool) {
        let mut row_start = self.references.len();
        let mut names_start = self.dictionary.len();
        let mut names_bytes = 0;
        let mut first_row = 0;
        for rows in request.batches {
            for (row, destination) in rows.reference_row.iter().zip(&rows.reference_destination) {
                let index = *row as usize;
                if rows.is_scheduled(index) || !takes(rows.partition[index]) {
                    continue;
                }
                let known = self.dictionary[names_start..].iter().position(|name| name == destination);
                let bytes = destination.name().len() + 8;
                let full = self.references.len() - row_start == LOG_REFERENCES_MAX
                    || (known.is_none() && names_bytes + bytes > DICTIONARY_BYTES_MAX);
                let mut place = known;
                if full {
                    self.close(owned);
                    row_start = self.references.len();
                    names_start = self.dictionary.len();
                    names_bytes = 0;
                    place = None;
                }
                let place = place.unwrap_or_else(|| {
                    names_bytes += bytes;
                    self.dictionary.push(*destination);
                    self.dictionary.len() - names_start - 1
                });
                self.references.push(Reference { request_row: first_row + row, destination: place as i16 + 1 });
            }
            first_row += rows.len() as u32;
        }
        if self.references.len() > row_start {
            self.close(owned);
        }
    }

    fn close(&mut self, owned: bool) {
        self.end.push(self.references.len() as i32);
        self.dictionary_end.push(self.dictionary.len() as i32);
        self.owned.push(owned);
    }
}
