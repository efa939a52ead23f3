//! Eviction: its limits and its result.

use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use vllm_neuron_core::store;

use super::entry::seconds;
use super::text;

/// An entry that was removed.
#[pyclass(frozen, get_all, module = "vllm_neuron._core")]
pub(crate) struct EvictedEntry {
    key: String,
    path: String,
    size_bytes: u64,
    last_used_s: f64,
}

/// What an eviction did.
#[pyclass(frozen, get_all, module = "vllm_neuron._core")]
pub(crate) struct Eviction {
    removed: Vec<Py<EvictedEntry>>,
    removed_bytes: u64,
    kept: u64,
    kept_bytes: u64,
}

impl Eviction {
    pub(super) fn new(py: Python<'_>, eviction: &store::Eviction) -> PyResult<Self> {
        let removed = eviction.removed.iter();
        let removed_bytes = removed.clone().map(|entry| entry.size_bytes).sum();
        let removed = removed.map(|entry| {
            let entry = EvictedEntry {
                key: entry.key.to_string(),
                path: text(&entry.path),
                size_bytes: entry.size_bytes,
                last_used_s: seconds(entry.last_use),
            };
            Py::new(py, entry)
        });
        Ok(Self {
            removed: removed.collect::<PyResult<_>>()?,
            removed_bytes,
            kept: eviction.kept,
            kept_bytes: eviction.kept_bytes,
        })
    }
}

#[pymethods]
impl Eviction {
    fn __repr__(&self) -> String {
        format!(
            "Eviction(removed={}, removed_bytes={}, kept={}, kept_bytes={})",
            self.removed.len(),
            self.removed_bytes,
            self.kept,
            self.kept_bytes
        )
    }
}

/// A time span given in seconds.
pub(super) fn span(name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| PyValueError::new_err(format!("{name}: expected seconds, found {seconds}")))
}
