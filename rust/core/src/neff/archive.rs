//! The bounded index of the payload's archive (check 8): names, sizes and places of its members.
//!
//! Nothing is unpacked to disk. Every size is checked against [`Limits`] before it is used.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Display;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::{Mismatch, NeffError, shortened};
use super::stream::{Compression, Stream};
use super::tar::{self, BLOCK_BYTES, Block, BlockKind, Fault, PaxRecords};

/// Bytes of a block, as a stream length.
const BLOCK: u64 = BLOCK_BYTES as u64;
/// Most bytes of one PAX record block; real ones hold three times stamps.
const MAX_PAX_BYTES: u64 = 1 << 20;
/// Leading bytes of each `.npy` member that the index keeps: magic, version and header length.
pub(super) const NPY_PREFIX_BYTES: usize = 12;

/// Bounds on what an archive may make the reader do.
///
/// Real files: at most 90 members, 9.3 MB inflated, inflate ratio 11 (docs/neff-format.md).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most members and PAX records, directories included.
    pub members: usize,
    /// Most bytes of one member.
    pub member_bytes: u64,
    /// Most bytes of the inflated archive.
    pub total_bytes: u64,
    /// Most inflated bytes per compressed byte, beyond [`Self::inflate_floor_bytes`].
    pub inflate_ratio: u64,
    /// Inflated bytes that are allowed whatever the ratio, so that a small archive of constants
    /// that compress well is not refused.
    pub inflate_floor_bytes: u64,
    /// Most bytes of a member's path.
    pub name_bytes: usize,
    /// Most bytes of a JSON member that is parsed, and of all subgraph definitions together.
    pub json_bytes: u64,
}

impl Limits {
    /// The bounds used unless a caller asks for others.
    pub const DEFAULT: Self = Self {
        members: 65_536,
        member_bytes: 4 << 30,
        total_bytes: 8 << 30,
        inflate_ratio: 256,
        inflate_floor_bytes: 64 << 20,
        name_bytes: 1024,
        json_bytes: 64 << 20,
    };
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// One file of the archive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Path inside the archive.
    pub name: String,
    /// Bytes of its content.
    pub size: u64,
    /// Where its content starts in the inflated stream.
    pub(super) offset: u64,
    /// The first bytes of a `.npy` file; only for the checks of a whole NEFF.
    #[serde(skip)]
    pub(super) npy_prefix: Option<[u8; NPY_PREFIX_BYTES]>,
}

/// The index of an archive, and the metadata members that were kept while it was read.
#[derive(Debug)]
pub(super) struct Archive {
    pub(super) compression: Compression,
    pub(super) members: Vec<Member>,
    by_name: HashMap<String, usize>,
    /// Content by index of the member; only out of a compressed payload.
    kept: HashMap<usize, Vec<u8>>,
    limits: Limits,
}

impl Archive {
    /// Reads the whole payload once and indexes it.
    ///
    /// The members of a compressed payload that satisfy `keep` and fit `limits.json_bytes`
    /// together stay in memory, so that reading them does not inflate the payload again.
    pub(super) fn index(
        payload: &[u8],
        limits: &Limits,
        keep: impl Fn(&str) -> bool,
    ) -> Result<Self, NeffError> {
        let mut archive = Self {
            compression: Compression::of(payload),
            members: Vec::new(),
            by_name: HashMap::new(),
            kept: HashMap::new(),
            limits: limits.clone(),
        };
        let mut reader = Reader::new(payload, limits);
        let mut keep_budget = limits.json_bytes;
        while let Some((name, size)) = reader.next_file()? {
            let offset = reader.stream.position();
            let index = archive.members.len();
            if archive.by_name.insert(name.clone(), index).is_some() {
                return Err(NeffError::Archive {
                    mismatch: reader.stream.mismatch(
                        offset.saturating_sub(BLOCK),
                        "every name once",
                        "a second member of this name",
                    ),
                    member: Some(name),
                });
            }
            let mut npy_prefix = None;
            if archive.compression == Compression::Gzip && size <= keep_budget && keep(&name) {
                keep_budget = keep_budget.saturating_sub(size);
                archive
                    .kept
                    .insert(index, reader.stream.take(size)?.into_owned());
            } else if is_numpy_file(&name) && size >= NPY_PREFIX_BYTES as u64 {
                npy_prefix = reader
                    .stream
                    .take(NPY_PREFIX_BYTES as u64)?
                    .first_chunk()
                    .copied();
            }
            archive.members.push(Member {
                name,
                size,
                offset,
                npy_prefix,
            });
        }
        reader.stream.finish()?;
        Ok(archive)
    }

    /// An archive whose index is known; None if it cannot be that of `payload`.
    pub(super) fn from_members(
        payload: &[u8],
        compression: Compression,
        members: Vec<Member>,
    ) -> Option<Self> {
        if Compression::of(payload) != compression {
            return None;
        }
        let mut by_name = HashMap::with_capacity(members.len());
        for (index, member) in members.iter().enumerate() {
            let end = member.offset.checked_add(member.size)?;
            let is_inside = compression == Compression::Gzip || end <= payload.len() as u64;
            if !is_inside || by_name.insert(member.name.clone(), index).is_some() {
                return None;
            }
        }
        Some(Self {
            compression,
            members,
            by_name,
            kept: HashMap::new(),
            limits: Limits::DEFAULT,
        })
    }

    pub(super) fn get(&self, name: &str) -> Option<&Member> {
        self.by_name
            .get(name)
            .and_then(|&index| self.members.get(index))
    }

    /// Makes sure that [`Self::read`] of `names` is cheap: what was not kept while the payload was
    /// indexed is inflated now, all in one pass.
    pub(super) fn load<'a>(
        &mut self,
        payload: &[u8],
        names: impl IntoIterator<Item = &'a str>,
    ) -> Result<(), NeffError> {
        let mut budget = self.limits.json_bytes;
        let mut wanted = Vec::new();
        for name in names {
            let Some(&index) = self.by_name.get(name) else {
                return Err(self.missing(name));
            };
            let member = self.members.get(index).ok_or_else(|| self.missing(name))?;
            budget = budget
                .checked_sub(member.size)
                .ok_or_else(|| NeffError::Limit {
                    what: "bytes of metadata",
                    mismatch: self.mismatch(
                        member.offset,
                        format_args!(
                            "at most {} bytes in {name:?} and its like",
                            self.limits.json_bytes
                        ),
                        format_args!("{} bytes in {name:?}", member.size),
                    ),
                })?;
            wanted.push((member.offset, member.size, index));
        }
        wanted.retain(|(_, _, index)| !self.kept.contains_key(index));
        if self.compression == Compression::None || wanted.is_empty() {
            return Ok(());
        }
        wanted.sort_unstable();
        let mut stream = Stream::new(payload, &self.limits);
        for (offset, size, index) in wanted {
            stream.skip(offset.saturating_sub(stream.position()))?;
            self.kept.insert(index, stream.take(size)?.into_owned());
        }
        Ok(())
    }

    /// The content of the member `name`.
    pub(super) fn read<'a>(
        &'a self,
        payload: &'a [u8],
        name: &str,
    ) -> Result<Cow<'a, [u8]>, NeffError> {
        let Some(&index) = self.by_name.get(name) else {
            return Err(self.missing(name));
        };
        if let Some(kept) = self.kept.get(&index) {
            return Ok(Cow::Borrowed(kept));
        }
        let member = self.members.get(index).ok_or_else(|| self.missing(name))?;
        let mut stream = Stream::new(payload, &self.limits);
        stream.skip(member.offset)?;
        stream.take(member.size)
    }

    /// Gives back the memory of the members that were kept.
    pub(super) fn forget_kept(&mut self) {
        self.kept = HashMap::new();
    }

    /// The error that a member is missing; its place is the start of the archive.
    fn missing(&self, name: &str) -> NeffError {
        self.content_error(name, "a member of this name", "none")
    }

    /// The error that the content of `name` is not what it must be.
    pub(super) fn content_error(
        &self,
        name: &str,
        expected: impl Display,
        found: impl Display,
    ) -> NeffError {
        let offset = self.get(name).map_or(0, |member| member.offset);
        NeffError::Content {
            member: shortened(name.to_owned()),
            mismatch: self.mismatch(offset, expected, found),
        }
    }

    fn mismatch(&self, position: u64, expected: impl Display, found: impl Display) -> Mismatch {
        let is_compressed = self.compression == Compression::Gzip;
        Mismatch::in_payload(is_compressed, position, expected, found)
    }
}

/// Reads the records of a tar stream one after the other.
struct Reader<'a> {
    stream: Stream<'a>,
    limits: &'a Limits,
    records: usize,
    /// Where the next record starts: content that nobody read is skipped.
    next: u64,
}

impl<'a> Reader<'a> {
    fn new(payload: &'a [u8], limits: &'a Limits) -> Self {
        Self {
            stream: Stream::new(payload, limits),
            limits,
            records: 0,
            next: 0,
        }
    }

    /// Name and size of the next regular file, with the stream at its content; `None` at the end.
    fn next_file(&mut self) -> Result<Option<(String, u64)>, NeffError> {
        let mut pax: Option<PaxRecords> = None;
        loop {
            let Some((start, block)) = self.next_block()? else {
                return match pax {
                    None => Ok(None),
                    Some(_) => Err(self.archive_error(
                        self.stream.position(),
                        "a member after its PAX records",
                        "the end of the archive",
                    )),
                };
            };
            match block.kind {
                BlockKind::Pax | BlockKind::GlobalPax => {
                    if pax.is_some() {
                        return Err(self.archive_error(
                            start,
                            "a member after its PAX records",
                            "more PAX records",
                        ));
                    }
                    let records = self.pax_records(start, &block)?;
                    if block.kind == BlockKind::Pax {
                        pax = Some(records);
                    } else if records != PaxRecords::default() {
                        return Err(self.archive_error(
                            start,
                            "no path and no size for all members at once",
                            "global PAX records with one",
                        ));
                    }
                }
                BlockKind::File | BlockKind::Directory => {
                    let is_directory = block.kind == BlockKind::Directory;
                    let (name, size) = self.identity(start, block, pax.take())?;
                    if !is_directory {
                        return Ok(Some((name, size)));
                    }
                    if size != 0 {
                        return Err(self.archive_error(
                            start,
                            "a directory without content",
                            format!("{size} bytes"),
                        ));
                    }
                }
            }
        }
    }

    /// The next header block and where it starts; `None` at the two blocks of zeros.
    fn next_block(&mut self) -> Result<Option<(u64, Block)>, NeffError> {
        self.stream
            .skip(self.next.saturating_sub(self.stream.position()))?;
        let start = self.next;
        let bytes = self.block(start)?;
        if bytes == [0; BLOCK_BYTES] {
            let second = start.saturating_add(BLOCK);
            if self.block(second)? != [0; BLOCK_BYTES] {
                return Err(self.archive_error(
                    second,
                    "a second block of zeros at the end of the archive",
                    "other bytes",
                ));
            }
            return Ok(None);
        }
        let block = tar::parse_block(&bytes).map_err(|fault| self.fault(start, fault))?;
        self.records = self.records.saturating_add(1);
        if self.records > self.limits.members {
            return Err(self.limit("members", start, self.limits.members as u64, None));
        }
        if block.size > self.limits.member_bytes {
            let size = Some(block.size);
            return Err(self.limit("bytes of a member", start, self.limits.member_bytes, size));
        }
        self.next = block
            .size
            .checked_next_multiple_of(BLOCK)
            .and_then(|content| content.checked_add(start)?.checked_add(BLOCK))
            .filter(|next| *next <= self.limits.total_bytes)
            .ok_or_else(|| {
                self.limit(
                    "bytes of the inflated archive",
                    start,
                    self.limits.total_bytes,
                    None,
                )
            })?;
        Ok(Some((start, block)))
    }

    fn block(&mut self, start: u64) -> Result<[u8; BLOCK_BYTES], NeffError> {
        let bytes = self.stream.take(BLOCK).map_err(|error| match error {
            NeffError::Archive { .. } => self.archive_error(
                start,
                "a header block of 512 bytes or the end of the archive (two blocks of zeros)",
                "the end of the payload",
            ),
            other => other,
        })?;
        bytes.first_chunk().copied().ok_or_else(|| {
            self.archive_error(
                start,
                "a header block of 512 bytes",
                "the end of the payload",
            )
        })
    }

    fn pax_records(&mut self, start: u64, block: &Block) -> Result<PaxRecords, NeffError> {
        if block.size > MAX_PAX_BYTES {
            return Err(self.limit(
                "bytes of PAX records",
                start,
                MAX_PAX_BYTES,
                Some(block.size),
            ));
        }
        let content = self.stream.take(block.size)?;
        let content_start = start.saturating_add(BLOCK);
        tar::parse_pax(&content).map_err(|fault| self.fault(content_start, fault))
    }

    /// Name and size of a member out of its header block and its PAX records.
    fn identity(
        &self,
        start: u64,
        block: Block,
        pax: Option<PaxRecords>,
    ) -> Result<(String, u64), NeffError> {
        let PaxRecords { path, size } = pax.unwrap_or_default();
        let name = path.unwrap_or(block.name);
        if name.len() > self.limits.name_bytes {
            let limit = self.limits.name_bytes as u64;
            return Err(self.limit("bytes of a name", start, limit, Some(name.len() as u64)));
        }
        let name = String::from_utf8(name).map_err(|error| {
            let found = String::from_utf8_lossy(error.as_bytes()).into_owned();
            self.archive_error(start, "a member name in UTF-8", format!("{found:?}"))
        })?;
        // The ustar field holds every size below our limits, so a PAX size has nothing to add: one
        // that differs makes readers disagree about where the next member starts.
        if size.is_some_and(|size| size != block.size) {
            return Err(NeffError::Archive {
                mismatch: self.stream.mismatch(
                    start,
                    format!(
                        "the PAX size to be that of the header, {} bytes",
                        block.size
                    ),
                    format!("{} bytes", size.unwrap_or_default()),
                ),
                member: Some(name),
            });
        }
        let path = match block.kind {
            BlockKind::Directory => name.strip_suffix('/').unwrap_or(&name),
            _ => &name,
        };
        if !is_plain_relative_path(path) {
            return Err(NeffError::Archive {
                mismatch: self.stream.mismatch(
                    start,
                    "a relative path without empty, `.` or `..` components",
                    format!("{name:?}"),
                ),
                member: Some(name),
            });
        }
        Ok((name, block.size))
    }

    fn fault(&self, start: u64, fault: Fault) -> NeffError {
        self.archive_error(
            start.saturating_add(fault.offset),
            fault.expected,
            fault.found,
        )
    }

    fn archive_error(
        &self,
        position: u64,
        expected: impl Display,
        found: impl Display,
    ) -> NeffError {
        NeffError::Archive {
            member: None,
            mismatch: self.stream.mismatch(position, expected, found),
        }
    }

    fn limit(&self, what: &'static str, start: u64, limit: u64, found: Option<u64>) -> NeffError {
        let found = found.map_or_else(|| "more".to_owned(), |found| found.to_string());
        NeffError::Limit {
            what,
            mismatch: self
                .stream
                .mismatch(start, format!("at most {limit}"), found),
        }
    }
}

/// Whether `name` is that of a numpy file (`.npy`, as every known NEFF spells it).
pub(super) fn is_numpy_file(name: &str) -> bool {
    Path::new(name)
        .extension()
        .is_some_and(|extension| extension == "npy")
}

/// Whether `path` names something below the current directory, in one way only.
pub(super) fn is_plain_relative_path(path: &str) -> bool {
    !path.contains('\0') && path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}
