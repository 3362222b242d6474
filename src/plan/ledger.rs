//! Which transactions are resolved: the arithmetic of the cursor.
//!
//! Invariants
//! - A transaction is *open* while a reference of it on this shard's partitions is neither acknowledged,
//!   copied beside the log, nor in the dead letters, or while its flush has no answer yet.
//! - The cursor is everything the reader has read whole, less the open ones: a claim's raw snapshot is
//!   never a cursor (what is in flight would be lost with the process).
//!
//! Cost: one hash look-up a log row and a flush, an array access a reference.

use hashbrown::HashMap;

use super::mutants::{self, Mutant};
use super::snapshot::Snapshot;

/// Index of an open transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransactionIndex(u32);

impl TransactionIndex {
    /// For slots that belong to no transaction of the log (copies beside it).
    pub const NONE: Self = Self(u32::MAX);
}

#[derive(Clone, Copy, Debug, Default)]
struct Open {
    xid: u64,
    count: u32,
}

/// The open transactions of one shard.
#[derive(Debug, Default)]
pub struct Ledger {
    index_of: HashMap<u64, u32>,
    open: Vec<Open>,
    free: Vec<u32>,
}

impl Ledger {
    /// Room for so many open transactions.
    #[must_use]
    pub fn with_capacity(transactions: usize) -> Self {
        Self {
            index_of: HashMap::with_capacity(transactions),
            open: Vec::with_capacity(transactions),
            free: Vec::with_capacity(transactions),
        }
    }

    /// Adds `count` unresolved references to a transaction.
    pub fn open(&mut self, xid: u64, count: u32) -> TransactionIndex {
        let index = match self.index_of.get(&xid) {
            Some(index) => *index,
            None => {
                let fresh = Open { xid, count: 0 };
                let index = match self.free.pop() {
                    Some(index) => {
                        self.open[index as usize] = fresh;
                        index
                    }
                    None => {
                        self.open.push(fresh);
                        (self.open.len() - 1) as u32
                    }
                };
                self.index_of.insert(xid, index);
                index
            }
        };
        self.open[index as usize].count += count;
        TransactionIndex(index)
    }

    /// One reference less.
    ///
    /// # Panics
    /// If the transaction has none left: only a bug can resolve a reference twice.
    pub fn resolve(&mut self, index: TransactionIndex) {
        if index == TransactionIndex::NONE {
            return;
        }
        let open = &mut self.open[index.0 as usize];
        assert!(open.count > 0, "reference of transaction {} resolved twice", open.xid);
        open.count -= 1;
        if open.count == 0 {
            self.index_of.remove(&open.xid);
            self.free.push(index.0);
        }
    }

    /// Whether the transaction is open.
    #[must_use]
    pub fn is_open(&self, xid: u64) -> bool {
        self.index_of.contains_key(&xid)
    }

    /// The open transactions, and how many references of each are unresolved.
    pub fn open_transactions(&self) -> impl Iterator<Item = (u64, u32)> {
        self.index_of.values().map(|index| self.open[*index as usize]).map(|open| (open.xid, open.count))
    }

    /// The id of an open transaction; `None` for [`TransactionIndex::NONE`].
    #[must_use]
    pub fn xid(&self, index: TransactionIndex) -> Option<u64> {
        self.open.get(index.0 as usize).map(|open| open.xid)
    }

    /// Number of open transactions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.index_of.len()
    }

    /// Whether none is open.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.index_of.is_empty()
    }

    /// What may be persisted as the cursor, given what the reader has read whole.
    #[must_use]
    pub fn cursor(&self, read: &Snapshot) -> Snapshot {
        if mutants::active(Mutant::RawSnapshotPersisted) {
            return read.clone();
        }
        let mut listed = Vec::with_capacity(read.listed().len() + self.index_of.len());
        listed.extend_from_slice(read.listed());
        listed.extend(self.index_of.keys().filter(|xid| **xid < read.xmax()));
        Snapshot::new(read.xmax(), listed)
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.index_of.clear();
        self.open.clear();
        self.free.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cursor_lists_what_is_open_and_what_was_not_read() {
        let mut ledger = Ledger::default();
        let read = Snapshot::new(20, vec![11]);
        let a = ledger.open(15, 2);
        let b = ledger.open(25, 1);
        assert_eq!(ledger.cursor(&read).to_string(), "11:20:11,15", "25 is beyond the range read");
        ledger.resolve(a);
        assert_eq!(ledger.cursor(&read).to_string(), "11:20:11,15", "one reference is still open");
        ledger.resolve(a);
        ledger.resolve(b);
        assert_eq!(ledger.cursor(&read).to_string(), "11:20:11");
        assert!(ledger.is_empty());
    }
}
