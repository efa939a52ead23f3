//! Attention of queries over the blocks of a paged KV cache, read where they lie.

use std::ops::Range;

use crate::kernel::{Bf16, Plain, Stored};
use crate::parallel::{Inline, Pool, in_pieces};
use crate::product::Instructions;
#[cfg(target_arch = "x86_64")]
use crate::x86::{Avx2, Avx512, Vectors};

/// Rows of queries in one piece of the work.
pub(crate) const PIECE_ROWS: usize = 24;
/// Pairs of a query and a key that are not worth another thread.
const FEW_PAIRS: usize = 4096;

/// The sizes of one call.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Sequences.
    pub sequences: usize,
    /// Queries of each sequence.
    pub queries: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Query heads that share a head of keys and values.
    pub group: usize,
    /// Length of a query and of a key.
    pub head: usize,
    /// Length of a value.
    pub value_head: usize,
    /// Blocks of each sequence.
    pub blocks: usize,
    /// Keys in a block.
    pub block_size: usize,
    /// Blocks in the cache.
    pub cache_blocks: usize,
}

impl AttentionShape {
    /// Keys of a sequence, whether seen or not.
    pub fn keys(&self) -> usize {
        self.blocks * self.block_size
    }

    /// Rows of queries that share a head of keys and values: `group` times `queries`.
    pub fn rows(&self) -> usize {
        self.group * self.queries
    }
}

/// What a call reads; all row-major.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOperands<'a, W> {
    /// (sequences, `kv_heads`, group, queries, head), scaled.
    pub queries: &'a [f32],
    /// (`cache_blocks`, `block_size`, `kv_heads`, head).
    pub keys: &'a [W],
    /// (`cache_blocks`, `block_size`, `kv_heads`, `value_head`).
    pub values: &'a [W],
    /// (sequences, blocks); one that is not in the cache stands for the nearest that is.
    pub blocks: &'a [i64],
    /// (sequences, queries, keys), not 0 where a query sees a key.
    pub visible: &'a [u8],
    /// (sequences, keys), 0 where a key's value counts as 0.
    pub live: &'a [u8],
    /// (`kv_heads`, group), one more score of each row, without a value.
    pub sinks: Option<&'a [f32]>,
    /// What scores are kept below by a hyperbolic tangent.
    pub soft_cap: Option<f32>,
}

/// An element of a KV cache, and of the result.
#[allow(private_bounds)]
#[cfg(target_arch = "x86_64")]
pub trait CacheElement: Stored + Vectors + Send + Sync {}
/// An element of a KV cache, and of the result.
#[allow(private_bounds)]
#[cfg(not(target_arch = "x86_64"))]
pub trait CacheElement: Stored + crate::kernel::Widened + Send + Sync {}

impl CacheElement for f32 {}
impl CacheElement for Bf16 {}

/// The keys that a query sees.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// From the first to the last.
    pub(crate) keys: Range<usize>,
    /// Whether it sees all of them and all are live.
    pub(crate) whole: bool,
}

/// What the threads share.
pub(crate) struct Call<'a, W> {
    pub(crate) shape: AttentionShape,
    pub(crate) operands: AttentionOperands<'a, W>,
    /// By sequence and query.
    pub(crate) seen: Vec<Seen>,
    /// The result.
    pub(crate) y: *mut W,
}

// SAFETY: pieces write disjoint parts of `y` and only read the rest.
unsafe impl<W: Sync> Sync for Call<'_, W> {}

/// Computes attention to (sequences, `kv_heads`, group, queries, `value_head`).
///
/// Scores and softmax are float32; shares are rounded to `W` before they are multiplied with the
/// values, sums are float32 and rounded once. A key that a query does not see adds nothing to its
/// row, whatever the cache holds there. A row that sees nothing is NaN, or 0 if it has a sink.
///
/// # Panics
///
/// If a slice has another length than `shape` says, or keys are asked for of an empty cache.
pub fn attention<W: CacheElement>(
    pool: &dyn Pool,
    with: Instructions,
    shape: AttentionShape,
    operands: AttentionOperands<'_, W>,
    y: &mut [W],
) {
    assert!(Instructions::available().contains(&with));
    let heads = shape.sequences * shape.kv_heads;
    let cache = shape.cache_blocks * shape.block_size * shape.kv_heads;
    for (name, found, expected) in [
        (
            "queries",
            operands.queries.len(),
            heads * shape.rows() * shape.head,
        ),
        ("keys", operands.keys.len(), cache * shape.head),
        ("values", operands.values.len(), cache * shape.value_head),
        (
            "blocks",
            operands.blocks.len(),
            shape.sequences * shape.blocks,
        ),
        (
            "visible",
            operands.visible.len(),
            shape.sequences * shape.queries * shape.keys(),
        ),
        ("live", operands.live.len(), shape.sequences * shape.keys()),
        (
            "sinks",
            operands.sinks.map_or(0, <[f32]>::len),
            operands.sinks.map_or(0, |_| shape.kv_heads * shape.group),
        ),
        ("result", y.len(), heads * shape.rows() * shape.value_head),
    ] {
        assert_eq!(found, expected, "{name} of {shape:?}");
    }
    assert!(
        shape.cache_blocks > 0 || operands.blocks.is_empty(),
        "no block to read"
    );

    let seen = seen(&shape, &operands);
    let pairs: usize = seen.iter().map(|seen| seen.keys.len()).sum();
    let few = pairs * shape.kv_heads * shape.group < FEW_PAIRS;
    let pieces = heads * shape.rows().div_ceil(PIECE_ROWS);
    let call = Call {
        shape,
        operands,
        seen,
        y: y.as_mut_ptr(),
    };
    let compute = |piece: usize| match with {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `with` is available, lengths were compared with the shape.
        Instructions::Avx512 | Instructions::Avx512Bf16 => unsafe { avx512(&call, piece) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Instructions::Avx2 => unsafe { avx2(&call, piece) },
        // SAFETY: as above.
        _ => unsafe { call.piece::<Plain<W>>(piece) },
    };
    in_pieces(if few { &Inline } else { pool }, pieces, &compute);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn avx512<W: CacheElement>(call: &Call<'_, W>, piece: usize) {
    // SAFETY: the caller's.
    unsafe { call.piece::<Avx512<W>>(piece) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<W: CacheElement>(call: &Call<'_, W>, piece: usize) {
    // SAFETY: the caller's.
    unsafe { call.piece::<Avx2<W>>(piece) }
}

/// Finds what each query of each sequence sees.
fn seen<W>(shape: &AttentionShape, operands: &AttentionOperands<'_, W>) -> Vec<Seen> {
    let keys = shape.keys();
    (0..shape.sequences * shape.queries)
        .map(|row| {
            let visible = &operands.visible[row * keys..][..keys];
            let sequence = row / shape.queries;
            let live = &operands.live[sequence * keys..][..keys];
            let first = visible.iter().position(|&sees| sees != 0);
            let last = visible.iter().rposition(|&sees| sees != 0);
            let keys = match (first, last) {
                (Some(first), Some(last)) => first..last + 1,
                _ => 0..0,
            };
            // The smallest of all is found faster than the first that is 0.
            let all = |flags: &[u8]| flags[keys.clone()].iter().min() != Some(&0);
            Seen {
                whole: all(visible) && all(live),
                keys,
            }
        })
        .collect()
}
