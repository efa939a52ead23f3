//! MD5 (RFC 1321), as fast as the processor's latency allows.
//!
//! Each of the 64 steps of a block needs the result of the one before, so the time of a block is
//! the length of that chain. What does not depend on the last step is summed up beside the chain
//! and [`settled`], since a compiler that sees one sum of five terms may put all of it into the
//! chain: docs/benchmarks.md has what that costs.

use zerocopy::little_endian::U32;
use zerocopy::transmute_ref;

/// MD5 of `bytes`.
pub(super) fn md5(bytes: &[u8]) -> [u8; 16] {
    let (blocks, rest) = bytes.as_chunks::<64>();
    let state = compress([0x6745_2301, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476], blocks);
    // The rest, a bit that is set, zeros, and the length in bits, in one block or two.
    let mut last = [[0; 64]; 2];
    for (to, from) in last
        .as_flattened_mut()
        .iter_mut()
        .zip(rest.iter().chain(&[0x80]))
    {
        *to = *from;
    }
    let count = if rest.len() < 56 { 1 } else { 2 };
    let last = last.get_mut(..count).unwrap_or_default();
    if let Some(length) = last.as_flattened_mut().last_chunk_mut() {
        *length = (bytes.len() as u64).wrapping_shl(3).to_le_bytes();
    }
    let mut digest = [0; 16];
    for (bytes, word) in digest
        .as_chunks_mut::<4>()
        .0
        .iter_mut()
        .zip(compress(state, last))
    {
        *bytes = word.to_le_bytes();
    }
    digest
}

/// The state after more blocks.
fn compress(mut state: [u32; 4], blocks: &[[u8; 64]]) -> [u32; 4] {
    for block in blocks {
        let w: &[U32; 16] = transmute_ref!(block);
        let mut next = state;
        let shifts = [7, 12, 17, 22];
        next = four_steps(next, f, shifts, [w[0], w[1], w[2], w[3]], K[0]);
        next = four_steps(next, f, shifts, [w[4], w[5], w[6], w[7]], K[1]);
        next = four_steps(next, f, shifts, [w[8], w[9], w[10], w[11]], K[2]);
        next = four_steps(next, f, shifts, [w[12], w[13], w[14], w[15]], K[3]);
        let shifts = [5, 9, 14, 20];
        next = four_steps(next, g, shifts, [w[1], w[6], w[11], w[0]], K[4]);
        next = four_steps(next, g, shifts, [w[5], w[10], w[15], w[4]], K[5]);
        next = four_steps(next, g, shifts, [w[9], w[14], w[3], w[8]], K[6]);
        next = four_steps(next, g, shifts, [w[13], w[2], w[7], w[12]], K[7]);
        let shifts = [4, 11, 16, 23];
        next = four_steps(next, h, shifts, [w[5], w[8], w[11], w[14]], K[8]);
        next = four_steps(next, h, shifts, [w[1], w[4], w[7], w[10]], K[9]);
        next = four_steps(next, h, shifts, [w[13], w[0], w[3], w[6]], K[10]);
        next = four_steps(next, h, shifts, [w[9], w[12], w[15], w[2]], K[11]);
        let shifts = [6, 10, 15, 21];
        next = four_steps(next, i, shifts, [w[0], w[7], w[14], w[5]], K[12]);
        next = four_steps(next, i, shifts, [w[12], w[3], w[10], w[1]], K[13]);
        next = four_steps(next, i, shifts, [w[8], w[15], w[6], w[13]], K[14]);
        next = four_steps(next, i, shifts, [w[4], w[11], w[2], w[9]], K[15]);
        let [a0, b0, c0, d0] = state;
        let [a1, b1, c1, d1] = next;
        state = [
            a0.wrapping_add(a1),
            b0.wrapping_add(b1),
            c0.wrapping_add(c1),
            d0.wrapping_add(d1),
        ];
    }
    state
}

/// Four steps, each of which makes one word of the state anew.
#[expect(
    clippy::inline_always,
    reason = "the calls would be longer than the steps"
)]
#[inline(always)]
fn four_steps(
    [a, b, c, d]: [u32; 4],
    mix: impl Fn(u32, u32, u32, u32) -> u32,
    shifts: [u32; 4],
    words: [U32; 4],
    constants: [u32; 4],
) -> [u32; 4] {
    let [w0, w1, w2, w3] = words;
    let [k0, k1, k2, k3] = constants;
    let sum = |state: u32, word: U32, k: u32| state.wrapping_add(word.get()).wrapping_add(k);
    let a = mix(sum(a, w0, k0), b, c, d)
        .rotate_left(shifts[0])
        .wrapping_add(b);
    let d = mix(sum(d, w1, k1), a, b, c)
        .rotate_left(shifts[1])
        .wrapping_add(a);
    let c = mix(sum(c, w2, k2), d, a, b)
        .rotate_left(shifts[2])
        .wrapping_add(d);
    let b = mix(sum(b, w3, k3), c, d, a)
        .rotate_left(shifts[3])
        .wrapping_add(c);
    [a, b, c, d]
}

// The functions of the four rounds, of which `b` comes last out of the chain, added to `sum`.

fn f(sum: u32, b: u32, c: u32, d: u32) -> u32 {
    settled(sum).wrapping_add(((c ^ d) & b) ^ d)
}

/// The two halves have no bit in common, so that adding them is joining them.
fn g(sum: u32, b: u32, c: u32, d: u32) -> u32 {
    settled(sum.wrapping_add(c & !d)).wrapping_add(b & d)
}

fn h(sum: u32, b: u32, c: u32, d: u32) -> u32 {
    settled(sum).wrapping_add(settled(c ^ d) ^ b)
}

fn i(sum: u32, b: u32, c: u32, d: u32) -> u32 {
    settled(sum).wrapping_add((b | !d) ^ c)
}

/// `word`, of which the compiler does not know how it was made.
fn settled(word: u32) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        let mut word = word;
        // SAFETY: no instruction; the register is given back as it was.
        unsafe {
            std::arch::asm!(
                "/* {0:e} */",
                inout(reg) word,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        word
    }
    #[cfg(not(target_arch = "x86_64"))]
    word
}

/// Of step `n`, from 1: the integer part of `abs(sin(n)) * 2^32`.
const K: [[u32; 4]; 16] = [
    [0xd76a_a478, 0xe8c7_b756, 0x2420_70db, 0xc1bd_ceee],
    [0xf57c_0faf, 0x4787_c62a, 0xa830_4613, 0xfd46_9501],
    [0x6980_98d8, 0x8b44_f7af, 0xffff_5bb1, 0x895c_d7be],
    [0x6b90_1122, 0xfd98_7193, 0xa679_438e, 0x49b4_0821],
    [0xf61e_2562, 0xc040_b340, 0x265e_5a51, 0xe9b6_c7aa],
    [0xd62f_105d, 0x0244_1453, 0xd8a1_e681, 0xe7d3_fbc8],
    [0x21e1_cde6, 0xc337_07d6, 0xf4d5_0d87, 0x455a_14ed],
    [0xa9e3_e905, 0xfcef_a3f8, 0x676f_02d9, 0x8d2a_4c8a],
    [0xfffa_3942, 0x8771_f681, 0x6d9d_6122, 0xfde5_380c],
    [0xa4be_ea44, 0x4bde_cfa9, 0xf6bb_4b60, 0xbebf_bc70],
    [0x289b_7ec6, 0xeaa1_27fa, 0xd4ef_3085, 0x0488_1d05],
    [0xd9d4_d039, 0xe6db_99e5, 0x1fa2_7cf8, 0xc4ac_5665],
    [0xf429_2244, 0x432a_ff97, 0xab94_23a7, 0xfc93_a039],
    [0x655b_59c3, 0x8f0c_cc92, 0xffef_f47d, 0x8584_5dd1],
    [0x6fa8_7e4f, 0xfe2c_e6e0, 0xa301_4314, 0x4e08_11a1],
    [0xf753_7e82, 0xbd3a_f235, 0x2ad7_d2bb, 0xeb86_d391],
];

#[cfg(test)]
mod tests {
    use md5_crate::Digest;

    use super::super::digest::hex;
    use super::md5;

    #[test]
    fn examples_of_the_rfc() {
        let digits = "1234567890".repeat(8);
        for (text, digest) in [
            ("", "d41d8cd98f00b204e9800998ecf8427e"),
            ("a", "0cc175b9c0f1b6a831c399e269772661"),
            ("abc", "900150983cd24fb0d6963f7d28e17f72"),
            ("message digest", "f96b697d7cb7938d525a2f31aaf161d0"),
            (
                "abcdefghijklmnopqrstuvwxyz",
                "c3fcd3d76192e4007dfb496cca67e13b",
            ),
            (digits.as_str(), "57edf4a22be3c955ac49da2e2107b67a"),
        ] {
            assert_eq!(hex(&md5(text.as_bytes())), digest, "{text:?}");
        }
    }

    #[test]
    fn every_length_up_to_five_blocks_is_what_another_implementation_says() {
        let bytes: Vec<u8> = (0..320_u32)
            .map(|at| at.wrapping_mul(167).to_le_bytes()[0])
            .collect();
        for length in 0..=bytes.len() {
            let bytes = bytes.get(..length).unwrap_or_default();
            let expected: [u8; 16] = md5_crate::Md5::digest(bytes).into();
            assert_eq!(md5(bytes), expected, "{length}");
        }
    }
}
