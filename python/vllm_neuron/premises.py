"""What a trace took for granted: values outside of its arguments that shaped the graph.

Dynamo guards everything that it reads while it traces: constants in attributes, globals, closures
and class bodies, lengths, dictionary keys, types, which function an attribute holds, which tensors
are the same object. Each such guard becomes a premise, kept with the trace record and looked at
again before the record is used. So a trace is stale exactly if something that it read has changed,
and values that it did not read (paths, ports, ids) do not matter.

A premise is JSON: `[check, path, argument, expected]`. A path starts at the step module or at a
loaded module. Following it runs no code of the objects on it, whatever a record says: only instance
dictionaries, class dictionaries and the interpreter's own descriptors are read.
"""

from __future__ import annotations

import enum
import json
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_neuron import _core

if TYPE_CHECKING:
    import torch

__all__ = [
    "PremiseChecks",
    "broken_premise",
    "encode_premises",
    "parse_premises",
    "plain",
    "premises_of",
    "variable_premises",
]

#: Dynamo's guards that become premises, by name of the guard. Left out are those of tensors, which
#: the graph's inputs cover, and of torch's own modules and settings.
_CHECKS = {
    "TYPE_MATCH": "type",
    "CONSTANT_MATCH": "value",
    "EQUALS_MATCH": "value",
    "BOOL_MATCH": "value",
    "NONE_MATCH": "value",
    "NOT_NONE_MATCH": "type",
    "CONSTANT_SUBCLASS_MATCH": "value",
    "ID_MATCH": "value",
    "FUNCTION_MATCH": "value",
    "CLOSURE_MATCH": "value",
    "BUILTIN_MATCH": "value",
    "CLASS_MATCH": "value",
    "SEQUENCE_LENGTH": "length",
    "EMPTY_NN_MODULE_HOOKS_DICT": "hooks",
    "DICT_KEYS_MATCH": "keys",
    "MAPPING_KEYS_CHECK": "keys",
    "DICT_CONTAINS": "contains",
    "DICT_NOT_CONTAINS": "contains",
    "SET_CONTAINS": "contains",
    "SET_NOT_CONTAINS": "contains",
    "HASATTR": "attribute",
    "NOT_PRESENT_IN_GENERIC_DICT": "own attribute",
    "DUPLICATE_INPUT": "same",
}

#: Where a module keeps the hooks that calling it runs.
_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)

#: Roots that the versions in the trace key cover, and that a warm start may not have loaded.
_VERSIONED = ("torch", "builtins")

#: Descriptors of the interpreter (slots, `__closure__`, `cell_contents`); calling one runs no
#: Python.
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)

#: Types of torch that are plain. By name: a trace record is read without torch.
_TORCH_CONSTANTS = ("dtype", "device", "layout", "memory_format")

_DICT = ["class", "builtins.dict", ""]

_MISSING = object()

#: A check of ours: the value of the environment variable that is the argument.
_VARIABLE = "variable"
_ENVIRONMENT = [["module", "os"], ["attr", "environ"]]

Path = list[list[Any]]


def plain(value: Any) -> Any:
    """Describe a plain value, function or class as JSON; None for what is not plain.

    Floats are exact. A text with a path separator is not plain: where a model lies does not shape
    its graph.
    """
    if value is None or isinstance(value, bool):
        return [type(value).__name__, str(value)]
    if isinstance(value, enum.Enum):
        return ["enum", str(value)]
    if isinstance(value, int):
        return ["int", str(int(value))]
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, str):
        return None if os.sep in value else ["str", value]
    if type(value).__module__ == "torch" and type(value).__name__ in _TORCH_CONSTANTS:
        return [type(value).__name__, str(value)]
    if isinstance(value, types.MethodType):
        return plain(value.__func__)
    if isinstance(value, types.FunctionType):
        # Two lambdas of one function have one name; the line tells them apart.
        line = value.__code__.co_firstlineno
        return ["function", f"{value.__module__}.{value.__qualname__}:{line}"]
    if isinstance(value, types.BuiltinFunctionType):
        return ["function", f"{value.__module__}.{value.__qualname__}"]
    if isinstance(value, type):
        return ["class", f"{value.__module__}.{value.__qualname__}"]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [plain(item) for item in value]]
    if isinstance(value, set | frozenset):
        return [type(value).__name__, sorted(str(plain(item)) for item in value)]
    return None


def premises_of(
    guards: Iterable[Any], step: torch.nn.Module, *, self_name: str, scope: Mapping[str, Any]
) -> list[list[Any]]:
    """Turn the guards of a trace into premises with the values that hold now.

    Args:
        guards: Dynamo's guards.
        step: the traced module.
        self_name: the name that the traced frame gives it.
        scope: the globals of the traced frame, with what Dynamo added.
    """
    found: dict[str, list[Any]] = {}
    for guard in guards:
        check = _CHECKS.get(guard.create_fn_name())
        if check is None or guard.originating_source is None:
            continue
        path = _path(guard.originating_source, self_name, scope)
        if path is None or path[0][1].partition(".")[0] in _VERSIONED:
            continue
        if check == "hooks":
            # One premise for the six guards of a module.
            path = path[:-1]
        argument = _argument(guard)
        if check == "same":
            argument = _path(argument, self_name, scope)
            if argument is None:
                continue
        elif check in ("contains", "attribute", "own attribute"):
            if not isinstance(argument, bool | int | str):
                continue
        else:
            argument = None
        expected = _state(check, path, argument, step)
        if check == "type" and expected == _DICT:
            # What is read of a dictionary has premises of its own.
            continue
        if expected is not _MISSING and expected is not None:
            found[repr((check, path, argument))] = [check, path, argument, expected]
    return [found[name] for name in sorted(found)]


def variable_premises(names: Iterable[str]) -> list[list[Any]]:
    """Premises of environment variables, with the values that they have now."""
    return [[_VARIABLE, _ENVIRONMENT, name, _variable(name)] for name in names]


def _variable(name: Any) -> Any:
    value = os.environ.get(name) if isinstance(name, str) else None
    return ["NoneType", "None"] if value is None else _text_value(value)


def broken_premise(premises: Iterable[Any], step: torch.nn.Module) -> str | None:
    """Say which premise does not hold for `step` now; None if all do."""
    for check, path, argument, expected in premises:
        if path[0][0] == "module" and path[0][1] not in sys.modules:
            # It has no state yet but what its source gives it, and sources are digested.
            continue
        try:
            state = _state(check, path, argument, step)
        except (TypeError, ValueError):
            # An argument that does not fit its check: a record that no capture wrote.
            state = _MISSING
        if state != expected:
            found = "absent" if state is _MISSING else state
            what = check if argument is None or check == "same" else f"{check} {argument!r}"
            return f"{_text(path)}: {what} was {expected!r:.80}, is {found!r:.80}"
    return None


class PremiseChecks:
    """The premises that one start has found to hold.

    The buckets of a step mostly took the same for granted: equal sets are looked at once. Lives no
    longer than the steps it is asked about, nor than their state stays as it is.
    """

    def __init__(self) -> None:
        self._held: set[tuple[int, str]] = set()

    def broken(self, premises: bytes, step: torch.nn.Module) -> str | None:
        """Say which of the premises, as `encode_premises` wrote them, does not hold for `step`.

        Raises:
            ValueError: the bytes are no premises.
        """
        identity = (id(step), _core.digest(premises))
        if identity in self._held:
            return None
        broken = broken_premise(parse_premises(json.loads(premises)), step)
        if broken is None:
            self._held.add(identity)
        return broken


def encode_premises(premises: list[list[Any]]) -> bytes:
    """Premises as JSON, byte for byte the same for equal ones."""
    return json.dumps(premises, separators=(",", ":"), allow_nan=False).encode()


def parse_premises(value: Any) -> list[list[Any]]:
    """Parse the premises of an entry.

    Raises:
        ValueError: they do not have the form that `premises_of` gives.
    """
    if not isinstance(value, list):
        raise ValueError("premises must be a list")
    checks = {*_CHECKS.values(), _VARIABLE}
    for item in value:
        if not (isinstance(item, list) and len(item) == 4 and item[0] in checks):
            raise ValueError(f"bad premise {item!r:.80}")
        for path in (item[1], item[2]) if item[0] == "same" else (item[1],):
            if not (
                isinstance(path, list)
                and path
                and all(isinstance(part, list) and len(part) == 2 for part in path)
                and all(isinstance(part[0], str) for part in path)
                and isinstance(path[0][1], str)
            ):
                raise ValueError(f"bad path {path!r:.80} in a premise")
    return value


def _state(check: str, path: Path, argument: Any, step: torch.nn.Module) -> Any:
    """What a check finds at a path, as JSON; `_MISSING` if the path leads nowhere."""
    if check == _VARIABLE:
        return _variable(argument)
    value = _follow(path, step)
    if value is _MISSING:
        return _MISSING
    if check == "type":
        return [*plain(type(value)), _methods(type(value))]
    if check == "value":
        if isinstance(value, str):
            return _text_value(value)
        described = plain(value)
        return described if described is not None else plain(type(value))
    if check == "same":
        return value is _follow(argument, step)
    if check == "hooks":
        return sum(len(_own(value).get(name, ())) for name in _HOOKS)
    if check == "attribute":
        return _attribute(value, argument) is not _MISSING
    if check == "own attribute":
        return argument in _own(value)
    if check == "contains":
        return argument in value if isinstance(value, dict | set | frozenset) else _MISSING
    if not isinstance(value, dict | list | tuple | set | frozenset):
        return _MISSING
    return [plain(key) for key in value] if check == "keys" else len(value)


def _text_value(value: str) -> list[str]:
    if os.sep in value:
        # The trace did read it, but an entry holds no path.
        return ["text", _core.digest(value.encode("utf-8", "surrogatepass"))]
    return ["str", value]


def _methods(cls: type) -> str:
    """Digest which functions a class and its bases hold; one may have been replaced."""
    held = [
        [name, plain(getattr(member, "__func__", member))]
        for base in type.__dict__["__mro__"].__get__(cls)
        if base.__module__.partition(".")[0] not in _VERSIONED
        for name, member in sorted(type.__dict__["__dict__"].__get__(base).items())
        if isinstance(member, types.FunctionType | staticmethod | classmethod)
    ]
    return _core.digest(json.dumps(held).encode())[:16] if held else ""


def _follow(path: Path, step: torch.nn.Module) -> Any:
    (kind, name), *rest = path
    value = step if kind == "step" else sys.modules.get(name, _MISSING)
    for operation, argument in rest:
        if value is _MISSING:
            break
        value = _advance(value, operation, argument)
    return value


def _advance(value: Any, operation: str, argument: Any) -> Any:
    if operation == "attr":
        return _attribute(value, argument)
    if operation == "child":
        children = _attribute(value, "_modules")
        return children.get(argument, _MISSING) if type(children) is dict else _MISSING
    if operation == "type":
        return type(value)
    if operation == "dict":
        return dict(_own(value))
    try:
        if operation == "item" and isinstance(value, dict):
            return dict.get(value, argument, _MISSING)
        if operation == "item" and isinstance(value, list | tuple):
            if isinstance(value, list):
                return list.__getitem__(value, argument)
            return tuple.__getitem__(value, argument)
        if operation in ("nth key", "nth") and isinstance(value, dict):
            key = list(dict.keys(value))[argument]
            return key if operation == "nth key" else dict.__getitem__(value, key)
    except (IndexError, KeyError, TypeError):
        return _MISSING
    return _MISSING


def _own(value: Any) -> Mapping[str, Any]:
    """The instance dictionary, without asking the instance."""
    if isinstance(value, type):
        return type.__dict__["__dict__"].__get__(value)
    if isinstance(value, types.ModuleType):
        return types.ModuleType.__dict__["__dict__"].__get__(value)
    for base in type.__dict__["__mro__"].__get__(type(value)):
        descriptor = type.__dict__["__dict__"].__get__(base).get("__dict__")
        if isinstance(descriptor, types.GetSetDescriptorType):
            return descriptor.__get__(value)
    return {}


def _attribute(value: Any, name: str) -> Any:
    """`value.name` without running Python code; `_MISSING` if that is not possible."""
    if name == "__dict__":
        return _own(value)
    if isinstance(value, type):
        if name == "__mro__":
            return type.__dict__["__mro__"].__get__(value)
    else:
        own = _own(value)
        if name in own:
            return own[name]
    for base in type.__dict__["__mro__"].__get__(value if isinstance(value, type) else type(value)):
        members = type.__dict__["__dict__"].__get__(base)
        if name in members:
            found = members[name]
            if isinstance(found, _DESCRIPTORS) and not isinstance(value, type):
                try:
                    return found.__get__(value)
                except (AttributeError, ValueError):
                    return _MISSING
            return found.__func__ if isinstance(found, staticmethod | classmethod) else found
    return _MISSING


def _argument(guard: Any) -> Any:
    """What Dynamo bound to the guard's function beyond the guard itself."""
    bound = guard.create_fn
    values = (*getattr(bound, "args", ()), *getattr(bound, "keywords", {}).values())
    return values[0] if values else None


def _path(source: Any, self_name: str, scope: Mapping[str, Any]) -> Path | None:
    """Dynamo's source as a path; None where it does not start at the step or at a module."""
    from torch._dynamo import source as sources

    if isinstance(source, sources.LocalSource):
        return [["step", ""]] if source.local_name == self_name else None
    if isinstance(source, sources.GlobalSource):
        value = scope.get(source.global_name, _MISSING)
        if isinstance(value, types.ModuleType):
            return [["module", value.__name__]]
        if source.global_name.startswith("__builtins_dict__"):
            return [["module", "builtins"]]
        return [["module", str(scope.get("__name__"))], ["attr", source.global_name]]
    if not isinstance(source, sources.ChainedSource):
        return None
    path = _path(source.base, self_name, scope)
    if path is None:
        return None
    parts: list[list[Any]] = []
    for part in _parts(source, sources):
        if part is None:
            return None
        parts.append(part)
    if path[-1] == ["attr", "_modules"] and parts and parts[0][0] == "item":
        return [*path[:-1], ["child", parts[0][1]]]
    return [*path, *parts]


def _parts(source: Any, sources: Any) -> Iterator[list[Any] | None]:
    if isinstance(source, sources.AttrSource | sources.GenericAttrSource):
        yield ["attr", source.member]
    elif isinstance(source, sources.TypeSource):
        yield ["type", None]
    elif isinstance(source, sources.TypeDictSource):
        yield ["dict", None]
    elif isinstance(source, sources.TypeMROSource):
        yield ["attr", "__mro__"]
    elif isinstance(source, sources.CodeSource):
        yield ["attr", "__code__"]
    elif isinstance(source, sources.ClosureSource):
        yield ["attr", "__closure__"]
    elif isinstance(source, sources.DefaultsSource):
        yield ["attr", source.field]
        yield ["item", source.idx_key]
    elif isinstance(source, sources.ConstDictKeySource):
        yield ["nth key", source.index]
    elif isinstance(
        source,
        sources.GetItemSource | sources.DictGetItemSource | sources.DictSubclassGetItemSource,
    ):
        if isinstance(source.index, sources.ConstDictKeySource):
            yield ["nth", source.index.index]
        elif isinstance(source.index, bool | int | str):
            yield ["item", source.index]
        else:
            yield None
    elif not isinstance(source, sources.NNModuleSource):
        yield None


def _text(path: Path) -> str:
    (kind, name), *rest = path
    text = "step" if kind == "step" else name
    for operation, argument in rest:
        if operation in ("attr", "child"):
            text += f".{argument}"
        elif operation == "item":
            text += f"[{argument!r}]"
        else:
            text += f".<{operation}{'' if argument is None else f' {argument}'}>"
    return text
