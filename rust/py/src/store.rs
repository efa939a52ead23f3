//! Bindings of `vllm_neuron_core::store`.

use pyo3::prelude::*;

/// Adds this file's classes and functions to the extension module.
pub(crate) fn register(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
