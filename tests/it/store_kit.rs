//! What the tests of the store stand on: an installed schema, a store with its lease keeper's door, and requests as
//! a shard would make them.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use corelane::batch::{DestinationId, NewRow, Rows};
use corelane::envelope::Trace;
use corelane::ids::Incarnation;
use corelane::partition::partition_of;
use corelane::plan::snapshot::Snapshot;
use corelane::seam::store::{
    ClaimReply, ClaimRequest, Coordination, NO_STREAM, Origin, ReadPosition, Registration, Store, StoreError,
    StoreReply, StoreRequest, Stored, Taken,
};
use corelane::store::connect::{Connect, Connecting, OnNotification};
use corelane::store::install;
use corelane::store::postgres::{PostgresCoordination, PostgresStore};
use corelane::store::schema_name::SchemaName;
use tokio_postgres::{AsyncMessage, NoTls};
use uuid::Uuid;

use crate::support::{TestSchema, schema};

pub const PARTITIONS: u32 = 16;
/// All of them.
pub const ALL: [u32; PARTITIONS as usize] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// A new incarnation of the tests' service.
pub fn registration(instance_name: &str, shards: u16) -> Registration {
    let (service_name, instance_name) = ("tests".to_owned(), instance_name.to_owned());
    Registration { id: Uuid::new_v4(), service_name, instance_name, shards, owns: true }
}

/// Dials a URL; the driver runs on the test's runtime.
pub struct Dial(pub String);

impl Connect for Dial {
    fn connect(&self) -> Connecting<'_> {
        let url = self.0.clone();
        Box::pin(async move {
            let (client, connection) = tokio_postgres::connect(&url, NoTls).await?;
            tokio::spawn(connection);
            Ok(client)
        })
    }
}

/// As [`Dial`]; what its connections hear is handed over.
pub struct HearingDial {
    pub url: String,
    pub hear: OnNotification,
}

impl Connect for HearingDial {
    fn connect(&self) -> Connecting<'_> {
        let (url, hear) = (self.url.clone(), self.hear.clone());
        Box::pin(async move {
            let (client, mut connection) = tokio_postgres::connect(&url, NoTls).await?;
            tokio::task::spawn_local(async move {
                while let Some(Ok(said)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
                    if let AsyncMessage::Notification(said) = said {
                        hear(Some(said.payload()));
                    }
                }
            });
            Ok(client)
        })
    }
}

/// An installed schema.
pub struct Space {
    pub schema: TestSchema,
    pub name: SchemaName,
}

impl Space {
    pub async fn new() -> Self {
        Self::in_schema(schema()).await
    }

    pub async fn in_schema(schema: TestSchema) -> Self {
        let name = SchemaName::new(&schema.name).unwrap();
        let mut client = schema.client().await;
        install::migrate(&mut client, &name, PARTITIONS).await.unwrap();
        Self { schema, name }
    }

    pub fn dial(&self) -> Rc<dyn Connect> {
        Rc::new(Dial(self.schema.url.clone()))
    }

    /// The owner's lease is past, by the database's clock.
    pub async fn expire(&self, owner: &Owner) {
        let sql = "update wh_instance set lease_until = '-infinity' where number = $1";
        self.schema.client().await.execute(sql, &[&owner.incarnation.number]).await.unwrap();
    }

    /// A new incarnation that has taken what is free.
    pub async fn owner(&self, shards: u16) -> Owner {
        let coordination = PostgresCoordination::new(self.dial(), &self.name);
        let (incarnation, count) = coordination.register_instance(&registration("one", shards), 60_000).await.unwrap();
        assert_eq!(count, PARTITIONS);
        let taken = coordination.take_partitions(incarnation, &ALL).await.unwrap().unwrap();
        let store = PostgresStore::new(self.dial(), &self.name);
        Owner {
            store,
            coordination,
            incarnation,
            taken,
            flush_number: 0,
            read: Snapshot::empty(),
            last: HashMap::new(),
        }
    }
}

/// One incarnation with the memory of one shard.
pub struct Owner {
    pub store: PostgresStore,
    pub coordination: PostgresCoordination,
    pub incarnation: Incarnation,
    pub taken: Taken,
    pub flush_number: i64,
    pub read: Snapshot,
    /// Remembered numbers (seq, version).
    pub last: HashMap<Uuid, (i64, i64)>,
}

/// A message of a test.
#[derive(Clone, Debug)]
pub struct Message {
    pub id: Uuid,
    pub stream: Option<Uuid>,
    pub event: bool,
    pub destinations: Vec<&'static str>,
    pub payload: Vec<u8>,
    pub due_unix_us: i64,
}

/// A message without stream.
pub fn loose(payload: &str) -> Message {
    Message {
        id: Uuid::now_v7(),
        stream: None,
        event: false,
        destinations: vec!["somewhere"],
        payload: payload.as_bytes().to_vec(),
        due_unix_us: 0,
    }
}

/// A message of a stream.
pub fn message(stream: Uuid, payload: &str) -> Message {
    Message { stream: Some(stream), ..loose(payload) }
}

/// An event of a stream.
pub fn event(stream: Uuid, payload: &str) -> Message {
    Message { event: true, ..message(stream, payload) }
}

pub fn destination(name: &str) -> DestinationId {
    DestinationId::of(name).unwrap()
}

/// A stream of a partition.
pub fn stream_in(partition: u32) -> Uuid {
    loop {
        let id = Uuid::now_v7();
        if partition_of(id, PARTITIONS) == partition {
            return id;
        }
    }
}

impl Owner {
    pub fn held(&self) -> Vec<u32> {
        self.taken.held.iter().map(|held| held.partition).collect()
    }

    pub fn origin(&self) -> Origin {
        Origin { incarnation: self.incarnation, shard: 0, flush_number: self.flush_number }
    }

    /// Stores as a shard does: numbers from memory where they are remembered.
    pub async fn try_store(&mut self, messages: &[Message]) -> Result<StoreReply, StoreError> {
        self.flush_number += 1;
        let mut rows = Rows::default();
        let mut streams: Vec<Uuid> = Vec::new();
        let mut row_stream = Vec::new();
        let mut next: Vec<(i64, i64)> = Vec::new();
        for message in messages {
            let partition = partition_of(message.stream.unwrap_or(message.id), PARTITIONS);
            let destinations: Vec<_> = message.destinations.iter().map(|name| destination(name)).collect();
            let row = rows.push(
                &NewRow {
                    message_id: message.id,
                    stream_id: message.stream,
                    partition,
                    is_event: message.event,
                    type_name: "test.message",
                    content_type: "",
                    correlation_id: Uuid::from_u128(7),
                    causation_id: Uuid::nil(),
                    trace: Trace { trace_id: Uuid::from_u128(1 << 100), span_id: u64::MAX, flags: 1 },
                    metadata: b"",
                    payload: &message.payload,
                    due_unix_us: message.due_unix_us,
                },
                &destinations,
            );
            match message.stream {
                None => {
                    row_stream.push(NO_STREAM);
                    rows.stream_seq[row] = 1;
                }
                Some(stream) => {
                    let index = streams.iter().position(|known| *known == stream).unwrap_or_else(|| {
                        streams.push(stream);
                        next.push(self.last.get(&stream).copied().unwrap_or((0, 0)));
                        streams.len() - 1
                    });
                    row_stream.push(index as u32);
                    if message.due_unix_us == 0 {
                        next[index].0 += 1;
                        rows.stream_seq[row] = next[index].0;
                        if message.event {
                            next[index].1 += 1;
                            rows.version[row] = next[index].1;
                        }
                    }
                }
            }
        }
        rows.end_unit();
        let last: Vec<_> = streams.iter().map(|stream| self.last.get(stream).copied()).collect();
        let mut partitions = rows.partition.clone();
        partitions.sort_unstable();
        partitions.dedup();
        let batches = [Arc::new(rows)];
        let request = StoreRequest {
            origin: self.origin(),
            ownership: self.taken.ownership,
            read: &self.read,
            epoch: None,
            batches: &batches,
            row_stream: &row_stream,
            stream_id: &streams,
            stream_partition: &streams.iter().map(|id| partition_of(*id, PARTITIONS)).collect::<Vec<_>>(),
            stream_known: &last.iter().map(Option::is_some).collect::<Vec<_>>(),
            stream_last_seq: &last.iter().map(|last| last.unwrap_or_default().0).collect::<Vec<_>>(),
            stream_last_version: &last.iter().map(|last| last.unwrap_or_default().1).collect::<Vec<_>>(),
            partitions: &partitions,
            held: &self.held(),
            patient: &[],
            patience_ms: 0,
        };
        let reply = self.store.store_shard_messages(&request).await?;
        if let StoreReply::Stored(stored) = &reply {
            for (index, stream) in streams.iter().enumerate() {
                let assumed = last[index].unwrap_or_default();
                let real = stored.looked_up.as_ref().map_or(assumed, |all| (all[index].seq, all[index].version));
                self.last.insert(*stream, (next[index].0 - assumed.0 + real.0, next[index].1 - assumed.1 + real.1));
            }
        }
        Ok(reply)
    }

    pub async fn store(&mut self, messages: &[Message]) -> Stored {
        match self.try_store(messages).await.unwrap() {
            StoreReply::Stored(stored) => stored,
            not_stored => panic!("{not_stored:?}"),
        }
    }

    pub async fn busy(&mut self, messages: &[Message]) -> Vec<Uuid> {
        match self.try_store(messages).await.unwrap() {
            StoreReply::Busy { stream_id } => stream_id,
            not_busy => panic!("{not_busy:?}"),
        }
    }

    pub async fn claim(&self, position: &ReadPosition, in_memory: &[i64], rows_max: usize) -> ClaimReply {
        let held = self.held();
        let request = ClaimRequest {
            incarnation: self.incarnation,
            shard: 0,
            position,
            partitions: &held,
            flushes_in_memory: in_memory,
            rows_max,
            streams_max: 4_096,
        };
        self.store.claim_work(&request).await.unwrap()
    }

    /// Claims until the snapshot is read whole; answers the payloads in order, and where the reader stands then.
    pub async fn drain(&self, position: &ReadPosition, rows_max: usize) -> (Vec<String>, ReadPosition) {
        let (mut texts, mut position) = (Vec::new(), position.clone());
        loop {
            let reply = self.claim(&position, &[], rows_max).await;
            texts.extend(payloads(&reply.rows));
            position = reply.position;
            if !reply.more {
                return (texts, position);
            }
        }
    }
}

pub fn payloads(rows: &Rows) -> Vec<String> {
    rows.payload.iter().map(|span| rows.text(*span).to_owned()).collect()
}

/// Whether somebody waits for a lock of this kind of this schema.
pub async fn waits_for_class(watch: &tokio_postgres::Client, kind: i32) -> bool {
    let sql = "select exists (select from pg_locks where locktype = 'advisory' and not granted
        and classid = wh_lock_class($1)::oid)";
    watch.query_one(sql, &[&kind]).await.unwrap().get(0)
}
