//! Stories of the lease keeper: what happens at which millisecond in, what it asks of the database and tells the
//! shards out.
//!
//! Words: `lose` (every call fails with its connection), `hang` (no call is answered), `refuse` (every call fails for
//! now), `gone` (every call fails: the schema is another one, `well`, `kill` (this incarnation is dead), `member N` (another one: connected, its lease running), `cut N` (its
//! connection ends), `log` / `empty` (something stands in the log, or not), `store` (somebody stores), `steps N` (so many steps of maintenance get
//! on), `stuck` (maintenance is not answered), `still N` (it renews no more and its lease is past), `beat N` (it renews), `stop`, `lease` (says
//! until when shards may publish). The lease is 10 s, its margin 5 s; there are 4 partitions and 2 shards.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use uuid::Uuid;

use super::tend::{Keeper, Stop};
use super::{Control, LeaseCell};
use crate::ids::Incarnation;
use crate::plan::lease::LeaseTimes;
use crate::runtime::sim::SimRuntime;
use crate::seam::runtime::Runtime;
use crate::seam::store::{Coordination, HeldPartition, Maintenance, Member, Members, Renewed, StoreError, Taken};
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
    owner: Cell<i32>,
    stopped: Cell<bool>,
    /// Whether something stands in the log.
    log: Cell<bool>,
    /// The last position that was drawn.
    position: Cell<i64>,
    /// Steps of maintenance that get on.
    steps: Cell<i32>,
    upkeep_hangs: Cell<bool>,
}

impl Town {
    fn tell(&self, text: &str) {
        let ms = self.clock.now().since_us(self.start) / 1000;
        self.told.borrow_mut().push(format!("{ms} {text}"));
    }

    async fn call(&self, name: &str) -> Result<(), StoreError> {
        self.tell(name);
        match self.manner.get() {
            Manner::Well => Ok(()),
            Manner::Lose => Err(StoreError::ConnectionLost("cut".into())),
            Manner::Refuse => Err(StoreError::Transient { sqlstate: "57P03".into(), text: "starting up".into() }),
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

#[derive(Clone)]
struct Door(Rc<Town>);

impl Coordination for Door {
    async fn register_instance(
        &self,
        id: Uuid,
        _service_name: &str,
        _instance_name: &str,
        _shards: u16,
        _lease_ms: u64,
    ) -> Result<(Incarnation, u32), StoreError> {
        self.0.call("register").await?;
        self.0.registered.set(self.0.registered.get() + 1);
        self.0.alive.set(true);
        Ok((Incarnation { number: self.0.registered.get(), id }, 4))
    }

    async fn renew_lease(&self, _incarnation: Incarnation, _lease_ms: u64) -> Result<Renewed, StoreError> {
        self.0.call("renew").await?;
        Ok(if self.0.alive.get() { Renewed::Alive } else { Renewed::Dead })
    }

    async fn members(&self, _incarnation: Incarnation) -> Result<Members, StoreError> {
        self.0.call("members").await?;
        let free_partitions = if self.0.owner.get() == 0 { 4 } else { 0 };
        Ok(Members { others: self.0.others.borrow().clone(), free_partitions, position: self.0.position.get() })
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
            self.0.owner.set(0);
        }
        Ok(others.len() < before)
    }

    async fn take_partitions(&self, incarnation: Incarnation) -> Result<Option<Taken>, StoreError> {
        self.0.call("take").await?;
        if !self.0.alive.get() {
            return Ok(None);
        }
        if self.0.owner.get() == 0 {
            self.0.owner.set(incarnation.number);
            self.0.ownership.set(self.0.ownership.get() + 1);
        }
        let mine = self.0.owner.get() == incarnation.number;
        let held = (0..if mine { 4 } else { 0 }).map(|partition| HeldPartition { partition, fence: 7 }).collect();
        Ok(Some(Taken { ownership: self.0.ownership.get(), held }))
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
    Member { incarnation: Incarnation { number, id: Uuid::nil() }, counter: 1, expired: false, connected: true }
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
            town.owner.set(0);
        }
        "member" => {
            town.others.borrow_mut().push(member(number));
            town.owner.set(number);
        }
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
        "lease" => {
            let until = lease.deadline();
            let text =
                if until == Tick(0) { "over".into() } else { format!("until {}", until.since_us(town.start) / 1000) };
            town.tell(&format!("lease {text}"));
        }
        other => panic!("no such word: {other}"),
    }
}

/// Plays `ms word; ms word; …`; answers what happened, `ms what`, up to the last word's time or the keeper's end.
fn play(owns: bool, script: &'static str) -> String {
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
        owner: Cell::new(0),
        stopped: Cell::new(false),
        log: Cell::new(false),
        position: Cell::new(0),
        steps: Cell::new(0),
        upkeep_hangs: Cell::new(false),
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
        tell: move |shard: u16, control: Control| {
            let Control::Partitions { incarnation, ownership, held } = control else { panic!("{control:?}") };
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

fn lines(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n")
}

#[test]
fn it_registers_takes_what_is_free_and_looks_every_step() {
    let told = play(true, "0 well; 6000 lease");
    let expected = lines(
        "0 register
         0 shard 0: 1/-1 []
         0 shard 1: 1/-1 []
         0 members
         0 take
         0 shard 0: 1/1 [0, 2]
         0 shard 1: 1/1 [1, 3]
         2500 renew
         2500 members
         5000 renew
         5000 members
         5000 maintain
         6000 lease until 10000",
    );
    assert_eq!(told, expected);
}

#[test]
fn one_that_only_stores_renews_and_takes_nothing() {
    let told = play(false, "0 well; 3000 lease");
    assert_eq!(
        told,
        lines("0 register\n 0 shard 0: 1/-1 []\n 0 shard 1: 1/-1 []\n 2500 renew\n 3000 lease until 7500")
    );
}

#[test]
fn a_lost_connection_ends_the_right_to_publish_until_a_renewal_is_answered() {
    let told = play(true, "0 well; 2000 lose; 2600 lease; 3000 well; 3600 lease");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    let expected = lines(
        "2500 renew
         2600 lease over
         2750 renew
         3250 renew
         3250 members
         3600 lease until 8250",
    );
    assert_eq!(told, expected);
}

#[test]
fn a_server_that_refuses_for_now_does_not_end_the_lease_before_its_time() {
    let told = play(true, "0 well; 2000 refuse; 4000 lease; 9000 lease");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    // The waits double up to the usual step; the shards stop by themselves at 5000.
    let expected = lines(
        "2500 renew
         2750 renew
         3250 renew
         4000 lease until 5000
         4250 renew
         6250 renew
         8750 renew
         9000 lease until 5000",
    );
    assert_eq!(told, expected);
}

#[test]
fn a_renewal_without_an_answer_is_given_up_and_counts_from_before_it_was_sent() {
    let told = play(true, "0 well; 2000 hang; 7000 lease; 7600 lease; 7700 well; 8000 lease");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    let expected = lines(
        "2500 renew
         7000 lease until 5000
         7600 lease over
         7750 renew
         7750 members
         7750 maintain
         8000 lease until 12750",
    );
    assert_eq!(told, expected);
}

#[test]
fn a_dead_incarnation_stands_down_and_comes_back_as_another() {
    let told = play(true, "0 well; 2000 kill; 2600 lease; 3000 lease");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    let expected = lines(
        "2500 renew
         2500 shard 0: 1/-1 []
         2500 shard 1: 1/-1 []
         2600 lease over
         2750 register
         2750 shard 0: 2/-1 []
         2750 shard 1: 2/-1 []
         2750 members
         2750 take
         2750 shard 0: 2/2 [0, 2]
         2750 shard 1: 2/2 [1, 3]
         3000 lease until 7750",
    );
    assert_eq!(told, expected);
}

#[test]
fn a_member_whose_connection_ended_is_taken_over_at_the_next_look() {
    let told = play(true, "0 member 9; 3000 cut 9; 6000 lease");
    let expected = lines(
        "0 register
         0 shard 0: 1/-1 []
         0 shard 1: 1/-1 []
         0 members
         0 take
         0 shard 0: 1/0 []
         0 shard 1: 1/0 []
         2500 renew
         2500 members
         5000 renew
         5000 members
         5000 early 9 dead
         5000 take
         5000 shard 0: 1/1 [0, 2]
         5000 shard 1: 1/1 [1, 3]
         5000 maintain
         6000 lease until 10000",
    );
    assert_eq!(told, expected);
}

#[test]
fn a_member_that_holds_its_connection_is_taken_over_only_after_a_whole_lease_of_silence() {
    // Its lease is past by the database's clock from the start; it renews once more at 4000, which the look at 5000
    // sees.
    let told = play(true, "0 member 9; 1 still 9; 4000 beat 9; 20000 lease");
    let late: Vec<&str> = told.lines().filter(|line| line.contains("dead") || line.contains("[0, 2]")).collect();
    assert_eq!(late, ["15000 late 9 dead", "15000 shard 0: 1/1 [0, 2]"]);
}

#[test]
fn a_member_whose_lease_runs_by_the_databases_clock_is_left_alone_however_long_it_is_silent() {
    let told = play(true, "0 member 9; 60000 lease");
    assert!(!told.contains("dead"), "{told}");
}

#[test]
fn a_stop_frees_the_partitions() {
    let told = play(true, "0 well; 3000 stop");
    let (_, told) = told.split_once("2500 members\n").unwrap();
    let told: Vec<&str> = told.lines().map(|line| line.split_once(' ').unwrap().1).collect();
    assert_eq!(told, ["deregister", "ended", "lease over"]);
}

#[test]
fn a_stop_ends_also_when_the_database_does_not_answer() {
    let told = play(true, "0 well; 2000 hang; 3000 stop");
    assert!(told.contains("deregister\n") && told.ends_with("lease over") && !told.contains("did not end"), "{told}");
}

#[test]
fn maintenance_comes_soon_while_something_is_in_the_log_and_once_a_minute_otherwise() {
    let told = play(true, "0 log; 16000 empty; 145000 lease");
    let times: Vec<&str> = told.lines().filter_map(|line| line.strip_suffix(" maintain")).collect();
    assert_eq!(times, ["5000", "10000", "15000", "20000", "80000", "140000"]);
}

#[test]
fn maintenance_that_had_nothing_to_do_comes_soon_after_somebody_has_stored() {
    let told = play(true, "0 well; 8000 store; 16000 empty; 31000 store; 41000 lease");
    let times: Vec<&str> = told.lines().filter_map(|line| line.strip_suffix(" maintain")).collect();
    assert_eq!(times, ["5000", "10000", "15000", "20000", "32500", "37500"]);
}

#[test]
fn a_stop_does_not_wait_for_maintenance() {
    let told = play(true, "0 log; 1 stuck; 5100 stop");
    let (_, told) = told.split_once("5000 maintain\n").unwrap();
    let at: Vec<u64> = told.lines().map(|line| line.split_once(' ').unwrap().0.parse().unwrap()).collect();
    assert!(told.contains("deregister\n") && at.iter().all(|ms| *ms < 5_110), "{told}");
}

#[test]
fn maintenance_goes_on_at_once_while_it_gets_on() {
    let told = play(true, "0 log; 1 steps 2; 11000 lease");
    let times: Vec<&str> = told.lines().filter_map(|line| line.strip_suffix(" maintain")).collect();
    assert_eq!(times, ["5000", "5000", "5000", "10000"]);
}

#[test]
fn maintenance_without_an_answer_makes_no_renewal_late() {
    let told = play(true, "0 log; 1 stuck; 26000 lease");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    let renewals: Vec<u64> =
        told.lines().filter_map(|line| line.strip_suffix(" renew")).map(|ms| ms.parse().unwrap()).collect();
    assert_eq!(renewals, (1..=10).map(|step| step * 2_500).collect::<Vec<u64>>());
    assert!(told.matches("maintain").count() >= 2 && told.ends_with("lease until 30000"), "{told}");
}

#[test]
fn where_the_schema_is_another_one_the_shards_are_told_and_the_keeper_ends() {
    let told = play(true, "0 well; 2000 gone; 2600 lease; 9000 well; 9100 stop");
    let (_, told) = told.split_once("1/1 [1, 3]\n").unwrap();
    let expected = lines(
        "2500 renew
         2500 shard 0: 1/-1 []
         2500 shard 1: 1/-1 []
         2500 deregister
         2600 lease over
         9100 ended
         9100 lease over",
    );
    assert_eq!(told, expected);
}
