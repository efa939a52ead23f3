//! BLAKE3-256 digests and XXH3-128 checksums.
