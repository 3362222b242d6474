//! A member of a subscription in slow motion: each call to the database is a step of the test, and nothing else is made.

use std::collections::HashMap;

use corelane::plan::follow::{Run, Runs};
use corelane::seam::store::StoreError;
use corelane::store::stored_event::StoredEvent;
use corelane::store::subscriptions::{Filter, Membership, Registering, Statements};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::store_kit::Space;

/// The lease of a member that nobody is to take for dead.
pub const LEASE_MS: i64 = 60_000;

/// What is read of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    pub stream_id: Uuid,
    pub version: i64,
    pub position: i64,
    pub text: String,
}

pub fn read(event: &StoredEvent) -> Read {
    Read {
        stream_id: event.stream_id,
        version: event.version,
        position: event.position,
        text: String::from_utf8(event.payload.clone()).unwrap(),
    }
}

/// One member.
pub struct Follower {
    pub client: Client,
    pub statements: Statements,
    pub member: Membership,
    pub runs: Runs,
    pub filter: Filter,
}

impl Follower {
    /// Joins and takes its share.
    pub async fn join(space: &Space, name: &str, from: Option<i64>) -> Self {
        let (client, statements) = (space.schema.client().await, Statements::of(&space.name));
        let who = Registering {
            service_name: "tests".to_owned(),
            instance_name: "follower".to_owned(),
            lease_ms: LEASE_MS,
            direct: true,
        };
        let incarnation = statements.register(&client, &who).await.unwrap();
        let subscription = statements.join(&client, name, incarnation, from).await.unwrap();
        let filter = Filter { rows_max: 1_000, bytes_max: 1 << 20, ..Filter::default() };
        let member = Membership { subscription, incarnation };
        let mut follower = Self { client, statements, member, runs: Runs::default(), filter };
        follower.share().await;
        follower
    }

    /// A look at the members; what is too much is given up where it stands. Answers how many partitions it has.
    pub async fn share(&mut self) -> usize {
        let shared = self.statements.share(&self.client, self.member, LEASE_MS).await.unwrap();
        assert!(shared.alive, "it is a member");
        let give_up = self.runs.reconcile(shared.written);
        if !give_up.is_empty() {
            self.write().await.unwrap();
            self.runs.remove(&give_up);
            self.statements.release(&self.client, self.member, &give_up).await.unwrap();
        }
        self.runs.partition_count()
    }

    /// One page of the next run; its place has moved when it answers.
    pub async fn page(&mut self) -> Vec<Read> {
        self.runs.merge();
        self.runs.runs.rotate_left(1);
        let run = &mut self.runs.runs[0];
        let page = self.statements.read(&self.client, self.member.subscription, run, &self.filter).await.unwrap();
        run.advance(&page.ahead);
        page.events.iter().map(read).collect()
    }

    /// Pages until everything that was committed before is read.
    pub async fn drain(&mut self) -> Vec<Read> {
        let mut all = Vec::new();
        loop {
            let events = self.page().await;
            let is_over = events.is_empty() && self.runs.runs.iter().all(|run| run.quiet);
            all.extend(events);
            if is_over {
                return all;
            }
        }
    }

    pub async fn texts(&mut self) -> Vec<String> {
        self.drain().await.into_iter().map(|read| read.text).collect()
    }

    /// Writes down where it stands.
    pub async fn write(&mut self) -> Result<(), StoreError> {
        for run in &mut self.runs.runs {
            self.statements.checkpoint(&self.client, self.member, run).await?;
            run.moved = false;
            run.held.iter_mut().for_each(|held| held.fence += 1);
        }
        Ok(())
    }

    /// Buffers of the server that its next page touches; the page is not taken.
    pub async fn buffers_of_a_page(&self) -> i64 {
        let run = self.run();
        let partitions: Vec<i32> = run.held.iter().map(|held| held.partition).collect();
        let resolved: Vec<&str> = run.held.iter().map(|held| &*held.resolved).collect();
        let explain = "explain (analyze, buffers, format json) select * from read_subscription($1, $2,
            $3::text[]::pg_snapshot[], $4, $5::text::pg_snapshot, $6, $7, false, $8, $9, $10, null, null, $11, 1000000)";
        let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 11] = [
            &self.member.subscription,
            &partitions,
            &resolved,
            &run.floor,
            &run.target.as_deref(),
            &run.target_floor,
            &run.position,
            &run.ceiling,
            &run.window,
            &run.quiet,
            &self.filter.rows_max,
        ];
        let row = self.client.query_one(explain, &parameters).await.unwrap();
        let plan = row.get::<_, Json>(0).0;
        let number = |name: &str| -> i64 {
            let (_, rest) = plan.split_once(&format!("{name}\": ")).expect(name);
            rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
        };
        number("Shared Hit Blocks") + number("Shared Read Blocks")
    }

    /// The run that has everything, between two targets.
    pub fn run(&self) -> &Run {
        assert_eq!(self.runs.runs.len(), 1);
        &self.runs.runs[0]
    }
}

/// Each event once, and each stream's in order without a gap. Answers how many there are.
pub fn assert_complete(events: &[Read]) -> usize {
    let mut last: HashMap<Uuid, i64> = HashMap::new();
    for event in events {
        let last = last.entry(event.stream_id).or_default();
        assert_eq!(event.version, *last + 1, "{event:?} came after version {last}");
        *last = event.version;
    }
    events.len()
}

/// First copies in the order of their streams, without a gap; copies are allowed. Answers how many first ones.
pub fn assert_at_least_once(events: &[Read]) -> usize {
    let mut seen = std::collections::HashSet::new();
    let first: Vec<Read> =
        events.iter().filter(|event| seen.insert((event.stream_id, event.version))).cloned().collect();
    assert_complete(&first)
}

/// The text of a JSON value.
struct Json(String);

impl<'a> tokio_postgres::types::FromSql<'a> for Json {
    fn from_sql(
        _: &tokio_postgres::types::Type,
        raw: &'a [u8],
    ) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(String::from_utf8(raw.to_vec())?))
    }

    fn accepts(of: &tokio_postgres::types::Type) -> bool {
        *of == tokio_postgres::types::Type::JSON
    }
}
