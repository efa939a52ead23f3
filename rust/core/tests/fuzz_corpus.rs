//! The fuzz targets' checks over their committed corpora and mutations of them, without libFuzzer.
//!
//! `PROPTEST_CASES` says how many mutations each target gets, 10,000 unless it is set.

// The helpers of tests may unwrap as the tests do.
#![allow(clippy::unwrap_used)]

#[path = "../../fuzz/src/checks.rs"]
// Public for the fuzz targets, which are crates of their own.
#[allow(unreachable_pub)]
mod checks;

use std::path::Path;

use proptest::prelude::*;

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../fuzz/corpus")
        .join(target);
    let files = std::fs::read_dir(folder).unwrap();
    let contents: Vec<_> = files
        .map(|file| std::fs::read(file.unwrap().path()).unwrap())
        .collect();
    assert!(!contents.is_empty(), "{target} has no corpus");
    contents
}

#[derive(Debug, Clone)]
enum Mutation {
    Flip(usize, u8),
    Truncate(usize),
    Overwrite(usize, Vec<u8>),
    Insert(usize, Vec<u8>),
    Duplicate(usize, usize),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let bytes = || prop::collection::vec(any::<u8>(), 1..12);
    prop_oneof![
        (any::<usize>(), 0_u8..8).prop_map(|(at, bit)| Mutation::Flip(at, bit)),
        any::<usize>().prop_map(Mutation::Truncate),
        (any::<usize>(), bytes()).prop_map(|(at, bytes)| Mutation::Overwrite(at, bytes)),
        (any::<usize>(), bytes()).prop_map(|(at, bytes)| Mutation::Insert(at, bytes)),
        (any::<usize>(), 1_usize..600).prop_map(|(at, length)| Mutation::Duplicate(at, length)),
    ]
}

fn apply(data: &mut Vec<u8>, mutation: &Mutation) {
    let place = |at: usize, data: &[u8]| at % (data.len() + 1);
    match mutation {
        Mutation::Flip(at, bit) if !data.is_empty() => {
            let at = at % data.len();
            data[at] ^= 1 << bit;
        }
        Mutation::Flip(..) => {}
        Mutation::Truncate(at) => data.truncate(place(*at, data)),
        Mutation::Overwrite(at, bytes) => {
            let at = place(*at, data);
            let end = (at + bytes.len()).min(data.len());
            data.splice(at..end, bytes.iter().copied());
        }
        Mutation::Insert(at, bytes) => {
            let at = place(*at, data);
            data.splice(at..at, bytes.iter().copied());
        }
        Mutation::Duplicate(at, length) => {
            let at = place(*at, data);
            let piece = data[at..(at + length).min(data.len())].to_vec();
            data.splice(at..at, piece);
        }
    }
}

fn run(target: &str, check: fn(&[u8])) {
    let corpus = corpus(target);
    for data in &corpus {
        check(data);
    }
    let mutations = prop::collection::vec(mutation(), 1..4);
    let cases = std::env::var("PROPTEST_CASES").map_or(10_000, |cases| cases.parse().unwrap());
    proptest!(ProptestConfig::with_cases(cases), |(from in any::<prop::sample::Index>(), mutations in mutations)| {
        let mut data = from.get(&corpus).clone();
        for mutation in &mutations {
            apply(&mut data, mutation);
        }
        check(&data);
    });
}

#[test]
fn entries() {
    run("entry", checks::entry);
}

#[test]
fn headers() {
    run("header", checks::header);
}

#[test]
fn neffs() {
    run("neff", checks::neff);
}

#[test]
fn archives() {
    run("archive", checks::archive);
}

#[test]
fn graphs() {
    run("graph", checks::graph);
}
