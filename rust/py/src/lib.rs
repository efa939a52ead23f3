//! The extension module `vllm_neuron._core`: thin bindings, one file per core module.

use pyo3::prelude::*;

mod buffer;
mod canonical_graph;
mod error;
mod graph;
mod host;
mod key;
mod neff;
mod nrt;
mod store;

/// The module's initialisation function, called by the interpreter on import.
#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    neff::register(module)?;
    nrt::register(module)?;
    host::register(module)?;
    key::register(module)?;
    canonical_graph::register(module)?;
    store::register(module)?;
    Ok(())
}
