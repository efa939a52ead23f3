//! Kernels of x86-64 processors.

use std::arch::x86_64::{
    __m256, __m512, __m512bh, __m512i, _MM_HINT_T0, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32,
    _mm_loadu_si128, _mm_movehl_ps, _mm_prefetch, _mm_shuffle_ps, _mm256_castps256_ps128,
    _mm256_castsi256_ps, _mm256_cvtepu16_epi32, _mm256_extractf128_ps, _mm256_fmadd_ps,
    _mm256_loadu_ps, _mm256_loadu_si256, _mm256_setzero_ps, _mm256_slli_epi32, _mm512_castsi512_ps,
    _mm512_cvtepu16_epi32, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_reduce_add_ps, _mm512_setzero_ps, _mm512_slli_epi32,
};
use std::mem::transmute;

use crate::kernel::{Bf16, Kernel, Widened};

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
    const ROWS: usize = 6;

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
        unsafe { _mm512_reduce_add_ps(sums) }
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
    const ROWS: usize = 6;

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
        unsafe { _mm512_reduce_add_ps(sums) }
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
        unsafe {
            let half = _mm_add_ps(
                _mm256_castps256_ps128(sums),
                _mm256_extractf128_ps::<1>(sums),
            );
            let quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps::<1>(quarter, quarter)))
        }
    }

    #[inline(always)]
    fn multiply(x: f32, w: W) -> f32 {
        x * w.widened()
    }
}
