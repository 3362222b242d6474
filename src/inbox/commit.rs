//! Results become durable: many in one transaction, each for itself.
//!
//! Invariants
//! - The memory of a message is written first, and what it emits only if that was new: a copy has no second effect.
//! - A handler that asked for the transaction runs under a savepoint, behind its message's memory.
//! - What fails, dies or waits behind is stored with its body in the same transaction as its neighbours' effects.
//! - A body that is kept has its lane's row in that transaction (`keep_inbox`): whatever a batch is cut into, and whoever
//!   has freed the lane since the message was looked up.
//! - The rows of the lanes that a transaction changes are taken in one pass, in their order (`lock_inbox`): an operator who
//!   gives dead letters back takes them so, too.
//! - A handler that was disturbed by others has no part in a transaction, and no attempt of its message is counted before
//!   it was so `inbox.disturbed_max` times by itself: what always runs into a time limit would hold its stream for ever.
//! - No handler starts in a transaction that is older than [`INBOX_TRANSACTION_MS`].
//! - Whatever is refused, is refused for one message: the caller takes a batch apart until it knows which.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use hashbrown::HashSet;
use tokio_postgres::Transaction;
use uuid::Uuid;

use super::door::{Burial, Door, Parking};
use super::handler::{ErrorKind, Handler, HandlerContext, HandlerError, Handlers};
use super::lane::Slot;
use crate::batch::Rows;
use crate::config::{OnDead, RetryBy};
use crate::engine::outbox;
use crate::engine::router::Router;
use crate::error::{FailureReason, bounded_error_text};
use crate::limits::INBOX_TRANSACTION_MS;
use crate::metrics::InboxMetrics;
use crate::plan::retry::{Retry, Verdict as Again};
use crate::seam::receiver::Delivery;
use crate::seam::store::StoreError;
use crate::store::schema_name::SchemaName;

/// See the limit.
const TRANSACTION_TIME: Duration = Duration::from_millis(INBOX_TRANSACTION_MS);

/// What a handler runs under.
const SAVEPOINT: &str = "corelane_handler";

/// What is to become of a message.
pub(super) enum Verdict {
    /// Its handler did it, and emits these.
    Done(Box<Rows>),
    /// Its handler runs in the commit.
    InTransaction,
    /// It is tried again in so many milliseconds.
    Failed { attempts: i32, due_in_ms: u64, reason: FailureReason, text: String },
    /// It goes to the dead letters here.
    Dead { attempts: i32, reason: FailureReason, text: String, hold: bool },
    /// It is stored behind its lane's head.
    Behind,
    /// It is stored first, and handled from there.
    Store,
    /// It is stored already and stays as it is, behind its lane's head.
    Left,
    /// It goes back to the broker.
    Abandon,
    /// It goes to the broker's dead letters.
    Refuse { reason: FailureReason, text: String },
}

impl Verdict {
    /// Whether the database has nothing to do with it.
    pub(super) fn is_brokers(&self) -> bool {
        matches!(self, Self::Left | Self::Abandon | Self::Refuse { .. })
    }

    /// Whether its body is stored.
    fn keeps(&self) -> bool {
        matches!(self, Self::Failed { .. } | Self::Dead { .. } | Self::Behind | Self::Store)
    }

    /// Whether nothing of its lane may be handled before it is.
    pub(super) fn parks(&self) -> bool {
        matches!(self, Self::Failed { .. } | Self::Dead { hold: true, .. })
    }
}

/// A message whose fate is decided, or is in the commit.
pub(super) struct Decision {
    pub slot: Slot,
    pub lane_id: Uuid,
    pub delivery: Arc<Delivery>,
    /// The source's name.
    pub source: Arc<str>,
    pub is_stored: bool,
    /// Tries that ended in failure before this one.
    pub attempts: i32,
    /// Its handler was disturbed before: it runs in a transaction of its own.
    pub is_alone: bool,
    pub verdict: Verdict,
}

impl Decision {
    /// Whether its handler runs in the commit.
    pub(super) fn is_in_transaction(&self) -> bool {
        matches!(self.verdict, Verdict::InTransaction)
    }

    /// Bytes that it brings into the transaction, as far as that is known.
    pub(super) fn bytes(&self) -> usize {
        match &self.verdict {
            Verdict::Done(rows) => rows.bytes_in_memory(),
            _ => self.delivery.bytes(),
        }
    }
}

/// What is the same for all messages of a consumer.
pub(super) struct Rules {
    pub name: Arc<str>,
    pub number: i16,
    pub handlers: Arc<Handlers>,
    pub router: Router,
    pub schema: SchemaName,
    pub retry: Retry,
    pub retry_by: RetryBy,
    pub on_dead: OnDead,
    pub handler_time: Duration,
    /// A handler that was disturbed so often by itself has failed.
    pub disturbed_max: u32,
    /// What one delivery's handler may emit, and what one transaction emits and keeps.
    pub emit_bytes_max: usize,
    pub commit_bytes_max: usize,
    pub metrics: Arc<InboxMetrics>,
}

impl Rules {
    /// What follows from a handler's error.
    pub(super) fn judge(&self, error: HandlerError, attempts: i32, is_stored: bool) -> Verdict {
        let HandlerError { kind, reason, text } = error;
        let is_brokers = self.retry_by == RetryBy::Broker && !is_stored;
        let attempts = attempts.saturating_add(1);
        let hold = self.on_dead == OnDead::Hold;
        let text = bounded_error_text(&text).0;
        match kind {
            ErrorKind::Unreadable if !is_stored => Verdict::Refuse { reason, text },
            ErrorKind::Permanent if is_brokers => Verdict::Refuse { reason, text },
            ErrorKind::Retry | ErrorKind::Disturbed if is_brokers => Verdict::Abandon,
            ErrorKind::Unreadable | ErrorKind::Permanent => Verdict::Dead { attempts, reason, text, hold },
            ErrorKind::Retry | ErrorKind::Disturbed => match self.retry.after_failure(attempts, rand::random()) {
                Again::RetryIn(due_in_ms) => Verdict::Failed { attempts, due_in_ms, reason, text },
                Again::Dead => Verdict::Dead { attempts, reason, text, hold },
            },
        }
    }

    /// A context for one try.
    pub(super) fn context<'t>(
        &self,
        delivery: &Delivery,
        attempts: i32,
        transaction: Option<&'t Transaction<'t>>,
    ) -> HandlerContext<'t> {
        let own = delivery.message_id;
        HandlerContext {
            router: self.router,
            bytes_max: self.emit_bytes_max,
            rows: Rows::default(),
            attempt: attempts.max(0).unsigned_abs() + 1,
            consumer: self.name.clone(),
            message_id: own,
            correlation_id: if delivery.correlation_id.is_nil() { own } else { delivery.correlation_id },
            trace: delivery.trace,
            transaction,
        }
    }

    /// Runs a handler within its time; a panic is its failure.
    pub(super) async fn run(
        &self,
        handler: &dyn Handler,
        delivery: &Delivery,
        context: &mut HandlerContext<'_>,
    ) -> Result<(), HandlerError> {
        let began = Instant::now();
        let call = async { tokio::time::timeout(self.handler_time, handler.handle(delivery, context)).await };
        let outcome = match AssertUnwindSafe(call).catch_unwind().await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => {
                self.metrics.timed_out.add(1);
                let text = format!("the handler did not end within {} ms", self.handler_time.as_millis());
                Err(HandlerError::retry(text))
            }
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().copied();
                let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("(no text)");
                Err(HandlerError::retry(format!("the handler panicked: {text}")))
            }
        };
        self.metrics.handler_us.record_us(u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX));
        match &outcome {
            Ok(()) => {}
            Err(error) if error.kind == ErrorKind::Disturbed => self.metrics.disturbed.add(1),
            Err(_) => self.metrics.failed.add(1),
        }
        outcome
    }

    /// What is said of a message for whose type there is no handler any more.
    pub(super) fn no_handler(type_name: &str) -> HandlerError {
        HandlerError::unreadable(format!("no handler here for messages of the type {type_name}"))
    }
}

/// What has become of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// As decided.
    Done,
    /// It was a copy, or gone: nothing of it was stored.
    Duplicate,
}

/// A transaction that was committed.
pub(super) struct Applied {
    pub fates: Vec<Fate>,
    pub emitted: usize,
    /// Lanes of which more is stored: due now.
    pub more: bool,
}

/// Why a transaction was not committed.
pub(super) enum NotApplied {
    /// The database's word.
    Store(StoreError),
    /// A handler's outcome is the broker's to take: the rest is to be committed without it.
    Again,
    /// The handler of this one was disturbed: whatever was before it has gone well, and is to be committed without it.
    Disturbed { at: usize, text: String },
    /// It has become too much: this one and those behind it are another transaction's.
    Full { at: usize },
}

impl From<StoreError> for NotApplied {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<tokio_postgres::Error> for NotApplied {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Store(StoreError::from(error))
    }
}

/// Commits decisions, in their order. Verdicts change where a handler in the transaction failed. A transaction that was
/// not committed is rolled back by the next statement over the connection.
pub(super) async fn apply(door: &mut Door, rules: &Rules, decisions: &mut [Decision]) -> Result<Applied, NotApplied> {
    let limit = door.limit();
    let (client, statements) = door.parts();
    let began = Instant::now();
    let mut transaction = limit.of(client.transaction()).await?;

    // First of all, of everything that came fresh: who is new. And of what was stored: that it still is.
    let fresh: Vec<usize> = (0..decisions.len()).filter(|at| !decisions[*at].is_stored).collect();
    let ids: Vec<Uuid> = fresh.iter().map(|at| decisions[*at].delivery.message_id).collect();
    let mut fates = vec![Fate::Done; decisions.len()];
    if !ids.is_empty() {
        let news = limit.of(statements.remember_inbox(&transaction, rules.number, &ids)).await?;
        for (at, is_new) in fresh.iter().zip(news) {
            if !is_new {
                fates[*at] = Fate::Duplicate;
            }
        }
    }
    let finished = |decision: &Decision| decision.is_stored && matches!(decision.verdict, Verdict::Done(_));
    let done: Vec<usize> = (0..decisions.len()).filter(|at| finished(&decisions[*at])).collect();
    if !done.is_empty() {
        let ids: Vec<Uuid> = done.iter().map(|at| decisions[*at].delivery.message_id).collect();
        let there = limit.of(statements.finish_inbox(&transaction, rules.number, &ids)).await?;
        for (at, was_there) in done.iter().zip(there) {
            if !was_there {
                fates[*at] = Fate::Duplicate;
            }
        }
    }

    // Handlers that write SQL of their own, one after the other; what they emit, by decision.
    let mut ran: Vec<Option<Rows>> = decisions.iter().map(|_| None).collect();
    let mut parked: HashSet<Uuid> = HashSet::new();
    let (mut has_run, mut ran_bytes) = (false, 0);
    for at in 0..decisions.len() {
        if fates[at] == Fate::Duplicate {
            continue;
        }
        if decisions[at].verdict.parks() {
            // It failed in a transaction that goes again.
            parked.insert(decisions[at].lane_id);
            continue;
        }
        if parked.contains(&decisions[at].lane_id) && decisions[at].is_in_transaction() {
            decisions[at].verdict = if decisions[at].is_stored { Verdict::Left } else { Verdict::Behind };
            continue;
        }
        if decisions[at].is_in_transaction() {
            let is_full = began.elapsed() >= TRANSACTION_TIME || ran_bytes >= rules.commit_bytes_max;
            if std::mem::replace(&mut has_run, true) && is_full {
                return Err(NotApplied::Full { at });
            }
            let decision = &mut decisions[at];
            let savepoint = limit.of(transaction.savepoint(SAVEPOINT)).await?;
            match run_in(&savepoint, rules, decision).await {
                Ok(rows) => {
                    if decision.is_stored {
                        let id = [decision.delivery.message_id];
                        let there = limit.of(statements.finish_inbox(&savepoint, rules.number, &id)).await?;
                        if there != [true] {
                            limit.of(savepoint.rollback()).await?;
                            fates[at] = Fate::Duplicate;
                            continue;
                        }
                    }
                    match limit.of(savepoint.commit()).await {
                        Ok(()) => {
                            ran_bytes += rows.bytes_in_memory();
                            ran[at] = Some(rows);
                        }
                        Err(error @ StoreError::ConnectionLost(_)) => return Err(error.into()),
                        Err(StoreError::Transient { sqlstate, text }) => {
                            rules.metrics.disturbed.add(1);
                            return Err(NotApplied::Disturbed { at, text: format!("{sqlstate}: {text}") });
                        }
                        Err(error) => {
                            // The handler has swallowed an error of its SQL: the savepoint cannot be released.
                            let text = format!("rollback to savepoint {SAVEPOINT}");
                            limit.of(transaction.batch_execute(&text)).await?;
                            let error = HandlerError::retry(format!("the handler's transaction had failed: {error}"));
                            rules.metrics.failed.add(1);
                            decision.verdict = rules.judge(error, decision.attempts, decision.is_stored);
                        }
                    }
                }
                Err(error) if error.kind == ErrorKind::Disturbed => {
                    return Err(NotApplied::Disturbed { at, text: error.text });
                }
                Err(error) => {
                    // A statement of its own that still runs is ended by the server within the handler's time.
                    limit.longer_by(rules.handler_time).of(savepoint.rollback()).await?;
                    decision.verdict = rules.judge(error, decision.attempts, decision.is_stored);
                }
            }
            if decision.verdict.is_brokers() {
                // Its memory is in this transaction: the rest goes again without it.
                return Err(NotApplied::Again);
            }
            if decision.verdict.parks() {
                parked.insert(decision.lane_id);
            }
        }
    }

    // In the order of the decisions: of a lane that is the order of its messages.
    let mut emitted = Rows::default();
    for (at, (decision, fate)) in decisions.iter().zip(&fates).enumerate() {
        let rows = match &decision.verdict {
            Verdict::Done(rows) if *fate == Fate::Done => Some(&**rows),
            _ => ran[at].as_ref(),
        };
        if let Some(rows) = rows
            && (0..rows.len()).any(|row| emitted.try_push_copy(rows, row).is_err())
        {
            // One alone always fits: it is no more than `emit_bytes_max`.
            return Err(NotApplied::Full { at: at.max(1) });
        }
    }
    let written = written(decisions, &fates);
    let number = rules.number;
    if !written.takes_its_lanes_at_once() {
        limit.of(statements.lock_inbox(&transaction, number, &written.lanes)).await?;
    }
    let Written { kept, parked, dead, ended, .. } = written;
    if !kept.is_empty() {
        limit.of(statements.keep_inbox(&transaction, rules, &kept)).await?;
    }
    if !dead.is_empty() {
        let hold = rules.on_dead == OnDead::Hold;
        limit.of(statements.bury_inbox(&transaction, number, &dead, hold)).await?;
    }
    if !parked.is_empty() {
        limit.of(statements.park_inbox(&transaction, number, &parked)).await?;
    }
    if !emitted.is_empty() {
        limit.of(outbox::store(&transaction, &rules.schema, &emitted)).await?;
    }
    // Last: what is stored behind in this transaction is seen.
    let more =
        !ended.is_empty() && limit.of(statements.unpark_inbox(&transaction, number, &ended)).await?.contains(&false);
    limit.of(transaction.commit()).await?;
    Ok(Applied { fates, emitted: emitted.len(), more })
}

/// What a transaction writes beside the memory and the effects.
#[derive(Default)]
struct Written<'a> {
    kept: Vec<&'a Decision>,
    parked: Vec<Parking<'a>>,
    dead: Vec<Burial<'a>>,
    /// Lanes that may go on: their stored head has gone, or is dead here. Ascending.
    ended: Vec<Uuid>,
    /// All of these lanes, with a message of each. Ascending.
    lanes: Vec<(Uuid, Uuid)>,
}

impl Written<'_> {
    /// Whether the first call takes all the lanes that the transaction takes, in their order. An operator who gives dead
    /// letters back takes them in that order too: two passes would meet him.
    fn takes_its_lanes_at_once(&self) -> bool {
        let mut first: Vec<Uuid> = match (self.kept.first(), self.parked.is_empty()) {
            (Some(head), _) => self.kept.iter().filter(|of| of.source == head.source).map(|of| of.lane_id).collect(),
            (None, false) => self.parked.iter().map(|of| of.lane_id).collect(),
            (None, true) => self.ended.clone(),
        };
        first.sort_unstable();
        first.dedup();
        first.len() == self.lanes.len()
    }
}

fn written<'a>(decisions: &'a [Decision], fates: &[Fate]) -> Written<'a> {
    let mut written = Written::default();
    // Lanes whose head fails, or is held.
    let mut waits: HashSet<Uuid> = HashSet::new();
    for (decision, fate) in decisions.iter().zip(fates) {
        let (lane_id, message_id) = (decision.lane_id, decision.delivery.message_id);
        if *fate == Fate::Duplicate {
            if decision.is_stored {
                written.ended.push(lane_id);
                written.lanes.push((lane_id, message_id));
            }
            continue;
        }
        if decision.is_stored && !matches!(decision.verdict, Verdict::Left) || decision.verdict.keeps() {
            written.lanes.push((lane_id, message_id));
        }
        if !decision.is_stored && decision.verdict.keeps() {
            written.kept.push(decision);
        }
        if decision.verdict.parks() {
            waits.insert(lane_id);
        }
        match &decision.verdict {
            Verdict::Done(_) | Verdict::InTransaction if decision.is_stored => written.ended.push(lane_id),
            Verdict::Failed { attempts, due_in_ms, reason, text } => {
                let (attempts, due_in_ms, reason) = (*attempts, *due_in_ms, *reason);
                written.parked.push(Parking { lane_id, message_id, attempts, due_in_ms, reason, text });
            }
            Verdict::Dead { attempts, reason, text, hold } => {
                written.dead.push(Burial { message_id, attempts: *attempts, reason: *reason, text });
                if !hold {
                    written.ended.push(lane_id);
                }
            }
            _ => {}
        }
    }
    written.ended.retain(|lane_id| !waits.contains(lane_id));
    written.ended.sort_unstable();
    written.ended.dedup();
    written.lanes.sort_unstable();
    written.lanes.dedup_by_key(|(lane_id, _)| *lane_id);
    // A lane is parked once: by the last word on it.
    let mut seen = HashSet::new();
    written.parked.reverse();
    written.parked.retain(|lane| seen.insert(lane.lane_id));
    written
}

/// Runs the handler of a decision in a savepoint; answers what it emits.
async fn run_in(savepoint: &Transaction<'_>, rules: &Rules, decision: &Decision) -> Result<Rows, HandlerError> {
    let type_name = &decision.delivery.type_name;
    let Some(handler) = rules.handlers.of(type_name) else { return Err(Rules::no_handler(type_name)) };
    let mut context = rules.context(&decision.delivery, decision.attempts, Some(savepoint));
    rules.run(&**handler, &decision.delivery, &mut context).await?;
    Ok(context.rows)
}
