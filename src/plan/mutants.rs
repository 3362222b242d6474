//! Switches that break one rule of the storage design each, so that a test can be seen to go red.
//! Without the feature `mutants` every question is answered no at compile time.

/// A rule that can be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mutant {
    /// Claim pages in the order of transaction ids instead of positions.
    OrderByXid,
    /// The raw snapshot of a claim persisted as the cursor.
    RawSnapshotPersisted,
    /// The reader's position kept over a crash of the server.
    CursorKeptOverCrash,
    /// Admission from memory without k = last + 1.
    AdmissionWithoutPredecessor,
    /// Numbers that are taken are passed over in silence.
    DoNothingOnNumbers,
    /// A segment truncated when its newest transaction is older than every snapshot.
    XidOnlyTruncation,
    /// Cursors written without the incarnation's lock.
    NoFenceLock,
    /// A flush sent again after a lost COMMIT without a look-up.
    BlindResend,
    /// The look-up after a lost COMMIT made without the flush's locks.
    LookUpWithoutLocks,
    /// A number given again after its row was truncated.
    NumberGivenAgain,
    /// The claim goes on while memory is full.
    ClaimWithoutBound,
    /// A partition handed over with all that was read, open messages too.
    OpenHandedOver,
    /// A partition handed over before its shard has let go of it.
    HandedOverUnasked,
    /// Who gives a dead letter back does not tell the lane's owner.
    OwnersNotTold,
    /// An expected version is not compared where numbers are looked up.
    ExpectationUnchecked,
}

#[cfg(feature = "mutants")]
mod switch {
    use super::Mutant;
    use std::cell::Cell;

    thread_local! {
        static ACTIVE: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    /// Whether the rule is broken on this thread.
    #[must_use]
    pub fn active(mutant: Mutant) -> bool {
        ACTIVE.with(|active| active.get() == Some(mutant))
    }

    /// Breaks a rule on this thread, or none.
    pub fn activate(mutant: Option<Mutant>) {
        ACTIVE.with(|active| active.set(mutant));
    }
}

#[cfg(not(feature = "mutants"))]
mod switch {
    use super::Mutant;

    /// Never: the switches are compiled for tests only.
    #[must_use]
    pub const fn active(_mutant: Mutant) -> bool {
        false
    }
}

pub use switch::*;
