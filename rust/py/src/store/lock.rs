//! The single-flight lock of a key.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use vllm_neuron_core::store;

use super::error::store_error;

/// First and longest pause between two attempts at a lock that another process holds.
const LOCK_PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// The single-flight lock of one key.
#[pyclass(module = "vllm_neuron._core")]
pub(crate) struct KeyLock {
    pub(super) store: Arc<store::Store>,
    pub(super) lock: store::KeyLock,
    pub(super) note: String,
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
