//! Operands for tests.

/// Numbers of -1 to 1 from a linear congruential generator.
#[allow(clippy::cast_precision_loss)]
pub(crate) fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}
