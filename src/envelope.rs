//! What travels with a payload: trace context today, the hop record later.

use uuid::Uuid;

/// W3C trace context in binary: 25 bytes instead of the header's 55.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Trace id; nil for none.
    pub trace_id: Uuid,
    /// Parent span id.
    pub span_id: u64,
    /// Trace flags; bit 0 = sampled.
    pub flags: u8,
}

impl Trace {
    /// Parses a `traceparent` header (version 00 or later, as the W3C recommendation asks).
    /// `None` for anything else: a bad header is dropped, the message is not.
    #[must_use]
    pub fn parse(header: &str) -> Option<Self> {
        let bytes = header.as_bytes();
        if bytes.len() < 55 || bytes[2] != b'-' || bytes[35] != b'-' || bytes[52] != b'-' {
            return None;
        }
        if &bytes[..2] == b"ff" || (&bytes[..2] == b"00" && bytes.len() != 55) {
            return None;
        }
        if bytes[..55].iter().any(u8::is_ascii_uppercase) {
            return None;
        }
        let trace_id = u128::from_str_radix(header.get(3..35)?, 16).ok()?;
        let span_id = u64::from_str_radix(header.get(36..52)?, 16).ok()?;
        let flags = u8::from_str_radix(header.get(53..55)?, 16).ok()?;
        if trace_id == 0 || span_id == 0 {
            return None;
        }
        Some(Self { trace_id: Uuid::from_u128(trace_id), span_id, flags })
    }

    /// As it stands in the tables' three columns.
    pub(crate) fn from_columns(trace_id: Option<Uuid>, span_id: Option<i64>, flags: Option<i16>) -> Self {
        Self {
            trace_id: trace_id.unwrap_or_default(),
            span_id: span_id.unwrap_or_default().cast_unsigned(),
            flags: flags.unwrap_or_default() as u8,
        }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.trace_id.is_nil()
    }
}

impl std::fmt::Display for Trace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id.as_u128(), self.span_id, self.flags)
    }
}
