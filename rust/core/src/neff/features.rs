//! The feature bits of the header.
//!
//! Source: docs/neff-format.md, "Feature bits".

/// LNC > 1 (`neff_feature_vnc`).
pub(super) const VIRTUAL_NEURON_CORE: u64 = 1 << 10;
/// The last subgraph has a table for descriptor-generating DMAs.
pub(super) const DGE_TABLE: u64 = 1 << 12;
/// The last subgraph has a dynamic hardware DMA queue.
pub(super) const DYNAMIC_HARDWARE_QUEUE: u64 = 1 << 21;

/// The bits that are accepted: published by name, seen in real files, or (63) in the masks of real
/// runtimes. Bit 8 is left out on purpose: runtimes refused it and no file at hand has it.
const NAMES: [(u32, &str); 12] = [
    (0, "bin-weights"),
    (1, "collectives-offset"),
    (2, "custom-ops"),
    (3, "coalesced-cc"),
    (10, "virtual-neuron-core"),
    (11, "newer-than-v2"),
    (12, "dge-table"),
    (15, "bit-15"),
    (16, "bit-16"),
    (21, "dynamic-hardware-queue"),
    (24, "newer-than-v3"),
    (63, "bit-63"),
];

/// All accepted bits.
pub(super) const KNOWN: u64 = {
    let mut mask = 0;
    let mut rest: &[(u32, &str)] = &NAMES;
    while let [(bit, _), tail @ ..] = rest {
        mask |= 1 << *bit;
        rest = tail;
    }
    mask
};

/// Names of the bits set in `feature_bits`; unnamed bits are called `bit-N`.
pub fn names(feature_bits: u64) -> Vec<&'static str> {
    NAMES
        .iter()
        .filter(|(bit, _)| feature_bits & (1 << bit) != 0)
        .map(|(_, name)| *name)
        .collect()
}
