//! Bytes of any Python object with the buffer protocol, readable without the GIL.

use std::slice;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

/// The bytes of a Python buffer.
///
/// A read-only buffer (`bytes`, a view or map of what is read-only) is used in place and kept
/// alive; a writable one is copied, so that what was checked cannot change afterwards, and so is a
/// read-only `memoryview` of a writable object.
pub(crate) enum SharedBytes {
    /// A read-only buffer, borrowed from its exporter.
    Borrowed(PyUntypedBuffer),
    /// A copy of a writable buffer.
    Copied(Vec<u8>),
}

impl SharedBytes {
    /// Takes hold of the bytes of `object`; raises `BufferError` if they are not contiguous.
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err(
                "expected a C-contiguous buffer, found a strided one: pass bytes(view) instead",
            ));
        }
        let read_only = buffer.readonly() && !is_view_of_writable(object)?;
        let borrowed = Self::Borrowed(buffer);
        Ok(if read_only {
            borrowed
        } else {
            Self::Copied(borrowed.as_ref().to_vec())
        })
    }
}

/// Whether `object` is a `memoryview` of something that can still be written to.
fn is_view_of_writable(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    if !object.is_instance_of::<PyMemoryView>() {
        return Ok(false);
    }
    let exporter = object.getattr(intern!(object.py(), "obj"))?;
    Ok(!PyUntypedBuffer::get(&exporter)?.readonly())
}

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        match self {
            // An empty buffer may have a null pointer.
            Self::Borrowed(buffer) if buffer.len_bytes() == 0 => &[],
            // SAFETY: the buffer is C-contiguous (checked in `new`), so `len_bytes` bytes from
            // `buf_ptr` are readable; its exporter keeps them in place until the `Py_buffer` is
            // released, which happens in the drop of `buffer`, after this borrow. While it is
            // borrowed beyond `new` it is read-only: nothing writes to it through Python. Maps are
            // made of published files, which are never written to or truncated.
            Self::Borrowed(buffer) => unsafe {
                slice::from_raw_parts(
                    buffer.buf_ptr().cast::<u8>().cast_const(),
                    buffer.len_bytes(),
                )
            },
            Self::Copied(bytes) => bytes,
        }
    }
}
