//! The C interface of XLA's typed custom calls, as far as a handler needs it.
//!
//! Structs and their fields are those of `xla/ffi/api/c_api.h`, version 0.3, which jaxlib carries
//! in its folder `include`.

use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::slice;

use crate::parallel::Pool;

const EXTENSION_METADATA: c_int = 1;
const VERSION: (c_int, c_int) = (0, 3);
const INVALID_ARGUMENT: c_int = 3;
/// Element types, `XLA_FFI_DataType`.
pub(crate) const PRED: c_int = 1;
pub(crate) const S16: c_int = 3;
pub(crate) const S64: c_int = 5;
pub(crate) const F32: c_int = 11;
pub(crate) const BF16: c_int = 16;

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

/// An operand or a result.
#[repr(C)]
pub(crate) struct Buffer {
    struct_size: usize,
    extension: *mut Extension,
    pub(crate) dtype: c_int,
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

/// Answers XLA's question for the version, or has `compute` do the work.
///
/// # Safety
///
/// XLA's frame.
pub(crate) unsafe fn handle(
    frame: *mut CallFrame,
    name: &str,
    compute: impl FnOnce(&CallFrame) -> Result<(), String>,
) -> XlaError {
    // SAFETY: valid for the call.
    let frame = unsafe { &*frame };
    // SAFETY: as above.
    if unsafe { answer_metadata(frame) } {
        return ptr::null_mut();
    }
    match catch_unwind(AssertUnwindSafe(|| compute(frame))) {
        Ok(Ok(())) => ptr::null_mut(),
        Ok(Err(reason)) => fail(frame, name, &reason),
        Err(_) => fail(frame, name, "the kernel panicked"),
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

fn fail(frame: &CallFrame, name: &str, reason: &str) -> XlaError {
    let message = CString::new(format!("{name}: {reason}")).unwrap_or_default();
    let mut create = ErrorCreate {
        struct_size: size_of::<ErrorCreate>(),
        extension: ptr::null_mut(),
        message: message.as_ptr(),
        code: INVALID_ARGUMENT,
    };
    // SAFETY: XLA copies the message.
    unsafe { ((*frame.api).error_create)(&raw mut create) }
}

impl CallFrame {
    /// Returns the operands.
    ///
    /// # Safety
    ///
    /// XLA's frame, during the call.
    pub(crate) unsafe fn operands(&self) -> &[&Buffer] {
        // SAFETY: the caller's.
        unsafe { self.arguments.all() }
    }

    /// Returns the result, if there is one and no other.
    ///
    /// # Safety
    ///
    /// As of `operands`.
    pub(crate) unsafe fn result(&self) -> Result<&Buffer, String> {
        // SAFETY: the caller's.
        match unsafe { self.results.all() } {
            [result] => Ok(result),
            others => Err(format!("expected 1 result, found {}", others.len())),
        }
    }
}

impl Buffers {
    unsafe fn all(&self) -> &[&Buffer] {
        match usize::try_from(self.size) {
            // SAFETY: XLA passes as many pointers as it says, none of them null.
            Ok(size) if size > 0 => unsafe { slice::from_raw_parts(self.each.cast(), size) },
            _ => &[],
        }
    }
}

impl Buffer {
    /// Returns the sizes of the dimensions.
    ///
    /// # Safety
    ///
    /// XLA's buffer, during the call.
    pub(crate) unsafe fn sizes(&self) -> Result<Vec<usize>, String> {
        let dims = match usize::try_from(self.rank) {
            Ok(0) => &[],
            // SAFETY: there are `rank` sizes.
            Ok(rank) => unsafe { slice::from_raw_parts(self.dims, rank) },
            Err(_) => return Err(format!("expected dimensions, found {}", self.rank)),
        };
        dims.iter()
            .map(|&size| {
                usize::try_from(size).map_err(|_| format!("expected sizes, found {dims:?}"))
            })
            .collect()
    }

    unsafe fn length(&self) -> usize {
        // SAFETY: the caller's.
        unsafe { self.sizes() }.map_or(0, |sizes| sizes.iter().product())
    }

    /// Returns the elements.
    ///
    /// # Safety
    ///
    /// As of `sizes`; `dtype` is that of `T`.
    pub(crate) unsafe fn elements<T>(&self) -> &[T] {
        // SAFETY: the caller's.
        match unsafe { self.length() } {
            0 => &[],
            // SAFETY: XLA's memory of so many elements of this type.
            length => unsafe { slice::from_raw_parts(self.data.cast(), length) },
        }
    }

    /// Returns the elements of a result.
    ///
    /// # Safety
    ///
    /// As of `elements`; called once.
    #[allow(clippy::mut_from_ref)] // The memory is XLA's, not the descriptor's.
    pub(crate) unsafe fn elements_mut<T>(&self) -> &mut [T] {
        // SAFETY: the caller's.
        match unsafe { self.length() } {
            0 => &mut [],
            // SAFETY: as above; a result shares no memory with an operand.
            length => unsafe { slice::from_raw_parts_mut(self.data.cast(), length) },
        }
    }
}

/// The thread pool of the XLA program that makes the call.
pub(crate) struct XlaPool<'a>(pub(crate) &'a CallFrame);

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
