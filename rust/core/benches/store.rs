//! Publish, hit and miss by size of the entry and by number of entries.
//!
//! A default run stays short; `VLLM_NEURON_BENCH_LARGE=1` adds 512 MiB and 1,000,000 entries.

// Benches may unwrap as tests do.
#![allow(clippy::unwrap_used, missing_docs)]

use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use vllm_neuron_core::digest::Digest;
use vllm_neuron_core::entry::Kind;
use vllm_neuron_core::store::{EvictionLimits, Lookup, Store, Verify};

fn is_large() -> bool {
    std::env::var_os("VLLM_NEURON_BENCH_LARGE").is_some()
}

fn sizes() -> Vec<usize> {
    let mut sizes = vec![4 << 10, 1 << 20, 64 << 20];
    if is_large() {
        sizes.push(512 << 20);
    }
    sizes
}

fn key(number: u64) -> Digest {
    Digest::of(&number.to_le_bytes())
}

fn by_size(c: &mut Criterion) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(&folder.path().join("store")).unwrap();
    for size in sizes() {
        let content = vec![7; size];
        let mut group = c.benchmark_group("store");
        group.throughput(Throughput::Bytes(size as u64));
        group
            .sample_size(10)
            .measurement_time(Duration::from_secs(2));
        let published = key(size as u64);
        store
            .put(Kind::Neff, &published, &[("neff", &content)])
            .unwrap();
        for (name, verify) in [
            ("hit, mapped", Verify::Sections(&[])),
            ("hit, checked", Verify::All),
        ] {
            group.bench_function(BenchmarkId::new(name, size), |b| {
                b.iter(|| {
                    let found = store.get(Kind::Neff, &published, verify);
                    assert!(matches!(found, Lookup::Hit(_)));
                });
            });
        }
        let mut number = 1 << 40;
        group.bench_function(BenchmarkId::new("publish", size), |b| {
            b.iter(|| {
                number += 1;
                store
                    .put(Kind::Neff, &key(number), &[("neff", &content)])
                    .unwrap();
                store.remove(Kind::Neff, &key(number)).unwrap();
            });
        });
        group.finish();
    }
}

/// Adds empty files in the places of entries: what grows with entries is the directory.
fn fill(root: &Path, count: u64) {
    for prefix in 0..256 {
        let path = root.join(format!("v1/{prefix:02x}"));
        std::fs::DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(path)
            .unwrap();
    }
    for number in 0..count {
        let name = key(number).to_string();
        let path = root.join(format!("v1/{}/{name}", &name[..2]));
        let mut options = std::fs::OpenOptions::new();
        options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o400)
            .open(path)
            .unwrap();
    }
}

fn by_count(c: &mut Criterion) {
    let mut counts = vec![1, 1_000, 50_000];
    if is_large() {
        counts.push(1_000_000);
    }
    for count in counts {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(&folder.path().join("store")).unwrap();
        let published = key(1 << 41);
        store
            .put(Kind::Neff, &published, &[("neff", &[7; 4096])])
            .unwrap();
        fill(store.root(), count - 1);
        let mut group = c.benchmark_group("entries");
        group
            .sample_size(10)
            .measurement_time(Duration::from_secs(1));
        group.bench_function(BenchmarkId::new("hit", count), |b| {
            b.iter(|| store.get(Kind::Neff, &published, Verify::All));
        });
        let absent = key(1 << 42);
        group.bench_function(BenchmarkId::new("miss", count), |b| {
            b.iter(|| store.get(Kind::Neff, &absent, Verify::All));
        });
        let limits = EvictionLimits {
            max_size_bytes: Some(1 << 40),
            max_age: None,
            min_age: Duration::ZERO,
            is_dry_run: true,
        };
        group.throughput(Throughput::Elements(count));
        group.bench_function(BenchmarkId::new("eviction pass", count), |b| {
            b.iter(|| store.evict(limits).unwrap());
        });
        group.finish();
    }
}

criterion_group!(benches, by_size, by_count);
criterion_main!(benches);
