//! Canonical graphs: writing, reading and hashing their bytes. The walk over Python objects is
//! measured by `benches/compare`.

#![allow(missing_docs)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use vllm_neuron_core::digest::Digest;
use vllm_neuron_core::key::decode::parse_graph;
use vllm_neuron_core::key::graph::{Argument, Callable, CanonicalGraph, Node, Operation, Value};

fn chain(count: u32) -> CanonicalGraph<'static> {
    let call = |number: u32| Operation::CallFunction {
        target: Callable::Operator {
            name: "aten::add",
            overload: "Tensor",
        },
        arguments: vec![Argument::Node(number - 1), Argument::Node(0)],
        keywords: vec![("alpha", Argument::Int(i64::from(number)))],
    };
    let operation = |number: u32| match number {
        0 => Operation::Placeholder(Some(Value::Scalar(Argument::None))),
        number if number + 1 == count => Operation::Output(Argument::Node(number - 1)),
        number => call(number),
    };
    let node = |number| Node {
        offset: 0,
        operation: operation(number),
    };
    CanonicalGraph {
        nodes: (0..count).map(node).collect(),
    }
}

fn key(c: &mut Criterion) {
    for count in [100, 10_000, 100_000] {
        let graph = chain(count);
        let bytes = graph.to_bytes();
        let mut group = c.benchmark_group("key");
        group.throughput(Throughput::Elements(u64::from(count)));
        group.sample_size(20);
        group.bench_function(BenchmarkId::new("write", count), |b| {
            b.iter(|| graph.to_bytes());
        });
        group.bench_function(BenchmarkId::new("decode", count), |b| {
            b.iter(|| parse_graph(&bytes));
        });
        group.bench_function(BenchmarkId::new("digest", count), |b| {
            b.iter(|| Digest::of(&bytes));
        });
        group.finish();
    }
}

criterion_group!(benches, key);
criterion_main!(benches);
