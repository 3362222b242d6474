//! A subscription without a connection: who asks for something is answered, and does not wait for the database.
//!
//! Invariants
//! - The end is asked for in vain at no time: it is answered while a connection is being made, and between two attempts.
//! - Only the next events are waited for.

use std::pin::pin;

use tokio::sync::mpsc;

use super::reader::{Ended, NextReply, Order, ReaderMain};
use crate::error::Error;
use crate::seam::store::StoreError;

/// What the handle asks for.
pub(super) struct Asking {
    pub(super) orders: mpsc::Receiver<Order>,
    /// Who waits for the next events.
    pub(super) waiting: Option<NextReply>,
}

impl Asking {
    /// Takes an order while nothing can be asked of the database.
    fn answer(&mut self, order: Option<Order>) -> Result<(), Ended> {
        match order {
            Some(Order::Next(reply)) => self.waiting = Some(reply),
            Some(Order::Lag(reply)) => {
                let text = "the subscription has no connection at the moment".to_owned();
                // Who asked may have gone.
                let _ = reply.send(Err(Error::Store(StoreError::ConnectionLost(text))));
            }
            Some(Order::Stop(reply)) => return Err(Ended::Left(Some(reply))),
            None => return Err(Ended::Left(None)),
        }
        Ok(())
    }
}

impl ReaderMain {
    /// Does what needs no connection that is there, and answers orders meanwhile; `Err` when it is to end.
    pub(super) async fn meanwhile<T>(&self, asking: &mut Asking, work: impl Future<Output = T>) -> Result<T, Ended> {
        let mut stopped = self.stopped.clone();
        let mut work = pin!(work);
        loop {
            tokio::select! {
                biased;
                _ = stopped.wait_for(|stopped| *stopped) => return Err(Ended::Left(None)),
                order = asking.orders.recv() => asking.answer(order)?,
                done = &mut work => return Ok(done),
            }
        }
    }

    /// What follows from a session's end: the error after which it begins again, or `None` if that was the last one.
    pub(super) fn lost(&mut self, ended: Ended, asking: &mut Asking) -> Option<StoreError> {
        match ended {
            Ended::Left(reply) => {
                if let Some(reply) = reply {
                    let _ = reply.send(());
                }
                None
            }
            Ended::Lost(error) => {
                if let Some(started) = self.started.take() {
                    let _ = started.send(Err(error.into()));
                    return None;
                }
                self.metrics.reconnects.add(1);
                let is_final = matches!(error, StoreError::Refused { .. } | StoreError::Denied { .. });
                if let Some(reply) = asking.waiting.take_if(|_| is_final) {
                    // One that waits no more asks again, or for something else.
                    let _ = reply.send(Err(error.clone().into()));
                }
                Some(error)
            }
        }
    }
}
