//! The faults of `verify`, one after the other, and the copies each may cause.
//!
//! Invariants
//! - A fault lasts until the engine works again: the next one meets a working engine.
//! - The bound of the copies is made of what the sink saw: for each fault that can make an owner forget what
//!   was acknowledged, the messages accepted from [`WINDOW`] before it until the engine works again.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use serde::Serialize;

use super::choice::name;
use super::conflicts;
use super::hand_over::Owners;
use super::processes::Process;
use super::proxy::Proxy;
use super::relay;
use crate::broker::client::BrokerClient;
use crate::broker::queue::Faults;
use crate::cli::FaultChoice;
use crate::failure::{Failure, Result};
use crate::sink::frames::Mode;
use crate::sink::socket_transport::SinkControl;
use crate::target::{Target, quoted};

/// How far back what was acknowledged may be forgotten: a cursor is written every 50 ms and commits
/// asynchronously (at most three times the WAL writer's 200 ms), and under these loads both may be late.
pub const WINDOW: Duration = Duration::from_millis(1_500);

/// How often progress is shown.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// A fault that was made.
#[derive(Clone, Debug, Serialize)]
pub struct Incident {
    /// Which.
    pub fault: String,
    /// When, in seconds from the start.
    pub at_s: f64,
    /// How long until the engine worked again.
    pub lasted_s: f64,
    /// Copies it may have caused.
    pub copies_max: u64,
}

/// What can be broken.
#[derive(Debug)]
pub struct Scene {
    /// The database.
    pub target: Arc<Target>,
    /// The engine's schema.
    pub schema: String,
    /// Each engine's way to the server; none on a given one.
    pub proxies: Vec<Proxy>,
    /// A library that moves a process's clock.
    pub wrong_clock: Option<PathBuf>,
    /// The sink.
    pub sink: SinkControl,
    /// It as a broker, where messages arrive from it.
    pub broker: Option<BrokerClient>,
    /// Its process.
    pub sink_process: Process,
    /// The engines' processes.
    pub engines: Vec<Process>,
    /// After each kill beside others: until every partition had a living owner again.
    pub take_overs: Vec<Duration>,
    /// After each order to stop beside others: until the last of its partitions had its next owner.
    pub hand_overs: Vec<Duration>,
    /// After each order to stop: until the process said that it has.
    pub stops: Vec<Duration>,
    /// Samples of the journal's length: when, how many.
    pub timeline: Vec<(Instant, u64)>,
    /// What was done.
    pub incidents: Vec<Incident>,
    /// Randomness of order and times.
    pub random: StdRng,
    /// When it began.
    pub began: Instant,
    /// When the faults end, once they have begun.
    pub until: Option<Instant>,
    /// When progress was last shown.
    pub told: Instant,
}

impl Scene {
    /// Breaks one thing after the other until `until`; each at least once if there is time.
    ///
    /// # Errors
    /// Where something does not come back that must.
    pub async fn play(&mut self, steps: &[FaultChoice], until: Instant) -> Result<()> {
        let mut order = Vec::new();
        while Instant::now() < until {
            if order.is_empty() {
                order = steps.to_vec();
                order.shuffle(&mut self.random);
            }
            let pause = Duration::from_millis(self.random.random_range(300..900));
            self.watch_for(pause).await;
            let Some(fault) = order.pop() else { continue };
            self.make(fault).await?;
        }
        Ok(())
    }

    /// Samples the journal's length for a while.
    pub async fn watch_for(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.sample().await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn sample(&mut self) -> u64 {
        let known = self.accepted();
        let count = self.sink.count().await.map_or(known, |(count, _)| count);
        self.timeline.push((Instant::now(), count));
        self.tell(count);
        count
    }

    /// A line a minute: a long run is seen to go on, also by who keeps only its output.
    fn tell(&mut self, accepted: u64) {
        if self.told.elapsed() < TELL_EVERY {
            return;
        }
        self.told = Instant::now();
        let left = self.until.map_or(0, |until| until.saturating_duration_since(self.told).as_secs());
        let (elapsed, faults) = (self.began.elapsed().as_secs(), self.incidents.len());
        eprintln!("verify: {elapsed} s, {left} s left, {faults} faults, {accepted} messages at the sink");
    }

    async fn make(&mut self, fault: FaultChoice) -> Result<()> {
        let start = Instant::now();
        tracing::info!(fault = name(fault), "fault");
        let mut accepted_to = u64::MAX;
        let forgets = match fault {
            FaultChoice::Refuse => {
                self.sink.mode(Mode::Refuse, 1_000).await?;
                self.watch_for(Duration::from_millis(500)).await;
                self.sink.mode(Mode::NotReady, 500).await?;
                self.watch_for(Duration::from_millis(600)).await;
                false
            }
            FaultChoice::Late => {
                self.sink.mode(Mode::Late, 1_000).await?;
                self.watch_for(Duration::from_millis(1_200)).await;
                false
            }
            FaultChoice::Unknown => {
                // Copies of these are counted by the journal itself: it knows what it answered.
                for mode in [Mode::UnknownAfter, Mode::UnknownBefore, Mode::Silent] {
                    self.sink.mode(mode, 300).await?;
                    self.watch_for(Duration::from_millis(400)).await;
                }
                self.watch_for(Duration::from_millis(1_200)).await;
                false
            }
            FaultChoice::SinkKill => {
                self.sink_process.kill().await;
                tokio::time::sleep(Duration::from_millis(300)).await;
                self.sink_process.start_again()?;
                self.await_sink().await?;
                // What was written and not answered is unknown to the engine.
                true
            }
            FaultChoice::Cut => {
                self.cut_connections().await?;
                // Whose connection has ended may be followed while it lives; both then publish what was not written.
                self.engines.len() > 1
            }
            FaultChoice::CommitCut => {
                let Some(proxy) = self.proxies.choose(&mut self.random).cloned() else { return Ok(()) };
                let after = self.random.random_bool(0.6);
                let before = proxy.cuts();
                proxy.arm(after);
                let deadline = Instant::now() + Duration::from_secs(3);
                while proxy.cuts() == before && Instant::now() < deadline {
                    self.watch_for(Duration::from_millis(20)).await;
                }
                self.engines.len() > 1
            }
            FaultChoice::BackendKill => {
                self.kill_backend().await?;
                true
            }
            FaultChoice::ServerRestart => {
                if let Some(server) = self.target.private() {
                    server.restart().await?;
                }
                true
            }
            FaultChoice::ReadOnly => {
                self.with_setting("default_transaction_read_only", "on", 500..2_500).await?;
                // Connections are given up, as after a cut.
                self.engines.len() > 1
            }
            FaultChoice::StatementTimeout => {
                let ms = self.random.random_range(2..20);
                self.with_setting("statement_timeout", &format!("{ms}ms"), 500..2_500).await?;
                true
            }
            FaultChoice::Conflicts => {
                let client = self.target.connect().await?;
                conflicts::switch(&client, &self.schema, self.random.random_range(50..300)).await?;
                let time = Duration::from_millis(self.random.random_range(500..2_500));
                self.watch_for(time).await;
                conflicts::switch(&client, &self.schema, 0).await?;
                // Nothing was written by a call that failed, and who failed calls again. A neighbour's look may fail too.
                self.engines.len() > 1
            }
            FaultChoice::NetworkDelay => {
                let Some(proxy) = self.proxies.choose(&mut self.random).cloned() else { return Ok(()) };
                proxy.delay(Duration::from_millis(self.random.random_range(10..150)));
                let time = Duration::from_millis(self.random.random_range(500..3_000));
                self.watch_for(time).await;
                proxy.delay(Duration::ZERO);
                true
            }
            FaultChoice::NetworkLoss => {
                let Some(proxy) = self.proxies.choose(&mut self.random).cloned() else { return Ok(()) };
                let time = self.beyond_the_lease_at_times();
                // What was on its way arrives late, or never.
                let arrives = self.random.random_bool(0.5);
                proxy.swallow(true);
                self.watch_for(time).await;
                if !arrives {
                    proxy.drop_all();
                }
                proxy.swallow(false);
                true
            }
            FaultChoice::Skew => {
                let Some(library) = self.wrong_clock.clone() else { return Ok(()) };
                let at = self.random.random_range(0..self.engines.len());
                let moved_s = self.random.random_range(60..7_200) * if self.random.random_bool(0.5) { 1 } else { -1 };
                self.engines[at].kill().await;
                self.sample().await;
                accepted_to = self.accepted();
                // Its clock is wrong until it is killed the next time.
                self.engines[at].beside_environment(super::clock::environment(&library, moved_s));
                self.restart(at).await?;
                self.engines[at].beside_environment(Vec::new());
                true
            }
            FaultChoice::EngineStop => {
                let at = self.random.random_range(0..self.engines.len());
                let before = self.living().await?;
                let owners = Owners::watch(self.target.connect().await?, &self.schema).await?;
                let order = Instant::now();
                self.engines[at].order("stop", "stopped", Duration::from_secs(60)).await?;
                self.stops.push(order.elapsed());
                if self.engines.len() > 1 {
                    self.await_take_over(&before).await?;
                    let ended = self.ended_of(&before).await?;
                    self.hand_overs.extend(owners.handed_over(&ended, order).await?);
                }
                self.restart(at).await?;
                // What it held is handed over exactly. But who takes it reads on from where it was left, and one that
                // cannot catch up within its patience begins at its last cursor.
                self.engines.len() > 1
            }
            FaultChoice::EngineKill => {
                let at = self.random.random_range(0..self.engines.len());
                let before = self.living().await?;
                self.engines[at].kill().await;
                // What the dead one had accepted is all that can come again.
                self.sample().await;
                accepted_to = self.accepted();
                if self.engines.len() > 1 {
                    let ended = self.await_take_over(&before).await?;
                    self.take_overs.extend(ended.then(|| start.elapsed()));
                }
                self.restart(at).await?;
                true
            }
            FaultChoice::EngineStall => {
                let at = self.random.random_range(0..self.engines.len());
                let time = self.beyond_the_lease_at_times();
                self.engines[at].stall(true);
                self.watch_for(time).await;
                self.engines[at].stall(false);
                true
            }
            FaultChoice::HangUp => {
                if let Some(broker) = &self.broker {
                    broker.hang_up().await.map_err(Failure::io("hanging up"))?;
                }
                // What was taken and not answered is unknown to the engine.
                true
            }
            FaultChoice::ShortLocks => {
                let lock_ms = self.random.random_range(5..300);
                self.misbehave(Faults { lock_ms, ..Faults::default() }).await?;
                false
            }
            FaultChoice::Redeliver => {
                let copy_every = self.random.random_range(2..20);
                self.misbehave(Faults { copy_every, ..Faults::default() }).await?;
                false
            }
            _ => false,
        };
        self.await_progress().await?;
        let copies_max = if forgets { accepted_to.min(self.accepted()) - self.accepted_at(start - WINDOW) } else { 0 };
        self.incidents.push(Incident {
            fault: name(fault),
            at_s: start.duration_since(self.began).as_secs_f64(),
            lasted_s: start.elapsed().as_secs_f64(),
            copies_max,
        });
        Ok(())
    }

    /// The broker delivers otherwise for a while.
    async fn misbehave(&mut self, faults: Faults) -> Result<()> {
        let time = Duration::from_millis(self.random.random_range(500..3_000));
        let what = Failure::io("telling the broker to misbehave");
        let Some(broker) = self.broker.take() else { return Ok(()) };
        let told = broker.misbehave(faults).await;
        self.watch_for(time).await;
        let back = broker.misbehave(Faults::default()).await;
        self.broker = Some(broker);
        told.and(back).map_err(what)
    }

    /// Arrivals that the broker still has.
    pub async fn unsettled(&self) -> u64 {
        let Some(broker) = &self.broker else { return 0 };
        relay::arrivals(broker).await.map_or(0, |state| state.waiting + state.out)
    }

    /// Arrivals that are done with, where messages arrive.
    async fn settled(&self) -> Option<u64> {
        relay::arrivals(self.broker.as_ref()?).await.map(|state| state.completed)
    }

    /// An engine that has ended comes back.
    async fn restart(&mut self, at: usize) -> Result<()> {
        self.engines[at].start_again()?;
        self.engines[at].await_line("started", Duration::from_secs(60)).await
    }

    /// A time without an instance: beyond the lease of ten seconds only where somebody else can go on.
    fn beyond_the_lease_at_times(&mut self) -> Duration {
        let long = self.engines.len() > 1 && self.random.random_bool(0.3);
        let ms = if long { 11_000..14_000 } else { 200..2_000 };
        Duration::from_millis(self.random.random_range(ms))
    }

    /// The whole server has another setting for a while, as for everybody who has none of his own.
    async fn with_setting(&mut self, name: &str, value: &str, ms: std::ops::Range<u64>) -> Result<()> {
        let time = Duration::from_millis(self.random.random_range(ms));
        let client = self.target.connect().await?;
        client.batch_execute(&format!("alter system set {name} = '{value}'")).await?;
        client.batch_execute("select pg_reload_conf()").await?;
        self.watch_for(time).await;
        // This session meets the fault as well: each of the two is a statement of its own, and needs no time.
        let mut left = 100;
        let reset = format!("alter system reset {name}");
        while let Err(error) = async {
            client.batch_execute("set statement_timeout = 0").await?;
            client.batch_execute(&reset).await?;
            client.batch_execute("select pg_reload_conf()").await
        }
        .await
        {
            left -= 1;
            if left == 0 {
                return Err(error.into());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Messages the sink has accepted, as last seen.
    fn accepted(&self) -> u64 {
        self.timeline.last().map_or(0, |(_, count)| *count)
    }

    /// Messages the sink had accepted at a moment.
    fn accepted_at(&self, moment: Instant) -> u64 {
        self.timeline.iter().rev().find(|(at, _)| *at <= moment).map_or(0, |(_, count)| *count)
    }

    /// Waits until the sink gets messages again, and arrivals are settled again where there are some.
    async fn await_progress(&mut self) -> Result<()> {
        let (before, settled) = (self.sample().await, self.settled().await);
        let deadline = Instant::now() + Duration::from_secs(40);
        loop {
            if let Some(status) = self.engines.iter_mut().find_map(Process::ended) {
                return Err(Failure::Promise(format!("an engine's process ended by itself: {status}")));
            }
            if self.sample().await > before && (settled.is_none() || self.settled().await > settled) {
                return Ok(());
            }
            if Instant::now() > deadline {
                let last = self.incidents.last().map_or("", |incident| &incident.fault);
                return Err(Failure::Promise(format!(
                    "nothing was published for 40 s after a fault (before it: {last})"
                )));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Incarnations that are not known to be dead, and own partitions.
    async fn living(&self) -> Result<Vec<i32>> {
        let sql = "select number from @.wh_instance i where state = 0 \
             and exists (select from @.wh_partition p where p.owner = i.number)";
        let client = self.target.connect().await?;
        let rows = client.query(&sql.replace('@', &quoted(&self.schema)), &[]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// Those of them that have ended since.
    async fn ended_of(&self, before: &[i32]) -> Result<Vec<i32>> {
        let sql = "select number from @.wh_instance where number = any ($1) and state <> 0";
        let client = self.target.connect().await?;
        let rows = client.query(&sql.replace('@', &quoted(&self.schema)), &[&before]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// Waits until one of these has ended and every partition is owned by a living one. One that owned nothing yet (it
    /// had just come back) is not among them: then, after a lease, the second is enough. Answers whether one has ended.
    async fn await_take_over(&self, before: &[i32]) -> Result<bool> {
        let sql = "select exists (select from @.wh_instance where number = any ($1) and state <> 0), \
             not exists (select from @.wh_partition p left join @.wh_instance i on i.number = p.owner and i.state = 0 \
                 where i.number is null)";
        let client = self.target.connect().await?;
        let sql = client.prepare(&sql.replace('@', &quoted(&self.schema))).await?;
        let since = Instant::now();
        while since.elapsed() < Duration::from_secs(40) {
            let row = client.query_one(&sql, &[&before]).await?;
            let (has_ended, all_owned) = (row.get(0), row.get(1));
            if all_owned && (has_ended || since.elapsed() > Duration::from_secs(12)) {
                return Ok(has_ended);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Err(Failure::Promise("an engine's partitions were not taken over within 40 s".into()))
    }

    async fn await_sink(&mut self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(30);
        while let Err(failure) = self.sink.count().await {
            if Instant::now() > deadline {
                return Err(failure);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// The engine's and the writers' connections of this schema alone: the server may not be ours.
    async fn cut_connections(&mut self) -> Result<()> {
        const CUT: &str = "select pg_terminate_backend(pid) from pg_stat_activity \
             where pid <> pg_backend_pid() and datname = current_database() \
             and (starts_with(application_name, 'corelane/' || $1) or application_name = 'loadgen/' || $1) \
             and random() < 0.5";
        let client = self.target.connect().await?;
        client.execute(CUT, &[&self.schema]).await?;
        Ok(())
    }

    async fn kill_backend(&mut self) -> Result<()> {
        const PIDS: &str = "select pid from pg_stat_activity where pid <> pg_backend_pid() \
             and starts_with(application_name, 'corelane/' || $1) order by random() limit 1";
        let client = self.target.connect().await?;
        let Some(row) = client.query_opt(PIDS, &[&self.schema]).await? else { return Ok(()) };
        let pid: i32 = row.get(0);
        // SAFETY: a process of our own server, named by it just now; a number above 1 addresses that process alone.
        if pid > 1 && unsafe { libc::kill(pid, libc::SIGKILL) } != 0 {
            return Err(Failure::Io {
                what: format!("killing backend {pid}"),
                source: std::io::Error::last_os_error(),
            });
        }
        // The server ends every session once it has noticed. What comes next is not to meet it half way.
        let deadline = Instant::now() + Duration::from_secs(5);
        while !client.is_closed() && Instant::now() < deadline {
            self.watch_for(Duration::from_millis(10)).await;
        }
        self.target.connect().await?;
        Ok(())
    }
}
