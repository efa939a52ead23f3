//! Device memory: tensors, slices of them, and sets of tensors by name.

use std::collections::HashMap;
use std::ffi::CString;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use super::abi::Opaque;
use super::error::NrtError;
use super::library::Library;

/// Releases 2.26 to 2.28 compute sizes from 4 GiB on modulo 4 GiB (AWS's release notes).
const OVERFLOWING: ([u64; 2], [u64; 2]) = ([2, 26], [2, 28]);
const OVERFLOW_BYTES: usize = 1 << 32;

/// Where a tensor lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Placement {
    /// In device memory.
    Device = 0,
    /// In host memory that the device reads (`VIRTUAL`; the older `HOST` is deprecated).
    Host = 2,
}

/// A handle of the runtime.
#[derive(Debug)]
pub(super) struct Pointer(pub(super) *mut Opaque);

// SAFETY: a handle is a name for an object of the runtime, which is thread-safe except for tensor
// sets; those are only used under their mutex.
unsafe impl Send for Pointer {}
// SAFETY: as above.
unsafe impl Sync for Pointer {}

/// Memory on the device, given back when dropped.
#[derive(Debug)]
pub struct Tensor {
    library: &'static Library,
    pub(super) handle: Pointer,
    size: usize,
    /// A slice shares the memory of what it is cut from.
    _source: Option<Arc<Tensor>>,
}

impl Tensor {
    /// Allocates `size` bytes, at least 1, for a logical core counted from 0 within the process.
    pub fn allocate(
        library: &'static Library,
        placement: Placement,
        core: i32,
        size: usize,
        name: &str,
    ) -> Result<Self, NrtError> {
        const CALL: &str = "nrt_tensor_allocate";
        library.require_init(CALL)?;
        if size == 0 {
            return Err(NrtError::refused(
                CALL,
                "expected a size of at least 1 byte, found 0",
            ));
        }
        if size >= OVERFLOW_BYTES {
            let [major, minor, ..] = library.version()?.numbers;
            if (OVERFLOWING.0..=OVERFLOWING.1).contains(&[major, minor]) {
                return Err(NrtError::refused(
                    CALL,
                    format!(
                        "{size} bytes for {name}: runtime {major}.{minor} takes less than 4 GiB per tensor; upgrade it"
                    ),
                ));
            }
        }
        let name_text = c_string(CALL, name)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the name is NUL-terminated and live, `handle` is a place for a pointer.
        let status = unsafe {
            (library.functions.allocate_tensor)(
                placement as i32,
                core,
                size,
                name_text.as_ptr(),
                &raw mut handle,
            )
        };
        NrtError::check(CALL, status, || {
            format!("{size} bytes for {name} on core {core}")
        })?;
        Self::adopt(library, CALL, handle, size, None)
    }

    /// A part of a tensor as a tensor of its own over the same memory.
    pub fn slice(
        self: &Arc<Self>,
        offset: usize,
        size: usize,
        name: &str,
    ) -> Result<Self, NrtError> {
        const CALL: &str = "nrt_tensor_allocate_slice";
        self.check_range(CALL, offset, size)?;
        let name_text = c_string(CALL, name)?;
        let mut handle = ptr::null_mut();
        // SAFETY: `self` is a live tensor, the range lies within it, the name is live.
        let status = unsafe {
            (self.library.functions.allocate_slice)(
                self.handle.0,
                offset,
                size,
                name_text.as_ptr(),
                &raw mut handle,
            )
        };
        NrtError::check(CALL, status, || {
            format!("bytes {offset} to +{size} of {}", self.size)
        })?;
        Self::adopt(self.library, CALL, handle, size, Some(Arc::clone(self)))
    }

    fn adopt(
        library: &'static Library,
        call: &'static str,
        handle: *mut Opaque,
        size: usize,
        source: Option<Arc<Self>>,
    ) -> Result<Self, NrtError> {
        if handle.is_null() {
            return Err(NrtError::refused(
                call,
                "success was reported, and the handle is NULL",
            ));
        }
        // SAFETY: the runtime has just made the handle.
        let found = unsafe { (library.functions.tensor_size)(handle) };
        let tensor = Self {
            library,
            handle: Pointer(handle),
            size,
            _source: source,
        };
        if found < size {
            return Err(NrtError::refused(
                call,
                format!("expected {size} bytes, found {found}"),
            ));
        }
        Ok(tensor)
    }

    /// Bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Address of its memory, 0 where the runtime gives none.
    pub fn address(&self) -> usize {
        self.library.functions.tensor_address.map_or(0, |function| {
            // SAFETY: `self` is a live tensor.
            (unsafe { function(self.handle.0) }).addr()
        })
    }

    /// Copies from the device.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), NrtError> {
        const CALL: &str = "nrt_tensor_read";
        self.check_range(CALL, offset, into.len())?;
        if into.is_empty() {
            return Ok(());
        }
        // SAFETY: `into` is writable for its length, which lies within the tensor.
        let status = unsafe {
            (self.library.functions.read_tensor)(
                self.handle.0,
                into.as_mut_ptr().cast(),
                offset,
                into.len(),
            )
        };
        NrtError::check(CALL, status, || format!("{} bytes at {offset}", into.len()))
    }

    /// Copies to the device.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), NrtError> {
        const CALL: &str = "nrt_tensor_write";
        self.check_range(CALL, offset, from.len())?;
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: `from` is readable for its length, which lies within the tensor.
        let status = unsafe {
            (self.library.functions.write_tensor)(
                self.handle.0,
                from.as_ptr().cast(),
                offset,
                from.len(),
            )
        };
        NrtError::check(CALL, status, || format!("{} bytes at {offset}", from.len()))
    }

    /// Fills the whole tensor with zeros.
    pub fn clear(&self) -> Result<(), NrtError> {
        const CHUNK: usize = 1 << 20;
        let Some(function) = self.library.functions.set_tensor else {
            let zeros = vec![0; CHUNK.min(self.size)];
            for offset in (0..self.size).step_by(CHUNK) {
                let length = CHUNK.min(self.size.saturating_sub(offset));
                self.write(offset, zeros.get(..length).unwrap_or_default())?;
            }
            return Ok(());
        };
        // SAFETY: `self` is a live tensor of that size.
        let status = unsafe { function(self.handle.0, 0, 0, self.size) };
        NrtError::check("nrt_tensor_memset", status, || {
            format!("{} bytes", self.size)
        })
    }

    fn check_range(&self, call: &'static str, offset: usize, size: usize) -> Result<(), NrtError> {
        if offset.checked_add(size).is_some_and(|end| end <= self.size) {
            return Ok(());
        }
        Err(NrtError::refused(
            call,
            format!(
                "expected a range within {} bytes, found {size} bytes at {offset}",
                self.size
            ),
        ))
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: the handle is owned and not used again; the function sets it to NULL.
        unsafe { (self.library.functions.free_tensor)(&raw mut self.handle.0) }
    }
}

/// Tensors by name, for an execution.
#[derive(Debug)]
pub struct TensorSet {
    library: &'static Library,
    inner: Mutex<SetInner>,
}

#[derive(Debug)]
struct SetInner {
    handle: Pointer,
    // The API wants tensors to outlive the set that they are in.
    tensors: HashMap<String, Arc<Tensor>>,
}

impl TensorSet {
    /// Makes an empty set.
    pub fn new(library: &'static Library) -> Result<Self, NrtError> {
        const CALL: &str = "nrt_allocate_tensor_set";
        library.require_init(CALL)?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is a place for a pointer.
        let status = unsafe { (library.functions.allocate_set)(&raw mut handle) };
        NrtError::check(CALL, status, String::new)?;
        if handle.is_null() {
            return Err(NrtError::refused(
                CALL,
                "success was reported, and the handle is NULL",
            ));
        }
        let inner = SetInner {
            handle: Pointer(handle),
            tensors: HashMap::new(),
        };
        Ok(Self {
            library,
            inner: Mutex::new(inner),
        })
    }

    /// Adds a tensor, or replaces the one of that name.
    pub fn add(&self, name: &str, tensor: &Arc<Tensor>) -> Result<(), NrtError> {
        const CALL: &str = "nrt_add_tensor_to_tensor_set";
        let name_text = c_string(CALL, name)?;
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner
            .tensors
            .get(name)
            .is_some_and(|found| Arc::ptr_eq(found, tensor))
        {
            return Ok(());
        }
        // SAFETY: set and tensor are live, the set is under its mutex, the name is live.
        let status = unsafe {
            (self.library.functions.add_to_set)(inner.handle.0, name_text.as_ptr(), tensor.handle.0)
        };
        NrtError::check(CALL, status, || format!("{name:?}"))?;
        inner.tensors.insert(name.to_owned(), Arc::clone(tensor));
        Ok(())
    }

    /// Runs `call` with the handle, while nobody else uses the set.
    pub(super) fn with_handle<T>(&self, call: impl FnOnce(*mut Opaque) -> T) -> T {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        call(inner.handle.0)
    }
}

impl Drop for TensorSet {
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the handle is owned and not used again; its tensors are still alive.
        unsafe { (self.library.functions.destroy_set)(&raw mut inner.handle.0) }
    }
}

fn c_string(call: &'static str, name: &str) -> Result<CString, NrtError> {
    // Names in the runtime's structs are char[256] with the NUL.
    if name.len() > 255 {
        return Err(NrtError::refused(
            call,
            format!("expected a name of at most 255 bytes, found {name:?}"),
        ));
    }
    CString::new(name).map_err(|_| {
        NrtError::refused(call, format!("expected a name without NUL, found {name:?}"))
    })
}
