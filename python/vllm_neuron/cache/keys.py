"""The three keys of a graph: trace key, lowering key, NEFF key, each made of named factors.

A factor is a JSON value. Its canonical form is JSON with sorted keys and no white space, so a key
depends on neither the order of a dict nor PYTHONHASHSEED. The factors are stored beside the
artefact they lead to, so that a miss can be explained by comparing them.

No factor may hold a path, host name, pid, time, rank or device index (spec CC-12).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from vllm_neuron import _core

__all__ = [
    "canonical_json",
    "differing_factors",
    "key_of",
    "lowering_factors",
    "neff_factors",
    "package_versions",
    "plugin_digest",
    "trace_factors",
]

#: Version of the meaning of the factors below; a change here makes every entry a miss.
KEY_SCHEMA = 1


def canonical_json(value: Any) -> bytes:
    """Encode a JSON value so that equal values give equal bytes.

    Raises:
        TypeError: the value is not made of dict, list, tuple, str, int, float, bool and None.
            An unknown object is refused: its `repr` would hold an address.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode("ascii")


def key_of(domain: str, factors: Mapping[str, Any]) -> _core.Key:
    """Digest named factors into a key; `domain` keeps the kinds of key apart."""
    builder = _core.KeyBuilder(domain)
    for name in sorted(factors):
        builder.add(name, canonical_json(factors[name]))
    return builder.finish()


@cache
def package_versions(*distributions: str) -> dict[str, str]:
    """Return the installed version of each distribution, "absent" where there is none."""
    found = {}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


@cache
def plugin_digest() -> str:
    """Digest the plugin's own Python sources that shape a graph or its lowering.

    The version alone would not see an edited installation.
    """
    package = Path(__file__).parent.parent
    tracing = (
        "binding.py",
        "capture.py",
        "dynamo_trace.py",
        "environment_reads.py",
        "premises.py",
        "trace_record.py",
    )
    shaping = [
        *(package / name for name in tracing),
        *sorted((package / "lowering").rglob("*.py")),
    ]
    digest = hashlib.blake2b(digest_size=16)
    for path in shaping:
        digest.update(path.relative_to(package).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def _tensor_factor(shape: Sequence[int], dtype: str) -> list[Any]:
    return [dtype, list(shape)]


def trace_factors(
    *,
    bucket: str,
    route: str,
    level: int,
    compiler_arguments: Iterable[str],
    target: str,
    step_state: str,
    arguments: Any,
    weights: Iterable[tuple[str, Sequence[int], str, Sequence[int], str | None]],
    model: Mapping[str, Any],
) -> dict[str, Any]:
    """Name everything that can change what a trace of a step function gives (spec PC-23).

    Args:
        bucket: name of the bucket.
        route: the compilation route.
        level: vLLM's optimization level.
        compiler_arguments: the merged arguments in their canonical form.
        target: what the compiler compiles for.
        step_state: digest of the step's module classes and plain attributes.
        arguments: signature of the call: a tree of `[dtype, shape]` and None.
        weights: name, shape, dtype, strides and first name of the same memory (None: this is it)
            of each parameter and buffer, in module order.
        model: what the caller knows of the model and its configuration, by factor name.
    """
    factors: dict[str, Any] = {
        "schema": KEY_SCHEMA,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "versions": package_versions("vllm-neuron-rs", "torch", "torch-mlir", "vllm"),
        "plugin": plugin_digest(),
        "bucket": bucket,
        "route": route,
        "level": level,
        "compiler-arguments": list(compiler_arguments),
        "target": target,
        "step-state": step_state,
        "arguments": arguments,
        "weights": [
            [name, *_tensor_factor(shape, dtype), list(strides), tied_to]
            for name, shape, dtype, strides, tied_to in weights
        ],
    }
    for name, value in model.items():
        factors[f"model.{name}"] = value
    return factors


def lowering_factors(
    *,
    graph_digest: str,
    aliases: Mapping[int, int],
    inputs: Iterable[tuple[Sequence[int], str]],
    route: str,
    lowering_versions: Mapping[str, str],
) -> dict[str, Any]:
    """Name everything that can change the module that a functional graph lowers to.

    `aliases` is the donation map: two graphs that differ only in what they update in place must not
    share an entry (bugs A01).
    """
    return {
        "schema": KEY_SCHEMA,
        "graph": graph_digest,
        "aliases": sorted([out, source] for out, source in aliases.items()),
        "inputs": [_tensor_factor(shape, dtype) for shape, dtype in inputs],
        "route": route,
        "plugin": plugin_digest(),
        "versions": dict(lowering_versions),
    }


def neff_factors(
    *,
    module_digest: str,
    compiler_arguments: Iterable[str],
    compiler: Mapping[str, str],
    route: str,
) -> dict[str, Any]:
    """Name everything that can change the NEFF that a module compiles to (spec CC-11)."""
    return {
        "schema": KEY_SCHEMA,
        "module": module_digest,
        "compiler-arguments": list(compiler_arguments),
        "compiler": dict(compiler),
        "route": route,
    }


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else canonical_json(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        found: dict[str, Any] = {}
        for key, inner in value.items():
            found.update(_leaves(inner, f"{path}.{key}" if path else str(key)))
        return found
    return {path: value}


def differing_factors(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Say in words which factors differ, dict-valued factors leaf by leaf.

    Returns:
        Texts such as `level was 2, is 1`, sorted by factor name; empty when nothing differs.
    """
    texts = []
    for name in sorted(set(old) | set(new)):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            before_leaves, after_leaves = _leaves(before), _leaves(after)
            for leaf in sorted(set(before_leaves) | set(after_leaves)):
                if before_leaves.get(leaf) != after_leaves.get(leaf):
                    texts.append(
                        f"{name} {leaf} was {_shorten(before_leaves.get(leaf))}, "
                        f"is {_shorten(after_leaves.get(leaf))}"
                    )
        elif isinstance(before, list | tuple) or isinstance(after, list | tuple):
            texts.append(_differing_list(name, before, after))
        else:
            texts.append(f"{name} was {_shorten(before)}, is {_shorten(after)}")
    return texts


def _differing_list(name: str, before: Any, after: Any) -> str:
    if isinstance(before, list | tuple) and isinstance(after, list | tuple):
        for position, (left, right) in enumerate(zip(before, after, strict=False)):
            if left != right:
                return (
                    f"{name}[{position}] was {_shorten(left)}, is {_shorten(right)}"
                    if len(before) == len(after)
                    else f"{name}: first difference at {position}: was {_shorten(left)}, "
                    f"is {_shorten(right)} ({len(before)} items, now {len(after)})"
                )
        return f"{name} had {len(before)} items, has {len(after)}"
    return f"{name} was {_shorten(before)}, is {_shorten(after)}"
