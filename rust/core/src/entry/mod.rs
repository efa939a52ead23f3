//! The format of one cache entry: one immutable, self-describing file.
//!
//! `docs/entry-format.md` is the specification. [`layout`] has the bytes, [`read`] checks them,
//! [`write`] makes them.

pub mod layout;
pub mod read;
pub mod write;

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

pub use crate::format::FormatError;
pub use read::{EntryLayout, SectionRow};
pub use write::EntryWriter;

/// What an entry holds; part of the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Kind {
    /// A saved trace.
    Trace = 1,
    /// A lowered module.
    Lowering = 2,
    /// A compiled NEFF.
    Neff = 3,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::Trace, Self::Lowering, Self::Neff];

    /// The kind with this code, if there is one.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }

    /// The code in the header.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// The name used everywhere outside the header.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Trace => "trace",
            Self::Lowering => "lowering",
            Self::Neff => "neff",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Text that names no kind.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("expected a kind (trace, lowering or neff), found {0:?}")]
pub struct UnknownKind(pub String);

impl FromStr for Kind {
    type Err = UnknownKind;

    fn from_str(text: &str) -> Result<Self, UnknownKind> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| UnknownKind(text.to_owned()))
    }
}

/// Sections that no entry can be made of.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SectionError {
    /// The number of sections is out of range.
    #[error("expected 1 to {max} sections, found {found}", max = layout::MAX_SECTIONS)]
    Count {
        /// How many were given.
        found: usize,
    },
    /// A name cannot be stored.
    #[error(
        "section name {name:?}: expected 1 to {max} printable ASCII characters without spaces",
        max = layout::NAME_BYTES
    )]
    Name {
        /// The name.
        name: String,
    },
    /// A name was given twice.
    #[error("section {name:?} is given twice")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// The sum of the lengths is no length of a file.
    #[error("the sections are too long for one file")]
    TooLong,
}
