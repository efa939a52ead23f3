//! Records of a tar stream: ustar header blocks and PAX records, read strictly and written plainly.
//!
//! Source: POSIX.1-2017, `pax`, "ustar Interchange Format" and "pax Extended Header"; what real
//! NEFFs use of it is in docs/neff-format.md, "Payload".

use std::mem::size_of;

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a tar block; every record starts on a block boundary of the stream.
pub(super) const BLOCK_BYTES: usize = 512;

/// One ustar header block.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawBlock {
    name: [u8; 100],
    mode: [u8; 8],
    uid: [u8; 8],
    gid: [u8; 8],
    size: [u8; 12],
    mtime: [u8; 12],
    checksum: [u8; 8],
    typeflag: u8,
    linkname: [u8; 100],
    magic: [u8; 6],
    version: [u8; 2],
    uname: [u8; 32],
    gname: [u8; 32],
    devmajor: [u8; 8],
    devminor: [u8; 8],
    prefix: [u8; 155],
    pad: [u8; 12],
}

const _: () = assert!(size_of::<RawBlock>() == BLOCK_BYTES);

const CHECKSUM_OFFSET: u64 = 148;
const SIZE_OFFSET: u64 = 124;
const TYPEFLAG_OFFSET: u64 = 156;
const MAGIC_OFFSET: u64 = 257;

/// What a header block introduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// PAX records for the next member.
    Pax,
    /// PAX records for all following members.
    GlobalPax,
}

/// A checked header block.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) kind: BlockKind,
    /// Name with its prefix, not yet checked as a path.
    pub(super) name: Vec<u8>,
    pub(super) size: u64,
}

/// A rule of the tar format that is broken, relative to the record it is in.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fault {
    /// Bytes from the start of the record.
    pub(super) offset: u64,
    pub(super) expected: String,
    pub(super) found: String,
}

impl Fault {
    fn new(offset: u64, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self {
            offset,
            expected: expected.into(),
            found: found.into(),
        }
    }
}

/// Reads a header block that is not all zero.
pub(super) fn parse_block(bytes: &[u8; BLOCK_BYTES]) -> Result<Block, Fault> {
    let raw: &RawBlock = zerocopy::transmute_ref!(bytes);
    if &raw.magic != b"ustar\0" || &raw.version != b"00" {
        return Err(Fault::new(
            MAGIC_OFFSET,
            "a POSIX ustar header (\"ustar\\0\" \"00\")",
            format!("{:?} {:?}", lossy(&raw.magic), lossy(&raw.version)),
        ));
    }
    let stored = octal(&raw.checksum).ok_or_else(|| {
        Fault::new(
            CHECKSUM_OFFSET,
            "an octal header checksum",
            lossy(&raw.checksum),
        )
    })?;
    let computed = checksum(bytes, raw.checksum);
    if stored != computed {
        return Err(Fault::new(
            CHECKSUM_OFFSET,
            format!("header checksum {computed}"),
            stored.to_string(),
        ));
    }
    let size = octal(&raw.size)
        .ok_or_else(|| Fault::new(SIZE_OFFSET, "an octal size", lossy(&raw.size)))?;
    // Nothing depends on these, but other readers refuse a block in which they are not numbers.
    let unused: [(u64, &[u8]); 6] = [
        (100, &raw.mode),
        (108, &raw.uid),
        (116, &raw.gid),
        (136, &raw.mtime),
        (329, &raw.devmajor),
        (337, &raw.devminor),
    ];
    for (offset, field) in unused {
        let is_empty = field.iter().all(|&byte| byte == 0 || byte == b' ');
        if !is_empty && octal(field).is_none() {
            return Err(Fault::new(
                offset,
                "an octal field or an empty one",
                lossy(field),
            ));
        }
    }
    let kind = match raw.typeflag {
        b'0' | 0 => BlockKind::File,
        b'5' => BlockKind::Directory,
        b'x' => BlockKind::Pax,
        b'g' => BlockKind::GlobalPax,
        other => {
            return Err(Fault::new(
                TYPEFLAG_OFFSET,
                "a regular file, a directory or PAX records",
                format!("{} (type {:?})", kind_name(other), char::from(other)),
            ));
        }
    };
    let (prefix, name) = (until_nul(&raw.prefix), until_nul(&raw.name));
    let name = if prefix.is_empty() {
        name.to_vec()
    } else {
        [prefix, b"/", name].concat()
    };
    Ok(Block { kind, name, size })
}

fn kind_name(typeflag: u8) -> &'static str {
    match typeflag {
        b'1' => "a hard link",
        b'2' => "a symbolic link",
        b'3' => "a character device",
        b'4' => "a block device",
        b'6' => "a FIFO",
        b'L' | b'K' => "a GNU long name",
        b'S' => "a sparse file",
        _ => "an unknown kind of member",
    }
}

/// Sum of all bytes of the block, the checksum field counted as spaces.
fn checksum(block: &[u8; BLOCK_BYTES], field: [u8; 8]) -> u64 {
    let sum = |bytes: &[u8]| bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>();
    let spaces = 8 * u64::from(b' ');
    sum(block).wrapping_sub(sum(&field)).wrapping_add(spaces)
}

/// An octal field: optional leading spaces, at least one digit, then NULs and spaces only.
fn octal(field: &[u8]) -> Option<u64> {
    let digits = field.trim_ascii_start();
    let end = digits
        .iter()
        .position(|byte| !byte.is_ascii_digit())
        .unwrap_or(digits.len());
    let (digits, terminator) = digits.split_at_checked(end)?;
    if digits.is_empty() || !terminator.iter().all(|&byte| byte == 0 || byte == b' ') {
        return None;
    }
    digits.iter().try_fold(0_u64, |value, &digit| {
        let digit = digit.checked_sub(b'0').filter(|digit| *digit < 8)?;
        value.checked_mul(8)?.checked_add(u64::from(digit))
    })
}

fn until_nul(field: &[u8]) -> &[u8] {
    field.split(|&byte| byte == 0).next().unwrap_or_default()
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What PAX records say that matters to a reader; times, owners and comments are skipped.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PaxRecords {
    pub(super) path: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
}

/// Reads the records `LENGTH KEY=VALUE\n` that fill `bytes`.
pub(super) fn parse_pax(bytes: &[u8]) -> Result<PaxRecords, Fault> {
    let mut records = PaxRecords::default();
    let mut rest = bytes;
    while !rest.is_empty() {
        let offset = (bytes.len() as u64).saturating_sub(rest.len() as u64);
        let fault = |expected: &str, found: &[u8]| {
            Fault::new(
                offset,
                expected,
                format!("{:?}", lossy(found.get(..40).unwrap_or(found))),
            )
        };
        let Some((record, tail)) = split_record(rest) else {
            return Err(fault(
                "a PAX record \"LENGTH KEY=VALUE\\n\" of the length it says",
                rest,
            ));
        };
        let Some(equals) = record.iter().position(|&byte| byte == b'=') else {
            return Err(fault("a PAX record with a \"=\"", record));
        };
        let (key, value) = record.split_at_checked(equals).unwrap_or_default();
        let value = value.get(1..).unwrap_or_default();
        match key {
            b"path" => records.path = Some(value.to_vec()),
            b"size" => {
                let size = str::from_utf8(value)
                    .ok()
                    .and_then(|text| text.parse().ok());
                records.size = Some(size.ok_or_else(|| fault("a decimal PAX size", value))?);
            }
            b"linkpath" => return Err(fault("no PAX link target", record)),
            key if key.starts_with(b"GNU.sparse.") => {
                return Err(fault("no PAX sparse file", record));
            }
            _ => {}
        }
        rest = tail;
    }
    Ok(records)
}

/// Splits `LENGTH KEY=VALUE\n` off `bytes`: `KEY=VALUE`, and what follows.
fn split_record(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = bytes.iter().take(20).position(|&byte| byte == b' ')?;
    let length = bytes.get(..space)?;
    if !length.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let length: usize = str::from_utf8(length).ok()?.parse().ok()?;
    let (record, tail) = bytes.split_at_checked(length)?;
    let body = record.get(space.checked_add(1)?..)?.strip_suffix(b"\n")?;
    Some((body, tail))
}

/// Appends a regular file to a tar stream: mode 0644, owner 0/0, mtime 0, fields ended by NUL.
///
/// Returns `None`, with `tar` unchanged, when name or size do not fit a ustar header.
pub(super) fn append_file(tar: &mut Vec<u8>, name: &str, content: &[u8]) -> Option<()> {
    let mut raw = RawBlock::new_zeroed();
    let (prefix, name) = split_name(name.as_bytes())?;
    raw.name.get_mut(..name.len())?.copy_from_slice(name);
    raw.prefix.get_mut(..prefix.len())?.copy_from_slice(prefix);
    write_octal(&mut raw.mode, 0o644)?;
    write_octal(&mut raw.uid, 0)?;
    write_octal(&mut raw.gid, 0)?;
    write_octal(&mut raw.size, content.len() as u64)?;
    write_octal(&mut raw.mtime, 0)?;
    write_octal(&mut raw.devmajor, 0)?;
    write_octal(&mut raw.devminor, 0)?;
    raw.typeflag = b'0';
    raw.magic = *b"ustar\0";
    raw.version = *b"00";
    raw.checksum = [b' '; 8];
    let sum = raw.as_bytes().iter().map(|&byte| u64::from(byte)).sum();
    write_octal(raw.checksum.first_chunk_mut::<7>()?, sum)?;
    tar.extend_from_slice(raw.as_bytes());
    tar.extend_from_slice(content);
    pad_to_block(tar);
    Some(())
}

/// Ends a tar stream: two blocks of zeros.
pub(super) fn append_end(tar: &mut Vec<u8>) {
    tar.resize(tar.len().saturating_add(2 * BLOCK_BYTES), 0);
}

fn pad_to_block(tar: &mut Vec<u8>) {
    tar.resize(tar.len().next_multiple_of(BLOCK_BYTES), 0);
}

/// Splits a path at a slash so that it fits prefix (155 bytes) and name (100 bytes).
fn split_name(path: &[u8]) -> Option<(&[u8], &[u8])> {
    if path.len() <= 100 {
        return Some((&[], path));
    }
    let slashes = path.iter().enumerate().filter(|(_, byte)| **byte == b'/');
    slashes.map(|(index, _)| index).find_map(|slash| {
        let (prefix, name) = path.split_at_checked(slash)?;
        let name = name.get(1..)?;
        (prefix.len() <= 155 && !name.is_empty() && name.len() <= 100).then_some((prefix, name))
    })
}

/// Fills `field` with octal digits and a final NUL.
fn write_octal(field: &mut [u8], value: u64) -> Option<()> {
    let (last, digits) = field.split_last_mut()?;
    let text = format!("{value:0width$o}", width = digits.len());
    *last = 0;
    (text.len() == digits.len()).then(|| digits.copy_from_slice(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn octal_takes_both_terminators_and_nothing_else() {
        for field in [
            &b"0000644\0"[..],
            b"000644 \0",
            b"644\0\0\0\0\0",
            b"  644 \0 ",
            b"644",
        ] {
            assert_eq!(octal(field), Some(0o644), "{field:?}");
        }
        for field in [
            &b""[..],
            b"\0\0",
            b"    ",
            b"648\0",
            b"64a\0",
            b"-644",
            b"644\x00644",
            b"\x80\x36",
        ] {
            assert_eq!(octal(field), None, "{field:?}");
        }
        assert_eq!(octal(b"1777777777777777777777"), Some(u64::MAX));
        assert_eq!(octal(b"2000000000000000000000"), None);
    }

    #[test]
    fn written_block_is_read_back() {
        let mut tar = Vec::new();
        append_file(&mut tar, "a/b", b"12345").unwrap();
        assert_eq!(tar.len(), 2 * BLOCK_BYTES);
        let block = parse_block(tar.first_chunk().unwrap()).unwrap();
        assert_eq!(
            block,
            Block {
                kind: BlockKind::File,
                name: b"a/b".to_vec(),
                size: 5
            }
        );
    }

    #[test]
    fn long_path_is_split_at_a_slash() {
        let path = [vec![b'p'; 155], vec![b'/'], vec![b'n'; 100]].concat();
        assert_eq!(
            split_name(&path),
            Some((&[b'p'; 155][..], &[b'n'; 100][..]))
        );
        assert_eq!(split_name(&[b'n'; 101]), None);
        assert_eq!(
            split_name(&[&[b'p'; 156][..], b"/", &[b'n'; 100]].concat()),
            None
        );
        assert_eq!(split_name(&[&[b'p'; 100][..], b"/"].concat()), None);
        let mut tar = vec![1, 2];
        assert_eq!(append_file(&mut tar, &"n".repeat(101), b""), None);
        assert_eq!(tar, [1, 2]);
    }

    #[test]
    fn pax_records_count_themselves() {
        assert_eq!(
            split_record(b"6 a=b\nrest"),
            Some((&b"a=b"[..], &b"rest"[..]))
        );
        assert_eq!(
            split_record(b"7 a=\n\n\nrest"),
            Some((&b"a=\n\n"[..], &b"rest"[..]))
        );
        for broken in [
            &b"5 a=b\n"[..],
            b"7 a=b\n",
            b"6a=b\n\n",
            b" a=b\n",
            b"-6 a=b\n",
            b"1 \n",
        ] {
            assert_eq!(split_record(broken), None, "{broken:?}");
        }
    }
}
