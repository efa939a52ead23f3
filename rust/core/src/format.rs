//! What is wrong with bytes of a specified format: entries and canonical graphs.

use thiserror::Error;

/// Bytes that break a rule of their format.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{what} at offset {offset}: expected {expected}, found {found}")]
pub struct FormatError {
    /// The field or rule.
    pub what: &'static str,
    /// Bytes from the start.
    pub offset: u64,
    /// What the rule asks for.
    pub expected: String,
    /// What is there.
    pub found: String,
}

impl FormatError {
    /// The error at `offset`; saturates, since no buffer is that long.
    // By value: most arguments are made for the call.
    #[allow(clippy::needless_pass_by_value)]
    pub(crate) fn new(
        what: &'static str,
        offset: usize,
        expected: impl ToString,
        found: impl ToString,
    ) -> Self {
        Self {
            what,
            offset: offset as u64,
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}

/// Bytes as hex digits, for messages.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect::<Vec<_>>()
        .join(" ")
}
