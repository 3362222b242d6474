//! The shape of the repository, held by tests: layers, file headers, sizes, names, reasons.

#![allow(clippy::expect_used)] // A test says by it what it stands on.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const LINES_MAX: usize = 500;

/// Layer of each module of `src`: a file may name modules of its own layer's group or below. Siblings of
/// layer 3 never name each other.
const LAYERS: &[(&str, u8)] = &[
    ("ids", 0),
    ("time", 0),
    ("limits", 0),
    ("message", 0),
    ("envelope", 0),
    ("error", 0),
    ("config", 0),
    ("metrics", 0),
    ("partition", 0),
    ("batch", 1),
    ("plan", 2),
    ("seam", 2),
    ("store", 3),
    ("transport", 3),
    ("runtime", 3),
    ("private_postgres", 3),
    ("shard", 4),
    ("inbox", 5),
    ("engine", 5),
    ("bin", 6),
    ("lib", 6),
];

/// Arrows against the grain, each with its reason.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("error", "seam", "a store's error is part of the public error"),
    ("message", "batch", "a message is written straight into columns"),
    ("store", "runtime", "the in-memory model runs in the simulation's virtual time"),
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn files(under: &str, ending: &str) -> Vec<PathBuf> {
    fn walk(directory: &Path, ending: &str, into: &mut Vec<PathBuf>) {
        let Ok(entries) = fs::read_dir(directory) else { return };
        for entry in entries.flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, ending, into);
            } else if path.to_string_lossy().ends_with(ending) {
                into.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(&root().join(under), ending, &mut found);
    found.sort();
    found
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

fn module_of(path: &Path) -> String {
    let inside = path.strip_prefix(root().join("src")).expect("under src");
    let first = inside.iter().next().expect("a name").to_string_lossy().into_owned();
    first.trim_end_matches(".rs").to_owned()
}

fn layer(module: &str) -> Option<u8> {
    LAYERS.iter().find(|(name, _)| *name == module).map(|(_, layer)| *layer)
}

#[test]
fn arrows_between_layers_point_down() {
    let mut wrong = Vec::new();
    for path in files("src", ".rs") {
        let from = module_of(&path);
        let from_layer = layer(&from).unwrap_or_else(|| panic!("{}: give the module {from} a layer", shown(&path)));
        let text = fs::read_to_string(&path).expect("source");
        for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
            for (at, _) in line.match_indices("crate::") {
                let name: String =
                    line[at + 7..].chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
                let Some(to_layer) = layer(&name) else { continue };
                let sibling = to_layer == 3 && from_layer == 3 && name != from;
                let allowed = EXCEPTIONS.iter().any(|(of, to, _)| *of == from && *to == name);
                if (to_layer > from_layer || sibling) && !allowed {
                    wrong.push(format!("{}: layer {from_layer} names crate::{name} of layer {to_layer}", shown(&path)));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_source_file_opens_with_what_it_is_for_and_is_one_story() {
    let mut wrong = Vec::new();
    for path in ["src", "tests", "benches", "loadgen", "examples"].iter().flat_map(|under| files(under, ".rs")) {
        let text = fs::read_to_string(&path).expect("source");
        if !text.starts_with("//!") {
            wrong.push(format!("{}: begin with what the file is for (//!)", shown(&path)));
        }
        let lines = text.lines().count();
        if lines > LINES_MAX {
            wrong.push(format!("{}: {lines} lines, {LINES_MAX} at most: two stories", shown(&path)));
        }
    }
    for path in files("sql", ".sql") {
        let text = fs::read_to_string(&path).expect("sql");
        if !text.starts_with("--") && !shown(&path).ends_with(".golden.sql") {
            wrong.push(format!("{}: begin with what it is for (--)", shown(&path)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn functions_of_sql_say_what_they_lock() {
    let mut wrong = Vec::new();
    for path in files("sql/functions", ".sql") {
        let text = fs::read_to_string(&path).expect("sql");
        let name = path.file_stem().expect("name").to_string_lossy().into_owned();
        let header: String = text.lines().take_while(|line| line.starts_with("--")).collect::<Vec<_>>().join("\n");
        if !header.starts_with(&format!("-- {name}")) {
            wrong.push(format!("{}: the header begins with `-- {name}`", shown(&path)));
        }
        if !header.contains("locks:") && text.to_lowercase().contains("language plpgsql") {
            wrong.push(format!("{}: the header says `locks:`", shown(&path)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn glommio_is_named_in_the_runtime_only() {
    for path in files("src", ".rs") {
        let text = fs::read_to_string(&path).expect("source");
        let names = text.lines().filter(|line| !line.trim_start().starts_with("//")).any(|line| {
            line.match_indices("glommio::")
                .any(|(at, _)| !line[..at].ends_with("runtime::") && !line[..at].ends_with("super::"))
        });
        assert!(!names || shown(&path).starts_with("src/runtime/"), "{} names glommio", shown(&path));
    }
}

#[test]
fn every_dependency_has_its_reason() {
    let text = fs::read_to_string(root().join("Cargo.toml")).expect("Cargo.toml");
    let section =
        text.split("[workspace.dependencies]").nth(1).expect("dependencies").split("\n[").next().expect("section");
    for line in section.lines().filter(|line| line.contains(" = ")) {
        assert!(line.contains("} # ") || line.contains("\" # ") || line.contains("\"  "), "no reason: {line}");
        assert!(line.split_once('#').is_some_and(|(_, reason)| reason.trim().len() > 10), "no reason: {line}");
    }
}

#[test]
fn the_top_level_holds_what_was_agreed() {
    let agreed: BTreeSet<&str> = [
        ".ci",
        ".git",
        ".gitignore",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "Cargo.lock",
        "Cargo.toml",
        "LICENSE-APACHE",
        "LICENSE-MIT",
        "README.md",
        "benches",
        "docs",
        "examples",
        "loadgen",
        "rustfmt.toml",
        "sql",
        "src",
        "target",
        "tests",
        "clippy.toml",
    ]
    .into();
    for entry in fs::read_dir(root()).expect("top level").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        assert!(agreed.contains(name.as_str()), "{name} at the top level");
    }
}

#[test]
fn no_file_names_a_place_of_one_machine_or_a_registry() {
    // Written apart, so that this file does not find itself.
    let words = [
        concat!("/wor", "k/"),
        concat!("crates", ".io"),
        concat!("pypi", ".org"),
        concat!("npmjs", ".org"),
        concat!("deb.debian", ".org"),
    ];
    let mut wrong = Vec::new();
    for under in ["src", "sql", "tests", "benches", "docs", "loadgen", "examples", ".ci"] {
        for path in files(under, "") {
            let Ok(text) = fs::read_to_string(&path) else { continue };
            wrong.extend(
                words.iter().filter(|word| text.contains(**word)).map(|word| format!("{}: {word}", shown(&path))),
            );
        }
    }
    for name in ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "Cargo.toml"] {
        let text = fs::read_to_string(root().join(name)).expect(name);
        wrong.extend(words.iter().filter(|word| text.contains(**word)).map(|word| format!("{name}: {word}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn sources() -> String {
    ["src", "tests"]
        .iter()
        .flat_map(|under| files(under, ".rs"))
        .map(|path| fs::read_to_string(path).expect("source"))
        .collect()
}

/// Names of the functions that are tests.
fn tests_of(sources: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let mut marked = false;
    for line in sources.lines().map(str::trim_start) {
        marked |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        if let Some((_, name)) = line.split_once("fn ").filter(|_| marked && !line.starts_with("//")) {
            found.insert(name.split('(').next().expect("a name"));
            marked = false;
        }
    }
    found
}

#[test]
fn each_invariant_of_the_architecture_names_a_test_that_exists() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let section =
        text.split("## Invariants").nth(1).expect("the section Invariants").split("\n## ").next().expect("section");
    let sources = sources();
    let mut count = 0;
    for line in
        section.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| #") && !line.starts_with("| -"))
    {
        let tests: Vec<&str> = line.split('`').skip(1).step_by(2).filter(|name| name.contains('_')).collect();
        assert!(!tests.is_empty(), "no test of this invariant is named: {line}");
        for test in tests {
            let known = sources.contains(&format!("fn {}(", test.rsplit("::").next().expect("name")));
            assert!(known, "there is no test {test} of this invariant: {line}");
        }
        count += 1;
    }
    assert!(count >= 10, "{count} invariants");
}

#[test]
fn each_hard_case_names_tests_that_exist() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let section = text.split("## Hard cases").nth(1).expect("the section Hard cases");
    let sources = sources();
    let tests = tests_of(&sources);
    let rows: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    assert!(rows.len() > 30, "{} cases", rows.len());
    for row in rows {
        let named: Vec<&str> = row.split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty() || row.starts_with("| no test of the name yet"), "no test is named: {row}");
        for test in named {
            assert!(tests.contains(test), "there is no test {test} of this case: {row}");
        }
    }
}

/// The reference's acceptance lines that docs/differences.md tells of: the first and the last number of each kind.
const ASKED: &[(&str, u32, u32)] = &[
    ("OSP-", 1, 18),
    ("IMM-", 1, 15),
    ("SCO-", 1, 20),
    ("INT-", 1, 18),
    ("BAT-", 1, 8),
    ("FAC-", 1, 1),
    ("HLP-", 1, 1),
    ("DEF-", 1, 1),
    ("PWB-", 1, 32),
    ("DAP-", 1, 16),
    ("SQL-", 1, 34),
    ("CT-", 1, 5),
    ("PUB-", 1, 15),
    ("IDLE-", 1, 1),
    ("INB-", 1, 1),
    ("INF-", 1, 1),
    ("MNT-", 1, 3),
    ("SCH-", 1, 1),
    ("PRT-", 1, 1),
    ("SEQ-", 1, 1),
    ("EXE-", 1, 1),
    ("D-", 1, 14),
    ("A", 107, 116),
    ("A", 139, 147),
];

/// The lines that a first cell names: `OSP-01, OSP-03 to OSP-05`.
fn lines_of(cell: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for part in cell.split(", ") {
        let (first, last) = part.split_once(" to ").unwrap_or((part, part));
        let kind = first.trim_end_matches(|c: char| c.is_ascii_digit());
        assert!(last.starts_with(kind), "{part}: of one kind");
        match (first[kind.len()..].parse::<u32>(), last[kind.len()..].parse::<u32>()) {
            (Ok(from), Ok(to)) if from <= to => lines.extend((from..=to).map(|number| format!("{kind}{number:02}"))),
            _ => lines.push(part.to_owned()),
        }
    }
    lines
}

#[test]
fn each_acceptance_line_of_the_reference_is_held_by_tests_different_for_a_reason_or_a_gap() {
    let text = fs::read_to_string(root().join("docs/differences.md")).expect("docs/differences.md");
    let sources = sources();
    let tests = tests_of(&sources);
    let (rows, gaps) = text.split_once("\n## Gaps\n").expect("the heading Gaps");
    let cells = |line: &str| line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let of = |text: &str| {
        let rows = text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| line"));
        rows.map(cells).collect::<Vec<_>>()
    };
    let (mut told, mut missing) = (BTreeSet::new(), BTreeSet::new());
    for row in of(rows) {
        let [line, _there, here, by] = row.as_slice() else { panic!("four cells: {row:?}") };
        let named: Vec<&str> = by.split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty(), "{line}: no test is named");
        for test in named {
            assert!(tests.contains(test), "{line}: there is no test {test}");
        }
        let different = here.starts_with("different");
        assert!(different || here.starts_with("held"), "{line}: held or different, not: {here}");
        let promise = here.match_indices('P').any(|(at, _)| here[at + 1..].starts_with(|c: char| c.is_ascii_digit()));
        assert!(!different || promise, "{line}: which promise stands for it? {here}");
        for one in lines_of(line) {
            assert!(told.insert(one.clone()), "{one} stands in two rows");
        }
    }
    for row in of(gaps) {
        assert_eq!(row.len(), 3, "three cells: {row:?}");
        missing.extend(lines_of(&row[0]));
    }
    for (kind, first, last) in ASKED {
        for number in *first..=*last {
            let line = format!("{kind}{number:02}");
            assert!(told.contains(&line) || missing.contains(&line), "{line} is not told of");
        }
    }
}

#[test]
fn the_tuning_tables_are_the_codes() {
    use corelane::config::{TABLE_BEGIN, TABLE_END, tuning_table};
    let path = root().join("docs/tuning.md");
    let text = fs::read_to_string(&path).expect("docs/tuning.md");
    let (before, rest) = text.split_once(TABLE_BEGIN).expect("the table's begin");
    let (table, after) = rest.split_once(TABLE_END).expect("the table's end");
    if table.trim() != tuning_table().trim() {
        assert!(
            std::env::var_os("CORELANE_UPDATE_GOLDEN").is_some(),
            "docs/tuning.md is behind src/config/keys.rs: CORELANE_UPDATE_GOLDEN=1 writes it anew"
        );
        fs::write(&path, format!("{before}{TABLE_BEGIN}\n{}{TABLE_END}{after}", tuning_table()))
            .expect("docs/tuning.md");
    }
    // The README's short one says the same of what it names.
    let readme = fs::read_to_string(root().join("README.md")).expect("README.md");
    let (_, short) = readme.split_once("| key | default | for |\n|---|---|---|\n").expect("the short table");
    let rows: Vec<&str> = short.lines().take_while(|line| line.starts_with('|')).collect();
    assert!(rows.len() > 5, "{rows:?}");
    let all = tuning_table();
    for row in rows {
        let begin = row.splitn(4, '|').take(3).collect::<Vec<_>>().join("|");
        assert!(all.lines().any(|line| line.starts_with(&format!("{begin}|"))), "README.md: {row}");
    }
}

/// What a page of the documentation points to is there.
#[test]
fn the_pages_links_lead_somewhere() {
    let pages = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "sql/README.md"].map(|name| root().join(name));
    let mut wrong = Vec::new();
    for path in pages.into_iter().chain(files("docs", ".md")) {
        let text = fs::read_to_string(&path).expect("page");
        let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link);
        for link in links.filter(|link| !link.starts_with('#') && !link.contains("://") && link.ends_with(".md")) {
            if !path.parent().expect("a directory").join(link).exists() {
                wrong.push(format!("{}: {link}", shown(&path)));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
