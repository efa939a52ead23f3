//! Canonical graph bytes and keys made of named components.
//!
//! `docs/key-format.md` is the specification.

mod cursor;
pub mod decode;
pub mod graph;
pub mod token;

use thiserror::Error;

use crate::digest::Digest;
pub use crate::format::FormatError;

/// Deepest nesting of containers in an argument of a graph.
pub const MAX_ARGUMENT_DEPTH: usize = 64;
/// Deepest nesting of graphs.
pub const MAX_GRAPH_DEPTH: usize = 16;
/// Higher-order operators whose arguments hold all that they do: nested graphs, operators, values.
///
/// Source: `torch/_higher_order_ops` of torch 2.13. Not here are those whose arguments point into
/// tables of the process (Triton kernels) or at Python objects (torchbind, leaf functions, print).
pub const HIGHER_ORDER_OPERATORS: [&str; 13] = [
    "associative_scan",
    "auto_functionalized",
    "auto_functionalized_v2",
    "cond",
    "flex_attention",
    "hints_wrapper",
    "invoke_subgraph",
    "map_impl",
    "out_dtype",
    "scan",
    "while_loop",
    "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
];

/// Context of a component's digest (BLAKE3 `derive_key`).
const COMPONENT_CONTEXT: &str = "vllm-neuron 2026 key component v1";
/// Start of the context of a key; the domain follows.
const KEY_CONTEXT: &str = "vllm-neuron 2026 key v1 ";
/// Most characters of a domain or a component's name.
const MAX_NAME_BYTES: usize = 64;

/// A use of [`KeyBuilder`] that makes no key.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The name of a domain or component is not of the allowed form.
    #[error(
        "{what} {name:?}: expected 1 to 64 characters of a-z 0-9 . _ -, a letter or digit first"
    )]
    Name {
        /// `domain` or `component`.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A component was added twice.
    #[error("component {name:?} is in the key already")]
    Duplicate {
        /// Its name.
        name: String,
    },
    /// A key of nothing finds nothing.
    #[error("the key has no components")]
    Empty,
}

/// A finished key: the digest that finds an entry, and the digest of each component.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// The digest.
    pub digest: Digest,
    /// Name and digest of each component, in the order they were added.
    pub components: Vec<(String, Digest)>,
}

/// Collects named components in order.
#[derive(Debug, Clone)]
pub struct KeyBuilder {
    domain: String,
    components: Vec<(String, Digest)>,
}

impl KeyBuilder {
    /// A builder for keys of `domain`, which separates them from all other domains' keys.
    pub fn new(domain: &str) -> Result<Self, KeyError> {
        check_name("domain", domain)?;
        Ok(Self {
            domain: domain.to_owned(),
            components: Vec::new(),
        })
    }

    /// Adds a component.
    pub fn add(&mut self, name: &str, value: &[u8]) -> Result<(), KeyError> {
        check_name("component", name)?;
        if self.components.iter().any(|(known, _)| known == name) {
            return Err(KeyError::Duplicate {
                name: name.to_owned(),
            });
        }
        self.components
            .push((name.to_owned(), Digest::derive(COMPONENT_CONTEXT, value)));
        Ok(())
    }

    /// The key of the components added so far.
    pub fn finish(&self) -> Result<Key, KeyError> {
        if self.components.is_empty() {
            return Err(KeyError::Empty);
        }
        let mut framed = Vec::new();
        for (name, digest) in &self.components {
            token::put_str(&mut framed, name);
            framed.extend_from_slice(digest.as_bytes());
        }
        Ok(Key {
            digest: Digest::derive(&format!("{KEY_CONTEXT}{}", self.domain), &framed),
            components: self.components.clone(),
        })
    }
}

fn check_name(what: &'static str, name: &str) -> Result<(), KeyError> {
    let alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = name.as_bytes();
    let valid = bytes.len() <= MAX_NAME_BYTES
        && bytes.first().is_some_and(alphanumeric)
        && bytes
            .iter()
            .all(|byte| alphanumeric(byte) || b"._-".contains(byte));
    if valid {
        Ok(())
    } else {
        Err(KeyError::Name {
            what,
            name: name.to_owned(),
        })
    }
}
