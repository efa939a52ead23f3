//! Products by every kernel that this processor has, beside sums in float64.

#![allow(clippy::unwrap_used)]

mod numbers;
mod threads;

use numbers::numbers;
use threads::Threads;
use vllm_neuron_host::{Bf16, Inline, Instructions, Shape, product_bf16, product_f32};

/// Rows at and around the tiles of 2 and 4 and the blocks of 12.
const ROWS: [usize; 6] = [1, 2, 3, 16, 17, 128];
/// Inner sizes at and around the steps of 8, 16 and 32, and none.
const INNER: [usize; 8] = [0, 1, 7, 8, 33, 64, 577, 1023];
/// Columns at and around the tiles of 4 and the pieces of 64.
const COLUMNS: [usize; 5] = [1, 3, 4, 67, 129];

fn shapes() -> impl Iterator<Item = Shape> {
    ROWS.into_iter().flat_map(|rows| {
        INNER.into_iter().flat_map(move |inner| {
            COLUMNS.into_iter().map(move |columns| Shape {
                rows,
                inner,
                columns,
            })
        })
    })
}

fn rounded(values: &[f32]) -> Vec<Bf16> {
    values.iter().copied().map(Bf16::round).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Each result with the sum of its products' sizes, by which its error is bounded.
fn reference(shape: Shape, x: &[f32], w: &[f32]) -> Vec<(f64, f64)> {
    (0..shape.rows * shape.columns)
        .map(|at| {
            let (row, column) = (at / shape.columns, at % shape.columns);
            (0..shape.inner)
                .map(|k| {
                    f64::from(x[row * shape.inner + k]) * f64::from(w[column * shape.inner + k])
                })
                .fold((0.0, 0.0), |(sum, size), product| {
                    (sum + product, size + product.abs())
                })
        })
        .collect()
}

/// Error of a sum of `inner` products in float32, relative to the products' sizes.
const F32_ERROR: f64 = 1e-5;
#[test]
fn every_shape_by_every_kernel() {
    for shape in shapes() {
        let Shape {
            rows,
            inner,
            columns,
        } = shape;
        let (x, w) = (numbers(rows * inner, 1), numbers(columns * inner, 2));
        let (x_bf16, w_bf16) = (rounded(&x), rounded(&w));
        let widened = |values: &[Bf16]| values.iter().map(|v| v.widen()).collect::<Vec<_>>();
        let exact = reference(shape, &x, &w);
        let exact_bf16 = reference(shape, &widened(&x_bf16), &widened(&w_bf16));
        for with in Instructions::available() {
            let mut y = vec![f32::NAN; rows * columns];
            product_f32(&Inline, with, shape, &x, &w, &mut y);
            for (found, (sum, size)) in y.iter().zip(&exact) {
                assert!(
                    (f64::from(*found) - sum).abs() <= size * F32_ERROR,
                    "{with:?} {shape:?}: {found} for {sum}"
                );
            }
            y.fill(f32::NAN);
            product_bf16(&Inline, with, shape, &x_bf16, &w_bf16, &mut y);
            for (found, (sum, size)) in y.iter().zip(&exact_bf16) {
                assert!(
                    (f64::from(*found) - sum).abs() <= size * F32_ERROR,
                    "{with:?} {shape:?}: {found} for {sum}"
                );
            }
            let mut once_rounded = vec![Bf16(0x7fc0); rows * columns];
            product_bf16(&Inline, with, shape, &x_bf16, &w_bf16, &mut once_rounded);
            assert_eq!(once_rounded, rounded(&y), "{with:?} {shape:?}");
        }
    }
}

#[test]
fn threads_change_no_bit() {
    for (rows, inner, columns) in [(1, 577, 1000), (17, 96, 129), (128, 33, 700)] {
        let shape = Shape {
            rows,
            inner,
            columns,
        };
        let (x, w) = (numbers(rows * inner, 3), numbers(columns * inner, 4));
        let (x_bf16, w_bf16) = (rounded(&x), rounded(&w));
        for with in Instructions::available() {
            let (mut serial, mut threaded) = (vec![0.0; rows * columns], vec![0.0; rows * columns]);
            let pool = Threads::new();
            product_f32(&Inline, with, shape, &x, &w, &mut serial);
            product_f32(&pool, with, shape, &x, &w, &mut threaded);
            assert_eq!(bits(&serial), bits(&threaded), "{with:?} {shape:?}");
            product_bf16(&Inline, with, shape, &x_bf16, &w_bf16, &mut serial);
            product_bf16(&pool, with, shape, &x_bf16, &w_bf16, &mut threaded);
            assert_eq!(bits(&serial), bits(&threaded), "{with:?} {shape:?}");
            pool.join();
        }
    }
}

/// A sequence of a batch gets the numbers that it would get alone.
#[test]
fn a_row_does_not_depend_on_the_rows_beside_it() {
    let (rows, inner, columns) = (17, 577, 67);
    let (x, w) = (numbers(rows * inner, 5), numbers(columns * inner, 6));
    let shape = |rows| Shape {
        rows,
        inner,
        columns,
    };
    for with in Instructions::available() {
        let mut together = vec![0.0; rows * columns];
        product_f32(&Inline, with, shape(rows), &x, &w, &mut together);
        for row in 0..rows {
            let mut alone = vec![0.0; columns];
            let x = &x[row * inner..(row + 1) * inner];
            product_f32(&Inline, with, shape(1), x, &w, &mut alone);
            let beside = &together[row * columns..(row + 1) * columns];
            assert_eq!(bits(&alone), bits(beside), "{with:?} row {row}");
        }
    }
}

#[test]
fn what_is_not_finite_stays_so_and_stays_in_its_row() {
    let (rows, inner, columns) = (3, 77, 5);
    let shape = Shape {
        rows,
        inner,
        columns,
    };
    for with in Instructions::available() {
        // In a whole step, and in what is left after the steps.
        for at in [5, 76] {
            for (value, expected) in [
                (f32::NAN, f32::NAN),
                (f32::INFINITY, f32::INFINITY),
                (f32::NEG_INFINITY, f32::NEG_INFINITY),
            ] {
                let mut x = vec![1.0; rows * inner];
                x[inner + at] = value;
                let w = vec![1.0; columns * inner];
                let (mut y, mut y_bf16) =
                    (vec![0.0; rows * columns], vec![Bf16(0); rows * columns]);
                product_f32(&Inline, with, shape, &x, &w, &mut y);
                product_bf16(
                    &Inline,
                    with,
                    shape,
                    &rounded(&x),
                    &rounded(&w),
                    &mut y_bf16,
                );
                for (index, (single, half)) in y.iter().zip(&y_bf16).enumerate() {
                    let expected = if index / columns == 1 { expected } else { 77.0 };
                    for found in [*single, half.widen()] {
                        assert!(
                            found.to_bits() == expected.to_bits()
                                || (found.is_nan() && expected.is_nan()),
                            "{with:?}: {found} for {expected}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn infinities_of_both_signs_are_nan() {
    let shape = Shape {
        rows: 1,
        inner: 2,
        columns: 1,
    };
    for with in Instructions::available() {
        let mut y = [0.0];
        let x = [f32::INFINITY, f32::NEG_INFINITY];
        product_f32(&Inline, with, shape, &x, &[1.0, 1.0], &mut y);
        assert!(y[0].is_nan(), "{with:?}");
    }
}

#[test]
fn rounding_to_bfloat16_is_to_the_nearest_even() {
    for (value, expected) in [
        (1.0, 0x3f80),
        (f32::from_bits(0x3f80_8000), 0x3f80),
        (f32::from_bits(0x3f81_8000), 0x3f82),
        (f32::from_bits(0x3f80_8001), 0x3f81),
        (f32::MAX, 0x7f80),
        (f32::NEG_INFINITY, 0xff80),
        (-0.0, 0x8000),
        (f32::from_bits(0x7f80_0001), 0x7fc0),
    ] {
        assert_eq!(Bf16::round(value), Bf16(expected), "{value}");
    }
}

#[test]
#[should_panic(expected = "assertion")]
fn slices_that_are_not_of_the_shape_are_refused() {
    let shape = Shape {
        rows: usize::MAX / 2 + 1,
        inner: 2,
        columns: 1,
    };
    product_f32(
        &Inline,
        Instructions::Plain,
        shape,
        &[],
        &[1.0, 1.0],
        &mut [],
    );
}
