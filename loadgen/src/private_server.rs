//! The private, throw-away server, and what `verify` does to its processes.

use crate::failure::{Failure, Result};

/// A server that belongs to this process and goes away with it.
#[derive(Debug)]
pub struct PrivateServer {
    directory: tempfile::TempDir,
}

impl PrivateServer {
    /// Makes a cluster and starts it.
    ///
    /// # Errors
    /// Where there are no server binaries, or the server does not start.
    pub async fn start() -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("loadgen-pg-").tempdir_in("/var/tmp").map_err(Failure::io("temp dir"))?;
        let path = directory.path().display().to_string();
        let script = format!(
            "chown postgres {path} && cd {path} && setpriv --reuid=postgres --regid=postgres --clear-groups sh -c '/usr/lib/postgresql/15/bin/initdb -D {path}/data -A trust -U postgres >/dev/null && /usr/lib/postgresql/15/bin/pg_ctl -D {path}/data -w -o \"-k {path} -c listen_addresses=\" -l {path}/log start >/dev/null'"
        );
        let status =
            tokio::process::Command::new("sh").arg("-c").arg(script).status().await.map_err(Failure::io("starting"))?;
        if !status.success() {
            return Err(Failure::Cluster("could not start".into()));
        }
        Ok(Self { directory })
    }

    /// Where it listens.
    #[must_use]
    pub fn url(&self) -> String {
        format!("host={} user=postgres dbname=postgres", self.directory.path().display())
    }
}

impl Drop for PrivateServer {
    fn drop(&mut self) {
        let path = self.directory.path().display().to_string();
        let _ = std::process::Command::new("sh").arg("-c").arg(format!("setpriv --reuid=postgres --regid=postgres --clear-groups /usr/lib/postgresql/15/bin/pg_ctl -D {path}/data -m immediate stop >/dev/null")).status();
    }
}
