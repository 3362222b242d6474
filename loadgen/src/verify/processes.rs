//! The processes of `verify`: this binary again, as sink and as engine.
//!
//! Invariants
//! - A child does not outlive this process: it is killed when its handle goes, and the kernel kills it when
//!   this process is killed.
//! - A kill is SIGKILL: nothing gets to say goodbye.

use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::failure::{Failure, Result};

/// A child of this binary.
#[derive(Debug)]
pub struct Process {
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    extra: Vec<(String, String)>,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts one.
    ///
    /// # Errors
    /// Of the system.
    pub fn start(arguments: Vec<String>, environment: Vec<(String, String)>) -> Result<Self> {
        let mut this = Self { arguments, environment, extra: Vec::new(), running: None };
        this.start_again()?;
        Ok(this)
    }

    /// Starts it again with the same arguments.
    ///
    /// # Errors
    /// Of the system.
    pub fn start_again(&mut self) -> Result<()> {
        let program = std::env::current_exe().map_err(Failure::io("finding this binary"))?;
        let mut command = Command::new(program);
        command
            .args(&self.arguments)
            .envs(self.environment.iter().chain(&self.extra).map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C is for this process, which ends its children itself.
            .process_group(0)
            .kill_on_drop(true);
        let parent = std::process::id();
        // SAFETY: between fork and exec only async-signal-safe calls are made.
        unsafe {
            command.pre_exec(move || {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                // The parent may have gone before the call above.
                if libc::getppid() as u32 == parent { Ok(()) } else { Err(std::io::Error::other("the parent is gone")) }
            });
        }
        let mut child = command.spawn().map_err(Failure::io("starting a process"))?;
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::Broken("a child without pipes".into()));
        };
        self.running = Some(Running { child, orders, answers: BufReader::new(answers).lines() });
        Ok(())
    }

    /// What it finds in its environment from its next start on, beside what it was first started with.
    pub fn beside_environment(&mut self, variables: Vec<(String, String)>) {
        self.extra = variables;
    }

    /// Kills it and waits for its end.
    pub async fn kill(&mut self) {
        if let Some(mut running) = self.running.take() {
            let _ = running.child.kill().await;
        }
    }

    /// Stops it where it is (`true`), or lets it go on.
    pub fn stall(&mut self, stops: bool) {
        let Some(pid) = self.running.as_ref().and_then(|running| running.child.id()) else { return };
        let signal = if stops { libc::SIGSTOP } else { libc::SIGCONT };
        // SAFETY: a child of ours that has not been waited for; its number is still its own.
        unsafe { libc::kill(pid as i32, signal) };
    }

    /// Whether it has ended by itself, with what.
    pub fn ended(&mut self) -> Option<String> {
        let running = self.running.as_mut()?;
        running.child.try_wait().ok().flatten().map(|status| status.to_string())
    }

    /// Gives an order and waits for the line that answers it.
    ///
    /// # Errors
    /// [`Failure::TimedOut`] if it does not come in time, or the process ended.
    pub async fn order(&mut self, order: &str, answer: &str, patience: Duration) -> Result<()> {
        let Some(running) = self.running.as_mut() else { return Err(Failure::TimedOut("no process runs".into())) };
        let line = format!("{order}\n");
        running.orders.write_all(line.as_bytes()).await.map_err(Failure::io(format!("ordering \"{order}\"")))?;
        self.await_line(answer, patience).await
    }

    /// Waits for a line that begins so.
    ///
    /// # Errors
    /// As [`Process::order`].
    pub async fn await_line(&mut self, answer: &str, patience: Duration) -> Result<()> {
        let Some(running) = self.running.as_mut() else { return Err(Failure::TimedOut("no process runs".into())) };
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match tokio::time::timeout(left, running.answers.next_line()).await {
                Ok(Ok(Some(line))) if line.starts_with(answer) => return Ok(()),
                Ok(Ok(Some(_))) => {}
                Ok(Ok(None) | Err(_)) => {
                    return Err(Failure::TimedOut(format!("a process ended before it said \"{answer}\"")));
                }
                Err(_) => {
                    return Err(Failure::TimedOut(format!("a process did not say \"{answer}\" within {patience:?}")));
                }
            }
        }
    }
}
