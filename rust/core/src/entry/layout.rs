//! The bytes of the header page: field order, sizes and constants of `docs/entry-format.md`.

use zerocopy::little_endian::{U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of every entry.
pub const MAGIC: [u8; 8] = *b"\x8dVNE\r\n\x1a\n";
/// The only format version so far.
pub const VERSION: u32 = 1;
/// Header size and alignment of sections, in bytes. Fixed by the format, not by the machine.
pub const PAGE_BYTES: usize = 4096;
/// Most sections that an entry can have.
pub const MAX_SECTIONS: usize = 64;
/// Most bytes that a section's name can have.
pub const NAME_BYTES: usize = 16;
/// Where the header checksum starts.
pub const CHECKSUM_OFFSET: usize = PAGE_BYTES - size_of::<U128>();

/// The fixed fields at the start of the file.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: U32,
    /// Code of a [`Kind`](super::Kind).
    pub kind: U32,
    /// Zero.
    pub flags: U32,
    /// Rows in use of the section table.
    pub section_count: U32,
    /// Length of the file.
    pub total_bytes: U64,
    /// The key that is the file's name.
    pub key: [u8; 32],
}

/// One row of the section table.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Row {
    /// ASCII, padded with zeros.
    pub name: [u8; NAME_BYTES],
    /// Where the section starts.
    pub offset: U64,
    /// Its length without padding.
    pub length: U64,
    /// XXH3-128 of its bytes without padding.
    pub checksum: U128,
}

const _: () = assert!(size_of::<Header>() == 64 && size_of::<Row>() == 48);
const _: () = assert!(size_of::<Header>() + MAX_SECTIONS * size_of::<Row>() <= CHECKSUM_OFFSET);

/// `length` rounded up to a whole number of pages; None when that is no `u64`.
pub fn whole_pages(length: u64) -> Option<u64> {
    length.checked_next_multiple_of(PAGE_BYTES as u64)
}

/// Whether `name` can be the name of a section.
pub fn is_section_name(name: &[u8]) -> bool {
    (1..=NAME_BYTES).contains(&name.len()) && name.iter().all(u8::is_ascii_graphic)
}
