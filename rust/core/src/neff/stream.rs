//! The inflated payload as a bounded stream: plain bytes, or gzip inflated as it is read.
//!
//! Nothing of the stream is kept; a compressed payload is inflated through a fixed buffer.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{ErrorKind, Read};

use flate2::bufread::GzDecoder;

use super::archive::Limits;
use super::error::{Mismatch, NeffError};
use super::header::PAYLOAD_OFFSET;

/// First bytes of a gzip stream (RFC 1952: magic, then method 8 = deflate).
const GZIP_MAGIC: [u8; 3] = [0x1f, 0x8b, 0x08];
/// Bytes inflated at a time where nobody wants them.
const SKIP_BYTES: usize = 16 * 1024;

/// How the archive is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// A gzip stream around the tar archive.
    Gzip,
    /// The tar archive itself.
    None,
}

impl Compression {
    /// Decides by the first bytes of the payload, as runtimes and packagers leave no other mark.
    pub(super) fn of(payload: &[u8]) -> Self {
        if payload.starts_with(&GZIP_MAGIC) {
            Self::Gzip
        } else {
            Self::None
        }
    }

    /// `gzip` or `none`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::None => "none",
        }
    }
}

enum Source<'a> {
    Plain(&'a [u8]),
    Gzip(Box<GzDecoder<&'a [u8]>>),
}

/// A reading position in the inflated payload.
pub(super) struct Stream<'a> {
    source: Source<'a>,
    payload_bytes: u64,
    position: u64,
    limits: &'a Limits,
}

impl<'a> Stream<'a> {
    pub(super) fn new(payload: &'a [u8], limits: &'a Limits) -> Self {
        let source = match Compression::of(payload) {
            Compression::None => Source::Plain(payload),
            Compression::Gzip => Source::Gzip(Box::new(GzDecoder::new(payload))),
        };
        Self {
            source,
            payload_bytes: payload.len() as u64,
            position: 0,
            limits,
        }
    }

    /// Bytes of the inflated stream read so far.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Describes a fault at `position` of the inflated stream.
    pub(super) fn mismatch(
        &self,
        position: u64,
        expected: impl Display,
        found: impl Display,
    ) -> Mismatch {
        Mismatch::in_payload(
            matches!(self.source, Source::Gzip(_)),
            position,
            expected,
            found,
        )
    }

    /// Reads exactly `count` bytes, without a copy if the payload is plain.
    pub(super) fn take(&mut self, count: u64) -> Result<Cow<'a, [u8]>, NeffError> {
        let wanted = usize::try_from(count).map_err(|_| self.ended_early(count))?;
        if let Source::Plain(rest) = &mut self.source {
            let Some((taken, tail)) = rest.split_at_checked(wanted) else {
                return Err(self.ended_early(count));
            };
            *rest = tail;
            self.position = self.position.saturating_add(count);
            return Ok(Cow::Borrowed(taken));
        }
        // The declared size is not trusted with an allocation: memory grows with what is inflated.
        let mut taken = Vec::with_capacity(wanted.min(SKIP_BYTES));
        while taken.len() < wanted {
            let start = taken.len();
            taken.resize(wanted.min(start.saturating_add(SKIP_BYTES)), 0);
            let read = self.fill(taken.get_mut(start..).unwrap_or_default())?;
            if start.saturating_add(read) < taken.len() {
                return Err(self.ended_early(count));
            }
        }
        Ok(Cow::Owned(taken))
    }

    /// Passes over exactly `count` bytes.
    pub(super) fn skip(&mut self, count: u64) -> Result<(), NeffError> {
        if matches!(self.source, Source::Plain(_)) {
            return self.take(count).map(|_| ());
        }
        let mut scratch = [0; SKIP_BYTES];
        let mut left = count;
        while left > 0 {
            let chunk = usize::try_from(left).unwrap_or(SKIP_BYTES).min(SKIP_BYTES);
            let read = self.fill(scratch.get_mut(..chunk).unwrap_or_default())?;
            if read < chunk {
                return Err(self.ended_early(count));
            }
            left = left.saturating_sub(read as u64);
        }
        Ok(())
    }

    /// Reads to the end of the payload: only zeros may be left, inside the gzip stream and after
    /// it. Reading to the end also checks the CRC and length of the gzip trailer.
    pub(super) fn finish(&mut self) -> Result<(), NeffError> {
        let mut scratch = [0; SKIP_BYTES];
        loop {
            let start = self.position;
            let read = self.fill(&mut scratch)?;
            if let Some(index) = scratch.iter().take(read).position(|&byte| byte != 0) {
                let position = start.saturating_add(index as u64);
                return Err(NeffError::Archive {
                    member: None,
                    mismatch: self.mismatch(
                        position,
                        "only zeros after the end of the archive",
                        "other bytes",
                    ),
                });
            }
            if read < scratch.len() {
                break;
            }
        }
        if let Source::Gzip(decoder) = &self.source {
            let trailing = *decoder.get_ref();
            if let Some(index) = trailing.iter().position(|&byte| byte != 0) {
                let left = trailing.len().saturating_sub(index) as u64;
                return Err(NeffError::Gzip {
                    mismatch: Mismatch::at(
                        PAYLOAD_OFFSET.saturating_add(self.payload_bytes.saturating_sub(left)),
                        "only zeros after the gzip stream",
                        "other bytes",
                    ),
                });
            }
        }
        Ok(())
    }

    /// Fills `buffer`; returns less than its length only at the end of the stream.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, NeffError> {
        let mut filled = 0;
        while let Some(free) = buffer.get_mut(filled..).filter(|free| !free.is_empty()) {
            let result = match &mut self.source {
                Source::Plain(rest) => rest.read(free),
                Source::Gzip(decoder) => decoder.read(free),
            };
            match result {
                Ok(0) => break,
                Ok(read) => {
                    filled = filled.saturating_add(read);
                    self.position = self.position.saturating_add(read as u64);
                    self.check_ratio()?;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    let found = if error.kind() == ErrorKind::UnexpectedEof {
                        "the end of the payload".to_owned()
                    } else {
                        error.to_string()
                    };
                    return Err(NeffError::Gzip {
                        mismatch: Mismatch::at(
                            PAYLOAD_OFFSET.saturating_add(self.consumed()),
                            "a valid gzip stream",
                            found,
                        ),
                    });
                }
            }
        }
        Ok(filled)
    }

    /// Bytes of the payload that have been used up.
    fn consumed(&self) -> u64 {
        let rest = match &self.source {
            Source::Plain(rest) => rest.len(),
            Source::Gzip(decoder) => decoder.get_ref().len(),
        };
        self.payload_bytes.saturating_sub(rest as u64)
    }

    fn check_ratio(&self) -> Result<(), NeffError> {
        let consumed = self.consumed();
        let allowed = consumed
            .saturating_mul(self.limits.inflate_ratio)
            .saturating_add(self.limits.inflate_floor_bytes);
        if self.position <= allowed {
            return Ok(());
        }
        Err(NeffError::Limit {
            what: "inflate ratio",
            mismatch: self.mismatch(
                self.position,
                format!("at most {allowed} bytes out of {consumed} compressed ones"),
                format!("{} bytes", self.position),
            ),
        })
    }

    fn ended_early(&self, count: u64) -> NeffError {
        NeffError::Archive {
            member: None,
            mismatch: self.mismatch(
                self.position,
                format!("{count} bytes"),
                "the end of the payload",
            ),
        }
    }
}
