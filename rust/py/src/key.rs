//! Bindings of `vllm_neuron_core::key` and `digest`.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};
use vllm_neuron_core::digest::Digest;
use vllm_neuron_core::key;

use crate::buffer::SharedBytes;
use crate::graph;

/// Bytes from which hashing is worth releasing the GIL: below, it takes a few microseconds.
const DETACH_FROM_BYTES: usize = 1 << 16;

/// A finished key.
#[pyclass(frozen, module = "vllm_neuron._core")]
pub(crate) struct Key(key::Key);

#[pymethods]
impl Key {
    /// The key, 64 hex digits.
    #[getter]
    fn hex(&self) -> String {
        self.0.digest.to_string()
    }

    /// The first 32 hex digits, for people.
    #[getter]
    fn short(&self) -> String {
        format!("{:.32}", self.0.digest)
    }

    /// Digest of each component by its name, in the order they were added.
    #[getter]
    fn components<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let components = PyDict::new(py);
        for (name, digest) in &self.0.components {
            components.set_item(name, digest.to_string())?;
        }
        Ok(components)
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other
            .cast::<Self>()
            .is_ok_and(|other| other.get().0.digest == self.0.digest)
    }

    fn __hash__(&self) -> u64 {
        let head = self.0.digest.as_bytes().first_chunk();
        u64::from_le_bytes(head.copied().unwrap_or_default())
    }

    fn __repr__(&self) -> String {
        format!("Key('{}')", self.0.digest)
    }
}

/// Collects the named components of a key, in order.
#[pyclass(module = "vllm_neuron._core")]
pub(crate) struct KeyBuilder(key::KeyBuilder);

#[pymethods]
impl KeyBuilder {
    #[new]
    fn new(domain: &str) -> PyResult<Self> {
        key::KeyBuilder::new(domain).map(Self).map_err(value_error)
    }

    /// Adds a component; a str counts as its UTF-8 bytes.
    fn add(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let added = match value.cast::<PyString>() {
            Ok(text) => self.0.add(name, text.to_str()?.as_bytes()),
            Err(_) => self.0.add(name, SharedBytes::new(value)?.as_ref()),
        };
        added.map_err(value_error)
    }

    /// The key of the components added so far.
    fn finish(&self) -> PyResult<Key> {
        self.0.finish().map(Key).map_err(value_error)
    }
}

/// BLAKE3-256 of a buffer, 64 hex digits.
#[pyfunction]
fn digest(py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<String> {
    let bytes = SharedBytes::new(data)?;
    Ok(digest_of(py, bytes.as_ref()).to_string())
}

/// The canonical bytes of a graph of `ATen` operators.
#[pyfunction]
fn graph_bytes<'py>(graph_module: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    Ok(PyBytes::new(
        graph_module.py(),
        &graph::graph_bytes(graph_module)?,
    ))
}

/// BLAKE3-256 of the canonical bytes of a graph, 64 hex digits.
#[pyfunction]
fn graph_digest(graph_module: &Bound<'_, PyAny>) -> PyResult<String> {
    let bytes = graph::graph_bytes(graph_module)?;
    Ok(digest_of(graph_module.py(), &bytes).to_string())
}

/// The digest of bytes that nobody changes; large ones without the GIL.
pub(crate) fn digest_of(py: Python<'_>, bytes: &[u8]) -> Digest {
    if bytes.len() < DETACH_FROM_BYTES {
        Digest::of(bytes)
    } else {
        py.detach(|| Digest::of(bytes))
    }
}

fn value_error(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Adds this file's classes and functions to the extension module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Key>()?;
    module.add_class::<KeyBuilder>()?;
    module.add_function(wrap_pyfunction!(digest, module)?)?;
    module.add_function(wrap_pyfunction!(graph_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(graph_digest, module)?)
}
