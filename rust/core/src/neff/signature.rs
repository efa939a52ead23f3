//! `neff.json`: the input and output tensors (check 9), read and written.
//!
//! The member has the shape of a TVM graph with one node that stands for the whole program.
//! Source: docs/neff-format.md, "neff.json".

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::archive::Archive;
use super::error::{NeffError, Warnings};

/// Name of the member.
pub(super) const MEMBER: &str = "neff.json";
/// `func_name` of the node that stands for the program.
const KELF_FUNCTION: &str = "__kelf";

/// One input or output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensor {
    /// Name, unique among the inputs or the outputs.
    pub name: String,
    /// Element type, by the names of [`super::dtype`].
    pub dtype: String,
    /// Extents, outermost first.
    pub shape: Vec<u64>,
}

/// What `neff.json` says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Signature {
    pub(super) inputs: Vec<Tensor>,
    /// De-duplicated: with LNC 2 every output is listed once per core.
    pub(super) outputs: Vec<Tensor>,
    /// The member that lists the subgraphs.
    pub(super) kelf: String,
}

#[derive(Deserialize)]
struct Graph {
    nodes: Vec<Node>,
    arg_nodes: Vec<usize>,
    #[serde(default)]
    heads: Vec<Vec<u64>>,
    node_row_ptr: Vec<usize>,
    attrs: Attributes,
    #[serde(default)]
    metadata: Metadata,
}

#[derive(Deserialize)]
struct Node {
    op: String,
    name: String,
    #[serde(default)]
    inputs: Vec<Vec<usize>>,
    #[serde(default)]
    output_names: Vec<String>,
    #[serde(default)]
    attrs: NodeAttributes,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct NodeAttributes {
    func_name: String,
    kelf: String,
    num_inputs: String,
    num_outputs: String,
}

#[derive(Deserialize)]
struct Attributes {
    shape: (String, Vec<Vec<u64>>),
    dltype: (String, Vec<String>),
    #[serde(default)]
    storage_id: (String, Vec<u64>),
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Metadata {
    signatures: HashMap<String, DeclaredSignature>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct DeclaredSignature {
    inputs: HashMap<String, DeclaredTensor>,
}

#[derive(Deserialize)]
struct DeclaredTensor {
    dtype: String,
    shape: Vec<u64>,
}

/// Reads the signature out of the text of `neff.json`.
pub(super) fn parse(
    archive: &Archive,
    text: &[u8],
    warnings: &mut Warnings,
) -> Result<Signature, NeffError> {
    let error = |expected: &str, found: String| archive.content_error(MEMBER, expected, found);
    let graph: Graph = serde_json::from_slice(text)
        .map_err(|reason| error("the JSON of a NEFF graph", reason.to_string()))?;
    let mut programs = graph
        .nodes
        .iter()
        .enumerate()
        .filter(|(_, node)| node.attrs.func_name == KELF_FUNCTION);
    let (program_index, program) = match (programs.next(), programs.next()) {
        (Some(program), None) => program,
        (None, _) => return Err(error("one node with func_name `__kelf`", "none".to_owned())),
        (Some(_), Some(_)) => {
            return Err(error(
                "one node with func_name `__kelf`",
                "several".to_owned(),
            ));
        }
    };
    let shapes = &graph.attrs.shape.1;
    let dtypes = &graph.attrs.dltype.1;
    let tensor = |name: &str, node: usize, output: usize| {
        let row = graph
            .node_row_ptr
            .get(node)
            .and_then(|first| first.checked_add(output));
        match row.and_then(|row| Some((shapes.get(row)?, dtypes.get(row)?))) {
            Some((shape, dtype)) => Ok(Tensor {
                name: name.to_owned(),
                dtype: dtype.clone(),
                shape: shape.clone(),
            }),
            None => Err(error(
                "a shape and a dltype for every tensor",
                format!("none for {name:?} (node {node}, output {output})"),
            )),
        }
    };

    let mut inputs = Vec::with_capacity(graph.arg_nodes.len().min(graph.nodes.len()));
    for &index in &graph.arg_nodes {
        let Some(node) = graph.nodes.get(index).filter(|node| node.op == "null") else {
            return Err(error(
                "arg_nodes to be nodes of op `null`",
                format!("node {index}"),
            ));
        };
        inputs.push(tensor(&node.name, index, 0)?);
    }
    let mut listed = Vec::with_capacity(program.output_names.len());
    for (output, name) in program.output_names.iter().enumerate() {
        listed.push(tensor(name, program_index, output)?);
    }
    let signature = Signature {
        kelf: program.attrs.kelf.clone(),
        outputs: without_repeats(&listed).map_err(|(first, other)| {
            error(
                &format!(
                    "every listing of output {:?} to be {}",
                    first.name,
                    describe(first)
                ),
                describe(other),
            )
        })?,
        inputs,
    };
    if let Some(name) = repeated_name(&signature.inputs) {
        return Err(error("every input name once", format!("{name:?} twice")));
    }
    if signature.outputs.is_empty() {
        return Err(error("at least one output", "none".to_owned()));
    }
    let counts = Counts {
        rows: shapes.len(),
        inputs: signature.inputs.len(),
        listed: listed.len(),
    };
    warn_of_inconsistency(&graph, program, program_index, &counts, warnings);
    warn_of_declared(&graph.metadata, &signature.inputs, warnings);
    Ok(signature)
}

fn describe(tensor: &Tensor) -> String {
    format!("{} {:?}", tensor.dtype, tensor.shape)
}

/// The tensors by first appearance; an error if a repeated name has another type or shape.
fn without_repeats(listed: &[Tensor]) -> Result<Vec<Tensor>, (&Tensor, &Tensor)> {
    let mut first: HashMap<&str, &Tensor> = HashMap::new();
    let mut outputs = Vec::new();
    for tensor in listed {
        match first.get(tensor.name.as_str()) {
            None => {
                first.insert(&tensor.name, tensor);
                outputs.push(tensor.clone());
            }
            Some(known) if *known != tensor => return Err((known, tensor)),
            Some(_) => {}
        }
    }
    Ok(outputs)
}

fn repeated_name(tensors: &[Tensor]) -> Option<&str> {
    let mut seen = std::collections::HashSet::new();
    tensors
        .iter()
        .map(|tensor| tensor.name.as_str())
        .find(|name| !seen.insert(*name))
}

struct Counts {
    rows: usize,
    inputs: usize,
    listed: usize,
}

/// Fields that repeat what is known already: nothing here depends on them, so a difference is a
/// warning.
fn warn_of_inconsistency(
    graph: &Graph,
    program: &Node,
    program_index: usize,
    counts: &Counts,
    warnings: &mut Warnings,
) {
    let rows = counts.inputs.saturating_add(counts.listed);
    let mut compare = |what: &str, expected: String, found: String| {
        if expected != found {
            warnings.push(format!(
                "{MEMBER}: {what}: expected {expected}, found {found}"
            ));
        }
    };
    compare("length of shape", rows.to_string(), counts.rows.to_string());
    compare(
        "length of dltype",
        rows.to_string(),
        graph.attrs.dltype.1.len().to_string(),
    );
    compare(
        "length of storage_id",
        rows.to_string(),
        graph.attrs.storage_id.1.len().to_string(),
    );
    compare(
        "last node_row_ptr",
        rows.to_string(),
        text_of(graph.node_row_ptr.last()),
    );
    compare(
        "num_inputs",
        counts.inputs.to_string(),
        program.attrs.num_inputs.clone(),
    );
    compare(
        "num_outputs",
        counts.listed.to_string(),
        program.attrs.num_outputs.clone(),
    );
    let arguments: Vec<_> = graph
        .arg_nodes
        .iter()
        .map(|&node| vec![node, 0, 0])
        .collect();
    if arguments != program.inputs {
        warnings.push(format!(
            "{MEMBER}: the inputs of the `__kelf` node are not the arg_nodes"
        ));
    }
    let heads = (0..counts.listed as u64).map(|output| vec![program_index as u64, output, 0]);
    if !heads.eq(graph.heads.iter().cloned()) {
        warnings.push(format!(
            "{MEMBER}: heads are not the outputs of the `__kelf` node"
        ));
    }
}

fn text_of(value: Option<&usize>) -> String {
    value.map_or_else(|| "none".to_owned(), ToString::to_string)
}

fn warn_of_declared(metadata: &Metadata, inputs: &[Tensor], warnings: &mut Warnings) {
    let Some(declared) = metadata.signatures.get("default") else {
        return;
    };
    for input in inputs {
        let found = declared.inputs.get(&input.name);
        if !found.is_some_and(|twin| twin.dtype == input.dtype && twin.shape == input.shape) {
            warnings.push(format!(
                "{MEMBER}: metadata does not repeat input {:?} as {}",
                input.name,
                describe(input)
            ));
        }
    }
}

/// The text of `neff.json` for one core.
pub(super) fn render(inputs: &[Tensor], outputs: &[Tensor], kelf: &str) -> Value {
    let input_nodes = inputs.iter().map(|input| {
        json!({
            "op": "null", "name": input.name, "inputs": [], "output_names": [input.name],
            "is_param": "0",
        })
    });
    let program = json!({
        "op": "tvm_op",
        "name": "sg_coreV10",
        "attrs": {
            "func_name": KELF_FUNCTION,
            "flatten_data": "0",
            "num_inputs": inputs.len().to_string(),
            "kelf": kelf,
            "num_outputs": outputs.len().to_string(),
        },
        "inputs": (0..inputs.len()).map(|index| [index, 0, 0]).collect::<Vec<_>>(),
        "output_names": outputs.iter().map(|output| &output.name).collect::<Vec<_>>(),
    });
    let rows = inputs.len().saturating_add(outputs.len());
    let tensors = || inputs.iter().chain(outputs);
    let declared: BTreeMap<_, _> = inputs
        .iter()
        .enumerate()
        .map(|(id, input)| {
            (
                &input.name,
                json!({"id": id, "dtype": input.dtype, "shape": input.shape}),
            )
        })
        .collect();
    json!({
        "nodes": input_nodes.chain([program]).collect::<Vec<_>>(),
        "arg_nodes": (0..inputs.len()).collect::<Vec<_>>(),
        "heads": (0..outputs.len()).map(|index| [inputs.len(), index, 0]).collect::<Vec<_>>(),
        "attrs": {
            "shape": ["list_shape", tensors().map(|tensor| &tensor.shape).collect::<Vec<_>>()],
            "storage_id": ["list_int", (0..rows).collect::<Vec<_>>()],
            "dltype": ["list_str", tensors().map(|tensor| &tensor.dtype).collect::<Vec<_>>()],
        },
        "node_row_ptr": (0..=inputs.len()).chain([rows]).collect::<Vec<_>>(),
        "metadata": {"signatures": {"default": {"inputs": declared, "outputs": {}}}},
    })
}
