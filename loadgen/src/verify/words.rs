//! What a verification says in the end, in words.
//!
//! Invariant: what is broken is in the last line, with its number, and a fault of the harness is told apart from it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Map;

use super::faults;
use super::oracle::Verdict;
use crate::failure::Failure;
use crate::report;
use crate::run::{Ending, Outcome};

/// A run that did not come to its end says whose fault that was.
#[must_use]
pub fn broken_off(mut json: Map<String, serde_json::Value>, failure: &Failure) -> Outcome {
    let (sentence, ending) = match failure {
        Failure::Promise(_) => (format!("broken: {failure}"), Ending::Broken),
        _ => (format!("no verdict: loadgen could not go on: {failure}"), Ending::Undecided),
    };
    println!("{sentence}");
    report::put(&mut json, "verdict", sentence);
    Outcome { json, ending }
}

/// The last line.
#[must_use]
pub fn sentence(verdict: &Verdict, copies_max: u64, conflicts: u64) -> String {
    let mut broken: Vec<String> = verdict
        .findings()
        .iter()
        .filter(|(_, found)| *found > 0)
        .map(|(name, found)| format!("{found} {name}"))
        .collect();
    if verdict.copies > copies_max {
        broken.push(format!("{} copies, at most {copies_max} are explained", verdict.copies));
    }
    if conflicts > 0 {
        broken.push(format!("{conflicts} deadlocks and serialization failures"));
    }
    match broken.as_slice() {
        [] => format!("held: {} messages in order, none lost, {} copies", verdict.messages, verdict.copies),
        broken => format!("broken: {}", broken.join("; ")),
    }
}

/// Faults by name.
#[must_use]
pub fn count_of_each(incidents: &[faults::Incident]) -> BTreeMap<&str, u64> {
    let mut counts = BTreeMap::new();
    for incident in incidents {
        *counts.entry(incident.fault.as_str()).or_default() += 1;
    }
    counts
}

/// Prints what was found.
pub fn show(verdict: &Verdict, copies_max: u64, incidents: &[faults::Incident]) {
    println!("{} messages, {} faults", verdict.messages, incidents.len());
    for (name, count) in count_of_each(incidents) {
        println!("  fault {name:34} {count}");
    }
    for (name, found) in verdict.findings() {
        println!("  {name:40} {found}");
    }
    let after = verdict.copies_after_unknown;
    println!("  {:40} {} (at most {copies_max}; {after} after an unknown answer)", "copies", verdict.copies);
}

/// In milliseconds, ascending; prints what they are about.
#[must_use]
pub fn sorted_ms(what: &str, times: &[Duration]) -> Vec<f64> {
    let mut sorted: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1000.0).collect();
    sorted.sort_by(f64::total_cmp);
    if let Some(longest) = sorted.last() {
        let (count, median) = (sorted.len(), sorted[sorted.len() / 2]);
        println!("  {what:40} {count}, median {median:.0} ms, at most {longest:.0} ms");
    }
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_says_what_is_broken() {
        let held = Verdict { messages: 9, copies: 2, ..Verdict::default() };
        assert_eq!(sentence(&held, 2, 0), "held: 9 messages in order, none lost, 2 copies");
        let broken = Verdict { lost: 1, order_violations: 3, ..held };
        assert_eq!(
            sentence(&broken, 1, 4),
            "broken: 3 order violations; 1 lost; 2 copies, at most 1 are explained; 4 deadlocks and serialization failures"
        );
    }

    #[test]
    fn a_broken_promise_is_told_apart_from_a_fault_of_the_harness() {
        let of = |failure| broken_off(Map::new(), &failure);
        let promise = of(Failure::Promise("nothing was published".into()));
        assert_eq!(promise.ending, Ending::Broken);
        assert_eq!(promise.json["verdict"], "broken: nothing was published");
        let harness = of(Failure::TimedOut("a process did not say".into()));
        assert_eq!(harness.ending, Ending::Undecided);
        assert!(harness.json["verdict"].as_str().unwrap().starts_with("no verdict: "));
    }
}
