//! The sink's journal: what was accepted, in the order in which it was.
//!
//! Invariants
//! - A batch is in the journal (in the kernel's hands: a kill of any process does not lose it) before it is answered.
//! - Records have one size; what a kill cut off at the end is no record and is dropped when the sink comes back.
//! - A record is never changed.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;

use super::frames::{MESSAGE_BYTES, SinkMessage};
use crate::failure::{Failure, Result};

/// The message, and whether the sink claimed not to know.
const RECORD_BYTES: usize = MESSAGE_BYTES + 8;

/// One record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What was accepted.
    pub message: SinkMessage,
    /// The sender was told that the outcome is unknown, or nothing: a copy is allowed.
    pub answered_unknown: bool,
}

/// A journal being written.
#[derive(Debug)]
pub struct Journal {
    file: File,
    count: u64,
    unknown: u64,
}

impl Journal {
    /// Opens it at its end; a cut record is dropped.
    ///
    /// # Errors
    /// Of the file.
    pub fn open(path: &Path) -> Result<Self> {
        let what = || format!("journal {}", path.display());
        let entries = if path.exists() { read(path)? } else { Vec::new() };
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(Failure::io(what()))?;
        file.set_len((entries.len() * RECORD_BYTES) as u64).map_err(Failure::io(what()))?;
        let unknown = entries.iter().filter(|entry| entry.answered_unknown).count() as u64;
        Ok(Self { file, count: entries.len() as u64, unknown })
    }

    /// Appends a batch in one write.
    ///
    /// # Errors
    /// Of the file.
    pub fn append(&mut self, messages: &[SinkMessage], answered_unknown: bool) -> Result<()> {
        let mut bytes = Vec::with_capacity(messages.len() * RECORD_BYTES);
        for message in messages {
            message.write(&mut bytes);
            bytes.extend_from_slice(&u64::from(answered_unknown).to_be_bytes());
        }
        self.file.write_all(&bytes).map_err(Failure::io("writing the journal"))?;
        self.count += messages.len() as u64;
        self.unknown += if answered_unknown { messages.len() as u64 } else { 0 };
        Ok(())
    }

    /// Records in it.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Records whose sender was told nothing certain.
    #[must_use]
    pub fn unknown(&self) -> u64 {
        self.unknown
    }
}

/// Reads a journal; a cut record at its end is passed over.
///
/// # Errors
/// Of the file.
pub fn read(path: &Path) -> Result<Vec<Entry>> {
    let mut bytes = Vec::new();
    let what = format!("journal {}", path.display());
    File::open(path).and_then(|mut file| file.read_to_end(&mut bytes)).map_err(Failure::io(what))?;
    let (records, _cut) = bytes.as_chunks::<RECORD_BYTES>();
    let entries = records.iter().map(|record| {
        let mut message = [0; MESSAGE_BYTES];
        message.copy_from_slice(&record[..MESSAGE_BYTES]);
        Entry { message: SinkMessage::read(&message), answered_unknown: record[RECORD_BYTES - 1] != 0 }
    });
    Ok(entries.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn message(seq: i64) -> SinkMessage {
        SinkMessage {
            message_id: Uuid::from_u128(seq as u128),
            stream_id: Uuid::from_u128(1),
            stream_seq: seq,
            version: 0,
            fence: 1,
            destination_hash: 2,
            payload_hash: 3,
        }
    }

    #[test]
    fn a_record_cut_by_a_kill_is_dropped_and_the_next_one_fits() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        let mut journal = Journal::open(&path).unwrap();
        journal.append(&[message(1), message(2)], false).unwrap();
        drop(journal);
        std::fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(&[9; 31]).unwrap();
        let mut journal = Journal::open(&path).unwrap();
        assert_eq!(journal.count(), 2);
        journal.append(&[message(3)], true).unwrap();
        let entries = read(&path).unwrap();
        let numbers: Vec<_> = entries.iter().map(|entry| (entry.message.stream_seq, entry.answered_unknown)).collect();
        assert_eq!(numbers, [(1, false), (2, false), (3, true)]);
        assert_eq!((journal.count(), journal.unknown()), (3, 1));
    }
}
