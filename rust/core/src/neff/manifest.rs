//! `info.json` and `kelf-0.json`: the compiler's version, the header's twins, the subgraph list.
//!
//! Source: docs/neff-format.md, "info.json" and "kelf-0.json".

use std::collections::HashSet;

use serde::Deserialize;
use serde_json::{Value, json};

use super::archive::Archive;
use super::error::{NeffError, Warnings};
use super::header::Header;

/// Name of the member that describes the package.
pub(super) const INFO_MEMBER: &str = "info.json";
/// Most subgraphs: one per core, and `tpb_per_node` has room for 64.
const MAX_SUBGRAPHS: usize = 64;

#[derive(Default, Deserialize)]
#[serde(default)]
struct Info {
    tool_version: String,
    name: Option<String>,
    num_tpb: Option<u64>,
    num_tpb_requested: Option<u64>,
    num_tpb_per_node: Option<Vec<u64>>,
}

/// Reads `info.json`, compares it with the header, and returns the compiler's version.
pub(super) fn parse_info(
    archive: &Archive,
    text: &[u8],
    header: &Header,
    warnings: &mut Warnings,
) -> Result<String, NeffError> {
    let info: Info = serde_json::from_slice(text).map_err(|reason| {
        archive.content_error(INFO_MEMBER, "the JSON of a NEFF's info", reason.to_string())
    })?;
    let mut compare = |field: &str, header: String, twin: Option<String>| {
        if twin.as_ref() != Some(&header) {
            let twin = twin.unwrap_or_else(|| "nothing".to_owned());
            warnings.push(format!(
                "header says {field} {header}, {INFO_MEMBER} says {twin}"
            ));
        }
    };
    let text = |value: Option<u64>| value.map(|value| value.to_string());
    compare(
        "name",
        format!("{:?}", header.name),
        info.name.map(|name| format!("{name:?}")),
    );
    compare("num_tpb", header.num_tpb.to_string(), text(info.num_tpb));
    compare(
        "requested_tpb_count",
        header.requested_tpb_count.to_string(),
        text(info.num_tpb_requested),
    );
    compare(
        "tpb_per_node",
        format!("{:?}", header.tpb_per_node),
        info.num_tpb_per_node.map(|counts| format!("{counts:?}")),
    );
    if info.tool_version.is_empty() {
        warnings.push(format!("{INFO_MEMBER} names no tool_version"));
    }
    Ok(info.tool_version)
}

/// The text of `info.json` for one core.
pub(super) fn render_info(name: &str, compiler_version: &str) -> Value {
    let mut per_node = [0_u8; 64];
    if let Some(first) = per_node.first_mut() {
        *first = 1;
    }
    json!({
        "tool_version": compiler_version,
        "kelp_version": "Dynamic",
        "name": name,
        "num_tpb": 1,
        "num_tpb_requested": 1,
        "num_tpb_per_node": per_node.to_vec(),
    })
}

/// The subgraph list.
#[derive(Debug, Deserialize)]
pub(super) struct Kelf {
    pub(super) graphs: Vec<KelfGraph>,
    /// Architecture that the code is for.
    #[serde(default)]
    pub(super) target: String,
}

/// One subgraph of the list.
#[derive(Debug, Deserialize)]
pub(super) struct KelfGraph {
    /// Path of its `def.json`.
    pub(super) definition: String,
}

/// Reads the subgraph list `member`.
pub(super) fn parse_kelf(
    archive: &Archive,
    member: &str,
    text: &[u8],
    warnings: &mut Warnings,
) -> Result<Kelf, NeffError> {
    let kelf: Kelf = serde_json::from_slice(text).map_err(|reason| {
        archive.content_error(
            member,
            "the JSON of a NEFF's subgraph list",
            reason.to_string(),
        )
    })?;
    if kelf.graphs.is_empty() || kelf.graphs.len() > MAX_SUBGRAPHS {
        return Err(archive.content_error(
            member,
            format!("1 to {MAX_SUBGRAPHS} subgraphs"),
            kelf.graphs.len().to_string(),
        ));
    }
    let mut definitions = HashSet::new();
    if let Some(graph) = kelf
        .graphs
        .iter()
        .find(|graph| !definitions.insert(&graph.definition))
    {
        return Err(archive.content_error(
            member,
            "every subgraph definition once",
            format_args!("{:?} twice", graph.definition),
        ));
    }
    if kelf.target.is_empty() {
        warnings.push(format!("{member} names no target"));
    }
    Ok(kelf)
}

/// The text of the subgraph list with the one subgraph `definition`.
pub(super) fn render_kelf(definition: &str, name: &str, target: &str) -> Value {
    json!({
        "graphs": [{"definition": definition, "name": name}],
        "version": "0.5",
        "target": target,
    })
}
