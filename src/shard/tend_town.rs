//! A lease keeper's town for its stories (`tend_tests`): a database and shards that do as a script says.
//!
//! Words, of the server: `lose` (every call fails with its connection), `hang` (no call is answered), `refuse` (every
//! call fails for now), `gone` (every call fails: the schema is another one), `well`, `slip` (the connection is lost with
//! the next hand-over, and the renewal after it refused for now), `stuck` (maintenance is not answered), `steps N` (so
//! many steps of maintenance get on), `log` / `empty` (something stands in the log, or not), `store` (somebody stores).
//!
//! Of others: `member N` (connected, its lease running), `peer N` (one that takes partitions), `worker N` (one that speaks
//! SQL: it takes some, and hears of nothing), `cut N` (its connection ends), `ended N` (its session lock is free), `still
//! N` (it renews no more and its lease is past), `beat N` (it renews), `heard` (they say that something has changed).
//!
//! Of this one: `kill` (the incarnation is dead), `let` (the shards let go what they were asked for), `cannot` (they
//! cannot), `part N` (the first N shards let everything go, because of a stop), `stop`, `lease` (says until when shards may
//! publish), `others` (says whether a stop leaves the rest to others), `listens` (one connection listens), `deaf` (it hears
//! nothing of what it says to itself), `hears` (it does), `unplugged` (it ends).
//!
//! The lease is 10 s, its margin 5 s; there are 4 partitions and 2 shards.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use uuid::Uuid;

use super::listen::Listener;
use super::tend::{Keeper, Stop};
use super::upkeep::Sentinel;
use super::{Control, LeaseCell};
use crate::ids::Incarnation;
use crate::plan::lease::LeaseTimes;
use crate::plan::listener::TestTimes;
use crate::runtime::sim::SimRuntime;
use crate::seam::runtime::Runtime;
use crate::seam::store::{
    Coordination, Heard, HeldPartition, Maintenance, Member, Members, Registration, Release, Renewed, StoreError, Taken,
};
use crate::time::Tick;

#[derive(Clone, Copy, PartialEq)]
enum Manner {
    Well,
    Lose,
    Hang,
    Refuse,
    Gone,
}

struct Town {
    clock: SimRuntime,
    start: Tick,
    told: RefCell<Vec<String>>,
    manner: Cell<Manner>,
    registered: Cell<i32>,
    alive: Cell<bool>,
    owns: Cell<bool>,
    ownership: Cell<i64>,
    others: RefCell<Vec<Member>>,
    /// Of each of the four partitions: who owns it; 0 = nobody.
    owners: RefCell<[i32; 4]>,
    /// What the shards were asked to let go, and have not.
    asked: RefCell<Vec<(Vec<u32>, futures_channel::oneshot::Sender<Release>)>>,
    said: Cell<bool>,
    slips: Cell<bool>,
    /// So many of the next calls meet a conflict of serialization.
    conflicts: Cell<i32>,
    stumbles: Cell<bool>,
    /// The member whose end the keeper waits for, and whether it has ended.
    ended: Cell<Option<i32>>,
    stopped: Cell<bool>,
    /// Whether something stands in the log.
    log: Cell<bool>,
    /// The last position that was drawn.
    position: Cell<i64>,
    /// Steps of maintenance that get on.
    steps: Cell<i32>,
    upkeep_hangs: Cell<bool>,
    listens: Cell<bool>,
    deaf: Cell<bool>,
    unplugged: Cell<bool>,
}

impl Town {
    fn tell(&self, text: &str) {
        let ms = self.clock.now().since_us(self.start) / 1000;
        self.told.borrow_mut().push(format!("{ms} {text}"));
    }

    async fn call(&self, name: &str) -> Result<(), StoreError> {
        self.tell(name);
        if self.conflicts.get() > 0 {
            self.conflicts.set(self.conflicts.get() - 1);
            return Err(StoreError::Transient { sqlstate: "40001".into(), text: "forced".into() });
        }
        match self.manner.get() {
            Manner::Well => Ok(()),
            Manner::Lose => Err(StoreError::ConnectionLost("cut".into())),
            Manner::Refuse => Err(not_now()),
            Manner::Gone => Err(StoreError::SchemaChanged {
                installed: Some(9),
                wanted: 2,
                sqlstate: "42883".into(),
                text: "there is no such function".into(),
            }),
            Manner::Hang => std::future::pending().await,
        }
    }
}

fn not_now() -> StoreError {
    StoreError::Transient { sqlstate: "57P03".into(), text: "starting up".into() }
}

#[derive(Clone)]
struct Door(Rc<Town>);

impl Coordination for Door {
    async fn register_instance(
        &self,
        registration: &Registration,
        _lease_ms: u64,
    ) -> Result<(Incarnation, u32), StoreError> {
        let owns = registration.owns == self.0.owns.get();
        self.0.call(if owns { "register" } else { "register to own nothing" }).await?;
        self.0.registered.set(self.0.registered.get() + 1);
        self.0.alive.set(true);
        Ok((Incarnation { number: self.0.registered.get(), id: registration.id }, 4))
    }

    async fn renew_lease(&self, _incarnation: Incarnation, _lease_ms: u64) -> Result<Renewed, StoreError> {
        self.0.call("renew").await?;
        if self.0.stumbles.take() {
            return Err(not_now());
        }
        Ok(if self.0.alive.get() { Renewed::Alive } else { Renewed::Dead })
    }

    async fn members(&self, _incarnation: Incarnation) -> Result<Members, StoreError> {
        self.0.call("members").await?;
        let owners = *self.0.owners.borrow();
        let free = (0..4).filter(|partition| owners[*partition as usize] == 0).collect();
        let mut others = self.0.others.borrow().clone();
        for other in &mut others {
            other.held = owners.iter().filter(|owner| **owner == other.incarnation.number).count() as u32;
        }
        Ok(Members { others, free, position: self.0.position.get() })
    }

    async fn mark_dead(&self, dead: Member, early: bool) -> Result<bool, StoreError> {
        let number = dead.incarnation.number;
        self.0.call(&format!("{} {number} dead", if early { "early" } else { "late" })).await?;
        let mut others = self.0.others.borrow_mut();
        let before = others.len();
        others.retain(|other| {
            other.incarnation.number != number
                || if early { other.connected } else { !other.expired || other.counter != dead.counter }
        });
        if others.len() < before {
            self.0.owners.borrow_mut().iter_mut().filter(|of| **of == number).for_each(|of| *of = 0);
        }
        Ok(others.len() < before)
    }

    async fn take_partitions(&self, incarnation: Incarnation, partitions: &[u32]) -> Result<Option<Taken>, StoreError> {
        self.0.call("take").await?;
        if !self.0.alive.get() {
            return Ok(None);
        }
        let mut owners = self.0.owners.borrow_mut();
        let free: Vec<u32> = partitions.iter().copied().filter(|partition| owners[*partition as usize] == 0).collect();
        if !free.is_empty() {
            free.iter().for_each(|partition| owners[*partition as usize] = incarnation.number);
            self.0.ownership.set(self.0.ownership.get() + 1);
        }
        let mine = (0..4).filter(|partition| owners[*partition as usize] == incarnation.number);
        let held = mine.map(|partition| HeldPartition { partition, fence: 7 }).collect();
        Ok(Some(Taken { ownership: self.0.ownership.get(), held }))
    }

    async fn release_partitions(&self, incarnation: Incarnation, release: &Release) -> Result<Option<i64>, StoreError> {
        let partitions: Vec<u32> = release.partitions.iter().map(|(partition, _)| *partition).collect();
        self.0.call(&format!("hand over {partitions:?}")).await?;
        if self.0.slips.take() {
            self.0.stumbles.set(true);
            return Err(StoreError::ConnectionLost("cut".into()));
        }
        let mut owners = self.0.owners.borrow_mut();
        for partition in partitions {
            let owner = &mut owners[partition as usize];
            if *owner == incarnation.number {
                *owner = 0;
            }
        }
        self.0.ownership.set(self.0.ownership.get() + 1);
        Ok(Some(self.0.ownership.get()))
    }

    async fn wait_for_end(&self, member: Member, _limit_ms: u64) -> Result<bool, StoreError> {
        while self.0.ended.get() != Some(member.incarnation.number) {
            self.0.clock.sleep_until(self.0.clock.now().plus_ms(1)).await;
        }
        self.0.ended.set(None);
        Ok(true)
    }

    async fn listen(&self) -> Result<bool, StoreError> {
        self.0.unplugged.set(false);
        Ok(self.0.listens.get())
    }

    async fn test_listener(&self) -> Result<(), StoreError> {
        self.0.tell("test");
        if self.0.deaf.get() { std::future::pending().await } else { Ok(()) }
    }

    async fn listener_lost(&self) {
        while !self.0.unplugged.get() {
            self.0.clock.sleep_until(self.0.clock.now().plus_ms(1)).await;
        }
    }

    async fn heard(&self) -> Heard {
        while !self.0.said.take() {
            self.0.clock.sleep_until(self.0.clock.now().plus_ms(1)).await;
        }
        Heard { members: true, ..Heard::default() }
    }

    async fn withdraw_instance(&self, _incarnation: Incarnation) -> Result<bool, StoreError> {
        self.0.call("withdraw").await?;
        Ok(self.0.alive.get())
    }

    async fn deregister_instance(&self, _incarnation: Incarnation) -> Result<(), StoreError> {
        self.0.call("deregister").await
    }

    async fn perform_maintenance(&self, _incarnation: Incarnation, _limit_ms: u64) -> Result<Maintenance, StoreError> {
        if self.0.upkeep_hangs.get() {
            self.0.tell("maintain");
            return std::future::pending().await;
        }
        self.0.call("maintain").await?;
        let steps = self.0.steps.get();
        self.0.steps.set(steps.saturating_sub(1));
        Ok(Maintenance { work_left: self.0.log.get(), more: steps > 0, ..Maintenance::default() })
    }
}

struct StopAt(Rc<Town>);

impl Stop for StopAt {
    async fn stopped(&self) {
        while !self.0.stopped.get() {
            self.0.clock.sleep_until(self.0.clock.now().plus_ms(1)).await;
        }
    }

    fn is_stopped(&self) -> bool {
        self.0.stopped.get()
    }
}

fn member(number: i32) -> Member {
    let incarnation = Incarnation { number, id: Uuid::from_u128(number as u128) };
    Member { incarnation, counter: 1, expired: false, connected: true, direct: true, owns: false, held: 0 }
}

fn happens(town: &Town, lease: &LeaseCell, what: &str) {
    let (verb, number) = what.split_once(' ').map_or((what, 0), |(verb, number)| (verb, number.parse().unwrap()));
    let change = |change: &dyn Fn(&mut Member)| {
        town.others.borrow_mut().iter_mut().filter(|other| other.incarnation.number == number).for_each(change);
    };
    match verb {
        "lose" => town.manner.set(Manner::Lose),
        "hang" => town.manner.set(Manner::Hang),
        "refuse" => town.manner.set(Manner::Refuse),
        "gone" => town.manner.set(Manner::Gone),
        "well" => town.manner.set(Manner::Well),
        "kill" => {
            town.alive.set(false);
            *town.owners.borrow_mut() = [0; 4];
        }
        "member" => {
            town.others.borrow_mut().push(member(number));
            *town.owners.borrow_mut() = [number; 4];
        }
        "peer" => town.others.borrow_mut().push(Member { owns: true, ..member(number) }),
        "worker" => town.others.borrow_mut().push(Member { owns: true, direct: false, ..member(number) }),
        "heard" => town.said.set(true),
        "ended" => town.ended.set(Some(number)),
        "let" => {
            for (partitions, reply) in town.asked.borrow_mut().drain(..) {
                let partitions = partitions.into_iter().map(|partition| (partition, None)).collect();
                reply.send(Release { epoch: None, partitions }).unwrap();
            }
        }
        "part" => (0..number as u32).for_each(|shard| {
            let partitions = vec![(shard, None), (shard + 2, None)];
            lease.part(Release { epoch: None, partitions });
        }),
        "slip" => town.slips.set(true),
        "conflicts" => town.conflicts.set(number),
        "cannot" => town.asked.borrow_mut().clear(),
        "cut" => change(&|other| other.connected = false),
        "still" => change(&|other| other.expired = true),
        "beat" => change(&|other| other.counter += 1),
        "stop" => town.stopped.set(true),
        "log" => town.log.set(true),
        "empty" => town.log.set(false),
        "store" => {
            town.position.set(town.position.get() + 1);
            town.log.set(true);
        }
        "steps" => town.steps.set(number),
        "stuck" => town.upkeep_hangs.set(true),
        "listens" => town.listens.set(true),
        "deaf" => town.deaf.set(true),
        "hears" => town.deaf.set(false),
        "unplugged" => town.unplugged.set(true),
        "lease" => {
            let until = lease.deadline();
            let text =
                if until == Tick(0) { "over".into() } else { format!("until {}", until.since_us(town.start) / 1000) };
            town.tell(&format!("lease {text}"));
        }
        "others" => town.tell(&format!("others {}", lease.has_others())),
        other => panic!("no such word: {other}"),
    }
}

/// Plays `ms word; ms word; …`; answers what happened, `ms what`, up to the last word's time or the keeper's end.
pub(super) fn play(owns: bool, script: &'static str) -> String {
    let clock = SimRuntime::new(1, 1_000_000);
    let town = Rc::new(Town {
        clock: clock.clone(),
        start: clock.now(),
        told: RefCell::default(),
        manner: Cell::new(Manner::Well),
        registered: Cell::new(0),
        alive: Cell::new(false),
        owns: Cell::new(owns),
        ownership: Cell::new(0),
        others: RefCell::default(),
        owners: RefCell::default(),
        asked: RefCell::default(),
        said: Cell::new(false),
        slips: Cell::new(false),
        conflicts: Cell::new(0),
        stumbles: Cell::new(false),
        ended: Cell::new(None),
        stopped: Cell::new(false),
        log: Cell::new(false),
        position: Cell::new(0),
        steps: Cell::new(0),
        upkeep_hangs: Cell::new(false),
        listens: Cell::new(false),
        deaf: Cell::new(false),
        unplugged: Cell::new(false),
    });
    let lease = Arc::new(LeaseCell::default());
    let told = town.clone();
    let keeper = Keeper {
        runtime: clock.clone(),
        coordination: Door(town.clone()),
        service_name: "test".into(),
        instance_name: "test".into(),
        shards: 2,
        times: LeaseTimes::new(10_000, 5_000, 4_000).unwrap(),
        owns: town.owns.get(),
        lease: lease.clone(),
        others: Arc::default(),
        listener: Arc::new(Listener::new(TestTimes { interval_ms: 30_000, limit_ms: 2_000 })),
        sentinel: Sentinel::default(),
        tell: move |shard: u16, control: Control| {
            let (incarnation, ownership, held) = match control {
                Control::Partitions { incarnation, ownership, held } => (incarnation, ownership, held),
                Control::Release { partitions, reply } => {
                    told.tell(&format!("shard {shard}: let {partitions:?} go"));
                    told.asked.borrow_mut().push((partitions, reply));
                    return;
                }
                Control::Look => return told.tell(&format!("shard {shard}: look")),
                Control::Listening(listening) => return told.tell(&format!("shard {shard}: listening {listening}")),
                other => panic!("{other:?}"),
            };
            let held: Vec<u32> = held.iter().map(|held| held.partition).collect();
            told.tell(&format!("shard {shard}: {}/{ownership} {held:?}", incarnation.number));
        },
    };
    let ended = Rc::new(Cell::new(false));
    let (stop, has_ended) = (StopAt(town.clone()), ended.clone());
    let player = town.clone();
    clock
        .block_on(async move {
            let mut keeper = Some(keeper);
            for step in script.split(';') {
                let (ms, what) = step.trim().split_once(' ').unwrap();
                let at = player.start.plus_ms(ms.parse().unwrap());
                player.clock.sleep_until(at).await;
                happens(&player, &lease, what);
                if let Some(keeper) = keeper.take() {
                    // Begins after the words of millisecond 0.
                    let (stop, has_ended) = (StopAt(stop.0.clone()), has_ended.clone());
                    player.clock.spawn(async move {
                        keeper.keep(stop).await;
                        has_ended.set(true);
                    });
                }
            }
            let give_up = player.clock.now().plus_ms(20_000);
            while player.stopped.get() && !has_ended.get() && player.clock.now() < give_up {
                player.clock.sleep_until(player.clock.now().plus_ms(1)).await;
            }
            if player.stopped.get() {
                player.tell(if has_ended.get() { "ended" } else { "did not end" });
                happens(&player, &lease, "lease");
            }
        })
        .unwrap();
    clock.end_world();
    town.told.borrow().join("\n")
}

pub(super) fn lines(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n")
}
