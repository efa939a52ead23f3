//! Element types by the names used in `neff.json`.

/// Name and bytes per element. float32, float16, bfloat16 and int32 are seen in real files; the
/// other names are those of torch, which our own writer uses.
const ITEM_BYTES: [(&str, u64); 16] = [
    ("float64", 8),
    ("float32", 4),
    ("float16", 2),
    ("bfloat16", 2),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
    ("int64", 8),
    ("int32", 4),
    ("int16", 2),
    ("int8", 1),
    ("uint64", 8),
    ("uint32", 4),
    ("uint16", 2),
    ("uint8", 1),
    ("bool", 1),
    ("complex64", 8),
];

/// Bytes per element of `dtype`, or `None` for a name that is not known.
pub fn item_bytes(dtype: &str) -> Option<u64> {
    ITEM_BYTES
        .iter()
        .find(|(name, _)| *name == dtype)
        .map(|(_, bytes)| *bytes)
}
