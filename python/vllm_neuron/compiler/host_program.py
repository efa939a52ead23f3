"""What a NEFF of the host emulator holds: members, and the manifest that describes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_neuron.lowering.module import ModuleFormat

__all__ = ["EXECUTABLE_MEMBER", "FORMAT", "MANIFEST_MEMBER", "MODULE_MEMBERS", "HostManifest"]

FORMAT = 2
"""Version of the members below; a reader refuses any other."""

MANIFEST_MEMBER = "host/manifest.json"
EXECUTABLE_MEMBER = "host/executable.xla"
MODULE_MEMBERS: Mapping[ModuleFormat, str] = {
    "stablehlo": "host/module.stablehlo",
    "hlo": "host/module.hlo",
}
"""The member that holds the module, one of them, by what it is."""


@dataclass(frozen=True, slots=True)
class HostManifest:
    """How the program in a host NEFF was made and where its executable may run.

    Attributes:
        jaxlib: the version of jaxlib that wrote the executable; no other can load it.
        cpu: `cpu_features()` of the processor it was made for; it may not run on another.
        options: the XLA options, to be used again when the executable is rebuilt.
        kernels: `host_kernels.VERSION` that the executable was made with; it may call no other.
        arguments: the compiler arguments as given.
        aliases: output index to the index of the input that is updated in place.
    """

    jaxlib: str
    cpu: str
    options: Mapping[str, bool | int]
    kernels: int
    arguments: tuple[str, ...]
    aliases: Mapping[int, int]

    def to_json(self) -> bytes:
        """Return the bytes of the manifest member; equal manifests give equal bytes."""
        fields = {
            "format": FORMAT,
            "jaxlib": self.jaxlib,
            "cpu": self.cpu,
            "options": dict(self.options),
            "kernels": self.kernels,
            "arguments": list(self.arguments),
            "aliases": {str(output): source for output, source in sorted(self.aliases.items())},
        }
        return json.dumps(fields, sort_keys=True, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> HostManifest:
        """Parse the manifest member.

        Raises:
            ValueError: not the JSON of a manifest of this format.
        """
        fields = json.loads(data)
        _expect(isinstance(fields, dict), "an object", fields)
        _expect(fields.get("format") == FORMAT, f"format {FORMAT}", fields.get("format"))
        jaxlib, cpu = fields.get("jaxlib"), fields.get("cpu")
        _expect(isinstance(jaxlib, str), "a string `jaxlib`", jaxlib)
        _expect(isinstance(cpu, str), "a string `cpu`", cpu)
        kernels = fields.get("kernels")
        _expect(type(kernels) is int, "a number `kernels`", kernels)
        options, arguments, aliases = (fields.get(k) for k in ("options", "arguments", "aliases"))
        _expect(
            isinstance(options, dict) and all(isinstance(v, int) for v in options.values()),
            "an object `options` of numbers and booleans",
            options,
        )
        _expect(
            isinstance(arguments, list) and all(isinstance(v, str) for v in arguments),
            "a list `arguments` of strings",
            arguments,
        )
        _expect(
            isinstance(aliases, dict)
            and all(k.isdecimal() and type(v) is int for k, v in aliases.items()),
            "an object `aliases` of output to input index",
            aliases,
        )
        return cls(
            jaxlib=jaxlib,
            cpu=cpu,
            options=options,
            kernels=kernels,
            arguments=tuple(arguments),
            aliases={int(output): source for output, source in aliases.items()},
        )


def _expect(condition: bool, expected: str, found: Any) -> None:
    if not condition:
        raise ValueError(f"manifest of a host program: expected {expected}, found {found!r}")
