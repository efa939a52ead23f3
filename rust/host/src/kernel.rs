//! The inner loop of a matrix product, generic over the instructions that it is made of.

/// A bfloat16 number as its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

impl Bf16 {
    /// The same value as a float32.
    #[inline]
    pub fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    /// The nearest bfloat16, of two the even one; NaN stays NaN.
    #[inline]
    #[allow(clippy::cast_possible_truncation)] // The upper half of a u32.
    pub fn round(value: f32) -> Self {
        let bits = value.to_bits();
        if value.is_nan() {
            return Self((bits >> 16) as u16 | 0x40);
        }
        Self(((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16)
    }
}

/// What a result is stored as.
pub(crate) trait Stored: Copy {
    fn from_sum(sum: f32) -> Self;
}

impl Stored for f32 {
    #[inline(always)]
    fn from_sum(sum: f32) -> Self {
        sum
    }
}

impl Stored for Bf16 {
    #[inline(always)]
    fn from_sum(sum: f32) -> Self {
        Self::round(sum)
    }
}

/// The instructions of one processor for one pair of operand types.
///
/// # Safety
///
/// Methods may only be called where the processor has the instructions, and loads must stay
/// inside of their rows.
pub(crate) trait Kernel {
    /// An element of the left operand.
    type X: Copy;
    /// An element of the weight.
    type W: Copy;
    /// `STEP` elements of the left operand in a register.
    type XVector: Copy;
    /// `STEP` elements of the weight in a register.
    type WVector: Copy;
    /// Partial sums.
    type Sums: Copy;
    /// Elements that one step reads of a row.
    const STEP: usize;
    /// Rows of the left operand whose sums are in registers at once, 1 to 4. Of more, LLVM keeps them in
    /// memory between the loops.
    const ROWS: usize;

    /// Has memory, which need not be the weight's any more, brought near.
    fn prefetch(from: *const Self::W);
    unsafe fn zero() -> Self::Sums;
    unsafe fn load_x(from: *const Self::X) -> Self::XVector;
    unsafe fn load_w(from: *const Self::W) -> Self::WVector;
    unsafe fn add_product(sums: Self::Sums, x: Self::XVector, w: Self::WVector) -> Self::Sums;
    unsafe fn total(sums: Self::Sums) -> f32;
    /// What `total` gives of each.
    #[inline(always)]
    unsafe fn totals(sums: [Self::Sums; COLUMNS]) -> [f32; COLUMNS] {
        // SAFETY: the caller's.
        sums.map(|sums| unsafe { Self::total(sums) })
    }
    fn multiply(x: Self::X, w: Self::W) -> f32;
}

/// A kernel that also scales rows of the weight, for sums of them.
///
/// # Safety
///
/// As of `Kernel`.
pub(crate) trait Blend: Kernel<X = f32> {
    unsafe fn splat(x: f32) -> Self::XVector;
    unsafe fn store(sums: Self::Sums, to: *mut f32);
}

/// Rows of the weight whose sums are in registers at once.
pub(crate) const COLUMNS: usize = 4;

/// How far ahead of a single row's product the weight is brought near, in bytes.
const AHEAD: usize = 8192;

/// A rectangle of the result: `rows` times `columns` dot products of length `inner`.
pub(crate) struct Rectangle<X, W, Y> {
    pub(crate) x: *const X,
    pub(crate) w: *const W,
    pub(crate) y: *mut Y,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) inner: usize,
    /// Distance of two rows of the weight.
    pub(crate) w_stride: usize,
    /// Distance of two rows of the result.
    pub(crate) y_stride: usize,
}

impl<X, W, Y> Rectangle<X, W, Y> {
    /// Computes all of it.
    ///
    /// Every result is the sum of the same products in the same order, wherever it lies and
    /// whatever is computed beside it.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `K`; the pointers reach over what the sizes say.
    #[inline(always)]
    pub(crate) unsafe fn compute<K: Kernel<X = X, W = W>>(&self)
    where
        X: Copy,
        W: Copy,
        Y: Stored,
    {
        let whole = self.columns - self.columns % COLUMNS;
        // SAFETY: as the caller promised; the tiles lie inside of the rectangle.
        unsafe {
            for column in (0..whole).step_by(COLUMNS) {
                self.rows_of::<K, COLUMNS>(column);
            }
            for column in whole..self.columns {
                self.rows_of::<K, 1>(column);
            }
        }
    }

    #[inline(always)]
    unsafe fn rows_of<K: Kernel<X = X, W = W>, const N: usize>(&self, column: usize)
    where
        X: Copy,
        W: Copy,
        Y: Stored,
    {
        let mut row = 0;
        while row < self.rows {
            let count = (self.rows - row).min(K::ROWS);
            // SAFETY: as the caller promised.
            unsafe {
                match count {
                    1 => self.tile::<K, 1, N>(row, column),
                    2 => self.tile::<K, 2, N>(row, column),
                    3 => self.tile::<K, 3, N>(row, column),
                    _ => self.tile::<K, 4, N>(row, column),
                }
            }
            row += count;
        }
    }

    #[inline(always)]
    unsafe fn tile<K: Kernel<X = X, W = W>, const M: usize, const N: usize>(
        &self,
        row: usize,
        column: usize,
    ) where
        X: Copy,
        W: Copy,
        Y: Stored,
    {
        if M > K::ROWS {
            return;
        }
        // SAFETY: the tile lies inside of the rectangle, and a step inside of its rows.
        unsafe {
            let x = self.x.add(row * self.inner);
            let w = self.w.add(column * self.w_stride);
            // The next columns, a part of them while each of the last rows is multiplied.
            let tiles = self.rows.div_ceil(K::ROWS).min(N);
            let left = (self.rows - row - M).div_ceil(K::ROWS);
            let near = if left < tiles {
                N * (tiles - 1 - left) / tiles..N * (tiles - left) / tiles
            } else {
                0..0
            };
            let mut sums = [[K::zero(); N]; M];
            let stepped = self.inner - self.inner % K::STEP;
            if M == 1 {
                // One after the other, as the weight lies: all there is to do is to read it.
                for (n, sum) in sums[0].iter_mut().enumerate() {
                    let w = w.add(n * self.w_stride);
                    for at in (0..stepped).step_by(K::STEP) {
                        K::prefetch(w.wrapping_add(AHEAD / size_of::<W>() + at));
                        *sum = K::add_product(*sum, K::load_x(x.add(at)), K::load_w(w.add(at)));
                    }
                }
            } else {
                let mut at = 0;
                while at < stepped {
                    for n in near.clone() {
                        K::prefetch(w.wrapping_add((N + n) * self.w_stride + at));
                    }
                    let mut weights = [K::load_w(w.add(at)); N];
                    for (n, weight) in weights.iter_mut().enumerate().skip(1) {
                        *weight = K::load_w(w.add(n * self.w_stride + at));
                    }
                    for (m, sums) in sums.iter_mut().enumerate() {
                        let left = K::load_x(x.add(m * self.inner + at));
                        for (sum, weight) in sums.iter_mut().zip(weights) {
                            *sum = K::add_product(*sum, left, weight);
                        }
                    }
                    at += K::STEP;
                }
            }
            for (m, sums) in sums.iter().enumerate() {
                let mut four = [K::zero(); COLUMNS];
                four[..N].copy_from_slice(sums);
                let totals = if N == 1 {
                    [K::total(four[0]); COLUMNS]
                } else {
                    K::totals(four)
                };
                for (n, mut sum) in totals.into_iter().enumerate().take(N) {
                    for at in stepped..self.inner {
                        sum += K::multiply(
                            *x.add(m * self.inner + at),
                            *w.add(n * self.w_stride + at),
                        );
                    }
                    *self.y.add((row + m) * self.y_stride + column + n) = Y::from_sum(sum);
                }
            }
        }
    }
}

/// Plain Rust, for processors without one of the other kernels; `W` is what the weight is.
pub(crate) struct Plain<W>(std::marker::PhantomData<W>);

/// Lanes of the plain kernel.
const LANES: usize = 8;

/// A number that the plain kernel takes as a weight.
pub(crate) trait Widened: Copy {
    fn widened(self) -> f32;
}

impl Widened for f32 {
    #[inline(always)]
    fn widened(self) -> f32 {
        self
    }
}

impl Widened for Bf16 {
    #[inline(always)]
    fn widened(self) -> f32 {
        self.widen()
    }
}

impl<W: Widened> Blend for Plain<W> {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::XVector {
        [x; LANES]
    }

    #[inline(always)]
    unsafe fn store(sums: Self::Sums, to: *mut f32) {
        // SAFETY: the caller's.
        unsafe { to.cast::<Self::Sums>().write_unaligned(sums) }
    }
}

impl<W: Widened> Kernel for Plain<W> {
    type X = f32;
    type W = W;
    type XVector = [f32; LANES];
    type WVector = [f32; LANES];
    type Sums = [f32; LANES];
    const STEP: usize = LANES;
    const ROWS: usize = 2;

    #[inline(always)]
    fn prefetch(_: *const W) {}

    #[inline(always)]
    unsafe fn zero() -> Self::Sums {
        [0.0; LANES]
    }

    #[inline(always)]
    unsafe fn load_x(from: *const f32) -> Self::XVector {
        // SAFETY: the caller's.
        std::array::from_fn(|lane| unsafe { *from.add(lane) })
    }

    #[inline(always)]
    unsafe fn load_w(from: *const W) -> Self::WVector {
        // SAFETY: the caller's.
        std::array::from_fn(|lane| unsafe { *from.add(lane) }.widened())
    }

    #[inline(always)]
    unsafe fn add_product(sums: Self::Sums, x: Self::XVector, w: Self::WVector) -> Self::Sums {
        std::array::from_fn(|lane| sums[lane] + x[lane] * w[lane])
    }

    #[inline(always)]
    unsafe fn total(sums: Self::Sums) -> f32 {
        sums.iter().sum()
    }

    #[inline(always)]
    fn multiply(x: f32, w: W) -> f32 {
        x * w.widened()
    }
}
