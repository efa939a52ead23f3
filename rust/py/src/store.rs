//! Bindings of `vllm_neuron_core::store`.

use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use pyo3::exceptions::{PyBufferError, PyKeyError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping, PyMemoryView};
use vllm_neuron_core::digest::Digest;
use vllm_neuron_core::entry::Kind;
use vllm_neuron_core::store::{self, Lookup, SectionBytes, StoreError, Verify};

use crate::buffer::SharedBytes;
use crate::error::exception;

/// First and longest pause between two attempts at a lock that another process holds.
const LOCK_PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// A directory of entries, used by any number of processes.
#[pyclass(frozen, module = "vllm_neuron._core")]
pub(crate) struct Store {
    store: Arc<store::Store>,
    /// Only locked while attached to the interpreter, so that no fork of Python's finds it locked.
    problems: Mutex<Vec<Py<StoreProblem>>>,
}

/// Something that went wrong without stopping anything.
#[pyclass(frozen, get_all, module = "vllm_neuron._core")]
pub(crate) struct StoreProblem {
    path: Option<String>,
    reason: String,
    error: Py<PyAny>,
}

#[pymethods]
impl StoreProblem {
    fn __repr__(&self) -> String {
        format!("StoreProblem({:?})", self.reason)
    }
}

/// What a listing tells of one entry.
#[pyclass(frozen, get_all, module = "vllm_neuron._core")]
pub(crate) struct EntryInfo {
    key: String,
    kind: &'static str,
    path: String,
    size_bytes: u64,
    modified_s: f64,
    sections: Py<PyDict>,
}

/// One entry, held: its bytes stay as they are even when the file is removed.
#[pyclass(frozen, module = "vllm_neuron._core")]
pub(crate) struct Entry(store::Entry);

/// Exporter of the bytes of one section, behind the memoryview that `Entry.section` gives.
#[pyclass(frozen, module = "vllm_neuron._core")]
pub(crate) struct Section(SectionBytes);

/// The single-flight lock of one key.
#[pyclass(module = "vllm_neuron._core")]
pub(crate) struct KeyLock {
    store: Arc<store::Store>,
    lock: store::KeyLock,
    note: String,
}

#[pymethods]
impl Store {
    #[new]
    // The path is made for the call.
    #[allow(clippy::needless_pass_by_value)]
    fn new(py: Python<'_>, root: PathBuf) -> PyResult<Self> {
        let store = store::Store::new(&root).map_err(|error| store_error(py, &error))?;
        Ok(Self {
            store: Arc::new(store),
            problems: Mutex::new(Vec::new()),
        })
    }

    /// The directory, absolute.
    #[getter]
    fn root(&self) -> String {
        text(self.store.root())
    }

    /// The entry of a key, or None: it never fails on what it finds.
    #[pyo3(signature = (kind, key, *, verify=None))]
    fn get(
        &self,
        py: Python<'_>,
        kind: &str,
        key: &str,
        verify: Option<Vec<String>>,
    ) -> PyResult<Option<Entry>> {
        let (kind, key) = parse(kind, key)?;
        let lookup = py.detach(|| match verify {
            None => self.store.get(kind, &key, Verify::All),
            Some(names) => {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                self.store.get(kind, &key, Verify::Sections(&names))
            }
        });
        match lookup {
            Lookup::Hit(entry) => Ok(Some(Entry(entry))),
            Lookup::Miss => Ok(None),
            Lookup::Refused(error) => {
                self.note(py, &error)?;
                Ok(None)
            }
        }
    }

    /// Publishes an entry; False if a sound one was there already.
    fn put(
        &self,
        py: Python<'_>,
        kind: &str,
        key: &str,
        sections: &Bound<'_, PyMapping>,
    ) -> PyResult<bool> {
        let (kind, key) = parse(kind, key)?;
        let mut owned = Vec::new();
        for item in sections.items()?.iter() {
            let (name, content) = item.extract::<(String, Bound<'_, PyAny>)>()?;
            owned.push((name, SharedBytes::new(&content)?));
        }
        let sections: Vec<(&str, &[u8])> = owned
            .iter()
            .map(|(name, content)| (name.as_str(), content.as_ref()))
            .collect();
        let published = py
            .detach(|| self.store.put(kind, &key, &sections))
            .map_err(|error| store_error(py, &error))?;
        for problem in &published.problems {
            self.note(py, problem)?;
        }
        Ok(published.is_new)
    }

    /// Takes an entry away that is sound but of no use; False if there is none.
    fn remove(&self, py: Python<'_>, kind: &str, key: &str) -> PyResult<bool> {
        let (kind, key) = parse(kind, key)?;
        py.detach(|| self.store.remove(kind, &key))
            .map_err(|error| store_error(py, &error))
    }

    /// The single-flight lock of a key, not taken yet. `note` says to those who wait what is done.
    #[pyo3(signature = (key, *, note=""))]
    fn lock(&self, key: &str, note: &str) -> PyResult<KeyLock> {
        let lock = self.store.lock(&parse_key(key)?);
        Ok(KeyLock {
            store: Arc::clone(&self.store),
            lock,
            note: note.to_owned(),
        })
    }

    /// The entries by their headers, in no order.
    fn entries(&self, py: Python<'_>) -> PyResult<Vec<EntryInfo>> {
        let (found, problems) = py.detach(|| self.store.entries());
        for problem in &problems {
            self.note(py, problem)?;
        }
        found
            .into_iter()
            .map(|info| entry_info(py, &info))
            .collect()
    }

    /// What went wrong since the last call.
    fn take_problems(&self) -> Vec<Py<StoreProblem>> {
        std::mem::take(&mut *self.problems.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// How often things happened through this object.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = PyDict::new(py);
        for (name, count) in self.store.counters().named() {
            counters.set_item(name, count)?;
        }
        Ok(counters)
    }

    fn __repr__(&self) -> String {
        format!("Store({:?})", text(self.store.root()))
    }
}

impl Store {
    fn note(&self, py: Python<'_>, error: &StoreError) -> PyResult<()> {
        let problem = StoreProblem {
            path: error.path().map(text),
            reason: error.to_string(),
            error: store_error(py, error).into_value(py).into_any(),
        };
        let problem = Py::new(py, problem)?;
        self.problems
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(problem);
        Ok(())
    }
}

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

#[pymethods]
impl KeyLock {
    /// Waits for the lock; False if `timeout_s` passed first. None waits without end.
    #[pyo3(signature = (timeout_s=None))]
    fn acquire(&mut self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        let deadline = match timeout_s {
            None => None,
            Some(seconds) => {
                let wait = Duration::try_from_secs_f64(if seconds < 0.0 { 0.0 } else { seconds })
                    .map_err(|_| {
                    PyValueError::new_err(format!("timeout_s: expected seconds, found {seconds}"))
                })?;
                Instant::now().checked_add(wait)
            }
        };
        let (mut pause, longest) = LOCK_PAUSES;
        loop {
            let acquired = py
                .detach(|| self.lock.try_acquire(&self.store, &self.note))
                .map_err(|error| store_error(py, &error))?;
            if acquired {
                return Ok(true);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
            py.detach(|| std::thread::sleep(left.map_or(pause, |left| pause.min(left))));
            py.check_signals()?;
            pause = longest.min(pause * 2);
        }
    }

    /// Who holds the lock, as far as it can be read.
    fn holder<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(holder) = py.detach(|| self.lock.holder(&self.store)) else {
            return Ok(None);
        };
        let fields = PyDict::new(py);
        fields.set_item("pid", holder.pid)?;
        fields.set_item("host", holder.host)?;
        fields.set_item("boot_id", holder.boot_id)?;
        fields.set_item("time_s", holder.time_s)?;
        fields.set_item("note", holder.note)?;
        Ok(Some(fields))
    }

    /// Frees the lock. Without effect if it is not held.
    fn release(&mut self) {
        self.lock.release();
    }

    /// Whether this process holds the lock through this object.
    #[getter]
    fn held(&self) -> bool {
        self.lock.is_held()
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        let py = slf.py();
        if !slf.borrow_mut().acquire(py, None)? {
            return Err(PyRuntimeError::new_err(
                "a lock without a deadline was not acquired",
            ));
        }
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&mut self, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.lock.release();
    }
}

fn parse(kind: &str, key: &str) -> PyResult<(Kind, Digest)> {
    let kind = kind
        .parse()
        .map_err(|error| PyValueError::new_err(format!("kind: {error}")))?;
    Ok((kind, parse_key(key)?))
}

fn parse_key(key: &str) -> PyResult<Digest> {
    key.parse()
        .map_err(|error| PyValueError::new_err(format!("key: {error}")))
}

/// A path for Python; names that are no UTF-8 lose what cannot be shown.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
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

fn entry_info(py: Python<'_>, info: &store::EntryInfo) -> PyResult<EntryInfo> {
    let since = info.modified.duration_since(SystemTime::UNIX_EPOCH);
    Ok(EntryInfo {
        key: info.layout.key.to_string(),
        kind: info.layout.kind.name(),
        path: text(&info.path),
        size_bytes: info.layout.total_bytes,
        modified_s: since.map_or(0.0, |elapsed| elapsed.as_secs_f64()),
        sections: section_lengths(py, &info.layout.sections)?.unbind(),
    })
}

/// The exception for a failure of the store.
fn store_error(py: Python<'_>, error: &StoreError) -> PyErr {
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

/// Called by the interpreter in a forked child.
#[pyfunction]
fn _after_fork_in_child() {
    store::after_fork_in_child();
}

/// Adds this file's classes and functions to the extension module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Store>()?;
    module.add_class::<StoreProblem>()?;
    module.add_class::<EntryInfo>()?;
    module.add_class::<Entry>()?;
    module.add_class::<KeyLock>()?;
    let hook = wrap_pyfunction!(_after_fork_in_child, module)?;
    let hooks = PyDict::new(module.py());
    hooks.set_item("after_in_child", hook)?;
    module
        .py()
        .import("os")?
        .getattr("register_at_fork")?
        .call((), Some(&hooks))?;
    Ok(())
}
