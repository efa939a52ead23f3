//! Entries that are held, and what a listing tells of others.

use std::ffi::c_int;
use std::time::SystemTime;

use pyo3::exceptions::{PyBufferError, PyKeyError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMemoryView};
use vllm_neuron_core::store::{self, SectionBytes};

use super::error::store_error;
use super::text;

/// What a listing tells of one entry.
#[pyclass(frozen, get_all, module = "vllm_neuron._core")]
pub(crate) struct EntryInfo {
    key: String,
    kind: &'static str,
    path: String,
    size_bytes: u64,
    modified_s: f64,
    last_used_s: f64,
    sections: Py<PyDict>,
}

/// One entry, held: its bytes stay as they are even when the file is removed.
#[pyclass(frozen, module = "vllm_neuron._core")]
pub(crate) struct Entry(pub(super) store::Entry);

/// Exporter of the bytes of one section, behind the memoryview that `Entry.section` gives.
#[pyclass(frozen, module = "vllm_neuron._core")]
pub(crate) struct Section(SectionBytes);

#[pymethods]
impl Entry {
    /// `trace`, `lowering` or `neff`.
    #[getter]
    fn kind(&self) -> &'static str {
        self.0.kind().name()
    }

    /// The key, 64 hex digits.
    #[getter]
    fn key(&self) -> String {
        self.0.key().to_string()
    }

    /// Where the file was when it was opened.
    #[getter]
    fn path(&self) -> String {
        text(self.0.path())
    }

    /// Length of the file.
    #[getter]
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    /// Length in bytes of each section by its name, in file order.
    #[getter]
    fn sections<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        section_lengths(py, self.0.sections())
    }

    /// The content of a section, without a copy, read-only.
    fn section<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyMemoryView>> {
        let found = py
            .detach(|| self.0.section(name))
            .map_err(|error| store_error(py, &error))?;
        let bytes = found.ok_or_else(|| {
            let names: Vec<&str> = self
                .0
                .sections()
                .iter()
                .map(|section| section.name.as_str())
                .collect();
            let path = self.0.path().display();
            PyKeyError::new_err(format!("{path} has no section {name:?}, only {names:?}"))
        })?;
        PyMemoryView::from(Bound::new(py, Section(bytes))?.as_any())
    }

    fn __repr__(&self) -> String {
        format!(
            "Entry(kind={:?}, key={:?})",
            self.0.kind().name(),
            self.key()
        )
    }
}

#[pymethods]
impl Section {
    // SAFETY: `view` is the interpreter's, to be filled in; that is the contract of the slot.
    #[allow(clippy::needless_pass_by_value)]
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let bytes = slf.get().0.as_ref();
        let length = ffi::Py_ssize_t::try_from(bytes.len())
            .map_err(|_| PyBufferError::new_err("the section is too long for a buffer"))?;
        let start = bytes.as_ptr().cast_mut().cast();
        // SAFETY: `start` and `length` are a live slice, which the mapping that `slf` holds keeps
        // in place; `PyBuffer_FillInfo` takes a reference to `slf` for the view's life, and refuses
        // a writable view since the fourth argument says read-only.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, length, 1, flags) };
        if filled == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(slf.py()))
        }
    }
}

fn section_lengths<'py>(
    py: Python<'py>,
    sections: &[vllm_neuron_core::entry::SectionRow],
) -> PyResult<Bound<'py, PyDict>> {
    let lengths = PyDict::new(py);
    for section in sections {
        lengths.set_item(&section.name, section.range.len())?;
    }
    Ok(lengths)
}

pub(super) fn entry_info(py: Python<'_>, info: &store::EntryInfo) -> PyResult<EntryInfo> {
    Ok(EntryInfo {
        key: info.layout.key.to_string(),
        kind: info.layout.kind.name(),
        path: text(&info.path),
        size_bytes: info.layout.total_bytes,
        modified_s: seconds(info.modified),
        last_used_s: seconds(info.last_use),
        sections: section_lengths(py, &info.layout.sections)?.unbind(),
    })
}

/// Unix time in seconds.
pub(super) fn seconds(time: SystemTime) -> f64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0.0, |elapsed| elapsed.as_secs_f64())
}
