//! Connections on every executor of this machine: settings, errors, deadlines, TLS, passwords.

use std::future::Future;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use corelane::private_postgres::{Options, PrivatePostgres};
use corelane::runtime::probe::{RuntimeKind, glommio_refused};
use corelane::runtime::thread::{ThreadMain, ThreadPlan, start};
use corelane::seam::dial::Dial;
use corelane::seam::store::StoreError;
use corelane::store::connect::{Connect, ConnectPlan, ConnectTarget, TargetError, silence};

use crate::support::{connect, database_url, eventually};

const PASSWORD: &str = "correct-horse-7";

fn kinds() -> Vec<RuntimeKind> {
    let mut kinds = vec![RuntimeKind::Tokio];
    kinds.extend(glommio_refused().is_none().then_some(RuntimeKind::Glommio));
    kinds
}

/// Connects, asks, answers the first column of the first row of each statement, as text.
struct Asks {
    plan: ConnectPlan,
    statements: Vec<String>,
}

impl ThreadMain for Asks {
    type Output = Result<Vec<String>, StoreError>;

    fn run<R: Dial>(self, runtime: R) -> impl Future<Output = Self::Output> + 'static {
        async move {
            let connector = self.plan.on(runtime);
            let client = connector.connect().await?;
            let mut answers = Vec::new();
            for statement in self.statements {
                let rows =
                    client.query_typed(&statement, &[]).await.map_err(|error| StoreError::from_postgres(&error))?;
                answers.push(rows.first().map(|row| row.get::<_, String>(0)).unwrap_or_default());
            }
            Ok(answers)
        }
    }
}

fn ask_on(kind: RuntimeKind, plan: &ConnectPlan, statements: &[&str]) -> Result<Vec<String>, StoreError> {
    let statements = statements.iter().map(|statement| (*statement).to_owned()).collect();
    let thread = ThreadPlan { kind, core: None, name: "test".to_owned(), metrics: Arc::default() };
    start(thread, Asks { plan: plan.clone(), statements }).unwrap().join().unwrap()
}

fn plan(url: &str) -> ConnectPlan {
    ConnectPlan::new(ConnectTarget::parse(url).unwrap(), Vec::new()).unwrap()
}

fn denied_code(result: Result<Vec<String>, StoreError>) -> String {
    match result {
        Err(StoreError::Denied { sqlstate, text }) => {
            assert!(!text.contains(PASSWORD), "{text}");
            sqlstate
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn settings_are_made_before_anybody_gets_the_client() {
    let hostile = "it's \\ \"mine\"; drop table x";
    let settings = ConnectPlan::settings("my schema", "flush-3", 1_500, 20_000);
    let mut more = settings.clone();
    more.push(("corelane.note".to_owned(), hostile.to_owned()));
    let plan = plan(&database_url()).with_settings(more);
    let statements = [
        "select current_setting('application_name')",
        "select current_setting('lock_timeout')",
        "select current_setting('idle_in_transaction_session_timeout')",
        "select current_setting('corelane.note')",
        // A row that fills many reads.
        "select length(repeat('x', 5000000))::text || right(repeat('y', 5000000), 1)",
        "select repeat('z', 3000000)",
    ];
    for kind in kinds() {
        let answers = ask_on(kind, &plan, &statements).unwrap();
        assert_eq!(answers[..5], ["corelane/my schema/flush-3", "1500ms", "20s", hostile, "5000000y"], "{kind:?}");
        assert_eq!(answers[5].len(), 3_000_000, "{kind:?}");
    }
}

#[test]
fn a_session_of_which_nothing_is_heard_is_to_be_ended_by_the_server() {
    let plan = plan(&database_url()).with_settings(silence(8_000));
    // On a unix socket the last four have no value, but are taken.
    let statements = [
        "select current_setting('idle_session_timeout')",
        "select string_agg(name, ' ' order by name) from pg_settings where name like 'tcp%' and source = 'session'",
    ];
    for kind in kinds() {
        let answers = ask_on(kind, &plan, &statements).unwrap();
        let named = "tcp_keepalives_count tcp_keepalives_idle tcp_keepalives_interval tcp_user_timeout";
        assert_eq!(answers, ["8s", named], "{kind:?}");
    }
    for silent_ms in [2_000, 5_000, 32_500, 3_600_000] {
        let of = |name: &str| -> u64 {
            let made = silence(silent_ms);
            made.iter().find(|(of, _)| of == name).unwrap().1.trim_end_matches("ms").parse().unwrap()
        };
        let asked_s = of("tcp_keepalives_interval") * of("tcp_keepalives_count");
        assert!(of("tcp_keepalives_idle") >= 1);
        assert!((of("tcp_keepalives_idle") + asked_s) * 1_000 <= silent_ms.max(5_000), "{silent_ms}");
    }
}

#[test]
fn a_setting_that_the_server_refuses_is_an_error_and_no_connection() {
    let plan = plan(&database_url()).with_settings(vec![("lock_timeout".to_owned(), "soon".to_owned())]);
    for kind in kinds() {
        let result = ask_on(kind, &plan, &["select '1'"]);
        assert!(matches!(&result, Err(StoreError::Refused { sqlstate, .. }) if sqlstate == "22023"), "{result:?}");
    }
}

#[tokio::test]
async fn errors_of_statements_mean_what_their_code_says() {
    let admin = connect(&database_url()).await;
    admin.batch_execute("create table if not exists connect_taken (id int primary key)").await.unwrap();
    admin.batch_execute("insert into connect_taken values (1) on conflict do nothing").await.unwrap();
    let plan = plan(&database_url()).with_settings(ConnectPlan::settings("s", "t", 50, 1_000));
    let mut locker = connect(&database_url()).await;
    let transaction = locker.transaction().await.unwrap();
    transaction.batch_execute("select pg_advisory_xact_lock(77001)").await.unwrap();
    for kind in kinds() {
        let ask = |statement: &str| ask_on(kind, &plan, &[statement]);
        assert!(matches!(ask("insert into connect_taken values (1) returning '1'"), Err(StoreError::NumberTaken)));
        let waited = ask("select pg_advisory_lock(77001)::text");
        assert!(matches!(&waited, Err(StoreError::Transient { sqlstate, .. }) if sqlstate == "55P03"), "{waited:?}");
        let wrong = ask("select 1/0::int::text");
        assert!(matches!(wrong, Err(StoreError::Refused { .. })), "{wrong:?}");
        let ended = ask("select pg_terminate_backend(pg_backend_pid())::text");
        assert!(matches!(ended, Err(StoreError::ConnectionLost(_))), "{ended:?}");
    }
    transaction.rollback().await.unwrap();
    admin.batch_execute("drop table connect_taken").await.unwrap();
}

#[tokio::test]
async fn a_client_that_is_dropped_leaves_no_session_behind() {
    struct Holds {
        plan: ConnectPlan,
        asked: tokio::sync::oneshot::Sender<()>,
        gone: tokio::sync::oneshot::Receiver<()>,
    }
    impl ThreadMain for Holds {
        type Output = ();
        fn run<R: Dial>(self, runtime: R) -> impl Future<Output = ()> + 'static {
            async move {
                let client = self.plan.on(runtime).connect().await.unwrap();
                client.query_typed("select 1", &[]).await.unwrap();
                drop(client);
                self.asked.send(()).unwrap();
                // The thread goes on: it is the drop that ends the session, not the end of the executor.
                self.gone.await.unwrap();
            }
        }
    }
    let admin = connect(&database_url()).await;
    for kind in kinds() {
        let name = format!("dropped-{}", kind.name());
        let settings = vec![("application_name".to_owned(), name.clone())];
        let (asked, was_asked) = tokio::sync::oneshot::channel();
        let (go, gone) = tokio::sync::oneshot::channel();
        let thread = ThreadPlan { kind, core: None, name: name.clone(), metrics: Arc::default() };
        let running =
            start(thread, Holds { plan: plan(&database_url()).with_settings(settings), asked, gone }).unwrap();
        was_asked.await.unwrap();
        eventually("the session ends", Duration::from_secs(10), || async {
            let sql = "select count(*) from pg_stat_activity where application_name = $1";
            admin.query_one(sql, &[&name]).await.unwrap().get::<_, i64>(0) == 0
        })
        .await;
        go.send(()).unwrap();
        running.join().unwrap();
    }
}

#[test]
fn who_cannot_be_reached_is_lost_and_what_is_not_there_is_denied() {
    let base = database_url();
    let (start_of_url, _) = base.rsplit_once('/').unwrap();
    // Nobody listens: the listener is gone with its statement.
    let refused = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let refused = format!("postgres://a@127.0.0.1:{refused}/x");
    // Somebody listens and never says a word.
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("postgres://a@127.0.0.1:{}/x?connect_timeout=1", mute.local_addr().unwrap().port());
    for kind in kinds() {
        let wrong_database = plan(&format!("{start_of_url}/no_such_database"));
        assert_eq!(denied_code(ask_on(kind, &wrong_database, &[])), "3D000");
        for url in [refused.as_str(), &silent, "postgres://a@host.invalid/x", "host=/no/such/directory user=a"] {
            let began = Instant::now();
            let result = ask_on(kind, &plan(url), &[]);
            assert!(matches!(result, Err(StoreError::ConnectionLost(_))), "{kind:?} {url}: {result:?}");
            assert!(began.elapsed() < Duration::from_secs(60), "{kind:?} {url}: its deadline");
        }
    }
}

#[test]
fn the_next_server_of_a_list_is_tried() {
    let base = ConnectTarget::parse(&database_url()).unwrap();
    let shown = base.endpoints()[0].to_string();
    let Some(directory) = Path::new(&shown).parent().filter(|directory| directory.is_absolute()) else {
        println!("skipped: the server of the environment is reached by TCP, and this test needs its unix socket");
        return;
    };
    let list = format!("host=/no/such/directory,{} user=postgres dbname=postgres", directory.display());
    for kind in kinds() {
        assert_eq!(ask_on(kind, &plan(&list), &["select 'here'"]).unwrap(), ["here"]);
    }
}

/// A server with TLS and passwords on loopback: its certificate is for `localhost` only.
struct Guarded {
    cluster: PrivatePostgres,
    port: u16,
    authority: String,
    stranger: String,
}

fn guarded() -> Option<Guarded> {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    let authority = || {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        (pem, Issuer::new(params, key))
    };
    let ((authority_pem, issuer), (stranger_pem, _)) = (authority(), authority());
    let key = KeyPair::generate().unwrap();
    let certificate =
        CertificateParams::new(vec!["localhost".to_owned()]).unwrap().signed_by(&key, &issuer).unwrap().pem();

    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let settings = vec!["listen_addresses=127.0.0.1".to_owned(), format!("port={port}")];
    let mut cluster = PrivatePostgres::start(Options { settings, ..Options::default() }).expect("a private Postgres");
    let data = cluster.data_directory();
    for (name, text) in [("server.crt", &certificate), ("server.key", &key.serialize_pem())] {
        let path = data.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        if let Some((user, group)) = cluster.user() {
            std::os::unix::fs::chown(&path, Some(user), Some(group)).unwrap();
        }
    }
    let rules = "local all all trust\nhostssl all all 127.0.0.1/32 scram-sha-256\n";
    std::fs::write(data.join("pg_hba.conf"), rules).unwrap();
    let role = format!("create role guarded login password '{PASSWORD}'");
    let directory = cluster.socket_directory().display().to_string();
    let admin = plan(&format!("host={directory} port={port} user=postgres dbname=postgres"));
    if let Err(error) = ask_on(RuntimeKind::Tokio, &admin, &[&role, "alter system set ssl = on"]) {
        assert!(error.to_string().contains("not supported by this build"), "{error}");
        eprintln!("skipped: this server is built without TLS");
        return None;
    }
    cluster.restart(corelane::private_postgres::StopMode::Fast).unwrap();
    Some(Guarded {
        port,
        authority: kept(&cluster, "authority.pem", &authority_pem),
        stranger: kept(&cluster, "stranger.pem", &stranger_pem),
        cluster,
    })
}

fn kept(cluster: &PrivatePostgres, name: &str, text: &str) -> String {
    let path = cluster.socket_directory().join(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn tls_verifies_as_much_as_its_mode_says_and_passwords_are_checked() {
    let Some(server) = guarded() else { return };
    let (port, authority, stranger) = (server.port, &server.authority, &server.stranger);
    let target = |host: &str, password: &str, more: &str| {
        format!("host={host} hostaddr=127.0.0.1 port={port} user=guarded password={password} dbname=postgres {more}")
    };
    let encrypted = "select ssl::text from pg_stat_ssl where pid = pg_backend_pid()";
    for kind in kinds() {
        for (host, more) in [
            ("localhost", "sslmode=prefer".to_owned()),
            ("localhost", "sslmode=require".to_owned()),
            ("localhost", format!("sslmode=require sslrootcert={authority}")),
            ("another.name", format!("sslmode=verify-ca sslrootcert={authority}")),
            ("localhost", format!("sslmode=verify-full sslrootcert={authority}")),
        ] {
            let result = ask_on(kind, &plan(&target(host, PASSWORD, &more)), &[encrypted]);
            assert_eq!(result.unwrap(), ["true"], "{kind:?} {more}");
        }
        for (host, more) in [
            ("another.name", format!("sslmode=verify-full sslrootcert={authority}")),
            ("127.0.0.1", format!("sslmode=verify-full sslrootcert={authority}")),
            ("localhost", format!("sslmode=verify-full sslrootcert={stranger}")),
            ("localhost", format!("sslmode=verify-ca sslrootcert={stranger}")),
            ("localhost", format!("sslmode=require sslrootcert={stranger}")),
        ] {
            let result = ask_on(kind, &plan(&target(host, PASSWORD, &more)), &[encrypted]);
            assert_eq!(denied_code(result), "08P01", "{kind:?} {host} {more}");
        }
        assert_eq!(denied_code(ask_on(kind, &plan(&target("localhost", "wrong", "")), &[])), "28P01");
        assert_eq!(denied_code(ask_on(kind, &plan(&target("localhost", PASSWORD, "sslmode=disable")), &[])), "28000");
        let without = format!("host=localhost port={port} user=guarded dbname=postgres");
        assert_eq!(denied_code(ask_on(kind, &plan(&without), &[])), "28000", "no password at all");
        // A socket needs no TLS, whatever the mode.
        let directory = server.cluster.socket_directory().display();
        let socket = format!(
            "host={directory} port={port} user=guarded dbname=postgres sslmode=verify-full sslrootcert={authority}"
        );
        assert_eq!(ask_on(kind, &plan(&socket), &[encrypted]).unwrap(), ["false"]);
    }
    let none =
        ConnectTarget::parse(&target("localhost", PASSWORD, "sslmode=verify-ca sslrootcert=/no/such.pem")).unwrap();
    let error = ConnectPlan::new(none, Vec::new()).unwrap_err();
    assert!(matches!(&error, TargetError::Tls(text) if text.contains("/no/such.pem")), "{error}");
    let admin = plan(&format!("host={} port={port} user=postgres", server.cluster.socket_directory().display()));
    ask_on(RuntimeKind::Tokio, &admin, &["alter system set ssl = off", "select pg_reload_conf()::text"]).unwrap();
    for kind in kinds() {
        // The server may still be reading its new settings.
        let deadline = Instant::now() + Duration::from_secs(10);
        let refused = plan(&target("localhost", PASSWORD, "sslmode=require"));
        while ask_on(kind, &refused, &[]).is_ok() {
            assert!(Instant::now() < deadline, "TLS is still on");
            std::thread::yield_now();
        }
        assert_eq!(denied_code(ask_on(kind, &refused, &[])), "08P01", "a server without TLS");
    }
}
