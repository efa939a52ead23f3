//! A stand-in for `libnrt.so.1`: the documented C symbols, struct sizes and statuses.
//!
//! It refuses what the documentation does not allow: calls before `nrt_init` or after `nrt_close`,
//! handles that it did not give out or that were given back, ranges outside a tensor, sets that do
//! not have exactly the model's names and sizes, NEFFs that are not sound or for another target.
//! Programs are run by the host emulator in a Python process of its own (`device.rs`).
//!
//! Beyond the documented symbols there are `stand_in_count` and `stand_in_fail` for tests.

mod api;
mod device;
mod settings;
mod state;
