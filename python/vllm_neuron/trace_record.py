"""The trace record: everything needed to run a compiled graph without tracing it again.

It binds each graph input to a parameter, buffer, attribute or argument by name, says which
outputs are inputs updated in place, how the step function's return value is rebuilt, and from
which Python sources the trace was made. It is JSON, read by a strict parser; reading one never
runs code.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from vllm_neuron.result_tree import check_tree, missing_class, rebuild

__all__ = ["DTYPES", "GraphInput", "TensorSpec", "TraceRecord", "source_digests", "source_file"]

_FORMAT = 4

InputKind = Literal["parameter", "buffer", "attribute", "argument"]

# dtype names are torch's own without "torch."; sub-byte types have no tensor layout here.
_DTYPE_NAMES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 "
    "uint64 uint32 uint16 uint8 bool complex64 complex128"
)
DTYPES = frozenset(_DTYPE_NAMES.split())


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype name of one tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class GraphInput:
    """What one graph input is bound to.

    Attributes:
        kind: where the tensor lives.
        name: fully-qualified name of a parameter or buffer, the dotted path of a plain tensor
            attribute (`rope.tables['cos']`), or the path of an argument (`kv_caches[3][0]`).
        spec: shape and dtype.
    """

    kind: InputKind
    name: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """How the inputs and outputs of one captured graph relate to its step function.

    Attributes:
        inputs: the graph's inputs in order.
        outputs: the graph's outputs in order; the final values of mutated inputs come first.
        aliases: graph output index to the index of the graph input it updates in place.
        result: the return value as a JSON tree: `["output", i]`, `["input", i]`,
            `["const", value]`, `["float", hex]`, `["list", [...]]`, `["tuple", [...]]`,
            `["dict", [[key, tree], ...]]`, `["torch.return_types.NAME", [...]]`,
            `["torch.Size", [...]]`, `["namedtuple", ["module:Class", [...]]]`,
            `["dataclass", ["module:Class", [[attribute, tree], ...]]]`, or for a subclass of dict
            `["mapping", ["module:Class", [[key, tree], ...], [[attribute, tree], ...]]]`.
        sources: Python module name to the BLAKE3 hex digest of its source file, for every
            module whose code the trace inlined.
    """

    inputs: tuple[GraphInput, ...]
    outputs: tuple[TensorSpec, ...]
    aliases: dict[int, int]
    result: Any
    sources: dict[str, str]

    def to_json(self) -> bytes:
        """Serialise, byte for byte the same for equal records."""
        tree = {
            "format": _FORMAT,
            "inputs": [[i.kind, i.name, i.spec.dtype, list(i.spec.shape)] for i in self.inputs],
            "outputs": [[o.dtype, list(o.shape)] for o in self.outputs],
            "aliases": [[o, i] for o, i in sorted(self.aliases.items())],
            "result": self.result,
            "sources": dict(sorted(self.sources.items())),
        }
        return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> TraceRecord:
        """Parse what `to_json` wrote.

        Raises:
            ValueError: the bytes are not a record of this format.
        """
        try:
            tree = json.loads(data)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"trace record is not JSON: {error}") from None
        return cls.from_tree(tree)

    @classmethod
    def from_tree(cls, tree: Any) -> TraceRecord:
        """Read what JSON made of the bytes of `to_json`.

        Raises:
            ValueError: it is not a record of this format.
        """
        fields = {"format", "inputs", "outputs", "aliases", "result", "sources"}
        if not isinstance(tree, dict) or set(tree) != fields:
            raise ValueError(f"trace record: expected an object with the fields {sorted(fields)}")
        if tree["format"] != _FORMAT:
            raise ValueError(f"trace record: expected format {_FORMAT}, found {tree['format']!r}")
        inputs = tuple(_parse_input(item) for item in _list(tree["inputs"], "inputs"))
        outputs = tuple(
            _parse_spec(*_list(item, "outputs", 2)) for item in _list(tree["outputs"], "outputs")
        )
        aliases: dict[int, int] = {}
        for item in _list(tree["aliases"], "aliases"):
            output, graph_input = _list(item, "aliases", 2)
            output = _index(output, len(outputs), "aliases")
            graph_input = _index(graph_input, len(inputs), "aliases")
            if output in aliases or graph_input in aliases.values():
                raise ValueError("trace record: an output or input is aliased twice")
            if outputs[output] != inputs[graph_input].spec:
                raise ValueError("trace record: an aliased output and its input differ in spec")
            aliases[output] = graph_input
        sources = tree["sources"]
        if not isinstance(sources, dict) or not all(
            isinstance(digest, str) for digest in sources.values()
        ):
            raise ValueError("trace record: sources must map module names to digests")
        check_tree(tree["result"], len(outputs), len(inputs))
        return cls(inputs, outputs, aliases, tree["result"], sources)

    def sources_changed(self) -> list[str]:
        """Modules whose source file now has another digest, or can no longer be found.

        Nothing is imported or executed: a module that is not loaded is located on disk.
        """
        current = source_digests(self.sources)
        return [name for name, digest in self.sources.items() if current.get(name) != digest]

    def missing_class(self) -> str | None:
        """The first class of the result that is not loaded any more, as `module:Class`."""
        return missing_class(self.result)

    def rebuild_result(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """The step function's return value, from the graph's outputs and inputs in order."""
        return rebuild(self.result, outputs, inputs)


def source_digests(modules: Mapping[str, Any] | Sequence[str]) -> dict[str, str]:
    """BLAKE3 hex digests of the source files of `modules`; those not found are left out."""
    from vllm_neuron._core import digest

    digests = {}
    for name in modules:
        path = source_file(name)
        if path is not None:
            digests[name] = digest(path.read_bytes())
    return digests


def source_file(name: str) -> Path | None:
    """The source file of a module, which need not be loaded; None if it has none."""
    module = sys.modules.get(name)
    found = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    if found is None:
        # importlib.util.find_spec would import the parent packages; PathFinder does not.
        search: Sequence[str] | None = None
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:depth]), search)
            if spec is None:
                return None
            search, found = spec.submodule_search_locations, spec.origin
    path = Path(found) if found else None
    return path if path is not None and path.suffix == ".py" and path.is_file() else None


def _list(value: Any, where: str, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        size = "" if length is None else f" of {length}"
        raise ValueError(f"trace record: {where} must hold lists{size}, found {value!r:.80}")
    return value


def _index(value: Any, count: int, where: str) -> int:
    if type(value) is not int or not 0 <= value < count:
        raise ValueError(f"trace record: {where}: expected an index below {count}, found {value!r}")
    return value


def _parse_input(item: Any) -> GraphInput:
    kind, name, dtype, shape = _list(item, "inputs", 4)
    if kind not in get_args(InputKind) or not isinstance(name, str):
        raise ValueError(f"trace record: bad input binding {item!r:.80}")
    return GraphInput(kind, name, _parse_spec(dtype, shape))


def _parse_spec(dtype: Any, shape: Any) -> TensorSpec:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"trace record: unknown dtype {dtype!r:.80}")
    if not all(type(size) is int and size >= 0 for size in _list(shape, "shape")):
        raise ValueError(f"trace record: bad shape {shape!r:.80}")
    return TensorSpec(tuple(shape), dtype)
