//! The faults of `verify`, one after the other, and the copies each may cause.
//!
//! Invariants
//! - Faults that touch the server's processes or its socket exist on the private server only, and are refused
//!   by name elsewhere.
//! - The bound of the copies is made of what the sink saw: for each fault that can make an owner forget what
//!   was acknowledged, the messages accepted from [`WINDOW`] before it until the engine works again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde::Serialize;

use super::processes::Process;
use super::proxy::Proxy;
use crate::cli::FaultChoice;
use crate::failure::{Failure, Result};
use crate::sink::frames::Mode;
use crate::sink::socket_transport::SinkControl;
use crate::target::{Target, quoted};

/// How far back what was acknowledged may be forgotten: a cursor is written every 50 ms and commits
/// asynchronously (at most three times the WAL writer's 200 ms), and under these loads both may be late.
pub const WINDOW: Duration = Duration::from_millis(1_500);

/// What is broken by a step. Foreign writers run all the time and are no steps.
pub const STEPS: [FaultChoice; 10] = [
    FaultChoice::Refuse,
    FaultChoice::Late,
    FaultChoice::Unknown,
    FaultChoice::SinkKill,
    FaultChoice::Cut,
    FaultChoice::CommitCut,
    FaultChoice::BackendKill,
    FaultChoice::ServerRestart,
    FaultChoice::EngineKill,
    FaultChoice::EngineStall,
];

/// Writers.
pub const WRITERS: [FaultChoice; 4] =
    [FaultChoice::ForeignSql, FaultChoice::Enlisted, FaultChoice::LowerXid, FaultChoice::RepeatableRead];

/// Whether a fault needs a server that is ours.
#[must_use]
pub fn needs_private_server(fault: FaultChoice) -> bool {
    matches!(fault, FaultChoice::CommitCut | FaultChoice::BackendKill | FaultChoice::ServerRestart)
}

/// The faults asked for.
///
/// # Errors
/// [`Failure::Usage`] naming those that a given database does not allow.
pub fn choose(asked: &[FaultChoice], private: bool) -> Result<Vec<FaultChoice>> {
    if asked.contains(&FaultChoice::None) {
        return if asked.len() == 1 {
            Ok(Vec::new())
        } else {
            Err(Failure::Usage("--faults none stands alone".into()))
        };
    }
    if asked.contains(&FaultChoice::All) {
        let all = STEPS.iter().chain(&WRITERS).copied();
        return Ok(all.filter(|fault| private || !needs_private_server(*fault)).collect());
    }
    let refused: Vec<String> =
        asked.iter().filter(|fault| !private && needs_private_server(**fault)).map(|fault| name(*fault)).collect();
    if !refused.is_empty() {
        return Err(Failure::Usage(format!(
            "--faults {}: not with --database-url: loadgen touches the processes and the socket of its own server only",
            refused.join(",")
        )));
    }
    Ok(asked.to_vec())
}

/// The word of the command line.
#[must_use]
pub fn name(fault: FaultChoice) -> String {
    use clap::ValueEnum;
    fault.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

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
    /// The engine's way to the server.
    pub proxy: Option<Proxy>,
    /// The sink.
    pub sink: SinkControl,
    /// Its process.
    pub sink_process: Process,
    /// The engines' processes.
    pub engines: Vec<Process>,
    /// After each kill beside others: until every partition had a living owner again.
    pub take_overs: Vec<Duration>,
    /// Samples of the journal's length: when, how many.
    pub timeline: Vec<(Instant, u64)>,
    /// What was done.
    pub incidents: Vec<Incident>,
    /// Randomness of order and times.
    pub random: StdRng,
    /// When it began.
    pub began: Instant,
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
        count
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
                let Some(proxy) = self.proxy.clone() else { return Ok(()) };
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
            FaultChoice::EngineKill => {
                let at = self.random.random_range(0..self.engines.len());
                let before = self.living().await?;
                self.engines[at].kill().await;
                // What the dead one had accepted is all that can come again.
                self.sample().await;
                accepted_to = self.accepted();
                if self.engines.len() > 1 {
                    self.await_take_over(start, &before).await?;
                }
                self.engines[at].start_again()?;
                self.engines[at].await_line("started", Duration::from_secs(25)).await?;
                true
            }
            FaultChoice::EngineStall => {
                let at = self.random.random_range(0..self.engines.len());
                // Beyond the lease of ten seconds only where somebody else can go on.
                let long = self.engines.len() > 1 && self.random.random_bool(0.3);
                let ms = if long { 11_000..14_000 } else { 200..2_000 };
                let time = Duration::from_millis(self.random.random_range(ms));
                self.engines[at].stall(true);
                self.watch_for(time).await;
                self.engines[at].stall(false);
                true
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

    /// Messages the sink has accepted, as last seen.
    fn accepted(&self) -> u64 {
        self.timeline.last().map_or(0, |(_, count)| *count)
    }

    /// Messages the sink had accepted at a moment.
    fn accepted_at(&self, moment: Instant) -> u64 {
        self.timeline.iter().rev().find(|(at, _)| *at <= moment).map_or(0, |(_, count)| *count)
    }

    /// Waits until the sink gets messages again.
    async fn await_progress(&mut self) -> Result<()> {
        let before = self.sample().await;
        let deadline = Instant::now() + Duration::from_secs(40);
        loop {
            if let Some(status) = self.engines.iter_mut().find_map(Process::ended) {
                return Err(Failure::TimedOut(format!("an engine's process ended by itself: {status}")));
            }
            if self.sample().await > before {
                return Ok(());
            }
            if Instant::now() > deadline {
                let last = self.incidents.last().map_or("", |incident| &incident.fault);
                return Err(Failure::TimedOut(format!(
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

    /// Waits until one of these is dead and every partition is owned by a living one, and notes how long that took.
    async fn await_take_over(&mut self, since: Instant, before: &[i32]) -> Result<()> {
        let sql = "select exists (select from @.wh_instance where number = any ($1) and state <> 0) \
             and not exists (select from @.wh_partition p left join @.wh_instance i on i.number = p.owner and i.state = 0 \
                 where i.number is null)";
        let client = self.target.connect().await?;
        let sql = client.prepare(&sql.replace('@', &quoted(&self.schema))).await?;
        while since.elapsed() < Duration::from_secs(20) {
            if client.query_one(&sql, &[&before]).await?.get(0) {
                self.take_overs.push(since.elapsed());
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Err(Failure::TimedOut("a killed engine's partitions were not taken over within 20 s".into()))
    }

    async fn await_sink(&mut self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(5);
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
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_the_server_are_refused_by_name_elsewhere() {
        let error = choose(&[FaultChoice::BackendKill, FaultChoice::Cut], false).unwrap_err().to_string();
        assert!(error.contains("backend-kill") && !error.contains("cut,"), "{error}");
        let all = choose(&[FaultChoice::All], false).unwrap();
        assert!(all.contains(&FaultChoice::EngineKill) && !all.contains(&FaultChoice::ServerRestart));
        assert_eq!(choose(&[FaultChoice::All], true).unwrap().len(), STEPS.len() + WRITERS.len());
        assert!(choose(&[FaultChoice::None], false).unwrap().is_empty());
        assert!(choose(&[FaultChoice::None, FaultChoice::Cut], true).is_err());
    }
}
