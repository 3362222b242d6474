//! The name of the schema, and how it gets into SQL.
//!
//! Invariant: what is put into SQL is the quoted name, also inside string literals of the files, so that any
//! name that Postgres takes can be installed.

use std::fmt;

use crate::error::{Error, Result};

/// Bytes of a Postgres name; a longer one would be cut silently.
const NAME_BYTES_MAX: usize = 63;

/// A checked schema name. Shows itself quoted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SchemaName {
    name: String,
    quoted: String,
}

impl SchemaName {
    /// Checks a name.
    ///
    /// # Errors
    /// [`Error::Schema`] for a name that Postgres would refuse or cut.
    pub fn new(name: &str) -> Result<Self> {
        let reason = if name.is_empty() {
            "is empty"
        } else if name.len() > NAME_BYTES_MAX {
            "has more than 63 bytes"
        } else if name.contains('\0') {
            "contains NUL"
        } else if name.starts_with("pg_") {
            "begins with pg_, which Postgres keeps for itself"
        } else {
            return Ok(Self { name: name.to_owned(), quoted: format!("\"{}\"", name.replace('"', "\"\"")) });
        };
        Err(Error::Schema(format!("schema {name:?}: the name {reason}")))
    }

    /// As it stands in the catalogue.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// As it is written in SQL.
    #[must_use]
    pub fn quoted(&self) -> &str {
        &self.quoted
    }

    /// Puts the name into a file of ours: for `@schema@` the quoted name (its apostrophes doubled inside a
    /// string literal), for `$$` a quote that the name does not contain.
    #[must_use]
    pub fn render(&self, text: &str) -> String {
        let mut dollar = "$wh$".to_owned();
        while self.name.contains(&dollar) {
            dollar.insert(1, 'x');
        }
        let in_literal = self.quoted.replace('\'', "''");
        let mut rendered = String::with_capacity(text.len() + text.len() / 4);
        for line in text.split_inclusive('\n') {
            let mut rest = line;
            let mut literal = false;
            while let Some(next) = rest.chars().next() {
                if let Some(after) = rest.strip_prefix("@schema@") {
                    rendered.push_str(if literal { &in_literal } else { &self.quoted });
                    rest = after;
                } else if let Some(after) = rest.strip_prefix("$$") {
                    rendered.push_str(&dollar);
                    rest = after;
                } else if !literal && rest.starts_with("--") {
                    rendered.push_str(rest);
                    break;
                } else {
                    literal ^= next == '\'';
                    rendered.push(next);
                    rest = &rest[next.len_utf8()..];
                }
            }
        }
        rendered
    }
}

impl fmt::Display for SchemaName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.quoted)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_quoted_where_it_stands() {
        let schema = SchemaName::new("o'd\"d$wh$").unwrap();
        assert_eq!(
            schema.render("as $$ select '@schema@.t', @schema@.t -- it's @schema@\n'@schema@' $$"),
            "as $xwh$ select '\"o''d\"\"d$wh$\".t', \"o'd\"\"d$wh$\".t -- it's @schema@\n'\"o''d\"\"d$wh$\"' $xwh$"
        );
    }

    #[test]
    fn names_that_postgres_refuses_or_cuts_are_refused() {
        for bad in ["", "pg_mine", "a\0b", &"x".repeat(64)] {
            assert!(SchemaName::new(bad).is_err(), "{bad:?}");
        }
        assert!(SchemaName::new(&"x".repeat(63)).is_ok());
    }
}
