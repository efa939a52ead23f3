//! NEFF containers: parse, validate, write.
//!
//! A NEFF is a 1024-byte header and a tar archive, compressed or not, with the program of one
//! graph. [`Neff::parse`] applies the checks of docs/neff-format.md in its order; a broken rule is
//! a [`NeffError`], what is merely unlike every known file is a warning. [`write()`] makes a NEFF
//! without device code, for the host emulator and for tests.

#![deny(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

mod archive;
mod digest;
pub mod dtype;
mod error;
mod features;
mod header;
mod index;
mod manifest;
mod md5;
mod signature;
mod stream;
mod subgraph;
mod tar;
mod write;

use std::borrow::Cow;

pub use archive::{Limits, Member};
pub use digest::DigestOrder;
pub use error::{ErrorKind, Mismatch, NeffError};
pub use features::names as feature_names;
pub use header::{HEADER_BYTES, Header, PackageVersion};
pub use signature::Tensor;
pub use stream::Compression;
pub use subgraph::Subgraph;
pub use write::{WriteError, WriteRequest, write};

use archive::Archive;
use error::Warnings;

/// How thoroughly and within which bounds to parse.
#[derive(Clone, Debug)]
pub struct ParseOptions {
    /// Whether to compare the payload with the digest in the header.
    pub verify_hash: bool,
    /// Bounds on the archive.
    pub limits: Limits,
}

impl Default for ParseOptions {
    fn default() -> Self {
        Self {
            verify_hash: true,
            limits: Limits::DEFAULT,
        }
    }
}

/// A validated NEFF over the bytes `B`, which are kept and not copied.
#[derive(Debug)]
pub struct Neff<B> {
    data: B,
    header: Header,
    digest_order: Option<DigestOrder>,
    archive: Archive,
    signature: signature::Signature,
    target: String,
    compiler_version: String,
    subgraphs: Vec<Subgraph>,
    warnings: Vec<String>,
}

impl<B: AsRef<[u8]>> Neff<B> {
    /// Parses and validates `data`.
    pub fn parse(data: B, options: &ParseOptions) -> Result<Self, NeffError> {
        let mut warnings = Warnings::default();
        let (header, payload) = header::parse(data.as_ref(), &mut warnings)?;
        let digest_order = if options.verify_hash {
            Some(digest::verify(&header, payload)?)
        } else {
            None
        };
        let mut archive = Archive::index(payload, &options.limits, is_metadata)?;

        archive.load(payload, [signature::MEMBER])?;
        let text = archive.read(payload, signature::MEMBER)?;
        let signature = signature::parse(&archive, &text, &mut warnings)?;
        let compiler_version = if archive.get(manifest::INFO_MEMBER).is_some() {
            archive.load(payload, [manifest::INFO_MEMBER])?;
            let text = archive.read(payload, manifest::INFO_MEMBER)?;
            manifest::parse_info(&archive, &text, &header, &mut warnings)?
        } else {
            warnings.push("there is no info.json: the compiler's version is unknown");
            String::new()
        };
        archive.load(payload, [signature.kelf.as_str()])?;
        let text = archive.read(payload, &signature.kelf)?;
        let kelf = manifest::parse_kelf(&archive, &signature.kelf, &text, &mut warnings)?;
        archive.load(
            payload,
            kelf.graphs.iter().map(|graph| graph.definition.as_str()),
        )?;
        let mut subgraphs = Vec::with_capacity(kelf.graphs.len());
        for graph in &kelf.graphs {
            let path = &graph.definition;
            let text = archive.read(payload, path)?;
            subgraphs.push(subgraph::parse(
                &archive,
                path,
                &text,
                &signature,
                &mut warnings,
            )?);
        }
        warn_of_unusual_features(&header, &subgraphs, &mut warnings);
        for tensor in signature.inputs.iter().chain(&signature.outputs) {
            if dtype::item_bytes(&tensor.dtype).is_none() {
                warnings.push(format!(
                    "{:?} has the unknown dtype {:?}; its size is not checked",
                    tensor.name, tensor.dtype
                ));
            }
        }
        archive.forget_kept();
        Ok(Self {
            header,
            digest_order,
            archive,
            signature,
            target: kelf.target,
            compiler_version,
            subgraphs,
            warnings: warnings.into_lines(),
            data,
        })
    }

    /// The bytes that were parsed.
    pub fn data(&self) -> &[u8] {
        self.data.as_ref()
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Order of the digest in the header; `None` if it was not verified.
    pub fn digest_order(&self) -> Option<DigestOrder> {
        self.digest_order
    }

    /// How the archive is stored.
    pub fn compression(&self) -> Compression {
        self.archive.compression
    }

    /// Architecture that the code is for; empty if the file names none.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Version of the compiler; empty if the file names none.
    pub fn compiler_version(&self) -> &str {
        &self.compiler_version
    }

    /// Input tensors, in the order of the graph's arguments.
    pub fn inputs(&self) -> &[Tensor] {
        &self.signature.inputs
    }

    /// Output tensors, each name once.
    pub fn outputs(&self) -> &[Tensor] {
        &self.signature.outputs
    }

    /// The subgraphs, one per physical core.
    pub fn subgraphs(&self) -> &[Subgraph] {
        &self.subgraphs
    }

    /// Files of the archive, in its order.
    pub fn members(&self) -> &[Member] {
        &self.archive.members
    }

    /// What is allowed but unlike every known file.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The content of one member: a part of the data if the archive is not compressed, else
    /// inflated from the start of the archive up to it.
    pub fn member(&self, name: &str) -> Result<Cow<'_, [u8]>, NeffError> {
        let payload = self.data.as_ref().get(HEADER_BYTES..).unwrap_or_default();
        self.archive.read(payload, name)
    }
}

/// The members that [`Neff::parse`] reads itself, under their usual names.
fn is_metadata(name: &str) -> bool {
    matches!(name, signature::MEMBER | manifest::INFO_MEMBER)
        || (name.starts_with("kelf") && !name.contains('/'))
        || name.ends_with("/def.json")
}

/// Rules that hold in every known file but that nothing documents.
fn warn_of_unusual_features(header: &Header, subgraphs: &[Subgraph], warnings: &mut Warnings) {
    if subgraphs.len() as u64 != u64::from(header.lnc_size) {
        warnings.push(format!(
            "lnc_size is {}, the number of subgraphs is {}",
            header.lnc_size,
            subgraphs.len()
        ));
    }
    let Some(last) = subgraphs.last() else {
        return;
    };
    let rules = [
        (
            features::VIRTUAL_NEURON_CORE,
            header.lnc_size == 2,
            "lnc_size is 2",
        ),
        (
            features::DGE_TABLE,
            last.has_dge_table,
            "the last subgraph has a DGE table",
        ),
        (
            features::DYNAMIC_HARDWARE_QUEUE,
            last.has_dynamic_hardware_queue,
            "the last subgraph has a dynamic hardware queue",
        ),
    ];
    for (bit, holds, condition) in rules {
        if (header.feature_bits & bit != 0) != holds {
            warnings.push(format!(
                "feature bit {bit:#x} is {} although {} that {condition}",
                if holds { "clear" } else { "set" },
                if holds {
                    "it is true"
                } else {
                    "it is not true"
                },
            ));
        }
    }
}
