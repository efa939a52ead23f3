//! The digest of the payload (check 7): MD5 in two byte orders, or SHA-256.
//!
//! Source: docs/neff-format.md, "Digest and uuid".

use sha2::{Digest, Sha256};

use super::error::{Mismatch, NeffError};
use super::header::{Header, PackageVersion};
use super::md5::md5;

/// Order of the digest's bytes in the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DigestOrder {
    /// The digest's own order.
    Standard,
    /// The bytes of each 32-bit word reversed, as compilers 2.18 to 2.24 write it.
    WordSwapped,
}

impl DigestOrder {
    /// `standard` or `word-swapped`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Standard => "standard",
            Self::WordSwapped => "word-swapped",
        }
    }
}

/// `digest` with the bytes of each 32-bit word reversed.
fn swap_words(mut digest: [u8; 16]) -> [u8; 16] {
    for word in digest.as_chunks_mut::<4>().0 {
        word.reverse();
    }
    digest
}

/// Compares the payload with the digest in the header and tells in which order it was written.
pub(super) fn verify(header: &Header, payload: &[u8]) -> Result<DigestOrder, NeffError> {
    match header.package_version {
        PackageVersion::Md5 => {
            let digest = md5(payload);
            let stored = header.hash.first_chunk::<16>().copied().unwrap_or_default();
            if stored == digest {
                Ok(DigestOrder::Standard)
            } else if stored == swap_words(digest) {
                Ok(DigestOrder::WordSwapped)
            } else {
                Err(NeffError::Checksum {
                    algorithm: "MD5",
                    mismatch: Mismatch::at(
                        172,
                        format_args!("{} (or its word-swapped form)", hex(&digest)),
                        hex(&stored),
                    ),
                })
            }
        }
        PackageVersion::Sha256 => {
            let digest: [u8; 32] = Sha256::digest(payload).into();
            if header.hash == digest {
                Ok(DigestOrder::Standard)
            } else {
                Err(NeffError::Checksum {
                    algorithm: "SHA-256",
                    mismatch: Mismatch::at(172, hex(&digest), hex(&header.hash)),
                })
            }
        }
    }
}

/// Lower-case hexadecimal digits of `bytes`.
pub(super) fn hex(bytes: &[u8]) -> String {
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits
        .filter_map(|digit| char::from_digit(digit.into(), 16))
        .collect()
}
