//! The broker's journal: what was published and what was settled, so that a kill of the broker loses nothing.
//!
//! Invariants
//! - A message is in the journal (in the kernel's hands) before its publisher is told that it was taken, a settlement
//!   before its client is.
//! - What a kill cut off at the end is no record and is dropped when the broker comes back.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::frames::{Settled, Whole};
use super::queue::Queues;
use crate::failure::{Failure, Result};

#[derive(Debug, Serialize, Deserialize)]
enum Record {
    Published { queue: String, number: u64, message: Box<Whole> },
    Settled { number: u64 },
}

/// Queues that survive their process.
#[derive(Debug)]
pub struct StoredQueues {
    /// Who decides.
    pub queues: Queues,
    file: File,
}

impl StoredQueues {
    /// Opens a journal and reads what it holds.
    ///
    /// # Errors
    /// Of the file.
    pub fn open(path: &Path) -> Result<Self> {
        let what = || format!("the broker's journal {}", path.display());
        let mut file =
            OpenOptions::new().create(true).read(true).append(true).open(path).map_err(Failure::io(what()))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(Failure::io(what()))?;
        let (mut queues, whole) = replay(&bytes);
        let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let turn = u64::try_from(since_1970.as_micros()).unwrap_or_default();
        queues.begin_life(uuid::Uuid::new_v4().as_u64_pair().1 >> 1, turn);
        file.set_len(whole as u64).map_err(Failure::io(what()))?;
        Ok(Self { queues, file })
    }

    /// Takes messages, in order.
    ///
    /// # Errors
    /// Of the file: nothing was taken then.
    pub fn publish(&mut self, queue: &str, messages: Vec<Whole>) -> Result<()> {
        let first = self.queues.next_number();
        let records = messages.iter().zip(first..).map(|(message, number)| Record::Published {
            queue: queue.to_owned(),
            number,
            message: Box::new(message.clone()),
        });
        self.append(records)?;
        for (message, number) in messages.into_iter().zip(first..) {
            self.queues.put(queue, number, message);
        }
        Ok(())
    }

    /// Notes what became of messages; whether each was still its client's.
    ///
    /// # Errors
    /// Of the file.
    pub fn settle(&mut self, client: u64, settled: &[(u64, Settled)], now_ms: u64) -> Result<Vec<bool>> {
        let mut gone = Vec::new();
        let held: Vec<bool> = settled
            .iter()
            .map(|(receipt, settled)| {
                let number = self.queues.settle(client, *receipt, *settled, now_ms);
                if *settled != Settled::Abandoned {
                    gone.extend(number.map(|number| Record::Settled { number }));
                }
                number.is_some()
            })
            .collect();
        self.append(gone.into_iter())?;
        Ok(held)
    }

    fn append(&mut self, records: impl Iterator<Item = Record>) -> Result<()> {
        let mut bytes = Vec::new();
        for record in records {
            let form = postcard::to_allocvec(&record).map_err(|error| Failure::Broken(error.to_string()))?;
            bytes.extend_from_slice(&(form.len() as u32).to_be_bytes());
            bytes.extend_from_slice(&form);
        }
        self.file.write_all(&bytes).map_err(Failure::io("writing the broker's journal"))
    }
}

/// What a journal says, and how many of its bytes are whole records.
fn replay(bytes: &[u8]) -> (Queues, usize) {
    let mut published = std::collections::BTreeMap::new();
    let mut at = 0;
    while let Some((length, rest)) = bytes[at..].split_first_chunk::<4>() {
        let length = u32::from_be_bytes(*length) as usize;
        let Some(record) = rest.get(..length).and_then(|form| postcard::from_bytes(form).ok()) else { break };
        match record {
            Record::Published { queue, number, message } => drop(published.insert(number, (queue, message))),
            Record::Settled { number } => drop(published.remove(&number)),
        }
        at += 4 + length;
    }
    let mut queues = Queues::default();
    for (number, (queue, message)) in published {
        queues.put(&queue, number, *message);
    }
    (queues, at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn message(id: u128) -> Whole {
        Whole { message_id: Uuid::from_u128(id), payload: vec![id as u8], ..Whole::default() }
    }

    #[test]
    fn a_broker_that_is_killed_gives_what_was_not_settled_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("queues");
        let mut stored = StoredQueues::open(&path).unwrap();
        stored.publish("orders", (1..=4).map(message).collect()).unwrap();
        let given = stored.queues.receive(1, "orders", 3, 0);
        let settled = [(given[0].receipt, Settled::Completed), (given[1].receipt, Settled::Abandoned)];
        assert_eq!(stored.settle(1, &settled, 0).unwrap(), [true, true]);
        drop(stored);
        OpenOptions::new().append(true).open(&path).unwrap().write_all(&[0, 0, 0, 90, 1, 2]).unwrap();
        let mut stored = StoredQueues::open(&path).unwrap();
        stored.publish("orders", vec![message(5)]).unwrap();
        drop(stored);
        let mut stored = StoredQueues::open(&path).unwrap();
        let given = stored.queues.receive(2, "orders", 9, 0);
        let ids: Vec<u128> = given.iter().map(|delivered| delivered.message.message_id.as_u128()).collect();
        assert_eq!(ids, [2, 3, 4, 5]);
    }
}
