//! The Neuron runtime's C API (`libnrt.so.1`) by dlopen: own declarations, safe handles.
//!
//! [`Library`] is the loaded and, after [`Library::init`], initialised runtime: one for the life of
//! the process, never closed. [`Tensor`], [`TensorSet`] and [`Model`] own their handles and give
//! them back when dropped; a set keeps the tensors in it alive, as the API asks for. Every call that
//! fails is an [`NrtError`] with the runtime's own status, known or not.
//!
//! Source of every name, layout and rule: AWS's public documentation of the runtime, see
//! docs/hardware.md. Nothing here was run with a real libnrt.

pub mod abi;
mod error;
mod library;
mod model;
mod status;
mod tensor;

pub use error::NrtError;
pub use library::{InstanceInfo, Library, MemoryStats, Version, default_paths};
pub use model::{Model, TensorInfo};
pub use status::Status;
pub use tensor::{Placement, Tensor, TensorSet};
