//! One piece of attention: some rows of queries over a head of keys and values.

use std::ops::Range;

use crate::attention::{CacheElement, Call, PIECE_ROWS, Seen};
use crate::kernel::{Blend, Rectangle};
use crate::softmax::softmax;

/// Registers of a value that are summed up at once.
const CHUNK: usize = 4;
/// Lanes of the widest register.
const MOST_LANES: usize = 16;

/// One row of queries, of one query and one head.
struct Row<'a> {
    seen: &'a Seen,
    /// By key of the sequence.
    visible: &'a [u8],
    sink: Option<f32>,
}

/// Rows that are summed up together.
struct Tile<'a> {
    rows: &'a [Row<'a>],
    /// Of each row, the share of each of the `cached` keys.
    shares: &'a [f32],
    /// The first of the keys.
    first: usize,
    /// Where in the cache each key is, in rows of one head.
    cached: &'a [usize],
    /// By key of the sequence.
    live: &'a [u8],
}

impl<W: CacheElement> Call<'_, W> {
    /// Computes the rows of one piece.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `K`; lengths agree with the shape.
    #[inline(always)]
    pub(crate) unsafe fn piece<K: Blend<W = W>>(&self, piece: usize) {
        let (shape, operands) = (&self.shape, &self.operands);
        let tiles = shape.rows().div_ceil(PIECE_ROWS);
        let (pair, tile) = (piece / tiles, piece % tiles);
        let (sequence, head) = (pair / shape.kv_heads, pair % shape.kv_heads);
        let start = tile * PIECE_ROWS;
        let rows: Vec<Row<'_>> = (start..shape.rows().min(start + PIECE_ROWS))
            .map(|row| {
                let (group, query) = (row / shape.queries, row % shape.queries);
                let at = sequence * shape.queries + query;
                Row {
                    seen: &self.seen[at],
                    visible: &operands.visible[at * shape.keys()..][..shape.keys()],
                    sink: operands
                        .sinks
                        .map(|sinks| sinks[head * shape.group + group]),
                }
            })
            .collect();
        let filled = || {
            rows.iter()
                .map(|row| &row.seen.keys)
                .filter(|keys| !keys.is_empty())
        };
        let first = filled().map(|keys| keys.start).min().unwrap_or(0);
        let end = filled().map(|keys| keys.end).max().unwrap_or(0);
        let cached = self.cached_rows(sequence, head, first..end);
        let span = cached.len();
        let mut shares = vec![0.0; rows.len() * span];

        let row = pair * shape.rows() + start;
        // SAFETY: lengths agree with the shape, `cached` lies in the cache.
        unsafe { self.scores::<K>(row, rows.len(), first, &cached, &mut shares) };
        for (at, row) in rows.iter().enumerate() {
            let keys = row.seen.keys.clone();
            if keys.is_empty() {
                continue;
            }
            softmax::<W>(
                &mut shares[at * span..][keys.start - first..keys.end - first],
                (!row.seen.whole).then(|| &row.visible[keys]),
                operands.soft_cap,
                row.sink,
            );
        }
        let mut at = 0;
        while at < rows.len() {
            let count = (rows.len() - at).min(K::ROWS);
            let tile = Tile {
                rows: &rows[at..at + count],
                shares: &shares[at * span..(at + count) * span],
                first,
                cached: &cached,
                live: &operands.live[sequence * shape.keys()..][..shape.keys()],
            };
            // SAFETY: as above.
            unsafe {
                match count {
                    1 => self.blend::<K, 1>(row + at, &tile),
                    2 => self.blend::<K, 2>(row + at, &tile),
                    3 => self.blend::<K, 3>(row + at, &tile),
                    _ => self.blend::<K, 4>(row + at, &tile),
                }
            }
            at += count;
        }
    }

    /// Returns where in the cache each key of a sequence is, in rows of one head.
    fn cached_rows(&self, sequence: usize, head: usize, keys: Range<usize>) -> Vec<usize> {
        let shape = &self.shape;
        let blocks = &self.operands.blocks[sequence * shape.blocks..][..shape.blocks];
        let last = shape.cache_blocks.saturating_sub(1);
        let mut cached = Vec::with_capacity(keys.len());
        let mut key = keys.start;
        while key < keys.end {
            // As StableHLO's gather reads: the nearest block of the cache.
            let block = usize::try_from(blocks[key / shape.block_size].max(0))
                .map_or(last, |block| block.min(last));
            let end = (key - key % shape.block_size + shape.block_size).min(keys.end);
            for at in key..end {
                cached.push(
                    (block * shape.block_size + at % shape.block_size) * shape.kv_heads + head,
                );
            }
            key = end;
        }
        cached
    }

    /// Multiplies rows of queries with the keys of each block.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `K`; `cached` lies in the cache, `row` and the `rows`
    /// from it on are queries.
    #[inline(always)]
    unsafe fn scores<K: Blend<W = W>>(
        &self,
        row: usize,
        rows: usize,
        first: usize,
        cached: &[usize],
        scores: &mut [f32],
    ) {
        let shape = &self.shape;
        let mut at = 0;
        while at < cached.len() {
            let in_block = shape.block_size - (first + at) % shape.block_size;
            let columns = in_block.min(cached.len() - at);
            // SAFETY: the keys of a block follow each other at a fixed distance.
            unsafe {
                Rectangle {
                    x: self.operands.queries.as_ptr().add(row * shape.head),
                    w: self.operands.keys.as_ptr().add(cached[at] * shape.head),
                    y: scores.as_mut_ptr().add(at),
                    rows,
                    columns,
                    inner: shape.head,
                    w_stride: shape.kv_heads * shape.head,
                    y_stride: cached.len(),
                }
                .compute::<K>();
            }
            at += columns;
        }
    }

    /// Sums up the values of a tile's rows by their shares.
    ///
    /// # Safety
    ///
    /// As of `scores`.
    #[inline(always)]
    unsafe fn blend<K: Blend<W = W>, const M: usize>(&self, row: usize, tile: &Tile<'_>) {
        if M > K::ROWS {
            return;
        }
        let length = self.shape.value_head;
        let wide = length - length % (CHUNK * K::STEP);
        let whole = length - length % K::STEP;
        // SAFETY: columns lie inside of a value.
        unsafe {
            for column in (0..wide).step_by(CHUNK * K::STEP) {
                self.columns::<K, M, CHUNK>(row, column, tile);
            }
            for column in (wide..whole).step_by(K::STEP) {
                self.columns::<K, M, 1>(row, column, tile);
            }
        }
        for column in whole..length {
            for (m, of) in tile.rows.iter().enumerate() {
                let mut sum = empty_sum(of);
                for at in tile.keys(m) {
                    if tile.counts(m, at) {
                        let value = self.operands.values[tile.cached[at] * length + column];
                        sum += tile.share(m, at) * value.widened();
                    }
                }
                // SAFETY: inside of the result, and of this piece alone.
                unsafe { *self.y.add((row + m) * length + column) = W::from_sum(sum) };
            }
        }
    }

    /// Computes `C` registers of the results of `M` rows, from `column` on.
    ///
    /// The products of a row are added up in the order of its keys, whatever rows are beside it.
    ///
    /// # Safety
    ///
    /// As of `blend`.
    #[inline(always)]
    unsafe fn columns<K: Blend<W = W>, const M: usize, const C: usize>(
        &self,
        row: usize,
        column: usize,
        tile: &Tile<'_>,
    ) {
        let length = self.shape.value_head;
        // SAFETY: the processor has the instructions.
        let zero = unsafe { K::zero() };
        let mut sums = [[zero; C]; M];
        let mut common = 0..tile.cached.len();
        for m in 0..M {
            let keys = tile.keys(m);
            common = common.start.max(keys.start)..common.end.min(keys.end);
            if !tile.rows[m].seen.whole {
                common.end = common.start;
            }
        }
        for (m, sums) in sums.iter_mut().enumerate() {
            let keys = tile.keys(m);
            let end = if common.is_empty() {
                keys.end
            } else {
                common.start
            };
            // SAFETY: the caller's.
            unsafe { self.add::<K, C>(sums, m, keys.start..end, column, tile) };
        }
        // SAFETY: as above.
        unsafe {
            for at in common.clone() {
                let value = self
                    .operands
                    .values
                    .as_ptr()
                    .add(tile.cached[at] * length + column);
                let mut values = [K::load_w(value); C];
                for (c, register) in values.iter_mut().enumerate().skip(1) {
                    *register = K::load_w(value.add(c * K::STEP));
                }
                for (m, sums) in sums.iter_mut().enumerate() {
                    let share = K::splat(tile.share(m, at));
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum = K::add_product(*sum, share, value);
                    }
                }
            }
        }
        if !common.is_empty() {
            for (m, sums) in sums.iter_mut().enumerate() {
                let keys = common.end..tile.keys(m).end;
                // SAFETY: the caller's.
                unsafe { self.add::<K, C>(sums, m, keys, column, tile) };
            }
        }
        for (m, sums) in sums.iter().enumerate() {
            let empty = empty_sum(&tile.rows[m]);
            for (c, sums) in sums.iter().enumerate() {
                let mut lanes = [0.0; MOST_LANES];
                // SAFETY: a register has at most so many lanes; the result is this piece's alone.
                unsafe {
                    K::store(*sums, lanes.as_mut_ptr());
                    let to = self.y.add((row + m) * length + column + c * K::STEP);
                    for (lane, sum) in lanes.into_iter().enumerate().take(K::STEP) {
                        *to.add(lane) = W::from_sum(sum + empty);
                    }
                }
            }
        }
    }

    /// Adds products of some keys to the sums of one row.
    ///
    /// # Safety
    ///
    /// As of `blend`.
    #[inline(always)]
    unsafe fn add<K: Blend<W = W>, const C: usize>(
        &self,
        sums: &mut [K::Sums; C],
        m: usize,
        keys: Range<usize>,
        column: usize,
        tile: &Tile<'_>,
    ) {
        for at in keys {
            if !tile.counts(m, at) {
                continue;
            }
            // SAFETY: the caller's.
            unsafe {
                let value = tile.cached[at] * self.shape.value_head + column;
                let value = self.operands.values.as_ptr().add(value);
                let share = K::splat(tile.share(m, at));
                for (c, sum) in sums.iter_mut().enumerate() {
                    *sum = K::add_product(*sum, share, K::load_w(value.add(c * K::STEP)));
                }
            }
        }
    }
}

impl Tile<'_> {
    /// The keys that a row sees, counted from the first of the tile.
    fn keys(&self, m: usize) -> Range<usize> {
        let keys = &self.rows[m].seen.keys;
        if keys.is_empty() {
            return 0..0;
        }
        keys.start - self.first..keys.end - self.first
    }

    fn share(&self, m: usize, at: usize) -> f32 {
        self.shares[m * self.cached.len() + at]
    }

    /// Whether a key's value is part of a row's sum.
    fn counts(&self, m: usize, at: usize) -> bool {
        let row = &self.rows[m];
        let key = self.first + at;
        row.seen.whole || (row.visible[key] != 0 && self.live[key] != 0)
    }
}

/// What a row's sum starts with: NaN if it has no share to give, else 0.
fn empty_sum(row: &Row<'_>) -> f32 {
    let shared = !row.seen.keys.is_empty() || row.sink.is_some_and(f32::is_finite);
    if shared { 0.0 } else { f32::NAN }
}
