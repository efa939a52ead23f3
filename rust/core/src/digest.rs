//! BLAKE3-256 digests and XXH3-128 checksums.
//!
//! A *digest* is cryptographic: it names content. A *checksum* is not: it finds decay and tearing.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A BLAKE3-256 digest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; Self::SIZE_BYTES]);

impl Digest {
    /// Length in bytes.
    pub const SIZE_BYTES: usize = 32;

    /// The digest with these bytes.
    pub const fn from_bytes(bytes: [u8; Self::SIZE_BYTES]) -> Self {
        Self(bytes)
    }

    /// The plain BLAKE3-256 digest of `data`, as `b3sum` prints it.
    pub fn of(data: &[u8]) -> Self {
        Self(*blake3::hash(data).as_bytes())
    }

    /// The digest of `data` in BLAKE3's key-derivation mode, which separates contexts.
    pub fn derive(context: &str, data: &[u8]) -> Self {
        Self(blake3::derive_key(context, data))
    }

    /// The 32 bytes.
    pub const fn as_bytes(&self) -> &[u8; Self::SIZE_BYTES] {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut hex = String::with_capacity(2 * Self::SIZE_BYTES);
        for byte in self.0 {
            hex.push(char::from(DIGITS[usize::from(byte >> 4)]));
            hex.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
        f.pad(&hex)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// Text that is not a digest.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("expected 64 lower-case hex digits, found {0:?}")]
pub struct InvalidDigest(pub String);

impl FromStr for Digest {
    type Err = InvalidDigest;

    /// Parses 64 lower-case hex digits. Upper case is refused: a key is also a file name, and one
    /// key must have one name.
    fn from_str(text: &str) -> Result<Self, InvalidDigest> {
        let nibble = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        let invalid = || InvalidDigest(text.chars().take(80).collect());
        let digits = text.as_bytes();
        if digits.len() != 2 * Self::SIZE_BYTES {
            return Err(invalid());
        }
        let mut bytes = [0; Self::SIZE_BYTES];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let (high, low) = (nibble(pair[0]), nibble(pair[1]));
            *byte = (high.ok_or_else(invalid)? << 4) | low.ok_or_else(invalid)?;
        }
        Ok(Self(bytes))
    }
}

/// The XXH3-128 checksum of `data` (seed 0).
pub fn checksum(data: &[u8]) -> u128 {
    xxhash_rust::xxh3::xxh3_128(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_of_nothing_is_the_published_vector() {
        // Source: test_vectors.json of the BLAKE3 repository, input_len 0.
        let hex = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        assert_eq!(Digest::of(b"").to_string(), hex);
        assert_eq!(hex.parse(), Ok(Digest::of(b"")));
    }

    #[test]
    fn digest_has_one_spelling() {
        let hex = Digest::of(b"x").to_string();
        for bad in [
            &hex[1..],
            &hex.to_uppercase(),
            &format!("{hex}0"),
            &hex.replace('a', "g"),
        ] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }

    #[test]
    fn checksum_of_nothing_is_the_published_vector() {
        // Source: XXH3_128bits of an empty input with seed 0, xxHash's sanity tests.
        assert_eq!(checksum(b""), 0x99aa_06d3_0147_98d8_6001_c324_468d_497f);
    }
}
