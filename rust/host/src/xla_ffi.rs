//! The C interface of XLA's typed custom calls, as far as a handler needs it.
//!
//! Structs and their fields are those of `xla/ffi/api/c_api.h`, version 0.3, which jaxlib carries
//! in its folder `include`.

use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::slice;

use crate::kernel::Bf16;
use crate::parallel::Pool;
use crate::product::{Instructions, Shape, product_bf16, product_f32};

const EXTENSION_METADATA: c_int = 1;
const VERSION: (c_int, c_int) = (0, 3);
const INVALID_ARGUMENT: c_int = 3;
const F32: c_int = 11;
const BF16: c_int = 16;

#[repr(C)]
struct Extension {
    struct_size: usize,
    kind: c_int,
    next: *mut Extension,
}

#[repr(C)]
struct ApiVersion {
    struct_size: usize,
    extension: *mut Extension,
    major: c_int,
    minor: c_int,
}

#[repr(C)]
struct Metadata {
    struct_size: usize,
    version: ApiVersion,
    traits: u32,
    state_type: i64,
}

#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

#[repr(C)]
struct ErrorCreate {
    struct_size: usize,
    extension: *mut Extension,
    message: *const c_char,
    code: c_int,
}

#[repr(C)]
struct ThreadPoolSchedule {
    struct_size: usize,
    extension: *mut Extension,
    context: *mut c_void,
    task: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
}

#[repr(C)]
struct ThreadPoolNumThreads {
    struct_size: usize,
    extension: *mut Extension,
    context: *mut c_void,
    threads: *mut i64,
}

/// An error of XLA's, which XLA frees.
pub type XlaError = *mut c_void;
type Unused = *const c_void;

#[repr(C)]
struct Api {
    struct_size: usize,
    extension: *mut Extension,
    version: ApiVersion,
    internal: Unused,
    error_create: unsafe extern "C" fn(*mut ErrorCreate) -> XlaError,
    error_get_message: Unused,
    error_destroy: unsafe extern "C" fn(*mut ErrorDestroy),
    handler_register: Unused,
    stream_get: Unused,
    type_register: Unused,
    context_get: Unused,
    state_set: Unused,
    state_get: Unused,
    memory_allocate: Unused,
    memory_free: Unused,
    pool_schedule: unsafe extern "C" fn(*mut ThreadPoolSchedule) -> XlaError,
    pool_threads: unsafe extern "C" fn(*mut ThreadPoolNumThreads) -> XlaError,
}

#[repr(C)]
struct ErrorDestroy {
    struct_size: usize,
    extension: *mut Extension,
    error: XlaError,
}

#[repr(C)]
struct Buffer {
    struct_size: usize,
    extension: *mut Extension,
    dtype: c_int,
    data: *mut c_void,
    rank: i64,
    dims: *const i64,
}

/// Arguments, and results likewise.
#[repr(C)]
struct Buffers {
    struct_size: usize,
    extension: *mut Extension,
    size: i64,
    types: *const c_int,
    each: *const *const Buffer,
}

/// What XLA passes to a handler.
#[repr(C)]
pub struct CallFrame {
    struct_size: usize,
    extension: *mut Extension,
    api: *const Api,
    context: *mut c_void,
    stage: c_int,
    arguments: Buffers,
    results: Buffers,
}

/// What XLA calls.
pub type Handler = unsafe extern "C" fn(*mut CallFrame) -> XlaError;

/// The custom calls by name.
pub const HANDLERS: &[(&str, Handler)] = &[("vllm_neuron.linear", linear)];

/// The handler of the custom call `vllm_neuron.linear`: operands x (rows, inner) and weight
/// (columns, inner), both float32 or both bfloat16; result (rows, columns) of the same type or,
/// of bfloat16 operands, float32.
///
/// # Safety
///
/// XLA calls it.
unsafe extern "C" fn linear(frame: *mut CallFrame) -> XlaError {
    // SAFETY: XLA's frame, valid for the call.
    let frame = unsafe { &*frame };
    // SAFETY: as above.
    if unsafe { answer_metadata(frame) } {
        return ptr::null_mut();
    }
    // SAFETY: as above.
    let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { multiply(frame) }));
    match outcome {
        Ok(Ok(())) => ptr::null_mut(),
        Ok(Err(reason)) => fail(frame, &reason),
        Err(_) => fail(frame, "the kernel panicked"),
    }
}

/// XLA asks a handler for its version once, when it is registered.
unsafe fn answer_metadata(frame: &CallFrame) -> bool {
    // SAFETY: XLA's pointers are null or valid.
    unsafe {
        let Some(extension) = frame.extension.as_ref() else {
            return false;
        };
        if extension.kind != EXTENSION_METADATA {
            return false;
        }
        let metadata = (*frame.extension.cast::<MetadataExtension>()).metadata;
        (*metadata).version.major = VERSION.0;
        (*metadata).version.minor = VERSION.1;
        (*metadata).traits = 0;
        (*metadata).state_type = 0;
    }
    true
}

fn fail(frame: &CallFrame, reason: &str) -> XlaError {
    let message = CString::new(format!("vllm_neuron.linear: {reason}")).unwrap_or_default();
    let mut create = ErrorCreate {
        struct_size: size_of::<ErrorCreate>(),
        extension: ptr::null_mut(),
        message: message.as_ptr(),
        code: INVALID_ARGUMENT,
    };
    // SAFETY: XLA copies the message.
    unsafe { ((*frame.api).error_create)(&raw mut create) }
}

unsafe fn multiply(frame: &CallFrame) -> Result<(), String> {
    // SAFETY: XLA's buffers, valid for the call.
    unsafe {
        let [x, weight] = buffers::<2>(&frame.arguments)?;
        let [y] = buffers::<1>(&frame.results)?;
        let ([rows, inner], [columns, weight_inner]) = (sizes(x)?, sizes(weight)?);
        if inner != weight_inner || sizes(y)? != [rows, columns] {
            return Err(format!(
                "expected (rows, inner), (columns, inner) and (rows, columns), found {:?}, {:?} \
                 and {:?}",
                sizes(x)?,
                sizes(weight)?,
                sizes(y)?
            ));
        }
        let shape = Shape {
            rows,
            inner,
            columns,
        };
        let pool = XlaPool(frame);
        let with = Instructions::best();
        match (x.dtype, weight.dtype, y.dtype) {
            (F32, F32, F32) => {
                product_f32(
                    &pool,
                    with,
                    shape,
                    elements(x),
                    elements(weight),
                    elements_mut(y),
                );
            }
            (BF16, BF16, F32) => product_bf16::<f32>(
                &pool,
                with,
                shape,
                elements(x),
                elements(weight),
                elements_mut(y),
            ),
            (BF16, BF16, BF16) => product_bf16::<Bf16>(
                &pool,
                with,
                shape,
                elements(x),
                elements(weight),
                elements_mut(y),
            ),
            types => {
                return Err(format!(
                    "expected float32 or bfloat16, found types {types:?}"
                ));
            }
        }
    }
    Ok(())
}

unsafe fn buffers<const N: usize>(list: &Buffers) -> Result<[&Buffer; N], String> {
    if usize::try_from(list.size) != Ok(N) {
        return Err(format!("expected {N} buffers, found {}", list.size));
    }
    // SAFETY: the caller's; XLA passes as many pointers as it says.
    Ok(std::array::from_fn(|index| unsafe {
        &**list.each.add(index)
    }))
}

unsafe fn sizes(buffer: &Buffer) -> Result<[usize; 2], String> {
    if buffer.rank != 2 {
        return Err(format!("expected a matrix, found rank {}", buffer.rank));
    }
    // SAFETY: the caller's; there are `rank` sizes.
    let dims = unsafe { slice::from_raw_parts(buffer.dims, 2) };
    match (usize::try_from(dims[0]), usize::try_from(dims[1])) {
        (Ok(rows), Ok(columns)) => Ok([rows, columns]),
        _ => Err(format!("expected sizes, found {dims:?}")),
    }
}

unsafe fn length(buffer: &Buffer) -> usize {
    // SAFETY: the caller's.
    unsafe { sizes(buffer) }.map_or(0, |[rows, columns]| rows * columns)
}

unsafe fn elements<T>(buffer: &Buffer) -> &[T] {
    // SAFETY: the caller's.
    match unsafe { length(buffer) } {
        0 => &[],
        // SAFETY: the caller's: XLA's memory of so many elements, of the type that was compared.
        length => unsafe { slice::from_raw_parts(buffer.data.cast(), length) },
    }
}

#[allow(clippy::mut_from_ref)] // The memory is XLA's, not the descriptor's.
unsafe fn elements_mut<T>(buffer: &Buffer) -> &mut [T] {
    // SAFETY: the caller's.
    match unsafe { length(buffer) } {
        0 => &mut [],
        // SAFETY: as above; a result shares no memory with an argument.
        length => unsafe { slice::from_raw_parts_mut(buffer.data.cast(), length) },
    }
}

/// The thread pool of the XLA program that makes the call.
struct XlaPool<'a>(&'a CallFrame);

impl XlaPool<'_> {
    /// Whether a call of XLA succeeded; its error is freed.
    fn succeeded(&self, error: XlaError) -> bool {
        if !error.is_null() {
            let mut destroy = ErrorDestroy {
                struct_size: size_of::<ErrorDestroy>(),
                extension: ptr::null_mut(),
                error,
            };
            // SAFETY: an error that XLA made and nobody else frees.
            unsafe { ((*self.0.api).error_destroy)(&raw mut destroy) };
        }
        error.is_null()
    }
}

impl Pool for XlaPool<'_> {
    fn threads(&self) -> usize {
        let mut threads = 1;
        let mut ask = ThreadPoolNumThreads {
            struct_size: size_of::<ThreadPoolNumThreads>(),
            extension: ptr::null_mut(),
            context: self.0.context,
            threads: &raw mut threads,
        };
        // SAFETY: XLA's function, for the duration of the call.
        let error = unsafe { ((*self.0.api).pool_threads)(&raw mut ask) };
        if self.succeeded(error) {
            usize::try_from(threads).unwrap_or(1)
        } else {
            1
        }
    }

    fn start(&self, task: unsafe extern "C" fn(*mut c_void), data: *mut c_void) -> bool {
        let mut schedule = ThreadPoolSchedule {
            struct_size: size_of::<ThreadPoolSchedule>(),
            extension: ptr::null_mut(),
            context: self.0.context,
            task,
            data,
        };
        // SAFETY: as above; `task` may be called with `data` by any thread.
        let error = unsafe { ((*self.0.api).pool_schedule)(&raw mut schedule) };
        self.succeeded(error)
    }
}
