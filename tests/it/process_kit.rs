//! Engines in processes of their own, which can be killed, stopped and woken: this test binary again, running one
//! test that is ignored otherwise.
//!
//! Invariants
//! - A child does not outlive its handle, nor its parent: it ends when its standard input does.
//! - What a child's transport accepts stands in the journal, one `write` a message, before it is answered: the order of
//!   the lines is the order at the sink, whichever process sent them.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use corelane::transport::memory::Fault;
use corelane::{Engine, Error, MemoryTransport, RawMessage};
use uuid::Uuid;

use crate::support::TestSchema;

const PATIENCE: Duration = Duration::from_secs(60);
/// Begins each line that is an answer: the test harness of the child writes to the same place.
const ANSWER: &str = "case: ";

/// What a child's transport does beside accepting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Nothing.
    Accept,
    /// After so many messages it never answers again.
    HangAfter(usize),
    /// When it has accepted `m1` the whole process stops, as by SIGSTOP; what is called `x` it refuses for good.
    StopAtM1,
}

/// How to start one.
pub struct CasePlan<'a> {
    pub schema: &'a TestSchema,
    pub instance: &'a str,
    pub journal: &'a Path,
    pub manner: Manner,
    pub settings: &'a [(&'a str, &'a str)],
    /// Further environment of the process.
    pub environment: &'a [(&'a str, String)],
}

/// What became of a load.
#[derive(Debug)]
pub struct Loaded {
    /// Messages whose unit was acknowledged.
    pub stored: usize,
    /// Units that were not.
    pub refused: usize,
    /// Why the last of them was not.
    pub words: String,
}

/// A running one.
pub struct CaseProcess {
    child: Child,
    orders: ChildStdin,
    answers: mpsc::Receiver<String>,
}

impl CaseProcess {
    /// Starts it and waits until its engine runs.
    pub fn start(plan: &CasePlan<'_>) -> Self {
        let settings: Vec<String> = plan.settings.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process_kit::engine_of_a_case", "--ignored", "--nocapture", "--test-threads=1"])
            .env("CASE_URL", &plan.schema.url)
            .env("CASE_SCHEMA", &plan.schema.name)
            .env("CASE_INSTANCE", plan.instance)
            .env("CASE_JOURNAL", plan.journal)
            .env("CASE_MANNER", format!("{:?}", plan.manner))
            .env("CASE_SETTINGS", settings.join(";"))
            .envs(plan.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("this binary again");
        let (orders, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let Some((_, answer)) = line.split_once(ANSWER) else { continue };
                if sender.send(answer.to_owned()).is_err() {
                    return;
                }
            }
        });
        let process = Self { child, orders, answers };
        process.await_answer("started");
        process
    }

    /// Gives an order without waiting for its answer.
    pub fn order(&self, order: &str) {
        (&self.orders).write_all(format!("{order}\n").as_bytes()).expect("it takes orders");
    }

    /// Waits for an answer that begins so; others before it are passed over.
    pub fn await_answer(&self, begins: &str) -> String {
        loop {
            let answer = self.answers.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no answer \"{begins}\""));
            if answer.starts_with(begins) {
                return answer;
            }
        }
    }

    /// Commits messages, given as stream and text, in one unit of work.
    pub fn store(&self, messages: &[(Uuid, &str)]) {
        self.begin_store(messages);
        self.await_answer("stored");
    }

    /// As [`CaseProcess::store`], for a process that may stop before it answers.
    pub fn begin_store(&self, messages: &[(Uuid, &str)]) {
        let messages: Vec<String> = messages.iter().map(|(stream, text)| format!("{stream}:{text}")).collect();
        self.order(&format!("unit {}", messages.join(" ")));
    }

    /// Begins to store a unit of one message a stream every 10 ms, until [`CaseProcess::end_load`].
    pub fn begin_load(&self, streams: &[Uuid]) {
        let streams: Vec<String> = streams.iter().map(Uuid::to_string).collect();
        self.order(&format!("load {}", streams.join(" ")));
    }

    /// Ends it and waits for what is under way.
    pub fn end_load(&self) -> Loaded {
        self.order("end-load");
        let answer = self.await_answer("loaded");
        let mut words = answer.splitn(4, ' ').skip(1);
        let mut next = || words.next().unwrap();
        let (stored, refused) = (next().parse().unwrap(), next().parse().unwrap());
        Loaded { stored, refused, words: next().to_owned() }
    }

    /// Partitions that it holds, and its wall clock in seconds.
    pub fn status(&self) -> (usize, u64) {
        self.order("status");
        let answer = self.await_answer("status");
        let mut words = answer.split(' ').skip(1);
        let mut next = || words.next().unwrap();
        (next().parse().unwrap(), next().parse().unwrap())
    }

    /// Ends it in good order, as far as that goes: what it could not publish is left to the others.
    pub fn stop(self) {
        self.order("stop");
        self.await_answer("stopped");
    }

    /// Sends a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: a child of ours that has not been waited for, so the number is its.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Whether it is stopped.
    pub fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
    }

    /// Kills it (SIGKILL) and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for CaseProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A line of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub instance: String,
    pub fence: i64,
    pub stream: Uuid,
    pub stream_seq: i64,
    pub text: String,
}

/// The journal as far as it is written.
pub fn journal(path: &Path) -> Vec<Line> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let parse = |line: &str| {
        let mut words = line.split(' ');
        let mut next = || words.next().expect("five words");
        Line {
            instance: next().to_owned(),
            fence: next().parse().unwrap(),
            stream: next().parse().unwrap(),
            stream_seq: next().parse().unwrap(),
            text: next().to_owned(),
        }
    };
    whole.lines().map(parse).collect()
}

/// The first copies of a journal, each once.
pub fn first_copies(lines: &[Line]) -> Vec<Line> {
    let mut seen = std::collections::HashSet::new();
    lines.iter().filter(|line| seen.insert((line.stream, line.stream_seq))).cloned().collect()
}

/// First copies of each stream come in the order of their numbers.
pub fn assert_ordered(lines: &[Line]) {
    let mut last = std::collections::HashMap::new();
    for line in first_copies(lines) {
        let last = last.entry(line.stream).or_insert(0);
        assert_eq!(line.stream_seq, *last + 1, "{line:?} came after number {last}");
        *last = line.stream_seq;
    }
}

fn setting(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

fn transport(manner: &str) -> MemoryTransport {
    let (instance, path) = (setting("CASE_INSTANCE"), PathBuf::from(setting("CASE_JOURNAL")));
    let file = File::options().create(true).append(true).open(path).unwrap();
    let stops = manner == format!("{:?}", Manner::StopAtM1);
    let hangs_after = manner.strip_prefix("HangAfter(").map(|rest| rest.trim_end_matches(')').parse().unwrap());
    let decided = AtomicUsize::new(0);
    MemoryTransport::new(move |_, message| {
        let text = String::from_utf8_lossy(message.payload);
        let (stream, fence, number) = (message.stream_id.unwrap_or_default(), message.fence, message.stream_seq);
        (&file).write_all(format!("{instance} {fence} {stream} {number} {text}\n").as_bytes()).unwrap();
        if stops && text == "m1" {
            // SAFETY: a signal to this process itself.
            unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
            // Another thread may get the signal: nothing is answered before all of them have stopped.
            std::thread::sleep(Duration::from_millis(200));
        }
    })
    .with_faults(move |_, message| match hangs_after {
        Some(count) if decided.fetch_add(1, Ordering::Relaxed) >= count => Fault::Hang,
        _ if stops && message.payload == b"x" => Fault::RefuseForGood("refused by the one that sleeps".into()),
        _ => Fault::None,
    })
}

/// Units of one message a stream, a hundred a second, until it is told to stop.
async fn load(engine: Engine, streams: Vec<Uuid>, stop: Arc<AtomicBool>) -> Loaded {
    /// So many wait at most while the database lets nobody in.
    const UNITS_MAX: usize = 500;
    let (mut units, mut loaded) =
        (tokio::task::JoinSet::new(), Loaded { stored: 0, refused: 0, words: "none".to_owned() });
    let mut ticks = tokio::time::interval(Duration::from_millis(10));
    loop {
        let ends = stop.load(Ordering::Relaxed);
        while ends || units.len() >= UNITS_MAX {
            let Some(unit) = units.join_next().await else { return loaded };
            note(&mut loaded, unit.unwrap());
        }
        while let Some(unit) = units.try_join_next() {
            note(&mut loaded, unit.unwrap());
        }
        ticks.tick().await;
        let (engine, streams) = (engine.clone(), streams.clone());
        units.spawn(async move {
            let mut unit = engine.unit_of_work();
            for stream in streams {
                unit.push(&RawMessage::event("test.load", b"load").stream(stream).to(&["sink"]))?;
            }
            unit.commit().await.map(|receipts| receipts.len())
        });
    }
}

fn note(loaded: &mut Loaded, unit: Result<usize, Error>) {
    match unit {
        Ok(count) => loaded.stored += count,
        Err(error) => (loaded.refused, loaded.words) = (loaded.refused + 1, error.to_string().replace('\n', " ")),
    }
}

/// The child's whole life. Without its environment it has nothing to do.
#[test]
#[ignore = "the process of other tests"]
fn engine_of_a_case() {
    if setting("CASE_URL").is_empty() {
        return;
    }
    // The parent drops the schema.
    let schema = ManuallyDrop::new(TestSchema { url: setting("CASE_URL"), name: setting("CASE_SCHEMA") });
    let mut config = crate::engine::config(&schema);
    config.set("service.instance", &setting("CASE_INSTANCE")).unwrap();
    for setting in setting("CASE_SETTINGS").split(';').filter(|setting| !setting.is_empty()) {
        let (key, value) = setting.split_once('=').unwrap();
        config.set(key, value).unwrap();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let transport = transport(&setting("CASE_MANNER"));
    let engine = runtime.block_on(Engine::builder(config).transport(transport).migrate(true).start()).expect("start");
    println!("\n{ANSWER}started");
    let mut loading = None;
    for order in std::io::stdin().lines().map_while(Result::ok) {
        match order.split_once(' ') {
            Some(("unit", messages)) => {
                let mut unit = engine.unit_of_work();
                for message in messages.split(' ') {
                    let (stream, text) = message.split_once(':').unwrap();
                    let message = RawMessage::event("test.case", text.as_bytes()).stream(stream.parse().unwrap());
                    unit.push(&message.to(&["sink"])).unwrap();
                }
                // One that is killed or declared dead meanwhile may answer an error: the journal tells.
                let stored = runtime.block_on(unit.commit()).is_ok();
                println!("\n{ANSWER}stored {stored}");
            }
            None if order == "stop" => {
                let report = runtime.block_on(engine.shutdown(PATIENCE));
                println!("\n{ANSWER}stopped {}", report.drained);
                return;
            }
            Some(("load", streams)) => {
                let streams = streams.split(' ').map(|stream| stream.parse().unwrap()).collect();
                let stop = Arc::new(AtomicBool::new(false));
                loading = Some((stop.clone(), runtime.spawn(load(engine.clone(), streams, stop))));
            }
            None if order == "end-load" => {
                let (stop, load) = loading.take().expect("it has begun");
                stop.store(true, Ordering::Relaxed);
                let loaded = runtime.block_on(load).unwrap();
                println!("\n{ANSWER}loaded {} {} {}", loaded.stored, loaded.refused, loaded.words);
            }
            _ => {
                let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
                println!("\n{ANSWER}status {} {wall}", engine.partitions_held());
            }
        }
    }
}
