//! The types of torch that occur in graphs.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// Looked up once per process.
pub(super) struct Torch {
    pub(super) graph_module: Py<PyType>,
    pub(super) node: Py<PyType>,
    pub(super) operator: Py<PyType>,
    pub(super) higher_order_operator: Py<PyType>,
    pub(super) tensor: Py<PyType>,
    pub(super) parameter: Py<PyType>,
    pub(super) fake_tensor: Py<PyType>,
    pub(super) size: Py<PyType>,
    pub(super) immutable_list: Py<PyType>,
    pub(super) immutable_dict: Py<PyType>,
    pub(super) dtype: Py<PyType>,
    pub(super) layout: Py<PyType>,
    pub(super) memory_format: Py<PyType>,
    pub(super) device: Py<PyType>,
    pub(super) operator_module: Py<PyAny>,
    pub(super) strided: Py<PyAny>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

impl Torch {
    pub(super) fn get(py: Python<'_>) -> PyResult<&Self> {
        TORCH.get_or_try_init(py, || {
            let class = |module: &str, name: &str| -> PyResult<Py<PyType>> {
                Ok(py
                    .import(module)?
                    .getattr(name)?
                    .cast_into::<PyType>()?
                    .unbind())
            };
            Ok(Self {
                graph_module: class("torch.fx", "GraphModule")?,
                node: class("torch.fx", "Node")?,
                operator: class("torch._ops", "OpOverload")?,
                higher_order_operator: class("torch._ops", "HigherOrderOperator")?,
                tensor: class("torch", "Tensor")?,
                parameter: class("torch.nn", "Parameter")?,
                fake_tensor: class("torch._subclasses.fake_tensor", "FakeTensor")?,
                size: class("torch", "Size")?,
                immutable_list: class("torch.fx.immutable_collections", "immutable_list")?,
                immutable_dict: class("torch.fx.immutable_collections", "immutable_dict")?,
                dtype: class("torch", "dtype")?,
                layout: class("torch", "layout")?,
                memory_format: class("torch", "memory_format")?,
                device: class("torch", "device")?,
                operator_module: py.import("_operator")?.into_any().unbind(),
                strided: py.import("torch")?.getattr("strided")?.unbind(),
            })
        })
    }
}
