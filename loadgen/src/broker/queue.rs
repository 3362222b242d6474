//! What a broker decides: who gets which message, for how long, and what comes again. Time is an argument.
//!
//! Invariants
//! - A message is in a queue until it is settled by who holds its lock; then it never comes again (but for the copies
//!   that a fault asks for).
//! - A session (a stream of a queue) is given to one client at a time, in order; a message without stream is a session of
//!   its own.
//! - A receipt is that of one delivery: what has come again is not settled by that of before.
//! - What is given back, whose lock has ended or whose client has gone, comes again in its old place, and with it what is
//!   out of its session behind it: the session's next turn begins. Turns grow, also over the lives of a session and of the
//!   broker, and none is 0: that would say that there is no order.

use std::collections::{BTreeMap, HashMap, VecDeque};

use uuid::Uuid;

use super::frames::{Delivered, QueueState, Settled, Whole};

/// How a broker misbehaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Faults {
    /// Every so many completed messages, one comes again although it was completed; 0: never.
    pub copy_every: u64,
    /// How long a lock lasts, in milliseconds; 0: as without a fault.
    pub lock_ms: u64,
}

/// How long a lock lasts where nothing else is said, in milliseconds.
pub const LOCK_MS: u64 = 30_000;

/// A session's key: its stream, or the number of a message without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum SessionKey {
    Stream(Uuid),
    Alone(u64),
}

#[derive(Debug)]
struct Waiting {
    message: Whole,
    delivery_count: u32,
}

#[derive(Debug, Default)]
struct Session {
    /// By number: what was published first comes first, also when it comes again.
    waiting: BTreeMap<u64, Waiting>,
    /// Out at the client that has the session.
    out: usize,
    /// Grows when something comes back; 0 before the first.
    turn: u64,
    client: Option<u64>,
    is_ready: bool,
}

#[derive(Debug, Default)]
struct Queue {
    sessions: HashMap<SessionKey, Session>,
    /// Sessions with something to give, each once.
    ready: VecDeque<SessionKey>,
    delivered: u64,
    completed: u64,
    dead: u64,
}

#[derive(Debug)]
struct Out {
    number: u64,
    queue: String,
    key: SessionKey,
    message: Whole,
    delivery_count: u32,
    client: u64,
    until_ms: u64,
}

/// All queues.
#[derive(Debug, Default)]
pub struct Queues {
    queues: HashMap<String, Queue>,
    /// By receipt.
    out: HashMap<u64, Out>,
    faults: Faults,
    /// Without a fault, in milliseconds; 0: [`LOCK_MS`].
    lock_ms: u64,
    next_number: u64,
    next_receipt: u64,
    /// The last turn that was drawn, over all sessions.
    last_turn: u64,
    /// No lock ends before it.
    earliest_ms: u64,
}

fn key_of(message: &Whole, number: u64) -> SessionKey {
    message.stream_id.map_or(SessionKey::Alone(number), SessionKey::Stream)
}

impl Queue {
    fn put(&mut self, key: SessionKey, number: u64, waiting: Waiting) {
        let session = self.sessions.entry(key).or_default();
        session.waiting.insert(number, waiting);
        if !session.is_ready {
            session.is_ready = true;
            self.ready.push_back(key);
        }
    }
}

impl Queues {
    /// Other faults from now on.
    pub fn misbehave(&mut self, faults: Faults) {
        self.faults = faults;
    }

    /// Receipts and turns are drawn from here on: receipts of another life are nobody's, and its turns are over.
    pub fn begin_life(&mut self, receipt: u64, turn: u64) {
        (self.next_receipt, self.last_turn) = (receipt, turn);
    }

    /// Locks last so long without a fault, in milliseconds.
    pub fn lock_for(&mut self, ms: u64) {
        self.lock_ms = ms;
    }

    /// The lock time that holds now, in milliseconds.
    #[must_use]
    pub fn lock_ms(&self) -> u64 {
        [self.faults.lock_ms, self.lock_ms].into_iter().find(|ms| *ms > 0).unwrap_or(LOCK_MS)
    }

    /// The number that the next message gets.
    #[must_use]
    pub fn next_number(&self) -> u64 {
        self.next_number
    }

    /// A message has come (or stood in the journal under this number).
    pub fn put(&mut self, queue: &str, number: u64, message: Whole) {
        self.next_number = self.next_number.max(number + 1);
        let key = key_of(&message, number);
        self.queues.entry(queue.to_owned()).or_default().put(key, number, Waiting { message, delivery_count: 0 });
    }

    /// Gives a client up to so many messages of a queue, and their sessions with them.
    pub fn receive(&mut self, client: u64, queue: &str, rows_max: usize, now_ms: u64) -> Vec<Delivered> {
        self.expire(now_ms);
        let until_ms = now_ms + self.lock_ms();
        self.earliest_ms = self.earliest_ms.min(until_ms);
        let Some(of) = self.queues.get_mut(queue) else { return Vec::new() };
        let mut given = Vec::new();
        for _ in 0..of.ready.len() {
            if given.len() >= rows_max {
                break;
            }
            let Some(key) = of.ready.pop_front() else { break };
            let Some(session) = of.sessions.get_mut(&key) else { continue };
            if session.client.is_some_and(|holder| holder != client) {
                of.ready.push_back(key);
                continue;
            }
            if session.turn == 0 {
                self.last_turn += 1;
                session.turn = self.last_turn;
            }
            while given.len() < rows_max {
                let Some((number, waiting)) = session.waiting.pop_first() else { break };
                session.client = Some(client);
                session.out += 1;
                of.delivered += 1;
                let delivery_count = waiting.delivery_count + 1;
                let receipt = self.next_receipt;
                self.next_receipt += 1;
                given.push(Delivered { receipt, delivery_count, turn: session.turn, message: waiting.message.clone() });
                let out = Out {
                    number,
                    queue: queue.to_owned(),
                    key,
                    message: waiting.message,
                    delivery_count,
                    client,
                    until_ms,
                };
                self.out.insert(receipt, out);
            }
            session.is_ready = !session.waiting.is_empty();
            if session.is_ready {
                of.ready.push_back(key);
            }
        }
        given
    }

    /// A client says what became of a message; its number, if the client still held the lock.
    pub fn settle(&mut self, client: u64, receipt: u64, settled: Settled, now_ms: u64) -> Option<u64> {
        self.expire(now_ms);
        let number = self.out.get(&receipt).filter(|out| out.client == client)?.number;
        if settled == Settled::Abandoned {
            self.return_from(receipt);
            return Some(number);
        }
        let out = self.out.remove(&receipt)?;
        let is_copied = match settled {
            Settled::Completed => {
                let of = self.queues.entry(out.queue.clone()).or_default();
                of.completed += 1;
                self.faults.copy_every > 0 && of.completed.is_multiple_of(self.faults.copy_every)
            }
            _ => {
                self.queues.entry(out.queue.clone()).or_default().dead += 1;
                false
            }
        };
        self.leave(out, is_copied);
        Some(number)
    }

    /// Locks last so much longer; answers which are still held.
    pub fn renew(&mut self, client: u64, receipts: &[u64], now_ms: u64) -> Vec<bool> {
        self.expire(now_ms);
        let until_ms = now_ms + self.lock_ms();
        let renewed = receipts.iter().map(|receipt| match self.out.get_mut(receipt) {
            Some(out) if out.client == client => {
                out.until_ms = until_ms;
                true
            }
            _ => false,
        });
        renewed.collect()
    }

    /// A client has gone: what it held comes again.
    pub fn disconnect(&mut self, client: u64) {
        self.give_back(|out| out.client == client);
    }

    /// Locks that have ended.
    pub fn expire(&mut self, now_ms: u64) {
        if now_ms >= self.earliest_ms {
            self.give_back(|out| out.until_ms <= now_ms);
            self.earliest_ms = self.out.values().map(|out| out.until_ms).min().unwrap_or(u64::MAX);
        }
    }

    /// What waits, is out, and was done.
    #[must_use]
    pub fn states(&self) -> Vec<QueueState> {
        let state = |(name, queue): (&String, &Queue)| QueueState {
            name: name.clone(),
            waiting: queue.sessions.values().map(|session| session.waiting.len() as u64).sum(),
            out: self.out.values().filter(|out| out.queue == *name).count() as u64,
            delivered: queue.delivered,
            completed: queue.completed,
            dead: queue.dead,
        };
        self.queues.iter().map(state).collect()
    }

    fn give_back(&mut self, which: impl Fn(&Out) -> bool) {
        // By number: what goes back takes along what is behind it.
        let receipts: BTreeMap<u64, u64> =
            self.out.iter().filter(|(_, out)| which(out)).map(|(receipt, out)| (out.number, *receipt)).collect();
        for receipt in receipts.into_values() {
            self.return_from(receipt);
        }
    }

    /// Gives back a message and what is out of its session behind it.
    fn return_from(&mut self, receipt: u64) {
        let of = |out: &Out| (out.number, out.queue.clone(), out.key);
        let Some((number, queue, key)) = self.out.get(&receipt).map(of) else { return };
        let is_behind = |out: &Out| out.number >= number && out.key == key && out.queue == queue;
        let back: Vec<u64> = self.out.iter().filter(|(_, out)| is_behind(out)).map(|(at, _)| *at).collect();
        for receipt in back {
            if let Some(out) = self.out.remove(&receipt) {
                self.leave(out, true);
            }
        }
        if let Some(session) = self.queues.get_mut(&queue).and_then(|of| of.sessions.get_mut(&key)) {
            self.last_turn += 1;
            session.turn = self.last_turn;
        }
    }

    /// A message is out no more; it comes again, or it has gone.
    fn leave(&mut self, out: Out, comes_again: bool) {
        let Some(of) = self.queues.get_mut(&out.queue) else { return };
        if let Some(session) = of.sessions.get_mut(&out.key) {
            session.out -= 1;
            if session.out == 0 {
                session.client = None;
            }
        }
        if comes_again {
            of.put(out.key, out.number, Waiting { message: out.message, delivery_count: out.delivery_count });
        } else if of.sessions.get(&out.key).is_some_and(|session| session.waiting.is_empty() && session.out == 0) {
            of.sessions.remove(&out.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(stream: Option<u128>, id: u128) -> Whole {
        Whole { message_id: Uuid::from_u128(id), stream_id: stream.map(Uuid::from_u128), ..Whole::default() }
    }

    fn ids(given: &[Delivered]) -> Vec<u128> {
        given.iter().map(|delivered| delivered.message.message_id.as_u128()).collect()
    }

    fn filled() -> Queues {
        let mut queues = Queues::default();
        for (number, (stream, id)) in [(Some(7), 1), (Some(7), 2), (Some(8), 3), (None, 4)].into_iter().enumerate() {
            queues.put("orders", number as u64, message(stream, id));
        }
        queues
    }

    #[test]
    fn a_session_has_one_client_at_a_time_and_its_order() {
        let mut queues = filled();
        let first = queues.receive(1, "orders", 1, 0);
        assert_eq!(ids(&first), [1]);
        assert_eq!(ids(&queues.receive(2, "orders", 9, 0)), [3, 4], "the rest of stream 7 is the first client's");
        assert_eq!(ids(&queues.receive(1, "orders", 9, 0)), [2]);
        assert!(queues.settle(2, first[0].receipt, Settled::Completed, 1).is_none(), "not its lock");
        assert!(queues.settle(1, first[0].receipt, Settled::Completed, 1).is_some());
        assert!(queues.settle(1, first[0].receipt, Settled::Completed, 1).is_none(), "once");
    }

    #[test]
    fn what_is_not_settled_comes_again_in_its_place_and_with_what_is_behind_it() {
        let mut queues = filled();
        let given = queues.receive(1, "orders", 2, 0);
        assert_eq!(ids(&given), [1, 2]);
        assert!(queues.settle(1, given[0].receipt, Settled::Abandoned, 5).is_some());
        assert!(
            queues.settle(1, given[1].receipt, Settled::Completed, 5).is_none(),
            "went back with the one before it"
        );
        let again = queues.receive(2, "orders", 9, 10);
        let seven: Vec<_> = again.iter().filter(|delivered| delivered.message.stream_id.is_some()).collect();
        assert_eq!(seven.iter().map(|one| one.message.message_id.as_u128()).collect::<Vec<_>>(), [3, 1, 2]);
        assert!(seven[1].turn > given[0].turn && given[0].turn > 0);
        assert_eq!(seven[1].delivery_count, 2);
        queues.disconnect(2);
        assert_eq!(queues.receive(3, "orders", 9, 20).len(), 4);
    }

    #[test]
    fn a_lock_ends_unless_it_is_renewed() {
        let mut queues = filled();
        let given = queues.receive(1, "orders", 9, 0);
        let alone: Vec<u64> =
            given.iter().filter(|one| one.message.stream_id.is_none()).map(|one| one.receipt).collect();
        assert_eq!(queues.renew(1, &alone, LOCK_MS - 1), [true]);
        assert_eq!(ids(&queues.receive(2, "orders", 9, LOCK_MS)), [1, 2, 3]);
        assert!(queues.settle(1, alone[0], Settled::Completed, LOCK_MS).is_some());
        assert!(queues.settle(1, given[0].receipt, Settled::Completed, LOCK_MS).is_none(), "lock lost");
    }

    #[test]
    fn a_completed_message_comes_again_where_a_fault_says_so_and_else_never() {
        let mut queues = filled();
        queues.misbehave(Faults { copy_every: 2, lock_ms: 0 });
        let given = queues.receive(1, "orders", 9, 0);
        for delivered in &given {
            assert!(queues.settle(1, delivered.receipt, Settled::Completed, 0).is_some());
        }
        assert_eq!(queues.receive(1, "orders", 9, 0).len(), 2);
        let state = &queues.states()[0];
        assert_eq!((state.waiting, state.out, state.completed, state.delivered), (0, 2, 4, 6));
    }

    #[test]
    fn dead_ones_are_counted_and_gone() {
        let mut queues = filled();
        let given = queues.receive(1, "orders", 1, 0);
        assert!(queues.settle(1, given[0].receipt, Settled::Dead, 0).is_some());
        assert_eq!(queues.states()[0].dead, 1);
        assert_eq!(ids(&queues.receive(2, "orders", 9, 0)), [3, 4, 2], "whoever was served waits for its next turn");
    }

    #[test]
    fn what_has_come_again_to_the_same_client_is_not_settled_by_its_first_receipt() {
        let mut queues = filled();
        let first = queues.receive(1, "orders", 2, 0);
        let again = queues.receive(1, "orders", 9, LOCK_MS);
        let of_seven: Vec<_> = again.iter().filter(|one| one.delivery_count == 2).collect();
        assert_eq!(of_seven.len(), 2);
        for delivered in &first {
            assert!(queues.settle(1, delivered.receipt, Settled::Completed, LOCK_MS).is_none(), "its lock has ended");
        }
        for delivered in of_seven {
            assert!(queues.settle(1, delivered.receipt, Settled::Completed, LOCK_MS).is_some());
        }
    }

    #[test]
    fn turns_grow_over_the_lives_of_a_session() {
        let mut queues = Queues::default();
        let mut last = 0;
        for number in 0..3 {
            queues.put("orders", number, message(Some(7), number.into()));
            let first = queues.receive(1, "orders", 9, 0);
            queues.disconnect(1);
            let again = queues.receive(1, "orders", 9, 0);
            assert!(first[0].turn > last && again[0].turn > first[0].turn, "life {number}");
            last = again[0].turn;
            assert!(queues.settle(1, again[0].receipt, Settled::Completed, 0).is_some());
        }
    }
}
