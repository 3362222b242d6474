//! The engine's side of its consumers.
//!
//! Invariant: a consumer's tasks do not keep the engine alive: they hold a weak handle.

use std::sync::Arc;

use super::Engine;
use crate::config::Config;
use crate::error::Result;
use crate::inbox::{Handlers, NewConsumer, Running};
use crate::seam::receiver::Receiver;

impl Engine {
    pub(crate) fn receiver(&self, source: &str) -> Option<Arc<dyn Receiver>> {
        self.shared.transport.receiver(source)
    }

    pub(crate) async fn start_consumer(
        &self,
        config: &Config,
        name: &str,
        receivers: Vec<Arc<dyn Receiver>>,
        handlers: Handlers,
    ) -> Result<Arc<Running>> {
        self.shared.check_running()?;
        let shared = Arc::downgrade(&self.shared);
        let new = NewConsumer {
            config,
            name,
            receivers,
            handlers,
            router: self.shared.router,
            announce: Arc::new(move || {
                if let Some(shared) = shared.upgrade() {
                    shared.announce();
                }
            }),
        };
        self.shared.consumers.start(new).await
    }
}
