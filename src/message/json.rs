//! Is it JSON? Asked of raw payloads whose producer wants to be told before they are stored. And JSON read as a type.
//!
//! Invariants
//! - What RFC 8259 allows passes: any number, doubled keys, escapes of lone surrogates, `\u0000`. The bytes are
//!   not changed by looking at them.
//! - An error names the byte offset of the first wrong byte.
//! - Any depth is looked at without recursion.
//!
//! How: simd-json on reused buffers says yes fast. It is stricter than the grammar (a number must fit its
//! types), so its no is put to serde_json, which skips values without reading them and knows the place.
//! Measured (`benches/payload.rs`, 933 bytes): 1.1 µs, where serde_json skipping alone takes 0.65 µs and parsing
//! into a type 1.8 (simd-json) and 2.2 µs (serde_json): simd-json pays where values are wanted, not for the check.

use std::cell::RefCell;

use serde::de::{DeserializeOwned, IgnoredAny};

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::new(Buffers {
        copy: Vec::new(),
        parser: simd_json::Buffers::default(),
    });
}

struct Buffers {
    copy: Vec<u8>,
    parser: simd_json::Buffers,
}

/// Copies above this size are not kept by a thread.
const KEPT_BYTES_MAX: usize = 1024 * 1024;

/// Nothing if the bytes are one JSON text; otherwise the offset of the first wrong byte and what was expected.
///
/// # Errors
/// See above.
pub fn check(bytes: &[u8]) -> Result<(), (usize, String)> {
    if fast(bytes) {
        return Ok(());
    }
    let text = std::str::from_utf8(bytes).map_err(|error| (error.valid_up_to(), "not UTF-8".to_owned()))?;
    match serde_json::from_str::<IgnoredAny>(text) {
        Ok(IgnoredAny) => Ok(()),
        Err(error) if error.is_eof() => Err((bytes.len(), error.to_string())),
        Err(error) => Err((first_wrong(bytes, offset_of(bytes, error.line(), error.column())), error.to_string())),
    }
}

/// Reads a type, by simd-json on the thread's reused buffers. What that refuses (it takes no number that does not fit its
/// types) is put to serde_json, whose word counts.
///
/// # Errors
/// What serde_json says, with the place.
pub fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, serde_json::Error> {
    let fast = BUFFERS.with(|buffers| {
        // One that a `Deserialize` of the user's calls from within finds them taken.
        let Ok(mut buffers) = buffers.try_borrow_mut() else { return None };
        let Buffers { copy, parser } = &mut *buffers;
        copy.clear();
        copy.extend_from_slice(bytes);
        let read = simd_json::serde::from_slice_with_buffers(copy, parser).ok();
        if copy.capacity() > KEPT_BYTES_MAX {
            *buffers = Buffers { copy: Vec::new(), parser: simd_json::Buffers::default() };
        }
        read
    });
    fast.map_or_else(|| serde_json::from_slice(bytes), Ok)
}

fn fast(bytes: &[u8]) -> bool {
    BUFFERS.with_borrow_mut(|buffers| {
        // The parser unescapes strings in place: it works on a copy.
        buffers.copy.clear();
        buffers.copy.extend_from_slice(bytes);
        let valid = simd_json::to_tape_with_buffers(&mut buffers.copy, &mut buffers.parser).is_ok();
        if buffers.copy.capacity() > KEPT_BYTES_MAX {
            *buffers = Buffers { copy: Vec::new(), parser: simd_json::Buffers::default() };
        }
        valid
    })
}

/// The parser says where it stopped, which is the wrong byte or one beside it: the wrong one is the first
/// whose prefix cannot be continued to a JSON text.
fn first_wrong(bytes: &[u8], near: usize) -> usize {
    let hopeless = |end: usize| {
        bytes
            .get(..=end)
            .is_some_and(|prefix| serde_json::from_slice::<IgnoredAny>(prefix).is_err_and(|error| !error.is_eof()))
    };
    (near.saturating_sub(2)..=near + 2).find(|end| hopeless(*end)).unwrap_or(near)
}

/// serde_json counts lines from 1 and columns in bytes, 0 being the line's start.
fn offset_of(bytes: &[u8], line: usize, column: usize) -> usize {
    let start = match line {
        0 | 1 => 0,
        _ => {
            let breaks = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
            breaks.map(|(at, _)| at + 1).nth(line - 2).unwrap_or(bytes.len())
        }
    };
    (start + column.saturating_sub(1)).min(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_grammar_allows_passes() {
        for json in [
            "12345678901234567890",
            "123456789012345678901234567890",
            "0.1234567890123456789",
            "1e400",
            "-1E+2",
            "-0",
            r#"{"a":1,"a":2}"#,
            r#"{"b":1,"a":2}"#,
            r#"{"a":"\u0000"}"#,
            r#"{"a":"\ud800"}"#,
            r#" [ true , false , null , "é\n" ] "#,
            "\"x\"",
            "{}",
        ] {
            assert_eq!(check(json.as_bytes()), Ok(()), "{json}");
        }
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        assert_eq!(check(deep.as_bytes()), Ok(()));
    }

    #[test]
    fn what_it_does_not_is_named_with_its_place() {
        for (json, offset) in [
            (&b""[..], 0),
            (b"  ", 2),
            (b"{\"a\":}", 5),
            (b"{\"a\":1", 6),
            (b"[1,]", 3),
            (b"[1,\n 2,\n x]", 9),
            (b"{} {}", 3),
            (b"{'a':1}", 1),
            (b"01", 1),
            (b"nul", 3),
            (b"NaN", 0),
            (b"\"a\nb\"", 2),
            (b"\"a\xff\"", 2),
            (b"\"\\x\"", 2),
            (b"\xef\xbb\xbf{}", 0),
        ] {
            let found = check(json).map_err(|(offset, _)| offset);
            assert_eq!(found, Err(offset), "{}: {:?}", json.escape_ascii(), check(json));
        }
    }

    #[test]
    fn the_two_parsers_agree_on_what_is_wrong() {
        // Every single-byte change of a text with all kinds of values: the fast yes must never be wrong.
        let good = br#"{"k":[1,-2.5e3,true,null,"s\u00e9\n"],"l":{}}"#;
        for at in 0..good.len() {
            for byte in 0..=255u8 {
                let mut changed = good.to_vec();
                changed[at] = byte;
                let slow =
                    std::str::from_utf8(&changed).is_ok_and(|text| serde_json::from_str::<IgnoredAny>(text).is_ok());
                assert!(!fast(&changed) || slow, "{}", changed.escape_ascii());
            }
        }
    }
}
