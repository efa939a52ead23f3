//! A canonical graph in memory, and its bytes.
//!
//! [`super::decode`] makes one of bytes. It borrows names from them and holds no content of
//! constants, only their digests. Writing it again gives the same bytes: a graph has one form.

use super::token::{TensorSpec, TokenWriter};
use crate::digest::Digest;

/// The nodes of one graph; node `i` is value `i`.
#[derive(Debug, Clone, PartialEq)]
pub struct CanonicalGraph<'a> {
    /// Nodes in graph order; the last one, and no other, is the output.
    pub nodes: Vec<Node<'a>>,
}

/// One node.
#[derive(Debug, Clone, PartialEq)]
pub struct Node<'a> {
    /// Where the node is in the bytes that it was decoded from; for errors.
    pub offset: usize,
    /// What it does.
    pub operation: Operation<'a>,
}

/// What a node does.
#[derive(Debug, Clone, PartialEq)]
pub enum Operation<'a> {
    /// An input; in a nested graph without a value, since the operands decide.
    Placeholder(Option<Value<'a>>),
    /// A constant.
    GetAttr(Constant<'a>),
    /// A call of an operator.
    CallFunction {
        /// The operator.
        target: Callable<'a>,
        /// Its arguments in order.
        arguments: Vec<Argument<'a>>,
        /// Its keyword arguments, sorted by name.
        keywords: Vec<(&'a str, Argument<'a>)>,
    },
    /// The results.
    Output(Argument<'a>),
}

/// The value of a placeholder.
#[derive(Debug, Clone, PartialEq)]
pub enum Value<'a> {
    /// A tensor.
    Tensor(Spec<'a>),
    /// A value of one of Python's scalar types.
    Scalar(Argument<'a>),
}

/// Shape and type of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec<'a> {
    /// `float32`.
    pub dtype: &'a str,
    /// `cpu`.
    pub device_type: &'a str,
    /// `strided`.
    pub layout: &'a str,
    /// Elements per dimension.
    pub shape: Vec<i64>,
    /// Elements between neighbours, per dimension.
    pub stride: Vec<i64>,
}

/// What a `get_attr` node refers to.
#[derive(Debug, Clone, PartialEq)]
pub enum Constant<'a> {
    /// A tensor at its first use; they are numbered in this order.
    Tensor {
        /// Shape and type.
        spec: Spec<'a>,
        /// Which memory it is in.
        storage: u32,
        /// Elements of that memory before its first one.
        storage_offset: i64,
        /// Digest of its elements in row-major order.
        content: Digest,
    },
    /// The tensor with this number.
    TensorAgain(u32),
    /// A nested graph at its first use; they are numbered in the order in which they end.
    Graph(CanonicalGraph<'a>),
    /// The nested graph with this number.
    GraphAgain(u32),
}

/// An operator or function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Callable<'a> {
    /// `aten::add` and `Tensor`.
    Operator {
        /// Qualified name.
        name: &'a str,
        /// Overload.
        overload: &'a str,
    },
    /// One of [`super::HIGHER_ORDER_OPERATORS`].
    HigherOrderOperator(&'a str),
    /// A function of Python's `operator` module.
    Function(&'a str),
}

/// An argument of a node.
#[derive(Debug, Clone, PartialEq)]
pub enum Argument<'a> {
    /// `None`.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer in `i64`.
    Int(i64),
    /// Another integer: the fewest two's complement bytes, little-endian.
    BigInt(&'a [u8]),
    /// A float, by its bits, so that every NaN is itself.
    Float(u64),
    /// A complex number: bits of the real and the imaginary part.
    Complex(u64, u64),
    /// A string.
    Str(&'a str),
    /// Bytes.
    Bytes(&'a [u8]),
    /// The result of an earlier node of the same graph.
    Node(u32),
    /// A list.
    List(Vec<Argument<'a>>),
    /// A tuple.
    Tuple(Vec<Argument<'a>>),
    /// A dict, sorted by key.
    Dict(Vec<(&'a str, Argument<'a>)>),
    /// A slice: start, stop, step.
    Slice(Box<[Argument<'a>; 3]>),
    /// `...`.
    Ellipsis,
    /// A dtype.
    Dtype(&'a str),
    /// A layout.
    Layout(&'a str),
    /// A memory format.
    MemoryFormat(&'a str),
    /// A device, by its type.
    Device(&'a str),
    /// An operator or function.
    Callable(Callable<'a>),
}

impl CanonicalGraph<'_> {
    /// The bytes of the graph.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut tokens = TokenWriter::new();
        self.write(&mut tokens);
        tokens.into_bytes()
    }

    fn write(&self, tokens: &mut TokenWriter) {
        tokens.count(self.nodes.len());
        for node in &self.nodes {
            match &node.operation {
                Operation::Placeholder(value) => {
                    tokens.placeholder();
                    match value {
                        None => {}
                        Some(Value::Tensor(spec)) => tokens.tensor(&spec.borrow()),
                        Some(Value::Scalar(value)) => value.write(tokens),
                    }
                }
                Operation::GetAttr(constant) => {
                    tokens.get_attr();
                    constant.write(tokens);
                }
                Operation::CallFunction {
                    target,
                    arguments,
                    keywords,
                } => {
                    tokens.call_function();
                    target.write(tokens);
                    tokens.count(arguments.len());
                    for argument in arguments {
                        argument.write(tokens);
                    }
                    write_named(keywords, tokens);
                }
                Operation::Output(results) => {
                    tokens.output();
                    results.write(tokens);
                }
            }
        }
    }
}

impl Spec<'_> {
    fn borrow(&self) -> TensorSpec<'_> {
        TensorSpec {
            dtype: self.dtype,
            device_type: self.device_type,
            layout: self.layout,
            shape: &self.shape,
            stride: &self.stride,
        }
    }
}

impl Constant<'_> {
    fn write(&self, tokens: &mut TokenWriter) {
        match self {
            Self::Tensor {
                spec,
                storage,
                storage_offset,
                content,
            } => tokens.constant(&spec.borrow(), *storage, *storage_offset, content),
            Self::TensorAgain(number) => tokens.constant_again(*number),
            Self::Graph(graph) => {
                tokens.graph();
                graph.write(tokens);
            }
            Self::GraphAgain(number) => tokens.graph_again(*number),
        }
    }
}

impl Callable<'_> {
    fn write(&self, tokens: &mut TokenWriter) {
        match self {
            Self::Operator { name, overload } => tokens.operator(name, overload),
            Self::HigherOrderOperator(name) => tokens.higher_order_operator(name),
            Self::Function(name) => tokens.function(name),
        }
    }
}

impl Argument<'_> {
    fn write(&self, tokens: &mut TokenWriter) {
        match self {
            Self::None => tokens.none(),
            Self::Bool(value) => tokens.bool(*value),
            Self::Int(value) => tokens.int(*value),
            Self::BigInt(value) => tokens.big_int(value),
            Self::Float(bits) => tokens.float(f64::from_bits(*bits)),
            Self::Complex(real, imaginary) => {
                tokens.complex(f64::from_bits(*real), f64::from_bits(*imaginary));
            }
            Self::Str(value) => tokens.str(value),
            Self::Bytes(value) => tokens.bytes(value),
            Self::Node(index) => tokens.node(*index),
            Self::List(items) => {
                tokens.list(items.len());
                for item in items {
                    item.write(tokens);
                }
            }
            Self::Tuple(items) => {
                tokens.tuple(items.len());
                for item in items {
                    item.write(tokens);
                }
            }
            Self::Dict(items) => {
                tokens.dict();
                write_named(items, tokens);
            }
            Self::Slice(parts) => {
                tokens.slice();
                for part in parts.iter() {
                    part.write(tokens);
                }
            }
            Self::Ellipsis => tokens.ellipsis(),
            Self::Dtype(name) => tokens.dtype(name),
            Self::Layout(name) => tokens.layout(name),
            Self::MemoryFormat(name) => tokens.memory_format(name),
            Self::Device(device_type) => tokens.device(device_type),
            Self::Callable(callable) => callable.write(tokens),
        }
    }
}

fn write_named(items: &[(&str, Argument<'_>)], tokens: &mut TokenWriter) {
    tokens.count(items.len());
    for (name, argument) in items {
        tokens.name(name);
        argument.write(tokens);
    }
}
