//! Walks a live `torch.fx.GraphModule` and writes its canonical tokens: the only bulk reader of
//! Python objects.
//!
//! One pass, no strings made per node: names of operators, dtypes and the like are read once per
//! object. `docs/key-format.md` says what follows what.

use std::collections::HashMap;
use std::slice;

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{
    PyBool, PyBytes, PyCFunction, PyComplex, PyDict, PyFloat, PyInt, PyList, PySlice, PyString,
    PyTuple, PyType,
};
use vllm_neuron_core::digest::Digest;
use vllm_neuron_core::key::token::{TensorSpec, TokenWriter};

use crate::error::exception;
use crate::key::digest_of;

/// Higher-order operators whose arguments hold all that they do: nested graphs, operators, values.
///
/// Source: `torch/_higher_order_ops` of torch 2.13. Not here are those whose arguments point into
/// tables of the process (Triton kernels) or at Python objects (torchbind, leaf functions, print).
const HIGHER_ORDER_OPERATORS: [&str; 13] = [
    "associative_scan",
    "auto_functionalized",
    "auto_functionalized_v2",
    "cond",
    "flex_attention",
    "hints_wrapper",
    "invoke_subgraph",
    "map_impl",
    "out_dtype",
    "scan",
    "while_loop",
    "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
];
/// Deepest nesting of containers in an argument.
const MAX_ARGUMENT_DEPTH: usize = 64;
/// Deepest nesting of graphs.
const MAX_GRAPH_DEPTH: usize = 16;

/// The types of torch that occur in graphs.
struct Torch {
    graph_module: Py<PyType>,
    node: Py<PyType>,
    operator: Py<PyType>,
    higher_order_operator: Py<PyType>,
    tensor: Py<PyType>,
    parameter: Py<PyType>,
    fake_tensor: Py<PyType>,
    size: Py<PyType>,
    immutable_list: Py<PyType>,
    immutable_dict: Py<PyType>,
    dtype: Py<PyType>,
    layout: Py<PyType>,
    memory_format: Py<PyType>,
    device: Py<PyType>,
    operator_module: Py<PyAny>,
    strided: Py<PyAny>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

impl Torch {
    fn get(py: Python<'_>) -> PyResult<&Self> {
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

/// The canonical bytes of `graph_module`.
pub(crate) fn graph_bytes(graph_module: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    let torch = Torch::get(graph_module.py())?;
    if !graph_module.is_instance(torch.graph_module.bind(graph_module.py()))? {
        let found = graph_module.get_type().fully_qualified_name()?;
        return Err(PyTypeError::new_err(format!(
            "expected a torch.fx.GraphModule, found {found}"
        )));
    }
    let mut walk = Walk {
        py: graph_module.py(),
        torch,
        tokens: TokenWriter::new(),
        node: None,
        names: HashMap::new(),
        constants: HashMap::new(),
        storages: HashMap::new(),
        storage_count: 0,
        graphs: HashMap::new(),
        held: Vec::new(),
    };
    walk.graph(graph_module, 0)?;
    Ok(walk.tokens.into_bytes())
}

/// Address of an object that the graph keeps alive for the whole walk.
type Address = usize;

fn address(object: &Bound<'_, PyAny>) -> Address {
    object.as_ptr() as Address
}

/// What stands for an object that occurs often.
#[derive(Clone)]
enum Name {
    Operator {
        name: Box<str>,
        overload: Box<str>,
    },
    HigherOrderOperator(Box<str>),
    Function(Box<str>),
    /// A dtype, layout or memory format, without `torch.`.
    Plain(Box<str>),
}

struct Walk<'py> {
    py: Python<'py>,
    torch: &'py Torch,
    tokens: TokenWriter,
    /// The node being read, for errors.
    node: Option<Bound<'py, PyAny>>,
    names: HashMap<Address, Name>,
    constants: HashMap<Address, u32>,
    storages: HashMap<usize, u32>,
    storage_count: u32,
    graphs: HashMap<Address, u32>,
    /// Constants and nested graphs: an attribute may be made by its access, and its address must
    /// not be given to another one.
    held: Vec<Bound<'py, PyAny>>,
}

/// Numbers of the nodes of one graph.
type Numbers = HashMap<Address, u32>;

impl<'py> Walk<'py> {
    fn graph(&mut self, graph_module: &Bound<'py, PyAny>, depth: usize) -> PyResult<()> {
        let nodes = graph_module
            .getattr(intern!(self.py, "graph"))?
            .getattr(intern!(self.py, "nodes"))?
            .try_iter()?
            .collect::<PyResult<Vec<_>>>()?;
        self.tokens.count(nodes.len());
        let mut numbers = Numbers::with_capacity(nodes.len());
        for (node, number) in nodes.iter().zip(0_u32..) {
            self.node = Some(node.clone());
            self.write_node(graph_module, node, &numbers, depth)?;
            numbers.insert(address(node), number);
        }
        Ok(())
    }

    fn write_node(
        &mut self,
        graph_module: &Bound<'py, PyAny>,
        node: &Bound<'py, PyAny>,
        numbers: &Numbers,
        depth: usize,
    ) -> PyResult<()> {
        let opcode = node.getattr(intern!(self.py, "op"))?;
        match opcode.cast::<PyString>()?.to_str()? {
            "call_function" => self.call_function(node, numbers),
            "placeholder" => {
                self.tokens.placeholder();
                if depth == 0 {
                    self.placeholder_value(node)
                } else {
                    Ok(())
                }
            }
            "get_attr" => {
                self.tokens.get_attr();
                self.constant(graph_module, node, depth)
            }
            "output" => {
                self.tokens.output();
                let results = node.getattr(intern!(self.py, "args"))?;
                self.argument(&results.get_item(0)?, numbers, 0)
            }
            _ => Err(self.refuse(&opcode, "nodes of this kind are not ATen operators")),
        }
    }

    fn call_function(&mut self, node: &Bound<'py, PyAny>, numbers: &Numbers) -> PyResult<()> {
        self.tokens.call_function();
        let target = node.getattr(intern!(self.py, "target"))?;
        if !self.callable(&target)? {
            return Err(self.refuse(&target, "its name does not say what it does"));
        }
        let arguments = node
            .getattr(intern!(self.py, "args"))?
            .cast_into::<PyTuple>()?;
        self.tokens.count(arguments.len());
        for argument in arguments.iter_borrowed() {
            self.argument(&argument, numbers, 0)?;
        }
        let keywords = node.getattr(intern!(self.py, "kwargs"))?;
        self.named_arguments(keywords.cast::<PyDict>()?, numbers, 0)
    }

    /// Count, then name and argument, sorted by name.
    fn named_arguments(
        &mut self,
        arguments: &Bound<'py, PyDict>,
        numbers: &Numbers,
        depth: usize,
    ) -> PyResult<()> {
        self.tokens.count(arguments.len());
        let mut sorted = Vec::with_capacity(arguments.len());
        for (name, argument) in arguments.iter() {
            let name = name.cast_into_exact::<PyString>().map_err(|error| {
                self.refuse(&error.into_inner(), "only str can be a key of a dict")
            })?;
            sorted.push((name.to_str()?.to_owned(), argument));
        }
        sorted.sort_by(|(left, _), (right, _)| left.cmp(right));
        for (name, argument) in &sorted {
            self.tokens.name(name);
            self.argument(argument, numbers, depth)?;
        }
        Ok(())
    }

    fn argument(
        &mut self,
        value: &Bound<'py, PyAny>,
        numbers: &Numbers,
        depth: usize,
    ) -> PyResult<()> {
        let is_a = |class: &Py<PyType>| value.get_type_ptr().cast() == class.as_ptr();
        if is_a(&self.torch.node) {
            let Some(number) = numbers.get(&address(value)) else {
                return Err(self.refuse(value, "the node is not an earlier one of this graph"));
            };
            self.tokens.node(*number);
            return Ok(());
        }
        if self.scalar(value)? {
            return Ok(());
        }
        if depth >= MAX_ARGUMENT_DEPTH {
            return Err(self.refuse(value, "the argument is nested too deeply"));
        }
        if value.is_exact_instance_of::<PyTuple>() || is_a(&self.torch.size) {
            let items = value.cast::<PyTuple>()?;
            self.tokens.tuple(items.len());
            items
                .iter_borrowed()
                .try_for_each(|item| self.argument(&item, numbers, depth + 1))
        } else if is_a(&self.torch.immutable_list) || value.is_exact_instance_of::<PyList>() {
            let items = value.cast::<PyList>()?;
            self.tokens.list(items.len());
            items
                .iter()
                .try_for_each(|item| self.argument(&item, numbers, depth + 1))
        } else if is_a(&self.torch.immutable_dict) || value.is_exact_instance_of::<PyDict>() {
            self.tokens.dict();
            self.named_arguments(value.cast::<PyDict>()?, numbers, depth + 1)
        } else if value.is_exact_instance_of::<PySlice>() {
            self.tokens.slice();
            for part in ["start", "stop", "step"] {
                self.argument(&value.getattr(part)?, numbers, depth + 1)?;
            }
            Ok(())
        } else if self.torch_value(value)? || self.callable(value)? {
            Ok(())
        } else {
            Err(self.refuse(value, "it has no canonical form"))
        }
    }

    /// Writes a value of one of Python's own scalar types; false if it is none.
    fn scalar(&mut self, value: &Bound<'py, PyAny>) -> PyResult<bool> {
        if let Ok(value) = value.cast_exact::<PyInt>() {
            self.int(value)?;
        } else if value.is_none() {
            self.tokens.none();
        } else if let Ok(value) = value.cast_exact::<PyBool>() {
            self.tokens.bool(value.is_true());
        } else if let Ok(value) = value.cast_exact::<PyFloat>() {
            self.tokens.float(value.value());
        } else if let Ok(value) = value.cast_exact::<PyString>() {
            self.tokens.str(value.to_str()?);
        } else if let Ok(value) = value.cast_exact::<PyComplex>() {
            self.tokens.complex(value.real(), value.imag());
        } else if let Ok(value) = value.cast_exact::<PyBytes>() {
            self.tokens.bytes(value.as_bytes());
        } else if value.is(self.py.Ellipsis()) {
            self.tokens.ellipsis();
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    fn int(&mut self, value: &Bound<'py, PyInt>) -> PyResult<()> {
        if let Ok(value) = value.extract::<i64>() {
            self.tokens.int(value);
            return Ok(());
        }
        let bits: usize = value
            .call_method0(intern!(self.py, "bit_length"))?
            .extract()?;
        let signed = PyDict::new(self.py);
        signed.set_item("signed", true)?;
        let bytes = value.call_method("to_bytes", (bits / 8 + 1, "little"), Some(&signed))?;
        self.tokens.big_int(bytes.cast::<PyBytes>()?.as_bytes());
        Ok(())
    }

    /// Writes a dtype, layout, memory format or device; false if it is none.
    fn torch_value(&mut self, value: &Bound<'py, PyAny>) -> PyResult<bool> {
        let torch = self.torch;
        let is_a = |class: &Py<PyType>| value.get_type_ptr().cast() == class.as_ptr();
        if is_a(&torch.device) {
            // The index is left out: ranks that differ only in their device share entries.
            let device_type = value.getattr(intern!(self.py, "type"))?;
            self.tokens
                .device(device_type.cast::<PyString>()?.to_str()?);
        } else if is_a(&torch.dtype) {
            let name = self.plain_name(value)?;
            self.tokens.dtype(&name);
        } else if is_a(&torch.memory_format) {
            let name = self.plain_name(value)?;
            self.tokens.memory_format(&name);
        } else if is_a(&torch.layout) {
            let name = self.plain_name(value)?;
            self.tokens.layout(&name);
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    /// `float32` of `torch.float32`; read once per object, which lives as long as torch.
    fn plain_name(&mut self, value: &Bound<'py, PyAny>) -> PyResult<Box<str>> {
        if let Some(Name::Plain(name)) = self.names.get(&address(value)) {
            return Ok(name.clone());
        }
        let text = value.str()?;
        let text = text.to_str()?;
        let name: Box<str> = text.strip_prefix("torch.").unwrap_or(text).into();
        self.names.insert(address(value), Name::Plain(name.clone()));
        Ok(name)
    }

    /// Writes an operator or function; false if it is none that can be named.
    fn callable(&mut self, value: &Bound<'py, PyAny>) -> PyResult<bool> {
        let key = address(value);
        if !self.names.contains_key(&key) {
            match self.read_callable(value)? {
                Some(name) => self.names.insert(key, name),
                None => return Ok(false),
            };
        }
        match self.names.get(&key) {
            Some(Name::Operator { name, overload }) => self.tokens.operator(name, overload),
            Some(Name::HigherOrderOperator(name)) => self.tokens.higher_order_operator(name),
            Some(Name::Function(name)) => self.tokens.function(name),
            Some(Name::Plain(_)) | None => return Ok(false),
        }
        Ok(true)
    }

    fn read_callable(&self, value: &Bound<'py, PyAny>) -> PyResult<Option<Name>> {
        let text = |object: Bound<'py, PyAny>| -> PyResult<Box<str>> {
            Ok(object.cast::<PyString>()?.to_str()?.into())
        };
        if value.is_instance(self.torch.operator.bind(self.py))? {
            return Ok(Some(Name::Operator {
                name: text(value.getattr("_schema")?.getattr("name")?)?,
                overload: text(value.getattr("_overloadname")?)?,
            }));
        }
        if value.is_instance(self.torch.higher_order_operator.bind(self.py))? {
            let name = text(value.getattr("_name")?)?;
            let is_known = HIGHER_ORDER_OPERATORS.contains(&&*name);
            return Ok(is_known.then_some(Name::HigherOrderOperator(name)));
        }
        if value.is_exact_instance_of::<PyCFunction>() {
            let name = text(value.getattr("__name__")?)?;
            let named = self
                .torch
                .operator_module
                .bind(self.py)
                .getattr_opt(&*name)?;
            return Ok(named
                .is_some_and(|named| named.is(value))
                .then_some(Name::Function(name)));
        }
        Ok(None)
    }

    fn placeholder_value(&mut self, node: &Bound<'py, PyAny>) -> PyResult<()> {
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

    fn constant(
        &mut self,
        graph_module: &Bound<'py, PyAny>,
        node: &Bound<'py, PyAny>,
        depth: usize,
    ) -> PyResult<()> {
        let path = node.getattr(intern!(self.py, "target"))?;
        let path = path.cast::<PyString>()?.to_str()?;
        let mut value = graph_module.clone();
        for name in path.split('.') {
            value = value.getattr(name)?;
        }
        if value.is_instance(self.torch.graph_module.bind(self.py))? {
            return self.nested_graph(&value, depth);
        }
        let class = value.get_type();
        if class.is(&self.torch.tensor) || class.is(&self.torch.parameter) {
            return self.constant_tensor(&value);
        }
        Err(self.refuse(&value, "only plain tensors and graphs can be constants"))
    }

    fn nested_graph(&mut self, graph_module: &Bound<'py, PyAny>, depth: usize) -> PyResult<()> {
        if let Some(number) = self.graphs.get(&address(graph_module)) {
            self.tokens.graph_again(*number);
            return Ok(());
        }
        if depth >= MAX_GRAPH_DEPTH {
            return Err(self.refuse(graph_module, "graphs are nested too deeply"));
        }
        self.tokens.graph();
        let caller = self.node.clone();
        self.graph(graph_module, depth + 1)?;
        self.node = caller;
        // Numbered when complete: a graph cannot contain itself.
        let number = index(self.graphs.len());
        self.graphs.insert(address(graph_module), number);
        self.held.push(graph_module.clone());
        Ok(())
    }

    fn constant_tensor(&mut self, tensor: &Bound<'py, PyAny>) -> PyResult<()> {
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
        if !layout.is(&self.torch.strided) {
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

    /// The error for something that has no canonical form.
    fn refuse(&self, object: &Bound<'py, PyAny>, reason: &str) -> PyErr {
        self.make_error(object, reason)
            .unwrap_or_else(|error| error)
    }

    fn make_error(&self, object: &Bound<'py, PyAny>, reason: &str) -> PyResult<PyErr> {
        let node = match &self.node {
            Some(node) => node.getattr("name")?.str()?.to_str()?.to_owned(),
            None => String::new(),
        };
        let found = object.get_type().fully_qualified_name()?;
        let what = if object.is_instance_of::<PyString>() || self.is_callable_kind(object)? {
            format!("{} of type {found}", object.str()?)
        } else {
            format!("an object of type {found}")
        };
        let details = PyDict::new(self.py);
        details.set_item("node", &node)?;
        details.set_item("type_name", &found)?;
        details.set_item("reason", reason)?;
        let message = format!("node {node}: {what} cannot be part of a graph key: {reason}");
        Ok(exception("GraphKeyError", &message, &details))
    }

    /// Whether the text of `object` is a name and safe to print.
    fn is_callable_kind(&self, object: &Bound<'py, PyAny>) -> PyResult<bool> {
        Ok(object.is_instance(self.torch.operator.bind(self.py))?
            || object.is_instance(self.torch.higher_order_operator.bind(self.py))?
            || object.is_exact_instance_of::<PyCFunction>())
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

/// A number in the token stream; streams with 2^32 constants do not fit into memory.
fn index(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
