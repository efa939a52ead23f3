//! Arguments of nodes: Python's scalars and containers, torch's small types, operators.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyBytes, PyCFunction, PyComplex, PyDict, PyFloat, PyInt, PyList, PySlice, PyString,
    PyTuple, PyType,
};
use vllm_neuron_core::key::{HIGHER_ORDER_OPERATORS, MAX_ARGUMENT_DEPTH};

use super::{Name, Numbers, Walk, address};

impl<'py> Walk<'py> {
    /// Count, then name and argument, sorted by name.
    pub(super) fn named_arguments(
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
            sorted.push((self.text(&name)?.to_owned(), argument));
        }
        sorted.sort_by(|(left, _), (right, _)| left.cmp(right));
        for (name, argument) in &sorted {
            self.tokens.name(name);
            self.argument(argument, numbers, depth)?;
        }
        Ok(())
    }

    pub(super) fn argument(
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

    /// The UTF-8 of a `str`; those with a lone surrogate have none.
    fn text<'a>(&self, value: &'a Bound<'py, PyString>) -> PyResult<&'a str> {
        value
            .to_str()
            .map_err(|_| self.refuse(value, "a str with a lone surrogate is no Unicode text"))
    }

    /// Writes a value of one of Python's own scalar types; false if it is none.
    pub(super) fn scalar(&mut self, value: &Bound<'py, PyAny>) -> PyResult<bool> {
        if let Ok(value) = value.cast_exact::<PyInt>() {
            self.int(value)?;
        } else if value.is_none() {
            self.tokens.none();
        } else if let Ok(value) = value.cast_exact::<PyBool>() {
            self.tokens.bool(value.is_true());
        } else if let Ok(value) = value.cast_exact::<PyFloat>() {
            self.tokens.float(value.value());
        } else if let Ok(value) = value.cast_exact::<PyString>() {
            let text = self.text(value)?;
            self.tokens.str(text);
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
    pub(super) fn plain_name(&mut self, value: &Bound<'py, PyAny>) -> PyResult<Box<str>> {
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
    pub(super) fn callable(&mut self, value: &Bound<'py, PyAny>) -> PyResult<bool> {
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
}
