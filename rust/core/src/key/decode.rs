//! Reads graph bytes, version 1, back into a graph. The bytes are not trusted.
//!
//! Each count is compared with the bytes that are left before anything is allocated for it, and
//! nesting is bounded, so that memory is a small multiple of the input's length.

use super::cursor::{Cursor, quoted};
use super::graph::{Argument, Callable, CanonicalGraph, Constant, Node, Operation, Spec, Value};
use super::token::{self, MAGIC, VERSION};
use super::{FormatError, HIGHER_ORDER_OPERATORS, MAX_ARGUMENT_DEPTH, MAX_GRAPH_DEPTH};
use crate::digest::Digest;
use crate::format::hex;

/// Most elements that a tensor's storage can have: every size in bytes stays inside `i64`.
///
/// 16 bytes is the largest element, of `complex128`.
const MAX_ELEMENTS: i64 = i64::MAX / 16;

/// Reads a whole graph; every byte must have its place.
pub fn parse_graph(data: &[u8]) -> Result<CanonicalGraph<'_>, FormatError> {
    let mut reader = Reader {
        cursor: Cursor::new(data),
        constants: 0,
        storages: 0,
        graphs: 0,
    };
    let magic = reader.cursor.take("magic", MAGIC.len())?;
    if magic != MAGIC {
        return Err(FormatError::new("magic", 0, hex(&MAGIC), hex(magic)));
    }
    let version = reader.cursor.u32("version")?;
    if version != VERSION {
        return Err(FormatError::new("version", MAGIC.len(), VERSION, version));
    }
    let graph = reader.graph(0)?;
    match reader.cursor.left() {
        0 => Ok(graph),
        left => {
            Err(reader
                .cursor
                .error("end of the graph", "nothing more", format!("{left} bytes")))
        }
    }
}

/// A place in the bytes, and how much was numbered before it.
struct Reader<'a> {
    cursor: Cursor<'a>,
    constants: u32,
    storages: u32,
    graphs: u32,
}

impl<'a> Reader<'a> {
    fn graph(&mut self, depth: usize) -> Result<CanonicalGraph<'a>, FormatError> {
        let count = self.cursor.count("count of nodes", 1)?;
        if count == 0 {
            return Err(self
                .cursor
                .error("count of nodes", "at least 1, the output", 0));
        }
        let mut nodes = Vec::new();
        for index in 0..count {
            let offset = self.cursor.at();
            let operation = self.operation(index, depth)?;
            let is_output = matches!(operation, Operation::Output(_));
            let is_last = index.saturating_add(1) == count;
            if is_output != is_last {
                let (expected, found) = if is_last {
                    ("the output as the last node", "another node")
                } else {
                    ("one output, as the last node", "an output before it")
                };
                return Err(FormatError::new("node", offset, expected, found));
            }
            nodes.push(Node { offset, operation });
        }
        Ok(CanonicalGraph { nodes })
    }

    fn operation(&mut self, index: usize, depth: usize) -> Result<Operation<'a>, FormatError> {
        let start = self.cursor.at();
        match self.cursor.tag("node")? {
            token::PLACEHOLDER if depth > 0 => Ok(Operation::Placeholder(None)),
            token::PLACEHOLDER => self.value().map(Some).map(Operation::Placeholder),
            token::GET_ATTR => self.constant(depth).map(Operation::GetAttr),
            token::CALL_FUNCTION => {
                let target = self.target()?;
                let arguments = self.arguments(index, 0)?;
                let keywords = self.named("keyword arguments", index, 0)?;
                Ok(Operation::CallFunction {
                    target,
                    arguments,
                    keywords,
                })
            }
            token::OUTPUT => self.argument(index, 0).map(Operation::Output),
            tag => Err(FormatError::new("node", start, "tag 01 to 04", hex(&[tag]))),
        }
    }

    fn value(&mut self) -> Result<Value<'a>, FormatError> {
        let start = self.cursor.at();
        let tag = self.cursor.tag("value of a placeholder")?;
        if tag == token::TENSOR {
            return self.spec().map(Value::Tensor);
        }
        match self.scalar(tag)? {
            Some(value) => Ok(Value::Scalar(value)),
            None => Err(FormatError::new(
                "value of a placeholder",
                start,
                "tag 40, 10 to 18 or 1e",
                hex(&[tag]),
            )),
        }
    }

    fn spec(&mut self) -> Result<Spec<'a>, FormatError> {
        let dtype = self.cursor.plain_name("dtype", "")?;
        let device_type = self.cursor.plain_name("device type", "")?;
        let start = self.cursor.at();
        let layout = self.cursor.text("layout")?;
        if layout != "strided" {
            return Err(FormatError::new("layout", start, "strided", quoted(layout)));
        }
        let rank = self.cursor.count("rank", 16)?;
        let start = self.cursor.at();
        let shape = self.sizes("shape", rank)?;
        let stride = self.sizes("stride", rank)?;
        if extent(&shape, &stride).is_none() {
            let expected = format!("a tensor of at most {MAX_ELEMENTS} elements");
            let found = format!("shape {shape:?}, stride {stride:?}");
            return Err(FormatError::new("shape", start, expected, found));
        }
        Ok(Spec {
            dtype,
            device_type,
            layout,
            shape,
            stride,
        })
    }

    fn sizes(&mut self, what: &'static str, rank: usize) -> Result<Vec<i64>, FormatError> {
        let mut sizes = Vec::new();
        for _ in 0..rank {
            let start = self.cursor.at();
            match self.cursor.i64(what)? {
                size @ 0.. => sizes.push(size),
                size => return Err(FormatError::new(what, start, "0 or more", size)),
            }
        }
        Ok(sizes)
    }

    fn constant(&mut self, depth: usize) -> Result<Constant<'a>, FormatError> {
        let start = self.cursor.at();
        match self.cursor.tag("constant")? {
            token::CONSTANT => {
                let spec = self.spec()?;
                let start = self.cursor.at();
                let storage = self.cursor.u32("storage number")?;
                if storage > self.storages {
                    let expected = format!("at most {}, the next one", self.storages);
                    return Err(FormatError::new("storage number", start, expected, storage));
                }
                if storage == self.storages {
                    self.storages = self.storages.saturating_add(1);
                }
                let start = self.cursor.at();
                let storage_offset = self.cursor.i64("storage offset")?;
                let is_inside = extent(&spec.shape, &spec.stride)
                    .and_then(|extent| extent.checked_add(storage_offset))
                    .is_some_and(|end| end <= MAX_ELEMENTS);
                if storage_offset < 0 || !is_inside {
                    let expected = "an element of a storage";
                    return Err(FormatError::new(
                        "storage offset",
                        start,
                        expected,
                        storage_offset,
                    ));
                }
                self.constants = self.constants.saturating_add(1);
                let content = Digest::from_bytes(self.cursor.array("digest of a constant")?);
                Ok(Constant::Tensor {
                    spec,
                    storage,
                    storage_offset,
                    content,
                })
            }
            token::CONSTANT_AGAIN => self
                .earlier("constant number", self.constants)
                .map(Constant::TensorAgain),
            token::GRAPH => {
                if depth >= MAX_GRAPH_DEPTH {
                    let expected = format!("at most {MAX_GRAPH_DEPTH} deep");
                    return Err(FormatError::new(
                        "nested graph",
                        start,
                        expected,
                        "a deeper one",
                    ));
                }
                let graph = self.graph(depth.saturating_add(1))?;
                self.graphs = self.graphs.saturating_add(1);
                Ok(Constant::Graph(graph))
            }
            token::GRAPH_AGAIN => self
                .earlier("nested graph number", self.graphs)
                .map(Constant::GraphAgain),
            tag => Err(FormatError::new(
                "constant",
                start,
                "tag 30 to 33",
                hex(&[tag]),
            )),
        }
    }

    /// The number of something that came before.
    fn earlier(&mut self, what: &'static str, count: u32) -> Result<u32, FormatError> {
        let start = self.cursor.at();
        let number = self.cursor.u32(what)?;
        if number < count {
            return Ok(number);
        }
        Err(FormatError::new(
            what,
            start,
            format!("less than {count}, an earlier one"),
            number,
        ))
    }

    fn target(&mut self) -> Result<Callable<'a>, FormatError> {
        let start = self.cursor.at();
        let tag = self.cursor.tag("target")?;
        match self.callable(tag)? {
            Some(target) => Ok(target),
            None => Err(FormatError::new(
                "target",
                start,
                "tag 24 to 26",
                hex(&[tag]),
            )),
        }
    }

    fn arguments(&mut self, nodes: usize, depth: usize) -> Result<Vec<Argument<'a>>, FormatError> {
        let count = self.cursor.count("count of arguments", 1)?;
        let mut arguments = Vec::new();
        for _ in 0..count {
            arguments.push(self.argument(nodes, depth)?);
        }
        Ok(arguments)
    }

    /// Names and arguments, strictly sorted. Names of keyword arguments are identifiers, since a
    /// graph is turned into source text at times; keys of a dict are any text.
    fn named(
        &mut self,
        what: &'static str,
        nodes: usize,
        depth: usize,
    ) -> Result<Vec<(&'a str, Argument<'a>)>, FormatError> {
        let count = self.cursor.count(what, 5)?;
        let mut items: Vec<(&str, Argument<'_>)> = Vec::new();
        for _ in 0..count {
            let start = self.cursor.at();
            let name = if depth == 0 {
                self.cursor.plain_name("name of a keyword argument", "")?
            } else {
                self.cursor.text("key of a dict")?
            };
            if let Some((last, _)) = items.last()
                && *last >= name
            {
                let expected = format!("a name after {}", quoted(last));
                return Err(FormatError::new(what, start, expected, quoted(name)));
            }
            items.push((name, self.argument(nodes, depth)?));
        }
        Ok(items)
    }

    /// An argument of node number `nodes`, which can refer to those before it.
    fn argument(&mut self, nodes: usize, depth: usize) -> Result<Argument<'a>, FormatError> {
        let start = self.cursor.at();
        let tag = self.cursor.tag("argument")?;
        if tag == token::NODE {
            let nodes = u32::try_from(nodes).unwrap_or(u32::MAX);
            return self.earlier("node number", nodes).map(Argument::Node);
        }
        if let Some(scalar) = self.scalar(tag)? {
            return Ok(scalar);
        }
        if depth >= MAX_ARGUMENT_DEPTH {
            let expected = format!("at most {MAX_ARGUMENT_DEPTH} deep");
            return Err(FormatError::new(
                "argument",
                start,
                expected,
                "a deeper one",
            ));
        }
        let deeper = depth.saturating_add(1);
        Ok(match tag {
            token::LIST => Argument::List(self.arguments(nodes, deeper)?),
            token::TUPLE => Argument::Tuple(self.arguments(nodes, deeper)?),
            token::DICT => Argument::Dict(self.named("items of a dict", nodes, deeper)?),
            token::SLICE => Argument::Slice(Box::new([
                self.argument(nodes, deeper)?,
                self.argument(nodes, deeper)?,
                self.argument(nodes, deeper)?,
            ])),
            token::DTYPE => Argument::Dtype(self.cursor.plain_name("dtype", "")?),
            token::LAYOUT => Argument::Layout(self.cursor.plain_name("layout", "")?),
            token::MEMORY_FORMAT => {
                Argument::MemoryFormat(self.cursor.plain_name("memory format", "")?)
            }
            token::DEVICE => Argument::Device(self.cursor.plain_name("device type", "")?),
            _ => {
                let found = hex(&[tag]);
                let error = || FormatError::new("argument", start, "tag 10 to 26", found);
                Argument::Callable(self.callable(tag)?.ok_or_else(error)?)
            }
        })
    }

    /// What follows the tag of a scalar; None if the tag is another one.
    fn scalar(&mut self, tag: u8) -> Result<Option<Argument<'a>>, FormatError> {
        Ok(Some(match tag {
            token::NONE => Argument::None,
            token::FALSE => Argument::Bool(false),
            token::TRUE => Argument::Bool(true),
            token::INT => Argument::Int(self.cursor.i64("int")?),
            token::BIG_INT => self.big_int()?,
            token::FLOAT => Argument::Float(self.cursor.bits("float")?),
            token::COMPLEX => {
                Argument::Complex(self.cursor.bits("complex")?, self.cursor.bits("complex")?)
            }
            token::STR => Argument::Str(self.cursor.text("str")?),
            token::BYTES => Argument::Bytes(self.cursor.bytes("bytes")?),
            token::ELLIPSIS => Argument::Ellipsis,
            _ => return Ok(None),
        }))
    }

    fn big_int(&mut self) -> Result<Argument<'a>, FormatError> {
        let start = self.cursor.at();
        let bytes = self.cursor.bytes("int outside i64")?;
        if bytes.len() > size_of::<i64>() && token::shortest(bytes).len() == bytes.len() {
            return Ok(Argument::BigInt(bytes));
        }
        Err(FormatError::new(
            "int outside i64",
            start,
            "the fewest bytes, more than 8",
            format!("{} bytes", bytes.len()),
        ))
    }

    /// What follows the tag of an operator or function; None if the tag is another one.
    fn callable(&mut self, tag: u8) -> Result<Option<Callable<'a>>, FormatError> {
        let start = self.cursor.at();
        Ok(Some(match tag {
            token::OPERATOR => {
                let name = self.cursor.plain_name("operator", ":.")?;
                let overload = self.cursor.plain_name("overload", "")?;
                Callable::Operator { name, overload }
            }
            token::HIGHER_ORDER_OPERATOR => {
                let name = self.cursor.text("higher-order operator")?;
                if !HIGHER_ORDER_OPERATORS.contains(&name) {
                    let expected = format!("one of {}", HIGHER_ORDER_OPERATORS.join(", "));
                    let what = "higher-order operator";
                    return Err(FormatError::new(what, start, expected, quoted(name)));
                }
                Callable::HigherOrderOperator(name)
            }
            token::FUNCTION => Callable::Function(self.cursor.plain_name("function", "")?),
            _ => return Ok(None),
        }))
    }
}

/// Elements from the first to the last one of a tensor; None if there are more than any can have.
fn extent(shape: &[i64], stride: &[i64]) -> Option<i64> {
    let inside = |elements: &i64| *elements <= MAX_ELEMENTS;
    let mut elements = 1_i64;
    // Dimensions of nothing first: whoever multiplies the others overflows all the same.
    for dimension in shape.iter().filter(|dimension| **dimension > 0) {
        elements = elements.checked_mul(*dimension).filter(inside)?;
    }
    let mut extent = 1_i64;
    for (dimension, stride) in shape.iter().zip(stride) {
        let last = dimension.saturating_sub(1).max(0).checked_mul(*stride)?;
        extent = extent.checked_add(last).filter(inside)?;
    }
    let is_empty = shape.contains(&0);
    Some(if is_empty { 0 } else { extent })
}
