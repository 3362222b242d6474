//! Which database, as the operator writes it: a URL or a `key=value` line.
//!
//! Invariant: nothing of it that may hold a password is ever shown: no error quotes the text, `Debug` and
//! `Display` name host, database and user only.
//!
//! `sslmode` knows two words more than tokio-postgres does (`verify-ca`, `verify-full`), and `sslrootcert`
//! is ours: both are taken out of the text before it is parsed.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};

/// How much of TLS is asked for, in libpq's words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsMode {
    /// Never.
    Disable,
    /// If the server has it; nothing is verified.
    #[default]
    Prefer,
    /// Or no connection. Verified like `verify-ca` if a root certificate is given, else not.
    Require,
    /// The certificate must come from a trusted root.
    VerifyCa,
    /// And bear the host's name.
    VerifyFull,
}

/// Why a text names no database. Never quotes it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// It could not be read.
    #[error(
        "database.url cannot be read (it is not shown, it may hold a password): write \
         postgres://user:password@host:port/database?sslmode=… or host=… user=… dbname=…{0}"
    )]
    Syntax(String),
    /// No host in it.
    #[error("database.url names no host: give a host name, or the directory of the server's unix socket")]
    NoHost,
    /// A word that `sslmode` does not know.
    #[error("database.url: sslmode must be disable, prefer, require, verify-ca or verify-full")]
    SslMode,
    /// TLS was asked for and cannot be had.
    #[error("database.url: {0}")]
    Tls(String),
}

/// One server that may be the one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// By name or address.
    Tcp {
        /// As written: what a certificate must bear.
        host: String,
        /// `hostaddr`, if given: then the name is not looked up.
        address: Option<IpAddr>,
        /// Port.
        port: u16,
    },
    /// By socket.
    Unix {
        /// The socket itself.
        path: PathBuf,
    },
}

impl fmt::Display for Endpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port, .. } => write!(formatter, "{host}:{port}"),
            Self::Unix { path } => write!(formatter, "{}", path.display()),
        }
    }
}

/// A database and how to get to it.
#[derive(Clone)]
pub struct ConnectTarget {
    pub(super) config: Config,
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) tls_mode: TlsMode,
    pub(super) root_certificates: Option<PathBuf>,
}

impl ConnectTarget {
    /// Reads a URL or a `key=value` line.
    ///
    /// # Errors
    /// What in it cannot be read or does not go together. Never quotes the text: it may hold a password.
    pub fn parse(text: &str) -> Result<Self, TargetError> {
        let (rest, own) = take_own_keys(text)?;
        let config: Config = rest.parse().map_err(|error| TargetError::Syntax(hint(&error)))?;
        let mut target = Self::from_config(config)?;
        for (key, value) in own {
            match key {
                OwnKey::SslMode => target.tls_mode = tls_mode(&value)?,
                OwnKey::SslRootCert => target.root_certificates = Some(PathBuf::from(value)),
            }
        }
        Ok(target)
    }

    /// From what tokio-postgres has read; its `sslmode` is taken over.
    ///
    /// # Errors
    /// [`TargetError::NoHost`], or [`TargetError::Syntax`] if hosts, addresses and ports do not go together.
    pub fn from_config(config: Config) -> Result<Self, TargetError> {
        let endpoints = endpoints(&config)?;
        let tls_mode = match config.get_ssl_mode() {
            SslMode::Disable => TlsMode::Disable,
            SslMode::Require => TlsMode::Require,
            _ => TlsMode::Prefer,
        };
        Ok(Self { config, endpoints, tls_mode, root_certificates: None })
    }

    /// With this time for one server to answer, where the text names none.
    #[must_use]
    pub fn or_connect_timeout(mut self, limit: std::time::Duration) -> Self {
        if self.config.get_connect_timeout().is_none() {
            self.config.connect_timeout(limit);
        }
        self
    }

    /// The servers, in the order they are tried.
    #[must_use]
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// How much of TLS.
    #[must_use]
    pub fn tls_mode(&self) -> TlsMode {
        self.tls_mode
    }
}

impl fmt::Display for ConnectTarget {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "database {:?}", self.config.get_dbname().unwrap_or("(of the user's name)"))?;
        if let Some(user) = self.config.get_user() {
            write!(formatter, " as {user:?}")?;
        }
        for (index, endpoint) in self.endpoints.iter().enumerate() {
            write!(formatter, "{}{endpoint}", if index == 0 { " at " } else { ", " })?;
        }
        Ok(())
    }
}

impl fmt::Debug for ConnectTarget {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ConnectTarget({self}, {:?})", self.tls_mode)
    }
}

fn endpoints(config: &Config) -> Result<Vec<Endpoint>, TargetError> {
    let (hosts, addresses, ports) = (config.get_hosts(), config.get_hostaddrs(), config.get_ports());
    let count = hosts.len().max(addresses.len());
    if count == 0 {
        return Err(TargetError::NoHost);
    }
    if (!hosts.is_empty() && !addresses.is_empty() && hosts.len() != addresses.len())
        || (ports.len() > 1 && ports.len() != count)
    {
        return Err(TargetError::Syntax("; there must be as many ports and addresses as hosts".to_owned()));
    }
    Ok((0..count)
        .map(|index| {
            let port = ports.get(index).or(ports.first()).copied().unwrap_or(5432);
            let address = addresses.get(index).copied();
            match (hosts.get(index), address) {
                (Some(Host::Unix(directory)), None) => {
                    Endpoint::Unix { path: directory.join(format!(".s.PGSQL.{port}")) }
                }
                (Some(Host::Tcp(host)), _) => Endpoint::Tcp { host: host.clone(), address, port },
                // A socket's directory beside an address: the address counts.
                (_, Some(address)) => Endpoint::Tcp { host: address.to_string(), address: Some(address), port },
                (None, None) => Endpoint::Tcp { host: String::new(), address: None, port },
            }
        })
        .collect())
}

/// Which option is wrong, if it is one whose name is known: anything else could be a piece of a password.
fn hint(error: &tokio_postgres::Error) -> String {
    const OPTIONS: &[&str] = &[
        "host",
        "hostaddr",
        "port",
        "user",
        "dbname",
        "connect_timeout",
        "keepalives",
        "keepalives_idle",
        "options",
        "keepalives_interval",
        "keepalives_retries",
        "tcp_user_timeout",
        "target_session_attrs",
        "channel_binding",
        "load_balance_hosts",
        "sslnegotiation",
        "application_name",
    ];
    let cause = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
    let wrong = OPTIONS.iter().find(|option| cause == format!("invalid value for option `{option}`"));
    wrong.map(|option| format!("; the value of {option} is not valid")).unwrap_or_default()
}

enum OwnKey {
    SslMode,
    SslRootCert,
}

fn own_key(name: &str) -> Option<OwnKey> {
    match name {
        "sslmode" => Some(OwnKey::SslMode),
        "sslrootcert" => Some(OwnKey::SslRootCert),
        _ => None,
    }
}

fn tls_mode(word: &str) -> Result<TlsMode, TargetError> {
    Ok(match word {
        "disable" => TlsMode::Disable,
        "prefer" | "allow" => TlsMode::Prefer,
        "require" => TlsMode::Require,
        "verify-ca" => TlsMode::VerifyCa,
        "verify-full" => TlsMode::VerifyFull,
        _ => return Err(TargetError::SslMode),
    })
}

/// The text without the keys that are ours, and those.
fn take_own_keys(text: &str) -> Result<(String, Vec<(OwnKey, String)>), TargetError> {
    if text.starts_with("postgres://") || text.starts_with("postgresql://") {
        take_from_url(text)
    } else {
        take_from_line(text)
    }
}

fn take_from_url(text: &str) -> Result<(String, Vec<(OwnKey, String)>), TargetError> {
    let Some((before, query)) = text.split_once('?') else { return Ok((text.to_owned(), Vec::new())) };
    let mut own = Vec::new();
    let mut kept = Vec::new();
    for pair in query.split('&') {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        match own_key(name) {
            Some(key) => own.push((key, percent_decoded(value)?)),
            None => kept.push(pair),
        }
    }
    let rest = if kept.is_empty() { before.to_owned() } else { format!("{before}?{}", kept.join("&")) };
    Ok((rest, own))
}

fn percent_decoded(text: &str) -> Result<String, TargetError> {
    let wrong = || TargetError::Syntax("; a % stands before two hexadecimal digits".to_owned());
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let digits = rest.get(..2).and_then(|digits| std::str::from_utf8(digits).ok()).ok_or_else(wrong)?;
        bytes.push(u8::from_str_radix(digits, 16).map_err(|_| wrong())?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).map_err(|_| wrong())
}

/// `key = value` or `key = 'quoted \' value'`, separated by white space.
fn take_from_line(text: &str) -> Result<(String, Vec<(OwnKey, String)>), TargetError> {
    let wrong = || TargetError::Syntax(String::new());
    let mut own = Vec::new();
    let mut kept = String::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let (name, after) = rest.split_once('=').ok_or_else(wrong)?;
        let written = after.trim_start();
        let (value, length) = line_value(written).ok_or_else(wrong)?;
        match own_key(name.trim()) {
            Some(key) => own.push((key, value)),
            None => {
                kept.push_str(&format!("{}={} ", name.trim(), &written[..length]));
            }
        }
        rest = written[length..].trim_start();
    }
    Ok((kept, own))
}

/// The value at the start of the text, and how many bytes it was written in.
fn line_value(text: &str) -> Option<(String, usize)> {
    let quoted = text.starts_with('\'');
    let mut value = String::new();
    let mut characters = text.char_indices().skip(usize::from(quoted));
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => value.push(characters.next()?.1),
            '\'' if quoted => return Some((value, at + 1)),
            _ if !quoted && character.is_whitespace() => return Some((value, at)),
            _ => value.push(character),
        }
    }
    (!quoted).then_some((value, text.len()))
}

#[cfg(test)]
#[path = "target_tests.rs"]
mod tests;
