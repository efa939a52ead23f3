//! What holds for any bytes, one function per fuzz target.
//!
//! The fuzz targets call these with what libFuzzer makes up, and `rust/core/tests/fuzz_corpus.rs`
//! with the committed corpora and mutations of them, under any toolchain.

// Each target uses one of them.
#![allow(dead_code)]

use vllm_neuron_core::entry::{EntryLayout, layout::PAGE_BYTES};
use vllm_neuron_core::key::decode::parse_graph;
use vllm_neuron_core::neff::{Neff, ParseOptions};

/// A whole entry file: refused, or every section lies inside.
pub fn entry(data: &[u8]) {
    if let Ok(layout) = EntryLayout::parse_all(data) {
        assert_eq!(layout.total_bytes, data.len() as u64);
        for section in &layout.sections {
            assert!(data.get(section.range.clone()).is_some());
        }
    }
}

/// A header page whose checksum is made right, so that the rules behind it are reached.
pub fn header(data: &[u8]) {
    let mut page = data.to_vec();
    page.resize(PAGE_BYTES, 0);
    let checksum = vllm_neuron_core::digest::checksum(&page[..PAGE_BYTES - 16]);
    page[PAGE_BYTES - 16..].copy_from_slice(&checksum.to_le_bytes());
    let claimed = u64::from_le_bytes(page[24..32].try_into().unwrap_or_default());
    if let Ok(layout) = EntryLayout::parse(&page, claimed) {
        let mut end = PAGE_BYTES;
        for section in &layout.sections {
            assert!(section.range.start >= end && section.range.end >= section.range.start);
            end = section.range.end;
        }
        assert!(end as u64 <= claimed);
    }
}

/// A whole NEFF: refused, or each member can be read.
pub fn neff(data: &[u8]) {
    let options = ParseOptions {
        verify_hash: false,
        ..ParseOptions::default()
    };
    if let Ok(neff) = Neff::parse(data, &options) {
        for member in neff.members().iter().take(64) {
            let content = neff
                .member(&member.name)
                .map(|content| content.len() as u64);
            assert_eq!(content.ok(), Some(member.size));
        }
    }
}

/// The payload of a NEFF behind a header that fits.
pub fn archive(data: &[u8]) {
    const SOUND: &[u8] = include_bytes!("../../../tests/golden/neff/decode-8-plain.neff");
    let mut file = SOUND[..1024].to_vec();
    file[16..24].copy_from_slice(&(data.len() as u64).to_le_bytes());
    file.extend_from_slice(data);
    neff(&file);
}

/// Graph bytes: refused, or exactly what writing the graph gives.
pub fn graph(data: &[u8]) {
    if let Ok(graph) = parse_graph(data) {
        assert_eq!(graph.to_bytes(), data);
    }
}
