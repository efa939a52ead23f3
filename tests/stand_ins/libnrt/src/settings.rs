//! What the environment says about the machine that this stands in for.

use std::env;
use std::path::PathBuf;

use vllm_neuron_core::nrt::Status;

/// The machine.
pub(crate) struct Settings {
    /// Target in the NEFFs that it takes.
    pub(crate) target: String,
    /// Instance family number.
    pub(crate) family: u32,
    /// Physical cores of a logical one.
    pub(crate) lnc: u32,
    /// Logical cores of the machine.
    pub(crate) total: u32,
    /// Logical cores of this process, or the status for a list of cores that there are not.
    pub(crate) visible: Result<u32, Status>,
    /// Bytes of memory per logical core.
    pub(crate) memory: u64,
    /// Version numbers.
    pub(crate) version: [u64; 4],
    /// Python interpreter with the product.
    pub(crate) python: PathBuf,
    /// The emulator's program.
    pub(crate) program: PathBuf,
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.trim().is_empty())
}

fn number(name: &str, default: u64) -> u64 {
    variable(name)
        .and_then(|value| value.trim().parse().ok())
        .unwrap_or(default)
}

impl Settings {
    /// Reads the environment.
    pub(crate) fn read() -> Self {
        let name = variable("STAND_IN_NRT_TARGET").unwrap_or_else(|| "trn2".into());
        let (architecture, family) = match name.as_str() {
            "trn1" => ("sunda", 2),
            "inf2" => ("sunda", 4),
            "trn3" => ("mariana", 14),
            _ => ("cayman", 5),
        };
        let total = u32::try_from(number("STAND_IN_NRT_CORES", 4)).unwrap_or(u32::MAX);
        let lnc = variable("NEURON_LOGICAL_NC_CONFIG")
            .or_else(|| variable("NEURON_RT_VIRTUAL_CORE_SIZE"))
            .and_then(|value| value.parse().ok())
            .unwrap_or(if architecture == "sunda" { 1 } else { 2 });
        let visible = match variable("NEURON_RT_VISIBLE_CORES") {
            Some(text) => cores(&text, total).ok_or(Status(2)),
            None => match u32::try_from(number("NEURON_RT_NUM_CORES", 0)).unwrap_or(u32::MAX) {
                0 => Ok(total),
                count if count <= total => Ok(count),
                _ => Err(Status(9)),
            },
        };
        let mut version = [2, 35, 30, 0];
        if let Some(text) = variable("STAND_IN_NRT_VERSION") {
            for (place, part) in version.iter_mut().zip(text.split('.')) {
                *place = part.parse().unwrap_or(0);
            }
        }
        Self {
            target: format!("stand-in-{architecture}"),
            family,
            lnc,
            total,
            visible,
            memory: number("STAND_IN_NRT_MEMORY", 24 << 30),
            version,
            python: variable("STAND_IN_PYTHON")
                .unwrap_or_else(|| "python3".into())
                .into(),
            program: variable("STAND_IN_DEVICE").unwrap_or_default().into(),
        }
    }
}

/// How many cores a list such as `3`, `3-6` or `3-5,6` has; contiguous and increasing.
fn cores(text: &str, total: u32) -> Option<u32> {
    let mut listed: Vec<u32> = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse().ok()?, last.trim().parse::<u32>().ok()?);
        listed.extend(first..=last);
    }
    let is_contiguous = listed
        .windows(2)
        .all(|pair| matches!(pair, [a, b] if *b == a + 1));
    let fits = listed.last().is_some_and(|last| *last < total);
    (is_contiguous && fits).then(|| u32::try_from(listed.len()).unwrap_or(u32::MAX))
}
