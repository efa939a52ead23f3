//! Lays out an entry: the header page, and where each section goes.

use std::collections::HashSet;

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64, U128};

use super::layout::{
    CHECKSUM_OFFSET, Header, MAGIC, MAX_SECTIONS, NAME_BYTES, PAGE_BYTES, Row, VERSION,
    is_section_name, whole_pages,
};
use super::{Kind, SectionError};
use crate::digest::{Digest, checksum};

/// An entry about to be written: its header page and its sections with their offsets.
///
/// What lies between the parts is zeros. The parts are not joined, so that a section of hundreds
/// of MiB is written from where it is.
#[derive(Debug)]
pub struct EntryWriter<'a> {
    page: Vec<u8>,
    sections: Vec<(u64, &'a [u8])>,
    total_bytes: u64,
}

impl<'a> EntryWriter<'a> {
    /// Lays out `sections` (name and content) in the given order.
    pub fn new(
        kind: Kind,
        key: &Digest,
        sections: &[(&str, &'a [u8])],
    ) -> Result<Self, SectionError> {
        if !(1..=MAX_SECTIONS).contains(&sections.len()) {
            return Err(SectionError::Count {
                found: sections.len(),
            });
        }
        let mut names = HashSet::new();
        let mut rows = Vec::with_capacity(sections.len());
        let mut placed = Vec::with_capacity(sections.len());
        let mut next_offset = PAGE_BYTES as u64;
        for (name, content) in sections {
            if !is_section_name(name.as_bytes()) {
                return Err(SectionError::Name {
                    name: (*name).to_owned(),
                });
            }
            if !names.insert(*name) {
                return Err(SectionError::Duplicate {
                    name: (*name).to_owned(),
                });
            }
            let mut padded_name = [0; NAME_BYTES];
            for (target, byte) in padded_name.iter_mut().zip(name.bytes()) {
                *target = byte;
            }
            let length = content.len() as u64;
            rows.push(Row {
                name: padded_name,
                offset: U64::new(next_offset),
                length: U64::new(length),
                checksum: U128::new(checksum(content)),
            });
            placed.push((next_offset, *content));
            next_offset = next_offset
                .checked_add(length)
                .and_then(whole_pages)
                .ok_or(SectionError::TooLong)?;
        }
        let header = Header {
            magic: MAGIC,
            version: U32::new(VERSION),
            kind: U32::new(kind.code()),
            flags: U32::ZERO,
            // At most MAX_SECTIONS.
            section_count: U32::new(u32::try_from(rows.len()).unwrap_or(u32::MAX)),
            total_bytes: U64::new(next_offset),
            key: *key.as_bytes(),
        };
        let mut page = Vec::with_capacity(PAGE_BYTES);
        page.extend_from_slice(header.as_bytes());
        page.extend_from_slice(rows.as_slice().as_bytes());
        page.resize(CHECKSUM_OFFSET, 0);
        let header_checksum = U128::new(checksum(&page));
        page.extend_from_slice(header_checksum.as_bytes());
        Ok(Self {
            page,
            sections: placed,
            total_bytes: next_offset,
        })
    }

    /// Length of the file.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// What is to be written, as (offset, bytes) in file order; everything between is zeros.
    pub fn parts(&self) -> impl Iterator<Item = (u64, &[u8])> {
        std::iter::once((0, self.page.as_slice())).chain(self.sections.iter().copied())
    }

    /// The whole file in memory.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut file = Vec::new();
        for (offset, bytes) in self.parts() {
            file.resize(usize::try_from(offset).unwrap_or(usize::MAX), 0);
            file.extend_from_slice(bytes);
        }
        file.resize(usize::try_from(self.total_bytes).unwrap_or(usize::MAX), 0);
        file
    }
}
