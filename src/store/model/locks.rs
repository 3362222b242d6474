//! The model's lock table: advisory locks, locks on segments, and waiting for a transaction to end.
//!
//! Invariants
//! - A request that conflicts with a holder, or with one that waits before it, waits behind it (or fails at
//!   once, if it only tries): nobody starves.
//! - Who holds a lock already gets it again without waiting behind others.
//! - All locks of an owner go at once, when its transaction (or session) ends.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// What is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    /// Of an incarnation: shared by its fenced writes, exclusive for whoever ends it.
    Fence(i32),
    /// The flushes of one shard, one after the other.
    Flush(i32, u16),
    /// A partition.
    Partition(u32),
    /// A stream, by 32 bits of its id.
    Stream(u32),
    /// A session that keeps an incarnation alive.
    Alive(i32),
    /// Maintenance is under way.
    Maintenance,
    /// A segment's tables: shared by what writes or reads them, exclusive to truncate.
    Segment(usize),
    /// The transaction runs: held exclusively by itself.
    Transaction(u64),
    /// The rows that one shard's settlements write, or one instance's row.
    Row(i32, u16),
    /// The rows of the partitions.
    Partitions,
    /// The parked row of a lane.
    Lane(uuid::Uuid, crate::batch::DestinationId),
    /// A scheduled message.
    Scheduled(i64),
}

/// Who holds or waits: a transaction or a session.
pub(super) type Owner = u64;

struct Waiting {
    ticket: u64,
    owner: Owner,
    exclusive: bool,
    waker: Option<Waker>,
}

#[derive(Default)]
struct Entry {
    /// Owner and whether it holds exclusively.
    holders: BTreeMap<Owner, bool>,
    waiting: VecDeque<Waiting>,
}

impl Entry {
    fn admits(&self, owner: Owner, exclusive: bool) -> bool {
        self.holders.iter().all(|(holder, held)| *holder == owner || !(exclusive || *held))
    }
}

#[derive(Default)]
struct Table {
    entries: BTreeMap<Key, Entry>,
    tickets: u64,
}

/// The lock table of one life of the server.
#[derive(Clone, Default)]
pub(super) struct Locks(Rc<RefCell<Table>>);

impl Locks {
    /// Takes the lock if that is possible at once.
    pub(super) fn try_lock(&self, owner: Owner, key: Key, exclusive: bool) -> bool {
        let mut table = self.0.borrow_mut();
        let entry = table.entries.entry(key).or_default();
        let held = entry.holders.contains_key(&owner);
        let waits = entry.waiting.iter().any(|waiting| exclusive || waiting.exclusive);
        if !entry.admits(owner, exclusive) || (!held && waits) {
            return false;
        }
        *entry.holders.entry(owner).or_insert(false) |= exclusive;
        true
    }

    /// Waits for the lock.
    pub(super) fn lock(&self, owner: Owner, key: Key, exclusive: bool) -> Acquire {
        Acquire { locks: self.clone(), owner, key, exclusive, ticket: None }
    }

    /// Whether anybody but the owner holds it.
    pub(super) fn holder_but(&self, owner: Owner, key: Key) -> Option<Owner> {
        let table = self.0.borrow();
        table.entries.get(&key)?.holders.keys().copied().find(|holder| *holder != owner)
    }

    /// Gives everything of the owner back.
    pub(super) fn release_all(&self, owner: Owner) {
        self.release_if(owner, |_| true);
    }

    /// Gives one lock back.
    pub(super) fn release(&self, owner: Owner, key: Key) {
        self.release_if(owner, |of| *of == key);
    }

    fn release_if(&self, owner: Owner, of: impl Fn(&Key) -> bool) {
        let mut woken = Vec::new();
        let mut table = self.0.borrow_mut();
        table.entries.retain(|key, entry| {
            if of(key) && entry.holders.remove(&owner).is_some() {
                grant(entry, &mut woken);
            }
            !entry.holders.is_empty() || !entry.waiting.is_empty()
        });
        drop(table);
        woken.into_iter().for_each(Waker::wake);
    }

    /// Whether the owner waits for itself through others: a deadlock.
    pub(super) fn is_deadlocked(&self, owner: Owner) -> bool {
        let table = self.0.borrow();
        let mut open = vec![owner];
        let mut seen = Vec::new();
        while let Some(next) = open.pop() {
            for entry in table.entries.values() {
                let Some(at) = entry.waiting.iter().position(|waiting| waiting.owner == next) else { continue };
                let before = entry.waiting.iter().take(at).map(|waiting| waiting.owner);
                for blocker in entry.holders.keys().copied().chain(before).filter(|of| *of != next) {
                    if blocker == owner {
                        return true;
                    }
                    if !seen.contains(&blocker) {
                        seen.push(blocker);
                        open.push(blocker);
                    }
                }
            }
        }
        false
    }
}

/// Hands the lock to as many of those who wait, in their order, as can hold it together.
fn grant(entry: &mut Entry, woken: &mut Vec<Waker>) {
    while let Some(next) = entry.waiting.front() {
        if !entry.admits(next.owner, next.exclusive) {
            return;
        }
        if let Some(next) = entry.waiting.pop_front() {
            *entry.holders.entry(next.owner).or_insert(false) |= next.exclusive;
            woken.extend(next.waker);
        }
    }
}

/// A wait for a lock; given up when dropped.
pub(super) struct Acquire {
    locks: Locks,
    owner: Owner,
    key: Key,
    exclusive: bool,
    ticket: Option<u64>,
}

impl Future for Acquire {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Some(ticket) = self.ticket else {
            if self.locks.try_lock(self.owner, self.key, self.exclusive) {
                return Poll::Ready(());
            }
            let ticket = {
                let mut table = self.locks.0.borrow_mut();
                table.tickets += 1;
                let ticket = table.tickets;
                let waker = Some(context.waker().clone());
                let waiting = Waiting { ticket, owner: self.owner, exclusive: self.exclusive, waker };
                table.entries.entry(self.key).or_default().waiting.push_back(waiting);
                ticket
            };
            self.ticket = Some(ticket);
            return Poll::Pending;
        };
        let mut table = self.locks.0.borrow_mut();
        let waiting = table
            .entries
            .get_mut(&self.key)
            .and_then(|entry| entry.waiting.iter_mut().find(|waiting| waiting.ticket == ticket));
        match waiting {
            Some(waiting) => {
                waiting.waker = Some(context.waker().clone());
                Poll::Pending
            }
            None => {
                drop(table);
                self.ticket = None;
                Poll::Ready(())
            }
        }
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut woken = Vec::new();
        let mut table = self.locks.0.borrow_mut();
        if let Some(entry) = table.entries.get_mut(&self.key) {
            entry.waiting.retain(|waiting| waiting.ticket != ticket);
            grant(entry, &mut woken);
        }
        drop(table);
        woken.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_locks_share_and_a_try_fails_behind_who_waits() {
        let locks = Locks::default();
        let key = Key::Partition(3);
        assert!(locks.try_lock(1, key, false) && locks.try_lock(2, key, false));
        assert!(!locks.try_lock(3, key, true));
        let mut waiting = Box::pin(locks.lock(3, key, true));
        let mut context = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        assert!(!locks.try_lock(4, key, false), "behind the one that waits");
        assert!(locks.try_lock(1, key, false), "held already");
        locks.release_all(1);
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        locks.release_all(2);
        assert!(waiting.as_mut().poll(&mut context).is_ready());
        assert!(!locks.try_lock(4, key, false));
    }

    #[test]
    fn a_circle_is_seen() {
        let locks = Locks::default();
        assert!(locks.try_lock(1, Key::Stream(1), true) && locks.try_lock(2, Key::Stream(2), true));
        let mut context = Context::from_waker(Waker::noop());
        let mut one = Box::pin(locks.lock(1, Key::Stream(2), true));
        assert!(one.as_mut().poll(&mut context).is_pending());
        assert!(!locks.is_deadlocked(1));
        let mut two = Box::pin(locks.lock(2, Key::Stream(1), true));
        assert!(two.as_mut().poll(&mut context).is_pending());
        assert!(locks.is_deadlocked(1) && locks.is_deadlocked(2));
    }
}
