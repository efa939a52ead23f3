//! The C symbols.
//!
//! # Safety
//! Pointers are as the documentation of the runtime says; null ones are refused.

#![allow(clippy::missing_safety_doc, clippy::not_unsafe_ptr_arg_deref)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::slice;

use vllm_neuron_core::nrt::Status;
use vllm_neuron_core::nrt::abi::{
    RawInstanceInfo, RawMemoryStats, RawTensorInfo, RawTensorInfoArray, RawVersion,
};

use crate::settings::Settings;
use crate::state::{FAILURE, INVALID, INVALID_HANDLE, State, explain, lock};

type Handle = *mut c_void;

fn handle_of(number: u64) -> Handle {
    ptr::without_provenance_mut(usize::try_from(number).unwrap_or(usize::MAX))
}

fn number_of(handle: *const c_void) -> u64 {
    handle.addr() as u64
}

fn status(result: Result<(), Status>) -> Status {
    result.err().unwrap_or(Status::SUCCESS)
}

/// Runs a call behind the phase gate.
fn call(name: &str, body: impl FnOnce(&mut State) -> Result<(), Status>) -> Status {
    let mut locked = lock();
    let state = locked.state();
    status(state.enter(name).and_then(|()| body(state)))
}

/// Runs a call that gives out a handle; on failure `*out` is null.
unsafe fn give(
    name: &str,
    out: *mut Handle,
    body: impl FnOnce(&mut State) -> Result<u64, Status>,
) -> Status {
    if out.is_null() {
        return explain(INVALID, &format!("{name}: no place for the handle"));
    }
    let mut locked = lock();
    let state = locked.state();
    let result = state.enter(name).and_then(|()| body(state));
    let handle = result.map_or(ptr::null_mut(), handle_of);
    // SAFETY: not null; the caller gave a place for a pointer.
    unsafe { out.write(handle) };
    status(result.map(drop))
}

unsafe fn text(name: *const c_char) -> Option<String> {
    if name.is_null() {
        return None;
    }
    // SAFETY: not null, so the caller gave a NUL-terminated text.
    unsafe { CStr::from_ptr(name) }
        .to_str()
        .ok()
        .map(str::to_owned)
}

/// Copies `value` to a struct whose size the caller gives.
unsafe fn fill<T>(out: *mut T, size: usize, value: T) -> Status {
    if out.is_null() || size != size_of::<T>() {
        return explain(
            INVALID,
            &format!("a struct of {size} bytes, expected {}", size_of::<T>()),
        );
    }
    // SAFETY: not null, and of the right size.
    unsafe { out.write(value) };
    Status::SUCCESS
}

fn field<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [0; N];
    for (place, byte) in field.iter_mut().take(N - 1).zip(text.bytes()) {
        *place = byte;
    }
    field
}

#[unsafe(no_mangle)]
extern "C" fn nrt_init(framework: c_int, fw: *const c_char, fal: *const c_char) -> Status {
    if !(1..=5).contains(&framework) {
        return explain(INVALID, &format!("framework {framework}"));
    }
    let _ = (fw, fal);
    let mut locked = lock();
    let state = locked.state();
    *state.counts.entry("nrt_init".into()).or_default() += 1;
    status(state.open())
}

#[unsafe(no_mangle)]
extern "C" fn nrt_close() {
    lock().state().close();
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_get_version(out: *mut RawVersion, size: usize) -> Status {
    let numbers = Settings::read().version;
    let [major, minor, patch, _] = numbers;
    let value = RawVersion {
        numbers,
        detail: field(&format!("{major}.{minor}.{patch}.0+stand-in")),
        git_hash: field("stand-in"),
    };
    // SAFETY: by the caller.
    unsafe { fill(out, size, value) }
}

unsafe fn total(out: *mut u32) -> Status {
    // SAFETY: by the caller.
    unsafe { fill(out, size_of::<u32>(), Settings::read().total) }
}

unsafe fn visible(out: *mut u32) -> Status {
    match Settings::read().visible {
        // SAFETY: by the caller.
        Ok(count) => unsafe { fill(out, size_of::<u32>(), count) },
        Err(status) => explain(status, "cores that there are not"),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_get_total_nc_count(out: *mut u32) -> Status {
    // SAFETY: by the caller.
    unsafe { total(out) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_get_total_vnc_count(out: *mut u32) -> Status {
    // SAFETY: by the caller.
    unsafe { total(out) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_get_visible_nc_count(out: *mut u32) -> Status {
    // SAFETY: by the caller.
    unsafe { visible(out) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_get_visible_vnc_count(out: *mut u32) -> Status {
    // SAFETY: by the caller.
    unsafe { visible(out) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_get_instance_info(out: *mut RawInstanceInfo, size: usize) -> Status {
    let value = RawInstanceInfo {
        family: Settings::read().family,
        size: 7,
        arch_name: field("stand-in"),
        device_revision: [0; 8],
    };
    // SAFETY: by the caller.
    unsafe { fill(out, size, value) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_get_vnc_memory_stats(
    _core: u32,
    out: *mut RawMemoryStats,
    size: usize,
    filled: *mut usize,
) -> Status {
    let (bytes_used, bytes_limit) = lock().state().used();
    if !filled.is_null() {
        // SAFETY: not null; the caller gave a place for a size.
        unsafe { filled.write(size_of::<RawMemoryStats>()) };
    }
    // SAFETY: by the caller.
    unsafe {
        fill(
            out,
            size,
            RawMemoryStats {
                bytes_used,
                bytes_limit,
            },
        )
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_load(
    neff: *const c_void,
    size: usize,
    core: i32,
    core_count: i32,
    out: *mut Handle,
) -> Status {
    // SAFETY: by the caller.
    unsafe {
        give("nrt_load", out, |state| {
            if neff.is_null() || core_count != -1 {
                return Err(explain(INVALID, "no NEFF, or a core count other than -1"));
            }
            state.load(slice::from_raw_parts(neff.cast(), size), core)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_load_collectives(
    neff: *const c_void,
    size: usize,
    core: i32,
    core_count: i32,
    rank: u32,
    ranks: u32,
    out: *mut Handle,
) -> Status {
    // SAFETY: by the caller.
    unsafe {
        give("nrt_load_collectives", out, |state| {
            if neff.is_null() || core_count != -1 || rank >= ranks {
                return Err(explain(INVALID, &format!("rank {rank} of {ranks}")));
            }
            state.load(slice::from_raw_parts(neff.cast(), size), core)
        })
    }
}

#[unsafe(no_mangle)]
extern "C" fn nrt_unload(model: Handle) -> Status {
    call("nrt_unload", |state| state.unload(number_of(model)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_get_model_tensor_info(
    model: Handle,
    out: *mut *mut RawTensorInfoArray,
) -> Status {
    if out.is_null() {
        return INVALID;
    }
    call("nrt_get_model_tensor_info", |state| {
        let ports = &state
            .models
            .get(&number_of(model))
            .ok_or(INVALID_HANDLE)?
            .ports;
        // One block of 8-byte words: the count, then the entries.
        let words = 1 + ports.len() * size_of::<RawTensorInfo>() / 8;
        let block = Box::leak(vec![0_u64; words].into_boxed_slice());
        block[0] = ports.len() as u64;
        let array = block.as_mut_ptr().cast::<RawTensorInfoArray>();
        for (index, port) in ports.iter().enumerate() {
            let shape: Vec<u32> = port
                .shape
                .iter()
                .map(|n| u32::try_from(*n).unwrap_or(u32::MAX))
                .collect();
            let info = RawTensorInfo {
                name: field(&port.name),
                usage: i32::from(port.is_output),
                size: port.bytes,
                // UNKNOWN: nobody may rely on the numbers.
                dtype: 0,
                ndim: u32::try_from(shape.len()).unwrap_or(u32::MAX),
                shape: shape.leak().as_ptr(),
            };
            // SAFETY: the block has room for every entry after its first word.
            unsafe {
                (&raw mut (*array).entries)
                    .cast::<RawTensorInfo>()
                    .add(index)
                    .write(info);
            };
        }
        *state.counts.entry("tensor infos".into()).or_default() += 1;
        // SAFETY: not null; the caller gave a place for a pointer.
        unsafe { out.write(array) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nrt_free_model_tensor_info(array: *mut RawTensorInfoArray) -> Status {
    call("nrt_free_model_tensor_info", |state| {
        if array.is_null() {
            return Err(INVALID_HANDLE);
        }
        // The memory stays, as this is a process for a test; the count tells leaks.
        *state.counts.entry("tensor infos".into()).or_default() -= 1;
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_allocate_tensor_set(out: *mut Handle) -> Status {
    // SAFETY: by the caller.
    unsafe {
        give("nrt_allocate_tensor_set", out, |state| {
            let handle = state.handle();
            state.sets.insert(handle, std::collections::BTreeMap::new());
            Ok(handle)
        })
    }
}

/// Takes a handle back: the object goes, the caller's pointer becomes null.
unsafe fn take_back(
    name: &str,
    place: *mut Handle,
    body: impl FnOnce(&mut State, u64) -> Result<(), Status>,
) {
    if place.is_null() {
        return;
    }
    // SAFETY: not null; the caller gave a place with a handle.
    let handle = unsafe { place.replace(ptr::null_mut()) };
    let mut locked = lock();
    let state = locked.state();
    let result = state
        .enter(name)
        .and_then(|()| body(state, number_of(handle)));
    if let Err(found) = result {
        *state.counts.entry("bad frees".into()).or_default() += 1;
        explain(found, &format!("{name} of a handle that is not in use"));
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_destroy_tensor_set(set: *mut Handle) {
    // SAFETY: by the caller.
    unsafe {
        take_back("nrt_destroy_tensor_set", set, |state, set| {
            state.sets.remove(&set).map(drop).ok_or(INVALID_HANDLE)
        });
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_add_tensor_to_tensor_set(
    set: Handle,
    name: *const c_char,
    tensor: Handle,
) -> Status {
    // SAFETY: by the caller.
    let name = unsafe { text(name) };
    call("nrt_add_tensor_to_tensor_set", |state| {
        let name = name.filter(|name| !name.is_empty()).ok_or(INVALID)?;
        if !state.tensors.contains_key(&number_of(tensor)) {
            return Err(INVALID_HANDLE);
        }
        let set = state.sets.get_mut(&number_of(set)).ok_or(INVALID_HANDLE)?;
        set.insert(name, number_of(tensor));
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_get_tensor_from_tensor_set(
    set: Handle,
    name: *const c_char,
    out: *mut Handle,
) -> Status {
    // SAFETY: by the caller.
    let name = unsafe { text(name) };
    call("nrt_get_tensor_from_tensor_set", |state| {
        let set = state.sets.get(&number_of(set)).ok_or(INVALID_HANDLE)?;
        let tensor = set.get(&name.unwrap_or_default()).ok_or(FAILURE)?;
        if out.is_null() {
            return Err(INVALID);
        }
        // SAFETY: not null; the caller gave a place for a pointer.
        unsafe { out.write(handle_of(*tensor)) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nrt_execute(model: Handle, inputs: *const c_void, outputs: Handle) -> Status {
    call("nrt_execute", |state| {
        state.execute(number_of(model), number_of(inputs), number_of(outputs))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_tensor_allocate(
    placement: c_int,
    core: c_int,
    size: usize,
    name: *const c_char,
    out: *mut Handle,
) -> Status {
    let _ = name;
    // SAFETY: by the caller.
    unsafe {
        give("nrt_tensor_allocate", out, |state| {
            state.allocate(placement, core, size)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_tensor_allocate_slice(
    source: *const c_void,
    offset: usize,
    size: usize,
    name: *const c_char,
    out: *mut Handle,
) -> Status {
    let _ = name;
    // SAFETY: by the caller.
    unsafe {
        give("nrt_tensor_allocate_slice", out, |state| {
            state.slice(number_of(source), offset, size)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_tensor_free(tensor: *mut Handle) {
    // SAFETY: by the caller.
    unsafe { take_back("nrt_tensor_free", tensor, State::free) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_tensor_read(
    tensor: *const c_void,
    into: *mut c_void,
    offset: usize,
    size: usize,
) -> Status {
    call("nrt_tensor_read", |state| {
        if into.is_null() {
            return Err(INVALID);
        }
        state.access(number_of(tensor), offset, size, |bytes| {
            // SAFETY: the caller gave `size` writable bytes.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), into.cast(), size) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nrt_tensor_write(
    tensor: Handle,
    from: *const c_void,
    offset: usize,
    size: usize,
) -> Status {
    call("nrt_tensor_write", |state| {
        if from.is_null() {
            return Err(INVALID);
        }
        state.access(number_of(tensor), offset, size, |bytes| {
            // SAFETY: the caller gave `size` readable bytes.
            unsafe { ptr::copy_nonoverlapping(from.cast(), bytes.as_mut_ptr(), size) }
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nrt_tensor_memset(tensor: Handle, offset: u64, value: c_int, size: usize) -> Status {
    call("nrt_tensor_memset", |state| {
        let offset = usize::try_from(offset).map_err(|_| INVALID)?;
        let value = u8::try_from(value).map_err(|_| INVALID)?;
        state.access(number_of(tensor), offset, size, |bytes| bytes.fill(value))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nrt_tensor_get_size(tensor: *const c_void) -> usize {
    lock()
        .state()
        .tensors
        .get(&number_of(tensor))
        .map_or(0, |tensor| tensor.size)
}

/// How many there are of something, or how often a call was made.
#[unsafe(no_mangle)]
unsafe extern "C" fn stand_in_count(name: *const c_char) -> i64 {
    // SAFETY: by the caller.
    let name = unsafe { text(name) }.unwrap_or_default();
    let mut locked = lock();
    let state = locked.state();
    let length = |length: usize| i64::try_from(length).unwrap_or(i64::MAX);
    match name.as_str() {
        "models" => length(state.models.len()),
        "tensors" => length(state.tensors.len()),
        "sets" => length(state.sets.len()),
        "bytes" => i64::try_from(state.used().0).unwrap_or(i64::MAX),
        _ => state.counts.get(&name).copied().unwrap_or(0),
    }
}

/// Makes the next call of that name return a status without doing anything.
#[unsafe(no_mangle)]
unsafe extern "C" fn stand_in_fail(name: *const c_char, status: c_int) {
    // SAFETY: by the caller.
    let name = unsafe { text(name) }.unwrap_or_default();
    lock().state().order_failure(name, Status(status));
}
