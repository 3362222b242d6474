//! The simulation's executor: one thread, virtual time, and every choice drawn from one seed.
//!
//! Invariants
//! - The same seed gives the same run: nothing here reads a clock, an address or a hash order.
//! - Time moves only when nothing is runnable (and a little with each step, so that a loop without a wait
//!   is seen to burn time); it jumps to the next timer.
//! - Tasks belong to a process. A killed process loses all its tasks at once, at whatever await they stand;
//!   a stalled one is not polled until its stall is over, whatever wakes it.
//! - A panic in a task and more steps than allowed end the run with a [`Failure`]: neither is passed over.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

pub use super::random::Random;
use uuid::Uuid;

use crate::seam::runtime::Runtime;
use crate::time::Tick;

/// Lines of the trace that are kept for a failure's report.
const TRACE_LINES_MAX: usize = 200;

/// Why a run ended before its time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("seed {seed}, at {at_us} us, step {step}: {text}")]
pub struct Failure {
    /// The seed that replays it.
    pub seed: u64,
    /// Virtual time.
    pub at_us: u64,
    /// Steps made.
    pub step: u64,
    /// What happened.
    pub text: String,
}

struct Ready {
    tasks: Mutex<Vec<u64>>,
}

struct TaskWaker {
    task: u64,
    ready: Arc<Ready>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut tasks = self.ready.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        if !tasks.contains(&self.task) {
            tasks.push(self.task);
        }
    }
}

struct Task {
    process: u64,
    /// Absent while it is being polled.
    future: Option<Pin<Box<dyn Future<Output = ()>>>>,
    waker: Waker,
}

struct State {
    seed: u64,
    now: Tick,
    random: Random,
    tasks: BTreeMap<u64, Task>,
    timers: BTreeMap<(Tick, u64), Waker>,
    stalled: BTreeMap<u64, Tick>,
    next_id: u64,
    steps: u64,
    steps_max: u64,
    failure: Option<Failure>,
    trace: VecDeque<String>,
}

struct World {
    state: RefCell<State>,
    ready: Arc<Ready>,
    echo: Cell<bool>,
}

/// One process on the simulated machine: a handle to the executor that its tasks are spawned with.
#[derive(Clone)]
pub struct SimRuntime {
    world: Rc<World>,
    process: u64,
}

impl SimRuntime {
    /// A new world with its first process. More than `steps_max` polls of tasks are a failure.
    #[must_use]
    pub fn new(seed: u64, steps_max: u64) -> Self {
        let state = State {
            seed,
            now: Tick(1_000_000),
            random: Random::new(seed),
            tasks: BTreeMap::new(),
            timers: BTreeMap::new(),
            stalled: BTreeMap::new(),
            next_id: 1,
            steps: 0,
            steps_max,
            failure: None,
            trace: VecDeque::new(),
        };
        let ready = Arc::new(Ready { tasks: Mutex::new(Vec::new()) });
        Self { world: Rc::new(World { state: RefCell::new(state), ready, echo: Cell::new(false) }), process: 0 }
    }

    /// Another process of the same world.
    #[must_use]
    pub fn new_process(&self) -> Self {
        Self { world: self.world.clone(), process: self.fresh_id() }
    }

    /// This process' number.
    #[must_use]
    pub fn process(&self) -> u64 {
        self.process
    }

    /// The seed.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.world.state.borrow().seed
    }

    /// A number below `bound`, from the world's one sequence.
    #[must_use]
    pub fn below(&self, bound: u64) -> u64 {
        self.world.state.borrow_mut().random.below(bound)
    }

    /// True so many times in a thousand.
    #[must_use]
    pub fn per_mille(&self, chance: u64) -> bool {
        chance > 0 && self.below(1000) < chance
    }

    /// Sleeps for up to `us_max` microseconds.
    pub async fn dawdle(&self, us_max: u64) {
        let us = self.below(us_max + 1);
        let until = self.now().plus_us(us);
        self.sleep_until(until).await;
    }

    /// Drops all tasks of this process where they stand. The caller, if it is one of them, ends at its next
    /// await.
    pub fn kill(&self) {
        let doomed: Vec<Task> = {
            let mut state = self.world.state.borrow_mut();
            let ids: Vec<u64> =
                state.tasks.iter().filter(|(_, task)| task.process == self.process).map(|(id, _)| *id).collect();
            ids.iter().filter_map(|id| state.tasks.remove(id)).collect()
        };
        // Their destructors may come back here: no borrow is held.
        drop(doomed);
    }

    /// Drops every task of the world: tasks hold the world, so that without this nothing would be freed.
    pub fn end_world(&self) {
        loop {
            let doomed = std::mem::take(&mut self.world.state.borrow_mut().tasks);
            if doomed.is_empty() {
                return;
            }
            drop(doomed);
        }
    }

    /// Polls no task of this process before `until`.
    pub fn stall_until(&self, until: Tick) {
        self.world.state.borrow_mut().stalled.insert(self.process, until);
    }

    /// Remembers a line for the report of a failure.
    pub fn trace(&self, line: impl FnOnce() -> String) {
        let mut state = self.world.state.borrow_mut();
        if state.trace.len() == TRACE_LINES_MAX {
            state.trace.pop_front();
        }
        let line = format!("{:>10} p{} {}", state.now.0, self.process, line());
        if self.world.echo.get() {
            eprintln!("{line}");
        }
        state.trace.push_back(line);
    }

    /// Prints every trace line at once, for the replay of one seed.
    pub fn echo_trace(&self, echo: bool) {
        self.world.echo.set(echo);
    }

    /// The last lines of the trace.
    #[must_use]
    pub fn last_events(&self) -> Vec<String> {
        self.world.state.borrow().trace.iter().cloned().collect()
    }

    /// Ends the run as failed, for the first reason given.
    pub fn fail(&self, text: impl Into<String>) {
        let mut state = self.world.state.borrow_mut();
        if state.failure.is_none() {
            let failure = Failure { seed: state.seed, at_us: state.now.0, step: state.steps, text: text.into() };
            state.failure = Some(failure);
        }
    }

    /// Runs until `main` has ended. Other tasks stay where they are.
    ///
    /// # Errors
    /// The first failure: a panic, too many steps, [`SimRuntime::fail`], or nothing left that could ever run.
    pub fn block_on<T: 'static>(&self, main: impl Future<Output = T> + 'static) -> Result<T, Failure> {
        let answer = Rc::new(RefCell::new(None));
        let into = answer.clone();
        self.spawn(async move {
            let value = main.await;
            *into.borrow_mut() = Some(value);
        });
        self.run_until(|| answer.borrow().is_some())?;
        let value = answer.borrow_mut().take();
        value.ok_or_else(|| Failure { seed: self.seed(), at_us: 0, step: 0, text: "no answer".into() })
    }

    /// Runs until `done` says so.
    ///
    /// # Errors
    /// As [`SimRuntime::block_on`].
    pub fn run_until(&self, mut done: impl FnMut() -> bool) -> Result<(), Failure> {
        loop {
            if let Some(failure) = self.world.state.borrow().failure.clone() {
                return Err(failure);
            }
            if done() {
                return Ok(());
            }
            if !self.step() {
                self.fail("nothing is runnable and no timer is set");
            }
        }
    }

    /// One poll of one runnable task, or one jump of the clock. `false` if there is neither.
    fn step(&self) -> bool {
        let Some(task) = self.pick() else { return self.jump() };
        let (mut future, waker, process) = {
            let mut state = self.world.state.borrow_mut();
            state.steps += 1;
            let us = state.random.below(3);
            state.now = state.now.plus_us(us);
            if state.steps > state.steps_max {
                let text = format!("more than {} steps: a livelock, or a bound too low", state.steps_max);
                drop(state);
                self.fail(text);
                return true;
            }
            let Some(entry) = state.tasks.get_mut(&task) else { return true };
            let Some(future) = entry.future.take() else { return true };
            (future, entry.waker.clone(), entry.process)
        };
        let polled = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(&mut Context::from_waker(&waker))));
        let ended = match polled {
            Ok(Poll::Pending) => false,
            Ok(Poll::Ready(())) => true,
            Err(panic) => {
                let text = panic
                    .downcast_ref::<String>()
                    .cloned()
                    .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
                    .unwrap_or_default();
                self.fail(format!("panic in process {process}: {text}"));
                true
            }
        };
        // Killed while it ran: its entry is gone, and the future is dropped here.
        let unused = {
            let mut state = self.world.state.borrow_mut();
            if ended {
                state.tasks.remove(&task);
                Some(future)
            } else if let Some(entry) = state.tasks.get_mut(&task) {
                entry.future = Some(future);
                None
            } else {
                Some(future)
            }
        };
        drop(unused);
        true
    }

    /// A runnable task, by chance, leaving those of stalled processes where they are.
    fn pick(&self) -> Option<u64> {
        let mut state = self.world.state.borrow_mut();
        let state = &mut *state;
        let now = state.now;
        state.stalled.retain(|_, until| *until > now);
        let mut ready = self.world.ready.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        ready.retain(|task| state.tasks.contains_key(task));
        if state.stalled.is_empty() {
            if ready.is_empty() {
                return None;
            }
            let at = state.random.below(ready.len() as u64) as usize;
            return Some(ready.swap_remove(at));
        }
        let runnable: Vec<usize> = (0..ready.len())
            .filter(|at| state.tasks.get(&ready[*at]).is_some_and(|task| !state.stalled.contains_key(&task.process)))
            .collect();
        if runnable.is_empty() {
            return None;
        }
        let at = runnable[state.random.below(runnable.len() as u64) as usize];
        Some(ready.swap_remove(at))
    }

    /// Moves the clock to the next timer or the end of a stall and wakes what is due.
    fn jump(&self) -> bool {
        let due: Vec<Waker> = {
            let mut state = self.world.state.borrow_mut();
            let timer = state.timers.keys().next().map(|(at, _)| *at);
            let stall = state.stalled.values().min().copied();
            let Some(next) = timer.into_iter().chain(stall).min() else { return false };
            state.now = state.now.max(next);
            let now = state.now;
            let later = state.timers.split_off(&(now.plus_us(1), 0));
            std::mem::replace(&mut state.timers, later).into_values().collect()
        };
        due.into_iter().for_each(Waker::wake);
        true
    }

    fn fresh_id(&self) -> u64 {
        let mut state = self.world.state.borrow_mut();
        state.next_id += 1;
        state.next_id
    }
}

/// A timer that goes away with its future.
struct Sleep {
    world: Rc<World>,
    key: (Tick, u64),
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.world.state.borrow_mut();
        if state.now >= self.key.0 {
            state.timers.remove(&self.key);
            return Poll::Ready(());
        }
        if self.key.0 != Tick::NEVER {
            state.timers.insert(self.key, context.waker().clone());
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let timer = self.world.state.borrow_mut().timers.remove(&self.key);
        drop(timer);
    }
}

impl Runtime for SimRuntime {
    fn now(&self) -> Tick {
        self.world.state.borrow().now
    }

    fn sleep_until(&self, at: Tick) -> impl Future<Output = ()> + 'static {
        Sleep { world: self.world.clone(), key: (at, self.fresh_id()) }
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        let id = self.fresh_id();
        let waker = Arc::new(TaskWaker { task: id, ready: self.world.ready.clone() });
        let entry = Task { process: self.process, future: Some(Box::pin(task)), waker: waker.clone().into() };
        self.world.state.borrow_mut().tasks.insert(id, entry);
        waker.wake();
    }

    fn yield_now(&self) -> impl Future<Output = ()> + 'static {
        let mut yielded = false;
        poll_fn(move |context| {
            if yielded {
                return Poll::Ready(());
            }
            yielded = true;
            context.waker().wake_by_ref();
            Poll::Pending
        })
    }

    fn draw_id(&self) -> Uuid {
        Uuid::from_u64_pair(self.below(u64::MAX), self.below(u64::MAX))
    }

    fn name(&self) -> &'static str {
        "sim"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order_of(seed: u64) -> String {
        let runtime = SimRuntime::new(seed, 10_000);
        let order = Rc::new(RefCell::new(String::new()));
        for name in ["a", "b", "c", "d"] {
            let (clock, order) = (runtime.clone(), order.clone());
            runtime.spawn(async move {
                for _ in 0..3 {
                    order.borrow_mut().push_str(name);
                    clock.dawdle(50).await;
                }
            });
        }
        let clock = runtime.clone();
        let ended = runtime.block_on(async move { clock.sleep_until(Tick(2_000_000)).await });
        assert_eq!(ended, Ok(()));
        order.take()
    }

    #[test]
    fn a_seed_is_a_run() {
        assert_eq!(order_of(7), order_of(7));
        assert_ne!(order_of(7), order_of(8));
        assert_eq!(order_of(7).len(), 12);
    }

    #[test]
    fn a_killed_process_stops_and_a_stalled_one_waits() {
        let runtime = SimRuntime::new(1, 10_000);
        let counts = [Rc::new(Cell::new(0)), Rc::new(Cell::new(0))];
        let processes = [runtime.new_process(), runtime.new_process()];
        for (process, count) in processes.iter().zip(&counts) {
            let (clock, count) = (process.clone(), count.clone());
            process.spawn(async move {
                loop {
                    count.set(count.get() + 1);
                    clock.sleep_until(clock.now().plus_ms(1)).await;
                }
            });
        }
        let (clock, start) = (runtime.clone(), runtime.now());
        let [killed, stalled] = processes;
        let ended = runtime.block_on(async move {
            stalled.stall_until(start.plus_ms(50));
            clock.sleep_until(start.plus_ms(10)).await;
            killed.kill();
            clock.sleep_until(start.plus_ms(60)).await;
        });
        assert_eq!(ended, Ok(()));
        assert!((8..=12).contains(&counts[0].get()), "{}", counts[0].get());
        assert!((8..=12).contains(&counts[1].get()), "{}", counts[1].get());
    }

    #[test]
    fn panics_livelocks_and_standstills_are_failures() {
        let runtime = SimRuntime::new(3, 1_000);
        let clock = runtime.clone();
        let spin = runtime.block_on(async move {
            loop {
                clock.yield_now().await;
            }
        });
        assert!(spin.is_err_and(|failure: Failure| failure.text.contains("livelock") && failure.seed == 3));

        let runtime = SimRuntime::new(4, 1_000);
        let still = runtime.block_on(std::future::pending::<()>());
        assert!(still.is_err_and(|failure| failure.text.contains("nothing is runnable")));
    }
}
