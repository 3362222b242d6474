//! What a database URL may look like, and what of it is never shown.

#![allow(clippy::unwrap_used)] // A test says by it what it stands on.

use super::*;

fn shown(text: &str) -> String {
    match ConnectTarget::parse(text) {
        Ok(target) => {
            let roots = target.root_certificates.as_ref().map(|path| path.display().to_string());
            format!("{target} {:?} {}", target.tls_mode, roots.unwrap_or_default())
        }
        Err(error) => format!("error: {error}"),
    }
}

#[test]
fn urls_and_lines_name_the_same_database() {
    for (text, expected) in [
        ("postgres://a:secret@db:5433/shop", "database \"shop\" as \"a\" at db:5433 Prefer "),
        ("host=db port=5433 user=a password=secret dbname=shop", "database \"shop\" as \"a\" at db:5433 Prefer "),
        ("postgresql://a@%2Frun%2Fpg/shop", "database \"shop\" as \"a\" at /run/pg/.s.PGSQL.5432 Prefer "),
        ("host=/run/pg port=5440 dbname=shop", "database \"shop\" at /run/pg/.s.PGSQL.5440 Prefer "),
        (
            "postgres://a@one:5432,two:5433/shop?sslmode=verify-full&sslrootcert=%2Fetc%2Fmy%20ca.pem&connect_timeout=3",
            "database \"shop\" as \"a\" at one:5432, two:5433 VerifyFull /etc/my ca.pem",
        ),
        (
            "host=db sslrootcert = '/etc/it\\'s.pem' sslmode=require user = a",
            "database \"(of the user's name)\" as \"a\" at db:5432 Require /etc/it's.pem",
        ),
        ("host=db hostaddr=127.0.0.9 user=a", "database \"(of the user's name)\" as \"a\" at db:5432 Prefer "),
    ] {
        assert_eq!(shown(text), expected, "{text}");
    }
}

#[test]
fn what_is_wrong_is_said_without_the_text() {
    for (text, expected) in [
        ("postgres://a:hunter2@db:port/shop", "the value of port is not valid"),
        ("postgres://a:hunter2@db/shop?sslmode=always", "sslmode must be"),
        ("host=db password=hunter2 hunter2 user=a", "cannot be read"),
        ("host=db password='hunter2", "cannot be read"),
        ("password=hunter2 user=a", "names no host"),
        ("hunter2", "cannot be read"),
        ("postgres://a:hunter2@db/shop?sslrootcert=%zz", "hexadecimal"),
        ("", "names no host"),
    ] {
        let got = shown(text);
        assert!(got.starts_with("error: ") && got.contains(expected), "{text}: {got}");
        assert!(!got.contains("hunter2"), "{got}");
    }
}

#[test]
fn debug_hides_the_password() {
    let target = ConnectTarget::parse("postgres://a:hunter2@db/shop").unwrap();
    let got = format!("{target} {target:?}");
    assert!(!got.contains("hunter2") && got.contains("db:5432"), "{got}");
}
