//! Graph keys, entry store and NEFF container of vllm-neuron, without Python.
//!
//! * [`digest`]: BLAKE3-256 digests (cryptographic) and XXH3-128 checksums (rot and tearing).
//! * [`key`]: canonical bytes of a graph, and keys made of named components.
//! * [`entry`]: the format of one cache entry, one immutable file.
//! * [`store`]: a directory of entries: look up, publish, single-flight, list.
//! * [`neff`]: parse, validate and write NEFF containers.
//! * [`nrt`]: the C API of the Neuron runtime, by dlopen.

pub mod digest;
pub mod entry;
mod format;
pub mod key;
mod mmap;
pub mod neff;
pub mod nrt;
pub mod store;
