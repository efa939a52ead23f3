//! Matrix products and attention of the host emulator, as custom calls of XLA's CPU programs.
//!
//! XLA's own product of a few rows with a large weight rearranges the weight at every call. Here
//! it is read once, as it lies. Attention reads a paged KV cache where it lies, and of it what a
//! sequence has. `docs/host-emulator.md` says what is computed and how exactly.

// Kernels are generic over instructions, which a function has only if it is inlined into one that
// declares them.
#![allow(clippy::inline_always)]

mod attention;
mod attention_rows;
mod calls;
mod kernel;
mod parallel;
mod product;
mod softmax;
#[cfg(target_arch = "x86_64")]
mod x86;
mod xla_ffi;

pub use attention::{AttentionOperands, AttentionShape, CacheElement, attention};
pub use calls::HANDLERS;
pub use kernel::Bf16;
pub use parallel::{Inline, Pool};
pub use product::{Instructions, Shape, product_bf16, product_f32};
pub use xla_ffi::{CallFrame, Handler, XlaError};

/// Version of the custom calls: operands, results and the order of sums. Programs name it.
pub const VERSION: u32 = 2;
