//! What is printed at the end, and the JSON file.
//!
//! Invariants
//! - The table and the file show the same figures; what could not be measured is a dash and a `null`.
//! - The file is written whole or not at all.

use std::path::Path;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::failure::{Failure, Result};
use crate::figures::{Figures, Latencies};
use crate::latency::Percentiles;

/// One column of the table.
#[derive(Debug)]
pub struct Column<'a> {
    /// Its head.
    pub head: String,
    /// Its figures.
    pub figures: &'a Figures,
}

/// The table, one column a subject.
#[must_use]
pub fn table(columns: &[Column<'_>]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
    let mut head = vec![Cell::new("")];
    head.extend(columns.iter().map(|column| Cell::new(&column.head).set_alignment(CellAlignment::Right)));
    table.set_header(head);
    let mut row = |name: &str, value: &dyn Fn(&Figures) -> String| {
        let mut cells = vec![Cell::new(name)];
        let values: Vec<String> = columns.iter().map(|column| value(column.figures)).collect();
        if values.iter().any(|value| !value.is_empty()) {
            cells.extend(values.into_iter().map(|value| Cell::new(value).set_alignment(CellAlignment::Right)));
            table.add_row(cells);
        }
    };
    row("runtime, shards, batch", &|f| format!("{}, {}, {}", f.runtime, f.shards, f.batch));
    row("messages", &|f| format!("{} in {:.1} s", thousands(f.messages as f64), f.seconds));
    row("messages/s", &|f| thousands(f.messages_per_second));
    row("server CPU µs a message", &|f| number(f.server_cpu_us_per_message, 1));
    row("client CPU µs a message", &|f| number(f.client_cpu_us_per_message, 1));
    // What none of them has belongs to another scenario.
    let mut latencies = |name: &str, of: fn(&Latencies) -> Option<Percentiles>| {
        if columns.iter().any(|column| of(&column.figures.latency_ms).is_some()) {
            row(name, &|f| latency(of(&f.latency_ms)));
        }
    };
    latencies("store ms (p50 p99 p99.9 max)", |of| of.store);
    latencies("publish ms (p50 p99 p99.9 max)", |of| of.publish);
    let scenario = columns.first().map_or("", |column| column.figures.scenario.split(' ').next().unwrap_or_default());
    let end_to_end = match scenario {
        "inbox" => "arrival to settled ms (p50 p99 p99.9 max)",
        "subscribe" => "append to seen ms (p50 p99 p99.9 max)",
        "relay" => "arrival to relayed ms (p50 p99 p99.9 max)",
        _ => "end to end ms (p50 p99 p99.9 max)",
    };
    latencies(end_to_end, |of| of.end_to_end);
    latencies("claim ms (p50 p99 p99.9 max)", |of| of.claim);
    row("WAL bytes a message", &|f| number(f.wal_bytes_per_message, 0));
    row("commits a message", &|f| number(f.commits_per_message, 4));
    row("rows updated or deleted a message", &|f| number(f.rows_updated_or_deleted_per_message, 4));
    row("allocations a message", &|f| number(f.allocations_per_message, 2));
    row("order violations", &|f| f.order_violations.to_string());
    row("lost", &|f| f.lost.to_string());
    row("copies", &|f| f.copies.to_string());
    let some = |count: Option<u64>| count.map_or(String::new(), |count| count.to_string());
    row("streams with gaps in their versions", &|f| some(f.gaps));
    row("conflicts, appended again", &|f| some(f.conflicts));
    row("duplicates", &|f| some(f.duplicates));
    row("double effects", &|f| some(f.double_effects));
    row("skips", &|f| some(f.skips));
    row("lag at most, events", &|f| some(f.lag_events));
    row("lag at most, ms", &|f| some(f.lag_age_ms));
    row("calls refused as overloaded", &|f| if f.overloaded > 0 { f.overloaded.to_string() } else { String::new() });
    table
}

/// The shards' lines.
#[must_use]
pub fn shard_table(figures: &Figures) -> Option<Table> {
    if figures.per_shard.is_empty() {
        return None;
    }
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header([
        "shard",
        "core",
        "partitions",
        "rows",
        "flushes",
        "rows a flush",
        "ring fill max",
        "claims",
        "runs",
        "CPU ms",
    ]);
    for (index, shard) in figures.per_shard.iter().enumerate() {
        table.add_row([
            index.to_string(),
            shard.core.map_or("-".into(), |core| core.to_string()),
            shard.partitions.to_string(),
            shard.rows.to_string(),
            shard.flushes.to_string(),
            format!("{:.1}", shard.rows_per_flush),
            shard.ring_fill_max.to_string(),
            shard.claims.to_string(),
            shard.runs.to_string(),
            (shard.cpu_us / 1000).to_string(),
        ]);
    }
    Some(table)
}

/// A subject's cost and speed against another's: above 1 Corelane is the better one.
#[must_use]
pub fn ratios(ours: &Figures, theirs: &Figures) -> Value {
    json!({
        "wall": ratio(Some(ours.messages_per_second), Some(theirs.messages_per_second)),
        "cpu": ratio(theirs.cpu_us_per_message(), ours.cpu_us_per_message()),
    })
}

fn ratio(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    let (one, other) = (one?, other?);
    (other > 0.0).then_some(one / other)
}

/// The figures as a JSON object: what everything else in the file is added to.
#[must_use]
pub fn object(figures: &Figures) -> Map<String, Value> {
    match serde_json::to_value(figures) {
        Ok(Value::Object(map)) => map,
        _ => Map::new(),
    }
}

/// Adds a value to an object.
pub fn put(object: &mut Map<String, Value>, key: &str, value: impl Serialize) {
    object.insert(key.to_owned(), serde_json::to_value(value).unwrap_or(Value::Null));
}

/// Refuses a path that could not be written in the end, before anything is measured. Leaves nothing behind.
///
/// # Errors
/// Naming the path.
pub fn check_writable(path: &Path) -> Result<()> {
    let refused = |source| Failure::Io { what: format!("--json {}: cannot be written", path.display()), source };
    if path.is_dir() {
        return Err(refused(std::io::ErrorKind::IsADirectory.into()));
    }
    let beside = path.with_extension("json.part");
    std::fs::write(&beside, "").and_then(|()| std::fs::remove_file(&beside)).map_err(refused)
}

/// Writes the file: beside it first, then over it.
///
/// # Errors
/// Where the system does not let it.
pub fn write_json(path: &Path, value: &Map<String, Value>) -> Result<()> {
    let text = serde_json::to_string_pretty(value).unwrap_or_default() + "\n";
    let beside = path.with_extension("json.part");
    std::fs::write(&beside, text).map_err(Failure::io(format!("writing {}", beside.display())))?;
    std::fs::rename(&beside, path).map_err(Failure::io(format!("writing {}", path.display())))
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".into(), |value| format!("{value:.digits$}"))
}

fn latency(value: Option<Percentiles>) -> String {
    let digits = |ms: f64| if ms < 10.0 { format!("{ms:.2}") } else { format!("{ms:.0}") };
    value.map_or("-".into(), |p| format!("{} {} {} {}", digits(p.p50), digits(p.p99), digits(p.p999), digits(p.max)))
}

fn thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_the_keys_that_were_promised() {
        let object = object(&Figures::default());
        for key in [
            "scenario",
            "runtime",
            "shards",
            "batch",
            "messages",
            "seconds",
            "messages_per_second",
            "server_cpu_us_per_message",
            "client_cpu_us_per_message",
            "latency_ms",
            "wal_bytes_per_message",
            "commits_per_message",
            "rows_updated_or_deleted_per_message",
            "order_violations",
            "lost",
            "copies",
        ] {
            assert!(object.contains_key(key), "{key}");
        }
        for key in ["store", "publish", "end_to_end", "claim"] {
            assert!(object["latency_ms"].as_object().unwrap().contains_key(key), "{key}");
        }
    }

    #[test]
    fn a_path_that_cannot_be_written_is_refused_before_the_run() {
        let directory = tempfile::tempdir().unwrap();
        let good = directory.path().join("figures.json");
        check_writable(&good).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left behind");
        for bad in [directory.path().join("no/such/figures.json"), directory.path().to_owned()] {
            let error = check_writable(&bad).unwrap_err().to_string();
            assert!(error.contains(&bad.display().to_string()), "{error}");
        }
    }

    #[test]
    fn above_one_means_corelane_is_better() {
        let side = |rate, cpu| Figures {
            messages_per_second: rate,
            server_cpu_us_per_message: Some(cpu),
            client_cpu_us_per_message: Some(0.0),
            ..Figures::default()
        };
        let ratios = ratios(&side(300.0, 10.0), &side(100.0, 50.0));
        assert_eq!((ratios["wall"].as_f64(), ratios["cpu"].as_f64()), (Some(3.0), Some(5.0)));
    }

    #[test]
    fn a_table_shows_a_dash_for_what_is_unknown() {
        let figures = Figures { messages: 1_234_567, ..Figures::default() };
        let text = table(&[Column { head: "corelane".into(), figures: &figures }]).to_string();
        assert!(text.contains("1,234,567") && text.contains('-'), "{text}");
    }
}
