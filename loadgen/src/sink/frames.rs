//! What goes over the sink's socket: a length, a kind, and fixed fields. Ours on both ends.
//!
//! Invariants
//! - A frame that is not complete is not acted on.
//! - What does not parse ends the connection: nobody else speaks this.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use uuid::Uuid;

/// Longest frame: a batch of 4,096 messages whose payloads are only hashed.
const FRAME_BYTES_MAX: usize = 16 << 20;

/// A message as the sink gets it. The payload stays with the sender; its hash is compared with what is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct SinkMessage {
    pub message_id: Uuid,
    pub stream_id: Uuid,
    pub stream_seq: i64,
    pub version: i64,
    pub fence: i64,
    pub destination_hash: u64,
    pub payload_hash: u64,
}

/// Bytes of a message in a frame and in the journal.
pub const MESSAGE_BYTES: usize = 72;

impl SinkMessage {
    /// Appends the fixed form.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.message_id.as_bytes());
        out.extend_from_slice(self.stream_id.as_bytes());
        for number in [self.stream_seq, self.version, self.fence] {
            out.extend_from_slice(&number.to_be_bytes());
        }
        for number in [self.destination_hash, self.payload_hash] {
            out.extend_from_slice(&number.to_be_bytes());
        }
    }

    /// Reads the fixed form.
    #[must_use]
    pub fn read(bytes: &[u8; MESSAGE_BYTES]) -> Self {
        let number = |at: usize| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&bytes[at..at + 8]);
            u64::from_be_bytes(eight)
        };
        let id = |at: usize| Uuid::from_u64_pair(number(at), number(at + 8));
        Self {
            message_id: id(0),
            stream_id: id(16),
            stream_seq: number(32) as i64,
            version: number(40) as i64,
            fence: number(48) as i64,
            destination_hash: number(56),
            payload_hash: number(64),
        }
    }
}

/// FNV-1a: enough to see a byte that changed, and the same in every build.
#[must_use]
pub fn hash_of(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Take these messages.
    Publish(Vec<SinkMessage>),
    /// Behave so from now on, for so many milliseconds.
    Mode(Mode, u32),
    /// How many messages stand in the journal, and how many were answered as unknown after they were written.
    Count,
}

/// How the sink behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// It takes everything at once.
    #[default]
    Accept,
    /// It refuses every third message.
    Refuse,
    /// It is not ready.
    NotReady,
    /// It answers after 300 ms.
    Late,
    /// It writes the journal and then says it does not know.
    UnknownAfter,
    /// It does not know, and has not written.
    UnknownBefore,
    /// It takes the batch, writes it, and never answers.
    Silent,
}

const MODES: [Mode; 7] =
    [Mode::Accept, Mode::Refuse, Mode::NotReady, Mode::Late, Mode::UnknownAfter, Mode::UnknownBefore, Mode::Silent];

/// What the sink says of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Answer {
    Accepted = 0,
    Refused = 1,
    NotReady = 2,
    Unknown = 3,
}

impl Answer {
    /// From its byte.
    #[must_use]
    pub fn of(byte: u8) -> Self {
        match byte {
            0 => Self::Accepted,
            1 => Self::Refused,
            2 => Self::NotReady,
            _ => Self::Unknown,
        }
    }
}

impl Request {
    /// The frame's body.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Publish(messages) => {
                out.push(1);
                messages.iter().for_each(|message| message.write(&mut out));
            }
            Self::Mode(mode, ms) => {
                out.push(2);
                out.push(*mode as u8);
                out.extend_from_slice(&ms.to_be_bytes());
            }
            Self::Count => out.push(3),
        }
        out
    }

    /// From a frame's body.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        match bytes.split_first()? {
            (1, rest) => {
                let (messages, left) = rest.as_chunks::<MESSAGE_BYTES>();
                left.is_empty().then(|| Self::Publish(messages.iter().map(SinkMessage::read).collect()))
            }
            (2, [mode, ms @ ..]) => {
                Some(Self::Mode(*MODES.get(*mode as usize)?, u32::from_be_bytes(ms.try_into().ok()?)))
            }
            (3, []) => Some(Self::Count),
            _ => None,
        }
    }
}

/// Sends a frame.
///
/// # Errors
/// Of the socket.
pub async fn send(socket: &mut (impl AsyncWrite + Unpin), body: &[u8]) -> std::io::Result<()> {
    let mut frame = Vec::with_capacity(body.len() + 4);
    frame.extend_from_slice(&(body.len() as u32).to_be_bytes());
    frame.extend_from_slice(body);
    socket.write_all(&frame).await
}

/// Receives a frame.
///
/// # Errors
/// Of the socket; also for a length nobody of ours would send.
pub async fn receive(socket: &mut (impl AsyncRead + Unpin)) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 4];
    socket.read_exact(&mut length).await?;
    let length = u32::from_be_bytes(length) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(std::io::Error::other(format!("a frame of {length} bytes")));
    }
    let mut body = vec![0; length];
    socket.read_exact(&mut body).await?;
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_survive_the_wire() {
        let message = SinkMessage {
            message_id: Uuid::now_v7(),
            stream_id: Uuid::new_v4(),
            stream_seq: 5,
            version: 4,
            fence: -1,
            destination_hash: hash_of(b"orders"),
            payload_hash: u64::MAX,
        };
        for request in [Request::Publish(vec![message; 3]), Request::Mode(Mode::Silent, 700), Request::Count] {
            assert_eq!(Request::parse(&request.to_bytes()), Some(request));
        }
        assert_eq!(Request::parse(&[1, 0, 0]), None, "half a message is none");
        assert_eq!(Request::parse(&[]), None);
        for (index, mode) in MODES.iter().enumerate() {
            assert_eq!(*mode as usize, index);
        }
    }
}
