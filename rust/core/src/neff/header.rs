//! The 1024-byte header: layout, checks 1 to 6, and its bytes for the writer.
//!
//! Source: docs/neff-format.md, "Header". Every integer is little-endian.

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::error::{Mismatch, NeffError, Warnings};
use super::{digest, features};

/// Bytes of the header; the payload starts here.
pub const HEADER_BYTES: usize = 1024;
/// [`HEADER_BYTES`] as a file offset.
pub(super) const PAYLOAD_OFFSET: u64 = 1024;
/// Highest NEFF major version that is understood (check 3).
const MAX_MAJOR_VERSION: u64 = 2;
/// Bytes of the name field, its NUL included.
pub(super) const NAME_BYTES: usize = 256;

/// The header as it lies in the file.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawHeader {
    pub(super) package_version: U64,
    pub(super) header_size: U64,
    pub(super) data_size: U64,
    pub(super) major: U64,
    pub(super) minor: U64,
    pub(super) build_version: [u8; 128],
    pub(super) num_tpb: U32,
    pub(super) hash: [u8; 32],
    pub(super) uuid: [u8; 16],
    pub(super) name: [u8; NAME_BYTES],
    pub(super) requested_tpb_count: U32,
    pub(super) tpb_per_node: [u8; 64],
    pub(super) feature_bits: U64,
    pub(super) lnc_size: U32,
    pub(super) pad: [u8; 468],
}

const _: () = {
    assert!(size_of::<RawHeader>() == HEADER_BYTES);
    assert!(offset_of!(RawHeader, build_version) == 40);
    assert!(offset_of!(RawHeader, hash) == 172);
    assert!(offset_of!(RawHeader, uuid) == 204);
    assert!(offset_of!(RawHeader, name) == 220);
    assert!(offset_of!(RawHeader, requested_tpb_count) == 476);
    assert!(offset_of!(RawHeader, feature_bits) == 544);
    assert!(offset_of!(RawHeader, lnc_size) == 552);
    assert!(offset_of!(RawHeader, pad) == 556);
};

/// The version of the packaging: which digest the header carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackageVersion {
    /// Version 1: SHA-256.
    Sha256,
    /// Version 2: MD5.
    Md5,
}

impl PackageVersion {
    /// The number in the header.
    pub const fn number(self) -> u64 {
        match self {
            Self::Sha256 => 1,
            Self::Md5 => 2,
        }
    }
}

/// A checked header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Which digest is used.
    pub package_version: PackageVersion,
    /// NEFF major and minor version.
    pub neff_version: (u64, u64),
    /// Bytes of the payload.
    pub data_size: u64,
    /// Cores for efficient execution.
    pub num_tpb: u32,
    /// Cores asked for.
    pub requested_tpb_count: u32,
    /// Cores needed by each graph node.
    pub tpb_per_node: [u8; 64],
    /// Digest field; MD5 uses its first 16 bytes.
    pub hash: [u8; 32],
    /// Identity of the NEFF for runtime and profiler.
    pub uuid: [u8; 16],
    /// Name given by the compiler.
    pub name: String,
    /// Features that a runtime must know.
    pub feature_bits: u64,
    /// Physical cores per logical core.
    pub lnc_size: u32,
}

impl Header {
    /// The UUID in its usual text form, `8-4-4-4-12` hexadecimal digits.
    pub fn uuid_text(&self) -> String {
        let mut text = String::with_capacity(36);
        for (index, digit) in digest::hex(&self.uuid).chars().enumerate() {
            if matches!(index, 8 | 12 | 16 | 20) {
                text.push('-');
            }
            text.push(digit);
        }
        text
    }
}

/// Checks the header against the file (checks 1 to 6) and returns it with the payload.
///
/// What no rule forbids but no real file shows becomes a line in `warnings`.
pub(super) fn parse<'a>(
    data: &'a [u8],
    warnings: &mut Warnings,
) -> Result<(Header, &'a [u8]), NeffError> {
    let Ok((raw, rest)) = RawHeader::ref_from_prefix(data) else {
        return Err(NeffError::Header {
            field: "length of the file",
            mismatch: Mismatch::at(
                0,
                format_args!("at least {HEADER_BYTES} bytes"),
                format_args!("{} bytes", data.len()),
            ),
        });
    };
    let header_size = raw.header_size.get();
    if header_size != PAYLOAD_OFFSET {
        return Err(NeffError::Header {
            field: "header_size",
            mismatch: Mismatch::at(8, HEADER_BYTES, header_size),
        });
    }
    if rest.is_empty() {
        return Err(NeffError::Header {
            field: "length of the file",
            mismatch: Mismatch::at(
                PAYLOAD_OFFSET,
                "a payload after the header",
                "the end of the file",
            ),
        });
    }
    let (major, minor) = (raw.major.get(), raw.minor.get());
    if major > MAX_MAJOR_VERSION {
        return Err(NeffError::Unsupported {
            field: "neff_version_major",
            mismatch: Mismatch::at(24, format_args!("at most {MAX_MAJOR_VERSION}"), major),
        });
    }
    let feature_bits = raw.feature_bits.get();
    let unknown = feature_bits & !features::KNOWN;
    if unknown != 0 {
        return Err(NeffError::Unsupported {
            field: "feature_bits",
            mismatch: Mismatch::at(
                544,
                format_args!("only bits of {:#x}", features::KNOWN),
                format_args!("{feature_bits:#x} (unknown: {unknown:#x})"),
            ),
        });
    }
    let payload = payload(raw.data_size.get(), rest, warnings)?;
    let package_version = match raw.package_version.get() {
        1 => PackageVersion::Sha256,
        2 => PackageVersion::Md5,
        found => {
            return Err(NeffError::Unsupported {
                field: "pkg_version",
                mismatch: Mismatch::at(0, "1 or 2", found),
            });
        }
    };
    let name = name(&raw.name, warnings)?;
    if minor != 0 {
        warnings.push(format!(
            "neff_version_minor is {minor}; only 0 is known from real files"
        ));
    }
    if (major == 2) != (feature_bits != 0) || major == 0 {
        warnings.push(format!(
            "neff_version_major is {major} with feature_bits {feature_bits:#x}; \
             real files have major 2 exactly if a feature bit is set, else 1"
        ));
    }
    if package_version == PackageVersion::Md5 && raw.hash.iter().skip(16).any(|&byte| byte != 0) {
        warnings.push("the 16 bytes after the MD5 digest (offset 188) are not zero");
    }
    if raw.uuid == [0; 16] {
        warnings.push("the uuid (offset 204) is all zero; runtimes use it as identity");
    }
    if raw.build_version.iter().any(|&byte| byte != 0) {
        warnings.push("neff_build_version (offset 40) is not zero");
    }
    if raw.pad.iter().any(|&byte| byte != 0) {
        warnings.push("the padding at the end of the header (offset 556) is not zero");
    }
    let header = Header {
        package_version,
        neff_version: (major, minor),
        data_size: raw.data_size.get(),
        num_tpb: raw.num_tpb.get(),
        requested_tpb_count: raw.requested_tpb_count.get(),
        tpb_per_node: raw.tpb_per_node,
        hash: raw.hash,
        uuid: raw.uuid,
        name,
        feature_bits,
        lnc_size: raw.lnc_size.get(),
    };
    Ok((header, payload))
}

/// The `data_size` bytes after the header (check 5).
fn payload<'a>(
    data_size: u64,
    rest: &'a [u8],
    warnings: &mut Warnings,
) -> Result<&'a [u8], NeffError> {
    let payload = usize::try_from(data_size)
        .ok()
        .and_then(|size| rest.get(..size));
    match payload {
        Some([]) | None => Err(NeffError::Header {
            field: "data_size",
            mismatch: Mismatch::at(
                16,
                format_args!("{} (length of the file - {HEADER_BYTES})", rest.len()),
                data_size,
            ),
        }),
        Some(payload) => {
            let extra = rest.len().saturating_sub(payload.len());
            if extra != 0 {
                warnings.push(format!("{extra} bytes follow the payload and are ignored"));
            }
            Ok(payload)
        }
    }
}

fn name(field: &[u8; NAME_BYTES], warnings: &mut Warnings) -> Result<String, NeffError> {
    let mut parts = field.splitn(2, |&byte| byte == 0);
    let (Some(text), Some(tail)) = (parts.next(), parts.next()) else {
        return Err(NeffError::Header {
            field: "name",
            mismatch: Mismatch::at(220, "a NUL within 256 bytes", "none"),
        });
    };
    if tail.iter().any(|&byte| byte != 0) {
        warnings.push("the name (offset 220) is not filled up with zeros");
    }
    if text.is_empty() {
        warnings.push("the name (offset 220) is empty");
    }
    let name = String::from_utf8_lossy(text).into_owned();
    if name.as_bytes() != text {
        warnings.push("the name (offset 220) is not UTF-8");
    }
    Ok(name)
}

impl RawHeader {
    /// A header by the writer rules for one core, without features: what the writer fills in
    /// further are `data_size`, `hash`, `uuid` and `name`.
    ///
    /// Source: docs/neff-format.md, "Writer".
    pub(super) fn for_one_core() -> Self {
        let mut raw = Self::new_zeroed();
        raw.package_version = U64::new(PackageVersion::Md5.number());
        raw.header_size = U64::new(PAYLOAD_OFFSET);
        raw.major = U64::new(1);
        raw.num_tpb = U32::new(1);
        raw.requested_tpb_count = U32::new(1);
        if let Some(first) = raw.tpb_per_node.first_mut() {
            *first = 1;
        }
        raw.lnc_size = U32::new(1);
        raw
    }
}
