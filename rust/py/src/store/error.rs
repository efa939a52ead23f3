//! The exceptions of the store.

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use vllm_neuron_core::store::StoreError;

use super::text;
use crate::error::exception;

/// The exception for a failure of the store.
pub(super) fn store_error(py: Python<'_>, error: &StoreError) -> PyErr {
    make_error(py, error).unwrap_or_else(|failure| failure)
}

fn make_error(py: Python<'_>, error: &StoreError) -> PyResult<PyErr> {
    let message = error.to_string();
    let details = PyDict::new(py);
    details.set_item("path", error.path().map(text))?;
    let class = match error {
        StoreError::Corrupt { source, .. } => {
            details.set_item("offset", source.offset)?;
            details.set_item("expected", &source.expected)?;
            details.set_item("found", &source.found)?;
            "StoreCorruptError"
        }
        StoreError::Untrusted { reason, .. } => {
            details.set_item("reason", reason)?;
            "StoreUntrustedError"
        }
        StoreError::ReadOnly { source, .. } => {
            details.set_item("errno", source.raw_os_error())?;
            "StoreReadOnlyError"
        }
        StoreError::Io {
            path,
            operation,
            source,
        } => {
            // As Python's own: the interpreter chooses the subclass by errno and adds the path.
            let errno = source.raw_os_error();
            let reason = match errno {
                Some(errno) => py
                    .import("os")?
                    .call_method1("strerror", (errno,))?
                    .extract()?,
                None => source.to_string(),
            };
            let arguments = (errno, format!("cannot {operation}: {reason}"), text(path));
            return Ok(PyErr::from_value(
                py.get_type::<PyOSError>().call1(arguments)?,
            ));
        }
        StoreError::Section(_) => return Ok(PyValueError::new_err(message)),
        _ => "StoreError",
    };
    Ok(exception(class, &message, &details))
}
