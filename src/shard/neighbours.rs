//! The lease keeper watches the others: whose connection or lease has ended is declared dead.
//!
//! Invariants
//! - Early only by the session lock that somebody who lives holds; late only by both clocks: the database says that the
//!   lease is past, and this process has seen no renewal for as long.
//! - Each member is waited for by one: its neighbour in a ring by number.

use super::Control;
use super::tend::Keeper;
use crate::ids::Incarnation;
use crate::plan::lease::Watch;
use crate::seam::runtime::Runtime;
use crate::seam::store::{Coordination, Member, Members, StoreError};
use crate::time::Tick;

impl<R: Runtime, C: Coordination, F: Fn(u16, Control)> Keeper<R, C, F> {
    /// Waits for the end of a member's connection, from a moment on.
    pub(super) async fn vigil(&self, member: Member, from: Tick) -> Result<bool, StoreError> {
        self.runtime.sleep_until(from).await;
        self.coordination.wait_for_end(member, self.times.ttl_ms() / 2).await
    }

    /// Ends members whose connection or lease has ended; answers whether any was.
    pub(super) async fn mark_dead(&self, watch: &mut Watch, members: &Members) -> Result<bool, StoreError> {
        let mut any = false;
        for member in members.others.iter().filter(|member| !member.connected) {
            if self.is_marked_dead(*member, true).await? {
                tracing::warn!(incarnation = member.incarnation.number, "declared dead: its connection has ended");
                any = true;
            }
        }
        let mut late: Vec<Member> = Vec::new();
        watch.look(&members.others, self.times.ttl_ms(), self.runtime.now(), |member| late.push(member));
        for member in late {
            if self.is_marked_dead(member, false).await? {
                tracing::warn!(incarnation = member.incarnation.number, "declared dead: its lease is over");
                any = true;
            }
        }
        Ok(any)
    }

    /// One that cannot be marked now (it is in a transaction that does not end) holds up no other work.
    async fn is_marked_dead(&self, member: Member, early: bool) -> Result<bool, StoreError> {
        match self.within_limit(self.coordination.mark_dead(member, early)).await {
            Err(error @ StoreError::Transient { .. }) => {
                tracing::warn!(%error, incarnation = member.incarnation.number, "it cannot be declared dead yet");
                Ok(false)
            }
            answer => answer,
        }
    }
}

/// The member whose end this one waits for: the next by number, in a ring, so that each is waited for by one.
pub(super) fn neighbour(incarnation: Incarnation, members: &Members) -> Option<Member> {
    let candidates = || members.others.iter().filter(|member| member.connected && (member.owns || member.held > 0));
    let after = candidates().filter(|member| member.incarnation.number > incarnation.number);
    let next = after.min_by_key(|member| member.incarnation.number);
    next.or_else(|| candidates().min_by_key(|member| member.incarnation.number)).copied()
}
