//! The token stream of graph bytes, version 1: one method per row of `docs/key-format.md`.
//!
//! Knows nothing of Python. The caller decides what follows what; this file decides the bytes.

use crate::digest::Digest;

/// First bytes of every stream.
pub const MAGIC: [u8; 8] = *b"VNGRAPH\0";
/// Version of the token stream.
pub const VERSION: u32 = 1;

pub(super) const PLACEHOLDER: u8 = 0x01;
pub(super) const GET_ATTR: u8 = 0x02;
pub(super) const CALL_FUNCTION: u8 = 0x03;
pub(super) const OUTPUT: u8 = 0x04;
pub(super) const NONE: u8 = 0x10;
pub(super) const FALSE: u8 = 0x11;
pub(super) const TRUE: u8 = 0x12;
pub(super) const INT: u8 = 0x13;
pub(super) const BIG_INT: u8 = 0x14;
pub(super) const FLOAT: u8 = 0x15;
pub(super) const COMPLEX: u8 = 0x16;
pub(super) const STR: u8 = 0x17;
pub(super) const BYTES: u8 = 0x18;
pub(super) const NODE: u8 = 0x19;
pub(super) const LIST: u8 = 0x1a;
pub(super) const TUPLE: u8 = 0x1b;
pub(super) const DICT: u8 = 0x1c;
pub(super) const SLICE: u8 = 0x1d;
pub(super) const ELLIPSIS: u8 = 0x1e;
pub(super) const DTYPE: u8 = 0x20;
pub(super) const LAYOUT: u8 = 0x21;
pub(super) const MEMORY_FORMAT: u8 = 0x22;
pub(super) const DEVICE: u8 = 0x23;
pub(super) const OPERATOR: u8 = 0x24;
pub(super) const HIGHER_ORDER_OPERATOR: u8 = 0x25;
pub(super) const FUNCTION: u8 = 0x26;
pub(super) const CONSTANT: u8 = 0x30;
pub(super) const CONSTANT_AGAIN: u8 = 0x31;
pub(super) const GRAPH: u8 = 0x32;
pub(super) const GRAPH_AGAIN: u8 = 0x33;
pub(super) const TENSOR: u8 = 0x40;

/// Shape and type of a tensor, without its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorSpec<'a> {
    /// `float32`.
    pub dtype: &'a str,
    /// `cpu`.
    pub device_type: &'a str,
    /// `strided`.
    pub layout: &'a str,
    /// Elements per dimension.
    pub shape: &'a [i64],
    /// Elements between neighbours, per dimension.
    pub stride: &'a [i64],
}

/// Appends tokens to a growing buffer.
#[derive(Debug)]
pub struct TokenWriter {
    out: Vec<u8>,
}

impl Default for TokenWriter {
    fn default() -> Self {
        Self::new()
    }
}

/// Appends a `str`: `u32` length, then UTF-8.
///
/// Longer strings than `u32::MAX` bytes do not occur: they would not fit into a graph that torch
/// can hold; the length saturates, and the content behind it still tells such strings apart.
pub(crate) fn put_str(out: &mut Vec<u8>, text: &str) {
    put_length(out, text.len());
    out.extend_from_slice(text.as_bytes());
}

fn put_length(out: &mut Vec<u8>, length: usize) {
    out.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
}

/// The fewest two's complement bytes, little-endian, that hold the same number as `bytes`.
pub(super) fn shortest(bytes: &[u8]) -> &[u8] {
    let mut short = bytes;
    while let [head @ .., last] = short {
        let Some(next) = head.last() else { break };
        let sign_extension = if next & 0x80 == 0 { 0x00 } else { 0xff };
        if *last != sign_extension {
            break;
        }
        short = head;
    }
    short
}

impl TokenWriter {
    /// A stream that has its magic and version.
    pub fn new() -> Self {
        let mut out = Vec::with_capacity(1 << 16);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        Self { out }
    }

    /// The bytes written.
    pub fn into_bytes(self) -> Vec<u8> {
        self.out
    }

    /// A count: of nodes, arguments, items.
    pub fn count(&mut self, count: usize) {
        put_length(&mut self.out, count);
    }

    /// A name without a tag: of a keyword argument or a key of a dict.
    pub fn name(&mut self, name: &str) {
        put_str(&mut self.out, name);
    }

    /// A placeholder; its value follows, except in a nested graph.
    pub fn placeholder(&mut self) {
        self.out.push(PLACEHOLDER);
    }

    /// A `get_attr` node; its constant follows.
    pub fn get_attr(&mut self) {
        self.out.push(GET_ATTR);
    }

    /// A `call_function` node; target, arguments and keyword arguments follow.
    pub fn call_function(&mut self) {
        self.out.push(CALL_FUNCTION);
    }

    /// The output node; its argument follows.
    pub fn output(&mut self) {
        self.out.push(OUTPUT);
    }

    /// `None`.
    pub fn none(&mut self) {
        self.out.push(NONE);
    }

    /// A truth value.
    pub fn bool(&mut self, value: bool) {
        self.out.push(if value { TRUE } else { FALSE });
    }

    /// An integer.
    pub fn int(&mut self, value: i64) {
        self.out.push(INT);
        self.out.extend_from_slice(&value.to_le_bytes());
    }

    /// An integer outside `i64`, as two's complement bytes, little-endian.
    pub fn big_int(&mut self, value: &[u8]) {
        let value = shortest(value);
        self.out.push(BIG_INT);
        put_length(&mut self.out, value.len());
        self.out.extend_from_slice(value);
    }

    /// A float, by its bits.
    pub fn float(&mut self, value: f64) {
        self.out.push(FLOAT);
        self.out.extend_from_slice(&value.to_bits().to_le_bytes());
    }

    /// A complex number, by its bits.
    pub fn complex(&mut self, real: f64, imaginary: f64) {
        self.out.push(COMPLEX);
        self.out.extend_from_slice(&real.to_bits().to_le_bytes());
        self.out
            .extend_from_slice(&imaginary.to_bits().to_le_bytes());
    }

    /// A string.
    pub fn str(&mut self, value: &str) {
        self.out.push(STR);
        put_str(&mut self.out, value);
    }

    /// Bytes.
    pub fn bytes(&mut self, value: &[u8]) {
        self.out.push(BYTES);
        put_length(&mut self.out, value.len());
        self.out.extend_from_slice(value);
    }

    /// The result of node `index` of the same graph.
    pub fn node(&mut self, index: u32) {
        self.out.push(NODE);
        self.out.extend_from_slice(&index.to_le_bytes());
    }

    /// A list; its items follow.
    pub fn list(&mut self, count: usize) {
        self.out.push(LIST);
        self.count(count);
    }

    /// A tuple; its items follow.
    pub fn tuple(&mut self, count: usize) {
        self.out.push(TUPLE);
        self.count(count);
    }

    /// A dict; count, names and items follow, sorted by name.
    pub fn dict(&mut self) {
        self.out.push(DICT);
    }

    /// A slice; start, stop and step follow.
    pub fn slice(&mut self) {
        self.out.push(SLICE);
    }

    /// `...`.
    pub fn ellipsis(&mut self) {
        self.out.push(ELLIPSIS);
    }

    /// A dtype, `float32`.
    pub fn dtype(&mut self, name: &str) {
        self.tagged_str(DTYPE, name);
    }

    /// A layout, `strided`.
    pub fn layout(&mut self, name: &str) {
        self.tagged_str(LAYOUT, name);
    }

    /// A memory format, `contiguous_format`.
    pub fn memory_format(&mut self, name: &str) {
        self.tagged_str(MEMORY_FORMAT, name);
    }

    /// A device, by its type.
    pub fn device(&mut self, device_type: &str) {
        self.tagged_str(DEVICE, device_type);
    }

    /// An operator: `aten::add` and `Tensor`.
    pub fn operator(&mut self, name: &str, overload: &str) {
        self.tagged_str(OPERATOR, name);
        put_str(&mut self.out, overload);
    }

    /// A higher-order operator.
    pub fn higher_order_operator(&mut self, name: &str) {
        self.tagged_str(HIGHER_ORDER_OPERATOR, name);
    }

    /// A function of Python's `operator` module.
    pub fn function(&mut self, name: &str) {
        self.tagged_str(FUNCTION, name);
    }

    /// The value of a placeholder that is a tensor.
    pub fn tensor(&mut self, spec: &TensorSpec<'_>) {
        self.out.push(TENSOR);
        self.spec(spec);
    }

    /// A constant tensor at its first use.
    pub fn constant(
        &mut self,
        spec: &TensorSpec<'_>,
        storage: u32,
        storage_offset: i64,
        content: &Digest,
    ) {
        self.out.push(CONSTANT);
        self.spec(spec);
        self.out.extend_from_slice(&storage.to_le_bytes());
        self.out.extend_from_slice(&storage_offset.to_le_bytes());
        self.out.extend_from_slice(content.as_bytes());
    }

    /// A constant tensor that was written before as number `index`.
    pub fn constant_again(&mut self, index: u32) {
        self.out.push(CONSTANT_AGAIN);
        self.out.extend_from_slice(&index.to_le_bytes());
    }

    /// A nested graph at its first use; count and nodes follow.
    pub fn graph(&mut self) {
        self.out.push(GRAPH);
    }

    /// A nested graph that was written before as number `index`.
    pub fn graph_again(&mut self, index: u32) {
        self.out.push(GRAPH_AGAIN);
        self.out.extend_from_slice(&index.to_le_bytes());
    }

    fn tagged_str(&mut self, tag: u8, text: &str) {
        self.out.push(tag);
        put_str(&mut self.out, text);
    }

    fn spec(&mut self, spec: &TensorSpec<'_>) {
        put_str(&mut self.out, spec.dtype);
        put_str(&mut self.out, spec.device_type);
        put_str(&mut self.out, spec.layout);
        self.count(spec.shape.len());
        for dimension in spec.shape.iter().chain(spec.stride) {
            self.out.extend_from_slice(&dimension.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn big_ints_use_the_fewest_bytes() {
        assert_eq!(shortest(&[0xff, 0x00, 0x00]), [0xff, 0x00]);
        assert_eq!(shortest(&[0x7f, 0x00, 0x00]), [0x7f]);
        assert_eq!(shortest(&[0x80, 0xff, 0xff]), [0x80]);
        assert_eq!(shortest(&[0x00, 0xff]), [0x00, 0xff]);
        assert_eq!(shortest(&[0x00]), [0x00]);
    }
}
