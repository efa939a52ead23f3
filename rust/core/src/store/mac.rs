//! Optional proof that an entry was written by somebody who knows the store's key.
//!
//! `docs/entry-format.md`, "Message authentication". A checksum finds decay; this finds forgery in a
//! directory that others can write to, such as a shared volume.

use std::fmt;

use super::error::StoreError;
use super::lookup::Entry;
use crate::digest::Digest;
use crate::entry::Kind;

/// The section that holds the code.
pub(super) const SECTION: &str = "mac";

/// The key of a store's message authentication codes.
#[derive(Clone)]
pub struct MacKey([u8; Self::SIZE_BYTES]);

impl MacKey {
    /// Length in bytes.
    pub const SIZE_BYTES: usize = 32;

    /// The key with these bytes.
    pub const fn new(bytes: [u8; Self::SIZE_BYTES]) -> Self {
        Self(bytes)
    }

    /// The code of an entry's kind, key and sections, in order.
    pub(super) fn code<'a>(
        &self,
        kind: Kind,
        key: &Digest,
        sections: impl Iterator<Item = (&'a str, &'a [u8])>,
    ) -> [u8; 32] {
        *self.hash(kind, key, sections).as_bytes()
    }

    /// Checks the code of an entry.
    pub(super) fn check(&self, entry: &Entry) -> Result<(), StoreError> {
        let refuse = |reason: &str| StoreError::Untrusted {
            path: entry.path().to_owned(),
            reason: reason.to_owned(),
        };
        let mut contents = Vec::with_capacity(entry.sections().len());
        for section in entry.sections() {
            if let Some(bytes) = entry.section(&section.name)? {
                contents.push((section.name.as_str(), bytes));
            }
        }
        let Some((SECTION, code)) = contents.pop() else {
            return Err(refuse("the entry has no message authentication code"));
        };
        let borrowed = contents.iter().map(|(name, bytes)| (*name, bytes.as_ref()));
        let expected = self.hash(entry.kind(), entry.key(), borrowed);
        // Compared in constant time.
        let found = <[u8; 32]>::try_from(code.as_ref()).map(blake3::Hash::from_bytes);
        if found.is_ok_and(|found| found == expected) {
            return Ok(());
        }
        Err(refuse(
            "the entry's message authentication code is not that of this store's key",
        ))
    }

    fn hash<'a>(
        &self,
        kind: Kind,
        key: &Digest,
        sections: impl Iterator<Item = (&'a str, &'a [u8])>,
    ) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&kind.code().to_le_bytes());
        hasher.update(key.as_bytes());
        for (name, content) in sections {
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name.as_bytes());
            hasher.update(&(content.len() as u64).to_le_bytes());
            hasher.update(content);
        }
        hasher.finalize()
    }
}

impl fmt::Debug for MacKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MacKey(..)")
    }
}
