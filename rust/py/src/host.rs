//! Bindings of `vllm_neuron_host`: the custom calls of the host emulator's programs.

use std::ffi::CStr;

use pyo3::exceptions::PyMemoryError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use vllm_neuron_host::{HANDLERS, VERSION};

/// Adds this file's functions to the extension module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("HOST_KERNELS_VERSION", VERSION)?;
    module.add_function(wrap_pyfunction!(host_kernels, module)?)
}

/// The name that `register_custom_call_target` of jaxlib expects of a capsule.
const CAPSULE: &CStr = c"xla._CUSTOM_CALL_TARGET";

/// The handler of each custom call by its name, as jaxlib registers it.
#[pyfunction]
fn host_kernels(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let handlers = PyDict::new(py);
    for (name, handler) in HANDLERS {
        // SAFETY: a function lives as long as the process and needs no destructor; the name is
        // static.
        let capsule = unsafe {
            ffi::PyCapsule_New(
                (*handler as *const ()).cast_mut().cast(),
                CAPSULE.as_ptr(),
                None,
            )
        };
        if capsule.is_null() {
            return Err(PyErr::take(py).unwrap_or_else(|| PyMemoryError::new_err("a capsule")));
        }
        // SAFETY: a new reference, which is not null.
        handlers.set_item(name, unsafe { Bound::from_owned_ptr(py, capsule) })?;
    }
    Ok(handlers)
}
