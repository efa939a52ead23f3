//! What can go wrong with a store, always with the path.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use thiserror::Error;

use crate::entry::{FormatError, Kind, SectionError};

/// A failure of a store operation.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A file in the place of an entry breaks a rule of the format.
    #[error("{}: {source}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The rule.
        source: FormatError,
    },
    /// Somebody else could have written the file or directory.
    #[error(
        "{}: {reason}. Give the cache a directory of your own that others cannot write to",
        path.display()
    )]
    Untrusted {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The directory takes no writes.
    #[error("{}: cannot {operation}: {source}", path.display())]
    ReadOnly {
        /// The file or directory.
        path: PathBuf,
        /// What was tried.
        operation: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The system refused something else.
    #[error("{}: cannot {operation}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was tried.
        operation: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The key finds a sound entry of another kind.
    #[error("{}: expected an entry of kind {expected}, found one of kind {found}", path.display())]
    OtherKind {
        /// The file.
        path: PathBuf,
        /// The kind that was asked for.
        expected: Kind,
        /// The kind of the entry.
        found: Kind,
    },
    /// The sections cannot be stored.
    #[error(transparent)]
    Section(#[from] SectionError),
}

impl StoreError {
    /// The file or directory, if one is at fault.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Corrupt { path, .. }
            | Self::Untrusted { path, .. }
            | Self::ReadOnly { path, .. }
            | Self::Io { path, .. }
            | Self::OtherKind { path, .. } => Some(path),
            Self::Section(_) => None,
        }
    }

    /// A system call that failed while something was read.
    pub(super) fn read(path: &Path, operation: &'static str, error: impl Into<io::Error>) -> Self {
        Self::Io {
            path: path.to_owned(),
            operation,
            source: error.into(),
        }
    }

    /// A system call that failed while something was written.
    pub(super) fn write(path: &Path, operation: &'static str, error: Errno) -> Self {
        let path = path.to_owned();
        let source = error.into();
        match error {
            Errno::ROFS | Errno::ACCESS | Errno::PERM => Self::ReadOnly {
                path,
                operation,
                source,
            },
            _ => Self::Io {
                path,
                operation,
                source,
            },
        }
    }

    /// A file that is not even a regular file.
    pub(super) fn wrong_type(path: &Path, expected: &str, found: rustix::fs::FileType) -> Self {
        let source = FormatError {
            what: "file type",
            offset: 0,
            expected: expected.to_owned(),
            found: file_type_name(found).to_owned(),
        };
        Self::Corrupt {
            path: path.to_owned(),
            source,
        }
    }
}

/// The name of a file type for messages.
pub(super) fn file_type_name(file_type: rustix::fs::FileType) -> &'static str {
    use rustix::fs::FileType;
    match file_type {
        FileType::RegularFile => "regular file",
        FileType::Directory => "directory",
        FileType::Symlink => "symbolic link",
        FileType::Fifo => "FIFO",
        FileType::Socket => "socket",
        FileType::CharacterDevice => "character device",
        FileType::BlockDevice => "block device",
        FileType::Unknown => "unknown",
    }
}
