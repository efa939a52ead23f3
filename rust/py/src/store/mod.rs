//! Bindings of `vllm_neuron_core::store`.

mod entry;
mod error;
mod evict;
mod lock;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping};
use vllm_neuron_core::digest::Digest;
use vllm_neuron_core::entry::Kind;
use vllm_neuron_core::store::{self, Lookup, StoreError, Verify};

use self::entry::{Entry, EntryInfo, entry_info};
use self::error::store_error;
use self::evict::{EvictedEntry, Eviction, span};
use self::lock::KeyLock;
use crate::buffer::SharedBytes;

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

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (root, *, mac_key=None))]
    // The path is made for the call.
    #[allow(clippy::needless_pass_by_value)]
    fn new(py: Python<'_>, root: PathBuf, mac_key: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let mut store = store::Store::new(&root).map_err(|error| store_error(py, &error))?;
        if let Some(mac_key) = mac_key {
            let bytes = SharedBytes::new(mac_key)?;
            let found = bytes.as_ref().len();
            let mac_key = bytes.as_ref().try_into().map_err(|_| {
                PyValueError::new_err(format!("mac_key: expected 32 bytes, found {found}"))
            })?;
            store = store.with_mac_key(store::MacKey::new(mac_key));
        }
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
        if verify.is_none()
            && let Some(entry) = self.store.get_held(kind, &key, Verify::All)
        {
            return Ok(Some(Entry(entry)));
        }
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

    /// Removes the entries used longest ago until the rest keeps the limits.
    #[pyo3(signature = (*, max_size_bytes=None, max_age_s=None, min_age_s=60.0, dry_run=false))]
    fn evict(
        &self,
        py: Python<'_>,
        max_size_bytes: Option<u64>,
        max_age_s: Option<f64>,
        min_age_s: f64,
        dry_run: bool,
    ) -> PyResult<Eviction> {
        let limits = store::EvictionLimits {
            max_size_bytes,
            max_age: max_age_s.map(|age| span("max_age_s", age)).transpose()?,
            min_age: span("min_age_s", min_age_s)?,
            is_dry_run: dry_run,
        };
        let eviction = py
            .detach(|| self.store.evict(limits))
            .map_err(|error| store_error(py, &error))?;
        for problem in &eviction.problems {
            self.note(py, problem)?;
        }
        Eviction::new(py, &eviction)
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
    module.add_class::<Eviction>()?;
    module.add_class::<EvictedEntry>()?;
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
