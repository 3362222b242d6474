//! A subscription's thread: its connection, its incarnation, its places; it reads when it is asked to.
//!
//! Invariants
//! - It is a member for as long as its connection lives: a lost one is the end of the incarnation, and everything in
//!   memory goes with it. What was handed out comes again, from what is written down.
//! - While a batch is out, neither its partitions are given up nor its place is written: the batch itself may be
//!   writing it, in a transaction of the consumer's.
//! - Whether such a transaction has committed is told by the fences, and by nothing else.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::away::Asking;
use super::session::{Out, RETRY, Session};
use super::{BatchEnd, DONE, EventBatch, OPEN, WRITTEN};
use crate::error::{Error, Result};
use crate::metrics::SubscriptionMetrics;
use crate::plan::follow::Runs;
use crate::runtime::thread::ThreadMain;
use crate::seam::dial::Dial;
use crate::seam::store::StoreError;
use crate::store::connect::{Connect, ConnectPlan};
use crate::store::subscriptions::{Filter, Lag, Membership, Registering, Statements};
use tokio::sync::{Notify, mpsc, oneshot, watch};

/// How often a reader that something is stored for brings the store's indexes up to date at most: what is newer than that is
/// read whole for each page, so it is the longer part of a page's time if it is seldom done.
const SUMMARIZE_EVERY: Duration = Duration::from_millis(25);
/// How often a place that is not written by its consumers is written down, at most.
const WRITE_EVERY: Duration = Duration::from_secs(1);
/// A leave that met a conflict is tried again after this.
const LEAVE_AGAIN: Duration = Duration::from_millis(20);
/// The lag that is a metric ends here.
const LAG_EVENTS_MAX: i32 = 10_000;

pub(super) type NextReply = oneshot::Sender<Result<Option<EventBatch>>>;

/// What a subscription's handle asks for.
pub(in crate::engine) enum Order {
    /// What became of the batch before is said by that; then the next one.
    Next(NextReply),
    /// How far it is behind.
    Lag(oneshot::Sender<Result<Lag>>),
    /// Leave.
    Stop(oneshot::Sender<()>),
}

/// The thread.
pub(super) struct ReaderMain {
    pub connect: ConnectPlan,
    pub statements: Arc<Statements>,
    pub name: String,
    pub from: Option<i64>,
    pub filter: Filter,
    pub who: Registering,
    pub poll: Duration,
    pub call_timeout: Duration,
    pub orders: mpsc::Receiver<Order>,
    pub stored: watch::Receiver<u64>,
    pub stopped: watch::Receiver<bool>,
    /// A batch is done.
    pub acknowledged: Arc<Notify>,
    pub metrics: Arc<SubscriptionMetrics>,
    pub started: Option<oneshot::Sender<Result<()>>>,
}

/// How a session ended.
pub(super) enum Ended {
    /// For good; who asked is answered when it is over.
    Left(Option<oneshot::Sender<()>>),
    /// The connection or the membership is gone.
    Lost(StoreError),
}

/// What woke the reader.
enum Woken {
    Order(Option<Order>),
    Time,
    Said,
    Stopped,
}

/// What others have said on the connection.
#[derive(Default)]
struct Heard {
    said: Notify,
    members: std::cell::Cell<bool>,
    lost: std::cell::Cell<bool>,
}

impl ThreadMain for ReaderMain {
    type Output = ();

    async fn run<R: Dial>(mut self, runtime: R) {
        let heard = std::rc::Rc::new(Heard::default());
        let hear = heard.clone();
        let connect = self.connect.on(runtime).on_notification(std::rc::Rc::new(move |said| {
            match said {
                None => hear.lost.set(true),
                // The number of a subscription: its members have changed.
                Some(said) if said.parse::<i32>().is_ok() => hear.members.set(true),
                Some(_) => {}
            }
            hear.said.notify_one();
        }));
        let (_, nobody) = mpsc::channel(1);
        let mut asking = Asking { orders: std::mem::replace(&mut self.orders, nobody), waiting: None };
        let mut retry = RETRY.0;
        loop {
            heard.lost.set(false);
            let begun = self.meanwhile(&mut asking, self.begin(&connect)).await;
            let ended = match begun.and_then(|begun| begun.map_err(Ended::Lost)) {
                Ok(mut session) => {
                    if let Some(started) = self.started.take() {
                        let _ = started.send(Ok(()));
                    }
                    let ended = self.live(&mut session, &heard, &mut asking).await;
                    if session.has_read {
                        retry = RETRY.0;
                    }
                    ended
                }
                Err(ended) => ended,
            };
            let Some(error) = self.lost(ended, &mut asking) else { return };
            tracing::warn!(subscription = self.name, %error, "a subscription begins again");
            if let Err(ended) = self.meanwhile(&mut asking, tokio::time::sleep(retry)).await {
                self.lost(ended, &mut asking);
                return;
            }
            retry = (retry * 2).min(RETRY.1);
        }
    }
}

impl ReaderMain {
    /// Connects and joins under a new incarnation.
    async fn begin(&self, connect: &impl Connect) -> std::result::Result<Session, StoreError> {
        let client = connect.connect().await?;
        let calls = async {
            if self.who.direct {
                self.statements.listen(&client).await?;
            }
            let incarnation = self.statements.register(&client, &self.who).await?;
            let subscription = self.statements.join(&client, &self.name, incarnation, self.from).await?;
            Ok::<_, StoreError>(Membership { subscription, incarnation })
        };
        let member = self.within(calls).await?;
        let now = Instant::now();
        Ok(Session {
            client,
            member,
            epoch: None,
            runs: Runs::default(),
            out: None,
            give_up: Vec::new(),
            asked: false,
            has_read: false,
            look_at: now,
            summarize_at: Some(now),
            summarized_to: None,
            write_at: now,
            read_at: now,
        })
    }

    async fn within<T>(
        &self,
        call: impl Future<Output = std::result::Result<T, StoreError>>,
    ) -> std::result::Result<T, StoreError> {
        match tokio::time::timeout(self.call_timeout, call).await {
            Ok(answer) => answer,
            Err(_) => Err(StoreError::no_answer(self.call_timeout.as_millis())),
        }
    }

    /// Until the connection or the subscription ends.
    async fn live(&mut self, session: &mut Session, heard: &Heard, asking: &mut Asking) -> Ended {
        loop {
            let step = async {
                self.step(session, heard, &mut asking.waiting).await?;
                // After a page, whose reader is busy with it, and not before one.
                if session.summarize_at.is_some_and(|at| at <= Instant::now()) {
                    self.summarize(session).await?;
                }
                Ok(())
            };
            if let Err(error) = step.await {
                return Ended::Lost(error);
            }
            let due = session.due(asking.waiting.is_some());
            let woken = self.wait(heard, asking, due).await;
            match woken {
                Woken::Time => {}
                Woken::Said => session.read_at = Instant::now(),
                Woken::Order(Some(Order::Next(reply))) => {
                    asking.waiting = Some(reply);
                    session.asked = true;
                }
                Woken::Order(Some(Order::Lag(reply))) => {
                    let lag = self.lag(session).await;
                    let lost = lag.as_ref().err().is_some_and(|error| matches!(error, StoreError::ConnectionLost(_)));
                    let _ = reply.send(lag.map_err(Error::from));
                    if lost {
                        return Ended::Lost(StoreError::ConnectionLost("while the lag was asked for".to_owned()));
                    }
                }
                Woken::Order(Some(Order::Stop(reply))) => {
                    self.leave(session).await;
                    return Ended::Left(Some(reply));
                }
                Woken::Order(None) | Woken::Stopped => {
                    self.leave(session).await;
                    if let Some(reply) = asking.waiting.take() {
                        let _ = reply.send(Ok(None));
                    }
                    return Ended::Left(None);
                }
            }
        }
    }

    async fn wait(&mut self, heard: &Heard, asking: &mut Asking, due: Instant) -> Woken {
        let Asking { orders, waiting } = asking;
        let wants = waiting.is_some();
        let stored = async {
            if !wants || self.stored.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        // Who asked may not wait any more, and ask for something else.
        let gone = async {
            match waiting {
                Some(reply) => reply.closed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            _ = self.stopped.wait_for(|stopped| *stopped) => Woken::Stopped,
            order = orders.recv(), if !wants => Woken::Order(order),
            () = gone => Woken::Time,
            () = heard.said.notified() => Woken::Said,
            () = stored => Woken::Said,
            () = self.acknowledged.notified() => Woken::Time,
            () = tokio::time::sleep_until(due.into()) => Woken::Time,
        }
    }

    /// Whatever is due.
    async fn step(
        &mut self,
        session: &mut Session,
        heard: &Heard,
        waiting: &mut Option<NextReply>,
    ) -> std::result::Result<(), StoreError> {
        if heard.lost.get() {
            return Err(StoreError::ConnectionLost("the connection has ended".to_owned()));
        }
        if std::mem::take(&mut session.asked) {
            self.settle_out(session).await?;
        }
        session.settle_unasked();
        if heard.members.replace(false) || session.look_at <= Instant::now() {
            self.look(session).await?;
        }
        if session.out.is_none() && !session.give_up.is_empty() {
            self.write(session).await?;
            let given = std::mem::take(&mut session.give_up);
            session.runs.remove(&given);
            self.within(self.statements.release(&session.client, session.member, &given)).await?;
        }
        if session.write_at <= Instant::now() && session.out.is_none() {
            self.write(session).await?;
        }
        let Some(reply) = waiting.take_if(|reply| !reply.is_closed()) else {
            *waiting = None;
            return Ok(());
        };
        *waiting = Some(reply);
        if let Some(out) = &mut session.out {
            if out.not_before > Instant::now() {
                return Ok(());
            }
            out.attempt += 1;
            out.end.state.store(OPEN, Ordering::Release);
            let batch = EventBatch { end: out.end.clone(), attempt: out.attempt };
            self.metrics.batches_again.add(1);
            hand(waiting, batch);
            return Ok(());
        }
        if session.read_at <= Instant::now() {
            self.read(session, waiting).await?;
        }
        Ok(())
    }

    /// What became of the batch that is out, now that another is asked for.
    async fn settle_out(&self, session: &mut Session) -> std::result::Result<(), StoreError> {
        let Some(out) = session.out.take() else { return Ok(()) };
        match out.end.state.load(Ordering::Acquire) {
            DONE => session.done(&out, 0),
            WRITTEN => {
                let fences = self.within(self.statements.fences(&session.client, session.member, &out.before)).await?;
                let all_at = |more: i64| {
                    fences.len() == out.before.held.len()
                        && out.before.held.iter().all(|held| fences.contains(&(held.partition, held.fence + more)))
                };
                if all_at(1) {
                    session.done(&out, 1);
                } else if all_at(0) {
                    out.end.state.store(OPEN, Ordering::Release);
                    session.again(out);
                } else {
                    // Some of it is another's: from what is written down.
                    session.drop_all();
                }
            }
            _ => session.again(out),
        }
        Ok(())
    }

    /// Who has what.
    async fn look(&self, session: &mut Session) -> std::result::Result<(), StoreError> {
        let shared = self.within(self.statements.share(&session.client, session.member, self.who.lease_ms)).await?;
        if !shared.alive {
            return Err(StoreError::ConnectionLost("this is no member any more".to_owned()));
        }
        if session.epoch.replace(shared.epoch).is_some_and(|before| before != shared.epoch) {
            session.drop_all();
        }
        if let Some(out) = &session.out {
            // Its own transaction may have raised them: whoever acknowledges it will see. The others go on.
            let out_of = |partition: i32| out.before.held.iter().any(|held| held.partition == partition);
            let (theirs, others): (Vec<_>, Vec<_>) =
                shared.written.into_iter().partition(|written| out_of(written.held.partition));
            let mut give_up: Vec<i32> =
                theirs.iter().filter(|written| written.give_up).map(|written| written.held.partition).collect();
            give_up.extend(session.runs.reconcile(others));
            session.give_up = give_up;
        } else {
            session.give_up = session.runs.reconcile(shared.written);
        }
        session.look_at = Instant::now() + Duration::from_millis(self.who.lease_ms as u64 / 4);
        session.read_at = Instant::now();
        let held = session.runs.partition_count() + session.out.as_ref().map_or(0, |out| out.before.held.len());
        self.metrics.partitions_now.set(held as u64);
        if session.out.is_none() {
            let lag = self.within(self.statements.measure(&session.client, &self.name, LAG_EVENTS_MAX)).await?;
            self.metrics.lag_events_now.set(lag.events);
            self.metrics.lag_age_ms_now.set(lag.oldest_age_ms);
        }
        Ok(())
    }

    /// Brings the indexes up to what was stored.
    async fn summarize(&self, session: &mut Session) -> std::result::Result<(), StoreError> {
        session.summarize_at = None;
        match self.within(self.statements.summarize(&session.client, session.summarized_to)).await {
            Err(error @ StoreError::ConnectionLost(_)) => return Err(error),
            // It costs time, not events: pages are found without it.
            Err(error) => tracing::debug!(%error, "the event store's indexes could not be brought up to date"),
            Ok(summarized_to) => session.summarized_to = summarized_to,
        }
        Ok(())
    }

    /// Pages until there is one with events, or nothing more to read.
    async fn read(
        &self,
        session: &mut Session,
        waiting: &mut Option<NextReply>,
    ) -> std::result::Result<(), StoreError> {
        session.runs.merge();
        if session.runs.runs.is_empty() {
            session.read_at = session.look_at;
            return Ok(());
        }
        // In turn: one that has much to catch up does not keep the others waiting.
        session.runs.runs.rotate_left(1);
        let run = &session.runs.runs[0];
        let call = self.statements.read(&session.client, session.member.subscription, run, &self.filter);
        let page = self.within(call).await?;
        session.has_read = true;
        if session.epoch.is_some_and(|epoch| epoch != page.epoch) {
            session.drop_all();
            return Ok(());
        }
        // Something was stored, for whomever.
        let moved = !page.ahead.whole || run.held.iter().any(|held| held.resolved != page.ahead.target);
        if moved && session.summarize_at.is_none() {
            session.summarize_at = Some(Instant::now() + SUMMARIZE_EVERY);
        }
        if page.events.is_empty() {
            let was_quiet = run.quiet;
            session.runs.runs[0].advance(&page.ahead);
            let rest = session.runs.runs.iter().any(|run| !run.quiet);
            let is_over = page.ahead.whole && (was_quiet || !rest);
            session.read_at = if is_over && !rest { Instant::now() + self.poll } else { Instant::now() };
            return Ok(());
        }
        let before = session.runs.runs.remove(0);
        let mut run = before.clone();
        run.advance(&page.ahead);
        // Behind the last event there is nothing to look for before something is said, or it is time.
        let is_over = run.quiet && session.runs.runs.iter().all(|run| run.quiet);
        session.read_at = if is_over { Instant::now() + self.poll } else { Instant::now() };
        self.metrics.events.add(page.events.len() as u64);
        self.metrics.batches.add(1);
        let end = Arc::new(BatchEnd {
            state: OPEN.into(),
            member: session.member,
            run,
            statements: self.statements.clone(),
            acknowledged: self.acknowledged.clone(),
            events: page.events,
        });
        session.out = Some(Out { end: end.clone(), before, attempt: 1, not_before: Instant::now() });
        hand(waiting, EventBatch { end, attempt: 1 });
        Ok(())
    }

    /// Writes down what has moved.
    async fn write(&self, session: &mut Session) -> std::result::Result<(), StoreError> {
        session.write_at = Instant::now() + WRITE_EVERY;
        for run in session.runs.runs.iter_mut().filter(|run| run.moved) {
            let call = async { Ok(self.statements.checkpoint(&session.client, session.member, run).await?) };
            match self.within(call).await {
                Ok(()) => {
                    run.moved = false;
                    run.held.iter_mut().for_each(|held| held.fence += 1);
                }
                Err(StoreError::Refused { sqlstate, text }) if sqlstate == super::CHECKPOINT_LOST => {
                    tracing::info!(subscription = self.name, text, "partitions have gone to another member");
                    session.drop_all();
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn lag(&self, session: &mut Session) -> std::result::Result<Lag, StoreError> {
        session.settle_unasked();
        if session.out.is_none() {
            self.write(session).await?;
        }
        self.within(self.statements.measure(&session.client, &self.name, 1_000_000)).await
    }

    /// An orderly end. What cannot be written is read again by whoever comes; others wait for what is not released until
    /// they see the connection's end, so a conflict is tried again, for as long as one call may take.
    async fn leave(&self, session: &mut Session) {
        session.settle_unasked();
        let until = Instant::now() + self.call_timeout;
        let left = loop {
            let left = async {
                self.write(session).await?;
                self.within(self.statements.leave(&session.client, session.member)).await
            };
            match left.await {
                Err(StoreError::Transient { .. }) if Instant::now() + LEAVE_AGAIN < until => {
                    tokio::time::sleep(LEAVE_AGAIN).await;
                }
                left => break left,
            }
        };
        if let Err(error) = left {
            tracing::warn!(subscription = self.name, %error, "it leaves without a word: its connection's end tells");
        }
    }
}

fn hand(waiting: &mut Option<NextReply>, batch: EventBatch) {
    if let Some(reply) = waiting.take() {
        // One that is not taken is dropped, and so not done.
        let _ = reply.send(Ok(Some(batch)));
    }
}
