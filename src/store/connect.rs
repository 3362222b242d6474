//! Connections to Postgres on whatever executor the thread has: dial, TLS, log in, settings, driver.
//!
//! Invariants
//! - A connection is there within its deadline or not at all: name look-up, handshakes and settings included.
//! - It belongs to its thread: the driver is a task of that thread's executor, and ends with it or when the
//!   `Client` is dropped.
//! - Session settings are made before anybody gets the client: no statement of ours runs without them. Behind a pooler
//!   a session is somebody else's after each transaction: there they are made in each one ([`Manner`]).
//! - Names are looked up on a thread of their own: the system's resolver blocks.
//!
//! A dropped query is not a cancelled one. Who must be sure that a statement has ended drops the `Client`, and
//! judges by what a new connection sees.

use std::future::{Future, poll_fn};
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_postgres::config::{SslMode, TargetSessionAttrs};
use tokio_postgres::tls::{NoTls, TlsConnect};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Config};

pub use super::target::{ConnectTarget, Endpoint, TargetError, TlsMode};
use crate::seam::dial::{Dial, SocketPlace};
use crate::seam::store::StoreError;

/// How long one server may take, unless the target's `connect_timeout` says otherwise.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);

/// Addresses of one name that are tried.
const ADDRESSES_MAX: usize = 8;

/// A connection on its way.
pub type Connecting<'a> = Pin<Box<dyn Future<Output = Result<Client, StoreError>> + 'a>>;

/// Where a loop gets its connections from; one object may give many.
pub trait Connect {
    /// A new connection, ready to work.
    fn connect(&self) -> Connecting<'_>;

    /// How statements are sent over its connections.
    fn manner(&self) -> Manner {
        Manner::default()
    }
}

/// A session setting: name and value.
pub type Setting = (String, String);

/// How statements are sent over a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manner {
    /// Without a name on the server: each is sent whole, with the types of its parameters.
    pub unnamed: bool,
    /// Behind a pooler that gives each transaction a connection of its choice: nothing of a session lasts, and these
    /// settings are made in each transaction. `None`: the session is ours.
    pub each_transaction: Option<Vec<Setting>>,
}

/// The setting that a pooler keeps for its client.
const KEPT_BY_POOLERS: &str = "application_name";

/// What may be made once for all connections of a process: the target, its trust store, the settings.
#[derive(Clone, Debug)]
pub struct ConnectPlan(Arc<Plan>);

#[derive(Debug)]
struct Plan {
    target: ConnectTarget,
    settings: Vec<Setting>,
    unnamed: bool,
    pooled: bool,
    #[cfg(feature = "tls")]
    tls: Option<Arc<rustls::ClientConfig>>,
}

impl ConnectPlan {
    /// Reads the certificates that the target names. `settings` are session settings by name and value; they
    /// are values to the server, never text of a statement.
    ///
    /// # Errors
    /// [`TargetError::Tls`]: a certificate cannot be read, or TLS is asked for of a build without it.
    pub fn new(target: ConnectTarget, settings: Vec<(String, String)>) -> Result<Self, TargetError> {
        #[cfg(not(feature = "tls"))]
        if !matches!(target.tls_mode, TlsMode::Disable | TlsMode::Prefer) {
            return Err(TargetError::Tls("sslmode asks for TLS: this build is without the feature `tls`".to_owned()));
        }
        Ok(Self(Arc::new(Plan {
            #[cfg(feature = "tls")]
            tls: super::tls::client_config(&target)?,
            target,
            settings,
            unnamed: false,
            pooled: false,
        })))
    }

    /// The same target with other settings; the certificates are not read again.
    #[must_use]
    pub fn with_settings(&self, settings: Vec<(String, String)>) -> Self {
        Self(Arc::new(Plan {
            target: self.0.target.clone(),
            settings,
            unnamed: self.0.unnamed,
            pooled: self.0.pooled,
            #[cfg(feature = "tls")]
            tls: self.0.tls.clone(),
        }))
    }

    /// The same target, reached through a pooler that gives each transaction a connection of its choice, or not; and
    /// whether statements may have names there. The certificates are not read again.
    #[must_use]
    pub fn in_manner(&self, pooled: bool, unnamed: bool) -> Self {
        let mut target = self.0.target.clone();
        if let Some((_, name)) = self.0.settings.iter().find(|(name, _)| pooled && name == KEPT_BY_POOLERS) {
            target.config.application_name(name);
        }
        Self(Arc::new(Plan {
            target,
            settings: self.0.settings.clone(),
            unnamed,
            pooled,
            #[cfg(feature = "tls")]
            tls: self.0.tls.clone(),
        }))
    }

    /// The plan on a thread's executor.
    #[must_use]
    pub fn on<R: Dial>(&self, runtime: R) -> Connector<R> {
        Connector { runtime, plan: self.clone(), on_notification: None }
    }

    /// The settings that every connection of ours wants: who it is, that it is not held up for ever, and that each
    /// statement sees what was committed before it, whatever a role or the database says otherwise. (Whether transactions
    /// may write is left to them: a database that was made read-only is to stay so.)
    #[must_use]
    pub fn settings(schema: &str, role: &str, lock_timeout_ms: u64, idle_timeout_ms: u64) -> Vec<(String, String)> {
        vec![
            ("application_name".to_owned(), format!("corelane/{schema}/{role}")),
            ("lock_timeout".to_owned(), format!("{lock_timeout_ms}ms")),
            ("idle_in_transaction_session_timeout".to_owned(), format!("{idle_timeout_ms}ms")),
            ("default_transaction_isolation".to_owned(), "read committed".to_owned()),
        ]
    }
}

/// Settings with which the server ends a session that it has heard nothing of for so long (2,000 ms at least): a host that
/// has gone without a word, or a process that stands still while its host goes on answering. Whoever makes them asks for
/// something well within that time. (Those about TCP do nothing on a unix socket, where there is no such host.)
#[must_use]
pub fn silence(silent_ms: u64) -> Vec<Setting> {
    let silent_s = (silent_ms / 1_000).max(2);
    let of = |name: &str, value: String| (name.to_owned(), value);
    vec![
        of("idle_session_timeout", format!("{silent_ms}ms")),
        of("tcp_user_timeout", format!("{silent_ms}ms")),
        // Half of the time silent, then three questions in the other half.
        of("tcp_keepalives_idle", (silent_s / 2).to_string()),
        of("tcp_keepalives_interval", (silent_s / 6).max(1).to_string()),
        of("tcp_keepalives_count", "3".to_owned()),
    ]
}

/// Connects on one thread's executor.
#[derive(Clone)]
pub struct Connector<R> {
    runtime: R,
    plan: ConnectPlan,
    on_notification: Option<OnNotification>,
}

/// Gets the payload of every notification that a connection receives, and `None` when the connection is lost, on the
/// connection's thread.
pub type OnNotification = Rc<dyn Fn(Option<&str>)>;

impl<R> Connector<R> {
    /// The same; its connections hand over what they hear. They hear only what they LISTEN to.
    #[must_use]
    pub fn on_notification(mut self, on_notification: OnNotification) -> Self {
        self.on_notification = Some(on_notification);
        self
    }
}

impl<R: Dial> Connect for Connector<R> {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async move {
            let (runtime, plan, hear) = (&self.runtime, &*self.plan.0, self.on_notification.as_ref());
            let mut last = StoreError::ConnectionLost("no server was tried".to_owned());
            for endpoint in plan.target.endpoints() {
                match within_deadline(runtime, plan, endpoint, hear).await {
                    Ok(client) => return Ok(client),
                    // Another server will not know a password better, but may be the one that is up.
                    Err(error) => last = error,
                }
            }
            Err(last)
        })
    }

    fn manner(&self) -> Manner {
        let Plan { settings, unnamed, pooled, .. } = &*self.plan.0;
        let made = || settings.iter().filter(|(name, _)| name != KEPT_BY_POOLERS).cloned().collect();
        Manner { unnamed: *unnamed, each_transaction: pooled.then(made) }
    }
}

async fn within_deadline<R: Dial>(
    runtime: &R,
    plan: &Plan,
    endpoint: &Endpoint,
    hear: Option<&OnNotification>,
) -> Result<Client, StoreError> {
    let limit = plan.target.config.get_connect_timeout().copied().unwrap_or(CONNECT_TIME_MAX);
    let limit_us = u64::try_from(limit.as_micros()).unwrap_or(u64::MAX);
    let deadline = pin!(runtime.sleep_until(runtime.now().plus_us(limit_us)));
    match select(pin!(open(runtime, plan, endpoint, hear)), deadline).await {
        Either::Left((result, _)) => result,
        Either::Right(_) => Err(StoreError::ConnectionLost(format!("{endpoint}: no connection within {limit:?}"))),
    }
}

async fn open<R: Dial>(
    runtime: &R,
    plan: &Plan,
    endpoint: &Endpoint,
    hear: Option<&OnNotification>,
) -> Result<Client, StoreError> {
    let lost = |error: std::io::Error| StoreError::ConnectionLost(format!("{endpoint}: {error}"));
    let mut config = plan.target.config.clone();
    let stream = match endpoint {
        Endpoint::Unix { path } => {
            // As with libpq: whoever can open the socket is on this machine.
            config.ssl_mode(SslMode::Disable);
            runtime.dial(SocketPlace::Unix(path.clone())).await.map_err(lost)?
        }
        Endpoint::Tcp { host, address, port } => {
            let places = match address {
                Some(address) => vec![SocketAddr::new(*address, *port)],
                None => look_up(host.clone(), *port).await.map_err(lost)?,
            };
            dial_first(runtime, places).await.map_err(lost)?
        }
    };
    let client = log_in(runtime, plan, endpoint, config, stream, hear).await?;
    if !plan.pooled {
        let made = apply_settings(&client, &plan.settings, false).await;
        made.map_err(|error| super::sqlstate::classify(&error))?;
    }
    if plan.target.config.get_target_session_attrs() == TargetSessionAttrs::ReadWrite {
        refuse_standby(&client, endpoint).await?;
    }
    Ok(client)
}

async fn dial_first<R: Dial>(runtime: &R, places: Vec<SocketAddr>) -> std::io::Result<R::Stream> {
    let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
    for place in places.into_iter().take(ADDRESSES_MAX) {
        match runtime.dial(SocketPlace::Tcp(place)).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Addresses of a name. The resolver blocks, so it gets a thread; one that hangs ends by its own time limits.
async fn look_up(host: String, port: u16) -> std::io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let (answer, answered) = futures_channel::oneshot::channel();
    std::thread::Builder::new().name("corelane-resolve".to_owned()).spawn(move || {
        let found = (host.as_str(), port).to_socket_addrs().map(Iterator::collect);
        // Whoever asked may have given up.
        let _ = answer.send(found);
    })?;
    answered.await.unwrap_or_else(|_| Err(std::io::Error::other("the resolver's thread ended")))
}

async fn log_in<R: Dial>(
    runtime: &R,
    plan: &Plan,
    endpoint: &Endpoint,
    mut config: Config,
    stream: R::Stream,
    hear: Option<&OnNotification>,
) -> Result<Client, StoreError> {
    #[cfg(feature = "tls")]
    if let (Some(tls), Endpoint::Tcp { host, .. }) = (&plan.tls, endpoint) {
        let wanted = if plan.target.tls_mode == TlsMode::Prefer { SslMode::Prefer } else { SslMode::Require };
        config.ssl_mode(wanted);
        let tls = super::tls::Tls { config: Arc::clone(tls), host: host.clone() };
        return start(runtime, &config, stream, tls, hear).await;
    }
    let _ = (plan, endpoint);
    config.ssl_mode(SslMode::Disable);
    start(runtime, &config, stream, NoTls, hear).await
}

async fn start<R, S, T>(
    runtime: &R,
    config: &Config,
    stream: S,
    tls: T,
    hear: Option<&OnNotification>,
) -> Result<Client, StoreError>
where
    R: Dial,
    S: AsyncRead + AsyncWrite + Unpin + 'static,
    T: TlsConnect<S>,
    T::Stream: 'static,
{
    let (client, mut connection) =
        config.connect_raw(stream, tls).await.map_err(|error| StoreError::from_postgres(&error))?;
    let hear = hear.cloned();
    runtime.spawn(async move {
        loop {
            match poll_fn(|context| connection.poll_message(context)).await {
                None => return,
                Some(Ok(AsyncMessage::Notification(said))) => {
                    if let Some(hear) = &hear {
                        hear(Some(said.payload()));
                    }
                }
                Some(Ok(AsyncMessage::Notice(notice))) => tracing::info!("{}: {}", notice.severity(), notice.message()),
                Some(Ok(_)) => {}
                Some(Err(error)) => {
                    tracing::warn!(error = %StoreError::from_postgres(&error), "a connection to the database has ended");
                    if let Some(hear) = &hear {
                        hear(None);
                    }
                    return;
                }
            }
        }
    });
    Ok(client)
}

/// Makes settings, for the transaction under way or for the session.
pub(crate) async fn apply_settings(
    client: &Client,
    settings: &[Setting],
    in_transaction: bool,
) -> Result<(), tokio_postgres::Error> {
    if settings.is_empty() {
        return Ok(());
    }
    let (names, values): (Vec<&str>, Vec<&str>) =
        settings.iter().map(|(name, value)| (name.as_str(), value.as_str())).unzip();
    let text = "select set_config(name, value, $3) from unnest($1::text[], $2::text[]) as setting(name, value)";
    let parameters: [(&(dyn ToSql + Sync), Type); 3] =
        [(&names, Type::TEXT_ARRAY), (&values, Type::TEXT_ARRAY), (&in_transaction, Type::BOOL)];
    client.query_typed(text, &parameters).await.map(|_| ())
}

async fn refuse_standby(client: &Client, endpoint: &Endpoint) -> Result<(), StoreError> {
    let rows = client
        .query_typed("select current_setting('transaction_read_only')", &[])
        .await
        .map_err(|error| super::sqlstate::classify(&error))?;
    let read_only = rows.first().and_then(|row| row.try_get::<_, String>(0).ok());
    if read_only.as_deref() == Some("off") {
        return Ok(());
    }
    Err(StoreError::Transient { sqlstate: "25006".to_owned(), text: format!("{endpoint}: this server is read-only") })
}
