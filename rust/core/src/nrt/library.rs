//! The loaded runtime library: found, resolved and initialised once for the life of the process.

use std::env;
use std::ffi::c_char;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::OnceLock;

use libloading::os::unix::{Library as Handle, RTLD_NOW};

use super::abi::{self, RawInstanceInfo, RawMemoryStats, RawVersion};
use super::error::NrtError;
use super::status::Status;

/// The SONAME, then the place of AWS's package, then the development link.
const NAMES: [&str; 3] = [
    "libnrt.so.1",
    "/opt/aws/neuron/lib/libnrt.so.1",
    "libnrt.so",
];

/// Where the library is looked for, in order: `override_path` alone if it is given.
pub fn default_paths(override_path: Option<&Path>) -> Vec<PathBuf> {
    match override_path {
        Some(path) => vec![path.to_owned()],
        None => NAMES.iter().map(PathBuf::from).collect(),
    }
}

/// Version of the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Major, minor, patch, maintenance.
    pub numbers: [u64; 4],
    /// Text of the whole version.
    pub detail: String,
    /// Commit of the sources.
    pub git_hash: String,
}

/// What machine it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceInfo {
    /// Instance family by number.
    pub family: u32,
    /// Instance size by number.
    pub size: u32,
    /// Name of the architecture.
    pub architecture: String,
}

/// Memory of a logical core in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryStats {
    /// In use.
    pub used: u64,
    /// All of it.
    pub limit: u64,
}

/// The functions of the library. Optional ones are `None` where the library is older.
#[derive(Debug)]
pub(super) struct Functions {
    pub(super) load: abi::Load,
    pub(super) unload: abi::Unload,
    pub(super) allocate_set: abi::AllocateSet,
    pub(super) destroy_set: abi::DestroySet,
    pub(super) add_to_set: abi::AddToSet,
    pub(super) execute: abi::Execute,
    pub(super) allocate_tensor: abi::AllocateTensor,
    pub(super) free_tensor: abi::FreeTensor,
    pub(super) read_tensor: abi::ReadTensor,
    pub(super) write_tensor: abi::WriteTensor,
    pub(super) tensor_size: abi::TensorSize,
    pub(super) allocate_slice: abi::AllocateSlice,
    pub(super) load_collectives: Option<abi::LoadCollectives>,
    pub(super) tensor_info: Option<abi::GetTensorInfo>,
    pub(super) free_tensor_info: Option<abi::FreeTensorInfo>,
    pub(super) set_tensor: Option<abi::SetTensor>,
    pub(super) tensor_address: Option<abi::TensorAddress>,
    init: abi::Init,
    close: abi::Close,
    version: abi::GetVersion,
    total: abi::GetCount,
    visible: abi::GetCount,
    instance: Option<abi::GetInstanceInfo>,
    memory: Option<abi::GetMemoryStats>,
}

/// The runtime.
#[derive(Debug)]
pub struct Library {
    path: PathBuf,
    pub(super) functions: Functions,
    initialised: OnceLock<(u32, Status)>,
}

static LOADED: OnceLock<&'static Library> = OnceLock::new();

impl Library {
    /// Loads the library, or returns the one that this process has loaded.
    ///
    /// It is never unloaded: it has threads and the device belongs to the process.
    pub fn open(override_path: Option<&Path>) -> Result<&'static Self, NrtError> {
        if let Some(library) = LOADED.get() {
            return Ok(library);
        }
        let mut tried = Vec::new();
        for path in default_paths(override_path) {
            // SAFETY: loading runs the library's initialisers; it is the runtime that the user
            // installed or named, and running it is what this is for.
            match unsafe { Handle::open(Some(&path), RTLD_NOW) } {
                Ok(handle) => {
                    let functions = resolve(&handle, &path)?;
                    // Never dlclose.
                    std::mem::forget(handle);
                    let library = Box::leak(Box::new(Self {
                        path,
                        functions,
                        initialised: OnceLock::new(),
                    }));
                    return Ok(LOADED.get_or_init(|| library));
                }
                Err(error) => tried.push(error.to_string()),
            }
        }
        Err(NrtError::NotLoaded { tried })
    }

    /// The path or name that it was loaded by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Initialises the runtime once per process; it takes possession of the visible cores.
    ///
    /// A second call returns the outcome of the first.
    pub fn init(&self) -> Result<(), NrtError> {
        let (pid, status) = *self.initialised.get_or_init(|| {
            let empty: *const c_char = c"".as_ptr();
            // SAFETY: both texts are NUL-terminated and live.
            let status = unsafe { (self.functions.init)(abi::NO_FRAMEWORK, empty, empty) };
            (process::id(), status)
        });
        NrtError::check("nrt_init", status, || {
            "is the driver loaded (lsmod), are cores free, does NEURON_RT_VISIBLE_CORES fit?".into()
        })?;
        if pid == process::id() {
            return Ok(());
        }
        Err(NrtError::refused(
            "nrt_init",
            format!(
                "process {pid} initialised the runtime and then forked; start workers by spawn"
            ),
        ))
    }

    /// Whether `init` succeeded in this process.
    pub fn is_ready(&self) -> bool {
        self.initialised.get() == Some(&(process::id(), Status::SUCCESS))
    }

    /// Gives the cores back. Only for the end of a process: initialising again is not possible.
    pub fn close(&self) {
        if self.is_ready() {
            // SAFETY: initialised; the caller uses no handle afterwards, and those that are dropped
            // later get a status back.
            unsafe { (self.functions.close)() }
        }
    }

    /// The version of the runtime; needs no device.
    pub fn version(&self) -> Result<Version, NrtError> {
        let mut raw = RawVersion {
            numbers: [0; 4],
            detail: [0; 128],
            git_hash: [0; 64],
        };
        // SAFETY: `raw` has the layout and the size that is passed.
        let status = unsafe { (self.functions.version)(&raw mut raw, size_of::<RawVersion>()) };
        NrtError::check("nrt_get_version", status, String::new)?;
        Ok(Version {
            numbers: raw.numbers,
            detail: text(&raw.detail),
            git_hash: text(&raw.git_hash),
        })
    }

    /// How many logical cores the machine has; needs no initialisation.
    pub fn total_cores(&self) -> Result<u32, NrtError> {
        count("nrt_get_total_vnc_count", self.functions.total)
    }

    /// How many logical cores this process may use; needs no initialisation.
    pub fn visible_cores(&self) -> Result<u32, NrtError> {
        count("nrt_get_visible_vnc_count", self.functions.visible)
    }

    /// What machine it is, or `None` from a runtime that does not tell.
    pub fn instance(&self) -> Result<Option<InstanceInfo>, NrtError> {
        let Some(function) = self.functions.instance else {
            return Ok(None);
        };
        let mut raw = RawInstanceInfo {
            family: 0,
            size: 0,
            arch_name: [0; 16],
            device_revision: [0; 8],
        };
        // SAFETY: `raw` has the layout and the size that is passed.
        let status = unsafe { function(&raw mut raw, size_of::<RawInstanceInfo>()) };
        NrtError::check("nrt_get_instance_info", status, String::new)?;
        Ok(Some(InstanceInfo {
            family: raw.family,
            size: raw.size,
            architecture: text(&raw.arch_name),
        }))
    }

    /// Memory of a logical core, or `None` from a runtime that does not tell.
    pub fn memory(&self, core: u32) -> Result<Option<MemoryStats>, NrtError> {
        let Some(function) = self.functions.memory else {
            return Ok(None);
        };
        let mut raw = RawMemoryStats {
            bytes_used: 0,
            bytes_limit: 0,
        };
        let mut filled = 0;
        // SAFETY: `raw` has the layout and the size that is passed; `filled` is a size_t.
        let status = unsafe {
            function(
                core,
                &raw mut raw,
                size_of::<RawMemoryStats>(),
                &raw mut filled,
            )
        };
        NrtError::check("nrt_get_vnc_memory_stats", status, || {
            format!("core {core}")
        })?;
        Ok(Some(MemoryStats {
            used: raw.bytes_used,
            limit: raw.bytes_limit,
        }))
    }

    /// What is to be used before a handle is made: the runtime is initialised.
    pub(super) fn require_init(&self, call: &'static str) -> Result<(), NrtError> {
        if self.is_ready() {
            return Ok(());
        }
        Err(NrtError::refused(
            call,
            "nrt_init has not succeeded in this process",
        ))
    }
}

fn resolve(handle: &Handle, path: &Path) -> Result<Functions, NrtError> {
    Ok(Functions {
        load: required(handle, path, "nrt_load")?,
        unload: required(handle, path, "nrt_unload")?,
        allocate_set: required(handle, path, "nrt_allocate_tensor_set")?,
        destroy_set: required(handle, path, "nrt_destroy_tensor_set")?,
        add_to_set: required(handle, path, "nrt_add_tensor_to_tensor_set")?,
        execute: required(handle, path, "nrt_execute")?,
        allocate_tensor: required(handle, path, "nrt_tensor_allocate")?,
        free_tensor: required(handle, path, "nrt_tensor_free")?,
        read_tensor: required(handle, path, "nrt_tensor_read")?,
        write_tensor: required(handle, path, "nrt_tensor_write")?,
        tensor_size: required(handle, path, "nrt_tensor_get_size")?,
        allocate_slice: required(handle, path, "nrt_tensor_allocate_slice")?,
        load_collectives: optional(handle, "nrt_load_collectives"),
        tensor_info: optional(handle, "nrt_get_model_tensor_info"),
        free_tensor_info: optional(handle, "nrt_free_model_tensor_info"),
        set_tensor: optional(handle, "nrt_tensor_memset"),
        tensor_address: optional(handle, "nrt_tensor_get_va"),
        init: required(handle, path, "nrt_init")?,
        close: required(handle, path, "nrt_close")?,
        version: required(handle, path, "nrt_get_version")?,
        // The names with vnc are newer.
        total: match optional(handle, "nrt_get_total_vnc_count") {
            Some(function) => function,
            None => required(handle, path, "nrt_get_total_nc_count")?,
        },
        visible: match optional(handle, "nrt_get_visible_vnc_count") {
            Some(function) => function,
            None => required(handle, path, "nrt_get_visible_nc_count")?,
        },
        instance: optional(handle, "nrt_get_instance_info"),
        memory: optional(handle, "nrt_get_vnc_memory_stats"),
    })
}

fn required<T: Copy>(handle: &Handle, path: &Path, symbol: &str) -> Result<T, NrtError> {
    optional(handle, symbol).ok_or_else(|| NrtError::NoSymbol {
        path: path.to_owned(),
        symbol: symbol.to_owned(),
    })
}

fn optional<T: Copy>(handle: &Handle, symbol: &str) -> Option<T> {
    // SAFETY: `T` is the documented type of the function of that name (abi.rs), and the library
    // stays loaded for good.
    unsafe { handle.get::<T>(symbol.as_bytes()) }
        .ok()
        .map(|found| *found)
}

fn count(call: &'static str, function: abi::GetCount) -> Result<u32, NrtError> {
    let mut value = 0;
    // SAFETY: `value` is the uint32_t that the function fills.
    let status = unsafe { function(&raw mut value) };
    NrtError::check(call, status, || {
        let visible = env::var("NEURON_RT_VISIBLE_CORES").unwrap_or_default();
        if visible.is_empty() {
            visible
        } else {
            format!("NEURON_RT_VISIBLE_CORES={visible}")
        }
    })?;
    Ok(value)
}

/// The text of a fixed field up to its first NUL.
pub(super) fn text(field: &[u8]) -> String {
    let end = field
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(field.len());
    String::from_utf8_lossy(field.get(..end).unwrap_or_default()).into_owned()
}
