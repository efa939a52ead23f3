//! Kernels of x86-64 processors.

use std::arch::x86_64::{
    __m128, __m256, __m512, __m512bh, __m512i, _MM_HINT_T0, _mm_add_ps, _mm_loadu_si128,
    _mm_prefetch, _mm256_add_ps, _mm256_castpd_ps, _mm256_castps256_ps128, _mm256_castsi256_ps,
    _mm256_cvtepu16_epi32, _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_loadu_ps,
    _mm256_loadu_si256, _mm256_set1_ps, _mm256_setzero_ps, _mm256_shuffle_ps, _mm256_slli_epi32,
    _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps, _mm512_castps_pd,
    _mm512_castps512_ps256, _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_dpbf16_ps,
    _mm512_extractf64x4_pd, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps,
};
use std::mem::transmute;

use crate::kernel::{Bf16, Blend, COLUMNS, Kernel, Widened};

/// AVX-512 with float32 sums; `W` is what the weight is.
pub(crate) struct Avx512<W>(std::marker::PhantomData<W>);

/// AVX-512 BF16: products of bfloat16 pairs.
pub(crate) struct Avx512Bf16;

/// AVX2 and FMA with float32 sums; `W` is what the weight is.
pub(crate) struct Avx2<W>(std::marker::PhantomData<W>);

/// Vectors of weights, widened to float32.
pub(crate) trait Vectors: Widened {
    unsafe fn load_512(from: *const Self) -> __m512;
    unsafe fn load_256(from: *const Self) -> __m256;
}

// SAFETY of all intrinsics below: the caller of a kernel promises the instructions and the memory.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Vectors for f32 {
    #[inline(always)]
    unsafe fn load_512(from: *const Self) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_256(from: *const Self) -> __m256 {
        unsafe { _mm256_loadu_ps(from) }
    }
}

#[allow(clippy::undocumented_unsafe_blocks)]
impl Vectors for Bf16 {
    #[inline(always)]
    unsafe fn load_512(from: *const Self) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn load_256(from: *const Self) -> __m256 {
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
}

#[allow(clippy::undocumented_unsafe_blocks)]
impl<W: Vectors> Kernel for Avx512<W> {
    type X = f32;
    type W = W;
    type XVector = __m512;
    type WVector = __m512;
    type Sums = __m512;
    const STEP: usize = 16;
    const ROWS: usize = 4;

    #[inline(always)]
    fn prefetch(from: *const Self::W) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn load_x(from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_w(from: *const W) -> __m512 {
        unsafe { W::load_512(from) }
    }

    #[inline(always)]
    unsafe fn add_product(sums: __m512, x: __m512, w: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(x, w, sums) }
    }

    #[inline(always)]
    unsafe fn total(sums: __m512) -> f32 {
        unsafe { totals_512([sums, sums, sums, sums])[0] }
    }

    #[inline(always)]
    unsafe fn totals(sums: [__m512; COLUMNS]) -> [f32; COLUMNS] {
        unsafe { totals_512(sums) }
    }

    #[inline(always)]
    fn multiply(x: f32, w: W) -> f32 {
        x * w.widened()
    }
}

#[allow(clippy::undocumented_unsafe_blocks)]
impl Kernel for Avx512Bf16 {
    type X = Bf16;
    type W = Bf16;
    type XVector = __m512i;
    type WVector = __m512i;
    type Sums = __m512;
    const STEP: usize = 32;
    const ROWS: usize = 4;

    #[inline(always)]
    fn prefetch(from: *const Self::W) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn load_x(from: *const Bf16) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn load_w(from: *const Bf16) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn add_product(sums: __m512, x: __m512i, w: __m512i) -> __m512 {
        unsafe {
            _mm512_dpbf16_ps(
                sums,
                transmute::<__m512i, __m512bh>(x),
                transmute::<__m512i, __m512bh>(w),
            )
        }
    }

    #[inline(always)]
    unsafe fn total(sums: __m512) -> f32 {
        unsafe { totals_512([sums, sums, sums, sums])[0] }
    }

    #[inline(always)]
    unsafe fn totals(sums: [__m512; COLUMNS]) -> [f32; COLUMNS] {
        unsafe { totals_512(sums) }
    }

    #[inline(always)]
    fn multiply(x: Bf16, w: Bf16) -> f32 {
        x.widen() * w.widen()
    }
}

#[allow(clippy::undocumented_unsafe_blocks)]
impl<W: Vectors> Kernel for Avx2<W> {
    type X = f32;
    type W = W;
    type XVector = __m256;
    type WVector = __m256;
    type Sums = __m256;
    const STEP: usize = 8;
    const ROWS: usize = 2;

    #[inline(always)]
    fn prefetch(from: *const Self::W) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn load_x(from: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_w(from: *const W) -> __m256 {
        unsafe { W::load_256(from) }
    }

    #[inline(always)]
    unsafe fn add_product(sums: __m256, x: __m256, w: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(x, w, sums) }
    }

    #[inline(always)]
    unsafe fn total(sums: __m256) -> f32 {
        unsafe { totals_256([sums, sums, sums, sums])[0] }
    }

    #[inline(always)]
    unsafe fn totals(sums: [__m256; COLUMNS]) -> [f32; COLUMNS] {
        unsafe { totals_256(sums) }
    }

    #[inline(always)]
    fn multiply(x: f32, w: W) -> f32 {
        x * w.widened()
    }
}

#[allow(clippy::undocumented_unsafe_blocks)]
impl<W: Vectors> Blend for Avx512<W> {
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn store(sums: __m512, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, sums) }
    }
}

#[allow(clippy::undocumented_unsafe_blocks)]
impl<W: Vectors> Blend for Avx2<W> {
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn store(sums: __m256, to: *mut f32) {
        unsafe { _mm256_storeu_ps(to, sums) }
    }
}

/// Adds up the lanes of each register: first those at the same place of each half and quarter, then
/// the four that are left.
#[allow(clippy::undocumented_unsafe_blocks)]
#[inline(always)]
unsafe fn totals_512(sums: [__m512; COLUMNS]) -> [f32; COLUMNS] {
    unsafe {
        let [a, b, c, d] = sums;
        totals_256([halved(a), halved(b), halved(c), halved(d)])
    }
}

/// Adds the upper half of a register to the lower. No closure: it would not have the instructions.
#[allow(clippy::undocumented_unsafe_blocks)]
#[inline(always)]
unsafe fn halved(sums: __m512) -> __m256 {
    unsafe {
        _mm256_add_ps(
            _mm512_castps512_ps256(sums),
            _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(sums))),
        )
    }
}

/// As `totals_512`.
#[allow(clippy::undocumented_unsafe_blocks)]
#[inline(always)]
unsafe fn totals_256(sums: [__m256; COLUMNS]) -> [f32; COLUMNS] {
    unsafe {
        let [a, b, c, d] = sums;
        // Of each half, lanes 0 and 2 and lanes 1 and 3 of two registers side by side.
        let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        let abcd = _mm256_add_ps(
            _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd),
            _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd),
        );
        let totals = _mm_add_ps(
            _mm256_castps256_ps128(abcd),
            _mm256_extractf128_ps::<1>(abcd),
        );
        transmute::<__m128, [f32; COLUMNS]>(totals)
    }
}
