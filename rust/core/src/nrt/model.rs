//! A NEFF that the runtime has loaded.

use std::ptr;
use std::slice;

use super::abi::{Opaque, RawTensorInfo, RawTensorInfoArray};
use super::error::NrtError;
use super::library::{Library, text};
use super::tensor::{Pointer, TensorSet};

/// More tensors than any model has; a larger count means another layout of the struct.
const MOST_TENSORS: u64 = 1 << 20;

/// One input or output as the runtime tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Whether it is an output.
    pub is_output: bool,
    /// Bytes.
    pub size: u64,
}

/// A loaded model, unloaded when dropped.
#[derive(Debug)]
pub struct Model {
    library: &'static Library,
    handle: Pointer,
}

impl Model {
    /// Loads a NEFF onto a logical core, counted from 0 within the process.
    ///
    /// The bytes are read in place and not needed afterwards.
    pub fn load(library: &'static Library, neff: &[u8], core: i32) -> Result<Self, NrtError> {
        const CALL: &str = "nrt_load";
        library.require_init(CALL)?;
        let mut handle = ptr::null_mut();
        // SAFETY: `neff` is readable for its length during the call; `handle` is a place for a
        // pointer. A core count of -1 is what the header asks for.
        let status = unsafe {
            (library.functions.load)(neff.as_ptr().cast(), neff.len(), core, -1, &raw mut handle)
        };
        NrtError::check(CALL, status, || {
            format!("{} bytes onto core {core}", neff.len())
        })?;
        Self::adopt(library, CALL, handle)
    }

    /// Loads a NEFF with collectives: the part of device `rank` out of `ranks`.
    pub fn load_collectives(
        library: &'static Library,
        neff: &[u8],
        core: i32,
        rank: u32,
        ranks: u32,
    ) -> Result<Self, NrtError> {
        const CALL: &str = "nrt_load_collectives";
        library.require_init(CALL)?;
        let Some(function) = library.functions.load_collectives else {
            return Err(NrtError::refused(
                CALL,
                "this runtime does not have it; upgrade it",
            ));
        };
        let mut handle = ptr::null_mut();
        // SAFETY: as in `load`.
        let status = unsafe {
            function(
                neff.as_ptr().cast(),
                neff.len(),
                core,
                -1,
                rank,
                ranks,
                &raw mut handle,
            )
        };
        NrtError::check(CALL, status, || {
            format!("rank {rank} of {ranks} onto core {core}")
        })?;
        Self::adopt(library, CALL, handle)
    }

    fn adopt(
        library: &'static Library,
        call: &'static str,
        handle: *mut Opaque,
    ) -> Result<Self, NrtError> {
        if handle.is_null() {
            return Err(NrtError::refused(
                call,
                "success was reported, and the handle is NULL",
            ));
        }
        Ok(Self {
            library,
            handle: Pointer(handle),
        })
    }

    /// Inputs and outputs as the runtime tells them, or `None` from one that does not.
    pub fn tensors(&self) -> Result<Option<Vec<TensorInfo>>, NrtError> {
        const CALL: &str = "nrt_get_model_tensor_info";
        let functions = &self.library.functions;
        let (Some(get), Some(free)) = (functions.tensor_info, functions.free_tensor_info) else {
            return Ok(None);
        };
        let mut array: *mut RawTensorInfoArray = ptr::null_mut();
        // SAFETY: the model is live; `array` is a place for a pointer.
        let status = unsafe { get(self.handle.0, &raw mut array) };
        NrtError::check(CALL, status, String::new)?;
        if array.is_null() {
            return Err(NrtError::refused(
                CALL,
                "success was reported, and the array is NULL",
            ));
        }
        // SAFETY: the runtime filled the array, which lives until it is freed below.
        let count = unsafe { (*array).tensor_count };
        let found = match usize::try_from(count) {
            Ok(length) if count <= MOST_TENSORS => {
                // SAFETY: `length` entries follow the first field (abi.rs).
                let entries = unsafe {
                    slice::from_raw_parts(
                        (&raw const (*array).entries).cast::<RawTensorInfo>(),
                        length,
                    )
                };
                Ok(entries.iter().map(info).collect())
            }
            _ => Err(NrtError::refused(
                CALL,
                format!("{count} tensors cannot be"),
            )),
        };
        // SAFETY: made by the runtime, not used again.
        let status = unsafe { free(array) };
        NrtError::check("nrt_free_model_tensor_info", status, String::new)?;
        found.map(Some)
    }

    /// Runs the model once; returns when it is done.
    pub fn execute(&self, inputs: &TensorSet, outputs: &TensorSet) -> Result<(), NrtError> {
        const CALL: &str = "nrt_execute";
        if ptr::eq(inputs, outputs) {
            return Err(NrtError::refused(
                CALL,
                "inputs and outputs are one tensor set",
            ));
        }
        let status = inputs.with_handle(|input| {
            outputs.with_handle(|output| {
                // SAFETY: model and sets are live, and nobody else uses the sets meanwhile.
                unsafe { (self.library.functions.execute)(self.handle.0, input, output) }
            })
        });
        NrtError::check(CALL, status, String::new)
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: the handle is owned and not used again. A failure leaves nothing to do here, and
        // releases before 2.29 report none anyway.
        let _ = unsafe { (self.library.functions.unload)(self.handle.0) };
    }
}

fn info(raw: &RawTensorInfo) -> TensorInfo {
    TensorInfo {
        name: text(&raw.name),
        is_output: raw.usage == 1,
        size: raw.size,
    }
}
