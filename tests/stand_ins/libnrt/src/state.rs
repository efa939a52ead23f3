//! What the runtime knows: its phase, and the objects behind the handles that it gave out.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use vllm_neuron_core::neff::{Neff, ParseOptions, dtype};
use vllm_neuron_core::nrt::Status;

use crate::device::{Device, Storage};
use crate::settings::Settings;

pub(crate) const FAILURE: Status = Status(1);
pub(crate) const INVALID: Status = Status(2);
pub(crate) const INVALID_HANDLE: Status = Status(3);
pub(crate) const RESOURCE: Status = Status(4);
const NOT_ENOUGH_CORES: Status = Status(9);
const UNINITIALIZED: Status = Status(13);
const CLOSED: Status = Status(14);
const BAD_INPUT: Status = Status(1002);

/// One input or output of a model.
#[derive(Clone)]
pub(crate) struct Port {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: u64,
    pub(crate) is_output: bool,
}

pub(crate) struct Model {
    pub(crate) ports: Vec<Port>,
}

/// A tensor or a slice of one.
pub(crate) struct Tensor {
    storage: Arc<Mutex<Storage>>,
    offset: usize,
    pub(crate) size: usize,
}

#[derive(Default)]
pub(crate) struct State {
    phase: Phase,
    pub(crate) models: HashMap<u64, Model>,
    pub(crate) tensors: HashMap<u64, Tensor>,
    pub(crate) sets: HashMap<u64, BTreeMap<String, u64>>,
    pub(crate) counts: BTreeMap<String, i64>,
    failures: Vec<(String, Status)>,
    /// Handles are numbers that are no addresses and are never used again.
    last_handle: u64,
    used_bytes: u64,
}

#[derive(Default)]
enum Phase {
    #[default]
    New,
    Open {
        settings: Settings,
        device: Box<Device>,
    },
    Closed,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// The state under its lock: one call at a time.
pub(crate) struct Locked(MutexGuard<'static, Option<State>>);

impl Locked {
    pub(crate) fn state(&mut self) -> &mut State {
        self.0.get_or_insert_default()
    }
}

pub(crate) fn lock() -> Locked {
    Locked(STATE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Says on stderr why something is refused, as the real runtime does.
pub(crate) fn explain(status: Status, text: &str) -> Status {
    let _ = writeln!(
        io::stderr(),
        "stand-in libnrt: {text} (status {})",
        status.0
    );
    status
}

impl State {
    pub(crate) fn open(&mut self) -> Result<(), Status> {
        match self.phase {
            Phase::New => {}
            Phase::Open { .. } => return Err(explain(FAILURE, "nrt_init was called before")),
            Phase::Closed => return Err(CLOSED),
        }
        let settings = Settings::read();
        settings
            .visible
            .map_err(|status| explain(status, "cores that there are not"))?;
        let device = Device::start(&settings)
            .map_err(|error| explain(FAILURE, &format!("no device: {error}")))?;
        self.phase = Phase::Open {
            settings,
            device: Box::new(device),
        };
        Ok(())
    }

    pub(crate) fn close(&mut self) {
        self.models.clear();
        self.tensors.clear();
        self.sets.clear();
        self.phase = Phase::Closed;
    }

    /// The phase gate of every call that needs the runtime, and the failure that a test ordered.
    pub(crate) fn enter(&mut self, call: &str) -> Result<(), Status> {
        *self.counts.entry(call.to_owned()).or_default() += 1;
        match self.phase {
            Phase::New => return Err(explain(UNINITIALIZED, &format!("{call} before nrt_init"))),
            Phase::Closed => return Err(explain(CLOSED, &format!("{call} after nrt_close"))),
            Phase::Open { .. } => {}
        }
        match self.failures.iter().position(|(name, _)| name == call) {
            Some(index) => Err(self.failures.remove(index).1),
            None => Ok(()),
        }
    }

    pub(crate) fn order_failure(&mut self, call: String, status: Status) {
        self.failures.push((call, status));
    }

    pub(crate) fn used(&self) -> (u64, u64) {
        let Phase::Open { settings, .. } = &self.phase else {
            return (0, 0);
        };
        (self.used_bytes, settings.memory)
    }

    fn parts(&mut self) -> Result<(&Settings, &mut Device), Status> {
        match &mut self.phase {
            Phase::Open { settings, device } => Ok((settings, device)),
            _ => Err(UNINITIALIZED),
        }
    }

    pub(crate) fn handle(&mut self) -> u64 {
        // Odd, so that no aligned address looks like one.
        self.last_handle += 2;
        self.last_handle + 1
    }

    fn check_core(&mut self, core: i32) -> Result<(), Status> {
        let visible = self.parts()?.0.visible?;
        if core == -1 || u32::try_from(core).is_ok_and(|core| core < visible) {
            return Ok(());
        }
        Err(explain(
            NOT_ENOUGH_CORES,
            &format!("core {core} of {visible}"),
        ))
    }

    pub(crate) fn load(&mut self, neff: &[u8], core: i32) -> Result<u64, Status> {
        self.check_core(core)?;
        let (settings, _) = self.parts()?;
        let parsed = Neff::parse(neff, &ParseOptions::default())
            .map_err(|error| explain(Status(error.kind().status()), &error.to_string()))?;
        if parsed.target() != settings.target {
            let text = format!(
                "the NEFF is for {:?}, this stands in for {:?} and has no such core",
                parsed.target(),
                settings.target
            );
            return Err(explain(INVALID, &text));
        }
        if parsed.header().lnc_size != settings.lnc {
            let text = format!(
                "LNC {} in the NEFF, {} here",
                parsed.header().lnc_size,
                settings.lnc
            );
            return Err(explain(INVALID, &text));
        }
        let inputs = parsed.inputs().iter().map(|tensor| (tensor, false));
        let outputs = parsed.outputs().iter().map(|tensor| (tensor, true));
        let ports = inputs.chain(outputs).map(|(tensor, is_output)| {
            let bytes = dtype::item_bytes(&tensor.dtype)? * tensor.shape.iter().product::<u64>();
            Some(Port {
                name: tensor.name.clone(),
                dtype: tensor.dtype.clone(),
                shape: tensor.shape.clone(),
                bytes,
                is_output,
            })
        });
        let Some(ports) = ports.collect::<Option<Vec<_>>>() else {
            return Err(explain(INVALID, "unknown dtype"));
        };
        let handle = self.handle();
        let (_, device) = self.parts()?;
        let path = device
            .put_neff(handle, neff)
            .map_err(|error| explain(RESOURCE, &error.to_string()))?;
        device
            .ask(&json!({"call": "load", "model": handle, "path": path}))
            .map_err(|error| explain(INVALID, &error))?;
        self.models.insert(handle, Model { ports });
        Ok(handle)
    }

    pub(crate) fn unload(&mut self, model: u64) -> Result<(), Status> {
        self.models.remove(&model).ok_or(INVALID_HANDLE)?;
        let (_, device) = self.parts()?;
        device
            .ask(&json!({"call": "unload", "model": model}))
            .map(drop)
            .map_err(|error| explain(FAILURE, &error))
    }

    pub(crate) fn allocate(
        &mut self,
        placement: i32,
        core: i32,
        size: usize,
    ) -> Result<u64, Status> {
        self.check_core(core)?;
        if !(0..=2).contains(&placement) || size == 0 {
            return Err(explain(
                INVALID,
                &format!("placement {placement}, {size} bytes"),
            ));
        }
        let bytes = size as u64;
        let (used, limit) = self.used();
        if used + bytes > limit {
            return Err(explain(
                RESOURCE,
                &format!("{bytes} bytes, {used} of {limit} in use"),
            ));
        }
        let handle = self.handle();
        let (_, device) = self.parts()?;
        let storage = device
            .storage(handle, bytes)
            .map_err(|error| explain(RESOURCE, &error.to_string()))?;
        self.used_bytes += bytes;
        let storage = Arc::new(Mutex::new(storage));
        self.tensors.insert(
            handle,
            Tensor {
                storage,
                offset: 0,
                size,
            },
        );
        Ok(handle)
    }

    pub(crate) fn slice(&mut self, source: u64, offset: usize, size: usize) -> Result<u64, Status> {
        let source = self.tensors.get(&source).ok_or(INVALID_HANDLE)?;
        check_range(source, offset, size)?;
        if size == 0 {
            return Err(explain(INVALID, "a slice of 0 bytes"));
        }
        let slice = Tensor {
            storage: Arc::clone(&source.storage),
            offset: source.offset + offset,
            size,
        };
        let handle = self.handle();
        self.tensors.insert(handle, slice);
        Ok(handle)
    }

    pub(crate) fn free(&mut self, tensor: u64) -> Result<(), Status> {
        if self
            .sets
            .values()
            .any(|set| set.values().any(|member| *member == tensor))
        {
            *self
                .counts
                .entry("freed while in a set".into())
                .or_default() += 1;
        }
        let tensor = self.tensors.remove(&tensor).ok_or(INVALID_HANDLE)?;
        if let Some(storage) = Arc::into_inner(tensor.storage) {
            let storage = storage.into_inner().unwrap_or_else(PoisonError::into_inner);
            self.used_bytes -= storage.map.len() as u64;
            self.parts()?.1.forget(&storage);
        }
        Ok(())
    }

    /// Runs `access` on the bytes of a part of a tensor, as the device has them.
    pub(crate) fn access(
        &mut self,
        tensor: u64,
        offset: usize,
        size: usize,
        access: impl FnOnce(&mut [u8]),
    ) -> Result<(), Status> {
        let tensor = self.tensors.get(&tensor).ok_or(INVALID_HANDLE)?;
        check_range(tensor, offset, size)?;
        let start = tensor.offset + offset;
        let storage = Arc::clone(&tensor.storage);
        let mut storage = storage.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, device) = self.parts()?;
        device
            .flush(&mut storage)
            .map_err(|error| explain(FAILURE, &error))?;
        let part = storage.map.get_mut(start..start + size).ok_or(INVALID)?;
        access(part);
        Ok(())
    }

    pub(crate) fn execute(&mut self, model: u64, inputs: u64, outputs: u64) -> Result<(), Status> {
        let ports = &self.models.get(&model).ok_or(INVALID_HANDLE)?.ports;
        let mut places: [Vec<Value>; 2] = [Vec::new(), Vec::new()];
        for (set, is_output) in [(inputs, false), (outputs, true)] {
            let set = self.sets.get(&set).ok_or(INVALID_HANDLE)?;
            let wanted: Vec<&Port> = ports.iter().filter(|p| p.is_output == is_output).collect();
            if let Some(name) = set
                .keys()
                .find(|name| wanted.iter().all(|p| p.name != **name))
            {
                return Err(explain(
                    BAD_INPUT,
                    &format!("the model has no tensor {name:?}"),
                ));
            }
            for port in wanted {
                let Some(tensor) = set.get(&port.name).and_then(|id| self.tensors.get(id)) else {
                    return Err(explain(BAD_INPUT, &format!("no tensor {:?}", port.name)));
                };
                if tensor.size as u64 != port.bytes {
                    let text = format!(
                        "{:?}: {} bytes, expected {}",
                        port.name, tensor.size, port.bytes
                    );
                    return Err(explain(INVALID, &text));
                }
                let mut storage = tensor
                    .storage
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                storage.is_resident = true;
                places[usize::from(is_output)].push(json!([
                    storage.id,
                    tensor.offset,
                    port.dtype,
                    port.shape
                ]));
            }
        }
        let [inputs, outputs] = places;
        let request =
            json!({"call": "execute", "model": model, "inputs": inputs, "outputs": outputs});
        let (_, device) = self.parts()?;
        device
            .ask(&request)
            .map(drop)
            .map_err(|error| explain(FAILURE, &error))
    }
}

fn check_range(tensor: &Tensor, offset: usize, size: usize) -> Result<(), Status> {
    if offset
        .checked_add(size)
        .is_some_and(|end| end <= tensor.size)
    {
        return Ok(());
    }
    Err(explain(
        INVALID,
        &format!("{size} bytes at {offset} of {}", tensor.size),
    ))
}
