//! How long partitions have nobody while an engine stops: their owners, looked at all the time.
//!
//! Invariant: a hand-over counts from the order to stop, until the last partition that the engine held has its next
//! owner. How long its process then takes to end is another figure.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use crate::failure::{Failure, Result};
use crate::target::quoted;

/// A look every so often.
const EVERY: Duration = Duration::from_millis(2);

/// Owners by partition (0: nobody), and when that was seen.
type Look = (Instant, Vec<i32>);

/// Looks until it is told to end.
#[derive(Debug)]
pub struct Owners {
    end: oneshot::Sender<()>,
    looks: JoinHandle<Result<Vec<Look>>>,
}

impl Owners {
    /// Begins with a first look.
    ///
    /// # Errors
    /// Of the database.
    pub async fn watch(client: Client, schema: &str) -> Result<Self> {
        let sql = "select array_agg(coalesce(owner, 0) order by partition) from @.wh_partition";
        let sql = client.prepare(&sql.replace('@', &quoted(schema))).await?;
        let row = client.query_one(&sql, &[]).await?;
        let mut looks = vec![(Instant::now(), row.get(0))];
        let (end, mut ended) = oneshot::channel();
        let looks = tokio::spawn(async move {
            while ended.try_recv() == Err(oneshot::error::TryRecvError::Empty) {
                tokio::time::sleep(EVERY).await;
                let row = client.query_one(&sql, &[]).await?;
                let owners: Vec<i32> = row.get(0);
                if looks.last().is_none_or(|(_, last)| *last != owners) {
                    looks.push((Instant::now(), owners));
                }
            }
            Ok(looks)
        });
        Ok(Self { end, looks })
    }

    /// How long after `order` each partition of an incarnation among `ended` had its next owner, at the latest; `None` if
    /// it had none.
    ///
    /// # Errors
    /// Of the database.
    pub async fn handed_over(self, ended: &[i32], order: Instant) -> Result<Option<Duration>> {
        let _ = self.end.send(());
        let looks = self.looks.await.map_err(|_| Failure::Broken("the look at the owners has ended".into()))??;
        Ok(last_of(&looks, ended).map(|at| at.saturating_duration_since(order)))
    }
}

/// When the last of their partitions had another owner.
fn last_of(looks: &[Look], ended: &[i32]) -> Option<Instant> {
    let (_, first) = looks.first()?;
    let left = (0..first.len()).filter(|partition| ended.contains(&first[*partition]));
    let next = |partition: usize| {
        let is_next = |owner: i32| owner != 0 && !ended.contains(&owner);
        looks.iter().find(|(_, owners)| is_next(owners[partition])).map(|(at, _)| *at)
    };
    left.map(next).collect::<Option<Vec<_>>>()?.into_iter().max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_partition_counts_and_only_those_that_were_left() {
        let start = Instant::now();
        let at = |ms: u64, owners: [i32; 3]| (start + Duration::from_millis(ms), owners.to_vec());
        // The third moves between others meanwhile, and the first again later: neither is the stopped one's.
        let looks = [at(0, [7, 7, 8]), at(5, [7, 0, 8]), at(9, [0, 8, 0]), at(12, [9, 8, 0]), at(20, [0, 8, 9])];
        assert_eq!(last_of(&looks, &[7]), Some(start + Duration::from_millis(12)));
        assert_eq!(last_of(&looks[..3], &[7]), None, "the first has none yet");
        assert_eq!(last_of(&looks, &[6]), None, "it held nothing");
    }
}
