//! What can go wrong with the runtime.

use std::path::PathBuf;

use thiserror::Error;

use super::status::Status;

/// Why the runtime could not do something.
#[derive(Debug, Error)]
pub enum NrtError {
    /// No library could be loaded.
    #[error("cannot load the Neuron runtime: {}", tried.join("; "))]
    NotLoaded {
        /// Each path and why it failed.
        tried: Vec<String>,
    },
    /// The library lacks a function that is needed.
    #[error("{}: the library has no symbol {symbol}; it is not a Neuron runtime that this version can use", path.display())]
    NoSymbol {
        /// The library.
        path: PathBuf,
        /// The function.
        symbol: String,
    },
    /// A call returned another status than success.
    #[error("{call}: {status}{detail}")]
    Call {
        /// The function.
        call: &'static str,
        /// What it returned.
        status: Status,
        /// What it was called for, with `; ` in front, or empty.
        detail: String,
    },
    /// The call was not made, because it cannot be right.
    #[error("{call}: {reason}")]
    Refused {
        /// The function.
        call: &'static str,
        /// Expected and found.
        reason: String,
    },
}

impl NrtError {
    /// The runtime's status, where a call returned one.
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Call { status, .. } => Some(*status),
            _ => None,
        }
    }

    pub(super) fn check(
        call: &'static str,
        status: Status,
        detail: impl FnOnce() -> String,
    ) -> Result<(), Self> {
        if status == Status::SUCCESS {
            return Ok(());
        }
        let detail = detail();
        let detail = if detail.is_empty() {
            detail
        } else {
            format!("; {detail}")
        };
        Err(Self::Call {
            call,
            status,
            detail,
        })
    }

    pub(super) fn refused(call: &'static str, reason: impl Into<String>) -> Self {
        Self::Refused {
            call,
            reason: reason.into(),
        }
    }
}
