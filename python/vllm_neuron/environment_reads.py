"""Which environment variables the source of a module reads, as far as it names them.

Dynamo guards some of these reads, and folds others (`os.getenv`) without a trace. So the sources
that a trace went through are searched for the names, which errs on the safe side: a variable that
the traced functions do not read costs a needless trace when it changes. Names that are computed are
not seen (docs/how-to-precompile-cache.md).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from vllm_neuron.trace_record import source_file

__all__ = ["variables_read_by", "variables_read_in"]

#: Packages whose variables the trace key covers: vLLM's by its own table (`vllm.factors`), torch's
#: and the plugin's by their versions and `envs`.
_COVERED = ("vllm", "torch", "vllm_neuron")

_METHODS = ("get", "pop", "setdefault", "__getitem__", "__contains__")


def variables_read_by(modules: Iterable[str]) -> list[str]:
    """Names of the environment variables that the sources of modules read, sorted."""
    found: set[str] = set()
    for name in modules:
        if name.partition(".")[0] in _COVERED:
            continue
        path = source_file(name)
        if path is not None:
            found |= variables_read_in(path)
    return sorted(found)


def variables_read_in(path: Path) -> set[str]:
    """Names of the environment variables that one source file reads."""
    source = path.read_bytes()
    if b"environ" not in source and b"getenv" not in source:
        return set()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        # It was imported once, so it is another file now: its digest makes the trace stale.
        return set()
    return {name for node in ast.walk(tree) if (name := _read(node)) is not None}


def _read(node: ast.AST) -> str | None:
    """The variable that an expression reads, if it is one that reads."""
    if isinstance(node, ast.Call) and node.args:
        function = node.func
        if _ends_with(function, "getenv"):
            return _text(node.args[0])
        if isinstance(function, ast.Attribute) and function.attr in _METHODS:
            return _text(node.args[0]) if _ends_with(function.value, "environ") else None
    if isinstance(node, ast.Subscript) and _ends_with(node.value, "environ"):
        return _text(node.slice)
    if isinstance(node, ast.Compare) and any(
        _ends_with(operand, "environ") for operand in node.comparators
    ):
        return _text(node.left)
    return None


def _ends_with(node: ast.expr, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (
        isinstance(node, ast.Attribute) and node.attr == name
    )


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
