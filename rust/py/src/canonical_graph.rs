//! Bindings of `vllm_neuron_core::key::decode`: the parts of a decoded graph as Python objects.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyComplex, PyDict, PyList, PySlice, PyTuple};
use vllm_neuron_core::key::decode::parse_graph;
use vllm_neuron_core::key::graph::{
    Argument, Callable, CanonicalGraph as Graph, Constant, Operation, Spec, Value,
};

use crate::buffer::SharedBytes;
use crate::error::exception;

/// The nodes of one decoded graph.
#[pyclass(frozen, get_all, module = "vllm_neuron._core")]
pub(crate) struct CanonicalGraph {
    nodes: Py<PyTuple>,
}

/// One node of a decoded graph.
#[pyclass(frozen, get_all, module = "vllm_neuron._core")]
pub(crate) struct CanonicalNode {
    op: &'static str,
    offset: usize,
    target: Py<PyAny>,
    args: Py<PyTuple>,
    kwargs: Py<PyDict>,
}

/// The result of an earlier node, as an argument.
#[pyclass(frozen, get_all, module = "vllm_neuron._core")]
pub(crate) struct NodeReference {
    index: u32,
}

/// An object of torch, or a function, by its name.
#[pyclass(frozen, get_all, module = "vllm_neuron._core")]
pub(crate) struct NamedObject {
    kind: &'static str,
    name: String,
    overload: Option<String>,
}

/// Shape and type of a tensor.
#[pyclass(frozen, get_all, module = "vllm_neuron._core")]
pub(crate) struct CanonicalTensor {
    dtype: String,
    device_type: String,
    layout: String,
    shape: Py<PyTuple>,
    stride: Py<PyTuple>,
}

/// A constant tensor, whose content is known by its digest.
#[pyclass(frozen, get_all, module = "vllm_neuron._core")]
pub(crate) struct CanonicalConstant {
    tensor: Py<CanonicalTensor>,
    storage: u32,
    storage_offset: i64,
    digest: String,
}

/// Reads canonical graph bytes back into a graph.
#[pyfunction]
fn decode_graph(py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<Py<CanonicalGraph>> {
    let bytes = SharedBytes::new(data)?;
    let graph = match py.detach(|| parse_graph(bytes.as_ref())) {
        Ok(graph) => graph,
        Err(error) => {
            let details = PyDict::new(py);
            details.set_item("offset", error.offset)?;
            details.set_item("expected", &error.expected)?;
            details.set_item("found", &error.found)?;
            return Err(exception("GraphFormatError", &error.to_string(), &details));
        }
    };
    let mut decoder = Decoder {
        py,
        constants: Vec::new(),
        graphs: Vec::new(),
    };
    decoder.graph(&graph)
}

/// Makes Python objects; what is used again is the same object again.
struct Decoder<'py> {
    py: Python<'py>,
    constants: Vec<Py<PyAny>>,
    graphs: Vec<Py<PyAny>>,
}

impl<'py> Decoder<'py> {
    fn graph(&mut self, graph: &Graph<'_>) -> PyResult<Py<CanonicalGraph>> {
        let mut nodes = Vec::with_capacity(graph.nodes.len());
        for node in &graph.nodes {
            let mut made = CanonicalNode {
                op: "",
                offset: node.offset,
                target: self.py.None(),
                args: PyTuple::empty(self.py).unbind(),
                kwargs: PyDict::new(self.py).unbind(),
            };
            match &node.operation {
                Operation::Placeholder(value) => {
                    made.op = "placeholder";
                    made.target = match value {
                        None => self.py.None(),
                        Some(Value::Tensor(spec)) => self.tensor(spec)?.into_any(),
                        Some(Value::Scalar(scalar)) => self.argument(scalar)?.unbind(),
                    };
                }
                Operation::GetAttr(constant) => {
                    made.op = "get_attr";
                    made.target = self.constant(constant)?;
                }
                Operation::CallFunction {
                    target,
                    arguments,
                    keywords,
                } => {
                    made.op = "call_function";
                    made.target = self.callable(*target)?.unbind();
                    made.args = PyTuple::new(self.py, self.arguments(arguments)?)?.unbind();
                    made.kwargs = self.named(keywords)?.unbind();
                }
                Operation::Output(results) => {
                    made.op = "output";
                    made.args = PyTuple::new(self.py, [self.argument(results)?])?.unbind();
                }
            }
            nodes.push(Bound::new(self.py, made)?);
        }
        let nodes = PyTuple::new(self.py, nodes)?.unbind();
        Py::new(self.py, CanonicalGraph { nodes })
    }

    fn tensor(&self, spec: &Spec<'_>) -> PyResult<Py<CanonicalTensor>> {
        let tensor = CanonicalTensor {
            dtype: spec.dtype.to_owned(),
            device_type: spec.device_type.to_owned(),
            layout: spec.layout.to_owned(),
            shape: PyTuple::new(self.py, &spec.shape)?.unbind(),
            stride: PyTuple::new(self.py, &spec.stride)?.unbind(),
        };
        Py::new(self.py, tensor)
    }

    fn constant(&mut self, constant: &Constant<'_>) -> PyResult<Py<PyAny>> {
        let again = |seen: &[Py<PyAny>], number: u32| {
            let made = usize::try_from(number).ok().and_then(|at| seen.get(at));
            // The parser has compared the number with how many there were.
            made.map_or_else(|| self.py.None(), |made| made.clone_ref(self.py))
        };
        match constant {
            Constant::Tensor {
                spec,
                storage,
                storage_offset,
                content,
            } => {
                let made = CanonicalConstant {
                    tensor: self.tensor(spec)?,
                    storage: *storage,
                    storage_offset: *storage_offset,
                    digest: content.to_string(),
                };
                let made = Py::new(self.py, made)?.into_any();
                self.constants.push(made.clone_ref(self.py));
                Ok(made)
            }
            Constant::Graph(graph) => {
                let made = self.graph(graph)?.into_any();
                self.graphs.push(made.clone_ref(self.py));
                Ok(made)
            }
            Constant::TensorAgain(number) => Ok(again(&self.constants, *number)),
            Constant::GraphAgain(number) => Ok(again(&self.graphs, *number)),
        }
    }

    fn arguments(&self, arguments: &[Argument<'_>]) -> PyResult<Vec<Bound<'py, PyAny>>> {
        arguments
            .iter()
            .map(|argument| self.argument(argument))
            .collect()
    }

    fn named(&self, items: &[(&str, Argument<'_>)]) -> PyResult<Bound<'py, PyDict>> {
        let named = PyDict::new(self.py);
        for (name, argument) in items {
            named.set_item(name, self.argument(argument)?)?;
        }
        Ok(named)
    }

    fn argument(&self, argument: &Argument<'_>) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        Ok(match argument {
            Argument::None => py.None().into_bound(py),
            Argument::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
            Argument::Int(value) => value.into_pyobject(py)?.into_any(),
            Argument::BigInt(value) => {
                let signed = PyDict::new(py);
                signed.set_item("signed", true)?;
                py.get_type::<pyo3::types::PyInt>().call_method(
                    "from_bytes",
                    (PyBytes::new(py, value), "little"),
                    Some(&signed),
                )?
            }
            Argument::Float(bits) => f64::from_bits(*bits).into_pyobject(py)?.into_any(),
            Argument::Complex(real, imaginary) => {
                PyComplex::from_doubles(py, f64::from_bits(*real), f64::from_bits(*imaginary))
                    .into_any()
            }
            Argument::Str(value) => value.into_pyobject(py)?.into_any(),
            Argument::Bytes(value) => PyBytes::new(py, value).into_any(),
            Argument::Node(index) => Bound::new(py, NodeReference { index: *index })?.into_any(),
            Argument::List(items) => PyList::new(py, self.arguments(items)?)?.into_any(),
            Argument::Tuple(items) => PyTuple::new(py, self.arguments(items)?)?.into_any(),
            Argument::Dict(items) => self.named(items)?.into_any(),
            Argument::Slice(parts) => {
                let parts = PyTuple::new(py, self.arguments(parts.as_slice())?)?;
                py.get_type::<PySlice>().call1(parts)?
            }
            Argument::Ellipsis => py.Ellipsis().into_bound(py),
            Argument::Dtype(name) => self.object("dtype", name, None)?,
            Argument::Layout(name) => self.object("layout", name, None)?,
            Argument::MemoryFormat(name) => self.object("memory_format", name, None)?,
            Argument::Device(name) => self.object("device", name, None)?,
            Argument::Callable(callable) => self.callable(*callable)?,
        })
    }

    fn callable(&self, callable: Callable<'_>) -> PyResult<Bound<'py, PyAny>> {
        match callable {
            Callable::Operator { name, overload } => self.object("operator", name, Some(overload)),
            Callable::HigherOrderOperator(name) => self.object("higher_order_operator", name, None),
            Callable::Function(name) => self.object("function", name, None),
        }
    }

    fn object(
        &self,
        kind: &'static str,
        name: &str,
        overload: Option<&str>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let named = NamedObject {
            kind,
            name: name.to_owned(),
            overload: overload.map(str::to_owned),
        };
        Ok(Bound::new(self.py, named)?.into_any())
    }
}

/// Adds this file's classes and functions to the extension module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CanonicalGraph>()?;
    module.add_class::<CanonicalNode>()?;
    module.add_class::<NodeReference>()?;
    module.add_class::<NamedObject>()?;
    module.add_class::<CanonicalTensor>()?;
    module.add_class::<CanonicalConstant>()?;
    module.add_function(wrap_pyfunction!(decode_graph, module)?)
}
