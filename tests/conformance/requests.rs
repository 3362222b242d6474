//! Builders of the script's requests: a reader that moves on, and flushes that own their columns.

use std::sync::Arc;

use corelane::batch::{DestinationId, NewRow, Rows};
use corelane::ids::{Epoch, Incarnation};
use corelane::partition::partition_of;
use corelane::seam::store::{ClaimRequest, NO_STREAM, Origin, ReadPosition, StoreRequest, Taken};
use uuid::Uuid;

/// Where the script's shard stands.
pub struct Reader {
    pub incarnation: Incarnation,
    pub ownership: i64,
    pub held: Vec<u32>,
    pub position: ReadPosition,
    flushes: Vec<i64>,
}

impl Reader {
    pub fn new(incarnation: Incarnation, taken: &Taken) -> Self {
        Self {
            incarnation,
            ownership: taken.ownership,
            held: taken.held.iter().map(|held| held.partition).collect(),
            position: ReadPosition::default(),
            flushes: Vec::new(),
        }
    }

    pub fn begin(&self) -> Self {
        Self {
            incarnation: self.incarnation,
            ownership: self.ownership,
            held: self.held.clone(),
            position: ReadPosition::default(),
            flushes: Vec::new(),
        }
    }

    pub fn origin(&self, flush_number: i64) -> Origin {
        Origin { incarnation: self.incarnation, shard: 0, flush_number }
    }

    pub fn claim(&mut self, flushes_in_memory: &[i64], rows_max: usize) -> ClaimRequest<'_> {
        self.flushes = flushes_in_memory.to_vec();
        ClaimRequest {
            incarnation: self.incarnation,
            shard: 0,
            position: &self.position,
            partitions: &self.held,
            flushes_in_memory: &self.flushes,
            rows_max,
            streams_max: 4_096,
        }
    }
}

/// A flush and its columns.
pub struct Flush {
    origin: Origin,
    ownership: i64,
    epoch: Option<Epoch>,
    held: Vec<u32>,
    partition_count: u32,
    rows: Rows,
    batches: Vec<Arc<Rows>>,
    streamless: Option<Uuid>,
    known_streams: Vec<(Uuid, i64, i64)>,
    row_stream: Vec<u32>,
    stream_id: Vec<Uuid>,
    stream_partition: Vec<u32>,
    stream_known: Vec<bool>,
    stream_last_seq: Vec<i64>,
    stream_last_version: Vec<i64>,
    partitions: Vec<u32>,
}

impl Flush {
    pub fn new(reader: &Reader, number: i64, partition_count: u32) -> Self {
        Self {
            origin: reader.origin(number),
            ownership: reader.ownership,
            epoch: None,
            held: reader.held.clone(),
            partition_count,
            rows: Rows::default(),
            batches: Vec::new(),
            streamless: None,
            known_streams: Vec::new(),
            row_stream: Vec::new(),
            stream_id: Vec::new(),
            stream_partition: Vec::new(),
            stream_known: Vec::new(),
            stream_last_seq: Vec::new(),
            stream_last_version: Vec::new(),
            partitions: Vec::new(),
        }
    }

    pub fn not_held(&mut self) -> &mut Self {
        self.held.clear();
        self
    }

    pub fn ownership(&mut self, ownership: i64) -> &mut Self {
        self.ownership = ownership;
        self
    }

    pub fn epoch(&mut self, epoch: Epoch) -> &mut Self {
        self.epoch = Some(epoch);
        self
    }

    pub fn known(&mut self, stream: Uuid, last_seq: i64, last_version: i64) -> &mut Self {
        self.known_streams.push((stream, last_seq, last_version));
        self
    }

    pub fn push(&mut self, stream_id: Option<Uuid>, is_event: bool, destinations: &[&str]) -> &mut Self {
        self.push_row(stream_id, is_event, 0, destinations)
    }

    /// An event that expects its stream at this version.
    pub fn push_expecting(&mut self, stream: Uuid, version: i64) -> &mut Self {
        self.push_row(Some(stream), true, 0, &["x"]);
        self.rows.expect_version(version);
        self
    }

    pub fn push_due(&mut self, stream: Uuid, due_unix_us: i64, destinations: &[&str]) -> &mut Self {
        self.push_row(Some(stream), false, due_unix_us, destinations)
    }

    /// A message of this id.
    pub fn push_as(&mut self, message_id: Uuid, stream_id: Option<Uuid>, destinations: &[&str]) -> &mut Self {
        self.push_message(message_id, stream_id, false, 0, destinations)
    }

    fn push_row(&mut self, stream_id: Option<Uuid>, is_event: bool, due_unix_us: i64, names: &[&str]) -> &mut Self {
        let message_id = Uuid::from_u128(
            0x0191_0000_0000_7000_8000_0000_0000_0000
                + (self.origin.flush_number as u128) * 4096
                + self.rows.len() as u128,
        );
        self.push_message(message_id, stream_id, is_event, due_unix_us, names)
    }

    fn push_message(
        &mut self,
        message_id: Uuid,
        stream_id: Option<Uuid>,
        is_event: bool,
        due_unix_us: i64,
        names: &[&str],
    ) -> &mut Self {
        let destinations: Vec<_> = names.iter().map(|name| DestinationId::of(name).unwrap()).collect();
        let row = NewRow {
            message_id,
            stream_id,
            partition: partition_of(stream_id.unwrap_or(message_id), self.partition_count),
            is_event,
            type_name: "conformance",
            content_type: "",
            correlation_id: Uuid::nil(),
            causation_id: Uuid::nil(),
            trace: corelane::envelope::Trace::default(),
            metadata: b"",
            payload: b"{\"a\":1,\"a\":2}",
            due_unix_us,
        };
        self.rows.push(&row, &destinations);
        self.rows.end_unit();
        if stream_id.is_none() {
            self.streamless = Some(message_id);
        }
        self
    }

    pub fn streamless_story(&self, destination: &str) -> String {
        format!("{}:1/0>{destination}", self.streamless.unwrap().as_u128() as u16)
    }

    /// The request; numbers its rows as a shard does.
    pub fn request<'a>(&'a mut self, reader: &'a Reader) -> StoreRequest<'a> {
        let mut given: Vec<(i64, i64)> = Vec::new();
        for row in 0..self.rows.len() {
            self.partitions.push(self.rows.partition[row]);
            let stream = self.rows.stream_id(row).filter(|_| self.rows.due_unix_us[row] == 0);
            let Some(stream) = stream else {
                self.row_stream.push(NO_STREAM);
                self.rows.stream_seq[row] = i64::from(self.rows.due_unix_us[row] == 0);
                continue;
            };
            let at = self.stream_id.iter().position(|id| *id == stream).unwrap_or_else(|| {
                let known = self.known_streams.iter().find(|of| of.0 == stream);
                self.stream_id.push(stream);
                self.stream_partition.push(self.rows.partition[row]);
                self.stream_known.push(known.is_some());
                self.stream_last_seq.push(known.map_or(0, |of| of.1));
                self.stream_last_version.push(known.map_or(self.rows.expected(row).unwrap_or(0), |of| of.2));
                given.push((0, 0));
                self.stream_id.len() - 1
            });
            given[at].0 += 1;
            self.rows.stream_seq[row] = self.stream_last_seq[at] + given[at].0;
            if self.rows.is_event(row) {
                given[at].1 += 1;
                self.rows.version[row] = self.stream_last_version[at] + given[at].1;
            }
            self.row_stream.push(at as u32);
        }
        self.partitions.sort_unstable();
        self.partitions.dedup();
        self.batches.push(Arc::new(std::mem::take(&mut self.rows)));
        StoreRequest {
            origin: self.origin,
            ownership: self.ownership,
            read: &reader.position.read,
            epoch: self.epoch,
            batches: &self.batches,
            row_stream: &self.row_stream,
            stream_id: &self.stream_id,
            stream_partition: &self.stream_partition,
            stream_known: &self.stream_known,
            stream_last_seq: &self.stream_last_seq,
            stream_last_version: &self.stream_last_version,
            partitions: &self.partitions,
            held: &self.held,
            patient: &[],
            patience_ms: 0,
        }
    }
}
