//! The inflated payload as a bounded stream: plain bytes, or gzip inflated as it is read.
//!
//! Nothing of the stream is kept; a compressed payload is inflated through a fixed buffer.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{BufRead, BufReader, ErrorKind};

use flate2::bufread::GzDecoder;

use super::archive::Limits;
use super::error::{Mismatch, NeffError};
use super::header::PAYLOAD_OFFSET;

/// First bytes of a gzip stream (RFC 1952: magic, then method 8 = deflate).
const GZIP_MAGIC: [u8; 3] = [0x1f, 0x8b, 0x08];
/// Bytes inflated at a time; large enough that calls into the decoder do not count.
const BUFFER_BYTES: usize = 256 * 1024;

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
    Gzip(Box<BufReader<GzDecoder<&'a [u8]>>>),
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
            Compression::Gzip => {
                let decoder = GzDecoder::new(payload);
                Source::Gzip(Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder)))
            }
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
        let mut taken = Vec::with_capacity(wanted.min(BUFFER_BYTES));
        while let Some(left @ 1..) = wanted.checked_sub(taken.len()) {
            let inflated = self.inflated()?;
            let part = inflated.get(..left).unwrap_or(inflated);
            if part.is_empty() {
                return Err(self.ended_early(count));
            }
            taken.extend_from_slice(part);
            let passed = part.len();
            self.pass(passed);
        }
        Ok(Cow::Owned(taken))
    }

    /// Passes over exactly `count` bytes.
    pub(super) fn skip(&mut self, count: u64) -> Result<(), NeffError> {
        let mut left = count;
        while left > 0 {
            let available = self.inflated()?.len();
            let part = usize::try_from(left).unwrap_or(available).min(available);
            if part == 0 {
                return Err(self.ended_early(count));
            }
            self.pass(part);
            left = left.saturating_sub(part as u64);
        }
        Ok(())
    }

    /// Reads to the end of the payload: only zeros may be left, inside the gzip stream and after
    /// it. Reading to the end also checks the CRC and length of the gzip trailer.
    pub(super) fn finish(&mut self) -> Result<(), NeffError> {
        loop {
            let inflated = self.inflated()?;
            let available = inflated.len();
            if available == 0 {
                break;
            }
            if let Some(index) = inflated.iter().position(|&byte| byte != 0) {
                let position = self.position.saturating_add(index as u64);
                return Err(NeffError::Archive {
                    member: None,
                    mismatch: self.mismatch(
                        position,
                        "only zeros after the end of the archive",
                        "other bytes",
                    ),
                });
            }
            self.pass(available);
        }
        if let Source::Gzip(reader) = &self.source {
            let trailing = *reader.get_ref().get_ref();
            if let Some(index) = trailing.iter().position(|&byte| byte != 0) {
                return Err(NeffError::Gzip {
                    mismatch: Mismatch::at(
                        PAYLOAD_OFFSET
                            .saturating_add(self.consumed())
                            .saturating_add(index as u64),
                        "only zeros after the gzip stream",
                        "other bytes",
                    ),
                });
            }
        }
        Ok(())
    }

    /// The next bytes of the stream, at least one unless it has ended; they stay until
    /// [`Self::pass`].
    fn inflated(&mut self) -> Result<&[u8], NeffError> {
        if let Source::Gzip(reader) = &mut self.source {
            if let Err(error) = reader.fill_buf() {
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
            self.check_ratio()?;
        }
        Ok(self.buffered())
    }

    /// Bytes that can be passed over without reading on.
    fn buffered(&self) -> &[u8] {
        match &self.source {
            Source::Plain(rest) => rest,
            Source::Gzip(reader) => reader.buffer(),
        }
    }

    fn pass(&mut self, count: usize) {
        match &mut self.source {
            Source::Plain(rest) => rest.consume(count),
            Source::Gzip(reader) => reader.consume(count),
        }
        self.position = self.position.saturating_add(count as u64);
    }

    /// Bytes of the payload that have been used up.
    fn consumed(&self) -> u64 {
        let rest = match &self.source {
            Source::Plain(rest) => rest.len(),
            Source::Gzip(reader) => reader.get_ref().get_ref().len(),
        };
        self.payload_bytes.saturating_sub(rest as u64)
    }

    /// Checks what has been inflated so far, read or not.
    fn check_ratio(&self) -> Result<(), NeffError> {
        let consumed = self.consumed();
        let inflated = self.position.saturating_add(self.buffered().len() as u64);
        let allowed = consumed
            .saturating_mul(self.limits.inflate_ratio)
            .saturating_add(self.limits.inflate_floor_bytes);
        if inflated <= allowed {
            return Ok(());
        }
        Err(NeffError::Limit {
            what: "inflate ratio",
            mismatch: self.mismatch(
                self.position,
                format_args!("at most {allowed} bytes out of {consumed} compressed ones"),
                format_args!("{inflated} bytes"),
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
