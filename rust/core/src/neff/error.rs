//! What can be wrong with a NEFF, and where.

use std::fmt;

use thiserror::Error;

use super::header::PAYLOAD_OFFSET;

/// The family of a [`NeffError`]; decides the status that a runtime reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The container breaks a rule of the format.
    Format,
    /// The digest in the header is not the digest of the payload.
    Checksum,
    /// A version or feature that this reader does not know.
    Unsupported,
}

impl ErrorKind {
    /// The `NRT_STATUS` for this family: 2 (`NRT_INVALID`) or 10
    /// (`NRT_UNSUPPORTED_NEFF_VERSION`). Source: docs/neff-format.md, "Checks".
    pub const fn status(self) -> i32 {
        match self {
            Self::Format | Self::Checksum => 2,
            Self::Unsupported => 10,
        }
    }
}

/// The place of a fault, what belongs there and what is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Bytes from the start of the file. For a fault inside a compressed payload: the start of
    /// the payload, because no byte of the file alone holds the fault.
    pub offset: u64,
    /// Bytes from the start of the inflated tar stream, for a fault inside a compressed payload.
    pub inflated_offset: Option<u64>,
    /// What belongs there.
    pub expected: String,
    /// What is there.
    pub found: String,
}

impl Mismatch {
    /// A mismatch at a place in the file itself.
    pub(super) fn at(offset: u64, expected: impl fmt::Display, found: impl fmt::Display) -> Self {
        Self {
            offset,
            inflated_offset: None,
            expected: shortened(expected.to_string()),
            found: shortened(found.to_string()),
        }
    }

    /// A mismatch in the payload, at `position` of its inflated stream. Of a payload that is not
    /// compressed every position is a place in the file.
    pub(super) fn in_payload(
        is_compressed: bool,
        position: u64,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> Self {
        if is_compressed {
            let mismatch = Self::at(PAYLOAD_OFFSET, expected, found);
            Self {
                inflated_offset: Some(position),
                ..mismatch
            }
        } else {
            Self::at(PAYLOAD_OFFSET.saturating_add(position), expected, found)
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.inflated_offset {
            Some(inflated) => write!(f, "at inflated offset {inflated} of the payload")?,
            None => write!(f, "at offset {}", self.offset)?,
        }
        write!(f, ": expected {}, found {}", self.expected, self.found)
    }
}

/// `text` cut to a length that a message can bear: parts of it come out of the file.
pub(super) fn shortened(mut text: String) -> String {
    const MOST_BYTES: usize = 400;
    if text.len() > MOST_BYTES {
        text.truncate(text.floor_char_boundary(MOST_BYTES));
        text.push_str("...");
    }
    text
}

/// What a NEFF has that is allowed but unlike every known file: a bounded list of bounded lines.
#[derive(Debug, Default)]
pub(super) struct Warnings {
    lines: Vec<String>,
    left_out: u64,
}

impl Warnings {
    const MOST_LINES: usize = 100;

    pub(super) fn push(&mut self, line: impl Into<String>) {
        if self.lines.len() < Self::MOST_LINES {
            self.lines.push(shortened(line.into()));
        } else {
            self.left_out = self.left_out.saturating_add(1);
        }
    }

    pub(super) fn into_lines(mut self) -> Vec<String> {
        if self.left_out > 0 {
            self.lines.push(format!("{} more warnings", self.left_out));
        }
        self.lines
    }
}

/// Why bytes are not a usable NEFF.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NeffError {
    /// The header or the length of the file.
    #[error("NEFF header, {field}, {mismatch}")]
    Header {
        /// Name of the header field.
        field: &'static str,
        /// Where and what.
        mismatch: Mismatch,
    },
    /// A version or feature bit outside what this reader knows.
    #[error("NEFF not supported, {field}, {mismatch}")]
    Unsupported {
        /// Name of the header field.
        field: &'static str,
        /// Where and what.
        mismatch: Mismatch,
    },
    /// The payload's digest.
    #[error("NEFF {algorithm} digest of the payload, {mismatch}")]
    Checksum {
        /// `MD5` or `SHA-256`.
        algorithm: &'static str,
        /// Where and what.
        mismatch: Mismatch,
    },
    /// The gzip stream around the archive.
    #[error("NEFF payload, gzip stream, {mismatch}")]
    Gzip {
        /// Where and what.
        mismatch: Mismatch,
    },
    /// The tar archive: its structure, or a member that must not be there.
    #[error("NEFF archive{}, {mismatch}", of_member(.member.as_ref()))]
    Archive {
        /// The member's name, where it is known.
        member: Option<String>,
        /// Where and what.
        mismatch: Mismatch,
    },
    /// A size or count above the reader's bounds.
    #[error("NEFF archive beyond the reader's limits, {what}, {mismatch}")]
    Limit {
        /// The quantity.
        what: &'static str,
        /// Where and what.
        mismatch: Mismatch,
    },
    /// What a member says, or a member that is missing.
    #[error("NEFF member {member:?}, {mismatch}")]
    Content {
        /// The member's name.
        member: String,
        /// Where and what.
        mismatch: Mismatch,
    },
}

fn of_member(member: Option<&String>) -> String {
    member.map_or_else(String::new, |name| format!(", member {name:?}"))
}

impl NeffError {
    /// The family of this error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Checksum { .. } => ErrorKind::Checksum,
            Self::Unsupported { .. } => ErrorKind::Unsupported,
            _ => ErrorKind::Format,
        }
    }

    /// Where, expected and found.
    pub const fn mismatch(&self) -> &Mismatch {
        match self {
            Self::Header { mismatch, .. }
            | Self::Unsupported { mismatch, .. }
            | Self::Checksum { mismatch, .. }
            | Self::Gzip { mismatch }
            | Self::Archive { mismatch, .. }
            | Self::Limit { mismatch, .. }
            | Self::Content { mismatch, .. } => mismatch,
        }
    }

    /// The member at fault, where there is one.
    pub fn member(&self) -> Option<&str> {
        match self {
            Self::Archive { member, .. } => member.as_deref(),
            Self::Content { member, .. } => Some(member),
            _ => None,
        }
    }
}
