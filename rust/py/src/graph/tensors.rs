//! Tensors: the values of placeholders, and constants with their content.

use std::slice;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyString, PyTuple};
use vllm_neuron_core::digest::Digest;
use vllm_neuron_core::key::token::TensorSpec;

use super::{Walk, address, index};
use crate::key::digest_of;

impl<'py> Walk<'py> {
    pub(super) fn placeholder_value(&mut self, node: &Bound<'py, PyAny>) -> PyResult<()> {
        let meta = node.getattr(intern!(self.py, "meta"))?;
        let value = meta.cast::<PyDict>()?.get_item(intern!(self.py, "val"))?;
        let Some(value) = value else {
            return Err(self.refuse(node, "the placeholder has no meta['val']"));
        };
        let torch = self.torch;
        if value.is_instance(torch.tensor.bind(self.py))? {
            let is_plain = value.get_type().is(&torch.tensor)
                || value.get_type().is(&torch.fake_tensor)
                || value.is_instance(torch.parameter.bind(self.py))?;
            if !is_plain {
                return Err(self.refuse(&value, "a tensor subclass has a meaning of its own"));
            }
            let spec = self.read_spec(&value)?;
            self.tokens.tensor(&spec.borrow());
            return Ok(());
        }
        if self.scalar(&value)? {
            return Ok(());
        }
        Err(self.refuse(
            &value,
            "only tensors and constants can be inputs of a static graph",
        ))
    }

    pub(super) fn constant_tensor(&mut self, tensor: &Bound<'py, PyAny>) -> PyResult<()> {
        if let Some(number) = self.constants.get(&address(tensor)) {
            self.tokens.constant_again(*number);
            return Ok(());
        }
        let spec = self.read_spec(tensor)?;
        if tensor.getattr("is_quantized")?.is_truthy()? || &*spec.device_type == "meta" {
            return Err(self.refuse(tensor, "the constant has no plain content"));
        }
        let storage: usize = tensor
            .call_method0("untyped_storage")?
            .call_method0("data_ptr")?
            .extract()?;
        let storage = self.storage_number(storage);
        let offset: i64 = tensor.call_method0("storage_offset")?.extract()?;
        let content = self.content_digest(tensor)?;
        self.tokens
            .constant(&spec.borrow(), storage, offset, &content);
        let number = index(self.constants.len());
        self.constants.insert(address(tensor), number);
        self.held.push(tensor.clone());
        Ok(())
    }

    /// Numbers storages by their memory; one without memory is not shared with anything.
    fn storage_number(&mut self, memory: usize) -> u32 {
        let next = self.storage_count;
        let number = if memory == 0 {
            next
        } else {
            *self.storages.entry(memory).or_insert(next)
        };
        if number == next {
            self.storage_count += 1;
        }
        number
    }

    /// Digest of the elements in row-major order.
    fn content_digest(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Digest> {
        let mut dense = tensor.call_method0("detach")?;
        for step in ["resolve_conj", "resolve_neg", "cpu", "contiguous"] {
            dense = dense.call_method0(step)?;
        }
        let size_bytes: usize = dense.getattr("nbytes")?.extract()?;
        if size_bytes == 0 {
            return Ok(Digest::of(&[]));
        }
        let memory: usize = dense.call_method0("data_ptr")?.extract()?;
        if memory == 0 {
            return Err(self.refuse(tensor, "the constant has no memory"));
        }
        // SAFETY: a contiguous CPU tensor has `nbytes` bytes at `data_ptr`, and `dense` keeps them
        // until the end of this function. A constant of a graph is not written to.
        let bytes = unsafe { slice::from_raw_parts(memory as *const u8, size_bytes) };
        Ok(digest_of(self.py, bytes))
    }

    fn read_spec(&mut self, tensor: &Bound<'py, PyAny>) -> PyResult<Spec> {
        let layout = tensor.getattr(intern!(self.py, "layout"))?;
        // A nested tensor calls itself strided and has neither sizes nor strides.
        if !layout.is(&self.torch.strided) || tensor.getattr("is_nested")?.is_truthy()? {
            return Err(self.refuse(tensor, "only strided tensors have a canonical form"));
        }
        let dtype = tensor.getattr(intern!(self.py, "dtype"))?;
        let device = tensor.getattr(intern!(self.py, "device"))?;
        let device_type = device.getattr(intern!(self.py, "type"))?;
        let shape = tensor.getattr(intern!(self.py, "shape"))?;
        let stride = tensor.call_method0(intern!(self.py, "stride"))?;
        Ok(Spec {
            dtype: self.plain_name(&dtype)?,
            device_type: device_type.cast::<PyString>()?.to_str()?.into(),
            layout: self.plain_name(&layout)?,
            shape: self.static_sizes(&shape)?,
            stride: self.static_sizes(&stride)?,
        })
    }

    fn static_sizes(&self, sizes: &Bound<'py, PyAny>) -> PyResult<Vec<i64>> {
        sizes
            .cast::<PyTuple>()?
            .iter()
            .map(|size| match size.cast_exact::<PyInt>() {
                Ok(size) => size.extract(),
                Err(_) => Err(self.refuse(&size, "only static shapes are compiled")),
            })
            .collect()
    }
}

struct Spec {
    dtype: Box<str>,
    device_type: Box<str>,
    layout: Box<str>,
    shape: Vec<i64>,
    stride: Vec<i64>,
}

impl Spec {
    fn borrow(&self) -> TensorSpec<'_> {
        TensorSpec {
            dtype: &self.dtype,
            device_type: &self.device_type,
            layout: &self.layout,
            shape: &self.shape,
            stride: &self.stride,
        }
    }
}
