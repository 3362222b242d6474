//! Debian's pgbouncer before a private server, in transaction mode: each transaction gets a connection of its choice.
//!
//! Invariants
//! - It runs as the user that the server runs as (it refuses to be root), reached through a unix socket beside the
//!   server's, and ends with its handle or its parent.
//! - Nothing is installed: the binary is that of `CORELANE_PGBOUNCER_BIN`, of `PATH` or of `/usr/sbin`. Unpacked from a
//!   package, it finds its libraries beside itself.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use corelane::private_postgres::PrivatePostgres;

const PORT: u16 = 6432;
/// Connections to the server: few, so that clients take turns on them.
const POOL_SIZE: u16 = 6;

/// A running one.
pub struct Pooler {
    child: Child,
    directory: PathBuf,
}

impl Pooler {
    /// Starts it before the cluster's server; `None`, and a word about it, where there is no binary.
    pub fn before(cluster: &PrivatePostgres) -> Option<Self> {
        let Some(binary) = find() else {
            println!("left out: no pgbouncer in CORELANE_PGBOUNCER_BIN, PATH or /usr/sbin");
            return None;
        };
        let directory = cluster.socket_directory().to_owned();
        let (here, settings) = (directory.display(), directory.join("pooler.ini"));
        let text = format!(
            "[databases]\n* = host={here} port=5432 user=postgres\n[pgbouncer]\nlisten_addr =\nunix_socket_dir = {here}\n\
             listen_port = {PORT}\nauth_type = any\npool_mode = transaction\ndefault_pool_size = {POOL_SIZE}\n\
             max_client_conn = 200\nquery_wait_timeout = 20\n"
        );
        std::fs::write(&settings, text).unwrap();
        let log = File::create(directory.join("pooler.log")).unwrap();
        let mut command = Command::new(&binary);
        command.arg(&settings).current_dir(&directory).env("LD_LIBRARY_PATH", libraries(&binary));
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        if let Some((uid, gid)) = cluster.user() {
            command.uid(uid).gid(gid);
        }
        // SAFETY: prctl is async-signal-safe; the standard library changes the user before this runs.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let mut this = Self { child: command.spawn().expect("pgbouncer"), directory };
        this.wait_until_ready();
        Some(this)
    }

    /// The URL of a database behind it.
    pub fn url(&self) -> String {
        let host = self.directory.display().to_string().replace('/', "%2F");
        format!("postgresql://postgres@{host}:{PORT}/postgres")
    }

    fn wait_until_ready(&mut self) {
        let (socket, deadline) =
            (self.directory.join(format!(".s.PGSQL.{PORT}")), Instant::now() + Duration::from_secs(20));
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            let log = || std::fs::read_to_string(self.directory.join("pooler.log")).unwrap_or_default();
            assert!(self.child.try_wait().unwrap().is_none(), "pgbouncer has ended: {}", log());
            assert!(Instant::now() < deadline, "pgbouncer does not answer: {}", log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn find() -> Option<PathBuf> {
    if let Some(given) = std::env::var_os("CORELANE_PGBOUNCER_BIN") {
        let given = PathBuf::from(given);
        assert!(given.is_file(), "CORELANE_PGBOUNCER_BIN = {}: there is none", given.display());
        return Some(given);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    places.map(|place| place.join("pgbouncer")).find(|place| place.is_file())
}

/// `…/usr/lib` and what lies in it, of a package that was unpacked to `…`; nothing for one that is installed.
fn libraries(binary: &Path) -> String {
    let root = binary.ancestors().nth(3).filter(|root| *root != Path::new("/"));
    let Some(lib) = root.map(|root| root.join("usr/lib")).filter(|lib| lib.is_dir()) else { return String::new() };
    let inner = std::fs::read_dir(&lib).into_iter().flatten().flatten().map(|entry| entry.path());
    let all: Vec<String> =
        inner.chain([lib.clone()]).filter(|place| place.is_dir()).map(|p| p.display().to_string()).collect();
    all.join(":")
}
