//! Who stores messages: callers of the processes, and strangers with transactions of their own.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use corelane::Error;
use corelane::batch::{DestinationId, NewRow, Rows};
use corelane::partition::partition_of;
use corelane::runtime::sim::SimRuntime;
use corelane::seam::runtime::Runtime;
use corelane::shard::{Arrival, Submission};
use corelane::store::model::{Isolation, Model, NewMessage};
use uuid::Uuid;

use crate::process::Process;

/// What is written, and where to.
#[derive(Clone)]
pub struct Subjects {
    pub streams: Vec<Uuid>,
    pub destinations: Vec<DestinationId>,
    pub partition_count: u32,
    pub rows_max: u64,
    pub events_per_mille: u64,
    pub streamless_per_mille: u64,
    pub scheduled_per_mille: u64,
    pub expected_per_mille: u64,
}

/// What callers were told.
#[derive(Default)]
pub struct Told {
    /// Message, its number and version, as answered.
    pub stored: Vec<(Uuid, i64, i64)>,
    /// "Nothing was stored."
    pub refused: Vec<Uuid>,
    pub scheduled: Vec<Uuid>,
    /// "Stored, but with which numbers is not known."
    pub unnumbered: Vec<Uuid>,
    /// Appends that were refused because of their stream's version.
    pub conflicts: u64,
    /// Appends with an expected version that were stored.
    pub appends: u64,
    /// Versions that streams have, by what the model has committed.
    versions: BTreeMap<Uuid, i64>,
    known: usize,
}

impl Told {
    /// The version that the stream has now.
    fn version(&mut self, model: &Model, stream: Uuid) -> i64 {
        for of in model.history_after(self.known) {
            self.known += 1;
            let version = self.versions.entry(of.lane_id).or_default();
            *version = (*version).max(of.version);
        }
        self.versions.get(&stream).copied().unwrap_or(0)
    }
}

/// Makes message ids, counting up.
#[derive(Clone, Default)]
pub struct Ids(Rc<Cell<u64>>);

impl Ids {
    pub fn fresh(&self) -> Uuid {
        self.0.set(self.0.get() + 1);
        Uuid::from_u128(0x0190_0000_0000_7000_9000_0000_0000_0000 + u128::from(self.0.get()))
    }
}

impl Subjects {
    fn one(&self, runtime: &SimRuntime, ids: &Ids) -> NewMessage {
        let streamless = runtime.per_mille(self.streamless_per_mille);
        let stream = self.streams[runtime.below(self.streams.len() as u64) as usize];
        let mut destinations = Vec::new();
        for destination in &self.destinations {
            if runtime.per_mille(600) {
                destinations.push(*destination);
            }
        }
        NewMessage {
            message_id: ids.fresh(),
            stream_id: (!streamless).then_some(stream),
            is_event: runtime.per_mille(self.events_per_mille),
            destinations,
        }
    }

    /// A batch of one to a few units, for the shard that is to store it.
    fn batch(&self, runtime: &SimRuntime, ids: &Ids, shards: u32, version: &dyn Fn(Uuid) -> i64) -> (usize, Rows) {
        let mut unit = BTreeMap::new();
        let mut rows = Rows::default();
        let mut shard = None;
        for _ in 0..=runtime.below(self.rows_max) {
            let message = self.one(runtime, ids);
            let partition = partition_of(message.stream_id.unwrap_or(message.message_id), self.partition_count);
            let of = partition % shards;
            // Mostly what belongs to one shard; now and then a unit reaches into the partitions of others.
            if shard.is_some_and(|shard| shard != of) && !runtime.per_mille(100) {
                continue;
            }
            shard.get_or_insert(of);
            let scheduled = !message.is_event && runtime.per_mille(self.scheduled_per_mille);
            let row = NewRow {
                message_id: message.message_id,
                stream_id: message.stream_id,
                partition,
                is_event: message.is_event,
                type_name: "simulated",
                content_type: "",
                correlation_id: Uuid::nil(),
                causation_id: Uuid::nil(),
                trace: corelane::envelope::Trace::default(),
                metadata: b"",
                payload: b"{}",
                due_unix_us: if scheduled { (runtime.now().0 + runtime.below(2_000_000)) as i64 } else { 0 },
            };
            rows.push(&row, &message.destinations);
            if let Some(stream) = message.stream_id.filter(|_| message.is_event) {
                // The first of a unit says it: what there is now, or one more or less.
                let before = unit.entry(stream).or_insert(0);
                if *before == 0 && runtime.per_mille(self.expected_per_mille) {
                    let wrong = if runtime.per_mille(300) { runtime.below(3) as i64 - 1 } else { 0 };
                    rows.expect_version((version(stream) + wrong).max(0));
                }
                *before += 1;
            }
            if runtime.per_mille(500) {
                rows.end_unit();
                unit.clear();
            }
        }
        rows.end_unit();
        (shard.unwrap_or(0) as usize, rows)
    }
}

/// Callers of one process: they push batches and note what they are told. They die with their process.
pub fn spawn_caller(
    process: &Process,
    model: &Model,
    subjects: &Subjects,
    ids: &Ids,
    told: &Rc<RefCell<Told>>,
    pace: Pace,
) {
    let model = model.clone();
    let runtime = process.runtime.clone();
    let (rings, budgets) = (process.rings.clone(), process.budgets.clone());
    let (subjects, ids, told) = (subjects.clone(), ids.clone(), told.clone());
    process.runtime.spawn(async move {
        let mut answers = Vec::new();
        while pace.open.get() && pace.left.get() > 0 {
            runtime.dawdle(pace.pause_us).await;
            let version = |stream| told.borrow_mut().version(&model, stream);
            let (shard, rows) = subjects.batch(&runtime, &ids, rings.len() as u32, &version);
            let before: Vec<i64> = rows.expected_row.iter().map(|row| version(rows.lane_id[*row as usize])).collect();
            let count = rows.len();
            pace.left.set(pace.left.get().saturating_sub(count as u64));
            if !budgets[shard].try_acquire(count, pace.budget_rows) {
                continue; // Overloaded: nothing was stored, and nobody remembers these.
            }
            let (reply, hears) = futures_channel::oneshot::channel();
            let submission = Submission { rows: Arc::new(rows), reply };
            if rings[shard].push(Arrival::Submission(submission)).is_err() {
                budgets[shard].release(count);
                continue;
            }
            answers.push((hears, before));
            // Some callers wait for their answer, others have several batches under way.
            if runtime.per_mille(500) {
                for (hears, before) in answers.drain(..) {
                    note(&runtime, &model, hears.await, &before, &told);
                }
            }
        }
        for (hears, before) in answers {
            note(&runtime, &model, hears.await, &before, &told);
        }
    });
}

/// How fast, and how much.
#[derive(Clone)]
pub struct Pace {
    pub pause_us: u64,
    pub budget_rows: usize,
    pub left: Rc<Cell<u64>>,
    pub open: Rc<Cell<bool>>,
}

type Answer = Result<corelane::shard::SubmissionReply, futures_channel::oneshot::Canceled>;

/// `before`: the version that each stream had of which one was expected, when the batch was handed over.
fn note(runtime: &SimRuntime, model: &Model, answer: Answer, before: &[i64], told: &RefCell<Told>) {
    let Ok(answer) = answer else { return };
    let mut told = told.borrow_mut();
    let refused: BTreeMap<u32, &Error> = answer.refused.iter().map(|(unit, error)| (*unit, error)).collect();
    let mut start = 0;
    for (unit, end) in answer.rows.unit_end.iter().enumerate() {
        for row in start..*end as usize {
            let message_id = answer.rows.message_id[row];
            if let Some(expected) = answer.rows.expected(row) {
                let (stream, version) = (answer.rows.lane_id[row], answer.rows.version[row]);
                match refused.get(&(unit as u32)) {
                    None if version != expected + 1 => {
                        runtime.fail(format!("P5: {stream} at {expected} was expected, {version} was appended"));
                    }
                    None => told.appends += 1,
                    Some(Error::VersionConflict { stream_id, found, .. }) if *stream_id == stream => {
                        told.conflicts += 1;
                        let at = answer.rows.expected_row.partition_point(|of| (*of as usize) < row);
                        let now = told.version(model, stream);
                        if *found == expected || (before[at] == expected && now == expected) {
                            runtime.fail(format!("P5: {stream} at {expected} was refused as {found}, and is at {now}"));
                        }
                    }
                    Some(_) => {}
                }
            }
            match refused.get(&(unit as u32)) {
                Some(Error::OutcomeUnknown { .. }) => {}
                Some(Error::StoredUnnumbered { .. }) => told.unnumbered.push(message_id),
                Some(_) => told.refused.push(message_id),
                None if answer.rows.due_unix_us[row] != 0 => told.scheduled.push(message_id),
                None => told.stored.push((message_id, answer.rows.stream_seq[row], answer.rows.version[row])),
            }
        }
        start = *end as usize;
    }
}

/// Strangers: each kind of transaction that a user may hold.
pub fn spawn_stranger(runtime: &SimRuntime, model: &Model, subjects: &Subjects, ids: &Ids, pace: Pace, hold_us: u64) {
    let runtime = runtime.new_process();
    let (model, subjects, ids) = (model.clone(), subjects.clone(), ids.clone());
    let clock = runtime.clone();
    runtime.spawn(async move {
        while pace.open.get() && pace.left.get() > 0 {
            clock.dawdle(pace.pause_us * 4).await;
            let messages: Vec<_> = (0..=clock.below(3)).map(|_| subjects.one(&clock, &ids)).collect();
            pace.left.set(pace.left.get().saturating_sub(messages.len() as u64));
            let kind = clock.below(5);
            let isolation = if kind == 3 { Isolation::RepeatableRead } else { Isolation::ReadCommitted };
            let transaction = model.begin(isolation);
            let done = async {
                match kind {
                    // Its id is older than its turn on the stream.
                    1 => {
                        transaction.write_elsewhere().await?;
                        clock.dawdle(hold_us / 4).await;
                    }
                    // Its snapshot is older than a rotation.
                    3 => {
                        transaction.read().await?;
                        clock.dawdle(hold_us).await;
                    }
                    _ => {}
                }
                transaction.store(&messages).await?;
                // Enlisted and held open.
                if kind == 2 {
                    clock.dawdle(hold_us).await;
                }
                Ok::<_, corelane::seam::store::StoreError>(())
            }
            .await;
            clock.trace(|| format!("stranger of kind {kind}: {done:?}"));
            if done.is_ok() && !clock.per_mille(150) {
                let _ = transaction.commit().await;
            }
        }
    });
}
