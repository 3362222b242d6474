//! The model's data: rows with the transaction that wrote them, and which transactions are visible.
//!
//! Invariants
//! - A row that is only ever inserted (event, outbox, log) is there from its insertion, with its
//!   transaction's id; a snapshot decides who sees it. It goes at once if its transaction aborts.
//! - Everything else changes by *effects*: closures that run at the moment their transaction becomes visible.
//! - A transaction's id is given at its first write. It becomes durable (commit record), then visible, then
//!   lets go of its locks: three moments with other transactions between them.
//! - A crash keeps what is durable, drops the rest, and gives transaction ids again that left no trace.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use uuid::Uuid;

use super::locks::Owner;
use crate::batch::{DestinationId, Rows};
use crate::plan::snapshot::Snapshot;
use crate::seam::store::LastNumbers;
use crate::time::Tick;

/// Segments of the log and the outbox.
pub(super) const SEGMENTS: usize = 3;
/// An asynchronous commit is durable at the latest after so long.
const WAL_WRITER_US: u64 = 600_000;

/// One message: a batch of one row, with its destinations as references.
pub(super) type Body = Rc<Rows>;
/// A lane: stream (or message) and destination.
pub(super) type LaneKey = (Uuid, DestinationId);

pub(super) struct Event {
    pub xid: u64,
    pub stream_seq: i64,
    pub body: Body,
}

pub(super) struct Outbox {
    pub xid: u64,
    pub body: Body,
}

#[derive(Clone, Copy)]
pub(super) struct Reference {
    pub partition: u32,
    pub destination: DestinationId,
    pub stream_seq: i64,
    pub version: i64,
    pub lane_id: Uuid,
}

/// Which flush wrote a log row: incarnation, shard, flush number.
pub(super) type Flush = (i32, u16, i64);

#[derive(Clone)]
pub(super) struct Log {
    pub xid: u64,
    pub position: i64,
    pub flush: Option<Flush>,
    pub owned: bool,
    pub references: Vec<Reference>,
    /// The flush's streams and their numbers before it, for the look-up after a lost commit.
    pub before: Rc<Vec<(Uuid, LastNumbers)>>,
}

#[derive(Default)]
pub(super) struct Segment {
    pub outbox: BTreeMap<(Uuid, i64), Outbox>,
    pub log: Vec<Log>,
}

/// What is noted of a flush when its log rows are truncated.
#[derive(Clone, Copy)]
pub(super) struct Truncated {
    pub flush_number: i64,
    pub xid: u64,
    pub position: i64,
    pub owned: bool,
}

pub(super) struct Instance {
    pub id: Uuid,
    pub counter: i64,
    pub ownership: i64,
    pub lease_until: Tick,
    pub shards: u16,
    pub alive: bool,
    pub owns: bool,
}

#[derive(Clone, Default)]
pub(super) struct Partition {
    pub owner: Option<i32>,
    pub fence: i64,
    pub ownership: i64,
    pub base: Snapshot,
}

pub(super) struct Cursor {
    pub number: i64,
    pub ownership: i64,
    pub resolved: Snapshot,
}

pub(super) struct Parked {
    pub partition: u32,
    pub attempts: i32,
    pub due: Tick,
    pub held: bool,
    pub stream_seq: i64,
}

pub(super) struct Kept {
    pub version: i64,
    /// Copied for a message of the outbox.
    pub body: Option<Body>,
    /// By an operator.
    pub given_back: bool,
}

/// A dead letter, as the simulation asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dead {
    /// The reference's reason number.
    pub reason: i16,
    /// Attempts made.
    pub attempts: i32,
}

/// What a dead letter keeps of its message.
#[derive(Clone)]
pub(super) struct Buried {
    pub partition: u32,
    pub version: i64,
    pub body: Option<Body>,
}

pub(super) struct Scheduled {
    pub body: Body,
    pub due: Tick,
}

/// One committed message, as the oracle remembers it whatever is truncated later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Message.
    pub message_id: Uuid,
    /// Stream, or the message itself.
    pub lane_id: Uuid,
    /// Number.
    pub stream_seq: i64,
    /// Version; 0 for what is not an event of a stream.
    pub version: i64,
    /// Where it is to go.
    pub destinations: Vec<DestinationId>,
}

pub(super) type Effect = Box<dyn FnOnce(&mut Database)>;

/// A transaction under way.
#[derive(Default)]
pub(super) struct Transaction {
    pub xid: Option<u64>,
    /// It has put rows into tables: its id is in the write-ahead log.
    pub wrote: bool,
    pub effects: Vec<Effect>,
    /// The commit record is written; whether a crash keeps it.
    pub recorded: bool,
    pub committed: Vec<Committed>,
}

/// One schema of one server.
pub(super) struct Database {
    pub epoch: Option<Uuid>,
    pub partition_count: u32,
    pub next_xid: u64,
    latest_completed: u64,
    running: BTreeSet<u64>,
    /// Ids below this one have left a trace that survives a crash.
    durable_xid: u64,
    /// The newest id that has ended after putting rows into tables: in the log, perhaps not written out yet.
    latest_logged: u64,
    pub transactions: BTreeMap<Owner, Transaction>,
    /// Cursors committed asynchronously and not yet written out: when, by which transaction, whose, which.
    unflushed: Vec<(Tick, u64, (i32, u16), i64)>,

    pub next_position: i64,
    pub events: BTreeMap<(Uuid, i64), Event>,
    pub segments: [Segment; SEGMENTS],
    /// Which segment is current, by the transaction that made it so.
    pub current: Vec<(u64, usize)>,
    /// Last numbers carried over, with the transaction that wrote them.
    pub streams: BTreeMap<Uuid, (i64, u64)>,
    pub instances: BTreeMap<i32, Instance>,
    pub next_instance: i32,
    pub partitions: Vec<Partition>,
    pub cursors: BTreeMap<(i32, u16), Vec<Cursor>>,
    pub next_cursor: i64,
    /// Of each shard the newest flush that was looked up and not found.
    pub given_up: BTreeMap<(i32, u16), i64>,
    /// Of each shard the newest flush whose log rows were truncated.
    pub truncated: BTreeMap<(i32, u16), Truncated>,
    pub parked: BTreeMap<LaneKey, Parked>,
    pub kept: BTreeMap<(Uuid, DestinationId, i64), Kept>,
    pub dead: BTreeMap<(Uuid, DestinationId, i64), Dead>,
    /// Everything that was ever dead, and of it what was discarded.
    pub buried: BTreeMap<(Uuid, DestinationId, i64), Buried>,
    pub discarded: BTreeSet<(Uuid, DestinationId, i64)>,
    pub scheduled: BTreeMap<i64, Scheduled>,
    pub next_scheduled: i64,
    /// Everything that was ever committed, in the order of visibility.
    pub history: Vec<Committed>,
}

impl Database {
    pub(super) fn new(partition_count: u32, epoch: Uuid) -> Self {
        Self {
            epoch: Some(epoch),
            partition_count,
            next_xid: 1_000,
            latest_completed: 999,
            running: BTreeSet::new(),
            durable_xid: 1_000,
            latest_logged: 0,
            transactions: BTreeMap::new(),
            unflushed: Vec::new(),
            next_position: 1,
            events: BTreeMap::new(),
            segments: Default::default(),
            current: vec![(0, 0)],
            streams: BTreeMap::new(),
            instances: BTreeMap::new(),
            next_instance: 0,
            partitions: vec![Partition::default(); partition_count as usize],
            cursors: BTreeMap::new(),
            next_cursor: 1,
            given_up: BTreeMap::new(),
            truncated: BTreeMap::new(),
            parked: BTreeMap::new(),
            kept: BTreeMap::new(),
            dead: BTreeMap::new(),
            buried: BTreeMap::new(),
            discarded: BTreeSet::new(),
            scheduled: BTreeMap::new(),
            next_scheduled: 1,
            history: Vec::new(),
        }
    }

    /// `pg_current_snapshot()`.
    pub(super) fn snapshot(&self) -> Snapshot {
        let xmax = self.latest_completed + 1;
        Snapshot::new(xmax, self.running.iter().copied().filter(|xid| *xid < xmax).collect())
    }

    /// The transaction's id, given now if it has none.
    pub(super) fn assign_xid(&mut self, owner: Owner) -> u64 {
        let transaction = self.transactions.entry(owner).or_default();
        if let Some(xid) = transaction.xid {
            return xid;
        }
        let xid = self.next_xid;
        self.next_xid += 1;
        transaction.xid = Some(xid);
        self.running.insert(xid);
        xid
    }

    /// `nextval('wh_position')`.
    pub(super) fn draw_position(&mut self) -> i64 {
        let position = self.next_position;
        self.next_position += 4096;
        position
    }

    /// Writes the commit record. Without `wait` it is kept in memory for a while.
    pub(super) fn record_commit(&mut self, owner: Owner, cursor: Option<((i32, u16), i64)>, wait: bool, now: Tick) {
        let Some(transaction) = self.transactions.get_mut(&owner) else { return };
        transaction.recorded = true;
        let xid = transaction.xid.unwrap_or(0);
        match (wait, cursor) {
            (false, Some((shard, number))) => self.unflushed.push((now, xid, shard, number)),
            _ => {
                // Everything logged before is written out with it.
                self.unflushed.clear();
                let wrote = |of: &&Transaction| of.wrote || of.recorded;
                let newest = self.transactions.values().filter(wrote).filter_map(|of| of.xid).max();
                self.durable_xid = self.durable_xid.max(newest.map_or(0, |xid| xid + 1)).max(self.latest_logged + 1);
            }
        }
    }

    /// Makes a recorded transaction visible to snapshots taken from now on.
    pub(super) fn make_visible(&mut self, owner: Owner) {
        let Some(transaction) = self.transactions.remove(&owner) else { return };
        if let Some(xid) = transaction.xid {
            self.running.remove(&xid);
            self.latest_completed = self.latest_completed.max(xid);
            self.latest_logged = self.latest_logged.max(xid);
        }
        for effect in transaction.effects {
            effect(self);
        }
        self.history.extend(transaction.committed);
    }

    /// Takes a transaction back.
    pub(super) fn abort(&mut self, owner: Owner) {
        let Some(transaction) = self.transactions.remove(&owner) else { return };
        let Some(xid) = transaction.xid else { return };
        self.running.remove(&xid);
        self.latest_completed = self.latest_completed.max(xid);
        if transaction.wrote {
            self.latest_logged = self.latest_logged.max(xid);
        }
        self.forget_rows(xid);
    }

    fn forget_rows(&mut self, xid: u64) {
        self.events.retain(|_, row| row.xid != xid);
        for segment in &mut self.segments {
            segment.outbox.retain(|_, row| row.xid != xid);
            segment.log.retain(|row| row.xid != xid);
        }
    }

    /// The server dies and comes back: `lost` decides from which of the youngest asynchronous commits on
    /// nothing was written out, `reissued` how many of the ids that left no trace are given again.
    pub(super) fn crash(&mut self, now: Tick, lost: u64, reissued: u64) {
        let owners: Vec<Owner> = self.transactions.keys().copied().collect();
        for owner in owners {
            if self.transactions.get(&owner).is_some_and(|of| of.recorded) {
                self.make_visible(owner);
            } else {
                self.abort(owner);
            }
        }
        let unflushed = std::mem::take(&mut self.unflushed);
        let old = unflushed.iter().take_while(|(at, ..)| now.since_us(*at) >= WAL_WRITER_US).count();
        let kept = old + (lost % ((unflushed.len() - old) as u64 + 1)) as usize;
        // What is written out has everything logged before it written out as well: those ids are not given again.
        let newest = unflushed[..kept].iter().map(|(_, xid, ..)| xid + 1).max().unwrap_or(0);
        self.durable_xid = self.durable_xid.max(newest);
        for (_, _, shard, number) in &unflushed[kept..] {
            if let Some(cursors) = self.cursors.get_mut(shard) {
                cursors.retain(|cursor| cursor.number != *number);
            }
        }
        let room = self.next_xid - self.durable_xid.min(self.next_xid);
        self.next_xid -= if room == 0 { 0 } else { reissued % (room + 1) };
        self.latest_completed = self.next_xid - 1;
        self.latest_logged = self.latest_logged.min(self.latest_completed);
        self.running.clear();
        self.epoch = None;
    }

    /// The segment that is current for a snapshot.
    pub(super) fn current_segment(&self, snapshot: &Snapshot) -> usize {
        self.current.iter().rev().find(|(xid, _)| snapshot.contains(*xid)).map_or(0, |(_, segment)| *segment)
    }

    /// The last numbers of a stream that a snapshot (and the transaction itself) sees.
    pub(super) fn last_numbers(&self, stream: Uuid, snapshot: &Snapshot, own: Option<u64>) -> LastNumbers {
        let sees = |xid: u64| snapshot.contains(xid) || Some(xid) == own;
        let event = self
            .events
            .range((stream, 0)..=(stream, i64::MAX))
            .rev()
            .find(|(_, row)| sees(row.xid))
            .map(|((_, version), row)| (row.stream_seq, *version));
        let (mut seq, version) = event.unwrap_or((0, 0));
        for segment in &self.segments {
            let row = segment.outbox.range((stream, 0)..=(stream, i64::MAX)).rev().find(|(_, row)| sees(row.xid));
            seq = seq.max(row.map_or(0, |((_, seq), _)| *seq));
        }
        if let Some((last, xid)) = self.streams.get(&stream)
            && sees(*xid)
        {
            seq = seq.max(*last);
        }
        LastNumbers { seq, version }
    }

    /// What is resolved for a partition: base, and what its owner's shard has persisted since it took it.
    pub(super) fn resolved(&self, partition: u32) -> Snapshot {
        let of = &self.partitions[partition as usize];
        let cursor = of.owner.and_then(|owner| {
            let shards = self.instances.get(&owner).map_or(1, |instance| instance.shards);
            let shard = (partition % u32::from(shards)) as u16;
            self.cursors
                .get(&(owner, shard))?
                .iter()
                .filter(|cursor| cursor.ownership >= of.ownership)
                .max_by_key(|cursor| cursor.number)
        });
        cursor.map_or_else(|| of.base.clone(), |cursor| of.base.union(&cursor.resolved))
    }

    /// The body of a message, wherever it stands.
    pub(super) fn body_of(&self, lane_id: Uuid, stream_seq: i64, version: i64, snapshot: &Snapshot) -> Option<Body> {
        if version > 0 {
            let row = self.events.get(&(lane_id, version)).filter(|row| snapshot.contains(row.xid))?;
            return Some(row.body.clone());
        }
        self.segments
            .iter()
            .find_map(|segment| segment.outbox.get(&(lane_id, stream_seq)))
            .filter(|row| snapshot.contains(row.xid))
            .map(|row| row.body.clone())
    }
}
