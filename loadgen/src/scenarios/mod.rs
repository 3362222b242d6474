//! Loads beside the outbox's, each with its checks and its own baselines.

use corelane::engine::Engine;
use corelane::message::{Enqueue, Expected, Header, PayloadError, Wishes};
use uuid::Uuid;

use crate::baselines::TYPE_NAME;
use crate::cli::ScenarioChoice;
use crate::engine_side;
use crate::failure::Result;
use crate::figures::Figures;
use crate::scenario::Scenario;
use crate::shape::PayloadView;
use crate::target::Target;

pub mod events;
pub mod inbox;
pub mod relay;
pub mod subscribe;

/// An event that is only stored, written straight into the engine's arena.
#[derive(Clone)]
struct Append {
    stream_id: Uuid,
    /// The version that its stream is expected to have.
    expected: Option<i64>,
    correlation_id: Uuid,
    payload: PayloadView,
}

impl Enqueue for Append {
    fn header(&self) -> Header<'_> {
        Header {
            type_name: TYPE_NAME,
            content_type: "",
            is_event: true,
            stream_id: Some(self.stream_id),
            destinations: &[],
            wishes: Wishes {
                correlation_id: self.correlation_id,
                expected: self.expected.map_or(Expected::Any, Expected::Exact),
                ..Wishes::default()
            },
            check_json: false,
        }
    }

    fn write_payload(&self, buffer: &mut Vec<u8>, bytes_max: usize) -> std::result::Result<(), PayloadError> {
        self.payload.write(buffer, bytes_max)
    }
}

/// Says what was measured: the engine, with so many connections beside those of its shards and its two.
fn describe(figures: &mut Figures, scenario: &Scenario, engine: &Engine, beside: usize) {
    figures.subject = "corelane".into();
    figures.runtime = engine.runtime().kind.name().to_owned();
    figures.shards = engine.shards().len();
    figures.connections = 2 * figures.shards + 2 + beside;
    figures.batch = scenario.batch;
    figures.scenario = scenario.name();
}

/// Measures the engine under a scenario, in a schema of its own.
///
/// # Errors
/// Of the server or the engine. Broken promises are figures, no errors.
pub async fn measure(target: &Target, scenario: &Scenario, title: &str) -> Result<Figures> {
    match scenario.kind {
        ScenarioChoice::Outbox => engine_side::measure(target, scenario, title).await,
        ScenarioChoice::Events => events::measure(target, scenario).await,
        ScenarioChoice::Inbox => inbox::measure(target, scenario).await,
        ScenarioChoice::Subscribe => subscribe::measure(target, scenario).await,
        ScenarioChoice::Relay => relay::measure(target, scenario).await,
    }
}
