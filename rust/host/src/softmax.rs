//! Softmax of a row of attention scores, written for the compiler to vectorise.

use crate::kernel::{Stored, Widened};

/// Lanes of the sums, the same with all instructions.
const LANES: usize = 16;

/// Makes shares of a row's scores, as `torch.softmax` does, rounded to `W`.
#[inline(always)]
pub(crate) fn softmax<W: Stored + Widened>(
    scores: &mut [f32],
    visible: Option<&[u8]>,
    soft_cap: Option<f32>,
    sink: Option<f32>,
) {
    if let Some(cap) = soft_cap {
        for score in scores.iter_mut() {
            *score = (*score / cap).tanh() * cap;
        }
    }
    if let Some(visible) = visible {
        for (score, &sees) in scores.iter_mut().zip(visible) {
            if sees == 0 {
                *score = f32::NEG_INFINITY;
            }
        }
    }
    let mut largest = [f32::NEG_INFINITY; LANES];
    let mut sums = [0.0; LANES];
    for chunk in scores.chunks(LANES) {
        for (largest, score) in largest.iter_mut().zip(chunk) {
            *largest = if *score > *largest { *score } else { *largest };
        }
    }
    let largest = largest
        .into_iter()
        .chain(sink)
        .fold(f32::NEG_INFINITY, f32::max);
    for chunk in scores.chunks_mut(LANES) {
        for (sum, score) in sums.iter_mut().zip(chunk) {
            // NaN if there is a NaN or an infinity among the scores, which makes the sum NaN.
            *score = exp(*score - largest);
            *sum += *score;
        }
    }
    let sum = sums.iter().sum::<f32>() + sink.map_or(0.0, |sink| exp(sink - largest));
    for score in scores {
        *score = W::from_sum(*score / sum).widened();
    }
}

/// The exponential of a number that is not above 0, to the last digit or two; 0 below -87.3.
///
/// The range reduction and the polynomial are those of Cephes' `expf`.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// Adding it to a small number leaves its nearest integer in the low bits.
    const ROUNDING: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let bounded = if x < -87.3 { -87.3 } else { x };
    let rounded = bounded * std::f32::consts::LOG2_E + ROUNDING;
    let power = rounded - ROUNDING;
    let rest = bounded - power * LN2_HIGH - power * LN2_LOW;
    let mut series = 1.987_569_1e-4;
    for coefficient in [
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        0.166_666_65,
        0.5,
    ] {
        series = series * rest + coefficient;
    }
    let fraction = series * rest * rest + rest + 1.0;
    let scale = f32::from_bits((rounded.to_bits() << 23).wrapping_add(1.0_f32.to_bits()));
    if x < -87.3 { 0.0 } else { fraction * scale }
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn the_exponential_is_that_of_float64() {
        for step in 0..=87_000 {
            let x = -0.001 * f64::from(step);
            #[allow(clippy::cast_possible_truncation)]
            let x = x as f32;
            let exact = f64::from(x).exp();
            assert!(
                (f64::from(exp(x)) - exact).abs() <= exact * 2.0_f64.powi(-22),
                "{x}"
            );
        }
        assert_eq!(exp(0.0).to_bits(), 1.0_f32.to_bits());
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(-88.0).to_bits(), 0);
        assert!(exp(f32::NAN).is_nan());
    }
}
