//! Raising the exception classes of `vllm_neuron.errors`: a message and its parts by name.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use vllm_neuron_core::neff::{ErrorKind, NeffError};

/// Makes an instance of `vllm_neuron.errors.<class>` with `details` as its attributes.
///
/// If that fails (no such class), the failure itself is returned: it must not be swallowed.
pub(crate) fn exception(class: &str, message: &str, details: &Bound<'_, PyDict>) -> PyErr {
    let make = || -> PyResult<Bound<'_, PyAny>> {
        details
            .py()
            .import("vllm_neuron.errors")?
            .getattr(class)?
            .call((message,), Some(details))
    };
    match make() {
        Ok(instance) => PyErr::from_value(instance),
        Err(error) => error,
    }
}

/// Maps an error of the NEFF reader to `NeffFormatError` and its siblings.
pub(crate) fn neff_error(py: Python<'_>, error: &NeffError, path: Option<&str>) -> PyErr {
    let class = match error.kind() {
        ErrorKind::Checksum => "NeffChecksumError",
        ErrorKind::Unsupported => "NeffUnsupportedError",
        _ => "NeffFormatError",
    };
    let message = match path {
        Some(path) => format!("{path}: {error}"),
        None => error.to_string(),
    };
    let mismatch = error.mismatch();
    let details = PyDict::new(py);
    let filled = details
        .set_item("path", path)
        .and_then(|()| details.set_item("offset", mismatch.offset))
        .and_then(|()| details.set_item("inflated_offset", mismatch.inflated_offset))
        .and_then(|()| details.set_item("member", error.member()))
        .and_then(|()| details.set_item("expected", &mismatch.expected))
        .and_then(|()| details.set_item("found", &mismatch.found))
        .and_then(|()| details.set_item("status", error.kind().status()));
    match filled {
        Ok(()) => exception(class, &message, &details),
        Err(error) => error,
    }
}
