//! Each mistake has one clear error. (That the tables of docs/tuning.md and the README are the code's, `tests/tidy.rs` says.)

use super::*;

fn error_of(result: Result<Config>) -> String {
    match result.and_then(|config| config.validate()) {
        Ok(()) => "accepted".to_owned(),
        Err(Error::Config(text)) => text,
        Err(other) => format!("not a config error: {other}"),
    }
}

#[test]
fn defaults_are_within_their_own_bounds() {
    assert_eq!(error_of(Ok(Config::default())), "accepted");
}

#[test]
fn a_value_out_of_range_is_named_with_its_range() {
    for (toml, expected) in [
        ("[flush]\nrows_max = 90000", "flush.rows_max = 90000: must be 1..=4096 (positions of one store call)"),
        ("[flush]\nrows_max = 0", "flush.rows_max = 0: must be 1..=4096 (positions of one store call)"),
        ("[flush]\nrows_max = -1", "flush.rows_max = -1: must be 1..=4096 (positions of one store call)"),
        ("[flush]\nrows_max = \"many\"", "flush.rows_max = many: must be 1..=4096 (positions of one store call)"),
        ("[flush]\nrows_max = 1.5", "flush.rows_max = 1.5: must be 1..=4096 (positions of one store call)"),
        ("[shards]\nruntime = \"green\"", "shards.runtime = green: must be auto | glommio | tokio"),
        ("[shards]\ncores = [0, -2]", "shards.cores = [0, -2]: must be a list of numbers in 0..4096"),
        ("[service]\nname = \"\"", "service.name = : must be text of 1..=255 bytes without NUL"),
        ("[partitions]\ncount = 65537", "partitions.count = 65537: must be 1..=65536 (fixed at install)"),
    ] {
        assert_eq!(error_of(Config::from_toml(toml)), expected);
    }
}

#[test]
fn lease_range() {
    let range = "must be 1000..=600000 (renewed every quarter; a dead owner's work waits for it)";
    for ttl in ["0", "-1", "100000000000"] {
        let expected = format!("lease.ttl_ms = {ttl}: {range}");
        assert_eq!(error_of(Config::from_toml(&format!("[lease]\nttl_ms = {ttl}"))), expected);
        let from_env = Config::default().overlay_variables("CORELANE", [("CORELANE__LEASE__TTL_MS", ttl)]);
        assert_eq!(error_of(from_env), expected);
    }
}

#[test]
fn an_unknown_key_is_named_with_its_neighbours() {
    assert_eq!(
        error_of(Config::from_toml("[flush]\nrow_max = 5")),
        "flush.row_max = 5: unknown key in config; [flush] has rows_max, bytes_max, age_us_max"
    );
    let text = error_of(Config::from_toml("[flsh]\nrows_max = 5"));
    assert!(text.starts_with("flsh.rows_max = 5: unknown key in config; sections are database, service, "), "{text}");
    let from_env = Config::default().overlay_variables("CORELANE", [("CORELANE__FLUSH__SIZE", "5")]);
    assert_eq!(
        error_of(from_env),
        "flush.size = 5: unknown key in CORELANE__FLUSH__SIZE; [flush] has rows_max, bytes_max, age_us_max"
    );
}

#[test]
fn text_that_is_not_toml_is_an_error_with_its_source() {
    let text = error_of(Config::from_toml("[database]\nurl = \"hunter2"));
    assert!(text.starts_with("config, line 2: ") && !text.contains("hunter2"), "{text}");
}

#[test]
fn a_missing_file_is_named() {
    let text = error_of(Config::from_file("no/such/file.toml"));
    assert!(text.starts_with("config file no/such/file.toml: "), "{text}");
}

#[test]
fn the_environment_wins_and_only_its_prefix_counts() {
    let config =
        Config::from_toml("[flush]\nrows_max = 10\nage_us_max = 7\n[shards]\ncores = [1, 2]").and_then(|config| {
            config.overlay_variables(
                "CORELANE",
                [
                    ("CORELANE__FLUSH__ROWS_MAX", "1_024"),
                    ("CORELANE__SHARDS__CORES", "0, 3"),
                    ("CORELANE__SHARDS__RUNTIME", "tokio"),
                    ("CORELANE_PG_BIN", "/usr/bin"),
                    ("CORELANE_TEST_DATABASE_URL", "x"),
                    ("OTHER__FLUSH__ROWS_MAX", "1"),
                ],
            )
        });
    let config = config.unwrap();
    assert_eq!((config.flush.rows_max, config.flush.age_us_max), (1_024, 7));
    assert_eq!(config.shards.cores, [0, 3]);
    assert_eq!(config.shards.runtime, RuntimeChoice::Tokio);
    let origin = |name: &str| config.entries().into_iter().find(|entry| entry.name == name).map(|entry| entry.origin);
    assert_eq!(origin("flush.rows_max"), Some(Origin::Environment));
    assert_eq!(origin("flush.age_us_max"), Some(Origin::File));
    assert_eq!(origin("flush.bytes_max"), Some(Origin::Default));
}

#[test]
fn a_variable_with_too_few_underscores_is_told_the_right_name() {
    for (rest, meant) in [
        ("SHARDS_COUNT", Some("SHARDS__COUNT")),
        ("SHARDS__COUNT", Some("SHARDS__COUNT")),
        ("FLUSH_ROWS_MAX", Some("FLUSH__ROWS_MAX")),
        ("DATABASE_URL", None),
        ("TEST_DATABASE_URL", None),
        ("PG_BIN", None),
        ("SCHEMA", None),
    ] {
        assert_eq!(misspelt(rest).as_deref(), meant, "{rest}");
    }
}

#[test]
fn margin_is_refused_with_the_figures() {
    let text = error_of(Config::from_toml("[lease]\nmargin_ms = 4999"));
    assert!(text.starts_with("lease.margin_ms = 4999: must be at least publish.timeout_ms + 1000 = 5000"), "{text}");
    assert!(text.contains("lease.ttl_ms / 2 = 5000"), "{text}");
    let text = error_of(Config::from_toml("[lease]\nmargin_ms = 5001"));
    assert!(text.starts_with("lease.margin_ms = 5001: "), "{text}");
    let short = "[lease]\nttl_ms = 4000\nmargin_ms = 1500\n[publish]\ntimeout_ms = 500";
    assert_eq!(error_of(Config::from_toml(short)), "accepted");
}

#[test]
fn values_are_checked_against_each_other() {
    for (toml, expected) in [
        ("[claim]\npoll_ms = 300\npoll_ms_max = 200", "claim.poll_ms = 300: must be at most claim.poll_ms_max = 200"),
        (
            "[database]\ndirect = false\ndirect_url = 'postgres://h/x'",
            "database.direct = false: contradicts database.direct_url, which is set; leave one of the two out",
        ),
        ("[retry]\nbase_ms = 300\ncap_ms = 200", "retry.base_ms = 300: must be at most retry.cap_ms = 200"),
        (
            "[strategy]\nbatch_debounce_ms = 300\nbatch_age_ms_max = 200",
            "strategy.batch_debounce_ms = 300: must be at most strategy.batch_age_ms_max = 200",
        ),
        ("[shards]\ncount = 3\n[partitions]\ncount = 2", "shards.count = 3: must be at most partitions.count = 2"),
    ] {
        assert_eq!(error_of(Config::from_toml(toml)), expected);
    }
}

#[test]
fn a_field_set_by_the_program_is_checked_too() {
    let mut config = Config::default();
    config.flush.rows_max = 90_000;
    assert_eq!(error_of(Ok(config)), "flush.rows_max = 90000: must be 1..=4096 (positions of one store call)");
}

#[test]
fn the_connection_url_is_never_shown() {
    let secret = "postgres://someone:hunter2@localhost/x";
    let mut config = Config::default();
    config.set("database.url", secret).unwrap();
    assert!(config.entries().iter().all(|entry| !entry.value.contains("hunter2")));
    let misspelt = Config::from_toml(&format!("[database]\nulr = \"{secret}\""));
    assert!(!error_of(misspelt).contains("hunter2"));
    let nul = Config::default().overlay_variables("CORELANE", [("CORELANE__DATABASE__URL", "hunter2\0")]);
    assert!(!error_of(nul).contains("hunter2"));
}

#[test]
fn every_key_says_unit_and_reason() {
    for key in Config::keys() {
        assert!(!key.unit.is_empty() && !key.reason.is_empty(), "{}", key.name);
    }
}

#[test]
fn a_pooler_is_named_by_words_in_a_file_and_in_the_environment() {
    let config = Config::from_toml("[database]\ndirect = false").unwrap();
    let variables = [("CORELANE__DATABASE__PREPARED_STATEMENTS", "on")];
    let config = config.overlay_variables("CORELANE", variables).unwrap();
    assert_eq!((config.database.direct, config.database.prepared_statements), (false, Prepared::On));
    let config = config.overlay_variables("CORELANE", [("CORELANE__DATABASE__DIRECT", "true")]).unwrap();
    assert!(config.database.direct);
    assert_eq!(
        error_of(config.overlay_variables("CORELANE", [("CORELANE__DATABASE__DIRECT", "maybe")])),
        "database.direct = maybe: must be true | false"
    );
}

#[test]
fn a_destination_may_have_a_word_of_its_own() {
    let text = "[retry]\non_dead = \"hold\"\n[destinations.\"a.b\"]\non_dead = \"continue\"\n[destinations.c]\non_dead = \"hold\"";
    let mut config = Config::from_toml(text).unwrap();
    config = config.overlay_variables("CORELANE", [("CORELANE__DESTINATIONS__C__ON_DEAD", "continue")]).unwrap();
    let said: Vec<_> = config.destinations.on_dead().collect();
    assert_eq!(said, [("a.b", OnDead::Continue), ("c", OnDead::Continue)]);
    assert_eq!(config.retry.on_dead, OnDead::Hold);
    for wrong in [
        "[destinations.a]\non_dead = \"stop\"",
        "[destinations.a]\nhold = \"yes\"",
        "[destinations]\non_dead = \"hold\"",
    ] {
        assert!(Config::from_toml(wrong).is_err(), "{wrong}");
    }
}
