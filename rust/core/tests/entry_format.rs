//! Laws of the entry format: every damage is found, no bytes make the reader panic, golden files
//! stay readable.

// The helpers of tests may unwrap as the tests do.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use vllm_neuron_core::digest::{Digest, checksum};
use vllm_neuron_core::entry::{EntryLayout, EntryWriter, FormatError, Kind, SectionError, layout};

const PAGE: usize = layout::PAGE_BYTES;

fn key() -> Digest {
    Digest::of(b"key")
}

fn entry(sections: &[(&str, &[u8])]) -> Vec<u8> {
    EntryWriter::new(Kind::Neff, &key(), sections)
        .unwrap()
        .to_bytes()
}

/// Two pages: the header, and one section with padding behind it.
fn small_entry() -> Vec<u8> {
    entry(&[("record", br#"{"model": "tiny", "bucket": "decode 8"}"#)])
}

/// Changes header bytes and makes the header checksum right again.
fn forge(file: &[u8], offset: usize, bytes: &[u8]) -> FormatError {
    let mut file = file.to_vec();
    file[offset..offset + bytes.len()].copy_from_slice(bytes);
    let sum = checksum(&file[..layout::CHECKSUM_OFFSET]).to_le_bytes();
    file[layout::CHECKSUM_OFFSET..PAGE].copy_from_slice(&sum);
    EntryLayout::parse_all(&file).unwrap_err()
}

#[test]
fn what_was_written_is_read() {
    let large = vec![7; 3 * PAGE + 1];
    let sections: [(&str, &[u8]); 4] = [
        ("record", b"{}"),
        ("empty", b""),
        ("neff", &large),
        ("sixteen-letters!", &large[..PAGE]),
    ];
    let file = entry(&sections);
    let read = EntryLayout::parse_all(&file).unwrap();
    assert_eq!(
        (read.kind, read.key, read.total_bytes),
        (Kind::Neff, key(), file.len() as u64)
    );
    assert_eq!(read.sections.len(), sections.len());
    for ((name, content), section) in sections.iter().zip(&read.sections) {
        assert_eq!(
            (*name, *content),
            (section.name.as_str(), &file[section.range.clone()])
        );
        assert_eq!(section.range.start % PAGE, 0);
    }
}

#[test]
fn every_flipped_bit_is_found() {
    let file = small_entry();
    assert_eq!(file.len(), 2 * PAGE);
    for bit in 0..8 * file.len() {
        let mut damaged = file.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(EntryLayout::parse_all(&damaged).is_err(), "bit {bit}");
    }
}

#[test]
fn every_flipped_bit_of_the_header_of_a_large_entry_is_found() {
    let content = vec![7; 1 << 20];
    let file = entry(&[("record", b"{}"), ("neff", &content)]);
    let mut damaged = file.clone();
    for bit in 0..8 * PAGE {
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(EntryLayout::parse_all(&damaged).is_err(), "bit {bit}");
        damaged[bit / 8] = file[bit / 8];
    }
    assert!(EntryLayout::parse_all(&damaged).is_ok());
}

#[test]
fn every_truncation_and_extension_is_found() {
    let file = small_entry();
    for length in 0..file.len() {
        assert!(
            EntryLayout::parse_all(&file[..length]).is_err(),
            "length {length}"
        );
    }
    for extra in [1, PAGE, 2 * PAGE] {
        let mut longer = file.clone();
        longer.resize(file.len() + extra, 0);
        assert!(
            EntryLayout::parse_all(&longer).is_err(),
            "{extra} more bytes"
        );
    }
}

#[test]
fn swapped_and_repeated_pages_are_found() {
    let file = entry(&[("a", &[1; PAGE]), ("b", &[2; PAGE])]);
    let (header, first, second) = (&file[..PAGE], &file[PAGE..2 * PAGE], &file[2 * PAGE..]);
    for pages in [
        [header, second, first],
        [header, first, first],
        [first, second, header],
    ] {
        assert!(EntryLayout::parse_all(&pages.concat()).is_err());
    }
}

#[test]
fn forged_headers_are_refused_at_the_field() {
    let file = entry(&[("a", &[1; 10]), ("b", &[2; 10])]);
    let far = u64::MAX.to_le_bytes();
    let table = |row: usize, field: usize| 64 + 48 * row + field;
    let cases: [(usize, &[u8], &str, u64); 14] = [
        (0, b"PK\x03\x04", "magic", 0),
        (8, &[2], "format version", 8),
        (12, &[0], "kind", 12),
        (12, &[4], "kind", 12),
        (16, &[1], "flags", 16),
        (20, &[0], "section count", 20),
        (20, &[65], "section count", 20),
        (20, &[0xff; 4], "section count", 20),
        (24, &far, "total length", 24),
        (table(0, 0), b"b\0", "section name", 112),
        (table(0, 0), b"\0", "section name", 64),
        (table(0, 2), b"x", "section name", 64),
        (table(1, 16), &far, "section offset", 128),
        (table(1, 24), &far, "section length", 136),
    ];
    for (offset, bytes, what, at) in cases {
        let error = forge(&file, offset, bytes);
        assert_eq!((error.what, error.offset), (what, at), "{error}");
    }
    let error = forge(&file, table(2, 5), &[9]);
    assert_eq!((error.what, error.offset), ("padding of the header", 165));
    // One section fewer: the second one's page belongs to nothing.
    let error = forge(&file, 20, &[1]);
    assert_eq!(error.what, "padding of the header");
    // A section that leaves a page unused, and one that shares a page with the next.
    let error = forge(&file, table(1, 16), &(4 * PAGE as u64).to_le_bytes());
    assert_eq!(
        (error.what, &*error.expected, &*error.found),
        ("section offset", "8192", "16384")
    );
    let error = forge(&file, table(1, 16), &(PAGE as u64).to_le_bytes());
    assert_eq!(
        (error.what, &*error.expected, &*error.found),
        ("section offset", "8192", "4096")
    );
}

#[test]
fn messages_have_place_expected_and_found() {
    let mut file = small_entry();
    file[PAGE] ^= 1;
    let error = EntryLayout::parse_all(&file).unwrap_err();
    let (good, bad) = (
        checksum(&small_entry()[PAGE..PAGE + 39]),
        checksum(&file[PAGE..PAGE + 39]),
    );
    assert_eq!(
        error.to_string(),
        format!(
            "checksum of a section at offset 4096: expected {good:032x} for section \"record\", \
             found {bad:032x}"
        )
    );
    let error = EntryLayout::parse_all(&file[..100]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "length of the file at offset 0: expected at least 4096, found 100"
    );
}

#[test]
fn sections_that_cannot_be_stored_are_refused() {
    let refuse = |sections: &[(&str, &[u8])]| EntryWriter::new(Kind::Trace, &key(), sections).err();
    assert_eq!(refuse(&[]), Some(SectionError::Count { found: 0 }));
    let names: Vec<String> = (0..65).map(|index| index.to_string()).collect();
    let many: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &b""[..])).collect();
    assert_eq!(refuse(&many), Some(SectionError::Count { found: 65 }));
    assert_eq!(refuse(&many[..64]), None);
    for name in ["", "seventeen-letters", "a b", "a\0", "\u{e9}"] {
        let refused = Some(SectionError::Name {
            name: name.to_owned(),
        });
        assert_eq!(refuse(&[(name, b"")]), refused);
    }
    let twice = Some(SectionError::Duplicate {
        name: "a".to_owned(),
    });
    assert_eq!(refuse(&[("a", b"1"), ("b", b""), ("a", b"2")]), twice);
}

#[test]
fn golden_entries_are_read_and_written_byte_for_byte() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/entries");
    let mut seen = Vec::new();
    for kind in Kind::ALL {
        let path: PathBuf = folder.join(format!("v1-{kind}.entry"));
        let file = std::fs::read(&path).unwrap();
        let read = EntryLayout::parse_all(&file).unwrap();
        assert_eq!(
            (read.kind, read.key),
            (kind, Digest::of(kind.name().as_bytes()))
        );
        let sections: Vec<(&str, &[u8])> = read
            .sections
            .iter()
            .map(|section| (section.name.as_str(), &file[section.range.clone()]))
            .collect();
        seen.push(sections.len());
        assert_eq!(
            EntryWriter::new(kind, &read.key, &sections)
                .unwrap()
                .to_bytes(),
            file
        );
    }
    assert_eq!(seen, [2, 3, 4]);
}

proptest! {
    #[test]
    fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..9000)) {
        prop_assert!(EntryLayout::parse_all(&bytes).is_err());
    }

    #[test]
    fn no_forged_header_makes_the_reader_panic(
        offset in 0..300_usize,
        bytes in proptest::collection::vec(any::<u8>(), 1..32),
    ) {
        let mut file = entry(&[("a", &[1; 10]), ("b", &[2; 5000]), ("c", b"")]);
        let original = file.clone();
        file[offset..offset + bytes.len()].copy_from_slice(&bytes);
        let sum = checksum(&file[..layout::CHECKSUM_OFFSET]).to_le_bytes();
        file[layout::CHECKSUM_OFFSET..PAGE].copy_from_slice(&sum);
        // Kind, key and names can be forged consistently; the content cannot be mistaken.
        if let Ok(read) = EntryLayout::parse_all(&file) {
            let ranges = |layout: &EntryLayout| {
                layout.sections.iter().map(|section| section.range.clone()).collect::<Vec<_>>()
            };
            prop_assert_eq!(ranges(&read), ranges(&EntryLayout::parse_all(&original).unwrap()));
        }
    }

    #[test]
    fn any_sections_are_read_back(
        contents in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..6000), 1..6),
    ) {
        let names = ["a", "b", "c", "d", "e", "f"];
        let sections: Vec<(&str, &[u8])> =
            names.into_iter().zip(contents.iter().map(Vec::as_slice)).collect();
        let file = entry(&sections);
        let read = EntryLayout::parse_all(&file).unwrap();
        for ((name, content), section) in sections.iter().zip(&read.sections) {
            prop_assert_eq!((*name, *content), (section.name.as_str(), &file[section.range.clone()]));
        }
    }
}
