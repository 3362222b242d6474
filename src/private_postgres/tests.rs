//! A private server lives as long as its process, and no longer; where there are no binaries it is said.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{Options, PrivatePostgres, PrivatePostgresError, StopMode, find};

/// Set in a child of a test: it runs one test as another process.
const CHILD: &str = "CORELANE_PRIVATE_POSTGRES_CHILD";

fn child(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command.args(["--exact", &format!("private_postgres::tests::{test}"), "--nocapture", "--test-threads=1"]);
    command.env(CHILD, "1");
    command
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn runs(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with('Z'))
}

#[test]
fn a_cluster_starts_restarts_and_leaves_nothing() {
    let mut postgres = PrivatePostgres::start(Options::default()).expect("start");
    let (directory, pid) = (postgres.socket_directory().to_owned(), postgres.pid());
    assert!(pid.is_some() && postgres.is_durable());
    postgres.restart(StopMode::Immediate).expect("restart");
    assert_ne!(postgres.pid(), pid);
    drop(postgres);
    assert!(!directory.exists());
}

#[test]
fn a_server_that_was_killed_starts_again_and_is_not_taken_for_ready_before() {
    let mut postgres = PrivatePostgres::start(Options::default()).expect("start");
    let pid = postgres.pid().expect("a pid");
    let _ = Command::new("kill").args(["-9", &pid.to_string()]).status().expect("kill");
    postgres.stop(StopMode::Immediate).expect("stop");
    let left = std::fs::read_to_string(postgres.data_directory().join("postmaster.pid")).expect("its file is left");
    assert!(left.contains("ready") && left.starts_with(&pid.to_string()), "{left}");
    postgres.start_again().expect("start again");
    let file = std::fs::read_to_string(postgres.data_directory().join("postmaster.pid")).expect("its file");
    assert!(file.starts_with(&postgres.pid().expect("a pid").to_string()), "{file}");
    assert!(postgres.socket_directory().join(".s.PGSQL.5432").exists());
}

/// As another process, which is then killed. The server is started from a thread that ends: it must not take the
/// server along.
#[test]
fn a_killed_owner_leaves_no_server_and_its_directory_is_swept() {
    if std::env::var_os(CHILD).is_some() {
        let starting = std::thread::spawn(|| PrivatePostgres::start(Options::default()).expect("start"));
        let postgres = starting.join().expect("the thread");
        println!("\n{} {}", postgres.pid().expect("a pid"), postgres.socket_directory().display());
        loop {
            std::thread::park();
        }
    }
    let mut owner = child("a_killed_owner_leaves_no_server_and_its_directory_is_swept")
        .stdout(Stdio::piped())
        .spawn()
        .expect("a child");
    let lines = BufReader::new(owner.stdout.take().expect("its output")).lines();
    let line = lines.map_while(Result::ok).find(|line| line.contains(" /")).expect("the child's server");
    let (pid, directory) = line.split_once(' ').expect("two words");
    let (pid, directory): (u32, PathBuf) = (pid.parse().expect("a number"), directory.into());
    assert!(runs(pid) && directory.join("data").exists(), "the server outlives the thread that started it");
    super::sweep::sweep(Path::new("/var/tmp"));
    assert!(directory.join("data").exists(), "what is locked is left alone");

    owner.kill().expect("kill -9");
    owner.wait().expect("its end");
    until("the server ends with its owner", || !runs(pid));
    until("the directory is swept", || {
        super::sweep::sweep(Path::new("/var/tmp"));
        !directory.exists()
    });
}

#[test]
fn without_binaries_the_error_says_what_to_install_and_what_else_works() {
    if std::env::var_os(CHILD).is_some() {
        let error = PrivatePostgres::start(Options::default()).expect_err("there are none");
        assert!(matches!(error, PrivatePostgresError::NoBinaries(_)));
        println!("said: {error}");
        return;
    }
    let output = child("without_binaries_the_error_says_what_to_install_and_what_else_works")
        .env("CORELANE_PG_BIN", "/nonexistent")
        .output()
        .expect("a child");
    let said = String::from_utf8_lossy(&output.stdout);
    for word in ["said: no PostgreSQL", "CORELANE_PG_BIN", "postgresql-server", "--database-url"] {
        assert!(said.contains(word), "{word} in: {said}");
    }
}

/// As root on Debian or Ubuntu: an `apt-get` of ours, first in PATH, writes down what it was asked and "installs"
/// links to the binaries of this machine.
#[test]
fn missing_binaries_are_installed_without_starting_a_server() {
    if std::env::var_os(CHILD).is_some() {
        let found = super::fetch::fetch_with(&std::env::var("TEST_ETC").expect("set")).expect("installed");
        println!("found in {}", found.directory.display());
        return;
    }
    let debian = std::fs::read_to_string("/etc/os-release").is_ok_and(|text| text.contains("debian"));
    if !debian || !rustix::process::geteuid().is_root() {
        println!("skipped: only root on Debian or Ubuntu installs anything");
        return;
    }
    let real = find().expect("this machine's binaries").directory;
    let directory = tempfile::tempdir().expect("a directory");
    let fake = directory.path().join("apt-get");
    let script = format!(
        "#!/bin/sh\necho \"$DEBIAN_FRONTEND $*\" >> {at}/asked\n[ \"$1\" = update ] || /bin/ln -s {real}/initdb {real}/postgres {at}/\n",
        at = directory.path().display(),
        real = real.display()
    );
    std::fs::write(&fake, script).expect("the script");
    std::fs::set_permissions(&fake, std::fs::Permissions::from_mode(0o755)).expect("executable");
    let output = child("missing_binaries_are_installed_without_starting_a_server")
        .env_remove("CORELANE_PG_BIN")
        .env("CORELANE_PG_USUAL_PLACES", "0")
        .env("PATH", directory.path())
        .env("TEST_ETC", directory.path())
        .stdin(Stdio::null())
        .output()
        .expect("a child");
    let (said, announced) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("found in"), "{said}\n{announced}");
    assert!(announced.contains("installing the package"), "{announced}");
    let asked = std::fs::read_to_string(directory.path().join("asked")).expect("what it was asked");
    let lines: Vec<&str> = asked.lines().collect();
    assert_eq!(lines.first(), Some(&"noninteractive update"));
    assert!(lines.get(1).is_some_and(|line| line.starts_with("noninteractive install --yes")), "{asked}");
    let settings = std::fs::read_to_string(directory.path().join("createcluster.conf")).expect("the setting");
    assert!(settings.lines().any(|line| line.replace(' ', "") == "create_main_cluster=false"), "{settings}");
}
