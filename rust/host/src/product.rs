//! Products with a weight as `torch.nn.Linear` keeps it: `y = x * transpose(weight)`.

use std::sync::OnceLock;

use crate::kernel::{Bf16, Plain, Rectangle, Stored};
use crate::parallel::{Pool, in_pieces};
#[cfg(target_arch = "x86_64")]
use crate::x86::{Avx2, Avx512, Avx512Bf16};

/// Bytes of the left operand that stay in a core's second-level cache beside a piece of the weight.
const CACHED_BYTES: usize = 256 << 10;
/// Rows of the weight in one piece of the work.
const PIECE_COLUMNS: usize = 64;

/// The sizes of one product.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Rows of the left operand and of the result.
    pub rows: usize,
    /// Length of the rows of both operands.
    pub inner: usize,
    /// Rows of the weight, columns of the result.
    pub columns: usize,
}

/// The instructions that a product is computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instructions {
    /// Whatever the compiler makes of plain Rust.
    Plain,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 without BF16.
    Avx512,
    /// AVX-512 with BF16.
    Avx512Bf16,
}

impl Instructions {
    /// The best that this processor has.
    pub fn best() -> Self {
        static BEST: OnceLock<Instructions> = OnceLock::new();
        *BEST.get_or_init(|| {
            Self::available()
                .last()
                .copied()
                .unwrap_or(Instructions::Plain)
        })
    }

    /// All that this processor has, the best last.
    pub fn available() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut found = vec![Self::Plain];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                found.push(Self::Avx2);
                if is_x86_feature_detected!("avx512f") {
                    found.push(Self::Avx512);
                    if is_x86_feature_detected!("avx512bf16") {
                        found.push(Self::Avx512Bf16);
                    }
                }
            }
        }
        found
    }
}

/// Operands and result, which threads share: each writes a part of the result of its own.
#[derive(Clone, Copy)]
struct Operands<X, W, Y> {
    x: *const X,
    w: *const W,
    y: *mut Y,
}

// SAFETY: the operands are only read, and no two pieces write the same element.
unsafe impl<X, W, Y> Sync for Operands<X, W, Y> {}

/// Multiplies float32 operands.
///
/// # Panics
///
/// If a slice has another length than `shape` says.
pub fn product_f32(
    pool: &dyn Pool,
    with: Instructions,
    shape: Shape,
    x: &[f32],
    w: &[f32],
    y: &mut [f32],
) {
    run(pool, with, shape, x, w, y, |part| match with {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `with` is one of `Instructions::available`.
        Instructions::Avx512 | Instructions::Avx512Bf16 => unsafe { avx512(part) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Instructions::Avx2 => unsafe { avx2(part) },
        // SAFETY: it needs none.
        _ => unsafe { part.compute::<Plain<f32>>() },
    });
}

/// Multiplies bfloat16 operands; sums are float32, rounded once if `Y` is bfloat16.
///
/// # Panics
///
/// If a slice has another length than `shape` says.
#[allow(private_bounds)]
pub fn product_bf16<Y: Stored + Send>(
    pool: &dyn Pool,
    with: Instructions,
    shape: Shape,
    x: &[Bf16],
    w: &[Bf16],
    y: &mut [Y],
) {
    #[cfg(target_arch = "x86_64")]
    if with == Instructions::Avx512Bf16 {
        // SAFETY: `with` is one of `Instructions::available`.
        run(pool, with, shape, x, w, y, |part| unsafe {
            avx512_bf16(part);
        });
        return;
    }
    let widened: Vec<f32> = x.iter().map(|value| value.widen()).collect();
    run(pool, with, shape, &widened, w, y, |part| match with {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Instructions::Avx512 => unsafe { avx512(part) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Instructions::Avx2 => unsafe { avx2(part) },
        // SAFETY: it needs none.
        _ => unsafe { part.compute::<Plain<Bf16>>() },
    });
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn avx512<W: crate::x86::Vectors, Y: Stored>(part: &Rectangle<f32, W, Y>) {
    // SAFETY: the caller's.
    unsafe { part.compute::<Avx512<W>>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16,avx2,fma")]
unsafe fn avx512_bf16<Y: Stored>(part: &Rectangle<Bf16, Bf16, Y>) {
    // SAFETY: the caller's.
    unsafe { part.compute::<Avx512Bf16>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<W: crate::x86::Vectors, Y: Stored>(part: &Rectangle<f32, W, Y>) {
    // SAFETY: the caller's.
    unsafe { part.compute::<Avx2<W>>() }
}

fn run<X, W, Y>(
    pool: &dyn Pool,
    with: Instructions,
    shape: Shape,
    x: &[X],
    w: &[W],
    y: &mut [Y],
    compute: impl Fn(&Rectangle<X, W, Y>) + Sync,
) {
    let Shape {
        rows,
        inner,
        columns,
    } = shape;
    assert!(Instructions::available().contains(&with));
    assert_eq!(
        (Some(x.len()), Some(w.len()), Some(y.len())),
        (
            rows.checked_mul(inner),
            columns.checked_mul(inner),
            rows.checked_mul(columns)
        ),
    );
    let all = Operands {
        x: x.as_ptr(),
        w: w.as_ptr(),
        y: y.as_mut_ptr(),
    };
    let block = (CACHED_BYTES / (inner * size_of::<X>()).max(1))
        .next_multiple_of(12)
        .max(12);
    in_pieces(pool, columns.div_ceil(PIECE_COLUMNS), &|piece| {
        let all = &all;
        let column = piece * PIECE_COLUMNS;
        for row in (0..rows).step_by(block) {
            // SAFETY: inside of the slices, whose lengths were compared with the shape.
            let part = unsafe {
                Rectangle {
                    x: all.x.add(row * inner),
                    w: all.w.add(column * inner),
                    y: all.y.add(row * columns + column),
                    rows: block.min(rows - row),
                    columns: PIECE_COLUMNS.min(columns - column),
                    inner,
                    w_stride: inner,
                    y_stride: columns,
                }
            };
            compute(&part);
        }
    });
}
