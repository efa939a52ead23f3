//! Bindings of `vllm_neuron_core::neff`.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use vllm_neuron_core::neff::{
    self, Compression, ParseOptions, Tensor, WriteRequest, feature_names,
};

use crate::buffer::SharedBytes;
use crate::error::{exception, neff_error};

/// Adds this file's classes and functions to the extension module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Neff>()?;
    module.add_class::<NeffTensor>()?;
    module.add_function(wrap_pyfunction!(write_neff, module)?)
}

/// One input or output of a NEFF.
#[pyclass(frozen, eq, hash, skip_from_py_object, module = "vllm_neuron._core")]
#[derive(Clone, PartialEq, Eq, Hash)]
struct NeffTensor {
    /// Name, unique among the inputs or the outputs.
    #[pyo3(get)]
    name: String,
    /// Element type, a torch dtype's name without `torch.`.
    #[pyo3(get)]
    dtype: String,
    dimensions: Vec<u64>,
}

#[pymethods]
impl NeffTensor {
    /// Extents, outermost first.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.dimensions)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Self { name, dtype, .. } = self;
        let shape = self.shape(py)?.repr()?;
        Ok(format!(
            "NeffTensor(name={name:?}, dtype={dtype:?}, shape={shape})"
        ))
    }
}

impl From<&Tensor> for NeffTensor {
    fn from(tensor: &Tensor) -> Self {
        Self {
            name: tensor.name.clone(),
            dtype: tensor.dtype.clone(),
            dimensions: tensor.shape.clone(),
        }
    }
}

/// A validated NEFF. It keeps a hold of the buffer that it was parsed from.
#[pyclass(frozen, module = "vllm_neuron._core")]
struct Neff {
    inner: neff::Neff<SharedBytes>,
    path: Option<String>,
}

#[pymethods]
impl Neff {
    /// Parses and validates the bytes of a NEFF, without the GIL.
    #[staticmethod]
    #[pyo3(signature = (data, *, path = None, verify_hash = true, index = None))]
    fn parse(
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        path: Option<String>,
        verify_hash: bool,
        index: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let data = SharedBytes::new(data)?;
        let index = index.map(SharedBytes::new).transpose()?;
        let options = ParseOptions {
            verify_hash,
            ..ParseOptions::default()
        };
        let parsed = py.detach(|| match &index {
            Some(index) => neff::Neff::parse_indexed(data, index.as_ref(), &options),
            None => neff::Neff::parse(data, &options),
        });
        match parsed {
            Ok(inner) => Ok(Self { inner, path }),
            Err(error) => Err(neff_error(py, &error, path.as_deref())),
        }
    }

    /// What parsing found out, to be kept beside the bytes.
    fn index<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.index())
    }

    /// The path given to `parse`.
    #[getter]
    fn path(&self) -> Option<&str> {
        self.path.as_deref()
    }

    /// 1 (SHA-256) or 2 (MD5).
    #[getter]
    fn package_version(&self) -> u64 {
        self.inner.header().package_version.number()
    }

    /// Major and minor version.
    #[getter]
    fn neff_version(&self) -> (u64, u64) {
        self.inner.header().neff_version
    }

    /// Name given by the compiler.
    #[getter]
    fn name(&self) -> &str {
        &self.inner.header().name
    }

    /// Identity for runtime and profiler, as `8-4-4-4-12` hexadecimal digits.
    #[getter]
    fn uuid(&self) -> String {
        self.inner.header().uuid_text()
    }

    /// Features that a runtime must know.
    #[getter]
    fn feature_bits(&self) -> u64 {
        self.inner.header().feature_bits
    }

    /// Physical cores per logical core.
    #[getter]
    fn lnc_size(&self) -> u32 {
        self.inner.header().lnc_size
    }

    /// Bytes of the file.
    #[getter]
    fn size_bytes(&self) -> usize {
        self.inner.data().len()
    }

    /// Bytes of the payload.
    #[getter]
    fn data_size(&self) -> u64 {
        self.inner.header().data_size
    }

    /// `standard` or `word-swapped`; None if the digest was not verified.
    #[getter]
    fn digest_order(&self) -> Option<&'static str> {
        self.inner.digest_order().map(neff::DigestOrder::as_str)
    }

    /// `gzip` or `none`.
    #[getter]
    fn compression(&self) -> &'static str {
        self.inner.compression().as_str()
    }

    /// Architecture that the code is for; empty if the file names none.
    #[getter]
    fn target(&self) -> &str {
        self.inner.target()
    }

    /// Version of the compiler; empty if the file names none.
    #[getter]
    fn compiler_version(&self) -> &str {
        self.inner.compiler_version()
    }

    /// Inputs, in the order of the graph's arguments.
    #[getter]
    fn inputs(&self) -> Vec<NeffTensor> {
        self.inner.inputs().iter().map(NeffTensor::from).collect()
    }

    /// Outputs, each name once.
    #[getter]
    fn outputs(&self) -> Vec<NeffTensor> {
        self.inner.outputs().iter().map(NeffTensor::from).collect()
    }

    /// Names and sizes of the archive's files.
    #[getter]
    fn members(&self) -> Vec<(&str, u64)> {
        self.inner
            .members()
            .iter()
            .map(|member| (member.name.as_str(), member.size))
            .collect()
    }

    /// What is allowed but unlike every known NEFF.
    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.inner.warnings().to_vec()
    }

    /// The content of one file of the archive.
    fn member<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyBytes>> {
        match py.detach(|| self.inner.member(name)) {
            Ok(content) => Ok(PyBytes::new(py, &content)),
            Err(error) => Err(neff_error(py, &error, self.path.as_deref())),
        }
    }

    /// Everything above as plain JSON-able values.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let header = self.inner.header();
        let (major, minor) = header.neff_version;
        let tensors = |tensors: &[Tensor]| -> PyResult<Bound<'py, PyList>> {
            let list = PyList::empty(py);
            for tensor in tensors {
                let entry = PyDict::new(py);
                entry.set_item("name", &tensor.name)?;
                entry.set_item("dtype", &tensor.dtype)?;
                entry.set_item("shape", &tensor.shape)?;
                list.append(entry)?;
            }
            Ok(list)
        };
        let members = PyList::empty(py);
        for (name, size) in self.members() {
            let entry = PyDict::new(py);
            entry.set_item("name", name)?;
            entry.set_item("size_bytes", size)?;
            members.append(entry)?;
        }
        let result = PyDict::new(py);
        result.set_item("path", self.path.as_deref())?;
        result.set_item("size_bytes", self.size_bytes())?;
        result.set_item("name", &header.name)?;
        result.set_item("uuid", header.uuid_text())?;
        result.set_item("target", self.inner.target())?;
        result.set_item("compiler_version", self.inner.compiler_version())?;
        result.set_item("package_version", self.package_version())?;
        result.set_item("neff_version", format!("{major}.{minor}"))?;
        result.set_item("feature_bits", header.feature_bits)?;
        result.set_item("features", feature_names(header.feature_bits))?;
        result.set_item("lnc_size", header.lnc_size)?;
        result.set_item("num_tpb", header.num_tpb)?;
        result.set_item("requested_tpb_count", header.requested_tpb_count)?;
        result.set_item("digest_order", self.digest_order())?;
        result.set_item("compression", self.compression())?;
        result.set_item("data_size", header.data_size)?;
        result.set_item("inputs", tensors(self.inner.inputs())?)?;
        result.set_item("outputs", tensors(self.inner.outputs())?)?;
        result.set_item("members", members)?;
        result.set_item("warnings", self.inner.warnings())?;
        Ok(result)
    }

    fn __repr__(&self) -> String {
        format!("Neff(name={:?}, uuid={:?})", self.name(), self.uuid())
    }
}

/// Name, dtype and shape of a tensor, as Python gives them.
type TensorTuple = (String, String, Vec<u64>);

/// Writes a NEFF without device code for one core.
#[pyfunction]
#[pyo3(
    signature = (
        *, name, target, compiler_version, inputs, outputs, members = Vec::new(),
        compression = "gzip",
    ),
    text_signature = "(*, name, target, compiler_version, inputs, outputs, members=(), \
                      compression='gzip')"
)]
#[expect(
    clippy::too_many_arguments,
    reason = "keyword arguments of a Python function"
)]
fn write_neff<'py>(
    py: Python<'py>,
    name: &str,
    target: &str,
    compiler_version: &str,
    inputs: Vec<TensorTuple>,
    outputs: Vec<TensorTuple>,
    members: Vec<(String, Bound<'py, PyAny>)>,
    compression: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let invalid = |field: &str, found: &str, message: &str| {
        let details = PyDict::new(py);
        match details
            .set_item("name", field)
            .and_then(|()| details.set_item("value", found))
        {
            Ok(()) => exception("ConfigurationError", message, &details),
            Err(error) => error,
        }
    };
    let compression = match compression {
        "gzip" => Compression::Gzip,
        "none" => Compression::None,
        other => {
            let message = format!(
                "cannot write a NEFF: compression must be \"gzip\" or \"none\", found {other:?}"
            );
            return Err(invalid("compression", other, &message));
        }
    };
    let tensors = |tuples: Vec<TensorTuple>| -> Vec<Tensor> {
        tuples
            .into_iter()
            .map(|(name, dtype, shape)| Tensor { name, dtype, shape })
            .collect()
    };
    let (inputs, outputs) = (tensors(inputs), tensors(outputs));
    let members = members
        .into_iter()
        .map(|(name, content)| Ok((name, SharedBytes::new(&content)?)))
        .collect::<PyResult<Vec<_>>>()?;
    let written = py.detach(|| {
        let members: Vec<_> = members
            .iter()
            .map(|(name, content)| (name.as_str(), content.as_ref()))
            .collect();
        neff::write(&WriteRequest {
            name,
            target,
            compiler_version,
            inputs: &inputs,
            outputs: &outputs,
            members: &members,
            compression,
        })
    });
    match written {
        Ok(bytes) => Ok(PyBytes::new(py, &bytes)),
        Err(error) => Err(invalid(error.field, &error.found, &error.to_string())),
    }
}
