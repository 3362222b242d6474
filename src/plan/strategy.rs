//! When queued units of work are handed over to their shards.
//!
//! Invariants
//! - `Immediate`: with the push itself.
//! - `Interval`: at the next tick of a timer that goes on whether there is work or not, so at most once an interval;
//!   a message waits half of it on average, and never longer.
//! - `Batch`: as soon as so many messages are queued; else when none has come for the debounce, and at the latest when
//!   the oldest has waited for the maximum age: a trickle that never pauses cannot put it off.
//! - Where nothing is queued nothing is due.

use crate::time::Tick;

/// What made a queue be handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Trigger {
    /// The push itself.
    Push,
    /// The interval's timer.
    Timer,
    /// As many messages were queued as make up a batch.
    Size,
    /// None came for a while.
    Debounce,
    /// The oldest had waited long enough.
    Age,
    /// As many rows or bytes were queued as one flush takes: waiting would save no call.
    FullFlush,
    /// The program asked for it.
    Manual,
    /// The engine ends.
    End,
}

impl Trigger {
    /// All of them.
    pub const ALL: [Self; 8] =
        [Self::Push, Self::Timer, Self::Size, Self::Debounce, Self::Age, Self::FullFlush, Self::Manual, Self::End];
}

/// The answer of [`Pace::due`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Hand over, for this reason.
    Now(Trigger),
    /// Not before this moment, unless more is queued.
    At(Tick),
    /// Nothing is queued.
    Empty,
}

/// A strategy with its figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Each push.
    Immediate,
    /// By a timer.
    Interval {
        /// Its period in microseconds, at least 1.
        interval_us: u64,
        /// Its ticks are at whole intervals from here on.
        origin: Tick,
    },
    /// By number, pause or age.
    Batch {
        /// So many messages.
        size: usize,
        /// No further one for so many microseconds.
        debounce_us: u64,
        /// The oldest is so old, in microseconds.
        age_us_max: u64,
    },
}

/// A queue as its strategy sees it.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    policy: Policy,
    messages: usize,
    oldest: Tick,
    newest: Tick,
}

impl Pace {
    /// With nothing queued.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self { policy, messages: 0, oldest: Tick(0), newest: Tick(0) }
    }

    /// A unit of so many messages has joined the queue. Answers whether it is the first: whoever waits for a moment
    /// has to ask anew then. (Every other one puts the moment off or makes it now.)
    pub fn queued(&mut self, messages: usize, now: Tick) -> bool {
        let first = self.messages == 0;
        if first {
            self.oldest = now;
        }
        self.newest = now;
        self.messages += messages;
        first
    }

    /// So many messages have left the queue. Of what stays the oldest is taken to be as old as before.
    pub fn handed_over(&mut self, messages: usize) {
        self.messages = self.messages.saturating_sub(messages);
    }

    /// Messages in the queue.
    #[must_use]
    pub fn messages(&self) -> usize {
        self.messages
    }

    /// Whether to hand over.
    #[must_use]
    pub fn due(&self, now: Tick) -> Due {
        if self.messages == 0 {
            return Due::Empty;
        }
        let by = |at: Tick, trigger| if at <= now { Due::Now(trigger) } else { Due::At(at) };
        match self.policy {
            Policy::Immediate => Due::Now(Trigger::Push),
            Policy::Interval { interval_us, origin } => {
                let ticks = self.oldest.since_us(origin) / interval_us.max(1) + 1;
                by(origin.plus_us(ticks.saturating_mul(interval_us)), Trigger::Timer)
            }
            Policy::Batch { size, .. } if self.messages >= size => Due::Now(Trigger::Size),
            Policy::Batch { debounce_us, age_us_max, .. } => {
                let (pause, age) = (self.newest.plus_us(debounce_us), self.oldest.plus_us(age_us_max));
                if age < pause { by(age, Trigger::Age) } else { by(pause, Trigger::Debounce) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000;

    fn interval() -> Pace {
        Pace::new(Policy::Interval { interval_us: 100 * MS, origin: Tick(7 * MS) })
    }

    fn batch() -> Pace {
        Pace::new(Policy::Batch { size: 100, debounce_us: 100 * MS, age_us_max: 1_000 * MS })
    }

    fn at_ms(ms: u64) -> Tick {
        Tick(ms * MS)
    }

    /// A caller that pushes at these moments: when, how many and why they are handed over.
    fn run(mut pace: Pace, pushes_ms: impl IntoIterator<Item = u64>, until_ms: u64) -> Vec<(u64, usize, Trigger)> {
        let mut pushes = pushes_ms.into_iter().peekable();
        let mut handed = Vec::new();
        for now_ms in 0..=until_ms {
            while pushes.next_if_eq(&now_ms).is_some() {
                pace.queued(1, at_ms(now_ms));
                if let Due::Now(trigger @ (Trigger::Push | Trigger::Size)) = pace.due(at_ms(now_ms)) {
                    handed.push((now_ms, pace.messages(), trigger));
                    pace.handed_over(pace.messages());
                }
            }
            if let Due::Now(trigger) = pace.due(at_ms(now_ms)) {
                handed.push((now_ms, pace.messages(), trigger));
                pace.handed_over(pace.messages());
            }
        }
        handed
    }

    /// IMM: nothing waits for company.
    #[test]
    fn immediate_is_due_with_each_push() {
        let handed = run(Pace::new(Policy::Immediate), [3, 3, 5], 10);
        assert_eq!(handed, [(3, 1, Trigger::Push), (3, 1, Trigger::Push), (5, 1, Trigger::Push)]);
    }

    /// By the timer, all that was queued before the tick together, nothing without work.
    #[test]
    fn interval_hands_over_at_the_next_tick_what_was_queued_before_it() {
        let handed = run(interval(), [10, 90, 107, 500], 1_000);
        assert_eq!(handed, [(107, 3, Trigger::Timer), (507, 1, Trigger::Timer)]);
        assert_eq!(run(interval(), [], 1_000), []);
        assert_eq!(interval().due(Tick::NEVER), Due::Empty);
    }

    /// Whatever the rate, at most ten hand-overs a second, and nobody waits longer than the interval.
    #[test]
    fn interval_makes_at_most_ten_hand_overs_a_second_whatever_the_rate() {
        for pushes_a_ms in [1, 7] {
            let pushes = (0..2_000_u64).flat_map(|ms| std::iter::repeat_n(ms, pushes_a_ms));
            let handed = run(interval(), pushes, 2_100);
            assert_eq!(handed.iter().map(|(_, messages, _)| messages).sum::<usize>(), 2_000 * pushes_a_ms);
            assert!(handed.windows(2).all(|pair| pair[1].0 - pair[0].0 >= 100), "{handed:?}");
        }
        let mut pace = interval();
        for queued_ms in 8..300 {
            pace.queued(1, at_ms(queued_ms));
            let Due::At(due) = pace.due(at_ms(queued_ms)) else { panic!("not before the tick") };
            assert!(due > at_ms(queued_ms) && due <= at_ms(queued_ms + 100));
            pace.handed_over(1);
        }
    }

    /// The size hands over at once; one less does not.
    #[test]
    fn batch_size_is_reached_or_not() {
        let handed = run(batch(), std::iter::repeat_n(5, 250), 50);
        assert_eq!(handed, [(5, 100, Trigger::Size), (5, 100, Trigger::Size)]);
        assert_eq!(run(batch(), std::iter::repeat_n(5, 99), 50), []);
    }

    /// Each push restarts the pause, and both messages leave together.
    #[test]
    fn batch_debounce_begins_anew_with_each_push() {
        assert_eq!(run(batch(), [0, 60], 500), [(160, 2, Trigger::Debounce)]);
        assert_eq!(run(batch(), [0, 101], 500), [(100, 1, Trigger::Debounce), (201, 1, Trigger::Debounce)]);
    }

    /// The reference's debounce has no end: a trickle below the size would wait for ever there.
    #[test]
    fn batch_age_ends_a_trickle_that_never_pauses() {
        let handed = run(batch(), (0..3_000).step_by(50), 2_900);
        assert_eq!(
            handed.iter().map(|(ms, _, trigger)| (*ms, *trigger)).collect::<Vec<_>>(),
            [(1_000, Trigger::Age), (2_050, Trigger::Age),]
        );
    }

    #[test]
    fn what_stays_behind_a_full_flush_keeps_its_age() {
        let mut pace = batch();
        assert!(pace.queued(60, at_ms(0)));
        assert!(!pace.queued(30, at_ms(40)));
        pace.handed_over(60);
        assert_eq!((pace.messages(), pace.due(at_ms(50))), (30, Due::At(at_ms(140))));
    }
}
