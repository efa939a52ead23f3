//! Checks the bytes of an entry against the format.

use std::ops::Range;

use zerocopy::FromBytes;
use zerocopy::little_endian::U128;

use super::layout::{
    CHECKSUM_OFFSET, Header, MAGIC, MAX_SECTIONS, PAGE_BYTES, Row, VERSION, is_section_name,
    whole_pages,
};
use super::{FormatError, Kind};
use crate::digest::{Digest, checksum};
use crate::format::hex;

/// One section of a checked header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SectionRow {
    /// The name.
    pub name: String,
    /// Where its bytes are in the file, without padding.
    pub range: Range<usize>,
    /// XXH3-128 of its bytes.
    pub checksum: u128,
    /// Where the table row's checksum is in the file, for errors.
    table_offset: usize,
}

/// A header page that keeps all rules; the sections' content is checked one by one with
/// [`EntryLayout::check_section`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryLayout {
    /// What the entry holds.
    pub kind: Kind,
    /// The key that it was published under.
    pub key: Digest,
    /// Length of the file.
    pub total_bytes: u64,
    /// Sections in file order.
    pub sections: Vec<SectionRow>,
}

impl EntryLayout {
    /// Checks a header page against the length of its file.
    ///
    /// `page` is the first [`PAGE_BYTES`] of the file, or all of a shorter one.
    pub fn parse(page: &[u8], file_bytes: u64) -> Result<Self, FormatError> {
        let short = || {
            FormatError::new(
                "length of the file",
                0,
                format!("at least {PAGE_BYTES}"),
                page.len(),
            )
        };
        let page = page.get(..PAGE_BYTES).ok_or_else(short)?;
        let (header, rows) = Header::ref_from_prefix(page).map_err(|_| short())?;
        if header.magic != MAGIC {
            return Err(FormatError::new(
                "magic",
                0,
                hex(&MAGIC),
                hex(&header.magic),
            ));
        }
        if header.version.get() != VERSION {
            return Err(FormatError::new(
                "format version",
                8,
                VERSION,
                header.version,
            ));
        }
        check_header_checksum(page)?;
        let kind = Kind::from_code(header.kind.get())
            .ok_or_else(|| FormatError::new("kind", 12, "1, 2 or 3", header.kind))?;
        if header.flags.get() != 0 {
            return Err(FormatError::new("flags", 16, 0, header.flags));
        }
        let count = usize::try_from(header.section_count.get()).unwrap_or(usize::MAX);
        if !(1..=MAX_SECTIONS).contains(&count) {
            return Err(FormatError::new(
                "section count",
                20,
                format!("1 to {MAX_SECTIONS}"),
                count,
            ));
        }
        if header.total_bytes.get() != file_bytes {
            return Err(FormatError::new(
                "total length",
                24,
                format!("{file_bytes} (of the file)"),
                header.total_bytes,
            ));
        }
        let (rows, padding) = <[Row]>::ref_from_prefix_with_elems(rows, count)
            .map_err(|_| FormatError::new("section table", 64, "inside the header page", count))?;
        let padding = padding.get(..padding.len().saturating_sub(size_of::<U128>()));
        check_zeros(
            "padding of the header",
            padding.unwrap_or_default(),
            table_offset(count),
        )?;
        Ok(Self {
            kind,
            key: Digest::from_bytes(header.key),
            total_bytes: file_bytes,
            sections: parse_rows(rows, file_bytes)?,
        })
    }

    /// The section with this name.
    pub fn section(&self, name: &str) -> Option<&SectionRow> {
        self.sections.iter().find(|section| section.name == name)
    }

    /// Checks content and padding of one section in `file`, which is the whole file.
    pub fn check_section(file: &[u8], section: &SectionRow) -> Result<(), FormatError> {
        let Range { start, end } = section.range;
        let outside = || {
            FormatError::new(
                "section",
                section.table_offset,
                "inside the file",
                file.len(),
            )
        };
        let content = file.get(start..end).ok_or_else(outside)?;
        let padded = end
            .checked_next_multiple_of(PAGE_BYTES)
            .ok_or_else(outside)?;
        let padding = file.get(end..padded).ok_or_else(outside)?;
        let found = checksum(content);
        if found != section.checksum {
            return Err(FormatError {
                what: "checksum of a section",
                offset: start as u64,
                expected: format!("{:032x} for section {:?}", section.checksum, section.name),
                found: format!("{found:032x}"),
            });
        }
        check_zeros("padding of a section", padding, end)
    }

    /// Checks a whole file: header page and every section.
    pub fn parse_all(file: &[u8]) -> Result<Self, FormatError> {
        let layout = Self::parse(file, file.len() as u64)?;
        for section in &layout.sections {
            Self::check_section(file, section)?;
        }
        Ok(layout)
    }
}

/// Where row `index` of the table starts.
fn table_offset(index: usize) -> usize {
    // At most 64 + 64 * 48: cannot overflow.
    size_of::<Header>() + index * size_of::<Row>()
}

fn check_header_checksum(page: &[u8]) -> Result<(), FormatError> {
    let missing = || FormatError::new("header checksum", CHECKSUM_OFFSET, "16 bytes", page.len());
    let (covered, stored) = page.split_at_checked(CHECKSUM_OFFSET).ok_or_else(missing)?;
    let stored = U128::ref_from_bytes(stored).map_err(|_| missing())?.get();
    let found = checksum(covered);
    if stored == found {
        Ok(())
    } else {
        Err(FormatError::new(
            "header checksum",
            CHECKSUM_OFFSET,
            format!("{found:032x}"),
            format!("{stored:032x}"),
        ))
    }
}

fn parse_rows(rows: &[Row], file_bytes: u64) -> Result<Vec<SectionRow>, FormatError> {
    let mut sections: Vec<SectionRow> = Vec::with_capacity(rows.len());
    let mut next_offset = PAGE_BYTES as u64;
    for (index, row) in rows.iter().enumerate() {
        let at = table_offset(index);
        let name = parse_name(row, at)?;
        if sections.iter().any(|section| section.name == name) {
            return Err(FormatError::new(
                "section name",
                at,
                "a name of its own",
                format!("{name:?} twice"),
            ));
        }
        if row.offset.get() != next_offset {
            return Err(FormatError::new(
                "section offset",
                at + 16,
                next_offset,
                row.offset,
            ));
        }
        let end = next_offset
            .checked_add(row.length.get())
            .filter(|end| *end <= file_bytes)
            .ok_or_else(|| {
                let most = file_bytes.saturating_sub(next_offset);
                FormatError::new(
                    "section length",
                    at + 24,
                    format!("at most {most}"),
                    row.length,
                )
            })?;
        let range = (usize::try_from(next_offset), usize::try_from(end));
        let (Ok(start), Ok(stop)) = range else {
            return Err(FormatError::new(
                "section length",
                at + 24,
                "an address of this machine",
                end,
            ));
        };
        next_offset = whole_pages(end).ok_or_else(|| {
            FormatError::new("section length", at + 24, "a length of a file", row.length)
        })?;
        sections.push(SectionRow {
            name,
            range: start..stop,
            checksum: row.checksum.get(),
            table_offset: at + 32,
        });
    }
    if next_offset != file_bytes {
        return Err(FormatError::new(
            "end of the last section",
            24,
            next_offset,
            file_bytes,
        ));
    }
    Ok(sections)
}

fn parse_name(row: &Row, at: usize) -> Result<String, FormatError> {
    let invalid = || {
        FormatError::new(
            "section name",
            at,
            "printable ASCII, then zeros",
            hex(&row.name),
        )
    };
    let length = row
        .name
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(row.name.len());
    let (name, padding) = row.name.split_at_checked(length).ok_or_else(invalid)?;
    if !is_section_name(name) || padding.iter().any(|byte| *byte != 0) {
        return Err(invalid());
    }
    str::from_utf8(name)
        .map(str::to_owned)
        .map_err(|_| invalid())
}

fn check_zeros(what: &'static str, padding: &[u8], start: usize) -> Result<(), FormatError> {
    match padding.iter().position(|byte| *byte != 0) {
        None => Ok(()),
        Some(index) => {
            let found = padding.get(index).copied().unwrap_or_default();
            Err(FormatError::new(
                what,
                start.saturating_add(index),
                "00",
                format!("{found:02x}"),
            ))
        }
    }
}
