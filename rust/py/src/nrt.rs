//! Bindings of `vllm_neuron_core::nrt`. Every call into the runtime is made without the GIL.

use std::path::PathBuf;
use std::slice;
use std::sync::Arc;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use vllm_neuron_core::nrt::{self, Library, NrtError, Placement, Status, abi};

use crate::buffer::SharedBytes;
use crate::error::exception;

/// Adds this file's classes and functions to the extension module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NrtLibrary>()?;
    module.add_class::<NrtTensor>()?;
    module.add_class::<NrtTensorSet>()?;
    module.add_class::<NrtModel>()?;
    module.add_function(wrap_pyfunction!(nrt_status, module)?)?;
    module.add_function(wrap_pyfunction!(nrt_layout, module)?)
}

/// Maps an error to `vllm_neuron.errors.ExecutionError` with `status`, `call` and `reason`.
fn raise(py: Python<'_>, error: &NrtError) -> PyErr {
    let details = PyDict::new(py);
    let call = match error {
        NrtError::Call { call, .. } | NrtError::Refused { call, .. } => Some(*call),
        _ => None,
    };
    let message = error.to_string();
    let filled = details
        .set_item("bucket", py.None())
        .and_then(|()| details.set_item("status", error.status().map(|status| status.0)))
        .and_then(|()| details.set_item("call", call))
        .and_then(|()| details.set_item("reason", &message));
    match filled {
        Ok(()) => exception("ExecutionError", &message, &details),
        Err(error) => error,
    }
}

fn without_gil<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<T, NrtError> + Send,
) -> PyResult<T> {
    py.detach(call).map_err(|error| raise(py, &error))
}

/// Name and meaning of an `NRT_STATUS`, None for one that is not known.
#[pyfunction]
fn nrt_status(value: i32) -> Option<(&'static str, &'static str)> {
    let status = Status(value);
    Some((status.name()?, status.meaning()?))
}

/// Sizes and offsets of the C structs as compiled.
#[pyfunction]
fn nrt_layout(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let layout = PyDict::new(py);
    for (name, value) in abi::LAYOUT {
        layout.set_item(name, value)?;
    }
    Ok(layout)
}

/// The runtime library of this process.
#[pyclass(frozen, module = "vllm_neuron._core")]
struct NrtLibrary {
    inner: &'static Library,
}

#[pymethods]
impl NrtLibrary {
    /// Loads the library; the first one that is loaded stays for the life of the process.
    #[staticmethod]
    #[pyo3(signature = (path=None))]
    fn open(py: Python<'_>, path: Option<PathBuf>) -> PyResult<Self> {
        let inner = without_gil(py, move || Library::open(path.as_deref()))?;
        Ok(Self { inner })
    }

    #[getter]
    fn path(&self) -> PathBuf {
        self.inner.path().to_owned()
    }

    /// Version as numbers and text.
    fn version(&self, py: Python<'_>) -> PyResult<([u64; 4], String)> {
        let version = without_gil(py, || self.inner.version())?;
        Ok((version.numbers, version.detail))
    }

    fn init(&self, py: Python<'_>) -> PyResult<()> {
        without_gil(py, || self.inner.init())
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }

    fn total_cores(&self, py: Python<'_>) -> PyResult<u32> {
        without_gil(py, || self.inner.total_cores())
    }

    fn visible_cores(&self, py: Python<'_>) -> PyResult<u32> {
        without_gil(py, || self.inner.visible_cores())
    }

    /// Family, size and architecture name, or None.
    fn instance(&self, py: Python<'_>) -> PyResult<Option<(u32, u32, String)>> {
        let info = without_gil(py, || self.inner.instance())?;
        Ok(info.map(|info| (info.family, info.size, info.architecture)))
    }

    /// Bytes used and bytes there are on a logical core, or None.
    fn memory(&self, py: Python<'_>, core: u32) -> PyResult<Option<(u64, u64)>> {
        let stats = without_gil(py, || self.inner.memory(core))?;
        Ok(stats.map(|stats| (stats.used, stats.limit)))
    }

    /// Allocates device memory, or host memory that the device reads.
    #[pyo3(signature = (size, *, core=0, name="", on_host=false))]
    fn allocate(
        &self,
        py: Python<'_>,
        size: usize,
        core: i32,
        name: &str,
        on_host: bool,
    ) -> PyResult<NrtTensor> {
        let placement = if on_host {
            Placement::Host
        } else {
            Placement::Device
        };
        let tensor = without_gil(py, || {
            nrt::Tensor::allocate(self.inner, placement, core, size, name)
        })?;
        Ok(NrtTensor {
            inner: Arc::new(tensor),
        })
    }

    fn tensor_set(&self, py: Python<'_>) -> PyResult<NrtTensorSet> {
        let inner = without_gil(py, || nrt::TensorSet::new(self.inner))?;
        Ok(NrtTensorSet { inner })
    }

    /// Loads a NEFF; a read-only buffer is handed to the runtime in place.
    #[pyo3(signature = (neff, *, core=0, rank=None))]
    fn load(
        &self,
        neff: &Bound<'_, PyAny>,
        core: i32,
        rank: Option<(u32, u32)>,
    ) -> PyResult<NrtModel> {
        let bytes = SharedBytes::new(neff)?;
        let inner = without_gil(neff.py(), || match rank {
            None => nrt::Model::load(self.inner, bytes.as_ref(), core),
            Some((rank, ranks)) => {
                nrt::Model::load_collectives(self.inner, bytes.as_ref(), core, rank, ranks)
            }
        })?;
        Ok(NrtModel { inner })
    }
}

/// Memory of the runtime.
#[pyclass(frozen, module = "vllm_neuron._core")]
struct NrtTensor {
    inner: Arc<nrt::Tensor>,
}

#[pymethods]
impl NrtTensor {
    #[getter]
    fn size(&self) -> usize {
        self.inner.size()
    }

    fn address(&self) -> usize {
        self.inner.address()
    }

    #[pyo3(signature = (offset, size, *, name=""))]
    fn slice(&self, py: Python<'_>, offset: usize, size: usize, name: &str) -> PyResult<Self> {
        let slice = without_gil(py, || self.inner.slice(offset, size, name))?;
        Ok(Self {
            inner: Arc::new(slice),
        })
    }

    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        without_gil(py, || self.inner.clear())
    }

    /// Copies the bytes of a buffer to the device.
    #[pyo3(signature = (source, *, offset=0))]
    fn write(&self, source: &Bound<'_, PyAny>, offset: usize) -> PyResult<()> {
        let buffer = PyUntypedBuffer::get(source)?;
        let from = bytes_of(&buffer)?;
        without_gil(source.py(), || self.inner.write(offset, from))
    }

    /// Copies bytes of the device into a writable buffer.
    #[pyo3(signature = (target, *, offset=0))]
    fn read(&self, target: &Bound<'_, PyAny>, offset: usize) -> PyResult<()> {
        let mut buffer = PyUntypedBuffer::get(target)?;
        let into = bytes_of_mut(&mut buffer)?;
        without_gil(target.py(), || self.inner.read(offset, into))
    }
}

/// The bytes of a buffer, while it is held.
fn bytes_of(buffer: &PyUntypedBuffer) -> PyResult<&[u8]> {
    check_contiguous(buffer)?;
    if buffer.len_bytes() == 0 {
        return Ok(&[]);
    }
    let start = buffer.buf_ptr().cast::<u8>().cast_const();
    // SAFETY: the buffer is contiguous and held for the lifetime of the slice. A caller who writes
    // to it meanwhile gets torn bytes, as with `memcpy`.
    Ok(unsafe { slice::from_raw_parts(start, buffer.len_bytes()) })
}

/// The bytes of a writable buffer, while it is held.
fn bytes_of_mut(buffer: &mut PyUntypedBuffer) -> PyResult<&mut [u8]> {
    check_contiguous(buffer)?;
    if buffer.readonly() {
        return Err(PyBufferError::new_err(
            "expected a writable buffer, found a read-only one",
        ));
    }
    if buffer.len_bytes() == 0 {
        return Ok(&mut []);
    }
    let start = buffer.buf_ptr().cast::<u8>();
    // SAFETY: as above, and it is writable.
    Ok(unsafe { slice::from_raw_parts_mut(start, buffer.len_bytes()) })
}

fn check_contiguous(buffer: &PyUntypedBuffer) -> PyResult<()> {
    if buffer.is_c_contiguous() {
        return Ok(());
    }
    Err(PyBufferError::new_err(
        "expected a C-contiguous buffer, found a strided one",
    ))
}

/// Tensors by name.
#[pyclass(frozen, module = "vllm_neuron._core")]
struct NrtTensorSet {
    inner: nrt::TensorSet,
}

#[pymethods]
impl NrtTensorSet {
    fn add(&self, py: Python<'_>, name: &str, tensor: &NrtTensor) -> PyResult<()> {
        without_gil(py, || self.inner.add(name, &tensor.inner))
    }
}

/// A loaded NEFF.
#[pyclass(frozen, module = "vllm_neuron._core")]
struct NrtModel {
    inner: nrt::Model,
}

#[pymethods]
impl NrtModel {
    /// Name, whether it is an output, and bytes of each tensor, or None.
    fn tensors(&self, py: Python<'_>) -> PyResult<Option<Vec<(String, bool, u64)>>> {
        let found = without_gil(py, || self.inner.tensors())?;
        Ok(found.map(|tensors| {
            tensors
                .into_iter()
                .map(|info| (info.name, info.is_output, info.size))
                .collect()
        }))
    }

    fn execute(
        &self,
        py: Python<'_>,
        inputs: &NrtTensorSet,
        outputs: &NrtTensorSet,
    ) -> PyResult<()> {
        without_gil(py, || self.inner.execute(&inputs.inner, &outputs.inner))
    }
}
