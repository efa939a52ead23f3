//! The C declarations, written from the documented layouts, with their sizes and offsets checked
//! when this is compiled.

use std::ffi::{c_char, c_int, c_void};
use std::mem::{offset_of, size_of};

use super::status::Status;

/// `nrt_model_t`, `nrt_tensor_t` and the tensor set are opaque.
pub type Opaque = c_void;

/// Version of the runtime.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawVersion {
    /// Major, minor, patch, maintenance.
    pub numbers: [u64; 4],
    /// Text of the whole version.
    pub detail: [u8; 128],
    /// Commit of the sources.
    pub git_hash: [u8; 64],
}

/// One input or output of a model.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawTensorInfo {
    /// Name, ended by a NUL.
    pub name: [u8; 256],
    /// 0 for an input, 1 for an output.
    pub usage: i32,
    /// Bytes.
    pub size: u64,
    /// `nrt_dtype`, whose numbers changed between releases: for people only.
    pub dtype: i32,
    /// Extents.
    pub shape: *const u32,
    /// How many extents.
    pub ndim: u32,
}

/// What `nrt_get_model_tensor_info` gives; `tensor_count` entries follow the first field.
#[derive(Debug)]
#[repr(C)]
pub struct RawTensorInfoArray {
    /// How many entries follow.
    pub tensor_count: u64,
    /// The entries.
    pub entries: [RawTensorInfo; 0],
}

/// What machine it is.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawInstanceInfo {
    /// Instance family.
    pub family: u32,
    /// Instance size.
    pub size: u32,
    /// Name of the architecture.
    pub arch_name: [u8; 16],
    /// Revision of the device.
    pub device_revision: [u8; 8],
}

/// Memory of a logical core.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawMemoryStats {
    /// Bytes in use.
    pub bytes_used: u64,
    /// Bytes that there are.
    pub bytes_limit: u64,
}

/// One part of a batched read or write.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawBatchOp {
    /// Bytes from the start of the tensor.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// Host memory.
    pub buffer: *mut c_void,
}

/// The parts for one tensor.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawBatch {
    /// The tensor.
    pub tensor: *const Opaque,
    /// The parts.
    pub operations: *const RawBatchOp,
    /// How many.
    pub count: u32,
}

/// Where a tensor is.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawAllocationInfo {
    /// Address on the device.
    pub physical_address: u64,
    /// Bytes.
    pub size: u64,
    /// Which HBM.
    pub hbm_index: i32,
}

/// A list of tensors.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawTensorList {
    /// The tensors.
    pub tensors: *const *const Opaque,
    /// How many.
    pub count: u64,
}

/// A group of ranks.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawCommunicator {
    /// Ranks of the group.
    pub replica_group: *const u32,
    /// Own rank.
    pub rank: u32,
    /// How many ranks.
    pub rank_count: u32,
    /// Own device among those that run the model.
    pub ctx_device_id: u32,
    /// How many of them.
    pub ctx_device_count: u32,
    /// Logical core.
    pub vnc: u32,
}

/// Microcode.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawMicrocode {
    /// Two times pointer and size.
    pub parts: [(*const c_void, usize); 2],
}

/// What `nrt_get_model_info` gives (append-only).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawModelInfo {
    /// Logical core.
    pub vnc: u32,
}

/// Sizes and offsets by name, as compiled; a test compares them with the document.
pub const LAYOUT: [(&str, usize); 42] = [
    ("nrt_tensor_info_t", size_of::<RawTensorInfo>()),
    ("nrt_tensor_info_t.name", offset_of!(RawTensorInfo, name)),
    ("nrt_tensor_info_t.usage", offset_of!(RawTensorInfo, usage)),
    ("nrt_tensor_info_t.size", offset_of!(RawTensorInfo, size)),
    ("nrt_tensor_info_t.dtype", offset_of!(RawTensorInfo, dtype)),
    ("nrt_tensor_info_t.shape", offset_of!(RawTensorInfo, shape)),
    ("nrt_tensor_info_t.ndim", offset_of!(RawTensorInfo, ndim)),
    ("nrt_tensor_info_array_t", size_of::<RawTensorInfoArray>()),
    (
        "nrt_tensor_info_array_t.array",
        offset_of!(RawTensorInfoArray, entries),
    ),
    ("nrt_version_t", size_of::<RawVersion>()),
    ("nrt_version_t.rt_detail", offset_of!(RawVersion, detail)),
    ("nrt_version_t.git_hash", offset_of!(RawVersion, git_hash)),
    ("nrt_instance_info_t", size_of::<RawInstanceInfo>()),
    (
        "nrt_instance_info_t.family",
        offset_of!(RawInstanceInfo, family),
    ),
    (
        "nrt_instance_info_t.size",
        offset_of!(RawInstanceInfo, size),
    ),
    (
        "nrt_instance_info_t.arch_name",
        offset_of!(RawInstanceInfo, arch_name),
    ),
    (
        "nrt_instance_info_t.device_revision",
        offset_of!(RawInstanceInfo, device_revision),
    ),
    ("nrt_tensor_batch_op_t", size_of::<RawBatchOp>()),
    ("nrt_tensor_batch_op_t.size", offset_of!(RawBatchOp, size)),
    (
        "nrt_tensor_batch_op_t.buffer",
        offset_of!(RawBatchOp, buffer),
    ),
    ("nrt_tensor_batch_t", size_of::<RawBatch>()),
    ("nrt_tensor_batch_t.ops", offset_of!(RawBatch, operations)),
    ("nrt_tensor_batch_t.num_ops", offset_of!(RawBatch, count)),
    (
        "nrt_tensor_device_allocation_info_t",
        size_of::<RawAllocationInfo>(),
    ),
    (
        "nrt_tensor_device_allocation_info_t.size",
        offset_of!(RawAllocationInfo, size),
    ),
    (
        "nrt_tensor_device_allocation_info_t.hbm_index",
        offset_of!(RawAllocationInfo, hbm_index),
    ),
    ("nrt_tensor_list_t", size_of::<RawTensorList>()),
    (
        "nrt_tensor_list_t.num_tensors",
        offset_of!(RawTensorList, count),
    ),
    ("nrt_vnc_memory_stats_t", size_of::<RawMemoryStats>()),
    (
        "nrt_vnc_memory_stats_t.bytes_used",
        offset_of!(RawMemoryStats, bytes_used),
    ),
    (
        "nrt_vnc_memory_stats_t.bytes_limit",
        offset_of!(RawMemoryStats, bytes_limit),
    ),
    ("nrt_model_info_t", size_of::<RawModelInfo>()),
    ("nrt_cc_comm_t", size_of::<RawCommunicator>()),
    (
        "nrt_cc_comm_t.replica_group",
        offset_of!(RawCommunicator, replica_group),
    ),
    ("nrt_cc_comm_t.rank", offset_of!(RawCommunicator, rank)),
    (
        "nrt_cc_comm_t.rank_n",
        offset_of!(RawCommunicator, rank_count),
    ),
    (
        "nrt_cc_comm_t.ctx_device_id",
        offset_of!(RawCommunicator, ctx_device_id),
    ),
    (
        "nrt_cc_comm_t.ctx_device_count",
        offset_of!(RawCommunicator, ctx_device_count),
    ),
    ("nrt_cc_comm_t.vnc", offset_of!(RawCommunicator, vnc)),
    ("nrt_ucode_info", size_of::<RawMicrocode>()),
    ("NRT_STATUS", size_of::<Status>()),
    ("nrt_version_t.rt_major", offset_of!(RawVersion, numbers)),
];

const _: () = {
    assert!(size_of::<RawTensorInfo>() == 296);
    assert!(offset_of!(RawTensorInfoArray, entries) == 8);
    assert!(size_of::<RawVersion>() == 224);
    assert!(size_of::<RawInstanceInfo>() == 32);
    assert!(size_of::<RawMemoryStats>() == 16);
    assert!(size_of::<Status>() == 4);
};

/// Framework of `nrt_init` for programs of their own.
pub const NO_FRAMEWORK: c_int = 1;

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        $($(#[$doc])* pub type $name = unsafe extern "C" fn($($argument),*) $(-> $result)?;)*
    };
}

functions! {
    /// `nrt_init`.
    Init: fn(c_int, *const c_char, *const c_char) -> Status;
    /// `nrt_close`; whether it returns a status is documented both ways, so nothing is read.
    Close: fn();
    /// `nrt_get_version`.
    GetVersion: fn(*mut RawVersion, usize) -> Status;
    /// `nrt_get_{total,visible}_{nc,vnc}_count`.
    GetCount: fn(*mut u32) -> Status;
    /// `nrt_load`.
    Load: fn(*const c_void, usize, i32, i32, *mut *mut Opaque) -> Status;
    /// `nrt_load_collectives`.
    LoadCollectives: fn(*const c_void, usize, i32, i32, u32, u32, *mut *mut Opaque) -> Status;
    /// `nrt_unload`.
    Unload: fn(*mut Opaque) -> Status;
    /// `nrt_get_model_tensor_info`.
    GetTensorInfo: fn(*mut Opaque, *mut *mut RawTensorInfoArray) -> Status;
    /// `nrt_free_model_tensor_info`.
    FreeTensorInfo: fn(*mut RawTensorInfoArray) -> Status;
    /// `nrt_allocate_tensor_set`.
    AllocateSet: fn(*mut *mut Opaque) -> Status;
    /// `nrt_destroy_tensor_set`.
    DestroySet: fn(*mut *mut Opaque);
    /// `nrt_add_tensor_to_tensor_set`.
    AddToSet: fn(*mut Opaque, *const c_char, *mut Opaque) -> Status;
    /// `nrt_execute`.
    Execute: fn(*mut Opaque, *const Opaque, *mut Opaque) -> Status;
    /// `nrt_tensor_allocate`.
    AllocateTensor: fn(c_int, c_int, usize, *const c_char, *mut *mut Opaque) -> Status;
    /// `nrt_tensor_free`.
    FreeTensor: fn(*mut *mut Opaque);
    /// `nrt_tensor_read`.
    ReadTensor: fn(*const Opaque, *mut c_void, usize, usize) -> Status;
    /// `nrt_tensor_write`.
    WriteTensor: fn(*mut Opaque, *const c_void, usize, usize) -> Status;
    /// `nrt_tensor_get_size`.
    TensorSize: fn(*const Opaque) -> usize;
    /// `nrt_tensor_memset`.
    SetTensor: fn(*mut Opaque, u64, c_int, usize) -> Status;
    /// `nrt_tensor_allocate_slice`.
    AllocateSlice: fn(*const Opaque, usize, usize, *const c_char, *mut *mut Opaque) -> Status;
    /// `nrt_tensor_get_va`.
    TensorAddress: fn(*const Opaque) -> *mut c_void;
    /// `nrt_get_instance_info`.
    GetInstanceInfo: fn(*mut RawInstanceInfo, usize) -> Status;
    /// `nrt_get_vnc_memory_stats`.
    GetMemoryStats: fn(u32, *mut RawMemoryStats, usize, *mut usize) -> Status;
}
