//! Attention by every kernel that this processor has, beside sums in float64.

#![allow(clippy::unwrap_used)]

mod numbers;
mod threads;

use numbers::numbers;
use threads::Threads;
use vllm_neuron_host::{AttentionOperands, AttentionShape, Bf16, Inline, Instructions, attention};

/// A call's operands, owned.
#[derive(Clone)]
struct Case {
    shape: AttentionShape,
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    blocks: Vec<i64>,
    visible: Vec<u8>,
    live: Vec<u8>,
    sinks: Option<Vec<f32>>,
    soft_cap: Option<f32>,
}

impl Case {
    /// Sequences of `lengths` tokens, of which the last `queries` ask; each in blocks of its own.
    fn new(shape: AttentionShape, lengths: &[usize], window: usize) -> Self {
        assert_eq!(lengths.len(), shape.sequences);
        let keys = shape.keys();
        let cached = shape.cache_blocks * shape.block_size * shape.kv_heads;
        let rows = shape.sequences * shape.kv_heads * shape.rows();
        let mut case = Self {
            shape,
            queries: numbers(rows * shape.head, 1),
            keys: numbers(cached * shape.head, 2),
            values: numbers(cached * shape.value_head, 3),
            blocks: (0..shape.sequences * shape.blocks)
                .map(|at| i64::try_from(shape.cache_blocks - 1 - at).unwrap())
                .collect(),
            visible: vec![0; shape.sequences * shape.queries * keys],
            live: vec![0; shape.sequences * keys],
            sinks: None,
            soft_cap: None,
        };
        for (sequence, &length) in lengths.iter().enumerate() {
            case.live[sequence * keys..][..length].fill(1);
            for query in 0..shape.queries {
                let end = (length + 1 + query).saturating_sub(shape.queries);
                let row = (sequence * shape.queries + query) * keys;
                case.visible[row..][end.saturating_sub(window)..end].fill(1);
            }
        }
        case
    }

    fn run(&self, with: Instructions) -> Vec<f32> {
        let mut y = vec![7.0; self.results()];
        attention(
            &Inline,
            with,
            self.shape,
            self.operands(&self.keys, &self.values),
            &mut y,
        );
        y
    }

    fn run_bf16(&self, with: Instructions) -> Vec<f32> {
        let round = |values: &[f32]| values.iter().copied().map(Bf16::round).collect::<Vec<_>>();
        let (keys, values) = (round(&self.keys), round(&self.values));
        let mut y = vec![Bf16(7); self.results()];
        attention(
            &Inline,
            with,
            self.shape,
            self.operands(&keys, &values),
            &mut y,
        );
        y.into_iter().map(Bf16::widen).collect()
    }

    fn results(&self) -> usize {
        self.shape.sequences * self.shape.kv_heads * self.shape.rows() * self.shape.value_head
    }

    fn operands<'a, W>(&'a self, keys: &'a [W], values: &'a [W]) -> AttentionOperands<'a, W> {
        AttentionOperands {
            queries: &self.queries,
            keys,
            values,
            blocks: &self.blocks,
            visible: &self.visible,
            live: &self.live,
            sinks: self.sinks.as_deref(),
            soft_cap: self.soft_cap,
        }
    }

    /// Where in the cache a key is, in rows of one head.
    fn cached(&self, sequence: usize, head: usize, key: usize) -> usize {
        let shape = &self.shape;
        let block = self.blocks[sequence * shape.blocks + key / shape.block_size];
        let block = usize::try_from(block.max(0))
            .unwrap()
            .min(shape.cache_blocks - 1);
        (block * shape.block_size + key % shape.block_size) * shape.kv_heads + head
    }

    fn expected(&self) -> Vec<f64> {
        let shape = &self.shape;
        let (keys, mut y) = (shape.keys(), Vec::new());
        for row in 0..shape.sequences * shape.kv_heads * shape.rows() {
            let (pair, of_pair) = (row / shape.rows(), row % shape.rows());
            let (sequence, head) = (pair / shape.kv_heads, pair % shape.kv_heads);
            let (group, query) = (of_pair / shape.queries, of_pair % shape.queries);
            let visible = &self.visible[(sequence * shape.queries + query) * keys..][..keys];
            let seen: Vec<usize> = (0..keys).filter(|&key| visible[key] != 0).collect();
            let mut scores: Vec<f64> = seen
                .iter()
                .map(|&key| {
                    let at = self.cached(sequence, head, key) * shape.head;
                    let score: f64 = (0..shape.head)
                        .map(|d| {
                            f64::from(self.queries[row * shape.head + d])
                                * f64::from(self.keys[at + d])
                        })
                        .sum();
                    self.soft_cap.map_or(score, |cap| {
                        (score / f64::from(cap)).tanh() * f64::from(cap)
                    })
                })
                .collect();
            if let Some(sinks) = &self.sinks {
                scores.push(f64::from(sinks[head * shape.group + group]));
            }
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let shares: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f64 = shares.iter().sum();
            for d in 0..shape.value_head {
                y.push(
                    seen.iter()
                        .zip(&shares)
                        .filter(|(key, _)| self.live[sequence * keys + **key] != 0)
                        .map(|(&key, share)| {
                            let at = self.cached(sequence, head, key) * shape.value_head + d;
                            share / sum * f64::from(self.values[at])
                        })
                        .sum(),
                );
            }
        }
        y
    }

    /// Compares every kernel with float64.
    fn check(&self) {
        let expected = self.expected();
        let rounded = |values: &[f32]| {
            values
                .iter()
                .map(|&v| Bf16::round(v).widen())
                .collect::<Vec<_>>()
        };
        let mut half = self.clone();
        (half.keys, half.values) = (rounded(&self.keys), rounded(&self.values));
        let half = half.expected();
        for with in Instructions::available() {
            for (found, expected, bound) in [
                (self.run(with), &expected, 1e-5),
                (self.run_bf16(with), &half, 1e-2),
            ] {
                for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
                    assert!(
                        (f64::from(*found) - expected).abs() <= bound,
                        "{with:?} {:?} at {at}: {found} for {expected}",
                        self.shape
                    );
                }
            }
        }
    }
}

fn shape(sequences: usize, queries: usize, kv_heads: usize, group: usize) -> AttentionShape {
    AttentionShape {
        sequences,
        queries,
        kv_heads,
        group,
        head: 64,
        value_head: 64,
        blocks: 3,
        block_size: 4,
        cache_blocks: 3 * sequences + 2,
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Lengths at and around the blocks of 4; a step's, a chunk's and more rows than a piece has.
#[test]
fn every_shape_by_every_kernel() {
    for (heads, group) in [(1, 1), (3, 3), (2, 7)] {
        for window in [1, 3, usize::MAX] {
            Case::new(shape(5, 1, heads, group), &[1, 3, 4, 5, 12], window).check();
            Case::new(shape(2, 4, heads, group), &[4, 9], window).check();
            Case::new(shape(1, 11, heads, group), &[12], window).check();
        }
    }
}

#[test]
fn heads_of_every_length() {
    for head in [1, 7, 8, 16, 33, 80, 100, 128] {
        for value_head in [1, 15, 16, 48, 65, 128] {
            let mut shape = shape(2, 3, 2, 3);
            (shape.head, shape.value_head) = (head, value_head);
            Case::new(shape, &[3, 10], 5).check();
        }
    }
}

#[test]
fn sinks_and_soft_cap() {
    let mut case = Case::new(shape(3, 2, 2, 3), &[2, 5, 12], 6);
    case.soft_cap = Some(0.5);
    case.check();
    case.sinks = Some(vec![-2.0, -1.0, 0.0, 1.0, 2.0, 30.0]);
    case.check();
    case.soft_cap = None;
    case.check();
}

/// A mask with holes, and a key that is seen whose value does not count.
#[test]
fn any_mask() {
    let mut case = Case::new(shape(2, 2, 2, 2), &[12, 9], usize::MAX);
    for (at, visible) in case.visible.iter_mut().enumerate() {
        *visible &= u8::from(at % 3 != 1 && at % 7 != 2);
    }
    case.live[5] = 0;
    case.live[11] = 0;
    case.check();
}

/// Neither a key that no query sees nor one that another query sees leaves a trace in a row.
#[test]
fn what_a_query_does_not_see_may_be_anything() {
    for garbage in [f32::NAN, f32::INFINITY, -1e38] {
        let clean = Case::new(shape(2, 4, 2, 3), &[6, 11], 4);
        let mut dirty = clean.clone();
        // The last key of the second sequence, which its last query alone sees, and all stale ones.
        for sequence in 0..2 {
            for key in [6, 11][sequence] - 1 + (1 - sequence)..12 {
                for head in 0..2 {
                    let at = dirty.cached(sequence, head, key) * 64;
                    dirty.keys[at..at + 64].fill(garbage);
                    dirty.values[at..at + 64].fill(garbage);
                }
            }
        }
        for with in Instructions::available() {
            let (expected, found) = (clean.run(with), dirty.run(with));
            for (row, (expected, found)) in expected.chunks(64).zip(found.chunks(64)).enumerate() {
                let (sequence, query) = (row / 24, row % 4);
                if (sequence, query) != (1, 3) {
                    assert_eq!(bits(expected), bits(found), "{with:?} row {row} {garbage}");
                }
            }
        }
    }
}

#[test]
fn what_is_seen_and_not_finite_shows_in_its_row() {
    for with in Instructions::available() {
        let mut case = Case::new(shape(1, 2, 1, 2), &[5], usize::MAX);
        let at = case.cached(0, 0, 4) * 64;
        case.values[at + 63] = f32::INFINITY;
        let y = case.run(with);
        assert!(y[63].is_finite() && y[127].is_infinite(), "{with:?}");
        case.keys[at] = f32::NAN;
        let y = case.run(with);
        for (row, y) in y.chunks(64).enumerate() {
            assert!(
                y.iter().all(|y| y.is_nan() == (row % 2 == 1)),
                "{with:?} row {row}"
            );
        }
    }
}

#[test]
fn a_row_that_sees_nothing() {
    for with in Instructions::available() {
        let mut case = Case::new(shape(2, 1, 1, 2), &[0, 3], usize::MAX);
        let y = case.run(with);
        assert!(y[..128].iter().all(|y| y.is_nan()), "{with:?}");
        assert!(y[128..].iter().all(|y| y.is_finite()), "{with:?}");
        case.sinks = Some(vec![0.5, f32::NEG_INFINITY]);
        let y = case.run_bf16(with);
        assert!(y[..64].iter().all(|&y| y == 0.0), "{with:?}");
        assert!(y[64..128].iter().all(|y| y.is_nan()), "{with:?}");
    }
}

/// As a gather of `StableHLO`, which takes the nearest block of the cache.
#[test]
fn blocks_that_are_not_in_the_cache() {
    let mut case = Case::new(shape(2, 1, 2, 3), &[12, 12], usize::MAX);
    case.blocks = vec![i64::MAX, -1, 0, i64::MIN, 8, 1 << 40];
    case.check();
}

#[test]
fn nothing_to_do() {
    for (sequences, blocks) in [(0, 3), (2, 0)] {
        let mut shape = shape(sequences, 1, 2, 2);
        (shape.blocks, shape.cache_blocks) = (blocks, 8);
        let case = Case::new(shape, &vec![0; sequences], 1);
        for with in Instructions::available() {
            assert!(case.run(with).iter().all(|y| y.is_nan()));
        }
    }
}

/// Threads change no bit, nor do other rows or other sequences.
#[test]
fn a_row_does_not_depend_on_what_is_beside_it() {
    let mut shape = shape(3, 9, 2, 4);
    (shape.blocks, shape.cache_blocks) = (20, 60);
    let case = Case::new(shape, &[9, 33, 80], usize::MAX);
    for with in Instructions::available() {
        let expected = case.run(with);
        let (pool, mut threaded) = (Threads::new(), vec![0.0; case.results()]);
        let operands = case.operands(&case.keys, &case.values);
        attention(&pool, with, shape, operands, &mut threaded);
        pool.join();
        assert_eq!(bits(&expected), bits(&threaded), "{with:?}");

        let mut alone = shape;
        (alone.sequences, alone.queries) = (1, 1);
        for sequence in 0..3 {
            for row in 0..72 {
                let (head, group, query) = (row / 36, row / 9 % 4, row % 9);
                let mut single = Case::new(alone, &[1], 1);
                single.keys.clone_from(&case.keys);
                single.values.clone_from(&case.values);
                single.blocks = case.blocks[sequence * 20..][..20].to_vec();
                single.live = case.live[sequence * 80..][..80].to_vec();
                single.visible = case.visible[(sequence * 9 + query) * 80..][..80].to_vec();
                let at = (head * 4 + group) * 64;
                let row = sequence * 72 + row;
                single.queries[at..at + 64]
                    .copy_from_slice(&case.queries[row * 64..(row + 1) * 64]);
                let found = &single.run(with)[at..at + 64];
                let expected = &expected[row * 64..(row + 1) * 64];
                assert_eq!(bits(expected), bits(found), "{with:?} row {row}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "blocks of")]
fn slices_that_are_not_of_the_shape_are_refused() {
    let mut case = Case::new(shape(2, 1, 1, 1), &[1, 1], 1);
    case.blocks.pop();
    case.run(Instructions::Plain);
}
