"""Host NEFFs in the dress of a device: the container of a target and a logical core size.

The target keeps the prefix `stand-in-`, which no device has.
"""

import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.neff import build  # noqa: E402
from vllm_neuron._core import Neff, write_neff  # noqa: E402

HOST_MEMBERS = (
    "host/manifest.json",
    "host/executable.xla",
    "host/module.stablehlo",
    "host/module.hlo",
)
# Bits of docs/neff-format.md: virtual-neuron-core, newer than v2, newer than v3.
LNC_BIT, CAYMAN_BIT, MARIANA_BIT = 1 << 10, 1 << 11, 1 << 24
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2,
    "uint8": 1, "bool": 1, "complex64": 8,
}  # fmt: skip


def as_device_neff(host: bytes, *, architecture: str, lnc: int, version: str) -> bytes:
    """The NEFF that a compiler for `architecture` would write, with the host program inside."""
    neff = Neff.parse(host)
    inputs, outputs = (
        [(t.name, t.dtype, list(t.shape)) for t in s] for s in (neff.inputs, neff.outputs)
    )
    sizes = [
        (name, kind, math.prod(shape) * ITEM_BYTES[dtype])
        for kind, tensors in (("input", inputs), ("output", outputs))
        for name, dtype, shape in tensors
    ]
    variables = {"SB": {"type": "state-buffer", "var_id": 0}} | {
        name: {"type": kind, "var_id": index, "size": size, "ops": []}
        for index, (name, kind, size) in enumerate(sizes, 1)
    }
    features = ["neff_feature_vnc"] if lnc == 2 else []
    files = build.members(
        kelf=build.kelf(lnc, target=architecture),
        graph=build.graph(inputs, outputs, lnc),
        info=build.info(tool_version=version, name="file.neff"),
        definition=build.definition(variables, neff_features=features),
    )
    for core in range(1, lnc):
        for name in [name for name in files if name.startswith("sg00/")]:
            files[name.replace("sg00/", f"sg{core:02}/", 1)] = files[name]
    files |= {name: neff.member(name) for name, _ in neff.members if name in HOST_MEMBERS}
    bits = LNC_BIT if lnc == 2 else 0
    bits |= CAYMAN_BIT if architecture.endswith(("cayman", "mariana")) else 0
    bits |= MARIANA_BIT if architecture.endswith("mariana") else 0
    return build.container(
        build.tar(files),
        name=b"file.neff",
        feature_bits=bits,
        lnc_size=lnc,
        neff_version_major=2 if bits else 1,
    )


def as_host_neff(device: bytes) -> bytes:
    """The host NEFF inside a NEFF that `as_device_neff` made."""
    neff = Neff.parse(device)
    return write_neff(
        name="file.neff",
        target="host",
        compiler_version=neff.compiler_version,
        inputs=[(t.name, t.dtype, t.shape) for t in neff.inputs],
        outputs=[(t.name, t.dtype, t.shape) for t in neff.outputs],
        members=[(name, neff.member(name)) for name, _ in neff.members if name in HOST_MEMBERS],
        compression="none",
    )
