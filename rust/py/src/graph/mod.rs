//! Walks a live `torch.fx.GraphModule` and writes its canonical tokens: the only bulk reader of
//! Python objects.
//!
//! One pass, no strings made per node: names of operators, dtypes and the like are read once per
//! object. `docs/key-format.md` says what follows what.

mod arguments;
mod tensors;
mod torch;

use std::collections::HashMap;

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyString, PyTuple};
use vllm_neuron_core::key::MAX_GRAPH_DEPTH;
use vllm_neuron_core::key::token::TokenWriter;

use self::torch::Torch;
use crate::error::exception;

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

/// A number in the token stream; streams with 2^32 constants do not fit into memory.
fn index(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
