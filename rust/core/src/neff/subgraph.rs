//! `def.json` of one subgraph: engine files, variables, queues (check 11), read and written.
//!
//! Source: docs/neff-format.md, "def.json".

use std::collections::BTreeMap;
use std::fmt::Display;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::archive::{Archive, Member, NPY_PREFIX_BYTES, is_numpy_file};
use super::dtype;
use super::error::{NeffError, Warnings};
use super::signature::{Signature, Tensor};

/// Key prefixes of the five engines in `def.json`, and the stem of the files our writer gives them.
pub(super) const ENGINES: [(&str, &str); 5] = [
    ("pe", "PE"),
    ("act", "Activation"),
    ("pool", "Pool"),
    ("dve", "DVE"),
    ("sp", "SP"),
];
/// Bytes of one engine instruction; every `.bin` of real files is a multiple.
const INSTRUCTION_BYTES: u64 = 64;
/// Name of the variable for the on-chip state buffer.
pub(super) const STATE_BUFFER: &str = "SB";

#[derive(Deserialize)]
struct Definition {
    var: BTreeMap<String, Variable>,
    /// Queues by name; what they are does not matter here.
    #[serde(default)]
    #[expect(
        clippy::zero_sized_map_values,
        reason = "a set cannot skip over a map's values"
    )]
    dma_queue: BTreeMap<String, IgnoredAny>,
    #[serde(default)]
    neff_features: Vec<String>,
    pe: Option<String>,
    act: Option<String>,
    pool: Option<String>,
    dve: Option<String>,
    sp: Option<String>,
    pe_instr: Option<String>,
    act_instr: Option<String>,
    pool_instr: Option<String>,
    dve_instr: Option<String>,
    sp_instr: Option<String>,
}

#[derive(Deserialize)]
struct Variable {
    #[serde(rename = "type")]
    kind: String,
    var_id: u64,
    size: Option<u64>,
    file_name: Option<String>,
}

/// What the checks of the whole NEFF need to know of a subgraph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subgraph {
    /// Path of its `def.json`.
    pub definition: String,
    /// Names of its features.
    pub features: Vec<String>,
    /// Whether it has a table for descriptor-generating DMAs.
    pub(super) has_dge_table: bool,
    /// Whether it has a dynamic hardware DMA queue.
    pub(super) has_dynamic_hardware_queue: bool,
}

/// Checks the subgraph whose `def.json` is the member `path`.
pub(super) fn parse(
    archive: &Archive,
    path: &str,
    text: &[u8],
    signature: &Signature,
    warnings: &mut Warnings,
) -> Result<Subgraph, NeffError> {
    let definition: Definition = serde_json::from_slice(text).map_err(|reason| {
        archive.content_error(
            path,
            "the JSON of a subgraph definition",
            reason.to_string(),
        )
    })?;
    let check = Check { archive, path };
    check.engines(&definition, warnings)?;
    check.variable_ids(&definition.var)?;
    check.files(&definition.var, warnings)?;
    check.tensors(&definition.var, "input", &signature.inputs)?;
    check.tensors(&definition.var, "output", &signature.outputs)?;
    Ok(Subgraph {
        definition: path.to_owned(),
        features: definition.neff_features,
        has_dge_table: definition
            .var
            .values()
            .any(|variable| variable.kind == "dge-table"),
        has_dynamic_hardware_queue: definition
            .dma_queue
            .keys()
            .any(|name| name.starts_with('q') && name.ends_with("DynamicHW")),
    })
}

struct Check<'a> {
    archive: &'a Archive,
    path: &'a str,
}

impl Check<'_> {
    fn error(&self, expected: impl Display, found: impl Display) -> NeffError {
        self.archive.content_error(self.path, expected, found)
    }

    /// The member `name` beside the definition.
    fn sibling(&self, name: &str) -> Option<&Member> {
        match self.path.rsplit_once('/') {
            Some((directory, _)) => self.archive.get(&format!("{directory}/{name}")),
            None => self.archive.get(name),
        }
    }

    fn engines(&self, definition: &Definition, warnings: &mut Warnings) -> Result<(), NeffError> {
        let keys = [
            ("pe", &definition.pe),
            ("act", &definition.act),
            ("pool", &definition.pool),
            ("dve", &definition.dve),
            ("sp", &definition.sp),
            ("pe_instr", &definition.pe_instr),
            ("act_instr", &definition.act_instr),
            ("pool_instr", &definition.pool_instr),
            ("dve_instr", &definition.dve_instr),
            ("sp_instr", &definition.sp_instr),
        ];
        for (key, file) in keys {
            let Some(file) = file else {
                return Err(self.error(format!("a file name under {key:?}"), "no such key"));
            };
            let Some(member) = self.sibling(file) else {
                return Err(self.error(
                    format!("the file of {key:?}, {file:?}, beside the definition"),
                    "no such member",
                ));
            };
            if key.ends_with("_instr") && !member.size.is_multiple_of(INSTRUCTION_BYTES) {
                warnings.push(format!(
                    "{} has {} bytes, not whole instructions of {INSTRUCTION_BYTES}",
                    member.name, member.size
                ));
            }
        }
        Ok(())
    }

    fn variable_ids(&self, variables: &BTreeMap<String, Variable>) -> Result<(), NeffError> {
        let mut seen = vec![false; variables.len()];
        for (name, variable) in variables {
            let slot = usize::try_from(variable.var_id)
                .ok()
                .and_then(|id| seen.get_mut(id));
            match slot {
                Some(slot) if !*slot => *slot = true,
                _ => {
                    return Err(self.error(
                        format!("each var_id of 0 to {} once", seen.len().saturating_sub(1)),
                        format!("{} (variable {name:?})", variable.var_id),
                    ));
                }
            }
        }
        Ok(())
    }

    fn files(
        &self,
        variables: &BTreeMap<String, Variable>,
        warnings: &mut Warnings,
    ) -> Result<(), NeffError> {
        for (name, variable) in variables
            .iter()
            .filter(|(_, variable)| variable.kind == "file")
        {
            let file = variable.file_name.as_deref().unwrap_or_default();
            let (Some(member), Some(size)) = (self.sibling(file), variable.size) else {
                return Err(self.error(
                    format!("a size and the file {file:?} for variable {name:?}"),
                    "one of them missing",
                ));
            };
            if !is_numpy_file(file) {
                if member.size != size {
                    warnings.push(format!(
                        "{} has {} bytes, its variable {name:?} has {size}",
                        member.name, member.size
                    ));
                }
            } else if npy_data_bytes(member) != Some(size) {
                return Err(self.archive.content_error(
                    &member.name,
                    format!("a numpy file with {size} bytes of data, as variable {name:?} says"),
                    npy_data_bytes(member).map_or_else(
                        || "no numpy header".to_owned(),
                        |found| format!("{found} bytes"),
                    ),
                ));
            }
        }
        Ok(())
    }

    fn tensors(
        &self,
        variables: &BTreeMap<String, Variable>,
        kind: &str,
        tensors: &[Tensor],
    ) -> Result<(), NeffError> {
        for tensor in tensors {
            let Some(variable) = variables
                .get(&tensor.name)
                .filter(|found| found.kind == kind)
            else {
                return Err(self.error(
                    format!("an {kind} variable {:?}, as neff.json says", tensor.name),
                    "none",
                ));
            };
            let expected = match tensor.byte_count() {
                ByteCount::Known(bytes) => bytes,
                ByteCount::UnknownDtype => continue,
                ByteCount::Overflow => {
                    return Err(self.error(
                        format!("a shape of {:?} that fits 64 bits", tensor.name),
                        format!("{:?}", tensor.shape),
                    ));
                }
            };
            if variable.size != Some(expected) {
                return Err(self.error(
                    format!(
                        "{expected} bytes for {kind} {:?} ({} {:?})",
                        tensor.name, tensor.dtype, tensor.shape
                    ),
                    variable
                        .size
                        .map_or_else(|| "no size".to_owned(), |size| size.to_string()),
                ));
            }
        }
        Ok(())
    }
}

/// Bytes of a tensor, if they can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ByteCount {
    Known(u64),
    UnknownDtype,
    Overflow,
}

impl Tensor {
    pub(super) fn byte_count(&self) -> ByteCount {
        let Some(item_bytes) = dtype::item_bytes(&self.dtype) else {
            return ByteCount::UnknownDtype;
        };
        let bytes = self
            .shape
            .iter()
            .try_fold(item_bytes, |bytes, extent| bytes.checked_mul(*extent));
        bytes.map_or(ByteCount::Overflow, ByteCount::Known)
    }
}

/// Bytes of data in a numpy file, from its first bytes: magic, version, length of the text header.
///
/// Source: numpy.lib.format, versions 1.0 to 3.0.
fn npy_data_bytes(member: &Member) -> Option<u64> {
    let prefix: &[u8; NPY_PREFIX_BYTES] = member.npy_prefix.as_ref()?;
    let (magic, rest) = prefix.split_first_chunk::<6>()?;
    let (version, rest) = rest.split_first_chunk::<2>()?;
    let data_offset = match (magic, version) {
        (b"\x93NUMPY", [1, _]) => {
            u64::from(u16::from_le_bytes(*rest.first_chunk()?)).checked_add(10)?
        }
        (b"\x93NUMPY", [2 | 3, _]) => {
            u64::from(u32::from_le_bytes(*rest.first_chunk()?)).checked_add(12)?
        }
        _ => return None,
    };
    member.size.checked_sub(data_offset)
}

/// The text of a `def.json` without code: the variables are the state buffer, inputs and outputs.
///
/// Tensors whose bytes cannot be told have been refused by the writer.
pub(super) fn render(inputs: &[Tensor], outputs: &[Tensor]) -> Value {
    let mut definition = Map::new();
    for (key, stem) in ENGINES {
        definition.insert(key.to_owned(), json!(format!("{stem}.json")));
        definition.insert(format!("{key}_instr"), json!(format!("{stem}.bin")));
        definition.insert(format!("{key}_dbg"), json!([]));
        definition.insert(format!("{key}_asm_dbg"), json!([]));
    }
    let mut variables = Map::new();
    variables.insert(
        STATE_BUFFER.to_owned(),
        json!({"type": "state-buffer", "var_id": 0}),
    );
    let kinds = inputs.iter().map(|input| ("input", input));
    for (kind, tensor) in kinds.chain(outputs.iter().map(|output| ("output", output))) {
        if let ByteCount::Known(size) = tensor.byte_count() {
            let id = variables.len();
            variables.insert(
                tensor.name.clone(),
                json!({"type": kind, "var_id": id, "size": size, "ops": []}),
            );
        }
    }
    definition.insert("dma_dbg".to_owned(), json!([]));
    definition.insert("debug_info".to_owned(), json!({}));
    definition.insert("dma_queue".to_owned(), json!({}));
    definition.insert("var".to_owned(), Value::Object(variables));
    definition.insert("neff_features".to_owned(), json!([]));
    definition.insert("runtime_event_count".to_owned(), json!(12));
    definition.insert("runtime_semaphore_count".to_owned(), json!(3));
    definition.insert("name".to_owned(), json!("definition"));
    definition.insert("version".to_owned(), json!("0.6"));
    Value::Object(definition)
}

/// The text of an engine's JSON without code.
pub(super) fn render_engine(stem: &str) -> Value {
    json!({"name": format!("{stem}.json"), "instr": format!("{stem}.bin"), "dma": []})
}
