//! Laws of the canonical graph's decoder: golden bytes come back as they were, and whatever the
//! bytes are, they are refused or have exactly the graph that is written back as these bytes.

// The helpers of tests may unwrap as the tests do.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;
use serde::Deserialize;
use vllm_neuron_core::key::decode::parse_graph;

#[derive(Deserialize)]
struct Golden {
    bytes: String,
}

fn golden() -> BTreeMap<String, Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/keys/graphs.json");
    let text = std::fs::read_to_string(path).unwrap();
    let named: BTreeMap<String, Golden> = serde_json::from_str(&text).unwrap();
    let decode = |hex: &str| {
        let digits = hex.as_bytes().chunks(2);
        digits
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    };
    named
        .into_iter()
        .map(|(name, golden)| (name, decode(&golden.bytes)))
        .collect()
}

/// The law; true if the bytes are a graph.
fn check(data: &[u8]) -> bool {
    match parse_graph(data) {
        Ok(graph) => {
            assert_eq!(graph.to_bytes(), data, "one graph, two forms");
            true
        }
        Err(error) => {
            assert!(error.offset <= data.len() as u64, "{error}");
            assert!(error.to_string().len() < 1000, "{error}");
            false
        }
    }
}

#[test]
fn golden_bytes_come_back_as_they_were() {
    let golden = golden();
    assert_eq!(golden.len(), 4);
    for (name, data) in golden {
        assert!(check(&data), "{name}");
    }
}

#[test]
fn every_truncation_is_refused() {
    for data in golden().values() {
        for length in 0..data.len() {
            assert!(!check(&data[..length]), "{length}");
        }
    }
}

#[test]
fn every_changed_bit_is_refused_or_is_another_graph() {
    for (name, data) in golden() {
        for bit in 0..data.len() * 8 {
            let mut changed = data.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            check(&changed);
            assert_ne!(
                parse_graph(&changed).ok(),
                parse_graph(&data).ok(),
                "{name}, bit {bit}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn any_bytes_are_refused_or_have_one_graph(nodes in prop::collection::vec(any::<u8>(), 0..300)) {
        let header = b"VNGRAPH\0\x01\0\0\0";
        check(&nodes);
        check(&[header.as_slice(), &nodes].concat());
    }

    #[test]
    fn mixed_golden_bytes_are_refused_or_have_one_graph(
        from in any::<prop::sample::Index>(),
        to in any::<prop::sample::Index>(),
        cut in any::<prop::sample::Index>(),
        length in 0_usize..64,
        place in any::<prop::sample::Index>(),
    ) {
        let golden: Vec<Vec<u8>> = golden().into_values().collect();
        let mut data = from.get(&golden).clone();
        let other = to.get(&golden);
        let start = cut.index(other.len());
        let piece = &other[start..(start + length).min(other.len())];
        let at = place.index(data.len());
        data.splice(at..at.saturating_add(length / 2).min(data.len()), piece.iter().copied());
        check(&data);
    }
}
