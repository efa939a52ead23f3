//! NEFF validation by size: with and without the payload's digest, plain and gzip.
//!
//! A default run stays short; `VLLM_NEURON_BENCH_LARGE=1` adds 512 MiB.

// Benches may unwrap as tests do.
#![allow(clippy::unwrap_used, missing_docs)]

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use vllm_neuron_core::neff::{Compression, Neff, ParseOptions, Tensor, WriteRequest, write};

fn example(size: usize, compression: Compression) -> Vec<u8> {
    // A fifth is noise, as real NEFFs inflate to five to ten times their size.
    let mut state = 7_u64;
    let content: Vec<u8> = (0..size)
        .map(|index| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            if index % 4096 < 820 {
                state.to_le_bytes()[7]
            } else {
                0
            }
        })
        .collect();
    let tensor = |name: &str| Tensor {
        name: name.to_owned(),
        dtype: "float32".to_owned(),
        shape: vec![8, 8],
    };
    let request = WriteRequest {
        name: "bench",
        target: "host",
        compiler_version: "1",
        inputs: &[tensor("x")],
        outputs: &[tensor("y")],
        members: &[("sg00/content.bin", &content)],
        compression,
    };
    write(&request).unwrap()
}

fn validate(c: &mut Criterion) {
    let mut sizes = vec![4 << 10, 1 << 20, 64 << 20];
    if std::env::var_os("VLLM_NEURON_BENCH_LARGE").is_some() {
        sizes.push(512 << 20);
    }
    for size in sizes {
        for (name, compression) in [("plain", Compression::None), ("gzip", Compression::Gzip)] {
            let file = example(size, compression);
            let mut group = c.benchmark_group(format!("neff, {name}"));
            group.throughput(Throughput::Bytes(file.len() as u64));
            group
                .sample_size(10)
                .measurement_time(Duration::from_secs(2));
            for (what, verify_hash) in [("index", false), ("index and hash", true)] {
                let options = ParseOptions {
                    verify_hash,
                    ..ParseOptions::default()
                };
                group.bench_function(BenchmarkId::new(what, size), |b| {
                    b.iter(|| Neff::parse(file.as_slice(), &options).unwrap());
                });
            }
            group.finish();
        }
    }
}

criterion_group!(benches, validate);
criterion_main!(benches);
