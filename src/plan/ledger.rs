//! Which transactions are resolved: the arithmetic of the cursor.
//!
//! Invariants
//! - A transaction is *open* while a reference of it on this shard's partitions is neither acknowledged,
//!   copied beside the log, nor in the dead letters, or while its flush has no answer yet.
//! - The cursor is everything the reader has read whole, less the open ones: a claim's raw snapshot is
//!   never a cursor (what is in flight would be lost with the process).
//! - What was *set aside* can be written nowhere and stays open for good: at most so many transactions. Beyond them there
//!   is no cursor any more, so what is persisted stays as it is, nothing is lost, and neither this nor a cursor grows.
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
    is_set_aside: bool,
}

/// The open transactions of one shard.
#[derive(Debug, Default)]
pub struct Ledger {
    index_of: HashMap<u64, u32>,
    open: Vec<Open>,
    free: Vec<u32>,
    set_aside: usize,
    is_full: bool,
}

impl Ledger {
    /// Room for so many open transactions.
    #[must_use]
    pub fn with_capacity(transactions: usize) -> Self {
        Self {
            index_of: HashMap::with_capacity(transactions),
            open: Vec::with_capacity(transactions),
            free: Vec::with_capacity(transactions),
            set_aside: 0,
            is_full: false,
        }
    }

    /// Adds `count` unresolved references to a transaction.
    pub fn open(&mut self, xid: u64, count: u32) -> TransactionIndex {
        let index = match self.index_of.get(&xid) {
            Some(index) => *index,
            None => {
                let fresh = Open { xid, ..Open::default() };
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

    /// The reference is never resolved: its transaction stays open for good. Where `transactions_max` are already, it
    /// is let go instead, and there is no cursor from then on that could pass it.
    pub fn set_aside(&mut self, index: TransactionIndex, transactions_max: usize) {
        if index == TransactionIndex::NONE {
            return;
        }
        let open = &mut self.open[index.0 as usize];
        if open.is_set_aside {
            // One of its references keeps it open: that is enough.
            assert!(open.count > 1, "reference of transaction {} set aside twice", open.xid);
            open.count -= 1;
        } else if self.set_aside < transactions_max {
            open.is_set_aside = true;
            self.set_aside += 1;
        } else {
            self.is_full = true;
            self.resolve(index);
        }
    }

    /// Whether more was set aside than a cursor can list: there is none.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.is_full
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

    /// What may be persisted as the cursor, given what the reader has read whole. `None`: nothing any more.
    #[must_use]
    pub fn cursor(&self, read: &Snapshot) -> Option<Snapshot> {
        if mutants::active(Mutant::RawSnapshotPersisted) {
            return Some(read.clone());
        }
        if self.is_full {
            return None;
        }
        let mut listed = Vec::with_capacity(read.listed().len() + self.index_of.len());
        listed.extend_from_slice(read.listed());
        listed.extend(self.index_of.keys().filter(|xid| **xid < read.xmax()));
        Some(Snapshot::new(read.xmax(), listed))
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.set_aside = 0;
        self.is_full = false;
        self.index_of.clear();
        self.open.clear();
        self.free.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor(ledger: &Ledger, read: &Snapshot) -> String {
        ledger.cursor(read).map_or_else(|| "none".to_owned(), |cursor| cursor.to_string())
    }

    #[test]
    fn the_cursor_lists_what_is_open_and_what_was_not_read() {
        let mut ledger = Ledger::default();
        let read = Snapshot::new(20, vec![11]);
        let a = ledger.open(15, 2);
        let b = ledger.open(25, 1);
        assert_eq!(cursor(&ledger, &read), "11:20:11,15", "25 is beyond the range read");
        ledger.resolve(a);
        assert_eq!(cursor(&ledger, &read), "11:20:11,15", "one reference is still open");
        ledger.resolve(a);
        ledger.resolve(b);
        assert_eq!(cursor(&ledger, &read), "11:20:11");
        assert!(ledger.is_empty());
    }

    #[test]
    fn what_is_set_aside_is_listed_for_good_up_to_its_bound_and_then_there_is_no_cursor() {
        let mut ledger = Ledger::default();
        let read = Snapshot::new(100, Vec::new());
        let transactions: Vec<_> = (10..15).map(|xid| ledger.open(xid, 2)).collect();
        ledger.set_aside(transactions[0], 2);
        ledger.set_aside(transactions[0], 2);
        ledger.set_aside(transactions[1], 2);
        ledger.resolve(transactions[1]);
        ledger.resolve(transactions[2]);
        ledger.resolve(transactions[2]);
        assert_eq!(cursor(&ledger, &read), "10:100:10,11,13,14");
        // The third: from now on nothing may be persisted, and nothing grows.
        for transaction in &transactions[3..] {
            ledger.set_aside(*transaction, 2);
            ledger.resolve(*transaction);
        }
        for xid in 20..2_000 {
            let transaction = ledger.open(xid, 1);
            ledger.set_aside(transaction, 2);
        }
        assert_eq!((ledger.len(), ledger.is_full(), cursor(&ledger, &read).as_str()), (2, true, "none"));
        assert!(ledger.open.len() <= 6, "{} entries", ledger.open.len());
        ledger.clear();
        assert_eq!(cursor(&ledger, &read), "100:100:");
    }
}
