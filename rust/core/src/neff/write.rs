//! The writer: NEFFs without device code, for the host emulator and for tests.
//!
//! Equal requests give equal bytes. Source: docs/neff-format.md, "Writer".

use std::collections::HashSet;
use std::io::{self, Write};

use flate2::{Compression as Level, GzBuilder};
use serde_json::Value;
use thiserror::Error;
use zerocopy::{IntoBytes, little_endian::U64};

use super::archive::{Limits, is_plain_relative_path};
use super::header::{HEADER_BYTES, NAME_BYTES, RawHeader};
use super::md5::md5;
use super::signature::Tensor;
use super::stream::Compression;
use super::subgraph::{self, ByteCount};
use super::{manifest, signature, tar};

const KELF_MEMBER: &str = "kelf-0.json";
const SUBGRAPH: &str = "sg00";
/// Architectures and devices that exist: a NEFF without device code must never reach one of them,
/// so it must not carry their names.
const DEVICE_TARGETS: [&str; 10] = [
    "sunda", "cayman", "mariana", "inf1", "inf2", "trn1", "trn1n", "trn2", "trn2n", "trn3",
];
/// The byte for Unix in a gzip header (RFC 1952), as in every known NEFF.
const GZIP_UNIX: u8 = 3;

/// What to write.
#[derive(Clone, Debug)]
pub struct WriteRequest<'a> {
    /// Name of the NEFF, at most 255 bytes.
    pub name: &'a str,
    /// Target that no device has.
    pub target: &'a str,
    /// Version of the compiler, for `info.json`.
    pub compiler_version: &'a str,
    /// Input tensors.
    pub inputs: &'a [Tensor],
    /// Output tensors; at least one.
    pub outputs: &'a [Tensor],
    /// More files for the archive, by path.
    pub members: &'a [(&'a str, &'a [u8])],
    /// How to store the archive.
    pub compression: Compression,
}

/// Why a NEFF cannot be written: a part of the request and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("cannot write a NEFF: {field} must be {expected}, found {found:?}")]
pub struct WriteError {
    /// Name of the part.
    pub field: &'static str,
    /// What it must be.
    pub expected: String,
    /// What it is, as given.
    pub found: String,
}

impl WriteError {
    fn new(field: &'static str, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self {
            field,
            expected: expected.into(),
            found: found.into(),
        }
    }
}

/// Writes a NEFF for one core whose engines have no code.
pub fn write(request: &WriteRequest<'_>) -> Result<Vec<u8>, WriteError> {
    check_names(request)?;
    check_tensors(request)?;
    // The header's place is kept free, so that a plain archive is not moved afterwards.
    let mut file = vec![0; HEADER_BYTES];
    append_members(&mut file, request)?;
    if request.compression == Compression::Gzip {
        let archive = file.get(HEADER_BYTES..).unwrap_or_default();
        let payload = gzip(archive)
            .map_err(|error| WriteError::new("members", "compressible", error.to_string()))?;
        file.truncate(HEADER_BYTES);
        file.extend_from_slice(&payload);
    }
    let payload = file.get(HEADER_BYTES..).unwrap_or_default();
    let header = header(request.name, payload);
    if let Some(place) = file.first_chunk_mut::<HEADER_BYTES>() {
        place.copy_from_slice(header.as_bytes());
    }
    Ok(file)
}

fn check_names(request: &WriteRequest<'_>) -> Result<(), WriteError> {
    let WriteRequest { name, target, .. } = request;
    if name.is_empty() || name.len() >= NAME_BYTES || name.contains('\0') {
        return Err(WriteError::new("name", "1 to 255 bytes without NUL", *name));
    }
    if target.is_empty()
        || DEVICE_TARGETS
            .iter()
            .any(|real| real.eq_ignore_ascii_case(target))
    {
        return Err(WriteError::new(
            "target",
            "a name that no device has, because the NEFF holds no device code",
            *target,
        ));
    }
    Ok(())
}

fn check_tensors(request: &WriteRequest<'_>) -> Result<(), WriteError> {
    if request.outputs.is_empty() {
        return Err(WriteError::new("outputs", "at least one tensor", "[]"));
    }
    // One name space: the variables of def.json.
    let mut names = HashSet::from([subgraph::STATE_BUFFER]);
    let inputs = request.inputs.iter().map(|tensor| ("inputs", tensor));
    for (field, tensor) in inputs.chain(request.outputs.iter().map(|tensor| ("outputs", tensor))) {
        let Tensor { name, dtype, shape } = tensor;
        if name.is_empty() || name.len() >= NAME_BYTES || name.contains('\0') {
            return Err(WriteError::new(
                field,
                "named with 1 to 255 bytes without NUL",
                name,
            ));
        }
        if !names.insert(name) {
            return Err(WriteError::new(
                field,
                "named differently from each other, from the inputs and from \"SB\"",
                name,
            ));
        }
        match tensor.byte_count() {
            ByteCount::Known(_) => {}
            ByteCount::UnknownDtype => {
                return Err(WriteError::new(field, "of a known dtype", dtype));
            }
            ByteCount::Overflow => {
                return Err(WriteError::new(
                    field,
                    "of a size that fits 64 bits",
                    format!("{shape:?}"),
                ));
            }
        }
    }
    Ok(())
}

/// Appends the tar archive: what every NEFF has, then the members of the request.
fn append_members(file: &mut Vec<u8>, request: &WriteRequest<'_>) -> Result<(), WriteError> {
    let definition = format!("{SUBGRAPH}/def.json");
    let mut generated = vec![
        (
            KELF_MEMBER.to_owned(),
            text(&manifest::render_kelf(
                &definition,
                SUBGRAPH,
                request.target,
            )),
        ),
        (
            signature::MEMBER.to_owned(),
            text(&signature::render(
                request.inputs,
                request.outputs,
                KELF_MEMBER,
            )),
        ),
        (
            manifest::INFO_MEMBER.to_owned(),
            text(&manifest::render_info(
                request.name,
                request.compiler_version,
            )),
        ),
        (
            definition,
            text(&subgraph::render(request.inputs, request.outputs)),
        ),
    ];
    for (_, stem) in subgraph::ENGINES {
        let json = text(&subgraph::render_engine(stem));
        generated.push((format!("{SUBGRAPH}/{stem}.json"), json));
        generated.push((format!("{SUBGRAPH}/{stem}.bin"), Vec::new()));
    }
    let limits = Limits::DEFAULT;
    let generated = generated
        .iter()
        .map(|(name, content)| (name.as_str(), content.as_slice()));
    let mut names = HashSet::new();
    for (name, content) in generated.chain(request.members.iter().copied()) {
        let error = |expected: &str| WriteError::new("members", expected, name);
        if !is_plain_relative_path(name) {
            return Err(error(
                "named by a relative path without empty, `.` or `..` components",
            ));
        }
        if !names.insert(name) {
            return Err(error(
                "named once, and unlike the members that every NEFF has",
            ));
        }
        if content.len() as u64 > limits.member_bytes || names.len() > limits.members {
            return Err(error("within the reader's limits of count and size"));
        }
        tar::append_file(file, name, content)
            .ok_or_else(|| error("named within the lengths of a ustar header"))?;
    }
    tar::append_end(file);
    let bytes = file.len().saturating_sub(HEADER_BYTES) as u64;
    if bytes > limits.total_bytes {
        return Err(WriteError::new(
            "members",
            format!("at most {} bytes together", limits.total_bytes),
            bytes.to_string(),
        ));
    }
    Ok(())
}

fn text(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

/// Level 1 uses fixed Huffman codes, 13 bits for a repetition of 258 bytes: it packs at most 159
/// times, which is within the reader's inflate ratio.
fn gzip(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = GzBuilder::new()
        .mtime(0)
        .operating_system(GZIP_UNIX)
        .write(Vec::new(), Level::fast());
    encoder.write_all(bytes)?;
    encoder.finish()
}

fn header(name: &str, payload: &[u8]) -> RawHeader {
    let digest = md5(payload);
    let mut raw = RawHeader::for_one_core();
    raw.data_size = U64::new(payload.len() as u64);
    if let Some(hash) = raw.hash.first_chunk_mut::<16>() {
        *hash = digest;
    }
    // Content-derived, so that equal content has one identity and other content another.
    raw.uuid = digest;
    if let Some(place) = raw.name.get_mut(..name.len()) {
        place.copy_from_slice(name.as_bytes());
    }
    raw
}
