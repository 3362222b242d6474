//! One private cluster: made, started, stopped, started again, removed.
//!
//! Invariants
//! - The server is a child of a thread that lives as long as the process: the kernel's death signal follows
//!   the spawning thread, and a test's thread ends before its process does.
//! - The death signal is SIGQUIT (SIGKILL would leave back ends behind), set after the change of user, which
//!   clears it.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::{Binaries, PrivatePostgresError, fetch, find, io, sweep};

/// The longest path a unix socket can have, less its name.
const SOCKET_DIRECTORY_MAX: usize = 107 - ".s.PGSQL.5432".len() - 1;
const READY_IN: Duration = Duration::from_secs(60);

/// How to make a cluster.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Further settings, `name=value`.
    pub settings: Vec<String>,
    /// The binaries; found by [`find`] if not given.
    pub binaries: Option<Binaries>,
}

/// How to stop a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMode {
    /// Ends the sessions, writes a checkpoint.
    Fast,
    /// As a crash would: recovery at the next start.
    Immediate,
}

/// A private cluster; its server ends and its directory goes when this is dropped.
#[derive(Debug)]
pub struct PrivatePostgres {
    directory: PathBuf,
    binaries: Binaries,
    settings: Vec<String>,
    user: Option<(u32, u32)>,
    server: Option<Child>,
    durable: bool,
    _lock: File,
}

impl PrivatePostgres {
    /// Makes a cluster and starts its server; takes about two seconds.
    ///
    /// # Errors
    /// [`PrivatePostgresError`]: no binaries, no room, no start.
    pub fn start(options: Options) -> Result<Self, PrivatePostgresError> {
        let binaries = match options.binaries.or_else(find) {
            Some(binaries) => binaries,
            None => fetch::fetch().map_err(PrivatePostgresError::NoBinaries)?,
        };
        let user = if rustix::process::geteuid().is_root() { Some(unprivileged_user()?) } else { None };
        let parent = Path::new("/var/tmp");
        let parent = if parent.is_dir() { parent.to_owned() } else { std::env::temp_dir() };
        sweep::sweep(&parent);
        let (directory, lock) =
            sweep::new_directory(&parent).map_err(io(format!("a directory under {}", parent.display())))?;
        let durable = !on_memory(&directory);
        // From here on the directory goes with `this`, also when a step below fails.
        let mut this =
            Self { directory, binaries, settings: options.settings, user, server: None, durable, _lock: lock };
        if this.directory.as_os_str().len() > SOCKET_DIRECTORY_MAX {
            return Err(PrivatePostgresError::NotStarted {
                what: format!("{} is too long for a unix socket", this.directory.display()),
                log: String::new(),
            });
        }
        if let Some((uid, gid)) = user {
            chown(&this.directory, Some(uid), Some(gid)).map_err(io("giving the directory to the server's user"))?;
        }
        this.init()?;
        this.start_again()?;
        Ok(this)
    }

    /// A URL for a database of the server (`postgres` exists).
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        let host: String = self.directory.display().to_string().replace('/', "%2F");
        format!("postgresql://postgres@{host}/{database}")
    }

    /// The socket's directory.
    #[must_use]
    pub fn socket_directory(&self) -> &Path {
        &self.directory
    }

    /// The data directory.
    #[must_use]
    pub fn data_directory(&self) -> PathBuf {
        self.directory.join("data")
    }

    /// The server's log.
    #[must_use]
    pub fn log_path(&self) -> PathBuf {
        self.directory.join("log")
    }

    /// The binaries it runs.
    #[must_use]
    pub fn binaries(&self) -> &Binaries {
        &self.binaries
    }

    /// Whether its files are on a disk. If not, nothing measured with it says anything about a real server.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        self.durable
    }

    /// The postmaster's process id, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.server.as_ref().map(Child::id)
    }

    /// The user and group the server runs as, if not this process's own: for tools that must run as it.
    #[must_use]
    pub fn user(&self) -> Option<(u32, u32)> {
        self.user
    }

    /// Stops the server and waits for its end.
    ///
    /// # Errors
    /// If it cannot be signalled.
    pub fn stop(&mut self, mode: StopMode) -> Result<(), PrivatePostgresError> {
        let Some(mut server) = self.server.take() else { return Ok(()) };
        let signal = match mode {
            StopMode::Fast => rustix::process::Signal::INT,
            StopMode::Immediate => rustix::process::Signal::QUIT,
        };
        let pid = rustix::process::Pid::from_child(&server);
        rustix::process::kill_process(pid, signal).map_err(|error| io("stopping the server")(error.into()))?;
        // One that a test has frozen would never see it.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::CONT);
        server.wait().map_err(io("waiting for the server's end"))?;
        Ok(())
    }

    /// Starts the server if it does not run, and waits until it answers.
    ///
    /// # Errors
    /// With the end of its log, if it does not.
    pub fn start_again(&mut self) -> Result<(), PrivatePostgresError> {
        if self.server.is_some() {
            return Ok(());
        }
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data_directory());
        for setting in [
            "listen_addresses=".to_owned(),
            format!("unix_socket_directories={}", self.directory.display()),
            "unix_socket_permissions=0777".to_owned(),
            "port=5432".to_owned(),
            "max_connections=200".to_owned(),
        ]
        .iter()
        .chain(&self.settings)
        {
            command.arg("-c").arg(setting);
        }
        let log = File::options().create(true).append(true).open(self.log_path()).map_err(io("the server's log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone().map_err(io("the server's log"))?).stderr(log);
        self.server = Some(spawn_bound_to_process(command).map_err(io("starting the server"))?);
        self.wait_until_ready()
    }

    /// Stops and starts.
    ///
    /// # Errors
    /// As the two.
    pub fn restart(&mut self, mode: StopMode) -> Result<(), PrivatePostgresError> {
        self.stop(mode)?;
        self.start_again()
    }

    fn init(&self) -> Result<(), PrivatePostgresError> {
        let output = self
            .command("initdb")
            .args(["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "--no-sync", "-D"])
            .arg(self.data_directory())
            .output()
            .map_err(io("initdb"))?;
        if !output.status.success() {
            return Err(PrivatePostgresError::NotStarted {
                what: format!("initdb ended with {}", output.status),
                log: String::from_utf8_lossy(&output.stderr).into_owned(),
            });
        }
        Ok(())
    }

    /// A command of the binaries, run as the server's user, in its directory.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.binaries.directory.join(program));
        command.current_dir(&self.directory).env_remove("PGDATA").env("LC_ALL", "C");
        if let Some((uid, gid)) = self.user {
            command.uid(uid).gid(gid);
        }
        command
    }

    fn wait_until_ready(&mut self) -> Result<(), PrivatePostgresError> {
        let deadline = Instant::now() + READY_IN;
        loop {
            let ended = match &mut self.server {
                Some(server) => server.try_wait().map_err(io("the server"))?,
                None => None,
            };
            if let Some(status) = ended {
                self.server = None;
                return Err(PrivatePostgresError::NotStarted {
                    what: format!("the server ended with {status}"),
                    log: self.log_end(),
                });
            }
            // "ready" stands last in the pid file when connections are taken. The file of a server that was killed
            // says so as well: its first line is that one's process.
            let pid_file = std::fs::read_to_string(self.data_directory().join("postmaster.pid")).unwrap_or_default();
            let own = self.pid().map(|pid| pid.to_string());
            let mut lines = pid_file.lines().map(str::trim);
            if lines.next() == own.as_deref() && lines.nth(6) == Some("ready") {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(PrivatePostgresError::NotStarted {
                    what: format!("not ready after {READY_IN:?}"),
                    log: self.log_end(),
                });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn log_end(&self) -> String {
        let mut text = String::new();
        if let Ok(mut file) = File::open(self.log_path()) {
            let _ = file.read_to_string(&mut text);
        }
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for PrivatePostgres {
    fn drop(&mut self) {
        let _ = self.stop(StopMode::Immediate);
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Runs the command as a child of a thread that never ends, so that the death signal means this process.
fn spawn_bound_to_process(mut command: Command) -> std::io::Result<Child> {
    type Request = (Command, mpsc::Sender<std::io::Result<Child>>);
    static SPAWNER: std::sync::OnceLock<mpsc::Sender<Request>> = std::sync::OnceLock::new();
    let parent = std::process::id();
    // SAFETY: between fork and exec only prctl and getppid are called, which are async-signal-safe. The standard
    // library changes the user before this runs, which would otherwise clear the death signal.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGQUIT) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // The parent may have died before the call.
            if libc::getppid() as u32 != parent {
                return Err(std::io::Error::other("the parent has ended"));
            }
            Ok(())
        });
    }
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, requests) = mpsc::channel::<Request>();
        let run = move || {
            for (mut command, answer) in requests {
                let _ = answer.send(command.spawn());
            }
        };
        // Without the thread the channel is closed, and the caller below gets an error.
        let _ = std::thread::Builder::new().name("private-postgres".into()).spawn(run);
        sender
    });
    let (sender, answer) = mpsc::channel();
    spawner.send((command, sender)).map_err(|_| std::io::Error::other("the spawning thread has ended"))?;
    answer.recv().map_err(|_| std::io::Error::other("the spawning thread has ended"))?
}

/// `postgres`, else `nobody`.
fn unprivileged_user() -> Result<(u32, u32), PrivatePostgresError> {
    let passwd = std::fs::read_to_string("/etc/passwd").map_err(io("/etc/passwd"))?;
    for name in ["postgres", "nobody"] {
        for line in passwd.lines() {
            let mut fields = line.split(':');
            if fields.next() != Some(name) {
                continue;
            }
            if let (Some(Ok(uid)), Some(Ok(gid))) = (fields.nth(1).map(str::parse), fields.next().map(str::parse)) {
                return Ok((uid, gid));
            }
        }
    }
    Err(io("a user to run the server as")(std::io::Error::other("neither `postgres` nor `nobody` exists")))
}

fn on_memory(directory: &Path) -> bool {
    const TMPFS: i64 = 0x0102_1994;
    const RAMFS: i64 = 0x8584_58f6_u32 as i64;
    rustix::fs::statfs(directory).is_ok_and(|stat| matches!(stat.f_type, TMPFS | RAMFS))
}
