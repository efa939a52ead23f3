//! What parsing a NEFF found out, kept beside it: loading it again inflates and hashes nothing.
//!
//! Specified in docs/neff-format.md, "Stored index". An index is bound to its NEFF by the digest in
//! the header and the payload's length. It is a cache of this reader's own findings: whoever keeps
//! it must keep it as safe as the NEFF itself.

use serde::{Deserialize, Serialize};

use super::archive::{Archive, Member};
use super::error::Warnings;
use super::signature::Signature;
use super::stream::Compression;
use super::subgraph::Subgraph;
use super::{Neff, NeffError, ParseOptions, digest, header};

/// Version of the index; another one is not used.
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct StoredIndex {
    version: u32,
    /// The digest field of the header, in hex.
    hash: String,
    data_size: u64,
    is_gzip: bool,
    members: Vec<Member>,
    signature: Signature,
    target: String,
    compiler_version: String,
    subgraphs: Vec<Subgraph>,
    warnings: Vec<String>,
}

impl<B: AsRef<[u8]>> Neff<B> {
    /// The index, as JSON.
    pub fn index(&self) -> Vec<u8> {
        let stored = StoredIndex {
            version: VERSION,
            hash: digest::hex(&self.header.hash),
            data_size: self.header.data_size,
            is_gzip: self.archive.compression == Compression::Gzip,
            members: self.archive.members.clone(),
            signature: self.signature.clone(),
            target: self.target.clone(),
            compiler_version: self.compiler_version.clone(),
            subgraphs: self.subgraphs.clone(),
            warnings: self.warnings.clone(),
        };
        // Strings and numbers in vectors always have a JSON form.
        serde_json::to_vec(&stored).unwrap_or_default()
    }

    /// Parses `data` with the index that an earlier parse of the same bytes gave.
    ///
    /// The header is checked as ever, the digest if `options` ask for it; the archive is not read.
    /// An index of other bytes or of another version is not used: then this is [`Neff::parse`].
    pub fn parse_indexed(data: B, index: &[u8], options: &ParseOptions) -> Result<Self, NeffError> {
        let (header, payload) = header::parse(data.as_ref(), &mut Warnings::default())?;
        let stored = serde_json::from_slice::<StoredIndex>(index)
            .ok()
            .filter(|stored| {
                stored.version == VERSION
                    && stored.hash == digest::hex(&header.hash)
                    && stored.data_size == header.data_size
            });
        let compression = match &stored {
            Some(stored) if stored.is_gzip => Compression::Gzip,
            _ => Compression::None,
        };
        let known = stored.and_then(|mut stored| {
            let members = std::mem::take(&mut stored.members);
            Some((
                Archive::from_members(payload, compression, members)?,
                stored,
            ))
        });
        let Some((archive, stored)) = known else {
            return Self::parse(data, options);
        };
        let digest_order = if options.verify_hash {
            Some(digest::verify(&header, payload)?)
        } else {
            None
        };
        Ok(Self {
            header,
            digest_order,
            archive,
            signature: stored.signature,
            target: stored.target,
            compiler_version: stored.compiler_version,
            subgraphs: stored.subgraphs,
            warnings: stored.warnings,
            data,
        })
    }
}
